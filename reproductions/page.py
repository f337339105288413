"""Draws the page of RL17's or GDP's table: our results beside the paper's, row by row, and how we
computed them.

    cards       the number of rows that are done, and a few figures over all rows
    results     seconds, bounds, sizes; orderings, placements, methods
    learned     what learned methods reached, and with how much effort
    notes       towers, curves, the machines' fit, sizes of our own, the command

The page has no script.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from dovetail.machine import parse_machine
from dovetail.machine.presets import FITTED
from dovetail.reports.charts import Axes, Line, key, line_chart, svg, svg_rect, svg_text
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    render_page,
)
from dovetail.units import (
    format_bandwidth,
    format_bytes,
    format_capacity,
    format_count,
    format_seconds,
)
from reproductions import STYLE, tables
from reproductions.cases import AS_PUBLISHED, LEARNED, METHOD_OF, machine_of
from reproductions.learned import trained_columns
from reproductions.methods import APART, HYPOTHESIS, PLAIN
from reproductions.orderings import format_step, is_oom, orderings_of
from reproductions.records import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Case,
    CaseResult,
    Column,
    LossCurve,
    MethodResult,
    PlanWork,
    TowerResult,
)
from reproductions.results import Outcome, PaperTable, ResultColumn, ResultTable, remarked
from reproductions.running import EXPERT, BenchSettings
from reproductions.tables import NOT_RUN, OOM, Done, format_span, lines_of, training_lines

CITATIONS = {
    "rl17": (
        "A. Mirhoseini, H. Pham, Q. V. Le, B. Steiner, R. Larsen, Y. Zhou, N. Kumar, M. Norouzi, "
        "S. Bengio, J. Dean: Device Placement Optimization with Reinforcement Learning. ICML 2017, "
        "https://arxiv.org/abs/1706.04972, tables 1 and 2, figures 4 to 9."
    ),
    "gdp": (
        "Y. Zhou, S. Roy, A. Abdolrashidi, D. Wong, P. C. Ma, Q. Xu, M. Zhong, H. Liu, A. Goldie, "
        "A. Mirhoseini, J. Laudon: GDP: Generalized Device Placement for Dataflow Graphs. 2019, "
        "https://arxiv.org/abs/1910.01578, table 1."
    ),
}
HYPOTHESIS_TEXT = (
    "Hypothesis, not stated by the paper: a variable that several devices read is on the CPU, as "
    "are its update and the sums of its gradient; links at 3.5 GB/s. Nothing is fitted to it."
)
COLUMN_TITLES = {PLAIN: "plain costs", HYPOTHESIS: "hypothesis"}
"""Maps our columns to their titles; any other column has its name as title."""
OUTCOMES = {
    True: Markup('<span class="yes">yes</span>'),
    False: Markup('<span class="no">no</span>'),
    None: Markup('<span class="open">open</span>'),
}
"""Maps whether an ordering holds to how the page says it; None: we have no figure for it."""
NEAR_BOUND = 0.15
"""A card counts the rows whose best plan is within this share of its bound."""
STEP = partial(ResultColumn, write=format_step)
"""A column of seconds of a step."""
COUNT = partial(ResultColumn, write="{:,}".format)
SECONDS = partial(ResultColumn, write=format_seconds)
RATIO = partial(ResultColumn, write="{:.3f} x".format)


def paper_table(
    settings: BenchSettings, *, rows: str, jobs: int, fresh: bool, command: str
) -> PaperTable:
    """RL17's or GDP's table, as the command line asks for it."""
    name, csv, trainings = settings.name, "rows.csv", "trainings.csv"

    def compute(tell: Callable[[str, float], None], complain: Callable[[str], None]) -> Outcome:
        # This imports torch, which a page does not need.
        from reproductions.tasks import run_table

        found = run_table(settings, rows=rows, jobs=jobs, fresh=fresh, tell=tell, complain=complain)
        titles = {case.key: case.title for case in found.cases}
        in_columns = [
            (row, column_name, column)
            for row in found.rows
            for column_name, column in row.columns.items()
        ]
        printed = ResultTable.of(
            ("row", "column", "ops", *map(SECONDS, ("expert", "best")), "method",
             *map(SECONDS, ("bound", "took"))),
            (
                (titles[row.key], column_name, row.ops, _seconds_of(column, EXPERT),
                 _seconds_of(column, column.best), column.best or "nothing fits", column.bound,
                 row.seconds)
                for row, column_name, column in in_columns
            ),
        )  # fmt: skip
        sizes = ("key", "ops", "groups", "flops", "parameter_bytes", "seconds")
        summaries: dict[str, dict[str, Any]] = {
            row.key: {size: getattr(row, size) for size in sizes} | {"columns": {}}
            for row in found.rows
        }
        for row, column_name, column in in_columns:
            summaries[row.key]["columns"][column_name] = {
                "best": column.best or None,
                "value": _seconds_of(column, column.best),
                "lower_bound": column.bound,
                "bound_proof": column.proof,
                "methods": {method: result.seconds for method, result in column.methods.items()},
                "learned": {
                    method: [
                        {
                            "seed": run.seed,
                            "seconds": run.found.seconds,
                            "trials": run.trials,
                            "controllers": run.controllers,
                        }
                        for run in runs
                    ]
                    for method, runs in column.learned.items()
                },
            }
        return Outcome(
            page=lambda facts: render(
                name, found.cases, found.rows, found.towers, found.curves, facts=facts
            ),
            files={
                csv: ResultTable.of_records(tables.FIELDS, lines_of(name, found.cases, found.rows)),
                trainings: ResultTable.of_records(
                    tables.LEARNED_FIELDS, training_lines(name, found.done)
                ),
            },
            printed=[printed.shown()],
            summary={
                "table": name,
                "rows": list(summaries.values()),
                "missing": sorted({case.key for case in found.cases} - summaries.keys()),
                "towers": [vars(tower) for tower in found.towers],
                "tasks": found.computed,
            },
            failures=found.failures,
        )

    return PaperTable(settings.out, command, (csv, trainings), compute)


def render(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[CaseResult],
    towers: Sequence[TowerResult],
    curves: Sequence[LossCurve],
    *,
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page of table `name` as text. Cases without a row are shown as not yet run.

    facts   (label, text) of how the run was made: the command, the machine that ran it
    """
    of_case = {row.key: row for row in rows}
    done = [(case, of_case[case.key]) for case in cases if case.key in of_case]
    columns = list(dict.fromkeys(column for _, row in done for column in row.columns))
    lacking = "; ".join(case.title for case in cases if case.key not in of_case)
    missing = [f"Not yet run: {lacking}."] if lacking else []

    def row_by_row(parts_of: Callable[[Case, str], Sequence[Part]], fold: str = "") -> list[Part]:
        """A section for each row that is done, of a section for each column, in which the
        hypothesis is set apart."""
        shown: list[Part] = []
        for case, row in done:
            of_columns = [
                Section(
                    COLUMN_TITLES.get(column, column).capitalize(),
                    parts_of(case, column),
                    style="hypothesis-box" if column == HYPOTHESIS else "",
                )
                for column in row.columns
            ]
            shown.append(Section(case.title, of_columns, fold))
        return [*shown, *missing]

    ordered = {
        (case.key, column): orderings_of(case, row, column, machine_of(case))
        for case, row in done
        for column in row.columns
    }

    def orderings(case: Case, column: str) -> list[Part]:
        head = ("the paper's ordering", "its seconds", "ours", "holds", "why, or a remark")
        lines = [
            (each.statement, each.published, each.found, OUTCOMES[each.holds], each.why)
            for each in ordered[case.key, column]
        ]
        if not lines:
            return ["The paper has no figures to order."]
        return [ResultTable.of(head, lines, style="scroll why").shown()]

    def plans(case: Case, column: str) -> list[Part]:
        of_column = of_case[case.key].columns[column]
        shown = [_shown_plan(case, of_column, method) for method in of_column.shown]
        return [*shown] or ["No plan fits."]

    def methods(case: Case, column: str) -> list[Part]:
        row = of_case[case.key]
        to_train = LEARNED[name] if column in trained_columns(case, row.columns) else ()
        return [_method_table(row.columns[column], to_train)]

    cards: list[Card] = [("rows", f"{len(done)} of {len(cases)}", "those that are done")]
    for column in columns:
        holds = [
            each.holds
            for case, _ in done
            for each in ordered.get((case.key, column), ())
            if each.holds is not None
        ]
        if holds:
            label = f"orderings that hold, {COLUMN_TITLES.get(column, column)}"
            cards.append((label, f"{sum(holds)} of {len(holds)}", "the paper's, in our figures"))
    plain = [row.columns[PLAIN] for _, row in done if PLAIN in row.columns]
    gains = [gain for of in plain if (gain := _gain_over_expert(of)) is not None]
    if (mean := tables.geometric_mean(gains)) is not None:
        remark = f"geometric mean of {len(gains)} rows, {min(gains):.2f} to {max(gains):.2f}"
        cards.append(("best over expert", f"{mean:.2f} x", remark))
    if gaps := [gap for of in plain if (gap := _gap(of)) is not None]:
        label = f"within {100 * NEAR_BOUND:.0f} % of the bound"
        figure = f"{sum(gap <= NEAR_BOUND for gap in gaps)} of {len(gaps)}"
        cards.append((label, figure, f"rows; {100 * min(gaps):.1f} % to {100 * max(gaps):.1f} %"))
    hypothesis = Markup("<p><em>{}</em></p>").format(HYPOTHESIS_TEXT)
    learned: list[Part] = [table.section() for table in tables.tables_of(name, done)]
    bounds = _bounds(done)
    ours = [(case.title, case.ours) for case in cases if case.ours]
    all_seconds = sum(row.seconds for row in rows)
    made = dict(facts) or {"command": f"python -m reproductions {name}"}
    made["all rows together"] = f"{format_seconds(all_seconds)} of computing, captures included"
    parts: list[Part] = [
        Section("Seconds of one step", [
            "The first line of a row has the paper's seconds. Below it stand ours, simulated, with "
            "their ratio to the paper's. OOM: out of memory. For a method that learns, we give the "
            "training of the median, and the range from the best training to the worst; best of "
            "ours is the best method that does not learn.",
            *([hypothesis] if HYPOTHESIS in columns else []),
            _seconds_table(name, cases, of_case).shown(),
        ]),
        Section("Learned methods", [
            HOW_LEARNED[name], *(learned or ["No training was run."])
        ]),
        Section("Best, bound and expert", [
            "No placement of the graph on the machine takes less time than the bound, whatever is "
            "known of it. Best is the least of all methods that do not learn.",
            bounds.shown() if bounds.rows else "Not yet run.",
        ]),
        Section("Ops and groups", [
            "A group is what is placed together. The paper counts ops of TensorFlow, ours are ops "
            "of ATen, an optimizer's update of one parameter being one op.",
            _sizes(cases, of_case).shown(),
        ]),
        Section("Which of the paper's orderings hold", [
            "Two columns within 2 % of each other are as fast. Of a learned method the training of "
            "the median counts. Nothing was tuned to make an ordering hold.",
            *row_by_row(orderings),
        ]),
        Section("Placements and loads", [
            "Each plan as a picture: rows are modules, cells groups of ops in the order of the "
            "data, colours devices; thin lines are the largest tensors between devices. Below it "
            "the seconds that each device computes, and that the busiest channels carry.",
            *row_by_row(plans, "closed"),
        ]),
        Section("All methods", row_by_row(methods, "closed")),
    ]  # fmt: skip
    # Towers and curves are RL17's; another paper has the sections only if it has figures for them.
    is_rl17 = name == "rl17"
    if is_rl17 or towers:
        parts.append(Section("Data-parallel towers", _towers(towers, curves)))
    if is_rl17 or curves:
        parts.append(Section("Loss against simulated time", _curves(curves)))
    not_given = "Sizes and choices that the paper does not give; these are ours."
    parts += [
        Section("The machine, and how it was fitted", _fit(name, cases)),
        Section(
            "What the paper does not say",
            [not_given, Table(("row", "ours"), ours, "scroll left")]
            if ours
            else ["The paper gives all sizes."],
        ),
        Section("How this was made", [Table((), list(made.items()), "facts")]),
    ]
    return render_page(
        Page(
            f"{name.upper()}'s table of device placement, and ours",
            [*cards, *tables.verdicts(name, done)],
            parts,
            brand="python -m reproductions",
            lead=[CITATIONS[name]],
            more_style=STYLE.read_text("utf-8"),
        )
    )


