"""Budget: what a search may spend, and the ledger of what it has bought.

Every placement is evaluated once, however many methods propose it; a repeat is looked up and costs
nothing. The ledger holds plain tuples that are stored in one assignment, so a Ctrl-C at any moment
leaves it whole.
"""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.placers.problem import GroupPlacement, Problem

BATCH_ENTRIES = 2**21
"""Largest batch handed to the evaluator, in ops x placements: 8 MiB of device indices."""


@dataclass(frozen=True, order=True)
class Score:
    """How good a placement is; the smaller the better, fitting into memory first.

    lacking_bytes   summed over devices what the peak is above capacity; 0: feasible. inf: unknown
    value           seconds of the objective
    """

    lacking_bytes: float
    value: float


UNKNOWN = Score(np.inf, np.inf)


@dataclass
class Budget:
    """Limits of seconds and of evaluations, and everything that was evaluated under them.

    seconds, evaluations   limits; inf: none
    clock                  returns seconds; only differences count
    pace_seconds           what one evaluation of the latest batch took
    interrupted            a Ctrl-C arrived: nothing more is bought, but for what must be
    progress               called with (share of the budget spent, best feasible value or inf)
    found                  method -> what it found, in the order tried
    """

    seconds: float = np.inf
    evaluations: float = np.inf
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[float, float], None] | None = None
    interrupted: bool = False
    spent: int = 0
    pace_seconds: float = 0.0
    best: tuple[Score, GroupPlacement, NDArray[np.int64]] | None = None
    found: dict[str, tuple[Score, GroupPlacement]] = field(default_factory=dict)
    _ledger: dict[bytes, tuple[Score, NDArray[np.int64]]] = field(default_factory=dict)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def spent_seconds(self) -> float:
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Evaluations that may still be bought; 0 after an interrupt."""
        return 0 if self.interrupted else max(0, self.evaluations - self.spent)

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        return min(1.0, max(self.spent / self.evaluations, self.spent_seconds / self.seconds))

    @property
    def exhausted(self) -> bool:
        return self.interrupted or self.fraction >= 1.0

    def known(self, placement: GroupPlacement) -> bool:
        """Has this placement been evaluated?"""
        return placement.tobytes() in self._ledger

    @property
    def distinct(self) -> int:
        """Number of placements that have been evaluated."""
        return len(self._ledger)

    def peaks(self, placement: GroupPlacement) -> NDArray[np.int64]:
        """[devices] peak memory in bytes of a placement that was evaluated."""
        return self._ledger[placement.tobytes()][1]

    def score(
        self, problem: Problem, placements: NDArray[np.int32], *, always: bool = False
    ) -> list[Score]:
        """The score of each group placement [batch, groups]; `UNKNOWN` where the budget is out.

        `always` evaluates even beyond the budget: what every result is compared with. A Ctrl-C in
        the evaluator is kept in `interrupted`, and the batch that it broke stays unknown.
        """
        keys = [row.tobytes() for row in placements]
        rows = {key: i for i, key in enumerate(keys) if key not in self._ledger}
        wanted = sorted(rows.values())
        for batch in _batches(wanted, len(problem.graph)):
            affordable = batch if always else batch[: int(min(self.left, len(batch)))]
            if not affordable or (self.exhausted and not always):
                break
            try:
                self._buy(problem, placements[affordable])
            except KeyboardInterrupt:
                self.interrupted = True
        return [self._ledger[key][0] if key in self._ledger else UNKNOWN for key in keys]

    def _buy(self, problem: Problem, placements: NDArray[np.int32]) -> None:
        began = self.clock()
        found = problem.evaluate(problem.spread(placements))
        self.spent += len(placements)
        over = np.maximum(found.peak_memory_bytes - problem.capacities, 0).sum(axis=1)
        lacking = np.where(found.feasible, over, np.maximum(over, 1))
        for i, row in enumerate(placements):
            score = Score(float(lacking[i]), float(found.values[i]))
            self._ledger[row.tobytes()] = (score, found.peak_memory_bytes[i])
            if self.best is None or score < self.best[0]:
                self.best = (score, row.copy(), found.peak_memory_bytes[i])
        self.pace_seconds = (self.clock() - began) / len(placements)
        if self.progress is not None and self.best is not None:
            score = self.best[0]
            self.progress(self.fraction, np.inf if score.lacking_bytes else score.value)


def parse_budget(text: str, clock: Callable[[], float] = time.monotonic) -> Budget:
    """ "10" or "10s": a budget of seconds; "5000e": of evaluations. Raises `UsageError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([se]?)\s*", text)
    amount = float(match[1]) if match else 0.0
    if match is None or amount <= 0 or (match[2] == "e" and not amount.is_integer()):
        raise UsageError("--budget", f"{text!r} is not a budget; write 10, 10s or 5000e")
    if match[2] == "e":
        return Budget(evaluations=amount, clock=clock)
    return Budget(seconds=amount, clock=clock)


@contextmanager
def keeping_interrupts(budget: Budget) -> Iterator[None]:
    """Within it a first Ctrl-C only sets `budget.interrupted`, wherever it arrives; a second raises
    `KeyboardInterrupt`.

    Does nothing outside the main thread, which alone is interrupted, or where the program has its
    own handler.
    """
    theirs = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or theirs is not signal.default_int_handler:
        yield
        return

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if budget.interrupted:
            raise _SecondInterrupt
        budget.interrupted = True

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    except _SecondInterrupt:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, theirs)


class _SecondInterrupt(BaseException):
    """Passes through whatever keeps the best so far at a `KeyboardInterrupt`."""


def _batches(rows: list[int], ops: int) -> Iterator[list[int]]:
    size = max(16, BATCH_ENTRIES // max(1, ops))
    size = min(size, 1024)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
