"""The policy proposes, local search finishes: `gdp+search`.

What the policy draws zero-shot enters the ledger, and local search goes on from the best that is
known: the policy's, or a baseline's where that is better. GDP (Zhou et al., 2019,
https://arxiv.org/abs/1910.01578) fine-tunes its policy on the graph instead; the search is ours.
"""

from pathlib import Path

from dovetail.placers.baselines import Placer, attempt, try_baselines
from dovetail.placers.budget import Budget
from dovetail.placers.learned.placing import make_gdp
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, Problem

PROPOSING_SHARE = 0.2
"""Of the budget, at most: a policy that is slow on a large graph leaves the search its time."""


def make_gdp_search(policy: Path | None, finetune: int) -> Placer:
    """`make_gdp` with a search after it."""
    propose = make_gdp(policy, finetune)

    def gdp_search(problem: Problem, budget: Budget) -> GroupPlacement:
        """The best placement that the search finds from the policy's proposals. Raises
        `PolicyFileError` where no policy is shipped."""
        try_baselines(problem, budget)
        attempt("gdp", propose, problem, _part(budget, PROPOSING_SHARE))
        return local_search(problem, budget)

    return gdp_search


def gdp_search(problem: Problem, budget: Budget) -> GroupPlacement:
    """The shipped policy's proposals, improved by local search."""
    return make_gdp_search(None, 0)(problem, budget)


def _part(budget: Budget, share: float) -> Budget:
    return budget.slice(seconds=share * budget.seconds, evaluations=share * budget.evaluations)
