"""Searches for the placement of one step on one machine.

    machine ─► costs ─► groups ─► problem ─► placement ─► copies of shared ops ─► stages ─► plan

`search_plan` is the whole. What else could be planned instead, such as another form of the step,
`candidates` says; what is fastest of it, `planning`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import InfeasibleError
from dovetail.frontends import Captured
from dovetail.graph import Graph, GroupLevels, group_levels
from dovetail.graph.cells import cells_of
from dovetail.graph.kernels import compiled_ties
from dovetail.graph.source import Source
from dovetail.graph.units import Units
from dovetail.instances import Instance
from dovetail.machine import Machine
from dovetail.methods import PLACERS, imported
from dovetail.pipeline.opening import EXPORTED, bound_of, planned, with_copies
from dovetail.pipeline.pipelining import Kept, kept_modules
from dovetail.pipeline.prices import GivenMap, Pricing, price_others, read_place
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.sources import (
    Notes,
    TellProgress,
    costs_of,
    graph_of,
    groups_of,
    machine_of,
    source_of,
    transforms_of,
)
from dovetail.placers import (
    Budget,
    PlacementProblem,
    Placer,
    PlacerOutcome,
    keeping_interrupts,
    make_problem,
    permitted,
)
from dovetail.placers import place as run_placer
from dovetail.plans import Placement, Plan, capacities_of, normalise
from dovetail.simulator import LowerBound, Simulator

MOST_SPLIT_OPS = 100_000
"""The groups of a larger graph are not split: too few placements of it are simulated in a usual
budget to make use of that."""
MOST_SEARCHES = 5
"""A search is repeated at most so many times with less memory on GPUs. Each repetition has one
part in so many of the budget."""


def search_to_fit(request: PlanRequest, progress: TellProgress) -> Plan:
    """The plan of a request, of which GPUs hold what they must.

    On a GPU every tensor that arrives has its place for the whole step, and some others too
    (`most_bytes`), where the search counts what is alive. If that does not fit, the search is
    repeated with less memory there and a part of its budget. The bound is that of the first search,
    which has all memory.
    """
    first = chosen = search_plan(request, progress)
    caps = dict(request.caps)
    for _ in range(MOST_SEARCHES):
        lower = lower_caps(chosen, request)
        if not lower or chosen.interrupted:
            break
        caps |= lower
        part = request.limits.divided(MOST_SEARCHES)
        fewer = replace(request, caps=tuple(caps.items()), budget=part)
        try:
            again = search_plan(fewer, prefixed("with less memory on GPUs: ", progress))
        except InfeasibleError:
            break
        except KeyboardInterrupt:
            return replace(chosen, interrupted=True)
        chosen = replace(
            again,
            caps=first.caps,
            lower_bound=min(first.lower_bound, again.value),
            bound_proof=first.bound_proof,
        )
    notes: list[str] = []
    if chosen is not first:
        notes.append("searched with less memory on GPUs, as what arrives there stays all step long")
    if lower_caps(chosen, request):
        notes.append("what a GPU holds does not fit, so that this plan does not run")
    return replace(chosen, notes=(*chosen.notes, *notes)) if notes else chosen


def prefixed(prefix: str, progress: TellProgress) -> TellProgress:
    """`progress`, told with a prefix before what is being done."""
    return lambda doing, done, value: progress(f"{prefix}{doing}", done, value)


def lower_caps(plan: Plan, request: PlanRequest) -> dict[str, int]:
    """The GPUs that would hold more than they have, and the bytes that the next search may plan
    with there."""
    from dovetail.executors.shares import most_bytes, share_out

    lower: dict[str, int] = {}
    local_gpus = plan.machine.local and has_gpus(plan.machine)
    if not isinstance(request.planned_step, Captured) or not local_gpus:
        return lower
    step = planned(plan, request.planned_step)
    allowed = capacities_of(plan.machine, dict(request.caps))
    for share in share_out(plan, step.graph, step.program).shares:
        device, excess = plan.machine.devices[share.device], 0
        if device.torch_device:
            excess = most_bytes(share, step.graph, step.program) - int(allowed[share.device])
        if excess > 0:
            promised = plan.peak_memory_bytes[share.device]
            lower[device.name] = max(1, min(int(allowed[share.device]), promised) - excess)
    return lower


def has_gpus(machine: Machine) -> bool:
    """True if a device of the machine is a GPU."""
    return any(device.kind == "gpu" for device in machine.devices)


def search_plan(
    request: PlanRequest,
    progress: TellProgress,
    costs: Costs | None = None,
    *,
    compiled: bool = False,
) -> Plan:
    """The plan of a request, not yet compared with the step on all cores.

    costs      of the step's ops on the machine; None: they are found as the step and machine ask
               for
    compiled   they are those that ops have in compiled code, so what is placed are its kernels
    """
    began, step, notes = time.perf_counter(), request.planned_step, Notes()
    for note in step.notes if isinstance(step, Captured) else ():
        notes.say(note)
    # What the user may have got wrong is read and checked before anything is measured, which can
    # take minutes.
    places: dict[str, Plan | GivenMap] = {}
    if isinstance(request.place, (str, Path)):
        places[Path(request.place).name] = read_place(request.place)
    elif request.place is not None:
        places["given map"] = request.place
    machine = machine_of(step, request.machine, progress, notes)
    kept = kept_modules(request, machine)
    costs = costs or costs_of(step, machine, progress, notes)
    progress("grouping ops", 0.0, None)
    groups = _groups_to_place(request, machine, kept, compiled)
    problem, simulator = problem_of(request, machine, costs, groups, kept)
    graph, budget = problem.graph, _budget_of(request)
    chosen: Plan | None = None
    try:
        with keeping_interrupts(budget):
            progress("proving a bound", 0.0, None)
            bound = bound_of(graph, machine, costs, problem.objective, request.pins, request.caps)
            # The search can stop at a plan that reaches it.
            budget.ledger.prove(bound.seconds, bound.proof)
            progress("preparing the search (compiled once a machine)", 0.0, None)
            outcome = _placed(problem, request, budget, progress)
            # The search's own bound holds for plans that keep groups whole. In an instance groups
            # are all that must stay together; elsewhere a plan may split them.
            if isinstance(step, Instance) and outcome.bound is not None:
                bound = max(bound, outcome.bound, key=lambda candidate: candidate.seconds)
            chosen = replace(
                to_plan(problem, outcome, simulator, bound),
                source=source_of(step, request.model),
                transforms=transforms_of(step),
                pins=tuple(request.pins),
                caps=tuple(request.caps),
                whole=kept.patterns,
                made_for=request.format,
                min_gain=request.resolved_gain,
                planning_seconds=time.perf_counter() - began,
                notes=notes.texts + kept.notes + outcome.notes,
            )
        if request.format:
            EXPORTED[request.format](chosen, graph)  # raises what the format cannot say
        bare, chosen = chosen, _with_copies(chosen, request, kept)
        if request.stages and not budget.interrupted:
            searched = _Searched(request, kept, groups, problem, simulator, budget)
            try:
                chosen = _with_stages(bare, chosen, searched, progress)
            except KeyboardInterrupt:
                budget.interrupted = True  # the plan without stages stays
            chosen = replace(chosen, planning_seconds=time.perf_counter() - began)
        if places or request.format == "device-map":
            pricing = Pricing(graph, chosen.machine, costs, chosen.objective, tuple(request.caps))
            rows, said = price_others(step, pricing, places)
            chosen = replace(
                chosen, baselines={**chosen.baselines, **rows}, notes=(*chosen.notes, *said)
            )
        chosen = replace(chosen, interrupted=budget.interrupted)
    # Ctrl-C outside the search: the plan is kept if there is one.
    except KeyboardInterrupt:
        if chosen is None:
            raise
        chosen = replace(chosen, interrupted=True)
    return chosen


def _placed(
    problem: PlacementProblem, request: PlanRequest, budget: Budget, progress: TellProgress
) -> PlacerOutcome:
    """What the request's placer finds."""
    # A method runs in place of the placer's own function: the request's, or that of a placer with a
    # policy file or updates.
    method: Placer | None = request.method
    if method is None and (request.policy is not None or request.finetune):
        path = None if request.policy is None else Path(request.policy)
        method = imported(PLACERS[request.placer].with_policy)(path, request.finetune)
    return run_placer(
        problem,
        request.placer,
        budget,
        lambda done, best: progress("planning", done, best if best < np.inf else None),
        method,
        request.resolved_gain,
    )


