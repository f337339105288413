"""Computes analytic costs of stages, whose kernels share the lanes and the memory of one device.

A launch (`Launch`) that runs alone takes

    start + max(flops / (rate x occupancy), moved bytes / bandwidth)

This is the roofline of `analytic` at the share of the device that the launch's parallelism fills.
While it runs, the launch wants this occupancy, and the share of the bandwidth that it uses. A
kernel wants the average over its launches. The groups of a stage run at the same time. If their
wants add up to more than the device has, all slow down alike (processor sharing). So after tau
seconds of undisturbed time every group has done the same amount of its own work. Let A(tau) and
B(tau) be the sums of the occupancies and of the shares of bandwidth that groups want there. A stage
of several groups takes

    join + integral over tau of  max(1, A(tau), B(tau))

A merged stage is one launch. It has the sum of all flops, each padded to the largest window, and
reads the shared input once. The model leaves out caches, waves of blocks, clock rates, and how
libraries choose algorithms. `benchmarks/stages/analytic.md` says how far off it is.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from dovetail.errors import MachineError
from dovetail.graph import Graph
from dovetail.graph.kernels import CONVOLUTION, FOLDED, NORMALISATIONS, PRODUCTS, Kernels
from dovetail.machine import Device, chip_of_driver

# The work of each kernel of a captured inference step: arithmetic, memory traffic, parallelism.
#
# A kernel is one or more *launches* in order. A convolution or product is one launch together with
# the normalisation and activation after it. Pointwise work before it is a launch of its own:
#
#     mul, add, relu | convolution 3x3, depthwise | convolution 1x1, normalisation, relu
#
# A tensor that one launch writes and another reads is traffic, even within a kernel. A tensor that
# stays within a launch is not. Views move nothing. A launch reads the folded values (weights) that
# it needs. A normalisation that is folded into the convolution before it costs nothing.


_HEADS = PRODUCTS | {CONVOLUTION}


@dataclass(frozen=True)
class Launch:
    """The work of one launch.

    elements   the number of elements that run in parallel: of a convolution its outputs, of other
               work its outputs or inputs, whichever are more, because sums over many inputs are
               split
    """

    flops: float
    moved_bytes: float
    elements: float


@dataclass(frozen=True)
class StageWork:
    """The work of one kernel.

    launches       its launches, which run one after another
    window         the window's size, if the kernel is a single convolution; (): it cannot be merged
    image_bytes    bytes of the convolution's input, which kernels that merge read once
    weight_bytes   bytes of the convolution's weight, which grow with the window
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
    """Return [kernels] the work of each. O(ops + reads)."""
    parts: list[list[list[int]]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel == FOLDED:
            continue
        launches = parts[kernel]
        if not launches or (graph.kinds[op] in _HEADS and not _moves_nothing(graph, launches[-1])):
            launches.append([])
        launches[-1].append(op)
    works = []
    for launches in parts:
        work = StageWork(
            tuple(_launch(graph, ops) for ops in launches if not _moves_nothing(graph, ops))
        )
        heads = [op for ops in launches for op in ops if graph.kinds[op] == CONVOLUTION]
        if len(work.launches) == len(heads) == 1:
            image, weight = (int(t) for t in graph.inputs_of(heads[0])[:2])
            work = replace(
                work,
                window=graph.shapes[weight][2:],
                image_bytes=float(graph.tensor_bytes[image]),
                weight_bytes=float(graph.tensor_bytes[weight]),
            )
        works.append(work)
    return works


def _launch(graph: Graph, ops: list[int]) -> Launch:
    members = set(ops)
    has_head = any(graph.kinds[op] in _HEADS for op in ops)
    folded = {op for op in ops[1:] if has_head and graph.kinds[op] in NORMALISATIONS}
    flops = sum(float(graph.flops[op]) for op in members - folded)
    # A storage moves once, with its largest tensor.
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for op in sorted(members - folded):
        for t in graph.inputs_of(op):
            if int(graph.producers[t]) not in members:
                storage = int(graph.storages[t])
                read[storage] = max(read.get(storage, 0), int(graph.tensor_bytes[t]))
    for op in ops:
        for t in graph.outputs_of(op):
            if graph.bases[t] >= 0:
                continue
            # Only a tensor moves that is read elsewhere or returned, or whose view is.
            storage = int(graph.storages[t])
            aliases = [
                u for o in members for u in graph.outputs_of(o) if int(graph.storages[u]) == storage
            ]
            if any(
                u in graph.outputs
                or any(int(reader) not in members for reader in graph.consumers_of(u))
                for u in {t, *aliases}
            ):
                written[storage] = max(written.get(storage, 0), int(graph.tensor_bytes[t]))
    elements = [float(math.prod(graph.shapes[t])) for op in ops for t in graph.outputs_of(op)]
    if not any(graph.kinds[op] == CONVOLUTION for op in ops):
        elements += [float(math.prod(graph.shapes[t])) for op in ops for t in graph.inputs_of(op)]
    moved = float(sum(read.values()) + sum(written.values()))
    return Launch(flops, moved, max(elements, default=1.0))


def _moves_nothing(graph: Graph, ops: list[int]) -> bool:
    """Return True if all outputs are views."""
    return all(graph.bases[t] >= 0 for op in ops for t in graph.outputs_of(op))


FITTED = Path(__file__).with_name("stages.json")
"""The file of the parameters that `benchmarks/stages/fit_analytic.py` fitted, and of the
measurements behind them."""


def resident_threads(device: Device) -> int:
    """The threads that a GPU holds: its multiprocessors x threads of each. Of one that is here by
    its driver, of another by its name; 0 if that is not known."""
    chip = device.chip or chip_of_driver(device.model)
    by_name = chip.multiprocessors * chip.threads if chip else 0
    if device.chip or not device.torch_device:
        return by_name
    # Imported here, because analytic costs need no torch.
    from dovetail.runtime.cuda import cuda_here

    cuda = cuda_here()
    if not cuda.is_available():
        return by_name
    card = cuda.get_device_properties(device.torch_device)
    return int(card.multi_processor_count * card.max_threads_per_multi_processor) or by_name


class Profile(NamedTuple):
    """The seconds of undisturbed work, and the shares of the device (0 to 1) that it wants."""

    seconds: float
    occupancy: float
    bandwidth: float


class StageRates(Protocol):
    """The rates at which a device runs launches.

    join_seconds   what a stage of several groups takes besides its groups
    """

    @property
    def join_seconds(self) -> float: ...

    def alone(self, launch: Launch) -> Profile: ...

    def beside(self, launch: Launch) -> Profile:
        """Return the launch's profile in a stage of several groups."""


@dataclass(frozen=True)
class GpuRates:
    """The rates of a GPU.

    A launch of `full_elements` or more reaches flops_per_second; a smaller one reaches its share of
    it in proportion. `launch_seconds` is the time from one launch of a group to the next.
    """

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
    """The rates of a CPU. Its lanes are cores, each with its share of flops_per_second.

    A launch by itself is split over as many cores as get `lane_elements` each. On more than one
    core it reaches `efficiency` of their rate. Beside other groups a launch has one core.
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
    """Return the profile of a launch; its wants are averaged over its seconds, start included."""
    busy = max(arithmetic, memory)
    if start + busy == 0:
        return Profile(0.0, 0.0, 0.0)
    share = 1 / (start + busy)
    return Profile(start + busy, occupancy * busy * share, memory * share)


class AnalyticStages:
    """Computes seconds of stages of kernels with these works, on a device with these rates."""

    def __init__(self, works: Sequence[StageWork], rates: StageRates) -> None:
        self.works, self.rates = works, rates
        self._alone = [_mean([rates.alone(x) for x in work.launches]).seconds for work in works]
        self._beside = [_mean([rates.beside(x) for x in work.launches]) for work in works]

    def seconds(self, groups: Sequence[Sequence[int]], merged: bool = False) -> float:
        """Return the seconds of groups that run at the same time, the kernels of each in order.

        merged   True: all kernels as one launch

        O(kernels log kernels). Raises ValueError for kernels that cannot be merged.
        """
        if merged:
            launch = merged_launch([self.works[kernel] for group in groups for kernel in group])
            return self.rates.alone(launch).seconds
        if len(groups) == 1:
            return sum([self._alone[kernel] for kernel in groups[0]])
        # The integral: between two events the wants are constant.
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
                demand = occupancies if occupancies > bandwidths else bandwidths
                total += (tau - before) * demand if demand > 1.0 else tau - before
                before = tau
            occupancies += occupancy
            bandwidths += bandwidth
        return self.rates.join_seconds + total

    def least_seconds(self) -> float:
        """Return the least seconds that all kernels can take together, however they run side by
        side, because all share the device."""
        return sum(
            profile.seconds * max(profile.occupancy, profile.bandwidth) for profile in self._beside
        )


def stage_rates(device: Device, *, dtype: str = "float32", lanes: int = 0) -> StageRates:
    """Return the rates of a device.

    Those of a GPU use parameters that were fitted to a V100: a share of its peak, and elements in
    proportion to the threads that it holds.

    lanes   threads of a GPU or cores of a CPU; 0: as the device says

    Raises `MachineError` if lanes or the rate of that dtype are not known.
    """
    peak, bandwidth = device.rate(dtype), device.bandwidth_bytes_per_second
    lanes = lanes or (resident_threads(device) if device.kind == "gpu" else len(device.cores))
    if lanes < 1:
        raise MachineError(
            f"device {device.name!r}: how many {'threads' if device.kind == 'gpu' else 'cores'} "
            f"a {device.model} runs at once is not known; give it as lanes"
        )
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
    """Return the rates of a GPU by its data sheet and the four fitted parameters."""
    return GpuRates(
        parameters["peak_share"] * peak_flops_per_second,
        bandwidth_bytes_per_second,
        parameters["full_share"] * resident_threads,
        parameters["launch_seconds"],
        parameters["join_seconds"],
    )


@cache
def fitted_parameters() -> dict[str, float]:
    """Return the four parameters by name.

    peak_share       share of the peak rate that a launch reaches if it fills the device
    full_share       elements that fill the device, divided by the threads that it holds
    launch_seconds, join_seconds   as in `GpuRates`
    """
    parameters: dict[str, float] = json.loads(FITTED.read_text(encoding="utf-8"))["parameters"]
    return parameters


def _mean(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of launches one after another: their sum of seconds, their mean wants."""
    seconds = sum(p.seconds for p in profiles)
    if seconds == 0:
        return Profile(0.0, 0.0, 0.0)
    return Profile(
        seconds,
        sum(p.occupancy * p.seconds for p in profiles) / seconds,
        sum(p.bandwidth * p.seconds for p in profiles) / seconds,
    )


def merged_launch(works: Sequence[StageWork]) -> Launch:
    """Return one convolution that replaces several convolutions of one input.

    Raises ValueError for other kernels.
    """
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
