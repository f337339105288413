"""Every placement of the groups: exact, and only for problems with few of them."""

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import UNKNOWN, Budget
from dovetail.placers.problem import GroupPlacement, PlacementProblem

MOST_PLACEMENTS = 20_000
"""Placements up to which all of them may be evaluated."""
MOST_ENTRIES = 2**27
"""Most groups x placements in one array of all placements: half a GiB."""


def can_enumerate(problem: PlacementProblem, budget: Budget) -> bool:
    """Few enough placements, and the budget is likely to reach for all of them."""
    count = problem.placements
    if count > min(MOST_PLACEMENTS, MOST_ENTRIES / max(1, problem.groups.count)):
        return False
    if count > budget.left:
        return False
    # Half of what is left, since the pace was measured on a few placements.
    return bool(budget.pace_seconds * count <= (budget.seconds - budget.spent_seconds) / 2)


def exhaustive(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """The best of all placements if the budget reaches for them, else the best of those seen.

    Placements are tried in lexicographic order; ties: the first.
    """
    try:
        scores = budget.score(problem, every_placement(problem))
        best = min(scores)
        if UNKNOWN not in scores and not best.lacking_bytes:
            budget.prove(best.value, "every placement")
    except KeyboardInterrupt:
        budget.interrupted = True
    return budget.best[1] if budget.best is not None else problem.fastest


def every_placement(problem: PlacementProblem) -> NDArray[np.int32]:
    """[placements, groups]"""
    options = [np.flatnonzero(problem.allowed[group]) for group in problem.free]
    count = int(problem.placements)
    everything = np.repeat(problem.fastest[None], count, axis=0)
    if options:
        grids = np.meshgrid(*options, indexing="ij")
        everything[:, problem.free] = np.stack([grid.ravel() for grid in grids], axis=1)
    return everything
