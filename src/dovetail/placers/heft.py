"""Heterogeneous earliest finish time: list scheduling for unlike devices.

Ops are taken by falling upward rank, which is the longest path to the end with mean costs,

    rank_u(n_i) = w_i + max over n_j after n_i of   c_ij + rank_u(n_j)

where w_i is the mean of the op's seconds over devices and c_ij the mean seconds of the send over
pairs of devices. Each op goes to the device where it finishes first. There it takes the first idle
gap between ops that is long enough (the insertion-based policy), or else the time behind the last:

    EFT(n_i, p) = w_i,p + max(start of the gap, arrives(n_i, p))      arrives: see `list_scheduling`

Ties: the lower op index, the lower device.

Paper: Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for
heterogeneous computing", IEEE Transactions on Parallel and Distributed Systems 13(3), 2002,
https://doi.org/10.1109/71.993206, section 4.2.
Differences: a group goes where the first of its ops goes; a group goes only to an allowed device
that still has room for its bytes (`PlacementProblem.group_bytes`), or, if no device has, to the one
with the most room left. A device remembers its latest `MOST_GAPS` gaps; as long as it has no more,
the policy is the paper's. Complexity: O(ops x log ops + (reads + ops x MOST_GAPS) x devices); gaps
that end too soon are skipped by bisection.
"""

from typing import NamedTuple

import numpy as np

from dovetail.placers.budget import Budget
from dovetail.placers.list_scheduling import (
    GroupLimits,
    ListSchedule,
    Tasks,
    arrival,
    best_of_sets,
    fits,
    longest_paths,
    mean_seconds,
    mean_transfer,
    ranked,
    roomiest_unless_fitting,
    tasks_of,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int32, Int64

MOST_GAPS = 256
"""A device remembers at most this many gaps, the latest ones. That bounds the time of an op."""


class _HeftSchedule(NamedTuple):
    """The growing schedule. Times in seconds from the start of the step.

    placed, room      [groups] device, or -1: none yet; [devices] bytes left
    starts, ends      [ops]
    tails             [devices] end of the last op there
    gap_starts, gap_ends   [devices, MOST_GAPS] idle times before the tail, in order of time
    gap_counts        [devices] how many of these entries count
    """

    placed: Int32
    room: Int64
    starts: Float64
    ends: Float64
    tails: Float64
    gap_starts: Float64
    gap_ends: Float64
    gap_counts: Int64


def heft(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the better of the schedules over all devices and over those of the fastest model."""
    tasks = tasks_of(problem)
    return best_of_sets(problem, budget, lambda limits: heft_schedule(tasks, limits).placed)


def heft_schedule(tasks: Tasks, limits: GroupLimits) -> ListSchedule:
    """Return the schedule over the devices that `limits` permits."""
    ops, devices = tasks.seconds.shape
    by_rank, _ = ranked(upward_ranks(tasks, limits))
    work = _HeftSchedule(
        placed=np.full(len(limits.choices), -1, np.int32),
        room=limits.room_bytes.copy(),
        starts=np.zeros(ops),
        ends=np.zeros(ops),
        tails=np.zeros(devices),
        gap_starts=np.zeros((devices, MOST_GAPS)),
        gap_ends=np.zeros((devices, MOST_GAPS)),
        gap_counts=np.zeros(devices, np.int64),
    )
    _schedule(tasks, limits, by_rank, work)
    return ListSchedule(work.placed, work.starts, work.ends)


def upward_ranks(tasks: Tasks, limits: GroupLimits) -> Float64:
    """Return [ops] the upward rank in seconds. No op has a higher rank than an op before it."""
    latency, per_byte = mean_transfer(tasks, limits)
    ranks = np.zeros(len(tasks.of_op))
    op_seconds = mean_seconds(tasks, limits)
    longest_paths(tasks, op_seconds, latency + per_byte * tasks.before_bytes, ranks)
    return ranks


@kernel
def _schedule(tasks: Tasks, limits: GroupLimits, by_rank: Int32, work: _HeftSchedule) -> None:
    """Schedule the ops in the order `by_rank` and fill `work`."""
    for i in range(len(by_rank)):
        op = by_rank[i]
        if tasks.runs[op] == 0:
            continue
        group = tasks.of_op[op]
        home = work.placed[group]
        # -1 stays if some device has room: every device is then tried.
        if home < 0:
            home = roomiest_unless_fitting(limits, work.room, group)
        best, best_gap, best_start = -1, -1, np.inf
        for device in range(len(work.tails)):
            if home == device or (home < 0 and fits(limits, work.room, group, device)):
                ready = arrival(tasks, work.placed, work.ends, op, device)
                seconds = tasks.seconds[op, device]
                # The first gap that is long enough; the number of gaps stands for the time behind
                # the last op. Gaps do not overlap and stand in order of time, so bisection can skip
                # those that end too soon. The rest must be walked: a gap that ends late enough may
                # begin too late.
                gap, count = 0, work.gap_counts[device]
                high = count
                while gap < high:
                    middle = (gap + high) >> 1
                    if work.gap_ends[device, middle] < ready + seconds:
                        gap = middle + 1
                    else:
                        high = middle
                while gap < count:
                    begins = max(ready, work.gap_starts[device, gap])
                    if begins + seconds <= work.gap_ends[device, gap]:
                        break
                    gap += 1
                begins = max(ready, gap_start(work, device, gap))
                # The strict comparison gives ties to the lower device.
                if best < 0 or begins + seconds < best_start + tasks.seconds[op, best]:
                    best, best_gap, best_start = device, gap, begins
        if work.placed[group] < 0:
            work.placed[group] = best
            work.room[best] -= limits.group_bytes[group]
        end = best_start + tasks.seconds[op, best]
        work.starts[op] = best_start
        work.ends[op] = end

        # The op is taken out of its gap.
        before, after = gap_start(work, best, best_gap), end
        if best_gap < work.gap_counts[best]:
            after = work.gap_ends[best, best_gap]
            work.gap_counts[best] -= 1
            for j in range(best_gap, work.gap_counts[best]):
                work.gap_starts[best, j] = work.gap_starts[best, j + 1]
                work.gap_ends[best, j] = work.gap_ends[best, j + 1]
        else:
            work.tails[best] = end
        # The idle times before and after the op become gaps. Both are inserted at the same index,
        # the later one first, so that the earlier one comes to stand before it.
        for part in range(2):
            first, last = (end, after) if part == 0 else (before, best_start)
            if first < last:
                add_gap(work, best, best_gap, first, last)


@inlined
def gap_start(work: _HeftSchedule, device: int, gap: int) -> float:
    """Return when a gap begins; for the number of gaps, when the last op ends."""
    start: float = work.tails[device]
    if gap < work.gap_counts[device]:
        start = work.gap_starts[device, gap]
    return start


@inlined
def add_gap(work: _HeftSchedule, device: int, gap: int, first: float, last: float) -> None:
    """Insert a gap at index `gap`. If there are `MOST_GAPS` already, the earliest is forgotten,
    which may be the new one."""
    count = work.gap_counts[device]
    if count == MOST_GAPS:
        if gap == 0:
            return
        gap -= 1
        for i in range(gap):
            work.gap_starts[device, i] = work.gap_starts[device, i + 1]
            work.gap_ends[device, i] = work.gap_ends[device, i + 1]
    else:
        for i in range(count, gap, -1):
            work.gap_starts[device, i] = work.gap_starts[device, i - 1]
            work.gap_ends[device, i] = work.gap_ends[device, i - 1]
        work.gap_counts[device] = count + 1
    work.gap_starts[device, gap] = first
    work.gap_ends[device, gap] = last
