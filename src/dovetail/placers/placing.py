"""Every method by name, and one of them at work on a problem."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, OutOfMemoryError, UsageError
from dovetail.placers.auto import auto
from dovetail.placers.baselines import BASELINES, Placer, attempt, try_baselines
from dovetail.placers.budget import Budget
from dovetail.placers.chain import chain
from dovetail.placers.exact import exact
from dovetail.placers.families import families
from dovetail.placers.heft import heft
from dovetail.placers.ideal_dp import ideal_dp
from dovetail.placers.latency_search import latency_search
from dovetail.placers.linear_dp import linear_dp
from dovetail.placers.local_search import local_search
from dovetail.placers.m_topo import m_topo
from dovetail.placers.metis import metis
from dovetail.placers.mincut import mincut
from dovetail.placers.multilevel import multilevel
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.placers.scotch import scotch
from dovetail.placers.sct import sct
from dovetail.placers.single import single
from dovetail.plans import Placement, normalise
from dovetail.simulator import LowerBound


def _seq2seq(problem: Problem, budget: Budget) -> GroupPlacement:
    from dovetail.placers.learned.placing import seq2seq

    return seq2seq(problem, budget)


def _hdp(problem: Problem, budget: Budget) -> GroupPlacement:
    from dovetail.placers.learned.placing import hdp

    return hdp(problem, budget)


def _gdp(problem: Problem, budget: Budget) -> GroupPlacement:
    from dovetail.placers.learned.placing import gdp

    return gdp(problem, budget)


def _gdp_search(problem: Problem, budget: Budget) -> GroupPlacement:
    from dovetail.placers.learned.search import gdp_search

    return gdp_search(problem, budget)


PLACERS: dict[str, Placer] = {
    **BASELINES,
    "m_topo": m_topo,
    "heft": heft,
    "sct": sct,
    "metis": metis,
    "scotch": scotch,
    "mincut": mincut,
    "linear_dp": linear_dp,
    "ideal_dp": ideal_dp,
    "families": families,
    "local_search": local_search,
    "latency_search": latency_search,
    "multilevel": multilevel,
    "exact": exact,
    "seq2seq": _seq2seq,
    "hdp": _hdp,
    "gdp": _gdp,
    "gdp+search": _gdp_search,
    "auto": auto,
}
"""The learned ones are imported, and torch with them, by who uses them."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a placer found.

    placement           [ops], source entries filled in
    value               seconds of the objective
    peak_memory_bytes   [devices]
    feasible            it fits: always, since what does not fit is raised
    placer              the method that found it
    baselines           method -> value, None where it does not fit, in the order tried
    found_seconds       method -> seconds from the start of the search to its value
    bound               proven by the search for placements whose groups stay together, if any
    evaluations         distinct placements that were evaluated
    """

    placement: Placement
    value: float
    peak_memory_bytes: NDArray[np.int64]
    feasible: bool
    placer: str
    baselines: dict[str, float | None]
    found_seconds: dict[str, float]
    bound: LowerBound | None
    evaluations: int
    seconds: float
    interrupted: bool


def place(
    problem: Problem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None = None,
    method: Placer | None = None,
) -> Outcome:
    """Run one method, and the cheap ones to compare it with.

    budget     of the search; the four baselines are always evaluated, and count
    progress   called with (share of the budget spent, best feasible value so far or inf)
    method     what runs under that name, in place of ours

    Ctrl-C ends the search with the best so far, `interrupted`; within `keeping_interrupts` at
    whatever moment it arrives. Raises `UsageError` for an unknown name, and `OutOfMemoryError` with
    the device that lacks most where the method found nothing that fits.
    """
    if placer_name not in PLACERS:
        raise UsageError("--placer", f"{placer_name!r} is not one of {', '.join(PLACERS)}")
    budget.progress = progress
    if problem.chain is not None:
        return _place_along(problem, placer_name, budget, progress)
    try_baselines(problem, budget)
    if placer_name not in BASELINES:
        attempt(placer_name, method or PLACERS[placer_name], problem, budget)
    found = {name: pair for name, pair in budget.found.items() if name != "auto"}
    if placer_name in BASELINES and placer_name not in found:
        raise KeyboardInterrupt  # stopped before it: what others found is not what was asked for
    chosen = placer_name if placer_name in found else min(found, key=lambda name: found[name][0])
    return _outcome(problem, budget, chosen, progress)


ALONG = {"single": single, "chain": chain}
"""The methods for a problem with an order of which each device has one run."""


def _place_along(
    problem: Problem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None,
) -> Outcome:
    """As `place`, of a problem with a chain."""
    if placer_name not in (*ALONG, "auto"):
        detail = f"{placer_name!r} keeps no order of stages; leave it out, or use single or chain"
        raise UsageError("placer", detail)
    for name, method in ALONG.items():
        attempt(name, method, problem, budget)
    found = budget.found
    chosen = placer_name if placer_name in found else min(found, key=lambda name: found[name][0])
    return _outcome(problem, budget, chosen, progress)


def _outcome(
    problem: Problem,
    budget: Budget,
    chosen: str,
    progress: Callable[[float, float], None] | None,
) -> Outcome:
    """What the method `chosen` found, beside all others. Raises `InfeasibleError`."""
    found = {name: pair for name, pair in budget.found.items() if name != "auto"}
    score, placement = found[chosen]
    if score.lacking_bytes:
        raise _infeasible(problem, budget.peaks(placement))
    if progress is not None:
        progress(1.0, score.value)
    return Outcome(
        placement=normalise(problem.spread(placement), problem.graph, problem.machine),
        value=score.value,
        peak_memory_bytes=budget.peaks(placement),
        feasible=True,
        placer=chosen,
        baselines={
            name: None if score.lacking_bytes else score.value for name, (score, _) in found.items()
        },
        found_seconds={name: budget.found_seconds[name] for name in found},
        bound=budget.bound,
        evaluations=budget.distinct,
        seconds=budget.spent_seconds,
        interrupted=budget.interrupted,
    )


def _infeasible(problem: Problem, peaks: NDArray[np.int64]) -> InfeasibleError:
    """The error that names the device that lacks most, or says that memory is not what lacks."""
    device = int((peaks - problem.capacities).argmax())
    if peaks[device] <= problem.capacities[device]:
        reason = (
            "leaves a device and comes back to it" if problem.contiguous else "waits for itself"
        )
        return InfeasibleError(
            f"no plan was found: every one that was tried {reason}; give it a larger budget, fewer "
            "pins, or --placer exact"
        )
    name = problem.machine.device_names[device]
    return OutOfMemoryError(name, int(peaks[device]), int(problem.capacities[device]))
