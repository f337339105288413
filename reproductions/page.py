"""Draws the page of a paper's table: our results beside the paper's, row by row, and how we
computed them.

    cards       the number of rows that are done, and a few figures over all rows
    results     seconds, bounds, sizes; orderings, placements, methods
    learned     what learned methods reached, and with how much effort
    notes       towers, curves, the machines' fit, sizes of our own, the command

The page has no script.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from dovetail.machine import Machine, parse_machine
from dovetail.machine.presets import FITTED
from dovetail.reports.charts import Axes, Line, line_chart
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    drawing,
    remarked,
    render_page,
    save_page,
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
from reproductions.tables import NOT_RUN, OOM, format_span

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
EXPERT = "expert"
"""The name of the method that splits a network as an expert would."""
OUTCOMES = {
    True: Markup('<span class="yes">yes</span>'),
    False: Markup('<span class="no">no</span>'),
    None: Markup('<span class="open">open</span>'),
}
"""Maps whether an ordering holds to how the page says it; None: we have no figure for it."""
NEAR_BOUND = 0.15
"""A card counts the rows whose best plan is within this share of its bound."""


@dataclass(frozen=True)
class _TableResults:
    """A table's cases, and the rows that are done: key -> row."""

    name: str
    cases: tuple[Case, ...]
    rows: Mapping[str, CaseResult]

    @property
    def done(self) -> list[tuple[Case, CaseResult]]:
        """The cases that have a row, with it."""
        return [(case, self.rows[case.key]) for case in self.cases if case.key in self.rows]

    @property
    def columns(self) -> list[str]:
        """The names of our columns, in the order in which rows have them."""
        return list(dict.fromkeys(name for _, row in self.done for name in row.columns))

    @property
    def paper_columns(self) -> list[str]:
        """The paper's columns that any case has, learned ones last."""
        printed = [name for case in self.cases if case.published for name in case.published.seconds]
        learned = LEARNED[self.name]
        return sorted(dict.fromkeys(printed), key=lambda name: METHOD_OF[name] in learned)


@dataclass(frozen=True)
class _ColumnShown:
    """One of our columns of a row; `holds` has an item for each ordering of the paper."""

    name: str
    holds: list[bool | None]
    orderings: Part
    plans: list[Part]
    methods: Table


@dataclass(frozen=True)
class _CaseShown:
    """A row that is done."""

    title: str
    columns: list[_ColumnShown]


