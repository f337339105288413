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
"""The kinds of event. `_Events.latest` sorts events, so these numbers put ops before transfers."""
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
    # `now` is the moment from which on the step is explained; it goes back from the end to 0. An
    # event is taken once (`seen`), so that the walk ends even if measured clocks disagree.
    events = _Events(timeline, graph)
    compute = np.zeros(len(timeline.devices))
    transfers = np.zeros(len(timeline.channels))
    waiting = 0.0
    chain: list[Event] = []
    seen: set[Event] = set()
    now = timeline.step_seconds
    every = [(OP, i) for i in range(len(timeline.ops))]
    every += [(TRANSFER, i) for i in range(len(timeline.transfer_ops))]
    event = events.latest(every, now, seen)
    while event is not None:
        chain.append(event)
        seen.add(event)
        start, end = events.span(event)
        end, start = min(end, now), min(start, now)
        waiting += now - end
        kind, index = event
        if kind == OP:
            compute[timeline.op_devices[index]] += end - start
        else:
            transfers[timeline.transfer_channels[index]] += end - start
        now = start
        event = events.latest(events.causes(event), now, seen)
    # No event explains what is left before the first event of the chain.
    return StepLimits(compute, transfers, waiting + now, tuple(reversed(chain)))


class _Events:
    """The events of one timeline, and for each event those that it can have waited for.

    span_of_op         [ops] the op's span; -1: it has none, as source ops
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
        self.span_of_op = np.full(len(graph), -1, dtype=np.int64)
        self.span_of_op[timeline.ops] = np.arange(len(timeline.ops))
        by_start = np.argsort(timeline.op_starts, kind="stable")
        self.device_spans = [
            by_start[timeline.op_devices[by_start] == device]
            for device in range(len(timeline.devices))
        ]
        self.device_starts = [timeline.op_starts[spans].tolist() for spans in self.device_spans]
        self.channel_before: dict[int, int] = {}
        self.channel_transfers: dict[str, list[int]] = {}
        self.arrivals: dict[tuple[int, int, int], list[int]] = {}
        last_on: dict[int, int] = {}
        for i in np.argsort(timeline.transfer_starts, kind="stable").tolist():
            channel = int(timeline.transfer_channels[i])
            if channel in last_on:
                self.channel_before[i] = last_on[channel]
            last_on[channel] = i
            self.channel_transfers.setdefault(timeline.channels[channel], []).append(i)
            self.arrivals.setdefault(self._cargo(i, timeline.transfer_destinations), []).append(i)
        self.control_before: dict[int, list[int]] = {}
        for before, after in graph.control.tolist():
            self.control_before.setdefault(after, []).append(before)

    def span(self, event: Event) -> tuple[float, float]:
        """(start, end) of the event, in seconds."""
        kind, i = event
        t = self.timeline
        if kind == OP:
            return float(t.op_starts[i]), float(t.op_ends[i])
        return float(t.transfer_starts[i]), float(t.transfer_ends[i])

    def latest(self, candidates: list[Event], now: float, seen: set[Event]) -> Event | None:
        """The candidate that ended last before `now`; None if there is none. An event that began
        before `now` and ended after it counts as ended at `now`: in a measured run the clocks of
        devices can disagree."""
        best, best_end = None, -1.0
        # The events are sorted and the comparison is strict, so the first of equal ends is kept.
        for event in sorted(set(candidates) - seen):
            start, end = self.span(event)
            if (end <= now or start < now) and min(end, now) > best_end:
                best, best_end = event, min(end, now)
        return best

    def causes(self, event: Event) -> list[Event]:
        """All events that this event can have waited for."""
        kind, index = event
        timeline = self.timeline
        if kind == TRANSFER:
            # What it carries, and its channel.
            source = int(timeline.transfer_sources[index])
            events = self._run_on(source, int(timeline.transfer_ops[index]))
            # In the second of two hops over the host, another transfer brought the cargo to the
            # source.
            events += self._arrivals_of(self._cargo(index, timeline.transfer_sources))
            if index in self.channel_before:
                events.append((TRANSFER, self.channel_before[index]))
            # A channel with a device's name is that device, which may have run an op before.
            channel = timeline.channels[int(timeline.transfer_channels[index])]
            if channel in timeline.devices:
                start = float(timeline.transfer_starts[index])
                events += self._last_op(timeline.devices.index(channel), start)
            return events
        # Ops that start together on a device are a stage, which waits for the inputs of all of
        # them.
        device = int(timeline.op_devices[index])
        starts, start = self.device_starts[device], float(timeline.op_starts[index])
        first, stop = bisect_left(starts, start), bisect_right(starts, start)
        stage = self.device_spans[device][first:stop].tolist()
        # Ops of the same stage explain each other in one direction alone, by index.
        events = [(OP, member) for member in stage if member < index]
        events += self._last_op(device, start)
        # The last transfer before it that the device itself carried, if any.
        carried = self.channel_transfers.get(timeline.devices[device], [])
        before = bisect_left(carried, start, key=lambda i: float(timeline.transfer_starts[i]))
        events += [(TRANSFER, carried[before - 1])] if before else []
        for member in stage:
            op = int(timeline.ops[member])
            for tensor in self.graph.inputs_of(op).tolist():
                events += self._run_on(device, int(self.graph.producers[tensor]))
                events += self._arrivals_of((tensor, -1, device))
            for earlier in self.control_before.get(op, []):
                events += self._run_on(device, earlier)
                events += self._arrivals_of((-1, earlier, device))
        return events

    def _last_op(self, device: int, start: float) -> list[Event]:
        """The op that the device ran last before `start`, if any. One op of a stage stands for all
        of them, because they end together."""
        before = bisect_left(self.device_starts[device], start)
        return [(OP, int(self.device_spans[device][before - 1]))] if before else []

    def _run_on(self, device: int, op: int) -> list[Event]:
        """The op's run, if it ran on this device."""
        span = int(self.span_of_op[op])
        ran_here = span >= 0 and self.timeline.op_devices[span] == device
        return [(OP, span)] if ran_here else []

    def _arrivals_of(self, cargo: tuple[int, int, int]) -> list[Event]:
        return [(TRANSFER, i) for i in self.arrivals.get(cargo, [])]

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
