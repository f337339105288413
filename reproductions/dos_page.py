"""Shows DOS's tables beside ours: a page, a CSV file, and tables that README and terminal share.

All are made from the lines of `bench.dos`, which are the lines of the CSV file.
"""

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from dovetail.reports.charts import Axes, Line, bar_chart, line_chart, scatter_chart
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    render_page,
    save_page,
    strong,
)
from dovetail.runtime.files import write_atomically
from dovetail.schedulers.additivity import pairs_ordered_right
from dovetail.schedulers.results import SEQUENTIAL
from reproductions.dos import (
    BLOCK,
    DOS,
    ELSEWHERE,
    FIELDS,
    MEASURED,
    NETWORKS,
    PAPER_BATCHES,
    PUBLISHED_DOS,
    PUBLISHED_IOS,
    PUBLISHED_PAIRS,
    PUBLISHED_TABLE1,
    PUBLISHED_TABLE2,
    PUBLISHED_WORK,
    SAMPLE,
    SCHEDULE,
    SCHEDULERS_OF,
    TABLE1,
    TABLE2,
    TABLE5,
)

Lines = Sequence[Mapping[str, str]]
PEERS = ("TensorFlow", "TVM", "TensorRT")
"""The other programs whose milliseconds are published; none of them is run here."""
PAPERS_INCEPTION = "inception-v3"
"""The network of the paper's tables 1 and 2."""


@dataclass(frozen=True)
class DosTable:
    """A table: the name under which a README has it, title, what to know of it, head and rows."""

    name: str
    title: str
    note: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables_of(lines: Lines) -> list[DosTable]:
    """The tables of all rows that are done, without those of which nothing is known."""
    shown = [
        _milliseconds(lines),
        _work(lines),
        _search(lines),
        _devices(lines),
        _batches(lines),
        _speedups(lines),
        _pairs(lines),
        _blocks(lines),
    ]
    return [table for table in shown if table.rows]


# ---- The networks: table 5 ----

_OURS = (SEQUENTIAL, *SCHEDULERS_OF[TABLE5])


def _milliseconds(lines: Lines) -> DosTable:
    """A line for each network and device of ours, then the published ones."""
    rows = []
    for network, of_network in _by(lines, "network", table=TABLE5, kind=SCHEDULE):
        for device, of_device in _by(of_network, "device"):
            found = {line["scheduler"]: line for line in of_device}
            chosen = next(line for line in of_device if line["chosen"] == "True")
            rows.append((
                NETWORKS[network].title, device, chosen["source"],
                *(_ms(found.get(name)) for name in _OURS),
                f"{chosen['scheduler']}, {_ms(chosen)}", *("-" for _ in PEERS),
            ))  # fmt: skip
        for paper, published in (("DOS", PUBLISHED_DOS), ("IOS's code", PUBLISHED_IOS)):
            figures = published[network]
            cells = [f"{figures[name]:.2f}" if name in figures else "-" for name in _OURS]
            peers = [f"{figures[name]:.2f}" if name in figures else "-" for name in PEERS]
            rows.append((NETWORKS[network].title, f"V100, {paper}", "published",
                         *cells, "-", *peers))  # fmt: skip
    return DosTable(
        "table 5",
        "Table 5: milliseconds at batch 1",
        "Published are DOS's own columns as far as they are known, and those of the README of "
        "IOS's code. TensorFlow, TVM and TensorRT were not run here.",
        ("network", "device", "source", *_OURS, "chosen", *PEERS),
        rows,
    )


def _work(lines: Lines) -> DosTable:
    rows = []
    for network, of_network in _by(lines, "network", table=TABLE5, scheduler=DOS, kind=SCHEDULE):
        published = PUBLISHED_WORK[network]
        for line in of_network:
            adds = float(line["multiply_adds"])
            rows.append((
                NETWORKS[network].title, line["device"], line["source"],
                _beside(line["launches"], published.kernels),
                _beside(f"{adds / 1e9:.2f}", f"{published.multiply_adds:.2f}"),
                _beside(f"{float(line['moved_bytes']) / 1e6:.0f}", f"{published.moved:.0f}"),
                _beside(f"{adds / float(line['seconds']) / 1e12:.3g}", published.utilisation),
            ))  # fmt: skip
    return DosTable(
        "work",
        "Kernels, work and memory access of the dos schedule, ours / DOS's",
        "A fused call counts as one kernel here. DOS's figures are of a V100.",
        ("network", "device", "source", "kernels", "G multiply-adds", "MB", "T multiply-adds/s"),
        rows,
    )


