"""Earliest task first: list scheduling that takes communication and memory into account.

Of all pairs of a ready op and a device, the one that can start earliest is scheduled. Among pairs
that start at one instant, the op with the longest path to the end (its static level) goes first,
then the lower op index, then the lower device.

    starts(op, d) = max(free_d, arrives(op, d))            arrives: see `list_scheduling`

Paper: Hwang, Chow, Anger and Lee, "Scheduling precedence graphs in systems with interprocessor
communication times", SIAM Journal on Computing 18(2), 1989,
https://doi.org/10.1137/0218016, section 4. With memory: m-ETF of Jeon et al., "Baechi: Fast Device
Placement of Machine Learning Graphs", SoCC 2020, https://arxiv.org/abs/2301.08695.
Differences: unlike devices; a group goes where the first of its ops goes; a group goes only to a
device that still has room for its bytes (`PlacementProblem.group_bytes`), or, if no device has, to
the one with the most room left. As in the paper, links are never busy.

Each device keeps the ready ops in two heaps: ops whose inputs are there by the time the device is
free, by rank, and ops whose inputs come later, by arrival. O((ops x log ops + reads) x devices).

For `sct` the same loop has favourite children, and lets devices wait for them. An op is *urgent*
once its inputs could be on every device that it may choose. Urgent ops stand in heaps of their own,
in lanes `devices` to `2 x devices - 1`; lane d holds all ready ops that device d may run.
"""

from typing import NamedTuple

import numpy as np

