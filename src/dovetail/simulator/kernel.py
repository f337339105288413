"""Simulates placements event by event, over flat arrays, by the rules of docs/design.md:

    until nothing runs:
        channels start, then devices start          start_all
        now = the next end; for everything that ends then:
            op        its outputs go to consumers here, and into queues     finish_op
            transfer  its tensor goes to consumers there, and onwards       finish_transfer

Memory is counted along the way: what starts allocates, and the last user that ends frees. Frees
come before starts at one instant, so the bytes in use after the starts are the most at that
instant. Ends at one instant may be handled in any order, because queues and devices choose by key,
and the counts come out the same.

Names: a *unit* is what a transfer carries. It is numbered as the tensor, or as tensors + op for a
control edge. A *lane* does one thing at a time. It is numbered as the device, or as devices +
channel.

Complexity: O(log(devices + channels) + log(ready)) per event. Queueing is O(1), except for
transfers that become ready at one instant out of order.
"""

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import EVERYWHERE, HOST
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import DispatchRules, Float64, Int32, Int64, StepModel, StepWorkspace
from dovetail.simulator.heaps import pop_rank, push_rank

# ── Queues of a simulation: ready ops, work by its end, and transfers of each channel ───────────


# Indices into `StepWorkspace.counts`, which holds the scalars of one simulation: running events,
# queued transfers, touched devices, touched channels, the number of the last unit that was sent,
# ended ops, entries of the memory log, and rounds of starts.
EVENTS, QUEUED, DEVICES, CHANNELS, SENT, DONE, LOGGED, TURNS = range(8)


@inlined
def copy(source: NDArray[np.integer], destination: NDArray[np.integer]) -> None:
    """Copy element by element: numba's slice assignment needs its memory manager, which is off."""
    for i in range(len(source)):
        destination[i] = source[i]


@inlined
def enqueue(
    flat: StepModel, work: StepWorkspace, now: float, unit: int, destination: int, link: int
) -> None:
    """Queue a transfer by (time ready, unit, destination).

    No entry of the queue is ready later than now, so only entries that became ready at this very
    instant can stand behind the new one. The search from the tail ends at the first older entry.
    """
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
    touch_channel(flat, work, channel)


@inlined
def arrive(rules: DispatchRules, work: StepWorkspace, op: int, device: int) -> None:
    """Note one arrival that the op waits for; after the last one it is ready."""
    work.pending[op] -= 1
    if work.pending[op] == 0:
        make_ready(rules, work, op, device)


@inlined
def make_ready(rules: DispatchRules, work: StepWorkspace, op: int, device: int) -> None:
    """Let the device start the op: push its rank to the heap, or count it in its slot."""
    touch_device(work, device)
    if rules.ordered[device]:
        work.slot_waits[rules.slot_of[op]] -= 1
        return
    push_rank(work.ready, work.ready_sizes, device, rules.ranks[op])


@inlined
def push_event(work: StepWorkspace, time: float, lane: int) -> None:
    """Note that what runs on the lane ends at `time`."""
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
def pop_event(work: StepWorkspace) -> int:
    """Remove the earliest end, and return its lane."""
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
def touch_device(work: StepWorkspace, device: int) -> None:
    """Note that something may start on the device: `start_all` looks at touched lanes only."""
    if not work.is_touched[device]:
        work.is_touched[device] = 1
        work.touched_devices[work.counts[DEVICES]] = device
        work.counts[DEVICES] += 1


@inlined
def touch_channel(flat: StepModel, work: StepWorkspace, channel: int) -> None:
    """Note that a transfer may start on the channel."""
    if not work.is_touched[flat.devices + channel]:
        work.is_touched[flat.devices + channel] = 1
        work.touched_channels[work.counts[CHANNELS]] = channel
        work.counts[CHANNELS] += 1


@inlined
def allocate(work: StepWorkspace, device: int, size_bytes: int) -> None:
    """Add bytes in use on the device, and keep the peak."""
    work.memory[device] += size_bytes
    work.peaks[device] = max(work.peaks[device], work.memory[device])


