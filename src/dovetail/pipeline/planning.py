"""Plans a step: machine -> costs -> groups -> problem -> placement -> plan.

`find_plan` is the whole flow. The functions below it stand in the order in which it calls them;
prices of other placements, a device map or another plan, come last.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import (
    CaptureError,
    CostError,
    DovetailError,
    FileFormatError,
    GraphMismatchError,
    InfeasibleError,
    ModelError,
    UsageError,
)
from dovetail.exports import DeviceMap
from dovetail.frontends import Captured
from dovetail.graph import EVERYWHERE, Graph, GroupLevels, group_levels
from dovetail.graph.cells import cells_of
from dovetail.graph.kernels import CONVOLUTION, compiled_ties
from dovetail.graph.source import Source
from dovetail.graph.units import Units
from dovetail.instances import Instance
from dovetail.machine import Machine, names_here, parse_machine
from dovetail.methods import PLACERS, imported
from dovetail.pipeline.batches import Planners, plan_batch
from dovetail.pipeline.opening import (
    EXPORTED,
    bound_of,
    costs_in,
    planned,
    timeline_of,
    with_copies,
)
from dovetail.pipeline.pipelining import Kept, kept_modules, plan_pipeline
from dovetail.pipeline.requests import PlanRequest, with_fields_of
from dovetail.pipeline.sources import (
    Notes,
    Step,
    TellProgress,
    costs_of,
    graph_of,
    groups_of,
    machine_of,
    silent,
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
from dovetail.plans import (
    Placement,
    Plan,
    capacities_of,
    check_placement,
    load_plan,
    normalise,
    planned_graph,
)
from dovetail.runtime.files import read_json
from dovetail.runtime.user_code import said
from dovetail.simulator import LowerBound, Simulator
from dovetail.transforms import Form, duplicate, the
from dovetail.units import HERE, HERE_CPU, format_seconds

MOST_SPLIT_OPS = 100_000
"""The groups of a larger graph are not split: too few placements of it are simulated in a usual
budget to make use of that."""
SEGMENTS_SHARE = 0.5
"""The share of `--compile-budget` that segments may take. `torch.compile` has the rest."""
MOST_SEARCHES = 5
"""A search is repeated so often with less memory on GPUs, each time with this part of its
budget."""
HOPELESS = 1.5
"""A plan for all cores as one device is not compiled and measured beside a plan on several devices
if it is predicted, op by op, to take this many times as long."""
GivenMap = Mapping[str, int | str]
"""A device map: module or parameter path -> device. A `DeviceMap` names the main device as well."""

# --- The flow ---


@with_fields_of(PlanRequest)
def plan(
    step: Step, machine: str | Machine = "", *, progress: TellProgress = silent, **options: Any
) -> Plan:
    """Find how to run `step` fastest on `machine`.

    machine    a `Machine`, or its text: "here", "here/1", "here/2", "box.toml", "4 x k80 +
               haswell". By default an instance's own, and else "here", of whose cores an op uses as
               many as are measured to be best for this step
    options    fields of `PlanRequest`, whose docstring says what each means
    progress   is told what is being done

    A plan on the text here or here/n is measured beside the step as its user would run it, eager
    and by `torch.compile`: see `pipeline.ways`. Where that cannot be measured, a plan on here/n
    without pins and caps has `here`, all cores as one device, among its baselines. If one of these
    is faster than what `auto` found, it is the plan that is returned, and its machine is `here`. A
    machine with cores that was described otherwise keeps its rates.

    From the start of the search on, a first Ctrl-C ends it with the best plan so far,
    `interrupted`. Raises `InvalidError`, or `InfeasibleError` if nothing fits.
    """
    return find_plan(PlanRequest(step, machine, **options), progress)


def find_plan(request: PlanRequest, progress: TellProgress = silent) -> Plan:
    """Find the plan of a request. See `plan`."""
    if request.replicas:
        return plan_batch(request, Planners(search_plan, find_plan), progress)
    if request.resolved_objective == "pipeline":
        return plan_pipeline(request, progress)
    chosen = _searched_to_fit(request, progress)
    try:
        request, chosen = in_best_form(request, chosen, progress)
        if request.stages:
            chosen = _compare_with_all_cores(chosen, request, progress)
        compared = _with_fastest_way(chosen, request, progress)
        if compared.measured or request.stages:
            return compared
        return _compare_with_all_cores(compared, request, progress)
    except KeyboardInterrupt:
        return replace(chosen, interrupted=True)


def _searched_to_fit(request: PlanRequest, progress: TellProgress) -> Plan:
    """A plan of which GPUs hold what they must.

    On a GPU every tensor that arrives has its place for the whole step, and some others too
    (`most_bytes`), where the search counts what is alive. If that does not fit, the search is
    repeated with less memory there and a part of its budget. The bound is that of the first search,
    which has all memory.
    """
    first = chosen = search_plan(request, progress)
    caps = dict(request.caps)
    for _ in range(MOST_SEARCHES):
        lower = _lower_caps(chosen, request)
        if not lower or chosen.interrupted:
            break
        caps |= lower
        part = request.limits.divided(MOST_SEARCHES)
        fewer = replace(request, caps=tuple(caps.items()), budget=part)
        try:
            found = search_plan(fewer, _prefixed("with less memory on GPUs: ", progress))
        except InfeasibleError:
            break
        except KeyboardInterrupt:
            return replace(chosen, interrupted=True)
        chosen = replace(
            found,
            caps=first.caps,
            lower_bound=min(first.lower_bound, found.value),
            bound_proof=first.bound_proof,
        )
    notes: list[str] = []
    if chosen is not first:
        notes.append("searched with less memory on GPUs, as what arrives there stays all step long")
    if _lower_caps(chosen, request):
        notes.append("what a GPU holds does not fit, so that this plan does not run")
    return replace(chosen, notes=(*chosen.notes, *notes)) if notes else chosen


def _lower_caps(plan: Plan, request: PlanRequest) -> dict[str, int]:
    """The GPUs that would hold more than they have, and the bytes that the next search may plan
    with there."""
    from dovetail.executors.shares import most_bytes, share_out

    lower: dict[str, int] = {}
    if not isinstance(request.planned_step, Captured) or not _has_gpus(plan.machine):
        return lower
    if not plan.machine.local:
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
    given_places = _given_place(request)
    machine = machine_of(step, request.machine, progress, notes)
    kept = kept_modules(request, machine)
    costs = costs or costs_of(step, machine, progress, notes)
    progress("grouping ops", 0.0, None)
    groups = _groups_to_place(request, machine, kept, compiled)
    problem, simulator = problem_of(request, machine, costs, groups, kept)
    budget = _budget_of(request)
    chosen: Plan | None = None
    try:
        with keeping_interrupts(budget):
            bound = _proven_bound(request, problem, budget, progress)
            progress("preparing the search (compiled once a machine)", 0.0, None)
            method, gain = _method_of(request), request.resolved_gain
            outcome = run_placer(
                problem, request.placer, budget, _search_progress(progress), method, gain
            )
            chosen = to_plan(problem, outcome, simulator, _stronger_bound(bound, outcome, step))
            chosen = _fill_in_request(chosen, request, kept, notes, outcome, began)
        if request.format:
            EXPORTED[request.format](chosen, problem.graph)  # raises what the format cannot say
        bare, chosen = chosen, _with_copies(chosen, request, kept)
        if request.stages and not budget.interrupted:
            searched = _Searched(request, kept, groups, problem, simulator, budget)
            try:
                chosen = _with_stages(bare, chosen, searched, progress)
            except KeyboardInterrupt:
                budget.interrupted = True  # the plan without stages stays
            chosen = replace(chosen, planning_seconds=time.perf_counter() - began)
        chosen = _add_baselines(chosen, request, given_places, costs)
        chosen = replace(chosen, interrupted=budget.interrupted)
    # Ctrl-C outside the search: the plan is kept if there is one.
    except KeyboardInterrupt:
        if chosen is None:
            raise
        chosen = replace(chosen, interrupted=True)
    return chosen


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


CHUNKS = (1, 4, 8)
"""The numbers of chunks of time steps in which fused recurrent kernels are tried on several
devices. On one device a layer is one kernel."""


def in_best_form(
    request: PlanRequest, chosen: Plan, progress: TellProgress
) -> tuple[PlanRequest, Plan]:
    """(request, plan) of the step captured in another form, if a plan of that is predicted to be
    faster than `chosen`; else both as they are given.

    Recurrent layers have the form of their fused kernels, networks with convolutions that of
    channels last in memory. The searches have the budget of one search together. What a step costs
    in another form is known where it is measured. Plans with stages, for a format and of a given
    placement are of the step as it was captured.
    """
    step = request.planned_step
    if not isinstance(step, Captured) or step.plain is None or the(Form, step.transforms):
        return request, chosen
    given = request.stages or request.format or request.place is not None or request.per_op
    automatic = request.placer == "auto" and request.method is None and not request.contiguous
    if given or not automatic or not chosen.machine.local or chosen.interrupted:
        return request, chosen
    # The other forms are of kernels of CPUs.
    if _has_gpus(chosen.machine):
        return request, chosen
    several = len(chosen.machine.devices) > 1
    forms = _forms(step, several=several)
    best, told = (request, chosen), [f"as it is {format_seconds(chosen.value)}"]
    for name, form in forms.items():
        try:
            other = replace(
                request,
                step=form.apply(step),
                # On one device the number of threads is chosen for each form.
                machine=chosen.machine if several else request.machine,
                budget=request.limits.divided(len(forms)),
            )
            found = search_plan(other, _prefixed(f"with {name}: ", progress))
        except (CaptureError, ModelError):
            told.append(f"with {name} it cannot be captured")
            continue
        # What fails in this form only, such as a pin on an op that it does not have.
        except DovetailError as error:
            told.append(f"with {name}: {str(error).splitlines()[0]}")
            continue
        except KeyboardInterrupt:
            best = best[0], replace(best[1], interrupted=True)
            break
        told.append(f"with {name} {format_seconds(found.value)}")
        if found.value < best[1].value:
            best = replace(other, machine=request.machine), found
        if found.interrupted:
            best = best[0], replace(best[1], interrupted=True)
            break
    if forms:
        note = f"the step as predicted: {', '.join(told)}"
        best = best[0], replace(best[1], notes=(*best[1].notes, note))
    return best


def _forms(step: Captured, *, several: bool) -> dict[str, Form]:
    """The forms that the step may have beside its own, by name.

    several   there are several devices
    """
    forms: dict[str, Form] = {}
    most = step.fused_steps if several else min(1, step.fused_steps)
    for count in CHUNKS:
        if count <= most:
            of_each = "one fused kernel" if count == 1 else f"{count} fused kernels"
            forms[f"{of_each} a recurrent layer"] = Form(recurrent_chunks=count)
    if _has_images(step.graph):
        forms["channels last"] = Form(channels_last=True)
    return forms


def _has_images(graph: Graph) -> bool:
    """True if a convolution reads a tensor of four dimensions."""
    return any(
        kind == CONVOLUTION and any(len(graph.shapes[t]) == 4 for t in graph.inputs_of(op))
        for op, kind in enumerate(graph.kinds)
    )


def _prefixed(prefix: str, progress: TellProgress) -> TellProgress:
    """`progress`, told with a prefix before what is being done."""
    return lambda doing, done, value: progress(f"{prefix}{doing}", done, value)


# --- The steps of the flow, in its order ---


def _given_place(request: PlanRequest) -> dict[str, Plan | GivenMap]:
    """The placement that the user gives to be priced, under the name of its row; empty if none."""
    if request.place is None:
        return {}
    if isinstance(request.place, (str, Path)):
        return {Path(request.place).name: read_place(request.place)}
    return {"given map": request.place}


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


def _proven_bound(
    request: PlanRequest, problem: PlacementProblem, budget: Budget, progress: TellProgress
) -> LowerBound:
    """A lower bound of every plan that pins and caps permit. The budget learns it, too, so that the
    search can stop at a plan that reaches it."""
    progress("proving a bound", 0.0, None)
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    bound = bound_of(graph, machine, costs, problem.objective, request.pins, request.caps)
    budget.ledger.prove(bound.seconds, bound.proof)
    return bound


def _method_of(request: PlanRequest) -> Placer | None:
    """The method that runs in place of the placer's own function: the request's method, or the
    placer with a policy file or updates. None: the placer's own function runs."""
    if request.method is not None or (request.policy is None and not request.finetune):
        return request.method
    path = None if request.policy is None else Path(request.policy)
    make = imported(PLACERS[request.placer].with_policy)
    placer: Placer = make(path, request.finetune)
    return placer


