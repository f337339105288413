"""Everything on one device: the best of them. What is pinned elsewhere stays there."""

import numpy as np

from dovetail.placers.budget import Budget
from dovetail.placers.problem import GroupPlacement, Problem


def single(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best of one placement per device; ties: the first device.

    A group that may not be on the device goes to its fastest one, as RL17 puts ops without a GPU
    kernel on the CPU.
    """
    candidates = np.stack(
        [
            problem.settle(np.full(problem.groups.count, device))
            for device in range(problem.devices)
            if problem.machine.devices[device].kind != "host"
        ]
    )
    scores = budget.score(problem, candidates, always=True)
    return np.asarray(candidates[scores.index(min(scores))])
