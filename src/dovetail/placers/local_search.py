"""Local search over groups, from the best of the constructed placements.

Each round proposes a batch of moves from the current placement and evaluates them together, so that
all cores are used. The best of the batch becomes current if it is no worse, or worse by a little:

    accept if   value <= current x (1 + temperature x Exp(1))

where the temperature falls to 0 as the budget is spent (annealing; Kirkpatrick, Gelatt and Vecchi,
Science 220, 1983, https://doi.org/10.1126/science.220.4598.671). When several moves of a batch
improve, the next batch tries them together. A search that stalls goes on from another start, or
from the best placement, blended with another start or shaken by a few moves (iterated local search;
Lourenco, Martin and Stutzle, 2003, https://doi.org/10.1007/0-306-48056-5_11).

Differences: annealing judges the best of a batch instead of one move, and its temperature follows
the budget spent instead of a fixed schedule; a restart is accepted whatever it finds.

Memory comes first: of two placements the one that lacks fewer bytes is better, whatever its value.
Kinds of move that have won are proposed more often. No placement is evaluated twice. Ties fall to
the earlier proposal, so a seed and a budget of evaluations give one result.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.baselines import try_baselines
from dovetail.placers.budget import UNKNOWN, Budget, Score
from dovetail.placers.critical import critical_path
from dovetail.placers.load_search import load_search
from dovetail.placers.moves import MOVES, Landscape, landscape
from dovetail.placers.problem import GroupPlacement, Problem

BATCH = 16
TEMPERATURE = 0.02
"""Of a fresh search: moves that lose about 2 % are taken."""
TRACE_ROUNDS = 6
"""Rounds between two looks at the critical path: one costs about three evaluations."""
STALL_ROUNDS = 40
"""Rounds without a new best before a restart, and as many more as there are groups / `BATCH`."""
TRIES = 6
"""Proposals drawn for each place in a batch before the neighbourhood counts as known."""
GIVE_UP = 20
"""Restarts in a row without anything new to evaluate before the search counts as complete."""


def local_search(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best placement found until the budget is spent, or until nothing new is found.

    For `load` that is `load_search`, which needs no evaluator on the way.
    """
    try_baselines(problem, budget)
    if problem.objective == "load" and not problem.contiguous:
        return load_search(problem, budget)
    found = [placement for _, placement in sorted(budget.found.values(), key=lambda pair: pair[0])]
    if budget.best is not None:
        found.insert(0, budget.best[1])
    starts = list({placement.tobytes(): placement for placement in found}.values())
    if len(problem.free):
        try:
            _Search(problem, budget, np.stack(starts)).run()
        except KeyboardInterrupt:
            budget.interrupted = True
    return budget.best[1] if budget.best is not None else starts[0]


