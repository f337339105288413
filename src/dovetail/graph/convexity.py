"""Checks that a placement is contiguous, so that each device can run its part in one go.

A placement is contiguous if devices can be put in an order in which no forward edge goes back. Then
no path of ops leaves a device and comes back to it (the ops of each device are *convex*), and no
two devices wait for each other. The two ways to break the rule:

    d0   a ────────► c       a -> b -> c leaves d0       d0   a1 ───┐  ┌──► b2
         └───► b ────┘       and comes back                         │  │
    d1         b                                         d1   b1 ───┼──┘    a2 waits for a1, on d0,
                                                              a2 ◄──┘       and b2 for b1, on d1

Only forward ops and the edges between them count. In training the backward pass returns to every
device by nature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.graph.records import Graph


def find_return(graph: Graph, placement: NDArray[np.integer[Any]]) -> tuple[int, int, int] | None:
    """Return (op, op elsewhere, op) of a way that leaves a device and comes back, or None.

    The three are the last op before the way leaves, the first op elsewhere, and the op where it is
    back. A path along edges is returned first; of several the one whose last op comes first. If
    there is none, a way may also step from any op of a device to any other one of it, and the first
    device that has such a way counts.

    `placement` [ops]: device indices. Takes O(reads + devices^3). If there is a way, it also keeps
    a set of devices per op.
    """
    edges = graph.forward_edges
    devices = placement[edges]
    leaving = devices[:, 0] != devices[:, 1]
    edges, devices = edges[leaving], devices[leaving]
    count = int(devices.max(initial=-1)) + 1
    reaches = np.zeros((count, count), dtype=bool)
    reaches[devices[:, 0], devices[:, 1]] = True
    # Warshall's transitive closure over devices. A placement is contiguous if none reaches itself.
    for middle in range(count):
        reaches |= reaches[:, middle, None] & reaches[None, middle]
    if not reaches.diagonal().any():
        return None
    path = _first_path(graph, placement)
    if path is not None:
        return path
    home = int(np.argmax(reaches.diagonal()))
    out = int(np.flatnonzero((devices[:, 0] == home) & reaches[devices[:, 1], home])[0])
    reaches |= np.eye(count, dtype=bool)
    back = (devices[:, 1] == home) & reaches[devices[out, 1], devices[:, 0]]
    return int(edges[out, 0]), int(edges[out, 1]), int(edges[np.flatnonzero(back)[0], 1])


def _first_path(graph: Graph, placement: NDArray[np.integer[Any]]) -> tuple[int, int, int] | None:
    """Return what `find_return` does, for paths along edges only."""
    placed = placement.tolist()
    befores: list[list[int]] = [[] for _ in placed]
    for before, after in graph.forward_edges.tolist():
        befores[after].append(before)
    # left[op]: device -> (last op there, first op elsewhere) of a path to `op` that left it.
    left: list[dict[int, tuple[int, int]]] = [{} for _ in placed]
    for op, device in enumerate(placed):
        crossings = left[op]
        for before in befores[op]:
            if placed[before] != device:
                crossings.setdefault(placed[before], (before, op))
            for other, crossing in left[before].items():
                crossings.setdefault(other, crossing)
        if device in crossings:
            return (*crossings[device], op)
    return None
