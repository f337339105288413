"""Analytic costs of stages: kernels that share the lanes and the memory of one device.

A launch (`launches`) takes, undisturbed,

    start + max(flops / (rate x occupancy), moved bytes / bandwidth)

the roofline of `analytic` at the share of the device that its parallelism fills. While it runs it
wants that occupancy, and the share of the bandwidth that it uses; a kernel wants the average over
its launches. Groups run at the same time. Where their wants add up to more than the device, all
slow down alike (processor sharing), so that groups keep step: with A(tau) and B(tau) the
occupancies and the shares of bandwidth that those still running want, after each has done what
takes tau seconds undisturbed, a stage of several groups takes

    join + integral over tau of  max(1, A(tau), B(tau))

A merged stage is one launch of the summed flops, each padded to the largest window, that reads the
shared input once. Left out: caches, waves of blocks, clock rates, how libraries choose algorithms.
`benchmarks/stages/analytic.md` says how far off that is.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from dovetail.errors import MachineError
from dovetail.graph import Graph
from dovetail.graph.kernels import CONVOLUTION, FOLDED, NORMALISATIONS, PRODUCTS, Kernels
from dovetail.machine import Device

# The work of each kernel of a captured inference step: arithmetic, memory traffic, parallelism.
#
# A kernel is one or more *launches* in order. A convolution or a product is one, with the
# normalisation and activation after it; what pointwise work stands before it is one:
#
#     mul, add, relu | convolution 3x3, depthwise | convolution 1x1, normalisation, relu
#
# A tensor that one launch writes and another reads is traffic, within a kernel too; a tensor that
# stays within a launch is none. Views move nothing. Folded values (weights) are read by the launch
# that needs them; a normalisation that goes into the convolution before it costs nothing.


_HEADS = PRODUCTS | {CONVOLUTION}


@dataclass(frozen=True)
class Launch:
    """elements: what runs in parallel. Of a convolution, its outputs; of other work, its outputs or
    inputs, whichever are more, for sums over many inputs are split."""

    flops: float
    moved_bytes: float
    elements: float


@dataclass(frozen=True)
class StageWork:
    """The work of one kernel.

    launches       one after another
    window         kernel size of the one convolution that it is; () for what does not merge
    image_bytes    of what it convolves: kernels that merge read it once
    weight_bytes   what grows with the window
    """

    launches: tuple[Launch, ...]
    window: tuple[int, ...] = ()
    image_bytes: float = 0.0
    weight_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(launch.flops for launch in self.launches)

    @property
    def moved_bytes(self) -> float:
        return sum(launch.moved_bytes for launch in self.launches)


def kernel_works(graph: Graph, kernels: Kernels) -> list[StageWork]:
    """[kernels] what each does. O(ops + reads)."""
    parts: list[list[list[int]]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel == FOLDED:
            continue
        launches = parts[kernel]
        if not launches or (graph.kinds[op] in _HEADS and not _moves_nothing(graph, launches[-1])):
            launches.append([])
        launches[-1].append(op)
    return [_work(graph, launches) for launches in parts]


def _work(graph: Graph, parts: list[list[int]]) -> StageWork:
    launches = tuple(_launch(graph, ops) for ops in parts if not _moves_nothing(graph, ops))
    heads = [op for ops in parts for op in ops if graph.kinds[op] == CONVOLUTION]
    if len(launches) != 1 or len(heads) != 1:
        return StageWork(launches)
    image, weight = (int(t) for t in graph.inputs_of(heads[0])[:2])
    return StageWork(
        launches,
        graph.shapes[weight][2:],
        float(graph.tensor_bytes[image]),
        float(graph.tensor_bytes[weight]),
    )


def _launch(graph: Graph, ops: list[int]) -> Launch:
    members = set(ops)
    folded = {op for op in ops[1:] if graph.kinds[op] in NORMALISATIONS and _has_head(graph, ops)}
    flops = sum(float(graph.flops[op]) for op in members - folded)
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for op in sorted(members - folded):
        for t in graph.inputs_of(op):
            if int(graph.producers[t]) not in members:
                _largest(read, graph, int(t))
    for op in ops:
        for t in graph.outputs_of(op):
            if graph.bases[t] < 0 and _leaves(graph, members, int(graph.storages[t]), t):
                _largest(written, graph, t)
    elements = [float(math.prod(graph.shapes[t])) for op in ops for t in graph.outputs_of(op)]
    if not any(graph.kinds[op] == CONVOLUTION for op in ops):
        elements += [float(math.prod(graph.shapes[t])) for op in ops for t in graph.inputs_of(op)]
    moved = float(sum(read.values()) + sum(written.values()))
    return Launch(flops, moved, max(elements, default=1.0))


def _largest(largest: dict[int, int], graph: Graph, tensor: int) -> None:
    """A storage moves once, as far as any of its tensors reaches."""
    storage = int(graph.storages[tensor])
    largest[storage] = max(largest.get(storage, 0), int(graph.tensor_bytes[tensor]))


def _leaves(graph: Graph, members: set[int], storage: int, tensor: int) -> bool:
    """Is a tensor, or a view of it within the launch, read elsewhere or returned?"""
    aliases = [
        t for op in members for t in graph.outputs_of(op) if int(graph.storages[t]) == storage
    ]
    return any(
        t in graph.outputs or any(int(reader) not in members for reader in graph.consumers_of(t))
        for t in {tensor, *aliases}
    )


def _has_head(graph: Graph, ops: list[int]) -> bool:
    return any(graph.kinds[op] in _HEADS for op in ops)


def _moves_nothing(graph: Graph, ops: list[int]) -> bool:
    """All views?"""
    return all(graph.bases[t] >= 0 for op in ops for t in graph.outputs_of(op))


FITTED = Path(__file__).with_name("stages.json")
"""Parameters that `benchmarks/stages/fit_analytic.py` fitted, and the measurements behind them."""
RESIDENT_THREADS = {
    "k80": 13 * 2048, "p100": 56 * 2048, "v100": 80 * 2048, "titan_xp": 30 * 2048,
    "2080ti": 68 * 1024, "a100": 108 * 2048, "h100": 132 * 2048, "h200": 132 * 2048,
}  # fmt: skip
"""Device model -> the threads it holds, multiprocessors x threads of each: the vendor's tables."""


