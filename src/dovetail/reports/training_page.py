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

# ---- What each worker did when, as inline SVG ----
#
#     worker 0   ███▒░███▒░███▒░███▒░        compute, exchange, wait
#     worker 1   ███▒░███▒✕    ▲███▒░        ✕ lost, ▲ joined again
#
# Compute is from a window's first step to its last. Exchange is from there to the server's answer;
# with rules that gather it includes the wait for the other workers. Wait is the rest, from an
# answer to the next window. A run of many commits is drawn as shares of equal pieces of time
# instead of spans.

Floats = NDArray[np.float64]
WIDTH, LABELS, ROW, GAP = 1100.0, 84.0, 16.0, 5.0
MOST_WORKERS, MOST_SPANS, MOST_MARKS = 40, 3000, 200
"""At most this many workers have a lane and this many events a mark. A run with more spans than
`MOST_SPANS` is drawn as shares."""
PIECES = 300
"""Shares are drawn for this many equal pieces of time."""
KINDS = ("compute", "exchange", "wait")
MARKS = {"lost": "✕", "restarted": "▲", "joined": "▲", "refused": "!"}


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


def timeline(history: History) -> Markup:
    """The chart of the lanes of up to `MOST_WORKERS` workers, with marks for events."""
    lanes = lanes_of(history)
    if not lanes:
        return Markup("<p>No commit was recorded.</p>")
    shown = lanes[:MOST_WORKERS]
    last = max((event.seconds for event in history.outcome.events), default=0.0)
    end = max(history.outcome.seconds, last, *(float(lane.answers[-1]) for lane in lanes))
    end = end if end > 0 else 1.0
    exact = sum(3 * len(lane.begins) for lane in shown) <= MOST_SPANS
    rows = {lane.worker: i * (ROW + GAP) for i, lane in enumerate(shown)}
    parts = []
    for lane in shown:
        y = rows[lane.worker]
        parts.append(f'<text x="{LABELS - 8:.0f}" y="{y + 12:.1f}" text-anchor="end">'
                     f"worker {lane.worker}</text>")  # fmt: skip
        parts.append(_spans(lane, y, end) if exact else _shares(lane, y, end))
    height = len(shown) * (ROW + GAP)
    parts += _marks(history.outcome.events, rows, end, height)
    for value in ticks(0.0, end):
        parts.append(
            f'<text x="{_at(value, end):.1f}" y="{height + 12:.0f}" text-anchor="middle">'
            f"{format_seconds(value)}</text>"
        )
    what = f"{history.name}: what each of {len(lanes)} workers did when"
    keys = "".join(f'<li><i class="{kind}"></i>{kind}</li>' for kind in KINDS)
    notes = []
    if not exact:
        notes.append(f"Shares of pieces of {format_seconds(end / PIECES)}.")
    if len(lanes) > len(shown):
        notes.append(f"{len(lanes) - len(shown)} more workers are not drawn.")
    hint = f'<p class="hint">{" ".join(notes)}</p>' if notes else ""
    return Markup(
        f'<svg class="chart lanes" viewBox="0 -2 {WIDTH:.0f} {height + 20:.0f}" role="img" '
        f'aria-label="{escape(what)}">{"".join(parts)}</svg><ul class="key">{keys}</ul>{hint}'
    )


def _at(seconds: float, end: float) -> float:
    return LABELS + (WIDTH - LABELS - 20) * seconds / end


def _spans(lane: Lane, y: float, end: float) -> str:
    """A lane as one path for each kind, with a box for each span. One path is much smaller than as
    many elements."""
    drawn = []
    for kind in KINDS:
        starts, stops = lane.spans_of(kind)
        boxes = [
            f"M{_at(start, end):.1f} {y:.0f}H{max(_at(stop, end), _at(start, end) + 0.2):.1f}"
            f"v{ROW:.0f}H{_at(start, end):.1f}z"
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            if stop > start
        ]
        if boxes:
            drawn.append(f'<path class="{kind}" d="{"".join(boxes)}"/>')
    return "".join(drawn)


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
    width = (WIDTH - LABELS - 20) / PIECES
    left = LABELS + width * np.arange(PIECES)
    top, bottom = y + ROW * (1 - ceiling), y + ROW * (1 - floor)
    up = "".join(f"V{b:.1f}H{x + width:.1f}" for x, b in zip(left, top, strict=True))
    down = "".join(f"V{b:.1f}H{x:.1f}" for x, b in zip(left[::-1], bottom[::-1], strict=True))
    return f"M{LABELS:.1f} {bottom[0]:.1f}{up}{down}z"


