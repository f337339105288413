"""Finds out whether a run diverges, and names a rule that would not.

A run diverges when its loss leaves what it began with and goes on growing, or is not finite any
more. What makes asynchronous runs do so is the length of a step times its staleness: n workers
that push sums of lambda updates move the center by n lambda updates, all taken from one point; by
the mean of each window they move it by n, and weights that moved since take less still by ADAG's
division (J. Hermans, On Scalable Deep Learning and Parallelizing Gradient Descent, 2017,
https://github.com/JoeriHermans/master-thesis; staleness is n - 1 on average).
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dovetail.training.records import Row

GROWTH = 2.0
"""A run diverges if its median loss is so many times that of its beginning, and still grows."""
SPREADS = 5.0
"""The median must be so many standard deviations of the first losses beyond that, besides."""
FEWEST = 20
"""A median is of at least so many commits; with n workers it is of 2 n, if that is more."""

SUMS = ("downpour", "downpour-adagrad", "ssp", "hogwild", "dc-asgd", "dc-asgd-adaptive")
"""Rules whose commits grow with their windows, or which do not make up for staleness."""
STABLE = ("agn", "adag-agn")
FEW_WORKERS = 10
"""Up to so many workers, means of windows (AGN) are the remedy. On digits, AGN learns as well as
ADAG's division up to 20 workers, and 28 points worse at 40. The limit is lower because a rate that
was too high for sums may be too high for the means of many workers."""


@dataclass(frozen=True)
class Divergence:
    """The sign of divergence that was seen, and the commit at which it was."""

    clock: int
    detail: str


class LossWatch:
    """Looks at losses as they come; `found` is what it has seen, None while all is well.

    The beginning is the first `FEWEST` (2 n) commits. Of as many last ones the median must be
    `GROWTH` times that of the beginning, beyond `SPREADS` of its standard deviations, and larger
    than the median of those before them: a jump that passes is none.
    """

    def __init__(self, workers: int = 1) -> None:
        self.found: Divergence | None = None
        self._many = max(FEWEST, 2 * workers)
        self._first: list[float] = []
        self._limit = math.inf
        self._before: deque[float] = deque(maxlen=self._many)
        self._last: deque[float] = deque(maxlen=self._many)

    def add(self, rows: Iterable[Row]) -> Divergence | None:
        """The divergence, if these rows are the first to show it."""
        if self.found is not None:
            return None
        for row in rows:
            detail = self._see(row.loss)
            if detail:
                self.found = Divergence(row.clock, f"{detail} by commit {row.clock}")
                return self.found
        return None

    def _see(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._first) < self._many:
            self._first.append(loss)
            if len(self._first) == self._many:
                self._limit = self._limit_of(np.array(self._first))
            return ""
        if len(self._last) == self._many:
            self._before.append(self._last[0])
        self._last.append(loss)
        if len(self._before) < self._many or loss < self._limit:
            return ""
        last = float(np.median(self._last))
        if last > self._limit and last > np.median(self._before):
            return f"the loss went from {np.median(self._first):.3g} to {last:.3g}"
        return ""

    def _limit_of(self, first: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
        middle = float(np.median(first))
        return middle + (GROWTH - 1) * abs(middle) + SPREADS * float(first.std())


def diverging(rows: Iterable[Row], workers: int = 1) -> Divergence | None:
    """Where a run's commits show that it diverges; None: nowhere."""
    return LossWatch(workers).add(rows)


def stable_rule(rule: str, window: int | None, workers: int) -> str:
    """The rule to use where `rule` diverges with these; "" where none of them does better."""
    if rule in ("agn", "adag"):
        return "adag-agn"
    if rule in SUMS:
        return "agn" if workers <= FEW_WORKERS and (window or 0) > 1 else "adag-agn"
    return ""


def remedy(rule: str, window: int | None, workers: int) -> str:
    """What to do about a run that diverges, in a sentence, with its evidence."""
    steps = "all" if window is None else str(window)
    other = stable_rule(rule, window, workers)
    if not other:
        return (
            f"halve the learning rate: {rule} takes windows and staleness into account already"
            + (f", or use fewer than {workers} workers" if workers > 1 else "")
        )
    about = f"commits of {workers} workers are {workers - 1} stale on average"
    if other == "agn":
        return (
            f"use agn: {about}, and {rule} adds {steps} updates in each, which together are "
            f"{workers} x {steps} updates from one point; agn adds their mean"
        )
    return f"use adag-agn: {about}, and it divides by how far each weight has moved since" + (
        f", where {rule} adds {steps} updates in each" if rule in SUMS and steps != "1" else ""
    )