@kernel
def simulate_batch(
    flat: StepModel,
    rules: DispatchRules,
    work: StepWorkspace,
    placements: Int32,
    values: Float64,
    peaks: Int64,
    record: bool,
) -> None:
    """Simulate each row of `placements` [batch, ops]; fill `values` [batch] and `peaks`.

    A value is the end of the last event, in seconds. It is inf, with peaks of 0, if an op is on a
    device that cannot run it, and if orders cannot complete. With `record`, `work` keeps what a
    timeline needs of the last row. Values and timelines come from this one function, so that they
    have the same numbers.
    """
    for row in range(len(placements)):
        peaks[row, :] = 0
        values[row] = np.inf
        if not fill_placement(flat, work, placements[row]):
            continue
        reset(flat, rules, work)
        place_sources(flat, rules, work, record)
        start_all(flat, rules, work, 0.0, record)
        now = 0.0
        while work.counts[EVENTS] > 0:
            now = work.event_times[0]
            # All that ends at one instant is handled before anything starts (rule 4).
            while work.counts[EVENTS] > 0 and work.event_times[0] == now:
                finish(flat, rules, work, now, pop_event(work))
            start_all(flat, rules, work, now, record)
        # Ops are left where explicit orders wait for each other. Then the value stays inf.
        if work.counts[DONE] == flat.ops:
            values[row] = now
            copy(work.peaks, peaks[row])


@inlined
def finish(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, lane: int
) -> None:
    """End what runs on the lane: a transfer, an op, or all ops of a slot."""
    running = work.running[lane]
    work.running[lane] = -1
    if lane >= flat.devices:
        touch_channel(flat, work, lane - flat.devices)
        finish_transfer(flat, rules, work, now, running)
        return
    touch_device(work, lane)
    first, last = 0, 1
    if rules.ordered[lane]:
        first, last = rules.op_offsets[running], rules.op_offsets[running + 1]
    for i in range(first, last):
        op = rules.slot_ops[i] if rules.ordered[lane] else running
        finish_op(flat, rules, work, now, op)


@inlined
def fill_placement(flat: StepModel, work: StepWorkspace, placement: Int32) -> bool:
    """Fill `placed`, with the homes of sources; False if an op cannot run where it is."""
    placed = work.placed
    for op in range(flat.ops):
        if not flat.is_source[op]:
            placed[op] = placement[op]
            if flat.compute_seconds[op, placed[op]] == np.inf:
                return False
    for i in range(len(flat.sources)):
        # A home of 0 or more is the op that writes the source: they live together.
        home = flat.source_homes[i]
        if home == HOST:
            home = flat.host
        elif home >= 0:
            home = placement[home]
        placed[flat.sources[i]] = home
    return True


@inlined
def reset(flat: StepModel, rules: DispatchRules, work: StepWorkspace) -> None:
    """Prepare the workspace for the placement in `placed`."""
    copy(rules.pending, work.pending)
    work.holds[:, :] = 0
    work.stamps[:] = -1
    work.ready_sizes[:] = 0
    work.running[:] = -1
    work.heads[:] = -1
    work.tails[:] = -1
    work.is_touched[:] = 0
    work.counts[:] = 0
    work.memory[:] = 0
    work.busy_until[:] = 0.0
    work.logged[:] = -1
    for device in range(flat.devices):
        work.next_slots[device] = rules.slot_offsets[device]
        touch_device(work, device)
    for slot in range(len(rules.slot_seconds)):
        work.slot_waits[slot] = rules.op_offsets[slot + 1] - rules.op_offsets[slot]
    for tensor in range(flat.tensors):
        work.homes[tensor] = work.placed[flat.producers[tensor]]


