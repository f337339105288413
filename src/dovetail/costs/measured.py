"""Measured costs: each distinct op signature timed once per kind of device, and kept.

Devices of one kind (same processor, same numbers of cores and threads) are timed at the same time,
each with its share of the signatures: that is twice as fast on two devices, and what each sees of
the memory and the caches is what it will see when a plan keeps the others busy. One that has
nothing left to measure repeats what another measures.
"""

import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.costs.cache import CostCache, Measured
from dovetail.costs.records import Costs
from dovetail.costs.worker import Entry, FailedCall, TimedCalls, copies_for
from dovetail.errors import CostError
from dovetail.frontends import Program
from dovetail.frontends.arguments import distinct_refs
from dovetail.graph import HOST, Graph
from dovetail.machine import Device, Machine
from dovetail.runtime.neighbours import disturbs
from dovetail.runtime.processes import Worker, launch, ready

PROTOCOL = 4
"""Part of every cache key: raise it when what is measured changes."""
_BATCH_OPS = 64
_BATCH_BYTES = 2**28
_PATIENCE_SECONDS = 20.0
"""How long a device waits, in all, for its core to be undisturbed."""
_NEIGHBOURS_SECONDS = 5.0
"""How long a device measures batches again, in all, that other programs disturbed: who works for
longer than that works on."""

Progress = Callable[[float], None]


def device_key(device: Device, machine: Machine) -> str:
    """Everything that a measurement on this device depends on."""
    peers = sum(_kind(other) == _kind(device) for other in machine.devices)
    return (
        f"{device.model} | {_threads_of(device)} | {peers} at once | torch {torch.__version__} "
        f"| protocol {PROTOCOL}"
    )


def measured_costs(
    graph: Graph,
    program: Program | None,
    machine: Machine,
    cache: CostCache,
    *,
    progress: Progress = lambda _fraction: None,
    beside: Callable[[float], None] = lambda _cores: None,
) -> Costs:
    """[ops, devices] measured seconds; what the cache holds is not measured again.

    beside    told how many cores other programs used while some ops were measured, where that
              `disturbs`; the cache does not keep what those took
    program   None (a graph from a file) works only if the cache holds every signature;
              `CostError` names the first op it lacks.
    """
    seconds = np.zeros((len(graph), len(machine.devices)))
    ops = np.flatnonzero(~graph.is_source)
    cold = _cold_tensors(graph)
    keys = [_signature_key(graph, cold, op) for op in ops.tolist()]
    first: dict[str, int] = {}
    for key, op in zip(keys, ops.tolist(), strict=True):
        first.setdefault(key, op)
    for kind, devices in _kinds(machine).items():
        device_name = device_key(devices[0], machine)
        known = cache.costs(device_name, first)
        missing = [op for key, op in first.items() if key not in known]
        if missing and program is None:
            raise CostError(
                graph.names[missing[0]],
                "it was never measured here, and a saved graph holds no calls to measure; "
                "name the model instead of its graph",
            )
        if missing and program is not None:
            progress(1 - len(missing) / len(first))  # starting the workers takes a while
            entries = {op: _entry(graph, program, cold, op) for op in missing}
            for found, others_cores in _measure(graph, entries, devices, cache, beside):
                by_key = {_signature_key(graph, cold, op): cost for op, cost in found.items()}
                if not disturbs(others_cores):
                    cache.add_costs(device_name, by_key)
                known |= by_key
                progress(1 - sum(key not in known for key in first) / len(first))
        column = np.array([known[key].seconds for key in keys])
        for d, device in enumerate(machine.devices):
            if _kind(device) == kind:
                seconds[ops, d] = column
                seconds[~graph.runs_on(device.kind), d] = np.inf
    return Costs(seconds, "measured")


def _threads_of(device: Device) -> str:
    cores, threads = len(device.cores), device.op_threads
    return f"{cores} cores" if threads == cores else f"{threads} threads on {cores} cores"


def _kind(device: Device) -> tuple[str, int, int]:
    return device.model, len(device.cores), device.op_threads


def _kinds(machine: Machine) -> dict[tuple[str, int, int], list[Device]]:
    kinds = defaultdict(list)
    for device in machine.devices:
        kinds[_kind(device)].append(device)
    return kinds


