"""Schedules ops on streams with events, without stages: an op waits only for the ops it reads.

This is list scheduling by critical path: of the ops that are ready, the one with the longest path
to the end goes first, on the stream where it can start earliest. R. L. Graham, "Bounds on
Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17, 1969. Differences: an op
sees the end of an op of another stream `wait_seconds` later. The papers on stages (`dos`, `ios`)
have no such schedule.

An op that reads the output of another stream waits for an event of that stream. Waits that are
implied by the order of a stream or by other waits are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dovetail.schedulers.records import KernelBlock, OpSet, members


@dataclass(frozen=True)
class Streams:
    """A schedule on streams.

    orders   [streams] the ops of each stream, in running order
    waits    (event, op): `op` starts only after `event`, an op of another stream, has ended
    """

    orders: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, int], ...]


def dataflow(
    block: KernelBlock, seconds: Sequence[float], streams: int, wait_seconds: float = 0.0
) -> tuple[Streams, float]:
    """Return a schedule on at most `streams` streams, and the seconds that it is predicted to take.

    seconds        [ops]
    wait_seconds   how much later than its end another stream sees that an op has ended

    Ties: the lowest op; the stream of the producer that ended last, then the lowest stream.
    O(ops x (ready ops + streams)).
    """
    # [ops] the seconds of the longest path from each op's start to the end of the block.
    ranks = list(seconds)
    for op in reversed(range(len(block))):
        ranks[op] += max((ranks[after] for after in members(block.successors[op])), default=0.0)
    orders: list[list[int]] = [[] for _ in range(streams)]
    free = [0.0] * streams
    ended = [0.0] * len(block)
    stream_of = [0] * len(block)
    left = [before.bit_count() for before in block.predecessors]
    ready = [op for op in range(len(block)) if not left[op]]
    while ready:
        op = min(ready, key=lambda op: (-ranks[op], op))
        ready.remove(op)
        producers = list(members(block.predecessors[op]))
        starts = [
            max([free[s], *(ended[p] + wait_seconds * (stream_of[p] != s) for p in producers)])
            for s in range(streams)
        ]
        # Of streams that could start equally early, the one of the producer that ended last is
        # taken, because there the op needs no event.
        near = stream_of[max(producers, key=lambda p: ended[p])] if producers else 0
        stream = min(range(streams), key=lambda s: (starts[s], s != near, s))
        stream_of[op] = stream
        orders[stream].append(op)
        free[stream] = ended[op] = starts[stream] + seconds[op]
        for consumer in members(block.successors[op]):
            left[consumer] -= 1
            if not left[consumer]:
                ready.append(consumer)
    return with_waits(block, orders), max(ended, default=0.0)


def replayed(
    block: KernelBlock, streams: Streams, seconds: Sequence[float], wait_seconds: float = 0.0
) -> float:
    """Return the seconds that the streams take, by the same rules as in `dataflow`."""
    stream_of = {op: s for s, order in enumerate(streams.orders) for op in order}
    before = {op: previous for order in streams.orders for previous, op in pairwise(order)}
    events: dict[int, list[int]] = {}
    for event, op in streams.waits:
        events.setdefault(op, []).append(event)
    ended: dict[int, float] = {}
    for op in _sequence(block, streams.orders):
        start = ended[before[op]] if op in before else 0.0
        for event in events.get(op, ()):
            late = wait_seconds if stream_of[event] != stream_of[op] else 0.0
            start = max(start, ended[event] + late)
        ended[op] = start + seconds[op]
    return max(ended.values(), default=0.0)


def with_waits(block: KernelBlock, orders: Sequence[Sequence[int]]) -> Streams:
    """Return streams with these orders, and the fewest waits that keep every edge of the block.

    Raises ValueError for orders that deadlock, or do not name every op once.
    """
    named = sorted(op for order in orders for op in order)
    if named != list(range(len(block))):
        raise ValueError("orders must name every op once")
    stream_of = {op: s for s, order in enumerate(orders) for op in order}
    previous = {op: before for order in orders for before, op in pairwise(order)}
    waits = []
    # For each op, the ops that have ended for sure when it starts.
    happened: dict[int, OpSet] = {}
    for op in _sequence(block, orders):
        ended = 0
        if op in previous:
            ended = happened[previous[op]] | 1 << previous[op]
        awaited = [p for p in members(block.predecessors[op]) if stream_of[p] != stream_of[op]]
        # A wait for one op also covers all that happened before that op, so the ops with the
        # longest history are waited for first.
        awaited.sort(key=lambda p: happened[p].bit_count(), reverse=True)
        for producer in awaited:
            if not ended >> producer & 1:
                waits.append((producer, op))
                ended |= happened[producer] | 1 << producer
        happened[op] = ended
    return Streams(tuple(tuple(order) for order in orders if order), tuple(sorted(waits)))


def _sequence(block: KernelBlock, orders: Sequence[Sequence[int]]) -> list[int]:
    """Return all ops in one order that keeps the block's edges and the order of each stream.

    Raises ValueError if there is no such order: then the streams would deadlock.
    """
    done, sequence = 0, []
    heads = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stream, order in enumerate(orders):
            while heads[stream] < len(order):
                op = order[heads[stream]]
                if block.predecessors[op] & ~done:
                    break
                sequence.append(op)
                done |= 1 << op
                heads[stream] += 1
                moved = True
    if len(sequence) < len(block):
        stuck = next(
            order[head] for head, order in zip(heads, orders, strict=True) if head < len(order)
        )
        raise ValueError(f"op {stuck} waits for an op that comes after it in its stream's order")
    return sequence
