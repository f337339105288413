"""Computes device loads, which limit a pipeline that works on many steps at once.

    load(device) = seconds it computes + seconds of every transfer into it and out of it

Transfers are those of the step: one per (tensor, destination), in two hops where there is no link,
and an empty one per control edge and destination. Nothing waits for anything, so a load is a sum. A
host that runs nothing counts as memory and not as a device, so it has no load.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.graph import EVERYWHERE, HOST, Graph, Phase
from dovetail.machine import Machine
from dovetail.plans import Placement
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64, StepModel, flatten, homes_of


def device_loads(graph: Graph, machine: Machine, costs: Costs, placement: Placement) -> Float64:
    """[devices] load of each device in seconds; inf if it has an op that it cannot run."""
    flat = flatten(graph, machine, costs)
    loads = np.zeros(flat.devices)
    sum_loads(flat, homes_of(flat, placement), np.full(flat.devices, -1, np.int64), loads)
    return loads


@kernel
def sum_loads(flat: StepModel, placed: Int32, stamps: Int64, loads: Float64) -> None:
    """Fill `loads` for `placed`, which has the homes of sources. `stamps` [devices] is scratch."""
    loads[:] = 0.0
    stamps[:] = -1
    for op in range(flat.ops):
        if not flat.is_source[op]:
            loads[placed[op]] += flat.compute_seconds[op, placed[op]]
    for tensor in range(flat.tensors):
        home = placed[flat.producers[tensor]]
        if home != EVERYWHERE:
            first, last = flat.consumer_offsets[tensor], flat.consumer_offsets[tensor + 1]
            size_bytes = flat.sent_bytes[tensor]
            targets = flat.consumers[first:last]
            add_sends(flat, placed, stamps, loads, tensor, home, size_bytes, targets)
    for op in range(flat.ops):
        first, last = flat.control_offsets[op], flat.control_offsets[op + 1]
        if first < last:
            targets = flat.control_targets[first:last]
            add_sends(flat, placed, stamps, loads, flat.tensors + op, placed[op], 0.0, targets)


@inlined
def add_sends(  # noqa: PLR0917 (kernel)
    flat: StepModel,
    placed: Int32,
    stamps: Int64,
    loads: Float64,
    unit: int,
    home: int,
    size_bytes: float,
    targets: Int32,
) -> None:
    """Add the hops of one unit to each device that has targets, once per device.

    A device was counted if its stamp is the unit. The host is stamped too, so that the first hop of
    two counts once.
    """
    for op in targets:
        destination = placed[op]
        if destination == home or stamps[destination] == unit:
            continue
        if flat.link_of[home, destination] >= 0:
            stamps[destination] = unit
            add_hop(flat, loads, home, destination, size_bytes)
            continue
        if stamps[flat.host] != unit:
            stamps[flat.host] = unit
            add_hop(flat, loads, home, flat.host, size_bytes)
        stamps[destination] = unit
        add_hop(flat, loads, flat.host, destination, size_bytes)


@inlined
def add_hop(
    flat: StepModel, loads: Float64, source: int, destination: int, size_bytes: float
) -> None:
    """Add a hop to the loads of both its ends."""
    link = flat.link_of[source, destination]
    seconds = flat.link_latencies[link] + size_bytes / flat.link_bandwidths[link]
    loads[source] += seconds
    loads[destination] += seconds


# ── The `load` objective as a small hypergraph, for searches over groups ────────────────────────
#
# Ops are contracted to their groups, and tensors to *nets*. A net has all tensors of one source
# group that the same set of other groups reads, which therefore always move together. For a
# placement of the groups
#
#     load(device) = work of its groups + hops out of it + hops into it
#
# where a net makes one hop per destination device. Without a link it makes one hop to the host
# (once per net) and one from there. These loads equal those of `device_loads`, up to the rounding
# of sums in another order. In a published instance accelerators reach each other through the host
# alone, so a tensor is paid for once on the way out and once per device on the way in.


HOST_SOURCE = -1
"""The entry of `net_sources` for an input, which is on the host in every placement."""


class LoadModel(NamedTuple):
    """The `load` objective of one problem, as flat arrays that kernels take as they are.

    groups, devices, host   counts, and the index of the host among the devices
    counted            [devices] 1: its load counts; 0: a host that runs nothing
    work_seconds       [groups, devices] inf: the group may not be there
    resident_bytes     [groups] parameters and state: there for as long as the group is. A device
                       holds at least the sum over its groups
    capacities         [devices] bytes, as float
    net_sources        [nets] group that makes it, or `HOST_SOURCE`
    net_offsets, net_targets   CSR [nets + 1]: other groups that read it, ascending
    net_bytes, net_sends       [nets] bytes in all, and number of tensors (each pays the latency)
    latency_seconds, seconds_per_byte   [devices, devices] of the link from row to column; 0 where
                       there is none
    linked             [devices, devices] 1: there is a link
    edges              [edges, 2] distinct (from group, to group) of data and control between
                       forward ops: what contiguity looks at
    forward            [groups] 1: has forward ops
    """

    groups: int
    devices: int
    host: int
    counted: Int8
    work_seconds: Float64
    resident_bytes: Float64
    capacities: Float64
    net_sources: Int32
    net_offsets: Int32
    net_targets: Int32
    net_bytes: Float64
    net_sends: Float64
    latency_seconds: Float64
    seconds_per_byte: Float64
    linked: Int8
    edges: Int32
    forward: Int8


def load_model(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    *,
    group_of: NDArray[np.integer],
    allowed: NDArray[np.bool_],
    capacities: NDArray[np.integer],
) -> LoadModel:
    """The load model of `graph`, contracted to the groups of `group_of` [ops].

    `allowed` [groups, devices] says where each group may be. Takes O(ops + reads x log reads).
    """
    groups, devices = allowed.shape
    columns = np.where(graph.is_source[:, None], 0.0, costs.compute_seconds).T
    work = np.stack([np.bincount(group_of, weights=c, minlength=groups) for c in columns], axis=1)
    latency, per_byte = np.zeros((devices, devices)), np.zeros((devices, devices))
    for a, b in np.argwhere(machine.link_index >= 0).tolist():
        link = machine.links[machine.link_index[a, b]]
        latency[a, b] = link.latency_seconds
        per_byte[a, b] = 1 / link.bandwidth_bytes_per_second
    forward = np.zeros(groups, np.int8)
    forward[group_of[graph.phases == Phase.FORWARD]] = 1
    forward_edges = group_of[graph.forward_edges]
    forward_edges = np.unique(forward_edges[forward_edges[:, 0] != forward_edges[:, 1]], axis=0)

    # The nets, by source and then by targets. A unit is a tensor, or for a control edge an empty
    # tensor of its own, one for all that wait for one op.
    made_by = graph.producers
    residence = graph.residences[made_by]
    source = np.where(
        residence == HOST, HOST_SOURCE, group_of[np.where(residence >= 0, residence, made_by)]
    )
    sent = costs.sends_of(graph)
    moves = residence[graph.input_tensors] != EVERYWHERE
    reads = np.stack([graph.input_tensors, group_of[graph.readers]], axis=1)[moves]
    befores, afters = graph.control[:, 0], graph.control[:, 1]
    waits = np.stack([graph.tensors + befores, group_of[afters]], axis=1)
    source = np.concatenate([source, group_of])
    sent = np.concatenate([sent, np.zeros(len(graph))])
    pairs = np.unique(np.concatenate([reads, waits]).astype(np.int64), axis=0)
    pairs = pairs[source[pairs[:, 0]] != pairs[:, 1]]
    units, starts = np.unique(pairs[:, 0], return_index=True)
    merged: dict[tuple[int, bytes], list[float]] = {}
    targets_of = np.split(pairs[:, 1].astype(np.int32), starts[1:]) if len(units) else []
    for unit, targets in zip(units.tolist(), targets_of, strict=True):
        entry = merged.setdefault((int(source[unit]), targets.tobytes()), [0.0, 0.0])
        entry[0] += float(sent[unit])
        entry[1] += 1
    nets = sorted(merged.items(), key=lambda net: net[0])
    targets_of = [np.frombuffer(key[1], np.int32) for key, _ in nets]
    return LoadModel(
        groups=groups,
        devices=devices,
        host=machine.host_index,
        counted=np.array([device.kind != "host" for device in machine.devices], np.int8),
        work_seconds=np.ascontiguousarray(np.where(allowed, work, np.inf)),
        resident_bytes=resident_bytes(graph, group_of, groups),
        capacities=np.asarray(capacities, np.float64),
        net_sources=np.array([key[0] for key, _ in nets], np.int32),
        net_offsets=np.cumsum([0] + [len(of_net) for of_net in targets_of]).astype(np.int32),
        net_targets=np.concatenate([np.zeros(0, np.int32), *targets_of]),
        net_bytes=np.array([size for _, (size, _) in nets], np.float64),
        net_sends=np.array([count for _, (_, count) in nets], np.float64),
        latency_seconds=latency,
        seconds_per_byte=per_byte,
        linked=(machine.link_index >= 0).astype(np.int8),
        edges=np.ascontiguousarray(forward_edges.reshape(-1, 2), np.int32),
        forward=forward,
    )


def group_loads(model: LoadModel, placements: NDArray[np.int32]) -> Float64:
    """[batch, devices] load of each device for placements [batch, groups].

    It is 0 for a device that does not count, and inf if a group may not be there.
    """
    loads = np.zeros((len(placements), model.devices))
    _sum_loads(model, np.ascontiguousarray(placements, np.int32), loads)
    return loads * model.counted


@kernel
def _sum_loads(model: LoadModel, placements: Int32, loads: Float64) -> None:
    for row in range(len(placements)):
        placement, total = placements[row], loads[row]
        for group in range(model.groups):
            total[placement[group]] += model.work_seconds[group, placement[group]]
        for net in range(len(model.net_sources)):
            add_net(model, placement, net, total)


@inlined
def add_net(model: LoadModel, placement: Int32, net: int, loads: Float64) -> None:
    """Add the hops of one net to `loads`. O(targets x devices)."""
    source = model.net_sources[net]
    home = model.host if source < 0 else placement[source]
    relayed = False
    first, last = model.net_offsets[net], model.net_offsets[net + 1]
    for i in range(first, last):
        destination = placement[model.net_targets[i]]
        if destination == home or _has_earlier_target(model, placement, first, i, destination):
            continue
        # The host may be a destination itself and a relay, and gets the net only once.
        if model.linked[home, destination]:
            is_host = destination == model.host
            if not (is_host and relayed):
                _add_hop(model, net, home, destination, loads)
            relayed = relayed or is_host
            continue
        if not relayed:
            _add_hop(model, net, home, model.host, loads)
        relayed = True
        _add_hop(model, net, model.host, destination, loads)


@inlined
def _has_earlier_target(
    model: LoadModel, placement: Int32, first: int, i: int, device: int
) -> bool:
    """True if a target before the i-th one is on the same device."""
    has_earlier = False
    for j in range(first, i):
        if placement[model.net_targets[j]] == device:
            has_earlier = True
            break
    return has_earlier


@inlined
def _add_hop(model: LoadModel, net: int, source: int, destination: int, loads: Float64) -> None:
    seconds = price(model, net, source, destination)
    loads[source] += seconds
    loads[destination] += seconds


@inlined
def price(model: LoadModel, net: int, source: int, destination: int) -> float:
    """Return the seconds of one hop of a net; 0 if there is no link."""
    return float(
        model.net_sends[net] * model.latency_seconds[source, destination]
        + model.net_bytes[net] * model.seconds_per_byte[source, destination]
    )


def resident_bytes(graph: Graph, group_of: NDArray[np.integer], groups: int) -> Float64:
    """[groups] bytes of parameters, state and buffers on a group's device throughout the step.

    What is written lives with its writer. What is resident wherever it is read is charged once, to
    its first reader. What nobody reads or writes is not counted.
    """
    homes = graph.residences[graph.producers].astype(np.int64)
    first = np.full(graph.tensors, HOST, np.int64)
    read = np.flatnonzero(np.diff(graph.consumer_offsets))
    first[read] = graph.consumers[graph.consumer_offsets[read]]
    homes = np.where(homes == EVERYWHERE, first, homes)
    lives = graph.is_source[graph.producers] & (homes != HOST)
    sizes = graph.tensor_bytes[lives]
    return np.bincount(group_of[homes[lives]], weights=sizes, minlength=groups).astype(np.float64)
