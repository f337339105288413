"""Turns streams into the steps that a host issues: run kernels, record events, await events.

    stream 0   record F ─────────────► 0 ── record A ──► ... ── wait J ──
    stream 1   wait F ──► 2 ── wait A ──► 3 ── record J ──────────┘

Side streams fork from stream 0 first, all by one event (F). Each wait for another stream has an
event of its own (A). All side streams join stream 0 at the end (J). An event is recorded before it
is awaited in the order of issue too, as capture demands: a wait for an event that was not recorded
yet waits for nothing.

Memory: an allocator that keeps free memory per stream gives memory that was freed on a stream to
whatever is issued to that stream next, at once. So a kernel's outputs are freed just before a
kernel of the *same* stream is issued that all their readers happen before. Freeing them sooner
would be wrong, because a reader in another stream might still run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.schedulers.dataflow import Streams, with_waits
from dovetail.schedulers.races import Buffer, happens_before
from dovetail.schedulers.records import KernelBlock, OpSet, members

Group = tuple[int, ...]
"""Kernels that are issued as one."""


@dataclass(frozen=True)
class RecordEvent:
    """Records an event, which happens when all that was issued to the stream has ended."""

    stream: int
    event: int


@dataclass(frozen=True)
class WaitEvent:
    """Makes all that is issued to the stream from now on start after the event."""

    stream: int
    event: int


@dataclass(frozen=True)
class RunKernels:
    """Runs a kernel, or several merged ones.

    dead   kernels whose outputs are freed before
    """

    stream: int
    kernels: Group
    dead: Group = ()


Step = RecordEvent | WaitEvent | RunKernels


def streams_of_stages(block: KernelBlock, stages: Sequence[Sequence[Group]], most: int) -> Streams:
    """At most `most` streams that run stages of groups, with merged kernels given as one group.

    The group with the most kernels goes first, and each group goes to the stream with the fewest
    kernels of that stage; of equal streams, to the first. Between stages kernels wait for what they
    read, not for whole stages.
    """
    orders: list[list[int]] = [[] for _ in range(most)]
    for groups in stages:
        load = [0] * most
        for group in sorted(groups, key=len, reverse=True):
            stream = min(range(most), key=load.__getitem__)
            orders[stream] += group
            load[stream] += len(group)
    return with_waits(block, orders)


def together(streams: Streams, merged: Collection[Group]) -> Streams:
    """The same streams, where merged kernels start and end as one.

    The first kernel of a group waits for what any of the group waits for, and whoever waits for one
    of them waits for the last. Raises ValueError unless the kernels of each group stand side by
    side in one stream, in ascending order.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for group in merged:
        order = next((o for o in streams.orders if group[0] in o), ())
        beside = tuple(sorted(group))
        start = order.index(beside[0]) if beside[0] in order else 0
        if order[start : start + len(group)] != beside or any(k in first for k in group):
            raise ValueError(f"merged kernels {group} must stand side by side in one stream")
        first |= dict.fromkeys(group, beside[0])
        last |= dict.fromkeys(group, beside[-1])
    waits = {(last.get(event, event), first.get(kernel, kernel)) for event, kernel in streams.waits}
    return Streams(streams.orders, tuple(sorted(waits)))


def as_one(
    block: KernelBlock,
    buffers: Sequence[Sequence[Buffer]],
    outputs: OpSet,
    merged: Collection[Group],
) -> tuple[KernelBlock, list[list[Buffer]], OpSet]:
    """(block, buffers, outputs) for `check_races`, in which merged kernels write as one.

    Merged kernels may write views of one tensor. So all that they write is ascribed to the first of
    them, and all their readers count as its readers.
    """
    before, owned = list(block.predecessors), [list(own) for own in buffers]
    for group in merged:
        first = min(group)
        for kernel in set(group) - {first}:
            for reader in (kernel, *members(block.successors[kernel])):
                before[reader] |= 1 << first
            owned[first] += owned[kernel]
            owned[kernel] = []
            outputs |= (outputs >> kernel & 1) << first
    return KernelBlock(tuple(before)), owned, outputs


