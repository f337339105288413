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

from dovetail.costs.launches import Launch, StageWork
from dovetail.errors import MachineError
from dovetail.graph.kernels import CONVOLUTION
from dovetail.machine import Device

FITTED = Path(__file__).with_name("stages.json")
"""What `benchmarks/stages/fit_analytic.py` fitted, and to what."""
RESIDENT_THREADS = {
    "k80": 13 * 2048, "p100": 56 * 2048, "v100": 80 * 2048, "titan_xp": 30 * 2048,
    "2080ti": 68 * 1024, "a100": 108 * 2048, "h100": 132 * 2048, "h200": 132 * 2048,
}  # fmt: skip
"""model -> multiprocessors x threads that each holds, by the vendor's tables."""


class Profile(NamedTuple):
    """seconds undisturbed; meanwhile wanted, of 1: occupancy and share of the bandwidth."""

    seconds: float
    occupancy: float
    bandwidth: float


class StageRates(Protocol):
    """How a device runs launches. join_seconds: of a stage of several groups, apart from them."""

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
        """Of all kernels, however they run side by side: the device is shared by all."""
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
    found: dict[str, float] = json.loads(FITTED.read_text(encoding="utf-8"))["parameters"]
    return found


def _mean(profiles: Sequence[Profile]) -> Profile:
    """Of launches one after another."""
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
