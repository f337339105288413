"""Finds what bounds a plan: the chain of events that makes the step as long as it is.

From the last event back to 0, each event is explained by the one that it waited for:

    cpu0   ├─── a ───┤▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒├── c ──┤     c waited for the transfer, that one for b
    wire                      ├── t ──┤
    cpu1   ├─────── b ───────┤                        chain: b, t, (waiting), c

An op waits for its device or for an input. Its device was held by the op that ran there before, or
by a transfer that the device carried itself. An input comes from a producer on the same device, or
by a transfer. A transfer waits for its channel or for the tensor that it carries.

Of all these events, the one that ended last is the one that was waited for. If several ended at one
instant, an op comes before a transfer, then the lowest index. Time that no event explains (the
overhead of a measured run) is waiting. The parts add up to the length of the step.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.plans import OPTIMAL_GAP, Plan
from dovetail.timeline import Timeline

OP, TRANSFER = 0, 1
"""The kinds of event."""
BOUND_SHARE = 0.9
"""A device that computes for at least this share of the step is said to bound it."""
Event = tuple[int, int]  # (OP, index of a span) or (TRANSFER, index of a transfer)


@dataclass(frozen=True, eq=False)
class StepLimits:
    """The seconds of the step's critical chain, by what they were spent on.

    compute_seconds    [devices] seconds in which ops of the chain ran
    transfer_seconds   [channels] seconds in which transfers of the chain ran
    waiting_seconds    seconds that no event explains
    chain              (OP, span) and (TRANSFER, transfer), from first to last
    """

    compute_seconds: NDArray[np.float64]
    transfer_seconds: NDArray[np.float64]
    waiting_seconds: float
    chain: tuple[Event, ...]

    @property
    def total_seconds(self) -> float:
        return float(
            self.compute_seconds.sum() + self.transfer_seconds.sum() + self.waiting_seconds
        )


def find_limits(timeline: Timeline, graph: Graph) -> StepLimits:
    """The critical chain of a step. O(spans log spans + reads along the chain)."""
    events = _Events(timeline, graph)
    spans = len(timeline.ops)
    compute = np.zeros(len(timeline.devices))
    transfers = np.zeros(len(timeline.channels))
    waiting = 0.0
    # An event is taken once, so that the walk ends even if measured clocks disagree.
    chain: dict[int, None] = {}
    # The moment from which on the step is explained; it goes back from the end to 0.
    now = timeline.step_seconds
    candidates = set(range(len(events.starts)))
    while True:
        # Of the candidates the one that ended last before `now`. An event that began before `now`
        # and ended after it counts as ended at `now`: in a measured run the clocks of devices can
        # disagree. The events are sorted and the comparison is strict, so the first of equal ends
        # is kept.
        latest, latest_end = -1, -1.0
        for event in sorted(candidates - chain.keys()):
            start, end = events.starts[event], events.ends[event]
            if (end <= now or start < now) and min(end, now) > latest_end:
                latest, latest_end = event, min(end, now)
        if latest < 0:
            break
        chain[latest] = None
        waiting += now - latest_end
        now = min(events.starts[latest], now)
        if latest < spans:
            compute[timeline.op_devices[latest]] += latest_end - now
        else:
            transfers[timeline.transfer_channels[latest - spans]] += latest_end - now
        candidates = events.causes(latest)
    # No event explains what is left before the first event of the chain.
    named = ((OP, e) if e < spans else (TRANSFER, e - spans) for e in reversed(chain))
    return StepLimits(compute, transfers, waiting + now, tuple(named))


class _Events:
    """The events of one timeline, numbered: its spans, then its transfers. For each event those
    that it can have waited for.

    starts, ends       [events] seconds
    span_of_op         op -> its span; source ops have none
    device_spans       [devices] the spans of each device, in the order in which they start
    device_starts      [devices] the times at which these spans start
    channel_before     transfer -> the transfer before it on its channel
    channel_transfers  channel's name -> its transfers, in the order in which they start
    arrivals           `_cargo` with the destination -> the transfers that bring this cargo there
    control_before     op -> the ops that it waits for by control edges
    """

    def __init__(self, timeline: Timeline, graph: Graph) -> None:
        self.timeline = timeline
        self.graph = graph
        self.starts: list[float] = [
            *timeline.op_starts.tolist(),
            *timeline.transfer_starts.tolist(),
        ]
        self.ends: list[float] = [*timeline.op_ends.tolist(), *timeline.transfer_ends.tolist()]
        self.span_of_op: dict[int, int] = {
            op: span for span, op in enumerate(timeline.ops.tolist())
        }
        by_start = np.argsort(timeline.op_starts, kind="stable")
        self.device_spans: list[list[int]] = [
            by_start[timeline.op_devices[by_start] == device].tolist()
            for device in range(len(timeline.devices))
        ]
        self.device_starts = [[self.starts[s] for s in spans] for spans in self.device_spans]
        self.channel_before: dict[int, int] = {}
        self.channel_transfers: dict[str, list[int]] = {}
        self.arrivals: dict[tuple[int, int, int], list[int]] = {}
        for i in np.argsort(timeline.transfer_starts, kind="stable").tolist():
            transfer = len(timeline.ops) + i
            channel = timeline.channels[int(timeline.transfer_channels[i])]
            before = self.channel_transfers.setdefault(channel, [])
            if before:
                self.channel_before[transfer] = before[-1]
            before.append(transfer)
            cargo = self._cargo(i, timeline.transfer_destinations)
            self.arrivals.setdefault(cargo, []).append(transfer)
        self.control_before: dict[int, list[int]] = {}
        for earlier, after in graph.control.tolist():
            self.control_before.setdefault(after, []).append(earlier)

    def causes(self, event: int) -> set[int]:
        """All events that this event can have waited for."""
        timeline, start, spans = self.timeline, self.starts[event], len(self.timeline.ops)
        if event >= spans:
            # What it carries, and its channel.
            i = event - spans
            events = self._run_on(int(timeline.transfer_sources[i]), int(timeline.transfer_ops[i]))
            # In the second of two hops over the host, another transfer brought the cargo to the
            # source.
            events += self.arrivals.get(self._cargo(i, timeline.transfer_sources), [])
            if event in self.channel_before:
                events.append(self.channel_before[event])
            # A channel with a device's name is that device, which may have run an op before.
            channel = timeline.channels[int(timeline.transfer_channels[i])]
            if channel in timeline.devices:
                events += self._last_op(timeline.devices.index(channel), start)
            return set(events)
        # Ops that start together on a device are a stage, which waits for the inputs of all of
        # them.
        device = int(timeline.op_devices[event])
        starts = self.device_starts[device]
        stage = self.device_spans[device][bisect_left(starts, start) : bisect_right(starts, start)]
        # Ops of the same stage explain each other in one direction alone, by index.
        events = [member for member in stage if member < event]
        events += self._last_op(device, start)
        # The last transfer before it that the device itself carried, if any.
        carried = self.channel_transfers.get(timeline.devices[device], [])
        before = bisect_left(carried, start, key=lambda transfer: self.starts[transfer])
        events += carried[max(before - 1, 0) : before]
        for member in stage:
            op = int(timeline.ops[member])
            for tensor in self.graph.inputs_of(op).tolist():
                events += self._run_on(device, int(self.graph.producers[tensor]))
                events += self.arrivals.get((tensor, -1, device), [])
            for earlier in self.control_before.get(op, []):
                events += self._run_on(device, earlier)
                events += self.arrivals.get((-1, earlier, device), [])
        return set(events)

    def _last_op(self, device: int, start: float) -> list[int]:
        """The op that the device ran last before `start`, if any. One op of a stage stands for all
        of them, because they end together."""
        before = bisect_left(self.device_starts[device], start)
        return self.device_spans[device][max(before - 1, 0) : before]

    def _run_on(self, device: int, op: int) -> list[int]:
        """The op's span, if it ran on this device."""
        span = self.span_of_op.get(op, -1)
        return [span] if span >= 0 and self.timeline.op_devices[span] == device else []

    def _cargo(self, transfer: int, devices: NDArray[np.int32]) -> tuple[int, int, int]:
        """The key by which a transfer and what it carries are matched: (tensor, -1, device), or for
        a control edge (-1, op, device). `devices` [transfers] are the sources of all transfers, or
        the destinations."""
        tensor = int(self.timeline.transfer_tensors[transfer])
        op = -1 if tensor >= 0 else int(self.timeline.transfer_ops[transfer])
        return tensor, op, int(devices[transfer])


