"""The sections of the page about training runs, each as markup."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from dovetail.reports.markup import Markup, cards, details, table
from dovetail.reports.plots import COLOURS, Axes, Line, averaged, bar_chart, line_chart
from dovetail.reports.training_timeline import KINDS, lanes_of, timeline
from dovetail.training import analysis
from dovetail.training.history import (
    Column,
    History,
    common_level,
    events_of,
    lower_is_better,
)
from dovetail.units import format_count, format_seconds

MOST_FIGURES, MOST_EVENTS, MOST_BINS, MOST_ROWS = 6, 200, 40, 64
TRAINING_LOSS = "training loss"


@dataclass(frozen=True, eq=False)
class Run:
    """A run on the page; `number` chooses its colour."""

    number: int
    label: str
    history: History

    @property
    def head(self) -> Markup:
        """Its label after its colour."""
        return Markup(f'<i class="c{self.number % COLOURS}"></i>{escape(self.label)}')


@dataclass(frozen=True, eq=False)
class _Curve:
    """[points] each."""

    run: Run
    seconds: Column
    samples: Column
    values: Column


def main_figure(runs: Sequence[Run]) -> str | None:
    """The figure that runs are compared by: the first that should be large, else the first."""
    names = _figures(runs)
    return next((name for name in names if not lower_is_better(name)), names[0] if names else None)


def head(runs: Sequence[Run]) -> Markup:
    """Cards with the figures that matter."""
    samples = sum(run.history.outcome.samples for run in runs)
    items = [("runs", str(len(runs)), f"{format_count(samples)} samples in all")]
    figure = main_figure(runs)
    if figure is not None:
        sign = -1 if lower_is_better(figure) else 1
        found = [(best.figures[figure], run) for run in runs
                 if (best := run.history.best(figure)) is not None]  # fmt: skip
        if found:
            value, run = max(found, key=lambda pair: sign * pair[0])
            items.append((f"best {figure}", f"{value:.4g}", f"by {run.label}"))
        items += _fastest(runs, figure)
    if len(runs) == 1:
        history = runs[0].history
        items.append(("staleness", _number(history.staleness.mean), f"mean; n - 1 is "
                      f"{history.workers - 1}"))  # fmt: skip
        items.append(("took", format_seconds(history.outcome.seconds),
                      f"{len(history):,} commits"))  # fmt: skip
    counts = Counter(event.kind for run in runs for event in run.history.outcome.events)
    lost = f"{counts['restarted'] + counts['server_restarted']} restarted"
    items.append(("workers lost", str(counts["lost"]), f"{lost}, {counts['refused']} refusals"))
    return cards(items)


def _fastest(runs: Sequence[Run], figure: str) -> list[tuple[str, str, str]]:
    level = common_level([run.history for run in runs], figure)
    if level is None or len(runs) < 2:
        return []
    times = [(seconds, run.number, run.label) for run in runs
             if (seconds := run.history.seconds_to(figure, level)) is not None]  # fmt: skip
    seconds, _, label = min(times)
    return [(f"fastest to {figure} {level:.4g}", format_seconds(seconds), f"by {label}")]


def runs_table(runs: Sequence[Run]) -> Markup:
    """A line a run: what it was, how far it came, how stale it was."""
    figures = _figures(runs)[:MOST_FIGURES]
    main = main_figure(runs)
    level = common_level([run.history for run in runs], main) if main else None
    reached = [] if level is None or len(runs) < 2 else [f"to {main} {level:.4g}"]
    titles = ["run", "backend", "workers", "window", "batch", "commits", "samples", "time",
              *(f"best {name}" for name in figures), *reached, "staleness", "ended"]  # fmt: skip
    lines = []
    for run in runs:
        history = run.history
        bests = [history.best(name) for name in figures]
        to_level = [_when(history.seconds_to(main, level)) for _ in reached if main and level]
        lines.append([
            run.head, history.backend or "-", str(history.workers),
            *(_whole(history.of_job(field)) for field in ("window", "batch")),
            f"{len(history):,}", f"{history.outcome.samples:,}",
            format_seconds(history.outcome.seconds),
            *(f"{best.figures[name]:.4g}" if best else "-"
              for name, best in zip(figures, bests, strict=True)),
            *to_level, _number(history.staleness.mean), ended(history),
        ])  # fmt: skip
    return table(titles, lines)


def ended(history: History) -> str:
    """How a run ended, in a word or two."""
    if history.divergence is not None:
        return "diverged"
    if history.outcome.meta.get("failed"):
        return "failed"
    if history.interrupted:
        return "interrupted"
    return "stopped early" if history.outcome.stopped else "done"


def learning(runs: Sequence[Run]) -> Markup:
    """Each figure, then the loss of the commits, against time and against samples."""
    drawn: list[tuple[str, list[_Curve]]] = [
        (figure, [_Curve(run, *run.history.curve(figure)) for run in runs])
        for figure in _figures(runs)[:MOST_FIGURES]
    ]
    losses = []
    for run in runs:
        columns = run.history.columns
        seconds, means = averaged(columns["seconds"], columns["loss"])
        samples, _ = averaged(columns["seen"], columns["loss"])
        losses.append(_Curve(run, seconds, samples, means))
    drawn.append((TRAINING_LOSS, losses))
    pieces = []
    for figure, curves in drawn:
        known = [curve for curve in curves if len(curve.values)]
        for what, format_x in (("time", format_seconds), ("samples", format_count)):
            lines = [
                Line(
                    curve.run.label,
                    (curve.seconds if what == "time" else curve.samples).astype(np.float64),
                    curve.values,
                    curve.run.number,
                )
                for curve in known
            ]
            axes = Axes(f"{figure} against {what}", format_x, _ceiling(figure, lines))
            pieces.append(f"<figure>{line_chart(lines, axes)}</figure>")
    return Markup(f'<div class="figures">{"".join(pieces)}</div>')


def _ceiling(figure: str, lines: Sequence[Line]) -> float:
    """What is beyond is cut: a loss that grows without end hides all others."""
    if not (lower_is_better(figure) and lines):
        return math.inf
    firsts = [line.y[np.isfinite(line.y)][:1] for line in lines]
    starts = [float(first[0]) for first in firsts if len(first)]
    return 3 * max(starts) if starts and max(starts) > 0 else math.inf


def efficiency(runs: Sequence[Run]) -> Markup:
    """E(row, column) of the main figure, for all pairs."""
    figure = main_figure(runs)
    curves = {} if figure is None else {run.number: run.history.curve(figure) for run in runs}
    known = [run for run in runs if run.number in curves and _usable(curves[run.number])]
    if figure is None or lower_is_better(figure) or len(known) < 2:
        return Markup("<p>It compares two runs or more by a figure that grows, such as "
                      "accuracy.</p>")  # fmt: skip
    lines = []
    for a in known:
        cells: list[str] = [a.head]
        for b in known:
            (a_seconds, _, a_values), (b_seconds, _, b_values) = curves[a.number], curves[b.number]
            value = analysis.temporal_efficiency(
                a_seconds.tolist(), a_values.tolist(), b_seconds.tolist(), b_values.tolist()
            )
            better = a is not b and value > 1
            cells.append(Markup(f"<b>{_number(value)}</b>") if better else _number(value))
        lines.append(cells)
    said = (
        f"Integral of {escape(figure)} over time of the row's run over that of the column's, up to "
        "the shorter time: above 1 the row's run made better use of it."
    )
    return Markup(f"<p>{said}</p>" + table(["", *(run.label for run in known)], lines))


def _usable(curve: tuple[Column, Column, Column]) -> bool:
    seconds, _, values = curve
    return bool(len(seconds) and seconds[-1] > 0 and np.isfinite(values).all())


def staleness(runs: Sequence[Run]) -> Markup:
    """A histogram a run, and their statistics."""
    pieces, lines = [], []
    for run in runs:
        history = run.history
        stats = history.staleness
        values = history.columns["staleness"][history.workers :]
        lines.append([run.head, f"{stats.commits:,}", str(history.workers - 1),
                      *map(_number, (stats.mean, stats.p50, stats.p95, stats.max))])  # fmt: skip
        if len(values):
            counts, labels = histogram(values)
            axes = Axes(f"{run.label}: commits by staleness")
            chart = bar_chart(counts, labels, axes, run.number)
            pieces.append(f"<figure>{chart}</figure>")
    figures = f'<div class="figures">{"".join(pieces)}</div>' if pieces else ""
    titles = ("run", "commits", "n - 1", "mean", "p50", "p95", "max")
    return Markup(figures + table(titles, lines))


def histogram(values: Column) -> tuple[list[float], list[str]]:
    """Counts and labels of at most `MOST_BINS` equally wide bins from 0 on."""
    width = -(-(int(values.max()) + 1) // MOST_BINS)
    counts = np.bincount(values // width)
    labels = [
        str(i) if width == 1 else f"{i * width}-{(i + 1) * width - 1}" for i in range(len(counts))
    ]
    return counts.astype(float).tolist(), labels


def momentum(runs: Sequence[Run]) -> Markup:
    """The estimates along each run, and their medians."""
    lines, rows = [], []
    for run in runs:
        history = run.history
        estimates = history.columns["momentum"]
        known = np.isfinite(estimates)
        spread = np.percentile(estimates[known], [25, 75]) if known.any() else (math.nan,) * 2
        rows.append([run.head, str(history.workers), _number(history.momentum),
                     f"{_number(spread[0])} to {_number(spread[1])}" if known.any() else "-",
                     _number(history.expected_momentum)])  # fmt: skip
        if known.any():
            x, y = averaged(history.columns["seen"][known].astype(np.float64), estimates[known])
            lines.append(Line(run.label, x, y, run.number))
            expected = np.full(2, history.expected_momentum)
            ends = np.array([0.0, float(x[-1])])
            lines.append(Line("1 - 1/n", ends, expected, run.number, dashed=True))
    axes = Axes("implicit momentum against samples; dashed: 1 - 1/n", top=1.5, bottom=-1.0)
    titles = ("run", "n", "median estimate", "middle half", "1 - 1/n")
    return Markup((line_chart(lines, axes) if lines else "") + table(titles, rows))


def workers(runs: Sequence[Run]) -> Markup:
    """A timeline a run, and the workers in figures."""
    pieces = []
    for run in runs:
        title = f"<h3>{escape(run.label)}</h3>" if len(runs) > 1 else ""
        pieces.append(f'{title}<div class="scroll">{timeline(run.history)}</div>')
        pieces.append(details("in figures", _worker_table(run.history)))
    return Markup("".join(pieces))


def _worker_table(history: History) -> Markup:
    _, of_worker = analysis.staleness(history.outcome.rows, history.workers)
    counts = {kind: Counter(event.worker for event in events_of(history.outcome, kind))
              for kind in ("lost", "restarted", "refused")}  # fmt: skip
    samples = np.bincount(_ranks(history), weights=history.columns["samples"]).tolist()
    lines = []
    for lane, count in zip(lanes_of(history), samples, strict=True):
        total = float(lane.answers[-1] - lane.begins[0])
        shares = [lane.seconds_of(kind) / total if total > 0 else math.nan for kind in KINDS]
        tau = of_worker.get(lane.worker)
        stats = (tau.mean, tau.p50, tau.p95, tau.max) if tau else (math.nan,) * 4
        lines.append([f"worker {lane.worker}", f"{len(lane.begins):,}", f"{count:,.0f}",
                      *(f"{100 * share:.0f} %" if math.isfinite(share) else "-"
                        for share in shares),
                      *map(_number, stats),
                      *(str(found[lane.worker]) for found in counts.values())])  # fmt: skip
    titles = ("worker", "commits", "samples", *KINDS, "staleness", "p50", "p95", "max",
              "lost", "restarted", "refused")  # fmt: skip
    return table(titles, lines[:MOST_ROWS])


def _ranks(history: History) -> Column:
    """The lane of each commit's worker."""
    ranks: Column = np.unique(history.columns["worker"], return_inverse=True)[1]
    return ranks


