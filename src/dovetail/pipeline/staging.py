"""Decides placement and stages together: which device an op is on, and what runs beside it there.

    placements ──► stages on each device ──► simulate both ──► the best ──► measure, if it is here
        ▲                    │
        └── search again ◄───┘   with the costs that ops have in their stages

A placement that is best for one op after another may be worse than one that keeps branches on one
device, which runs them at the same time. So the search is repeated with costs that are less by what
stages gain: first by what each device gains if it runs everything, then by what the best plan so
far gains. Stages are chosen for the best placements of every search and for each device alone, and
all are simulated. The plan without stages and each device alone are among them, so the result is
never worse than placement alone, or than stages on one device alone. On devices of this machine the
best plans then run side by side with the plan without stages, which stays unless another one is
measured to be faster.

This is not exact: few placements get stages, and stages are chosen for the sum of their seconds,
without what they wait for. Then stages are dropped as long as the simulated plan gets faster.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import CostCache, Costs
from dovetail.costs.stages import AnalyticStages, kernel_works, stage_rates
from dovetail.errors import InfeasibleError, MachineError, OutOfMemoryError, UsageError
from dovetail.executors import Workers, run
from dovetail.executors.stages.cpu import Functions
from dovetail.executors.stages.measuring import CpuStages
from dovetail.executors.stages.targets import example_of
from dovetail.frontends import Captured
from dovetail.frontends.interpret import example_values
from dovetail.graph import Graph
from dovetail.graph.kernels import Kernels, fuse
from dovetail.machine import Device, Machine
from dovetail.pipeline.opening import planned, simulator_of, timeline_of, with_schedules
from dovetail.pipeline.requests import ScheduleRequest
from dovetail.pipeline.scheduling import check_repeats, ops_of_kernels, prepared_kernels, works_of
from dovetail.pipeline.searching import Searched, budget_of, placed, problem_of, with_shared_copies
from dovetail.pipeline.sources import Notes, TellProgress
from dovetail.placers import Budget, PlacementProblem, keeping_interrupts, permitted
from dovetail.plans import Placement, Plan, Schedule, Stage, normalise
from dovetail.runtime.timers import race
from dovetail.schedulers.ios import GROUPS
from dovetail.schedulers.placed import DeviceStages, PlacedStages, schedules_of
from dovetail.schedulers.records import OpSet, StageTiming, groups_of, members
from dovetail.schedulers.results import SEQUENTIAL, Scheduled
from dovetail.schedulers.timing import block_of, signatures_of
from dovetail.simulator import Simulator
from dovetail.transforms import Copies
from dovetail.units import format_seconds

SCHEDULERS = ("dos", "ios")
"""The schedulers that choose stages for a placement. The better result counts."""
WITH_STAGES = "+stages"
"""A method's name with this behind it stands for its placement with stages."""
ONE_DEVICE = f"one device{WITH_STAGES}"
"""The name of the baseline that runs everything on the best single device, with stages."""
WITHOUT = "without stages"
"""The name of the baseline that is the plan without stages."""
ROUNDS = 2
"""How often the search is repeated with the costs that ops have in stages."""
MOST_STAGED = 4
"""Stages are chosen for so many of the best placements of a search."""
MOST_DROPPED = 32
"""Of each plan at most this many stages are dropped on trial."""
MEASURED_PLANS = 3
"""At most this many plans are measured, beside the plan without stages."""
HAND_OVER_SECONDS = 1e-4
"""Seconds in which a CPU device's process starts the threads of a stage and waits for them. They
pass Python's lock to and fro, at 96 us a round trip (`docs/design.md`, section 6)."""


# --- What stages cost on each device ---


def device_stages(
    step: Captured, machine: Machine, cache: CostCache, progress: TellProgress, notes: Notes
) -> tuple[Kernels, list[DeviceStages | None]]:
    """(kernels of the step, [devices] what their stages cost there).

    On cores of this machine stages are measured, on GPUs and other devices predicted by their data
    sheets. Plans for this machine are measured as a whole afterwards. None stands for a device that
    runs one op after another: a device of one core, or one whose lanes are not known. `notes` is
    told of the latter. Raises `UsageError` for a step that cannot be measured, because it draws
    random numbers or writes over its buffers.
    """
    kernels = fuse(step.graph)
    if machine.local and any(len(device.cores) > 1 for device in machine.devices):
        check_repeats(step)
    found: list[DeviceStages | None] = []
    alike: dict[tuple[str, int, int], DeviceStages] = {}
    for device in machine.devices:
        key = (device.model, len(device.cores), device.op_threads)
        if machine.local and len(device.cores) > 1:
            if key not in alike:
                alike[key] = _measured_stages(step, kernels, device, cache, progress)
            found.append(alike[key])
        elif device.kind == "host" or device.cores:
            found.append(None)
        else:
            try:
                found.append(_analytic_stages(step.graph, kernels, device))
            except MachineError as error:
                notes.say(f"no stages: {error}")
                found.append(None)
    return kernels, found


