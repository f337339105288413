"""Runs one op after another, but merges ops of one type that read one tensor, where that is faster.

Merged convolutions of one input are one convolution that has the output channels of all; smaller
filters are padded with zeros to the size of the largest. Z. Jia et al., "Optimizing DNN Computation
with Relaxed Graph Substitutions" (MetaFlow), MLSys 2019, finds this graph substitution on such
networks, and both papers on stages (`dos`, `ios`) have it as their "merge" strategy.

Ops may be merged if they have the same *key*. A key names the tensor that they read and every
attribute that must be equal. Ops that read the same tensor do not wait for each other. For the ops
of each key, a dynamic programme over their subsets finds the best partition into merged sets:

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
"""At most this many ops of one key are partitioned together; more are taken this many at a time."""


def can_merge(keys: Sequence[Hashable | None], ops: Sequence[int]) -> bool:
    """Whether these ops are two or more of one key. keys: [ops of the network or block]."""
    return len(ops) > 1 and len({keys[op] for op in ops}) == 1 and keys[ops[0]] is not None


def merge(block: KernelBlock, timer: StageTimer, keys: Sequence[Hashable | None]) -> BlockSchedule:
    """Return stages of one op or one merged set each, in the order of their first ops.

    keys   [ops]; None for an op that merges with no other

    O(3^`MOST_MERGED`) for each set of `MOST_MERGED` ops of one key.
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
    # `m & (m - 1)` is 0 for a set of one op; those stages are in the list already.
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
    """Return (the sets with the least total seconds, how many choices were compared)."""
    best: dict[OpSet, tuple[float, OpSet]] = {0: (0.0, 0)}
    compared = 0
    # Every proper subset is a smaller number than its set, so ascending order does subsets first.
    for ops in sorted(subsets_of(whole)):
        first = ops & -ops
        choices = []
        for rest_of_part in (*subsets_of(ops ^ first), 0):
            part = first | rest_of_part
            # A set that the timer would not run merged is no choice here.
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
