"""Common parts of the list schedulers: the problem as flat arrays, memory, and heaps of ready ops.

A list scheduler takes the ops one after another, in an order of its own, and gives each a device
and a time there. It models the machine as the papers do: a device runs one op at a time, links are
never busy, and all that an op reads is on device d at the time

    arrives(op, d) = max over ops b before it of   ends(b) + latency(b's d, d)
                                                           + bytes x seconds_per_byte(b's d, d)

where bytes are those of all tensors of b that op reads, each counted once. If two devices have no
link, the latencies and the seconds per byte of the two hops through the host are summed. Source ops
are not scheduled: what they hold is there from the start. A control edge is an empty send. A group
goes where the first of its ops goes.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dovetail.graph.records import csr_offsets
from dovetail.placers.baselines import best_fitting
from dovetail.placers.budget import Budget
from dovetail.placers.problem import GroupPlacement, PlacementProblem, route
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64


class Tasks(NamedTuple):
    """The ops to schedule, in topological order.

    of_op             [ops] group
    runs              [ops] 0 for source ops, 1 for all others
    before_offsets, befores, before_bytes   CSR: distinct ops before each op, ascending, and the
                      bytes that each sends to it
    after_offsets, afters   CSR: distinct ops after each op, ascending
    seconds           [ops, devices]
    latency_seconds, seconds_per_byte   [devices, devices] from row to column; 0 on the diagonal
    """

    of_op: Int32
    runs: Int8
    before_offsets: Int32
    befores: Int32
    before_bytes: Float64
    after_offsets: Int32
    afters: Int32
    seconds: Float64
    latency_seconds: Float64
    seconds_per_byte: Float64


class GroupLimits(NamedTuple):
    """Where groups may go.

    choices       [groups, devices] 1 where allowed
    group_bytes   [groups] bytes that each group takes
    room_bytes    [devices] bytes that each device has for groups
    """

    choices: Int8
    group_bytes: Int64
    room_bytes: Int64


class ListSchedule(NamedTuple):
    """A list scheduler's result.

    placed         [groups] device
    starts, ends   [ops] seconds; 0 for source ops
    """

    placed: Int32
    starts: Float64
    ends: Float64


Scheduler = Callable[[GroupLimits], Int32]  # -> placed [groups], -1 where nothing runs


def tasks_of(problem: PlacementProblem) -> Tasks:
    """Return a problem as flat arrays. O(ops x devices + reads x log reads)."""
    graph, machine = problem.graph, problem.machine
    # Pairs of an op and one before it, sorted, with the bytes sent between them. Source ops count
    # in none.
    source, ops, tensors = graph.is_source, len(graph), graph.input_tensors
    control = graph.control.astype(np.int64)
    befores = np.concatenate([graph.producers[tensors], control[:, 0]])
    readers = np.concatenate([graph.readers, control[:, 1]]).astype(np.int64)
    sizes = np.concatenate([problem.sent_bytes[tensors], np.zeros(len(control))])
    real = ~source[befores] & ~source[readers]
    keys, inverse = np.unique(readers[real] * ops + befores[real], return_inverse=True)
    sizes = np.bincount(inverse.ravel(), weights=sizes[real], minlength=len(keys))
    readers, befores = keys // ops, keys % ops

    # Without a link, a transfer takes the sum over the two hops through the host.
    count = len(machine.devices)
    latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
    for a, b in itertools.permutations(range(count), 2):
        links = route(machine, a, b)
        latency[a, b] = sum(link.latency_seconds for link in links)
        per_byte[a, b] = sum(1 / link.bandwidth_bytes_per_second for link in links)

    by_before = np.argsort(befores, kind="stable")
    return Tasks(
        of_op=np.array(problem.groups.of_op, np.int32),
        runs=(~graph.is_source).astype(np.int8),
        before_offsets=csr_offsets(readers, len(graph)),
        befores=befores.astype(np.int32),
        before_bytes=sizes.astype(np.float64),
        after_offsets=csr_offsets(befores, len(graph)),
        afters=readers[by_before].astype(np.int32),
        seconds=np.array(problem.costs.compute_seconds, np.float64, order="C"),
        latency_seconds=latency,
        seconds_per_byte=per_byte,
    )


def best_of_sets(problem: PlacementProblem, budget: Budget, schedule: Scheduler) -> GroupPlacement:
    """Return the better of the schedules over all devices and over those of the fastest model.

    A set of only the fast devices helps, because starting early does not mean ending early: idle
    slow devices draw ops that fast ones should run. Ties: the earlier attempt, then the larger set.
    """
    return best_fitting(
        problem,
        budget,
        len(problem.device_sets),
        lambda i, attempt, room: schedule(limits_of(problem, i, room, all_outputs=attempt > 0)),
    )


def limits_of(
    problem: PlacementProblem,
    device_set: int,
    room_bytes: Int64 | None = None,
    *,
    all_outputs: bool = False,
) -> GroupLimits:
    """Return limits that keep groups on the devices of `problem.device_sets[device_set]`.

    A group that may be on none of these devices keeps all its choices.

    room_bytes   [devices]; None: the capacities
    all_outputs  count all outputs of a group, not only the bytes that stay for long
    """
    within = np.isin(np.arange(problem.devices), problem.device_sets[device_set])
    choices = problem.allowed & within
    choices = np.where(np.any(choices, axis=1, keepdims=True), choices, problem.allowed)
    sizes = problem.made_bytes if all_outputs else problem.group_bytes
    room = problem.capacities if room_bytes is None else room_bytes
    return GroupLimits(
        np.array(choices, np.int8, order="C"), np.array(sizes, np.int64), np.array(room, np.int64)
    )


def mean_transfer(tasks: Tasks, limits: GroupLimits) -> tuple[float, float]:
    """Return (latency seconds, seconds per byte), means over all ordered pairs of devices that some
    group may choose; 0 if that is one device."""
    used = np.flatnonzero(limits.choices.any(axis=0))
    pairs = max(1, len(used) * (len(used) - 1))
    square = np.ix_(used, used)
    latency, per_byte = tasks.latency_seconds[square], tasks.seconds_per_byte[square]
    return float(latency.sum() / pairs), float(per_byte.sum() / pairs)


def mean_seconds(tasks: Tasks, limits: GroupLimits) -> Float64:
    """Return [ops] the mean seconds over the devices that each op may choose."""
    may = limits.choices[tasks.of_op] == 1
    return np.asarray(np.where(may, tasks.seconds, 0.0).sum(axis=1) / may.sum(axis=1))


def ranked(levels: Float64) -> tuple[Int32, Int32]:
    """Return (ops by rank, [ops] rank): rank 0 has the highest level; ties: the lower index."""
    by_rank = np.argsort(-levels, kind="stable").astype(np.int32)
    ranks = np.empty_like(by_rank)
    ranks[by_rank] = np.arange(len(by_rank), dtype=np.int32)
    return by_rank, ranks


@kernel
def longest_paths(
    tasks: Tasks, own_seconds: Float64, send_seconds: Float64, levels: Float64
) -> None:
    """Fill `levels` [ops] with the seconds of the longest path from each op to the end, the op
    included.

    own_seconds    [ops]
    send_seconds   [befores] of each send
    """
    levels[:] = 0.0
    for op in range(len(levels) - 1, -1, -1):
        levels[op] += own_seconds[op]
        for i in range(tasks.before_offsets[op], tasks.before_offsets[op + 1]):
            before = tasks.befores[i]
            levels[before] = max(levels[before], send_seconds[i] + levels[op])


@inlined
def arrival(tasks: Tasks, placed: Int32, ends: Float64, op: int, device: int) -> float:
    """Return the time at which all that `op` reads is on `device`.

    All ops before it must have been scheduled.
    """
    latest = 0.0
    for i in range(tasks.before_offsets[op], tasks.before_offsets[op + 1]):
        before = tasks.befores[i]
        source = placed[tasks.of_op[before]]
        time = ends[before]
        if source != device:
            wait = tasks.before_bytes[i] * tasks.seconds_per_byte[source, device]
            time += tasks.latency_seconds[source, device] + wait
        latest = max(latest, time)
    return latest


@inlined
def fits(limits: GroupLimits, room: Int64, group: int, device: int) -> bool:
    """Whether the group may go to the device and the device has room left for it."""
    return bool(limits.choices[group, device] == 1 and room[device] >= limits.group_bytes[group])


@inlined
def roomiest_unless_fitting(limits: GroupLimits, room: Int64, group: int) -> int:
    """Return -1 if some allowed device has room for the group, else the allowed device with most
    room left; ties: the first."""
    best = -1
    for device in range(len(room)):
        if limits.choices[group, device] == 1:
            if room[device] >= limits.group_bytes[group]:
                return -1
            if best < 0 or room[device] > room[best]:
                best = device
    return best


class LaneHeaps(NamedTuple):
    """Two binary min-heaps per lane (see `etf`), of which the first `*_sizes[lane]` entries count.

    now           [lanes, most] ranks of ops that can start as soon as the lane is free
    later_times, later_ranks   [lanes, most] ops whose inputs come later, by time, then rank
    """

    now: Int32
    now_sizes: Int64
    later_times: Float64
    later_ranks: Int32
    later_sizes: Int64


def empty_heaps(lanes: int, most: int) -> LaneHeaps:
    """Return empty heaps with room for `most` entries each.

    `np.empty` writes nothing, so pages that no entry is written to take no physical memory.
    """
    return LaneHeaps(
        now=np.empty((lanes, most), np.int32),
        now_sizes=np.zeros(lanes, np.int64),
        later_times=np.empty((lanes, most)),
        later_ranks=np.empty((lanes, most), np.int32),
        later_sizes=np.zeros(lanes, np.int64),
    )


@inlined
def push_later(heaps: LaneHeaps, lane: int, time: float, rank: int) -> None:
    """Add an entry to the `later` heap of a lane."""
    times, ranks = heaps.later_times[lane], heaps.later_ranks[lane]
    i = heaps.later_sizes[lane]
    heaps.later_sizes[lane] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if is_sooner(heaps, lane, parent, time, rank):
            break
        times[i] = times[parent]
        ranks[i] = ranks[parent]
        i = parent
    times[i] = time
    ranks[i] = rank


@inlined
def pop_later(heaps: LaneHeaps, lane: int) -> None:
    """Remove the soonest entry from the `later` heap of a lane."""
    times, ranks = heaps.later_times[lane], heaps.later_ranks[lane]
    size = heaps.later_sizes[lane] - 1
    heaps.later_sizes[lane] = size
    time, rank = times[size], ranks[size]
    i, child = 0, 1
    while child < size:
        right = child + 1
        if right < size and not is_sooner(heaps, lane, child, times[right], ranks[right]):
            child = right
        if not is_sooner(heaps, lane, child, time, rank):
            break
        times[i] = times[child]
        ranks[i] = ranks[child]
        i = child
        child = 2 * i + 1
    times[i] = time
    ranks[i] = rank


@inlined
def is_sooner(heaps: LaneHeaps, lane: int, i: int, time: float, rank: int) -> bool:
    """Whether entry `i` of the `later` heap comes before (time, rank)."""
    other = heaps.later_times[lane, i]
    return bool(other < time or (other == time and heaps.later_ranks[lane, i] < rank))
