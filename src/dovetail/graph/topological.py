"""Orders nodes so that each follows those that it needs."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def topological_order(
    count: int, edges: NDArray[np.integer], priorities: Sequence[float]
) -> list[int]:
    """Return the nodes 0 to `count` - 1 so that each follows those that it needs.

    Of the nodes that are ready the one with the least priority comes next, then the one of lowest
    number. O((count + edges) log count).

    edges   [edges, 2] distinct (from, to); there is no circle
    """
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    offsets = np.searchsorted(edges[:, 0], np.arange(count + 1)).tolist()
    targets = edges[:, 1].tolist()
    waits = np.bincount(edges[:, 1], minlength=count).tolist()
    ready = [(priorities[node], node) for node in range(count) if not waits[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for target in targets[offsets[node] : offsets[node + 1]]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, (priorities[target], target))
    assert len(order) == count, "nodes of a graph without circles do not wait for each other"
    return order