def _marks(
    events: tuple[Event, ...], rows: dict[int, float], end: float, height: float
) -> list[str]:
    """At most `MOST_MARKS` marks of events: a sign in the worker's lane, or a line through all
    lanes if the server restarted. A worker's events at second 0 are left out: that is the start."""
    parts = []
    for event in events:
        x = _at(max(event.seconds, 0.0), end)
        title = f"<title>{escape(_said(event))}</title>"
        if event.worker in rows and event.kind in MARKS and event.seconds > 0:
            parts.append(
                f'<text class="mark" x="{x:.1f}" y="{rows[event.worker] + 12:.1f}" '
                f'text-anchor="middle">{MARKS[event.kind]}{title}</text>'
            )
        elif event.kind == "server_restarted":
            parts.append(f'<path class="mark" d="M{x:.1f} -2V{height:.0f}">{title}</path>')
        if len(parts) >= MOST_MARKS:
            break
    return parts


def _said(event: Event) -> str:
    detail = event.detail.strip().splitlines()[-1][:200] if event.detail.strip() else ""
    who = "server" if event.worker < 0 else f"worker {event.worker}"
    return f"{who} {event.kind.replace('_', ' ')} at {format_seconds(event.seconds)}" + (
        f": {detail}" if detail else ""
    )


# ---- What the page's sections show ----

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
    """A run on the page; `number` chooses its colour."""

    number: int
    label: str
    history: History

    @property
    def head(self) -> Markup:
        """The label after the run's colour."""
        return Markup('<i class="c{}"></i>{}').format(self.number % COLOURS, self.label)


