"""Common parts of the partitioners: turns a problem into a weighted undirected graph, and the parts
of that graph back into a placement that respects memory.

Vertices are groups with a choice, weighted by their seconds on the fastest device that they may
use. Groups without a choice stay where they must be and are left out; their work lowers the share
of their device. With t(g) the weight of group g and w(g, d) its seconds on device d,

    speed(d)  =  sum of t(g) / sum of w(g, d)                 over the groups that may be on d
    share(d)  ~  all work x speed(d) / all speeds - work of the groups fixed on d

An edge is weighted by the bytes that go between its two groups, in both directions, each tensor
once per reading group. Partitioners ignore memory and constraints. `best_candidate` repairs that:
it moves groups off devices where they may not be or that are over-full, first those with the fewest
bytes newly cut per byte moved, and each to the device that it exchanges most bytes with.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix

from dovetail.placers.baselines import best_fitting
from dovetail.placers.budget import Budget
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64

MOST_WEIGHT = 2**28
"""Integer weights sum to about this, so that sums fit 32 bits, also with what a library adds."""
MIN_SHARE = 1e-3
"""A device with a smaller share gets no part, because partitioners cannot cut one so small."""
HEAVY = 1.1
"""Groups that must move avoid a device that would then have more than this many times the largest
work that a device had before."""


class GroupNetwork(NamedTuple):
    """Symmetric CSR over groups: offsets [groups + 1], neighbours and their bytes [2 x edges]."""

    offsets: Int64
    neighbours: Int32
    edge_bytes: Float64


class PartitionProblem(NamedTuple):
    """The graph that a partitioner cuts, and the parts that it cuts into.

    within        devices that groups may use
    devices       [parts] device of each part, among `within`
    shares        [parts] share of all vertices' weight; they sum to 1
    fixed         [groups] device of each group that is no vertex; meaningless for vertices
    groups        [vertices] the group of each
    weights       [vertices] positive integers
    offsets, neighbours, edge_weights   symmetric CSR [vertices + 1], [2 x edges]; weights positive
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
    """What `_relocate` reads, and (room, loads, placement) what it changes.

    choices       [groups, devices] 1: the group may go there
    group_bytes   [groups]
    work_seconds  [groups, devices]
    most_seconds  [1] a device with more work than this is heavy
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
    """A placement [groups] on the devices `within` that need not keep to memory and constraints."""

    within: list[int]
    placement: GroupPlacement


Cut = Callable[[PartitionProblem], tuple[list[Int64], bool]]
"""A partitioner's answers ([vertices] the part of each), and whether parts may be reordered as in
`placed`."""


def net_of(problem: PlacementProblem) -> GroupNetwork:
    """Return the edges of a problem without direction. An edge without bytes counts as one byte.

    O(edges x log edges).
    """
    before, after, sizes = problem.edges
    count = problem.groups.count
    one_way = csr_matrix((np.maximum(sizes, 1.0), (before, after)), shape=(count, count))
    both = (one_way + one_way.T).tocsr()
    both.sort_indices()
    return GroupNetwork(both.indptr.astype(np.int64), both.indices.astype(np.int32), both.data)


def parts_of(
    problem: PlacementProblem, net: GroupNetwork, within: list[int], *, memory: bool = False
) -> PartitionProblem:
    """Return the graph of the groups that have a choice among the devices `within`.

    memory   weigh groups by bytes as much as by work, and let no share exceed what fits its device
    """
    allowed = problem.allowed[:, within]
    choices = np.zeros(problem.groups.count, np.int64)
    choices[problem.free] = allowed[problem.free].sum(axis=1)
    fixed = problem.fastest.copy()
    bound = choices == 1
    fixed[bound] = np.array(within)[allowed[bound].argmax(axis=1)]
    groups = np.flatnonzero(choices > 1).astype(np.int32)

    # Groups weigh the seconds on their fastest device. Shares are in proportion to the devices'
    # speeds, less the work that is fixed there.
    allowed = allowed[groups]
    seconds = np.where(allowed, problem.work_seconds[groups][:, within], 0.0)
    weights = np.where(allowed, seconds, np.inf).min(axis=1, initial=np.inf)
    reachable = np.where(allowed, weights[:, None], 0.0).sum(axis=0)
    device_seconds = seconds.sum(axis=0)
    speeds = np.divide(
        reachable, device_seconds, out=np.ones(len(within)), where=device_seconds > 0
    )
    elsewhere = choices <= 1
    fixed_devices = fixed[elsewhere]
    pinned = problem.work_seconds[elsewhere, fixed_devices]
    pinned = np.bincount(fixed_devices, weights=pinned, minlength=problem.devices)[within] * speeds
    target = (weights.sum() + pinned.sum()) * speeds / speeds.sum() - pinned
    # A device can have no less than nothing, and no more than the work of all that may go there.
    shares = _normal(np.minimum(np.maximum(target, 0.0), reachable))
    if memory:
        sizes = problem.group_bytes[groups].astype(np.float64)
        weights = _normal(weights) + _normal(sizes)
        fixed_bytes = np.where(choices > 1, 0, problem.group_bytes)
        held = np.bincount(fixed, weights=fixed_bytes, minlength=problem.devices)
        room = problem.capacities[within] - held.astype(np.float64)[within]
        shares = _normal(np.minimum(shares, np.maximum(room, 0) / max(1.0, sizes.sum())))
    # The minimum keeps at least one part if all shares are below `MIN_SHARE`.
    has_part = shares >= min(MIN_SHARE, shares.max())
    # The edges among the groups, renumbered.
    count = problem.groups.count
    matrix = csr_matrix((net.edge_bytes, net.neighbours, net.offsets), shape=(count, count))
    inner = matrix if len(groups) == count else matrix[groups][:, groups].tocsr()
    inner.sort_indices()
    return PartitionProblem(
        within=within,
        devices=[device for device, keep in zip(within, has_part, strict=True) if keep],
        shares=_normal(shares[has_part]),
        fixed=fixed,
        groups=groups,
        weights=integers(weights),
        offsets=inner.indptr.astype(np.int64),
        neighbours=inner.indices.astype(np.int64),
        edge_weights=integers(inner.data),
    )


def integers(values: Float64, most: int = MOST_WEIGHT) -> Int64:
    """Return integers in proportion to `values`, at least 1 each, with a sum of about `most`."""
    return np.maximum(np.rint(_normal(values) * most), 1).astype(np.int64)


def trivial_labels(parts: PartitionProblem) -> Int64 | None:
    """Return [vertices] the part of each if nothing has to be cut, else None.

    Nothing has to be cut if there is one part, or if there are no more vertices than parts. Then
    the heaviest vertex gets the part with the largest share, and so on.
    """
    if len(parts.devices) == 1:
        return np.zeros(len(parts.groups), np.int64)
    if len(parts.groups) > len(parts.devices):
        return None
    labels = np.empty(len(parts.groups), np.int64)
    by_share = np.argsort(-parts.shares, kind="stable")
    labels[np.argsort(-parts.weights, kind="stable")] = by_share[: len(labels)]
    return labels


def has_empty_part(parts: PartitionProblem, labels: Int64) -> bool:
    """Whether some part has no vertex, though there are enough vertices for all parts."""
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
    """Return the parts as a placement.

    labels    [vertices] part of each
    reorder   swap parts among devices that are alike, so that parts are with the fixed groups that
              they exchange most bytes with, or else in the order of the groups
    """
    devices = np.array(parts.devices, np.int32)
    if reorder:
        # [parts, devices] bytes between each part and the groups fixed on each device.
        part_of = np.full(problem.groups.count, -1, np.int64)
        part_of[parts.groups] = labels
        vertices = np.repeat(np.arange(len(part_of)), np.diff(net.offsets))
        at_edge = (part_of[vertices] >= 0) & (part_of[net.neighbours] < 0)
        cells = part_of[vertices[at_edge]] * problem.devices + parts.fixed[net.neighbours[at_edge]]
        shape = (len(devices), problem.devices)
        sums = np.bincount(cells, weights=net.edge_bytes[at_edge], minlength=shape[0] * shape[1])
        talk = sums.reshape(shape).astype(np.float64)

        # Devices are alike in model, capacity and share.
        sums = np.bincount(labels, weights=np.arange(len(labels)), minlength=len(devices))
        means = sums / np.maximum(np.bincount(labels, minlength=len(devices)), 1)
        alike: dict[tuple[str, int, float], list[int]] = {}
        for part, device in enumerate(parts.devices):
            model = problem.machine.devices[device].model
            key = (model, int(problem.capacities[device]), round(float(parts.shares[part]), 2))
            alike.setdefault(key, []).append(part)
        swapped = devices.copy()
        for members in alike.values():
            along = np.array(members)[np.argsort(means[members], kind="stable")]
            # Parts that exchange bytes with fixed groups are assigned so that most of these bytes
            # stay on a device. Without any, parts are in the order of the mean index of their
            # vertices.
            block = talk[np.ix_(along, devices[members])]
            chosen = linear_sum_assignment(-block)[1] if block.any() else np.arange(len(along))
            swapped[along] = devices[members][chosen]
        devices = swapped
    placement = parts.fixed.copy()
    placement[parts.groups] = devices[labels]
    return PartitionCandidate(parts.within, placement)


def candidates_within(
    problem: PlacementProblem, net: GroupNetwork, within: list[int], cut: Cut
) -> list[PartitionCandidate]:
    """Return one candidate for each answer of a partitioner on the devices `within`, without those
    that have an empty part, unless all have one.

    If some device is then over-full, by `PlacementProblem.group_bytes`, the partitioner is also
    asked with bytes counted in the weights.
    """
    candidates: list[PartitionCandidate] = []
    for memory in (False, True):
        parts = parts_of(problem, net, within, memory=memory)
        labels = trivial_labels(parts)
        tried, reorder = cut(parts) if labels is None else ([labels], True)
        full = [labels for labels in tried if not has_empty_part(parts, labels)]
        candidates += [
            placed(problem, net, parts, labels, reorder=reorder) for labels in full or tried
        ]
        held = [
            np.bincount(candidate.placement, problem.group_bytes, problem.devices)
            for candidate in candidates
        ]
        if not (np.stack(held) > problem.capacities).any():
            break
    return candidates


def best_candidate(
    problem: PlacementProblem,
    net: GroupNetwork,
    budget: Budget,
    candidates: list[PartitionCandidate],
) -> GroupPlacement:
    """Return the best candidate after its groups were moved to where they may be and fit.

    Memory is estimated while moving: the second attempt counts as if all outputs of a group stayed.
    """

    def moved(i: int, attempt: int, room: NDArray[np.int64]) -> GroupPlacement:
        sizes = problem.made_bytes if attempt == 1 else problem.group_bytes
        return refit(problem, net, candidates[i], sizes, room)

    return best_fitting(problem, budget, len(candidates), moved)


def refit(
    problem: PlacementProblem,
    net: GroupNetwork,
    candidate: PartitionCandidate,
    group_bytes: NDArray[np.int64],
    room_bytes: Int64,
) -> GroupPlacement:
    """Return the candidate's placement with groups moved to where they may be and fit.

    First, groups that are where they may not be move, in order of index. Then groups move off
    devices that hold more than `room_bytes` [devices], in order of bytes newly cut per byte moved.
    A group that fits nowhere stays. O(edges + groups x devices).
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
        rows = np.repeat(np.arange(len(placement)), np.diff(net.offsets))
        same = placement[rows] == placement[net.neighbours]
        signed = np.where(same, net.edge_bytes, -net.edge_bytes)
        loss = np.bincount(rows, weights=signed, minlength=len(placement))
        rates = (loss / np.maximum(group_bytes, 1))[crowded]
        _relocate(crowded[np.argsort(rates, kind="stable")], net, moves)
    return placement


