"""Budget: what a search may spend, and the ledger of all placements that it has evaluated.

Every placement is evaluated once in a ledger, however many methods propose it; a repeat is looked
up and costs nothing. Each entry of the ledger is a tuple that is stored in one assignment, so a
Ctrl-C at any moment leaves every entry whole.

    whole budget ─── slice ─── slice        limits within limits: what one spends, all around spend
         └──── ledger ───┴───────┘          one ledger of all placements of these groups
         └─────── slice, apart ── ledger    the same graph in other groups
"""

import hashlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, UsageError
from dovetail.interrupts import raises_interrupts
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import working_clock
from dovetail.simulator.bounds import LowerBound

BATCH_ENTRIES = 2**21
"""Largest batch that the evaluator is handed, in ops x placements: 8 MiB of int32 device indices. A
batch has 16 placements even if these are more, and at most 1,024."""


@dataclass(frozen=True, order=True)
class Score:
    """How good a placement is. The smaller score is the better one: scores compare by memory first,
    then by value.

    lacking_bytes   bytes by which peaks exceed capacities, summed over devices; at least 1 for a
                    placement that is infeasible for any reason. 0: feasible; inf: not evaluated
    value           seconds of the objective
    """

    lacking_bytes: float
    value: float


UNKNOWN = Score(np.inf, np.inf)
"""Score of a placement that was not evaluated; it is worse than every other score."""
CLOSED_GAP = 1e-5
"""A value whose relative distance from a lower bound is at most this counts as the optimum. It
cannot be 0, because exact methods lower their bounds by small margins for rounding."""


@dataclass
class SearchLedger:
    """What is known of the placements of one problem's groups: scores, results and the bound.

    entries          digest of a placement -> (score, [devices] peak bytes)
    results          method -> (score, placement) of the best that it returned, in the order tried
    result_seconds   method -> seconds from the start of the whole budget until it returned that
    best             (score, placement, [devices] peak bytes) of the best placement of all
    fewest           number of devices that run something -> (score, placement) of the best
                     placement that uses so many
    bound            the best lower bound that is proven, for placements whose groups stay together
    pace_seconds     seconds per evaluation in the latest batch
    rounds           how many searches have asked for a number of their own
    """

    entries: dict[bytes, tuple[Score, NDArray[np.int64]]] = field(default_factory=dict)
    results: dict[str, tuple[Score, GroupPlacement]] = field(default_factory=dict)
    result_seconds: dict[str, float] = field(default_factory=dict)
    best: tuple[Score, GroupPlacement, NDArray[np.int64]] | None = None
    fewest: dict[int, tuple[Score, GroupPlacement]] = field(default_factory=dict)
    bound: LowerBound | None = None
    pace_seconds: float = 0.0
    rounds: int = 0

    def __contains__(self, placement: GroupPlacement) -> bool:
        return _digest(placement) in self.entries

    def __len__(self) -> int:
        """The number of placements whose scores are known."""
        return len(self.entries)

    @property
    def value(self) -> float:
        """The best value of a placement that fits; inf if none is known."""
        return np.inf if self.best is None or self.best[0].lacking_bytes else self.best[0].value

    def peaks(self, placement: GroupPlacement) -> NDArray[np.int64]:
        """Return [devices] the peak bytes of a placement that was evaluated; else `KeyError`."""
        return self.entries[_digest(placement)][1]

    def enter(self, placement: GroupPlacement, score: Score, peaks: NDArray[np.int64]) -> None:
        self.entries[_digest(placement)] = (score, peaks)
        if self.best is None or score < self.best[0]:
            self.best = (score, placement.copy(), peaks)

    def enter_fewest(self, devices: int, score: Score, placement: GroupPlacement) -> None:
        """Keep the placement if no better one is known that runs something on so many devices."""
        if devices not in self.fewest or score < self.fewest[devices][0]:
            self.fewest[devices] = (score, placement.copy())

    def adopt(self, part: "SearchLedger", unit_of: NDArray[np.int32]) -> None:
        """Enter the best of a budget `apart`, with its placements spread over these groups.

        unit_of   [groups] the part's group that each group is in
        """
        pairs = [*part.results.values(), *part.fewest.values()]
        if part.best is not None:
            pairs.append(part.best[:2])
        for score, placement in pairs:
            self.enter(placement[unit_of], score, part.peaks(placement))
        for devices, (score, placement) in part.fewest.items():
            self.enter_fewest(devices, score, placement[unit_of])
        for name, (score, placement) in part.results.items():
            if name not in self.results or score < self.results[name][0]:
                self.results[name] = (score, placement[unit_of])
                self.result_seconds[name] = part.result_seconds[name]

    def prove(self, seconds: float, proof: str) -> None:
        """Note a lower bound on the objective of every placement whose groups stay together. Only
        the highest bound is kept.

        proof   what proved it, as reports name it
        """
        if self.bound is None or seconds > self.bound.seconds:
            self.bound = LowerBound(float(seconds), proof)

    def next_round(self) -> int:
        """Return 0, then 1, 2 and so on: each search takes a number that keys its random stream."""
        self.rounds += 1
        return self.rounds - 1


