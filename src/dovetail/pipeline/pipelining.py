"""Plans a training step over micro-batches: stages on devices, in the order of a schedule.

step of one micro-batch ──► stages, schedule (placers.pipelines) ──► step of all micro-batches
                                  ▲                                          │
                                  └──────────── simulated op by op ◄─────────┘

With several towers, the devices are split into as many like sets. Tower 0's stages are found for
the first set. Every other tower has the same stages on its own devices, and what all share, the
means of gradients and the updates, is where tower 0's stages are.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs, analytic_costs
from dovetail.errors import InfeasibleError, OrderError, UsageError
from dovetail.exports.pipelines import torch_refuses
from dovetail.exports.rules import FORMATS
from dovetail.frontends import Captured
from dovetail.graph import Graph, Phase
from dovetail.machine import Machine
from dovetail.methods import PIPELINE_SCHEDULES
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import kept_modules, to_plan
from dovetail.pipeline.sources import (
    Notes,
    TellProgress,
    costs_of,
    graph_of,
    groups_of,
    machine_of,
    replicated,
    silent,
)
from dovetail.placers import Budget, keeping_interrupts, make_problem
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
from dovetail.runtime.timers import Deadline
from dovetail.simulator import LowerBound, Simulator
from dovetail.timeline import Timeline
from dovetail.transforms import MicroBatches, Towers, micro_batched, replicate
from dovetail.transforms.copying import AGAIN, COPY, MEAN, SHARED, SUM, Rows
from dovetail.transforms.micro_batches import changes_of
from dovetail.units import format_seconds

if TYPE_CHECKING:
    from dovetail.simulator import BatchEvaluation


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
    graph, count = graph_of(step), request.micro_batches
    deadline = request.deadline or Deadline()
    with deadline.phase("measuring") as part:
        machine = machine_of(step, request.machine, progress, notes, part)
    mirror = towers_devices(machine, replicas)
    kept = kept_modules(request, machine)
    # The costs of one micro-batch's ops, and signature -> seconds [devices] of what adds up
    # gradients. On this machine both are measured within a step of all micro-batches.
    sums: dict[str, NDArray[np.float64]] = {}
    if machine.local and isinstance(step, Captured):
        whole_step = replicated(MicroBatches(count).apply(step), replicas)
        with deadline.phase("measuring") as part:
            measured = costs_of(whole_step, machine, progress, notes, part)
        every = _unrolled(graph, count, None, None, replicas)
        seconds = np.zeros((len(graph), len(machine.devices)))
        kinds, micro = every.rows.kinds, every.rows.copies
        first = ((kinds == SHARED) | ((kinds == COPY) & (micro == 0))) & (every.towers <= 0)
        rows = np.flatnonzero(first)
        seconds[every.rows.origins[rows]] = measured.compute_seconds[rows]
        for op in np.flatnonzero(every.rows.origins < 0).tolist():
            sums[every.graph.signatures[op]] = measured.compute_seconds[op]
        costs = Costs(seconds, measured.source, None)
    else:
        costs = costs_of(step, machine, progress, notes)
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
        count, schedules, request.recompute == "auto", kept.chain,
        torch_refuses if request.format else None,
    )  # fmt: skip

    # Each variant of the problem is searched with an equal part of the budget.
    progress("planning stages", 0.0, None)
    best: tuple[PipelineProblem, _Steps, PipelineOutcome] | None = None
    failure: InfeasibleError | None = None
    baselines: dict[str, float | None] = {}
    is_exact, variants = True, problem.variants
    for variant in variants:
        budget = Budget(*request.limits.divided(len(variants)))
        of_variant = _Steps(variant, costs, sums, mirror)
        try:
            with deadline.phase("searching"), keeping_interrupts(budget):
                outcome = search(variant, budget, of_variant.simulate)
        except InfeasibleError as error:
            failure, is_exact = failure or error, False
            if not error.interrupted:
                continue
            if best is None:
                raise
            break
        for name, row in outcome.baselines.items():
            known = [s for s in (baselines.get(name), row) if s is not None]
            baselines[name] = min(known, default=None)
        is_exact &= outcome.is_exact
        if best is None or outcome.simulated.value < best[2].simulated.value:
            best = variant, of_variant, outcome
        if budget.interrupted:
            is_exact = len(variants) == 1 and is_exact
            break
    if best is None:
        assert failure is not None, "every variant was searched"
        raise failure
    problem, steps, outcome = best
    cut, value = outcome.cut, outcome.simulated.value
    bound = LowerBound(value, "every cut simulated")
    # Devices of tower 0 that are alike may stand for devices that are not.
    if not is_exact or replicas > 1:
        progress("proving a bound", 0.0, None)
        with keeping_interrupts(budget):
            quick = budget.interrupted
            bounds = [pipeline_bound(other, value, quick=quick) for other in problem.variants]
            bound = min(bounds, key=lambda other: other.seconds)

    whole, timeline = steps.timeline(cut)
    names, times = machine.device_names, times_of(problem, cut)
    each = (times.forward + times.inputs + times.weights).tolist()
    parts = [
        f"{names[device]} {format_seconds(seconds)}{' recomputing' if again else ''}"
        for device, seconds, again in zip(cut.devices, each, cut.recompute, strict=True)
    ]
    towers = f"{replicas} towers, each of " if replicas > 1 else ""
    most = [cut.held[0]] if len(set(cut.held)) == 1 else cut.held
    held = f" with {', '.join(map(str, most))} micro-batches in a stage at most" if most else ""
    told = (
        f"{towers}{count} micro-batches, schedule {cut.schedule}{held}, stages for "
        f"each micro-batch: {', '.join(parts)}"
    )
    of_pipeline = MicroBatches(
        count,
        cut.schedule,
        tuple(cut.stages.tolist()),
        cut.devices,
        cut.recompute,
        tuple(tuple(map(str, tasks)) for tasks in tasks_of(problem, cut)),
    )
    plan = to_plan(
        request,
        whole.graph,
        machine,
        whole.costs,
        steps.placement_of(cut, whole),
        timeline,
        added=(of_pipeline, *([Towers(replicas)] if replicas > 1 else [])),
        placer=cut.name or "pipeline",
        value=timeline.step_seconds,
        lower_bound=min(bound.seconds, timeline.step_seconds),
        bound_proof=bound.proof,
        groups=placing.groups.count,
        planning_seconds=time.perf_counter() - began,
        interrupted=budget.interrupted,
        baselines={**baselines, "pipeline": timeline.step_seconds},
        whole=kept.patterns,
        notes=(*notes.texts, *kept.notes, told),
    )
    if request.format:
        FORMATS[request.format].export(plan, whole.graph)  # raises what the format cannot say
    return plan


def _never(_placements: NDArray[np.int32]) -> "BatchEvaluation":
    raise AssertionError("a pipeline's stages are simulated as cuts, not as placements")


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
    for index in gpus_or_cpus(machine):
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


def gpus_or_cpus(machine: Machine) -> list[int]:
    """The machine's GPUs, or without GPUs its CPUs."""
    kinds = [device.kind for device in machine.devices]
    wanted = "gpu" if "gpu" in kinds else "cpu"
    return [index for index, kind in enumerate(kinds) if kind == wanted]


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


