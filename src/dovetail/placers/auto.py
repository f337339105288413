"""Tries every method within one budget, keeps the best plan, and notes what each method found.

    coarse units ──steps 1 to 3──► best ──► split units ──local search──► … ──► the groups, apart
    COARSE_SHARE of the budget              the rest, an equal part for each level

Which ops should stay together is part of the search: few large units are quick to search, but the
best plan may split them. If the problem has `coarser` partitions, steps 1 to 3 place the units of
the coarsest one. Then local search improves the best placement on ever smaller units, down to the
groups themselves; see Walshaw's multilevel refinement in `multilevel`. All levels are simulated on
the true graph.

0. Where nothing has a choice of devices, as on one device, `single` is the plan, and exact.

1. The baselines, then, where there are few placements (at most `exhaustive.MOST_PLACEMENTS`, and
   within the budget), all of them, which is exact.
2. Otherwise the constructive methods, each once, until `CONSTRUCTIVE_SHARE` of the budget is spent.
3. The rest of the budget goes to the improving methods, slice by slice. All share the best
   placement so far and the best bound. A method's share depends on its gains so far:

       share(m)  ~  FLOOR + gains(m) / all gains        m's gains are halved at each slice of m

   A gain is the relative fall of the best value plus the relative rise of the bound. The next slice
   goes to the method that is furthest behind its share. Each slice of a method is twice as long as
   the one before, since exact search and annealing use one long run better than many short ones. A
   method that returns early without a gain gets no more slices.

The search stops early when the value meets the bound or every method is done. It returns the best
feasible placement that *any* method evaluated, so it is never worse than one of them.

Portfolio with shares by past success: Gomes and Selman, "Algorithm portfolios", Artificial
Intelligence 126, 2001, https://doi.org/10.1016/S0004-3702(00)00081-3; dynamic shares as in Gagliolo
and Schmidhuber, "Learning dynamic algorithm portfolios", 2006,
https://doi.org/10.1007/s10472-006-9036-z. Differences: one deterministic rule instead of a bandit,
so that a seed and a budget of evaluations give one plan.
"""

from dataclasses import dataclass

import numpy as np

from dovetail.errors import NoPlanFitsError
from dovetail.methods import PLACERS, Method
from dovetail.placers.baselines import attempt, single, try_baselines
from dovetail.placers.budget import Budget
from dovetail.placers.exhaustive import can_enumerate, exhaustive
from dovetail.placers.local_search import local_search
from dovetail.placers.multilevel import under_units
from dovetail.placers.problem import GroupPlacement, PlacementProblem

CONSTRUCTIVE_SHARE = 0.4
"""No constructive method begins once this share of the budget is spent."""
FIRST_SLICE = 1 / 24
"""A method's first slice, as a share of the budget that is left when the improving methods begin.
A method that builds a model before it searches gets `Method.slices` times as much."""
LARGE_OPS, LARGE_SHARE = 20_000, 0.85
"""On a graph of more than `LARGE_OPS` ops, a slice of `multilevel` is `LARGE_SHARE` of the budget
that is left, because moves are cheap only on the merged graphs that it simulates. Constructive
methods that are not `Method.large` are left out there: the linear programme of `sct` takes seconds
on such a graph."""
MOST_EXACT_GROUPS = 64
"""`auto` leaves out `exact` for the objective `step` if more groups than this have a choice: it
then neither finds nor proves anything in time."""
FLOOR = 0.15
"""A method without gains keeps this share, before shares are scaled to sum to 1."""
COARSE_SHARE = 0.35
"""The share of the budget that is spent on the coarsest units, if groups may be split."""
SPLIT = "split_groups"
"""The name in outcomes for a placement that splits units of the coarsest partition."""


@dataclass
class _Arm:
    """An improving method, how often and for how long it ran, and its gains, halved at each
    slice."""

    method: Method
    slices: int = 0
    spent: float = 0.0
    gains: float = 0.0