# ---- Results: seconds beside the paper's, bounds, sizes ----


def _gap(column: Column) -> float | None:
    """The distance of the best plan from the bound, as a share of the bound; None if nothing fits
    or there is no bound."""
    best = _seconds_of(column, column.best)
    return best / column.bound - 1 if best is not None and column.bound > 0 else None


def _gain_over_expert(column: Column) -> float | None:
    """The expert's seconds over the best's; None if one of them is missing."""
    best, expert = _seconds_of(column, column.best), _seconds_of(column, EXPERT)
    return expert / best if best and expert else None


def _seconds_of(column: Column, method: str) -> float | None:
    """The method's seconds; None if it has none, or for "", the best method where nothing fits."""
    result = column.methods.get(method)
    return None if result is None else result.seconds


def _why_missing(result: MethodResult | None) -> str:
    """A word on why a method has no seconds."""
    if result is None:
        return NOT_RUN
    return OOM if is_oom(result) else "none"


def _step_or_why(result: MethodResult | None) -> str:
    if result is None or result.seconds is None:
        return _why_missing(result)
    return format_step(result.seconds)


def _seconds_table(
    name: str, cases: Sequence[Case], of_case: Mapping[str, CaseResult]
) -> ResultTable:
    """The paper's seconds of each row, how long it searched, and below them a line for each of our
    columns: seconds with their ratio to the paper's, best of ours, bound, expert over best."""
    printed = [column for case in cases if case.published for column in case.published.seconds]
    # The paper's columns that any case has, learned ones last.
    papers = sorted(dict.fromkeys(printed), key=lambda paper: METHOD_OF[paper] in LEARNED[name])
    lines: list[tuple[str, list[str]]] = []  # (style, cells)
    for case in cases:
        published = case.published.seconds if case.published else {}
        hours = case.published.hours if case.published else {}
        cells = [case.title]
        for paper in papers:
            text = format_step(published[paper]) if paper in published else "-"
            searched = [f"search: {hours[paper]}"] if text != "-" and hours.get(paper) else []
            cells.append(remarked(text, *searched) if searched else text)
        lines.append(("paper", [*cells, "", "", ""]))
        if case.key not in of_case:
            lines.append(("ours", [NOT_RUN, *[""] * (len(papers) + 3)]))
            continue
        for column_name, column in of_case[case.key].columns.items():
            title = COLUMN_TITLES.get(column_name)
            cells = [f"ours, {title}" if title else column_name]
            for paper in papers:
                method = METHOD_OF[paper]
                result, runs = column.methods.get(method), column.learned.get(method, ())
                if result is None or result.seconds is None:
                    cells.append(_why_missing(result))
                    continue
                beside = published.get(paper)
                remarks = [f"{result.seconds / beside:.2f} x"] if beside else []
                remarks += [format_span(runs)] if len(runs) > 1 else []
                as_published = column.methods.get(AS_PUBLISHED.get(method, ""))
                if as_published is not None:
                    remarks.append(f"as published {format_step(as_published.seconds)}")
                cells.append(remarked(format_step(result.seconds), *remarks))
            best, gain, gap = (
                _seconds_of(column, column.best), _gain_over_expert(column), _gap(column)
            )  # fmt: skip
            if best is None:
                cells += ["nothing fits", format_step(column.bound), ""]
            else:
                above = [] if gap is None else [f"{100 * gap:+.0f} %"]
                cells += [
                    remarked(format_step(best), column.best),
                    remarked(format_step(column.bound), *above),
                    "" if gain is None else f"{gain:.2f} x",
                ]
            lines.append((f"ours {column_name}" if column_name == HYPOTHESIS else "ours", cells))
    return ResultTable.of(
        ("", *papers, "best of ours", "bound", "expert over best"),
        (cells for _, cells in lines),
        style="scroll seconds",
        marks={i: style for i, (style, _) in enumerate(lines)},
    )