def shares(limits: StepLimits, timeline: Timeline) -> list[tuple[str, float]]:
    """(what, share of the chain) of each part, largest first: computing on each device, transfers
    on each channel, and waiting."""
    total = limits.total_seconds or 1.0
    parts = [
        (f"computing on {name}", float(seconds))
        for name, seconds in zip(timeline.devices, limits.compute_seconds, strict=True)
    ]
    parts += [
        (f"transfers on {name}", float(seconds))
        for name, seconds in zip(timeline.channels, limits.transfer_seconds, strict=True)
    ]
    parts.append(("waiting that no op or transfer explains", limits.waiting_seconds))
    ordered = sorted(parts, key=lambda part: -part[1])
    return [(what, seconds / total) for what, seconds in ordered if seconds > 0]


def explain(limits: StepLimits, timeline: Timeline, plan: Plan, *, with_proof: bool = True) -> str:
    """Two or three sentences: what the critical chain is spent on, and what the bound proves of
    the plan, `with_proof`."""
    parts = [
        f"{100 * share:.0f} % {what}"
        for what, share in shares(limits, timeline)[:4]
        if share >= 0.005
    ]
    chain = ", ".join(parts) or "empty"
    if plan.objective not in ("step", "pipeline"):
        text = f"The plan is for {plan.objective}; of one step alone the critical chain is {chain}."
    else:
        text = f"The step's critical chain is {chain}."
        if limits.total_seconds > 0:
            # What the step is bound by, and what would shorten it.
            compute_seconds = float(limits.compute_seconds.sum())
            transfer_seconds = float(limits.transfer_seconds.sum())
            busy_shares = timeline.busy_seconds / timeline.step_seconds
            device, share = timeline.devices[int(busy_shares.argmax())], float(busy_shares.max())
            if limits.waiting_seconds > max(compute_seconds, transfer_seconds):
                binding = "waiting: overhead between ops outweighs the work"
            elif transfer_seconds > compute_seconds:
                binding = "transfers: a faster link, or fewer cuts, would shorten it"
            elif share >= BOUND_SHARE:
                binding = (
                    f"{device}, which computes {100 * share:.0f} % of the time: only less work "
                    "there, or a faster device, would shorten it"
                )
            else:
                binding = (
                    "ops that wait for one another: even the busiest device, "
                    f"{device}, computes only {100 * share:.0f} % of the time"
                )
            text += f" It is bound by {binding}."
    if plan.lower_bound <= 0 or not with_proof:
        return text
    which = "contiguous plan" if plan.contiguous else "plan"
    text += f" The bound '{plan.bound_proof}' proves that no {which} "
    if plan.gap <= OPTIMAL_GAP:
        return text + "is better, but for rounding."
    # The share is rounded down, so that the sentence stays true.
    percent = math.floor(1000 / (1 + plan.gap)) / 10
    return text + f"takes less than {percent:g} % of this plan's value."