@inlined
def place_sources(flat: StepModel, rules: DispatchRules, work: StepWorkspace, record: bool) -> None:
    """Set the state at time 0: memory of sources, ops that wait for nothing, first sends."""
    for i in range(len(flat.sources)):
        op = flat.sources[i]
        home = work.placed[op]
        for tensor in range(flat.output_offsets[op], flat.output_offsets[op + 1]):
            if home != EVERYWHERE:
                work.memory[home] += flat.tensor_bytes[tensor]
                continue
            # What lives everywhere takes memory once on each device that reads it. A stamp with a
            # fresh number marks the devices that were counted, without clearing an array.
            work.counts[SENT] += 1
            for k in range(flat.consumer_offsets[tensor], flat.consumer_offsets[tensor + 1]):
                device = work.placed[flat.consumers[k]]
                if work.stamps[device] != work.counts[SENT]:
                    work.stamps[device] = work.counts[SENT]
                    work.memory[device] += flat.tensor_bytes[tensor]
    copy(work.memory, work.peaks)
    if record:
        log_memory(flat, work, 0.0)
    for op in range(flat.ops):
        if work.pending[op] == 0 and not flat.is_source[op]:
            make_ready(rules, work, op, work.placed[op])
    for i in range(len(flat.sources)):
        op = flat.sources[i]
        # Parameters and state keep their memory to the end; inputs are freed after their last use.
        pinned = flat.source_homes[i] != HOST
        for tensor in range(flat.output_offsets[op], flat.output_offsets[op + 1]):
            if work.homes[tensor] == EVERYWHERE:
                work.roots[tensor] = -1
                continue
            users = deliver(flat, rules, work, 0.0, tensor, work.homes[tensor])
            hold_output(flat, work, tensor, work.homes[tensor], users, pinned)
    work.counts[DONE] = len(flat.sources)


@inlined
def finish_op(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, op: int
) -> None:
    """End an op: hand on its outputs, and let go of its inputs."""
    device = work.placed[op]
    work.counts[DONE] += 1
    for tensor in range(flat.output_offsets[op], flat.output_offsets[op + 1]):
        users = deliver(flat, rules, work, now, tensor, device)
        hold_output(flat, work, tensor, device, users, False)
    deliver_control(flat, rules, work, now, op, device)
    for i in range(flat.input_offsets[op], flat.input_offsets[op + 1]):
        release(flat, work, flat.input_tensors[i], device)


@inlined
def finish_transfer(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, entry: int
) -> None:
    """End a transfer: let go of the source's copy, hand on the new copy, start the second hop."""
    unit, device = work.queue_units[entry], work.queue_destinations[entry]
    link = work.queue_links[entry]
    busy_seconds = flat.link_receive_seconds[link]
    if busy_seconds > 0:
        receiver = flat.link_receivers[link]
        # A device that runs nothing has received by the time that the tensor is there: that is part
        # of the link's latency.
        if receiver >= flat.devices or work.busy_until[receiver] > now:
            work.busy_until[receiver] += busy_seconds
    if unit >= flat.tensors:
        arrive_control(flat, rules, work, now, unit - flat.tensors, device)
        return
    release(flat, work, unit, flat.link_sources[link])
    users = 0
    for k in range(flat.consumer_offsets[unit], flat.consumer_offsets[unit + 1]):
        op = flat.consumers[k]
        if work.placed[op] == device:
            users += 1
            arrive(rules, work, op, device)
    # On the host, the tensor may be on its way to devices that its home has no link to.
    if device == flat.host and flat.relayed[work.homes[unit]]:
        work.counts[SENT] += 1
        for k in range(flat.consumer_offsets[unit], flat.consumer_offsets[unit + 1]):
            destination = work.placed[flat.consumers[k]]
            users += send_on(flat, work, now, unit, work.homes[unit], destination)
    work.holds[unit, device] = users


@inlined
def deliver(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, tensor: int, device: int
) -> int:
    """Hand a new tensor to its consumers here and queue its sends; return its number of users."""
    users = 0
    work.counts[SENT] += 1
    # `send` stamps the destination, so that each device gets the tensor once.
    token = work.counts[SENT]
    for k in range(flat.consumer_offsets[tensor], flat.consumer_offsets[tensor + 1]):
        op = flat.consumers[k]
        destination = work.placed[op]
        if destination == device:
            users += 1
            arrive(rules, work, op, device)
        elif work.stamps[destination] != token:
            users += send(flat, work, now, tensor, device, destination)
    return users


