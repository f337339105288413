"""PPO's clipped objective, decision by decision and for a placement as a whole."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dovetail.placers.learned.losses import ppo, with_elite
from dovetail.placers.learned.policy import Draw, Judged
from dovetail.placers.learned.records import LearningSettings

SETTINGS = LearningSettings("ppo", trials=2, rate=0.1, clip=0.2)


@dataclass
class Fixed:
    """Stands for a policy with these ratios to what was drawn."""

    judged: Judged

    def judge(self, _view, actions):
        return Judged(self.judged.log_probs[: len(actions["d"])], self.judged.entropies)

    def actions_of(self, _view, placement):
        return {"d": torch.from_numpy(placement.astype(np.int64))[None]}


def drawn(log_probs):
    batch, decisions = log_probs.shape
    actions = {"d": torch.zeros(batch, decisions, dtype=torch.int64)}
    return Draw(actions, np.zeros((batch, decisions), np.int32), log_probs)


def loss_at(ratios, advantages, settings=SETTINGS, entropies=None):
    """(loss, its gradient by the logarithm of each ratio)"""
    old = torch.full_like(ratios, -1.0)
    new = (old + ratios.log()).requires_grad_()
    entropies = torch.zeros(1, ratios.shape[1]) if entropies is None else entropies
    loss = ppo(Fixed(Judged(new, entropies)), None, drawn(old), advantages, settings)
    (gradient,) = torch.autograd.grad(loss, new)
    return float(loss.detach()), gradient


def test_the_loss_is_the_clipped_mean_over_decisions():
    ratios = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 0.9]])
    found, _ = loss_at(ratios, torch.tensor([2.0, -1.0]))
    gains = [2 * 1.2, 2 * 0.5, 2 * 1.1, -1.5, -0.8, -0.9]
    assert found == pytest.approx(-np.mean(gains))


def test_a_decision_that_has_gone_far_enough_teaches_no_more():
    ratios = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 0.9]])
    _, gradient = loss_at(ratios, torch.tensor([2.0, -1.0]))
    assert gradient[0, 0] == 0  # better, and already likelier
    assert gradient[1, 1] == 0  # worse, and already less likely
    assert (gradient[0, 1:] < 0).all()
    assert gradient[1, 0] > 0
    assert gradient[1, 2] > 0


def test_one_ratio_for_a_placement_is_the_product_of_its_decisions():
    settings = replace(SETTINGS, ratio="placement")
    ratios = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.9, 0.9], [2.0, 2.0, 2.0]])
    found, gradient = loss_at(ratios, torch.tensor([2.0, -1.0, 3.0]), settings)
    assert found == pytest.approx(-np.mean([2 * 0.825, -1.215, 3 * 1.2]))
    assert (gradient[0] == gradient[0, 0]).all()
    assert gradient[0, 0] < 0 < gradient[1, 0]
    assert not gradient[2].any()


def test_the_ratio_of_a_placement_of_many_ops_stays_finite():
    settings = replace(SETTINGS, ratio="placement")
    found, gradient = loss_at(torch.full((1, 500), 2.0), torch.tensor([-1.0]), settings)
    assert np.isfinite(found)
    assert torch.isfinite(gradient).all()


def test_trials_without_an_advantage_teach_nothing():
    ratios = torch.tensor([[1.5, 0.5], [1.1, 0.9]])
    _, gradient = loss_at(ratios, torch.tensor([0.0, 1.0]))
    assert not gradient[0].any()
    assert gradient[1].any()


def test_decisions_that_were_not_open_are_left_out_of_the_mean():
    old = torch.tensor([[-1.0, 0.0, 0.0, 0.0]])
    judged = Judged(old.clone().requires_grad_(), torch.zeros(1, 4))
    found = ppo(Fixed(judged), None, drawn(old), torch.tensor([3.0]), SETTINGS)
    assert float(found.detach()) == pytest.approx(-3.0)


def test_entropy_is_a_bonus_of_what_is_open():
    settings = LearningSettings("ppo", trials=2, rate=0.1, entropy=0.5)
    entropies = torch.tensor([[0.6, 0.2, 0.0]])
    ratios = torch.ones(2, 3)
    plain, _ = loss_at(ratios, torch.zeros(2))
    found, _ = loss_at(ratios, torch.zeros(2), settings, entropies)
    assert found == pytest.approx(plain - 0.5 * 0.4)


def test_the_elite_joins_with_the_highest_advantage_as_if_just_drawn():
    old = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]])
    judged = Judged(torch.tensor([[-0.7, -0.3], [-0.5, -0.25]]), torch.zeros(1, 2))
    placement = np.array([1, 0], dtype=np.int32)
    draw, advantages = with_elite(
        Fixed(judged), None, drawn(old), torch.tensor([0.5, -1.0]), placement, 2.0
    )
    assert advantages.tolist() == [0.5, -1.0, 1.0]
    torch.testing.assert_close(
        draw.log_probs, torch.tensor([[-1.0, -2.0], [-0.5, -0.25], [-0.7, -0.3]])
    )
    assert draw.actions["d"].tolist() == [[0, 0], [0, 0], [1, 0]]


def test_where_nothing_is_better_than_expected_there_is_no_elite():
    old = torch.tensor([[-1.0, -2.0]])
    judged = Judged(old, torch.zeros(1, 2))
    placement = np.array([1, 0], dtype=np.int32)
    draw, advantages = with_elite(Fixed(judged), None, drawn(old), torch.zeros(1), placement, 1.0)
    assert advantages.tolist() == [0.0]
    assert len(draw.log_probs) == 1
