"""Device loads: what limits a pipeline that works on many steps at once.

    load(device) = seconds it computes + seconds of every transfer into it and out of it

Transfers are those of the step: one per (tensor, destination), two hops where there is no link,
one empty one per control edge and destination. Nothing waits for anything, so a load is a sum. A
host that runs nothing is memory, not a device: what passes through it makes no load there.
"""

import numpy as np

from dovetail.costs import Costs
from dovetail.graph import EVERYWHERE, Graph
from dovetail.machine import Machine
from dovetail.plans import Placement
from dovetail.simulator.compiling import inlined, kernel
from dovetail.simulator.flat import Flat, Float64, Int32, Int64, flatten, homes_of


def device_loads(graph: Graph, machine: Machine, costs: Costs, placement: Placement) -> Float64:
    """[devices] seconds of work of each device; inf where it cannot run an op it has."""
    flat = flatten(graph, machine, costs)
    loads = np.zeros(flat.devices)
    sum_loads(flat, homes_of(flat, placement), np.full(flat.devices, -1, np.int64), loads)
    return loads


@kernel
def sum_loads(flat: Flat, placed: Int32, stamps: Int64, loads: Float64) -> None:
    """Fill `loads` for `placed`, sources filled in. `stamps` [devices] is scratch."""
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
def add_sends(  # noqa: PLR0913 (kernel)
    flat: Flat,
    placed: Int32,
    stamps: Int64,
    loads: Float64,
    unit: int,
    home: int,
    size_bytes: float,
    targets: Int32,
) -> None:
    for op in targets:
        there = placed[op]
        if there == home or stamps[there] == unit:
            continue
        if flat.link_of[home, there] >= 0:
            stamps[there] = unit
            add_hop(flat, loads, home, there, size_bytes)
            continue
        if stamps[flat.host] != unit:
            stamps[flat.host] = unit
            add_hop(flat, loads, home, flat.host, size_bytes)
        stamps[there] = unit
        add_hop(flat, loads, flat.host, there, size_bytes)


@inlined
def add_hop(flat: Flat, loads: Float64, source: int, destination: int, size_bytes: float) -> None:
    link = flat.link_of[source, destination]
    seconds = flat.link_latencies[link] + size_bytes / flat.link_bandwidths[link]
    loads[source] += seconds
    loads[destination] += seconds
