"""One self-contained page about training runs: several rules side by side, or one run alone.

    head        runs, the best figure, the fastest to what all reached
    learning    figures against time and samples                        training_sections.py
    asynchrony  staleness, implicit momentum, temporal efficiency       training_sections.py
    workers     what each did when, and what happened to it             training_timeline.py

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.reports.markup import Markup, cards, details, policy, table
from dovetail.reports.plots import COLOURS, Axes, Line, averaged, bar_chart, line_chart, ticks
from dovetail.runtime.files import write_atomically
from dovetail.training import analysis
from dovetail.training.history import Column, History, common_level, events_of, lower_is_better
from dovetail.training.records import Event
from dovetail.units import format_count, format_seconds

# What each worker of a training run did when, as inline SVG.
#
#     worker 0   ███▒░███▒░███▒░███▒░        compute, exchange, wait
#     worker 1   ███▒░███▒✕    ▲███▒░        ✕ lost, ▲ joined again
#
# Compute is from a window's first step to its last; exchange from there to the server's answer,
# which in rules that gather includes the wait for the others; wait is what remains. A run of many
# commits is drawn as shares of equal pieces of time instead of spans.


Floats = NDArray[np.float64]
WIDTH, LABELS, ROW, GAP = 1100.0, 84.0, 16.0, 5.0
MOST_WORKERS, MOST_SPANS, MOST_MARKS = 40, 3000, 200
PIECES = 300
KINDS = ("compute", "exchange", "wait")
MARKS = {"lost": "✕", "restarted": "▲", "joined": "▲", "refused": "!"}


@dataclass(frozen=True, eq=False)
class Lane:
    """One worker's windows in order [windows]; each ends before the next begins."""

    worker: int
    begins: Floats
    ends: Floats
    answers: Floats

    def seconds_of(self, kind: str) -> float:
        """In all; waiting is counted from the first window's begin to the last answer."""
        if kind == "compute":
            return float((self.ends - self.begins).sum())
        if kind == "exchange":
            return float((self.answers - self.ends).sum())
        return float((self.begins[1:] - self.answers[:-1]).sum())

    def spans_of(self, kind: str) -> tuple[Floats, Floats]:
        """Where its spans of one kind begin and end."""
        if kind == "compute":
            return self.begins, self.ends
        if kind == "exchange":
            return self.ends, self.answers
        return self.answers[:-1], self.begins[1:]


def lanes_of(history: History) -> list[Lane]:
    """A lane a worker, by number. Clocks that differ between processes by a little are put right:
    no span is negative and no window begins before the last was answered."""
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


def timeline(history: History) -> str:
    """The lanes of up to `MOST_WORKERS` workers, and what happened to them."""
    lanes = lanes_of(history)
    if not lanes:
        return "<p>No commit was recorded.</p>"
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
    return (
        f'<svg class="chart lanes" viewBox="0 -2 {WIDTH:.0f} {height + 20:.0f}" role="img" '
        f'aria-label="{escape(what)}">{"".join(parts)}</svg><ul class="key">{keys}</ul>{hint}'
    )


def _at(seconds: float, end: float) -> float:
    return LABELS + (WIDTH - LABELS - 20) * seconds / end


def _spans(lane: Lane, y: float, end: float) -> str:
    """A path a kind, of a box a span."""
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
    """What share of each piece of time was computed (from below), exchanged and waited."""
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
    """Seconds of [0, edge] that lie within the spans, for each edge."""
    if not len(starts):
        return np.zeros(len(edges))
    total = np.cumsum(stops - starts)
    moments = np.stack([starts, stops], axis=1).ravel()
    seconds = np.stack([total - (stops - starts), total], axis=1).ravel()
    return np.interp(edges, moments, seconds)


def _band(floor: Floats, ceiling: Floats, y: float) -> str:
    """The area between two staircases of shares."""
    width = (WIDTH - LABELS - 20) / PIECES
    left = LABELS + width * np.arange(PIECES)
    top, bottom = y + ROW * (1 - ceiling), y + ROW * (1 - floor)
    up = "".join(f"V{b:.1f}H{x + width:.1f}" for x, b in zip(left, top, strict=True))
    down = "".join(f"V{b:.1f}H{x:.1f}" for x, b in zip(left[::-1], bottom[::-1], strict=True))
    return f"M{LABELS:.1f} {bottom[0]:.1f}{up}{down}z"


def _marks(
    events: tuple[Event, ...], rows: dict[int, float], end: float, height: float
) -> list[str]:
    """A sign in the worker's lane; a line through all for what happened to the server. What
    happened at the very start is no news."""
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


# The sections of the page about training runs, each as markup.


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


def made_section(runs: Sequence[Run], command: str) -> Markup:
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


MOST_RUNS = 40


def write_training_page(
    histories: Sequence[History], path: str | os.PathLike[str], *, made: str = ""
) -> None:
    """Write the page of these runs to `path`, whole or not at all. Their order is kept.

    made   the command that made it

    Raises `UnwritableError`, and `UsageError` for no run or more than `MOST_RUNS`.
    """
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, render_training(histories, made=made).encode("utf-8", "replace"))


def render_training(histories: Sequence[History], *, made: str = "") -> str:
    """The page as text. O(commits); what is drawn of a run is bounded whatever its length."""
    if not 0 < len(histories) <= MOST_RUNS:
        raise UsageError("histories", f"there are {len(histories)}; a page shows 1 to {MOST_RUNS}")
    runs = [
        Run(i, label, history)
        for i, (label, history) in enumerate(zip(_labels(histories), histories, strict=True))
    ]
    style = "\n".join(_asset(name) for name in ("page.css", "training.css"))
    title = "Training by " + ", ".join(dict.fromkeys(run.history.name for run in runs))
    parts = {
        "policy": policy(style),
        "title": escape(title),
        "style": style,
        "cards": head(runs),
        "runs": runs_table(runs),
        "learning": learning(runs),
        "efficiency": efficiency(runs),
        "staleness": staleness(runs),
        "momentum": momentum(runs),
        "workers": workers(runs),
        "events": events(runs),
        "made": made_section(runs, made),
    }
    # One pass over the template: what is filled in is not searched again.
    pieces = _asset("training.html").split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _labels(histories: Sequence[History]) -> list[str]:
    """The runs' names; where two are the same with workers and window, then with a number."""
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
