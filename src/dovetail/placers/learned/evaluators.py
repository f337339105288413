"""A controller's evaluators: who says how long a placement takes.

A. Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.4: each controller has K workers that run what it draws,
and waits for all of them.

    controller ── placements ──┬─► evaluator 0    a process each: measured, or slow, or apt to die
               ◄── Trials ─────┼─► evaluator 1
                               └─► ...
               ── placements ────► the simulator's own threads: cheap, in this process

An evaluator that dies, or hangs, loses the placement that it had, and is started again. Imports no
torch.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from dovetail.errors import EvaluatorsLostError, ProcessDiedError
from dovetail.placers.budget import Budget, Score
from dovetail.placers.learned.records import Judge, PlacementTask, Trials
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.processes import Channel, Worker, launch, ready
from dovetail.training.liveness import alive

JudgeFactory = Callable[[PlacementTask], Judge]
"""Makes the judge of a task, in the evaluator's process; must travel by cloudpickle."""

BEAT_SECONDS = 1.0
"""Between two signs of life of a controller that waits."""
LOSSES = 3
"""Evaluators that die so often before they have judged anything do not die by accident."""
HUNG_SECONDS = 600.0
"""An evaluator that takes longer over one placement has hung: steps take seconds to measure."""


class SimulatedJudge:
    """The simulator, a batch at once, on the threads that the problem's simulator was given."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        found = self.problem.evaluate(self.problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=np.bool_))


class BudgetJudge:
    """Judges by a budget's ledger: a placement that is known costs nothing, but is a trial.

    best    (score, placement) of all that passed here; None: nothing yet
    """

    def __init__(self, problem: PlacementProblem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.best: tuple[Score, GroupPlacement] | None = None

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        """Trials that the budget could not pay are not judged."""
        scores = self.budget.score(self.problem, placements)
        seconds = np.array([score.value for score in scores])
        lacking = np.array([score.lacking_bytes for score in scores])
        for score, placement in zip(scores, placements, strict=True):
            known = np.isfinite(score.lacking_bytes)
            if known and (self.best is None or score < self.best[0]):
                self.best = (score, placement.copy())
        return Trials(seconds, lacking == 0, np.isfinite(lacking))


@dataclass
class _Evaluator:
    """A process, the row that it has, -1: none, and when it got it."""

    process: Worker
    row: int = -1
    since: float = 0.0


class EvaluatorPool:
    """K evaluator processes of one controller. Use it in the thread that made it, and close it.

    losses   of each evaluator, with no placement judged in between, that are still an accident
    lost     evaluators so far
    """

    def __init__(
        self,
        factory: JudgeFactory,
        tasks: Sequence[PlacementTask],
        count: int,
        *,
        name: str = "evaluator",
        losses: int = LOSSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost = 0
        self._clock = clock
        self._lost_in_row, self._losses, self._tasks = 0, losses, len(tasks)
        self._name = name
        self._plan = cloudpickle.dumps((factory, tuple(tasks)), protocol=5)
        self._serials = itertools.count()
        self._evaluators = [_Evaluator(self._start(i)) for i in range(count)]

    @property
    def pids(self) -> list[int]:
        """Of the evaluators as they are now."""
        return [evaluator.process.pid for evaluator in self._evaluators]

    def judges(self) -> list[Judge]:
        """One for each task."""
        return [_PoolJudge(self, number) for number in range(self._tasks)]

    def judge(self, number: int, placements: NDArray[np.int32]) -> Trials:
        """What the evaluators say of placements of task `number`, each as soon as one is free.

        Raises `ProcessError` with the traceback of a judge that raised, and `EvaluatorsLostError`
        where evaluators die again and again.
        """
        batch, serial = len(placements), next(self._serials)
        trials = Trials(np.full(batch, np.inf), np.zeros(batch, bool), np.zeros(batch, bool))
        waiting = deque(range(batch))
        for evaluator in self._evaluators:
            evaluator.row = -1
        while True:
            for evaluator in self._evaluators:
                if waiting and evaluator.row < 0:
                    row = waiting.popleft()
                    self._give(evaluator, row, (serial, number, placements[row : row + 1]))
            busy = {id(e.process): e for e in self._evaluators if e.row >= 0}
            if not busy:
                return trials
            for process in ready([e.process for e in busy.values()], BEAT_SECONDS):
                self._hear(busy[id(process)], serial, trials)
            self._end_hung()
            alive()

    def close(self) -> None:
        """End all of them."""
        for evaluator in self._evaluators:
            evaluator.process.close(kill=True)
        self._evaluators.clear()

    def _start(self, index: int) -> Worker:
        process = launch(f"{__name__}:serve", name=f"{self._name} {index}")
        process.send(self._plan)
        return process

    def _give(
        self, evaluator: _Evaluator, row: int, request: tuple[int, int, NDArray[np.int32]]
    ) -> None:
        """Send it, to another one where this has died meanwhile: that loses no placement."""
        while True:
            # The clock is read before sending: once it has the placement, an evaluator may be at
            # work, or hang, before this process goes on.
            since = self._clock()
            try:
                evaluator.process.send(request)
            except ProcessDiedError as error:
                self._replace(evaluator, error.status)
            else:
                evaluator.row, evaluator.since = row, since
                return

    def _hear(self, evaluator: _Evaluator, serial: int, trials: Trials) -> None:
        row = evaluator.row
        try:
            answered, found = evaluator.process.receive()
        except ProcessDiedError as error:
            self._replace(evaluator, error.status)
            return
        if answered != serial:  # of a batch that was broken off
            return
        self._lost_in_row, evaluator.row = 0, -1
        trials.seconds[row] = found.seconds[0]
        trials.valid[row] = found.valid[0]
        trials.judged[row] = found.judged[0]

    def _end_hung(self) -> None:
        for evaluator in self._evaluators:
            if evaluator.row >= 0 and self._clock() - evaluator.since > HUNG_SECONDS:
                self._replace(evaluator, f"silent for {HUNG_SECONDS:.0f} s")

    def _replace(self, evaluator: _Evaluator, status: str) -> None:
        self.lost += 1
        self._lost_in_row += 1
        if self._lost_in_row > self._losses * len(self._evaluators):
            raise EvaluatorsLostError(self.lost, status)
        evaluator.process.close(kill=True)
        evaluator.process, evaluator.row = self._start(self._evaluators.index(evaluator)), -1


class _PoolJudge:
    """The pool's judge of one task."""

    def __init__(self, pool: EvaluatorPool, number: int) -> None:
        self.pool, self._number = pool, number

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        return self.pool.judge(self._number, placements)

    def close(self) -> None:
        """End the pool."""
        self.pool.close()


def serve(channel: Channel) -> None:
    """An evaluator: judge until the controller closes the channel."""
    factory, tasks = cloudpickle.loads(channel.receive())
    judges: dict[int, Judge] = {}
    while True:
        serial, number, placement = channel.receive()
        if number not in judges:
            judges[number] = factory(tasks[number])
        channel.send((serial, judges[number](placement)))