def _analytic_stages(graph: Graph, kernels: Kernels, device: Device) -> DeviceStages:
    """Stage costs by data sheet, as `dovetail schedule --device v100` predicts them; kernels are
    not merged. Raises `MachineError` for a device whose rates or lanes are not known."""
    model = AnalyticStages(kernel_works(graph, kernels), stage_rates(device))
    block = block_of(graph, kernels)

    def time(stages: Sequence[OpSet]) -> list[StageTiming]:
        return [
            StageTiming(model.seconds([list(members(group)) for group in groups_of(block, stage)]))
            for stage in stages
        ]

    alone = [model.seconds([[kernel]]) for kernel in range(kernels.count)]
    return DeviceStages(block, signatures_of(graph, kernels), time, alone)


def _measured_stages(
    step: Captured, kernels: Kernels, device: Device, cache: CostCache, progress: TellProgress
) -> DeviceStages:
    """Stage costs measured on cores of this process, as `dovetail schedule` measures them, and kept
    in the same cache. Kernels are not merged, because the plan's ops run as they were captured."""
    prepared = prepared_kernels(step, kernels)
    inputs, _ = example_values(step, 0)
    block, signatures = block_of(step.graph, kernels), signatures_of(step.graph, kernels)
    threads = len(device.cores)
    stages = CpuStages(
        Functions(prepared, example_of(prepared, inputs)),
        block,
        signatures,
        [None] * kernels.count,
        cache,
        device=device.model,
        threads=threads,
        progress=lambda doing, fraction: progress(doing, fraction, None),
    )
    alone = stages.alone.one_thread if device.op_threads == 1 else stages.alone.all_threads
    groups = max(2, min(GROUPS, threads))
    return DeviceStages(
        block, signatures, stages.timer, alone, stages.cannot_win, HAND_OVER_SECONDS, groups
    )


# --- Stages of one placement ---

Chosen = tuple[tuple[int, Stage], ...]
"""(device, stage) of every stage that runs several groups at the same time."""
Priced = tuple[float, tuple[Schedule | None, ...]]
"""(simulated seconds, inf if it lacks memory; the schedules of all devices)."""


@dataclass(frozen=True, eq=False)
class _Context:
    """What plans with the same copies share: their graph, and what chooses stages in it."""

    graph: Graph
    simulator: Simulator
    stages: PlacedStages


class _Stager:
    """Chooses stages for plans of one step on one machine, whose costs and caps they share."""

    def __init__(self, step: Captured, progress: TellProgress, notes: Notes) -> None:
        self._step, self._progress, self._notes = step, progress, notes
        self._cache = CostCache()
        self._contexts: dict[tuple[Copies, ...], _Context] = {}

    def context(self, plan: Plan) -> _Context:
        """The context of plans with this plan's copies; stages are measured when it is made."""
        if plan.copies not in self._contexts:
            step, machine = planned(plan, self._step), plan.machine
            kernels, costs = device_stages(step, machine, self._cache, self._progress, self._notes)
            simulator = simulator_of(plan, step.graph)
            stages = PlacedStages(step.graph, kernels, plan.compute_seconds, costs)
            self._contexts[plan.copies] = _Context(step.graph, simulator, stages)
        return self._contexts[plan.copies]

    def staged(self, plan: Plan, *, thorough: bool = False) -> Plan:
        """The plan with the best stages that were found for its placement, under a name that says
        so; the plan itself if none make it faster. `thorough` as in `PlacedStages.choose`."""
        context, starts = self.context(plan), _starts(plan, self._step.graph)
        turns = np.zeros(len(plan.placement))  # [ops] the place of each in its device's order
        for order in plan.orders or ():
            turns[list(order)] = np.arange(len(order))

        def price(stages: Chosen) -> Priced:
            """The better of two orders of these stages in the plan: a stage comes where its first
            op was, or where its last op was."""
            priced = []
            for late in (False, True):
                schedules = schedules_of(
                    context.graph, plan.placement, plan.compute_seconds, stages, starts, late=late
                )
                timeline = context.simulator.timeline(
                    plan.placement, priorities=-turns, schedules=schedules
                )
                fits = (timeline.peak_memory_bytes <= context.simulator.capacities).all()
                priced.append((timeline.step_seconds if fits else np.inf, schedules))
            return min(priced, key=lambda pair: pair[0])

        best_value, best = plan.value, None
        for scheduler in SCHEDULERS:
            stages = tuple(context.stages.choose(plan.placement, scheduler, thorough=thorough))
            if not stages:
                continue
            value, schedules = price(stages)
            # A stage may wait for its inputs longer than it gains. So each is dropped with which
            # the plan is no faster. Later ones are tried first.
            for stage in stages[::-1][:MOST_DROPPED]:
                fewer = tuple(other for other in stages if other is not stage)
                if fewer and (tried := price(fewer))[0] <= value:
                    stages, (value, schedules) = fewer, tried
            if value < best_value:
                best_value, best = value, schedules
        if best is None:
            return plan
        found = with_schedules(plan, self._step.graph, best)
        return replace(found, placer=f"{plan.placer}{WITH_STAGES}")