def write_page(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[CaseResult],
    towers: Sequence[TowerResult],
    curves: Sequence[LossCurve],
    path: str | os.PathLike[str],
    *,
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page of table `name` to `path`, whole or not at all. Cases without a row are shown
    as not yet run.

    facts   (label, text) of how the run was made: the command, the machine that ran it

    Raises `UnwritableError`.
    """
    save_page(render(name, cases, rows, towers, curves, facts=facts), path)


def render(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[CaseResult],
    towers: Sequence[TowerResult],
    curves: Sequence[LossCurve],
    *,
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text. See `write_page`."""
    results = _TableResults(name, tuple(cases), {row.key: row for row in rows})
    shown = [_shown_case(results, case, row) for case, row in results.done]
    lines = [line for case in results.cases for line in _seconds_lines(results, case)]
    seconds = Table(
        ["", *results.paper_columns, "best of ours", "bound", "expert over best"],
        [cells for _, cells in lines],
        "scroll seconds",
        marks={i: style for i, (style, _) in enumerate(lines)},
    )
    hypothesis = Markup("<p><em>{}</em></p>").format(HYPOTHESIS_TEXT)
    learned: list[Part] = [
        Section(title, [Table(*content)]) for title, content in tables.tables_of(name, results.done)
    ]
    bounds = _bounds(results)
    lacking = "; ".join(case.title for case in results.cases if case.key not in results.rows)
    missing = [f"Not yet run: {lacking}."] if lacking else []
    ours = [(case.title, case.ours) for case in cases if case.ours]
    parts: list[Part] = [
        Section("Seconds of one step", [
            "The first line of a row has the paper's seconds. Below it stand ours, simulated, with "
            "their ratio to the paper's. OOM: out of memory. For a method that learns, we give the "
            "training of the median, and the range from the best training to the worst; best of "
            "ours is the best method that does not learn.",
            *([hypothesis] if HYPOTHESIS in results.columns else []),
            seconds,
        ]),
        Section("Learned methods", [
            HOW_LEARNED[name], *(learned or ["No training was run."])
        ]),
        Section("Best, bound and expert", [
            "No placement of the graph on the machine takes less time than the bound, whatever is "
            "known of it. Best is the least of all methods that do not learn.",
            bounds if bounds.rows else "Not yet run.",
        ]),
        Section("Ops and groups", [
            "A group is what is placed together. The paper counts ops of TensorFlow, ours are ops "
            "of ATen, an optimizer's update of one parameter being one op.",
            _sizes(results),
        ]),
        Section("Which of the paper's orderings hold", [
            "Two columns within 2 % of each other are as fast. Of a learned method the training of "
            "the median counts. Nothing was tuned to make an ordering hold.",
            *(Section(case.title, [_of_column(c.name, [c.orderings]) for c in case.columns])
              for case in shown),
            *missing,
        ]),
        Section("Placements and loads", [
            "Each plan as a picture: rows are modules, cells groups of ops in the order of the "
            "data, colours devices; thin lines are the largest tensors between devices. Below it "
            "the seconds that each device computes, and that the busiest channels carry.",
            *(Section(case.title, [_of_column(c.name, c.plans) for c in case.columns], "closed")
              for case in shown),
            *missing,
        ]),
        Section("All methods", [
            *(Section(case.title, [_of_column(c.name, [c.methods]) for c in case.columns], "closed")
              for case in shown),
            *missing,
        ]),
    ]  # fmt: skip
    # Towers and curves are RL17's; another paper has the sections only if it has figures for them.
    is_rl17 = name == "rl17"
    if is_rl17 or towers:
        parts.append(Section("Data-parallel towers", _towers(towers, curves)))
    if is_rl17 or curves:
        parts.append(Section("Loss against simulated time", _curves(curves)))
    not_given = "Sizes and choices that the paper does not give; these are ours."
    return render_page(
        Page(
            f"{name.upper()}'s table of device placement, and ours",
            _cards(results, shown),
            [
                *parts,
                Section("The machine, and how it was fitted", _fit(name, cases)),
                Section(
                    "What the paper does not say",
                    [not_given, Table(("row", "ours"), ours, "scroll left")]
                    if ours
                    else ["The paper gives all sizes."],
                ),
                Section("How this was made", [_facts(name, rows, facts)]),
            ],
            brand="python -m reproductions",
            lead=[CITATIONS[name]],
            more_style=STYLE.read_text("utf-8"),
        )
    )


def _of_column(name: str, parts: Sequence[Part]) -> Section:
    """What belongs to one of our columns; the hypothesis is set apart."""
    title = COLUMN_TITLES.get(name, name).capitalize()
    return Section(title, parts, style="hypothesis-box" if name == HYPOTHESIS else "")


def _cards(results: _TableResults, shown: Sequence[_CaseShown]) -> list[Card]:
    """The cards: how many rows are done, how many orderings hold, how far our best plans are from
    the expert's and from the bound, and what learned methods reached."""
    cards = [("rows", f"{len(results.done)} of {len(results.cases)}", "those that are done")]
    for name in results.columns:
        outcomes = [
            holds
            for case in shown
            for column in case.columns
            if column.name == name
            for holds in column.holds
            if holds is not None
        ]
        if outcomes:
            label = f"orderings that hold, {COLUMN_TITLES.get(name, name)}"
            figure = f"{sum(outcomes)} of {len(outcomes)}"
            cards.append((label, figure, "the paper's, in our figures"))
    plain = [row.columns[PLAIN] for _, row in results.done if PLAIN in row.columns]
    gains = [gain for column in plain if (gain := _gain_over_expert(column)) is not None]
    mean = tables.geometric_mean(gains)
    if mean is not None:
        remark = f"geometric mean of {len(gains)} rows, {min(gains):.2f} to {max(gains):.2f}"
        cards.append(("best over expert", f"{mean:.2f} x", remark))
    gaps = [gap for column in plain if (gap := _gap(column)) is not None]
    if gaps:
        label = f"within {100 * NEAR_BOUND:.0f} % of the bound"
        figure = f"{sum(gap <= NEAR_BOUND for gap in gaps)} of {len(gaps)}"
        cards.append((label, figure, f"rows; {100 * min(gaps):.1f} % to {100 * max(gaps):.1f} %"))
    return [*cards, *tables.verdicts(results.name, results.done)]


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


def _step_or(seconds: float | None, text: str) -> str:
    """The seconds of a step as text; `text` if there are none."""
    return text if seconds is None else format_step(seconds)


def _seconds_lines(results: _TableResults, case: Case) -> list[tuple[str, list[str]]]:
    """(style, cells) of the lines of a row: the paper's, and below it one for each of our
    columns."""
    names = results.paper_columns
    lines = [("paper", [case.title, *(_paper_cell(case, name) for name in names), "", "", ""])]
    row = results.rows.get(case.key)
    if row is None:
        return [*lines, ("ours", [NOT_RUN, *[""] * (len(names) + 3)])]
    for column_name, column in row.columns.items():
        title = COLUMN_TITLES.get(column_name)
        cells = [_our_cell(case, column, name) for name in names]
        style = f"ours {column_name}" if column_name == HYPOTHESIS else "ours"
        head = f"ours, {title}" if title else column_name
        lines.append((style, [head, *cells, *_last_cells(column)]))
    return lines


def _paper_cell(case: Case, name: str) -> str:
    """The seconds that the paper prints in this column, and how long it searched."""
    if case.published is None or name not in case.published.seconds:
        return "-"
    text = format_step(case.published.seconds[name])
    hours = case.published.hours.get(name)
    return remarked(text, f"search: {hours}") if hours else text


def _our_cell(case: Case, column: Column, name: str) -> str:
    """Our seconds for a column of the paper, with their ratio to the paper's."""
    method = METHOD_OF[name]
    result = column.methods.get(method)
    if result is None or result.seconds is None:
        return _why_missing(result)
    published = case.published.seconds.get(name) if case.published else None
    remarks = [f"{result.seconds / published:.2f} x"] if published else []
    runs = column.learned.get(method, ())
    if len(runs) > 1:
        remarks.append(format_span(runs))
    published_mode = column.methods.get(AS_PUBLISHED.get(method, ""))
    if published_mode is not None:
        remarks.append(f"as published {format_step(published_mode.seconds)}")
    return remarked(format_step(result.seconds), *remarks)


def _why_missing(result: MethodResult | None) -> str:
    """A word on why a method has no seconds."""
    if result is None:
        return NOT_RUN
    return OOM if is_oom(result) else "none"


def _last_cells(column: Column) -> list[str]:
    """The last cells of a line: best of ours, bound, expert over best."""
    best = _seconds_of(column, column.best)
    if best is None:
        return ["nothing fits", format_step(column.bound), ""]
    gain, gap = _gain_over_expert(column), _gap(column)
    return [
        remarked(format_step(best), column.best),
        remarked(format_step(column.bound), *([] if gap is None else [f"{100 * gap:+.0f} %"])),
        "" if gain is None else f"{gain:.2f} x",
    ]


def _bounds(results: _TableResults) -> Table:
    """The table of best, bound and expert of every row and column, with what proves the bound."""
    rows = []
    for case, row in results.done:
        for name, column in row.columns.items():
            best, expert = _seconds_of(column, column.best), _seconds_of(column, EXPERT)
            gap, gain = _gap(column), _gain_over_expert(column)
            rows.append((
                f"{case.title}, {COLUMN_TITLES.get(name, name)}",
                column.best or "nothing fits",
                _step_or(best, "-"),
                format_step(column.bound),
                "" if gap is None else f"{100 * gap:.1f} %",
                _step_or(expert, _why_missing(column.methods.get(EXPERT))),
                "" if gain is None else f"{gain:.2f} x",
                column.proof,
            ))  # fmt: skip
    head = ("row", "best method", "best", "bound", "above the bound", "expert", "expert over best",
            "the bound is proven by")  # fmt: skip
    return Table(head, rows)


def _sizes(results: _TableResults) -> Table:
    """The table of sizes: ops and groups beside the paper's. Each network stands once."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for case in results.cases:
        published, row = case.published, results.rows.get(case.key)
        counts = (published.ops, published.groups) if published else (None, None)
        paper_ops, paper_groups = (f"{n:,}" if n is not None else "not given" for n in counts)
        ops, groups, flops, parameters = NOT_RUN, "", "", ""
        if row is not None:
            ops, groups = f"{row.ops:,}", f"{row.groups:,}"
            flops = format_count(row.flops, "FLOP")
            parameters = format_bytes(row.parameter_bytes)
        # One network has a row for each number of GPUs, and its first row stands for all of them.
        title = case.title.removesuffix(f", {case.gpus} GPUs")
        cells = (title, paper_ops, ops, paper_groups, groups, flops, parameters,
                 f"{case.model} --train {case.train}")  # fmt: skip
        rows.setdefault((case.model, case.train), cells)
    head = ("network", "ops, paper", "ops, ours", "groups, paper", "groups, ours", "of a step",
            "parameters", "MODEL")  # fmt: skip
    return Table(head, list(rows.values()))


# ---- Rows that are done: orderings, plans, methods ----


def _shown_case(results: _TableResults, case: Case, row: CaseResult) -> _CaseShown:
    machine = machine_of(case)
    to_train, trained = LEARNED[results.name], trained_columns(case, row.columns)
    columns = []
    for name, column in row.columns.items():
        orderings = orderings_of(case, row, name, machine)
        lines = [
            (
                ordering.statement,
                ordering.published,
                ordering.found,
                OUTCOMES[ordering.holds],
                ordering.why,
            )
            for ordering in orderings
        ]
        head = ("the paper's ordering", "its seconds", "ours", "holds", "why, or a remark")
        plans: list[Part] = [_shown_plan(case, column, method) for method in column.shown]
        columns.append(
            _ColumnShown(
                name,
                [ordering.holds for ordering in orderings],
                Table(head, lines, "scroll why") if lines else "The paper has no figures to order.",
                plans or ["No plan fits."],
                _method_table(column, to_train if name in trained else ()),
            )
        )
    return _CaseShown(case.title, columns)


def _shown_plan(case: Case, column: Column, method: str) -> Figures:
    """A plan's picture and the chart of its loads."""
    work = column.shown[method]
    role = "expert" if method == EXPERT else f"best: {method}"
    if method == column.best == EXPERT:
        role = "expert, which is the best"
    seconds = _step_or(_seconds_of(column, method), OOM)
    runs = column.learned.get(method, ())
    if runs:  # what is drawn is the best of the trainings, while the tables have their median
        role = f"learned: {method}"
        role += f", best of {len(runs)} trainings" if len(runs) > 1 else ""
        seconds = format_step(tables.span(runs)[0])
    chart = load_chart(work, f"{case.title}, {role}: seconds by device and channel")
    caption = Markup("<b>{}</b>, {} a step").format(role, seconds)
    return Figures([Figure(caption, drawing(work.picture) + chart)])


def _method_table(column: Column, learned: Sequence[str]) -> Table:
    """The table of methods: seconds, memory, and how long each searched."""
    best = _seconds_of(column, column.best)
    rows = []
    for method, result in column.methods.items():
        peaks = result.peak_memory_bytes
        fullest = max(peaks, key=lambda name: peaks[name], default="")
        ratio = f"{result.seconds / best:.3f} x" if best and result.seconds is not None else ""
        rows.append((
            method + (" (best)" if method == column.best else ""),
            _step_or(result.seconds, _why_missing(result)),
            ratio,
            f"{format_bytes(peaks[fullest])} on {fullest}" if fullest else "",
            format_seconds(result.search_seconds),
            result.reason,
        ))  # fmt: skip
    rows += [(name, NOT_RUN, "", "", "", "") for name in learned if name not in column.methods]
    head = ("method", "seconds of a step", "to the best", "fullest device", "search took", "")
    return Table(head, rows)


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
    pitch = BAR_HEIGHT + BAR_SPACING
    drawn = "".join(_bar(label, parts, scale, i * pitch) for i, (label, parts) in enumerate(bars))
    keys = "".join(
        f'<li><i class="{kind}"></i>{kind}</li>'
        for kind in (*of_phases, *(["transfer"] if channels else []))
    )
    return Markup(
        f'<svg class="load" viewBox="0 0 {CHART_WIDTH:.0f} {len(bars) * pitch:.0f}" role="img" '
        f'aria-label="{escape(description)}">{drawn}</svg><ul class="key">{keys}</ul>'
    )


def _bar(label: str, parts: Sequence[tuple[str, float]], scale: float, y: float) -> str:
    """The SVG of one bar: its label, its parts side by side, and the sum of their seconds."""
    pieces, x = [], LABELS_WIDTH
    for kind, seconds in parts:
        if seconds > 0:
            width = max(seconds * scale, 0.5)
            pieces.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" '
                f'height="{BAR_HEIGHT:.0f}"><title>{kind}: {format_seconds(seconds)}</title></rect>'
            )
            x += width
    total = format_seconds(sum(seconds for _, seconds in parts))
    text_y = f"{y + TEXT_BASELINE:.1f}"
    return (
        f'<text x="{LABELS_WIDTH - 8:.0f}" y="{text_y}" text-anchor="end">{escape(label)}</text>'
        f'{"".join(pieces)}<text x="{x + 6:.1f}" y="{text_y}">{total}</text>'
    )


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
        times, losses = _smoothed(curve)
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