def _search(lines: Lines) -> DosTable:
    rows = [
        (
            NETWORKS[line["network"]].title, line["device"], line["scheduler"],
            f"{int(line['states']):,}", f"{int(line['timed']):,}",
            f"{float(line['search_seconds']):.3g}", f"{float(line['measuring_seconds']):.3g}",
            f"{PUBLISHED_WORK[line['network']].search_seconds:g}"
            if line["scheduler"] == DOS else "-",
        )
        for line in _select(lines, table=TABLE5, kind=SCHEDULE)
        if line["scheduler"] in (DOS, "ios")
    ]  # fmt: skip
    return DosTable(
        "search",
        "What searching takes",
        "Stages that were measured for an earlier scheduler or run are not measured again.",
        ("network", "device", "scheduler", "states", "stages measured", "search, s",
         "measuring, s", "DOS, s"),
        rows,
    )  # fmt: skip


# ---- Made for one device or batch, run on another: tables 1 and 2 ----


def _devices(lines: Lines) -> DosTable:
    selected = _select(lines, table=TABLE1, kind=ELSEWHERE)
    made_for = list(dict.fromkeys(line["made_for"] for line in selected))
    rows = []
    for network, of_network in _by(selected, "network"):
        rows += _matrix(NETWORKS[network].title, of_network, "device", made_for)
        if network == PAPERS_INCEPTION:
            published = {
                device: {to: f"{ms:.2f}" for to, ms in row.items()}
                for device, row in PUBLISHED_TABLE1.items()
            }
            rows += _published(NETWORKS[network].title, published, made_for)
    return DosTable(
        "table 1",
        "Table 1: milliseconds of the dos schedule made for one device, run on another",
        "A column is the device that the schedule was made for. In brackets: what is lost against "
        "the schedule made for the row's own device.",
        ("network", "run on", "source", *(f"for {name}" for name in made_for)),
        rows,
    )


def _batches(lines: Lines) -> DosTable:
    selected = _select(lines, table=TABLE2, kind=ELSEWHERE)
    made_for = sorted({line["made_for"] for line in selected}, key=int)
    rows = []
    for network, of_network in _by(selected, "network"):
        for device, of_device in _by(of_network, "device"):
            name = f"{NETWORKS[network].title}, {device}"
            rows += _matrix(name, of_device, "batch", made_for)
        if network == PAPERS_INCEPTION:
            published = {
                str(batch): {str(to): f"{ms:.2f}" for to, ms in row.items()}
                for batch, row in PUBLISHED_TABLE2.items()
            }
            rows += _published(f"{NETWORKS[network].title}, V100", published, made_for)
    return DosTable(
        "table 2",
        "Table 2: milliseconds of the dos schedule made for one batch size, run at another",
        f"DOS has batches {', '.join(map(str, PAPER_BATCHES))}. That its device is the V100 is "
        "taken from its diagonal at batch 1, which equals table 1's within .01 ms.",
        ("network", "run at", "source", *(f"for {batch}" for batch in made_for)),
        rows,
    )


