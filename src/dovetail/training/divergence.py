"""Finds out whether a run diverges, and names a rule that would not.

A run diverges when its loss grows beyond its first losses and goes on growing, or is not finite any
more. Asynchronous runs diverge when steps are too long for their staleness, which is n - 1 on
average. If n workers push sums of lambda updates, the center moves by n lambda updates that were
all computed at one point. If they push the mean of each window, it moves by n updates. ADAG's
division shortens the step further for weights that have moved since (J. Hermans, On Scalable Deep
Learning and Parallelizing Gradient Descent, 2017,
https://github.com/JoeriHermans/master-thesis).
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dovetail.training.records import Row
from dovetail.training.rules import RULES

GROWTH = 2.0
"""A run diverges if its median loss exceeds so many times the median of its first losses."""
SPREADS = 5.0
"""The median loss must exceed that by so many standard deviations of the first losses, too."""
FEWEST = 20
"""Each median is taken over so many commits, or over 2 n with n workers if that is more."""

FEW_WORKERS = 10
"""AGN, which adds the mean of a window, is the remedy up to so many workers. On digits, AGN learns
as well as ADAG's division up to 20 workers, and loses 28 points of accuracy at 40. The limit is
lower than 20, because a rate that was too high for sums may be too high for the means of many
workers."""


@dataclass(frozen=True)
class Divergence:
    """A sign of divergence, and the clock of the commit that showed it."""

    clock: int
    detail: str


class LossWatch:
    """Watches losses as they come. `found` is the divergence that it has seen, None before.

    Let k be `FEWEST`, or 2 n with n workers if that is more. A run diverges when the median of its
    last k losses exceeds both of these:

    * the limit: `GROWTH` times the median of its first k losses, plus `SPREADS` of their standard
      deviations
    * the median of the k losses before the last k, so that a loss that jumps and falls again is no
      divergence
    """

    def __init__(self, workers: int = 1) -> None:
        self.found: Divergence | None = None
        self._many = max(FEWEST, 2 * workers)
        self._first: list[float] = []
        self._limit = math.inf
        self._before: deque[float] = deque(maxlen=self._many)
        self._last: deque[float] = deque(maxlen=self._many)

    def add(self, rows: Iterable[Row]) -> Divergence | None:
        """Returns the divergence if these rows are the first to show it, else None."""
        if self.found is not None:
            return None
        for row in rows:
            detail, loss = "", row.loss
            if not math.isfinite(loss):
                detail = f"the loss is {loss}"
            elif len(self._first) < self._many:
                self._first.append(loss)
                if len(self._first) == self._many:
                    # `abs`, because twice a negative loss would be a lower limit.
                    middle = float(np.median(self._first))
                    spread = SPREADS * float(np.std(self._first))
                    self._limit = middle + (GROWTH - 1) * abs(middle) + spread
            else:
                if len(self._last) == self._many:
                    self._before.append(self._last[0])
                self._last.append(loss)
                # No median is computed while the newest loss is below the limit, to save time.
                if len(self._before) == self._many and loss >= self._limit:
                    last = float(np.median(self._last))
                    if last > self._limit and last > np.median(self._before):
                        detail = f"the loss went from {np.median(self._first):.3g} to {last:.3g}"
            if detail:
                self.found = Divergence(row.clock, f"{detail} by commit {row.clock}")
                return self.found
        return None


def diverging(rows: Iterable[Row], workers: int = 1) -> Divergence | None:
    """Returns the first divergence that a run's commits show; None if they show none."""
    return LossWatch(workers).add(rows)


def stable_rule(rule: str, window: int | None, workers: int) -> str:
    """The name of the rule to use if `rule` diverges with this window and so many workers; "" if
    no rule is known to do better."""
    if rule in ("agn", "adag"):
        return "adag-agn"
    if _adds_sums(rule):
        return "agn" if workers <= FEW_WORKERS and (window or 0) > 1 else "adag-agn"
    return ""


def _adds_sums(rule: str) -> bool:
    return rule in RULES and RULES[rule].adds_sums


def remedy(rule: str, window: int | None, workers: int) -> str:
    """One sentence that says what to do about a run that diverges, and why."""
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
