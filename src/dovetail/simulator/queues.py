"""What waits in a simulation: ready ops, work to end, and transfers in their channels' queues."""

import numpy as np
from numpy.typing import NDArray

from dovetail.simulator.compiling import inlined
from dovetail.simulator.flat import Flat, Rules, Work

# Where `Work.counts` keeps the scalars of one simulation.
EVENTS, QUEUED, TOUCHED, SENT, DONE, LOGGED, TURNS = range(7)


@inlined
def copy(source: NDArray[np.integer], destination: NDArray[np.integer]) -> None:
    """Element by element: numba's slice assignment wants its memory manager, which is off."""
    for i in range(len(source)):
        destination[i] = source[i]


@inlined
def enqueue(flat: Flat, work: Work, now: float, unit: int, destination: int, link: int) -> None:
    """Queue by (time ready, unit, destination). Nobody in the queue was ready later than now."""
    new = work.counts[QUEUED]
    work.counts[QUEUED] = new + 1
    channel = flat.link_channels[link]
    work.queue_ready[new] = now
    work.queue_units[new] = unit
    work.queue_destinations[new] = destination
    work.queue_links[new] = link
    before, after = work.tails[channel], -1
    while before >= 0 and work.queue_ready[before] == now:
        other = work.queue_units[before]
        if other < unit or (other == unit and work.queue_destinations[before] < destination):
            break
        after = before
        before = work.queue_previous[before]
    work.queue_previous[new] = before
    work.queue_next[new] = after
    if before < 0:
        work.heads[channel] = new
    else:
        work.queue_next[before] = new
    if after < 0:
        work.tails[channel] = new
    else:
        work.queue_previous[after] = new
    touch(work, flat.devices + channel)


@inlined
def arrive(rules: Rules, work: Work, op: int, device: int) -> None:
    work.pending[op] -= 1
    if work.pending[op] == 0:
        make_ready(rules, work, op, device)


@inlined
def make_ready(rules: Rules, work: Work, op: int, device: int) -> None:
    touch(work, device)
    if rules.ordered[device]:
        work.slot_waits[rules.slot_of[op]] -= 1
        return
    heap = work.ready[device]
    rank = rules.ranks[op]
    i = work.ready_sizes[device]
    work.ready_sizes[device] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] < rank:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = rank


@inlined
def pop_ready(work: Work, device: int) -> int:
    """Remove and return the least rank of a device's ready ops."""
    heap = work.ready[device]
    size = work.ready_sizes[device] - 1
    work.ready_sizes[device] = size
    least: int = heap[0]
    last = heap[size]
    i, child = 0, 1
    while child < size:
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if last < heap[child]:
            break
        heap[i] = heap[child]
        i = child
        child = 2 * i + 1
    heap[i] = last
    return least


@inlined
def push_event(work: Work, time: float, lane: int) -> None:
    times, lanes = work.event_times, work.event_slots
    i = work.counts[EVENTS]
    work.counts[EVENTS] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if times[parent] <= time:
            break
        times[i] = times[parent]
        lanes[i] = lanes[parent]
        i = parent
    times[i] = time
    lanes[i] = lane


@inlined
def pop_event(work: Work) -> int:
    times, lanes = work.event_times, work.event_slots
    size = work.counts[EVENTS] - 1
    work.counts[EVENTS] = size
    first: int = lanes[0]
    time, lane = times[size], lanes[size]
    i, child = 0, 1
    while child < size:
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if time <= times[child]:
            break
        times[i] = times[child]
        lanes[i] = lanes[child]
        i = child
        child = 2 * i + 1
    times[i] = time
    lanes[i] = lane
    return first


@inlined
def touch(work: Work, lane: int) -> None:
    if not work.is_touched[lane]:
        work.is_touched[lane] = 1
        work.touched[work.counts[TOUCHED]] = lane
        work.counts[TOUCHED] += 1


@inlined
def allocate(work: Work, device: int, size_bytes: int) -> None:
    work.memory[device] += size_bytes
    work.peaks[device] = max(work.peaks[device], work.memory[device])
