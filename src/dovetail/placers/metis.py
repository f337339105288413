"""METIS: the least bytes cut between parts whose work is in proportion to the speed of devices.

    minimise    sum of the edge weights between parts
    subject to  weight(part) <= (1 + imbalance) x share(part) x all weights

by multilevel partitioning: heavy edges are contracted, the small graph is cut, and the cut is
refined level by level on the way back. Vertices, edges and shares: see `partitioning`.

Paper: Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular
graphs", SIAM Journal on Scientific Computing 20(1), 1998,
https://doi.org/10.1137/S1064827595287997, sections 3 and 4; k-way: "Multilevel k-way partitioning
scheme for irregular graphs", JPDC 48(1), 1998, https://doi.org/10.1006/jpdc.1997.1404.
Differences: METIS knows no memory: groups move afterwards off devices that are over-full, and where
that is needed bytes also count in the weights. Both recursive and k-way cuts at several imbalances
are tried, and the evaluator says which is best: METIS knows no schedule either.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dovetail.placers.budget import Budget
from dovetail.placers.partitioning import (
    GroupNetwork,
    PartitionCandidate,
    PartitionProblem,
    best_fitting,
    has_empty_part,
    net_of,
    overflows,
    parts_of,
    placed,
    trivial_labels,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.simulator.flat import Int64

TRIES = ((True, 5), (False, 30), (True, 100), (False, 100), (True, 300), (False, 300))
"""(recursive bisection rather than k-way, imbalance in thousandths)"""
VERTICES_PER_SET = 400_000
"""Tries x vertices for a set of devices: one try from here on."""
_STDOUT = threading.Lock()


def metis(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """The best cut over all devices, and over the fastest model of device only. Ties: the larger
    set, the earlier try."""
    net = net_of(problem)
    candidates = []
    for within in problem.device_sets:
        cuts = _cuts(problem, net, parts_of(problem, net, within))
        candidates += cuts
        if any(overflows(problem, candidate.placement) for candidate in cuts):
            candidates += _cuts(problem, net, parts_of(problem, net, within, memory=True))
    return best_fitting(problem, net, budget, candidates)


def _cuts(
    problem: PlacementProblem, net: GroupNetwork, parts: PartitionProblem
) -> list[PartitionCandidate]:
    """One candidate for each try; those with an empty part only if all have one."""
    labels = trivial_labels(parts)
    if labels is not None:
        return [placed(problem, net, parts, labels, reorder=True)]
    count = max(1, VERTICES_PER_SET // len(parts.groups))
    tried = [
        partition(parts, problem.seed + i, recursive=recursive, imbalance=imbalance)
        for i, (recursive, imbalance) in enumerate(TRIES[:count])
    ]
    full = [labels for labels in tried if not has_empty_part(parts, labels)]
    return [placed(problem, net, parts, labels, reorder=True) for labels in full or tried]


def partition(parts: PartitionProblem, seed: int, *, recursive: bool, imbalance: int) -> Int64:
    """[vertices] the part of each.

    imbalance   thousandths that a part may be above its share
    """
    import pymetis

    kind = pymetis.zero_copy_dtype()
    graph = pymetis.CSRAdjacency(parts.offsets.astype(kind), parts.neighbours.astype(kind))
    shares = (parts.shares / parts.shares.sum()).tolist()
    with _silence():
        answer = pymetis.part_graph(
            len(parts.devices),
            graph,
            vweights=parts.weights.astype(kind),
            eweights=parts.edge_weights.astype(kind),
            tpwgts=shares,
            recursive=recursive,
            options=pymetis.Options(seed=seed % 2**31, ufactor=imbalance),
        )
    labels = np.array(answer.vertex_part, np.int64)
    assert len(labels) == len(parts.groups), "METIS left out vertices"
    return labels


@contextmanager
def _silence() -> Iterator[None]:
    """Keep off our standard output what METIS prints there where a group is heavier than a part:
    that parts may be empty, which `has_empty_part` notices and the evaluator judges."""
    try:
        ours = os.dup(1)
    except OSError:  # a process without standard output
        yield
        return
    flush = ctypes.CDLL(None).fflush
    with _STDOUT:
        flush(None)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(ours, 1)
            os.close(nowhere)
            os.close(ours)
