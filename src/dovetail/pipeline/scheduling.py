"""Finds the fastest stages of a captured inference step on one device.

step ──► kernels ──► stage costs ──► schedules ──► checked, run, measured side by side ──► chosen
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.costs import CostCache
from dovetail.errors import UnequalError, UsageError
from dovetail.executors.stages.preparing import PreparedKernels, prepare
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
from dovetail.runtime.timers import clock, race
from dovetail.runtime.torch_versions import pytree
from dovetail.schedulers.results import (
    SEQUENTIAL,
    KernelWork,
    ScheduleCandidate,
    Scheduled,
    Schedules,
    SearchEffort,
)

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
    prepared = prepared_kernels(step, kernels)
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


def prepared_kernels(step: Captured, kernels: Kernels) -> PreparedKernels:
    """The step's kernels as they are measured: those of a network with convolutions channels
    last."""
    return prepare(step, kernels, channels_last=CONVOLUTION in step.graph.kinds)


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


@with_fields_of(ScheduleRequest, skip=("model", "devices", "batches"))
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
    chosen, seconds = race(
        SEQUENTIAL, timers, rounds, lambda done: progress("measuring", done, None)
    )
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
    works = []
    for kernel_ops in ops_of_kernels(kernels):
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


def ops_of_kernels(kernels: Kernels) -> list[list[int]]:
    """[kernels] the ops of each."""
    ops: list[list[int]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel != FOLDED:
            ops[kernel].append(op)
    return ops


# --- Several batch sizes and devices ---


def find_schedules(
    request: ScheduleRequest, *, cache: CostCache | None = None, progress: TellProgress = silent
) -> list[Schedules]:
    """The fastest stages of a network: for each device, at each batch size."""
    steps = [step_of(request.model, batch, progress) for batch in request.batches or (0,)]
    return [
        schedules_on(device, steps, request, cache=cache, progress=progress)[0]
        for device in request.devices
    ]


def schedules_on(
    device: str,
    steps: Sequence[Captured],
    request: ScheduleRequest,
    *,
    cache: CostCache | None = None,
    progress: TellProgress = silent,
) -> tuple[Schedules, list[ScheduleTarget]]:
    """The fastest stages of steps, one for each batch size, on one device, and the steps as it
    runs them."""
    targets = [
        target_of(step, device, seed=request.seed, cache=cache, progress=progress) for step in steps
    ]
    results = [
        find(target, request.schedulers, rounds=request.rounds, progress=progress)[0]
        for target in targets
    ]
    model = request.model if isinstance(request.model, str) else request.model.source.model
    return Schedules(model, targets[0].device, targets[0].source, tuple(results)), targets


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


def with_batch(model: str, batch: int) -> str:
    """The MODEL text with another batch size, or as it is for 0. Raises `UsageError` for a network
    that is not of the zoo."""
    if not batch:
        return model
    if not model.startswith("zoo:"):
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
