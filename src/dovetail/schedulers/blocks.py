"""Blocks: a long graph is cut after every op through which all paths pass.

Both papers schedule such blocks one after another ("Accelerate DNN Inference by Inter-Operator
Parallelism", 2019; Y. Ding et al., "IOS", MLSys 2021, https://arxiv.org/abs/2011.01302, section 5).
Nothing is lost where stages hold independent ops: an op that all others precede or follow is a
stage by itself. Where groups are chains, those that would cross a cut are.

Where cells read the two cells before (NASNet), no op is passed by all paths, and the papers cut by
hand between cells. This module cuts by `crossing`: after an op and all that it needs, where at most
so many of these ops are read later. That is pruning: ops of different blocks never run side by
side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dovetail.errors import TooManyStatesError
from dovetail.schedulers.records import KernelBlock, OpSet, members
from dovetail.schedulers.states import states_of


@dataclass(frozen=True)
class Part:
    """A block of a block. ops: of the whole, ascending; op i of `block` is `ops[i]`."""

    ops: tuple[int, ...]
    block: KernelBlock


def cut(block: KernelBlock, crossing: int = 0) -> list[Part]:
    """The parts, in running order; `crossing` 0: lossless cuts only. O(ops²) bits."""
    parts = []
    done = 0
    for prefix in [*prefixes(block, crossing), block.everything]:
        if prefix & ~done:
            parts.append(part_of(block, prefix & ~done))
            done |= prefix
    return parts


def prefixes(block: KernelBlock, crossing: int) -> list[OpSet]:
    """Sets of ops that a part may end with, each within the next."""
    chosen: list[OpSet] = []
    ancestors: list[OpSet] = []
    for op, before in enumerate(block.predecessors):
        above = before
        for producer in members(before):
            above |= ancestors[producer]
        ancestors.append(above)
        needed = above | 1 << op
        if crossing:
            read = sum(1 for o in members(needed) if block.successors[o] & ~needed)
            ends = read <= crossing and not (chosen and chosen[-1] & ~needed)
        else:
            ends = needed | block.descendants[op] == block.everything
        if ends:
            chosen.append(needed)
    return chosen


def part_of(block: KernelBlock, ops: OpSet) -> Part:
    """Some ops as a block of their own; what they read from elsewhere is there."""
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
    """A stage of a part as ops of the whole."""
    return sum(1 << part.ops[op] for op in members(stage))


def joined(parts: Sequence[tuple[Part, Sequence[OpSet]]]) -> list[OpSet]:
    """Stages of the whole, of those of its parts in order."""
    return [whole(part, stage) for part, stages in parts for stage in stages]


# ── Narrowing: pruning of blocks that are too wide to be searched whole ─────────────────────────
#
# First blocks are cut where nothing is lost. A block that still has too many states is cut where
# few of its ops are read later, after as long a part as can be searched. Where no such cut helps,
# the search keeps states within a window, the widest that can be searched.

MOST_CROSSING = 4
"""Most ops that are read after a cut, when a block is cut where something is lost."""


@dataclass(frozen=True)
class Narrowed:
    """Parts in running order; windows: of each part's states, 0: none; pruning: "" where nothing is
    left out."""

    parts: tuple[Part, ...]
    windows: tuple[int, ...]
    pruning: str = ""


def narrowed(block: KernelBlock, most: int) -> Narrowed:
    """Parts of at most `most` states each. O(parts x most x ready ops)."""
    parts: list[Part] = []
    crossings, windows = [0], []
    for part in cut(block):
        if _fits(part.block, most):
            parts.append(part)
            windows.append(0)
            continue
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
    said = []
    if max(crossings):
        said.append(f"cut where {max(crossings)} ops are read later")
    if any(windows):
        said.append(f"a window of {min(filter(None, windows))} ops")
    return Narrowed(tuple(parts), tuple(windows), " and ".join(said))


def _longest(block: KernelBlock, crossing: int, most: int) -> list[Part]:
    """Parts that end at such cuts, each as long as fits; empty where one does not fit."""
    ends = [*prefixes(block, crossing), block.everything]
    parts: list[Part] = []
    done, first = 0, 0
    while done != block.everything:
        # More ops never have fewer states: the last end that fits is found by bisection.
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
    """The widest window that leaves no more than `most` states."""
    window = 1
    while _fits(block, most, window + 1):
        window += 1
    return window


@lru_cache(maxsize=4096)  # networks repeat their cells
def _fits(block: KernelBlock, most: int, window: int = 0) -> bool:
    try:
        states_of(block, window, most)
    except TooManyStatesError:
        return False
    return True