def problem_of(
    request: PlanRequest,
    machine: Machine,
    costs: Costs,
    groups: GroupLevels,
    kept: Kept | None = None,
) -> tuple[PlacementProblem, Simulator]:
    """The problem that placers search, and the simulator that values each placement."""
    kept = kept or Kept(())
    graph, objective = graph_of(request.planned_step), request.resolved_objective
    capacities = capacities_of(machine, dict(request.caps))
    simulator = Simulator(graph, machine, costs, capacities=capacities, ranked=objective == "step")
    problem = make_problem(
        graph,
        machine,
        costs,
        lambda placements: simulator.evaluate(placements, objective),
        groups=groups.finest,
        coarser=groups.coarser,
        objective=objective,
        pins=request.pins,
        caps=request.caps,
        seed=request.seed,
        contiguous=request.contiguous,
        trace=simulator.timeline,
        ranked=simulator.ranked,
        may_run=kept.may_run,
        chain=kept.chain,
    )
    return problem, simulator


def to_plan(
    problem: PlacementProblem, outcome: PlacerOutcome, simulator: Simulator, bound: LowerBound
) -> Plan:
    """The plan of a placer's outcome, without what the problem does not know: the graph's source,
    pins and caps."""
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    timeline = simulator.timeline(outcome.placement)
    return Plan(
        source=Source("", "", (), ""),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=normalise(outcome.placement, graph, machine),
        orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
        compute_seconds=costs.compute_seconds,
        costs_source=costs.source,
        placer=outcome.placer,
        seed=problem.seed,
        objective=problem.objective,
        value=outcome.value,
        lower_bound=bound.seconds,
        bound_proof=bound.proof,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        groups=problem.groups.count,
        planning_seconds=outcome.seconds,
        baselines=outcome.baselines,
        found_seconds=outcome.found_seconds,
        contiguous=problem.contiguous,
        sent_bytes=costs.sent_bytes,
        graph=graph,
    )