def events(runs: Sequence[Run]) -> Markup:
    """What happened how often, why commits were refused, and each event."""
    kinds = list(dict.fromkeys(e.kind for run in runs for e in run.history.outcome.events))
    if not kinds:
        return Markup("<p>No worker joined, left or was lost, and no commit was refused.</p>")
    counts = [[run.head, *_counts(run.history, kinds)] for run in runs]
    pieces = [table(["run", *(kind.replace("_", " ") for kind in kinds)], counts)]
    reasons = Counter((run.number, event.detail) for run in runs
                      for event in events_of(run.history.outcome, "refused"))  # fmt: skip
    if reasons:
        of_reason = [
            [runs[i].label, reason, f"{n:,}"] for (i, reason), n in reasons.most_common(40)
        ]
        pieces.append(table(("run", "refused because", "commits"), of_reason, "scroll left"))
    listed = [(run, event) for run in runs for event in run.history.outcome.events]
    lines = [[run.label, format_seconds(event.seconds),
              "server" if event.worker < 0 else f"worker {event.worker}",
              event.kind.replace("_", " "), Markup(f"<pre>{escape(event.detail[:4000])}</pre>")]
             for run, event in listed[:MOST_EVENTS]]  # fmt: skip
    more = f" (the first {MOST_EVENTS:,})" if len(listed) > MOST_EVENTS else ""
    titles = ("run", "time", "who", "what", "detail")
    pieces.append(details(f"all {len(listed):,}{more}", table(titles, lines, "scroll left")))
    return Markup("".join(pieces))


def _counts(history: History, kinds: Sequence[str]) -> list[str]:
    found = Counter(event.kind for event in history.outcome.events)
    return [f"{found[kind]:,}" for kind in kinds]


def made(runs: Sequence[Run], command: str) -> Markup:
    """The command, and each run's facts."""
    top = table((), [("command", command)], "scroll facts") if command else ""
    facts = [details(run.label, table((), run.history.facts(), "scroll facts")) for run in runs]
    return Markup(top + "".join(facts))


def _figures(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.history.figures))


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
