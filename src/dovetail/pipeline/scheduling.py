"""Finds the fastest stages of a captured inference step on one device.

step ──► kernels ──► stage costs ──► schedules ──► checked, run, measured side by side ──► chosen
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.costs import CostCache
from dovetail.errors import UnequalError, UsageError
from dovetail.executors.stages.choosing import fastest, measure
from dovetail.executors.stages.preparing import prepare
from dovetail.executors.stages.targets import (
    ScheduleTarget,
    analytic_target,
    cpu_target,
    cuda_target,
)
from dovetail.frontends import Captured
from dovetail.frontends.interpret import example_values
from dovetail.frontends.models import parse_zoo
from dovetail.graph import Graph
from dovetail.graph.kernels import CONVOLUTION, FOLDED, Kernels, fuse, written_sources
from dovetail.machine import Device, parse_machine
from dovetail.machine.local import local_machine
from dovetail.methods import SCHEDULERS
from dovetail.pipeline.requests import CPU, ScheduleRequest, is_cuda, runs_here, with_fields_of
from dovetail.pipeline.sources import TellProgress, resolve_model, silent
from dovetail.runtime.timers import clock
from dovetail.runtime.torch_versions import pytree
from dovetail.schedulers.additivity import random_stages
from dovetail.schedulers.dataflow import replayed
from dovetail.schedulers.records import OpSet, groups_of, members
from dovetail.schedulers.results import (
    SEQUENTIAL,
    KernelStage,
    KernelWork,
    ScheduleCandidate,
    Scheduled,
    Schedules,
    SearchEffort,
    Specialisation,
)
from dovetail.schedulers.scheduling import SchedulerResult

RANDOM = "random"
"""The scheduler's name of a candidate that was drawn at random."""
DRAWS_EACH = 20
"""At most so many draws for each random schedule that is wanted: a narrow network has few."""
_ROUND_OFF = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Outputs of two schedules may differ by this share of the output's largest value, by dtype. Any
other dtype, such as an integer, must agree exactly."""

Step = Callable[..., Any]


def target_of(
    step: Captured,
    device: str = CPU,
    *,
    seed: int = 0,
    cache: CostCache | None = None,
    progress: TellProgress = silent,
) -> ScheduleTarget:
    """The step on one device: its kernels, prepared, and what each takes by itself.

    device   "cpu": this machine's cores; "cuda" or "cuda:1"; or a preset such as "v100", which is
             predicted by analytic costs
    """
    if step.source.training:
        raise UsageError("MODEL", "stages are of inference steps; leave --train out")
    if runs_here(device):
        check_repeats(step)
    kernels = fuse(step.graph)
    if not kernels.count:
        raise UsageError("MODEL", "there is nothing to run in it")
    # A network with convolutions gets channels last.
    images = any(kind == CONVOLUTION for kind in step.graph.kinds)
    prepared = prepare(step, kernels, channels_last=images)
    cost_cache = cache or CostCache()

    def tell(doing: str, fraction: float) -> None:
        progress(doing, fraction, None)

    if device == CPU:
        inputs, _ = example_values(step, seed)
        cpu = local_machine().devices[0]
        return cpu_target(step, kernels, prepared, inputs, cpu, cost_cache, tell)
    if is_cuda(device):
        inputs, _ = example_values(step, seed)
        return cuda_target(step, kernels, prepared, inputs, device, cost_cache, tell)
    return analytic_target(step, kernels, prepared, one_device(device))


def check_repeats(step: Captured) -> None:
    """Raise `UsageError` for a step that may compute something else each time it runs. Measuring
    runs a step over and over, and schedules are compared by their outputs."""
    if written_sources(step.graph):
        raise UsageError("MODEL", "it writes over its buffers; stages are run over and over")
    if step.program.random_ops:
        raise UsageError("MODEL", "it draws random numbers; stages do not keep their order")


def one_device(text: str) -> Device:
    """The one device of a preset, apart from its implied host. Raises `UsageError` if it has
    several."""
    devices = [device for device in parse_machine(text).devices if device.kind != "host"]
    if len(devices) != 1:
        raise UsageError("device", f"{text!r} has {len(devices)} devices; name one, such as v100")
    return devices[0]


@with_fields_of(ScheduleRequest, skip=("model", "devices", "batches", "sampled", "specialised"))
def schedule(
    step: Captured,
    device: str = CPU,
    *,
    cache: CostCache | None = None,
    progress: TellProgress = silent,
    **options: Any,
) -> tuple[Scheduled, Step | None]:
    """Find the fastest stages of an inference step on one device.

    options   fields of `ScheduleRequest`: schedulers, rounds, seed

    Returns the schedules, and a function that runs the chosen one: step(*inputs) -> outputs. The
    function is None if the device is not here. If it is, a schedule other than sequential is chosen
    only if it was measured to be faster.
    """
    request = ScheduleRequest(step, (device,), **options)
    target = target_of(step, device, seed=request.seed, cache=cache, progress=progress)
    return find(target, request.schedulers, rounds=request.rounds, progress=progress)


def find(
    target: ScheduleTarget,
    schedulers: Sequence[str] = (),
    *,
    rounds: int = ScheduleRequest.rounds,
    progress: TellProgress = silent,
) -> tuple[Scheduled, Step | None]:
    """Find the fastest stages on a target. See `schedule`."""
    # Sequential comes first and always runs: it is what all others are compared with.
    names = list(dict.fromkeys([SEQUENTIAL, *(schedulers or SCHEDULERS)]))
    candidates = {}
    for place, name in enumerate(names):
        progress(f"{name}: searching", place / len(names), None)
        candidates[name] = search(target, name)
    candidates |= {extra.scheduler: extra for extra in target.extras()}
    steps = {name: target.step(candidate) for name, candidate in candidates.items()}
    running = {name: step for name, step in steps.items() if step is not None}
    if not running:
        # Nothing can be measured, so the least prediction is chosen. What a candidate without
        # stages predicts is a bound, and is not compared.
        staged = [name for name in candidates if candidates[name].stages]
        chosen = min(staged, key=lambda name: candidates[name].predicted_seconds)
        return _to_scheduled(target, candidates, {}, chosen), None
    check_equal(target, running)
    # Schedules that run alike are measured as one, under the name of the first of them. `reversed`
    # makes the earliest name win, so that a schedule that runs like sequential is "sequential".
    first = {target.program(candidates[name]): name for name in reversed(running)}
    timers = {name: target.timed(running[name]) for name in first.values()}
    chosen, seconds = fastest(timers, rounds, lambda done: progress("measuring", done, None))
    seconds = {name: seconds[first[target.program(candidates[name])]] for name in running}
    return _to_scheduled(target, candidates, seconds, chosen), running[chosen]


def _to_scheduled(
    target: ScheduleTarget,
    candidates: Mapping[str, ScheduleCandidate],
    seconds: Mapping[str, tuple[float, ...]],
    chosen: str,
) -> Scheduled:
    """The result for one batch size; `seconds` holds the measured rounds of each candidate."""
    return Scheduled(
        batch_of(target.captured),
        works_of(target.captured.graph, target.kernels),
        target.block,
        target.blocks,
        tuple(replace(c, seconds=seconds.get(name, ())) for name, c in candidates.items()),
        chosen,
        peak_bytes=target.peak_bytes(candidates[chosen]),
    )


def search(target: ScheduleTarget, name: str) -> ScheduleCandidate:
    """The schedule that one scheduler finds, and the effort of finding it."""
    # The target's counters run over all schedulers. The difference belongs to this one, and time
    # spent on measuring is taken off its search.
    costs = target.costs
    before, began = (costs.asked, costs.timed, costs.seconds), clock()
    result = SCHEDULERS[name](target.problem)
    measuring = costs.seconds - before[2]
    effort = SearchEffort(
        result.states,
        result.transitions,
        costs.asked - before[0],
        costs.timed - before[1],
        clock() - began - measuring,
        measuring,
    )
    return ScheduleCandidate(
        name,
        result.stages,
        result.streams or target.streams(result.stages),
        target.predicted(name, result),
        target.block_seconds(result),
        effort=effort,
        pruning=result.pruning,
    )


def reseen(target: ScheduleTarget, candidate: ScheduleCandidate) -> ScheduleCandidate:
    """A schedule that was made for another target, as this target of the same kernels runs it: its
    seconds are predicted anew, and this target chooses which stages are merged."""
    if not candidate.stages:
        seconds = replayed(
            target.block, candidate.streams, target.problem.seconds, target.problem.wait_seconds
        )
        result = SchedulerResult(seconds, streams=candidate.streams)
        total = target.predicted(candidate.scheduler, result)
        return replace(candidate, predicted_seconds=total, seconds=())
    op_sets = [sum(1 << kernel for kernel in stage.kernels) for stage in candidate.stages]
    repriced = as_candidate(target, op_sets, candidate.scheduler)
    return replace(
        candidate,
        stages=repriced.stages,
        streams=repriced.streams,
        predicted_seconds=repriced.predicted_seconds,
        seconds=(),
    )


def sample(
    target: ScheduleTarget,
    count: int,
    rng: random.Random,
    rounds: int,
    progress: TellProgress = silent,
) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of `count` distinct random schedules, all measured side by
    side. There are fewer if no more are found in `DRAWS_EACH` draws for each."""
    groups, ops = target.problem.groups, target.problem.group_ops
    drawn: dict[tuple[OpSet, ...], None] = {}
    for _ in range(DRAWS_EACH * count):
        drawn[tuple(random_stages(target.block, rng, groups, ops))] = None
        if len(drawn) == count:
            break
    candidates = [as_candidate(target, stages) for stages in drawn]
    timers = {}
    for place, candidate in enumerate(candidates):
        step = target.step(candidate)
        assert step is not None, "only a device that is here runs schedules"
        timers[str(place)] = target.timed(step)
        progress("random schedules", (place + 1) / len(candidates) / 2, None)
    measured = measure(timers, rounds, lambda f: progress("random schedules", 0.5 + f / 2, None))
    return [
        (candidate.predicted_seconds, statistics.median(measured[str(place)]))
        for place, candidate in enumerate(candidates)
    ]


