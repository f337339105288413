"""Runs one placement method and the baselines on a problem, and returns the outcome."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, OutOfMemoryError, UsageError
from dovetail.methods import KEEP_ORDER, NO_ORDER, PLACERS
from dovetail.placers.auto import auto
from dovetail.placers.baselines import BASELINES, Placer, attempt, single, try_baselines
from dovetail.placers.budget import CLOSED_GAP, Budget, Score
from dovetail.placers.chain import chain
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.plans import Placement, normalise
from dovetail.simulator import LowerBound

ScoredPlacement = tuple[Score, GroupPlacement]

# --- One method, and its outcome ---

CHAIN_METHODS: dict[str, Placer] = {"single": single, "chain": chain}
"""The methods for a problem with a chain, where each device takes one run of a given order. `auto`
runs both; `chain` has no entry in `PLACERS`, because it is for nothing else."""
SEARCH_SHARE = 0.15
"""Share of the whole budget that is reserved for plans on fewer devices, if there is a smallest
gain."""
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
    placer              the method that returned this placement
    baselines           method -> its value in the order tried; None if its placement does not fit
    found_seconds       method -> seconds from the start of the search until it had its value
    bound               lower bound that the search proved for placements whose groups stay
                        together; None: the search proved none
    evaluations         number of placements that were evaluated; one that is evaluated in groups
                        of several sizes counts each time
    seconds             that the search took
    interrupted         Ctrl-C ended the search
    notes               sentences on why the plan has this many devices
    """

    placement: Placement
    value: float
    peak_memory_bytes: NDArray[np.int64]
    placer: str
    baselines: dict[str, float | None]
    found_seconds: dict[str, float]
    bound: LowerBound | None
    evaluations: int
    seconds: float
    interrupted: bool
    notes: tuple[str, ...] = ()