@inlined
def deliver_control(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, op: int, device: int
) -> None:
    """Tell the ops that wait for this op's end; an empty transfer goes to each other device."""
    work.counts[SENT] += 1
    for k in range(flat.control_offsets[op], flat.control_offsets[op + 1]):
        after = flat.control_targets[k]
        destination = work.placed[after]
        if destination == device:
            arrive(rules, work, after, device)
        elif work.stamps[destination] != work.counts[SENT]:
            send(flat, work, now, flat.tensors + op, device, destination)


@inlined
def arrive_control(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, op: int, device: int
) -> None:
    """End the empty transfer of a control edge, which may go on from the host."""
    home = work.placed[op]
    work.counts[SENT] += 1
    for k in range(flat.control_offsets[op], flat.control_offsets[op + 1]):
        after = flat.control_targets[k]
        if work.placed[after] == device:
            arrive(rules, work, after, device)
        elif device == flat.host:
            send_on(flat, work, now, flat.tensors + op, home, work.placed[after])


@inlined
def send(
    flat: StepModel, work: StepWorkspace, now: float, unit: int, source: int, destination: int
) -> int:
    """Queue a send, to the host if there is no link; return 1, or 0 if it is queued already."""
    work.stamps[destination] = work.counts[SENT]
    link = flat.link_of[source, destination]
    if link < 0:
        destination = flat.host
        if work.stamps[destination] == work.counts[SENT]:
            return 0
        work.stamps[destination] = work.counts[SENT]
        link = flat.link_of[source, destination]
    enqueue(flat, work, now, unit, destination, link)
    return 1


@inlined
def send_on(
    flat: StepModel, work: StepWorkspace, now: float, unit: int, home: int, destination: int
) -> int:
    """Queue the second hop to a device that `home` has no link to; return 1 if it is new."""
    if destination == home or flat.link_of[home, destination] >= 0:
        return 0
    if work.stamps[destination] == work.counts[SENT]:
        return 0
    work.stamps[destination] = work.counts[SENT]
    enqueue(flat, work, now, unit, destination, flat.link_of[flat.host, destination])
    return 1


@inlined
def hold_output(
    flat: StepModel, work: StepWorkspace, tensor: int, device: int, users: int, pinned: bool
) -> None:
    """Note how many will use a new tensor's memory, and free it if nobody will."""
    base = flat.bases[tensor]
    root = tensor
    if pinned:
        root = -1
    elif base >= 0:
        # A view uses the memory that its base has on this device: the base's own, or the received
        # copy of the base. Of a base that lives everywhere the memory is never freed.
        root = work.roots[base] if work.homes[base] == device else base
        if work.homes[base] == EVERYWHERE:
            root = -1
    work.roots[tensor] = root
    if root >= 0:
        work.holds[root, device] += users + flat.is_output[tensor]
        if work.holds[root, device] == 0:
            work.memory[device] -= flat.tensor_bytes[root]


@inlined
def release(flat: StepModel, work: StepWorkspace, tensor: int, device: int) -> None:
    """Count one user less of the copy of `tensor` on `device`; the last one frees its memory."""
    home = work.homes[tensor]
    if home == EVERYWHERE:
        return
    root = work.roots[tensor] if home == device else tensor
    if root >= 0:
        work.holds[root, device] -= 1
        if work.holds[root, device] == 0:
            work.memory[device] -= flat.tensor_bytes[root]