def as_candidate(
    target: ScheduleTarget, stages: Sequence[OpSet], scheduler: str = RANDOM
) -> ScheduleCandidate:
    """A candidate of any stages. Each stage runs by the faster strategy, as groups or merged, and
    the candidate has its predicted seconds."""
    kernel_stages = []
    for stage, timing in zip(stages, target.problem.timer(stages), strict=True):
        groups = tuple(tuple(members(group)) for group in groups_of(target.block, stage))
        if timing.merged:
            groups = (tuple(kernel for group in groups for kernel in group),)
        kernel_stages.append(KernelStage(groups, timing.seconds, timing.merged))
    schedule = SchedulerResult(sum(stage.seconds for stage in kernel_stages), tuple(kernel_stages))
    total = target.predicted(scheduler, schedule)
    return ScheduleCandidate(scheduler, tuple(kernel_stages), target.streams(kernel_stages), total)


def check_equal(target: ScheduleTarget, steps: Mapping[str, Step]) -> None:
    """Raise `UnequalError` if a schedule's outputs differ from sequential's by more than
    round-off."""
    expected_outputs = _outputs(steps[SEQUENTIAL](*target.inputs))
    for name, step in steps.items():
        for value, expected in zip(_outputs(step(*target.inputs)), expected_outputs, strict=True):
            error = _error(value, expected)
            # Written so that an error that is not a number raises, too.
            if not error <= _ROUND_OFF.get(value.dtype, 0.0):
                raise UnequalError(name, error)


