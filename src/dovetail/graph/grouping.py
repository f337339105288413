"""Groups of ops that are placed together.

Two steps, each shrinking the problem that placers see:

1. Colocation: what can only lose by being apart. A parameter, its optimizer state and its update;
   ops with the same colocation id; a view with its base, but for views of what any module could
   compute for itself (`graph.duplicates`); a gradient with its op. Modules kept whole are units.
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
Of a replicated graph each tower is grouped like the replica that it copies: nothing of it joins
another tower's groups, or averages and updates, which would tie all towers together.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.graph.duplicates import spread_out
from dovetail.graph.records import Graph, Int32, Phase
from dovetail.graph.replicate import towers_of
from dovetail.graph.units import Units
from dovetail.runtime.compiling import inlined, kernel


@dataclass(frozen=True, eq=False)
class Groups:
    """of_op [ops]: the group of each op, 0 to count - 1, numbered by first op.

    A source op has the group of the op that writes it, else of its first reader.
    """

    of_op: Int32
    count: int


def group(graph: Graph, units: Units | None = None, *, largest_share: float = 1 / 32) -> Groups:
    """Both steps: colocation, then RL17's rule up to `largest_share` of the work a group. Two units
    are never merged."""
    groups = colocate(graph, units)
    return merge_single_consumers(graph, groups, units, largest_share=largest_share)


def colocate(graph: Graph, units: Units | None = None) -> Groups:
    """Step 1; with units, each is in one group. Near-linear in ops + reads."""
    ops = np.arange(len(graph), dtype=np.int32)
    first = np.full(int(graph.colocation.max(initial=-1)) + 1, len(graph), dtype=np.int32)
    given = graph.colocation >= 0
    np.minimum.at(first, graph.colocation[given], ops[given])
    pairs = [(ops[given], first[graph.colocation[given]])]
    for storage_writers in graph.writers.values():
        if len(storage_writers) > 1:
            one = np.array(storage_writers, dtype=np.int32)
            pairs.append((one, np.full_like(one, one[0])))
    aliases = np.flatnonzero((graph.bases >= 0) & ~graph.overwrites)
    views, makers = graph.producers[aliases], graph.producers[graph.bases[aliases]]
    # A gradient's view of the gradient that arrives belongs to its own op: with its base it
    # would chain each layer to the next. So would a view of what all layers share.
    joins = ~graph.is_source[makers] & (graph.gradient_of[views] < 0) & ~spread_out(graph)[makers]
    if units is not None:
        joins &= units.of_op[views] == units.of_op[makers]
        pairs += _within_units(units)
    pairs.append((views[joins], makers[joins]))
    gradients = ops[graph.gradient_of >= 0]
    pairs.append((gradients, graph.gradient_of[gradients]))
    befores, afters = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    edges = coo_array((np.ones(len(befores), np.int8), (befores, afters)), shape=(len(graph),) * 2)
    _, sets = connected_components(edges, directed=False)
    return _renumbered(_with_sources(graph, sets.astype(np.int32)))


def _within_units(units: Units) -> list[tuple[Int32, Int32]]:
    """(ops, ops) that units and ties put together."""
    members = np.flatnonzero(units.of_op >= 0).astype(np.int32)
    _, first = np.unique(units.of_op[members], return_index=True)
    heads = np.zeros(units.count, dtype=np.int32)
    heads[units.of_op[members[first]]] = members[first]
    return [(members, heads[units.of_op[members]]), (units.ties[:, 0], units.ties[:, 1])]


def merge_single_consumers(
    graph: Graph, groups: Groups, units: Units | None = None, *, largest_share: float = 1.0
) -> Groups:
    """Step 2. `largest_share=1` is the paper's rule without a limit. O(rounds x reads)."""
    weights = _weights(graph, groups)
    limit = largest_share * weights.sum(axis=0)
    roots = np.arange(groups.count, dtype=np.int32)
    edges = _edges_between(graph, groups)
    _merge(
        np.ascontiguousarray(edges[:, 0]),
        np.ascontiguousarray(edges[:, 1]),
        weights,
        limit,
        _kept_apart(graph, groups, units),
        roots,
        np.full(groups.count, -1, dtype=np.int32),
        np.empty(groups.count, dtype=np.int32),
        np.empty(len(edges), dtype=np.int32),
    )
    return _renumbered(roots[groups.of_op])


