"""Draws the page about training runs: several rules side by side, or one run alone.

    cards       runs, the best figure, the run that was first at the level that all reached
    learning    figures against time and samples
    asynchrony  staleness, implicit momentum, temporal efficiency
    workers     a timeline of each worker, with its events

The page has no script.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.reports.markup import Card, PageTable, render_page, save_page
from dovetail.reports.plots import COLOURS, Axes, Line, averaged, bar_chart, line_chart, ticks
from dovetail.training import analysis
from dovetail.training.history import Column, History, common_level, events_of, lower_is_better
from dovetail.training.records import Event
from dovetail.units import format_count, format_seconds

Floats = NDArray[np.float64]

MOST_FIGURES, MOST_EVENTS, MOST_BINS, MOST_ROWS = 6, 200, 40, 64
"""The page shows at most this many figures, events, bins of a histogram, and rows of workers."""
MOST_REASONS = 40
"""The page lists at most this many reasons for refused commits, the most frequent first."""
TRAINING_LOSS = "training loss"
"""The name under which the commits' loss is charted."""
MOST_RUNS = 40
"""A page shows at most this many runs: more could not be told apart in one chart."""


@dataclass(frozen=True, eq=False)
class ShownRun:
    """A run on the page. Its number, which counts from 0, chooses its colour. Its times are since
    its first step, `start_up_seconds` after its start."""

    number: int
    label: str
    history: History
    start_up_seconds: float

    @property
    def head(self) -> Markup:
        """The label after the run's colour."""
        return Markup('<i class="c{}"></i>{}').format(self.number % COLOURS, self.label)


@dataclass(frozen=True, eq=False)
class _LearningCurve:
    """One figure of one run: at so many seconds and samples it had this value, [points] each."""

    run: ShownRun
    seconds: Column
    samples: Column
    values: Column


@dataclass(frozen=True, eq=False)
class _WorkerTimes:
    """The timeline and table of a run's workers; the title is "" if the page has one run alone."""

    title: str
    chart: Markup
    table: PageTable


@dataclass(frozen=True, eq=False)
class _ShownEvents:
    """The events of all runs.

    counts     the number of events of each kind in each run
    refusals   the reasons for which commits were refused; None if none was
    listed     every event, folded under `summary`
    """

    counts: PageTable
    refusals: PageTable | None
    summary: str
    listed: PageTable


def write_training_page(
    histories: Sequence[History], path: str | os.PathLike[str], *, made: str = ""
) -> None:
    """Write the page of these runs, in their order, to `path`, whole or not at all.

    made   the command that made the page

    Raises `UnwritableError`, and `UsageError` for no run or more than `MOST_RUNS`.
    """
    save_page(render_training(histories, made=made), path)


def render_training(histories: Sequence[History], *, made: str = "") -> str:
    """The page as text. O(commits), but what is drawn of a run is bounded. Times are since the
    first step of each run."""
    if not 0 < len(histories) <= MOST_RUNS:
        raise UsageError("histories", f"there are {len(histories)}; a page shows 1 to {MOST_RUNS}")
    runs = [
        ShownRun(i, label, history.from_first_step(), history.start_up_seconds)
        for i, (label, history) in enumerate(zip(_labels(histories), histories, strict=True))
    ]
    staleness_charts, staleness_table = _staleness_section(runs)
    momentum_chart, momentum_table = _momentum_section(runs)
    return render_page(
        "training.html",
        "Training by " + ", ".join(dict.fromkeys(run.history.name for run in runs)),
        _cards(runs),
        styles=("page.css", "training.css"),
        runs=_runs_table(runs),
        learning=_learning_charts(runs),
        efficiency=_efficiency_table(runs),
        efficiency_figure=_main_figure(runs),
        staleness_charts=staleness_charts,
        staleness=staleness_table,
        momentum_chart=momentum_chart,
        momentum=momentum_table,
        workers=_worker_sections(runs),
        events=_events_section(runs),
        command=PageTable((), [("command", made)], "scroll facts") if made else None,
        run_facts=[(run.label, PageTable((), run.history.facts(), "scroll facts")) for run in runs],
    )


