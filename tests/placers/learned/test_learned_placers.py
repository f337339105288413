"""The learned methods as placers, through `place`."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dovetail.errors import OutOfMemoryError, PolicyMismatchError, UsageError
from dovetail.placers import PLACERS, Budget, place
from dovetail.placers.learned import placing
from dovetail.placers.learned.catalog import LEARNED, make_policy, settings_of
from dovetail.placers.learned.features import cut_placements, look
from dovetail.placers.learned.files import save_policy
from dovetail.placers.learned.judges import BudgetJudge
from dovetail.placers.learned.policy import Draw
from tests.support.learned_problems import random_problem, random_task
from tests.support.tiny_policies import Table

GROUPS = 6
OPTIONS = {
    "seq2seq": {"hidden": 8},
    "hdp": {"hidden": 8, "grouper_hidden": 8},
    "gdp": {"hidden": 16, "heads": 2},
    "seq2seq-paper": {"hidden": 8},
    "hdp-paper": {"hidden": 8, "grouper_hidden": 8},
    "gdp-paper": {"hidden": 16, "heads": 2},
}
METHODS = list(OPTIONS)


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Policies of a few neurons; an untrained one is shipped."""

    def make(name, view, seed=0):
        return make_policy(name, view, seed, **OPTIONS[name])

    monkeypatch.setattr(placing, "make_policy", make)
    monkeypatch.setattr(placing, "IDLE_UPDATES", 5)
    path = tmp_path / "gdp.safetensors"
    write_policy(path, "gdp")
    monkeypatch.setattr(placing, "shipped", lambda: path)


def write_policy(path, name):
    view = look(random_problem(1, GROUPS))
    card = {"trained_on": ["nothing"], "seed": 0, "updates": 0, "trials": 0, "seconds": 0.0}
    policy = make_policy(name, view, **OPTIONS[name])
    save_policy(path, policy, card | {"versions": {"dovetail": "0"}})


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_plan_within_its_evaluations(name):
    found = []
    for _ in range(2):
        budget = Budget(evaluations=40)
        outcome = place(random_problem(1, GROUPS), name, budget)
        assert outcome.placer == name
        assert 4 < outcome.evaluations <= 40
        found.append((outcome.value, outcome.placement.tolist(), outcome.evaluations))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", METHODS)
def test_what_is_returned_is_the_best_that_was_drawn(name):
    problem, budget = random_problem(2, GROUPS), Budget(evaluations=30)
    seen = []

    def evaluate(placements):
        found = problem.evaluate(placements)
        seen.extend(np.where(found.feasible, found.values, np.inf))
        return found

    placement = PLACERS[name](replace(problem, evaluate=evaluate), budget)
    assert budget.score(problem, placement[None])[0].value == min(seen)
    assert len(seen) == budget.spent <= 30


@pytest.mark.parametrize("name", METHODS)
def test_pins_are_respected(name):
    task = replace(random_task(1, GROUPS), pins=(("layers.2", "d1"), ("layers.4", "d0")))
    problem = task.problem()
    placement = PLACERS[name](problem, Budget(evaluations=30))
    assert placement[[2, 4]].tolist() == [1, 0]
    assert problem.allowed[np.arange(GROUPS), placement].all()


@pytest.mark.parametrize("name", METHODS)
def test_a_problem_that_does_not_fit_is_infeasible(name):
    task = random_task(1, GROUPS)
    task = replace(task, caps=(("d0", 1000), ("d1", 1000)))
    with pytest.raises(OutOfMemoryError):
        place(task.problem(), name, Budget(evaluations=20))


@pytest.mark.parametrize("name", METHODS)
def test_no_choice_and_no_budget_ask_for_no_policy(name, monkeypatch):
    monkeypatch.setattr(placing, "make_policy", None)
    monkeypatch.setattr(placing, "load_policy", None)
    task = random_task(1, GROUPS)
    bound = replace(task, pins=tuple((f"layers.{layer}", "d1") for layer in range(GROUPS)))
    problem = bound.problem()
    assert PLACERS[name](problem, Budget(evaluations=20)).tolist() == problem.fastest.tolist()
    problem, budget = task.problem(), Budget(evaluations=0)
    assert PLACERS[name](problem, budget).tolist() == problem.fastest.tolist()


def interrupted_after(problem, calls):
    """The problem, whose evaluator is interrupted in the call after so many."""
    seen = []

    def evaluate(placements):
        if len(seen) == calls:
            raise KeyboardInterrupt
        found = problem.evaluate(placements)
        seen.append(np.where(found.feasible, found.values, np.inf).min())
        return found

    return replace(problem, evaluate=evaluate), seen


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupt_keeps_the_best_so_far(name):
    problem, seen = interrupted_after(random_problem(1, GROUPS), 1)
    budget = Budget(evaluations=1000)
    placement = PLACERS[name](problem, budget)
    assert budget.interrupted
    assert len(seen) == 1
    assert budget.score(problem, placement[None])[0].value == seen[0]


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupt_before_anything_was_judged_leaves_the_method_out(name):
    problem, seen = interrupted_after(random_problem(1, GROUPS), 0)
    with pytest.raises(KeyboardInterrupt):
        PLACERS[name](problem, Budget(evaluations=1000))
    assert seen == []