def _search_progress(progress: TellProgress) -> Callable[[float, float], None]:
    """The callback by which the search tells how far it is and its best value so far."""
    return lambda done, best: progress("planning", done, best if best < np.inf else None)


def _stronger_bound(bound: LowerBound, outcome: PlacerOutcome, step: Step) -> LowerBound:
    """The larger of the two bounds for an instance, else `bound`.

    The search's bound holds for plans that keep groups whole. In an instance groups are all that
    must stay together, so there it holds for every plan. Elsewhere a plan may split groups.
    """
    if isinstance(step, Instance) and outcome.bound is not None:
        return max(bound, outcome.bound, key=lambda candidate: candidate.seconds)
    return bound


def _fill_in_request(
    chosen: Plan,
    request: PlanRequest,
    kept: Kept,
    notes: Notes,
    outcome: PlacerOutcome,
    began: float,
) -> Plan:
    """The plan with the fields that come from the request."""
    return replace(
        chosen,
        source=source_of(request.planned_step, request.model),
        transforms=transforms_of(request.planned_step),
        pins=tuple(request.pins),
        caps=tuple(request.caps),
        whole=kept.patterns,
        made_for=request.format,
        min_gain=request.resolved_gain,
        planning_seconds=time.perf_counter() - began,
        notes=notes.texts + kept.notes + outcome.notes,
    )


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
                outcome = run_placer(
                    staged, request.placer, budget, _search_progress(progress),
                    _method_of(request), request.resolved_gain,
                )  # fmt: skip
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