def _smoothed(curve: LossCurve) -> tuple[np.ndarray, np.ndarray]:
    """(times, losses) [steps]: the time at which each step begins, and the mean loss of up to
    `SMOOTHED_STEPS` steps that end with it."""
    losses = np.array(curve.losses, dtype=np.float64)
    # The mean of a run of steps is a difference of two sums from the first step on.
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    last = np.arange(1, len(losses) + 1)
    first = np.maximum(last - SMOOTHED_STEPS, 0)
    return curve.step_seconds * (last - 1), (sums[last] - sums[first]) / (last - first)


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
    """The towers' steps, and sentences that compare them with planned steps."""
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
    table: Part = Table(head, rows) if rows else "Not yet run."
    return [TOWERS_TEXT, table, *_against_towers(curves)]


def _against_towers(curves: Sequence[LossCurve]) -> Iterator[str]:
    """Yield sentences that repeat the paper's comparisons with our seconds: the step of all
    examples (planned, learned, and the expert's) and asynchronous towers, each against synchronous
    ones."""
    step_seconds: dict[str, dict[str, float]] = {}  # title -> name of the curve -> seconds
    for curve in curves:
        step_seconds.setdefault(curve.title, {})[curve.name] = curve.step_seconds
    for title, seconds in step_seconds.items():
        if SYNCHRONOUS not in seconds:
            continue
        for name in ("planned", *LEARNED["rl17"], EXPERT, ASYNCHRONOUS):
            if name in seconds:
                change = 100 * (1 - seconds[name] / seconds[SYNCHRONOUS])
                yield (
                    f"{title}, ours: a step of {'' if name == ASYNCHRONOUS else 'all examples, '}"
                    f"{name}, takes {format_seconds(seconds[name])}, {abs(change):.1f} % "
                    f"{'less' if change >= 0 else 'more'} than synchronous towers."
                )


