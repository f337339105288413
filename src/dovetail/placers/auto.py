"""All methods within one budget, and the table of what each found.

`auto` tries the best single device, the expert's split, balanced runs and list scheduling, then
searches with what is left of the budget: every placement where they are few (at most
`exhaustive.MOST_PLACEMENTS`, and within the budget), which is exact, else local search. It returns
the best feasible placement that *any* of them evaluated, so it is never worse than one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import OutOfMemoryError, UsageError
from dovetail.placers.balanced import balanced
from dovetail.placers.budget import UNKNOWN, Budget, Score
from dovetail.placers.etf import etf
from dovetail.placers.exhaustive import can_enumerate, exhaustive
from dovetail.placers.expert import expert
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.placers.single import single
from dovetail.plans import Placement, normalise

Placer = Callable[[Problem, Budget], GroupPlacement]
BASELINES: dict[str, Placer] = {
    "single": single,
    "expert": expert,
    "balanced": balanced,
    "etf": etf,
}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a placer found.

    placement           [ops], source entries filled in
    value               seconds of the objective
    peak_memory_bytes   [devices]
    feasible            it fits: always, since what does not fit is raised
    placer              the method that found it
    baselines           method -> value, None where it does not fit, in the order tried
    evaluations         distinct placements that were evaluated
    """

    placement: Placement
    value: float
    peak_memory_bytes: NDArray[np.int64]
    feasible: bool
    placer: str
    baselines: dict[str, float | None]
    evaluations: int
    seconds: float
    interrupted: bool


def auto(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best feasible placement of all methods."""
    for method in BASELINES.values():
        budget.score(problem, method(problem, budget)[None], always=True)
    return _search_of(problem, budget)[1](problem, budget)


PLACERS: dict[str, Placer] = {
    **BASELINES,
    "local_search": local_search,
    "auto": auto,
}


def place(
    problem: Problem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None = None,
) -> Outcome:
    """Run one method, and the cheap ones to compare it with.

    budget     of the search; the four baselines are always evaluated, and count
    progress   called with (share of the budget spent, best feasible value so far or inf)

    Ctrl-C ends the search with the best so far, `interrupted`. Raises `UsageError` for an unknown
    name, and `OutOfMemoryError` with the device that lacks most where the method found nothing
    that fits.
    """
    if placer_name not in PLACERS:
        raise UsageError("--placer", f"{placer_name!r} is not one of {', '.join(PLACERS)}")
    budget.progress = progress
    found = {name: _found(BASELINES[name], problem, budget) for name in BASELINES}
    if placer_name == "auto":
        name, search = _search_of(problem, budget)
        found[name] = _found(search, problem, budget)
    elif placer_name not in found:
        found[placer_name] = _found(PLACERS[placer_name], problem, budget)
    known = {name: result for name, result in found.items() if result is not None}
    if not known or (placer_name in BASELINES and placer_name not in known):
        raise KeyboardInterrupt  # stopped before the first evaluation: there is nothing to return
    chosen = placer_name if placer_name in known else min(known, key=lambda name: known[name][0])
    score, placement = known[chosen]
    if score.lacking_bytes:
        raise _lack(problem, budget.peaks(placement))
    return Outcome(
        placement=normalise(problem.spread(placement), problem.graph, problem.machine),
        value=score.value,
        peak_memory_bytes=budget.peaks(placement),
        feasible=True,
        placer=chosen,
        baselines={
            name: None if found_score.lacking_bytes else found_score.value
            for name, (found_score, _) in known.items()
        },
        evaluations=budget.spent,
        seconds=budget.spent_seconds,
        interrupted=budget.interrupted,
    )


def _search_of(problem: Problem, budget: Budget) -> tuple[str, Placer]:
    if can_enumerate(problem, budget):
        return "exhaustive", exhaustive
    return "local_search", local_search


def _found(method: Placer, problem: Problem, budget: Budget) -> tuple[Score, GroupPlacement] | None:
    """What a method finds, evaluated; None if a Ctrl-C left nothing."""
    try:
        placement = method(problem, budget)
        score = budget.score(problem, placement[None], always=True)[0]
    except KeyboardInterrupt:
        budget.interrupted = True
        return None
    return None if score == UNKNOWN else (score, placement)


def _lack(problem: Problem, peaks: NDArray[np.int64]) -> OutOfMemoryError:
    """The error that names the device that lacks most."""
    device = int((peaks - problem.capacities).argmax())
    name = problem.machine.device_names[device]
    return OutOfMemoryError(name, int(peaks[device]), int(problem.capacities[device]))
