"""What each worker of a training run did when, as inline SVG.

    worker 0   ███▒░███▒░███▒░███▒░        compute, exchange, wait
    worker 1   ███▒░███▒✕    ▲███▒░        ✕ lost, ▲ joined again

Compute is from a window's first step to its last; exchange from there to the server's answer,
which in rules that gather includes the wait for the others; wait is what remains. A run of many
commits is drawn as shares of equal pieces of time instead of spans.
"""

from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from dovetail.reports.plots import ticks
from dovetail.training.history import History
from dovetail.training.records import Event
from dovetail.units import format_seconds

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