def _against_experts(curves: Sequence[LossCurve]) -> Iterator[str]:
    """Yield sentences that compare the steps of a network with those of each of its experts."""
    seconds = {curve.name: curve.step_seconds for curve in curves}
    for expert in (EXPERT, APART):
        for name in ("planned", *LEARNED["rl17"]):
            if {expert, name} <= seconds.keys():
                change = 100 * (1 - seconds[name] / seconds[expert])
                yield (
                    f"A step of {name} takes {abs(change):.1f} % "
                    f"{'less' if change >= 0 else 'more'} than that of the {expert}."
                )


def _curves(curves: Sequence[LossCurve]) -> list[Part]:
    """The training curves of each network, with a table and sentences if any was run."""
    parts: list[Part] = []
    for title in dict.fromkeys(curve.title for curve in curves):
        of_network = [curve for curve in curves if curve.title == title]
        usable = _usable(of_network)
        compared = " ".join([*_against_experts(usable), _convergence(usable)]).strip()
        of_title: list[Part] = [loss_chart(of_network, f"{title}: loss")]
        of_title += [_losses(usable)] if usable else []
        parts.append(Section(title, [*of_title, *([compared] if compared else [])]))
    return [CURVES_TEXT, *(parts or ["Not yet run."])]


def _losses(curves: Sequence[LossCurve]) -> Table:
    """The table of the curves: each one's loss when the first curve ends, and at its own end."""
    end = _shared_seconds(curves)
    rows = []
    for curve in curves:
        # The steps that this curve has done by then, at least one; a quotient that is a whole
        # number may come out slightly less.
        steps = math.floor(end / curve.step_seconds * (1 + 1e-9))
        steps = min(len(curve.losses), max(1, steps))
        rows.append((
            curve.name,
            format_seconds(curve.step_seconds),
            f"{steps:,}",
            f"{_last_mean(curve.losses[:steps]):.3f}",
            f"{_last_mean(curve.losses):.3f}",
            f"{len(curve.losses):,}",
        ))  # fmt: skip
    head = ("", "seconds of a step", f"steps in {format_seconds(end)}", "loss then",
            "loss after all steps", "all steps")  # fmt: skip
    return Table(head, rows)


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
    """Which rates of the machines were fitted, the residuals, and the table's largest machine."""
    fit = _fit_of(name)
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
    if largest is not None:
        machine = parse_machine(largest.machine)
        parts.append(Section(machine.name, _rates(machine)))
    return parts


