"""Measures the implicit momentum that stale gradients add to plain descent on a quadratic.

Papers: I. Mitliagkas, C. Zhang, S. Hadjis, C. Re, "Asynchrony begets Momentum, with an Application
to Deep Learning", 2016, https://arxiv.org/abs/1605.09774, the queuing model; J. Hermans, "On
Scalable Deep Learning and Parallelizing Gradient Descent", Maastricht University 2017,
https://arxiv.org/abs/1710.06408, has it as equation 1.1: with memoryless step times and learning
rate eta
    E[x_{t+1} - x_t] = mu E[x_t - x_{t-1}] - c E[gradient(x_t)],   mu = 1 - 1/n,   c = eta/n.
Differences: expectations are means over replicas that run the same descent under schedules of
their own; mu and c are then fitted to the mean trajectory by least squares.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.training import StepTimes

Floats = NDArray[np.float64]
ROUNDS = 8
"""Each worker makes so many steps on average before the descent begins. By then the order of their
commits no longer depends on how they started."""


@dataclass(frozen=True)
class ImplicitMomentum:
    """The implicit momentum mu of a descent on x*x/2, averaged over replicas.

    momentum       the fitted mu
    theory         1 - 1/n, its value under memoryless step times
    rate           the fitted c, what is left of the learning rate eta
    theory_rate    eta/n, its value under memoryless step times
    mean_staleness mean staleness of the descent's commits
    trajectory     [steps + 1] x after each step, as a mean over replicas
    """

    workers: int
    momentum: float
    theory: float
    rate: float
    theory_rate: float
    mean_staleness: float
    trajectory: Floats


def implicit_momentum(
    workers: int,
    times: StepTimes,
    *,
    replicas: int = 4000,
    steps: int = 80,
    rate: float = 0.02,
    seed: int = 0,
) -> ImplicitMomentum:
    """Measures the implicit momentum of `workers` equal workers whose steps take such times.

    Each replica follows the schedule of `backends.simulated` without transfers: a commit is applied
    when its worker's step ends, and the worker continues from the center that it then pulls. Ties
    fall to the lower index. Workers begin at random moments and make `ROUNDS` steps each, on
    average, before the descent begins. It starts from x = 1 in all replicas. Cost: O((steps +
    ROUNDS workers) x replicas x workers), vectorised over replicas.
    """
    rng = np.random.default_rng((seed, workers))
    every = np.arange(replicas)
    # [replicas, workers] the time at which each worker's present step ends.
    ends = times.draw(rng, (replicas, workers))
    ends += rng.uniform(0.0, times.mean_seconds, ends.shape)
    # [replicas, workers] the x that each worker pulled last, and the clock at that pull.
    base = np.ones((replicas, workers))
    pulled = np.full((replicas, workers), -ROUNDS * workers)
    x = np.ones(replicas)
    # At negative clocks the workers only take turns, and x stays 1.
    trajectory, stale = np.ones(steps + 1), []
    for clock in range(-ROUNDS * workers, steps):
        who = np.argmin(ends, axis=1)
        if clock >= 0:
            stale.append(float(np.mean(clock - pulled[every, who])))
            # The gradient of x*x/2 is x itself, here at the x that the worker pulled.
            x = x - rate * base[every, who]
            trajectory[clock + 1] = x.mean()
        base[every, who] = x
        pulled[every, who] = clock + 1
        ends[every, who] += times.draw(rng, replicas)
    momentum, fitted_rate = fit_momentum(trajectory)
    return ImplicitMomentum(
        workers=workers,
        momentum=momentum,
        theory=1 - 1 / workers,
        rate=fitted_rate,
        theory_rate=rate / workers,
        mean_staleness=float(np.mean(stale)),
        trajectory=trajectory,
    )


def fit_momentum(trajectory: Floats) -> tuple[float, float]:
    """Fits (mu, c) of x_{t+1} - x_t = mu (x_t - x_{t-1}) - c x_t to x [steps] by least squares.

    For a geometric sequence, which plain descent explains as well, mu is 0.
    """
    change = np.diff(trajectory)
    unknowns = np.stack([change[:-1], -trajectory[1:-1]], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(unknowns, change[1:], rcond=1e-10)
    # In a geometric sequence the change is a multiple of x, so mu and c cannot be told apart.
    if rank < 2:
        return 0.0, float(np.linalg.lstsq(unknowns[:, 1:], change[1:])[0][0])
    mu, c = solution.tolist()
    return mu, c
