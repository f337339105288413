"""Contracts a problem for contiguous plans, and finds the best chain of stages.

A placement is *contiguous* when its devices can be put in an order in which no forward edge goes
back. Every device's forward part is then convex (no path leaves it and comes back), and each device
can run its part in one go: that is a *stage* (here always a pipeline stage). Convexity alone would
let two devices wait for each other. Ops and groups give the same answer, since both have the same
edges between devices.

Groups contract to *elements*: strongly connected components of the forward edges between groups.
Every contiguous plan keeps such a component on one device. Devices contract to *kinds*: those of a
kind are alike in work, memory and links, so that only their number matters. Transfers are counted
as if all went over the host, which is exact if devices have no other links (`is_star`):

    load(kind, S) = work of S + nets from outside read in S + nets of S read outside
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from dovetail.graph import Phase
from dovetail.graph.records import csr_offsets
from dovetail.placers.budget import Budget
from dovetail.placers.problem import PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64
from dovetail.simulator.loads import HOST_SOURCE

LOOSE = -1
"""Entry of `element_of` for a group that is in no element, because it has no forward op and no
place in the order. Such a group is placed last, where it fits."""
_DROPPED = -2
"""Source of a net that a loose group makes. Such nets are left out of the loads of stages."""


class DeviceKinds(NamedTuple):
    """Devices that are alike.

    members       devices of each kind, ascending
    room_bytes    [kinds] bytes that a stage on such a device may hold
    in_seconds    [2, kinds] a hop from the host: seconds per tensor, and per byte
    out_seconds   [2, kinds] a hop to the host, likewise
    """

    members: tuple[tuple[int, ...], ...]
    room_bytes: Float64
    in_seconds: Float64
    out_seconds: Float64


class Elements(NamedTuple):
    """What stages are made of, as flat arrays.

    work_seconds  [elements, kinds] inf: the element may not be there
    held_bytes    [elements]
    net_sources   [nets] element that makes the net; -1: it comes from the host
    net_sizes     [nets] number of other elements that read the net
    in_seconds, out_seconds   [nets, kinds] what a stage pays to read the net, and to send it
    touch_offsets, touches    CSR by element: the nets that it reads, as net, and those that
                  it makes, as ~net
    """

    work_seconds: Float64
    held_bytes: Float64
    net_sources: Int32
    net_sizes: Int32
    in_seconds: Float64
    out_seconds: Float64
    touch_offsets: Int64
    touches: Int32


class ElementOrder(NamedTuple):
    """The groups as a partial order.

    element_of   [groups] element of each group, or `LOOSE`; elements are numbered so that every
                 edge goes from a lower to a higher number
    elements     number of elements
    edges        [edges, 2] distinct (from element, to element)
    """

    element_of: Int32
    elements: int
    edges: Int32


def is_star(problem: PlacementProblem) -> bool:
    """Return True if all transfers go over a host whose own load does not count. The loads of
    stages are then exact."""
    model = problem.load
    devices = np.flatnonzero(model.counted)
    between = model.linked[np.ix_(devices, devices)].astype(bool)
    np.fill_diagonal(between, False)
    return not model.counted[model.host] and not between.any()


def order_of(problem: PlacementProblem, *, merging: bool = False) -> ElementOrder:
    """Return the order of the groups. Orphans (groups with backward ops and no forward ones) take
    part in it unless they tie forward groups together; then they are loose."""
    order = forward_order(problem, mirrored=False, merging=merging)
    if len(_orphans(problem)):
        mirrored = forward_order(problem, mirrored=True, merging=merging)
        # The forward groups make as many elements with orphans as without them, so orphans tie
        # nothing together.
        if len(np.unique(mirrored.element_of[problem.load.forward == 1])) == order.elements:
            return mirrored
    return order


def forward_order(
    problem: PlacementProblem, *, mirrored: bool, merging: bool = False
) -> ElementOrder:
    """Return the order that forward edges make.

    mirrored   orphans take part too: an edge between backward ops, of which at least one is in an
               orphan, is turned round, since backward runs against the direction of forward
    merging    a group without work and with a single neighbour joins that neighbour, which makes no
               plan worse
    """
    model = problem.load
    edges, taking = model.edges, model.forward.astype(bool)
    if mirrored:
        graph, of_op = problem.graph, problem.groups.of_op
        before, after = graph.producers[graph.input_tensors], graph.readers
        is_backward = (graph.phases[before] == Phase.BACKWARD) & (
            graph.phases[after] == Phase.BACKWARD
        )
        ends = np.stack([of_op[after[is_backward]], of_op[before[is_backward]]], axis=1)
        orphaned = model.forward[ends] == 0
        ends = ends[orphaned.any(axis=1) & (ends[:, 0] != ends[:, 1])]
        edges = np.concatenate([edges, _distinct(ends, problem.groups.count)])
        taking[_orphans(problem)] = True
    pairs: list[tuple[int, int]] = []
    if merging:
        # A pair sends no more together than apart if one group has no work and a single neighbour,
        # the other. If memory could bind, only groups that hold no bytes are joined. Memory cannot
        # bind if the smallest device has room for all that there is.
        everything = max(model.resident_bytes.sum(), float(problem.group_bytes.sum()))
        holds = problem.group_bytes + model.resident_bytes > 0
        idle = np.where(problem.allowed, model.work_seconds, 0.0).max(axis=1) == 0.0
        idle &= ~holds | (everything <= problem.capacities.min())
        sources = np.repeat(model.net_sources, np.diff(model.net_offsets))
        ends = np.concatenate([edges, np.stack([sources, model.net_targets], axis=1)])
        neighbours: list[set[int]] = [set() for _ in range(model.groups)]
        for source, target in ends.tolist():
            neighbours[target].add(source)
            if source != HOST_SOURCE:
                neighbours[source].add(target)
        waiting = np.flatnonzero(idle & (model.forward == 1)).tolist()
        while waiting:
            group = waiting.pop()
            if len(neighbours[group]) != 1:
                continue
            (beside,) = neighbours[group]
            # The pair may be wherever the neighbour may be, so that joining takes no choice away.
            may_join = (problem.allowed[group] | ~problem.allowed[beside]).all()
            if beside != HOST_SOURCE and model.forward[beside] and may_join:
                pairs.append((group, beside))
                neighbours[group].clear()
                neighbours[beside].remove(group)
                # The neighbour may have become a leaf by this.
                if idle[beside]:
                    waiting.append(beside)
    # Edges in both directions put a joined pair into one strongly connected component.
    joined = np.array(pairs, np.int32).reshape(-1, 2)
    both = np.concatenate([edges, joined, joined[:, ::-1]])
    matrix = csr_matrix((np.ones(len(both), np.int8), both.T), shape=(model.groups,) * 2)
    labels = connected_components(matrix, directed=True, connection="strong")[1]
    used, firsts, compact = np.unique(labels[taking], return_index=True, return_inverse=True)
    element_of = np.full(model.groups, LOOSE, np.int32)
    element_of[taking] = compact
    ends = element_of[edges]
    ends = _distinct(ends[ends[:, 0] != ends[:, 1]], len(used))
    # Elements are numbered along a topological order. Its ties fall to the lowest first group.
    rank = np.empty(len(used), np.int32)
    rank[topological(len(used), ends, np.argsort(firsts, kind="stable"))] = np.arange(len(used))
    element_of[taking] = rank[compact]
    return ElementOrder(element_of, len(used), _distinct(rank[ends], len(used)))


def topological(
    count: int, edges: NDArray[np.integer], preference: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Return a topological order of `count` nodes, depth first: of the ready nodes, the one that
    became ready last comes next; ties: the first in `preference`.

    edges        [edges, 2] (from, to)
    preference   [count] every node once
    """
    position = np.empty(count, np.int64)
    position[preference] = np.arange(count)
    waiting = np.bincount(edges[:, 1], minlength=count).tolist()
    # The targets of a node stand from the least preferred to the most preferred, since what is
    # pushed last is popped first.
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


