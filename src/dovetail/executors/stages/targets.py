"""Joins a captured inference step with one device: stage costs there, and schedules that run there.

this machine's cores      costs are measured; schedules run
a GPU of this machine     costs are measured, each stage as a CUDA graph; schedules run
a device by its preset    costs are analytic; schedules do not run
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dovetail.costs import CostCache
from dovetail.costs.stages import AnalyticStages, kernel_works, stage_rates
from dovetail.executors.stages.cpu import CpuStep, Functions
from dovetail.executors.stages.cuda import CudaNetwork, StageClock
from dovetail.executors.stages.issuing import Group, streams_of_stages
from dovetail.executors.stages.measuring import CpuStages, CudaStages, Progress
from dovetail.executors.stages.memory import plan_memory
from dovetail.executors.stages.merging import merge_keys, merged_function
from dovetail.executors.stages.phases import SchedulePhase, joined, phases_of, predicted, whole
from dovetail.executors.stages.preparing import PlacedKernels, PreparedKernels, place
from dovetail.frontends import Captured
from dovetail.graph.kernels import Kernels
from dovetail.machine import Device
from dovetail.runtime.timers import seconds_of
from dovetail.schedulers.blocks import narrowed
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.ios import GROUPS
from dovetail.schedulers.merge import can_merge
from dovetail.schedulers.records import KernelBlock, OpSet, StageTiming, groups_of, members
from dovetail.schedulers.results import SEQUENTIAL, KernelStage, ScheduleCandidate
from dovetail.schedulers.scheduling import MOST_STATES, SchedulerResult, StageProblem
from dovetail.schedulers.timing import OnceTimer, block_of, signatures_of

ONE_THREAD = "one thread"
"""The candidate that runs all kernels in order on one thread."""
WAIT_SECONDS = 5e-6
"""Seconds from an op's end to the next op on another CPU thread, as measured."""
CUDA_STREAMS = 8
"""A schedule on a GPU uses at most this many streams."""
EVENT_SECONDS = 2e-6
"""Seconds from an op's end to the next op on another stream of a CUDA graph, an estimate."""


class StageCosts(Protocol):
    """The effort of finding stage costs so far, with the fields of `MeasuredStages`."""

    asked: int
    timed: int
    seconds: float


