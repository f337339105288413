"""One op after another, but ops of one type that read one tensor become one, where that is faster.

The graph substitution that Z. Jia et al., "Optimizing DNN Computation with Relaxed Graph
Substitutions" (MetaFlow), MLSys 2019, finds on such networks, and the "merge" strategy of both
papers on stages: convolutions of one input are one convolution with the channels of all, the
smaller kernels padded with zeros to the size of the largest.

Ops may be merged that have the same *key*: what they read and all that must be equal. None of them
waits for another, for they read the same. Of each key's ops the best partition into merged sets is
found by a programme over their subsets:

    seconds(S) = min over subsets M of S that hold its first op of   merged(M) + seconds(S - M)
"""

from collections.abc import Hashable, Sequence

from dovetail.schedulers.records import (
    BlockSchedule,
    KernelBlock,
    OpSet,
    StageTimer,
    StageTiming,
    members,
    subsets_of,
)

MOST_MERGED = 8
"""Ops of one key that are partitioned together; where there are more, so many at a time."""


def can_merge(keys: Sequence[Hashable | None], ops: Sequence[int]) -> bool:
    """May these ops, two or more, be merged? keys [ops of the network or block]."""
    return len(ops) > 1 and len({keys[op] for op in ops}) == 1 and keys[ops[0]] is not None


def merge(block: KernelBlock, timer: StageTimer, keys: Sequence[Hashable | None]) -> BlockSchedule:
    """The stages of one op or one merged set each, in the order of their first ops.

    keys [ops]: None for an op that merges with none. O(3^`MOST_MERGED`) for each key.
    """
    alike: dict[Hashable, list[int]] = {}
    for op, key in enumerate(keys):
        if key is not None:
            alike.setdefault(key, []).append(op)
    sets = [
        sum(1 << op for op in ops[first : first + MOST_MERGED])
        for ops in alike.values()
        for first in range(0, len(ops), MOST_MERGED)
    ]
    stages = [1 << op for op in range(len(block))]
    stages += [m for whole in sets for m in subsets_of(whole) if m & (m - 1)]
    timings = dict(zip(stages, timer(stages), strict=True))
    chosen = {1 << op: timings[1 << op] for op in range(len(block))}
    transitions = 0
    for whole in sets:
        parts, compared = _partition(whole, timings)
        transitions += compared
        for op in members(whole):
            del chosen[1 << op]
        chosen |= {part: timings[part] for part in parts}
    order = sorted(chosen, key=lambda stage: stage & -stage)
    return BlockSchedule(
        tuple(order), tuple(chosen[s] for s in order), len(sets), transitions, len(timings)
    )


def _partition(whole: OpSet, timings: dict[OpSet, StageTiming]) -> tuple[list[OpSet], int]:
    """(the sets of least total seconds, how many were compared)."""
    best: dict[OpSet, tuple[float, OpSet]] = {0: (0.0, 0)}
    compared = 0
    for ops in sorted(subsets_of(whole)):  # every subset of a set is a smaller number
        first = ops & -ops
        choices = []
        for rest_of_part in (*subsets_of(ops ^ first), 0):
            part = first | rest_of_part
            if part == first or timings[part].merged:
                compared += 1
                choices.append((timings[part].seconds + best[ops ^ part][0], part))
        best[ops] = min(choices)
    parts = []
    left = whole
    while left:
        parts.append(best[left][1])
        left ^= best[left][1]
    return parts, compared