class Profile(NamedTuple):
    """seconds undisturbed; meanwhile wanted, of 1: occupancy and share of the bandwidth."""

    seconds: float
    occupancy: float
    bandwidth: float


class StageRates(Protocol):
    """The rates at which a device runs launches. join_seconds: of a stage of several groups, apart
    from them."""

    @property
    def join_seconds(self) -> float: ...

    def alone(self, launch: Launch) -> Profile: ...

    def beside(self, launch: Launch) -> Profile:
        """In a stage of several groups."""


@dataclass(frozen=True)
class GpuRates:
    """flops_per_second and bandwidth are reached by a launch of `full_elements` or more; by one of
    fewer, flops in proportion. launch_seconds: from one launch of a group to the next."""

    flops_per_second: float
    bandwidth_bytes_per_second: float
    full_elements: float
    launch_seconds: float
    join_seconds: float

    def alone(self, launch: Launch) -> Profile:
        occupancy = min(1.0, launch.elements / self.full_elements)
        arithmetic = launch.flops / (self.flops_per_second * occupancy)
        memory = launch.moved_bytes / self.bandwidth_bytes_per_second
        return _profile(self.launch_seconds, arithmetic, memory, occupancy)

    def beside(self, launch: Launch) -> Profile:
        return self.alone(launch)