@dataclass(eq=False)
class ScheduleTarget:
    """A step's kernels on one device.

    source            where costs come from: "measured" or "analytic"
    inputs            example inputs on the device, which steps are timed with
    streams_at_once   a schedule has at most so many streams; on cores, the threads
    """

    captured: Captured
    kernels: Kernels
    block: KernelBlock
    device: str
    source: str
    inputs: tuple[Tensor, ...]
    costs: StageCosts
    problem: StageProblem
    streams_at_once: int

    def streams(self, stages: Sequence[KernelStage]) -> Streams:
        """The streams that run these stages."""
        groups = [stage.groups for stage in stages]
        return streams_of_stages(self.block, groups, self.streams_at_once)

    def predicted(self, scheduler: str, schedule: SchedulerResult) -> float:
        """Predicted seconds of a scheduler's schedule, from the costs of its stages."""
        return schedule.seconds

    def program(self, candidate: ScheduleCandidate) -> Hashable:
        """A key that is equal for schedules that would run in the same way."""
        return candidate.streams

    def step(self, candidate: ScheduleCandidate) -> Callable[..., Any] | None:
        """A function step(*inputs) that runs the schedule; None if the device is not here.

        Raises `RaceError` for a schedule in which kernels could race.
        """
        return None

    def timed(self, step: Callable[..., Any]) -> Callable[[], float]:
        """A function that runs the step once and returns how many seconds it took."""
        return partial(seconds_of, partial(step, *self.inputs))

    def peak_bytes(self, candidate: ScheduleCandidate) -> int:
        """Bytes that kernels' outputs take in a static memory plan for the candidate's streams."""
        graph = self.captured.graph
        of_op = self.kernels.of_op.tolist()
        # [kernels] base tensor -> its bytes: tensors that share storage count once.
        sizes: list[dict[int, int]] = [{} for _ in range(self.kernels.count)]
        outputs = 0
        for op, kernel in enumerate(of_op):
            for tensor in graph.outputs_of(op) if kernel >= 0 else ():
                returned = tensor in graph.outputs
                outputs |= returned << kernel
                # A view that leaves a kernel keeps all of the tensor that it is a view of.
                base = tensor
                while graph.bases[base] >= 0:
                    base = int(graph.bases[base])
                made_here = of_op[graph.producers[base]] == kernel
                readers = {of_op[reader] for reader in graph.consumers_of(tensor)}
                if made_here and (returned or readers - {kernel}):
                    sizes[kernel][base] = int(graph.tensor_bytes[base])
        needed = [list(own.values()) for own in sizes]
        return plan_memory(self.block, candidate.streams, needed, outputs).total_bytes

    def extras(self) -> list[ScheduleCandidate]:
        """Further candidates that no scheduler finds; they are measured beside the others."""
        return []

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The kernels of each part of the block that `dos` searches separately."""
        return tuple(part.ops for part in narrowed(self.block, MOST_STATES["dos"]).parts)

    def block_seconds(self, schedule: SchedulerResult) -> tuple[float, ...]:
        """Predicted seconds of each of `blocks`; () if the schedule was not made in these blocks.

        A schedule that runs kernels one by one can be summed over any blocks.
        """
        if schedule.blocks == self.blocks:
            return schedule.block_seconds
        if schedule.stages and all(len(stage.kernels) == 1 for stage in schedule.stages):
            seconds = {stage.kernels[0]: stage.seconds for stage in schedule.stages}
            return tuple(sum(seconds[kernel] for kernel in own) for own in self.blocks)
        return ()


@dataclass(eq=False)
class CpuTarget(ScheduleTarget):
    """A step on this process's cores."""

    functions: Functions
    stages: CpuStages

    def streams(self, stages: Sequence[KernelStage]) -> Streams:
        return joined(self.phases(stages))

    def phases(self, stages: Sequence[KernelStage]) -> list[SchedulePhase]:
        """The phases that run these stages."""
        return phases_of(stages, self.stages.alone, self.streams_at_once)

    def predicted(self, scheduler: str, schedule: SchedulerResult) -> float:
        if not schedule.stages:
            return schedule.seconds
        if scheduler == SEQUENTIAL:
            return sum(self.stages.alone.all_threads)
        return predicted(self.phases(schedule.stages), schedule.stages, self.stages.alone)

    def program(
        self, candidate: ScheduleCandidate
    ) -> tuple[tuple[SchedulePhase, ...], tuple[Group, ...]]:
        """(phases, groups of merged kernels) of the candidate."""
        if candidate.scheduler == SEQUENTIAL:
            phases = whole(self.kernels.count)
        elif candidate.stages:
            phases = self.phases(candidate.stages)
        else:
            phases = [SchedulePhase(tuple(range(self.kernels.count)), candidate.streams)]
        return tuple(phases), _merged(candidate)

    def step(self, candidate: ScheduleCandidate) -> CpuStep:
        phases, merges = self.program(candidate)
        functions = self.functions.merging(merges) if merges else self.functions
        return CpuStep(functions.prepared, self.block, phases, functions, self.streams_at_once)

    def extras(self) -> list[ScheduleCandidate]:
        if self.streams_at_once == 1:
            return []
        order = Streams((tuple(range(self.kernels.count)),), ())
        return [ScheduleCandidate(ONE_THREAD, (), order, sum(self.stages.alone.one_thread))]


@dataclass(eq=False)
class CudaTarget(ScheduleTarget):
    """A step on a GPU of this machine, where schedules run as CUDA graphs."""

    placed: PlacedKernels

    def program(self, candidate: ScheduleCandidate) -> tuple[Streams, tuple[Group, ...]]:
        """(streams, groups of merged kernels) of the candidate."""
        if candidate.scheduler == SEQUENTIAL:
            return Streams((tuple(range(self.kernels.count)),), ()), ()
        return candidate.streams, _merged(candidate)

    def step(self, candidate: ScheduleCandidate) -> CudaNetwork:
        streams, merges = self.program(candidate)
        merged = {group: merged_function(self.placed.prepared, group)[0] for group in merges}
        return CudaNetwork(self.placed, streams, merged=merged)

    def timed(self, step: Callable[..., Any]) -> Callable[[], float]:
        assert isinstance(step, CudaNetwork)
        return lambda: step.time(1, 0)[0]


@dataclass(eq=False)
class AnalyticTarget(ScheduleTarget):
    """A step on a device that is known by its data sheet only."""

    least_seconds: float

    def predicted(self, scheduler: str, schedule: SchedulerResult) -> float:
        """Predicted seconds; for a schedule of streams without stages, a lower bound.

        Such a schedule is computed as if each stream had the device to itself. So the prediction is
        at least the time that all work takes on the whole device.
        """
        return schedule.seconds if schedule.stages else max(schedule.seconds, self.least_seconds)


