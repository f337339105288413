"""Runs one placement method on a problem, beside the baselines, and returns the outcome."""

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
# The search starts from the best plan. It moves everything off the device with the least work, to
# the other device where that costs least, until one device is left. If such a plan is near the
# best, a local search on its devices alone improves it. Plans on few devices that other searches
# evaluated count as well.

SEARCH_SHARE = 0.15
"""Share of the whole budget that is kept for these searches if there is a smallest gain."""
NEAR = 1.25
"""A plan on fewer devices is searched on if its value is at most this many times the best."""
EMPTIED = 2
"""How many devices, those with the least work, are candidates for being emptied."""


@dataclass(frozen=True, eq=False)
class SimplestPlan:
    """score, placement   of the plan that is returned
    devices   it uses
    best      value and number of devices of the best plan of all
    """

    score: Score
    placement: GroupPlacement
    devices: int
    best: tuple[float, int]


def simplest(
    problem: PlacementProblem, budget: Budget, best: tuple[Score, GroupPlacement], min_gain: float
) -> SimplestPlan:
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
            kept = SimplestPlan(
                score, placement, count, (best[0].value, devices_of(problem, best[1]))
            )
    assert kept is not None, "the best plan fits"
    return kept


def devices_of(problem: PlacementProblem, placement: GroupPlacement) -> int:
    """Number of devices that run something."""
    return len(np.unique(placement[problem.running]))


def _emptied(
    problem: PlacementProblem, budget: Budget, best: tuple[Score, GroupPlacement]
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


def _with_one_less(problem: PlacementProblem, placement: GroupPlacement) -> NDArray[np.int32]:
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
    problem: PlacementProblem,
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


# --- One method, and its outcome ---


HELPS = 0.05
"""If all devices gain less than this share over one device, the notes say that placement does not
help one step."""
FEWER = "fewer_devices"
"""Name of a plan that no method proposed: `simplest` made it from a plan on more devices."""


@dataclass(frozen=True, eq=False)
class PlacerOutcome:
    """What a placer found.

    placement           [ops], source entries filled in
    value               seconds of the objective
    peak_memory_bytes   [devices]
    feasible            it fits: always, since what does not fit is raised
    placer              the method that found it
    baselines           method -> value, None where it does not fit, in the order tried
    found_seconds       method -> seconds from the start of the search to its value
    notes               sentences on why it has this many devices
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
    notes: tuple[str, ...] = ()


def place(
    problem: PlacementProblem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None = None,
    method: Placer | None = None,
    min_gain: float = 0.0,
) -> PlacerOutcome:
    """Run one method, and the cheap ones to compare it with.

    budget     of the search; the four baselines are always evaluated, and count
    progress   called with (share of the budget spent, best feasible value so far or inf)
    method     what runs under that name, in place of ours
    min_gain   of `auto`: the share by which a plan must beat those with fewer devices

    Ctrl-C ends the search with the best so far, `interrupted`; within `keeping_interrupts` at
    whatever moment it arrives. Raises `UsageError` for an unknown name, and `OutOfMemoryError` with
    the device that lacks most where the method found nothing that fits.
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
            auto(problem, part)  # it notes what its methods find, each under its own name
        except KeyboardInterrupt:
            budget.interrupted = True
    elif placer_name not in BASELINES:
        attempt(placer_name, method or PLACERS[placer_name].load(), problem, part)
    found = {name: pair for name, pair in budget.found.items() if name != "auto"}
    if placer_name in BASELINES and placer_name not in found:
        raise KeyboardInterrupt  # stopped before it: what others found is not what was asked for
    chosen = placer_name if placer_name in found else min(found, key=lambda name: found[name][0])
    return _outcome(problem, budget, chosen, progress, simplify)


def _main_part(budget: Budget, min_gain: float) -> Budget:
    """What the search may spend; the rest is for plans with fewer devices."""
    if not min_gain:
        return budget
    share = 1 - SEARCH_SHARE
    evaluations = max(1.0, np.floor(share * budget.evaluations))
    return budget.slice(seconds=share * budget.seconds, evaluations=float(evaluations))


ALONG = {"single": single, "chain": chain}
"""The methods for a problem with a chain: each device takes one run of a given order."""


def _place_along(
    problem: PlacementProblem,
    placer_name: str,
    budget: Budget,
    progress: Callable[[float, float], None] | None,
    min_gain: float,
) -> PlacerOutcome:
    """As `place`, of a problem with a chain."""
    if placer_name not in (*ALONG, "auto"):
        detail = f"{placer_name!r} keeps no order of stages; leave it out, or use single or chain"
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
    """What the method `chosen` found, beside all others; or, where more devices gain too little,
    the best plan with fewer. Raises `InfeasibleError`."""
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
    """The first method that found this placement, or `FEWER`."""
    same = (name for name, (_, other) in found.items() if np.array_equal(other, placement))
    return next(same, FEWER)


def _why(problem: PlacementProblem, kept: SimplestPlan, min_gain: float) -> tuple[str, ...]:
    """What to tell of the number of devices."""
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