@dataclass
class Budget:
    """The limits of a search, what is spent of them, and the ledger of what it evaluates.

    seconds, evaluations   limits; inf: none
    clock        returns seconds; only differences count. The default clock stands still while numba
                 compiles
    progress     called with (share of the budget spent, best feasible value or inf)
    threads      cores that a search may use
    gap          (value - bound) / bound at which a search is done
    parent       the budget that this one is a slice of; None: a whole budget
    ledger       of all placements that are evaluated; a slice shares it
    spent        evaluations so far, with the work that methods charged as evaluations
    evaluated    number of placements that were evaluated so far
    """

    seconds: float = np.inf
    evaluations: float = np.inf
    clock: Callable[[], float] = working_clock
    progress: Callable[[float, float], None] | None = None
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    gap: float = CLOSED_GAP
    parent: "Budget | None" = None
    ledger: SearchLedger = field(default_factory=SearchLedger)
    spent: float = field(default=0, init=False)
    evaluated: int = field(default=0, init=False)
    _interrupted: bool = field(default=False, init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def slice(
        self, *, seconds: float = np.inf, evaluations: float = np.inf, apart: bool = False
    ) -> "Budget":
        """Return a smaller budget within this one. What it spends is spent here too.

        apart   for the same graph in other groups: the slice has a ledger of its own, since its
                placements are of other groups. `SearchLedger.adopt` brings its results back
        """
        return Budget(
            min(seconds, self.left_seconds),
            min(evaluations, self.left),
            self.clock,
            threads=self.threads,
            gap=self.gap,
            parent=self,
            ledger=SearchLedger() if apart else self.ledger,
        )

    def share(self, share: float, *, apart: bool = False) -> "Budget":
        """Return a slice with that share of this budget's limits, and at least one evaluation."""
        part = Limits(self.seconds, self.evaluations).share(share)
        return self.slice(seconds=part.seconds, evaluations=part.evaluations, apart=apart)

    @property
    def whole(self) -> "Budget":
        """The budget that this one is a slice of, however many slices lie between; or itself."""
        return self if self.parent is None else self.parent.whole

    @property
    def interrupted(self) -> bool:
        """True after a Ctrl-C, in the whole budget and all its slices. From then on only
        evaluations that must be made (`always`) are made."""
        return self.whole._interrupted

    @interrupted.setter
    def interrupted(self, value: bool) -> None:
        self.whole._interrupted = value

    @property
    def spent_seconds(self) -> float:
        """Seconds since this budget was made."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Evaluations that may still be bought; 0 after an interrupt."""
        return 0 if self.interrupted else max(0, self.evaluations - self.spent)

    @property
    def left_seconds(self) -> float:
        """Seconds that may still pass; 0 after an interrupt."""
        return 0.0 if self.interrupted else max(0.0, self.seconds - self.spent_seconds)

    @property
    def timed(self) -> bool:
        """True if the budget limits seconds. Otherwise no decision may depend on the clock, so that
        one seed and one budget give one plan."""
        return bool(np.isfinite(self.seconds))

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        if self.evaluations <= 0 or self.seconds <= 0:
            return 1.0
        return min(1.0, max(self.spent / self.evaluations, self.spent_seconds / self.seconds))

    @property
    def exhausted(self) -> bool:
        """True after a Ctrl-C, or if less than one evaluation is left. A part of one may be left
        because `charge` takes fractions."""
        return self.interrupted or self.fraction >= 1.0 or self.left < 1

    @property
    def closed(self) -> bool:
        """True if the best placement fits and its value is within `gap` of the bound."""
        value, bound = self.ledger.value, self.ledger.bound
        return bound is not None and value < np.inf and value <= bound.seconds * (1 + self.gap)

    def charge(self, evaluations: float, evaluated: int = 0) -> None:
        """Spend evaluations, or a fraction of one, on this budget and on all budgets around it.

        A method also charges here for work that evaluates no whole placement, at a rate of its own.

        evaluated   how many of them evaluated a whole placement
        """
        self.spent += evaluations
        self.evaluated += evaluated
        if self.parent is not None:
            self.parent.charge(evaluations, evaluated)

    def note(self, name: str, score: Score, placement: GroupPlacement) -> None:
        """Record what a method returned, and how many seconds of the whole budget have passed."""
        self.ledger.results[name] = (score, placement)
        self.ledger.result_seconds[name] = self.whole.spent_seconds

    def score(
        self, problem: PlacementProblem, placements: NDArray[np.int32], *, always: bool = False
    ) -> list[Score]:
        """Return the score of each group placement [batch, groups], or `UNKNOWN` for those that the
        budget no longer pays for.

        always   evaluate even beyond the budget: for the placements that every result is compared
                 with. A Ctrl-C in the evaluator sets `interrupted`, and the batch that it broke
                 stays unknown
        """
        ledger = self.ledger
        keys = [_digest(row) for row in placements]
        # One row for each distinct placement that the ledger lacks: repeats are bought once.
        rows = {key: i for i, key in enumerate(keys) if key not in ledger.entries}
        missing = sorted(rows.values())
        size = min(1024, max(16, BATCH_ENTRIES // max(1, len(problem.graph))))
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            affordable = batch if always else batch[: int(min(self.left, len(batch)))]
            if not affordable or (self.exhausted and not always):
                break
            try:
                began = self.clock()
                batch_placements = placements[affordable]
                evaluation = problem.evaluate(problem.spread(batch_placements))
                self.charge(len(affordable), len(affordable))
                over = np.maximum(evaluation.peak_memory_bytes - problem.capacities, 0).sum(axis=1)
                # An infeasible placement that fits into memory (it waits for itself, or is not
                # contiguous) counts as lacking one byte, so that it is worse than every feasible
                # one.
                lacking = np.where(evaluation.feasible, over, np.maximum(over, 1))
                is_used = np.zeros((len(affordable), problem.devices), dtype=bool)
                is_used[np.arange(len(is_used))[:, None], batch_placements[:, problem.running]] = 1
                devices = is_used.sum(axis=1).tolist()
                for i, row in enumerate(batch_placements):
                    score = Score(float(lacking[i]), float(evaluation.values[i]))
                    ledger.enter_fewest(devices[i], score, row)
                    ledger.enter(row, score, evaluation.peak_memory_bytes[i])
                ledger.pace_seconds = (self.clock() - began) / len(affordable)
                self.report()
            except KeyboardInterrupt:
                self.interrupted = True
        return [ledger.entries[key][0] if key in ledger.entries else UNKNOWN for key in keys]

    def report(self) -> None:
        """Call `progress` of the whole budget with the share that is spent and the best value."""
        whole = self.whole
        if whole.progress is not None and self.ledger.best is not None:
            whole.progress(whole.fraction, self.ledger.value)


class Limits(NamedTuple):
    """What a search may spend; inf: no limit. `Budget(*limits)` is a budget of it."""

    seconds: float = np.inf
    evaluations: float = np.inf

    def share(self, share: float) -> "Limits":
        """Return that share of the limits. It has an evaluation at least."""
        evaluations = self.evaluations
        # A budget of seconds has infinitely many evaluations, of which no share is a whole number.
        if np.isfinite(evaluations):
            evaluations = float(max(1, int(share * evaluations)))
        return Limits(share * self.seconds, evaluations)

    def divided(self, parts: int, taken: int = 1) -> "Limits":
        """Return `taken` of so many equal parts. They have an evaluation at least."""
        evaluations = self.evaluations
        if np.isfinite(evaluations):
            evaluations = float(max(1, int(evaluations) * taken // parts))
        return Limits(self.seconds * taken / parts, evaluations)


def parse_limits(text: str) -> Limits:
    """Return the limits that a text names: "10" and "10s" are seconds, "5000e" is evaluations.

    Raises `UsageError` for any other text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([se]?)\s*", text)
    amount = float(match[1]) if match else 0.0
    if match is None or amount <= 0 or (match[2] == "e" and not amount.is_integer()):
        raise UsageError("--budget", f"{text!r} is not a budget; write 10, 10s or 5000e")
    return Limits(evaluations=amount) if match[2] == "e" else Limits(seconds=amount)


def parse_budget(text: str, clock: Callable[[], float] = working_clock) -> Budget:
    """Return a budget of the limits that a text names; see `parse_limits`."""
    return Budget(*parse_limits(text), clock)


@contextmanager
def keeping_interrupts(budget: Budget) -> Iterator[None]:
    """Within this context a first Ctrl-C only sets `budget.interrupted`, wherever it arrives. A
    second one raises `KeyboardInterrupt`. An `InfeasibleError` that leaves it says that, too.

    Does nothing outside the main thread, since only the main thread is interrupted, or if the
    program has installed a handler of its own.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and raises_interrupts()):
        yield
        return

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if budget.interrupted:
            raise _SecondInterrupt
        budget.interrupted = True

    handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    except _SecondInterrupt:
        raise KeyboardInterrupt from None
    except InfeasibleError as error:
        error.interrupted = budget.interrupted
        raise
    finally:
        signal.signal(signal.SIGINT, handler)


class _SecondInterrupt(BaseException):
    """Raised at a second Ctrl-C. Searches catch `KeyboardInterrupt` to keep their best placement;
    they do not catch this."""


def _digest(placement: GroupPlacement) -> bytes:
    """Return a name of the placement of 16 bytes, however many groups there are."""
    return hashlib.blake2b(placement.tobytes(), digest_size=16).digest()
