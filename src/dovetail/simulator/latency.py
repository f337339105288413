"""Computes latency: how long one sample takes if each accelerator runs its part in one call.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 4. With S the ops of one accelerator, w(v)
the seconds of an op and c(u) those of moving the whole output of u between accelerator and host,

    start(S)  = max of end(u)            over u outside S that S reads
    end(S)    = start(S) + sum of c(u)   over those u, once each
                         + sum of w(v)   over S
                         + sum of c(v)   over v in S that is read outside S, once each
    end(v)    = end(S) for all v in S
    end(v)    = w(v) + max of end(u)     on a CPU, over all u that v reads: as many run at once as
                                         are ready, and host memory is theirs

and the latency is the largest end. If S waits for itself there is no latency; the value is inf.

Differences: in training an accelerator has two calls, one for its forward ops and then one for its
backward ops. What the first hands to the second stays on the accelerator. The paper's integer
programme forbids backward ops and allows an accelerator q calls; here q = 1.
"""

from typing import NamedTuple

import numpy as np

from dovetail.costs import Costs
from dovetail.errors import UsageError
from dovetail.graph import Graph, Phase
from dovetail.graph.records import csr_offsets
from dovetail.machine import Machine
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32


class LatencyModel(NamedTuple):
    """The arrays that do not depend on the placement.

    ops                nodes of the walk: all ops of the graph; sources take no part
    is_source          [ops]
    late               [ops] 1: a backward op
    accelerator        [devices] 1: runs its part in one call
    work_seconds       [ops, devices]
    in_seconds, out_seconds   [ops, devices] seconds of moving an op's outputs from the host to an
                       accelerator, and from there to the host
    user_offsets, users       CSR [ops + 1] of the ops that read an op, once each, forward ops first
    """

    ops: int
    is_source: Int8
    late: Int8
    accelerator: Int8
    work_seconds: Float64
    in_seconds: Float64
    out_seconds: Float64
    user_offsets: Int32
    users: Int32


class LatencyWorkspace(NamedTuple):
    """The arrays that one walk writes.

    The forward call of a device has number 2 x device, and its backward call the number after that.
    After those of all devices, every op on a CPU is a call of its own.

    call_of                [ops]
    heads, nexts           first op of each call, next op of the same call; -1: none
    waits                  [calls] reads from other calls that are not there yet
    starts, carries        [calls] start so far; seconds of its ops and its communication
    ready                  [calls] stack of the calls that can start
    stamps                 [calls] last op whose output was counted into the call
    """

    call_of: Int32
    heads: Int32
    nexts: Int32
    waits: Int32
    starts: Float64
    carries: Float64
    ready: Int32
    stamps: Int32


def latency_model(graph: Graph, machine: Machine, costs: Costs) -> LatencyModel:
    """The latency model of a published instance.

    Raises `UsageError` where the objective is not defined: if accelerators are not joined by a
    host alone, which runs nothing, and if there are inputs, control edges or updates.
    """
    reason = ""
    host = machine.host_index
    if machine.devices[host].kind != "host":
        reason = f"the host {machine.host} runs ops itself"
    elif ((machine.link_index >= 0).sum() > 2 * (len(machine.devices) - 1)) or any(
        machine.link_index[host, d] < 0 or machine.link_index[d, host] < 0
        for d in range(len(machine.devices))
        if d != host
    ):
        reason = "devices have links that do not end at the host"
    elif len(graph.control) or (graph.phases == Phase.UPDATE).any() or "input" in graph.kinds:
        reason = "the graph has inputs, updates or control edges"
    if reason:
        raise UsageError(
            "objective", f"latency is defined for published instances alone, and here {reason}"
        )
    seconds = costs.compute_seconds.copy()
    starts, ends = graph.producers[graph.input_tensors], graph.readers
    moves = ~graph.is_source[starts]
    edges = np.unique(np.stack([starts[moves], ends[moves]], axis=1), axis=0).reshape(-1, 2)
    made_bytes = np.bincount(graph.producers, costs.sends_of(graph), minlength=len(graph))
    is_accelerator = np.array([device.kind == "gpu" for device in machine.devices])
    incoming, outgoing = np.zeros_like(seconds), np.zeros_like(seconds)
    for device in np.flatnonzero(is_accelerator).tolist():
        to_host = machine.links[machine.link_index[device, machine.host_index]]
        from_host = machine.links[machine.link_index[machine.host_index, device]]
        for link, column in ((to_host, outgoing), (from_host, incoming)):
            column[:, device] = link.latency_seconds + made_bytes / link.bandwidth_bytes_per_second
    late = graph.phases == Phase.BACKWARD
    edges = edges[np.lexsort((edges[:, 1], late[edges[:, 1]], edges[:, 0]))]
    return LatencyModel(
        ops=len(graph),
        is_source=graph.is_source.astype(np.int8),
        late=late.astype(np.int8),
        accelerator=is_accelerator.astype(np.int8),
        work_seconds=np.ascontiguousarray(seconds),
        in_seconds=incoming,
        out_seconds=outgoing,
        user_offsets=csr_offsets(edges[:, 0], len(graph)),
        users=edges[:, 1].astype(np.int32),
    )


