"""The cheap methods, which every outcome is compared with and every search starts from."""

from collections.abc import Callable

from dovetail.placers.balanced import balanced
from dovetail.placers.budget import UNKNOWN, Budget
from dovetail.placers.etf import etf
from dovetail.placers.expert import expert
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.placers.single import single

Placer = Callable[[Problem, Budget], GroupPlacement]
BASELINES: dict[str, Placer] = {
    "single": single,
    "expert": expert,
    "balanced": balanced,
    "etf": etf,
}


def try_baselines(problem: Problem, budget: Budget) -> None:
    """Note in `budget.found` what each of them finds, even beyond the budget."""
    for name, method in BASELINES.items():
        if name not in budget.found:
            attempt(name, method, problem, budget)


def attempt(name: str, method: Placer, problem: Problem, budget: Budget) -> None:
    """Note in `budget.found` what a method finds, if that is better than what stands there; a
    Ctrl-C leaves it out.

    Raises `KeyboardInterrupt` if nothing at all is found by then.
    """
    try:
        placement = method(problem, budget)
        score = budget.score(problem, placement[None], always=True)[0]
    except KeyboardInterrupt:
        budget.interrupted = True
    else:
        if score != UNKNOWN and (name not in budget.found or score < budget.found[name][0]):
            budget.note(name, score, placement)
    if not budget.found:
        raise KeyboardInterrupt
