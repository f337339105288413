"""What it means that a plan is contiguous, and a problem as stages of devices see it.

A placement is *contiguous* when its devices can be put in an order in which no forward edge goes
back. Every device's forward part is then convex (no path leaves it and comes back), and each device
can run its part in one go: convexity alone would let two devices wait for each other. It makes no
difference whether ops or groups are looked at, since both have the same edges between devices.

Here groups contract to *elements*: strongly connected components of forward edges between groups,
which any order of devices keeps together. Devices contract to *kinds*: alike in work, memory and
links, so that only their number matters. Transfers are counted as if all went over the host, which
is exact where devices have no other link (`is_star`):

    load(kind, S) = work of S + nets from outside read in S + nets of S read outside
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from dovetail.graph import Phase
from dovetail.placers.problem import Problem
from dovetail.simulator.flat import Float64, Int32, Int64
from dovetail.simulator.load_model import HOST_SOURCE, LoadModel

LOOSE = -1
"""`element_of` a group that is in no element: it has no forward op, and goes where it fits last."""
_DROPPED = -2


class Kinds(NamedTuple):
    """Devices that are alike.

    members    devices of each kind, ascending
    room_bytes [kinds]
    in_seconds, out_seconds   [2, kinds] a hop from and to the host: per tensor, and per byte
    """

    members: tuple[tuple[int, ...], ...]
    room_bytes: Float64
    in_seconds: Float64
    out_seconds: Float64


class Elements(NamedTuple):
    """What stages are made of, as flat arrays.

    work_seconds  [elements, kinds] inf: may not be there
    held_bytes    [elements]
    net_sources   [nets] element that makes it; -1: it comes from the host
    net_sizes     [nets] number of other elements that read it
    in_seconds, out_seconds   [nets, kinds] what a stage pays to read it, and to send it
    touch_offsets, touches    CSR by element: a net that it reads, or ~net that it makes
    """

    work_seconds: Float64
    held_bytes: Float64
    net_sources: Int32
    net_sizes: Int32
    in_seconds: Float64
    out_seconds: Float64
    touch_offsets: Int64
    touches: Int32


class Order(NamedTuple):
    """The groups as a partial order.

    element_of   [groups] or `LOOSE`; elements are numbered so that edges go up
    elements     number of them
    edges        [edges, 2] distinct (from element, to element)
    """

    element_of: Int32
    elements: int
    edges: Int32


def is_star(problem: Problem) -> bool:
    """All transfers go over a host that counts for nothing: the loads of stages are exact."""
    model = problem.load
    devices = np.flatnonzero(model.counted)
    between = model.linked[np.ix_(devices, devices)].astype(bool)
    np.fill_diagonal(between, False)
    return not model.counted[model.host] and not between.any()


def order_of(problem: Problem, *, merging: bool = False) -> Order:
    """The order with orphans in it, unless that ties forward groups together: then without."""
    order = forward_order(problem, mirrored=False, merging=merging)
    if len(_orphans(problem)):
        mirrored = forward_order(problem, mirrored=True, merging=merging)
        if len(np.unique(mirrored.element_of[problem.load.forward == 1])) == order.elements:
            return mirrored
    return order


def forward_order(problem: Problem, *, mirrored: bool, merging: bool = False) -> Order:
    """The order that forward edges make.

    mirrored   orphaned backward groups take part too: an edge between backward ops of which one
               is orphaned is drawn the other way, as if its mirror image were in forward
    merging    a group without work and with one neighbour joins it, which no plan is the worse for
    """
    model = problem.load
    edges, taking = model.edges, model.forward.astype(bool)
    if mirrored:
        extra = _mirrored(problem)
        edges = np.concatenate([edges, extra])
        taking[_orphans(problem)] = True
    joined = _idle_leaves(problem, edges) if merging else np.empty((0, 2), np.int32)
    both = np.concatenate([edges, joined, joined[:, ::-1]])
    matrix = csr_matrix((np.ones(len(both), np.int8), both.T), shape=(model.groups,) * 2)
    labels = connected_components(matrix, directed=True, connection="strong")[1]
    used, firsts, compact = np.unique(labels[taking], return_index=True, return_inverse=True)
    element_of = np.full(model.groups, LOOSE, np.int32)
    element_of[taking] = compact
    ends = element_of[edges]
    ends = _distinct(ends[ends[:, 0] != ends[:, 1]], len(used))
    rank = np.empty(len(used), np.int32)
    rank[topological(len(used), ends, np.argsort(firsts, kind="stable"))] = np.arange(len(used))
    element_of[taking] = rank[compact]
    return Order(element_of, len(used), _distinct(rank[ends], len(used)))


def topological(
    count: int, edges: NDArray[np.integer], preference: NDArray[np.integer]
) -> NDArray[np.int32]:
    """A topological order of `count` nodes, depth first: of those ready, one that became so last;
    ties: the first of `preference`."""
    position = np.empty(count, np.int64)
    position[preference] = np.arange(count)
    waiting = np.bincount(edges[:, 1], minlength=count).tolist()
    sorted_edges = edges[np.lexsort((-position[edges[:, 1]], edges[:, 0]))]
    offsets = np.searchsorted(sorted_edges[:, 0], np.arange(count + 1)).tolist()
    targets = sorted_edges[:, 1].tolist()
    stack = [node for node in preference[::-1].tolist() if not waiting[node]]
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        for target in targets[offsets[node] : offsets[node + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                stack.append(target)
    return np.array(order, np.int32)


def kinds_of(
    problem: Problem, devices: list[int], room_bytes: Float64, *, alone: bool = False
) -> Kinds:
    """Devices alike in everything that a stage's load depends on, by their first device.

    room_bytes   [devices] of the machine
    alone        every device is a kind of its own
    """
    alike: dict[tuple[bytes, float, tuple[float, ...], int], list[int]] = {}
    for device in devices:
        work = problem.load.work_seconds[:, device].tobytes()
        hop = _hop(problem.load, device)
        key = (work, float(room_bytes[device]), hop, device if alone else 0)
        alike.setdefault(key, []).append(device)
    hops_of = np.array([key[2] for key in alike]).T
    return Kinds(
        members=tuple(tuple(members) for members in alike.values()),
        room_bytes=np.array([key[1] for key in alike]),
        in_seconds=hops_of[:2],
        out_seconds=hops_of[2:],
    )


def elements_of(
    problem: Problem,
    element_of: Int32,
    kinds: Kinds,
    group_bytes: Float64,
    strict: bool = True,
) -> Elements:
    """Contract groups, nets and devices. `strict`: a group is only where it may be; otherwise it
    weighs nothing where it may not be. O(reads of nets x log)."""
    model, count = problem.load, int(element_of.max(initial=-1)) + 1
    groups = np.flatnonzero(element_of != LOOSE)
    firsts = [members[0] for members in kinds.members]
    work = np.zeros((count, len(firsts)))
    seconds = model.work_seconds[groups][:, firsts]
    np.add.at(
        work, element_of[groups], seconds if strict else np.where(seconds < np.inf, seconds, 0)
    )
    held = np.bincount(element_of[groups], weights=group_bytes[groups], minlength=count)
    sources = np.where(
        model.net_sources == HOST_SOURCE,
        HOST_SOURCE,
        np.where(element_of[model.net_sources] == LOOSE, _DROPPED, element_of[model.net_sources]),
    )
    nets = np.repeat(np.arange(len(sources)), np.diff(model.net_offsets))
    targets = element_of[model.net_targets]
    kept = (targets != LOOSE) & (targets != sources[nets]) & (sources[nets] != _DROPPED)
    pairs = _distinct(np.stack([nets[kept], targets[kept]], axis=1), count)
    used, net = np.unique(pairs[:, 0], return_inverse=True)
    sources = sources[used].astype(np.int32)
    amounts = np.stack([model.net_sends[used], model.net_bytes[used]], axis=1)
    made = np.flatnonzero(sources >= 0)
    owners = np.concatenate([pairs[:, 1], sources[made]])
    touches = np.concatenate([net, ~made])
    by_owner = np.argsort(owners, kind="stable")
    return Elements(
        work_seconds=work,
        held_bytes=held.astype(np.float64),
        net_sources=sources,
        net_sizes=np.bincount(net, minlength=len(used)).astype(np.int32),
        in_seconds=np.ascontiguousarray(amounts @ kinds.in_seconds),
        out_seconds=np.ascontiguousarray(amounts @ kinds.out_seconds),
        touch_offsets=np.searchsorted(owners[by_owner], np.arange(count + 1)),
        touches=touches[by_owner].astype(np.int32),
    )


def _distinct(pairs: NDArray[np.integer], seconds: int) -> Int32:
    """Distinct pairs, ascending, of which the second is less than `seconds`."""
    keys = np.unique(pairs[:, 0].astype(np.int64) * seconds + pairs[:, 1])
    return np.stack([keys // max(seconds, 1), keys % max(seconds, 1)], axis=1).astype(np.int32)


def _orphans(problem: Problem) -> Int32:
    """Groups with backward ops and none of forward."""
    backward = np.unique(problem.groups.of_op[problem.graph.phases == Phase.BACKWARD])
    return np.asarray(backward[problem.load.forward[backward] == 0], np.int32)


def _mirrored(problem: Problem) -> Int32:
    """[edges, 2] of groups: backward edges that touch an orphan, turned round."""
    graph, of_op = problem.graph, problem.groups.of_op
    before, after = graph.producers[graph.input_tensors], graph.readers
    backward = graph.phases == Phase.BACKWARD
    kept = backward[before] & backward[after]
    ends = np.stack([of_op[after[kept]], of_op[before[kept]]], axis=1)
    orphaned = problem.load.forward[ends] == 0
    ends = ends[orphaned.any(axis=1) & (ends[:, 0] != ends[:, 1])]
    return _distinct(ends, problem.groups.count)


def _idle_leaves(problem: Problem, edges: Int32) -> Int32:
    """[pairs, 2] (a group without work and with one neighbour, that neighbour).

    Together they send no more than apart. Where memory could bind, only groups that hold nothing.
    """
    model = problem.load
    everything = max(model.resident_bytes.sum(), float(problem.group_bytes.sum()))
    holds = problem.group_bytes + model.resident_bytes > 0
    idle = np.where(problem.allowed, model.work_seconds, 0.0).max(axis=1) == 0.0
    idle &= ~holds | (everything <= problem.capacities.min())
    sources = np.repeat(model.net_sources, np.diff(model.net_offsets))
    ends = np.concatenate([edges, np.stack([sources, model.net_targets], axis=1)])
    neighbours: list[set[int]] = [set() for _ in range(model.groups)]
    for one, other in ends.tolist():
        neighbours[other].add(one)
        if one != HOST_SOURCE:
            neighbours[one].add(other)
    pairs: list[tuple[int, int]] = []
    waiting = np.flatnonzero(idle & (model.forward == 1)).tolist()
    while waiting:
        group = waiting.pop()
        if len(neighbours[group]) != 1:
            continue
        (beside,) = neighbours[group]
        kept = (problem.allowed[group] | ~problem.allowed[beside]).all()
        if beside != HOST_SOURCE and model.forward[beside] and kept:
            pairs.append((group, beside))
            neighbours[group].clear()
            neighbours[beside].remove(group)
            if idle[beside]:
                waiting.append(beside)
    return np.array(pairs, np.int32).reshape(-1, 2)


def _hop(model: LoadModel, device: int) -> tuple[float, float, float, float]:
    """Seconds of a hop from and to the host, each per tensor and per byte; without such a link,
    or on the host itself, the mean of the device's links."""
    others = [model.host] if device != model.host and model.linked[device, model.host] else None
    if others is None:
        others = np.flatnonzero(model.linked[device] * model.counted).tolist()
        others = [other for other in others if other != device]
    if not others:
        return (0.0, 0.0, 0.0, 0.0)
    return (
        float(model.latency_seconds[others, device].mean()),
        float(model.seconds_per_byte[others, device].mean()),
        float(model.latency_seconds[device, others].mean()),
        float(model.seconds_per_byte[device, others].mean()),
    )
