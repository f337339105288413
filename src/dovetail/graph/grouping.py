"""Groups ops that are placed together.

There are two steps, and each makes the problem smaller that placers see:

1. Colocation puts together what can only lose by being apart: a parameter, its optimizer state and
   its update; ops with the same colocation id; a view and its base, except a view of a value that
   any module could compute for itself (`graph.copies`); a gradient and its op. A module that is
   kept whole is one group.
2. RL17's rule (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning",
   ICML 2017, https://arxiv.org/abs/1706.04972, section 3.3): a group whose outputs have one
   consumer joins that consumer. This is repeated until no group merges.

Differences:

* The rule runs on colocation groups instead of single ops, because a gradient stays with its op
  here. If a group has forward ops, only its forward consumers count: a gradient also reads the
  activation and would keep a forward chain apart.
* `largest_share` (ours) stops a merge that would hold more than that share of all FLOPs or bytes.
  Without it the rule melts a network without branches into one group, which no plan can split.
* Groups that read different shared parameters stay apart. If the last cells of two layers were
  joined, both layers' weights would have to be on one device.
* The paper's table 1 has 188 groups for RNNLM, 280 for NMT and 83 for Inception-V3. Here there are
  374, 824 and 160, since the paper also joins each LSTM cell and each branch. `cells` does that,
  and has 131, 303 and 63.
* In a replicated graph each tower is grouped like the replica that it copies. Its groups join no
  other tower's groups, and no averages and updates, which would tie all towers together.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.graph.copies import spread_out, towers_of
from dovetail.graph.records import Graph, Int32, Phase
from dovetail.graph.units import Units
from dovetail.runtime.compiling import inlined, kernel


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of each op.

    of_op   [ops] 0 to count - 1, numbered in the order of the groups' first ops. A source op is in
            the group of the op that writes it, else of its first reader
    """

    of_op: Int32
    count: int


def group(graph: Graph, units: Units | None = None, *, largest_share: float = 1 / 32) -> Groups:
    """Return the groups after both steps.

    RL17's rule stops where a group would hold more than `largest_share` of the work. Two units are
    never merged.
    """
    groups = colocate(graph, units)
    return merge_single_consumers(graph, groups, units, largest_share=largest_share)


@dataclass(frozen=True, eq=False)
class GroupLevels:
    """Groups of a graph that a search may split.

    finest     the smallest groups: what step 1 leaves
    coarser    partitions of the finest groups from coarse to fine: [finest groups] the unit that
               each is in, numbered in the order of their first groups. Each partition only splits
               units of the one before. The first is that of `group`, the finest itself is left out
    """

    finest: Groups
    coarser: tuple[Int32, ...]


SHARES = (1 / 32, 1 / 128, 1 / 512)
"""The largest share of the work of a group at each level, from coarse to fine."""
FINER = 1.25
"""A level is left out if the next one has less than this many times its groups."""


def group_levels(graph: Graph, units: Units | None = None) -> GroupLevels:
    """Return the groups of step 1, and the groups of step 2 with ever smaller limits. Units as in
    `group`."""
    finest = colocate(graph, units)
    coarser: list[Int32] = []
    for share in SHARES:
        merged = merge_single_consumers(graph, finest, units, largest_share=share)
        unit_of = np.empty(finest.count, dtype=np.int64)
        unit_of[finest.of_op] = merged.of_op
        if coarser:
            # The rule with a smaller limit may join what it left apart with a larger one.
            unit_of += coarser[-1].astype(np.int64) * merged.count
        partition = numbered(unit_of)
        if not coarser or partition.count >= FINER * (int(coarser[-1].max()) + 1):
            coarser.append(partition.of_op)
    if finest.count < FINER * (int(coarser[-1].max()) + 1):
        coarser.pop()
    return GroupLevels(finest, tuple(coarser))