def longest_paths(count: int, edges: NDArray[np.integer]) -> Int32:
    """Return [nodes] the number of edges on the longest path to each of `count` nodes.

    edges   [edges, 2] (from, to); there is no circle
    """
    levels = np.zeros(count, np.int32)
    _longest_paths(
        csr_offsets(edges[:, 0], count),
        edges[np.argsort(edges[:, 0], kind="stable"), 1].astype(np.int32),
        np.bincount(edges[:, 1], minlength=count).astype(np.int32),
        np.zeros(count, np.int32),
        levels,
    )
    return levels


@kernel
def _longest_paths(
    offsets: Int32, targets: Int32, waits: Int32, ready: Int32, levels: Int32
) -> None:
    """Fill `levels` [nodes] with the longest path to each node of an acyclic graph.

    waits   [nodes] number of predecessors; used up
    ready   [nodes] working memory for the queue of ready nodes
    """
    first = last = 0
    for node in range(len(levels)):
        if waits[node] == 0:
            ready[last] = node
            last += 1
    while first < last:
        node = ready[first]
        first += 1
        for i in range(offsets[node], offsets[node + 1]):
            after = targets[i]
            levels[after] = max(levels[after], levels[node] + 1)
            waits[after] -= 1
            if waits[after] == 0:
                ready[last] = after
                last += 1


