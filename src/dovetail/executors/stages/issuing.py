"""Turns streams into instructions: for threads that run them, and for a host that issues them.

    a stream of kernels       0 ──────► 1 ──────► 4         2 ──────► 5
    a thread has segments     [AwaitFlag 0, RunKernels 2 5, SendTensor 5]
    a host issues in turns    stream 0   record F ─────────────► 0 ── record A ──► ... ── wait J ──
                              stream 1   wait F ──► 2 ── wait A ──► 3 ── record J ──────────┘

*A segment* is a run of kernels with nothing to wait for between them. It begins where a kernel
waits for one of another stream, and it ends with a kernel that another stream awaits, whose number
is the flag. A tensor is freed by a segment after which all readers of the tensor have surely ended:
they are in the segment itself, or they ended before its last kernel.

*What a host issues*: side streams fork from stream 0 first, all by one event (F). Each wait for
another stream has an event of its own (A), whose number is the flag. All side streams join stream 0
at the end (J). An event is recorded before it is awaited in the order of issue too, as capture
demands: a wait for an event that was not recorded yet waits for nothing.

Memory there: an allocator that keeps free memory per stream gives memory that was freed on a stream
to whatever is issued to that stream next, at once. So a kernel's outputs are freed just before a
kernel of the *same* stream is issued that all their readers happen before. Freeing them sooner
would be wrong, because a reader in another stream might still run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dovetail.executors.gpus.streams import fork, join, mark
from dovetail.frontends.instructions import AwaitFlag, FreeTensors, Issue, RunKernels, SendTensor
from dovetail.schedulers.blocks import part_of
from dovetail.schedulers.dataflow import Streams, with_waits
from dovetail.schedulers.races import Buffer, happens_before
from dovetail.schedulers.records import KernelBlock, OpSet, members

Group = tuple[int, ...]
"""Kernels that are issued as one."""


StreamInstruction = AwaitFlag | RunKernels | SendTensor
Segments = list[list[StreamInstruction]]
"""[streams] the instructions of each."""


def segments_of(
    block: KernelBlock, streams: Streams, readers: Mapping[int, Iterable[int]]
) -> Segments:
    """[streams] the segments of each stream, which runs kernels of the block, not always all.

    readers   tensors that may be freed -> the kernels that use each, including its producer

    A tensor is in no `frees` if after no segment all of its readers have surely ended.
    """
    part = part_of(block, sum(1 << kernel for order in streams.orders for kernel in order))
    # A kernel's place within the part of the block. Sets of kernels have a bit for each place.
    place_of = {kernel: place for place, kernel in enumerate(part.ops)}
    within = Streams(
        tuple(tuple(place_of[kernel] for kernel in order) for order in streams.orders),
        tuple((place_of[event], place_of[kernel]) for event, kernel in streams.waits),
    )
    ended = happens_before(part.block, within)

    def as_set(kernels: Iterable[int]) -> OpSet:
        return sum(1 << place for place in {place_of[kernel] for kernel in kernels})

    awaited = {event for event, _ in streams.waits}
    waits: dict[int, list[int]] = defaultdict(list)
    for event, kernel in streams.waits:
        waits[kernel].append(event)
    # [streams][segments] kernels, and what has ended when a segment has.
    found: list[list[list[int]]] = []
    for order in streams.orders:
        found.append([])
        is_open = False
        for kernel in order:
            if waits[kernel] or not is_open:
                found[-1].append([])
            found[-1][-1].append(kernel)
            is_open = kernel not in awaited
    ended_by = [
        [as_set(kernels) | ended[place_of[kernels[-1]]] for kernels in segments]
        for segments in found
    ]
    at = {
        kernel: (stream, number)
        for stream, segments in enumerate(found)
        for number, kernels in enumerate(segments)
        for kernel in kernels
    }
    frees: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tensor, using in readers.items():
        needed = as_set(using)
        # The stream of the reader that is furthest along its own stream is tried first.
        after = max((at[kernel] for kernel in using), key=lambda place: place[1])
        for stream in (after[0], *range(len(found))):
            # Not before the last reader of this stream.
            first = max((at[k][1] for k in using if at[k][0] == stream), default=0)
            last = next(
                (n for n in range(first, len(found[stream])) if not needed & ~ended_by[stream][n]),
                None,
            )
            if last is not None:
                frees[stream, last].append(tensor)
                break
    instructions: Segments = []
    for stream, segments in enumerate(found):
        instructions.append([])
        for number, kernels in enumerate(segments):
            instructions[-1] += [AwaitFlag(flag=event) for event in waits[kernels[0]]]
            run = RunKernels(tuple(kernels), tuple(frees[stream, number]))
            instructions[-1].append(run)
            if kernels[-1] in awaited:
                instructions[-1].append(SendTensor(flag=kernels[-1]))
    return instructions


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
) -> tuple[Issue, ...]:
    """What to issue, in order: one kernel of each stream in turn, side streams first.

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
    found: list[Issue] = []
    recorded: set[int] = set()
    # [streams] kernels whose outputs are not freed yet.
    live: list[list[int]] = [[] for _ in units]
    heads = [0] * len(units)
    # A kernel is issued only after the records of all events that it waits for. This ends, because
    # `happens_before` has refused streams that deadlock.
    while any(head < len(of) for head, of in zip(heads, units, strict=True)):
        for stream in [*range(1, len(units)), 0][: len(units)]:
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
            waits = (AwaitFlag(flag=event) for event in awaits[unit[0]])
            free = (FreeTensors(dead),) if dead else ()
            ends = (SendTensor(flag=event) for event in records[unit[-1]])
            found.append(Issue(stream, (*waits, *free, RunKernels(unit), *ends)))
            recorded.update(records[unit[-1]])
            heads[stream] += 1
    return tuple(found)


def issue(
    steps: Sequence[Issue],
    lanes: Sequence[Any],
    cuda: Any,
    run: Callable[[Group], object],
    free: Callable[[Group], object] = lambda _kernels: None,
) -> None:
    """Issue all of this to `lanes`, one stream of `cuda` (`torch.cuda` or a fake of it) for each.

    `run` is called for each kernel, or several merged ones, and `free` for kernels whose outputs
    are freed, while the stream is the current one.
    """
    main, *sides = lanes
    if sides:
        fork(cuda, main, sides)
    events: dict[int, Any] = {}
    for step in steps:
        lane = lanes[step.lane]
        for instruction in step.instructions:
            match instruction:
                case SendTensor(flag=event):
                    events[event] = mark(cuda, lane)
                case AwaitFlag(flag=event):
                    lane.wait_event(events[event])
                case FreeTensors(tensors=kernels):
                    with cuda.stream(lane):
                        free(kernels)
                case RunKernels(kernels=kernels):
                    with cuda.stream(lane):
                        run(kernels)
    join(cuda, main, sides)