def _starts(plan: Plan, graph: Graph) -> NDArray[np.float64]:
    """[ops] when each op starts in the plan; 0 for sources."""
    timeline = timeline_of(plan, graph)
    starts = np.zeros(len(plan.placement))
    starts[timeline.ops] = timeline.op_starts
    return starts


# --- What stages gain, as costs of ops ---


def _enter_factors(
    factors: NDArray[np.float64], stages: PlacedStages, placement: Placement, device: int
) -> None:
    """Enter the factors of the ops that share stages on a device, by the better scheduler."""
    best: list[Stage] = []
    most = 0.0
    for scheduler in SCHEDULERS:
        found = [stage for d, stage in stages.choose(placement, scheduler) if d == device]
        saved = sum(_one_by_one(stages, stage, device) - stage.seconds for stage in found)
        if saved > most:
            best, most = found, saved
    for stage in best:
        share = stage.seconds / _one_by_one(stages, stage, device)
        factors[list(stage.ops), device] = share


def _one_by_one(stages: PlacedStages, stage: Stage, device: int) -> float:
    """Seconds of a stage's ops one after another."""
    return float(stages.seconds[list(stage.ops), device].sum())


# --- The joint decision ---


@dataclass(frozen=True, eq=False)
class _Staged:
    """A placement without copies, its plan without stages, and that with the best that were found.
    The latter is the former if there are none."""

    placement: Placement
    plain: Plan
    plan: Plan


