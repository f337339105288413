"""Searches for the placement of one step on one machine.

    machine ─► costs ─► groups ─► problem ─► placement ─► copies of shared ops ─► stages ─► plan

`search_plan` is the whole. What else could be planned instead, such as another form of the step,
`candidates` says; what is fastest of it, `planning`. Pipelines, phases and stages are searched for
in files of their own (`pipelining`, `phases`, `staging`), which take from here what all searches
share: the modules that stay whole, the problem, the budget, and the plan's record.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import InfeasibleError, UsageError
from dovetail.exports.rules import FORMATS, rules_for
from dovetail.frontends import Captured
from dovetail.graph import Graph, GroupLevels, group_levels
from dovetail.graph.records import Int32
from dovetail.graph.units import Units, matched_modules, units_of
from dovetail.instances import Instance
from dovetail.machine import Machine
from dovetail.methods import PLACERS, imported
from dovetail.pipeline.opening import bound_of, planned, with_copies
from dovetail.pipeline.prices import GivenMap, Pricing, price_others, read_place
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.sources import (
    SENTENCE,
    Notes,
    TellProgress,
    costs_of,
    graph_of,
    groups_of,
    machine_of,
    source_of,
    transforms_of,
    unsplit_modules,
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
from dovetail.plans import Placement, Plan, capacities_of
from dovetail.runtime.timers import Deadline
from dovetail.simulator import LowerBound, Simulator
from dovetail.timeline import Timeline
from dovetail.transforms import AnyTransform
from dovetail.units import format_seconds

MOST_SPLIT_OPS = 100_000
"""The groups of a larger graph are not split: too few placements of it are simulated in a usual
budget to make use of that."""
FEW_HOPS = 20
"""A step that takes less than so many messages between devices gains hardly anything by several:
each op that moves waits for one."""
MOST_SEARCHES = 5
"""A search is repeated at most so many times with less memory on GPUs. Each repetition has one
part in so many of the budget."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The modules that must stay whole, and where ops may run.

    patterns   patterns of the modules that stay whole, the user's and the model's own
    units, may_run, chain   as `make_problem` takes them; None: nothing is asked for
    notes      sentences for the user about modules kept whole
    """

    patterns: tuple[str, ...]
    units: Units | None = None
    may_run: NDArray[np.bool_] | None = None
    chain: NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()


def kept_modules(request: PlanRequest, machine: Machine) -> Kept:
    """The modules that `whole` and `format` keep whole. Raises `PinError`, `UsageError` and
    `ExportError`, before any costs are measured."""
    graph, format = graph_of(request.planned_step), request.format
    # The result is not needed here. The call raises for a pin that matches nothing.
    permitted(graph, machine, request.pins)
    if not (request.whole or format):
        return Kept(())
    unsplit = unsplit_modules(request.planned_step) if format else {}
    patterns = tuple(dict.fromkeys([*request.whole, *unsplit]))
    modules = matched_modules(graph, patterns)
    if not format:
        return Kept(patterns, units_of(graph, modules))
    aliases = dict(source_of(request.planned_step, request.model).aliases)
    rules = rules_for(format, graph, machine, modules, aliases)
    for pattern, device in request.pins:
        if not rules.devices[machine.device_index(device)]:
            raise UsageError("pin", f"{pattern}={device}: a {format} has no name for {device}")
    may_run = np.broadcast_to(rules.devices, (len(graph), len(rules.devices))).copy()
    # What the format runs on the main device may run on the first GPU alone, or on the first CPU if
    # there is no GPU.
    kinds = [device.kind for device in machine.devices]
    first = next(d for kind in ("gpu", "cpu") for d, k in enumerate(kinds) if k == kind)
    may_run[rules.main] = np.arange(len(kinds)) == first
    notes = tuple(
        f"kept whole: {pattern}, as the model says not to split {name}"
        for pattern, name in unsplit.items()
    )
    return Kept(patterns, rules.units, may_run, rules.chain, notes)


@dataclass(frozen=True, eq=False)
class Searched:
    """What a search for a placement was given, and its budget, whose ledger knows what it found."""

    request: PlanRequest
    kept: Kept
    groups: GroupLevels
    problem: PlacementProblem
    budget: Budget


ChooseStages = Callable[[Searched, Plan, Plan, TellProgress], Plan]
"""(the search, its plan without copies and stages, the same with copies, progress) -> the best plan
of placement and stages: `staging.with_stages`."""


def search_to_fit(
    request: PlanRequest, progress: TellProgress, choose_stages: ChooseStages | None = None
) -> Plan:
    """The plan of a request, of which GPUs hold what they must.

    On a GPU every tensor that arrives has its place for the whole step, and some others too
    (`most_bytes`), where the search counts what is alive. If that does not fit, the search is
    repeated with less memory there and a part of its budget. The bound is that of the first search,
    which has all memory.
    """
    first = chosen = search_plan(request, progress, choose_stages=choose_stages)
    caps = dict(request.caps)
    for _ in range(MOST_SEARCHES):
        lower = lower_caps(chosen, request)
        if not lower or chosen.interrupted:
            break
        caps |= lower
        part = request.limits.divided(MOST_SEARCHES)
        fewer = replace(request, caps=tuple(caps.items()), budget=part)
        tell = prefixed("with less memory on GPUs: ", progress)
        try:
            again = search_plan(fewer, tell, choose_stages=choose_stages)
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
    if chosen is not first:
        told = "searched with less memory on GPUs, as what arrives there stays all step long"
        chosen = chosen.noted(told)
    if lower_caps(chosen, request):
        chosen = chosen.noted("what a GPU holds does not fit, so that this plan does not run")
    return chosen


def prefixed(prefix: str, progress: TellProgress) -> TellProgress:
    """`progress`, told with a prefix before what is being done; sentences are no such thing, and
    were said of the step as it is."""
    return lambda doing, done, value: (
        None if done == SENTENCE else progress(f"{prefix}{doing}", done, value)
    )


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
    ties: Int32 | None = None,
    choose_stages: ChooseStages | None = None,
) -> Plan:
    """The plan of a request, not yet compared with the step on all cores.

    costs           of the step's ops on the machine; None: they are found as the step and machine
                    ask for
    ties            [ties, 2] pairs of ops that stay together where groups are split, unless their
                    pins differ. For costs of compiled code, `graph.kernels.compiled_ties`
    choose_stages   chooses them for a request with stages
    """
    began, step, notes = time.perf_counter(), request.planned_step, Notes()
    graph, objective = graph_of(step), request.resolved_objective
    for note in step.notes if isinstance(step, Captured) else ():
        notes.say(note)
    # What the user may have got wrong is read and checked before anything is measured, which can
    # take minutes.
    places: dict[str, Plan | GivenMap] = {}
    if isinstance(request.place, (str, Path)):
        places[Path(request.place).name] = read_place(request.place)
    elif request.place is not None:
        places["given map"] = request.place
    deadline, is_first = request.deadline or Deadline(), costs is None
    with deadline.phase("measuring") as part:
        machine = machine_of(step, request.machine, progress, notes, part)
        kept = kept_modules(request, machine)
        costs = costs or costs_of(step, machine, progress, notes, part)
    progress("grouping ops", 0.0, None)
    # Only `auto` splits groups while it searches, down to what is tied. An instance has only one
    # kind of groups, and what a format keeps together is small already.
    splits = request.is_by_auto and request.grouping == "rule" and objective != "latency"
    splits &= not isinstance(step, Instance) and len(graph) <= MOST_SPLIT_OPS
    if splits:
        units = kept.units
        if ties is not None:
            # Ops that are pinned otherwise stay apart.
            may_run = permitted(graph, machine, request.pins)
            ties = ties[(may_run[ties[:, 0]] == may_run[ties[:, 1]]).all(axis=1)]
            units = units or Units(np.full(len(graph), -1, np.int32), ties[:0])
            units = replace(units, ties=np.concatenate([units.ties, ties]))
        groups = group_levels(graph, units)
    else:
        groups = GroupLevels(groups_of(step, kept.units, grouping=request.grouping), ())
    problem = problem_of(request, machine, costs, groups, kept)
    budget = budget_of(request)
    chosen: Plan | None = None
    try:
        with deadline.phase("searching"), keeping_interrupts(budget):
            progress("proving a bound", 0.0, None)
            bound = bound_of(graph, machine, costs, objective, request.pins, request.caps)
            # The search can stop at a plan that reaches it.
            budget.ledger.prove(bound.seconds, bound.proof)
            # Before most of the budget is spent, the user hears what it can gain at most.
            running = [d.kind != "host" for d in machine.devices]
            if is_first and machine.local and objective == "step" and sum(running) > 1:
                on_one = float(costs.compute_seconds.sum(axis=0)[running].min())
                hop = max((link.latency_seconds for link in machine.links), default=0.0)
                told = f"one step takes {format_seconds(on_one)} on one device"
                if on_one < FEW_HOPS * hop or on_one < bound.seconds * (1 + request.resolved_gain):
                    told += ": placement can hardly help here; a larger batch or replicas can"
                elif np.isfinite(on_one) and bound.seconds > 0:
                    most = on_one / bound.seconds
                    told += f", and no placement makes it more than {most:.2f} x as fast"
                if np.isfinite(on_one):
                    progress(told, SENTENCE, None)
            progress("preparing the search (compiled once a machine)", 0.0, None)
            outcome = placed(problem, request, budget, progress)
            # The search's own bound holds for plans that keep groups whole. In an instance groups
            # are all that must stay together; elsewhere a plan may split them.
            if isinstance(step, Instance) and outcome.bound is not None:
                bound = max(bound, outcome.bound, key=lambda candidate: candidate.seconds)
            chosen = plan_of(
                request,
                problem,
                outcome,
                bound,
                planning_seconds=time.perf_counter() - began,
                whole=kept.patterns,
                notes=notes.texts + kept.notes + outcome.notes,
            )
        if request.format:
            FORMATS[request.format].export(chosen, graph)  # raises what the format cannot say
        bare, chosen = chosen, with_shared_copies(chosen, request, kept)
        if choose_stages is not None and request.stages and not budget.interrupted:
            searched = Searched(request, kept, groups, problem, budget)
            try:
                chosen = choose_stages(searched, bare, chosen, progress)
            except KeyboardInterrupt:
                budget.interrupted = True  # the plan without stages stays
            chosen = replace(chosen, planning_seconds=time.perf_counter() - began)
        if places or request.format == "device-map":
            pricing = Pricing(graph, machine, costs, objective, tuple(request.caps))
            rows, said = price_others(step, pricing, places)
            chosen = replace(chosen, baselines={**chosen.baselines, **rows}).noted(*said)
        chosen = replace(chosen, interrupted=budget.interrupted)
    # Ctrl-C outside the search: the plan is kept if there is one.
    except KeyboardInterrupt:
        if chosen is None:
            raise
        chosen = replace(chosen, interrupted=True)
    return chosen


def placed(
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
) -> PlacementProblem:
    """The problem that placers search. Its `trace` simulates a placement."""
    kept = kept or Kept(())
    graph, objective = graph_of(request.planned_step), request.resolved_objective
    capacities = capacities_of(machine, dict(request.caps))
    simulator = Simulator(graph, machine, costs, capacities=capacities, ranked=objective == "step")
    return make_problem(
        graph,
        machine,
        costs,
        partial(simulator.evaluate, objective=objective),
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


def plan_of(
    request: PlanRequest,
    problem: PlacementProblem,
    outcome: PlacerOutcome,
    bound: LowerBound,
    **found: Any,
) -> Plan:
    """The plan of what a placer found. `found` are the fields that neither the outcome nor the
    bound tells."""
    assert problem.trace is not None, "the problem is one of `problem_of`"
    return to_plan(
        request,
        problem.graph,
        problem.machine,
        problem.costs,
        outcome.placement,
        problem.trace(outcome.placement),
        placer=outcome.placer,
        value=outcome.value,
        lower_bound=bound.seconds,
        bound_proof=bound.proof,
        groups=problem.groups.count,
        baselines=outcome.baselines,
        found_seconds=outcome.found_seconds,
        min_gain=request.resolved_gain,
        **found,
    )


def to_plan(
    request: PlanRequest,
    graph: Graph,
    machine: Machine,
    costs: Costs,
    placement: Placement,
    timeline: Timeline,
    *,
    added: Sequence[AnyTransform] = (),
    **found: Any,
) -> Plan:
    """The plan that a search for a request has found.

    graph      the planned one, of which the costs and the placement [ops] are
    timeline   of the placement
    added      transforms of the search, which made the planned step of the request's
    found      the other fields of the plan
    """
    step = request.planned_step
    return Plan(
        source=source_of(step, request.model),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=placement,
        orders=timeline.orders,
        compute_seconds=costs.compute_seconds,
        costs_source=costs.source,
        seed=request.seed,
        objective=request.resolved_objective,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        pins=tuple(request.pins),
        caps=tuple(request.caps),
        contiguous=request.contiguous,
        sent_bytes=costs.sent_bytes,
        made_for=request.format,
        transforms=(*transforms_of(step), *added),
        graph=graph,
        **found,
    )


def budget_of(request: PlanRequest) -> Budget:
    """The budget of a search, with the gap at which it may stop."""
    budget = Budget(*request.limits)
    budget.gap = max(budget.gap, request.gap)
    return budget


def with_shared_copies(plan: Plan, request: PlanRequest, kept: Kept) -> Plan:
    """The plan with copies of shared computations, if they help. Plans for a format and plans of an
    instance have none."""
    step = request.planned_step
    if request.format or isinstance(step, Instance):
        return plan
    return with_copies(plan, step, fixed_ops(graph_of(step), plan.machine, plan.pins, kept.units))


def fixed_ops(
    graph: Graph, machine: Machine, pins: Sequence[tuple[str, str]], units: Units | None
) -> NDArray[np.bool_]:
    """[ops] True for ops that a pin restricts or that belong to a unit."""
    free = permitted(graph, machine, ()).sum(axis=1)
    held = permitted(graph, machine, pins).sum(axis=1) < free
    return np.asarray(held if units is None else held | (units.of_op >= 0))