def colocate(graph: Graph, units: Units | None = None) -> Groups:
    """Return the groups after step 1. Each unit is in one group. Near-linear in ops + reads."""
    ops = np.arange(len(graph), dtype=np.int32)
    given = graph.colocation >= 0
    # The ids of a file may be any numbers, so they are counted before there is a table of them.
    ids, numbers = np.unique(graph.colocation[given], return_inverse=True)
    first = np.full(len(ids), len(graph), dtype=np.int32)
    np.minimum.at(first, numbers, ops[given])
    pairs = [(ops[given], first[numbers])]
    for storage_writers in graph.writers.values():
        if len(storage_writers) > 1:
            writers = np.array(storage_writers, dtype=np.int32)
            pairs.append((writers, np.full_like(writers, writers[0])))
    aliases = np.flatnonzero((graph.bases >= 0) & ~graph.overwrites)
    views, makers = graph.producers[aliases], graph.producers[graph.bases[aliases]]
    # A backward op may be a view of the gradient that arrives from the next layer. It stays with
    # its forward op: joining its base would chain each layer to the next. A view of a value that
    # all layers share would chain them too.
    joins = ~graph.is_source[makers] & (graph.gradient_of[views] < 0) & ~spread_out(graph)[makers]
    if units is not None:
        joins &= units.of_op[views] == units.of_op[makers]
        members = np.flatnonzero(units.of_op >= 0).astype(np.int32)
        _, first_member = np.unique(units.of_op[members], return_index=True)
        heads = np.zeros(units.count, dtype=np.int32)
        heads[units.of_op[members[first_member]]] = members[first_member]
        pairs.append((members, heads[units.of_op[members]]))
        pairs.append((units.ties[:, 0], units.ties[:, 1]))
    pairs.append((views[joins], makers[joins]))
    gradients = ops[graph.gradient_of >= 0]
    pairs.append((gradients, graph.gradient_of[gradients]))
    befores, afters = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    edges = coo_array((np.ones(len(befores), np.int8), (befores, afters)), shape=(len(graph),) * 2)
    _, sets = connected_components(edges, directed=False)
    sets = sets.astype(np.int32)
    # A source is with the op that writes it, else with its first reader.
    reader = np.full(len(graph), len(graph), dtype=np.int32)
    np.minimum.at(reader, graph.producers[graph.input_tensors], graph.readers)
    home = np.where(graph.residences >= 0, graph.residences, reader)
    moved = graph.is_source & (home < len(graph))
    sets[moved] = sets[home[moved]]
    return numbered(sets)


def merge_single_consumers(
    graph: Graph,
    groups: Groups,
    units: Units | None = None,
    *,
    largest_share: float = 1.0,
    units_join: bool = True,
) -> Groups:
    """Return the groups after step 2. `largest_share=1` is the paper's rule without a limit.

    units_join   False: a unit joins no consumer, though others may join it

    Takes O(rounds x reads).
    """
    weights: NDArray[np.float64] = np.stack(  # [groups, 2] FLOPs and accessed bytes of each group
        [
            np.bincount(groups.of_op, weights=column, minlength=groups.count)
            for column in (graph.flops, graph.accessed_bytes)
        ],
        axis=1,
    )
    limit = largest_share * weights.sum(axis=0)
    roots = np.arange(groups.count, dtype=np.int32)
    # Groups of different ids are not merged; id -1 merges with any id.
    apart = _shared_parameters(graph, groups)
    # The ids of units start above those of sets of parameters, which are fewer than ops.
    if units is not None:
        members = np.flatnonzero(units.of_op >= 0)
        apart[groups.of_op[members]] = len(graph) + groups.of_op[members]
    # The distinct edges (producer group, consumer group) within one tower each. Of a group with
    # forward ops only edges between forward ops count. A trained parameter counts: it lives with
    # its update and is sent from there. Inputs and sources that are resident everywhere do not.
    producers = graph.producers[graph.input_tensors]
    moves = graph.residences[producers] >= 0
    ends = np.stack([producers[moves], graph.readers[moves]], axis=1)
    is_forward = graph.phases == Phase.FORWARD
    has_forward = np.bincount(groups.of_op, weights=is_forward, minlength=groups.count) > 0
    pairs = groups.of_op[ends]
    counts = is_forward[ends].all(axis=1) | ~has_forward[pairs[:, 0]]
    towers = _towers(graph, groups)[pairs]
    counts &= (pairs[:, 0] != pairs[:, 1]) & (towers[:, 0] == towers[:, 1])
    edges = np.unique(pairs[counts], axis=0)
    _merge(
        np.ascontiguousarray(edges[:, 0]),
        np.ascontiguousarray(edges[:, 1]),
        weights,
        limit,
        apart,
        len(graph) if units is not None and not units_join else _NO_LIMIT,
        roots,
        np.full(groups.count, -1, dtype=np.int32),
        np.empty(groups.count, dtype=np.int32),
        np.empty(len(edges), dtype=np.int32),
    )
    return numbered(roots[groups.of_op])