def cpu_target(
    step: Captured,
    kernels: Kernels,
    prepared: PreparedKernels,
    inputs: tuple[Tensor, ...],
    device: Device,
    cache: CostCache,
    progress: Progress,
) -> CpuTarget:
    """The step on this process's cores. Kernels that are not in the cache are timed now."""
    block, signatures, keys = _described(step, kernels, prepared)
    functions = Functions(prepared, example_of(prepared, inputs))
    threads = len(device.cores)
    stages = CpuStages(
        functions,
        block,
        signatures,
        keys,
        cache,
        device=device.model,
        threads=threads,
        progress=progress,
    )
    problem = StageProblem(
        block, signatures, stages.timer, stages.bounded, keys, threads, stages.alone.one_thread,
        WAIT_SECONDS, groups=max(2, min(GROUPS, threads)),
    )  # fmt: skip
    name = f"{device.model}, {threads} threads"
    return CpuTarget(
        step, kernels, block, name, "measured", inputs, stages, problem, threads, functions, stages
    )


def cuda_target(
    step: Captured,
    kernels: Kernels,
    prepared: PreparedKernels,
    inputs: tuple[Tensor, ...],
    device: str,
    cache: CostCache,
    progress: Progress,
) -> CudaTarget:
    """The step on a GPU. Raises `UsageError` if there is none."""
    placed = place(prepared, inputs, device)
    block, signatures, keys = _described(step, kernels, prepared)
    name = torch.cuda.get_device_name(device)
    cudnn: Any = torch.backends.cudnn
    versions = f"{name} | CUDA {torch.version.cuda} | cuDNN {cudnn.version()}"
    stages = CudaStages(
        StageClock(placed, streams=CUDA_STREAMS),
        placed.prepared,
        signatures,
        keys,
        cache,
        device=versions,
        progress=progress,
    )
    problem = StageProblem(
        block, signatures, stages.timer, stages.bounded, keys, CUDA_STREAMS, stages.alone,
        EVENT_SECONDS,
    )  # fmt: skip
    given = tuple(placed.inputs[t] for t in prepared.inputs)
    return CudaTarget(
        step, kernels, block, name, "measured", given, stages, problem, CUDA_STREAMS, placed
    )


def analytic_target(
    step: Captured, kernels: Kernels, prepared: PreparedKernels, device: Device
) -> AnalyticTarget:
    """The step on a device by its data sheet.

    Raises `MachineError` for a device whose rates are not known.
    """
    block, signatures, keys = _described(step, kernels, prepared)
    works = kernel_works(step.graph, kernels)
    model = AnalyticStages(works, stage_rates(device))
    streams = max(1, len(device.cores)) if device.kind == "cpu" else CUDA_STREAMS

    def time(stages: Sequence[OpSet]) -> list[StageTiming]:
        """Seconds of stages, run at the same time or merged, whichever is faster.

        Only kernels that are one convolution each, and so have a window, count as mergeable: the
        analytic model has no rule for merged products.
        """
        timings = []
        for stage in stages:
            groups = [list(members(group)) for group in groups_of(block, stage)]
            timing = StageTiming(model.seconds(groups))
            own = [kernel for group in groups for kernel in group]
            if can_merge(keys, own) and all(model.works[kernel].window for kernel in own):
                merged = model.seconds(groups, merged=True)
                if merged < timing.seconds:
                    timing = StageTiming(merged, merged=True)
            timings.append(timing)
        return timings

    once = _Counted()
    timer = once.of(block, signatures, time, keys)
    seconds = [model.seconds([[kernel]]) for kernel in range(kernels.count)]
    problem = StageProblem(block, signatures, timer, timer, keys, streams, seconds, EVENT_SECONDS)
    return AnalyticTarget(
        step, kernels, block, device.model, "analytic", (), once, problem, streams,
        model.least_seconds(),
    )  # fmt: skip


def _merged(candidate: ScheduleCandidate) -> tuple[Group, ...]:
    """The groups of kernels that run as one."""
    return tuple(stage.groups[0] for stage in candidate.stages if stage.merged)


class _Counted(OnceTimer):
    """Analytic costs take no seconds of their own, because computing them is part of the search."""

    seconds = 0.0


def _described(
    step: Captured, kernels: Kernels, prepared: PreparedKernels
) -> tuple[KernelBlock, list[str], list[Hashable | None]]:
    """(which kernel waits for which, signatures, merge keys) of a step's kernels."""
    graph = step.graph
    return (
        block_of(graph, kernels),
        signatures_of(graph, kernels),
        merge_keys(graph, kernels, prepared),
    )


def example_of(prepared: PreparedKernels, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Tensor -> its value in a step with these inputs; the step is run for it, kernel by kernel."""
    values = dict(zip(prepared.inputs, map(prepared.laid_out, inputs), strict=True))
    with torch.inference_mode():
        for number in range(len(prepared.kernels)):
            run, takes, returns = prepared.function([number])
            values |= zip(returns, run(*(values[t] for t in takes)), strict=True)
    return values