def _add_baselines(
    chosen: Plan, request: PlanRequest, given_places: Mapping[str, Plan | GivenMap], costs: Costs
) -> Plan:
    """The plan with other placements among its baselines: the one that the user gives, and
    accelerate's own. It is `chosen` itself if no placement is given and the format is no device
    map."""
    if not given_places and request.place is None and request.format != "device-map":
        return chosen
    step = request.planned_step
    pricing = Pricing(graph_of(step), chosen.machine, costs, chosen.objective, tuple(request.caps))
    rows, notes = _price_others(step, pricing, given_places)
    return replace(chosen, baselines={**chosen.baselines, **rows}, notes=(*chosen.notes, *notes))


def _compare_with_all_cores(chosen: Plan, request: PlanRequest, progress: TellProgress) -> Plan:
    """A plan on here/n after it was compared with `here`, all cores as one device.

    `here` becomes one of the baselines, with None as its value if it has no plan. If the placer
    is `auto` and `here` is faster, the plan for `here` is returned. With stages both are measured,
    because the seconds of stages are predicted less well than those of ops. `chosen` itself is
    returned if there is nothing to compare: it is not on a text here/n, it has one device or GPUs,
    pins or caps name its devices, or the search was interrupted.
    """
    named = request.pins or request.caps or chosen.interrupted
    is_here = isinstance(request.machine, str) and names_here(request.machine)
    if named or not is_here or len(chosen.machine.devices) == 1 or _has_gpus(chosen.machine):
        return chosen
    try:
        all_cores = _plan_of_all_cores(chosen, request, progress)
    except (InfeasibleError, CostError):  # it does not fit, or a saved graph was never measured so
        return replace(chosen, baselines={**chosen.baselines, HERE: None})
    compared = replace(
        chosen,
        baselines={**chosen.baselines, HERE: all_cores.value},
        interrupted=all_cores.interrupted,
    )
    if request.stages and request.placer == "auto":
        return _measured_against(compared, all_cores, request, progress)
    # A plan on several devices must win by the least gain that the user asks of such a plan.
    several = sum(map(bool, chosen.orders or ())) > 1
    worth = all_cores.value * (1 - chosen.min_gain) if several else all_cores.value
    if request.placer != "auto" or chosen.value <= worth:
        return compared
    # The weaker bound holds on both machines.
    weaker = min((chosen, all_cores), key=lambda candidate: candidate.lower_bound)
    return replace(
        all_cores,
        placer=HERE,
        baselines=compared.baselines,
        found_seconds=chosen.found_seconds,
        planning_seconds=chosen.planning_seconds,
        lower_bound=weaker.lower_bound,
        bound_proof=weaker.bound_proof,
    )


