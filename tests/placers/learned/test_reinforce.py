"""The loss whose gradient is RL17's: against the definition, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dovetail.placers.learned.losses import reinforce
from dovetail.placers.learned.policy import Draw
from dovetail.placers.learned.records import LearningSettings
from tests.support.tiny_policies import Table

ADVANTAGES = torch.tensor([1.0, -2.0, 0.0])
DEVICES = torch.tensor([[0, 1], [1, 1], [0, 0]])
VIEW = SimpleNamespace(
    groups=2,
    allowed=np.ones((2, 2), dtype=bool),
    free=np.ones(2, dtype=bool),
    settled=np.zeros(2, dtype=np.int32),
)


@pytest.fixture
def policy():
    policy = Table(2, 2)
    policy.logits.data = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    return policy


def loss_of(policy, advantages=ADVANTAGES, **settings):
    draw = Draw({"devices": DEVICES}, DEVICES.numpy().astype(np.int32), torch.zeros(3, 2))
    return reinforce(
        policy, VIEW, draw, advantages, LearningSettings("reinforce", 3, 0.1, **settings)
    )


def test_the_gradient_is_the_mean_of_advantage_times_that_of_the_log_probability(policy):
    loss_of(policy).backward()
    chances = policy.logits.detach().softmax(dim=1)
    wanted = torch.zeros(2, 2)
    for advantage, devices in zip(ADVANTAGES, DEVICES, strict=True):
        for group, device in enumerate(devices):
            wanted[group] -= advantage * (torch.eye(2)[device] - chances[group]) / 3
    torch.testing.assert_close(policy.logits.grad, wanted)


def test_a_step_down_makes_good_placements_likelier_and_bad_ones_less_likely(policy):
    before = policy.judge(VIEW, {"devices": DEVICES}).log_probs.sum(dim=1)
    loss_of(policy).backward()
    policy.logits.data -= 0.1 * policy.logits.grad
    after = policy.judge(VIEW, {"devices": DEVICES}).log_probs.sum(dim=1)
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_trials_that_teach_nothing_have_no_gradient(policy):
    loss_of(policy, torch.zeros(3)).backward()
    assert (policy.logits.grad == 0).all()


@pytest.mark.parametrize(("settings", "weight"), [
    ({"entropy": 0.5}, 0.25), ({"entropy_each": 0.5}, 0.5),
])  # fmt: skip
def test_entropy_is_weighed_as_a_mean_over_decisions_or_each(policy, settings, weight):
    chances = policy.logits.detach().softmax(dim=1)
    entropy = -(chances * chances.log()).sum()
    gained = loss_of(policy) - loss_of(policy, **settings)
    torch.testing.assert_close(gained, weight * entropy, check_dtype=False)
