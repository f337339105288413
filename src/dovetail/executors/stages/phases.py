"""Turns a schedule into the phases that a CPU runs: of one op at a time, or of streams.

In a *whole* phase ops run one after another, each on all threads of the device. In a phase of
*streams* each op runs on one thread, and a stage begins when all streams have ended the stage
before. Going from one kind of phase to the other costs a hand-over between threads. So ops that are
alone in their stages get a whole phase only if a run of them wins more by it than the switch there
and back costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.results import KernelStage


@dataclass(frozen=True)
class SchedulePhase:
    """Kernels of one phase. `streams` is None if they run one after another on all threads."""

    kernels: tuple[int, ...]
    streams: Streams | None = None


@dataclass(frozen=True)
class AloneSeconds:
    """Seconds of each kernel by itself, measured within passes over the whole step.

    one_thread, all_threads   [kernels] seconds on one thread, and on all threads
    switching                 seconds of a switch from a whole phase to streams and back
    """

    one_thread: Sequence[float]
    all_threads: Sequence[float]
    switching: float

    def best(self, kernel: int) -> float:
        """Seconds of the kernel on one thread or on all, whichever is faster."""
        return min(self.one_thread[kernel], self.all_threads[kernel])


def whole(kernels: int) -> list[SchedulePhase]:
    """One phase that runs all kernels in order on all threads: what runs without a scheduler."""
    return [SchedulePhase(tuple(range(kernels)))] if kernels else []


def phases_of(
    stages: Sequence[KernelStage], alone: AloneSeconds, streams: int
) -> list[SchedulePhase]:
    """The phases that run these stages, in order."""
    # (the stages of a phase, True if it is whole); runs that win too little become streams.
    parts: list[tuple[list[KernelStage], bool]] = []
    for _, run in groupby(stages, key=lambda stage: len(stage.groups) > 1):
        own = list(run)
        kernels = [k for stage in own for k in stage.groups[0]]
        gained = sum(alone.one_thread[k] - alone.all_threads[k] for k in kernels)
        is_whole = len(own[0].groups) == 1 and gained > alone.switching
        if parts and not is_whole and not parts[-1][1]:
            parts[-1][0].extend(own)
        else:
            parts.append((own, is_whole))
    phases = []
    for own, is_whole in parts:
        if is_whole:
            phases.append(SchedulePhase(tuple(k for stage in own for k in stage.groups[0])))
            continue
        orders = [spread(stage.groups, alone.one_thread, streams) for stage in own]
        every = tuple(k for stage in own for k in stage.kernels)
        phases.append(SchedulePhase(every, barriers(orders)))
    return phases


def predicted(
    phases: Sequence[SchedulePhase], stages: Sequence[KernelStage], alone: AloneSeconds
) -> float:
    """Predicted seconds of `stages` when they run as `phases`.

    A stage of several groups takes its measured seconds. Kernels that run one after another take
    what each takes by itself on that number of threads. A merged stage was measured on one thread;
    on all threads it is assumed to gain the same factor as its kernels. Every phase of several
    streams costs one switch there and back, because the caller of a step counts as a whole phase.
    """
    with_all = {k for phase in phases if phase.streams is None for k in phase.kernels}
    started = sum(phase.streams is not None and len(phase.streams.orders) > 1 for phase in phases)
    seconds = []
    for stage in stages:
        one, every = (
            sum(of_kernels[k] for k in stage.kernels)
            for of_kernels in (alone.one_thread, alone.all_threads)
        )
        on_all = stage.kernels[0] in with_all
        if stage.merged:
            seconds.append(stage.seconds * (every / one if on_all else 1.0))
        elif len(stage.groups) > 1:
            seconds.append(stage.seconds)
        else:
            seconds.append(every if on_all else one)
    return started * alone.switching + sum(seconds)


def barriers(orders_of_stages: Sequence[Sequence[Sequence[int]]]) -> Streams:
    """Streams, of kernels given as [stages][streams], in which a stage waits for the one before."""
    count = max(map(len, orders_of_stages))
    orders: list[list[int]] = [[] for _ in range(count)]
    waits = []
    # Stream -> its last kernel in the stage before.
    last: dict[int, int] = {}
    for stage in orders_of_stages:
        for stream, kernels in enumerate(stage):
            if kernels:
                waits += [(k, kernels[0]) for other, k in last.items() if other != stream]
                orders[stream] += kernels
        last = {stream: kernels[-1] for stream, kernels in enumerate(stage) if kernels}
    return Streams(tuple(tuple(order) for order in orders if order), tuple(sorted(waits)))


def joined(phases: Sequence[SchedulePhase]) -> Streams:
    """Streams that stand for all phases one after another, for the check for races.

    The first stream has what whole phases run. Each phase waits for all of the phase before.
    """
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
    """[streams] kernels: the longest group goes first, each group to the stream that is free first.

    Equal groups go by position, and equally loaded streams by index.
    """
    orders: list[list[int]] = [[] for _ in range(streams)]
    loads = [0.0] * streams
    cost = [sum(seconds[k] for k in group) for group in groups]
    for place in sorted(range(len(groups)), key=lambda i: (-cost[i], i)):
        stream = loads.index(min(loads))
        orders[stream] += groups[place]
        loads[stream] += cost[place]
    return orders