def kinds_of(
    problem: PlacementProblem, devices: list[int], room_bytes: Float64, *, alone: bool = False
) -> DeviceKinds:
    """Return `devices` in kinds, in the order of their first devices. Devices of a kind are alike
    in everything that a stage's load depends on, and in room.

    room_bytes   [devices] of all devices of the machine
    alone        make every device a kind of its own
    """
    model = problem.load
    alike: dict[tuple[bytes, float, tuple[float, ...], int], list[int]] = {}
    for device in devices:
        work = model.work_seconds[:, device].tobytes()
        # For the host itself, and for a device without a link to the host, a hop takes the mean
        # over the device's links to devices whose load counts; nothing if there are none.
        if device != model.host and model.linked[device, model.host]:
            neighbours = [model.host]
        else:
            neighbours = np.flatnonzero(model.linked[device] * model.counted).tolist()
            neighbours = [neighbour for neighbour in neighbours if neighbour != device]
        hop = (0.0, 0.0, 0.0, 0.0)
        if neighbours:
            hop = (
                float(model.latency_seconds[neighbours, device].mean()),
                float(model.seconds_per_byte[neighbours, device].mean()),
                float(model.latency_seconds[device, neighbours].mean()),
                float(model.seconds_per_byte[device, neighbours].mean()),
            )
        key = (work, float(room_bytes[device]), hop, device if alone else 0)
        alike.setdefault(key, []).append(device)
    hops_of = np.array([key[2] for key in alike]).T
    return DeviceKinds(
        members=tuple(tuple(members) for members in alike.values()),
        room_bytes=np.array([key[1] for key in alike]),
        in_seconds=hops_of[:2],
        out_seconds=hops_of[2:],
    )