def _bounds(done: Done) -> ResultTable:
    """The table of best, bound and expert of every row and column, with what proves the bound."""
    return ResultTable.of(
        ("row", "best method", STEP("best"), STEP("bound"), "above the bound", "expert",
         "expert over best", "the bound is proven by"),
        (
            (
                f"{case.title}, {COLUMN_TITLES.get(name, name)}",
                column.best or "nothing fits",
                _seconds_of(column, column.best),
                column.bound,
                "" if (gap := _gap(column)) is None else f"{100 * gap:.1f} %",
                _step_or_why(column.methods.get(EXPERT)),
                "" if (gain := _gain_over_expert(column)) is None else f"{gain:.2f} x",
                column.proof,
            )
            for case, row in done
            for name, column in row.columns.items()
        ),
    )  # fmt: skip


def _sizes(cases: Sequence[Case], of_case: Mapping[str, CaseResult]) -> ResultTable:
    """The table of sizes: ops and groups beside the paper's. Each network stands once: its first
    row stands for those of other numbers of GPUs."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for case in cases:
        published, row = case.published, of_case.get(case.key)
        counts = (published.ops, published.groups) if published else (None, None)
        paper_ops, paper_groups = (f"{n:,}" if n is not None else "not given" for n in counts)
        ops, groups, flops, parameters = NOT_RUN, "", "", ""
        if row is not None:
            ops, groups = f"{row.ops:,}", f"{row.groups:,}"
            flops = format_count(row.flops, "FLOP")
            parameters = format_bytes(row.parameter_bytes)
        title = case.title.removesuffix(f", {case.gpus} GPUs")
        cells = (title, paper_ops, ops, paper_groups, groups, flops, parameters,
                 f"{case.model} --train {case.train}")  # fmt: skip
        rows.setdefault((case.model, case.train), cells)
    head = ("network", "ops, paper", "ops, ours", "groups, paper", "groups, ours", "of a step",
            "parameters", "MODEL")  # fmt: skip
    return ResultTable.of(head, rows.values())


# ---- Rows that are done: plans, methods ----


def _shown_plan(case: Case, column: Column, method: str) -> Figures:
    """A plan's picture and the chart of its loads."""
    work = column.shown[method]
    role = "expert" if method == EXPERT else f"best: {method}"
    if method == column.best == EXPERT:
        role = "expert, which is the best"
    seconds = format_step(_seconds_of(column, method))
    runs = column.learned.get(method, ())
    if runs:  # what is drawn is the best of the trainings, while the tables have their median
        role = f"learned: {method}"
        role += f", best of {len(runs)} trainings" if len(runs) > 1 else ""
        seconds = format_step(tables.span(runs)[0])
    chart = load_chart(work, f"{case.title}, {role}: seconds by device and channel")
    caption = Markup("<b>{}</b>, {} a step").format(role, seconds)
    return Figures([Figure(caption, drawing(work.picture) + chart)])


