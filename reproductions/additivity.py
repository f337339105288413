"""Counts and draws how often the sum over the stages predicts which of two schedules is faster.

Every scheduler of stages adds up the seconds of stages that were timed one by one. That is sound
only if schedules, measured as a whole, come in the same order as their sums. Paper: "Accelerate DNN
Inference by Inter-Operator Parallelism", 2019, figure 7: 93.7 % of the pairs of random schedules
have the predicted order.

Differences: pairs that a measurement cannot tell apart may be left out.
"""

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from dovetail.reports.charts import HEIGHT, LEFT, WIDTH, plot, svg_path, ticks
from dovetail.runtime.timers import summarise
from dovetail.schedulers.results import ScheduleCandidate

MOST_DOTS = 2000
"""A scatter chart has at most this many dots."""


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


def noise_of(candidates: Sequence[ScheduleCandidate]) -> float:
    """The noise of the measurements: the median, over the schedules, of the interquartile range of
    the rounds over their median."""
    spreads = sorted(summarise(list(c.seconds)).spread for c in candidates if len(c.seconds) > 1)
    return spreads[len(spreads) // 2] if spreads else 0.0


def scatter_chart(points: Sequence[tuple[float, float]]) -> Markup:
    """A chart of measured against predicted seconds: a dot for each pair, and the line on which
    both are equal."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not finite:
        return Markup("<p>Nothing was recorded.</p>")
    every = math.ceil(len(finite) / MOST_DOTS)
    longest = max(max(point) for point in finite)
    scale, unit = next(
        (scale, unit) for least, scale, unit in ((1, 1.0, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "us"))
        if longest >= least
    )  # fmt: skip
    xy = scale * np.array(finite[::every])  # [points, (predicted, measured)]
    # The ranges are 5 % wider than the values on each side, and never empty.
    lows, highs = xy.min(axis=0), xy.max(axis=0)
    more = 0.05 * np.where(highs > lows, highs - lows, np.where(highs != 0, abs(highs), 20.0))
    (left, low), (right, high) = (lows - more).tolist(), (highs + more).tolist()

    def at(x: float, y: float) -> str:
        across = LEFT + WIDTH * (x - left) / (right - left)
        return f"{across:.1f} {HEIGHT * (1 - (y - low) / (high - low)):.1f}"

    parts = []
    first, last = max(left, low), min(right, high)
    if first < last:
        equal = f"M{at(first, first)}L{at(last, last)}"
        parts.append(svg_path(equal, "line s7 dashed", "as predicted"))
    parts.append(svg_path("".join(f"M{at(x, y)}h0" for x, y in xy.tolist()), "line s0 dots"))
    marks = [(LEFT + WIDTH * (x - left) / (right - left), f"{x:.5g}") for x in ticks(left, right)]
    return plot(parts, (low, high), marks, f"measured against predicted, {unit}")
