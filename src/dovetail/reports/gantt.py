"""Draws who does what when, as inline SVG.

filling   the devices of a pipeline, with the samples that pass through it
lanes     the workers of a training run, with what each did
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.plans import Plan
from dovetail.reports.charts import key, svg, svg_path, svg_rect, svg_text, ticks
from dovetail.reports.kit import hint
from dovetail.units import format_seconds

if TYPE_CHECKING:
    # The page of a plan needs nothing of trainings.
    from dovetail.training import Event, History

Floats = NDArray[np.float64]

# ---- The pipeline that a plan for `load` fills: several samples in flight, a device a row ----
#
#     gpu0  |1111|2222|3333|4444|
#     gpu1       |111 |222 |333 |444 |
#     gpu2            |11111|22222|33333|44444|       one sample leaves every 5
#
# A device's stage takes its load, which counts its transfers. A sample enters a device when it has
# left all devices that this one reads from, and when the sample before it has left this one. If
# devices read from one another in a circle, they have no order. Then only the period is known.

SAMPLES = 6
"""The chart shows this many samples."""
FILLING_WIDTH, FILLING_ROW, GUTTER = 1000.0, 24.0, 130.0


@dataclass(frozen=True, eq=False)
class Filling:
    """The times at which the first samples pass through a pipeline.

    devices          [stages] devices in pipeline order
    starts, ends     [stages, samples] seconds at which each sample enters and leaves each device
    period_seconds   seconds between two samples that leave, once the pipeline is full
    """

    devices: tuple[int, ...]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    @property
    def period_seconds(self) -> float:
        return float((self.ends - self.starts).max(initial=0.0))


def fill(
    plan: Plan, graph: Graph, loads: dict[str, float], samples: int = SAMPLES
) -> Filling | None:
    """The times of the first samples on the devices that have a load; None if the devices read from
    one another in a circle."""
    names = plan.machine.device_names
    ops = np.flatnonzero(~graph.is_source)
    working = set(plan.placement[ops].tolist())
    stages = [d for d, name in enumerate(names) if d in working and loads.get(name, 0.0) > 0]
    # device -> the other devices with a load that it reads from. Sources do not count.
    before: dict[int, set[int]] = {device: set() for device in stages}
    makers = graph.producers[graph.input_tensors]
    real = ~graph.is_source[makers]
    reads = zip(plan.placement[makers[real]], plan.placement[graph.readers[real]], strict=True)
    for maker, reader in {(int(a), int(b)) for a, b in reads if a != b}:
        if maker in before and reader in before:
            before[reader].add(maker)
    order: list[int] = []
    # Devices whose order no read decides are ordered by the mean index of their ops.
    waiting = sorted(stages, key=lambda d: (float(np.mean(ops[plan.placement[ops] == d])), d))
    while waiting:
        ready = next((d for d in waiting if before[d] <= set(order)), None)
        if ready is None:
            return None
        order.append(ready)
        waiting.remove(ready)
    starts, ends = (np.zeros((len(order), samples)) for _ in range(2))
    row = {device: i for i, device in enumerate(order)}
    for i, device in enumerate(order):
        for sample in range(samples):
            arrived = max((ends[row[d], sample] for d in before[device]), default=0.0)
            free = ends[i, sample - 1] if sample else 0.0
            starts[i, sample] = max(arrived, free)
            ends[i, sample] = starts[i, sample] + loads[names[device]]
    return Filling(tuple(order), starts, ends)


def throughput(plan: Plan) -> tuple[str, str]:
    """The rate of the full pipeline: ("579 samples/s", "18.1 steps a second of 32"). The first
    dimension of the step's first input is its number of samples. ("", "") if the plan's value is
    0."""
    if plan.value <= 0:
        return "", ""
    shapes: Sequence[tuple[int, ...]] = plan.source.shapes
    batch = shapes[0][0] * plan.repeats if shapes and shapes[0] else 0
    if batch <= 1:
        return f"{1 / plan.value:.3g} samples/s", "once the pipeline is full"
    return f"{batch / plan.value:.3g} samples/s", f"{1 / plan.value:.3g} steps a second of {batch}"


def filling_chart(filling: Filling, names: Sequence[str]) -> Markup:
    """The chart as inline SVG, in the devices' colours. Samples are numbered, and every other one
    is paler."""
    end = float(filling.ends.max()) or 1.0
    height = FILLING_ROW * len(filling.devices)
    scale = (FILLING_WIDTH - GUTTER) / end
    parts = []
    for row, device in enumerate(filling.devices):
        y = row * FILLING_ROW
        parts.append(svg_text(0, y + 16, names[device]))
        spans = zip(filling.starts[row].tolist(), filling.ends[row].tolist(), strict=True)
        for sample, (start, stop) in enumerate(spans, 1):
            x, wide = GUTTER + scale * start, max(scale * (stop - start) - 1, 0.5)
            title = f"sample {sample} on {names[device]}: {format_seconds(start)} to "
            style = f"d{device}" + " pale" * (sample % 2 == 0)
            parts.append(
                svg_rect(x, y + 2, wide, FILLING_ROW - 4, style, title + format_seconds(stop))
            )
            if wide > 16:
                parts.append(svg_text(x + wide / 2, y + 16, str(sample), "middle", "mark"))
    parts.append(svg_text(GUTTER, height + 14, "0 s"))
    parts.append(svg_text(FILLING_WIDTH, height + 14, format_seconds(end), "end"))
    label = f"{filling.starts.shape[1]} samples through {len(filling.devices)} devices"
    return svg(parts, (FILLING_WIDTH, height + 18), "chart filling", label)


# ---- Lanes: what each worker did when ----
#
#     worker 0   ███▒░███▒░███▒░███▒░        compute, exchange, wait
#     worker 1   ███▒░███▒✕    ▲███▒░        ✕ lost, ▲ joined again
#
# Compute is from a window's first step to its last. Exchange is from there to the server's answer;
# with rules that gather it includes the wait for the other workers. Wait is the rest, from an
# answer to the next window. A run of many commits is drawn as shares of equal pieces of time
# instead of spans.

LANES_WIDTH, LABEL_WIDTH, RIGHT_MARGIN = 1100.0, 84.0, 20.0
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

    def spans_of(self, kind: str) -> tuple[Floats, Floats]:
        """(starts, ends) of the worker's spans of one kind. Waiting before the first window and
        after the last answer does not count."""
        if kind == "compute":
            return self.begins, self.ends
        if kind == "exchange":
            return self.ends, self.answers
        return self.answers[:-1], self.begins[1:]

    def seconds_of(self, kind: str) -> float:
        """The seconds of all spans of one kind."""
        starts, ends = self.spans_of(kind)
        return float((ends - starts).sum())


def timeline(history: "History") -> Markup:
    """The chart of the lanes of up to `MOST_WORKERS` workers, with at most `MOST_MARKS` marks of
    events: a sign in the worker's lane, or a line through all lanes if the server restarted. A
    worker's events at second 0 are left out: that is the start."""
    lanes, events = lanes_of(history), history.outcome.events
    if not lanes:
        return Markup("<p>No commit was recorded.</p>")
    shown = lanes[:MOST_WORKERS]
    last_event = max((event.seconds for event in events), default=0.0)
    last_answer = max(float(lane.answers[-1]) for lane in lanes)
    # A run without length is drawn as one of a second: all of it stands at the left end.
    end = max(history.outcome.seconds, last_event, last_answer)
    end = end if end > 0 else 1.0
    scale = (LANES_WIDTH - LABEL_WIDTH - RIGHT_MARGIN) / end
    as_spans = sum(3 * len(lane.begins) for lane in shown) <= MOST_SPANS
    tops = {lane.worker: i * (LANE_HEIGHT + GAP) for i, lane in enumerate(shown)}
    height = len(shown) * (LANE_HEIGHT + GAP)
    edges = np.linspace(0.0, end, PIECES + 1)
    piece_lefts, piece_width = LABEL_WIDTH + scale * edges[:-1], scale * end / PIECES
    parts = []
    for lane in shown:
        y = tops[lane.worker]
        parts.append(svg_text(LABEL_WIDTH - 8, y + BASELINE, f"worker {lane.worker}", "end"))
        floor = np.zeros(PIECES)
        for kind in KINDS:
            starts, stops = lane.spans_of(kind)
            if as_spans:
                # A box for each span. One path is much smaller than as many elements.
                lasting = stops > starts
                lefts = LABEL_WIDTH + scale * starts[lasting]
                rights = np.maximum(LABEL_WIDTH + scale * stops[lasting], lefts + LEAST_WIDTH)
                boxes = "".join(
                    f"M{left:.1f} {y:.0f}H{right:.1f}v{LANE_HEIGHT:.0f}H{left:.1f}z"
                    for left, right in zip(lefts.tolist(), rights.tolist(), strict=True)
                )
                parts.append(svg_path(boxes, kind))
                continue
            # Areas: for each piece of time the shares of compute (lowest), exchange and wait.
            share = np.diff(covered(starts, stops, edges)) / (end / PIECES)
            ceiling = np.minimum(floor + share, 1.0)
            # The path goes there along the upper staircase and back along the lower one. y grows
            # downwards: a share of 1 is at the top of the lane, at `y`.
            uppers, lowers = y + LANE_HEIGHT * (1 - ceiling), y + LANE_HEIGHT * (1 - floor)
            there = zip(piece_lefts, uppers, strict=True)
            back = zip(piece_lefts[::-1], lowers[::-1], strict=True)
            edge = f"M{LABEL_WIDTH:.1f} {lowers[0]:.1f}"
            edge += "".join(f"V{b:.1f}H{a + piece_width:.1f}" for a, b in there)
            edge += "".join(f"V{b:.1f}H{a:.1f}" for a, b in back)
            parts.append(svg_path(f"{edge}z", kind))
            floor = ceiling
    marks: list[str] = []
    for event in events:
        x = LABEL_WIDTH + scale * max(event.seconds, 0.0)
        said = f"{event_owner(event)} {event_name(event)} at {format_seconds(event.seconds)}"
        if event.detail.strip():
            # The last line of the detail: of a traceback, that is the error.
            said += f": {event.detail.strip().splitlines()[-1][:200]}"
        if event.worker in tops and event.kind in MARKS and event.seconds > 0:
            y = tops[event.worker] + BASELINE
            marks.append(svg_text(x, y, MARKS[event.kind], "middle", "mark", said))
        elif event.kind == "server_restarted":
            marks.append(svg_path(f"M{x:.1f} 0V{height:.0f}", "mark", said))
    parts += marks[:MOST_MARKS]
    for value in ticks(0.0, end):
        x = LABEL_WIDTH + scale * value
        parts.append(svg_text(x, height + BASELINE, format_seconds(value), "middle"))
    title = f"{history.name}: what each of {len(lanes)} workers did when"
    chart = svg(parts, (LANES_WIDTH, height + 18), "chart lanes", title)
    hints = []
    if not as_spans:
        hints.append(f"Shares of pieces of {format_seconds(end / PIECES)}.")
    if len(lanes) > len(shown):
        hints.append(f"{len(lanes) - len(shown)} more workers are not drawn.")
    return chart + key((kind, kind, "") for kind in KINDS) + hint(" ".join(hints))