@kernel
def _relocate(order: Int32, net: GroupNetwork, moves: _RepairState) -> None:
    """Move groups one by one, each to the best device.

    A device with room is best, then one that is not heavy, then the one that the group exchanges
    most bytes with, then the one with the least work; ties: the first.
    """
    placement, room, loads = moves.placement, moves.room, moves.loads
    for group in order:
        home, size = placement[group], moves.group_bytes[group]
        legal = moves.choices[group, home] == 1
        # Earlier moves may have made enough room at home. A group without bytes makes none.
        if legal and (room[home] >= 0 or size == 0):
            continue
        best, best_rank, best_talk = -1, -1, 0.0
        for device in range(len(room)):
            fits = room[device] >= size
            if device == home or moves.choices[group, device] == 0 or (legal and not fits):
                continue
            work = loads[device] + moves.work_seconds[group, device]
            rank = (2 if fits else 0) + (1 if work <= moves.most_seconds[0] else 0)
            talk = 0.0
            for i in range(net.offsets[group], net.offsets[group + 1]):
                if placement[net.neighbours[i]] == device:
                    talk += net.edge_bytes[i]
            better = rank > best_rank or (rank == best_rank and talk > best_talk)
            if not better and rank == best_rank and talk == best_talk:
                better = loads[device] < loads[best]
            if better:
                best, best_rank, best_talk = device, rank, talk
        if best >= 0:
            room[home] += size
            room[best] -= size
            loads[home] -= moves.work_seconds[group, home]
            loads[best] += moves.work_seconds[group, best]
            placement[group] = best


def _normal(values: Float64) -> Float64:
    """Return the values scaled to a sum of 1; equal values if their sum is 0."""
    total = float(values.sum())
    return values / total if total > 0 else np.full(len(values), 1 / max(1, len(values)))
