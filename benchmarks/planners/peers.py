"""What accelerate's `infer_auto_device_map` places, as a placement that our evaluator can judge.

accelerate fills devices one after another with whole modules, by the bytes of their parameters. Its
map says where each module's parameters live and its forward runs; backward and update ops go with
their module, ops outside all modules (sums of losses) to the last device of the map.
"""

import numpy as np
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import nn

from dovetail.placers import Budget, GroupPlacement, PlacementProblem


def accelerate_placement(
    problem: PlacementProblem, module: nn.Module, budget: Budget
) -> GroupPlacement:
    """The better of its sequential and its balanced map, on the fastest model of device."""
    devices = problem.device_sets[-1]
    found = []
    for balanced in (False, True):
        memory = {i: int(problem.capacities[device]) for i, device in enumerate(devices)}
        if balanced:
            memory = get_balanced_memory(module, max_memory=memory)
        where = infer_auto_device_map(module, max_memory={**memory, "cpu": 2**50})
        found.append(_placement(problem, where, devices))
    scores = budget.score(problem, np.stack(found), always=True)
    return found[scores.index(min(scores))]


def _placement(
    problem: PlacementProblem, where: dict[str, int | str], devices: list[int]
) -> GroupPlacement:
    host = problem.machine.host_index
    of_module = {path: devices[to] if isinstance(to, int) else host for path, to in where.items()}
    last = max(of_module.values())
    placed = {path: _device(of_module, path, last) for path in dict.fromkeys(problem.graph.modules)}
    of_op = np.array([placed[path] for path in problem.graph.modules])
    votes = np.zeros((problem.groups.count, problem.devices))
    seconds = np.where(problem.graph.is_source, 0.0, problem.costs.compute_seconds.min(axis=1))
    np.add.at(votes, (problem.groups.of_op, of_op), seconds + 1e-12)
    return problem.settle(votes.argmax(axis=1))


def _device(of_module: dict[str, int], path: str, last: int) -> int:
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        if (prefix := ".".join(parts[:length])) in of_module:
            return of_module[prefix]
    return last