def _has_gpus(machine: Machine) -> bool:
    return any(device.kind == "gpu" for device in machine.devices)


def _first_gpu(machine: Machine) -> Machine:
    """The first GPU as a machine of its own, where users run a network without a plan."""
    gpu = next(device for device in machine.devices if device.kind == "gpu")
    return Machine(machine.name, (gpu,), gpu.name)


def _plan_of_all_cores(chosen: Plan, request: PlanRequest, progress: TellProgress) -> Plan:
    """The plan of the same step on `here`, all cores as one device."""
    return search_plan(
        PlanRequest(
            request.planned_step,
            HERE_CPU,
            placer="single",
            objective=chosen.objective,
            contiguous=chosen.contiguous,
            seed=chosen.seed,
            whole=request.whole,
            format=chosen.made_for,
            stages=request.stages,
            model=chosen.source.model,
        ),
        progress,
    )


def _with_fastest_way(chosen: Plan, request: PlanRequest, progress: TellProgress) -> Plan:
    """A plan on a text here or here/n, compared with the step as it runs without a plan.

    `chosen` itself is returned for other machines and objectives, for what does not run, and after
    a Ctrl-C. Only what `auto` finds without pins and caps gives way to the user's own.
    """
    step = request.planned_step
    is_here = isinstance(request.machine, str) and names_here(request.machine or HERE)
    if not is_here or chosen.objective != "step" or chosen.interrupted:
        return chosen
    if not isinstance(step, Captured) or request.format:
        return chosen
    from dovetail.pipeline.ways import fastest_way

    on_one, has_gpus = len(chosen.machine.devices) == 1, _has_gpus(chosen.machine)
    if has_gpus:
        machine = _first_gpu(chosen.machine)
    else:
        machine = chosen.machine if on_one else parse_machine(HERE_CPU)
    replaces = request.placer == "auto" and not (request.pins or request.caps)
    plans, rival, limit_seconds = (chosen, chosen), None, request.compile_seconds
    try:
        if limit_seconds:
            began, share = time.perf_counter(), SEGMENTS_SHARE * limit_seconds
            plans = with_compiled(chosen, request, share, progress)
            limit_seconds -= min(time.perf_counter() - began, share)
        if replaces and not on_one and not request.stages and not has_gpus:
            began, share = time.perf_counter(), SEGMENTS_SHARE * limit_seconds
            rival = _rival_on_all_cores(plans[1], request, share, progress)
            if rival is not None:
                limit_seconds -= min(time.perf_counter() - began, share)
    except KeyboardInterrupt:
        return replace(chosen, interrupted=True)
    return fastest_way(
        plans,
        step,
        machine,
        rival=rival,
        replaces=replaces,
        compile_seconds=limit_seconds,
        progress=progress,
    )


