"""Binary min-heaps of ranks, one for each lane, in kernels."""

from dovetail.runtime.compiling import inlined
from dovetail.simulator.flat import Int32, Int64


@inlined
def push_rank(heaps: Int32, sizes: Int32 | Int64, lane: int, rank: int) -> None:
    """Add a rank to the heap of a lane.

    heaps   [lanes, most] of which the first `sizes[lane]` count
    """
    heap = heaps[lane]
    i = sizes[lane]
    sizes[lane] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] < rank:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = rank


@inlined
def pop_rank(heaps: Int32, sizes: Int32 | Int64, lane: int) -> int:
    """Remove and return the least rank of a lane, whose heap must not be empty."""
    heap = heaps[lane]
    size = sizes[lane] - 1
    sizes[lane] = size
    least: int = heap[0]
    last = heap[size]
    i, child = 0, 1
    while child < size:
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if last < heap[child]:
            break
        heap[i] = heap[child]
        i = child
        child = 2 * i + 1
    heap[i] = last
    return least
