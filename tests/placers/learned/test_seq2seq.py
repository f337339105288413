"""RL17's policy: what it draws is what it judges, under every mask, and it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.errors import PolicyMismatchError
from dovetail.placers.learned.features import POSITIONS, column, look
from dovetail.placers.learned.learner import PolicyLearner, TaskView
from dovetail.placers.learned.records import Trials
from dovetail.placers.learned.seq2seq import SETTINGS, Seq2Seq
from tests.support.drawn_placements import all_placements, draw, log_probs_of, masked
from tests.support.learned_problems import random_problem


@pytest.fixture
def view():
    return look(random_problem(1, groups=7, devices=3))


def policy_for(view, seed=0):
    """A small one with some character: all of its parameters count."""
    policy = Seq2Seq.for_view(view, seed=seed, hidden=8)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return policy


def test_what_was_drawn_is_judged_as_likely_as_when_it_was_drawn(view):
    policy = policy_for(view)
    found = draw(policy, view)
    judged = policy.judge(view, found.actions)
    torch.testing.assert_close(judged.log_probs.detach(), found.log_probs)
    assert found.log_probs.shape == judged.entropies.shape == (16, 7)
    assert (found.log_probs < 0).all()


def test_placements_are_the_actions_back_in_the_order_of_groups(view):
    numbers = view.numbers.copy()
    numbers[:, column("module")] = [0.5, 0.1, 0.9, 0.5, 0.0, 0.2, 0.3]
    view = replace(view, numbers=numbers)
    policy = policy_for(view)
    assert policy.order(view).tolist() == [4, 1, 5, 6, 0, 3, 2]
    found = draw(policy, view)
    assert (found.placements[:, policy.order(view)] == found.actions["devices"].numpy()).all()
    again = policy.actions_of(view, found.placements[3])["devices"]
    assert again.tolist() == [found.actions["devices"][3].tolist()]


@pytest.mark.parametrize("mask", [False, True])
def test_the_probabilities_of_all_placements_sum_to_one(view, mask):
    view = masked(view) if mask else view
    placements = all_placements(view)
    assert len(placements) == (2 * 3**4 if mask else 3**7)
    total = log_probs_of(policy_for(view), view, placements).double().exp().sum()
    assert abs(float(total) - 1) < 1e-5


def test_frequencies_of_draws_are_the_probabilities_that_judge_says():
    view = look(random_problem(2, groups=2, devices=3))
    policy = policy_for(view)
    torch.nn.init.zeros_(policy.worth)  # so that no placement is too rare to be counted
    placements = all_placements(view)
    chances = log_probs_of(policy, view, placements).exp().numpy()
    drawn = draw(policy, view, batch=20_000).placements
    counts = np.array([(drawn == row).all(axis=1).sum() for row in placements])
    spread = np.sqrt(20_000 * chances * (1 - chances))
    assert (np.abs(counts - 20_000 * chances) < 4.5 * spread).all()


def test_masks_hold_and_groups_without_a_choice_teach_nothing(view):
    view = masked(view)
    policy = policy_for(view)
    found = draw(policy, view, batch=200)
    assert view.allowed[np.arange(7)[None], found.placements][:, view.free].all()
    assert (found.placements[:, 1] == 2).all()
    assert (found.placements[:, 2] == 1).all()
    judged = policy.judge(view, found.actions)
    fixed = torch.from_numpy(np.isin(policy.order(view), [1, 2]))
    assert (judged.log_probs[:, fixed] == 0).all()
    assert (judged.entropies[:, fixed] == 0).all()
    assert (judged.entropies[:, ~fixed] > 0).all()
    (judged.log_probs.sum() + judged.entropies.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters())
    assert policy.likeliest(view)[[1, 2]].tolist() == [2, 1]


def test_the_same_generator_draws_the_same_and_another_draws_something_else(view):
    one, other, third = (draw(policy_for(view), view, seed=seed) for seed in (5, 5, 6))
    assert (one.placements == other.placements).all()
    assert (one.log_probs == other.log_probs).all()
    assert (one.placements != third.placements).any()
    first, again, elsewhere = (Seq2Seq.for_view(view, seed=seed) for seed in (3, 3, 4))
    assert (draw(first, view).log_probs == draw(again, view).log_probs).all()
    assert (draw(first, view).log_probs != draw(elsewhere, view).log_probs).any()


def test_making_a_policy_leaves_the_program_its_random_numbers(view):
    torch.manual_seed(11)
    wanted = torch.rand(3)
    torch.manual_seed(11)
    Seq2Seq.for_view(view, seed=1)
    assert (torch.rand(3) == wanted).all()


def test_the_likeliest_takes_the_best_device_at_each_step(view):
    view = masked(view)
    policy = policy_for(view, seed=2)
    chosen = policy.actions_of(view, policy.likeliest(view))["devices"][0]
    allowed = torch.from_numpy(view.allowed)[torch.from_numpy(policy.order(view))]
    for step in range(7):
        variants = chosen.repeat(3, 1)
        variants[:, step] = torch.arange(3)
        found = policy.judge(view, {"devices": variants}).log_probs[:, step]
        if found.max() < 0:  # a choice
            found = found.masked_fill(~allowed[step], -torch.inf)
        assert int(found.argmax()) == int(chosen[step])


def test_a_config_and_parameters_rebuild_a_policy(view):
    policy = policy_for(view)
    again = Seq2Seq(**policy.config)
    again.load_state_dict(policy.state_dict())
    assert (draw(again, view).log_probs == draw(policy, view).log_probs).all()


def test_a_fresh_policy_stays_on_a_device_for_runs_of_groups():
    view = look(random_problem(1, groups=60, devices=3))
    shares = []
    for stay in (0.0, 2.0):
        policy = Seq2Seq.for_view(view, stay=stay)
        torch.nn.init.zeros_(policy.worth)
        devices = draw(policy, view, batch=64).actions["devices"]
        shares.append(float((devices[:, 1:] == devices[:, :-1]).float().mean()))
    assert abs(shares[0] - 1 / 3) < 0.08
    assert abs(shares[1] - np.exp(2) / (np.exp(2) + 2)) < 0.08


def test_advice_of_other_methods_changes_nothing(view):
    policy = policy_for(view)
    numbers = view.numbers.copy()
    for name in ("schedule", "expert"):
        assert name in POSITIONS
        numbers[:, column(name)] = 0.25
    advised = replace(view, numbers=numbers)
    assert (numbers != view.numbers).any()
    assert (draw(policy, advised).log_probs == draw(policy, view).log_probs).all()


def test_a_policy_refuses_a_view_of_other_sizes(view):
    policy = policy_for(view)
    other = look(random_problem(1, groups=6, devices=3))
    with pytest.raises(PolicyMismatchError, match="7 groups on 3 devices") as raised:
        policy.likeliest(other)
    assert raised.value.policy == "seq2seq"


@pytest.mark.parametrize("seed", [1, 2])
def test_it_learns_the_optimum_of_a_tiny_problem(seed):
    problem = random_problem(seed, groups=6, devices=2)
    view = look(problem)

    def judge(placements):
        found = problem.evaluate(problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=bool))

    everything = judge(all_placements(view))
    optimum = everything.seconds[everything.valid].min()
    policy = Seq2Seq.for_view(view, seed=0)
    learner = PolicyLearner(policy, [TaskView("tiny", view)], [judge], SETTINGS, seed=0)
    theta = learner.theta
    for update in range(60):
        indices = np.arange(16 * update, 16 * (update + 1))
        theta += learner.update(theta, learner.gradient(theta, indices, 0).vector, 0.0)
    assert learner.best["tiny"].seconds == optimum
    means = [point.mean for point in learner.points]
    assert np.nanmean(means[-10:]) < np.nanmean(means[:10])
    likeliest = judge(policy.likeliest(view)[None])
    assert likeliest.valid[0]
    assert likeliest.seconds[0] <= 1.05 * optimum