def _groups_to_place(
    request: PlanRequest, machine: Machine, kept: Kept, compiled: bool = False
) -> GroupLevels:
    """The groups of the problem. Only `auto` splits groups while it searches, down to the kernels
    of compiled code if that is what runs. An instance has only one kind of groups, and what a
    format keeps together is small already."""
    step, grouping = request.planned_step, request.grouping
    splits = request.placer == "auto" and request.method is None and not request.contiguous
    splits &= grouping == "rule" and request.resolved_objective != "latency"
    splits &= not isinstance(step, Instance) and len(graph_of(step)) <= MOST_SPLIT_OPS
    if splits:
        graph, units = graph_of(step), kept.units
        if compiled:
            ties = compiled_ties(graph, cells_of(graph))
            # Ops that are pinned otherwise stay apart.
            may_run = permitted(graph, machine, request.pins)
            ties = ties[(may_run[ties[:, 0]] == may_run[ties[:, 1]]).all(axis=1)]
            units = units or Units(np.full(len(graph), -1, np.int32), ties[:0])
            units = replace(units, ties=np.concatenate([units.ties, ties]))
        return group_levels(graph, units)
    return GroupLevels(groups_of(step, kept.units, grouping=grouping), ())


def _budget_of(request: PlanRequest) -> Budget:
    """The budget of the search, with the gap at which it may stop."""
    budget = Budget(*request.limits)
    budget.gap = max(budget.gap, request.gap)
    return budget


