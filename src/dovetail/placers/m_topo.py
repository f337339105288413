"""Contiguous runs of a topological order that share memory evenly.

Groups in the order of their first op fill one device after another, each up to

    limit(d) = share(d) + the largest group's bytes

where share is the total bytes over the number of devices. It is the simplest method that respects
memory, and it looks at no cost at all.

Paper: Jeon, Cai, Srivastava, Jiang, Ke, Meng, Xie and Gupta, "Baechi: Fast Device Placement of
Machine Learning Graphs", SoCC 2020, https://arxiv.org/abs/2301.08695, algorithm m-TOPO.
Differences: devices may have unlike capacities. If a device cannot hold its even share, the others
share the rest evenly, up to their capacities. If the total is above the sum of the capacities,
shares are in proportion to capacities. A group that may not be on the device of its run goes to the
device with most room left among those where it may be. A group's size is all that it makes
(`PlacementProblem.made_bytes`), as in the paper, which counts an op's outputs. A step reuses
memory, so these shares balance memory but do not tell whether a plan fits: the evaluator does.
"""

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget
from dovetail.placers.list_scheduling import GroupLimits, best_of_sets
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import kernel
from dovetail.simulator.flat import Float64, Int32, Int64


def m_topo(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the better of two plans: runs over all devices, and over those of the fastest model.

    O(groups x devices).
    """
    made_bytes = problem.made_bytes.astype(np.int64)
    return best_of_sets(
        problem,
        budget,
        lambda limits: runs(limits._replace(group_bytes=made_bytes), problem.capacities),
    )


def runs(limits: GroupLimits, capacities: NDArray[np.int64]) -> Int32:
    """Return [groups] the device of each group, in runs of the group order.

    Shares are computed from `capacities`. If the limits leave a device less room than its capacity,
    its share shrinks in proportion, and all shares are scaled up to the total again.
    """
    used = limits.choices.any(axis=0)
    total, largest = int(limits.group_bytes.sum()), int(limits.group_bytes.max(initial=0))
    shares = even_shares(total, np.where(used, capacities, 0).astype(np.float64))
    shares *= limits.room_bytes / np.maximum(capacities, 1)
    shares *= total / max(1.0, float(shares.sum()))
    room = np.where(shares > 0, shares + largest, 0).astype(np.int64)
    devices = np.flatnonzero(used).astype(np.int32)
    placed = np.full(len(limits.choices), -1, np.int32)
    _fill(limits, devices, room, placed)
    return placed


def even_shares(total_bytes: int, room_bytes: Float64) -> Float64:
    """Return [devices] shares that sum to the total: min(room, level), with one level for all.

    If the rooms together are less than the total, shares are in proportion to the rooms.
    """
    if total_bytes >= room_bytes.sum():
        return np.asarray(room_bytes * (total_bytes / max(1.0, float(room_bytes.sum()))))
    level, left, count = 0.0, float(total_bytes), len(room_bytes)
    # From the smallest room up: a room below the current even level is filled, and its shortfall
    # raises the level of the others.
    for room in np.sort(room_bytes).tolist():
        level = left / count
        if room >= level:
            break
        left, count = left - room, count - 1
    return np.minimum(room_bytes, level)


@kernel
def _fill(limits: GroupLimits, devices: Int32, room: Int64, placed: Int32) -> None:
    """Fill `placed` [groups]. `room` [devices] is what is left of each device's limit.

    The last device takes all groups that are left, even above its limit.
    """
    now = 0
    for group in range(len(placed)):
        size = limits.group_bytes[group]
        while now + 1 < len(devices) and room[devices[now]] < size:
            now += 1
        chosen = devices[now]
        # The group may not be on it, so it goes where most room is left; ties: the first device.
        if limits.choices[group, chosen] == 0:
            chosen = -1
            for device in range(len(room)):
                sooner = chosen < 0 or room[device] > room[chosen]
                if limits.choices[group, device] == 1 and sooner:
                    chosen = device
        placed[group] = chosen
        room[chosen] -= size
