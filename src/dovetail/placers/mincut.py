"""MinCut: Scotch's mapping on all devices but the CPU.

Ops that only a CPU can run stay there; where a machine has nothing but CPUs, this is `scotch`.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.2. Differences: as in `scotch`.
"""

from dovetail.placers.budget import Budget
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.placers.scotch import map_within


def mincut(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best mapping on the devices that are no CPU. Raises `MissingLibraryError`."""
    devices = problem.device_sets[0]
    within = [d for d in devices if problem.machine.devices[d].kind != "cpu"]
    return map_within(problem, budget, within or devices)
