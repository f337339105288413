"""From a captured inference step to its fastest stages on one device.

step ──► kernels ──► stage costs ──► schedules ──► checked, run, measured side by side ──► chosen
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dovetail.costs import CostCache
from dovetail.errors import UnequalError, UsageError
from dovetail.executors.stages.choosing import fastest, measure
from dovetail.executors.stages.preparing import draws_nothing, prepare
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
"""In place of a scheduler's name."""
_ROUND_OFF = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the largest value of an output."""

Step = Callable[..., Any]


def target_of(
    step: Captured,
    device: str = CPU,
    *,
    seed: int = 0,
    cache: CostCache | None = None,
    progress: TellProgress = silent,
) -> ScheduleTarget:
    """The step's kernels on a device, prepared and timed by themselves.

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
    images = any(kind == CONVOLUTION for kind in step.graph.kinds)
    prepared = prepare(step, kernels, channels_last=images)
    known = cache or CostCache()

    def told(doing: str, fraction: float) -> None:
        progress(doing, fraction, None)

    if device == CPU:
        inputs, _ = example_values(step, seed)
        here = local_machine().devices[0]
        return cpu_target(step, kernels, prepared, inputs, here, known, told)
    if is_cuda(device):
        inputs, _ = example_values(step, seed)
        return cuda_target(step, kernels, prepared, inputs, device, known, told)
    return analytic_target(step, kernels, prepared, _one_device(device))


def check_repeats(step: Captured) -> None:
    """Raise `UsageError` for a step that does not compute the same each time it runs."""
    if written_sources(step.graph):
        raise UsageError("MODEL", "it writes over its buffers; stages are run over and over")
    if any(
        call is not None and call.random and not draws_nothing(call) for call in step.program.calls
    ):
        raise UsageError("MODEL", "it draws random numbers; stages do not keep their order")


def _one_device(text: str) -> Device:
    """A preset's own, not the host that it implies. Raises `UsageError` where there are several."""
    devices = [device for device in parse_machine(text).devices if device.kind != "host"]
    if len(devices) != 1:
        raise UsageError("device", f"{text!r} has {len(devices)} devices; name one, such as v100")
    return devices[0]


@with_fields_of(ScheduleRequest, skip=("model", "devices", "batches", "sampled"))
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

    Returns what was found, and the chosen schedule at work: step(*inputs) -> outputs; None if the
    device is not here. If it is, a schedule is chosen only if it was measured to be faster than
    sequential.
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
    """`schedule` on a target."""
    names = list(dict.fromkeys([SEQUENTIAL, *(schedulers or SCHEDULERS)]))
    candidates = {}
    for place, name in enumerate(names):
        progress(f"{name}: searching", place / len(names), None)
        candidates[name] = search(target, name)
    candidates |= {extra.scheduler: extra for extra in target.extras()}
    steps = {name: target.step(candidate) for name, candidate in candidates.items()}
    running = {name: step for name, step in steps.items() if step is not None}
    if not running:
        staged = [name for name in candidates if candidates[name].stages]  # others: bounds
        chosen = min(staged, key=lambda name: candidates[name].predicted_seconds)
        return _scheduled(target, candidates, {}, chosen), None
    check_equal(target, running)
    # Schedules that run alike are measured as one, sequential before all.
    first = {target.program(candidates[name]): name for name in reversed(running)}
    timers = {name: target.timed(running[name]) for name in first.values()}
    chosen, seconds = fastest(timers, rounds, lambda done: progress("measuring", done, None))
    seconds = {name: seconds[first[target.program(candidates[name])]] for name in running}
    return _scheduled(target, candidates, seconds, chosen), running[chosen]


def _scheduled(
    target: ScheduleTarget,
    candidates: Mapping[str, ScheduleCandidate],
    seconds: Mapping[str, tuple[float, ...]],
    chosen: str,
) -> Scheduled:
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
    """One scheduler's schedule, and what it took to find."""
    costs = target.costs
    before, began = (costs.asked, costs.timed, costs.seconds), clock()
    found = SCHEDULERS[name](target.problem)
    measuring = costs.seconds - before[2]
    effort = SearchEffort(
        found.states,
        found.transitions,
        costs.asked - before[0],
        costs.timed - before[1],
        clock() - began - measuring,
        measuring,
    )
    return ScheduleCandidate(
        name,
        found.stages,
        found.streams or target.streams(found.stages),
        target.predicted(name, found),
        target.block_seconds(found),
        effort=effort,
        pruning=found.pruning,
    )


