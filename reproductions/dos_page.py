"""Shows DOS's tables beside ours: a page, a CSV file, and tables that README and terminal share.

All are made from the lines of `reproductions.dos`, which are the lines of the CSV file.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from dovetail.reports.charts import Axes, Line, bar_chart, line_chart
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    render_page,
    strong,
)
from dovetail.schedulers.results import SEQUENTIAL
from reproductions import DOS_STYLE
from reproductions.additivity import pairs_ordered_right, scatter_chart
from reproductions.dos import (
    BLOCK,
    DOS,
    ELSEWHERE,
    FIELDS,
    MEASURED,
    NETWORKS,
    OTHER_SIZE,
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
    DosSettings,
    run_rows,
)
from reproductions.results import Outcome, PaperTable, ResultColumn, ResultTable
from reproductions.tasks import matching

CsvLine = Mapping[str, str]
Lines = Sequence[CsvLine]
PEERS = ("TensorFlow", "TVM", "TensorRT")
"""The other programs whose milliseconds are published; none of them is run here."""
PAPERS_INCEPTION = "inception-v3"
"""The network of the paper's tables 1 and 2."""


def paper_table(settings: DosSettings, *, rows: str, fresh: bool) -> PaperTable:
    """DOS's tables, as the command line asks for them."""
    matching(settings.rows, rows)
    warning = "" if settings.size is None else OTHER_SIZE
    command = (
        f"python -m reproductions dos --device {','.join(settings.devices)} "
        f"--batch {','.join(map(str, settings.batches))} --rounds {settings.rounds} "
        f"--sampled {settings.sampled}{f' --size {settings.size}' if settings.size else ''} "
        f"--seed {settings.seed}"
    )

    def compute(tell: Callable[[str, float], None], complain: Callable[[str], None]) -> Outcome:
        found = run_rows(settings, rows=rows, fresh=fresh, tell=tell, complain=complain)
        return Outcome(
            page=lambda facts: render(
                found.lines, missing=found.missing, warning=warning, facts=facts
            ),
            files={"rows.csv": ResultTable.of_records(FIELDS, found.lines)},
            printed=[table.shown() for table in tables_of(found.lines)],
            summary={
                "table": "dos",
                "lines": found.lines,
                "missing": found.missing,
                "tasks": found.computed,
            },
            failures=found.failures,
        )

    return PaperTable(settings.out, command, ("rows.csv",), compute, warning)