def place(  # noqa: C901  three steps, each of which depends on what was asked for
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
    method     runs under the name `placer_name`, instead of the method from the table. It does not
               replace a baseline
    min_gain   for `auto` only: the share by which a plan must beat plans with fewer devices

    Ctrl-C ends the search: the outcome is the best so far, with `interrupted` set. Within
    `keeping_interrupts` this holds at whatever moment it arrives. Raises `UsageError` for an
    unknown name. Raises `OutOfMemoryError` with the device that lacks most bytes, or
    `InfeasibleError`, if the method returned nothing feasible.
    """
    if placer_name not in PLACERS:
        raise UsageError("--placer", f"{placer_name!r} is not one of {', '.join(PLACERS)}")
    budget.progress = progress
    if placer_name != "auto" or problem.objective == "latency":
        min_gain = 0.0
    # 1. What the baselines and the method return is entered into the ledger.
    if problem.chain is not None:
        if placer_name not in KEEP_ORDER:
            raise UsageError("placer", NO_ORDER.format(placer=placer_name))
        methods = dict(CHAIN_METHODS)
        if method is not None and placer_name == "auto":
            methods["auto"] = method
        for name, run in methods.items():
            attempt(name, run, problem, budget)
    else:
        # Where groups may be split, `auto` runs the baselines on the coarsest units.
        by_auto = placer_name == "auto" and method is None
        if not (by_auto and (problem.coarser or not len(problem.free))):
            try_baselines(problem, budget)
        # If there is a smallest gain, a part of the budget is for plans with fewer devices.
        part = budget.share(1 - SEARCH_SHARE) if min_gain else budget
        if by_auto:
            try:
                # `auto` enters what its methods return into the ledger, each under its own name.
                auto(problem, part)
            except KeyboardInterrupt:
                budget.interrupted = True
                if not budget.ledger.results:
                    raise
        elif placer_name not in BASELINES:
            attempt(placer_name, method or PLACERS[placer_name].load(), problem, part)

    # 2. The result of the method that was asked for, or the best.
    # A method that runs under the name "auto" may itself run methods that enter their results into
    # the ledger, as the one of `pipeline.phases` does. Its own result is then one of theirs, and
    # is left out unless it is the best.
    results = {name: pair for name, pair in budget.ledger.results.items() if name != "auto"}
    of_auto = budget.ledger.results.get("auto")
    if of_auto is not None and of_auto[0] < min(score for score, _ in results.values()):
        results["auto"] = of_auto
    if placer_name in BASELINES and placer_name not in results:
        # Ctrl-C came before the baseline that was asked for, and another one is no substitute.
        raise KeyboardInterrupt
    chosen = placer_name if placer_name in results else min(results, key=lambda n: results[n][0])
    score, placement = results[chosen]
    if score.lacking_bytes:
        peaks = budget.ledger.peaks(placement)
        device = int((peaks - problem.capacities).argmax())
        if peaks[device] > problem.capacities[device]:
            name = problem.machine.device_names[device]
            raise OutOfMemoryError(name, int(peaks[device]), int(problem.capacities[device]))
        reason = (
            "leaves a device and comes back to it" if problem.contiguous else "waits for itself"
        )
        raise InfeasibleError(
            f"no plan was found: every one that was tried {reason}; give it a larger budget, fewer "
            "pins, or --placer exact"
        )

    # 3. If additional devices gain too little, the best plan with fewer devices is returned.
    notes: list[str] = []
    if min_gain:
        best_value, most = score.value, devices_of(problem, placement)
        kept_score, kept = simplest(problem, budget, (score, placement), min_gain)
        devices = devices_of(problem, kept)
        if devices < most:
            score, placement = kept_score, kept
            same = (n for n, (_, other) in results.items() if np.array_equal(other, placement))
            chosen = next(same, FEWER)
            if chosen == FEWER:
                budget.note(FEWER, score, placement)
                results[FEWER] = (score, placement)
        gain = 1 - best_value / kept_score.value if kept_score.value else 0.0
        if devices < most and gain > CLOSED_GAP:
            count = "1 device" if devices == 1 else f"{devices} devices"
            notes.append(
                f"{count}: {most} devices would gain {100 * gain:.2g} "
                f"%, less than the smallest gain of {100 * min_gain:.3g} %; --min-gain 0 takes them"
            )
        computing = sum(device.kind != "host" for device in problem.machine.devices)
        if devices == 1 and computing > 1 and gain < HELPS and problem.objective == "step":
            towers = ", or data-parallel towers with --replicas" if problem.graph.training else ""
            notes.append(
                "placement does not help one step here; for more samples a second use --objective "
                f"load, a pipeline over the devices{towers}"
            )
    if budget.progress is not None:
        budget.progress(1.0, score.value)
    return PlacerOutcome(
        placement=normalise(problem.spread(placement), problem.graph, problem.machine),
        value=score.value,
        peak_memory_bytes=budget.ledger.peaks(placement),
        placer=chosen,
        baselines={
            name: None if score.lacking_bytes else score.value
            for name, (score, _) in results.items()
        },
        found_seconds={name: budget.ledger.result_seconds[name] for name in results},
        bound=budget.ledger.bound,
        evaluations=budget.evaluated,
        seconds=budget.spent_seconds,
        interrupted=budget.interrupted,
        notes=tuple(notes),
    )


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

NEAR = 1.25
"""Local search improves a plan on fewer devices only if its value is at most this many times the
best plan's."""
EMPTIED = 2
"""In each step this many devices, those with the least work, are candidates for being emptied."""


def simplest(
    problem: PlacementProblem, budget: Budget, best: ScoredPlacement, min_gain: float
) -> ScoredPlacement:
    """Return the plan to take instead of `best`; it may be `best` itself.

    Going up from one device, a plan on more devices is taken only if its value is below that of the
    plan taken so far by more than the share `min_gain`. Plans that lack memory are skipped.
    """
    placement = best[1]
    count = devices_of(problem, placement)
    # Number of devices -> the best plan that runs something on so many.
    by_count = {count: best}
    alone = single(problem, budget)
    alone_score = budget.score(problem, alone[None], always=True)[0]
    _keep_better(by_count, devices_of(problem, alone), (alone_score, alone))

    # 1. Plans with ever more devices emptied. A device with little work hands all to another one
    # that is in use, unless a group may not go there.
    groups = np.flatnonzero(problem.running)
    while count > 2 and not budget.interrupted:
        used = np.unique(placement[groups])
        seconds = problem.work_seconds[groups, placement[groups]]
        work = np.bincount(placement[groups], weights=seconds, minlength=problem.devices)
        candidates = []
        for device in sorted(used.tolist(), key=lambda d: (work[d], d))[:EMPTIED]:
            for other in used.tolist():
                moved = np.where(placement == device, other, placement).astype(np.int32)
                if other != device and problem.allowed[groups, moved[groups]].all():
                    candidates.append(moved)
        if not candidates:
            break
        scores = budget.score(problem, np.stack(candidates), always=True)
        best_index = min(range(len(scores)), key=scores.__getitem__)
        placement = candidates[best_index]
        count -= 1
        _keep_better(by_count, count, (scores[best_index], placement))

    # 2. Those near the best are improved. Local search knows no chain: its moves would break it
    # and give infeasible plans.
    if problem.chain is None and not budget.interrupted:
        most = max(by_count)
        near = sorted(
            count
            for count, (score, _) in by_count.items()
            if 1 < count < most and not score.lacking_bytes and score.value <= NEAR * best[0].value
        )
        for i, count in enumerate(near):
            if budget.exhausted:
                break
            score, placement = by_count[count]
            is_used = np.zeros(problem.devices, dtype=bool)
            is_used[placement[groups]] = True
            allowed = problem.allowed & is_used
            # A group that may be on none of these devices keeps its choice, or it would have none.
            homeless = ~allowed.any(axis=1)
            allowed[homeless] = problem.allowed[homeless]
            # Each search gets an equal part of what is left, and at least something to begin with.
            # It has a separate budget, because a search starts from what its budget holds: the
            # main budget holds the best plan, which is on more devices.
            part = 1 / (len(near) - i)
            part_budget = Budget(
                max(part * budget.left_seconds, 1e-3) if budget.timed else np.inf,
                max(1, part * budget.left),
                budget.clock,
                threads=budget.threads,
            )
            part_budget.note("emptied", score, placement)
            improved = local_search(replace(problem, allowed=allowed), part_budget)
            budget.charge(part_budget.spent)
            improved_score = budget.score(problem, improved[None], always=True)[0]
            if improved_score < score and devices_of(problem, improved) <= count:
                by_count[count] = (improved_score, improved)

    # 3. The plan with the fewest devices that none with more devices beats by the gain.
    for count, scored in budget.ledger.fewest.items():
        _keep_better(by_count, count, scored)
    kept: ScoredPlacement | None = None
    for _, scored in sorted(by_count.items(), key=lambda entry: entry[0]):
        if scored[0].lacking_bytes:
            continue
        if kept is None or scored[0].value < kept[0].value * (1 - min_gain):
            kept = scored
    assert kept is not None, "the best plan fits"
    return kept


def devices_of(problem: PlacementProblem, placement: GroupPlacement) -> int:
    """Return the number of devices that run something."""
    return len(np.unique(placement[problem.running]))


def _keep_better(by_count: dict[int, ScoredPlacement], count: int, scored: ScoredPlacement) -> None:
    """Enter the placement on so many devices, unless there is one as good."""
    if count not in by_count or scored[0] < by_count[count][0]:
        by_count[count] = scored