def _rival_on_all_cores(
    chosen: Plan, request: PlanRequest, compile_seconds: float, progress: TellProgress
) -> tuple[Plan, Plan] | None:
    """A plan of the same step for all cores as one device, op by op and with compiled segments;
    None if there is none, or if it is predicted to take `HOPELESS` times as long."""
    from dovetail.pipeline.segmenting import with_segments

    step = request.planned_step
    assert isinstance(step, Captured), "only such steps are measured"
    prefixed = _prefixed("all cores as one device: ", progress)
    try:
        found = _plan_of_all_cores(chosen, request, prefixed)
    except (InfeasibleError, CostError):
        return None
    if found.interrupted:
        raise KeyboardInterrupt
    if found.value > HOPELESS * chosen.value:
        return None
    found = replace(
        found,
        placer=HERE,
        min_gain=chosen.min_gain,
        baselines=chosen.baselines,
        found_seconds=chosen.found_seconds,
        planning_seconds=chosen.planning_seconds,
    )
    if not compile_seconds:
        return found, found
    return with_segments(found, step, compile_seconds=compile_seconds, progress=prefixed)


def with_compiled(
    chosen: Plan, request: PlanRequest, limit_seconds: float, progress: TellProgress
) -> tuple[Plan, Plan]:
    """(the plan op by op, the plan with compiled segments) of the better of two placements: that of
    `chosen`, and one that is searched for with the costs of compiled segments. Both are one object
    if no segment is faster compiled.

    request         its step was captured, and `chosen` is a plan of it
    limit_seconds   limit of compiling
    """
    from dovetail.pipeline.segmenting import with_segments

    began, step = time.perf_counter(), request.planned_step
    assert isinstance(step, Captured), "only such steps have segments"
    plans = with_segments(chosen, step, compile_seconds=limit_seconds, progress=progress)
    left_seconds = limit_seconds - (time.perf_counter() - began)
    if left_seconds <= 0:
        return plans
    return _placed_as_compiled(chosen, plans, request, left_seconds, progress)


def _placed_as_compiled(
    chosen: Plan,
    plans: tuple[Plan, Plan],
    request: PlanRequest,
    limit_seconds: float,
    progress: TellProgress,
) -> tuple[Plan, Plan]:
    """The plans op by op and with compiled segments, of another placement than that of `chosen` if
    it is predicted to be faster with segments; else those that are given.

    The placement is searched for with the costs that ops have in the compiled segments of the first
    plan, which differ from kind to kind: pointwise ops gain most.
    """
    from dovetail.pipeline.segmenting import compiled_seconds, with_segments

    plan, segmented = plans
    step = request.planned_step
    assert isinstance(step, Captured), "only such steps have segments"
    several = len(plan.machine.devices) > 1 and request.placer == "auto" and not request.method
    if segmented is plan or not several or request.contiguous or request.stages:
        return plans
    graph, with_its_copies = step.graph, planned(plan, step).graph
    seconds = plan.compute_seconds
    if plan.copies:
        seconds = seconds[duplicate(graph, plan.copies).copy_of < 0]
    compiled = compiled_seconds(segmented, with_its_copies, graph, seconds)
    try:
        found = search_plan(
            replace(request, machine=plan.machine),
            _prefixed("with the costs of compiled segments: ", progress),
            Costs(compiled, plan.costs_source, None),
            compiled=True,
        )
    except InfeasibleError:
        return plans
    if found.interrupted:
        raise KeyboardInterrupt
    other = _repriced(found, chosen, graph, seconds)
    capacities = capacities_of(other.machine, dict(other.caps))
    if (np.array(other.peak_memory_bytes) > capacities).any() or _lower_caps(other, request):
        return plans
    rivals = with_segments(other, step, compile_seconds=limit_seconds, progress=progress)
    told = (
        f"placed again with the costs of compiled segments: {format_seconds(rivals[1].value)} "
        f"predicted, {format_seconds(segmented.value)} before"
    )
    best = rivals if rivals[1].value < segmented.value else plans
    first, second = (replace(one, notes=(*one.notes, told)) for one in best)
    # Without segments that are faster both are one plan.
    return (first, first) if best[0] is best[1] else (first, second)