def reseen(target: ScheduleTarget, candidate: ScheduleCandidate) -> ScheduleCandidate:
    """A schedule that was made for another target of the same kernels, as this one runs it: what is
    merged is this one's choice."""
    if not candidate.stages:
        seconds = replayed(
            target.block, candidate.streams, target.problem.seconds, target.problem.wait_seconds
        )
        found = SchedulerResult(seconds, streams=candidate.streams)
        total = target.predicted(candidate.scheduler, found)
        return replace(candidate, predicted_seconds=total, seconds=())
    asked = [sum(1 << kernel for kernel in stage.kernels) for stage in candidate.stages]
    here = as_candidate(target, asked, candidate.scheduler)
    return replace(
        candidate,
        stages=here.stages,
        streams=here.streams,
        predicted_seconds=here.predicted_seconds,
        seconds=(),
    )


def sample(
    target: ScheduleTarget,
    count: int,
    rng: random.Random,
    rounds: int,
    progress: TellProgress = silent,
) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of random schedules; measured side by side."""
    groups, ops = target.problem.groups, target.problem.group_ops
    drawn = [random_stages(target.block, rng, groups, ops) for _ in range(count)]
    candidates = [as_candidate(target, stages) for stages in drawn]
    timers = {}
    for place, candidate in enumerate(candidates):
        step = target.step(candidate)
        assert step is not None, "only a device that is here runs schedules"
        timers[str(place)] = target.timed(step)
        progress("random schedules", (place + 1) / count / 2, None)
    measured = measure(timers, rounds, lambda f: progress("random schedules", 0.5 + f / 2, None))
    return [
        (candidate.predicted_seconds, statistics.median(measured[str(place)]))
        for place, candidate in enumerate(candidates)
    ]


def as_candidate(
    target: ScheduleTarget, stages: Sequence[OpSet], scheduler: str = RANDOM
) -> ScheduleCandidate:
    """Any stages, as they would run, each by its faster strategy, and what they are predicted to
    take."""
    own = []
    for stage, timing in zip(stages, target.problem.timer(stages), strict=True):
        groups = tuple(tuple(members(group)) for group in groups_of(target.block, stage))
        if timing.merged:
            groups = (tuple(kernel for group in groups for kernel in group),)
        own.append(KernelStage(groups, timing.seconds, timing.merged))
    schedule = SchedulerResult(sum(stage.seconds for stage in own), tuple(own))
    total = target.predicted(scheduler, schedule)
    return ScheduleCandidate(scheduler, tuple(own), target.streams(own), total)


def check_equal(target: ScheduleTarget, steps: Mapping[str, Step]) -> None:
    """Raise `UnequalError` for a schedule whose outputs are not the sequential one's."""
    wanted = _outputs(steps[SEQUENTIAL](*target.inputs))
    for name, step in steps.items():
        for value, expected in zip(_outputs(step(*target.inputs)), wanted, strict=True):
            error = _error(value, expected)
            if not error <= _ROUND_OFF.get(value.dtype, 0.0):
                raise UnequalError(name, error)