def lanes_of(history: "History") -> list[Lane]:
    """A lane for each worker, by number. Clocks of processes differ a little, so times are clipped:
    no span is negative, and no window begins before the last one was answered."""
    columns = history.columns
    lanes = []
    for worker in np.unique(columns["worker"]).tolist():
        of_worker = columns["worker"] == worker
        order = np.argsort(columns["seconds"][of_worker], kind="stable")
        answers = np.maximum(columns["seconds"][of_worker][order], 0.0)
        before = np.concatenate([[0.0], answers[:-1]])
        begins = np.clip(columns["begin_seconds"][of_worker][order], before, answers)
        ends = np.clip(columns["end_seconds"][of_worker][order], begins, answers)
        lanes.append(Lane(worker, begins, ends, answers))
    return lanes


def covered(starts: Floats, stops: Floats, edges: Floats) -> Floats:
    """[edges] the seconds from 0 to each edge that lie within the spans, which do not overlap."""
    if not len(starts):
        return np.zeros(len(edges))
    # The covered time grows linearly within a span and is constant between two, so interpolating
    # between the ends of spans is exact.
    total = np.cumsum(stops - starts)
    moments = np.stack([starts, stops], axis=1).ravel()
    seconds = np.stack([total - (stops - starts), total], axis=1).ravel()
    return np.interp(edges, moments, seconds)


def event_owner(event: "Event") -> str:
    """The one to whom an event happened."""
    return "server" if event.worker < 0 else f"worker {event.worker}"


def event_name(event: "Event") -> str:
    """The kind of an event, in words."""
    return event.kind.replace("_", " ")