def _repriced(found: Plan, before: Plan, graph: Graph, seconds: NDArray[np.float64]) -> Plan:
    """A plan that was found by other costs, with its promises and notes by those of `before`.

    seconds   [ops, devices] these costs, of the graph without copies
    """
    if found.copies:
        seconds = seconds[duplicate(graph, found.copies).origins]
    plan = replace(found, compute_seconds=seconds)
    timeline = timeline_of(plan, graph)
    bound = bound_of(
        planned_graph(plan, graph), plan.machine, costs_in(plan), plan.objective, plan.pins,
        plan.caps,
    )  # fmt: skip
    return replace(
        plan,
        value=timeline.step_seconds,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        lower_bound=min(bound.seconds, timeline.step_seconds),
        bound_proof=bound.proof,
        baselines=before.baselines,
        found_seconds=before.found_seconds,
        planning_seconds=before.planning_seconds + found.planning_seconds,
        notes=before.notes,
    )


def _measured_against(
    compared: Plan, all_cores: Plan, request: PlanRequest, progress: TellProgress
) -> Plan:
    """`compared`, a plan on several devices, if it is measured to be faster than `all_cores` on all
    cores as one device; else the latter, with the former's table of methods."""
    from dovetail.pipeline.staging import quicker

    assert isinstance(request.planned_step, Captured), "the request has checked that"
    what = f"on {HERE}, all cores as one device"
    winner, told = quicker(all_cores, what, [compared], request.planned_step, progress)
    if winner is compared:
        return replace(compared, notes=(*compared.notes, told))
    return replace(
        all_cores,
        baselines={**all_cores.baselines, **compared.baselines},
        notes=(*all_cores.notes, told),
    )


# --- Prices of other placements ---
#
# A device map, or another plan, is priced as one of our own placements:
#
#     {"model.embed": 0, "model.layers.0": 0, "model.layers.1": "cpu", "lm_head": 1}
#
# If a map has a module on "cpu", accelerate copies its weights to an accelerator at every forward
# pass and computes there. So such a map has two prices: computed where the map says, and computed
# as accelerate runs it.

ACCELERATE = "accelerate auto"
"""The name of the baseline that is accelerate's own device map."""


@dataclass(frozen=True, eq=False)
class Pricing:
    """The graph, machine, costs and objective by which placements are priced; `caps` is as in
    `plan`."""

    graph: Graph
    machine: Machine
    costs: Costs
    objective: str
    caps: tuple[tuple[str, int], ...] = ()

    def price(self, placement: Placement) -> float | None:
        """The placement's value in seconds of the objective; None if it does not fit into
        memory."""
        capacities = capacities_of(self.machine, dict(self.caps))
        simulator = Simulator(
            self.graph,
            self.machine,
            self.costs,
            capacities=capacities,
            ranked=self.objective == "step",
        )
        evaluation = simulator.evaluate(placement[None], self.objective)
        over = (evaluation.peak_memory_bytes[0] > capacities).any()
        fits = bool(evaluation.feasible[0]) and not over
        return float(evaluation.values[0]) if fits else None


def read_place(path: str | Path) -> Plan | dict[str, int | str]:
    """The plan or device map that a file holds. A device map is {module or parameter path: device},
    with its main device if the file names one. Raises `FileFormatError`."""
    raw = read_json(path)
    if isinstance(raw, dict) and raw.get("format") == "dovetail.plan":
        return load_plan(path)
    main = None
    if isinstance(raw, dict) and isinstance(raw.get("device_map"), dict):
        main, raw = raw.get("main_device"), raw["device_map"]
    if not isinstance(raw, dict) or not all(
        isinstance(key, str) and isinstance(value, (int, str)) and not isinstance(value, bool)
        for key, value in raw.items()
    ):
        raise FileFormatError(str(path), "neither a plan nor a device map {module: device}")
    return raw if main is None else DeviceMap(raw, main)


def priced(
    name: str, place: Plan | GivenMap, step: Step, pricing: Pricing
) -> dict[str, float | None]:
    """The value of a given placement, under the name of its row. A map that accelerate would run
    otherwise has a second row. Raises `UsageError` for a device or module that does not exist, and
    what `check_placement` raises."""
    graph, machine = pricing.graph, pricing.machine
    if isinstance(place, Plan):
        placement = _placement_of_plan(place, graph, machine)
        check_placement(placement, graph, machine, pricing.costs.compute_seconds)
        return {name: pricing.price(placement)}
    placement = placement_of(place, step, machine)
    check_placement(placement, graph, machine, pricing.costs.compute_seconds)
    rows = {name: pricing.price(placement)}
    streamed = as_accelerate_runs(place, placement, pricing)
    if streamed is not None:
        moved, placement = streamed
        rows[f"{name} by accelerate"] = moved.price(placement)
    return rows


