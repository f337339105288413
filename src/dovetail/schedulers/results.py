"""Results of a search for stages: schedules of one network on one device, and their figures.

Kernels are what a device runs: ops, fused where it fuses them. Their numbers are those of
`graph.kernels.Kernels`, which are topological.
"""

import statistics
from dataclasses import dataclass

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.records import KernelBlock

SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class KernelWork:
    """ops: their names, in order; moved_bytes: read from and written to memory."""

    name: str
    ops: tuple[str, ...]
    flops: float
    moved_bytes: float


@dataclass(frozen=True)
class KernelStage:
    """Kernels that run together, for `seconds` in all.

    groups    run at the same time; the kernels of each, one after another
    merged    as one kernel in place of all
    """

    groups: tuple[tuple[int, ...], ...]
    seconds: float
    merged: bool = False

    @property
    def kernels(self) -> tuple[int, ...]:
        return tuple(sorted(kernel for group in self.groups for kernel in group))


@dataclass(frozen=True)
class SearchEffort:
    """What a search took.

    asked, timed    distinct stages that came up; those of them that had to be measured
    """

    states: int = 0
    transitions: int = 0
    asked: int = 0
    timed: int = 0
    search_seconds: float = 0.0
    measuring_seconds: float = 0.0


@dataclass(frozen=True)
class ScheduleCandidate:
    """One scheduler's schedule.

    stages               in running order; none where streams run without barriers
    streams              what runs: kernels in order, and the events between streams
    predicted_seconds    by what its stages cost, and on a CPU going from phase to phase; of streams
                         without barriers, by their kernels' costs alone
    block_seconds        predicted, per block of the network; () for streams without barriers
    seconds              of a step, the median of each round; () where the device is not here;
                         schedules that run alike have the same, measured once
    pruning              what was left out, by name; "" where nothing was
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
        """Measured; where nothing was, predicted."""
        return statistics.median(self.seconds) if self.seconds else self.predicted_seconds


@dataclass(frozen=True)
class Scheduled:
    """All schedules of a network at one batch size.

    block         which kernels wait for which
    blocks        the kernels of each part that was scheduled on its own, in running order
    chosen        the scheduler of the fastest schedule that was measured to be faster than
                  sequential, beyond doubt; else sequential. Predicted where nothing was measured
    sampled       (predicted, measured) seconds of random schedules
    peak_bytes    of the static memory plan of the chosen schedule; parameters apart
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
    """What schedules cost where they were not made for it: `seconds[row][column]` run on
    `rows[row]` with the schedule that was made for `columns[column]`."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Schedules:
    """costs_source: "measured" on the device, or "analytic" with its stated error."""

    model: str
    device: str
    costs_source: str
    results: tuple[Scheduled, ...]
    specialisations: tuple[Specialisation, ...] = ()
