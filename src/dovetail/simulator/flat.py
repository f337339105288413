"""Turns graph, machine and costs into the flat arrays that the kernel reads, once per simulator.

Orders and stages become *slots*. A slot holds the ops that a device starts together. An explicit
order is a list of slots of one op each. A device without order has no slots, and takes ready ops by
rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dovetail.costs import Costs
from dovetail.errors import OrderError
from dovetail.graph import EVERYWHERE, HOST, Graph
from dovetail.graph.records import csr_offsets
from dovetail.machine import Machine
from dovetail.plans import Schedule

Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


class StepModel(NamedTuple):
    """The arrays of a simulation that do not depend on the placement.

    sources, source_homes   [sources] source ops, ascending, and their `residences`
    is_source          [ops] 1 for source ops
    pending            [ops] arrivals an op waits for: reads of what is not resident everywhere,
                       and control predecessors
    tensor_bytes, sent_bytes   [tensors] bytes that a copy occupies, and bytes that a send moves
    bases              [tensors] tensor that each is a view of, -1: none
    is_output          [tensors] 1 for graph outputs
    fresh_bytes        [ops] bytes of the outputs that get new memory
    resident           [tensors] 1 for tensors that are on every device that reads them
    consumer_offsets, consumers, control_offsets, control_targets   CSR by tensor, by op
    link_of            [devices, devices] index of a link, -1: none
    link_senders, link_receivers   [links] whom each message keeps busy: devices, or numbers from
                       `devices` on, each the thread that issues the work of a host's GPUs
    link_send_seconds, link_receive_seconds   [links] for how long
    relayed            [devices] 1 where a device lacks a link to some other
    carriers, carried  [channels] device that has the channel's name, [devices] channel that has
                       the device's name; -1: none. Such a device makes the copies itself
    """

    ops: int
    tensors: int
    devices: int
    channels: int
    host: int
    sources: Int32
    source_homes: Int32
    is_source: Int8
    output_offsets: Int32
    input_offsets: Int32
    input_tensors: Int32
    producers: Int32
    tensor_bytes: Int64
    sent_bytes: Float64
    bases: Int32
    is_output: Int8
    resident: Int8
    pending: Int32
    fresh_bytes: Int64
    consumer_offsets: Int32
    consumers: Int32
    control_offsets: Int32
    control_targets: Int32
    compute_seconds: Float64
    link_of: Int32
    link_sources: Int32
    link_channels: Int32
    link_latencies: Float64
    link_bandwidths: Float64
    link_senders: Int32
    link_receivers: Int32
    link_send_seconds: Float64
    link_receive_seconds: Float64
    relayed: Int8
    carriers: Int32
    carried: Int32


class DispatchRules(NamedTuple):
    """How devices choose what to start: by rank, or by going through their slots in order.

    pending       [ops] as in `StepModel`, without arrivals from within an op's own slot
    ranks, by_rank   [ops] place of each op by priority, and its inverse
    ordered       [devices] 1: runs its slots `slot_offsets[d]` to `slot_offsets[d + 1]`
    op_offsets, slot_ops   CSR [slots + 1], ops of each slot, ascending
    slot_of       [ops] slot that the op is in, -1: none
    slot_seconds  [slots] seconds from the slot's start to its end
    """

    pending: Int32
    ranks: Int32
    by_rank: Int32
    ordered: Int8
    slot_offsets: Int32
    op_offsets: Int32
    slot_ops: Int32
    slot_of: Int32
    slot_seconds: Float64


class StepWorkspace(NamedTuple):
    """The arrays that one thread writes while it simulates.

    homes      [tensors] device where each tensor is made
    roots      [tensors] tensor whose memory it uses there; -1: memory that lives to the end
    holds      [tensors, devices] users left of the memory rooted in a tensor on a device
    stamps     [devices] number of the last unit that was sent there, so that a unit is sent once
               to each device
    ready      [devices, ops] binary heaps of ranks, `ready_sizes` long
    running    [devices + channels] op, slot or queue entry that runs; -1: idle
    busy_until   [2 x devices] when each device has ended its op and its messages. From `devices`
               on: the seconds that each host's thread has spent on issuing messages to GPUs
    event_*    binary heap of what runs, by end; `counts` has its length
    queue_*    pool of transfers, in one doubly linked list per channel from `heads` to `tails`
    touched_devices, touched_channels   [devices], [channels] those that may start something now;
               `is_touched` [devices + channels] is 1 for them
    span_*, transfer_*, log_*   what a timeline records; empty if none is wanted. `span_turns` says
               which of two ops that start at one time started first
    """

    placed: Int32
    homes: Int32
    roots: Int32
    pending: Int32
    holds: Int32
    stamps: Int64
    ready: Int32
    ready_sizes: Int32
    running: Int32
    busy_until: Float64
    next_slots: Int32
    slot_waits: Int32
    event_times: Float64
    event_slots: Int32
    queue_ready: Float64
    queue_units: Int32
    queue_destinations: Int32
    queue_links: Int32
    queue_next: Int32
    queue_previous: Int32
    heads: Int32
    tails: Int32
    touched_devices: Int32
    touched_channels: Int32
    is_touched: Int8
    counts: Int64
    memory: Int64
    peaks: Int64
    span_starts: Float64
    span_ends: Float64
    span_turns: Int32
    transfer_starts: Float64
    transfer_ends: Float64
    logged: Int64
    log_times: Float64
    log_devices: Int32
    log_bytes: Int64


def flatten(graph: Graph, machine: Machine, costs: Costs) -> StepModel:
    """The arrays of one graph on one machine. Raises `CostError` for missing costs."""
    costs.check(graph)
    ops, tensors, devices = len(graph), graph.tensors, len(machine.devices)
    sources = np.flatnonzero(graph.is_source).astype(np.int32)
    resident = (graph.is_source & (graph.residences == EVERYWHERE))[graph.producers]
    waits = ~resident[graph.input_tensors]
    fresh = np.where(graph.bases < 0, graph.tensor_bytes, 0)
    fresh_bytes = np.zeros(ops, np.int64)
    # `np.bincount` would sum floats.
    np.add.at(fresh_bytes, graph.producers, fresh)
    order = np.argsort(graph.control[:, 0], kind="stable")
    is_output = np.zeros(tensors, np.int8)
    is_output[graph.outputs] = 1
    links = machine.links
    # [devices] who sends and receives for each: a CPU by itself, GPUs by a thread of their host.
    hosts = list(dict.fromkeys(device.host for device in machine.devices))
    workers = [
        devices + hosts.index(device.host) if device.kind == "gpu" else index
        for index, device in enumerate(machine.devices)
    ]
    ends = [
        (machine.device_index(link.source), machine.device_index(link.destination))
        for link in links
    ]
    senders = [workers[source] for source, _ in ends]
    for i, (source, destination) in enumerate(ends):
        # The thread also copies from its host's memory to its GPUs.
        if machine.devices[source].host == machine.devices[destination].host:
            senders[i] = max(workers[source], workers[destination], key=lambda w: w >= devices)
    unlinked = (machine.link_index < 0) & ~np.eye(devices, dtype=bool)
    channel_of = {name: channel for channel, name in enumerate(machine.channels)}
    return StepModel(
        ops=ops,
        tensors=tensors,
        devices=devices,
        channels=len(machine.channels),
        host=machine.host_index,
        sources=sources,
        source_homes=_int32(graph.residences[sources]),
        is_source=graph.is_source.astype(np.int8),
        output_offsets=_int32(graph.output_offsets),
        input_offsets=_int32(graph.input_offsets),
        input_tensors=_int32(graph.input_tensors),
        producers=_int32(graph.producers),
        tensor_bytes=np.array(graph.tensor_bytes, np.int64),
        sent_bytes=np.array(costs.sends_of(graph), np.float64),
        bases=_int32(graph.bases),
        is_output=is_output,
        resident=resident.astype(np.int8),
        pending=_int32(
            np.bincount(graph.readers[waits], minlength=ops)
            + np.bincount(graph.control[:, 1], minlength=ops)
        ),
        fresh_bytes=fresh_bytes,
        consumer_offsets=_int32(graph.consumer_offsets),
        consumers=_int32(graph.consumers),
        control_offsets=csr_offsets(graph.control[:, 0], ops),
        control_targets=_int32(graph.control[order, 1]),
        compute_seconds=np.array(costs.compute_seconds, np.float64, order="C"),
        link_of=_int32(machine.link_index),
        link_sources=_int32([source for source, _ in ends]),
        link_channels=_int32([channel_of[link.channel] for link in links]),
        link_latencies=np.array([link.latency_seconds for link in links], np.float64),
        link_bandwidths=np.array([link.bandwidth_bytes_per_second for link in links], np.float64),
        link_senders=_int32(senders),
        link_receivers=_int32([workers[destination] for _, destination in ends]),
        link_send_seconds=np.array([link.send_seconds for link in links], np.float64),
        link_receive_seconds=np.array([link.receive_seconds for link in links], np.float64),
        relayed=np.asarray(unlinked.any(axis=1), np.int8),
        carriers=_int32([_index(machine.device_names, name) for name in machine.channels]),
        carried=_int32([_index(machine.channels, name) for name in machine.device_names]),
    )


def free_rules(flat: StepModel, priorities: Float64 | None = None) -> DispatchRules:
    """Rules under which every device takes the ready op of highest priority, then lowest index."""
    ranks = by_rank = np.arange(flat.ops, dtype=np.int32)
    if priorities is not None:
        by_rank = _int32(np.argsort(-np.asarray(priorities, np.float64), kind="stable"))
        ranks = np.empty_like(by_rank)
        ranks[by_rank] = np.arange(flat.ops, dtype=np.int32)
    none, zeros = np.zeros(0, np.int32), np.zeros(flat.devices + 1, np.int32)
    return DispatchRules(
        pending=flat.pending,
        ranks=ranks,
        by_rank=by_rank,
        ordered=np.zeros(flat.devices, np.int8),
        slot_offsets=zeros,
        op_offsets=np.zeros(1, np.int32),
        slot_ops=none,
        slot_of=np.full(flat.ops, -1, np.int32),
        slot_seconds=np.zeros(0),
    )


Slots = list[tuple[tuple[int, ...], float]]
"""(ops, seconds) of each slot of a device, in order."""


def ordered_rules(
    flat: StepModel, free: DispatchRules, slots: Sequence[Slots | None]
) -> DispatchRules:
    """The rules `free`, except that a device with a list in `slots[device]` runs those slots."""
    slot_of, pending = free.slot_of.copy(), flat.pending.copy()
    every = [slot for of_device in slots for slot in of_device or []]
    sizes = np.array([len(ops) for ops, _ in every], dtype=np.int64)
    listed = np.array([op for ops, _ in every for op in ops], dtype=np.int64)
    slot_of[listed] = np.repeat(np.arange(len(every)), sizes)
    # Ops of one slot do not wait for each other: the slot starts when all that comes from outside
    # is there.
    for ops, _ in every:
        for op in ops if len(ops) > 1 else ():
            pending[op] -= _arrivals_within(flat, op, set(ops))
    return free._replace(
        pending=pending,
        ordered=np.array([of_device is not None for of_device in slots], np.int8),
        slot_offsets=_int32(np.cumsum([0] + [len(of_device or []) for of_device in slots])),
        op_offsets=_int32(np.concatenate([[0], np.cumsum(sizes)])),
        # Slot after slot, the ops of each ascending.
        slot_ops=_int32(listed[np.lexsort((listed, np.repeat(np.arange(len(every)), sizes)))]),
        slot_of=slot_of,
        slot_seconds=np.array([seconds for _, seconds in every], np.float64),
    )


def slots_of(
    flat: StepModel, device: int, order: tuple[int, ...] | None, schedule: Schedule | None
) -> Slots | None:
    """The slots of a device, from its schedule or its order; None if it is free to choose."""
    if schedule is not None:
        return [(stage.ops, stage.seconds) for stage in schedule.stages]
    if order is None:
        return None
    # An op number that is out of range gets 0 seconds here; `check_slots` then refuses the order.
    costs = flat.compute_seconds[:, device].tolist()
    return [((op,), costs[op] if 0 <= op < flat.ops else 0.0) for op in order]


def check_slots(slots: Slots, placed: list[int], device: str) -> None:
    """Raise `OrderError` unless the slots name each of the device's ops once."""
    listed = sorted(op for ops, _ in slots for op in ops)
    if listed != sorted(placed):
        raise OrderError(device, "does not name each of its ops exactly once")
    if any(not 0 <= seconds < np.inf for _, seconds in slots):
        raise OrderError(device, "has a stage whose seconds are negative or not finite")


