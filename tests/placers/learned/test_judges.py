"""Judges: what the simulator says of a batch, and what a budget pays for."""

import numpy as np

from dovetail.placers import Budget
from dovetail.placers.learned.judges import BudgetJudge, SimulatedJudge
from tests.support.learned_problems import random_problem

GROUPS = 6


def test_the_simulators_judge_says_what_the_simulator_says():
    problem = random_problem(3, GROUPS)
    placements = np.random.default_rng(0).integers(2, size=(20, GROUPS)).astype(np.int32)
    found, wanted = (
        SimulatedJudge(problem)(placements),
        problem.evaluate(problem.spread(placements)),
    )
    assert np.array_equal(found.seconds, wanted.values)
    assert np.array_equal(found.valid, wanted.feasible)
    assert found.judged.all()
    assert 0 < found.valid.sum() < 20


def test_a_budgets_judge_pays_a_placement_once_and_leaves_what_it_cannot_pay_unjudged():
    problem = random_problem(1, GROUPS)
    budget = Budget(evaluations=3)
    judge = BudgetJudge(problem, budget)
    first = judge(np.array([[0, 1] * 3, [0, 1] * 3, [0] * 6], np.int32))
    assert first.judged.all()
    assert first.seconds[0] == first.seconds[1]
    assert budget.spent == 2
    second = judge(np.array([[0] * 6, [1] * 6, [1, 0] * 3], np.int32))
    assert second.judged.tolist() == [True, True, False]
    assert budget.spent == 3
    known = [budget.score(problem, np.array([row], np.int32))[0] for row in ([0, 1] * 3, [1] * 6)]
    assert judge.best[0] <= min(known)