@kernel
def _merge(  # noqa: PLR0913 (kernel)
    producers: Int32,
    consumers: Int32,
    weights: NDArray[np.float64],
    limit: NDArray[np.float64],
    shared: Int32,
    roots: Int32,
    heads: Int32,
    order: Int32,
    following: Int32,
) -> None:
    """Rounds of the rule, until none merges; `roots` [groups] in: each its own; out: the least
    group of each set.

    producers, consumers   [edges] ordered; overwritten
    shared                 [groups] id of the set of shared parameters that it reads; -1: none.
                           Sets merge only with none or with their like, so no new one arises
    heads, order, following   room: [groups] of -1, [groups], [edges]
    """
    edges, merged = len(producers), True
    while merged:
        merged = False
        kept = found = 0
        for edge in range(edges):  # each producer's edges as a list; producers as they appear
            a, b = _root(roots, producers[edge]), _root(roots, consumers[edge])
            if a == b and heads[a] >= 0:
                continue  # within a set; its first edge says when its turn comes
            producers[kept], consumers[kept] = a, b
            if heads[a] < 0:
                order[found] = a
                found += 1
            following[kept] = heads[a]
            heads[a] = kept
            kept += 1
        edges = kept
        for i in range(found):
            producer = order[i]
            a, b = _root(roots, producer), -1
            several = False
            edge = heads[producer]
            heads[producer] = -1
            while edge >= 0 and not several:
                # Merges since the round began may have joined these; roots are looked up anew.
                other = _root(roots, consumers[edge])
                several = other != a and b >= 0 and other != b
                if other != a:
                    b = other
                edge = following[edge]
            if several or b < 0:
                continue
            apart = shared[a] >= 0 and shared[b] >= 0 and shared[a] != shared[b]
            flops, size_bytes = weights[a, 0] + weights[b, 0], weights[a, 1] + weights[b, 1]
            if apart or flops > limit[0] or size_bytes > limit[1]:
                continue
            root = min(a, b)
            roots[max(a, b)] = root
            weights[root, 0], weights[root, 1] = flops, size_bytes
            shared[root] = max(shared[a], shared[b])
            merged = True
    for group in range(len(roots)):
        roots[group] = _root(roots, group)


@inlined
def _root(roots: Int32, item: int) -> int:
    root = item
    while roots[root] != root:
        roots[root] = roots[roots[root]]
        root = int(roots[root])
    return root


def _with_sources(graph: Graph, sets: Int32) -> Int32:
    """[ops] `sets`, but a source has that of the op that writes it, else of its first reader."""
    first = np.full(len(graph), len(graph), dtype=np.int32)
    np.minimum.at(first, graph.producers[graph.input_tensors], graph.readers)
    home = np.where(graph.residences >= 0, graph.residences, first)
    moved = graph.is_source & (home < len(graph))
    sets[moved] = sets[home[moved]]
    return sets


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


def _kept_apart(graph: Graph, groups: Groups, units: Units | None) -> Int32:
    """[groups] an id; groups of different ids are not merged, but any with those of id -1."""
    ids = _shared_parameters(graph, groups)
    if units is not None:
        members = np.flatnonzero(units.of_op >= 0)
        ids[groups.of_op[members]] = len(graph) + groups.of_op[members]
    return ids


def _shared_parameters(graph: Graph, groups: Groups) -> Int32:
    """[groups] the set of parameters it reads that other groups (of its tower) read as well, their
    own apart: an id of 0 or more, equal for equal sets, -1 for none."""
    parameter = np.array([kind == "parameter" for kind in graph.kinds]) & graph.is_source
    producers = graph.producers[graph.input_tensors]
    reads = parameter[producers]
    pairs = np.stack([producers[reads], groups.of_op[graph.readers[reads]]], axis=1)
    pairs = np.unique(pairs, axis=0)
    written = graph.residences[pairs[:, 0]] >= 0
    pairs = pairs[~written | (groups.of_op[pairs[:, 0]] != pairs[:, 1])]
    towers = _towers(graph, groups)[pairs[:, 1]]
    reads, counts = np.unique(np.stack([pairs[:, 0], towers]), axis=1, return_counts=True)
    several = np.zeros(len(graph), dtype=bool)
    several[reads[0, counts > 1]] = True
    read: dict[int, list[int]] = defaultdict(list)
    for parameter_op, reader in pairs[several[pairs[:, 0]]].tolist():
        read[reader].append(parameter_op)
    ids: dict[tuple[int, ...], int] = {}
    shared = np.full(groups.count, -1, dtype=np.int32)
    for reader, parameters in read.items():
        shared[reader] = ids.setdefault(tuple(parameters), len(ids))
    return shared


def _edges_between(graph: Graph, groups: Groups) -> NDArray[np.int32]:
    """[edges, 2] distinct (producer group, consumer group), of one tower where there are towers.
    Of a group with forward ops only the edges between forward ops."""
    producers = graph.producers[graph.input_tensors]
    # A parameter counts, with its update's group; what is resident everywhere moves nowhere.
    moves = graph.residences[producers] >= 0
    ends = np.stack([producers[moves], graph.readers[moves]], axis=1)
    is_forward = graph.phases == Phase.FORWARD
    has_forward = np.bincount(groups.of_op, weights=is_forward, minlength=groups.count) > 0
    pairs = groups.of_op[ends]
    counts = is_forward[ends].all(axis=1) | ~has_forward[pairs[:, 0]]
    towers = _towers(graph, groups)[pairs]
    counts &= (pairs[:, 0] != pairs[:, 1]) & (towers[:, 0] == towers[:, 1])
    return np.unique(pairs[counts], axis=0)


def _towers(graph: Graph, groups: Groups) -> Int32:
    """[groups] the tower of a replicated graph that each is of; -1: shared, or no tower."""
    towers = np.full(groups.count, -1, dtype=np.int32)
    np.maximum.at(towers, groups.of_op, towers_of(graph))
    return towers
