"""Budget: what a search may spend, and the ledger of all placements that it has evaluated.

Every placement is evaluated once in a ledger, however many methods propose it; a repeat is looked
up and costs nothing. A budget `apart` has a ledger of its own. Each entry of the ledger is a tuple
that is stored in one assignment, so a Ctrl-C at any moment leaves every entry whole.
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

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, UsageError
from dovetail.interrupts import raises_interrupts
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import working_clock
from dovetail.simulator.bounds import LowerBound

BATCH_ENTRIES = 2**21
"""Largest batch that the evaluator is handed, in ops x placements: 8 MiB of int32 device indices. A
batch has 16 placements even if these are more."""


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
class _Shared:
    """The state that a budget and all its slices share.

    entries        digest of a placement -> (score, [devices] peak bytes)
    found          method -> (score, placement) that it returned
    found_seconds  method -> seconds of the whole budget that had passed by then
    best           (score, placement, peak bytes) of the best placement that was evaluated
    fewest         number of devices that run something -> the best such placement
    bound          the best lower bound that holds while groups stay together
    interrupted    a Ctrl-C arrived
    pace_seconds   seconds per evaluation in the latest batch
    bought         number of evaluations, with those of budgets `apart`
    rounds         how many searches have asked for a number of their own
    """

    entries: dict[bytes, tuple[Score, NDArray[np.int64]]] = field(default_factory=dict)
    found: dict[str, tuple[Score, GroupPlacement]] = field(default_factory=dict)
    found_seconds: dict[str, float] = field(default_factory=dict)
    best: tuple[Score, GroupPlacement, NDArray[np.int64]] | None = None
    fewest: dict[int, tuple[Score, GroupPlacement]] = field(default_factory=dict)
    bound: LowerBound | None = None
    interrupted: bool = False
    pace_seconds: float = 0.0
    bought: int = 0
    rounds: int = 0


@dataclass
class Budget:
    """Limits of seconds and of evaluations, and everything that was evaluated under them.

    seconds, evaluations   limits; inf: none
    clock        returns seconds; only differences count. The default clock stands still while numba
                 compiles
    progress     called with (share of the budget spent, best feasible value or inf)
    threads      cores that a search may use
    gap          (value - bound) / bound at which a search is done
    spent        evaluations so far, with the work that methods charged as evaluations
    parent       the budget that this one is a slice of; None: a whole budget
    """

    seconds: float = np.inf
    evaluations: float = np.inf
    clock: Callable[[], float] = working_clock
    progress: Callable[[float, float], None] | None = None
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    gap: float = CLOSED_GAP
    spent: float = 0
    parent: "Budget | None" = None
    _shared: _Shared = field(default_factory=_Shared)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def slice(self, *, seconds: float = np.inf, evaluations: float = np.inf) -> "Budget":
        """Return a smaller budget within this one. What it spends is spent here too, and both share
        one ledger."""
        return Budget(
            min(seconds, self.left_seconds),
            min(evaluations, self.left),
            self.clock,
            threads=self.threads,
            gap=self.gap,
            parent=self,
            _shared=self._shared,
        )

    def apart(self, *, seconds: float = np.inf, evaluations: float = np.inf) -> "Budget":
        """Return a smaller budget within this one, for the same graph in other groups. What it
        spends is spent here too, but its ledger is its own, since placements are of other groups.
        `adopt` brings its results back."""
        part = self.slice(seconds=seconds, evaluations=evaluations)
        part._shared = _Shared()
        return part

    def adopt(self, part: "Budget", unit_of: NDArray[np.int32]) -> None:
        """Enter what a budget `apart` found, with its placements spread over this one's groups.

        unit_of   [groups] the part's group that each group is in
        """
        known = [*part.found.values(), *part.fewest.values()]
        if part.best is not None:
            known.append(part.best[:2])
        for score, placement in known:
            self._enter(placement[unit_of], score, part.peaks(placement))
        for used, (score, placement) in part.fewest.items():
            self._keep_fewest(used, score, placement[unit_of])
        for name, (score, placement) in part.found.items():
            if name not in self.found or score < self.found[name][0]:
                self._shared.found[name] = (score, placement[unit_of])
                self._shared.found_seconds[name] = part.found_seconds[name]

    @property
    def interrupted(self) -> bool:
        """True after a Ctrl-C. From then on only evaluations that must be made (`always`) are
        made."""
        around = self.parent is not None and self.parent.interrupted
        return around or self._shared.interrupted

    @interrupted.setter
    def interrupted(self, value: bool) -> None:
        self._shared.interrupted = value
        if self.parent is not None:
            self.parent.interrupted = value

    @property
    def best(self) -> tuple[Score, GroupPlacement, NDArray[np.int64]] | None:
        """(score, placement, [devices] peak bytes) of the best placement that was evaluated."""
        return self._shared.best

    @property
    def fewest(self) -> dict[int, tuple[Score, GroupPlacement]]:
        """Number of devices that run something -> (score, placement) of the best placement that
        uses so many."""
        return self._shared.fewest

    @property
    def bound(self) -> LowerBound | None:
        """The best lower bound that was proven, for placements whose groups stay together."""
        return self._shared.bound

    @property
    def found(self) -> dict[str, tuple[Score, GroupPlacement]]:
        """Method -> (score, placement) of the best that it returned, in the order tried."""
        return self._shared.found

    @property
    def found_seconds(self) -> dict[str, float]:
        """Method -> seconds from the start of the whole budget until it first returned that."""
        return self._shared.found_seconds

    @property
    def pace_seconds(self) -> float:
        """Seconds that one evaluation of the latest batch took."""
        return self._shared.pace_seconds

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
        if self.best is None or self.bound is None or self.best[0].lacking_bytes:
            return False
        return self.best[0].value <= self.bound.seconds * (1 + self.gap)

    def charge(self, evaluations: float) -> None:
        """Spend evaluations, or a fraction of one, on this budget and on all budgets around it.

        A method also charges here for work that evaluates no whole placement, at a rate of its own.
        """
        for budget in self._and_around():
            budget.spent += evaluations

    def _and_around(self) -> Iterator["Budget"]:
        """Yield this budget and those that it is a part of, from the inside out."""
        budget: Budget | None = self
        while budget is not None:
            yield budget
            budget = budget.parent

    def prove(self, seconds: float, proof: str) -> None:
        """Note a lower bound on the objective of every placement whose groups stay together. Only
        the highest bound is kept.

        proof   what proved it, as reports name it
        """
        if self._shared.bound is None or seconds > self._shared.bound.seconds:
            self._shared.bound = LowerBound(float(seconds), proof)

    def next_round(self) -> int:
        """Return 0, then 1, 2 and so on: each search takes a number that keys its random stream."""
        self._shared.rounds += 1
        return self._shared.rounds - 1

    def note(self, name: str, score: Score, placement: GroupPlacement) -> None:
        """Record what a method found, and how many seconds of the whole budget have passed."""
        self._shared.found[name] = (score, placement)
        *_, whole = self._and_around()
        self._shared.found_seconds[name] = whole.spent_seconds

    def known(self, placement: GroupPlacement) -> bool:
        """Return True if this placement has been evaluated."""
        return _digest(placement) in self._shared.entries

    @property
    def distinct(self) -> int:
        """Number of placements of these groups whose scores are known."""
        return len(self._shared.entries)

    @property
    def evaluated(self) -> int:
        """Number of evaluations so far, with those of budgets `apart`."""
        return self._shared.bought

    def peaks(self, placement: GroupPlacement) -> NDArray[np.int64]:
        """Return [devices] the peak bytes of a placement that was evaluated; else `KeyError`."""
        return self._shared.entries[_digest(placement)][1]

    def score(
        self, problem: PlacementProblem, placements: NDArray[np.int32], *, always: bool = False
    ) -> list[Score]:
        """Return the score of each group placement [batch, groups], or `UNKNOWN` for those that the
        budget no longer pays for.

        always   evaluate even beyond the budget: for the placements that every result is compared
                 with. A Ctrl-C in the evaluator sets `interrupted`, and the batch that it broke
                 stays unknown
        """
        entries = self._shared.entries
        keys = [_digest(row) for row in placements]
        # One row for each distinct placement that the ledger lacks: repeats are bought once.
        rows = {key: i for i, key in enumerate(keys) if key not in entries}
        missing = sorted(rows.values())
        for batch in _batches(missing, len(problem.graph)):
            affordable = batch if always else batch[: int(min(self.left, len(batch)))]
            if not affordable or (self.exhausted and not always):
                break
            try:
                self._buy(problem, placements[affordable])
            except KeyboardInterrupt:
                self.interrupted = True
        return [entries[key][0] if key in entries else UNKNOWN for key in keys]

    def _buy(self, problem: PlacementProblem, placements: NDArray[np.int32]) -> None:
        """Evaluate the placements, charge for them and enter them in the ledger."""
        began = self.clock()
        evaluation = problem.evaluate(problem.spread(placements))
        self.charge(len(placements))
        for shared in {
            id(budget._shared): budget._shared for budget in self._and_around()
        }.values():
            shared.bought += len(placements)
        over = np.maximum(evaluation.peak_memory_bytes - problem.capacities, 0).sum(axis=1)
        # An infeasible placement that fits into memory (it waits for itself, or is not contiguous)
        # counts as lacking one byte, so that it is worse than every feasible one.
        lacking = np.where(evaluation.feasible, over, np.maximum(over, 1))
        used = _devices_used(placements[:, problem.running], problem.devices).tolist()
        for i, row in enumerate(placements):
            score = Score(float(lacking[i]), float(evaluation.values[i]))
            self._keep_fewest(used[i], score, row)
            self._enter(row, score, evaluation.peak_memory_bytes[i])
        self._shared.pace_seconds = (self.clock() - began) / len(placements)
        self.report()

    def _enter(self, placement: GroupPlacement, score: Score, peaks: NDArray[np.int64]) -> None:
        self._shared.entries[_digest(placement)] = (score, peaks)
        if self.best is None or score < self.best[0]:
            self._shared.best = (score, placement.copy(), peaks)

    def _keep_fewest(self, used: int, score: Score, placement: GroupPlacement) -> None:
        simple = self._shared.fewest.get(used)
        if simple is None or score < simple[0]:
            self._shared.fewest[used] = (score, placement.copy())

    def report(self) -> None:
        """Call `progress` of the whole budget with the share that is spent and the best value."""
        *_, whole = self._and_around()
        if whole.progress is not None and self.best is not None:
            score = self.best[0]
            whole.progress(whole.fraction, np.inf if score.lacking_bytes else score.value)


def parse_budget(text: str, clock: Callable[[], float] = working_clock) -> Budget:
    """Return the budget that a text names: "10" and "10s" are seconds, "5000e" is evaluations.

    Raises `UsageError` for any other text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([se]?)\s*", text)
    amount = float(match[1]) if match else 0.0
    if match is None or amount <= 0 or (match[2] == "e" and not amount.is_integer()):
        raise UsageError("--budget", f"{text!r} is not a budget; write 10, 10s or 5000e")
    if match[2] == "e":
        return Budget(evaluations=amount, clock=clock)
    return Budget(seconds=amount, clock=clock)


def part_of_budget(text: str, parts: int) -> str:
    """The text of one of so many equal parts of a budget. A part has an evaluation at least."""
    budget = parse_budget(text)
    if budget.evaluations < np.inf:
        return f"{max(1, int(budget.evaluations) // parts)}e"
    return f"{budget.seconds / parts:.6f}s"


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


def _devices_used(placements: NDArray[np.int32], devices: int) -> NDArray[np.int64]:
    """Return [batch] the number of distinct devices in each placement [batch, groups]."""
    is_used = np.zeros((len(placements), devices), dtype=bool)
    is_used[np.arange(len(placements))[:, None], placements] = True
    return np.asarray(is_used.sum(axis=1), dtype=np.int64)


def _batches(rows: list[int], ops: int) -> Iterator[list[int]]:
    """Yield the rows in batches of at most `BATCH_ENTRIES` entries and 1,024 rows, but of at least
    16 rows as far as there are so many."""
    size = max(16, BATCH_ENTRIES // max(1, ops))
    size = min(size, 1024)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
