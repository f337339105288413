"""Groups of ops that are placed together.

Two steps, each shrinking the problem that placers see:

1. Colocation: what can only lose by being apart. A parameter, its optimizer state and its update;
   ops with the same colocation id; a view with its base; a gradient with its op.
2. RL17's rule (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning",
   ICML 2017, https://arxiv.org/abs/1706.04972, section 3.3): a group whose outputs have one
   consumer joins that consumer, repeated until nothing merges.

Differences: the rule runs on colocation groups instead of single ops, because a gradient stays
with its op here; of a group with forward ops only forward consumers count, so that a gradient's
second read of an activation does not keep a forward chain apart. `largest_share`
(ours) stops a merge that would hold more than that share of all FLOPs and bytes: unlimited, the
rule melts a network without branches into one group, and no plan could split it. Groups that read
different shared parameters stay apart, which gives the paper's own group per LSTM cell and
softmax step: joined, the last cells of two layers would drag both layers' weights to one device.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.graph.records import Graph, Int32, Phase


@dataclass(frozen=True, eq=False)
class Groups:
    """of_op [ops]: the group of each op, 0 to count - 1, numbered by first op.

    A source op has the group of the op that writes it, else of its first reader.
    """

    of_op: Int32
    count: int


def group(graph: Graph, *, largest_share: float = 1 / 32) -> Groups:
    """Both steps: colocation, then RL17's rule up to `largest_share` of the work a group."""
    return merge_single_consumers(graph, colocate(graph), largest_share=largest_share)


def colocate(graph: Graph) -> Groups:
    """Step 1. Near-linear in ops + reads."""
    union = _Union(len(graph))
    first: dict[int, int] = {}
    for op, colocation in enumerate(graph.colocation.tolist()):
        if colocation >= 0:
            union.join(op, first.setdefault(colocation, op))
    for storage_writers in graph.writers.values():
        for op in storage_writers[1:]:
            union.join(op, storage_writers[0])
    for tensor in np.flatnonzero((graph.bases >= 0) & ~graph.overwrites).tolist():
        view, made = int(graph.producers[tensor]), int(graph.producers[graph.bases[tensor]])
        # A gradient's view of the gradient that arrives belongs to its own op: with its base it
        # would chain each layer to the next.
        if not graph.is_source[made] and graph.gradient_of[view] < 0:
            union.join(view, made)
    for op in np.flatnonzero(graph.gradient_of >= 0).tolist():
        union.join(op, int(graph.gradient_of[op]))
    return _numbered(graph, union)


def merge_single_consumers(graph: Graph, groups: Groups, *, largest_share: float = 1.0) -> Groups:
    """Step 2. `largest_share=1` is the paper's rule without a limit. O(rounds x reads)."""
    union = _Union(groups.count)
    weights = _weights(graph, groups)
    limit = largest_share * weights.sum(axis=0)
    shared = _shared_parameters(graph, groups)
    edges = _edges_between(graph, groups)
    merged = True
    while merged:
        merged = False
        for producer, consumers in _consumer_groups(edges, union).items():
            a = union.find(producer)
            # Merges since the round began may have joined these; roots are looked up anew.
            others = {union.find(consumer) for consumer in consumers} - {a}
            if len(others) != 1:
                continue
            b = others.pop()
            apart = bool(shared[a] and shared[b]) and shared[a] != shared[b]
            if apart or (weights[a] + weights[b] > limit).any():
                continue
            root = union.join(a, b)
            weights[root], shared[root] = weights[a] + weights[b], shared[a] | shared[b]
            merged = True
    roots = np.array([union.find(g) for g in range(groups.count)], dtype=np.int32)
    return _renumbered(roots[groups.of_op])


class _Union:
    """Disjoint sets; the smaller index is the root, so that numbering is stable."""

    def __init__(self, count: int) -> None:
        self.parents = list(range(count))

    def find(self, item: int) -> int:
        while self.parents[item] != item:
            self.parents[item] = self.parents[self.parents[item]]
            item = self.parents[item]
        return item

    def join(self, a: int, b: int) -> int:
        a, b = sorted((self.find(a), self.find(b)))
        self.parents[b] = a
        return a


def _numbered(graph: Graph, union: _Union) -> Groups:
    roots = np.array([union.find(op) for op in range(len(graph))], dtype=np.int32)
    for op in np.flatnonzero(graph.is_source).tolist():
        readers = [int(c) for t in graph.outputs_of(op) for c in graph.consumers_of(t)[:1]]
        home = int(graph.residences[op])
        if home >= 0:
            roots[op] = roots[home]
        elif readers:
            roots[op] = roots[min(readers)]
    return _renumbered(roots)


def _renumbered(roots: Int32) -> Groups:
    _, first, inverse = np.unique(roots, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return Groups(rank[inverse].astype(np.int32), len(first))


def _weights(graph: Graph, groups: Groups) -> NDArray[np.float64]:
    """[groups, 2] FLOPs and accessed bytes of each group."""
    return np.stack(
        [
            np.bincount(groups.of_op, weights=column, minlength=groups.count)
            for column in (graph.flops, graph.accessed_bytes)
        ],
        axis=1,
    )


def _shared_parameters(graph: Graph, groups: Groups) -> list[frozenset[int]]:
    """Per group the parameters it reads that other groups read as well, their own apart."""
    read: list[set[int]] = [set() for _ in range(groups.count)]
    for op in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[op] != "parameter":
            continue
        readers = {
            int(groups.of_op[c]) for t in graph.outputs_of(op) for c in graph.consumers_of(t)
        }
        readers.discard(int(groups.of_op[op]) if graph.residences[op] >= 0 else -1)
        if len(readers) > 1:
            for reader in readers:
                read[reader].add(op)
    return [frozenset(parameters) for parameters in read]


def _edges_between(graph: Graph, groups: Groups) -> NDArray[np.int32]:
    """[edges, 2] distinct (producer group, consumer group). Of a group with forward ops only the
    edges between forward ops."""
    producers = graph.producers[graph.input_tensors]
    # A parameter counts, with its update's group; what is resident everywhere moves nowhere.
    moves = graph.residences[producers] >= 0
    ends = np.stack([producers[moves], graph.readers[moves]], axis=1)
    is_forward = graph.phases == Phase.FORWARD
    has_forward = np.bincount(groups.of_op, weights=is_forward, minlength=groups.count) > 0
    pairs = groups.of_op[ends]
    counts = is_forward[ends].all(axis=1) | ~has_forward[pairs[:, 0]]
    return np.unique(pairs[counts & (pairs[:, 0] != pairs[:, 1])], axis=0)


def _consumer_groups(edges: NDArray[np.int32], union: _Union) -> dict[int, set[int]]:
    """producer group -> its consumers' groups, as merged so far."""
    consumers: dict[int, set[int]] = defaultdict(set)
    for producer, consumer in edges.tolist():
        consumers[union.find(producer)].add(union.find(consumer))
    return consumers