def placement_of(place: GivenMap, step: Step, machine: Machine) -> Placement:
    """[ops] the device of each op by a device map. Raises `UsageError` as `priced` does.

    The longest entry that is the op's module or is around it decides. A backward op runs where its
    forward op does. An op that no entry covers runs where the first of its inputs was computed, and
    on the main device if it reads sources alone.
    """
    graph = graph_of(step)
    devices = {path: _device_of(path, name, machine) for path, name in place.items()}
    _check_paths(place, step)
    placement = np.full(len(graph), -1, dtype=np.int32)
    around: dict[str, int] = {}
    for module in dict.fromkeys(graph.modules):
        around[module] = _longest(module, devices)
    for op in range(len(graph)):
        forward = int(graph.gradient_of[op])
        if forward >= 0:
            placement[op] = placement[forward]
            continue
        placement[op] = around[graph.modules[op]]
        if placement[op] < 0 and not graph.is_source[op]:
            makers = graph.producers[graph.inputs_of(op)]
            maker_devices = placement[makers][~graph.is_source[makers]]
            placement[op] = maker_devices[0] if len(maker_devices) else -1
    main = _main_device(place, devices, machine)
    placement[placement < 0] = main
    _with_their_colocated(graph, placement)
    return normalise(placement, graph, machine)


def _longest(module: str, devices: Mapping[str, int]) -> int:
    """The device of the map's entry for the module, or for the nearest module around it that has
    one; -1: there is none."""
    path = module
    while path:
        if path in devices:
            return devices[path]
        path = path.rpartition(".")[0]
    return devices.get("", -1)


def _with_their_colocated(graph: Graph, placement: Placement) -> None:
    """Move all ops of one colocation to the device of the first of them, in place."""
    first: dict[int, int] = {}
    for op in np.flatnonzero((graph.colocation >= 0) & ~graph.is_source).tolist():
        placement[op] = first.setdefault(int(graph.colocation[op]), int(placement[op]))


def _device_of(path: str, name: int | str, machine: Machine) -> int:
    """The device that an entry names: an accelerator's number, "cuda:1", "cpu", or our own name."""
    kinds = [device.kind for device in machine.devices]
    text = str(name)
    if text == "disk":
        raise UsageError("place", f"{path!r} is on disk, where nothing runs; give it a device")
    if text in machine.device_names:
        return machine.device_index(text)
    if text == "cpu":
        if "cpu" not in kinds:
            raise UsageError("place", f"{path!r} is on cpu, but {machine.name} has none that runs")
        return kinds.index("cpu")
    number = text.removeprefix("cuda:") if text != "cuda" else "0"
    gpus = [d for d, kind in enumerate(kinds) if kind == "gpu"]
    # Python makes no number of more than 4,300 digits.
    if not number.isdecimal() or len(number) > 9 or int(number) >= len(gpus):
        numbers = f", and accelerators 0 to {len(gpus) - 1}" if gpus else ""
        names = ", ".join(machine.device_names)
        raise UsageError(
            "place", f"{path!r} is on {name!r:.40}; {machine.name} has {names}{numbers}"
        )
    return gpus[int(number)]


def _check_paths(place: GivenMap, step: Step) -> None:
    """Raise `UsageError` if an entry names no module, parameter or buffer of the network."""
    graph = graph_of(step)
    known_paths = {"", *graph.names}
    for module in dict.fromkeys(graph.modules):
        parts = module.split(".")
        known_paths.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    if isinstance(step, Captured):
        known_paths.update(name for name, _ in step.module.named_modules(remove_duplicate=False))
        known_paths.update(step.module.state_dict(keep_vars=True))
    for path in place:
        if path not in known_paths:
            raise UsageError("place", f"{path!r} is no module or parameter of this network")


def _main_device(place: GivenMap, devices: Mapping[str, int], machine: Machine) -> int:
    """The device on which accelerate runs modules that the map has on "cpu": the map's main device
    if it names one, else the first device in the map that is not "cpu"."""
    if isinstance(place, DeviceMap):
        return _device_of("main_device", place.main_device, machine)
    off_cpu = [devices[path] for path, name in place.items() if str(name) != "cpu"]
    return off_cpu[0] if off_cpu else next(iter(devices.values()), 0)