def _matrix(title: str, lines: Lines, run: str, made_for: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for each device or batch, `run`, that the schedules ran on."""
    rows = []
    for where, of_row in _by(lines, run):
        seconds = {line["made_for"]: float(line["seconds"]) for line in of_row}
        cells = []
        for to in made_for:
            loss = "" if to == where else f" ({100 * (seconds[to] / seconds[where] - 1):+.1f} %)"
            cells.append(f"{_figure(1e3 * seconds[to])}{loss}" if to in seconds else "-")
        rows.append((title, where, of_row[0]["source"], *cells))
    return rows


def _published(
    title: str, figures: Mapping[str, Mapping[str, str]], made_for: Sequence[str]
) -> list[tuple[str, ...]]:
    """The published rows of which a column is shown."""
    rows = []
    for where, row in figures.items():
        cells = [row.get(to, "-") for to in made_for]
        if any(cell != "-" for cell in cells):
            rows.append((title, where, "DOS", *cells))
    return rows


# ---- Speed-ups over batch sizes: figure 6 ----


def _speedups(lines: Lines) -> DosTable:
    selected = _select(lines, table=TABLE2, kind=SCHEDULE)
    batches = sorted({line["batch"] for line in selected}, key=int)
    rows = []
    for network, of_network in _by(selected, "network"):
        for device, of_device in _by(of_network, "device"):
            for scheduler, gains in _gains(of_device).items():
                cells = [f"{gains[b]:.3f}" if b in gains else "-" for b in batches]
                source = of_device[0]["source"]
                rows.append((NETWORKS[network].title, device, source, scheduler, *cells))
    return DosTable(
        "figure 6",
        "Figure 6: speed-up over sequential, by batch size",
        "DOS: batches 1, 2, 4 and 8, with 1.2 left at 8. Against what it is taken there was not "
        "checked.",
        ("network", "device", "source", "scheduler", *(f"batch {b}" for b in batches)),
        rows,
    )


def _gains(lines: Lines) -> dict[str, dict[str, float]]:
    """Scheduler -> batch -> sequential's seconds over the scheduler's, without sequential."""
    gains: dict[str, dict[str, float]] = {}
    for batch, of_batch in _by(lines, "batch"):
        seconds = {line["scheduler"]: float(line["seconds"]) for line in of_batch}
        for scheduler, value in seconds.items():
            if scheduler != SEQUENTIAL and value > 0:
                gains.setdefault(scheduler, {})[batch] = seconds[SEQUENTIAL] / value
    return gains


# ---- Sums over stages: figure 7; parts of the network ----


def _points(lines: Lines) -> list[tuple[float, float]]:
    return [(float(line["predicted_seconds"]), float(line["seconds"])) for line in lines]


def _pairs(lines: Lines) -> DosTable:
    rows = []
    for network, of_network in _by(lines, "network", kind=SAMPLE):
        for device, of_device in _by(of_network, "device"):
            points, noise = _points(of_device), float(of_device[0]["spread"])
            everything, apart = pairs_ordered_right(points), pairs_ordered_right(points, noise)
            rows.append((
                NETWORKS[network].title, device, str(len(points)), f"{everything[1]:,}",
                _share(*everything), f"{100 * PUBLISHED_PAIRS:.1f} %", f"{100 * noise:.1f} %",
                f"{apart[1]:,}", _share(*apart),
            ))  # fmt: skip
    return DosTable(
        "figure 7",
        "Figure 7: pairs of random schedules whose order is predicted right",
        "DOS counts all pairs. Beside it: of the pairs that lie further apart than the noise, "
        "which is the median, over the schedules of table 5, of the interquartile range of a "
        "schedule's rounds over their median.",
        ("network", "device", "schedules", "pairs", "of all pairs", "DOS", "noise",
         "pairs apart", "of these"),
        rows,
    )  # fmt: skip


def _share(right: int, compared: int) -> str:
    return f"{100 * right / compared:.1f} %" if compared else "-"


def _blocks(lines: Lines) -> DosTable:
    rows = []
    for network, of_network in _by(lines, "network", kind=BLOCK):
        for device, of_device in _by(of_network, "device"):
            gains = sorted(_block_gains(of_device).values())
            if gains:
                rows.append((
                    NETWORKS[network].title, device, str(len(gains)), f"{gains[0]:.3f}",
                    f"{median(gains):.3f}", f"{gains[-1]:.3f}",
                ))  # fmt: skip
    return DosTable(
        "blocks",
        "Speed-up of dos over sequential in the parts of a network",
        "Predicted by the costs of stages; parts of one kernel left out. A part is what dos "
        "searches by itself. Whether this is the paper's figure 8 could not be checked.",
        ("network", "device", "parts", "least", "median", "largest"),
        rows,
    )


def _block_gains(lines: Lines) -> dict[str, float]:
    """Block of several kernels -> sequential's predicted seconds over those of `dos`."""
    gains = {}
    for block, of_block in _by(lines, "block"):
        seconds = {line["scheduler"]: float(line["predicted_seconds"]) for line in of_block}
        if int(of_block[0]["kernels"]) > 1 and seconds.get(DOS) and SEQUENTIAL in seconds:
            gains[block] = seconds[SEQUENTIAL] / seconds[DOS]
    return gains


# ---- Lines, and how figures are written ----


def _select(
    lines: Iterable[Mapping[str, str]], *, table: str = "", **fields: str
) -> list[Mapping[str, str]]:
    """The lines with these fields; `table` is the first word of a row's key."""
    return [
        line
        for line in lines
        if line["row"].startswith(table and f"{table}.")
        and all(line.get(name) == value for name, value in fields.items())
    ]


def _by(
    lines: Iterable[Mapping[str, str]], field: str, *, table: str = "", **fields: str
) -> list[tuple[str, list[Mapping[str, str]]]]:
    """(value of a field, its lines) in the order in which the values come."""
    groups: dict[str, list[Mapping[str, str]]] = {}
    for line in _select(lines, table=table, **fields):
        groups.setdefault(line[field], []).append(line)
    return list(groups.items())


def _ms(line: Mapping[str, str] | None) -> str:
    return "-" if line is None else _figure(1e3 * float(line["seconds"]))


def _figure(value: float) -> str:
    """Three digits, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f}"


def _beside(ours: object, theirs: object) -> str:
    return f"{ours} / {theirs}"


# ---- The files ----


def write_dos_csv(lines: Lines, path: str | os.PathLike[str]) -> None:
    """Write the lines. Raises `UnwritableError`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, text.getvalue())


