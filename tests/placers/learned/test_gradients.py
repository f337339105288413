"""Gradients of each loss against finite differences, and what is learned without information."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from dovetail.placers.learned.features import look
from dovetail.placers.learned.gdp import Gdp, GdpPaper
from dovetail.placers.learned.hdp import Hdp
from dovetail.placers.learned.learner import PolicyLearner, TaskView
from dovetail.placers.learned.losses import ppo, reinforce
from dovetail.placers.learned.records import LearningSettings, Trials
from dovetail.placers.learned.seq2seq import Seq2Seq, Seq2SeqPaper
from tests.support.learned_problems import random_problem

REINFORCE = LearningSettings("reinforce", trials=6, rate=0.01, entropy=0.1, entropy_each=0.05)
PPO = LearningSettings("ppo", trials=6, rate=0.01, entropy=0.1, passes=3, clip=0.05)
WHOLE = replace(PPO, ratio="placement", clip=0.5)
SMALL = {
    "seq2seq": (Seq2Seq, {"hidden": 6}, reinforce, REINFORCE),
    "hdp": (Hdp, {"hidden": 6, "grouper_hidden": 5}, reinforce, REINFORCE),
    # One segment: no gradient goes into the segment before, and none should.
    "gdp": (Gdp, {"hidden": 8, "heads": 2, "segment": 8}, ppo, PPO),
    "seq2seq-paper": (Seq2SeqPaper, {"hidden": 6}, reinforce, REINFORCE),
    "gdp-paper": (GdpPaper, {"hidden": 8, "heads": 2, "segment": 8}, ppo, WHOLE),
}


@pytest.fixture
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def exact_view(problem):
    """A view in float64, so that differences of 1e-6 are seen."""
    view = look(problem)
    floats = {
        field.name: getattr(view, field.name).astype(np.float64)
        for field in fields(view)
        if getattr(view, field.name).dtype == np.float32
    }
    return replace(view, **floats)


def small(name, view):
    cls, options, loss, settings = SMALL[name]
    return cls.for_view(view, seed=1, **options).double(), loss, settings


def directions(policy):
    """(parameter, a unit vector of its shape) for each parameter."""
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.parameters():
        way = torch.randn(parameter.shape, generator=generator)
        yield parameter, way / way.norm()


def slope(parameter, way, value, step=1e-6):
    """The central difference of `value()` along `way`."""
    with torch.no_grad():
        parameter += step * way
        above = float(value())
        parameter -= 2 * step * way
        below = float(value())
        parameter += step * way
    return (above - below) / (2 * step)


def cost_of(draw, costs):
    return torch.tensor([costs[tuple(row)] for row in draw.placements.tolist()])


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("name", SMALL)
def test_a_losss_gradient_is_its_finite_difference_along_every_parameter(name):
    view = exact_view(random_problem(1, groups=5, devices=3))
    policy, loss, settings = small(name, view)
    draw = policy.draw(view, settings.trials, torch.Generator().manual_seed(0))
    with torch.no_grad():  # ratios of PPO are not all 1, and some are beyond the clip
        for parameter, way in directions(policy):
            parameter += 0.1 * way
    advantages = torch.linspace(-1, 2, settings.trials)

    def value():
        return loss(policy, view, draw, advantages, settings)

    policy.zero_grad()
    value().backward()
    slopes = []
    for parameter, way in directions(policy):
        found = 0.0 if parameter.grad is None else float((parameter.grad * way).sum())
        slopes.append(slope(parameter, way, value))
        assert found == pytest.approx(slopes[-1], rel=1e-5, abs=1e-8)
    assert np.count_nonzero(np.abs(slopes) > 1e-6) > len(slopes) / 2


def all_actions(name, view):
    """Every way to decide: a dict of tensors, the batch first."""
    groups, devices = view.groups, view.device_count
    if name != "hdp":
        ways = list(itertools.product(range(devices), repeat=groups))
        return {"devices": torch.tensor(ways)}
    groupings, placed = [], []
    for grouping in itertools.product(range(groups), repeat=groups):
        choices = [range(devices) if g in grouping else [0] for g in range(groups)]
        for way in itertools.product(*choices):
            groupings.append(grouping)
            placed.append(way)
    noise = torch.full((len(placed),), -1)
    return {"groups": torch.tensor(groupings), "devices": torch.tensor(placed), "noise": noise}


def placements_of(name, actions):
    devices = actions["devices"]
    return (devices.gather(1, actions["groups"]) if name == "hdp" else devices).tolist()


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-paper", "hdp"])
def test_reinforce_estimates_the_gradient_of_the_expected_cost(name):
    problem = random_problem(2, groups=3, devices=2, tight=False)
    view = exact_view(problem)
    policy, _, settings = small(name, view)
    settings = replace(settings, entropy=0.0, entropy_each=0.0)
    actions = all_actions(name, view)
    rows = placements_of(name, actions)
    found = problem.evaluate(problem.spread(np.array(rows, dtype=np.int32)))
    costs = torch.from_numpy(np.sqrt(found.values))

    def chances():
        return policy.judge(view, actions).log_probs.sum(dim=1).exp()

    weights = chances().detach()
    assert float(weights.sum()) == pytest.approx(1)
    # Each way weighs its probability; a baseline changes nothing.
    for baseline in (0.0, 7.0):
        advantages = weights * len(weights) * (baseline - costs)
        policy.zero_grad()
        draw = policy.draw(view, 1, torch.Generator())
        reinforce(policy, view, replace(draw, actions=actions), advantages, settings).backward()
        for parameter, way in directions(policy):
            given = 0.0 if parameter.grad is None else float((parameter.grad * way).sum())
            exact = slope(parameter, way, lambda: (chances() * costs).sum())
            assert given == pytest.approx(exact, rel=1e-5, abs=1e-8)


class Judge:
    """Seconds of the simulator; `shuffled`: those of another trial of the batch."""

    def __init__(self, problem, shuffled):
        self.problem, self.shuffled = problem, shuffled
        self.rng = np.random.default_rng(5)

    def __call__(self, placements):
        seconds = self.problem.evaluate(self.problem.spread(placements)).values
        if self.shuffled:
            seconds = self.rng.permutation(seconds)
        return Trials(seconds, np.ones(len(seconds), bool), np.ones(len(seconds), bool))


def likely_seconds(policy, problem, view):
    """Mean seconds of what the policy draws."""
    draw = policy.draw(view, 256, torch.Generator().manual_seed(9))
    return problem.evaluate(problem.spread(draw.placements)).values.mean()


LEARNING = {
    "seq2seq": (0.005, 40, {}),
    "hdp": (0.01, 30, {"noise": 0.0, "bound": 5.0}),
    "gdp": (0.003, 25, {"layers": 1, "sage_layers": 1}),
    "seq2seq-paper": (0.01, 40, {}),
    "gdp-paper": (0.003, 25, {"layers": 1, "sage_layers": 1}),
}
"""Adam's rate, updates, and further options."""