def with_stages(searched: Searched, bare: Plan, alone: Plan, progress: TellProgress) -> Plan:
    """The best plan of placement and stages. If none is better it is `alone`, with a note that says
    so.

    bare    the plan of the search, without copies and stages
    alone   the same with copies

    The searches with the costs of stages have the request's budget together, as the first search
    had.
    """
    request, problem, notes = searched.request, searched.problem, Notes()
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    step, min_gain = request.planned_step, request.resolved_gain
    assert isinstance(step, Captured), "the request has checked that"
    allowed, running = permitted(graph, machine, request.pins), ~graph.is_source
    stager = _Stager(step, progress, notes)
    found = [_Staged(bare.placement, alone, stager.staged(alone))]
    seen = {bare.placement.tobytes()}

    def consider(placements: Sequence[tuple[str, Placement]]) -> None:
        """Enter the placements that are new and fit, each with its best stages."""
        for name, placement in placements:
            if placement.tobytes() in seen:
                continue
            seen.add(placement.tobytes())
            if not allowed[running, placement[running]].all():
                continue
            assert problem.trace is not None, "the problem is one of `problem_of`"
            timeline = problem.trace(placement)
            if (timeline.peak_memory_bytes > problem.capacities).any():
                continue
            plan = replace(
                bare,
                placement=placement,
                orders=timeline.orders,
                placer=name,
                value=timeline.step_seconds,
                peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
            )
            plan = with_shared_copies(plan, request, searched.kept)
            found.append(_Staged(placement, plan, stager.staged(plan)))

    singles = [
        ("single", normalise(np.full(len(graph), device, dtype=np.int32), graph, machine))
        for device in np.flatnonzero(np.isfinite(costs.compute_seconds[running]).all(axis=0))
    ]
    consider([*singles, *_best_found(problem, searched.budget)])
    # [ops, devices] What an op's seconds are multiplied by in stages: first where its device runs
    # every op that it can run, then where the best plan so far has its stages.
    stages = stager.context(bare).stages
    factors, elsewhere = np.ones_like(stages.seconds), stages.seconds.argmin(axis=1)
    for device in range(len(machine.devices)):
        can = np.isfinite(stages.seconds[:, device])
        _enter_factors(factors, stages, np.where(can, device, elsewhere).astype(np.int32), device)
    # Where no stage gains, these searches would repeat the first one.
    for number in range(ROUNDS if (factors < 1).any() else 0):
        progress("planning with the costs of stages", number / ROUNDS, None)
        scaled = Costs(costs.compute_seconds * factors, costs.source, costs.sent_bytes)
        again = problem_of(request, machine, scaled, searched.groups, searched.kept)
        whole = budget_of(request)
        budget = whole.slice(
            seconds=whole.seconds / ROUNDS, evaluations=max(1.0, whole.evaluations // ROUNDS)
        )
        try:
            with keeping_interrupts(budget):
                outcome = placed(again, request, budget, progress)
        # With less budget than the first search had, a placer may find nothing that fits.
        except InfeasibleError:
            pass
        else:
            if budget.interrupted:
                raise KeyboardInterrupt
            consider([(outcome.placer, outcome.placement), *_best_found(again, budget)])
        best = min(found, key=_value)
        factors = factors.copy()
        factors[np.arange(len(graph)), best.placement] = 1.0
        for device in range(len(machine.devices)):
            _enter_factors(factors, stages, best.placement, device)
    # Larger parts are searched for the plan of placement alone, the best one, and the best on one
    # device.
    finalists = [
        found[0],
        min(found, key=_value),
        *sorted(filter(_is_single, found), key=_value)[:1],
    ]
    progress("choosing stages", 0.0, None)
    for number, finalist in enumerate({id(finalist): finalist for finalist in finalists}.values()):
        better = stager.staged(finalist.plain, thorough=True)
        found.append(replace(finalist, plan=better))
        progress("choosing stages", (number + 1) / len(finalists), None)
    on_one = min(filter(_is_single, found), key=_value, default=found[0]).plan
    plans = [alone, *(staged.plan for staged in found)]
    # The plan is no worse than placement alone, and than stages on one device alone. Of those it is
    # the one on the fewest devices that no plan on more devices beats by the smallest gain.
    limit = min(alone.value, on_one.value)
    chosen, *others = sorted(
        (plan for plan in plans if plan.value <= limit),
        key=lambda plan: (devices_of(plan), plan.value),
    )
    for plan in others:
        if plan.value < chosen.value * (1 - min_gain):
            chosen = plan
    told = f"{_text(chosen)} as predicted, {_text(alone)} without"
    if machine.local:
        rivals = [chosen, on_one, *sorted(plans, key=lambda plan: plan.value)]
        chosen, told = quicker(alone, WITHOUT, rivals, step, progress)
    baselines = {**alone.baselines, WITHOUT: alone.value, chosen.placer: chosen.value}
    if devices_of(on_one) == 1:
        baselines[ONE_DEVICE] = on_one.value
    counts = ", ".join(f"{n} on {name}" for name, n in stages_together(chosen).items() if n)
    none = "none that make it faster (the bound is of plans without stages)"
    notes.say(f"stages of several ops: {counts or none}; {told}")
    return replace(chosen, baselines=baselines, notes=alone.notes + notes.texts)


def _best_found(problem: PlacementProblem, budget: Budget) -> list[tuple[str, Placement]]:
    """(method, placement [ops]) of the best placements that the methods found and that fit."""
    results = budget.ledger.results
    fitting = [(pair, name) for name, pair in results.items() if not pair[0].lacking_bytes]
    fitting.sort(key=lambda entry: entry[0][0])
    return [
        (name, normalise(problem.spread(placement), problem.graph, problem.machine))
        for (_, placement), name in fitting[:MOST_STAGED]
    ]


def _value(staged: _Staged) -> float:
    return staged.plan.value


def _is_single(staged: _Staged) -> bool:
    return devices_of(staged.plan) == 1


def _text(plan: Plan) -> str:
    return format_seconds(plan.value)


def devices_of(plan: Plan) -> int:
    """The number of devices that run something."""
    orders, schedules = plan.orders or (), plan.schedules or (None,) * len(plan.machine.devices)
    return sum(
        bool(order) or schedule is not None
        for order, schedule in zip(orders, schedules, strict=True)
    )


def stages_together(plan: Plan) -> dict[str, int]:
    """Device -> how many stages of several ops it runs at the same time."""
    schedules = plan.schedules or (None,) * len(plan.machine.devices)
    return {
        name: sum(len(stage.ops) > 1 for stage in schedule.stages) if schedule else 0
        for name, schedule in zip(plan.machine.device_names, schedules, strict=True)
    }


# --- Stages that were found for one device, as a plan ---


def plan_of_stages(found: Scheduled, step: Captured, plan: Plan) -> Plan:
    """A plan to run the step in the chosen stages on all cores of this machine, as one device.

    found   the schedules of the step on `cpu`. If the chosen one has no stages, as a greedy one,
            the fastest one that has is taken
    plan    of the step on `here`, without stages

    The ops of a plan run as they were captured: kernels of a stage are not merged, and nothing is
    folded into weights. So a stage takes the same share of the seconds of its ops as it takes of
    its kernels one after another in the schedule, and the plan's own seconds are its promise.
    """
    graph, kernels = step.graph, fuse(step.graph)
    if works_of(graph, kernels) != found.kernels:
        raise UsageError("found", "is of another step")
    staged = [c for c in found.candidates if c.stages]
    chosen = found.best
    if not chosen.stages:
        chosen = min(staged, key=lambda c: c.step_seconds)
    of_kernel = ops_of_kernels(kernels)
    alone = {stage.kernels: stage.seconds for stage in found.candidate(SEQUENTIAL).stages}
    stages = []
    for stage in chosen.stages:
        if len(stage.groups) < 2:
            continue
        ops = sorted(op for kernel in stage.kernels for op in of_kernel[kernel])
        share = stage.seconds / max(sum(alone[kernel,] for kernel in stage.kernels), 1e-12)
        seconds = float(plan.compute_seconds[ops, 0].sum()) * share
        stages.append((0, Stage(tuple(ops), seconds)))
    if not stages:
        return replace(plan, notes=(*plan.notes, "no stage of several ops is faster here"))
    schedules = schedules_of(
        graph, plan.placement, plan.compute_seconds, stages, _starts(plan, graph)
    )
    plan = with_schedules(plan, graph, schedules)
    return replace(plan, placer=f"{chosen.scheduler}{WITH_STAGES}")


# --- Measured side by side ---

_BASELINE = "baseline"
"""The baseline's name among the plans that are measured; the others have numbers."""


def quicker(
    baseline: Plan, what: str, rivals: Sequence[Plan], step: Captured, progress: TellProgress
) -> tuple[Plan, str]:
    """(plan, text): the fastest of these plans as measured side by side on this machine.

    It is `baseline` unless a rival is beyond doubt faster. At most `MEASURED_PLANS` rivals are
    measured, the first ones. The text says what was measured.

    what   what the baseline is, as the text names it
    """
    distinct = list({id(plan): plan for plan in rivals if plan is not baseline}.values())
    if not distinct:
        return baseline, f"{_text(baseline)} as predicted"
    named = {_BASELINE: baseline}
    named |= {str(number): plan for number, plan in enumerate(distinct[:MEASURED_PLANS])}
    with ExitStack() as stack:
        timers = {}
        shared: list[Workers] = []
        for name, plan in named.items():
            # Processes take seconds to start, so plans for the same devices share them.
            serving = [workers for workers in shared if workers.serves(plan.machine)]
            if not serving:
                serving = [stack.enter_context(Workers(plan.machine))]
                shared += serving
            try:
                network = run(plan, planned(plan, step), workers=serving[0])
            except OutOfMemoryError as error:
                # On a GPU, beside the others. Without the baseline nothing is compared.
                if name == _BASELINE:
                    predicted = min(named.values(), key=lambda plan: plan.value)
                    return predicted, f"{_text(predicted)} as predicted; not measured: {error}"
                continue
            network = stack.enter_context(network)
            network.feed()
            timers[name] = lambda network=network: float(network.step_seconds(2)[0])
        if len(timers) < 2:
            return baseline, f"{_text(baseline)} as predicted; the others did not fit beside it"
        winner, seconds = race(
            _BASELINE,
            timers,
            ScheduleRequest.rounds,
            lambda done: progress("measuring plans", done, None),
        )
    medians = {name: median(of_name) for name, of_name in seconds.items()}
    others = (name for name in medians if name != _BASELINE)
    best = winner if winner != _BASELINE else min(others, key=lambda name: medians[name])
    doubt = "" if winner != _BASELINE else ", which is not faster beyond doubt"
    told = (
        f"measured {format_seconds(medians[_BASELINE])} {what}, and "
        f"{format_seconds(medians[best])} for the fastest other plan{doubt}"
    )
    return named[winner], told