_TAG = re.compile(r"</?([a-zA-Z]*)([^<>]*)>")
_DRAWN = {"svg", "text", "path", "title", "rect", "ul", "li", "i"}
_UNSAFE = re.compile(r"\b(on\w+|href|src|style)\s*=", re.IGNORECASE)


def drawing(picture: str) -> Markup:
    """A picture that was kept in a file, as markup if it is harmless, else a sentence instead.

    The file may come from anywhere. A picture is harmless if it has only elements that draw, and no
    attribute that could run a script, load a resource or set a style.
    """
    tags = _TAG.findall(picture)
    # After all tags are taken out, no "<" may be left: it would begin a tag that was not checked.
    # Nor may a ">": the tag before it would go on, behind an attribute that has one in its value.
    draws = all(name in _DRAWN and not _UNSAFE.search(rest) for name, rest in tags)
    if draws and not {"<", ">"} & set(_TAG.sub("", picture)):
        return Markup(picture)
    return Markup("<p>The picture that was kept is not one that this version draws.</p>")


def _method_table(column: Column, learned: Sequence[str]) -> Table:
    """The table of methods: seconds, memory, and how long each searched."""
    best = _seconds_of(column, column.best)
    rows: list[tuple[Any, ...]] = []
    for method, result in column.methods.items():
        peaks = result.peak_memory_bytes
        fullest = max(peaks, key=lambda name: peaks[name], default="")
        ratio = f"{result.seconds / best:.3f} x" if best and result.seconds is not None else ""
        rows.append((
            method + (" (best)" if method == column.best else ""),
            _step_or_why(result),
            ratio,
            f"{format_bytes(peaks[fullest])} on {fullest}" if fullest else "",
            format_seconds(result.search_seconds),
            result.reason,
        ))  # fmt: skip
    rows += [(name, NOT_RUN, "", "", "", "") for name in learned if name not in column.methods]
    head = ("method", "seconds of a step", "to the best", "fullest device", "search took", "")
    return ResultTable.of(head, rows).shown()