def trained_seconds(name, seed, *, shuffled):
    """What a fresh policy's draws take on average, and what they take once it was trained."""
    cls, options, _, settings = SMALL[name]
    rate, updates, further = LEARNING[name]
    settings = replace(
        settings, trials=16, rate=rate, normalised=True, baseline="batch", entropy=0.0, clip=0.2
    )
    problem = random_problem(seed, groups=6, devices=2, tight=False)
    view = look(problem)
    policy = cls.for_view(view, seed=seed, **{**options, "hidden": 16, **further})
    before = likely_seconds(policy, problem, view)
    learner = PolicyLearner(
        policy, [TaskView("", view)], [Judge(problem, shuffled)], settings, seed=seed
    )
    theta = learner.theta
    for start in range(0, updates * settings.trials, settings.trials):
        indices = np.arange(start, start + settings.trials)
        theta += learner.update(theta, learner.gradient(theta, indices, 0).vector, 0.0)
    learner.flat.write(theta)
    return before, likely_seconds(policy, problem, view)


@pytest.mark.parametrize("name", SMALL)
def test_a_policy_learns_from_rewards_but_not_from_shuffled_ones(name):
    """The same seeds, and as many trials: rewards alone make the difference."""
    learned = np.mean([trained_seconds(name, seed, shuffled=False) for seed in range(3)], axis=0)
    control = np.mean([trained_seconds(name, seed, shuffled=True) for seed in range(3)], axis=0)
    assert learned[0] == control[0]
    gain = learned[0] - learned[1]
    assert gain > 0.03 * learned[0]
    assert control[0] - control[1] < gain / 2
