"""Runs one placement method and the baselines on a problem, and returns the outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, OutOfMemoryError, UsageError
from dovetail.methods import PLACERS
from dovetail.placers.auto import auto
from dovetail.placers.baselines import BASELINES, Placer, attempt, single, try_baselines
from dovetail.placers.budget import CLOSED_GAP, Budget, Score
from dovetail.placers.chain import chain
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.plans import Placement, normalise
from dovetail.simulator import LowerBound

# --- Fewer devices ---
#
# A plan on more devices must beat every plan on fewer devices by the smallest gain:
#
#     devices   1      2      3      4
#     seconds   1.00   .80    .79    .78      smallest gain 2 %: the plan on 2 devices is returned
#               kept ─► kept   └──────┴────── these gain less than 2 % over .80
#
# The search starts from the best plan. Step by step it moves everything off one device, a device
# with little work, to the other device where the resulting plan is best, until one device is left.
# If such a plan is near the best, a local search on its devices alone improves it. Plans on few
# devices that other searches evaluated count as well.

SEARCH_SHARE = 0.15
"""Share of the whole budget that is reserved for plans on fewer devices, if there is a smallest
gain."""
NEAR = 1.25
"""Local search improves a plan on fewer devices only if its value is at most this many times the
best plan's."""
EMPTIED = 2
"""In each step this many devices, those with the least work, are candidates for being emptied."""


@dataclass(frozen=True, eq=False)
class SimplestPlan:
    """The plan that `simplest` chose.

    devices   number of devices that the plan uses
    best      (value, number of devices) of the best plan of all, for comparison
    """

    score: Score
    placement: GroupPlacement
    devices: int
    best: tuple[float, int]


def simplest(
    problem: PlacementProblem, budget: Budget, best: tuple[Score, GroupPlacement], min_gain: float
) -> SimplestPlan:
    """Return the plan to take instead of `best`; it may be `best` itself.

    Going up from one device, a plan on more devices is taken only if its value is below that of the
    plan taken so far by more than the share `min_gain`. Plans that lack memory are skipped.
    """
    by_count = _emptied(problem, budget, best)
    # Local search knows no chain: its moves would break it and give infeasible plans.
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
            kept = SimplestPlan(
                score, placement, count, (best[0].value, devices_of(problem, best[1]))
            )
    assert kept is not None, "the best plan fits"
    return kept


def devices_of(problem: PlacementProblem, placement: GroupPlacement) -> int:
    """Return the number of devices that run something."""
    return len(np.unique(placement[problem.running]))


def _emptied(
    problem: PlacementProblem, budget: Budget, best: tuple[Score, GroupPlacement]
) -> dict[int, tuple[Score, GroupPlacement]]:
    """Return number of devices -> (score, plan): `best`, plans with ever more of its devices
    emptied, and the best single device."""
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


def _with_one_less(problem: PlacementProblem, placement: GroupPlacement) -> NDArray[np.int32]:
    """Return [candidates, groups] plans in which one device with little work hands all to another.

    A candidate is dropped if a group may not go to the other device.
    """
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
    problem: PlacementProblem,
    budget: Budget,
    by_count: dict[int, tuple[Score, GroupPlacement]],
    best_value: float,
) -> None:
    """Improve the emptied plans that are near the best, by local search on their own devices."""
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
        # A group that may be on none of these devices keeps its choice, or it would have none.
        stays = np.logical_not(np.any(inside, axis=1))
        allowed = np.where(stays[:, None], problem.allowed, inside)
        part = 1 / (len(near) - i)
        # A separate budget, because a search starts from what its budget holds: the main budget
        # holds the best plan, which is on more devices.
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


# --- One method, and its outcome ---


HELPS = 0.05
"""If the best plan gains less than this share over the chosen plan on one device, the notes say
that placement does not help one step."""
FEWER = "fewer_devices"
"""Method name in outcomes for a plan that `simplest` derived from a plan on more devices."""


