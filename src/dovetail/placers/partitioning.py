"""Common parts of the partitioners: a problem as a weighted undirected graph, and its parts turned
back into a placement that respects memory.

Vertices are groups with a choice, weighed by the seconds of the fastest device that they may use.
Groups without one stay where they must and are left out; their work lowers the share of their
device. With t(g) that weight and w(g, d) the seconds on a device,

    speed(d)  =  sum of t(g) / sum of w(g, d)                 over the groups that may be on d
    share(d)  ~  all work x speed(d) / all speeds - work that is there anyway

Edges weigh the bytes that go between two groups, in either direction, each tensor once per reader.
Partitioners ignore memory and constraints; `best_fitting` moves groups from devices where they may
not be or that are over-full, to where most of what they talk to is: least bytes cut per byte moved.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix

from dovetail.placers.budget import Budget, Score
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64

MOST_WEIGHT = 2**28
"""Sum of integer weights, so that sums of them fit 32 bits whatever a library adds."""
MIN_SHARE = 1e-3
"""A device that should get less than this gets no part: partitioners cannot cut one so small."""
MEMORY_ATTEMPTS = 4
"""Times that groups are moved: once, and three more where memory turns out short."""
HEAVY = 1.1
"""Groups that must move avoid devices that have this much more than their share of the work."""


class GroupNetwork(NamedTuple):
    """Symmetric CSR over groups: offsets [groups + 1], neighbours and their bytes [2 x edges]."""

    offsets: Int64
    neighbours: Int32
    edge_bytes: Float64


class PartitionProblem(NamedTuple):
    """What is partitioned, and into what.

    within        devices that groups may use
    devices       of them, one per part
    shares        [parts] of the vertices' weight; they sum to 1
    fixed         [groups] where groups that are no vertices are; of vertices any device
    groups        [vertices] the group of each
    weights       [vertices] integer, positive
    offsets, neighbours, edge_weights   symmetric CSR [vertices + 1], [2 x edges]; positive
    """

    within: list[int]
    devices: list[int]
    shares: Float64
    fixed: GroupPlacement
    groups: Int32
    weights: Int64
    offsets: Int64
    neighbours: Int64
    edge_weights: Int64


class _RepairState(NamedTuple):
    """What moving groups looks at, and what it changes.

    choices       [groups, devices] 1: may go there
    group_bytes   [groups]
    work_seconds  [groups, devices]
    most_seconds  [1] a device with more work is heavy
    room          [devices] bytes left, negative where over-full
    loads         [devices] seconds of work
    placement     [groups]
    """

    choices: Int8
    group_bytes: Int64
    work_seconds: Float64
    most_seconds: Float64
    room: Int64
    loads: Float64
    placement: Int32


class PartitionCandidate(NamedTuple):
    """A placement [groups] that uses the devices `within`, memory and constraints ignored."""

    within: list[int]
    placement: GroupPlacement


def net_of(problem: PlacementProblem) -> GroupNetwork:
    """The edges of a problem without direction; an edge without bytes counts 1. O(edges x log)."""
    before, after, sizes = problem.edges
    count = problem.groups.count
    one_way = csr_matrix((np.maximum(sizes, 1.0), (before, after)), shape=(count, count))
    both = (one_way + one_way.T).tocsr()
    both.sort_indices()
    return GroupNetwork(both.indptr.astype(np.int64), both.indices.astype(np.int32), both.data)


def parts_of(
    problem: PlacementProblem, net: GroupNetwork, within: list[int], *, memory: bool = False
) -> PartitionProblem:
    """The graph of the groups that may choose among the devices `within`.

    memory   weigh groups by bytes as much as by work; no share is above what fits its device
    """
    allowed = problem.allowed[:, within]
    choices = np.zeros(problem.groups.count, np.int64)
    choices[problem.free] = allowed[problem.free].sum(axis=1)
    fixed = problem.fastest.copy()
    bound = choices == 1
    fixed[bound] = np.array(within)[allowed[bound].argmax(axis=1)]
    groups = np.flatnonzero(choices > 1).astype(np.int32)
    weights, shares = _work_shares(problem, within, fixed, groups)
    if memory:
        sizes = problem.group_bytes[groups].astype(np.float64)
        weights = _normal(weights) + _normal(sizes)
        fixed_bytes = np.where(choices > 1, 0, problem.group_bytes)
        held = np.bincount(fixed, weights=fixed_bytes, minlength=problem.devices)
        room = problem.capacities[within] - held.astype(np.float64)[within]
        shares = _normal(np.minimum(shares, np.maximum(room, 0) / max(1.0, sizes.sum())))
    has_part = shares >= min(MIN_SHARE, shares.max())
    offsets, neighbours, edge_bytes = _induced(net, groups)
    return PartitionProblem(
        within=within,
        devices=[device for device, keep in zip(within, has_part, strict=True) if keep],
        shares=_normal(shares[has_part]),
        fixed=fixed,
        groups=groups,
        weights=integers(weights),
        offsets=offsets,
        neighbours=neighbours,
        edge_weights=integers(edge_bytes),
    )


def integers(values: Float64, most: int = MOST_WEIGHT) -> Int64:
    """In proportion to `values`, at least 1 each, with a sum of about `most`."""
    return np.maximum(np.rint(_normal(values) * most), 1).astype(np.int64)


def trivial_labels(parts: PartitionProblem) -> Int64 | None:
    """[vertices] the part of each where there is nothing to cut: one part, or no more vertices than
    parts (the heaviest goes to the largest share); else None."""
    if len(parts.devices) == 1:
        return np.zeros(len(parts.groups), np.int64)
    if len(parts.groups) > len(parts.devices):
        return None
    labels = np.empty(len(parts.groups), np.int64)
    by_share = np.argsort(-parts.shares, kind="stable")
    labels[np.argsort(-parts.weights, kind="stable")] = by_share[: len(labels)]
    return labels


def has_empty_part(parts: PartitionProblem, labels: Int64) -> bool:
    """Is there a part without a vertex, though there were enough of them?"""
    assert labels.min(initial=0) >= 0, "a partitioner answered with a negative part"
    assert labels.max(initial=0) < len(parts.devices), "a partitioner answered with a part too many"
    enough = len(parts.groups) >= len(parts.devices)
    return enough and len(np.unique(labels)) < len(parts.devices)


def placed(
    problem: PlacementProblem,
    net: GroupNetwork,
    parts: PartitionProblem,
    labels: Int64,
    *,
    reorder: bool,
) -> PartitionCandidate:
    """Parts as a placement.

    reorder   swap the parts of devices that are alike: to be with the groups that are fixed there,
              else in the order of the groups
    """
    devices = np.array(parts.devices, np.int32)
    if reorder:
        devices = _reordered(problem, net, parts, labels)
    placement = parts.fixed.copy()
    placement[parts.groups] = devices[labels]
    return PartitionCandidate(parts.within, placement)


def best_fitting(
    problem: PlacementProblem,
    net: GroupNetwork,
    budget: Budget,
    candidates: list[PartitionCandidate],
) -> GroupPlacement:
    """The best of the candidates, once their groups are where they may be and where they fit.

    Memory is estimated while moving. Where the evaluator then finds a device over its capacity, the
    same is done again as if all that a group makes stayed, and then with that much less room.
    Ties: the earlier attempt, the earlier candidate.
    """
    rooms = dict.fromkeys(range(len(candidates)), problem.capacities.astype(np.int64))
    scored_placements: list[tuple[Score, GroupPlacement]] = []
    for attempt in range(MEMORY_ATTEMPTS):
        sizes = problem.made_bytes if attempt == 1 else problem.group_bytes
        placements = [
            problem.settle(refit(problem, net, candidates[i], sizes, room))
            for i, room in rooms.items()
        ]
        scores = budget.score(problem, np.stack(placements), always=True)
        scored_placements += zip(scores, placements, strict=True)
        for i, score, placement in zip(list(rooms), scores, placements, strict=True):
            if not 0 < score.lacking_bytes < np.inf:
                del rooms[i]
            elif attempt:
                share = problem.capacities / np.maximum(budget.peaks(placement), 1)
                rooms[i] = (rooms[i] * np.where(share < 1, 0.95 * share, 1.0)).astype(np.int64)
        if not rooms:
            break
    return min(scored_placements, key=lambda pair: pair[0])[1]


def overflows(problem: PlacementProblem, placement: GroupPlacement) -> bool:
    """Is a device over-full by the bytes that stay for long?"""
    held = np.bincount(placement, weights=problem.group_bytes, minlength=problem.devices)
    return bool((held > problem.capacities).any())


def refit(
    problem: PlacementProblem,
    net: GroupNetwork,
    candidate: PartitionCandidate,
    group_bytes: NDArray[np.int64],
    room_bytes: Int64,
) -> GroupPlacement:
    """The placement with groups moved, in order of index, from where they may not be, and from
    devices with more than `room_bytes` [devices], in order of bytes cut per byte moved.

    What fits nowhere stays. O(edges + groups x devices).
    """
    placement = candidate.placement.copy()
    within = np.isin(np.arange(problem.devices), candidate.within)
    choices = problem.allowed & within
    legal = choices[problem.free, placement[problem.free]]
    movable = choices[problem.free].any(axis=1)
    held = np.bincount(placement, weights=group_bytes, minlength=problem.devices)
    work = np.where(problem.allowed, problem.work_seconds, 0.0)
    seconds = work[np.arange(len(placement)), placement]
    loads = np.bincount(placement, weights=seconds, minlength=problem.devices).astype(np.float64)
    moves = _RepairState(
        choices=choices.astype(np.int8),
        group_bytes=group_bytes,
        work_seconds=np.ascontiguousarray(work),
        most_seconds=np.array([HEAVY * loads[candidate.within].max(initial=0.0)]),
        room=room_bytes - held.astype(np.int64),
        loads=loads,
        placement=placement,
    )
    _relocate(problem.free[movable & ~legal], net, moves)
    crowded = problem.free[movable & (moves.room[placement[problem.free]] < 0)]
    if len(crowded):
        _relocate(_cheapest_first(net, placement, group_bytes, crowded), net, moves)
    return placement


@kernel
def _relocate(order: Int32, net: GroupNetwork, moves: _RepairState) -> None:
    """Move groups, one by one: to a device that has room, then one that is not heavy, then the one
    that most bytes go to and from, then the one with the least work; ties: the first."""
    placement, room, loads = moves.placement, moves.room, moves.loads
    for group in order:
        here, size = placement[group], moves.group_bytes[group]
        legal = moves.choices[group, here] == 1
        if legal and (room[here] >= 0 or size == 0):
            continue
        best, best_rank, best_talk = -1, -1, 0.0
        for device in range(len(room)):
            fits = room[device] >= size
            if device == here or moves.choices[group, device] == 0 or (legal and not fits):
                continue
            work = loads[device] + moves.work_seconds[group, device]
            rank = (2 if fits else 0) + (1 if work <= moves.most_seconds[0] else 0)
            talk = _bytes_to(net, placement, group, device)
            better = rank > best_rank or (rank == best_rank and talk > best_talk)
            if not better and rank == best_rank and talk == best_talk:
                better = loads[device] < loads[best]
            if better:
                best, best_rank, best_talk = device, rank, talk
        if best >= 0:
            room[here] += size
            room[best] -= size
            loads[here] -= moves.work_seconds[group, here]
            loads[best] += moves.work_seconds[group, best]
            placement[group] = best


@inlined
def _bytes_to(net: GroupNetwork, placement: Int32, group: int, device: int) -> float:
    """Bytes between a group and its neighbours on a device."""
    total = 0.0
    for i in range(net.offsets[group], net.offsets[group + 1]):
        if placement[net.neighbours[i]] == device:
            total += net.edge_bytes[i]
    return total


def _cheapest_first(
    net: GroupNetwork, placement: GroupPlacement, group_bytes: NDArray[np.int64], groups: Int32
) -> Int32:
    """`groups` by bytes that leaving their device would cut, less those it may mend, per byte."""
    rows = np.repeat(np.arange(len(placement)), np.diff(net.offsets))
    same = placement[rows] == placement[net.neighbours]
    signed = np.where(same, net.edge_bytes, -net.edge_bytes)
    loss = np.bincount(rows, weights=signed, minlength=len(placement))
    return groups[np.argsort((loss / np.maximum(group_bytes, 1))[groups], kind="stable")]


def _work_shares(
    problem: PlacementProblem, within: list[int], fixed: GroupPlacement, groups: Int32
) -> tuple[Float64, Float64]:
    """([vertices] weight in seconds, [within] share of each device)"""
    allowed = problem.allowed[groups][:, within]
    seconds = np.where(allowed, problem.work_seconds[groups][:, within], 0.0)
    fastest = np.where(allowed, seconds, np.inf).min(axis=1, initial=np.inf)
    reachable = np.where(allowed, fastest[:, None], 0.0).sum(axis=0)
    device_seconds = seconds.sum(axis=0)
    speeds = np.divide(
        reachable, device_seconds, out=np.ones(len(within)), where=device_seconds > 0
    )
    elsewhere = np.ones(problem.groups.count, dtype=bool)
    elsewhere[groups] = False
    there = fixed[elsewhere]
    pinned = problem.work_seconds[elsewhere, there]
    pinned = np.bincount(there, weights=pinned, minlength=problem.devices)[within] * speeds
    target = (fastest.sum() + pinned.sum()) * speeds / speeds.sum() - pinned
    shares = np.minimum(np.maximum(target, 0.0), reachable)
    return fastest, _normal(shares)


def _normal(values: Float64) -> Float64:
    """Scaled to a sum of 1; all alike where there is nothing to scale."""
    total = float(values.sum())
    return values / total if total > 0 else np.full(len(values), 1 / max(1, len(values)))


def _induced(net: GroupNetwork, groups: Int32) -> tuple[Int64, Int64, Float64]:
    """CSR of the edges among `groups`, renumbered."""
    count = len(net.offsets) - 1
    shape = (count, count)
    matrix = csr_matrix((net.edge_bytes, net.neighbours, net.offsets), shape=shape)
    inner = matrix if len(groups) == count else matrix[groups][:, groups].tocsr()
    inner.sort_indices()
    return inner.indptr.astype(np.int64), inner.indices.astype(np.int64), inner.data


def _reordered(
    problem: PlacementProblem, net: GroupNetwork, parts: PartitionProblem, labels: Int64
) -> Int32:
    """[parts] device of each part, swapped only among devices alike in model, room and share."""
    devices = np.array(parts.devices, np.int32)
    talk = _talk(problem, net, parts, labels)
    sums = np.bincount(labels, weights=np.arange(len(labels)), minlength=len(devices))
    means = sums / np.maximum(np.bincount(labels, minlength=len(devices)), 1)
    alike: dict[tuple[str, int, float], list[int]] = {}
    for part, device in enumerate(parts.devices):
        model = problem.machine.devices[device].model
        key = (model, int(problem.capacities[device]), round(float(parts.shares[part]), 2))
        alike.setdefault(key, []).append(part)
    answer = devices.copy()
    for members in alike.values():
        along = np.array(members)[np.argsort(means[members], kind="stable")]
        block = talk[np.ix_(along, devices[members])]
        chosen = linear_sum_assignment(-block)[1] if block.any() else np.arange(len(along))
        answer[along] = devices[members][chosen]
    return answer


def _talk(
    problem: PlacementProblem, net: GroupNetwork, parts: PartitionProblem, labels: Int64
) -> Float64:
    """[parts, devices] bytes between each part and the groups that are fixed on each device."""
    part_of = np.full(problem.groups.count, -1, np.int64)
    part_of[parts.groups] = labels
    vertices = np.repeat(np.arange(len(part_of)), np.diff(net.offsets))
    is_boundary = (part_of[vertices] >= 0) & (part_of[net.neighbours] < 0)
    cells = (
        part_of[vertices[is_boundary]] * problem.devices + parts.fixed[net.neighbours[is_boundary]]
    )
    shape = (len(parts.devices), problem.devices)
    sums = np.bincount(cells, weights=net.edge_bytes[is_boundary], minlength=shape[0] * shape[1])
    return sums.reshape(shape).astype(np.float64)
