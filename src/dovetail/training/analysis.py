"""Measures what asynchrony did to a run: staleness and temporal efficiency.

    staleness     mean, median, 95th percentile and largest over a run's rows, and per worker
    efficiency    E(a, b) = integral of a's accuracy / integral of b's, up to the shorter time

Paper: J. Hermans, "On Scalable Deep Learning and Parallelizing Gradient Descent", Maastricht
University 2017, https://arxiv.org/abs/1710.06408, chapter 3 (temporal efficiency, equation 3.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.training.records import Row


@dataclass(frozen=True)
class Staleness:
    """Staleness of `commits` commits: mean, median, 95th percentile and largest. All four are nan
    if there are no commits."""

    commits: int
    mean: float
    p50: float
    p95: float
    max: float


def staleness(rows: Sequence[Row], workers: int) -> tuple[Staleness, dict[int, Staleness]]:
    """Returns the staleness of all workers together, and of each by its index. The first `workers`
    commits are left out: they all start from the first center, which says nothing about the run."""
    counted = rows[workers:]
    of_worker: dict[int, list[int]] = {}
    for row in counted:
        of_worker.setdefault(row.worker, []).append(row.staleness)
    return (
        _staleness([row.staleness for row in counted]),
        {worker: _staleness(values) for worker, values in sorted(of_worker.items())},
    )


def _staleness(values: Sequence[int]) -> Staleness:
    if not values:
        return Staleness(0, *[float("nan")] * 4)
    p50, p95 = np.percentile(values, (50, 95)).tolist()
    return Staleness(len(values), float(np.mean(values)), p50, p95, float(max(values)))


def temporal_efficiency(
    a_seconds: Sequence[float],
    a_accuracy: Sequence[float],
    b_seconds: Sequence[float],
    b_accuracy: Sequence[float],
) -> float:
    """Returns E(a, b). Above 1, a made better use of the time. It is infinite if b's integral is 0.

    Accuracy is taken to be linear between evaluations, and from 0 at time 0 to the first one.
    """
    end = min(a_seconds[-1], b_seconds[-1])
    of_a, of_b = _integral(a_seconds, a_accuracy, end), _integral(b_seconds, b_accuracy, end)
    return of_a / of_b if of_b else float("inf")


def _integral(seconds: Sequence[float], values: Sequence[float], end: float) -> float:
    x = np.concatenate([[0.0], np.asarray(seconds, np.float64)])
    y = np.concatenate([[0.0], np.asarray(values, np.float64)])
    inside = x < end
    x, y = np.append(x[inside], end), np.append(y[inside], np.interp(end, x, y))
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))