def auto(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best placement of all methods; ties: the method that was tried first."""
    if not len(problem.free):
        attempt("single", single, problem, budget)
        attempt("exhaustive", exhaustive, problem, budget)
    elif problem.coarser:
        levels = [*problem.coarser, np.arange(problem.groups.count, dtype=np.int32)]
        # If the coarsest units are so few that all their placements are tried, the methods run on
        # the next ones as well.
        enumerated = True
        for i, unit_of in enumerate(levels):
            if i and (budget.closed or budget.exhausted):
                break
            is_last = i + 1 == len(levels)
            left = 1 - budget.fraction
            share = COARSE_SHARE if enumerated and not is_last else 1 / (len(levels) - i)
            # A ledger is keyed by placements of its units, so each level has one of its own.
            part = budget.share(left * share, apart=True)
            if budget.ledger.bound is not None:
                part.ledger.prove(budget.ledger.bound.seconds, budget.ledger.bound.proof)
            if i:
                # So far units are whole in every placement, so any group tells where its unit is.
                _, some_group = np.unique(unit_of, return_index=True)
                part.ledger.adopt(budget.ledger, some_group.astype(np.int32))
            try:
                level = under_units(problem, unit_of)
                if enumerated:
                    enumerated = _try_methods(level, part)
                else:
                    attempt(SPLIT, local_search, level, part)
            except NoPlanFitsError:
                # Smaller units may fit where these do not.
                if is_last:
                    raise
                enumerated = True
            finally:
                budget.ledger.adopt(part.ledger, unit_of)
    else:
        _try_methods(problem, budget)
    return min(budget.ledger.results.values(), key=lambda pair: pair[0])[1]


def _try_methods(problem: PlacementProblem, budget: Budget) -> bool:
    """Run the methods on these groups, as steps 1 to 3 say. Returns True if instead of them all
    placements were tried."""
    ledger, is_large = budget.ledger, len(problem.graph) > LARGE_OPS

    # 1. The baselines, and all placements if they are few.
    try_baselines(problem, budget)
    if can_enumerate(problem, budget):
        attempt("exhaustive", exhaustive, problem, budget)
        return True

    # 2. Each constructive method gets a quarter of the share that is left for them, so that a slow
    # one leaves some to those after it.
    for method in methods_of("constructive", problem.objective):
        if is_large and not method.large:
            continue
        left = CONSTRUCTIVE_SHARE - budget.fraction
        if left <= 0 or budget.closed or budget.exhausted:
            break
        attempt(method.name, method.load(), problem, budget.share(left / 4), may_refuse=True)

    # 3. The improving methods share the rest in proportion to their gains.
    arms = [_Arm(method) for method in methods_of("improving", problem.objective)]
    if problem.objective == "step" and len(problem.free) > MOST_EXACT_GROUPS:
        arms = [arm for arm in arms if arm.method.name != "exact"]
    first_share = (1 - budget.fraction) * FIRST_SLICE
    while arms and not (budget.exhausted or budget.closed):
        # The next slice goes to the method that has spent least relative to its share; ties: the
        # first. Without any gain yet, all shares are equal.
        gains = sum(arm.gains for arm in arms) or 1.0
        arm = min(arms, key=lambda arm: arm.spent / (FLOOR + arm.gains / gains))
        arm.slices += 1
        share = first_share * arm.method.slices * 2 ** (arm.slices - 1)
        if arm.method.name == "multilevel" and is_large:
            share = LARGE_SHARE * (1 - budget.fraction)
        share = min(share, 1 - budget.fraction)

        assert ledger.best is not None, "the baselines were evaluated"
        before, bound_before, began = ledger.best[0], ledger.bound, budget.fraction
        part, run = budget.share(share), arm.method.load()
        usable = attempt(arm.method.name, run, problem, part, may_refuse=True)
        score, bound, spent = ledger.best[0], ledger.bound, budget.fraction - began

        # A gain is the relative fall of the value plus the relative rise of the bound, or 1 if the
        # best placement lacks less memory than before.
        gain = 0.0
        if score.lacking_bytes < before.lacking_bytes:
            gain = 1.0
        else:
            if 0 < before.value < np.inf:
                gain = max(0.0, before.value - score.value) / before.value
            low = 0.0 if bound_before is None else bound_before.seconds
            if bound is not None and bound.seconds > low:
                gain += (bound.seconds - low) / bound.seconds
        arm.gains = arm.gains / 2 + gain
        # A slice counts as at least an eighth spent. A method that returns at once would otherwise
        # stay furthest behind its share and be chosen again and again.
        arm.spent += max(spent, share / 8)
        # A method is done if it refused the problem, or if it left more than half of its slice
        # unspent and gained nothing: it has nothing more to try.
        if not usable or (gain == 0 and spent < share / 2 and not budget.exhausted):
            arms.remove(arm)
    return False


def methods_of(role: str, objective: str) -> list[Method]:
    """Return the methods of a role for an objective, in the order in which `auto` tries them."""
    suited = [m for m in PLACERS.values() if m.role == role and objective in m.objectives]
    return sorted(suited, key=lambda method: objective not in method.first_for)