@dataclass
class _Search:
    """The moving parts of one search.

    starts   [starts, groups] best first
    wins     [moves] how often each kind was accepted, fading; likewise `tries`
    """

    problem: Problem
    budget: Budget
    starts: NDArray[np.int32]
    land: Landscape = field(init=False)
    rng: np.random.Generator = field(init=False)
    wins: NDArray[np.float64] = field(init=False)
    tries: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.land = landscape(self.problem)
        self.rng = np.random.default_rng((self.problem.seed, self.budget.next_round()))
        self.wins = np.ones(len(MOVES))
        self.tries = np.full(len(MOVES), 4.0)

    def run(self) -> None:
        patience = STALL_ROUNDS + len(self.problem.free) // BATCH
        barren = 0
        current = self.starts[0]
        while not self._complete() and barren < GIVE_UP:
            before = self.budget.spent
            self._descend(current, patience)
            barren = barren + 1 if self.budget.spent == before else 0
            current = self._restart()

    def _descend(self, current: GroupPlacement, patience: int) -> None:
        """Move from `current` until `patience` rounds bring no new best."""
        score = self._scores(current[None])[0]
        best, stalled = score, 0
        merged: list[GroupPlacement] = []
        self._trace(current)
        rounds = 0
        while stalled < patience and not self._complete():
            kinds, batch = self._propose(current, merged)
            if not len(batch):
                return
            scores = self._scores(batch)
            winner = min(range(len(batch)), key=lambda i: (scores[i], i))
            self._learn(kinds, scores, score)
            merged = _merge(current, batch, scores, score)
            if self._accepts(scores[winner], score):
                current, score = batch[winner], scores[winner]
            rounds += 1
            if rounds % TRACE_ROUNDS == 0:
                self._trace(current)
            stalled = 0 if score < best else stalled + 1
            best = min(best, score)

    def _trace(self, current: GroupPlacement) -> None:
        """Find the critical path that moves are guided by; it grows old until the next look."""
        if self.problem.trace is not None and self.problem.objective == "step":
            timeline = self.problem.trace(self.problem.spread(current))
            self.land = replace(self.land, path=critical_path(self.problem, timeline))

    def _complete(self) -> bool:
        """The budget is spent, or every placement is known."""
        return self.budget.exhausted or self.budget.distinct >= self.problem.placements

    def _scores(self, batch: NDArray[np.int32]) -> list[Score]:
        return self.budget.score(self.problem, batch)

    def _propose(
        self, current: GroupPlacement, merged: list[GroupPlacement]
    ) -> tuple[list[int], NDArray[np.int32]]:
        """(kind of move or -1, placement) of up to `BATCH` that were never evaluated."""
        kinds, batch = [], []
        seen = {current.tobytes()}
        for candidate in merged:
            if candidate.tobytes() not in seen and not self.budget.known(candidate):
                seen.add(candidate.tobytes())
                kinds.append(-1)
                batch.append(candidate)
        odds = np.cumsum(self.wins / self.tries)
        draws = np.searchsorted(odds, self.rng.random(BATCH * TRIES) * odds[-1], side="right")
        for kind in draws.tolist():
            if len(batch) >= BATCH:
                break
            moved = MOVES[kind](current, self.land, self.rng)
            if moved is None or moved.tobytes() in seen or self.budget.known(moved):
                continue
            seen.add(moved.tobytes())
            kinds.append(kind)
            batch.append(moved)
        return kinds, np.array(batch, dtype=np.int32)

    def _accepts(self, new: Score, old: Score) -> bool:
        if new == UNKNOWN:
            return False
        if new <= old:
            return True
        if new.lacking_bytes > old.lacking_bytes:
            return False
        temperature = TEMPERATURE * (1 - self.budget.fraction) ** 2
        return new.value <= old.value * (1 + temperature * self.rng.exponential())

    def _learn(self, kinds: list[int], scores: list[Score], current: Score) -> None:
        for kind, score in zip(kinds, scores, strict=True):
            if kind >= 0:
                self.tries[kind] += 1
                self.wins[kind] += score < current
        if self.tries.sum() > 2000:
            self.wins = 1 + (self.wins - 1) / 2
            self.tries = 4 + (self.tries - 4) / 2

    def _restart(self) -> GroupPlacement:
        """Another start, or the best so far, shaken or blended with another start."""
        best = self.budget.best[1] if self.budget.best is not None else self.starts[0]
        current = best.copy()
        chance = self.rng.random()
        other = self.starts[self.rng.integers(len(self.starts))]
        if chance < 0.15:
            return np.asarray(other)
        if chance < 0.4:
            a, b = np.sort(self.rng.integers(len(current) + 1, size=2))
            current[a:b] = other[a:b]
        for _ in range(int(self.rng.integers(1, 6))):
            moved = MOVES[self.rng.integers(len(MOVES))](current, self.land, self.rng)
            current = current if moved is None else moved
        return current


def _merge(
    current: GroupPlacement, batch: NDArray[np.int32], scores: list[Score], score: Score
) -> list[GroupPlacement]:
    """The improving moves of a batch laid over one another: the best two, three, ..."""
    gains = [i for i in range(len(batch)) if scores[i] < score]
    better = sorted(gains, key=lambda i: (scores[i], i))
    merged, laid = [], current.copy()
    for rank, i in enumerate(better[:4]):
        changed = batch[i] != current
        laid = np.where(changed & (laid == current), batch[i], laid)
        if rank:
            merged.append(laid)
    return merged
