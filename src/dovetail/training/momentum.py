"""Estimates the momentum that asynchrony adds, during a run, from some coordinates of the center.

Let x_c be the center at clock c, and u = U(g(x_c)) the update of a commit with base clock c. For
workers with memoryless step times,

    E[x_{c+1} - x_c] = mu E[x_c - x_{c-1}] + (1 - mu) E[u]          mu = 1 - 1/n

(I. Mitliagkas, C. Zhang, S. Hadjis, C. Re: Asynchrony begets Momentum, with an Application to Deep
Learning, 2016, https://arxiv.org/abs/1605.09774). YellowFin (J. Zhang, I. Mitliagkas, 2017,
https://arxiv.org/abs/1706.03471, section 4, closed loop) estimates mu from what a server sees, as

    median over coordinates of (x_{c+1} - x_c - u) / (x_c - x_{c-1})

Differences: u is subtracted in the denominator too, because the recurrence has (1 - mu) u. Besides,
u and both differences are mostly noise of three commits. So the expectations are replaced by sums
over commits and coordinates, projected on the center's earlier movement z, which is independent of
that noise:

    mu = sum <x_{c+1} - x_c - u, z> / sum <x_c - x_{c-1} - u, z>       z = x_{c-1} - x_{c-1-LAG}

Each coordinate of z is divided by its mean u^2, and the weight of older commits fades. On a
quadratic of 1024 coordinates with noise, at rest, after 3000 commits (3 seeds), this gives for
n = 2, 4, 8, 16

    exponential step times   .54 +- .15   .73 +- .04   .86 +- .02   .94 +- .01     1 - 1/n: .5 ...
    20 % jitter             -.18 +- .07   .63 +- .03   .84 +- .02   .93 +- .01

YellowFin's median gives less than .03 in all of these cases. With few coordinates, or with steps
that hardly move the center, our estimate is as noisy as it is here for n = 2.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Rule, Slice

COORDINATES = 1024
"""The most coordinates of the center that are watched."""
VERSIONS = 256
"""The versions of the center that are kept. A commit whose base is older adds nothing."""
LAG = 32
"""The commits over which z, the earlier movement of the center, is taken."""
MEMORY = 1000
"""After so many commits, the weight of a commit in the estimate has faded to 1/e."""
WARM, FEWEST = 100, 200
"""The first `WARM` commits only measure how large updates are. An estimate needs `FEWEST`."""
_LEAST = 1e-30


class Momentum:
    """Keeps the last versions of some coordinates of the center, and the sums of the estimate."""

    def __init__(self, theta: Vector) -> None:
        count = min(COORDINATES, theta.size)
        rng = np.random.default_rng(0)
        chosen = rng.choice(theta.size, count, replace=False)
        self.coordinates: NDArray[np.int64] = np.sort(chosen).astype(np.int64)
        self._values = np.zeros((VERSIONS, count), theta.dtype)
        self._clocks = np.full(VERSIONS, -1, np.int64)
        # Fading sums: u squared [count], and the numerator and denominator of the estimate.
        self._squares = np.zeros(count)
        self._above = self._below = 0.0
        self._commits = 0
        self.version(0)[:] = theta[self.coordinates]

    def version(self, clock: int) -> Vector:
        """The row [count] for the coordinates' values at `clock`, which the caller fills."""
        row = clock % VERSIONS
        self._clocks[row] = clock
        values: Vector = self._values[row]
        return values

    def add(self, base_clock: int, update: Vector) -> float:
        """Takes in a commit with its update at the coordinates [count], and returns the estimate;
        nan while too few commits have come. A commit adds nothing if the versions around its base
        are not kept any more."""
        clocks = np.array(
            [max(base_clock - 1 - LAG, 0), base_clock - 1, base_clock, base_clock + 1]
        )
        rows = clocks % VERSIONS
        if base_clock >= 2 and (self._clocks[rows] == clocks).all():
            self._learn(self._values[rows].astype(np.float64), update.astype(np.float64))
        if self._commits < FEWEST or self._below == 0:
            return float("nan")
        return self._above / self._below

    def _learn(self, values: NDArray[np.float64], update: NDArray[np.float64]) -> None:
        origin, before, current, after = values
        fade = 1 - 1 / MEMORY
        self._squares = fade * self._squares + update * update
        self._commits += 1
        if self._commits <= WARM:
            return
        total = np.add.reduce(self._squares)
        # Coordinates that never moved are left out, since they would be divided by 0.
        moves = self._squares > _LEAST * total
        scale = np.divide(total, self._squares, out=np.zeros_like(self._squares), where=moves)
        z = (before - origin) * scale
        self._above = fade * self._above + float(np.dot(after - current - update, z))
        self._below = fade * self._below + float(np.dot(current - before - update, z))

    def save(self) -> tuple[dict[str, Any], dict[str, Vector]]:
        """The state: numbers for JSON, and vectors."""
        state = {
            "clocks": self._clocks.tolist(),
            "sums": [self._above, self._below],
            "commits": self._commits,
        }
        return state, {"values": self._values.reshape(-1), "squares": self._squares}

    def restore(self, state: dict[str, Any], vectors: dict[str, Vector]) -> None:
        """Takes over a state that `save` returned."""
        self._clocks[:] = state["clocks"]
        self._above, self._below = state["sums"]
        self._commits = state["commits"]
        self._values.reshape(-1)[:] = vectors["values"]
        self._squares = np.array(vectors["squares"], np.float64)


def adds_plainly(rule: Rule, dtype: Any) -> bool:
    """Whether the server does theta~ += v at any staleness, with v computed at the center. Only
    then does the estimate show the effect of the workers' delays alone."""
    if rule.apply is None or rule.needs_base or rule.keeps_theta or rule.server_slots:
        return False
    # A rule is a function, so it is tried on one stale commit to see what it does.
    theta = np.array([1.0, -2.0, 3.0], dtype)
    vector = np.array([0.5, 0.25, -4.0], dtype)
    part = Slice(theta.copy(), {}, dict.fromkeys(rule.server_counts, 0))
    rule.apply(part, Arrival(vector, 0, 3, 8, 2, 0.1, 4))
    return bool((part.theta == theta + vector).all())
