"""Searches over few, large units, in which weights stay together with all that reads them.

To move the weights of a layer, a search must move every group that reads them. Moved one by one,
each of these groups makes the step longer, so a search that moves single groups never finds what
moving the whole layer would gain. Here a unit is a *family*: the groups that read one parameter,
and the groups that read none and exchange most bytes with these. A group that reads several
parameters belongs to the largest. The search descends from several placements:

    each unit in random order goes to the device where the step is shortest, until none moves

This is coordinate descent over units x devices.

Source: RL17's expert gives each layer a device by hand (Mirhoseini et al., ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.1). Differences: the input and the recurrent weights of
a layer are two families, and the simulated step decides, not a rule.
"""

import numpy as np
from numpy.typing import NDArray

from dovetail.graph.grouping import numbered
from dovetail.placers.budget import Budget, Score
from dovetail.placers.problem import GroupPlacement, PlacementProblem

RESTARTS = 6
"""Number of descents. They start from the best placement so far, from every group's fastest device,
and then from random placements."""
MOST_HOPS = 100
"""A group that reads no parameter joins a family that is at most this many edges away."""
MOST_UNITS = 512
"""With more units than this, a sweep over all units and devices costs too much, and only the first
start is scored."""


def families(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best placement of whole families from `RESTARTS` descents; ties: the first."""
    units = family_of(problem)
    count = int(units.max(initial=-1)) + 1
    rng = np.random.default_rng((problem.seed, budget.ledger.next_round()))
    starts = [_majority(problem, units, problem.fastest)]
    if budget.ledger.best is not None:
        starts.insert(0, _majority(problem, units, budget.ledger.best[1]))
    best, chosen = _score(problem, budget, starts[0], always=True), starts[0]
    for restart in range(RESTARTS):
        if budget.exhausted or not 1 < count <= MOST_UNITS:
            break
        if restart < len(starts):
            start = starts[restart]
        else:
            drawn = rng.integers(problem.devices, size=count)[units]
            start = problem.settle(drawn)
        # One unit after another moves to its best device, until a whole sweep moves none.
        score, placement = _score(problem, budget, start), start
        moved = True
        while moved:
            moved = False
            for unit in rng.permutation(count).tolist():
                if budget.exhausted:
                    moved = False
                    break
                # All devices are options. The present one is in the ledger already and costs
                # nothing.
                members = units == unit
                options = np.repeat(placement[None], problem.devices, axis=0)
                options[:, members] = np.arange(problem.devices)[:, None]
                options = np.stack([problem.settle(option) for option in options])
                scores = budget.score(problem, options)
                winner = min(range(len(scores)), key=lambda i: (scores[i], i))
                if scores[winner] < score:
                    score, placement, moved = scores[winner], options[winner], True
        if score < best:
            best, chosen = score, placement
    return chosen


def family_of(problem: PlacementProblem) -> NDArray[np.int32]:
    """Return [groups] the unit of each group. Units are numbered by their first groups.

    O(reads x log reads + edges x hops).
    """
    graph, of_op = problem.graph, problem.groups.of_op
    reads = np.flatnonzero(graph.is_source[graph.producers[graph.input_tensors]])
    tensors = graph.input_tensors[reads]
    is_weight = np.array([kind != "input" for kind in graph.kinds])[graph.producers[tensors]]
    reads, tensors = reads[is_weight], tensors[is_weight]
    readers = of_op[graph.readers[reads]]
    # The last assignment to a group stays: that of the largest parameter that it reads; ties: the
    # first parameter.
    order = np.lexsort((-tensors, graph.tensor_bytes[tensors]))
    family = np.full(problem.groups.count, -1, dtype=np.int64)
    family[readers[order]] = graph.producers[tensors[order]]
    # Edge by edge, groups without a family join that of the neighbour with most bytes in common.
    sources, destinations, sizes = problem.edges
    ends, far_ends = np.append(sources, destinations), np.append(destinations, sources)
    order = np.lexsort((-far_ends, np.append(sizes, sizes)))
    ends, far_ends = ends[order], far_ends[order]
    for _ in range(MOST_HOPS):
        joins = (family[ends] < 0) & (family[far_ends] >= 0)
        if not joins.any():
            break
        # The last assignment to a group stays. Edges stand by rising bytes: it is the heaviest's.
        family[ends[joins]] = family[far_ends[joins]]
    # A group that is still without a family becomes one of its own, with a number above all ops'.
    alone = np.flatnonzero(family < 0)
    family[alone] = len(graph) + alone
    return numbered(family).of_op


def _majority(
    problem: PlacementProblem, units: NDArray[np.int32], placement: GroupPlacement
) -> GroupPlacement:
    """Return a placement of whole units, each on the device that has most of its work in
    `placement`."""
    work = np.where(np.isfinite(problem.work_seconds), problem.work_seconds, 0.0).min(axis=1)
    votes = np.zeros((int(units.max()) + 1, problem.devices))
    # The small number lets groups without work vote too.
    np.add.at(votes, (units, placement), work + 1e-12)
    return problem.settle(votes.argmax(axis=1)[units])


def _score(
    problem: PlacementProblem, budget: Budget, placement: GroupPlacement, *, always: bool = False
) -> Score:
    return budget.score(problem, placement[None], always=always)[0]