def as_accelerate_runs(
    place: GivenMap, placement: Placement, pricing: Pricing
) -> tuple[Pricing, Placement] | None:
    """(pricing, placement [ops]) of the map as accelerate runs a forward pass.

    An op on "cpu" runs on the main device, and the first op that reads a weight waits until it is
    copied there. Each weight is copied once a step. None is returned if nothing is on "cpu", if the
    main device is the CPU, which then computes, or for a training step, which accelerate does not
    run in this way.

    The copied weights take no memory on the main device here. accelerate holds those of one module
    at a time.
    """
    graph, machine = pricing.graph, pricing.machine
    devices = {path: _device_of(path, name, machine) for path, name in place.items()}
    main = _main_device(place, devices, machine)
    kinds = [device.kind for device in machine.devices]
    on_cpu = np.array([kinds[d] == "cpu" for d in placement.tolist()]) & ~graph.is_source
    if graph.training or kinds[main] != "gpu" or not on_cpu.any():
        return None
    host = kinds.index("cpu")
    link = machine.links[int(machine.link_index[host, main])]
    seconds = np.array(pricing.costs.compute_seconds)
    sizes = np.array(graph.tensor_bytes)
    sent = pricing.costs.sends_of(graph).copy()
    for op in np.flatnonzero(graph.is_source & (graph.residences == EVERYWHERE)).tolist():
        for tensor in graph.outputs_of(op):
            readers = [r for r in graph.consumers_of(tensor).tolist() if on_cpu[r]]
            if readers:
                seconds[readers[0], main] += (
                    link.latency_seconds + sizes[tensor] / link.bandwidth_bytes_per_second
                )
    # These weights now cost seconds of their first reader. Without bytes they occupy nothing on the
    # main device, and the simulator does not send them a second time.
    moved = np.where(on_cpu, main, placement).astype(np.int32)
    weights = _read_only_by(graph, on_cpu)
    sizes[weights] = 0
    sent[weights] = 0
    costs = Costs(seconds, pricing.costs.source, sent)
    lighter = replace(graph, tensor_bytes=sizes)
    return replace(pricing, graph=lighter, costs=costs), normalise(moved, lighter, machine)


def _read_only_by(graph: Graph, ops: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The tensors of parameters, buffers and constants that only these ops read."""
    resident = (graph.is_source & (graph.residences == EVERYWHERE))[graph.producers]
    read_by_others = np.zeros(graph.tensors, dtype=bool)
    read_by_others[graph.input_tensors[~ops[graph.readers]]] = True
    return np.flatnonzero(resident & ~read_by_others)


def _placement_of_plan(plan: Plan, graph: Graph, machine: Machine) -> Placement:
    """[ops] the placement of another plan for this graph, without the plan's copies, on the devices
    of the same names. Raises `GraphMismatchError`."""
    placement = plan.placement
    if plan.copies:
        placement = placement[duplicate(graph, plan.copies).copy_of < 0]
    if len(placement) != len(graph):
        raise GraphMismatchError(plan.graph_fingerprint, graph.fingerprint)
    index = np.array([machine.device_index(name) for name in plan.machine.device_names])
    return normalise(index[placement].astype(np.int32), graph, machine)


def accelerates_own(
    step: Step, machine: Machine, caps: Mapping[str, int], unsplit: Sequence[str]
) -> dict[str, Any] | None:
    """The device map that accelerate makes of this network for this machine, balanced as
    `from_pretrained(device_map="auto")` does. None if accelerate is not installed, if the step was
    not captured from a module, or if the machine has no accelerator.

    unsplit   classes of modules that accelerate must not split
    """
    gpus = [device for device in machine.devices if device.kind == "gpu"]
    if not gpus or not isinstance(step, Captured):
        return None
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils.modeling import get_balanced_memory
    except ImportError:
        return None
    memory: dict[int | str, int] = {
        i: int(min(device.memory_bytes, caps.get(device.name, device.memory_bytes)))
        for i, device in enumerate(gpus)
    }
    memory["cpu"] = int(
        next((d.memory_bytes for d in machine.devices if d.kind in ("cpu", "host")), 0)
    )
    classes = list(unsplit)
    log = logging.getLogger("accelerate.utils.modeling")
    level = log.level
    # accelerate would warn that the machine's accelerators are not here.
    log.setLevel(logging.ERROR)
    try:
        balanced = get_balanced_memory(
            step.module, max_memory=dict(memory), no_split_module_classes=classes
        )
        device_map: dict[str, Any] = infer_auto_device_map(
            step.module, max_memory=balanced, no_split_module_classes=classes
        )
    finally:
        log.setLevel(level)
    return device_map


def _price_others(
    step: Step, pricing: Pricing, places: Mapping[str, Plan | Mapping[str, int | str]]
) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """(the values of these placements and of accelerate's own, each under the name of its row,
    notes). Whatever fails in accelerate's map is a note: it must not cost the plan."""
    rows: dict[str, float | None] = {}
    for name, place in places.items():
        rows |= priced(name, place, step, pricing)
    classes = sorted(set(unsplit_modules(step).values()))
    try:
        device_map = accelerates_own(step, pricing.machine, dict(pricing.caps), classes)
    except Exception as error:
        return rows, (f"accelerate's map could not be priced: {said(error)}",)
    if device_map is None:
        return rows, ()
    # Modules that accelerate leaves on the CPU can be priced only if a CPU is among the devices.
    # Nothing runs on disk, so a map with weights there has no price.
    has_cpu = any(d.kind == "cpu" for d in pricing.machine.devices)
    streamed = "cpu" in device_map.values() and not has_cpu
    if streamed or "disk" in device_map.values():
        return rows | {ACCELERATE: None}, ()
    try:
        return rows | priced(ACCELERATE, device_map, step, pricing), ()
    except DovetailError as error:
        return rows, (f"accelerate's map could not be priced: {said(error)}",)
