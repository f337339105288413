"""The learned methods as placers: one controller in this process, judged by the budget's ledger.

    make policy ─► [draw ─► judge ─► theta += U(g)] x n ─► the best placement that was judged

seq2seq   from a fresh policy, by REINFORCE (RL17)
hdp       likewise, its grouper trained with it
*-paper   each of the three as published, from a fresh policy
gdp       from a policy that was trained before on other graphs, zero-shot: what it thinks
          likeliest, the cuts and the advice that it began from, and what it draws; then, if told
          to, some updates by PPO, which learn from the best of those

A loop ends with the budget, once every placement is known, or once the policy draws nothing new.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.placers.baselines import Placer, attempt, try_baselines
from dovetail.placers.budget import Budget
from dovetail.placers.learned.catalog import make_policy, settings_of
from dovetail.placers.learned.features import cut_placements, look
from dovetail.placers.learned.files import load_policy, shipped
from dovetail.placers.learned.judges import BudgetJudge
from dovetail.placers.learned.learner import BestPlacement, PolicyLearner, TaskView
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, PlacementProblem

IDLE_UPDATES = 20
"""Updates in a row that drew nothing new: the policy has made up its mind."""
FEWEST_PROPOSED, MOST_PROPOSED, PROPOSED_GROUPS = 32, 256, 2**17
"""Placements that a zero-shot policy proposes: as many as have that many groups in all, within
those limits."""
BATCH = 32
FEWEST_TUNED, TUNED_GROUPS = 8, 2**16
LARGE = 2048
"""Trials of an update of fine-tuning, likewise; with more groups than `LARGE` half as many, and
half the passes: what 50 updates take is a matter of a minute."""


def _placer(search: Callable[[PlacementProblem, ProblemView, BudgetJudge], None]) -> Placer:
    """The placer that returns the best placement [groups] of those that `search` has judged. It
    raises `KeyboardInterrupt` if one came before anything was."""

    def place(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
        view, judge = look(problem), BudgetJudge(problem, budget)
        if not view.free.any() or budget.exhausted:
            return problem.fastest
        try:
            search(problem, view, judge)
        except KeyboardInterrupt:
            budget.interrupted = True
        if judge.best is not None:
            return judge.best[1]
        if budget.interrupted:
            raise KeyboardInterrupt
        return problem.fastest

    return place


def make_gdp(policy: Path | None, finetune: int) -> Placer:
    """A placer by the policy in that file, by default the shipped one, after `finetune` updates.

    It raises what `load_policy` raises.
    """

    def search(problem: PlacementProblem, view: ProblemView, judge: BudgetJudge) -> None:
        loaded, _card = load_policy(policy or shipped(), "gdp")
        for placements in proposals(loaded, view, problem.seed):
            judge(placements)
            if judge.budget.exhausted:
                break
        if finetune:
            settings = finetuning(view)
            train(loaded.alone(view), view, judge, settings, problem.seed, updates=finetune)

    return _placer(search)


def finetuning(view: ProblemView) -> LearningSettings:
    """How a policy is tuned on that view: the more groups, the less an update does."""
    settings = settings_of("gdp", finetuned=True)
    less = 1 if view.groups <= LARGE else 2
    trials = max(FEWEST_TUNED, TUNED_GROUPS // (less * view.groups))
    return replace(settings, trials=min(settings.trials, trials), passes=settings.passes // less)


def proposals(policy: Policy, view: ProblemView, seed: int) -> Iterator[NDArray[np.int32]]:
    """What the policy takes for good, zero-shot, in batches [batch, groups]: its candidates; the
    graph cut by each position, which is what its training began from and what it should not be
    worse than; then what it draws."""
    cut = cut_placements(view, advice=bool(policy.config.get("advice", True)))
    chosen = policy.candidates(view), np.unique(cut, axis=0)
    yield from chosen
    wanted = min(max(FEWEST_PROPOSED, PROPOSED_GROUPS // view.groups), MOST_PROPOSED)
    device = next(policy.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for first in range(sum(map(len, chosen)), wanted, BATCH):
        yield policy.draw(view, min(BATCH, wanted - first), generator).placements


def train(
    policy: Policy,
    view: ProblemView,
    judge: BudgetJudge,
    settings: LearningSettings,
    seed: int,
    *,
    updates: int | None = None,
) -> PolicyLearner:
    """Train the policy until the budget is spent, nothing new is drawn, or for so many updates.
    The best that was judged before is where the best so far begins.

    It is `theta += U(g)` with one learner: the parameter server with one worker and window 1.
    """
    learner = PolicyLearner(policy, [TaskView("", view)], [judge], settings, seed=seed)
    if judge.best is not None and not judge.best[0].lacking_bytes:
        learner.best[""] = BestPlacement(judge.best[1], judge.best[0].value, 0)
    budget, idle = judge.budget, 0
    while idle < IDLE_UPDATES and learner.updates != updates:
        if budget.exhausted or len(budget.ledger) >= judge.problem.placements:
            break
        spent = budget.spent
        learner.step()
        idle = 0 if budget.spent > spent else idle + 1
    return learner


def train_afresh(name: str) -> Placer:
    """The placer that trains a fresh policy of that method until the budget is spent, and returns
    the best placement [groups] that it drew."""

    def search(problem: PlacementProblem, view: ProblemView, judge: BudgetJudge) -> None:
        policy = make_policy(name, view, problem.seed)
        train(policy, view, judge, settings_of(name), problem.seed)

    return _placer(search)


# The policy proposes, local search finishes: `gdp+search`.
#
# What the policy draws zero-shot enters the ledger, and local search goes on from the best that is
# known: the policy's, or a baseline's where that is better. GDP (Zhou et al., 2019,
# https://arxiv.org/abs/1910.01578) fine-tunes its policy on the graph instead; the search is ours.


PROPOSING_SHARE = 0.2
"""Of the budget, at most: a policy that is slow on a large graph leaves the search its time."""


def make_gdp_search(policy: Path | None, finetune: int) -> Placer:
    """`make_gdp` with a search after it."""
    propose = make_gdp(policy, finetune)

    def place(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
        """The best placement that the search finds from the policy's proposals. Raises
        `PolicyFileError` where no policy is shipped."""
        try_baselines(problem, budget)
        part = budget.slice(
            seconds=PROPOSING_SHARE * budget.seconds,
            evaluations=PROPOSING_SHARE * budget.evaluations,
        )
        attempt("gdp", propose, problem, part)
        return local_search(problem, budget)

    return place


# What the table of placers names.

seq2seq, seq2seq_paper = train_afresh("seq2seq"), train_afresh("seq2seq-paper")
hdp, hdp_paper = train_afresh("hdp"), train_afresh("hdp-paper")
gdp_paper = train_afresh("gdp-paper")
gdp, gdp_search = make_gdp(None, 0), make_gdp_search(None, 0)
"""By the shipped policy, zero-shot."""