def _with_copies(chosen: Plan, request: PlanRequest, kept: Kept) -> Plan:
    """The plan with copies of shared computations, if they help. Plans for a format and plans of an
    instance have none."""
    step = request.planned_step
    if request.format or isinstance(step, Instance):
        return chosen
    fixed = fixed_ops(graph_of(step), chosen.machine, request.pins, kept.units)
    return with_copies(chosen, step, fixed)


def fixed_ops(
    graph: Graph, machine: Machine, pins: Sequence[tuple[str, str]], units: Units | None
) -> NDArray[np.bool_]:
    """[ops] True for ops that a pin restricts or that belong to a unit."""
    free = permitted(graph, machine, ()).sum(axis=1)
    held = permitted(graph, machine, pins).sum(axis=1) < free
    return np.asarray(held if units is None else held | (units.of_op >= 0))


@dataclass(frozen=True, eq=False)
class _Searched:
    """What the search for a placement was given, and its budget, which knows what it found."""

    request: PlanRequest
    kept: Kept
    groups: GroupLevels
    problem: PlacementProblem
    simulator: Simulator
    budget: Budget


def _with_stages(bare: Plan, alone: Plan, searched: _Searched, progress: TellProgress) -> Plan:
    """The best plan of placement and stages.

    bare    the plan of the search, without copies and stages
    alone   the same with copies

    The searches with the costs of stages have the request's budget together, as the first search
    had.
    """
    from dovetail.pipeline.staging import ROUNDS, JointSearch, with_stages

    request, problem = searched.request, searched.problem
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    assert isinstance(request.planned_step, Captured), "the request has checked that"
    allowed = permitted(graph, machine, request.pins)
    running = ~graph.is_source

    def plan_of(name: str, placement: Placement) -> Plan | None:
        if not allowed[running, placement[running]].all():
            return None
        timeline = searched.simulator.timeline(placement)
        if (timeline.peak_memory_bytes > problem.capacities).any():
            return None
        plan = replace(
            bare,
            placement=placement,
            orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
            placer=name,
            value=timeline.step_seconds,
            peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        )
        return _with_copies(plan, request, searched.kept)

    def search(seconds: NDArray[np.float64]) -> list[tuple[str, Placement]]:
        scaled = Costs(seconds, costs.source, costs.sent_bytes)
        staged, _ = problem_of(request, machine, scaled, searched.groups, searched.kept)
        whole = _budget_of(request)
        budget = whole.slice(
            seconds=whole.seconds / ROUNDS, evaluations=max(1.0, whole.evaluations // ROUNDS)
        )
        try:
            with keeping_interrupts(budget):
                outcome = _placed(staged, request, budget, progress)
        # With less budget than the first search had, a placer may find nothing that fits.
        except InfeasibleError:
            return []
        if budget.interrupted:
            raise KeyboardInterrupt
        return [(outcome.placer, outcome.placement), *_best_found(staged, budget)]

    singles = [
        ("single", normalise(np.full(len(graph), device, dtype=np.int32), graph, machine))
        for device in np.flatnonzero(np.isfinite(costs.compute_seconds[running]).all(axis=0))
    ]
    placements = [(bare.placer, bare.placement), *singles, *_best_found(problem, searched.budget)]
    joint = JointSearch(
        request.planned_step, alone, costs.compute_seconds, placements, plan_of, search,
        request.resolved_gain,
    )  # fmt: skip
    return with_stages(joint, progress)


MOST_STAGED = 4
"""Stages are chosen for so many of the best placements of a search."""


def _best_found(problem: PlacementProblem, budget: Budget) -> list[tuple[str, Placement]]:
    """(method, placement [ops]) of the best placements that the methods found and that fit."""
    results = budget.ledger.results
    fitting = [(pair, name) for name, pair in results.items() if not pair[0].lacking_bytes]
    fitting.sort(key=lambda entry: entry[0][0])
    return [
        (name, normalise(problem.spread(placement), problem.graph, problem.machine))
        for (_, placement), name in fitting[:MOST_STAGED]
    ]
