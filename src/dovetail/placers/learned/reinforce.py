"""reinforce: the loss whose gradient is RL17's estimate of the policy's.

R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning", Machine Learning 8, 1992, https://doi.org/10.1007/BF00992696, as in A. Mirhoseini et al.,
"Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.1, equations 1 and 2:

    gradient of J  ~  1/K Σ_k (R(p_k) - B) ∇ log π(p_k)        R = sqrt(seconds), to be minimised

    advantages[k]  =  B - R(p_k), higher is better: `advantage` has B, the failing signal, and the
                      rule from which update on only placements that ran teach

Differences: an entropy term, for exploration (R. J. Williams and J. Peng, "Function optimization
using connectionist reinforcement learning algorithms", Connection Science 3, 1991), of weight
`Settings.entropy` as a mean over decisions and `Settings.entropy_each` as their sum.
"""

from torch import Tensor

from dovetail.placers.learned.policy import Draw, Policy
from dovetail.placers.learned.records import Settings, View


def reinforce(
    policy: Policy, view: View, draw: Draw, advantages: Tensor, settings: Settings
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
