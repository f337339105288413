"""Cuts a long block into parts that are scheduled one after another.

The first kind of cut is after an op through which all paths pass. Both papers schedule the parts
between such cuts apart ("Accelerate DNN Inference by Inter-Operator Parallelism", 2019; Y. Ding et
al., "IOS", MLSys 2021, https://arxiv.org/abs/2011.01302, section 5). If stages hold independent ops
(`dos`), this cut loses nothing: an op that all others precede or follow is a stage by itself. If
stages hold groups of several ops (`ios`), it rules out the groups that would cross the cut.

If every cell reads the two cells before it (NASNet), no op lies on all paths, and the papers cut by
hand between cells. The second kind of cut replaces that: it is made after an op and all that this
op needs, if at most `crossing` of these ops are read later. This is pruning, because ops of
different parts never run side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dovetail.schedulers.records import KernelBlock, OpSet, members
from dovetail.schedulers.states import states_within


@dataclass(frozen=True)
class Part:
    """A part of a larger block, as a block of its own.

    ops     numbers of the part's ops in the larger block, ascending
    block   the part; its op i is op `ops[i]` of the larger block
    """

    ops: tuple[int, ...]
    block: KernelBlock


def cut(block: KernelBlock, crossing: int = 0) -> list[Part]:
    """Return the parts in running order. With `crossing` 0, only ops on all paths are cuts.

    O(ops²) bits.
    """
    parts = []
    done = 0
    for prefix in [*prefixes(block, crossing), block.everything]:
        if prefix & ~done:
            parts.append(part_of(block, prefix & ~done))
            done |= prefix
    return parts


def prefixes(block: KernelBlock, crossing: int) -> list[OpSet]:
    """Return the sets of ops after which a cut may be made; each contains the one before it."""
    chosen: list[OpSet] = []
    ancestors: list[OpSet] = []
    for op, before in enumerate(block.predecessors):
        above = before
        for producer in members(before):
            above |= ancestors[producer]
        ancestors.append(above)
        needed = above | 1 << op
        if crossing:
            # Cuts must be nested, because each part is the difference of two of them. So a set that
            # lacks an op of the last chosen set is no cut, however few of its ops are read later.
            read = sum(1 for o in members(needed) if block.successors[o] & ~needed)
            ends = read <= crossing and not (chosen and chosen[-1] & ~needed)
        else:
            ends = needed | block.descendants[op] == block.everything
        if ends:
            chosen.append(needed)
    return chosen


def part_of(block: KernelBlock, ops: OpSet) -> Part:
    """Return some ops as a block of their own. Edges from other ops are dropped: those have run."""
    chosen = tuple(members(ops))
    place = {op: i for i, op in enumerate(chosen)}
    return Part(
        chosen,
        KernelBlock(
            tuple(
                sum(1 << place[p] for p in members(block.predecessors[op] & ops)) for op in chosen
            )
        ),
    )


def whole(part: Part, stage: OpSet) -> OpSet:
    """Return a stage of a part, with its ops numbered as in the larger block."""
    return sum(1 << part.ops[op] for op in members(stage))


def joined(parts: Sequence[tuple[Part, Sequence[OpSet]]]) -> list[OpSet]:
    """Return the stages of all parts, part by part, numbered as in the larger block."""
    return [whole(part, stage) for part, stages in parts for stage in stages]


# ── Narrowing: pruning of blocks that are too wide to be searched whole ─────────────────────────
#
# A block is first cut after the ops that lie on all paths. If a part still has too many states, it
# is cut where few of its ops are read later, into parts that are each as long as can be searched.
# If no such cut helps, the search of this part keeps its states within a window, the widest with
# which it can be searched.

MOST_CROSSING = 4
"""A pruning cut is made only where at most this many ops before the cut are read after it."""


@dataclass(frozen=True)
class Narrowed:
    """A block as parts that are small enough to be searched.

    parts     in running order
    windows   [parts] window of the states of each part; 0: no window
    pruning   what the search leaves out, in words; "" if it leaves out nothing
    """

    parts: tuple[Part, ...]
    windows: tuple[int, ...]
    pruning: str = ""


def narrowed(block: KernelBlock, most: int) -> Narrowed:
    """Divide a block into parts of at most `most` states each. O(parts x most x ready ops)."""
    parts: list[Part] = []
    crossings, windows = [0], []
    for part in cut(block):
        if _fits(part.block, most):
            parts.append(part)
            windows.append(0)
            continue
        # The fewer ops are read across a cut, the fewer stages the cut rules out, so the lowest
        # crossing that is enough is taken.
        for crossing in range(1, MOST_CROSSING + 1):
            finer = _longest(part.block, crossing, most)
            if finer:
                crossings.append(crossing)
                parts += [
                    Part(tuple(part.ops[op] for op in inner.ops), inner.block) for inner in finer
                ]
                windows += [0] * len(finer)
                break
        else:
            windows.append(_window(part.block, most))
            parts.append(part)
    notes = []
    if max(crossings):
        notes.append(f"cut where {max(crossings)} ops are read later")
    if any(windows):
        notes.append(f"a window of {min(filter(None, windows))} ops")
    return Narrowed(tuple(parts), tuple(windows), " and ".join(notes))


def _longest(block: KernelBlock, crossing: int, most: int) -> list[Part]:
    """Return parts that end at cuts with this crossing, each as long as `most` states allow.

    The list is empty if even the shortest possible part has too many states.
    """
    ends = [*prefixes(block, crossing), block.everything]
    parts: list[Part] = []
    done, first = 0, 0
    while done != block.everything:
        # A longer part never has fewer states, so the last end that fits is found by bisection. The
        # step doubles from 1 until an end does not fit, so that few tried parts are much too long.
        fits, beyond = first - 1, len(ends)
        step = 1
        while beyond - fits > 1:
            tried = min(fits + step, (fits + beyond) // 2 if beyond < len(ends) else beyond - 1)
            if _fits(part_of(block, ends[tried] & ~done).block, most):
                fits, step = tried, 2 * step
            else:
                beyond = tried
        if fits < first:
            return []
        parts.append(part_of(block, ends[fits] & ~done))
        done, first = ends[fits], fits + 1
    return [part for part in parts if part.ops]


def _window(block: KernelBlock, most: int) -> int:
    """Return the widest window that leaves at most `most` states; 1 if none does."""
    window = 1
    while _fits(block, most, window + 1):
        window += 1
    return window


# Cached because networks repeat their cells: equal parts are asked about again and again.
@lru_cache(maxsize=4096)
def _fits(block: KernelBlock, most: int, window: int = 0) -> bool:
    """Whether the block has at most `most` states."""
    # Not `states_of`: it estimates how many there are before it raises, which takes longer.
    return states_within(block, window, most) is not None
