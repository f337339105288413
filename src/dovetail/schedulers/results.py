"""Results of a search for stages: schedules of one network on one device, and their figures.

A kernel is what a device runs as one call: an op, or several ops that the device fuses. Kernels are
numbered as in `graph.kernels.Kernels`, in topological order.
"""

import statistics
from dataclasses import dataclass

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.records import KernelBlock

SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class KernelWork:
    """What one kernel does.

    ops           names of its ops, in order
    moved_bytes   bytes that it reads from memory and writes to it
    """

    name: str
    ops: tuple[str, ...]
    flops: float
    moved_bytes: float


@dataclass(frozen=True)
class KernelStage:
    """Kernels that run together.

    groups    run at the same time; the kernels of one group run one after another
    seconds   of the whole stage
    merged    the stage runs as one kernel that replaces all of its kernels
    """

    groups: tuple[tuple[int, ...], ...]
    seconds: float
    merged: bool = False

    @property
    def kernels(self) -> tuple[int, ...]:
        return tuple(sorted(kernel for group in self.groups for kernel in group))


@dataclass(frozen=True)
class SearchEffort:
    """How much a search computed and measured.

    states, transitions   as in `BlockSchedule`
    asked, timed          distinct stages that were asked for, and how many of them were measured
    """

    states: int = 0
    transitions: int = 0
    asked: int = 0
    timed: int = 0
    search_seconds: float = 0.0
    measuring_seconds: float = 0.0


@dataclass(frozen=True)
class ScheduleCandidate:
    """The schedule that one scheduler returned.

    stages               in running order; () if streams run without barriers
    streams              what runs: the kernels of each stream in order, and the events between them
    predicted_seconds    the sum over the stages, and on a CPU the switches between phases; for
                         streams without barriers, computed from the kernels' seconds alone
    block_seconds        predicted, per block of the network; () for streams without barriers
    seconds              [rounds] median measured seconds of a step; () if the device is not in this
                         machine. Schedules that run alike are measured once and share these
    pruning              what the search left out, in words; "" if it left out nothing
    """

    scheduler: str
    stages: tuple[KernelStage, ...]
    streams: Streams
    predicted_seconds: float
    block_seconds: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    effort: SearchEffort = SearchEffort()
    pruning: str = ""

    @property
    def median_seconds(self) -> float:
        """The median of the measured seconds; without a measurement, the predicted seconds."""
        return statistics.median(self.seconds) if self.seconds else self.predicted_seconds


@dataclass(frozen=True)
class Scheduled:
    """All schedules of a network at one batch size.

    block         which kernels wait for which
    blocks        the kernels of each part that was scheduled on its own, in running order
    chosen        the scheduler whose schedule is chosen. With measurements it is the fastest one,
                  if it is beyond doubt faster than sequential, else `sequential`. Without
                  measurements it is the one with the least predicted seconds
    sampled       (predicted, measured) seconds of random schedules
    peak_bytes    size of the static memory plan of the chosen schedule, without parameters
    """

    batch: int
    kernels: tuple[KernelWork, ...]
    block: KernelBlock
    blocks: tuple[tuple[int, ...], ...]
    candidates: tuple[ScheduleCandidate, ...]
    chosen: str
    sampled: tuple[tuple[float, float], ...] = ()
    peak_bytes: int = 0

    def candidate(self, scheduler: str) -> ScheduleCandidate:
        return next(c for c in self.candidates if c.scheduler == scheduler)

    @property
    def best(self) -> ScheduleCandidate:
        return self.candidate(self.chosen)


@dataclass(frozen=True)
class Specialisation:
    """A table of what schedules cost in settings that they were not made for.

    `seconds[row][column]` is the time on `rows[row]` of the schedule made for `columns[column]`.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Schedules:
    """All results for one model and device.

    costs_source   "measured" on the device, or "analytic" with its stated error
    results        one for each batch size
    """

    model: str
    device: str
    costs_source: str
    results: tuple[Scheduled, ...]
    specialisations: tuple[Specialisation, ...] = ()
