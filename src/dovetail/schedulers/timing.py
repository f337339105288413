"""Stage timers that time each distinct stage once, in however many states and blocks it occurs.

Two stages are equal if their groups are, in any order, and if both or neither can run merged; two
groups if their ops are equal one by one and read each other in the same way. Ops are equal if their
kernels' signatures are: kinds, attributes, shapes, strides and types of all that they are made of.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from dovetail.graph import Graph
from dovetail.graph.kernels import Kernels
from dovetail.schedulers.merge import can_merge
from dovetail.schedulers.records import (
    KernelBlock,
    OpSet,
    StageTimer,
    StageTiming,
    groups_of,
    members,
)

StageKey = tuple[tuple[tuple[Hashable, tuple[int, ...]], ...], ...]
"""Per group, sorted: per op its signature, and the places of those of the group that it reads."""


def block_of(graph: Graph, kernels: Kernels) -> KernelBlock:
    """Op i of the block is kernel i."""
    before = [0] * kernels.count
    readers = kernels.of_op[graph.readers]
    producers = kernels.of_op[graph.producers[graph.input_tensors]]
    ends = np.concatenate(
        [np.stack([producers, readers], axis=1), kernels.of_op[graph.control]], axis=0
    )
    ends = np.unique(ends[(ends >= 0).all(axis=1) & (ends[:, 0] != ends[:, 1])], axis=0)
    for producer, reader in ends.tolist():
        before[reader] |= 1 << producer
    return KernelBlock(tuple(before))


def signatures_of(graph: Graph, kernels: Kernels) -> list[str]:
    """[kernels] equal for kernels that cost the same."""
    parts: list[list[str]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel >= 0:
            parts[kernel].append(graph.signatures[op])
    return ["; ".join(of_kernel) for of_kernel in parts]


def key_of(block: KernelBlock, stage: OpSet, signatures: Sequence[Hashable]) -> StageKey:
    """What the stage's seconds depend on. `signatures` [ops] must be comparable."""
    group_keys = []
    for group in groups_of(block, stage):
        place = {op: i for i, op in enumerate(members(group))}
        group_keys.append(
            tuple(
                (signatures[op], tuple(place[p] for p in members(block.predecessors[op] & group)))
                for op in place
            )
        )
    return tuple(sorted(group_keys))


class OnceTimer:
    """A timer that has each distinct stage of any block timed once.

    asked, timed   stages that came up, and those that were handed on
    """

    def __init__(self) -> None:
        self.known: dict[tuple[StageKey, bool], StageTiming] = {}
        self.asked = self.timed = 0

    def of(
        self,
        block: KernelBlock,
        signatures: Sequence[Hashable],
        timer: StageTimer,
        merge_keys: Sequence[Hashable | None] = (),
    ) -> StageTimer:
        """A timer for one block, whose ops have these signatures; `timer` times what is new.

        merge_keys [ops]: as of `merge`, where the timer merges; equal ops of one input can be
        merged, of two inputs they cannot.
        """

        def time(stages: Sequence[OpSet]) -> list[StageTiming]:
            keys = [
                (
                    key_of(block, stage, signatures),
                    bool(merge_keys) and can_merge(merge_keys, tuple(members(stage))),
                )
                for stage in stages
            ]
            fresh = {
                key: stage
                for key, stage in zip(reversed(keys), reversed(stages), strict=True)
                if key not in self.known
            }
            self.asked += len(stages)
            self.timed += len(fresh)
            self.known.update(zip(fresh, timer(list(fresh.values())), strict=True))
            return [self.known[key] for key in keys]

        return time