def write_dos_page(
    lines: Lines,
    path: str | os.PathLike[str],
    *,
    missing: Sequence[str] = (),
    warning: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page to `path`, whole or not at all.

    missing   keys of the rows that are not done
    warning   what stands above all else
    facts     (label, text) of how the run was made

    Raises `UnwritableError`.
    """
    save_page(render_dos(lines, missing=missing, warning=warning, facts=facts), path)


def render_dos(
    lines: Lines,
    *,
    missing: Sequence[str] = (),
    warning: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text."""
    rows = len({line["row"] for line in lines})
    measured = list(dict.fromkeys(x["device"] for x in lines if x["source"] == MEASURED))
    predicted = list(dict.fromkeys(x["device"] for x in lines if x["device"] not in measured))
    cards: list[Card] = [
        ("rows", f"{rows} of {rows + len(missing)}", "computed and kept one by one"),
        ("measured", ", ".join(measured) or "none", "devices of this machine"),
        ("predicted", ", ".join(predicted) or "none", "by analytic costs"),
    ]
    about: list[Part] = [
        "Accelerate DNN Inference by Inter-Operator Parallelism (DOS), 2019, beside ours. Its text "
        "could not be read: its figures are of excerpts, and those of its successor of the README "
        "of IOS's code. The paper's figures are of a V100, where no other device is named. Ours "
        "are measured or predicted, as each line says; a prediction by a device's data sheet is a "
        "first look, and its gains below about 15 % mean nothing."
    ]
    if missing:
        about.append(f"Not computed: {', '.join(missing)}.")
    parts: list[Part] = [Section("", about)]
    parts += [Section(t.title, [t.note, Table(t.head, t.rows)]) for t in tables_of(lines)]
    if charts := _charts(lines):
        parts.append(Section("Pictures", [Figures(charts)]))
    parts.append(Section("How this was made", [Table((), facts, "scroll left")]))
    return render_page(
        Page(
            "Inter-operator schedules: the tables of DOS, and ours",
            cards,
            parts,
            brand="python -m reproductions dos",
            lead=[strong(warning)] if warning else [],
        )
    )


def _charts(lines: Lines) -> list[Figure]:
    charts = []
    for row, of_row in _by(lines, "row", table=TABLE2, kind=SCHEDULE):
        title = f"Figure 6: speed-up over sequential, against the batch size, {_of(of_row)}"
        drawn = [
            Line(scheduler, np.array([float(b) for b in gains]), np.array([*gains.values()]), i)
            for i, (scheduler, gains) in enumerate(_gains(of_row).items())
        ]
        charts.append(Figure(title, line_chart(drawn, Axes(f"speed-up against batch size, {row}"))))
    for _, of_row in _by(lines, "row", kind=SAMPLE):
        title = f"Figure 7: random schedules, {_of(of_row)}"
        charts.append(Figure(title, scatter_chart(_points(of_row))))
    for _, of_row in _by(lines, "row", kind=BLOCK):
        gains = _block_gains(of_row)
        if gains:
            title = "part: how many times as fast as sequential, predicted"
            chart = bar_chart([*gains.values()], [*gains], Axes(title))
            charts.append(Figure(f"Speed-up of each part, {_of(of_row)}", chart))
    return charts


def _of(lines: Lines) -> str:
    return f"{NETWORKS[lines[0]['network']].title} on {lines[0]['device']}"
