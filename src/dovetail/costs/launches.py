"""What kernels of a captured inference step do: arithmetic, memory traffic, parallelism.

A kernel is one or more *launches* in order. A convolution or a product is one, with the
normalisation and activation after it; what pointwise work stands before it is one:

    mul, add, relu | convolution 3x3, depthwise | convolution 1x1, normalisation, relu

What a launch writes and another reads is traffic, within a kernel too; what stays within a launch
is none. Views move nothing. What was folded (weights) is read by the launch that needs it; a
normalisation that goes into the convolution before it costs nothing.
"""

import math
from dataclasses import dataclass

from dovetail.graph import Graph
from dovetail.graph.kernels import CONVOLUTION, FOLDED, NORMALISATIONS, PRODUCTS, Kernels

_HEADS = PRODUCTS | {CONVOLUTION}


@dataclass(frozen=True)
class Launch:
    """elements: what runs in parallel. Of a convolution, its outputs; of other work, its outputs or
    inputs, whichever are more, for sums over many inputs are split."""

    flops: float
    moved_bytes: float
    elements: float


@dataclass(frozen=True)
class StageWork:
    """What one kernel does.

    launches       one after another
    window         kernel size of the one convolution that it is; () for what does not merge
    image_bytes    of what it convolves: kernels that merge read it once
    weight_bytes   what grows with the window
    """

    launches: tuple[Launch, ...]
    window: tuple[int, ...] = ()
    image_bytes: float = 0.0
    weight_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(launch.flops for launch in self.launches)

    @property
    def moved_bytes(self) -> float:
        return sum(launch.moved_bytes for launch in self.launches)


def kernel_works(graph: Graph, kernels: Kernels) -> list[StageWork]:
    """[kernels] what each does. O(ops + reads)."""
    parts: list[list[list[int]]] = [[] for _ in range(kernels.count)]
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel == FOLDED:
            continue
        own = parts[kernel]
        if not own or (graph.kinds[op] in _HEADS and not _moves_nothing(graph, own[-1])):
            own.append([])
        own[-1].append(op)
    return [_work(graph, launches) for launches in parts]


def _work(graph: Graph, parts: list[list[int]]) -> StageWork:
    launches = tuple(_launch(graph, ops) for ops in parts if not _moves_nothing(graph, ops))
    heads = [op for ops in parts for op in ops if graph.kinds[op] == CONVOLUTION]
    if len(launches) != 1 or len(heads) != 1:
        return StageWork(launches)
    image, weight = (int(t) for t in graph.inputs_of(heads[0])[:2])
    return StageWork(
        launches,
        graph.shapes[weight][2:],
        float(graph.tensor_bytes[image]),
        float(graph.tensor_bytes[weight]),
    )


def _launch(graph: Graph, ops: list[int]) -> Launch:
    own = set(ops)
    folded = {op for op in ops[1:] if graph.kinds[op] in NORMALISATIONS and _has_head(graph, ops)}
    flops = sum(float(graph.flops[op]) for op in own - folded)
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for op in sorted(own - folded):
        for t in graph.inputs_of(op):
            if int(graph.producers[t]) not in own:
                _largest(read, graph, int(t))
    for op in ops:
        for t in graph.outputs_of(op):
            if graph.bases[t] < 0 and _leaves(graph, own, int(graph.storages[t]), t):
                _largest(written, graph, t)
    elements = [float(math.prod(graph.shapes[t])) for op in ops for t in graph.outputs_of(op)]
    if not any(graph.kinds[op] == CONVOLUTION for op in ops):
        elements += [float(math.prod(graph.shapes[t])) for op in ops for t in graph.inputs_of(op)]
    moved = float(sum(read.values()) + sum(written.values()))
    return Launch(flops, moved, max(elements, default=1.0))


def _largest(found: dict[int, int], graph: Graph, tensor: int) -> None:
    """A storage moves once, as far as any of its tensors reaches."""
    storage = int(graph.storages[tensor])
    found[storage] = max(found.get(storage, 0), int(graph.tensor_bytes[tensor]))


def _leaves(graph: Graph, own: set[int], storage: int, tensor: int) -> bool:
    """Is a tensor, or a view of it within the launch, read elsewhere or returned?"""
    aliases = [t for op in own for t in graph.outputs_of(op) if int(graph.storages[t]) == storage]
    return any(
        t in graph.outputs or any(int(reader) not in own for reader in graph.consumers_of(t))
        for t in {tensor, *aliases}
    )


def _has_head(graph: Graph, ops: list[int]) -> bool:
    return any(graph.kinds[op] in _HEADS for op in ops)


def _moves_nothing(graph: Graph, ops: list[int]) -> bool:
    """All views?"""
    return all(graph.bases[t] >= 0 for op in ops for t in graph.outputs_of(op))
