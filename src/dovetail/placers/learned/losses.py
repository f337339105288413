"""What a trial teaches: how much better its placement did than was expected.

A. Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.1; Y. Zhou et al.: GDP: Generalized Device Placement
for Dataflow Graphs, 2019, https://arxiv.org/abs/1910.01578, section 3.

    cost c      sqrt(seconds); the failing signal where the placement failed
    baseline B  "moving"  starts at the failing signal;  B <- decay B + (1 - decay) mean c   (RL17)
                "mean"    of the costs of all earlier trials                                  (GDP)
                "batch"   of the costs of the batch itself                                   (ours)
    advantage   B - c, B as it was before the batch: higher is better; 0 for what teaches nothing

RL17: only placements that ran teach from its 5,000th step on, and only they move the baseline then.
Differences: a batch moves the moving average once, by its mean. The first batch has no earlier
trials, and its own mean stands for theirs. `normalised` (ours) divides a batch's advantages by
their root mean square, but by no less than a thousandth of its mean cost: what a converged policy
draws differs in nothing that matters. A trial that was not judged counts nowhere.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.placers.learned.policy import Draw, Policy
from dovetail.placers.learned.records import BASELINES, Bool, LearningSettings, ProblemView, Trials

SMALLEST_SPREAD = 1e-3
"""Of the mean cost: differences below that are not made larger."""
LARGEST_LOG = 20.0
"""The logarithm of a placement's ratio is cut to this, so that the ratio stays finite."""


def cost(trials: Trials, settings: LearningSettings) -> NDArray[np.float64]:
    """[batch] sqrt(seconds), `settings.failing` where a placement failed or was not judged."""
    ran = trials.valid & trials.judged & np.isfinite(trials.seconds)
    return np.where(ran, np.sqrt(np.where(ran, trials.seconds, 0.0)), settings.failing)


def teaching(trials: Trials, settings: LearningSettings, update: int) -> Bool:
    """[batch] trials that teach in the controller's update of that number, from 0."""
    late = settings.valid_only_from is not None and update >= settings.valid_only_from
    return np.asarray(trials.judged & trials.valid if late else trials.judged, dtype=np.bool_)


@dataclass
class Baseline:
    """What a trial of one task costs a controller by its experience.

    value    the moving average, or the mean
    count    trials behind it
    """

    kind: str
    decay: float
    value: float
    count: int = 0

    @classmethod
    def of(cls, settings: LearningSettings) -> Self:
        """A controller's first one."""
        assert settings.baseline in BASELINES, settings.baseline
        return cls(settings.baseline, settings.baseline_decay, float(settings.failing))

    def advantages(
        self, trials: Trials, settings: LearningSettings, update: int
    ) -> NDArray[np.float64]:
        """[batch] and take these trials into account for the next ones."""
        costs, teaches = cost(trials, settings), teaching(trials, settings, update)
        if not teaches.any():
            return np.zeros(len(costs))
        mean, count = float(costs[teaches].mean()), int(teaches.sum())
        own = self.kind == "batch" or (self.kind == "mean" and self.count == 0)
        expected = mean if own else self.value
        found = np.where(teaches, expected - costs, 0.0)
        if settings.normalised:
            spread = float(np.sqrt(np.mean(found[teaches] ** 2)))
            found /= max(spread, SMALLEST_SPREAD * mean, np.finfo(np.float64).tiny)
        old = self.value if self.count else mean
        self.count += count
        if self.kind == "moving":
            self.value = self.decay * self.value + (1 - self.decay) * mean
        else:
            self.value = old + (mean - old) * count / self.count
        return found


# reinforce: the loss whose gradient is RL17's estimate of the policy's.
#
# R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
# learning", Machine Learning 8, 1992, https://doi.org/10.1007/BF00992696, as in A. Mirhoseini et
# al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
# https://arxiv.org/abs/1706.04972, section 3.1, equations 1 and 2:
#
#     gradient of J  ~  1/K Σ_k (R(p_k) - B) ∇ log π(p_k)        R = sqrt(seconds), to be minimised
#
#     advantages[k]  =  B - R(p_k), higher is better: `advantage` has B, the failing signal, and the
#                       rule from which update on only placements that ran teach
#
# Differences: an entropy term, for exploration (R. J. Williams and J. Peng, "Function optimization
# using connectionist reinforcement learning algorithms", Connection Science 3, 1991), of weight
# `LearningSettings.entropy` as a mean over decisions and `LearningSettings.entropy_each` as their
# sum.


def reinforce(
    policy: Policy, view: ProblemView, draw: Draw, advantages: Tensor, settings: LearningSettings
) -> Tensor:
    """The loss [] to descend: minus the mean over trials of advantage x log-probability, minus the
    weighted entropies.

    advantages   [batch], 0 for trials that teach nothing: they count in K all the same
    """
    judged = policy.judge(view, draw.actions)
    log_probs = judged.log_probs.sum(dim=1)
    loss = -(advantages * log_probs).mean()
    if settings.entropy:
        loss = loss - settings.entropy * judged.entropies.mean()
    if settings.entropy_each:
        loss = loss - settings.entropy_each * judged.entropies.sum(dim=1).mean()
    return loss


# PPO's clipped objective over placements: what GDP is trained by.
#
# J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017,
# https://arxiv.org/abs/1707.06347, section 3, equation 7, as used by Y. Zhou et al., "GDP:
# Generalized Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578:
#
#     r = pi(a) / pi_drawn(a)          A: the trial's advantage
#     L = -mean(min(r A, clip(r, 1 - c, 1 + c) A)) - w mean(entropy)
#
# With `LearningSettings.ratio` "placement" a is a whole placement, as in GDP's objective, whose
# policy is the probability of one. GDP's text does not say whether the ratio is clipped as a whole
# or op by op. A product over a thousand decisions leaves [1 - c, 1 + c] at the first step, so that
# further passes over a batch do little.
#
# Differences: with `ratio` "decision" (ours) r is per decision, and every decision of a trial has
# the trial's advantage. There is no value network: the bias is the mean of all earlier trials,
# which is the baseline's business (`advantage`). `with_elite` lets the best placement so far take
# part in every batch, so that what was found once is learned; J. Oh et al., "Self-Imitation
# Learning", ICML 2018, https://arxiv.org/abs/1806.05635, replay what did better than expected.


def ppo(
    policy: Policy, view: ProblemView, draw: Draw, advantages: Tensor, settings: LearningSettings
) -> Tensor:
    """The loss of one pass over a batch of trials: a scalar with gradient.

    advantages   [batch] higher is better; 0 for trials that teach nothing

    Means run over the decisions that were open, of all trials; over trials where each has one
    ratio.
    """
    judged = policy.judge(view, draw.actions)
    taken = (draw.log_probs != 0) | (judged.log_probs.detach() != 0)
    logs = judged.log_probs - draw.log_probs
    if settings.ratio == "placement":
        logs = logs.sum(dim=1, keepdim=True).clamp(max=LARGEST_LOG)
        taken = taken.any(dim=1, keepdim=True)
    ratios = torch.exp(logs)
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
    view: ProblemView,
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