def _outputs(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _error(value: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest finite value; what is not finite must be equal."""
    differs = (value != expected) & ~(value.isnan() & expected.isnan())
    if not differs.any():
        return 0.0
    if not value.is_floating_point():
        return 1.0
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return float((value - expected)[differs].abs().max()) / largest if largest else 1.0


def batch_of(step: Captured) -> int:
    """Of a network of the zoo, what its text says; else the rows of the first input."""
    if step.source.model.startswith("zoo:"):
        network, options = parse_zoo(step.source.model)
        return int({**network.defaults, **options}["batch"])
    shape = tuple(step.inputs[0].shape) if step.inputs else ()
    return shape[0] if shape else 1


def works_of(graph: Graph, kernels: Kernels) -> tuple[KernelWork, ...]:
    """Names, FLOPs and memory access of kernels; what stays within one is not moved."""
    ops: list[list[int]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel != FOLDED:
            ops[kernel].append(op)
    found = []
    for own in ops:
        inside = {t for op in own for t in graph.outputs_of(op)}
        read = {int(t) for op in own for t in graph.inputs_of(op)} - inside
        written = {
            t
            for t in inside
            if t in graph.outputs or any(int(r) not in own for r in graph.consumers_of(t))
        }
        moved = float(graph.tensor_bytes[sorted(read | written)].sum())
        names = tuple(graph.names[op] for op in own)
        flops = float(graph.flops[own].sum())
        found.append(KernelWork(names[0], names, flops, moved))
    return tuple(found)


# --- Several batch sizes and devices ---
#
# Schedules are found for each of them, then run at sizes and on devices they were not made for.

_ZOO = "zoo:"


def find_schedules(
    request: ScheduleRequest, *, cache: CostCache | None = None, progress: TellProgress = silent
) -> list[Schedules]:
    """The fastest stages of a network: for each device, at each batch size."""
    steps = [_step(request.model, batch, progress) for batch in request.batches or (0,)]
    found, targets = [], []
    for device in request.devices:
        of_device = [
            target_of(step, device, seed=request.seed, cache=cache, progress=progress)
            for step in steps
        ]
        results = [_found(target, request, progress) for target in of_device]
        targets.append(of_device)
        matrix = _over_batches(of_device, results, request.rounds)
        first = of_device[0]
        found.append(
            Schedules(_name(request), first.device, first.source, tuple(results), tuple(matrix))
        )
    across = _over_devices(targets, found)
    return [replace(one, specialisations=(*one.specialisations, *across)) for one in found]


@with_fields_of(ScheduleRequest)
def schedules(
    model: str | Captured,
    devices: Sequence[str] = (CPU,),
    *,
    cache: CostCache | None = None,
    progress: TellProgress = silent,
    **options: Any,
) -> list[Schedules]:
    """`find_schedules`, of a request with these fields of `ScheduleRequest`."""
    return find_schedules(
        ScheduleRequest(model, devices, **options), cache=cache, progress=progress
    )


def _name(request: ScheduleRequest) -> str:
    """The MODEL text, as results show it."""
    model = request.model
    return model if isinstance(model, str) else model.source.model


def with_batch(model: str, batch: int) -> str:
    """MODEL at another batch size; 0: as it is. Raises `UsageError` for one not of the zoo."""
    if not batch:
        return model
    if not model.startswith(_ZOO):
        raise UsageError("batch", f"only networks of the zoo change their batch, not {model!r}")
    name, _, options = model.partition("?")
    kept = [o for o in options.split("&") if o and not o.startswith("batch=")]
    return f"{name}?{'&'.join([*kept, f'batch={batch}'])}"


def _step(model: str | Captured, batch: int, progress: TellProgress) -> Captured:
    """The step that MODEL names, at a batch size; 0: as it is."""
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


def _found(target: ScheduleTarget, request: ScheduleRequest, progress: TellProgress) -> Scheduled:
    found, step = find(target, request.schedulers, rounds=request.rounds, progress=progress)
    if request.sampled and step is not None:
        rng = random.Random(request.seed)
        drawn = sample(target, request.sampled, rng, request.rounds, progress)
        found = replace(found, sampled=tuple(drawn))
    return found


def _over_batches(
    targets: Sequence[ScheduleTarget], results: Sequence[Scheduled], rounds: int
) -> list[Specialisation]:
    """Each batch size by the schedules made for each; measured where the device is here."""
    if len(targets) < 2 or len({target.block for target in targets}) > 1:
        return []
    names = tuple(f"batch {batch_of(target.captured)}" for target in targets)
    rows = [_row(target, results, rounds) for target in targets]
    return [Specialisation("batch sizes", names, names, tuple(rows))]


def _row(target: ScheduleTarget, results: Sequence[Scheduled], rounds: int) -> tuple[float, ...]:
    steps = [target.step(reseen(target, result.best)) for result in results]
    running = [step for step in steps if step is not None]
    if len(running) < len(steps):
        return tuple(reseen(target, result.best).predicted_seconds for result in results)
    timers = {str(i): target.timed(step) for i, step in enumerate(running)}
    seconds = measure(timers, rounds)
    return tuple(statistics.median(seconds[str(i)]) for i in range(len(running)))


def _over_devices(
    targets: Sequence[Sequence[ScheduleTarget]], found: Sequence[Schedules]
) -> list[Specialisation]:
    """Per batch size each device by the schedules made for each, as predicted."""
    if len(found) < 2:
        return []
    names = tuple(one.device for one in found)
    made = []
    for place in range(len(found[0].results)):
        seconds: dict[tuple[int, int], float] = {}
        for row, column in product(range(len(found)), repeat=2):
            best = found[column].results[place].best
            seconds[row, column] = reseen(targets[row][place], best).predicted_seconds
        table = tuple(tuple(seconds[r, c] for c in range(len(found))) for r in range(len(found)))
        title = f"devices at batch {found[0].results[place].batch}, predicted"
        made.append(Specialisation(title, names, names, table))
    return made