@inlined
def start_all(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, record: bool
) -> None:
    """Start what may start on the touched lanes: channels by index, then devices.

    A channel that has a device's name is carried by that device. Then the two share one lane, and
    the device sends what waits before it runs another op.
    """
    channels, touched = work.counts[CHANNELS], work.touched_channels
    # The order of channels matters where transfers start at one instant and one thread issues them.
    for i in range(1, channels):
        channel, place = touched[i], i
        while place > 0 and touched[place - 1] > channel:
            touched[place] = touched[place - 1]
            place -= 1
        touched[place] = channel
    for i in range(channels + work.counts[DEVICES]):
        is_channel = i < channels
        lane = flat.devices + touched[i] if is_channel else work.touched_devices[i - channels]
        work.is_touched[lane] = 0
        if work.running[lane] >= 0:
            continue
        channel = lane - flat.devices
        # From here on `lane` is the device and `channel` the channel that share this lane, or -1.
        if channel >= 0:
            lane = flat.carriers[channel]
        else:
            channel = flat.carried[lane]
        if channel >= 0:
            if (lane >= 0 and work.running[lane] >= 0) or work.running[flat.devices + channel] >= 0:
                continue
            if work.heads[channel] >= 0:
                start_transfer(flat, work, now, flat.devices + channel, record)
                continue
        if lane < 0:
            continue
        if rules.ordered[lane]:
            start_slot(flat, rules, work, now, lane, record)
        elif work.ready_sizes[lane] > 0:
            op = rules.by_rank[pop_rank(work.ready, work.ready_sizes, lane)]
            work.running[lane] = op
            allocate(work, lane, flat.fresh_bytes[op])
            start = max(now, work.busy_until[lane])
            end = start + flat.compute_seconds[op, lane]
            work.busy_until[lane] = end
            push_event(work, end, lane)
            if record:
                work.span_starts[op] = start
                work.span_ends[op] = end
                work.span_turns[op] = work.counts[TURNS]
    work.counts[DEVICES] = 0
    work.counts[CHANNELS] = 0
    work.counts[TURNS] += 1
    if record:
        log_memory(flat, work, now)


@inlined
def start_transfer(
    flat: StepModel, work: StepWorkspace, now: float, lane: int, record: bool
) -> None:
    """Start the first transfer in the queue of a channel."""
    channel = lane - flat.devices
    entry = work.heads[channel]
    after = work.queue_next[entry]
    work.heads[channel] = after
    if after < 0:
        work.tails[channel] = -1
    else:
        work.queue_previous[after] = -1
    unit, link = work.queue_units[entry], work.queue_links[entry]
    seconds = flat.link_latencies[link]
    if unit < flat.tensors:
        seconds += flat.sent_bytes[unit] / flat.link_bandwidths[link]
        allocate(work, work.queue_destinations[entry], flat.tensor_bytes[unit])
    work.running[lane] = entry
    start = now
    busy_seconds = flat.link_send_seconds[link]
    if busy_seconds > 0:
        sender = flat.link_senders[link]
        if sender < flat.devices:
            # A device sends after the op that it runs, and before its next one.
            work.busy_until[sender] = max(now, work.busy_until[sender]) + busy_seconds
        else:
            # A thread that issues to GPUs does not wait for them: it has issued this message when
            # it has spent the time of all messages until now, and the message leaves then.
            work.busy_until[sender] += busy_seconds
            start = max(now, work.busy_until[sender])
    push_event(work, start + seconds, lane)
    if record:
        work.transfer_starts[entry] = start
        work.transfer_ends[entry] = start + seconds


@inlined
def start_slot(
    flat: StepModel, rules: DispatchRules, work: StepWorkspace, now: float, lane: int, record: bool
) -> None:
    """Start a device's next slot, if all its ops are ready."""
    slot = work.next_slots[lane]
    if slot == rules.slot_offsets[lane + 1] or work.slot_waits[slot] > 0:
        return
    work.next_slots[lane] = slot + 1
    work.running[lane] = slot
    start = max(now, work.busy_until[lane])
    end = start + rules.slot_seconds[slot]
    work.busy_until[lane] = end
    push_event(work, end, lane)
    for i in range(rules.op_offsets[slot], rules.op_offsets[slot + 1]):
        op = rules.slot_ops[i]
        allocate(work, lane, flat.fresh_bytes[op])
        if record:
            work.span_starts[op] = start
            work.span_ends[op] = end
            work.span_turns[op] = work.counts[TURNS]


@inlined
def log_memory(flat: StepModel, work: StepWorkspace, now: float) -> None:
    """Log the bytes in use on each device where they have changed since the last entry."""
    for device in range(flat.devices):
        if work.memory[device] != work.logged[device]:
            work.logged[device] = work.memory[device]
            entry = work.counts[LOGGED]
            work.counts[LOGGED] = entry + 1
            work.log_times[entry] = now
            work.log_devices[entry] = device
            work.log_bytes[entry] = work.memory[device]