# ---- Charts of the papers' figures as inline SVG. Colours come from the style sheet, by class ----
#
# load_chart   RL17's figures 8 and 9: a bar a device and a channel, as long as its seconds
# loss_chart   RL17's figures 6 and 7: loss against simulated time, a line a curve

CHART_WIDTH, LABELS_WIDTH, VALUES_WIDTH = 620.0, 150.0, 80.0
"""A chart of loads is so wide, its labels on the left and its values on the right included."""
BAR_HEIGHT, BAR_SPACING, TEXT_BASELINE = 13.0, 6.0, 10.5
"""Bars are so high and so far apart. Texts stand `TEXT_BASELINE` below the top of their bar."""
SMOOTHED_STEPS = 20
"""Each loss shown is the mean of up to this many steps."""
MOST_CHANNELS = 8
"""A chart of loads has at most this many channels, the busiest ones."""


def load_chart(work: PlanWork, description: str) -> Markup:
    """A chart of the seconds of each device by phase, and below them of the busiest channels."""
    busiest = sorted(work.transfer_seconds.items(), key=lambda item: -item[1])
    channels = [(name, seconds) for name, seconds in busiest if seconds > 0][:MOST_CHANNELS]
    of_phases = {
        "forward": work.forward_seconds,
        "backward": work.backward_seconds,
        "update": work.update_seconds,
    }
    # (label, parts), where a part is (kind, seconds)
    bars = [
        (device, [(phase, seconds.get(device, 0.0)) for phase, seconds in of_phases.items()])
        for device in work.forward_seconds
    ]
    bars += [(name, [("transfer", seconds)]) for name, seconds in channels]
    longest = max((sum(s for _, s in parts) for _, parts in bars), default=0.0) or 1.0
    scale = (CHART_WIDTH - LABELS_WIDTH - VALUES_WIDTH) / longest
    drawn, y = [], 0.0
    for label, parts in bars:
        drawn.append(svg_text(LABELS_WIDTH - 8, y + TEXT_BASELINE, label, "end"))
        x = LABELS_WIDTH
        for kind, seconds in parts:
            if seconds > 0:
                width, said = max(seconds * scale, 0.5), f"{kind}: {format_seconds(seconds)}"
                drawn.append(svg_rect(x, y, width, BAR_HEIGHT, kind, said))
                x += width
        total = format_seconds(sum(seconds for _, seconds in parts))
        drawn.append(svg_text(x + 6, y + TEXT_BASELINE, total))
        y += BAR_HEIGHT + BAR_SPACING
    kinds = (*of_phases, *(["transfer"] if channels else []))
    chart = svg(drawn, (CHART_WIDTH, y), "load", description)
    return chart + key((kind, kind, "") for kind in kinds)