@dataclass(frozen=True)
class CpuRates:
    """Lanes are cores, each with its share of flops_per_second.

    A launch by itself is split over as many as have `lane_elements` each, and `efficiency` of them
    is left where that is more than one; beside other groups a launch has one core.
    """

    flops_per_second: float
    bandwidth_bytes_per_second: float
    lanes: int
    efficiency: float = 0.9
    lane_elements: float = 16384.0
    launch_seconds: float = 1e-6
    join_seconds: float = 20e-6

    def alone(self, launch: Launch) -> Profile:
        lanes = int(max(1, min(self.lanes, launch.elements // self.lane_elements)))
        return self._on(launch, lanes, lanes * self.efficiency if lanes > 1 else 1.0)

    def beside(self, launch: Launch) -> Profile:
        return self._on(launch, 1, 1.0)

    def _on(self, launch: Launch, lanes: int, speed: float) -> Profile:
        arithmetic = launch.flops / (self.flops_per_second / self.lanes * speed)
        memory = launch.moved_bytes / self.bandwidth_bytes_per_second
        return _profile(self.launch_seconds, arithmetic, memory, lanes / self.lanes)


def _profile(start: float, arithmetic: float, memory: float, occupancy: float) -> Profile:
    busy = max(arithmetic, memory)
    if start + busy == 0:
        return Profile(0.0, 0.0, 0.0)
    share = 1 / (start + busy)
    return Profile(start + busy, occupancy * busy * share, memory * share)


class AnalyticStages:
    """Seconds of stages of the kernels whose works these are, on a device of such rates."""

    def __init__(self, works: Sequence[StageWork], rates: StageRates) -> None:
        self.works, self.rates = works, rates
        self._alone = [_mean([rates.alone(x) for x in work.launches]).seconds for work in works]
        self._beside = [_mean([rates.beside(x) for x in work.launches]) for work in works]

    def seconds(self, groups: Sequence[Sequence[int]], merged: bool = False) -> float:
        """Groups at the same time, the kernels of each in order; `merged`: all as one launch.

        O(kernels log kernels). Raises ValueError for a merge of what does not merge.
        """
        if merged:
            launch = merged_launch([self.works[kernel] for group in groups for kernel in group])
            return self.rates.alone(launch).seconds
        if len(groups) == 1:
            return sum([self._alone[kernel] for kernel in groups[0]])
        return self.rates.join_seconds + self._together(groups)

    def least_seconds(self) -> float:
        """The least seconds that all kernels can take, however they run side by side: all share the
        device."""
        return sum(
            profile.seconds * max(profile.occupancy, profile.bandwidth) for profile in self._beside
        )

    def _together(self, groups: Sequence[Sequence[int]]) -> float:
        """The integral. Between two events the wants are constant."""
        events = []
        for group in groups:
            tau = 0.0
            for kernel in group:
                seconds, occupancy, bandwidth = self._beside[kernel]
                events.append((tau, occupancy, bandwidth))
                tau += seconds
                events.append((tau, -occupancy, -bandwidth))
        events.sort()
        total = before = occupancies = bandwidths = 0.0
        for tau, occupancy, bandwidth in events:
            if tau > before:
                wanted = occupancies if occupancies > bandwidths else bandwidths
                total += (tau - before) * wanted if wanted > 1.0 else tau - before
                before = tau
            occupancies += occupancy
            bandwidths += bandwidth
        return total


def stage_rates(device: Device, *, dtype: str = "float32", lanes: int = 0) -> StageRates:
    """Rates of a device. Of a GPU, as fitted to a V100: a share of its peak, and elements in
    proportion to the threads that it holds. `lanes`: threads of a GPU, cores of a CPU; 0: as known.

    Raises `MachineError` where lanes or the rate of that dtype are not known.
    """
    if dtype not in device.flops_per_second:
        raise MachineError(
            f"device {device.name!r} has no flops_per_second for {dtype}; add it to the machine"
        )
    lanes = lanes or (
        RESIDENT_THREADS.get(device.model, 0) if device.kind == "gpu" else len(device.cores)
    )
    if lanes < 1:
        raise MachineError(
            f"device {device.name!r}: how many {'threads' if device.kind == 'gpu' else 'cores'} "
            f"a {device.model} runs at once is not known; give it as lanes"
        )
    peak, bandwidth = device.flops_per_second[dtype], device.bandwidth_bytes_per_second
    if device.kind == "cpu":
        share = device.efficiency(CONVOLUTION)
        return CpuRates(peak * share, bandwidth, lanes, launch_seconds=device.op_overhead_seconds)
    return gpu_rates(peak, bandwidth, lanes, fitted_parameters())


def gpu_rates(
    peak_flops_per_second: float,
    bandwidth_bytes_per_second: float,
    resident_threads: int,
    parameters: Mapping[str, float],
) -> GpuRates:
    """Rates of a GPU by its data sheet and the four fitted parameters."""
    return GpuRates(
        parameters["peak_share"] * peak_flops_per_second,
        bandwidth_bytes_per_second,
        parameters["full_share"] * resident_threads,
        parameters["launch_seconds"],
        parameters["join_seconds"],
    )


@cache
def fitted_parameters() -> dict[str, float]:
    """peak_share    of the peak rate, reached by a launch that fills the device
    full_share       elements that fill it, by the threads that it holds
    launch_seconds, join_seconds"""
    parameters: dict[str, float] = json.loads(FITTED.read_text(encoding="utf-8"))["parameters"]
    return parameters


def _mean(profiles: Sequence[Profile]) -> Profile:
    """The profile of launches one after another: their time in all, and their mean use."""
    seconds = sum(p.seconds for p in profiles)
    if seconds == 0:
        return Profile(0.0, 0.0, 0.0)
    return Profile(
        seconds,
        sum(p.occupancy * p.seconds for p in profiles) / seconds,
        sum(p.bandwidth * p.seconds for p in profiles) / seconds,
    )


def merged_launch(works: Sequence[StageWork]) -> Launch:
    """One convolution in place of several of one input. Raises ValueError for other kernels."""
    if not works or any(not work.window for work in works):
        raise ValueError("only kernels that are one convolution each merge")
    if len({(len(work.window), work.image_bytes) for work in works}) > 1:
        raise ValueError("kernels that merge read the same input")
    window = math.prod(map(max, *(w.window for w in works))) if len(works) > 1 else 0
    flops = moved = elements = 0.0
    for work in works:
        padded = window / math.prod(work.window) if window else 1.0
        flops += work.flops * padded
        moved += work.moved_bytes - work.image_bytes + work.weight_bytes * (padded - 1)
        elements += work.launches[0].elements
    return Launch(flops, moved + works[0].image_bytes, elements)
