"""Evaluates every placement of the groups. This is exact, and only for problems with few
placements."""

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import UNKNOWN, Budget
from dovetail.placers.problem import GroupPlacement, PlacementProblem

MOST_PLACEMENTS = 20_000
"""All placements are evaluated only if there are at most this many."""
MOST_ENTRIES = 2**27
"""Most entries, groups x placements, of the array of all placements: half a GiB of int32."""


def can_enumerate(problem: PlacementProblem, budget: Budget) -> bool:
    """Return True if there are few enough placements and the budget probably pays for all of
    them."""
    count = problem.placements
    if count > min(MOST_PLACEMENTS, MOST_ENTRIES / max(1, problem.groups.count)):
        return False
    if count > budget.left:
        return False
    # Only half of the seconds left are counted on, since the pace was measured on few placements.
    return bool(budget.ledger.pace_seconds * count <= (budget.seconds - budget.spent_seconds) / 2)


def exhaustive(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best of all placements if the budget pays for them, else the best that was
    evaluated.

    Placements are tried in lexicographic order; ties: the first. If all were evaluated and one
    fits, its value is noted as the lower bound.
    """
    try:
        scores = budget.score(problem, every_placement(problem))
        best = min(scores)
        if UNKNOWN not in scores and not best.lacking_bytes:
            budget.ledger.prove(best.value, "every placement")
    except KeyboardInterrupt:
        budget.interrupted = True
    return budget.ledger.best[1] if budget.ledger.best is not None else problem.fastest


def every_placement(problem: PlacementProblem) -> NDArray[np.int32]:
    """Return every placement, [placements, groups], in lexicographic order. Groups without a choice
    are on their fastest device."""
    options = [np.flatnonzero(problem.allowed[group]) for group in problem.free]
    count = int(problem.placements)
    everything = np.repeat(problem.fastest[None], count, axis=0)
    if options:
        grids = np.meshgrid(*options, indexing="ij")
        everything[:, problem.free] = np.stack([grid.ravel() for grid in grids], axis=1)
    return everything