def loss_chart(curves: Sequence[LossCurve], description: str) -> Markup:
    """A chart of loss against simulated time; each curve is a running mean (`SMOOTHED_STEPS`).

    The time axis ends where the first curve ends, so that all curves exist at every time shown.
    """
    curves = _usable(curves)
    if not curves:
        return Markup("<p>Not yet run.</p>")
    end = _shared_seconds(curves)
    lines = []
    for i, curve in enumerate(curves):
        # The mean of a run of steps is a difference of two sums from the first step on.
        sums = np.cumsum(np.concatenate([[0.0], np.array(curve.losses, dtype=np.float64)]))
        last = np.arange(1, len(curve.losses) + 1)
        first = np.maximum(last - SMOOTHED_STEPS, 0)
        losses = (sums[last] - sums[first]) / (last - first)
        # [steps] at which each step begins
        times = curve.step_seconds * (last - 1).astype(np.float64)
        inside = times <= end * (1 + 1e-9)
        took = f"{format_seconds(curve.step_seconds)} a step"
        lines.append(Line(curve.name, times[inside], losses[inside], i, remark=took))
    title = f"{description} against simulated time"
    return line_chart(lines, Axes(title, format_seconds, end_x=end))


def _usable(curves: Sequence[LossCurve]) -> list[LossCurve]:
    """The curves that have losses and take time."""
    return [curve for curve in curves if curve.losses and curve.step_seconds > 0]


def _shared_seconds(curves: Sequence[LossCurve]) -> float:
    """The time at which the first of the curves ends."""
    return min(curve.step_seconds * len(curve.losses) for curve in curves)


# ---- Notes: learning, towers, training curves, the machine's fit, how it was made ----

HOW_LEARNED = {
    "rl17": (
        "Every training begins with nothing but the graph, on the groups of RL17's rule; those of "
        "seq2seq-paper are a cell or branch each. seq2seq-paper is RL17's method as published; "
        "seq2seq is ours, with more features, a start by modules and parameters, and imitation of "
        "the best placement. Placements are simulated; the paper's were run, for 12 to 27 hours a "
        "row. To reach: the best baseline less the paper's margin of RL over its own, or less 80 % "
        "of the head room that auto, which does not learn, finds over ours, if that is less. "
        "auto@seq2seq is auto on the groups of seq2seq, with as many placements."
    ),
    "gdp": (
        "Every training begins with nothing but the graph: GDP-one is not the policy that comes "
        "with the package. gdp-paper and hdp-paper are the methods as published, op by op; gdp and "
        "hdp are ours. These place the same groups, and so does auto@gdp: auto, which does not "
        "learn, with as many placements as gdp; against HDP only as many of GDP's "
        "placements count as HDP had. Search effort is how many placements HDP evaluates up to its "
        "best, over how many GDP evaluates up to one as good, seed by seed; repeats count, for a "
        "real run would cost again. The paper's is of time, with six runs where ours are as many "
        "as stand there."
    ),
}
TOWERS_TEXT = (
    "The paper compares its placement with data parallelism on Inception-V3 (section 4.4): batch "
    "128 as 4 towers of 32, parameters and data reading on the CPU. Its placement trains 19.7 % "
    "faster than synchronous towers; asynchronous towers take less time a step and converge slower."
)
CURVES_TEXT = (
    "As the paper's figures 6 and 7. Losses are real, of small networks trained on one core: "
    "Inception-V3 a tenth as wide at 75 x 75 on scikit-learn's handwritten digits with RMSProp, "
    "4 x 16 images a step; NMT 64 wide that learns to write 8 words backwards with Adam, 4 x 16 "
    "sentences a step. Seconds of a step are simulated on the full-size graphs. Experts, planned "
    "and learned placements compute the same numbers, so that their losses are the same step by "
    "step. Asynchronous towers train around our own parameter server in virtual time: each is "
    "updated when it is ready, and four updates are a step. The expert of section 4.4 has each "
    "LSTM layer, the attention and the softmax on a GPU of its own. Each line is the "
    f"mean of up to {SMOOTHED_STEPS} steps, and ends where the first of them does."
)
FIT_TEXT = {
    "rl17": (
        "Peaks, bandwidths and capacities are the hardware's. Seconds per op, the share of the "
        "peak that is reached, and what of it convolutions reach are fitted to the paper's "
        "columns 1 CPU and 1 GPU, and to nothing else."
    ),
    "gdp": (
        "Peaks, bandwidths and capacities are the hardware's. One factor on all compute seconds is "
        "fitted such that the column human comes out in the mean, and nothing else is fitted."
    ),
}


