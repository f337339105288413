"""What tests of policies share: draws, a view with masks, and the odds of every placement."""

import itertools
from dataclasses import replace

import numpy as np
import torch


def draw(policy, view, batch=16, seed=5):
    return policy.draw(view, batch, torch.Generator().manual_seed(seed))


def masked(view):
    """Group 0 may not be on device 0, groups 1 and 2 have no choice."""
    allowed, free, settled = view.allowed.copy(), view.free.copy(), view.settled.copy()
    allowed[0, 0] = False
    allowed[1, :] = [False, False, True]
    free[[1, 2]] = False
    settled[[1, 2]] = [2, 1]
    return replace(view, allowed=allowed, free=free, settled=settled)


def all_placements(view):
    choices = [np.flatnonzero(row) for row in view.allowed]
    rows = np.array(list(itertools.product(*choices)), dtype=np.int32)
    return rows[(rows[:, ~view.free] == view.settled[~view.free]).all(axis=1)]


def log_probs_of(policy, view, placements):
    actions = torch.cat([policy.actions_of(view, row)["devices"] for row in placements])
    return policy.judge(view, {"devices": actions}).log_probs.sum(dim=1).detach()
