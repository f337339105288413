"""Counts how often the sum over the stages predicts which of two schedules is faster.

Every scheduler of stages adds up the seconds of stages that were timed one by one. That is sound
only if schedules, measured as a whole, come in the same order as their sums. Paper: "Accelerate DNN
Inference by Inter-Operator Parallelism", 2019, figure 7: 93.7 % of the pairs of random schedules
have the predicted order.

Differences: pairs that a measurement cannot tell apart may be left out.
"""

import random
from collections.abc import Sequence

import numpy as np

from dovetail.schedulers.records import KernelBlock, OpSet, members


def pairs_ordered_right(
    sampled: Sequence[tuple[float, float]], noise: float = 0.0
) -> tuple[int, int]:
    """Count (pairs whose order was predicted right, pairs that were compared).

    sampled   one (predicted, measured) seconds for each schedule
    noise     a pair is compared if the slower schedule took longer than the faster one, by at least
              `noise` times the faster one's seconds

    A compared pair with equal predictions counts as wrong. Time O(schedules^2); memory
    O(schedules), because one row of pairs is built at a time. Raises ValueError for a negative
    noise.
    """
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, as {noise} is")
    predicted, measured = np.array(sampled, dtype=np.float64).reshape(-1, 2).T
    right = compared = 0
    for i in range(len(measured) - 1):
        predicted_change = predicted[i + 1 :] - predicted[i]
        measured_change = measured[i + 1 :] - measured[i]
        faster = np.minimum(measured[i + 1 :], measured[i])
        apart = (measured_change != 0) & (np.abs(measured_change) >= noise * faster)
        compared += int(apart.sum())
        right += int((apart & (np.sign(predicted_change) == np.sign(measured_change))).sum())
    return right, compared


def random_stages(
    block: KernelBlock, rng: random.Random, most_groups: int, most_ops: int
) -> list[OpSet]:
    """Return the stages of a random schedule of a block, in running order.

    No stage has more than `most_groups` groups, and no group has more than `most_ops` ops. Random
    schedules are measured to see how well sums over stages predict them.

    A stage is filled with random ops that wait for nothing outside it, within limits that are drawn
    for that stage. The draw is not uniform over all schedules. O(ops x stages). Raises ValueError
    for a limit below 1.
    """
    if min(most_groups, most_ops) < 1:
        raise ValueError(f"{most_groups} groups of {most_ops} ops hold no op")
    # Drawn once per schedule, not per stage: so some schedules are nearly sequential and others run
    # nearly all ready ops at once, instead of all schedules being alike on average.
    wide, deep = rng.random(), rng.random()
    stages: list[OpSet] = []
    done = 0
    while done != block.everything:
        groups, ops = _upto(most_groups, wide, rng), _upto(most_ops, deep, rng)
        stages.append(_stage(block, done, rng, groups, ops))
        done |= stages[-1]
    return stages


def _upto(most: int, share: float, rng: random.Random) -> int:
    """Draw a number from 1 to `most`: always 1 if `share` is 0, always `most` if it is 1."""
    return 1 + sum(rng.random() < share for _ in range(most - 1))


def _stage(
    block: KernelBlock, done: OpSet, rng: random.Random, most_groups: int, most_ops: int
) -> OpSet:
    """Return one random stage that can run once the ops in `done` have ended."""
    ready = [
        op
        for op, before in enumerate(block.predecessors)
        if not done >> op & 1 and not before & ~done
    ]
    groups: list[OpSet] = []
    stage = 0
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        # The op joins the groups that it reads. No group can read the op: every op of the stage had
        # all its predecessors in `done` or in the stage before it was added.
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