def _towers(towers: Sequence[TowerResult], curves: Sequence[LossCurve]) -> list[Part]:
    """The towers' steps, and sentences that repeat the paper's comparisons with our seconds: the
    step of all examples (planned, learned, and the expert's) and asynchronous towers, each against
    synchronous ones."""
    rows = [
        (
            tower.title,
            tower.kind,
            f"{tower.replicas} x {tower.batch}",
            tower.reason or "none" if tower.seconds is None else format_seconds(tower.seconds),
            f"{tower.replicas * tower.batch / tower.seconds:.1f}" if tower.seconds else "",
        )
        for tower in towers
    ]
    head = ("network", "towers", "replicas x batch", "seconds of a step", "examples per second")
    parts: list[Part] = [
        TOWERS_TEXT, ResultTable.of(head, rows).shown() if rows else "Not yet run."
    ]  # fmt: skip
    step_seconds: dict[str, dict[str, float]] = {}  # title -> name of the curve -> seconds
    for curve in curves:
        step_seconds.setdefault(curve.title, {})[curve.name] = curve.step_seconds
    for title, seconds in step_seconds.items():
        for name in ("planned", *LEARNED["rl17"], EXPERT, ASYNCHRONOUS):
            if {name, SYNCHRONOUS} <= seconds.keys():
                examples = "" if name == ASYNCHRONOUS else "all examples, "
                change = _change(seconds[name], seconds[SYNCHRONOUS])
                parts.append(
                    f"{title}, ours: a step of {examples}{name}, takes "
                    f"{format_seconds(seconds[name])}, {change} than synchronous towers."
                )
    return parts


def _change(seconds: float, other_seconds: float) -> str:
    """The difference as a share of the other seconds: "19.7 % less"."""
    change = 100 * (1 - seconds / other_seconds)
    return f"{abs(change):.1f} % {'less' if change >= 0 else 'more'}"


def _curves(curves: Sequence[LossCurve]) -> list[Part]:
    """The training curves of each network. Below them, if any was run: each one's loss when the
    first curve ends, and at its own end; its step beside those of each of the network's experts;
    and how both kinds of towers converge."""
    parts: list[Part] = []
    for title in dict.fromkeys(curve.title for curve in curves):
        of_network = [curve for curve in curves if curve.title == title]
        usable = _usable(of_network)
        shown: list[Part] = [loss_chart(of_network, f"{title}: loss")]
        if usable:
            end, rows = _shared_seconds(usable), []
            for curve in usable:
                # The steps that this curve has done by then, at least one; a quotient that is a
                # whole number may come out slightly less.
                steps = math.floor(end / curve.step_seconds * (1 + 1e-9))
                steps = min(len(curve.losses), max(1, steps))
                means = _last_mean(curve.losses[:steps]), _last_mean(curve.losses)
                rows.append((curve.name, curve.step_seconds, steps, *means, len(curve.losses)))
            three = partial(ResultColumn, write="{:.3f}".format)
            head = (
                "", SECONDS("seconds of a step"), COUNT(f"steps in {format_seconds(end)}"),
                three("loss then"), three("loss after all steps"), COUNT("all steps"),
            )  # fmt: skip
            shown.append(ResultTable.of(head, rows).shown())
        seconds = {curve.name: curve.step_seconds for curve in usable}
        sentences = [
            f"A step of {name} takes {_change(seconds[name], seconds[expert])} than that of the "
            f"{expert}."
            for expert in (EXPERT, APART)
            for name in ("planned", *LEARNED["rl17"])
            if {expert, name} <= seconds.keys()
        ]
        if compared := " ".join([*sentences, _convergence(usable)]).strip():
            shown.append(compared)
        parts.append(Section(title, shown))
    return [CURVES_TEXT, *(parts or ["Not yet run."])]


