"""Blocks: a long graph is cut after every op through which all paths pass.

Both papers schedule such blocks one after another ("Accelerate DNN Inference by Inter-Operator
Parallelism", 2019; Y. Ding et al., "IOS", MLSys 2021, https://arxiv.org/abs/2011.01302, section 5).
Nothing is lost where stages hold independent ops: an op that all others precede or follow is a
stage by itself. Where groups are chains, those that would cross a cut are.

Where cells read the two cells before (NASNet), no op is passed by all paths, and the papers cut by
hand between cells. Ours does it by `crossing`: after an op and all that it needs, where at most so
many of these ops are read later. That is pruning: what could run beside another block does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.schedulers.records import Block, OpSet, members


@dataclass(frozen=True)
class Part:
    """A block of a block. ops: of the whole, ascending; op i of `block` is `ops[i]`."""

    ops: tuple[int, ...]
    block: Block


def cut(block: Block, crossing: int = 0) -> list[Part]:
    """The parts, in running order; `crossing` 0: lossless cuts only. O(ops²) bits."""
    parts = []
    done = 0
    for prefix in [*prefixes(block, crossing), block.everything]:
        if prefix & ~done:
            parts.append(part_of(block, prefix & ~done))
            done |= prefix
    return parts


def prefixes(block: Block, crossing: int) -> list[OpSet]:
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


def part_of(block: Block, ops: OpSet) -> Part:
    """Some ops as a block of their own; what they read from elsewhere is there."""
    chosen = tuple(members(ops))
    place = {op: i for i, op in enumerate(chosen)}
    return Part(
        chosen,
        Block(
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
