"""Results of a search for stages: schedules of one network on one device, and their figures.

    Schedules                        one model on one device
      Scheduled                      at one batch size
        ScheduleCandidate            the schedule of one scheduler
          KernelStage                kernels that run together

A kernel is what a device runs as one call: an op, or several ops that the device fuses. Kernels are
numbered as in `graph.kernels.Kernels`, in topological order.
"""

import statistics
from dataclasses import dataclass

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.records import KernelBlock

SEQUENTIAL = "sequential"
"""The scheduler that runs one kernel after another, with which all others are compared."""


@dataclass(frozen=True)
class KernelWork:
    """The work of one kernel.

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
    """The numbers of things that a search computed and measured.

    states              sets of ops whose best schedule was searched
    transitions         (state, ending) pairs that were compared
    asked, timed        distinct stages whose seconds were asked for, and how many of them had to be
                        measured for it
    search_seconds      time of the search without its measuring
    measuring_seconds   time that it measured stages
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

    stages              in running order; () if streams run without barriers
    streams             what runs: the kernels of each stream in order, and the events between them
    predicted_seconds   the sum over the stages, and on a CPU the switches between phases; for
                        streams without barriers, computed from the kernels' seconds alone
    block_seconds       predicted, of each of `Scheduled.blocks`; () if the schedule was not made
                        in these blocks
    seconds             [rounds] median measured seconds of a step; () if the device is not in this
                        machine. Schedules that run alike are measured once and share these
    pruning             what the search left out, in words; "" if it left out nothing
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
    def step_seconds(self) -> float:
        """The median of the measured seconds; without a measurement, the predicted seconds."""
        return statistics.median(self.seconds) if self.seconds else self.predicted_seconds


@dataclass(frozen=True)
class Scheduled:
    """All schedules of a network at one batch size.

    block        all kernels as one block: which kernels wait for which
    blocks       the kernels of each part of that block which `dos` searches by itself, in running
                 order
    chosen       the scheduler whose schedule is chosen. With measurements it is the fastest one, if
                 it is beyond doubt faster than sequential, else `sequential`. Without measurements
                 it is the one with the least predicted seconds among those with stages
    peak_bytes   size of the static memory plan of the chosen schedule, without parameters
    """

    batch: int
    kernels: tuple[KernelWork, ...]
    block: KernelBlock
    blocks: tuple[tuple[int, ...], ...]
    candidates: tuple[ScheduleCandidate, ...]
    chosen: str
    peak_bytes: int = 0

    def candidate(self, scheduler: str) -> ScheduleCandidate:
        """The schedule of a scheduler that ran."""
        return next(c for c in self.candidates if c.scheduler == scheduler)

    @property
    def best(self) -> ScheduleCandidate:
        """The chosen schedule."""
        return self.candidate(self.chosen)


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
