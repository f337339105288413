"""Does a run diverge, and which rule would not?

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
from dovetail.training.rules import RULES

GROWTH = 2.0
"""A median loss so many times that of the beginning, and still growing, diverges."""
SPREADS = 5.0
"""Beyond the growth: so many standard deviations of the losses at the beginning."""
FEWEST = 20
"""Commits in a median, at least; with n workers twice n."""

STABLE = ("agn", "adag-agn")
FEW_WORKERS = 10
"""Up to so many, means of windows are the remedy: on digits they learn as well as with ADAG's
division up to 20 workers, and 28 points worse at 40; but a rate that was too high for sums may be
so for the means of more than a few."""


@dataclass(frozen=True)
class Divergence:
    """What was seen, at which commit."""

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
    if _adds_sums(rule):
        return "agn" if workers <= FEW_WORKERS and (window or 0) > 1 else "adag-agn"
    return ""


def _adds_sums(rule: str) -> bool:
    return rule in RULES and RULES[rule].adds_sums


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
        f", where {rule} adds {steps} updates in each" if _adds_sums(rule) and steps != "1" else ""
    )