def _convergence(curves: Sequence[LossCurve]) -> str:
    """Sentences that compare the losses of both kinds of towers; "" if one kind is missing."""
    after = {
        curve.name: _last_mean(curve.losses)
        for curve in curves
        if curve.name in (SYNCHRONOUS, ASYNCHRONOUS)
    }
    if len(after) < 2:
        return ""
    slower = after[ASYNCHRONOUS] > after[SYNCHRONOUS]
    text = (
        f"After all steps the loss of asynchronous towers is {after[ASYNCHRONOUS]:.3f}, of "
        f"synchronous ones {after[SYNCHRONOUS]:.3f}: step by step they converge "
        f"{'slower, as' if slower else 'no slower here, other than'} in the paper. "
    )
    if not slower:
        text += (
            "They make four updates a step where the others make one, at the same learning rate."
        )
    return text


def _last_mean(losses: Sequence[float]) -> float:
    """The mean of up to `SMOOTHED_STEPS` losses, the last ones."""
    last = losses[-SMOOTHED_STEPS:]
    return sum(last) / len(last)


def _fit(name: str, cases: Sequence[Case]) -> list[Part]:
    """Which rates of the machines were fitted, the residuals, and the rates of the table's largest
    machine: a line for each model of device, and one for each pair of models that links join, with
    the rates of the last of these links."""
    try:
        fits = json.loads(FITTED.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fits = {}
    fit = fits.get(name) if isinstance(fits, dict) else None
    fit = fit if isinstance(fit, dict) else {}
    parts: list[Part] = [FIT_TEXT[name]]
    if fit.get("provisional"):
        parts.append(Markup("<p><b>Provisional: the fit has not been made yet.</b></p>"))
    parts += _residuals(fit)
    # A second fit, in which convolutions reach the same share of the peak as other ops.
    without = fit.get("without_convolutions_apart")
    if isinstance(without, Mapping) and (residuals := _residuals(without)):
        title = "The same without an efficiency of their own for convolutions"
        parts.append(Section(title, residuals, "closed"))
    if fit.get("command"):
        parts.append(Markup("<p>Made by <code>{}</code>.</p>").format(str(fit["command"])))
    largest = max(cases, key=lambda case: case.gpus, default=None)
    if largest is None:
        return parts
    machine = parse_machine(largest.machine)
    models = {device.model: device for device in machine.devices}
    devices = [
        (
            f"{sum(other.model == model for other in machine.devices)} x {model}",
            format_capacity(device.memory_bytes),
            ", ".join(
                f"{dtype} {format_count(rate, 'FLOP/s')}"
                for dtype, rate in device.flops_per_second.items()
            ),
            ", ".join(
                f"{kind or 'all else'} {100 * share:.1f} %"
                for kind, share in sorted(device.efficiencies.items(), reverse=True)
            ),
            format_bandwidth(device.bandwidth_bytes_per_second),
            format_seconds(device.op_overhead_seconds),
        )
        for model, device in models.items()
    ]
    model_of = {device.name: device.model for device in machine.devices}
    links = {
        f"{model_of[link.source]} to {model_of[link.destination]}": (
            format_bandwidth(link.bandwidth_bytes_per_second),
            format_seconds(link.latency_seconds),
        )
        for link in machine.links
    }
    head = ("device", "memory", "peak", "reached", "memory bandwidth", "per op")
    rows = ((name, *rates) for name, rates in links.items())
    rates = [ResultTable.of(head, devices), ResultTable.of(("link", "bandwidth", "latency"), rows)]
    parts.append(Section(machine.name, [table.shown() for table in rates]))
    return parts


def _residuals(fit: Mapping[str, Any]) -> list[Part]:
    """The published seconds that a fit used, beside the seconds simulated with it, and the number
    of its parameters; nothing if it names no figures."""
    figures, parameters = fit.get("figures"), fit.get("parameters")
    if not figures:
        return []
    text = f"{len(figures)} figures met {parameters} parameters." if parameters else ""
    if parameters == len(figures):
        text += (
            " As many of one as of the other: the fit is exact, and says nothing of how good the "
            "model is. What it predicts are the other columns."
        )
    head = (
        "network", "machine", "column", SECONDS("paper"), SECONDS("simulated"), RATIO("ratio")
    )  # fmt: skip
    rows = (
        (
            *(figure[name] for name in ("model", "machine", "column")),
            figure["published_seconds"],
            figure["simulated_seconds"],
            figure["simulated_seconds"] / figure["published_seconds"],
        )
        for figure in figures
    )
    return [text, ResultTable.of(head, rows).shown()]
