"""Measured reward: every placement that a policy draws runs on the devices of this machine.

The protocol is RL17's (Mirhoseini et al., "Device Placement Optimization with Reinforcement
Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4): a placement runs 10 steps, the
first is dropped, the mean of the others is its time; one that fails is invalid and no more; noise
is left to the moving baseline, and what is reported at the end is measured again, 15 times where
that takes less than 10 s.

    placement ─► predicted to fit? ─► orders by the simulator ─► load ─ 10 steps ─► mean
                  no: invalid                     a failure: invalid, new processes if they died

Differences: what the simulator says does not fit is not run, since too large a block would end
whoever else uses this machine; a placement that is drawn again is run again at most `MOST_RUNS`
times, and counts with the median of its runs; at the end the best few run in turns, so that a
disturbance strikes all of them, and the best median wins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, RunError, UsageError
from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured
from dovetail.placers import GroupPlacement, Problem
from dovetail.placers.learned.records import Task, Trials
from dovetail.plans import Plan, Source, normalise

STEPS = 10
MOST_RUNS = 3
FINAL_RUNS, LONG_SECONDS, LONG_RUNS = 15, 10.0, 3
FINALISTS = 5


@dataclass(frozen=True, eq=False)
class Timed:
    """A placement [groups] that ran again and again: mean step seconds of each run [runs]."""

    placement: GroupPlacement
    run_seconds: NDArray[np.float64]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.run_seconds))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.run_seconds, (25, 75))
        return float((high - low) / self.median_seconds)


@dataclass(eq=False)
class _Tally:
    """Runs of one placement, none yet where Ctrl-C ended the first; `failed` where it could not."""

    placement: GroupPlacement
    run_seconds: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def seconds(self) -> float:
        return float("inf") if self.failed else float(np.median(self.run_seconds))


class MeasuredTrials:
    """Trials that run here. A context manager: the devices' processes are kept from one trial to
    the next. Not to be shared by threads.

    task   of `step`, on a machine whose devices are cores of this one, else `UsageError`
    """

    def __init__(self, step: Captured, task: Task, *, steps: int = STEPS, seed: int = 0) -> None:
        self.step, self.task, self.steps, self.seed = step, task, steps, seed
        self.problem: Problem = task.problem(threads=1)
        self.failures: list[str] = []
        self._tallies: dict[bytes, _Tally] = {}
        self._workers = Workers(task.machine)

    def judge(self, placements: NDArray[np.int32]) -> Trials:
        """Run [batch, groups], one after the other: a `Judge`."""
        fits = self.problem.evaluate(self.problem.spread(placements)).feasible
        tallies = [self._try(row, bool(ok)) for row, ok in zip(placements, fits, strict=True)]
        seconds = np.array([tally.seconds for tally in tallies])
        return Trials(seconds, np.isfinite(seconds), np.ones(len(seconds), dtype=bool))

    def simulated(self, placements: NDArray[np.int32]) -> Trials:
        """The same trials by the simulator: a `Judge` that takes a millisecond each."""
        found = self.problem.evaluate(self.problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=bool))

    @property
    def runs(self) -> int:
        """Of placements, repeated ones counted again; failures are not."""
        return sum(len(tally.run_seconds) for tally in self._tallies.values())

    def finalists(self, count: int = FINALISTS) -> list[GroupPlacement]:
        """The best distinct placements that ran, best first. Raises what ended the last trial
        where none ran."""
        ran = sorted(
            (tally for tally in self._tallies.values() if tally.run_seconds),
            key=lambda tally: tally.seconds,
        )
        if not ran:
            last = self.failures[-1] if self.failures else "none was predicted to fit into memory"
            raise InfeasibleError(f"no placement that was tried ran: {last}")
        return [tally.placement for tally in ran[:count]]

    def compare(
        self,
        placements: Sequence[GroupPlacement],
        progress: Callable[[float], None] = lambda _fraction: None,
    ) -> list[Timed]:
        """Each placement again, in turns, best median first; those that fail are left out."""
        seconds: list[list[float]] = [[] for _ in placements]
        left = list(range(len(placements)))
        turns, turn = FINAL_RUNS, 0
        while turn < turns and left:
            # Who goes first changes, so that none always follows the same one.
            for i in left[turn % len(left) :] + left[: turn % len(left)]:
                found = self._run(placements[i])
                if found is None:
                    left.remove(i)
                    continue
                seconds[i].append(found)
                if found * self.steps >= LONG_SECONDS:
                    turns = LONG_RUNS
            turn += 1
            progress(turn / turns)
        timed = [Timed(placements[i], np.array(seconds[i])) for i in left]
        return sorted(timed, key=lambda one: one.median_seconds)

    def close(self, *, kill: bool = False) -> None:
        """End the devices' processes."""
        self._workers.close(kill=kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=error is not None)

    def _try(self, placement: GroupPlacement, fits: bool) -> _Tally:
        """Run it, unless its runs so far are enough."""
        key = placement.tobytes()
        tally = self._tallies.setdefault(key, _Tally(placement.copy(), failed=not fits))
        if not tally.failed and len(tally.run_seconds) < MOST_RUNS:
            found = self._run(placement)
            if found is None:
                tally.failed = not tally.run_seconds  # a disturbed repeat says nothing new
            else:
                tally.run_seconds.append(found)
        return tally

    def _run(self, placement: GroupPlacement) -> float | None:
        """Mean seconds of a step; None where it fails."""
        if self._workers.closed:
            self._workers.close(kill=True)
            self._workers = Workers(self.task.machine)
        try:
            plan = loadable(self.problem, self.problem.spread(placement))
            with execute(plan, self.step, seed=self.seed, workers=self._workers) as placed:
                return float(placed.step_seconds(self.steps).mean())
        except (RunError, InfeasibleError) as error:
            self.failures.append(str(error))
            return None


def loadable(problem: Problem, placement: NDArray[np.int32]) -> Plan:
    """A plan of this placement [ops] that can be run: in the simulator's orders, with no promise
    but its predicted step and memory."""
    if problem.trace is None:
        raise UsageError("task", "nobody simulates it, and a run needs the simulator's orders")
    graph, machine = problem.graph, problem.machine
    timeline = problem.trace(placement)
    return Plan(
        source=Source("", "", (), ""),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=normalise(placement, graph, machine),
        orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
        compute_seconds=problem.costs.compute_seconds,
        costs_source=problem.costs.source,
        placer="trial",
        seed=problem.seed,
        objective=problem.objective,
        value=timeline.step_seconds,
        lower_bound=0.0,
        bound_proof="",
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        groups=problem.groups.count,
        planning_seconds=0.0,
    )
