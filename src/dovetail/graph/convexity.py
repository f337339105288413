"""Convex parts: whether what is on one device is whole.

The ops on a device are convex if no path leaves the device and comes back to it:

    d0   a ────────► c       a -> b -> c leaves d0 and comes back: d0 is not convex
         └───► b ────┘
    d1         b

Only forward ops count, and the edges between them. In training the backward ops of a device come
back to it by nature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.graph.records import Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.graph.records import Graph


def find_return(graph: Graph, placement: NDArray[np.integer[Any]]) -> tuple[int, int, int] | None:
    """(op, op elsewhere, op) of the first path, by its last op, that leaves a device and comes
    back: the last op before it leaves, the first elsewhere, and where it is back. None where every
    device's forward ops are convex.

    `placement` [ops]: device indices. O(ops + reads), with a set of devices an op.
    """
    placed = placement.tolist()
    befores = _forward_reads(graph)
    # left[op]: device -> (last op there, first op elsewhere) of a path to `op` that left it.
    left: list[dict[int, tuple[int, int]]] = [{} for _ in placed]
    for op, device in enumerate(placed):
        seen = left[op]
        for before in befores[op]:
            if placed[before] != device:
                seen.setdefault(placed[before], (before, op))
            for other, crossing in left[before].items():
                seen.setdefault(other, crossing)
        if device in seen:
            return (*seen[device], op)
    return None


def _forward_reads(graph: Graph) -> list[list[int]]:
    """[ops] the forward ops that each forward op waits for, once each, ascending."""
    forward = graph.phases == Phase.FORWARD
    starts = np.concatenate([graph.producers[graph.input_tensors], graph.control[:, 0]])
    ends = np.concatenate([graph.readers, graph.control[:, 1]])
    kept = forward[starts] & forward[ends]
    befores: list[list[int]] = [[] for _ in range(len(graph))]
    for end, start in np.unique(np.stack([ends[kept], starts[kept]], axis=1), axis=0).tolist():
        befores[end].append(start)
    return befores