from dovetail.placers.budget import Budget
from dovetail.placers.list_scheduling import (
    GroupLimits,
    LaneHeaps,
    ListSchedule,
    Tasks,
    arrival,
    best_of_sets,
    empty_heaps,
    fits,
    longest_paths,
    pop_later,
    push_later,
    ranked,
    roomiest_unless_fitting,
    tasks_of,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64
from dovetail.simulator.heaps import pop_rank, push_rank


class Favourites(NamedTuple):
    """children           [ops] the op that should follow each op on the same device; -1: none
    patience_seconds   [ops] how long the device may wait for that child
    """

    children: Int32
    patience_seconds: Float64


class _EtfSchedule(NamedTuple):
    """The growing schedule. Times in seconds from the start of the step.

    placed, room     [groups] device, or -1: none yet; [devices] bytes left
    starts, ends     [ops]
    free             [devices] when each has ended what it was given so far
    waiting, done    [ops] number of ops before it that have not started; 1: it has started
    ready_heads, ready_next   [groups], [ops] linked lists of the ops that became ready before their
                     group had a device; -1: end
    by_rank, ranks   [ops] ops by rank, and the rank of each
    heaps            ranks of ready ops, by lane
    firsts           [devices] rank of the op that each could start earliest; -1: none
    first_times      [devices] when it could start that op
    last             [devices] op that ran last, -1: none
    fresh            [ops] stack of ops that are to be offered to lanes. An op gets here when it
                     becomes ready, and again when its group is given to the device with most room
    fresh_count      [1] height of that stack
    """

    placed: Int32
    room: Int64
    starts: Float64
    ends: Float64
    free: Float64
    waiting: Int32
    done: Int8
    ready_heads: Int32
    ready_next: Int32
    by_rank: Int32
    ranks: Int32
    heaps: LaneHeaps
    firsts: Int32
    first_times: Float64
    last: Int32
    fresh: Int32
    fresh_count: Int64


def etf(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the better of the schedules over all devices and over those of the fastest model."""
    tasks = tasks_of(problem)
    return best_of_sets(problem, budget, lambda limits: etf_schedule(tasks, limits).placed)


def etf_schedule(
    tasks: Tasks, limits: GroupLimits, favourites: Favourites | None = None
) -> ListSchedule:
    """Return the schedule over the devices in `limits`; with `favourites` that of `sct`."""
    ops, devices = tasks.seconds.shape
    aware = favourites is not None
    if favourites is None:
        favourites = Favourites(np.zeros(0, np.int32), np.zeros(0))
    levels = np.zeros(ops)
    longest_paths(tasks, tasks.seconds.min(axis=1), np.zeros(len(tasks.befores)), levels)
    groups, lanes = len(limits.choices), 2 * devices if aware else devices
    by_rank, ranks = ranked(levels)
    work = _EtfSchedule(
        placed=np.full(groups, -1, np.int32),
        room=limits.room_bytes.copy(),
        starts=np.zeros(ops),
        ends=np.zeros(ops),
        free=np.zeros(devices),
        waiting=np.diff(tasks.before_offsets).astype(np.int32),
        # Source ops count as done.
        done=(tasks.runs == 0).astype(np.int8),
        ready_heads=np.full(groups, -1, np.int32),
        ready_next=np.full(ops, -1, np.int32),
        by_rank=by_rank,
        ranks=ranks,
        # An op is offered to a lane at most twice: when it becomes ready, and when its group is
        # given to the device with most room.
        heaps=empty_heaps(lanes, 2 * ops),
        firsts=np.zeros(devices, np.int32),
        first_times=np.zeros(devices),
        last=np.full(devices, -1, np.int32),
        fresh=np.empty(ops, np.int32),
        fresh_count=np.zeros(1, np.int64),
    )
    left = _schedule(tasks, limits, favourites, work)
    assert left == 0, "some op never became ready: its predecessors form a cycle"
    return ListSchedule(work.placed, work.starts, work.ends)


@kernel
def _schedule(  # noqa: C901  (kernel)
    tasks: Tasks, limits: GroupLimits, favourites: Favourites, work: _EtfSchedule
) -> int:
    """Fill `work`. Returns how many ops were never scheduled: 0 unless ops wait in a cycle."""
    devices, left = len(work.free), 0
    for op in range(len(work.done)):
        if not work.done[op]:
            left += 1
            if work.waiting[op] == 0:
                add_fresh(work, op)
    while left > 0:
        # 1. Ready ops go into the lanes of every device on which their groups may be.
        while work.fresh_count[0] > 0:
            work.fresh_count[0] -= 1
            op = work.fresh[work.fresh_count[0]]
            group = tasks.of_op[op]
            home = work.placed[group]
            if home < 0:
                work.ready_next[op] = work.ready_heads[group]
                work.ready_heads[group] = op
            time = latest = 0.0
            # The plain lanes come first. So `latest`, when the op's inputs could be on every device
            # that it may choose, is complete at the first urgent lane.
            for lane in range(len(work.heaps.now_sizes)):
                urgent = lane >= devices
                device = lane - devices if urgent else lane
                if home == device or (home < 0 and limits.choices[group, device] == 1):
                    if urgent:
                        time = latest
                    else:
                        time = arrival(tasks, work.placed, work.ends, op, device)
                        latest = max(latest, time)
                    if time <= work.free[device]:
                        push_rank(work.heaps.now, work.heaps.now_sizes, lane, work.ranks[op])
                    else:
                        push_later(work.heaps, lane, time, work.ranks[op])

        # 2. The device that can start an op earliest. Ties of time: a device that is not awake goes
        # before one that is; then the lower rank; then the lower device, which comes first here.
        best, best_awake = -1, False
        for device in range(devices):
            awake = look(tasks, limits, favourites, work, device)
            if work.fresh_count[0] > 0:
                break
            if work.firsts[device] < 0:
                continue
            sooner = best < 0 or work.first_times[device] < work.first_times[best]
            if not sooner and work.first_times[device] == work.first_times[best]:
                better = work.firsts[device] < work.firsts[best]
                sooner = better if awake == best_awake else best_awake
            if sooner:
                best, best_awake = device, awake
        # `look` has given a group to a device. That device may have answered before the group's ops
        # were in its lane, so all devices are asked again.
        if work.fresh_count[0] > 0:
            continue
        if best < 0:
            return left

        # 3. It runs that op. Others become ready by this.
        op = work.by_rank[work.firsts[best]]
        if work.placed[tasks.of_op[op]] < 0:
            settle(limits, work, tasks.of_op[op], best)
        work.done[op] = 1
        work.last[best] = op
        work.starts[op] = work.first_times[best]
        work.ends[op] = work.starts[op] + tasks.seconds[op, best]
        work.free[best] = work.ends[op]
        for i in range(tasks.after_offsets[op], tasks.after_offsets[op + 1]):
            after = tasks.afters[i]
            work.waiting[after] -= 1
            if work.waiting[after] == 0:
                add_fresh(work, after)
        left -= 1
    return 0


@inlined
def look(
    tasks: Tasks, limits: GroupLimits, favourites: Favourites, work: _EtfSchedule, device: int
) -> bool:
    """Fill `firsts` and `first_times` of a device with the op that it could start earliest.

    Returns True if the device is awake: it keeps itself free for a favourite child that no other
    device could start sooner, and until then takes urgent ops only.
    """
    free = work.free[device]
    lane = device
    child, begins = -1, np.inf
    # More lanes than devices: this is a schedule of `sct`.
    if len(work.heaps.now_sizes) > len(work.free) and work.last[device] >= 0:
        child = favourites.children[work.last[device]]
        if child >= 0 and work.waiting[child] == 0 and not work.done[child]:
            # When the favourite child could start here, unless another device could start it
            # sooner.
            group = tasks.of_op[child]
            home = work.placed[group]
            elsewhere = np.inf
            for other in range(len(work.free)):
                if home == other or (home < 0 and fits(limits, work.room, group, other)):
                    time = arrival(tasks, work.placed, work.ends, child, other)
                    time = max(time, work.free[other])
                    if other == device:
                        begins = time
                    else:
                        elsewhere = min(elsewhere, time)
            if begins > elsewhere:
                begins = np.inf
            if begins - free <= favourites.patience_seconds[work.last[device]]:
                lane = len(work.free) + device
    # An awake device whose child can start at once takes the child and looks at no other op.
    if lane == device or begins > free:
        find_first(tasks, limits, work, lane, device)
    if lane > device:
        # Until the child can start, an urgent op may run, if it starts once the device is free.
        urgent = begins > free and work.firsts[device] >= 0 and work.first_times[device] <= free
        if not urgent:
            work.firsts[device] = work.ranks[child]
            work.first_times[device] = begins
    return lane > device


@inlined
def find_first(
    tasks: Tasks, limits: GroupLimits, work: _EtfSchedule, lane: int, device: int
) -> None:
    """Fill `firsts` and `first_times` of a device with what it could start first in a lane.

    A group that fits nowhere is given to the device with most room; its ready ops are offered
    again.
    """
    heaps, free = work.heaps, work.free[device]
    work.firsts[device] = -1
    # What has arrived by now competes by rank alone. A device's free time never falls, so an op
    # that is moved to the heap `now` stays there rightly.
    while heaps.later_sizes[lane] > 0 and heaps.later_times[lane, 0] <= free:
        push_rank(heaps.now, heaps.now_sizes, lane, heaps.later_ranks[lane, 0])
        pop_later(heaps, lane)
    # An op stands in the lanes of several devices. Where it no longer counts, because it has
    # started or its group cannot be on this device, it is dropped only when it comes to the top.
    while heaps.now_sizes[lane] + heaps.later_sizes[lane] > 0:
        is_now = heaps.now_sizes[lane] > 0
        rank = heaps.now[lane, 0] if is_now else heaps.later_ranks[lane, 0]
        op = work.by_rank[rank]
        group = tasks.of_op[op]
        home = work.placed[group]
        has_room = home < 0 and work.room[device] >= limits.group_bytes[group]
        if work.done[op] == 0 and (home == device or has_room):
            work.firsts[device] = rank
            work.first_times[device] = free if is_now else heaps.later_times[lane, 0]
            return
        if work.done[op] == 0 and home < 0:
            roomiest = roomiest_unless_fitting(limits, work.room, group)
            if roomiest >= 0:
                settle(limits, work, group, roomiest)
                ready = work.ready_heads[group]
                # The lane of that device may have dropped these ops already, when they did not fit.
                while ready >= 0:
                    add_fresh(work, ready)
                    ready = work.ready_next[ready]
        if is_now:
            pop_rank(heaps.now, heaps.now_sizes, lane)
        else:
            pop_later(heaps, lane)


@inlined
def settle(limits: GroupLimits, work: _EtfSchedule, group: int, device: int) -> None:
    """Put a group on a device and take its bytes from the room there."""
    work.placed[group] = device
    work.room[device] -= limits.group_bytes[group]


@inlined
def add_fresh(work: _EtfSchedule, op: int) -> None:
    """Put an op on the stack of those that are to be offered."""
    work.fresh[work.fresh_count[0]] = op
    work.fresh_count[0] += 1