@dataclass(frozen=True, eq=False)
class _WholeStep(_Unrolled):
    """The same with its costs and simulator."""

    costs: Costs
    simulator: Simulator


class _Steps:
    """Simulates cuts op by op. Graphs of cuts that change the same are made once. The timeline of
    the best cut is kept, as the plan needs it.

    costs    of one micro-batch's ops
    sums     signature -> measured seconds [devices] of what adds up gradients
    mirror   the devices of each tower
    """

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
        problem, recompute = self.problem, np.array(cut.recompute, dtype=bool)
        graph, count = problem.graph, problem.micro_batches
        key = changes_of(graph, count, cut.stages, recompute)
        if key not in self._made:
            # Each graph has all micro-batches' ops, so few are kept.
            if len(self._made) > 3:
                self._made.pop(next(iter(self._made)))
            made = _unrolled(graph, count, cut.stages, recompute, len(self.mirror.of))
            seconds = self.costs.compute_seconds[np.maximum(made.rows.origins, 0)]
            # What adds up gradients and losses takes what was measured, else what data sheets say.
            by_signature = dict(self.sums)
            analytic: NDArray[np.float64] | None = None
            for op in np.flatnonzero(made.rows.origins < 0).tolist():
                row = by_signature.get(made.graph.signatures[op])
                if row is None:
                    if analytic is None:
                        analytic = analytic_costs(made.graph, problem.machine).compute_seconds
                    row = by_signature[made.graph.signatures[op]] = analytic[op]
                seconds[op] = row
            costs = Costs(seconds, self.costs.source, None)
            simulator = Simulator(made.graph, problem.machine, costs, capacities=problem.capacities)
            self._made[key] = _WholeStep(
                made.graph, made.rows, made.ops, made.towers, costs, simulator
            )
        whole = self._made[key]
        placement, orders = self.placement_of(cut, whole), self.orders_of(cut, whole)
        return whole, whole.simulator.timeline(placement, orders=orders)

    def placement_of(self, cut: PipelineCut, whole: _Unrolled) -> Placement:
        """[ops of all micro-batches] the device of each."""
        devices = np.array(cut.devices, dtype=np.int32)[np.maximum(cut.stages[whole.ops], 0)]
        placement = self.mirror.of[np.maximum(whole.towers, 0), devices]
        return normalise(placement, whole.graph, self.problem.machine)

    def orders_of(self, cut: PipelineCut, whole: _Unrolled) -> list[tuple[int, ...]]:
        """[devices] the ops of each device: those of its tasks in order, each task's ops in the
        graph's order, and then what runs once a step."""
        problem, mirror = self.problem, self.mirror.of
        graph, count = problem.graph, problem.micro_batches
        kinds, _, micro, _ = whole.rows
        op, tower = whole.ops, np.maximum(whole.towers, 0)
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
        stages, towers = len(cut.devices), len(mirror)
        key = ((tower * stages + stage) * count + np.maximum(micro, 0)) * 4 + kind
        members = np.flatnonzero(in_task)
        members = members[np.argsort(key[members], kind="stable")]
        begins = np.searchsorted(key[members], np.arange(4 * count * stages * towers + 1))
        once = np.flatnonzero(runs & ~in_task)
        device = mirror[tower, np.array(cut.devices)[np.maximum(stage, 0)]]
        parts: list[list[NDArray[np.int64]]] = [[] for _ in problem.machine.devices]
        for first, tasks in enumerate(tasks_of(problem, cut)):
            for turn in range(towers if tasks else 0):
                parts[mirror[turn, first]] += [
                    members[begins[k] : begins[k + 1]]
                    for k in (
                        ((turn * stages + task.stage) * count + task.micro) * 4 + task.kind
                        for task in tasks
                    )
                ]
        for index, of_device in enumerate(parts):
            of_device.append(once[device[once] == index])
        return [tuple(np.concatenate(of_device).tolist()) for of_device in parts]
