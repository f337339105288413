"""Counts how often the sum over the stages predicts which of two schedules is faster.

Every search here adds up stages that were timed one by one. That is sound as far as measured
schedules have the order of their sums. Paper: "Accelerate DNN Inference by Inter-Operator
Parallelism", 2019, figure 7, counts the pairs of random schedules that do, 93.7 %.

Differences: pairs that measuring cannot tell apart may be left out.
"""

import random
from collections.abc import Sequence

import numpy as np

from dovetail.schedulers.records import KernelBlock, OpSet, members


def pairs_ordered_right(
    sampled: Sequence[tuple[float, float]], noise: float = 0.0
) -> tuple[int, int]:
    """(pairs whose order was predicted, pairs that were compared) of (predicted, measured) seconds.

    noise   a pair is compared if the slower of the two took at least `noise` times the faster's
            seconds longer, and longer at all

    Equal predictions of a pair that is compared are wrong. O(schedules^2), a row at a time.
    Raises ValueError for a negative noise.
    """
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, as {noise} is")
    predicted, measured = np.array(sampled, dtype=np.float64).reshape(-1, 2).T
    right = compared = 0
    for i in range(len(measured) - 1):
        ahead, took = predicted[i + 1 :] - predicted[i], measured[i + 1 :] - measured[i]
        faster = np.minimum(measured[i + 1 :], measured[i])
        apart = (took != 0) & (np.abs(took) >= noise * faster)
        compared += int(apart.sum())
        right += int((apart & (np.sign(ahead) == np.sign(took))).sum())
    return right, compared


def random_stages(
    block: KernelBlock, rng: random.Random, most_groups: int, most_ops: int
) -> list[OpSet]:
    """Random stages of a block in running order, to see how well sums over stages predict them; at
    most so many groups a stage and ops a group.

    How wide and how deep its stages tend to be is drawn once a schedule, so that schedules reach
    from one op after another to all that is ready at once. A stage takes ops at random of those
    that wait for none outside it, as long as its own limits hold. Not uniform over all schedules.
    O(ops x stages). Raises ValueError for a limit below 1.
    """
    if min(most_groups, most_ops) < 1:
        raise ValueError(f"{most_groups} groups of {most_ops} ops hold no op")
    wide, deep = rng.random(), rng.random()
    stages: list[OpSet] = []
    done = 0
    while done != block.everything:
        groups, ops = _upto(most_groups, wide, rng), _upto(most_ops, deep, rng)
        stages.append(_stage(block, done, rng, groups, ops))
        done |= stages[-1]
    return stages


def _upto(most: int, share: float, rng: random.Random) -> int:
    """1 to `most`: 1 where `share` is 0, `most` where it is 1."""
    return 1 + sum(rng.random() < share for _ in range(most - 1))


def _stage(
    block: KernelBlock, done: OpSet, rng: random.Random, most_groups: int, most_ops: int
) -> OpSet:
    """One stage, after the ops that are done."""
    ready = [
        op
        for op, before in enumerate(block.predecessors)
        if not done >> op & 1 and not before & ~done
    ]
    groups: list[OpSet] = []
    stage = 0
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        # It joins the groups that it reads; none reads it, as nothing in the stage waits for it.
        apart = [group for group in groups if not group & block.predecessors[op]]
        joined = 1 << op | sum(group for group in groups if group & block.predecessors[op])
        if joined.bit_count() > most_ops or len(apart) == most_groups:
            continue
        groups = [*apart, joined]
        stage |= 1 << op
        ready += [
            after
            for after in members(block.successors[op])
            if not block.predecessors[after] & ~(done | stage)
        ]
    return stage
