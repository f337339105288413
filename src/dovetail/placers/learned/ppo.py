"""PPO's clipped objective over placements: what GDP is trained by.

J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017,
https://arxiv.org/abs/1707.06347, section 3, equation 7, as used by Y. Zhou et al., "GDP:
Generalized Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578:

    r = pi(a) / pi_drawn(a)          A: the trial's advantage
    L = -mean(min(r A, clip(r, 1 - c, 1 + c) A)) - w mean(entropy)

Differences: r is per decision, not of a whole placement: a product over a thousand decisions leaves
[1 - c, 1 + c] at the first step, and the gradient would be gone. Every decision of a trial has the
trial's advantage. There is no value network: the bias is the mean of all earlier trials, which is
the baseline's business (`advantage`). `with_elite` lets the best placement so far take part in
every batch, so that what was found once is learned; J. Oh et al., "Self-Imitation Learning", ICML
2018, https://arxiv.org/abs/1806.05635, replay what did better than expected.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.placers.learned.policy import Draw, Policy
from dovetail.placers.learned.records import Settings, View


def ppo(policy: Policy, view: View, draw: Draw, advantages: Tensor, settings: Settings) -> Tensor:
    """The loss of one pass over a batch of trials: a scalar with gradient.

    advantages   [batch] higher is better; 0 for trials that teach nothing

    Means run over the decisions that were open, of all trials.
    """
    judged = policy.judge(view, draw.actions)
    taken = (draw.log_probs != 0) | (judged.log_probs.detach() != 0)
    ratios = torch.exp(judged.log_probs - draw.log_probs)
    clipped = ratios.clamp(1 - settings.clip, 1 + settings.clip)
    each = advantages[:, None]
    gains = torch.minimum(ratios * each, clipped * each)
    gain = (gains * taken).sum() / taken.sum().clamp(min=1)
    if settings.entropy == 0:
        return -gain
    opened = judged.entropies.detach() > 0
    entropy = judged.entropies.sum() / opened.sum().clamp(min=1)
    return -gain - settings.entropy * entropy


def with_elite(
    policy: Policy,
    view: View,
    draw: Draw,
    advantages: Tensor,
    placement: NDArray[np.int32],
    weight: float,
) -> tuple[Draw, Tensor]:
    """(draw, advantages) with one more trial: that placement [groups], as if drawn by the policy as
    it is now, with `weight` times the highest advantage. As they were where the policy cannot say
    how it would decide for the placement, or nothing is better than expected."""
    actions = policy.actions_of(view, placement)
    highest = advantages.max()
    if actions is None or not highest > 0:
        return draw, advantages
    with torch.no_grad():
        log_probs = policy.judge(view, actions).log_probs.to(draw.log_probs)
    joined = {key: torch.cat([draw.actions[key], actions[key]]) for key in draw.actions}
    draw = replace(draw, actions=joined, log_probs=torch.cat([draw.log_probs, log_probs]))
    return draw, torch.cat([advantages, weight * highest[None]])