def workspace(flat: StepModel, slots: int = 0, *, record: bool = False) -> StepWorkspace:
    """A workspace for one simulation at a time, with arrays for a timeline if `record`."""
    ops, tensors, devices = flat.ops, flat.tensors, flat.devices
    lanes = devices + flat.channels
    transfers = _most_sends(flat.consumer_offsets, devices)
    transfers += _most_sends(flat.control_offsets, devices)
    kept_ops, kept_transfers = (ops, transfers) if record else (0, 0)
    # An op, slot or transfer changes the memory of one device as it starts, and of one as it ends.
    entries = 2 * (ops + slots + transfers + devices) if record else 0
    return StepWorkspace(
        placed=np.zeros(ops, np.int32),
        homes=np.zeros(tensors, np.int32),
        roots=np.zeros(tensors, np.int32),
        pending=np.zeros(ops, np.int32),
        holds=np.zeros((tensors, devices), np.int32),
        stamps=np.zeros(devices, np.int64),
        ready=np.zeros((devices, ops), np.int32),
        ready_sizes=np.zeros(devices, np.int32),
        running=np.zeros(lanes, np.int32),
        busy_until=np.zeros(2 * devices),
        next_slots=np.zeros(devices, np.int32),
        slot_waits=np.zeros(slots, np.int32),
        event_times=np.zeros(lanes),
        event_slots=np.zeros(lanes, np.int32),
        queue_ready=np.zeros(transfers),
        queue_units=np.zeros(transfers, np.int32),
        queue_destinations=np.zeros(transfers, np.int32),
        queue_links=np.zeros(transfers, np.int32),
        queue_next=np.zeros(transfers, np.int32),
        queue_previous=np.zeros(transfers, np.int32),
        heads=np.zeros(flat.channels, np.int32),
        tails=np.zeros(flat.channels, np.int32),
        touched_devices=np.zeros(devices, np.int32),
        touched_channels=np.zeros(flat.channels, np.int32),
        is_touched=np.zeros(lanes, np.int8),
        counts=np.zeros(8, np.int64),
        memory=np.zeros(devices, np.int64),
        peaks=np.zeros(devices, np.int64),
        span_starts=np.zeros(kept_ops),
        span_ends=np.zeros(kept_ops),
        span_turns=np.zeros(kept_ops, np.int32),
        transfer_starts=np.zeros(kept_transfers),
        transfer_ends=np.zeros(kept_transfers),
        logged=np.zeros(devices, np.int64),
        log_times=np.zeros(entries),
        log_devices=np.zeros(entries, np.int32),
        log_bytes=np.zeros(entries, np.int64),
    )


