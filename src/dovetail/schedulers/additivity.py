"""Counts how often the sum over the stages predicts which of two schedules is faster.

Every scheduler of stages adds up the seconds of stages that were timed one by one. That is sound
only if schedules, measured as a whole, come in the same order as their sums. Paper: "Accelerate DNN
Inference by Inter-Operator Parallelism", 2019, figure 7: 93.7 % of the pairs of random schedules
have the predicted order.

Differences: pairs that a measurement cannot tell apart may be left out.
"""

from collections.abc import Sequence

import numpy as np


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