def latency_work(model: LatencyModel) -> LatencyWorkspace:
    """A workspace for one walk at a time."""
    calls = 2 * len(model.accelerator) + model.ops
    return LatencyWorkspace(
        call_of=np.zeros(model.ops, np.int32),
        heads=np.zeros(calls, np.int32),
        nexts=np.zeros(model.ops, np.int32),
        waits=np.zeros(calls, np.int32),
        starts=np.zeros(calls),
        carries=np.zeros(calls),
        ready=np.zeros(calls, np.int32),
        stamps=np.zeros(calls, np.int32),
    )


def latencies(model: LatencyModel, work: LatencyWorkspace, placements: Int32) -> Float64:
    """[batch] latency in seconds of placements [batch, ops]. Takes O(batch x (ops + reads)).

    It is inf if a call waits for itself, or if an op is on a device that cannot run it.
    """
    values = np.empty(len(placements))
    _walk_all(model, work, np.ascontiguousarray(placements, np.int32), values)
    return values


@kernel
def _walk_all(
    model: LatencyModel, work: LatencyWorkspace, placements: Int32, values: Float64
) -> None:
    for row in range(len(placements)):
        latency = walk(model, work, placements[row])
        values[row] = latency if latency >= 0 else np.inf


@inlined
def walk(model: LatencyModel, work: LatencyWorkspace, placement: Int32) -> float:
    """The latency of one placement [ops], or minus the number of calls that never start."""
    devices = len(model.accelerator)
    work.heads[:] = -1
    work.waits[:] = 0
    work.starts[:] = 0.0
    work.carries[:] = 0.0
    work.stamps[:] = -1
    for op in range(model.ops):
        if model.is_source[op]:
            continue
        device = placement[op]
        call = 2 * devices + op
        if model.accelerator[device]:
            call = 2 * device + model.late[op]
        work.call_of[op] = call
        work.nexts[op] = work.heads[call]
        work.heads[call] = op
        work.carries[call] += model.work_seconds[op, device]
    for device in range(devices):
        if work.heads[2 * device] >= 0 and work.heads[2 * device + 1] >= 0:
            # A device's backward call waits for its forward call, whatever it reads.
            work.waits[2 * device + 1] = 1
    for op in range(model.ops):
        if not model.is_source[op]:
            _count_reads(model, work, placement, op)
    return _run_calls(model, work)


@inlined
def _count_reads(model: LatencyModel, work: LatencyWorkspace, placement: Int32, op: int) -> None:
    """Count the reads of what `op` makes, and the seconds of moving it."""
    call, device = work.call_of[op], placement[op]
    first, last = model.user_offsets[op], model.user_offsets[op + 1]
    leaves = False
    for i in range(first, last):
        user = model.users[i]
        user_call, user_device = work.call_of[user], placement[user]
        if user_call == call:
            continue
        work.waits[user_call] += 1
        # Between the two calls of one accelerator nothing moves.
        if user_device == device and model.accelerator[device]:
            continue
        leaves = True
        if model.accelerator[user_device] and work.stamps[user_call] != op:
            work.stamps[user_call] = op
            # `user_call ^ 1` is the other call of that accelerator. If the forward call has fetched
            # the output already, the backward call does not pay again.
            if work.stamps[user_call ^ 1] != op:
                work.carries[user_call] += model.in_seconds[op, user_device]
    if leaves and model.accelerator[device]:
        work.carries[call] += model.out_seconds[op, device]


@inlined
def _run_calls(model: LatencyModel, work: LatencyWorkspace) -> float:
    """The end of the last call, or minus the number of calls that never start."""
    devices = len(model.accelerator)
    left, ready, latest = 0, 0, 0.0
    for call in range(len(work.heads)):
        if work.heads[call] >= 0:
            left += 1
            if work.waits[call] == 0:
                work.ready[ready] = call
                ready += 1
    while ready > 0:
        ready -= 1
        left -= 1
        call = work.ready[ready]
        end = work.starts[call] + work.carries[call]
        latest = max(latest, end)
        after = call + 1
        if call < 2 * devices and call % 2 == 0 and work.heads[after] >= 0:
            work.starts[after] = max(work.starts[after], end)
            work.waits[after] -= 1
            if work.waits[after] == 0:
                work.ready[ready] = after
                ready += 1
        op = work.heads[call]
        while op >= 0:
            for i in range(model.user_offsets[op], model.user_offsets[op + 1]):
                user_call = work.call_of[model.users[i]]
                if user_call == call:
                    continue
                work.starts[user_call] = max(work.starts[user_call], end)
                work.waits[user_call] -= 1
                if work.waits[user_call] == 0:
                    work.ready[ready] = user_call
                    ready += 1
            op = work.nexts[op]
    return latest if left == 0 else -float(left)