def _labels(histories: Sequence[History]) -> list[str]:
    """[runs] a label for each run: its name. If two names are equal, all get the number of workers
    and the window, and those that are still equal a number."""
    names = [history.name for history in histories]
    if len(set(names)) < len(names):
        names = [
            f"{history.name}, {history.workers} workers, window {history.of_job('window')}"
            for history in histories
        ]
    return [
        f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _cards(runs: Sequence[ShownRun]) -> list[Card]:
    """The cards at the top of the page."""
    samples = sum(run.history.outcome.samples for run in runs)
    cards = [("runs", str(len(runs)), f"{format_count(samples)} samples in all")]
    figure = _main_figure(runs)
    if figure is not None:
        sign = -1 if lower_is_better(figure) else 1
        bests = [(best.figures[figure], run) for run in runs
                 if (best := run.history.best(figure)) is not None]  # fmt: skip
        if bests:
            value, best_run = max(bests, key=lambda pair: sign * pair[0])
            cards.append((f"best {figure}", f"{value:.4g}", f"by {best_run.label}"))
        cards += _fastest(runs, figure)
    if len(runs) == 1:
        history = runs[0].history
        cards.append(("staleness", _number(history.staleness.mean), f"mean; n - 1 is "
                      f"{history.workers - 1}"))  # fmt: skip
        start = format_seconds(runs[0].start_up_seconds)
        cards.append(("took", format_seconds(history.outcome.seconds),
                      f"{len(history):,} commits; start-up {start}"))  # fmt: skip
    counts = Counter(event.kind for run in runs for event in run.history.outcome.events)
    restarted = f"{counts['restarted'] + counts['server_restarted']} restarted"
    cards.append(
        ("workers lost", str(counts["lost"]), f"{restarted}, {counts['refused']} refusals")
    )
    return cards


def _fastest(runs: Sequence[ShownRun], figure: str) -> list[Card]:
    """The card of the run that was first at the level that all runs reached; none if there is no
    such level or one run alone."""
    level = common_level([run.history for run in runs], figure)
    if level is None or len(runs) < 2:
        return []
    # Of runs that were equally fast, the one with the lowest number counts.
    times = [(seconds, run.number, run.label) for run in runs
             if (seconds := run.history.seconds_to(figure, level)) is not None]  # fmt: skip
    seconds, _, label = min(times)
    return [(f"fastest to {figure} {level:.4g}", format_seconds(seconds), f"by {label}")]


def _main_figure(runs: Sequence[ShownRun]) -> str | None:
    """The figure by which runs are compared: the first one that should be large, such as an
    accuracy, else the first one; None if there is none."""
    names = _figures(runs)
    return next((name for name in names if not lower_is_better(name)), names[0] if names else None)


def _figures(runs: Sequence[ShownRun]) -> list[str]:
    """Names of all figures of all runs, in order of first appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.history.figures))


def _runs_table(runs: Sequence[ShownRun]) -> PageTable:
    """The table of runs: a row for each with its settings, its best figures and its staleness."""
    figures = _figures(runs)[:MOST_FIGURES]
    main = _main_figure(runs)
    level = None
    if main is not None and len(runs) > 1:
        level = common_level([run.history for run in runs], main)
    to_level = [] if level is None else [f"to {main} {level:.4g}"]
    titles = ["run", "backend", "workers", "window", "batch", "commits", "samples", "time",
              *(f"best {name}" for name in figures), *to_level, "staleness", "ended"]  # fmt: skip
    rows = []
    for run in runs:
        history = run.history
        bests = [history.best(name) for name in figures]
        counts = [history.of_job(field) for field in ("window", "batch")]
        times = []
        if main is not None and level is not None:
            seconds = history.seconds_to(main, level)
            times = ["-" if seconds is None else format_seconds(seconds)]
        rows.append([
            run.head, history.backend or "-", str(history.workers),
            *("-" if count is None else f"{count:,}" for count in counts),
            f"{len(history):,}", f"{history.outcome.samples:,}",
            format_seconds(history.outcome.seconds),
            *(f"{best.figures[name]:.4g}" if best else "-"
              for name, best in zip(figures, bests, strict=True)),
            *times, _number(history.staleness.mean), _ending(history),
        ])  # fmt: skip
    return PageTable(titles, rows)


def _ending(history: History) -> str:
    """A word or two on how a run ended."""
    if history.divergence is not None:
        return "diverged"
    if history.outcome.meta.get("failed"):
        return "failed"
    if history.interrupted:
        return "interrupted"
    return "stopped early" if history.outcome.stopped else "done"


def _learning_charts(runs: Sequence[ShownRun]) -> list[Markup]:
    """Charts of each figure, then of the commits' loss, against time and against samples."""
    charted = [
        (figure, [_LearningCurve(run, *run.history.curve(figure)) for run in runs])
        for figure in _figures(runs)[:MOST_FIGURES]
    ]
    losses = []
    for run in runs:
        columns = run.history.columns
        seconds, means = averaged(columns["seconds"], columns["loss"])
        samples, _ = averaged(columns["seen"], columns["loss"])
        losses.append(_LearningCurve(run, seconds, samples, means))
    charted.append((TRAINING_LOSS, losses))
    return [
        _learning_chart(figure, curves, against)
        for figure, curves in charted
        for against in ("time", "samples")
    ]


def _learning_chart(figure: str, curves: Sequence[_LearningCurve], against: str) -> Markup:
    """The chart of one figure of all runs against "time" or "samples"."""
    by_time = against == "time"
    lines = [
        Line(
            curve.run.label,
            (curve.seconds if by_time else curve.samples).astype(np.float64),
            curve.values,
            curve.run.number,
        )
        for curve in curves
        if len(curve.values)
    ]
    format_x = format_seconds if by_time else format_count
    return line_chart(lines, Axes(f"{figure} against {against}", format_x, _ceiling(figure, lines)))


def _ceiling(figure: str, lines: Sequence[Line]) -> float:
    """The top of a figure's chart. A figure that should be small is cut at three times the largest
    first value: a loss that grows without end would hide all other lines."""
    if not (lower_is_better(figure) and lines):
        return math.inf
    finite = [line.y[np.isfinite(line.y)] for line in lines]
    largest = max((float(values[0]) for values in finite if len(values)), default=0.0)
    return 3 * largest if largest > 0 else math.inf


def _efficiency_table(runs: Sequence[ShownRun]) -> PageTable | None:
    """The table of the temporal efficiency E(row, column) of the main figure, for all pairs of
    runs; None if there is no figure that should be large, or less than two runs to compare."""
    figure = _main_figure(runs)
    if figure is None or lower_is_better(figure):
        return None
    curves = {run.number: run.history.curve(figure) for run in runs}
    compared = [run for run in runs if _usable(curves[run.number])]
    if len(compared) < 2:
        return None
    rows = []
    for a in compared:
        cells: list[str] = [a.head]
        for b in compared:
            (a_seconds, _, a_values), (b_seconds, _, b_values) = curves[a.number], curves[b.number]
            ratio = analysis.temporal_efficiency(
                a_seconds.tolist(), a_values.tolist(), b_seconds.tolist(), b_values.tolist()
            )
            text = _number(ratio)
            cells.append(Markup("<b>{}</b>").format(text) if a is not b and ratio > 1 else text)
        rows.append(cells)
    return PageTable(["", *(run.label for run in compared)], rows)


def _usable(curve: tuple[Column, Column, Column]) -> bool:
    """Whether a (seconds, samples, values) curve has an integral over time."""
    seconds, _, values = curve
    return bool(len(seconds) and seconds[-1] > 0 and np.isfinite(values).all())


def _staleness_section(runs: Sequence[ShownRun]) -> tuple[list[Markup], PageTable]:
    """(charts, table): a histogram of the staleness of each run, and its statistics."""
    charts, rows = [], []
    for run in runs:
        history = run.history
        stats = history.staleness
        # As in `analysis.staleness`: the first commits all start from the same center, which says
        # nothing about the run.
        values = history.columns["staleness"][history.workers :]
        rows.append([run.head, f"{stats.commits:,}", str(history.workers - 1),
                     *map(_number, (stats.mean, stats.p50, stats.p95, stats.max))])  # fmt: skip
        if len(values):
            counts, labels = histogram(values)
            axes = Axes(f"{run.label}: commits by staleness")
            charts.append(bar_chart(counts, labels, axes, run.number))
    return charts, PageTable(("run", "commits", "n - 1", "mean", "p50", "p95", "max"), rows)


def histogram(values: Column) -> tuple[list[float], list[str]]:
    """(counts, labels) of at most `MOST_BINS` equally wide bins from 0 on."""
    # -(-a // b) rounds up.
    width = -(-(int(values.max()) + 1) // MOST_BINS)
    counts = np.bincount(values // width)
    labels = [
        str(i) if width == 1 else f"{i * width}-{(i + 1) * width - 1}" for i in range(len(counts))
    ]
    return counts.astype(float).tolist(), labels


def _momentum_section(runs: Sequence[ShownRun]) -> tuple[Markup, PageTable]:
    """(chart, table) of implicit momentum: the estimates along each run, and their medians."""
    lines, rows = [], []
    for run in runs:
        history = run.history
        is_finite = np.isfinite(history.columns["momentum"])
        estimates = history.columns["momentum"][is_finite]
        middle_half = "-"
        if len(estimates):
            low, high = np.percentile(estimates, [25, 75])
            middle_half = f"{_number(low)} to {_number(high)}"
            x, y = averaged(history.columns["seen"][is_finite].astype(np.float64), estimates)
            lines.append(Line(run.label, x, y, run.number))
            ends = np.array([0.0, float(x[-1])])
            expected = np.full(2, history.expected_momentum)
            lines.append(Line("1 - 1/n", ends, expected, run.number, dashed=True))
        rows.append([run.head, str(history.workers), _number(history.momentum), middle_half,
                     _number(history.expected_momentum)])  # fmt: skip
    axes = Axes("implicit momentum against samples; dashed: 1 - 1/n", top=1.5, bottom=-1.0)
    titles = ("run", "n", "median estimate", "middle half", "1 - 1/n")
    return line_chart(lines, axes) if lines else Markup(""), PageTable(titles, rows)


def _worker_sections(runs: Sequence[ShownRun]) -> list[_WorkerTimes]:
    """The timeline of each run, and a table of its workers."""
    return [
        _WorkerTimes(
            run.label if len(runs) > 1 else "", timeline(run.history), _worker_table(run.history)
        )
        for run in runs
    ]


def _worker_table(history: History) -> PageTable:
    """A row for each worker: what it did, the shares of its time, and its staleness."""
    _, of_worker = analysis.staleness(history.outcome.rows, history.workers)
    counts = {kind: Counter(event.worker for event in events_of(history.outcome, kind))
              for kind in ("lost", "restarted", "refused")}  # fmt: skip
    # [commits] the index of the lane of each commit's worker: lanes are sorted by worker, too.
    ranks = np.unique(history.columns["worker"], return_inverse=True)[1]
    samples = np.bincount(ranks, weights=history.columns["samples"]).tolist()
    rows = []
    for lane, count in zip(lanes_of(history), samples, strict=True):
        total = float(lane.answers[-1] - lane.begins[0])
        shares = [lane.seconds_of(kind) / total if total > 0 else math.nan for kind in KINDS]
        tau = of_worker.get(lane.worker)
        stats = (tau.mean, tau.p50, tau.p95, tau.max) if tau else (math.nan,) * 4
        rows.append([f"worker {lane.worker}", f"{len(lane.begins):,}", f"{count:,.0f}",
                     *(f"{100 * share:.0f} %" if math.isfinite(share) else "-"
                       for share in shares),
                     *map(_number, stats),
                     *(str(of_kind[lane.worker]) for of_kind in counts.values())])  # fmt: skip
    titles = ("worker", "commits", "samples", *KINDS, "staleness", "p50", "p95", "max",
              "lost", "restarted", "refused")  # fmt: skip
    return PageTable(titles, rows[:MOST_ROWS])


def _events_section(runs: Sequence[ShownRun]) -> _ShownEvents | None:
    """The section of events: counts, reasons of refused commits, and each event. None if there was
    no event."""
    happened = [(run, event) for run in runs for event in run.history.outcome.events]
    if not happened:
        return None
    kinds = list(dict.fromkeys(event.kind for _, event in happened))
    counts = Counter((run.number, event.kind) for run, event in happened)
    count_rows = [[run.head, *(f"{counts[run.number, kind]:,}" for kind in kinds)] for run in runs]
    reasons = Counter((run.number, event.detail) for run in runs
                      for event in events_of(run.history.outcome, "refused"))  # fmt: skip
    refusals = [
        [runs[number].label, reason, f"{count:,}"]
        for (number, reason), count in reasons.most_common(MOST_REASONS)
    ]
    listed = [[run.label, format_seconds(event.seconds), _who(event), _what(event),
               Markup("<pre>{}</pre>").format(event.detail[:4000])]
              for run, event in happened[:MOST_EVENTS]]  # fmt: skip
    cut = f" (the first {MOST_EVENTS:,})" if len(happened) > MOST_EVENTS else ""
    return _ShownEvents(
        PageTable(["run", *(kind.replace("_", " ") for kind in kinds)], count_rows),
        PageTable(("run", "refused because", "commits"), refusals, "scroll left")
        if refusals
        else None,
        f"all {len(happened):,}{cut}",
        PageTable(("run", "time", "who", "what", "detail"), listed, "scroll left"),
    )


def _who(event: Event) -> str:
    return "server" if event.worker < 0 else f"worker {event.worker}"


def _what(event: Event) -> str:
    return event.kind.replace("_", " ")


def _number(value: float) -> str:
    """The number; "-" if it is not finite."""
    return f"{value:.3g}" if math.isfinite(value) else "-"


# ---- What each worker did when, as inline SVG ----
#
#     worker 0   ███▒░███▒░███▒░███▒░        compute, exchange, wait
#     worker 1   ███▒░███▒✕    ▲███▒░        ✕ lost, ▲ joined again
#
# Compute is from a window's first step to its last. Exchange is from there to the server's answer;
# with rules that gather it includes the wait for the other workers. Wait is the rest, from an
# answer to the next window. A run of many commits is drawn as shares of equal pieces of time
# instead of spans.

WIDTH, LABEL_WIDTH, RIGHT_MARGIN = 1100.0, 84.0, 20.0
"""The chart has this width in pixels, of which so many are left for the labels of the lanes and
beyond the end of the run."""
LANE_HEIGHT, GAP, BASELINE = 16.0, 5.0, 12.0
"""Pixels: the height of a lane, the gap below it, and where the base line of its text lies in
it."""
LEAST_WIDTH = 0.2
"""A span is drawn at least so many pixels wide, or it could not be seen."""
MOST_WORKERS, MOST_SPANS, MOST_MARKS = 40, 3000, 200
"""At most this many workers have a lane and this many events a mark. A run with more spans than
`MOST_SPANS` is drawn as shares."""
PIECES = 300
"""Shares are drawn for this many equal pieces of time."""
KINDS = ("compute", "exchange", "wait")
"""What a worker does, in the order in which the page names it; also classes of the page's style."""
MARKS = {"lost": "✕", "restarted": "▲", "joined": "▲", "refused": "!"}
"""Kind of an event -> its sign in the worker's lane. Events of other kinds have no sign there."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One worker's windows in order. begins, ends, answers [windows]: seconds of the first step, of
    the last one, and of the server's answer. Each window is answered before the next begins."""

    worker: int
    begins: Floats
    ends: Floats
    answers: Floats

    def seconds_of(self, kind: str) -> float:
        """The seconds of all spans of one kind. Waiting before the first window and after the last
        answer does not count."""
        if kind == "compute":
            return float((self.ends - self.begins).sum())
        if kind == "exchange":
            return float((self.answers - self.ends).sum())
        return float((self.begins[1:] - self.answers[:-1]).sum())

    def spans_of(self, kind: str) -> tuple[Floats, Floats]:
        """(starts, ends) of the worker's spans of one kind."""
        if kind == "compute":
            return self.begins, self.ends
        if kind == "exchange":
            return self.ends, self.answers
        return self.answers[:-1], self.begins[1:]


def timeline(history: History) -> Markup:
    """The chart of the lanes of up to `MOST_WORKERS` workers, with marks for events."""
    lanes = lanes_of(history)
    if not lanes:
        return Markup("<p>No commit was recorded.</p>")
    shown = lanes[:MOST_WORKERS]
    last_event = max((event.seconds for event in history.outcome.events), default=0.0)
    last_answer = max(float(lane.answers[-1]) for lane in lanes)
    # A run without length is drawn as one of a second: all of it stands at the left end.
    end = max(history.outcome.seconds, last_event, last_answer)
    end = end if end > 0 else 1.0
    as_spans = sum(3 * len(lane.begins) for lane in shown) <= MOST_SPANS
    tops = {lane.worker: i * (LANE_HEIGHT + GAP) for i, lane in enumerate(shown)}
    parts = []
    for lane in shown:
        y = tops[lane.worker]
        parts.append(f'<text x="{LABEL_WIDTH - 8:.0f}" y="{y + BASELINE:.1f}" text-anchor="end">'
                     f"worker {lane.worker}</text>")  # fmt: skip
        parts.append(_spans(lane, y, end) if as_spans else _shares(lane, y, end))
    height = len(shown) * (LANE_HEIGHT + GAP)
    parts += _marks(history.outcome.events, tops, end, height)
    for value in ticks(0.0, end):
        parts.append(
            f'<text x="{_x_of(value, end):.1f}" y="{height + BASELINE:.0f}" text-anchor="middle">'
            f"{format_seconds(value)}</text>"
        )
    title = f"{history.name}: what each of {len(lanes)} workers did when"
    keys = "".join(f'<li><i class="{kind}"></i>{kind}</li>' for kind in KINDS)
    hints = []
    if not as_spans:
        hints.append(f"Shares of pieces of {format_seconds(end / PIECES)}.")
    if len(lanes) > len(shown):
        hints.append(f"{len(lanes) - len(shown)} more workers are not drawn.")
    hint = f'<p class="hint">{" ".join(hints)}</p>' if hints else ""
    return Markup(
        f'<svg class="chart lanes" viewBox="0 -2 {WIDTH:.0f} {height + 20:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg><ul class="key">{keys}</ul>{hint}'
    )


def lanes_of(history: History) -> list[Lane]:
    """A lane for each worker, by number. Clocks of processes differ a little, so times are clipped:
    no span is negative, and no window begins before the last one was answered."""
    columns = history.columns
    lanes = []
    for worker in np.unique(columns["worker"]).tolist():
        mine = columns["worker"] == worker
        order = np.argsort(columns["seconds"][mine], kind="stable")
        answers = np.maximum(columns["seconds"][mine][order], 0.0)
        before = np.concatenate([[0.0], answers[:-1]])
        begins = np.clip(columns["begin_seconds"][mine][order], before, answers)
        ends = np.clip(columns["end_seconds"][mine][order], begins, answers)
        lanes.append(Lane(worker, begins, ends, answers))
    return lanes


def _x_of(seconds: float, end: float) -> float:
    """Where a moment of a run that ends at `end` seconds is drawn, in pixels from the left."""
    return LABEL_WIDTH + (WIDTH - LABEL_WIDTH - RIGHT_MARGIN) * seconds / end


def _spans(lane: Lane, y: float, end: float) -> str:
    """A lane as one path for each kind, with a box for each span. One path is much smaller than as
    many elements."""
    drawn = []
    for kind in KINDS:
        starts, stops = lane.spans_of(kind)
        boxes = [
            _box(_x_of(start, end), _x_of(stop, end), y)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            if stop > start
        ]
        if boxes:
            drawn.append(f'<path class="{kind}" d="{"".join(boxes)}"/>')
    return "".join(drawn)


def _box(left: float, right: float, y: float) -> str:
    """The part of a path's `d` that draws a box."""
    right = max(right, left + LEAST_WIDTH)
    return f"M{left:.1f} {y:.0f}H{right:.1f}v{LANE_HEIGHT:.0f}H{left:.1f}z"


def _shares(lane: Lane, y: float, end: float) -> str:
    """A lane as areas: for each piece of time the shares of compute (lowest), exchange and wait."""
    edges = np.linspace(0.0, end, PIECES + 1)
    piece = end / PIECES
    drawn, floor = [], np.zeros(PIECES)
    for kind in KINDS:
        share = np.diff(_covered(*lane.spans_of(kind), edges)) / piece
        ceiling = np.minimum(floor + share, 1.0)
        drawn.append(f'<path class="{kind}" d="{_band(floor, ceiling, y)}"/>')
        floor = ceiling
    return "".join(drawn)


def _covered(starts: Floats, stops: Floats, edges: Floats) -> Floats:
    """[edges] the seconds from 0 to each edge that lie within the spans, which do not overlap."""
    if not len(starts):
        return np.zeros(len(edges))
    # The covered time grows linearly within a span and is constant between two, so interpolating
    # between the ends of spans is exact.
    total = np.cumsum(stops - starts)
    moments = np.stack([starts, stops], axis=1).ravel()
    seconds = np.stack([total - (stops - starts), total], axis=1).ravel()
    return np.interp(edges, moments, seconds)


def _band(floor: Floats, ceiling: Floats, y: float) -> str:
    """The `d` of an SVG path around the area between two staircases of shares."""
    width = (WIDTH - LABEL_WIDTH - RIGHT_MARGIN) / PIECES
    lefts = LABEL_WIDTH + width * np.arange(PIECES)
    # y grows downwards: a share of 1 is at the top of the lane, at `y`.
    tops, bottoms = y + LANE_HEIGHT * (1 - ceiling), y + LANE_HEIGHT * (1 - floor)
    there = "".join(f"V{top:.1f}H{x + width:.1f}" for x, top in zip(lefts, tops, strict=True))
    back = "".join(
        f"V{bottom:.1f}H{x:.1f}" for x, bottom in zip(lefts[::-1], bottoms[::-1], strict=True)
    )
    return f"M{LABEL_WIDTH:.1f} {bottoms[0]:.1f}{there}{back}z"


def _marks(
    events: tuple[Event, ...], tops: dict[int, float], end: float, height: float
) -> list[str]:
    """At most `MOST_MARKS` marks of events: a sign in the worker's lane, or a line through all
    lanes if the server restarted. A worker's events at second 0 are left out: that is the start.

    tops   worker -> the top of its lane
    """
    parts = []
    for event in events:
        x = _x_of(max(event.seconds, 0.0), end)
        title = f"<title>{escape(_sentence(event))}</title>"
        if event.worker in tops and event.kind in MARKS and event.seconds > 0:
            parts.append(
                f'<text class="mark" x="{x:.1f}" y="{tops[event.worker] + BASELINE:.1f}" '
                f'text-anchor="middle">{MARKS[event.kind]}{title}</text>'
            )
        elif event.kind == "server_restarted":
            parts.append(f'<path class="mark" d="M{x:.1f} -2V{height:.0f}">{title}</path>')
        if len(parts) >= MOST_MARKS:
            break
    return parts


def _sentence(event: Event) -> str:
    """What happened to whom and when, and the last line of the detail: of a traceback, that is the
    error."""
    lines = event.detail.strip().splitlines()
    detail = f": {lines[-1][:200]}" if lines else ""
    return f"{_who(event)} {_what(event)} at {format_seconds(event.seconds)}{detail}"
