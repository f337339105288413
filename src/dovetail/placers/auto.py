"""The anytime portfolio: every method within one budget, and the table of what each found.

1. The baselines, then, where there are few placements (at most `exhaustive.MOST_PLACEMENTS`, and
   within the budget), all of them, which is exact.
2. Else the other constructive methods, while they take less than `CONSTRUCTIVE_SHARE`.
3. What is left goes to the methods that improve, slice by slice. All share the best placement so
   far and the best bound. A method's share of the budget follows what it has brought,

       share(m)  ~  FLOOR + gains(m) / all gains        gains fade by half at every slice

   where a gain is the relative fall of the best value plus the relative rise of the bound; the
   next slice goes to the method furthest behind its share. A method's slices double, since exact
   search and annealing use one long run better than many short ones. A method that returns early
   with nothing new is done.

The search stops early when the value meets the bound or every method is done. It returns the best
feasible placement that *any* method evaluated, so it is never worse than one of them.

Portfolio with shares by past success: Gomes and Selman, "Algorithm portfolios", Artificial
Intelligence 126, 2001, https://doi.org/10.1016/S0004-3702(00)00081-3; dynamic shares as in Gagliolo
and Schmidhuber, "Learning dynamic algorithm portfolios", 2006,
https://doi.org/10.1007/s10472-006-9036-z. Differences: one deterministic rule instead of a bandit,
so that a seed and a budget of evaluations give one plan.
"""

from dataclasses import dataclass

from dovetail.methods import PLACERS, Method
from dovetail.placers.baselines import attempt, try_baselines
from dovetail.placers.budget import Budget
from dovetail.placers.exhaustive import can_enumerate, exhaustive
from dovetail.placers.problem import GroupPlacement, PlacementProblem

CONSTRUCTIVE_SHARE = 0.4
"""Of the budget: no constructive method begins once so much of it is spent."""
FIRST_SLICE = 1 / 24
"""Of what is left when the improving methods begin; slices double from there. A method that builds
a model first begins with `Method.slices` times as much."""
LARGE_OPS, LARGE_SHARE = 20_000, 0.85
"""On a graph of more ops, `multilevel` begins with that share of what the constructive methods
leave, since simulating merged graphs is what makes moves cheap there. Methods that are not `large`
are left out: the linear programme of `sct` takes seconds by then."""
MOST_EXACT_GROUPS = 64
"""With more groups that have a choice, `exact` proves and finds nothing on a step in time."""
FLOOR = 0.15
"""Share that even a method without gains keeps, before shares are made to sum to 1."""
LEARNED = False
"""Whether the shipped policy proposes as well, after the constructive methods of a step."""


def auto(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """The best placement of all methods; of equally good ones that of the first method."""
    try_baselines(problem, budget)
    if can_enumerate(problem, budget):
        attempt("exhaustive", exhaustive, problem, budget)
    else:
        _construct(problem, budget)
        _improve(problem, budget)
    return min(budget.found.values(), key=lambda pair: pair[0])[1]


def methods_of(role: str, objective: str) -> list[Method]:
    """The methods of a role for an objective, in the order in which `auto` tries them."""
    suited = [m for m in PLACERS.values() if m.role == role and objective in m.objectives]
    return sorted(suited, key=lambda method: objective not in method.first_for)


def _construct(problem: PlacementProblem, budget: Budget) -> None:
    """Run each constructive method once, with a quarter of the share that is left for them."""
    methods = methods_of("constructive", problem.objective)
    if LEARNED and problem.objective == "step":
        methods.append(PLACERS["gdp"])
    for method in methods:
        if _is_large(problem) and not method.large:
            continue
        left = CONSTRUCTIVE_SHARE - budget.fraction
        if left <= 0 or budget.closed or budget.exhausted:
            return
        attempt(method.name, method.load(), problem, _part(budget, left / 4), may_refuse=True)


def _improve(problem: PlacementProblem, budget: Budget) -> None:
    """Spend the rest of the budget on the improving methods, by what each has brought."""
    arms = [_Arm(method) for method in methods_of("improving", problem.objective)]
    if problem.objective == "step" and len(problem.free) > MOST_EXACT_GROUPS:
        arms = [arm for arm in arms if arm.method.name != "exact"]
    first = (1 - budget.fraction) * FIRST_SLICE
    while arms and not (budget.exhausted or budget.closed):
        arm = _furthest_behind(arms)
        arm.slices += 1
        share = first * arm.method.slices * 2 ** (arm.slices - 1)
        if arm.method.name == "multilevel" and _is_large(problem):
            share = LARGE_SHARE * (1 - budget.fraction)
        share = min(share, 1 - budget.fraction)
        before, began = _state(budget), budget.fraction
        part, run = _part(budget, share), arm.method.load()
        usable = attempt(arm.method.name, run, problem, part, may_refuse=True)
        gain, spent = _gain(before, _state(budget)), budget.fraction - began
        arm.gains = arm.gains / 2 + gain
        arm.spent += max(spent, share / 8)
        if not usable or (gain == 0 and spent < share / 2 and not budget.exhausted):
            arms.remove(arm)


def _is_large(problem: PlacementProblem) -> bool:
    return len(problem.graph) > LARGE_OPS


@dataclass
class _Arm:
    """One improving method: what it was given and what it brought."""

    method: Method
    slices: int = 0
    spent: float = 0.0
    gains: float = 0.0


def _furthest_behind(arms: list[_Arm]) -> _Arm:
    """Of least spent / share; ties: the first."""
    total = sum(arm.gains for arm in arms) or 1.0
    return min(arms, key=lambda arm: arm.spent / (FLOOR + arm.gains / total))


def _state(budget: Budget) -> tuple[float, float, float]:
    """(bytes lacking, best value, bound)"""
    assert budget.best is not None, "the baselines were evaluated"
    score = budget.best[0]
    return score.lacking_bytes, score.value, 0.0 if budget.bound is None else budget.bound.seconds


def _gain(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Relative fall of the value plus relative rise of the bound; fitting into memory counts 1."""
    (lacking, value, bound), (lacking_now, value_now, bound_now) = before, after
    if lacking_now < lacking:
        return 1.0
    fall = max(0.0, value - value_now) / value if 0 < value < float("inf") else 0.0
    return fall + (bound_now - bound) / bound_now if bound_now > bound else fall


def _part(budget: Budget, share: float) -> Budget:
    """A slice of that share of the whole budget."""
    evaluations = share * budget.evaluations
    whole = evaluations if evaluations == float("inf") else max(1.0, float(int(evaluations)))
    return budget.slice(seconds=share * budget.seconds, evaluations=whole)
