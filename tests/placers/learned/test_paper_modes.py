"""The methods as published: exact about what they draw, blind to what the papers do not feed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.errors import PolicyMismatchError
from dovetail.graph import colocate
from dovetail.methods import PLACERS
from dovetail.pipeline import learn, plan, resolve_model
from dovetail.placers.learned.catalog import LEARNED, make_policy, settings_of
from dovetail.placers.learned.features import look
from dovetail.placers.learned.files import load_policy, save_policy
from dovetail.placers.learned.learner import PolicyLearner, TaskView
from dovetail.placers.learned.records import Trials
from tests.support.drawn_placements import all_placements, draw, log_probs_of, masked
from tests.support.learned_problems import random_problem

SMALL = {
    "seq2seq-paper": {"hidden": 8},
    "hdp-paper": {"hidden": 8, "grouper_hidden": 6},
    "gdp-paper": {"hidden": 16, "heads": 2, "segment": 4},
}
PAPERS = list(SMALL)
PER_DECISION = ["seq2seq-paper", "gdp-paper"]


def view_of(seed=1, groups=7, devices=3):
    return look(random_problem(seed, groups=groups, devices=devices))


def policy_for(name, view, seed=0):
    """A small one with some character: all of its parameters count."""
    policy = make_policy(name, view, seed, **SMALL[name])
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return policy


def test_every_learned_method_has_its_mode_as_published():
    names = [name for name, method in PLACERS.items() if method.learns]
    assert sorted(names) == sorted(LEARNED)
    assert {f"{name}-paper" for name in LEARNED if name not in SMALL} == set(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_training_is_that_of_the_paper_without_our_additions(name):
    settings = settings_of(name)
    assert (settings.elite, settings.entropy_each, settings.normalised) == (0.0, 0.0, False)
    assert (settings.objective, settings.baseline) == (
        ("ppo", "mean") if name == "gdp-paper" else ("reinforce", "moving")
    )
    assert settings.ratio == ("placement" if name == "gdp-paper" else "decision")
    assert settings.failing == 10.0


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("mask", [False, True])
def test_what_was_drawn_is_judged_as_likely_as_when_it_was_drawn(name, mask):
    view = masked(view_of()) if mask else view_of()
    policy = policy_for(name, view)
    found = draw(policy, view)
    judged = policy.judge(view, found.actions)
    torch.testing.assert_close(judged.log_probs.detach(), found.log_probs)
    assert (found.log_probs.sum(dim=1) < 0).all()
    assert view.allowed[np.arange(7)[None], found.placements][:, view.free].all()
    assert (found.placements[:, ~view.free] == view.settled[~view.free]).all()
    assert len(np.unique(found.placements, axis=0)) > 4
    (judged.log_probs.sum() + judged.entropies.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", PER_DECISION)
@pytest.mark.parametrize("mask", [False, True])
def test_the_probabilities_of_all_placements_sum_to_one(name, mask):
    view = masked(view_of()) if mask else view_of()
    placements = all_placements(view)
    total = log_probs_of(policy_for(name, view), view, placements).double().exp().sum()
    assert abs(float(total) - 1) < 1e-5


@pytest.mark.parametrize("name", PER_DECISION)
def test_frequencies_of_draws_are_the_probabilities_that_judge_says(name):
    view = view_of(2, groups=2)
    policy = policy_for(name, view)
    placements = all_placements(view)
    chances = log_probs_of(policy, view, placements).exp().numpy()
    drawn = draw(policy, view, batch=20_000).placements
    counts = np.array([(drawn == row).all(axis=1).sum() for row in placements])
    spread = np.sqrt(20_000 * chances * (1 - chances))
    assert (np.abs(counts - 20_000 * chances) < 4.5 * spread + 1).all()


@pytest.mark.parametrize("name", PAPERS)
def test_costs_positions_and_devices_change_nothing_but_types_shapes_and_edges_do(name):
    view = view_of()
    policy = policy_for(name, view)
    found = draw(policy, view)
    blind = replace(
        view,
        numbers=view.numbers[::-1] + 1,
        devices=view.devices[::-1] - 1,
        links=view.links * 2,
    )
    again = draw(policy, blind)
    assert (again.placements == found.placements).all()
    assert (again.log_probs == found.log_probs).all()
    seeing = (
        replace(view, shapes=view.shapes[::-1].copy()),
        replace(view, kind_buckets=np.roll(view.kind_buckets, 1)),
        replace(view, sources=view.sources[:0], destinations=view.destinations[:0]),
    )
    for changed in seeing:
        assert (draw(policy, changed).log_probs != found.log_probs).any()


@pytest.mark.parametrize("name", PAPERS)
def test_the_same_seeds_draw_the_same_and_others_something_else(name):
    view = view_of()
    first, again, elsewhere = (make_policy(name, view, seed, **SMALL[name]) for seed in (3, 3, 4))
    assert (draw(first, view).log_probs == draw(again, view).log_probs).all()
    assert (draw(first, view).log_probs != draw(elsewhere, view).log_probs).any()
    assert (draw(first, view, seed=6).placements != draw(first, view).placements).any()


@pytest.mark.parametrize("name", PAPERS)
def test_a_file_gives_the_same_policy_back_under_its_name(name, tmp_path):
    view = view_of()
    policy = policy_for(name, view)
    save_policy(tmp_path / "policy", policy, {})
    loaded, card = load_policy(tmp_path / "policy", name)
    assert card["method"] == loaded.name == name
    assert (draw(loaded, view).log_probs == draw(policy, view).log_probs).all()


@pytest.mark.parametrize("name", PAPERS)
def test_a_policy_refuses_a_machine_with_more_devices(name):
    policy = policy_for(name, view_of())
    with pytest.raises(PolicyMismatchError, match="devices") as raised:
        policy.likeliest(view_of(devices=4))
    assert raised.value.policy == name


def test_only_gdps_policy_serves_a_graph_of_another_size():
    other = view_of(groups=9)
    policy = policy_for("gdp-paper", view_of())
    assert policy.likeliest(other).shape == (9,)
    with pytest.raises(PolicyMismatchError, match="7 groups on 3 devices"):
        policy_for("seq2seq-paper", view_of()).likeliest(other)


@pytest.mark.parametrize("name", PER_DECISION)
def test_the_likeliest_takes_the_best_device_at_each_step(name):
    view = masked(view_of())
    policy = policy_for(name, view, seed=2)
    chosen = policy.actions_of(view, policy.likeliest(view))["devices"][0]
    for step in np.flatnonzero(view.free):
        variants = chosen.repeat(3, 1)
        variants[:, step] = torch.arange(3)
        found = policy.judge(view, {"devices": variants}).log_probs[:, step]
        found = found.masked_fill(~torch.from_numpy(view.allowed[step]), -torch.inf)
        assert int(found.argmax()) == int(chosen[step])


def test_four_placements_of_hdp_share_a_grouping():
    view = view_of(groups=12)
    groups = draw(policy_for("hdp-paper", view), view, batch=8).actions["groups"]
    assert (groups[:4] == groups[0]).all()
    assert (groups[4:] == groups[4]).all()
    assert (groups[0] != groups[4]).any()


def test_ops_of_gdp_attend_beyond_their_neighbours_unless_told_not_to():
    view = view_of(groups=12)
    far = replace(view, shapes=view.shapes.copy())
    far.shapes[0] += 1
    for attention in (True, False):
        policy = make_policy("gdp-paper", view, 1, **SMALL["gdp-paper"] | {
            "segment": 16, "sage_layers": 1, "attention": attention})  # fmt: skip
        reached = policy.likeliest(view).shape == (12,)
        with torch.no_grad():
            changed = (policy.logs(far) != policy.logs(view)).any(dim=1)
        near = {0, *view.destinations[view.sources == 0], *view.sources[view.destinations == 0]}
        assert reached
        assert set(torch.nonzero(changed)[:, 0].tolist()) - near == (
            set(range(12)) - near if attention else set()
        )


@pytest.mark.parametrize(
    ("name", "rate"), [("seq2seq-paper", 0.01), ("hdp-paper", 0.03), ("gdp-paper", 0.01)]
)
def test_it_learns_a_tiny_problem(name, rate):
    problem = random_problem(1, groups=6, devices=2, tight=False)
    view = look(problem)

    def judge(placements):
        found = problem.evaluate(problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=bool))

    optimum = judge(all_placements(view)).seconds.min()
    settings = replace(settings_of(name), rate=rate)
    policy = make_policy(name, view, 0, **SMALL[name] | {"hidden": 16})
    learner = PolicyLearner(policy, [TaskView("tiny", view)], [judge], settings, seed=0)
    theta = learner.theta
    for first in range(0, 640, settings.trials):
        indices = np.arange(first, first + settings.trials)
        theta += learner.update(theta, learner.gradient(theta, indices, 0).vector, 0.0)
    means = [point.mean for point in learner.points]
    assert np.mean(means[-10:]) < np.mean(means[:10])
    assert learner.best["tiny"].seconds <= 1.02 * optimum


@pytest.mark.parametrize("name", ["hdp-paper", "gdp-paper"])
def test_every_op_is_placed_by_itself_whoever_asks(name, monkeypatch):
    small = LEARNED[name]._replace(options={**LEARNED[name].options, **SMALL[name]})
    monkeypatch.setitem(LEARNED, name, small)
    step = resolve_model("tests.support.small_models:trained", "adam")
    result = learn(step, "2 x p100 + haswell", method=name, trials=8, settings={"trials": 4})
    count = colocate(step.graph).count
    assert result.plan.groups == count
    assert (result.plan.placer, result.policy.name) == (name, name)
    found = plan(step, "2 x p100 + haswell", placer=name, budget="12e")
    assert (found.groups, found.placer) == (count, name)
