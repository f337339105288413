"""Scotch: static mapping of the graph of groups onto the graph of the machine.

    minimise    sum over edges (a, b) of   bytes(a, b) x distance(device of a, device of b)
    subject to  work of a device in proportion to its speed

by dual recursive bipartitioning: the devices are cut in two by distance, the groups in two parts to
match, and so on down to single devices. Distances are the seconds of a transfer of mean size, over
the host where two devices have no link; speeds and weights: see `partitioning`.

Paper: Pellegrini and Roman, "SCOTCH: a software package for static mapping by dual recursive
bipartitioning of process and architecture graphs", HPCN 1996,
https://doi.org/10.1007/3-540-61142-8_588, as used by Mirhoseini et al., "Device Placement
Optimization with Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4.2:
all devices, the CPU included. Differences: groups without a choice are left out rather than handed
over as fixed vertices, with which `SCOTCH_graphMapFixed` may not return; groups move afterwards off
devices that are over-full; three imbalances are tried, and the evaluator says which is best.
"""

import numpy as np

from dovetail.placers.budget import Budget
from dovetail.placers.partitioning import (
    Candidate,
    Net,
    Parts,
    best_fitting,
    has_empty_part,
    integers,
    net_of,
    overflows,
    parts_of,
    placed,
    trivial_labels,
)
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.placers.scotch_library import Csr, Scotch, load_scotch
from dovetail.simulator.flat import Int64

IMBALANCES = (0.01, 0.05, 0.2)
MOST_DISTANCE = 32
"""Distances are integers, the shortest link is 4: no link counts as more than 8 times as long."""
SPEEDS = 1000


def scotch(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best mapping on all devices. Ties: the smaller imbalance.

    Raises `MissingLibraryError`.
    """
    return map_within(problem, budget, problem.device_sets[0])


def map_within(problem: Problem, budget: Budget, within: list[int]) -> GroupPlacement:
    """The best mapping on some devices; groups that may not be there go to their fastest."""
    library = load_scotch()
    net = net_of(problem)
    candidates = _mappings(problem, net, parts_of(problem, net, within), library)
    if any(overflows(problem, candidate.placement) for candidate in candidates):
        parts = parts_of(problem, net, within, memory=True)
        candidates += _mappings(problem, net, parts, library)
    return best_fitting(problem, net, budget, candidates)


def distances(problem: Problem, devices: list[int], transfer_bytes: float) -> Int64:
    """[devices, devices] of a transfer, 4 for the nearest pair, at most `MOST_DISTANCE`."""
    machine, index = problem.machine, problem.machine.link_index
    host = machine.host_index

    def seconds(a: int, b: int) -> float:
        if index[a, b] < 0:
            return seconds(a, host) + seconds(host, b)
        link = machine.links[index[a, b]]
        return float(link.latency_seconds + transfer_bytes / link.bandwidth_bytes_per_second)

    table = np.array([[0.0 if a == b else seconds(a, b) for b in devices] for a in devices])
    table = (table + table.T) / 2
    nearest = table[~np.eye(len(devices), dtype=bool)].min(initial=np.inf)
    scaled = np.rint(4 * table / nearest) if 0 < nearest < np.inf else np.full(table.shape, 4.0)
    return np.clip(scaled, 1, MOST_DISTANCE).astype(np.int64)


def _mappings(problem: Problem, net: Net, parts: Parts, library: Scotch) -> list[Candidate]:
    labels = trivial_labels(parts)
    if labels is not None:
        return [placed(problem, net, parts, labels, reorder=True)]
    mean_bytes = float(problem.edges[2].mean()) if len(problem.edges[2]) else 0.0
    lengths = distances(problem, parts.devices, mean_bytes)
    others = ~np.eye(len(parts.devices), dtype=bool)
    target = Csr(
        offsets=np.arange(len(others) + 1) * (len(others) - 1),
        neighbours=np.nonzero(others)[1],
        weights=integers(parts.shares, SPEEDS * len(others)),
        edge_weights=lengths[others],
    )
    shrunk = np.maximum(parts.edge_weights // MOST_DISTANCE, 1)
    source = Csr(parts.offsets, parts.neighbours, parts.weights, shrunk)
    tried = [library.map(source, target, imbalance, problem.seed) for imbalance in IMBALANCES]
    full = [labels for labels in tried if not has_empty_part(parts, labels)]
    # A swap of parts costs nothing only where all links are alike.
    uniform = len(np.unique(lengths[others])) == 1
    return [placed(problem, net, parts, labels, reorder=uniform) for labels in full or tried]