def elements_of(
    problem: PlacementProblem,
    element_of: Int32,
    kinds: DeviceKinds,
    group_bytes: Float64,
    strict: bool = True,
) -> Elements:
    """Contract groups, nets and devices to elements. O(reads of nets x log).

    element_of    [groups] element of each group, or `LOOSE`
    group_bytes   [groups] bytes that each group holds
    strict        True: an element may not be where one of its groups may not be. False: such a
                  group counts no work there
    """
    model, count = problem.load, int(element_of.max(initial=-1)) + 1
    groups = np.flatnonzero(element_of != LOOSE)
    firsts = [members[0] for members in kinds.members]
    work = np.zeros((count, len(firsts)))
    seconds = model.work_seconds[groups][:, firsts]
    np.add.at(
        work, element_of[groups], seconds if strict else np.where(seconds < np.inf, seconds, 0)
    )
    held = np.bincount(element_of[groups], weights=group_bytes[groups], minlength=count)
    # `HOST_SOURCE` is -1 and would index the last group; the outer `where` overrides what it reads.
    sources = np.where(
        model.net_sources == HOST_SOURCE,
        HOST_SOURCE,
        np.where(element_of[model.net_sources] == LOOSE, _DROPPED, element_of[model.net_sources]),
    )
    nets = np.repeat(np.arange(len(sources)), np.diff(model.net_offsets))
    targets = element_of[model.net_targets]
    # A net counts only for the elements that read it from outside.
    is_read = (targets != LOOSE) & (targets != sources[nets]) & (sources[nets] != _DROPPED)
    pairs = _distinct(np.stack([nets[is_read], targets[is_read]], axis=1), count)
    used, net = np.unique(pairs[:, 0], return_inverse=True)
    sources = sources[used].astype(np.int32)
    amounts = np.stack([model.net_sends[used], model.net_bytes[used]], axis=1)
    # A net that comes from the host is made by no element.
    inner_nets = np.flatnonzero(sources >= 0)
    owners = np.concatenate([pairs[:, 1], sources[inner_nets]])
    touches = np.concatenate([net, ~inner_nets])
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
    """Return the distinct pairs in ascending order. Every second number must be less than
    `seconds`, so that a pair fits into one integer key."""
    keys = np.unique(pairs[:, 0].astype(np.int64) * seconds + pairs[:, 1])
    return np.stack([keys // max(seconds, 1), keys % max(seconds, 1)], axis=1).astype(np.int32)


def _orphans(problem: PlacementProblem) -> Int32:
    """Return the groups with backward ops and no forward ops."""
    backward = np.unique(problem.groups.of_op[problem.graph.phases == Phase.BACKWARD])
    return np.asarray(backward[problem.load.forward[backward] == 0], np.int32)


# ── The walk up a lattice of ideals: the kernels in which `best_chain` spends its time ───────────

STEPS = 2_000_000
"""Steps that walks take between two looks at the budget; they take about .1 s."""


class Lattice(NamedTuple):
    """Ideals by size: the first is empty, the last holds every element.

    add_offsets, adds, leads   CSR by ideal: the elements that may be added to it, ascending by
                     rank, and the ideal that each leads to
    parents, lasts   [ideals] an ideal with one element less, and that element; -1 for the empty
                     ideal
    ranks            [elements] a topological numbering
    """

    add_offsets: Int64
    adds: Int32
    leads: Int32
    parents: Int32
    lasts: Int32
    ranks: Int32


class ChainTable(NamedTuple):
    """The table of the dynamic programme, whose recurrence stands above `best_chain`.

    values        [ideals, states] f: the least largest load of stages that make up the ideal on the
                  devices of the state; inf: none is known
    origins, kinds   [ideals, states] the ideal below the last of these stages, and that stage's
                  kind
    left_work     [ideals] weighted work of the elements that are not in the ideal
    power         [states] weighted number of devices that are left
    nexts         [states, kinds] the state with one device of the kind more in use; -1: none is
                  left
    room_bytes    [kinds]
    ceiling       [1] only values below it are searched for
    """

    values: Float64
    origins: Int32
    kinds: Int8
    left_work: Float64
    power: Float64
    nexts: Int32
    room_bytes: Float64
    ceiling: Float64


class Climb(NamedTuple):
    """The scratch arrays of a walk up from one ideal. The stage is what the walk has added so far.

    states            states of the bottom ideal that may still lead below the ceiling
    kinds             [kinds] 1: one of these states has a device of this kind left
    homes             [nets] where the source is: 0 neither below nor in the stage, 1 in the stage,
                      2 below or on the host
    below, inside     [nets] number of readers in the bottom ideal, and in the stage
    at, next_add      [depth] ideals on the way up, and the next CSR entry to try from each
    added             [depth] element that was added last
    loads             [depth, kinds] load of the stage
    least             [depth, kinds] that load without the transfers that more elements may undo:
                      no larger stage has less
    held_bytes        [depth]
    """

    states: Int32
    kinds: Int8
    homes: Int8
    below: Int32
    inside: Int32
    at: Int32
    next_add: Int64
    added: Int32
    loads: Float64
    least: Float64
    held_bytes: Float64


@kernel
def left_work(lattice: Lattice, weighed: Float64, total: float, left_work: Float64) -> None:
    """Fill `left_work` [ideals] with the weighted work of the elements outside each ideal.

    weighed   [elements] weighted work, of sum `total`
    """
    left_work[0] = total
    for ideal in range(1, len(lattice.parents)):
        left_work[ideal] = left_work[lattice.parents[ideal]] - weighed[lattice.lasts[ideal]]


@kernel
def push(  # noqa: C901  one walk, at which each step either adds an element or takes it back
    elements: Elements, lattice: Lattice, table: ChainTable, walk: Climb, ideal: int, steps: Int64
) -> int:
    """Walk up from `ideal` and from each ideal after it, and improve the values of the ideals
    above. After `STEPS` steps no further walk begins. Returns the first ideal that is still to be
    done.

    Ideals stand by size, so when an ideal's turn comes its own values are final.
    """
    ceiling, kinds = table.ceiling[0], len(walk.kinds)
    while ideal < len(lattice.parents) and steps[0] < STEPS:
        bottom = ideal
        ideal += 1
        steps[0] += 1
        # 1. The states of the bottom ideal that may still lead below the ceiling.
        alive = 0
        walk.kinds[:] = 0
        for state in range(len(table.power)):
            value = table.values[bottom, state]
            if value >= ceiling or table.left_work[bottom] > ceiling * table.power[state]:
                continue
            walk.states[alive] = state
            alive += 1
            for kind in range(kinds):
                if table.nexts[state, kind] >= 0:
                    walk.kinds[kind] = 1
        if not alive:
            continue

        # 2. The stage is empty, and the ideal lies below it. The parents lead down to the empty
        # ideal and name each element of the ideal once.
        for net in range(len(elements.net_sources)):
            walk.homes[net] = 2 if elements.net_sources[net] < 0 else 0
            walk.below[net] = 0
            walk.inside[net] = 0
        walk.at[0] = bottom
        walk.next_add[0] = lattice.add_offsets[bottom]
        lower = bottom
        while lower > 0:
            _mark(elements, walk, lattice.lasts[lower], 2, walk.below, 1)
            lower = lattice.parents[lower]

        # 3. The ideals above, depth first.
        depth = 0
        while depth >= 0:
            edge = walk.next_add[depth]
            if edge == lattice.add_offsets[walk.at[depth] + 1]:
                # All are done from here, so the element that was added last is taken back. Loads
                # and bytes need no undoing: each depth has its own.
                if depth > 0:
                    _mark(elements, walk, walk.added[depth], 0, walk.inside, -1)
                depth -= 1
                continue
            walk.next_add[depth] += 1
            element = lattice.adds[edge]
            # Elements are added in ascending rank only, so that each ideal above is met once.
            if depth > 0 and lattice.ranks[element] < lattice.ranks[walk.added[depth]]:
                continue
            steps[0] += 1
            # The stage with this element must fit some kind of device, by work and bytes alone,
            # which is cheap; nets are counted when the element is added.
            held = walk.held_bytes[depth] + elements.held_bytes[element]
            fits = False
            for kind in range(kinds):
                least = walk.least[depth, kind] + elements.work_seconds[element, kind]
                if walk.kinds[kind] and least < ceiling and held <= table.room_bytes[kind]:
                    fits = True
            if not fits:
                continue
            depth += 1
            _add(elements, walk, depth, element)
            above = lattice.leads[edge]
            walk.at[depth] = above
            walk.next_add[depth] = lattice.add_offsets[above]
            walk.added[depth] = element

            # 4. The stage up to here is entered in the table wherever it improves a value.
            grows = False
            for kind in range(kinds):
                if not walk.kinds[kind] or walk.held_bytes[depth] > table.room_bytes[kind]:
                    continue
                if walk.least[depth, kind] >= ceiling:
                    continue
                # A load above the ceiling does not end the walk: more elements may undo transfers.
                grows = True
                load = walk.loads[depth, kind]
                if load >= ceiling:
                    continue
                for i in range(alive):
                    state = walk.states[i]
                    then = table.nexts[state, kind]
                    if then < 0 or table.left_work[above] > ceiling * table.power[then]:
                        continue
                    value = max(load, table.values[bottom, state])
                    if value < table.values[above, then]:
                        table.values[above, then] = value
                        table.origins[above, then] = bottom
                        table.kinds[above, then] = kind
            # If no kind of device could take a larger stage, all edges further up are skipped.
            if not grows:
                walk.next_add[depth] = lattice.add_offsets[above + 1]
    return ideal


@inlined
def _mark(
    elements: Elements, walk: Climb, element: int, home: int, readers: Int32, change: int
) -> None:
    """Note for the nets that an element makes where it is, and change the readers, below or in the
    stage, of the nets that it reads."""
    for i in range(elements.touch_offsets[element], elements.touch_offsets[element + 1]):
        touch = elements.touches[i]
        if touch < 0:
            walk.homes[~touch] = home
        else:
            readers[touch] += change


@inlined
def _add(elements: Elements, walk: Climb, depth: int, element: int) -> None:
    """Put an element into the stage. Loads and bytes at `depth` are those at `depth - 1` plus what
    the element changes."""
    kinds = len(walk.kinds)
    walk.held_bytes[depth] = walk.held_bytes[depth - 1] + elements.held_bytes[element]
    for kind in range(kinds):
        work = elements.work_seconds[element, kind]
        walk.loads[depth, kind] = walk.loads[depth - 1, kind] + work
        walk.least[depth, kind] = walk.least[depth - 1, kind] + work
    for i in range(elements.touch_offsets[element], elements.touch_offsets[element + 1]):
        net = elements.touches[i]
        # By how many hops in and out the load changes; and whether a hop lasts: no larger stage can
        # undo it.
        came_in, goes_out, lasts = 0.0, 0.0, 0
        if net < 0:
            # The stage now makes the net: it no longer has it sent in, but sends it out if any
            # reader is elsewhere. Readers below can never join the stage.
            net = ~net
            walk.homes[net] = 1
            came_in = -1.0 if walk.inside[net] else 0.0
            goes_out = 1.0 if walk.inside[net] < elements.net_sizes[net] else 0.0
            lasts = walk.below[net]
        else:
            # The stage now reads the net. If it also makes the net, the last reader to join ends
            # the hop out. Otherwise the first reader brings the hop in, which only a source that is
            # still to come can undo.
            walk.inside[net] += 1
            if walk.homes[net] == 1:
                goes_out = -1.0 if walk.inside[net] == elements.net_sizes[net] else 0.0
            elif walk.inside[net] == 1:
                came_in = 1.0
                lasts = walk.homes[net]
        if came_in == 0.0 and goes_out == 0.0:
            continue
        for kind in range(kinds):
            into, out = elements.in_seconds[net, kind], elements.out_seconds[net, kind]
            walk.loads[depth, kind] += came_in * into + goes_out * out
            if lasts:
                walk.least[depth, kind] += max(came_in, 0.0) * into + max(goes_out, 0.0) * out


# ── The best chain of stages through a lattice of ideals ────────────────────────────────────────
#
# `ideal_dp` and `linear_dp` share this dynamic programme.
#
# An ideal is a set of elements that holds all predecessors of its members. With f(I, c) the least
# possible largest load of stages that make up I on devices c (a count of each kind),
#
#     f({}, none) = 0
#     f(I, c) = min over ideals J below I and kinds k in c of   max(f(J, c - k), load(k, I \ J))
#
# From every J that is reached, a depth-first walk up adds elements in ascending rank. It meets each
# I above J exactly once: the walk to I adds the elements of I \ J in the order of their ranks, and
# every prefix of that, with J, is an ideal. Loads along the walk follow from counts per net.
#
# Only plans below a given value (`ceiling`) are searched for, which cuts off most of the walk:
# * a stage grows no further if, for every kind of device that is left, its bytes exceed the room or
#   its work and the transfers that more elements cannot undo reach the ceiling;
# * a state (I, c) is skipped if the devices that are left cannot do the work that is left:
#   sum over k of lambda_k x devices left of k x ceiling
#                                           < sum over elements left of min_k lambda_k x work_k
#
# Exact for any weights lambda. O(ideals x ideals above) steps at most, each O(nets of an element x
# kinds + states).


MOST_ENTRIES = 2**24
"""Most entries, ideals x states, of a table. An entry has 13 bytes: value, origin and kind."""
_ROUNDING = 1e-9
"""The work that is left is lowered by this share of all work, because sums that are taken in
another order differ by rounding. So rounding cuts off no plan."""


class ContiguousChain(NamedTuple):
    """A chain of stages.

    value     seconds of the largest load
    stages    [elements] stage of each element, numbered from the bottom
    devices   device of each stage
    """

    value: float
    stages: Int32
    devices: list[int]


class DeviceStates(NamedTuple):
    """Which devices are in use, as numbered states; state 0 uses none.

    nexts   [states, kinds] as in `ChainTable`
    left    [states, kinds] devices of each kind that are left
    """

    nexts: Int32
    left: Int64


def states_of(counts: NDArray[np.int64], most: int) -> DeviceStates:
    """Return a state for every count of devices of each kind. If these are more than `most`, stages
    may use the devices only in their order; every device must then be a kind of its own.

    counts   [kinds] number of devices
    """
    kinds = len(counts)
    if np.prod(counts + 1.0) > most:
        assert (counts == 1).all(), "devices in order are kinds of their own"
        # In state s the devices before s are used or skipped. A stage on device k >= s leads to the
        # state k + 1.
        upto = np.arange(kinds + 1)
        nexts = np.where(upto[:, None] <= np.arange(kinds), np.arange(kinds) + 1, -1)
        return DeviceStates(nexts.astype(np.int32), (nexts >= 0).astype(np.int64))
    # States are all counts in C order, so one device more of a kind adds that kind's stride.
    used = np.indices(tuple(counts + 1)).reshape(kinds, -1).T
    strides = np.cumprod(np.concatenate([[1], (counts + 1)[:0:-1]]))[::-1]
    index = np.arange(len(used))[:, None] + strides
    return DeviceStates(np.where(used < counts, index, -1).astype(np.int32), counts - used)


def best_chain(
    elements: Elements,
    lattice: Lattice,
    kinds: DeviceKinds,
    *,
    ceiling: float,
    budget: Budget,
    step_evaluations: float,
    always: bool = False,
) -> tuple[ContiguousChain | None, bool]:
    """Return the best chain below `ceiling`, or None; and whether the search came to its end.

    budget             ends the search early, unless `always` is set
    step_evaluations   evaluations that the budget is charged for one step of a walk
    """
    counts = np.array([len(members) for members in kinds.members])
    states = states_of(counts, MOST_ENTRIES // len(lattice.parents))
    # Weights lambda [kinds] that make the bound on work high; any give a valid bound. The first
    # kind has weight 1. For each other kind in turn, eleven quantiles of the ratio between the
    # weighted work so far and the kind's own work are tried. The best has the most weighted work
    # per weighted device.
    work_seconds, weights = elements.work_seconds, np.ones(len(counts))
    weighed, power = work_seconds[:, 0], float(states.left[0][0])
    for kind in range(1, len(counts)):
        column = work_seconds[:, kind]
        finite = np.isfinite(column)
        usable = (column > 0) & finite & np.isfinite(weighed)
        ratios = weighed[usable] / column[usable] if usable.any() else np.zeros(1)
        ratios = np.quantile(ratios, np.linspace(0, 1, 11))
        # 0 x inf is inf here and not nan: an element that may not be on a kind never takes its
        # weighted work from that kind.
        columns = np.where(finite, np.where(finite, column, 0.0) * ratios[:, None], np.inf)
        sums = [np.minimum(weighed, scaled).sum() for scaled in columns]
        best = int(np.argmax(np.array(sums) / (power + states.left[0][kind] * ratios)))
        weights[kind] = ratios[best]
        weighed = np.minimum(weighed, columns[best])
        power += float(states.left[0][kind] * weights[kind])
    weighed = np.where(np.isfinite(weighed), weighed, 0.0)
    shape = (len(lattice.parents), len(states.nexts))
    left = np.zeros(shape[0])
    left_work(lattice, weighed, weighed.sum(), left)
    table = ChainTable(
        values=np.full(shape, np.inf),
        origins=np.full(shape, -1, np.int32),
        kinds=np.full(shape, -1, np.int8),
        left_work=left - _ROUNDING * weighed.sum(),
        power=states.left @ weights,
        nexts=states.nexts,
        room_bytes=kinds.room_bytes,
        ceiling=np.array([ceiling]),
    )
    # Only the empty ideal has a value yet: 0, with no device in use.
    table.values[0, 0] = 0.0
    # A walk has at most one step per element.
    depth, nets = len(elements.work_seconds) + 1, len(elements.net_sources)
    walk = Climb(
        states=np.zeros(shape[1], np.int32),
        kinds=np.zeros(len(counts), np.int8),
        homes=np.zeros(nets, np.int8),
        below=np.zeros(nets, np.int32),
        inside=np.zeros(nets, np.int32),
        at=np.zeros(depth, np.int32),
        next_add=np.zeros(depth, np.int64),
        added=np.zeros(depth, np.int32),
        loads=np.zeros((depth, len(counts))),
        least=np.zeros((depth, len(counts))),
        held_bytes=np.zeros(depth),
    )
    ideal, steps = 0, np.zeros(1, np.int64)
    while ideal < len(lattice.parents):
        if budget.exhausted and not always:
            return None, False
        ideal = push(elements, lattice, table, walk, ideal, steps)
        budget.charge(float(steps[0]) * step_evaluations)
        steps[0] = 0
    state = int(table.values[-1].argmin())
    if not table.values[-1, state] < ceiling:
        return None, True

    # The stages of the best chain are found by following the origins down from everything.
    value, ideal, tops = float(table.values[-1, state]), len(lattice.parents) - 1, []
    free = [list(members) for members in kinds.members]
    kinds_used = []
    while ideal:
        kind, origin = int(table.kinds[ideal, state]), int(table.origins[ideal, state])
        tops.append(ideal)
        kinds_used.append(kind)
        # Several states lead to `state` if devices may be skipped; the value came from the least.
        befores = np.flatnonzero(table.nexts[:, kind] == state)
        state = int(befores[table.values[origin, befores].argmin()])
        ideal = origin
    # Stages are numbered from the bottom and take the devices of their kind in machine order.
    devices = [free[kind].pop(0) for kind in reversed(kinds_used)]
    stages = np.zeros(len(lattice.ranks), np.int32)
    # Tops go down. Each marks a whole ideal; later ones mark its lower part anew.
    for stage, top in enumerate(tops):
        while top:
            stages[lattice.lasts[top]] = len(tops) - 1 - stage
            top = int(lattice.parents[top])
    return ContiguousChain(value, stages, devices), True