_NO_LIMIT = np.iinfo(np.int32).max


@kernel
def _merge(  # noqa: PLR0917 (kernel)
    producers: Int32,
    consumers: Int32,
    weights: NDArray[np.float64],
    limit: NDArray[np.float64],
    shared: Int32,
    sealed_from: int,
    roots: Int32,
    heads: Int32,
    order: Int32,
    following: Int32,
) -> None:
    """Apply the rule in rounds until a round merges nothing.

    roots                  [groups] in: each group itself; out: the lowest group of its merged set
    producers, consumers   [edges] sorted; overwritten
    shared                 [groups] id of the set of shared parameters that a group reads; -1: none.
                           A group merges only with groups of its own id or of id -1, so the merged
                           set has one id again
    sealed_from            a group of this id or a higher one joins no consumer
    heads, order, following   work space: [groups] of -1, [groups], [edges]
    """
    edges, merged = len(producers), True
    while merged:
        merged = False
        kept = producer_count = 0
        # Sort the edges into one linked list per producer (`heads`, `following`), with merged
        # groups as one; `order` lists producers as they first appear.
        for edge in range(edges):
            a, b = _root(roots, producers[edge]), _root(roots, consumers[edge])
            if a == b and heads[a] >= 0:
                # The edge is within a merged set, so it is dropped. A set's first edge is kept even
                # then, because its place decides when the set's turn comes.
                continue
            producers[kept], consumers[kept] = a, b
            if heads[a] < 0:
                order[producer_count] = a
                producer_count += 1
            following[kept] = heads[a]
            heads[a] = kept
            kept += 1
        edges = kept
        for i in range(producer_count):
            producer = order[i]
            a, b = _root(roots, producer), -1
            several = False
            edge = heads[producer]
            heads[producer] = -1
            while edge >= 0 and not several:
                # Merges in this round may have joined the two, so the root is looked up again.
                other = _root(roots, consumers[edge])
                several = other != a and b >= 0 and other != b
                if other != a:
                    b = other
                edge = following[edge]
            if several or b < 0:
                continue
            apart = shared[a] >= 0 and shared[b] >= 0 and shared[a] != shared[b]
            apart = apart or shared[a] >= sealed_from
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
    """Return the root of an item's set (union-find with path halving)."""
    root = item
    while roots[root] != root:
        roots[root] = roots[roots[root]]
        root = int(roots[root])
    return root


def numbered(roots: NDArray[np.integer]) -> Groups:
    """Return groups of equal entries of `roots` [ops], numbered in the order of their first ops."""
    _, first, inverse = np.unique(roots, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return Groups(rank[inverse].astype(np.int32), len(first))


def _shared_parameters(graph: Graph, groups: Groups) -> Int32:
    """Return [groups] the id of the set of shared parameters that each group reads; -1: none.

    A parameter is shared if several groups of one tower read it, besides the group that it is in
    itself. Equal sets have equal ids, from 0 up.
    """
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


def _towers(graph: Graph, groups: Groups) -> Int32:
    """Return [groups] the tower of a replicated graph that each group belongs to; -1: none."""
    towers = np.full(groups.count, -1, dtype=np.int32)
    np.maximum.at(towers, groups.of_op, towers_of(graph))
    return towers
