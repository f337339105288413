"""Multilevel placement: plan a small graph, then refine on ever larger ones.

    groups ──coarsen──► … ──coarsen──► units      every level is a graph of merged ops, on which
       ▲                                 │         placements of large graphs are simulated ten
    refine ◄──── … ◄────refine◄────── plan         times as fast or more

1. Coarsen groups by heavy edges until `COARSEST` units are left (`placers.coarsening`), and merge
   their ops (`placers.merging`): once, if that graph is small enough for all levels, else anew.
2. Where nothing is known yet, plan at every level with the baselines, and with repeated modules as
   units; the best on the true graph is the first incumbent.
3. In cycles: coarsen again, but join only groups that the incumbent puts on one device, so that it
   is one of the coarse placements (a V-cycle); go on from it by local search with whole units, then
   level by level with smaller ones. What is better on the true graph is the next incumbent.
4. What is left of the budget goes to local search on the true graph.

Paper: Walshaw, "Multilevel refinement for combinatorial optimisation problems", Annals of
Operations Research 131, 2004, https://doi.org/10.1023/B:ANOR.0000039525.80601.15.
Differences: levels differ by a factor of `GROWTH` in units, not 2, since each needs a graph of its
own; all levels plan, not the coarsest alone; refinement is local search with all its moves instead
of one along boundaries.

Budget: an evaluation on a merged graph is charged as the share that its ops are of the graph's.
With a budget of evaluations no decision looks at the clock. Memory: where what was found lacks
bytes on the true graph, the devices of the merged graphs get as much smaller as their peaks were
underestimated.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.baselines import BASELINES, try_baselines
from dovetail.placers.budget import Budget, Score
from dovetail.placers.coarsening import by_modules, coarsen
from dovetail.placers.local_search import local_search
from dovetail.placers.merging import merged_problem, under_units
from dovetail.placers.problem import GroupPlacement, Problem

COARSEST = 60
GROWTH = 4
MOST_OPS = 4000
"""Of a merged graph, where its units allow."""
FINE_OPS = 32000
"""Up to here the merged graph of the groups themselves serves every level."""
CYCLE_SHARE = 0.45
"""Of what is left of the budget for one cycle."""
MOST_CYCLES = 3
OBJECTIVES = ("step", "load")


def multilevel(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best placement found; where only convex placements are feasible, or there are no more
    than `COARSEST` groups, local search's."""
    small = len(problem.free) <= COARSEST
    if problem.contiguous or problem.objective not in OBJECTIVES or small:
        return local_search(problem, budget)
    levels = _Levels(problem, budget)
    best = levels.plan() if budget.best is None else budget.best[1]
    while not budget.exhausted and levels.cycles < MOST_CYCLES:
        best = levels.cycle(best, CYCLE_SHARE)
    return best if budget.exhausted else local_search(problem, budget)


class _Levels:
    """The way down and up, again and again.

    shifts   [devices] bytes by which merged graphs underestimated peaks
    """

    def __init__(self, problem: Problem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.shifts = np.zeros(problem.devices)
        self.cycles = self.refined = 0
        self._finest: Problem | None = None

    def plan(self) -> GroupPlacement:
        """The best of the baselines of all levels, and with repeated modules as units."""
        found = []
        levels = _spaced(coarsen(self.problem, COARSEST))
        modules = by_modules(self.problem)
        if int(modules.max()) + 1 < len(modules):
            levels.append(modules)
        for units in levels:
            small = self._merged(units)
            part = self._part(1 - self.budget.fraction, small)
            try_baselines(small, part)
            self._charge(part, small)
            assert part.best is not None, "the baselines were evaluated"
            found.append(part.best[1][units])
        return min(found, key=self._score)

    def cycle(self, incumbent: GroupPlacement, share: float) -> GroupPlacement:
        """The better of `incumbent` and what one cycle finds with `share` of what is left."""
        self.cycles += 1
        levels = _spaced(coarsen(self.problem, COARSEST, incumbent))
        share *= 1 - self.budget.fraction
        for units in levels:
            if not self.budget.exhausted:
                found = self._refine(units, incumbent, share / len(levels))
                incumbent = min(incumbent, found, key=self._score)
        return incumbent

    def _score(self, placement: GroupPlacement) -> Score:
        return self.budget.score(self.problem, placement[None], always=True)[0]

    def _merged(self, units: NDArray[np.int32]) -> Problem:
        """The finest merged graph where that is small, since it is the truest, else one of these
        units."""
        if self._finest is None:
            every = np.arange(len(units), dtype=np.int32)
            self._finest = merged_problem(self.problem, every, MOST_OPS)
        small = self._finest
        if len(small.graph) > FINE_OPS and int(units.max()) + 1 < len(units):
            small = merged_problem(self.problem, units, MOST_OPS)
        elif int(units.max()) + 1 < len(units):
            small = under_units(small, units)
        room = np.maximum(self.problem.capacities - self.shifts, 0).astype(np.int64)
        return replace(small, capacities=room)

    def _refine(
        self, units: NDArray[np.int32], start: GroupPlacement, share: float
    ) -> GroupPlacement:
        """What local search finds from `start`, which puts each unit on one device."""
        small = self._merged(units)
        self.refined += 1
        small = replace(small, seed=small.seed + self.refined)
        part = self._part(share, small)
        of_units = np.empty(small.groups.count, np.int32)
        of_units[units] = start
        score = part.score(small, of_units[None], always=True)[0]
        for name in BASELINES:  # nothing to construct: this is where the search goes on
            part.note(name, score, of_units)
        found = local_search(small, part)
        self._charge(part, small)
        placement = found[units]
        if self._score(placement).lacking_bytes > 0:
            under = self.budget.peaks(placement) - part.peaks(found)
            self.shifts = np.maximum(self.shifts, under)
        return placement

    def _part(self, share: float, small: Problem) -> Budget:
        """A budget of its own, since its placements are others; interrupted with the whole."""
        whole = self.budget
        evaluations = share * whole.evaluations * len(self.problem.graph) / len(small.graph)
        part = Budget(
            seconds=min(share * whole.seconds, whole.left_seconds),
            evaluations=evaluations if evaluations == np.inf else max(1.0, float(int(evaluations))),
            clock=whole.clock,
            threads=whole.threads,
        )

        def relay(_share: float, _value: float) -> None:
            part.interrupted |= whole.interrupted

        part.progress = relay
        return part

    def _charge(self, part: Budget, small: Problem) -> None:
        self.budget.charge(part.spent * len(small.graph) / len(self.problem.graph))
        self.budget.interrupted |= part.interrupted


def _spaced(levels: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """From coarse to fine, a factor of `GROWTH` in units or more between any two; the last has
    every group apart."""
    kept = [levels[-1]] if len(levels) > 1 else []
    for units in reversed(levels[1:-1]):
        count = int(units.max()) + 1
        if GROWTH * (int(kept[-1].max()) + 1) <= count <= len(units) / GROWTH:
            kept.append(units)
    return [*kept, levels[0]]
