"""Times each distinct stage once, however many states and blocks it occurs in.

Two stages are equal if they have equal groups, in any order, and if both or neither can run merged.
Two groups are equal if their ops are equal one by one and read each other in the same way. Two ops
are equal if their kernels have the same signature: kinds, attributes, shapes, strides and dtypes of
all graph ops in the kernel.
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
"""What makes two stages equal: the keys of the groups, sorted. A group's key has for each op its
signature, and the places within the group of the ops that it reads."""


def block_of(graph: Graph, kernels: Kernels) -> KernelBlock:
    """Return which kernels wait for which, as a block; its op i is kernel i."""
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
    """Return [kernels] signatures, which are equal for kernels that cost the same."""
    parts: list[list[str]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel >= 0:
            parts[kernel].append(graph.signatures[op])
    return ["; ".join(of_kernel) for of_kernel in parts]


def key_of(block: KernelBlock, stage: OpSet, signatures: Sequence[Hashable]) -> StageKey:
    """Return what the stage's seconds depend on.

    signatures   [ops]; they must be sortable, because the groups are sorted
    """
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
    """Makes timers for blocks that share what they have timed, so that equal stages are timed once.

    known          timing of each distinct stage so far
    asked, timed   number of stages that were asked for, and of those that had to be timed
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
        """Return a timer for one block.

        signatures   [ops] of the block
        timer        times the stages that are new
        merge_keys   [ops] as for `merge`; () if `timer` does not merge. Two stages of equal ops can
                     differ here: ops that read one input can be merged, ops of two inputs cannot
        """

        def time(stages: Sequence[OpSet]) -> list[StageTiming]:
            keys = [
                (
                    key_of(block, stage, signatures),
                    bool(merge_keys) and can_merge(merge_keys, tuple(members(stage))),
                )
                for stage in stages
            ]
            # Of equal new stages the first is handed on: reversed, it is the last to be written.
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