def steps_of(
    block: KernelBlock, streams: Streams, merged: Collection[Group] = (), outputs: OpSet = 0
) -> tuple[Step, ...]:
    """The steps to issue, in order: one kernel of each stream in turn, side streams first.

    outputs   kernels whose outputs are kept to the end

    Raises `RaceError` for streams that deadlock or leave a kernel out.
    """
    streams = together(streams, merged)
    # [kernels] kernels that have surely ended when each starts.
    earlier = happens_before(block, streams)
    # [streams] what is issued as one, a kernel or a merged group, in order.
    group_of = {kernel: group for group in merged for kernel in group}
    units: list[list[Group]] = []
    for order in streams.orders:
        units.append([])
        left = list(order)
        while left:
            size = len(group_of.get(left[0], (left[0],)))
            units[-1].append(tuple(left[:size]))
            left = left[size:]
    # Kernel -> the events that it waits for, and those that it records.
    awaits: dict[int, list[int]] = defaultdict(list)
    records: dict[int, list[int]] = defaultdict(list)
    for event, (producer, consumer) in enumerate(streams.waits):
        awaits[consumer].append(event)
        records[producer].append(event)
    # The event of the fork; `fork` + s is the event of side stream s that joins.
    fork, sides = len(streams.waits), range(1, len(units))
    found: list[Step] = [RecordEvent(0, fork)] if sides else []
    found += [WaitEvent(side, fork) for side in sides]
    recorded: set[int] = set()
    # [streams] kernels whose outputs are not freed yet.
    live: list[list[int]] = [[] for _ in units]
    heads = [0] * len(units)
    # A kernel is issued only after the records of all events that it waits for. This ends, because
    # `happens_before` has refused streams that deadlock.
    while any(head < len(of) for head, of in zip(heads, units, strict=True)):
        for stream in [*sides, 0][: len(units)]:
            if heads[stream] == len(units[stream]):
                continue
            unit = units[stream][heads[stream]]
            if not recorded.issuperset(awaits[unit[0]]):
                continue
            # A kernel is dead if it and all its readers have surely ended when the unit starts.
            dead = tuple(
                kernel
                for kernel in live[stream]
                if not outputs >> kernel & 1
                and not (block.successors[kernel] | 1 << kernel) & ~earlier[unit[0]]
            )
            live[stream] = [k for k in live[stream] if k not in dead] + list(unit)
            found += [WaitEvent(stream, event) for event in awaits[unit[0]]]
            found.append(RunKernels(stream, unit, dead))
            found += [RecordEvent(stream, event) for event in records[unit[-1]]]
            recorded.update(records[unit[-1]])
            heads[stream] += 1
    found += [RecordEvent(side, fork + side) for side in sides]
    found += [WaitEvent(0, fork + side) for side in sides]
    return tuple(found)


def issue(
    steps: Sequence[Step], lanes: Sequence[Any], cuda: Any, run: Callable[[RunKernels], object]
) -> None:
    """Issue the steps to `lanes`, which are streams of `cuda` (`torch.cuda` or a fake of it).

    `run` is called for each kernel while the step's stream is the current one.
    """
    events: dict[int, Any] = {}
    for step in steps:
        if isinstance(step, RecordEvent):
            events[step.event] = cuda.Event()
            events[step.event].record(lanes[step.stream])
        elif isinstance(step, WaitEvent):
            lanes[step.stream].wait_event(events[step.event])
        else:
            with cuda.stream(lanes[step.stream]):
                run(step)


def readers_of(reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]) -> KernelBlock:
    """The block of kernels that read and write these tensors.

    A tensor that no kernel writes is an input, and nobody waits for it.
    """
    made: Mapping[int, int] = {t: k for k, own in enumerate(writes) for t in own}
    return KernelBlock(
        tuple(sum(1 << k for k in {made[t] for t in own if t in made}) for own in reads)
    )