def _measure(
    graph: Graph,
    entries: dict[int, Entry],
    devices: list[Device],
    cache: CostCache,
    beside: Callable[[float], None],
) -> Iterator[tuple[dict[int, Measured], float]]:
    """Time the entries of these ops, handing each worker the next batch as it comes free:
    (op -> what was measured, cores that other programs used meanwhile), batch by batch.

    A batch that others disturbed is measured again later, while there is patience for that.
    """
    todo = list(reversed(_batches(graph, entries, len(devices))))
    core = _core_key(devices[0])
    best_seconds = cache.pace(core)
    with ExitStack() as stack:
        idle = [stack.enter_context(start_worker(device)) for device in devices]
        patience = dict.fromkeys(idle, _PATIENCE_SECONDS)
        again_seconds = dict.fromkeys(idle, _NEIGHBOURS_SECONDS)
        for worker in idle:
            worker.receive()
        working: dict[Worker, list[int]] = {}
        repeating: set[Worker] = set()
        while todo or working:
            for worker in idle:
                if todo:
                    batch = working[worker] = todo.pop()
                    allowed = patience[worker]
                else:
                    batch, allowed = next(iter(working.values())), 0.0
                    repeating.add(worker)
                worker.send(("time", [entries[op] for op in batch], best_seconds, allowed))
            idle = ready([*working, *repeating])
            for worker in idle:
                reply: TimedCalls | FailedCall = worker.receive()
                if worker in repeating:
                    repeating.remove(worker)
                    continue
                batch = working.pop(worker)
                if isinstance(reply, FailedCall):
                    name = graph.names[batch[reply.index]]
                    raise CostError(name, f"its call failed:\n{reply.traceback}")
                patience[worker] -= reply.waited_seconds
                best_seconds = min(best_seconds, reply.pace_seconds)
                cache.add_pace(core, best_seconds)
                if disturbs(reply.others_cores):
                    beside(reply.others_cores)
                    if again_seconds[worker] > 0:
                        again_seconds[worker] -= reply.seconds
                        todo.insert(0, batch)
                        continue
                measured = {
                    op: Measured(timing.median_seconds, timing.spread)
                    for op, timing in zip(batch, reply.timings, strict=True)
                }
                yield measured, reply.others_cores
        for worker in repeating:  # nobody waits for what these measure
            worker.close(kill=True)


def start_worker(device: Device) -> Worker:
    """A worker for the device, told to set up; its reply is still to come."""
    threads = device.op_threads
    entry = "dovetail.costs.worker:serve"
    worker = launch(entry, cores=device.cores, threads=threads, name=device.name)
    worker.send(("set up", threads))
    return worker


def _batches(graph: Graph, entries: dict[int, Entry], workers: int) -> list[list[int]]:
    """Ops in graph order, cut where a batch grows too long or its tensors too large."""
    most = max(1, min(_BATCH_OPS, -(-len(entries) // workers)))
    batches: list[list[int]] = [[]]
    held = 0
    for op, entry in entries.items():
        size = _held_bytes(graph, op, entry)
        if len(batches[-1]) == most or (batches[-1] and held + size > _BATCH_BYTES):
            batches.append([])
            held = 0
        batches[-1].append(op)
        held += size
    return batches


def _held_bytes(graph: Graph, op: int, entry: Entry) -> int:
    """Of all tensors with which the op is timed: its inputs, their copies, its outputs."""
    inputs = int(graph.tensor_bytes[graph.inputs_of(op)].sum())
    cold = int(graph.tensor_bytes[sorted(entry.cold)].sum())
    outputs = int(graph.tensor_bytes[list(graph.outputs_of(op))].sum())
    return inputs + copies_for(cold) * cold + outputs


def _core_key(device: Device) -> str:
    """What the pace of an undisturbed core depends on: it runs a piece of Python."""
    return f"{device.model} | {sys.implementation.name} {platform.python_version()}"


def _cold_tensors(graph: Graph) -> NDArray[np.bool_]:
    """[tensors] those held from step to step: a step uses much else before it reads them again."""
    held = graph.is_source[graph.producers] & (graph.residences[graph.producers] != HOST)
    return np.isin(graph.storages, graph.storages[held])


def _signature_key(graph: Graph, cold: NDArray[np.bool_], op: int) -> str:
    """The op's signature, and which of its inputs are cold: both change what is measured."""
    places = " ".join(map(str, np.flatnonzero(cold[graph.inputs_of(op)]).tolist()))
    return graph.signatures[op] + (f" | cold {places}" if places else "")


def _entry(graph: Graph, program: Program, cold: NDArray[np.bool_], op: int) -> Entry:
    call = program.calls[op]
    assert call is not None, graph.names[op]
    layouts = {
        t: (graph.shapes[t], graph.strides[t], graph.dtypes[t])
        for t in distinct_refs((call.args, call.kwargs))
    }
    return Entry(call, layouts, frozenset(t for t in layouts if cold[t]))
