"""The plan with the fewest devices that plans with more do not beat by a smallest gain.

    devices   1      2      3      4
    seconds   1.00   .80    .79    .78        smallest gain 2 %: the plan on 2 devices is returned,
              kept ─► kept   └──────┴── less than 2 % below .80

From the best plan on, the device with the least work is emptied onto the best other one, until one
device is left. Where such a plan comes near to the best, a local search on its devices alone
improves it. Plans with few devices that searches came upon count as well.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget, Score
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.placers.single import single

SEARCH_SHARE = 0.15
"""Of the whole budget: kept for these searches where there is a smallest gain."""
NEAR = 1.25
"""Times the best value: an emptied plan this near is worth a search on its devices."""
EMPTIED = 2
"""Devices of least work that are tried when one is to be emptied."""


@dataclass(frozen=True, eq=False)
class Simplest:
    """score, placement   of the plan that is returned
    devices   it uses
    best      value and number of devices of the best plan of all
    """

    score: Score
    placement: GroupPlacement
    devices: int
    best: tuple[float, int]


def simplest(
    problem: Problem, budget: Budget, best: tuple[Score, GroupPlacement], min_gain: float
) -> Simplest:
    """The plan to return instead of `best`, which may be itself. One that does not fit is none."""
    by_count = _emptied(problem, budget, best)
    if problem.chain is None and not budget.interrupted:
        _improve(problem, budget, by_count, best[0].value)
    for count, (score, placement) in budget.fewest.items():
        if count not in by_count or score < by_count[count][0]:
            by_count[count] = (score, placement)
    kept = None
    for count in sorted(by_count):
        score, placement = by_count[count]
        if score.lacking_bytes:
            continue
        if kept is None or score.value < kept.score.value * (1 - min_gain):
            kept = Simplest(score, placement, count, (best[0].value, devices_of(problem, best[1])))
    assert kept is not None, "the best plan fits"
    return kept


def devices_of(problem: Problem, placement: GroupPlacement) -> int:
    """Number of devices that run something."""
    return len(np.unique(placement[problem.running]))


def _emptied(
    problem: Problem, budget: Budget, best: tuple[Score, GroupPlacement]
) -> dict[int, tuple[Score, GroupPlacement]]:
    """number of devices -> a plan, from that of `best` down to 1."""
    by_count = {devices_of(problem, best[1]): best}
    alone = single(problem, budget)
    score = budget.score(problem, alone[None], always=True)[0]
    by_count.setdefault(devices_of(problem, alone), (score, alone))
    placement = best[1]
    while (count := devices_of(problem, placement)) > 2 and not budget.interrupted:
        candidates = _with_one_less(problem, placement)
        if not len(candidates):
            break
        scores = budget.score(problem, candidates, always=True)
        chosen = min(range(len(scores)), key=scores.__getitem__)
        placement = candidates[chosen]
        fewer = devices_of(problem, placement)
        if fewer >= count:
            break
        if fewer not in by_count or scores[chosen] < by_count[fewer][0]:
            by_count[fewer] = (scores[chosen], placement)
    return by_count


def _with_one_less(problem: Problem, placement: GroupPlacement) -> NDArray[np.int32]:
    """[candidates, groups] each with all of a device that does little on another one."""
    groups = np.flatnonzero(problem.running)
    used = np.unique(placement[groups])
    seconds = problem.work_seconds[groups, placement[groups]]
    work = np.bincount(placement[groups], weights=seconds, minlength=problem.devices)
    found = []
    for device in sorted(used.tolist(), key=lambda d: (work[d], d))[:EMPTIED]:
        for other in used.tolist():
            moved = np.where(placement == device, other, placement).astype(np.int32)
            if other != device and problem.allowed[np.arange(len(moved)), moved][groups].all():
                found.append(moved)
    return np.array(found, dtype=np.int32).reshape(-1, len(placement))


def _improve(
    problem: Problem,
    budget: Budget,
    by_count: dict[int, tuple[Score, GroupPlacement]],
    best_value: float,
) -> None:
    """Search on the devices of each emptied plan that is near the best."""
    most = max(by_count)
    near = [
        count
        for count, (score, _) in by_count.items()
        if 1 < count < most and not score.lacking_bytes and score.value <= NEAR * best_value
    ]
    for i, count in enumerate(sorted(near)):
        if budget.exhausted:
            return
        score, placement = by_count[count]
        used = np.unique(placement[problem.running])
        there = np.zeros(problem.devices, dtype=bool)
        there[used] = True
        inside = problem.allowed & there
        stays = np.logical_not(np.any(inside, axis=1))
        allowed = np.where(stays[:, None], problem.allowed, inside)
        part = 1 / (len(near) - i)
        own = Budget(
            max(part * budget.left_seconds, 1e-3) if budget.timed else np.inf,
            max(1, part * budget.left),
            budget.clock,
            threads=budget.threads,
        )
        own.note("emptied", score, placement)
        found = local_search(replace(problem, allowed=allowed), own)
        budget.charge(own.spent)
        better = budget.score(problem, found[None], always=True)[0]
        if better < score and devices_of(problem, found) <= count:
            by_count[count] = (better, found)
