"""Proves, before anything runs, that streams and buffers have no race, or raises `RaceError`.

Op a *happens before* op b if a stands before b in a stream, if b waits for an event of a, or if a
happens before an op that happens before b. The rules that are checked:

1. Every op is in one stream, once.
2. Streams and waits cannot deadlock.
3. Every producer happens before every op that reads it.
4. If the buffers of two ops share bytes, then one of the ops, and all ops that read its output,
   happen before the other op. An output of the block is read after the block has run, so no op may
   write over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.errors import RaceError
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.records import KernelBlock, OpSet, members


@dataclass(frozen=True)
class Buffer:
    """The bytes from `start` up to `end` of a device's arena, where an op's output lives."""

    start: int
    end: int


def check_races(
    block: KernelBlock,
    streams: Streams,
    buffers: Sequence[Buffer | Sequence[Buffer] | None] = (),
    outputs: OpSet = 0,
) -> None:
    """Raise `RaceError` for the first rule that is broken.

    buffers   [ops] or empty: where each op's outputs live; None: in memory of their own
    outputs   ops whose outputs are read after the block has run
    """
    earlier = happens_before(block, streams)
    for op, producers in enumerate(block.predecessors):
        for producer in members(producers & ~earlier[op]):
            raise RaceError(3, producer, op, "nothing orders it before the op that reads it")
    placed = sorted(
        (b.start, b.end, op)
        for op, of_op in enumerate(buffers)
        for b in ((of_op,) if isinstance(of_op, Buffer) else of_op or ())
        if b.end > b.start
    )
    # A sweep over the arena from its first byte: `live` holds the buffers that reach beyond the
    # start of the next one, which are the only ones that can share bytes with it.
    live: list[tuple[int, int, int]] = []
    for start, end, op in placed:
        live = [other for other in live if other[1] > start]
        for _, _, other in live:
            if other != op and not (
                _over(block, earlier, outputs, other, op)
                or _over(block, earlier, outputs, op, other)
            ):
                raise RaceError(4, other, op, "they share bytes while both may be live")
        live.append((start, end, op))


def happens_before(block: KernelBlock, streams: Streams) -> list[OpSet]:
    """Return [ops] the set of ops that have ended for sure when each op starts.

    Raises `RaceError` for rules 1 and 2.
    """
    named = 0
    before: list[OpSet] = [0] * len(block)
    for order in streams.orders:
        last = None
        for op in order:
            if not 0 <= op < len(block) or named >> op & 1:
                raise RaceError(1, op, op, "it is named twice, or is no op of the block")
            named |= 1 << op
            if last is not None:
                before[op] |= 1 << last
            last = op
    for op in members(block.everything & ~named):
        raise RaceError(1, op, op, "no stream runs it")
    for event, waiting in streams.waits:
        before[waiting] |= 1 << event
    return _close(before)


def _close(before: list[OpSet]) -> list[OpSet]:
    """Return the transitive closure of `before` [ops]. Raises `RaceError` if it has a cycle."""
    after: list[list[int]] = [[] for _ in before]
    for op, direct in enumerate(before):
        for earlier in members(direct):
            after[earlier].append(op)
    left = [direct.bit_count() for direct in before]
    ready = [op for op, count in enumerate(left) if not count]
    closed: list[OpSet] = [0] * len(before)
    done = 0
    while ready:
        op = ready.pop()
        done += 1
        for later in after[op]:
            closed[later] |= closed[op] | 1 << op
            left[later] -= 1
            if not left[later]:
                ready.append(later)
    if done < len(before):
        op = next(op for op, count in enumerate(left) if count)
        raise RaceError(2, op, op, "it waits for itself, through streams and events")
    return closed


def _over(
    block: KernelBlock, earlier: Sequence[OpSet], outputs: OpSet, first: int, then: int
) -> bool:
    """Whether `then` may write over the output of `first`: both `first` and all its readers have
    ended when `then` starts, and the output is not one of the block."""
    used = block.successors[first] | 1 << first
    return not outputs >> first & 1 and not used & ~earlier[then]
