"""Plans a training step over micro-batches: stages on devices, in the order of a schedule.

step of one micro-batch ──► stages, schedule (placers.pipelines) ──► step of all micro-batches
                                  ▲                                          │
                                  └──────────── simulated op by op ◄─────────┘

With several towers, the devices are split into as many like sets. Tower 0's stages are found for
the first set. Every other tower has the same stages on its own devices, and what all share, the
means of gradients and the updates, is where tower 0's stages are.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs, analytic_costs
from dovetail.errors import InfeasibleError, OrderError, UsageError
from dovetail.exports.pipelines import torch_refuses
from dovetail.exports.rules import rules_for
from dovetail.frontends import Captured
from dovetail.graph import Graph, Phase
from dovetail.graph.units import Units, matched_modules, units_of
from dovetail.machine import Machine
from dovetail.methods import PIPELINE_SCHEDULES
from dovetail.pipeline.opening import EXPORTED
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.sources import (
    Notes,
    Step,
    TellProgress,
    costs_of,
    graph_of,
    groups_of,
    machine_of,
    replicated,
    silent,
    source_of,
    transforms_of,
    unsplit_modules,
)
from dovetail.placers import (
    Budget,
    Limits,
    keeping_interrupts,
    make_problem,
    permitted,
)
from dovetail.placers.pipeline_bounds import pipeline_bound
from dovetail.placers.pipeline_schedules import B, F, I, W
from dovetail.placers.pipelines import (
    PipelineCut,
    PipelineOutcome,
    PipelineProblem,
    SimulatedCut,
    search,
    tasks_of,
    times_of,
    weight_ops,
)
from dovetail.plans import Placement, Plan, normalise
from dovetail.simulator import LowerBound, Simulator
from dovetail.timeline import Timeline
from dovetail.transforms import MicroBatches, Towers, micro_batched, replicate
from dovetail.transforms.copying import AGAIN, COPY, MEAN, SHARED, SUM, Rows
from dovetail.transforms.micro_batches import changes_of
from dovetail.units import format_seconds

if TYPE_CHECKING:
    from dovetail.simulator import BatchEvaluation


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


def plan_pipeline(
    request: PlanRequest, progress: TellProgress = silent, *, replicas: int = 1
) -> Plan:
    """Find stages, their devices and a schedule for the request's micro-batches.

    The request's step is one micro-batch. With `replicas`, each of so many towers has its own
    micro-batches, and `towers_devices` finds devices for them.

    Raises `InfeasibleError` if nothing fits, what `micro_batched` raises, and `UsageError` for
    devices that cannot be split among the towers.
    """
    began, step, notes = time.perf_counter(), request.planned_step, Notes()
    graph = graph_of(step)
    machine = machine_of(step, request.machine, progress, notes)
    mirror = towers_devices(machine, replicas)
    kept = kept_modules(request, machine)
    costs, sums = _costs(step, machine, (request.micro_batches, replicas), progress, notes)
    progress("grouping ops", 0.0, None)
    placing = make_problem(
        graph, machine, costs, _never, groups=groups_of(step, kept.units, grouping="ops"),
        objective="pipeline", pins=request.pins, caps=request.caps, seed=request.seed,
        may_run=kept.may_run,
    )  # fmt: skip
    schedules = PIPELINE_SCHEDULES if request.schedule == "auto" else (request.schedule,)
    allowed, capacities = placing.allowed, placing.capacities
    if replicas > 1:
        firsts = list(mirror.firsts)
        others = np.setdiff1d(np.arange(len(machine.devices)), firsts)
        allowed, capacities = allowed.copy(), capacities.copy()
        allowed[:, others] = False
        # A stage must fit on each tower's device.
        capacities[firsts] = capacities[mirror.of[:, firsts]].min(axis=0)
    problem = PipelineProblem(
        graph, machine, costs, placing.groups, allowed, capacities,
        request.micro_batches, schedules, request.recompute == "auto", kept.chain,
        torch_refuses if request.format else None,
    )  # fmt: skip
    found = _searched(problem, request.limits, (costs, sums, mirror), progress)
    problem, steps, outcome = found.problem, found.steps, found.outcome
    cut, value = outcome.cut, outcome.simulated.value
    bound = LowerBound(value, "every cut simulated")
    # Devices of tower 0 that are alike may stand for devices that are not.
    if not found.is_exact or replicas > 1:
        progress("proving a bound", 0.0, None)
        with keeping_interrupts(found.budget):
            quick = found.budget.interrupted
            bounds = [pipeline_bound(other, value, quick=quick) for other in problem.variants]
            bound = min(bounds, key=lambda other: other.seconds)
    whole, timeline = steps.timeline(cut)
    plan = Plan(
        source=source_of(step, request.model),
        transforms=(
            *transforms_of(step),
            micro_batches_of(problem, cut),
            *([Towers(replicas)] if replicas > 1 else []),
        ),
        graph_fingerprint=whole.graph.fingerprint,
        machine=machine,
        placement=placement_of(problem, cut, whole),
        orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
        compute_seconds=whole.costs.compute_seconds,
        costs_source=whole.costs.source,
        placer=cut.name or "pipeline",
        seed=request.seed,
        objective="pipeline",
        value=timeline.step_seconds,
        lower_bound=min(bound.seconds, timeline.step_seconds),
        bound_proof=bound.proof,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        groups=placing.groups.count,
        planning_seconds=time.perf_counter() - began,
        interrupted=found.budget.interrupted,
        pins=tuple(request.pins),
        caps=tuple(request.caps),
        baselines={**outcome.baselines, "pipeline": timeline.step_seconds},
        whole=kept.patterns,
        made_for=request.format,
        notes=(*notes.texts, *kept.notes, _describe(problem, cut, replicas)),
        graph=whole.graph,
    )
    if request.format:
        EXPORTED[request.format](plan, whole.graph)  # raises what the format cannot say
    return plan


@dataclass(frozen=True, eq=False)
class _SearchedStages:
    """What a search over all variants of a problem found.

    problem    the variant of the best cut
    budget     that of the last variant
    is_exact   True: every cut of every variant was simulated
    """

    problem: PipelineProblem
    steps: "_Steps"
    outcome: PipelineOutcome
    budget: Budget
    is_exact: bool


def _searched(
    problem: PipelineProblem,
    limits: Limits,
    simulated: "tuple[Costs, dict[str, NDArray[np.float64]], TowersDevices]",
    progress: TellProgress,
) -> _SearchedStages:
    """Search each variant of the problem with a part of the budget. Raises `InfeasibleError` if
    nothing fits in any.

    simulated   what `_Steps` takes
    """
    progress("planning stages", 0.0, None)
    best: _SearchedStages | None = None
    first: InfeasibleError | None = None
    rows: dict[str, float | None] = {}
    is_exact = True
    variants = problem.variants
    for variant in variants:
        budget = Budget(*limits.divided(len(variants)))
        steps = _Steps(variant, *simulated)
        try:
            with keeping_interrupts(budget):
                outcome = search(variant, budget, steps.simulate)
        except InfeasibleError as error:
            first, is_exact = first or error, False
            if not error.interrupted:
                continue
            if best is None:
                raise
            best = replace(best, budget=budget)
            break
        for name, seconds in outcome.baselines.items():
            known = [s for s in (rows.get(name), seconds) if s is not None]
            rows[name] = min(known, default=None)
        is_exact &= outcome.is_exact
        if best is None or outcome.simulated.value < best.outcome.simulated.value:
            best = _SearchedStages(variant, steps, outcome, budget, False)
        best = replace(best, budget=budget)
        if budget.interrupted:
            is_exact = len(variants) == 1 and is_exact
            break
    if best is None:
        assert first is not None, "every variant was searched"
        raise first
    return replace(best, outcome=replace(best.outcome, baselines=rows), is_exact=is_exact)


@dataclass(frozen=True, eq=False)
class TowersDevices:
    """The devices of each tower.

    of   [towers, machine's devices] the device that stands in each tower for a device of tower 0's
    firsts   tower 0's devices
    """

    of: NDArray[np.int32]
    firsts: tuple[int, ...]


def towers_devices(machine: Machine, replicas: int) -> TowersDevices:
    """Split the machine's GPUs, or without GPUs its CPUs, into like sets, one for each tower: of
    every kind of device each tower gets the same number, in the machine's order.

    Raises `UsageError` if that cannot be.
    """
    everything = np.arange(len(machine.devices), dtype=np.int32)
    if replicas == 1:
        return TowersDevices(everything[None], tuple(everything.tolist()))
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index in computing_devices(machine):
        device = machine.devices[index]
        like = (device.model, device.memory_bytes, device.threads, len(device.cores))
        kinds.setdefault(like, []).append(index)
    of = np.repeat(everything[None], replicas, axis=0)
    firsts: list[int] = []
    for members in kinds.values():
        if len(members) % replicas:
            raise UsageError(
                "replicas",
                f"are {replicas}, and {machine.name} cannot be split into as many like sets of "
                f"devices: it has {len(members)} like {machine.devices[members[0]].name}",
            )
        sets = np.array(members, dtype=np.int32).reshape(replicas, -1)
        of[:, sets[0]] = sets
        firsts += sets[0].tolist()
    return TowersDevices(of, tuple(sorted(firsts)))


def computing_devices(machine: Machine) -> list[int]:
    """The machine's GPUs, or without GPUs its CPUs."""
    kinds = [device.kind for device in machine.devices]
    wanted = "gpu" if "gpu" in kinds else "cpu"
    return [index for index, kind in enumerate(kinds) if kind == wanted]


def micro_batches_of(problem: PipelineProblem, cut: PipelineCut) -> MicroBatches:
    """The transform of a cut, which a plan keeps."""
    return MicroBatches(
        problem.micro_batches,
        cut.schedule,
        tuple(cut.stages.tolist()),
        cut.devices,
        cut.recompute,
        tuple(tuple(map(str, tasks)) for tasks in tasks_of(problem, cut)),
    )


def _never(_placements: NDArray[np.int32]) -> "BatchEvaluation":
    raise AssertionError("a pipeline's stages are simulated as cuts, not as placements")


def _costs(
    step: Step,
    machine: Machine,
    counts: tuple[int, int],
    progress: TellProgress,
    notes: Notes,
) -> tuple[Costs, dict[str, NDArray[np.float64]]]:
    """(costs of one micro-batch's ops, signature -> seconds [devices] of what adds up gradients).

    counts   (micro-batches, towers)

    On this machine both are measured within a step of all micro-batches. Elsewhere the second is
    empty.
    """
    graph = graph_of(step)
    if not machine.local or not isinstance(step, Captured):
        return costs_of(step, machine, progress, notes), {}
    count, replicas = counts
    whole_step = replicated(MicroBatches(count).apply(step), replicas)
    costs = costs_of(whole_step, machine, progress, notes)
    whole = _unrolled(graph, count, None, None, replicas)
    seconds = np.zeros((len(graph), len(machine.devices)))
    kinds, micro = whole.rows.kinds, whole.rows.copies
    first = ((kinds == SHARED) | ((kinds == COPY) & (micro == 0))) & (whole.towers <= 0)
    rows = np.flatnonzero(first)
    seconds[whole.rows.origins[rows]] = costs.compute_seconds[rows]
    added = np.flatnonzero(whole.rows.origins < 0).tolist()
    sums = {whole.graph.signatures[op]: costs.compute_seconds[op] for op in added}
    return Costs(seconds, costs.source, None), sums


@dataclass(frozen=True, eq=False)
class _Unrolled:
    """The graph of all micro-batches of all towers.

    rows     what each op stands for; the mean of a gradient of all towers counts as a MEAN
    ops      [ops] the op of one micro-batch with which each op goes
    towers   [ops] the tower that has it for itself; -1: all share it
    """

    graph: Graph
    rows: Rows
    ops: NDArray[np.int64]
    towers: NDArray[np.int64]


def _unrolled(
    graph: Graph,
    count: int,
    stages: NDArray[np.integer] | None,
    recompute: NDArray[np.bool_] | None,
    replicas: int,
) -> _Unrolled:
    made = micro_batched(graph, count, stages, recompute)
    rows = made.rows
    ops = rows.origins.copy()
    added = ops < 0
    ops[added] = graph.producers[rows.reduced[added]]
    if replicas == 1:
        return _Unrolled(made.graph, rows, ops, np.full(len(ops), -1, dtype=np.int64))
    towers = replicate(made.graph, replicas)
    of_towers = towers.rows
    averages = of_towers.origins < 0
    kinds, origins, micro, summed = (
        np.where(averages, of_average, column[of_towers.origins])
        for column, of_average in zip(rows, (MEAN, -1, -1, -1), strict=True)
    )
    averaged = made.graph.producers[np.maximum(of_towers.reduced, 0)]
    return _Unrolled(
        towers.graph,
        Rows(kinds, origins, micro, summed),
        np.where(averages, ops[averaged], ops[of_towers.origins]),
        of_towers.copies,
    )


class _WholeStep:
    """A graph of all micro-batches with its costs and simulator."""

    def __init__(
        self,
        unrolled: _Unrolled,
        problem: PipelineProblem,
        costs: Costs,
        sums: dict[str, NDArray[np.float64]],
        mirror: TowersDevices,
    ) -> None:
        self.unrolled, self.mirror = unrolled, mirror
        self.graph: Graph = unrolled.graph
        origins = unrolled.rows.origins
        seconds = costs.compute_seconds[np.maximum(origins, 0)]
        added = np.flatnonzero(origins < 0)
        seconds[added] = _added_seconds(self.graph, added, problem.machine, sums)
        self.costs = Costs(seconds, costs.source, None)
        self.simulator = Simulator(
            self.graph, problem.machine, self.costs, capacities=problem.capacities
        )


def _added_seconds(
    graph: Graph, ops: NDArray[np.integer], machine: Machine, sums: dict[str, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """[ops, devices] seconds of adding up gradients and losses: as measured, else by data sheet."""
    by_signature = dict(sums)
    analytic: NDArray[np.float64] | None = None
    seconds = np.zeros((len(ops), len(machine.devices)))
    for index, op in enumerate(ops.tolist()):
        row = by_signature.get(graph.signatures[op])
        if row is None:
            if analytic is None:
                analytic = analytic_costs(graph, machine).compute_seconds
            row = by_signature[graph.signatures[op]] = analytic[op]
        seconds[index] = row
    return seconds


class _Steps:
    """Simulates cuts op by op. Graphs of cuts that change the same are made once. The timeline of
    the best cut is kept, as the plan needs it."""

    def __init__(
        self,
        problem: PipelineProblem,
        costs: Costs,
        sums: dict[str, NDArray[np.float64]],
        mirror: TowersDevices,
    ) -> None:
        self.problem, self.costs, self.sums, self.mirror = problem, costs, sums, mirror
        self._made: dict[bytes, _WholeStep] = {}
        self._known: dict[tuple[object, ...], SimulatedCut] = {}
        self._best: tuple[tuple[object, ...], float, _WholeStep, Timeline] | None = None

    def simulate(self, cut: PipelineCut) -> SimulatedCut:
        """What the cut's step takes; infeasible if its orders cannot complete."""
        if cut.key not in self._known:
            devices = len(self.problem.machine.devices)
            try:
                whole, timeline = self.timeline(cut)
            except OrderError:
                self._known[cut.key] = SimulatedCut(np.inf, np.zeros(devices, np.int64), False)
                return self._known[cut.key]
            peaks = timeline.peak_memory_bytes
            fits = bool((peaks <= self.problem.capacities).all())
            feasible = fits and bool(np.isfinite(timeline.step_seconds))
            self._known[cut.key] = SimulatedCut(timeline.step_seconds, peaks, feasible)
            if feasible and (self._best is None or timeline.step_seconds < self._best[1]):
                self._best = cut.key, timeline.step_seconds, whole, timeline
        return self._known[cut.key]

    def timeline(self, cut: PipelineCut) -> tuple[_WholeStep, Timeline]:
        """(the step of all micro-batches, its timeline)."""
        if self._best is not None and self._best[0] == cut.key:
            return self._best[2], self._best[3]
        whole = self._graph(cut)
        placement = placement_of(self.problem, cut, whole)
        orders = op_orders(self.problem, cut, whole)
        return whole, whole.simulator.timeline(placement, orders=orders)

    def _graph(self, cut: PipelineCut) -> _WholeStep:
        recompute = np.array(cut.recompute, dtype=bool)
        graph, count = self.problem.graph, self.problem.micro_batches
        key = changes_of(graph, count, cut.stages, recompute)
        if key not in self._made:
            # Each graph has all micro-batches' ops, so few are kept.
            if len(self._made) > 3:
                self._made.pop(next(iter(self._made)))
            unrolled = _unrolled(graph, count, cut.stages, recompute, len(self.mirror.of))
            self._made[key] = _WholeStep(unrolled, self.problem, self.costs, self.sums, self.mirror)
        return self._made[key]


def placement_of(problem: PipelineProblem, cut: PipelineCut, whole: _WholeStep) -> Placement:
    """[ops of all micro-batches] the device of each."""
    unrolled = whole.unrolled
    devices = np.array(cut.devices, dtype=np.int32)[np.maximum(cut.stages[unrolled.ops], 0)]
    placement = whole.mirror.of[np.maximum(unrolled.towers, 0), devices]
    return normalise(placement, whole.graph, problem.machine)


def op_orders(
    problem: PipelineProblem, cut: PipelineCut, whole: _WholeStep
) -> list[tuple[int, ...]]:
    """[devices] the ops of each device: those of its tasks in order, each task's ops in the graph's
    order, and then what runs once a step."""
    graph, count, unrolled = problem.graph, problem.micro_batches, whole.unrolled
    kinds, _, micro, _ = unrolled.rows
    op, tower = unrolled.ops, np.maximum(unrolled.towers, 0)
    stage = cut.stages[op].astype(np.int64)
    split = cut.schedule == "zero-bubble"
    phases = graph.phases[op]
    late = np.where(weight_ops(graph, cut.stages)[op], W, I) if split else np.full(len(op), B)
    kind = np.where(phases == Phase.FORWARD, F, late)
    # Buffers are updated with the forward ops that they wait for.
    kind[(kinds == COPY) & (phases == Phase.UPDATE)] = F
    kind[kinds == AGAIN] = I if split else B
    kind[kinds == SUM] = W if split else B
    runs = ~whole.graph.is_source
    in_task = runs & ((kinds == COPY) | (kinds == AGAIN) | (kinds == SUM))
    stages, towers = len(cut.devices), len(whole.mirror.of)
    key = ((tower * stages + stage) * count + np.maximum(micro, 0)) * 4 + kind
    members = np.flatnonzero(in_task)
    members = members[np.argsort(key[members], kind="stable")]
    begins = np.searchsorted(key[members], np.arange(4 * count * stages * towers + 1))
    once = np.flatnonzero(runs & ~in_task)
    device = whole.mirror.of[tower, np.array(cut.devices)[np.maximum(stage, 0)]]
    parts: list[list[NDArray[np.int64]]] = [[] for _ in problem.machine.devices]
    for first, tasks in enumerate(tasks_of(problem, cut)):
        for turn in range(towers if tasks else 0):
            parts[whole.mirror.of[turn, first]] += [
                members[begins[k] : begins[k + 1]]
                for k in (
                    ((turn * stages + task.stage) * count + task.micro) * 4 + task.kind
                    for task in tasks
                )
            ]
    for index, of_device in enumerate(parts):
        of_device.append(once[device[once] == index])
    return [tuple(np.concatenate(of_device).tolist()) for of_device in parts]


def _describe(problem: PipelineProblem, cut: PipelineCut, replicas: int) -> str:
    """A sentence for the user: schedule, stages, and what recomputes."""
    times = times_of(problem, cut)
    names = problem.machine.device_names
    each = times.forward + times.inputs + times.weights
    parts = [
        f"{names[device]} {format_seconds(seconds)}{' recomputing' if again else ''}"
        for device, seconds, again in zip(cut.devices, each.tolist(), cut.recompute, strict=True)
    ]
    towers = f"{replicas} towers, each of " if replicas > 1 else ""
    most = [cut.held[0]] if len(set(cut.held)) == 1 else cut.held
    held = f" with {', '.join(map(str, most))} micro-batches in a stage at most" if most else ""
    return (
        f"{towers}{problem.micro_batches} micro-batches, schedule {cut.schedule}{held}, stages for "
        f"each micro-batch: {', '.join(parts)}"
    )