def render(
    lines: Lines,
    *,
    missing: Sequence[str] = (),
    warning: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text.

    missing   keys of the rows that are not done
    warning   what stands above all else
    facts     (label, text) of how the run was made
    """
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
    charts = []
    for row, of_row in _by(lines, "row", table=TABLE2, kind=SCHEDULE):
        drawn = [
            Line(scheduler, np.array([float(b) for b in gains]), np.array([*gains.values()]), i)
            for i, (scheduler, gains) in enumerate(_gains(of_row).items())
        ]
        chart = line_chart(drawn, Axes(f"speed-up against batch size, {row}"))
        what = "Figure 6: speed-up over sequential, against the batch size"
        charts.append(Figure(f"{what}, {_of(of_row)}", chart))
    for _, of_row in _by(lines, "row", kind=SAMPLE):
        chart = scatter_chart(_points(of_row))
        charts.append(Figure(f"Figure 7: random schedules, {_of(of_row)}", chart))
    for _, of_row in _by(lines, "row", kind=BLOCK):
        if block_gains := _block_gains(of_row):
            axes = Axes("part: how many times as fast as sequential, predicted")
            chart = bar_chart([*block_gains.values()], [*block_gains], axes)
            charts.append(Figure(f"Speed-up of each part, {_of(of_row)}", chart))
    return render_page(
        Page(
            "Inter-operator schedules: the tables of DOS, and ours",
            cards,
            [
                Section("", about),
                *(table.section() for table in tables_of(lines)),
                *([Section("Pictures", [Figures(charts)])] if charts else []),
                Section("How this was made", [Table((), facts, "scroll left")]),
            ],
            brand="python -m reproductions dos",
            more_style=DOS_STYLE.read_text("utf-8"),
            lead=[strong(warning)] if warning else [],
        )
    )


def tables_of(lines: Lines) -> list[ResultTable]:
    """The tables of all rows that are done, without those of which nothing is known."""
    makers = (
        _milliseconds, _work, _search, _devices, _batches, _speedups, _pairs, _blocks,
    )  # fmt: skip
    return [table for make in makers if (table := make(lines)).rows]


# ---- The networks: table 5 ----

_OURS = (SEQUENTIAL, *SCHEDULERS_OF[TABLE5])


def _milliseconds(lines: Lines) -> ResultTable:
    """A line for each network and device of ours, then the published ones."""
    rows = []
    for network, of_network in _by(lines, "network", table=TABLE5, kind=SCHEDULE):
        title = NETWORKS[network].title
        for device, of_device in _by(of_network, "device"):
            found = {line["scheduler"]: _ms(line) for line in of_device}
            chosen = next(line for line in of_device if line["chosen"] == "True")
            ours = (found.get(name) for name in _OURS)
            best = f"{chosen['scheduler']}, {_ms(chosen)}"
            rows.append((title, device, chosen["source"], *ours, best, *(None for _ in PEERS)))
        for paper, published in (("DOS", PUBLISHED_DOS), ("IOS's code", PUBLISHED_IOS)):
            figures = {name: f"{ms:.2f}" for name, ms in published[network].items()}
            cells, peers = (map(figures.get, names) for names in (_OURS, PEERS))
            rows.append((title, f"V100, {paper}", "published", *cells, None, *peers))
    return ResultTable.of(
        ("network", "device", "source", *_OURS, "chosen", *PEERS),
        rows,
        key="table 5",
        title="Table 5: milliseconds at batch 1",
        note="Published are DOS's own columns as far as they are known, and those of the README of "
        "IOS's code. TensorFlow, TVM and TensorRT were not run here.",
    )


def _work(lines: Lines) -> ResultTable:
    rows = []
    for network, of_network in _by(lines, "network", table=TABLE5, scheduler=DOS, kind=SCHEDULE):
        published = PUBLISHED_WORK[network]
        for line in of_network:
            adds = float(line["multiply_adds"])
            rows.append((
                NETWORKS[network].title, line["device"], line["source"],
                f"{line['launches']} / {published.kernels}",
                f"{adds / 1e9:.2f} / {published.multiply_adds:.2f}",
                f"{float(line['moved_bytes']) / 1e6:.0f} / {published.moved:.0f}",
                f"{adds / float(line['seconds']) / 1e12:.3g} / {published.utilisation}",
            ))  # fmt: skip
    return ResultTable.of(
        ("network", "device", "source", "kernels", "G multiply-adds", "MB", "T multiply-adds/s"),
        rows,
        key="work",
        title="Kernels, work and memory access of the dos schedule, ours / DOS's",
        note="A fused call counts as one kernel here. DOS's figures are of a V100.",
    )


def _search(lines: Lines) -> ResultTable:
    rows = [
        (
            NETWORKS[line["network"]].title, line["device"], line["scheduler"],
            int(line["states"]), int(line["timed"]),
            float(line["search_seconds"]), float(line["measuring_seconds"]),
            PUBLISHED_WORK[line["network"]].search_seconds if line["scheduler"] == DOS else None,
        )
        for line in _select(lines, table=TABLE5, kind=SCHEDULE)
        if line["scheduler"] in (DOS, "ios")
    ]  # fmt: skip
    return ResultTable.of(
        (
            "network", "device", "scheduler",
            *(ResultColumn(name, "", "{:,}".format) for name in ("states", "stages measured")),
            *(ResultColumn(name, "s", "{:.3g}".format) for name in ("search", "measuring")),
            ResultColumn("DOS", "s", "{:g}".format),
        ),
        rows,
        key="search",
        title="What searching takes",
        note="Stages that were measured for an earlier scheduler or run are not measured again.",
    )  # fmt: skip


# ---- Made for one device or batch, run on another: tables 1 and 2 ----


def _devices(lines: Lines) -> ResultTable:
    selected = _select(lines, table=TABLE1, kind=ELSEWHERE)
    made_for = list(dict.fromkeys(line["made_for"] for line in selected))
    rows = []
    for network, of_network in _by(selected, "network"):
        title = NETWORKS[network].title
        rows += _matrix(title, of_network, "device", made_for)
        if network == PAPERS_INCEPTION:
            rows += _published(title, PUBLISHED_TABLE1, made_for)
    return ResultTable.of(
        ("network", "run on", "source", *(f"for {name}" for name in made_for)),
        rows,
        key="table 1",
        title="Table 1: milliseconds of the dos schedule made for one device, run on another",
        note="A column is the device that the schedule was made for. In brackets: what is lost "
        "against the schedule made for the row's own device.",
    )


def _batches(lines: Lines) -> ResultTable:
    selected = _select(lines, table=TABLE2, kind=ELSEWHERE)
    made_for = sorted({line["made_for"] for line in selected}, key=int)
    rows = []
    for network, of_network in _by(selected, "network"):
        title = NETWORKS[network].title
        for device, of_device in _by(of_network, "device"):
            rows += _matrix(f"{title}, {device}", of_device, "batch", made_for)
        if network == PAPERS_INCEPTION:
            rows += _published(f"{title}, V100", PUBLISHED_TABLE2, made_for)
    return ResultTable.of(
        ("network", "run at", "source", *(f"for {batch}" for batch in made_for)),
        rows,
        key="table 2",
        title="Table 2: milliseconds of the dos schedule made for one batch size, run at another",
        note=f"DOS has batches {', '.join(map(str, PAPER_BATCHES))}. That its device is the V100 "
        "is taken from its diagonal at batch 1, which equals table 1's within .01 ms.",
    )


def _matrix(
    title: str, lines: Lines, run: str, made_for: Sequence[str]
) -> list[tuple[str | None, ...]]:
    """A row for each device or batch, `run`, that the schedules ran on."""
    rows = []
    for where, of_row in _by(lines, run):
        own = next((float(x["seconds"]) for x in of_row if x["made_for"] == where), math.nan)
        cells = {}
        for line in of_row:
            loss = f" ({100 * (float(line['seconds']) / own - 1):+.1f} %)"
            cells[line["made_for"]] = _ms(line) + loss * (line["made_for"] != where)
        rows.append((title, where, of_row[0]["source"], *map(cells.get, made_for)))
    return rows


def _published(
    title: str, figures: Mapping[Any, Mapping[Any, float]], made_for: Sequence[str]
) -> list[tuple[str | None, ...]]:
    """The published rows of which a column is shown."""
    rows = []
    for where, row in figures.items():
        printed = {str(to): f"{ms:.2f}" for to, ms in row.items()}
        if printed.keys() & set(made_for):
            rows.append((title, str(where), "DOS", *map(printed.get, made_for)))
    return rows


# ---- Speed-ups over batch sizes: figure 6 ----


def _speedups(lines: Lines) -> ResultTable:
    selected = _select(lines, table=TABLE2, kind=SCHEDULE)
    batches = sorted({line["batch"] for line in selected}, key=int)
    rows = [
        (NETWORKS[network].title, device, of_device[0]["source"], scheduler,
         *map(gains.get, batches))
        for network, of_network in _by(selected, "network")
        for device, of_device in _by(of_network, "device")
        for scheduler, gains in _gains(of_device).items()
    ]  # fmt: skip
    of_batches = (ResultColumn(f"batch {b}", "", "{:.3f}".format) for b in batches)
    return ResultTable.of(
        ("network", "device", "source", "scheduler", *of_batches),
        rows,
        key="figure 6",
        title="Figure 6: speed-up over sequential, by batch size",
        note="DOS: batches 1, 2, 4 and 8, with 1.2 left at 8. Against what it is taken there was "
        "not checked.",
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


def _pairs(lines: Lines) -> ResultTable:
    def share(right: int, compared: int) -> str | None:
        return f"{100 * right / compared:.1f} %" if compared else None

    rows = []
    for network, of_network in _by(lines, "network", kind=SAMPLE):
        for device, of_device in _by(of_network, "device"):
            points, noise = _points(of_device), float(of_device[0]["spread"])
            everything, apart = pairs_ordered_right(points), pairs_ordered_right(points, noise)
            rows.append((
                NETWORKS[network].title, device, len(points), f"{everything[1]:,}",
                share(*everything), f"{100 * PUBLISHED_PAIRS:.1f} %", f"{100 * noise:.1f} %",
                f"{apart[1]:,}", share(*apart),
            ))  # fmt: skip
    head = (
        "network", "device", "schedules", "pairs", "of all pairs", "DOS", "noise", "pairs apart",
        "of these",
    )  # fmt: skip
    return ResultTable.of(
        head,
        rows,
        key="figure 7",
        title="Figure 7: pairs of random schedules whose order is predicted right",
        note="DOS counts all pairs. Beside it: of the pairs that lie further apart than the noise, "
        "which is the median, over the schedules of table 5, of the interquartile range of a "
        "schedule's rounds over their median.",
    )


def _points(lines: Lines) -> list[tuple[float, float]]:
    return [(float(line["predicted_seconds"]), float(line["seconds"])) for line in lines]


def _blocks(lines: Lines) -> ResultTable:
    rows = []
    for network, of_network in _by(lines, "network", kind=BLOCK):
        for device, of_device in _by(of_network, "device"):
            if gains := sorted(_block_gains(of_device).values()):
                figures = len(gains), gains[0], median(gains), gains[-1]
                rows.append((NETWORKS[network].title, device, *figures))
    three = "{:.3f}".format
    of_gains = (ResultColumn(name, "", three) for name in ("least", "median", "largest"))
    return ResultTable.of(
        ("network", "device", "parts", *of_gains),
        rows,
        key="blocks",
        title="Speed-up of dos over sequential in the parts of a network",
        note="Predicted by the costs of stages; parts of one kernel left out. A part is what dos "
        "searches by itself. Whether this is the paper's figure 8 could not be checked.",
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


def _select(lines: Iterable[CsvLine], *, table: str = "", **fields: str) -> list[CsvLine]:
    """The lines with these fields; `table` is the first word of a row's key."""
    return [
        line
        for line in lines
        if line["row"].startswith(table and f"{table}.")
        and all(line.get(name) == value for name, value in fields.items())
    ]


def _by(
    lines: Iterable[CsvLine], field: str, *, table: str = "", **fields: str
) -> list[tuple[str, list[CsvLine]]]:
    """(value of a field, its lines) in the order in which the values come."""
    groups: dict[str, list[CsvLine]] = {}
    for line in _select(lines, table=table, **fields):
        groups.setdefault(line[field], []).append(line)
    return list(groups.items())


def _ms(line: CsvLine) -> str:
    """The line's milliseconds in three digits, without an exponent."""
    value = 1e3 * float(line["seconds"])
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f}"


def _of(lines: Lines) -> str:
    return f"{NETWORKS[lines[0]['network']].title} on {lines[0]['device']}"
