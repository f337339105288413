"""A schedule as a CPU runs it: phases of one op at a time, and phases of several.

In a *whole* phase ops run one after another with all threads of the device. In a phase of *streams*
each runs on one thread, and a stage begins when all streams have ended the one before. Going from
one kind to the other costs a hand-over between threads, so an op alone in its stage runs with all
threads only where a run of such ops wins more by it than two hand-overs cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.results import KernelStage


@dataclass(frozen=True)
class SchedulePhase:
    """streams: None for one kernel after another with all threads."""

    kernels: tuple[int, ...]
    streams: Streams | None = None


@dataclass(frozen=True)
class AloneSeconds:
    """[kernels] seconds of each by itself within a step, on one thread and on all; switching: from
    a whole phase to streams and back."""

    one_thread: Sequence[float]
    all_threads: Sequence[float]
    switching: float

    def best(self, kernel: int) -> float:
        return min(self.one_thread[kernel], self.all_threads[kernel])


def whole(kernels: int) -> list[SchedulePhase]:
    """All in order, with all threads: what runs without a scheduler."""
    return [SchedulePhase(tuple(range(kernels)))] if kernels else []


def phases_of(
    stages: Sequence[KernelStage], alone: AloneSeconds, streams: int
) -> list[SchedulePhase]:
    """Phases of stages in running order."""
    runs = [list(run) for _, run in groupby(stages, key=lambda s: len(s.groups) > 1)]
    together: list[KernelStage] = []
    found: list[SchedulePhase] = []
    for run in runs:
        if len(run[0].groups) == 1 and _gains(run, alone) > alone.switching:
            if together:
                found.append(_streamed(together, alone, streams))
                together = []
            found.append(SchedulePhase(tuple(k for stage in run for k in stage.groups[0])))
        else:
            together += run
    if together:
        found.append(_streamed(together, alone, streams))
    return found


def predicted(
    phases: Sequence[SchedulePhase], stages: Sequence[KernelStage], alone: AloneSeconds
) -> float:
    """Seconds of stages that run as these phases of theirs.

    Stages of several groups take what was measured; kernels that run one after another what each
    takes by itself on as many threads as it has there. A merged stage was measured on one thread;
    with all it is taken to be as much quicker as its kernels are. Every phase of several streams is
    gone to and come back from: the caller of a step is as a whole phase.
    """
    with_all = {k for phase in phases if phase.streams is None for k in phase.kernels}
    started = sum(phase.streams is not None and len(phase.streams.orders) > 1 for phase in phases)
    seconds = (_seconds(stage, stage.kernels[0] in with_all, alone) for stage in stages)
    return started * alone.switching + sum(seconds)


def barriers(orders_of_stages: Sequence[Sequence[Sequence[int]]]) -> Streams:
    """[stages][streams] kernels -> streams in which each stage waits for all of the one before."""
    count = max(map(len, orders_of_stages))
    orders: list[list[int]] = [[] for _ in range(count)]
    waits = []
    last: dict[int, int] = {}  # stream -> its last kernel that others may not have waited for
    for stage in orders_of_stages:
        for stream, kernels in enumerate(stage):
            if kernels:
                waits += [(k, kernels[0]) for other, k in last.items() if other != stream]
                orders[stream] += kernels
        last = {stream: kernels[-1] for stream, kernels in enumerate(stage) if kernels}
    return Streams(tuple(tuple(order) for order in orders if order), tuple(sorted(waits)))


def joined(phases: Sequence[SchedulePhase]) -> Streams:
    """Streams of all phases: what a whole phase runs is in the first, and each phase waits for all
    of the one before."""
    orders: list[list[int]] = [[]]
    waits: list[tuple[int, int]] = []
    before: dict[int, int] = {}
    for phase in phases:
        own = (phase.kernels,) if phase.streams is None else phase.streams.orders
        waits += () if phase.streams is None else phase.streams.waits
        for stream, order in enumerate(own):
            if stream == len(orders):
                orders.append([])
            waits += [(last, order[0]) for at, last in before.items() if at != stream]
            orders[stream] += order
        before = before | {s: order[-1] for s, order in enumerate(own)}
    return Streams(tuple(tuple(order) for order in orders), tuple(waits))


def spread(
    groups: Sequence[Sequence[int]], seconds: Sequence[float], streams: int
) -> list[list[int]]:
    """Groups over streams, the longest first, each to the stream that is free first."""
    orders: list[list[int]] = [[] for _ in range(streams)]
    loads = [0.0] * streams
    cost = [sum(seconds[k] for k in group) for group in groups]
    for place in sorted(range(len(groups)), key=lambda i: (-cost[i], i)):
        stream = loads.index(min(loads))
        orders[stream] += groups[place]
        loads[stream] += cost[place]
    return orders


def _seconds(stage: KernelStage, with_all: bool, alone: AloneSeconds) -> float:
    one, every = (
        sum(seconds[k] for k in stage.kernels) for seconds in (alone.one_thread, alone.all_threads)
    )
    if stage.merged:
        return stage.seconds * (every / one if with_all else 1.0)
    if len(stage.groups) > 1:
        return stage.seconds
    return every if with_all else one


def _gains(run: Sequence[KernelStage], alone: AloneSeconds) -> float:
    """What all threads win over one, for kernels that run one after another."""
    kernels = [k for stage in run for k in stage.groups[0]]
    return sum(alone.one_thread[k] - alone.all_threads[k] for k in kernels)


def _streamed(stages: Sequence[KernelStage], alone: AloneSeconds, streams: int) -> SchedulePhase:
    orders = [spread(stage.groups, alone.one_thread, streams) for stage in stages]
    kernels = tuple(k for stage in stages for k in stage.kernels)
    return SchedulePhase(kernels, barriers(orders))