def _outputs(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _error(value: Tensor, expected: Tensor) -> float:
    """The largest difference of two outputs, divided by the largest finite value. Values that are
    not finite must be equal. Where a share says nothing, any difference counts as 1."""
    differs = (value != expected) & ~(value.isnan() & expected.isnan())
    if not differs.any():
        return 0.0
    if not value.is_floating_point():
        return 1.0
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return float((value - expected)[differs].abs().max()) / largest if largest else 1.0


def batch_of(step: Captured) -> int:
    """The step's batch size: what the text of a zoo network says, else the first dimension of the
    first input."""
    if step.source.model.startswith("zoo:"):
        network, options = parse_zoo(step.source.model)
        return int({**network.defaults, **options}["batch"])
    shape = tuple(step.inputs[0].shape) if step.inputs else ()
    return shape[0] if shape else 1


def works_of(graph: Graph, kernels: Kernels) -> tuple[KernelWork, ...]:
    """The names, FLOPs and moved bytes of each kernel. A tensor that is made and read within one
    kernel is not moved."""
    ops: list[list[int]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel != FOLDED:
            ops[kernel].append(op)
    works = []
    for kernel_ops in ops:
        inside = {t for op in kernel_ops for t in graph.outputs_of(op)}
        read = {int(t) for op in kernel_ops for t in graph.inputs_of(op)} - inside
        written = {
            t
            for t in inside
            if t in graph.outputs or any(int(r) not in kernel_ops for r in graph.consumers_of(t))
        }
        moved = float(graph.tensor_bytes[sorted(read | written)].sum())
        names = tuple(graph.names[op] for op in kernel_ops)
        flops = float(graph.flops[kernel_ops].sum())
        works.append(KernelWork(names[0], names, flops, moved))
    return tuple(works)


# --- Several batch sizes and devices ---
#
# Schedules are searched for at each size and on each device. Then each runs at the sizes and on the
# devices that it was not made for, which shows how much specialising gains.

_ZOO = "zoo:"


def find_schedules(
    request: ScheduleRequest, *, cache: CostCache | None = None, progress: TellProgress = silent
) -> list[Schedules]:
    """The fastest stages of a network: for each device, at each batch size."""
    steps = [step_of(request.model, batch, progress) for batch in request.batches or (0,)]
    by_device, targets = [], []
    for device in request.devices:
        of_device = [
            target_of(step, device, seed=request.seed, cache=cache, progress=progress)
            for step in steps
        ]
        results = [_find_on_target(target, request, progress) for target in of_device]
        targets.append(of_device)
        made = [_specialised(result, request.specialised) for result in results]
        matrix = _batch_matrix(of_device, made, request.rounds)
        first = of_device[0]
        by_device.append(
            Schedules(_name(request), first.device, first.source, tuple(results), tuple(matrix))
        )
    across = _device_matrices(targets, by_device, request)
    return [
        replace(on_device, specialisations=(*on_device.specialisations, *across))
        for on_device in by_device
    ]


@with_fields_of(ScheduleRequest)
def schedules(
    model: str | Captured,
    devices: Sequence[str] = (CPU,),
    *,
    cache: CostCache | None = None,
    progress: TellProgress = silent,
    **options: Any,
) -> list[Schedules]:
    """The fastest stages of a network. The options are fields of `ScheduleRequest`; see
    `find_schedules`."""
    return find_schedules(
        ScheduleRequest(model, devices, **options), cache=cache, progress=progress
    )


def _name(request: ScheduleRequest) -> str:
    """The MODEL text, as results show it."""
    model = request.model
    return model if isinstance(model, str) else model.source.model


def with_batch(model: str, batch: int) -> str:
    """The MODEL text with another batch size, or as it is for 0. Raises `UsageError` for a network
    that is not of the zoo."""
    if not batch:
        return model
    if not model.startswith(_ZOO):
        raise UsageError("batch", f"only networks of the zoo change their batch, not {model!r}")
    name, _, options = model.partition("?")
    kept = [o for o in options.split("&") if o and not o.startswith("batch=")]
    return f"{name}?{'&'.join([*kept, f'batch={batch}'])}"


def step_of(model: str | Captured, batch: int = 0, progress: TellProgress = silent) -> Captured:
    """The captured step of a model at a batch size, or at its own for 0."""
    if isinstance(model, Captured):
        if batch:
            raise UsageError("batch", "a captured step has its batch; name a network of the zoo")
        return model
    text = with_batch(model, batch)
    progress(f"capturing {text}", 0.0, None)
    step = resolve_model(text)
    if not isinstance(step, Captured):
        raise UsageError(
            "MODEL", "stages are of a network that is captured: zoo:NAME or package.module:function"
        )
    return step


def _find_on_target(
    target: ScheduleTarget, request: ScheduleRequest, progress: TellProgress
) -> Scheduled:
    """The schedules on one target, with the random ones that the request asks for."""
    scheduled, step = find(target, request.schedulers, rounds=request.rounds, progress=progress)
    if request.sampled and step is not None:
        rng = random.Random(request.seed)
        drawn = sample(target, request.sampled, rng, request.rounds, progress)
        scheduled = replace(scheduled, sampled=tuple(drawn))
    return scheduled


def _specialised(result: Scheduled, scheduler: str) -> ScheduleCandidate:
    """The schedule that runs where it was not made for."""
    return result.candidate(scheduler) if scheduler else result.best


def _batch_matrix(
    targets: Sequence[ScheduleTarget], made: Sequence[ScheduleCandidate], rounds: int
) -> list[Specialisation]:
    """The matrix of batch sizes: each size run by the schedule made for each. Seconds are measured
    if the device is here. Empty if there is one size, or if the sizes have different kernels."""
    if len(targets) < 2 or len({target.block for target in targets}) > 1:
        return []
    names = tuple(f"batch {batch_of(target.captured)}" for target in targets)
    rows = [_row(target, made, rounds)[0] for target in targets]
    return [Specialisation("batch sizes", names, names, tuple(rows))]


def _row(
    target: ScheduleTarget, made: Sequence[ScheduleCandidate], rounds: int
) -> tuple[tuple[float, ...], bool]:
    """The seconds of the schedules on one target, and whether they were measured. They are
    predicted if the device is not here."""
    seen = [reseen(target, candidate) for candidate in made]
    # Schedules that run alike are measured as one, so that noise does not tell them apart.
    programs = [target.program(candidate) for candidate in seen]
    names = [str(programs.index(program)) for program in programs]
    steps = {name: target.step(seen[int(name)]) for name in dict.fromkeys(names)}
    timers = {name: target.timed(step) for name, step in steps.items() if step is not None}
    if not timers:
        return tuple(candidate.predicted_seconds for candidate in seen), False
    seconds = measure(timers, rounds)
    return tuple(statistics.median(seconds[name]) for name in names), True


def _device_matrices(
    targets: Sequence[Sequence[ScheduleTarget]],
    by_device: Sequence[Schedules],
    request: ScheduleRequest,
) -> list[Specialisation]:
    """One matrix for each batch size: each device run by the schedule made for each device. Seconds
    are measured on the devices that are here. Empty if there is one device."""
    if len(by_device) < 2:
        return []
    names = tuple(on_device.device for on_device in by_device)
    matrices = []
    for place in range(len(by_device[0].results)):
        results = [on_device.results[place] for on_device in by_device]
        made = [_specialised(result, request.specialised) for result in results]
        rows = [_row(of_device[place], made, request.rounds) for of_device in targets]
        title = f"devices at batch {results[0].batch}, {_how_known(names, rows)}"
        seconds = tuple(of_row for of_row, _ in rows)
        matrices.append(Specialisation(title, names, names, seconds))
    return matrices


def _how_known(names: Sequence[str], rows: Sequence[tuple[tuple[float, ...], bool]]) -> str:
    measured = [name for name, (_, was_measured) in zip(names, rows, strict=True) if was_measured]
    if not measured:
        return "predicted"
    others = " and predicted on the others" if len(measured) < len(names) else ""
    return f"measured on {' and '.join(measured)}{others}"
