"""Places with METIS: cuts the fewest bytes, with the work of parts in proportion to device speeds.

    minimise    sum of the edge weights between parts
    subject to  weight(part) <= (1 + imbalance) x share(part) x all weights

METIS partitions in levels: it contracts heavy edges, cuts the small graph, and refines the cut
level by level on the way back. Vertices, edges and shares are those of `partitioning`.

Paper: Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular
graphs", SIAM Journal on Scientific Computing 20(1), 1998,
https://doi.org/10.1137/S1064827595287997, sections 3 and 4; k-way: "Multilevel k-way partitioning
scheme for irregular graphs", JPDC 48(1), 1998, https://doi.org/10.1006/jpdc.1997.1404.
Differences: METIS knows no memory. So groups are moved off over-full devices afterwards, and if any
device is over-full, METIS also cuts with bytes counted in the weights. METIS knows no schedule
either. So recursive and k-way cuts are tried at several imbalances, and the evaluator picks the
best.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dovetail.placers.budget import Budget
from dovetail.placers.partitioning import (
    PartitionProblem,
    best_candidate,
    candidates_within,
    net_of,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.simulator.flat import Int64

TRIES = ((True, 5), (False, 30), (True, 100), (False, 100), (True, 300), (False, 300))
"""Each try is (recursive bisection rather than k-way, imbalance in thousandths)."""
VERTICES_PER_SET = 400_000
"""Tries x vertices are at most this for a set of devices, but there is always one try."""
_STDOUT = threading.Lock()
"""Guards the process's standard output while `_silence` redirects it."""


def metis(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best of the cuts over all devices and over those of the fastest model.

    Ties: the larger set, then the earlier try.
    """
    net = net_of(problem)

    def cut(parts: PartitionProblem) -> tuple[list[Int64], bool]:
        count = max(1, VERTICES_PER_SET // len(parts.groups))
        return [
            partition(parts, problem.seed + i, recursive=recursive, imbalance=imbalance)
            for i, (recursive, imbalance) in enumerate(TRIES[:count])
        ], True

    candidates = [
        candidate
        for within in problem.device_sets
        for candidate in candidates_within(problem, net, within, cut)
    ]
    return best_candidate(problem, net, budget, candidates)


def partition(parts: PartitionProblem, seed: int, *, recursive: bool, imbalance: int) -> Int64:
    """Return [vertices] the part of each, by one call of METIS.

    imbalance   thousandths by which a part may exceed its share
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
    """Discard what METIS prints to standard output.

    METIS warns there that parts may be empty if a group is heavier than a part. `has_empty_part`
    notices that, and the evaluator judges the result.
    """
    try:
        saved_stdout = os.dup(1)
    except OSError:
        # This process has no standard output.
        yield
        return
    # METIS writes through C's buffered stdout, not Python's. So the buffers of C are flushed before
    # descriptor 1 is redirected and again before it is restored.
    flush = ctypes.CDLL(None).fflush
    with _STDOUT:
        flush(None)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(saved_stdout, 1)
            os.close(nowhere)
            os.close(saved_stdout)
