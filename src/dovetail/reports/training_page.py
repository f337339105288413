"""Draws the page about training runs: several rules side by side, or one run alone.

    cards       runs, the best figure, the run that was first at the level that all reached
    learning    figures against time and samples
    asynchrony  staleness, implicit momentum, temporal efficiency
    workers     a timeline of each worker, with its events

The page has no script.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from dovetail.errors import UsageError
from dovetail.reports.charts import COLOURS, Axes, Line, averaged, bar_chart, line_chart
from dovetail.reports.gantt import KINDS, event_name, event_owner, lanes_of, timeline
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    coloured,
    in_figures,
    preformatted,
    render_page,
    scrolled,
)
from dovetail.training import Column, History, analysis, common_level, events_of, lower_is_better
from dovetail.units import format_count, format_seconds

MOST_FIGURES, MOST_EVENTS, MOST_BINS, MOST_ROWS = 6, 200, 40, 64
"""The page shows at most this many figures, events, bins of a histogram, and rows of workers."""
MOST_REASONS = 40
"""The page lists at most this many reasons for refused commits, the most frequent first."""
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
        return coloured(f"c{self.number % COLOURS}", self.label)


Runs = Sequence[ShownRun]
Curve = tuple[ShownRun, Column, Column, Column]
"""A run, and [points] seconds, samples and values: after so many of them it had this value."""


def render_training(histories: Sequence[History], *, made: str = "") -> str:
    """The page of these runs, in their order, as text. O(commits), but what is drawn of a run is
    bounded. Times are since the first step of each run.

    made   the command that made the page

    Raises `UsageError` for no run or more than `MOST_RUNS`.
    """
    if not 0 < len(histories) <= MOST_RUNS:
        raise UsageError("histories", f"there are {len(histories)}; a page shows 1 to {MOST_RUNS}")
    # A run's label is its name. If two names are equal, all get the number of workers and the
    # window, and those that are still equal a number.
    names = [history.name for history in histories]
    if len(set(names)) < len(names):
        names = [
            f"{history.name}, {history.workers} workers, window {history.of_job('window')}"
            for history in histories
        ]
    labels = [
        f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]
    runs = [
        ShownRun(i, label, history.from_first_step(), history.start_up_seconds)
        for i, (label, history) in enumerate(zip(labels, histories, strict=True))
    ]
    # Runs are compared by the first figure that should be large, such as an accuracy, else by the
    # first one.
    figures = list(dict.fromkeys(name for run in runs for name in run.history.figures))
    large = (name for name in figures if not lower_is_better(name))
    main = next(large, figures[0] if figures else None)
    level = None
    if main is not None and len(runs) > 1:
        level = common_level([run.history for run in runs], main)
    shown = figures[:MOST_FIGURES]

    samples = sum(run.history.outcome.samples for run in runs)
    cards: list[Card] = [("runs", str(len(runs)), f"{format_count(samples)} samples in all")]
    bests = []
    if main is not None:
        bests = [(best.figures[main], run.label) for run in runs
                 if (best := run.history.best(main)) is not None]  # fmt: skip
    if main is not None and bests:
        sign = -1 if lower_is_better(main) else 1
        value, label = max(bests, key=lambda pair: sign * pair[0])
        cards.append((f"best {main}", f"{value:.4g}", f"by {label}"))
    if main is not None and level is not None:
        # The run that was first at the level that all reached; of equally fast ones the first.
        times = [(seconds, run.number, run.label) for run in runs
                 if (seconds := run.history.seconds_to(main, level)) is not None]  # fmt: skip
        least, _, label = min(times)
        cards.append((f"fastest to {main} {level:.4g}", format_seconds(least), f"by {label}"))
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

    # A row for each run with its settings, its best figures, its staleness and how it ended.
    rows = []
    for run in runs:
        history = run.history
        best_of = {name: history.best(name) for name in shown}
        settings = {field: history.of_job(field) for field in ("window", "batch")}
        to_level = {}
        if main is not None and level is not None:
            reached = history.seconds_to(main, level)
            text = "-" if reached is None else format_seconds(reached)
            to_level = {f"to {main} {level:.4g}": text}
        ending = "stopped early" if history.outcome.stopped else "done"
        if history.divergence is not None:
            ending = "diverged"
        elif history.outcome.meta.get("failed"):
            ending = "failed"
        elif history.interrupted:
            ending = "interrupted"
        rows.append({
            "run": run.head,
            "backend": history.backend or "-",
            "workers": str(history.workers),
            **{name: "-" if count is None else f"{count:,}" for name, count in settings.items()},
            "commits": f"{len(history):,}",
            "samples": f"{history.outcome.samples:,}",
            "time": format_seconds(history.outcome.seconds),
            **{f"best {name}": f"{best.figures[name]:.4g}" if best else "-"
               for name, best in best_of.items()},
            **to_level,
            "staleness": _number(history.staleness.mean),
            "ended": ending,
        })  # fmt: skip
    return render_page(
        Page(
            "Training by " + ", ".join(dict.fromkeys(run.history.name for run in runs)),
            cards,
            [
                Section("Runs", [
                    "Times are since a run's first step. The processes' start is not among them.",
                    Table.of(rows),
                ]),
                *_learning(runs, shown, main),
                *_asynchrony(runs),
                *_workers(runs),
                Section("How this was made", [
                    preformatted(made),
                    *(Section(run.label, [Table((), run.history.facts(), "scroll facts")],
                              fold="closed") for run in runs),
                ]),
            ],
            brand="dovetail train",
        )
    )  # fmt: skip


def _number(value: float) -> str:
    """The number; "-" if it is not finite."""
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _statistics(stats: analysis.Staleness | None, mean: str) -> dict[str, str]:
    """The cells of a staleness, whose mean stands below the heading `mean`."""
    values = (math.nan,) * 4 if stats is None else (stats.mean, stats.p50, stats.p95, stats.max)
    return dict(zip((mean, "p50", "p95", "max"), map(_number, values), strict=True))


def _learning(runs: Runs, figures: Sequence[str], main: str | None) -> list[Section]:
    """The sections of what was learned: charts of each figure, then of the commits' loss, against
    time and against samples; and the temporal efficiency E(row, column) of the main figure, for all
    pairs of runs whose curve has an integral over time."""
    charted: list[tuple[str, list[Curve]]] = [
        (figure, [(run, *run.history.curve(figure)) for run in runs]) for figure in figures
    ]
    losses: list[Curve] = []
    for run in runs:
        columns = run.history.columns
        seconds, means = averaged(columns["seconds"], columns["loss"])
        samples, _ = averaged(columns["seen"], columns["loss"])
        losses.append((run, seconds, samples, means))
    charts = []
    for figure, curves in [*charted, ("training loss", losses)]:
        # A figure that should be small is cut at three times the largest first value: a loss that
        # grows without end would hide all other lines.
        first = [float(y[np.isfinite(y)][0]) for *_, y in curves if np.isfinite(y).any()]
        largest = max(first, default=0.0) if lower_is_better(figure) else 0.0
        top = 3 * largest if largest > 0 else math.inf
        for against, format_x in (("time", format_seconds), ("samples", format_count)):
            lines = [
                Line(run.label, (seconds if against == "time" else samples).astype(np.float64),
                     values, run.number)
                for run, seconds, samples, values in curves
                if len(values)
            ]  # fmt: skip
            axes = Axes(f"{figure} against {against}", format_x, top)
            charts.append(Figure("", line_chart(lines, axes)))
    sections = [Section("Learning, against time and against samples", [Figures(charts)])]

    of_main = {} if main is None else {run.number: run.history.curve(main) for run in runs}
    compared = []
    for run in runs:
        seconds, _, values = of_main.get(run.number, (np.zeros(0),) * 3)
        if len(seconds) and seconds[-1] > 0 and np.isfinite(values).all():
            compared.append(run)
    if main is None or lower_is_better(main) or len(compared) < 2:
        why = "It compares two runs or more by a figure that grows, such as accuracy."
        return [*sections, Section("Temporal efficiency", [why])]
    rows = []
    for a in compared:
        cells: list[str] = [a.head]
        for b in compared:
            a_seconds, _, a_values = of_main[a.number]
            b_seconds, _, b_values = of_main[b.number]
            ratio = analysis.temporal_efficiency(
                a_seconds.tolist(), a_values.tolist(), b_seconds.tolist(), b_values.tolist()
            )
            text = _number(ratio)
            cells.append(Markup("<b>{}</b>").format(text) if a is not b and ratio > 1 else text)
        rows.append(cells)
    efficiency: list[Part] = [
        f"Integral of {main} over time of the row's run over that of the column's, up to the "
        "shorter time: above 1 the row's run made better use of it.",
        Table(["", *(run.label for run in compared)], rows),
    ]
    return [*sections, Section("Temporal efficiency", efficiency)]


def _asynchrony(runs: Runs) -> list[Section]:
    """The sections of asynchrony: the staleness of each run as a histogram and in figures, and the
    implicit momentum, its estimates along each run and their medians."""
    charts, rows = [], []
    for run in runs:
        history = run.history
        stats = history.staleness
        # As in `analysis.staleness`: the first commits all start from the same center, which says
        # nothing about the run.
        values = history.columns["staleness"][history.workers :]
        rows.append({
            "run": run.head,
            "commits": f"{stats.commits:,}",
            "n - 1": str(history.workers - 1),
            **_statistics(stats, "mean"),
        })  # fmt: skip
        if len(values):
            counts, labels = histogram(values)
            axes = Axes(f"{run.label}: commits by staleness")
            charts.append(Figure("", bar_chart(counts, labels, axes, run.number)))
    staleness: list[Part] = [
        "The staleness of a commit says how often the center was changed between the pull that the "
        "commit started from and its own application. Equal workers without waiting have n - 1 on "
        "average. The first n commits are left out.",
        *([Figures(charts)] if charts else []),
        Table.of(rows),
    ]

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
        rows.append({
            "run": run.head,
            "n": str(history.workers),
            "median estimate": _number(history.momentum),
            "middle half": middle_half,
            "1 - 1/n": _number(history.expected_momentum),
        })  # fmt: skip
    axes = Axes("implicit momentum against samples; dashed: 1 - 1/n", top=1.5, bottom=-1.0)
    momentum: list[Part] = [
        "Stale gradients add momentum to plain descent. It is estimated from the center's path, "
        "and stands beside 1 - 1/n, which holds for memoryless step times. If a rule has momentum "
        "of its own, the estimate contains both.",
        *([line_chart(lines, axes)] if lines else []),
        Table.of(rows),
    ]
    return [Section("Staleness of commits", staleness), Section("Implicit momentum", momentum)]


def histogram(values: Column) -> tuple[list[float], list[str]]:
    """(counts, labels) of at most `MOST_BINS` equally wide bins from 0 on."""
    # -(-a // b) rounds up.
    width = -(-(int(values.max()) + 1) // MOST_BINS)
    counts = np.bincount(values // width)
    labels = [
        str(i) if width == 1 else f"{i * width}-{(i + 1) * width - 1}" for i in range(len(counts))
    ]
    return counts.astype(float).tolist(), labels


def _workers(runs: Runs) -> list[Section]:
    """The sections of what happened: the timeline of each run and a table of its workers, with what
    each did, the shares of its time, and its staleness; then the number of events of each kind, the
    reasons of refused commits, and each event."""
    parts: list[Part] = [
        "Compute: a window's local steps. Exchange: from there to the server's answer; in rules "
        "that gather, the wait for the other workers is in it. Wait: the rest."
    ]
    for run in runs:
        history = run.history
        _, of_worker = analysis.staleness(history.outcome.rows, history.workers)
        counts = {kind: Counter(event.worker for event in events_of(history.outcome, kind))
                  for kind in ("lost", "restarted", "refused")}  # fmt: skip
        # [commits] the index of the lane of each commit's worker: lanes are sorted by worker, too.
        ranks = np.unique(history.columns["worker"], return_inverse=True)[1]
        samples = np.bincount(ranks, weights=history.columns["samples"]).tolist()
        rows = []
        for lane, count in zip(lanes_of(history), samples, strict=True):
            total = float(lane.answers[-1] - lane.begins[0])
            rows.append({
                "worker": f"worker {lane.worker}",
                "commits": f"{len(lane.begins):,}",
                "samples": f"{count:,.0f}",
                **{kind: f"{100 * lane.seconds_of(kind) / total:.0f} %" if total > 0 else "-"
                   for kind in KINDS},
                **_statistics(of_worker.get(lane.worker), "staleness"),
                **{kind: str(of_kind[lane.worker]) for kind, of_kind in counts.items()},
            })  # fmt: skip
        # The page of one run alone has its name in the title.
        title = run.label if len(runs) > 1 else ""
        parts.append(
            Section(title, [scrolled(timeline(history)), in_figures(Table.of(rows[:MOST_ROWS]))])
        )
    done = Section("What each worker did when", parts)

    happened = [(run, event) for run in runs for event in run.history.outcome.events]
    if not happened:
        none = "No worker joined, left or was lost, and no commit was refused."
        return [done, Section("Events and refusals", [none])]
    # Kind -> its name.
    kinds = {event.kind: event_name(event) for _, event in happened}
    times = Counter((run.number, event.kind) for run, event in happened)
    count_rows = [[run.head, *(f"{times[run.number, kind]:,}" for kind in kinds)] for run in runs]
    events: list[Part] = [Table(["run", *kinds.values()], count_rows)]
    reasons = Counter((run.number, event.detail) for run in runs
                      for event in events_of(run.history.outcome, "refused"))  # fmt: skip
    refusals = [
        [runs[number].label, reason, f"{count:,}"]
        for (number, reason), count in reasons.most_common(MOST_REASONS)
    ]
    if refusals:
        events.append(Table(("run", "refused because", "commits"), refusals, "scroll left"))
    listed = [[run.label, format_seconds(event.seconds), event_owner(event), event_name(event),
               Markup("<pre>{}</pre>").format(event.detail[:4000])]
              for run, event in happened[:MOST_EVENTS]]  # fmt: skip
    cut = f" (the first {MOST_EVENTS:,})" if len(happened) > MOST_EVENTS else ""
    table = Table(("run", "time", "who", "what", "detail"), listed, "scroll left")
    events.append(Section(f"all {len(happened):,}{cut}", [table], fold="closed"))
    return [done, Section("Events and refusals", events)]