@dataclass(frozen=True, eq=False)
class _LearningCurve:
    """One figure of one run; seconds, samples and values are [points] each."""

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
    """The page as text. O(commits), but what is drawn of a run is bounded."""
    if not 0 < len(histories) <= MOST_RUNS:
        raise UsageError("histories", f"there are {len(histories)}; a page shows 1 to {MOST_RUNS}")
    runs = [
        ShownRun(i, label, history)
        for i, (label, history) in enumerate(zip(_labels(histories), histories, strict=True))
    ]
    staleness_charts, staleness_table = staleness(runs)
    momentum_chart, momentum_table = momentum(runs)
    return render_page(
        "training.html",
        "Training by " + ", ".join(dict.fromkeys(run.history.name for run in runs)),
        _cards(runs),
        styles=("page.css", "training.css"),
        runs=runs_table(runs),
        learning=learning(runs),
        efficiency=efficiency(runs),
        efficiency_figure=main_figure(runs),
        staleness_charts=staleness_charts,
        staleness=staleness_table,
        momentum_chart=momentum_chart,
        momentum=momentum_table,
        workers=workers(runs),
        events=events(runs),
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


def main_figure(runs: Sequence[ShownRun]) -> str | None:
    """The figure by which runs are compared: the first one that should be large, such as an
    accuracy, else the first one; None if there is none."""
    names = _figures(runs)
    return next((name for name in names if not lower_is_better(name)), names[0] if names else None)


def _cards(runs: Sequence[ShownRun]) -> list[Card]:
    samples = sum(run.history.outcome.samples for run in runs)
    cards = [("runs", str(len(runs)), f"{format_count(samples)} samples in all")]
    figure = main_figure(runs)
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
        cards.append(("took", format_seconds(history.outcome.seconds),
                      f"{len(history):,} commits"))  # fmt: skip
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
    times = [(seconds, run.number, run.label) for run in runs
             if (seconds := run.history.seconds_to(figure, level)) is not None]  # fmt: skip
    seconds, _, label = min(times)
    return [(f"fastest to {figure} {level:.4g}", format_seconds(seconds), f"by {label}")]


def runs_table(runs: Sequence[ShownRun]) -> PageTable:
    """The table of runs: a row for each with its settings, its best figures and its staleness."""
    figures = _figures(runs)[:MOST_FIGURES]
    main = main_figure(runs)
    level = common_level([run.history for run in runs], main) if main else None
    to_level = [] if level is None or len(runs) < 2 else [f"to {main} {level:.4g}"]
    titles = ["run", "backend", "workers", "window", "batch", "commits", "samples", "time",
              *(f"best {name}" for name in figures), *to_level, "staleness", "ended"]  # fmt: skip
    rows = []
    for run in runs:
        history = run.history
        bests = [history.best(name) for name in figures]
        times = [_when(history.seconds_to(main, level)) for _ in to_level if main and level]
        rows.append([
            run.head, history.backend or "-", str(history.workers),
            *(_whole(history.of_job(field)) for field in ("window", "batch")),
            f"{len(history):,}", f"{history.outcome.samples:,}",
            format_seconds(history.outcome.seconds),
            *(f"{best.figures[name]:.4g}" if best else "-"
              for name, best in zip(figures, bests, strict=True)),
            *times, _number(history.staleness.mean), ended(history),
        ])  # fmt: skip
    return PageTable(titles, rows)


def ended(history: History) -> str:
    """A word or two on how a run ended."""
    if history.divergence is not None:
        return "diverged"
    if history.outcome.meta.get("failed"):
        return "failed"
    if history.interrupted:
        return "interrupted"
    return "stopped early" if history.outcome.stopped else "done"


def learning(runs: Sequence[ShownRun]) -> list[Markup]:
    """Charts of each figure, then of the commits' loss, against time and against samples."""
    curves_of: dict[str, list[_LearningCurve]] = {
        figure: [_LearningCurve(run, *run.history.curve(figure)) for run in runs]
        for figure in _figures(runs)[:MOST_FIGURES]
    }
    losses = []
    for run in runs:
        columns = run.history.columns
        seconds, means = averaged(columns["seconds"], columns["loss"])
        samples, _ = averaged(columns["seen"], columns["loss"])
        losses.append(_LearningCurve(run, seconds, samples, means))
    charts = []
    for figure, curves in [*curves_of.items(), (TRAINING_LOSS, losses)]:
        for what, format_x in (("time", format_seconds), ("samples", format_count)):
            lines = [
                Line(
                    curve.run.label,
                    (curve.seconds if what == "time" else curve.samples).astype(np.float64),
                    curve.values,
                    curve.run.number,
                )
                for curve in curves
                if len(curve.values)
            ]
            axes = Axes(f"{figure} against {what}", format_x, _ceiling(figure, lines))
            charts.append(line_chart(lines, axes))
    return charts


def _ceiling(figure: str, lines: Sequence[Line]) -> float:
    """The top of a figure's chart. A figure that should be small is cut at three times the largest
    first value: a loss that grows without end would hide all other lines."""
    if not (lower_is_better(figure) and lines):
        return math.inf
    firsts = [line.y[np.isfinite(line.y)][:1] for line in lines]
    starts = [float(first[0]) for first in firsts if len(first)]
    return 3 * max(starts) if starts and max(starts) > 0 else math.inf


def efficiency(runs: Sequence[ShownRun]) -> PageTable | None:
    """The table of the temporal efficiency E(row, column) of the main figure, for all pairs of
    runs; None if there is no figure that should be large, or less than two runs to compare."""
    figure = main_figure(runs)
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
            value = analysis.temporal_efficiency(
                a_seconds.tolist(), a_values.tolist(), b_seconds.tolist(), b_values.tolist()
            )
            text = _number(value)
            cells.append(Markup("<b>{}</b>").format(text) if a is not b and value > 1 else text)
        rows.append(cells)
    return PageTable(["", *(run.label for run in compared)], rows)


def _usable(curve: tuple[Column, Column, Column]) -> bool:
    seconds, _, values = curve
    return bool(len(seconds) and seconds[-1] > 0 and np.isfinite(values).all())


def staleness(runs: Sequence[ShownRun]) -> tuple[list[Markup], PageTable]:
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


def momentum(runs: Sequence[ShownRun]) -> tuple[Markup, PageTable]:
    """(chart, table) of implicit momentum: the estimates along each run, and their medians."""
    lines, rows = [], []
    for run in runs:
        history = run.history
        estimates = history.columns["momentum"]
        finite = np.isfinite(estimates)
        low, high = np.percentile(estimates[finite], [25, 75]) if finite.any() else (math.nan,) * 2
        rows.append([run.head, str(history.workers), _number(history.momentum),
                     f"{_number(low)} to {_number(high)}" if finite.any() else "-",
                     _number(history.expected_momentum)])  # fmt: skip
        if finite.any():
            x, y = averaged(history.columns["seen"][finite].astype(np.float64), estimates[finite])
            lines.append(Line(run.label, x, y, run.number))
            expected = np.full(2, history.expected_momentum)
            ends = np.array([0.0, float(x[-1])])
            lines.append(Line("1 - 1/n", ends, expected, run.number, dashed=True))
    axes = Axes("implicit momentum against samples; dashed: 1 - 1/n", top=1.5, bottom=-1.0)
    titles = ("run", "n", "median estimate", "middle half", "1 - 1/n")
    return line_chart(lines, axes) if lines else Markup(""), PageTable(titles, rows)


def workers(runs: Sequence[ShownRun]) -> list[_WorkerTimes]:
    """The timeline of each run, and a table of its workers."""
    return [
        _WorkerTimes(
            run.label if len(runs) > 1 else "", timeline(run.history), _worker_table(run.history)
        )
        for run in runs
    ]


def _worker_table(history: History) -> PageTable:
    _, of_worker = analysis.staleness(history.outcome.rows, history.workers)
    counts = {kind: Counter(event.worker for event in events_of(history.outcome, kind))
              for kind in ("lost", "restarted", "refused")}  # fmt: skip
    samples = np.bincount(_ranks(history), weights=history.columns["samples"]).tolist()
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


def _ranks(history: History) -> Column:
    """[commits] the index of the lane of each commit's worker."""
    ranks: Column = np.unique(history.columns["worker"], return_inverse=True)[1]
    return ranks


def events(runs: Sequence[ShownRun]) -> _ShownEvents | None:
    """The section of events: counts, reasons of refused commits, and each event. None if there was
    no event."""
    kinds = list(dict.fromkeys(e.kind for run in runs for e in run.history.outcome.events))
    if not kinds:
        return None
    counts = [[run.head, *_counts(run.history, kinds)] for run in runs]
    reasons = Counter((run.number, event.detail) for run in runs
                      for event in events_of(run.history.outcome, "refused"))  # fmt: skip
    refusals = [
        [runs[i].label, reason, f"{n:,}"] for (i, reason), n in reasons.most_common(MOST_REASONS)
    ]
    happened = [(run, event) for run in runs for event in run.history.outcome.events]
    listed = [[run.label, format_seconds(event.seconds),
               "server" if event.worker < 0 else f"worker {event.worker}",
               event.kind.replace("_", " "),
               Markup("<pre>{}</pre>").format(event.detail[:4000])]
              for run, event in happened[:MOST_EVENTS]]  # fmt: skip
    more = f" (the first {MOST_EVENTS:,})" if len(happened) > MOST_EVENTS else ""
    return _ShownEvents(
        PageTable(["run", *(kind.replace("_", " ") for kind in kinds)], counts),
        PageTable(("run", "refused because", "commits"), refusals, "scroll left")
        if refusals
        else None,
        f"all {len(happened):,}{more}",
        PageTable(("run", "time", "who", "what", "detail"), listed, "scroll left"),
    )


def _counts(history: History, kinds: Sequence[str]) -> list[str]:
    counts = Counter(event.kind for event in history.outcome.events)
    return [f"{counts[kind]:,}" for kind in kinds]


def _figures(runs: Sequence[ShownRun]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.history.figures))


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