def _fit_of(name: str) -> dict[str, Any]:
    """A paper's entry in the file of fits; {} if there is none that can be read."""
    try:
        fits = json.loads(FITTED.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    fit = fits.get(name) if isinstance(fits, dict) else None
    return fit if isinstance(fit, dict) else {}


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
    rows = [
        (
            str(figure["model"]),
            str(figure["machine"]),
            str(figure["column"]),
            format_seconds(figure["published_seconds"]),
            format_seconds(figure["simulated_seconds"]),
            f"{figure['simulated_seconds'] / figure['published_seconds']:.3f} x",
        )
        for figure in figures
    ]
    head = ("network", "machine", "column", "paper", "simulated", "ratio")
    return [text, Table(head, rows)]


def _rates(machine: Machine) -> list[Table]:
    """The tables of a machine's rates: a line for each model of device, and one for each pair of
    models that links join, with the rates of the last of these links."""
    models = {device.model: device for device in machine.devices}
    counts = {model: sum(d.model == model for d in machine.devices) for model in models}
    rows = [
        (
            f"{counts[model]} x {model}",
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
    head = ("device", "memory", "peak", "reached", "memory bandwidth", "per op")
    model_of = {device.name: device.model for device in machine.devices}
    links = {
        f"{model_of[link.source]} to {model_of[link.destination]}": (
            format_bandwidth(link.bandwidth_bytes_per_second),
            format_seconds(link.latency_seconds),
        )
        for link in machine.links
    }
    link_rows = [(name, *rates) for name, rates in links.items()]
    return [Table(head, rows), Table(("link", "bandwidth", "latency"), link_rows)]


def _facts(name: str, rows: Sequence[CaseResult], facts: Sequence[tuple[str, str]]) -> Table:
    """The table of facts on the run: the command, and how long the rows took."""
    lines = dict(facts) or {"command": f"python -m reproductions {name}"}
    row_seconds = sum(row.seconds for row in rows)
    lines["all rows together"] = f"{format_seconds(row_seconds)} of computing, captures included"
    return Table((), list(lines.items()), "facts")