@pytest.mark.parametrize("name", ["seq2seq", "hdp"])
def test_an_interrupt_in_the_policy_keeps_what_was_drawn(name, monkeypatch):
    cls, draws = LEARNED[name][0], []
    draw = cls.draw

    def interrupted(self, view, batch, generator):
        draws.append(batch)
        if len(draws) == 3:
            raise KeyboardInterrupt
        return draw(self, view, batch, generator)

    monkeypatch.setattr(cls, "draw", interrupted)
    problem, budget = random_problem(1, GROUPS), Budget(evaluations=1000)
    placement = PLACERS[name](problem, budget)
    assert budget.interrupted
    assert budget.ledger.best[1].tolist() == placement.tolist()


def test_a_policy_that_draws_nothing_new_ends_before_its_budget():
    problem = random_problem(1, GROUPS)
    budget = Budget(evaluations=1000)
    view, judge = look(problem), BudgetJudge(problem, budget)
    policy = Table(view.groups, view.device_count)
    with torch.no_grad():  # it has made up its mind
        policy.logits[:, 0] = 1e4
    learner = placing.train(policy, view, judge, settings_of("seq2seq"), 0)
    assert budget.spent == 1
    assert learner.updates == 1 + 5
    assert learner.trials == 16 * learner.updates


def test_training_ends_once_every_placement_is_known():
    problem = random_problem(1, 2)  # four placements
    budget = Budget(evaluations=1000)
    view, judge = look(problem), BudgetJudge(problem, budget)
    policy = make_policy("seq2seq", view, **OPTIONS["seq2seq"])
    learner = placing.train(policy, view, judge, settings_of("seq2seq"), 0)
    assert len(budget.ledger) == problem.placements == 4
    assert learner.updates < 5


def test_finetuning_goes_on_from_the_policys_proposals(tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "MOST_PROPOSED", 32)
    path = tmp_path / "own.safetensors"
    write_policy(path, "gdp")
    problem = random_problem(1, GROUPS, devices=3)
    spent = {}
    for updates in (0, 4):
        budget = Budget(evaluations=1000)
        placing.make_gdp(path, updates)(problem, budget)
        spent[updates] = budget.spent
    assert (
        1 < spent[0] <= 1 + 32 < spent[4] <= 1 + 32 + 4 * settings_of("gdp", finetuned=True).trials
    )


@pytest.mark.parametrize(("groups", "wanted"), [(9, 256), (1000, 131), (9000, 32)])
def test_the_more_groups_the_fewer_placements_are_proposed(groups, wanted, monkeypatch):
    def cut(view, *, advice):
        return np.arange(5 if advice else 3, dtype=np.int32)[:, None].repeat(view.groups, axis=1)

    monkeypatch.setattr(placing, "cut_placements", cut)

    class Silent:
        config = {}  # noqa: RUF012
        candidates = staticmethod(lambda view: np.zeros((7, view.groups), np.int32))
        parameters = staticmethod(lambda: iter([torch.zeros(1)]))

        @staticmethod
        def draw(view, batch, generator):
            return Draw({}, np.zeros((batch, view.groups), np.int32), torch.zeros(batch))

    view = SimpleNamespace(groups=groups)
    batches = list(placing.proposals(Silent, view, 0))
    assert [len(batch) for batch in batches[:2]] == [7, 5]
    assert sum(map(len, batches)) == wanted
    assert max(map(len, batches)) <= placing.BATCH


@pytest.mark.parametrize("seed", range(5))
def test_zero_shot_is_no_worse_than_any_advice(tmp_path, seed):
    path = tmp_path / "own.safetensors"
    write_policy(path, "gdp")
    problem = random_problem(seed, 20, devices=3)
    found = problem.evaluate(problem.spread(cut_placements(look(problem))))
    budget = Budget(evaluations=1000)
    placing.make_gdp(path, 0)(problem, budget)
    assert budget.ledger.best[0].value <= found.values[found.feasible].min()


def test_training_begins_with_the_best_that_was_judged_before():
    problem, budget = random_problem(1, GROUPS), Budget(evaluations=100)
    view, judge = look(problem), BudgetJudge(problem, budget)
    judge(np.array([[0, 1] * GROUPS, [0] * 2 * GROUPS], np.int32)[:, :GROUPS])
    policy = make_policy("gdp", view)
    learner = placing.train(policy, view, judge, settings_of("gdp"), 0, updates=0)
    best = learner.best[""]
    assert (best.seconds, best.found) == (judge.best[0].value, 0)
    assert np.array_equal(best.placement, judge.best[1])


@pytest.mark.parametrize(
    ("groups", "trials", "passes"), [(9, 64, 4), (2048, 32, 4), (3000, 10, 2), (9000, 8, 2)]
)
def test_the_more_groups_the_less_an_update_of_fine_tuning_does(groups, trials, passes):
    found = placing.finetuning(SimpleNamespace(groups=groups))
    assert (found.trials, found.passes) == (trials, passes)


def test_a_policy_of_another_method_is_refused(tmp_path):
    write_policy(tmp_path / "other", "seq2seq")
    with pytest.raises(PolicyMismatchError):
        placing.make_gdp(tmp_path / "other", 0)(random_problem(1, GROUPS), Budget(evaluations=9))


def test_the_catalog_has_the_three_methods_and_refuses_others():
    view = look(random_problem(1, GROUPS))
    for name in METHODS:
        assert make_policy(name, view, **OPTIONS[name]).name == name
        assert settings_of(name).trials > 0
    with pytest.raises(UsageError):
        settings_of("nothing")
    with pytest.raises(UsageError):
        partial(make_policy, "nothing")(view)