@dataclass(frozen=True, eq=False)
class PlacerOutcome:
    """The placement that a run returns, beside the values of all methods that ran.

    placement           [ops], with the entries of source ops filled in
    value               seconds of the objective
    peak_memory_bytes   [devices]
    feasible            always True, because a placement that does not fit is raised as an error
    placer              the method that returned this placement
    baselines           method -> its value in the order tried; None if its placement does not fit
    found_seconds       method -> seconds from the start of the search until it had its value
    bound               lower bound that the search proved for placements whose groups stay
                        together; None: the search proved none
    evaluations         number of distinct placements that were evaluated
    seconds             that the search took
    interrupted         Ctrl-C ended the search
    notes               sentences on why the plan has this many devices
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
    notes: tuple[str, ...] = ()


def place(
    problem: PlacementProblem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None = None,
    method: Placer | None = None,
    min_gain: float = 0.0,
) -> PlacerOutcome:
    """Run one method, and the baselines to compare it with.

    budget     of the search; the baselines are always evaluated, and count against it
    progress   called with (share of the budget spent, best feasible value so far or inf)
    method     runs under the name `placer_name`, instead of the method from the table
    min_gain   for `auto` only: the share by which a plan must beat plans with fewer devices

    Ctrl-C ends the search: the outcome is the best so far, with `interrupted` set. Within
    `keeping_interrupts` this holds at whatever moment it arrives. Raises `UsageError` for an
    unknown name. Raises `OutOfMemoryError` with the device that lacks most bytes, or
    `InfeasibleError`, if the method returned nothing feasible.
    """
    if placer_name not in PLACERS:
        raise UsageError("--placer", f"{placer_name!r} is not one of {', '.join(PLACERS)}")
    budget.progress = progress
    simplify = min_gain if placer_name == "auto" and problem.objective != "latency" else 0.0
    if problem.chain is not None:
        return _place_along(problem, placer_name, budget, progress, simplify)
    try_baselines(problem, budget)
    part = _main_part(budget, simplify)
    if placer_name == "auto" and method is None:
        try:
            # `auto` enters what its methods return into the budget, each under its own name.
            auto(problem, part)
        except KeyboardInterrupt:
            budget.interrupted = True
    elif placer_name not in BASELINES:
        attempt(placer_name, method or PLACERS[placer_name].load(), problem, part)
    found = {name: pair for name, pair in budget.found.items() if name != "auto"}
    if placer_name in BASELINES and placer_name not in found:
        # Ctrl-C came before the baseline that was asked for, and another one is no substitute.
        raise KeyboardInterrupt
    chosen = placer_name if placer_name in found else min(found, key=lambda name: found[name][0])
    return _outcome(problem, budget, chosen, progress, simplify)


def _main_part(budget: Budget, min_gain: float) -> Budget:
    """Return the part of the budget for the method; the rest is for plans with fewer devices."""
    if not min_gain:
        return budget
    share = 1 - SEARCH_SHARE
    evaluations = max(1.0, np.floor(share * budget.evaluations))
    return budget.slice(seconds=share * budget.seconds, evaluations=float(evaluations))


ALONG = {"single": single, "chain": chain}
"""The methods for a problem with a chain, where each device takes one run of a given order."""


def _place_along(
    problem: PlacementProblem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None,
    min_gain: float,
) -> PlacerOutcome:
    """Do what `place` does, for a problem with a chain."""
    if placer_name not in (*ALONG, "auto"):
        # `chain` is no name that a user may give: `auto` runs it.
        detail = f"{placer_name!r} keeps no order of stages; leave it out, or use single"
        raise UsageError("placer", detail)
    for name, method in ALONG.items():
        attempt(name, method, problem, budget)
    found = budget.found
    chosen = placer_name if placer_name in found else min(found, key=lambda name: found[name][0])
    return _outcome(problem, budget, chosen, progress, min_gain)


def _outcome(
    problem: PlacementProblem,
    budget: Budget,
    chosen: str,
    progress: Callable[[float, float], None] | None,
    min_gain: float,
) -> PlacerOutcome:
    """Return the plan of the method `chosen` with the values of all methods. If its additional
    devices gain too little, return the best plan with fewer devices instead.

    Raises `InfeasibleError`, or `OutOfMemoryError`, which is one.
    """
    found = {name: pair for name, pair in budget.found.items() if name != "auto"}
    score, placement = found[chosen]
    if score.lacking_bytes:
        raise _infeasible(problem, budget.peaks(placement))
    notes: tuple[str, ...] = ()
    if min_gain:
        kept = simplest(problem, budget, (score, placement), min_gain)
        if kept.devices < kept.best[1]:
            score, placement, chosen = kept.score, kept.placement, _name_of(found, kept.placement)
            if chosen == FEWER:
                budget.note(FEWER, score, placement)
                found[FEWER] = (score, placement)
        notes = _why(problem, kept, min_gain)
    if progress is not None:
        progress(1.0, score.value)
    return PlacerOutcome(
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
        notes=notes,
    )


def _name_of(found: Mapping[str, tuple[Score, GroupPlacement]], placement: GroupPlacement) -> str:
    """Return the first method that returned this placement, or `FEWER` if none did."""
    same = (name for name, (_, other) in found.items() if np.array_equal(other, placement))
    return next(same, FEWER)


def _why(problem: PlacementProblem, kept: SimplestPlan, min_gain: float) -> tuple[str, ...]:
    """Return the notes on the number of devices of the plan."""
    notes = []
    value, devices = kept.best
    gain = 1 - value / kept.score.value if kept.score.value else 0.0
    if kept.devices < devices and gain > CLOSED_GAP:
        notes.append(
            f"{_count(kept.devices)}: {_count(devices)} would gain {100 * gain:.2g} %, less than "
            f"the smallest gain of {100 * min_gain:.3g} %; --min-gain 0 takes them"
        )
    running = sum(device.kind != "host" for device in problem.machine.devices)
    if kept.devices == 1 and running > 1 and gain < HELPS and problem.objective == "step":
        towers = ", or data-parallel towers with --replicas" if problem.graph.training else ""
        notes.append(
            "placement does not help one step here; for more samples a second use --objective "
            f"load, a pipeline over the devices{towers}"
        )
    return tuple(notes)


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _infeasible(problem: PlacementProblem, peaks: NDArray[np.int64]) -> InfeasibleError:
    """Return an error that names the device that lacks most bytes; if memory is enough, one that
    says what else made every plan infeasible."""
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
