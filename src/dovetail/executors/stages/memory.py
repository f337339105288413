"""Plans memory statically: one place in an arena for each kernel's outputs, safe in any execution.

Two kernels may share bytes if one of them, and every kernel that reads its outputs, has surely
ended before the other one starts. The order of a stream or an event makes that sure, as
`schedulers.races` defines. With one stream this is the usual rule of lifetimes. With several
streams fewer kernels are ordered, and the plan is larger.

Placing intervals that conflict pairwise at the least height is NP-hard (dynamic storage
allocation). The plan is greedy by size: the largest kernel is placed first, and each goes into the
smallest gap that it fits in, between the conflicting kernels that were placed before it. Y.
Pisarchyk and J. Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020,
https://arxiv.org/abs/2001.03288, section 5.

Differences: conflicts come from happens-before and not from positions in one order; the tensors of
one kernel are one piece, because the kernel writes them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.races import Buffer, happens_before
from dovetail.schedulers.records import KernelBlock, OpSet, members

ALIGNMENT = 512
"""Every tensor starts at a multiple of this many bytes, as with CUDA's own allocators."""


@dataclass(frozen=True)
class MemoryPlan:
    """Places of all kernels' outputs in one arena.

    buffers       [kernels] one buffer for each tensor that the kernel writes
    total_bytes   size of the arena, a multiple of the alignment
    """

    buffers: tuple[tuple[Buffer, ...], ...]
    total_bytes: int


def plan_memory(
    block: KernelBlock,
    streams: Streams,
    sizes: Sequence[Sequence[int]],
    outputs: OpSet,
    alignment: int = ALIGNMENT,
) -> MemoryPlan:
    """The memory plan of a schedule, whose buffers `check_races` accepts.

    Takes O(kernels² + reads x kernels) operations on bits and intervals.

    sizes     [kernels] bytes of each tensor that the kernel writes
    outputs   kernels whose tensors are read after all kernels have run

    Raises `RaceError` for streams that deadlock or leave a kernel out.
    """
    needed = [sum(_aligned(size, alignment) for size in of_kernel) for of_kernel in sizes]
    # [kernels] those that surely start after each has ended.
    later = [0] * len(block)
    for kernel, before in enumerate(happens_before(block, streams)):
        for first in members(before):
            later[first] |= 1 << kernel
    # [kernels] those that may write over its outputs, because the kernel and all its readers have
    # ended by then. Nobody may write over an output of the block.
    over = [0] * len(block)
    for kernel in members(block.everything & ~outputs):
        over[kernel] = later[kernel]
        for reader in members(block.successors[kernel]):
            over[kernel] &= later[reader]
    # The same relation the other way round: [kernels] those whose outputs it may write over.
    under = [0] * len(block)
    for kernel, writers in enumerate(over):
        for writer in members(writers):
            under[writer] |= 1 << kernel
    starts = [0] * len(block)
    placed: OpSet = 0
    # Kernels of equal size are placed by index, so that the plan is the same each time.
    for kernel in sorted(range(len(block)), key=lambda kernel: (-needed[kernel], kernel)):
        if not needed[kernel]:
            continue
        conflicts = placed & ~(over[kernel] | under[kernel])
        # The smallest gap that holds the kernel, the lowest of equal ones; else behind all.
        best, slack, end = -1, -1, 0
        for start, stop in sorted((starts[o], starts[o] + needed[o]) for o in members(conflicts)):
            left = start - end - needed[kernel]
            if left >= 0 and (best < 0 or left < slack):
                best, slack = end, left
            # Intervals that were placed before may overlap each other.
            end = max(end, stop)
        starts[kernel] = end if best < 0 else best
        placed |= 1 << kernel
    buffers = []
    for start, of_kernel in zip(starts, sizes, strict=True):
        own = []
        for size in of_kernel:
            own.append(Buffer(start, start + size))
            start += _aligned(size, alignment)
        buffers.append(tuple(own))
    ends = (start + size for start, size in zip(starts, needed, strict=True))
    return MemoryPlan(tuple(buffers), max(ends, default=0))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
