"""Judges: who says how long a placement takes. Imports no torch."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget, Score
from dovetail.placers.learned.records import Judge, PlacementTask, Trials
from dovetail.placers.problem import GroupPlacement, PlacementProblem

JudgeFactory = Callable[[PlacementTask], Judge]
"""Makes the judge of a task, in the controller's process; must travel by cloudpickle."""


class SimulatedJudge:
    """The simulator, a batch at once, on the threads that the problem's simulator was given."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        found = self.problem.evaluate(self.problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=np.bool_))


class BudgetJudge:
    """Judges by a budget's ledger: a placement that is known costs nothing, but is a trial.

    best    (score, placement) of all that passed here; None: nothing yet
    """

    def __init__(self, problem: PlacementProblem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.best: tuple[Score, GroupPlacement] | None = None

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        """Trials that the budget could not pay are not judged."""
        scores = self.budget.score(self.problem, placements)
        seconds = np.array([score.value for score in scores])
        lacking = np.array([score.lacking_bytes for score in scores])
        for score, placement in zip(scores, placements, strict=True):
            known = np.isfinite(score.lacking_bytes)
            if known and (self.best is None or score < self.best[0]):
                self.best = (score, placement.copy())
        return Trials(seconds, lacking == 0, np.isfinite(lacking))