def homes_of(flat: StepModel, placement: NDArray[np.integer]) -> Int32:
    """[ops] the placement with its source entries filled: host, writer's device, `EVERYWHERE`."""
    placed = np.array(placement, np.int32)
    homes = flat.source_homes
    with_writer = np.where(homes >= 0, placed[np.maximum(homes, 0)], EVERYWHERE)
    placed[flat.sources] = np.where(homes == HOST, flat.host, with_writer)
    return placed


def _arrivals_within(flat: StepModel, op: int, slot: set[int]) -> int:
    """How many arrivals that the op waits for come from ops of its own slot."""
    reads = flat.input_tensors[flat.input_offsets[op] : flat.input_offsets[op + 1]].tolist()
    count = sum(int(flat.producers[tensor]) in slot for tensor in reads)
    for before in slot:
        targets = flat.control_targets[flat.control_offsets[before] :]
        count += (
            targets[: flat.control_offsets[before + 1] - flat.control_offsets[before]]
            .tolist()
            .count(op)
        )
    return count


def _most_sends(offsets: Int32, devices: int) -> int:
    """The most sends that can be queued: per unit one to each other device, and one to the host."""
    fan_out = np.diff(offsets)
    return int((np.minimum(fan_out, devices - 1) + (fan_out > 0)).sum())


def _index(names: tuple[str, ...], name: str) -> int:
    """Index of the name, or -1."""
    return names.index(name) if name in names else -1


def _int32(values: ArrayLike) -> Int32:
    return np.array(values, np.int32, order="C")
