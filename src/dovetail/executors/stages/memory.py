"""A static memory plan: where each kernel's outputs live in one arena, whatever the streams do.

Two kernels may share bytes where one of them, and all that read its outputs, have ended for sure
before the other starts: by the order of a stream or through events, as `schedulers.races` says. In
one stream that is the usual rule of lifetimes; with several, fewer kernels are ordered, and the
plan is larger.

Placing intervals that conflict pairwise at the least height is NP-hard (dynamic storage
allocation). Greedy by size: the largest kernel first, each into the smallest gap that it fits in
between those it conflicts with, which are placed already. Y. Pisarchyk and J. Lee, "Efficient
Memory Management for Deep Neural Net Inference", 2020, https://arxiv.org/abs/2001.03288, section 5.

Differences: conflicts come from happens-before and not from positions in one order; the tensors of
one kernel are one piece, for it writes them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.races import Buffer, happens_before
from dovetail.schedulers.records import KernelBlock, OpSet, members

ALIGNMENT = 512
"""Bytes that every tensor starts at a multiple of: what CUDA's own allocators keep."""


@dataclass(frozen=True)
class MemoryPlan:
    """buffers: [kernels] one per tensor; total_bytes: of the arena, a multiple of the alignment."""

    buffers: tuple[tuple[Buffer, ...], ...]
    total_bytes: int


def plan_memory(
    block: KernelBlock,
    streams: Streams,
    sizes: Sequence[Sequence[int]],
    outputs: OpSet,
    alignment: int = ALIGNMENT,
) -> MemoryPlan:
    """Buffers that `check_races` accepts. O(kernels² + reads x kernels) bits and intervals.

    sizes     [kernels] bytes of each tensor that it writes
    outputs   kernels whose tensors are read after all has run

    Raises `RaceError` for streams that deadlock or leave a kernel out.
    """
    needed = [sum(_aligned(size, alignment) for size in of_kernel) for of_kernel in sizes]
    conflicts = _conflicts(block, happens_before(block, streams), outputs)
    starts = [0] * len(block)
    placed: OpSet = 0
    for kernel in sorted(range(len(block)), key=lambda kernel: (-needed[kernel], kernel)):
        if needed[kernel]:
            taken = sorted(
                (starts[o], starts[o] + needed[o]) for o in members(conflicts[kernel] & placed)
            )
            starts[kernel] = _best_gap(taken, needed[kernel])
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


def _conflicts(block: KernelBlock, earlier: Sequence[OpSet], outputs: OpSet) -> list[OpSet]:
    """[kernels] those whose outputs may be live together with its own, itself not among them."""
    later = [0] * len(block)
    for kernel, before in enumerate(earlier):
        for first in members(before):
            later[first] |= 1 << kernel
    over = [0] * len(block)  # [kernels] those that may write over its outputs
    for kernel in members(block.everything & ~outputs):
        over[kernel] = later[kernel]
        for reader in members(block.successors[kernel]):
            over[kernel] &= later[reader]
    under = [0] * len(block)
    for kernel, writers in enumerate(over):
        for writer in members(writers):
            under[writer] |= 1 << kernel
    return [
        block.everything & ~(over[kernel] | under[kernel] | 1 << kernel)
        for kernel in range(len(block))
    ]


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The start of the smallest gap of `size` or more, the lowest of equals; else above all.
    `taken` is sorted by start."""
    best, slack, end = -1, -1, 0
    for start, stop in taken:
        left = start - end - size
        if left >= 0 and (best < 0 or left < slack):
            best, slack = end, left
        end = max(end, stop)
    return end if best < 0 else best
