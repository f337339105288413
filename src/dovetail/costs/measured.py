"""Measured costs: each distinct op signature timed once per kind of device, and kept.

Devices of one kind (same processor, same number of cores) are timed at the same time, each with
its share of the signatures: that is twice as fast on two devices, and what each sees of the memory
and the caches is what it will see when a plan keeps the others busy.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.costs.cache import CostCache, Measured
from dovetail.costs.records import Costs
from dovetail.costs.worker import Entry, FailedCall, Layout
from dovetail.errors import CostError
from dovetail.frontends import Call, Program, Ref
from dovetail.graph import HOST, Graph
from dovetail.machine import Device, Machine
from dovetail.runtime.processes import Worker, launch, ready

PROTOCOL = 3
"""Part of every cache key: raise it when what is measured changes."""
_BATCH_OPS = 64
_BATCH_BYTES = 2**28

Progress = Callable[[float], None]


def device_key(device: Device, machine: Machine) -> str:
    """Everything that a measurement on this device depends on."""
    peers = sum(_kind(other) == _kind(device) for other in machine.devices)
    return (
        f"{device.model} | {len(device.cores)} cores | {peers} at once | torch {torch.__version__} "
        f"| protocol {PROTOCOL}"
    )


def measured_costs(
    graph: Graph,
    program: Program | None,
    machine: Machine,
    cache: CostCache,
    *,
    progress: Progress = lambda _fraction: None,
) -> Costs:
    """[ops, devices] measured seconds; what the cache holds is not measured again.

    program   None (a graph from a file) works only if the cache holds every signature;
              `CostError` names the first op it lacks.
    """
    seconds = np.zeros((len(graph), len(machine.devices)))
    ops = np.flatnonzero(~graph.is_source)
    first: dict[str, int] = {}
    for op in ops.tolist():
        first.setdefault(graph.signatures[op], op)
    for kind, devices in _kinds(machine).items():
        key = device_key(devices[0], machine)
        known = cache.costs(key, first)
        missing = [op for signature, op in first.items() if signature not in known]
        if missing and program is None:
            raise CostError(
                graph.names[missing[0]],
                "it was never measured here, and a saved graph holds no calls to measure; "
                "name the model instead of its graph",
            )
        if missing and program is not None:
            known |= _measure(graph, program, missing, devices, cache, key, progress)
        column = np.array([known[graph.signatures[op]].seconds for op in ops.tolist()])
        for d, device in enumerate(machine.devices):
            if _kind(device) == kind:
                seconds[ops, d] = column
                seconds[_refused(graph, device), d] = np.inf
    return Costs(seconds, "measured")


def _kind(device: Device) -> tuple[str, int]:
    return device.model, len(device.cores)


def _kinds(machine: Machine) -> dict[tuple[str, int], list[Device]]:
    kinds = defaultdict(list)
    for device in machine.devices:
        kinds[_kind(device)].append(device)
    return kinds


def _refused(graph: Graph, device: Device) -> NDArray[np.bool_]:
    return np.array([bool(kinds) and device.kind not in kinds for kinds in graph.device_kinds])


def _measure(
    graph: Graph,
    program: Program,
    ops: list[int],
    devices: list[Device],
    cache: CostCache,
    key: str,
    progress: Progress,
) -> dict[str, Measured]:
    """Time these ops, handing each worker the next batch as it comes free; save as we go."""
    found: dict[str, Measured] = {}
    batches = _batches(graph, ops, len(devices))
    todo = list(reversed(batches))
    pace = (cache.probe(_pace_key(key)) or {"seconds": math.inf})["seconds"]
    with ExitStack() as stack:
        busy: dict[Worker, list[int]] = {}
        workers = [stack.enter_context(start_worker(d)) for d in devices[: len(batches)]]
        for worker in workers:
            worker.receive()
            busy |= _hand(worker, todo, graph, program, pace)
        while busy:
            for worker in ready(busy):
                batch = busy.pop(worker)
                reply = worker.receive()
                if isinstance(reply, FailedCall):
                    name = graph.names[batch[reply.index]]
                    raise CostError(name, f"its call failed:\n{reply.traceback}")
                measured = {
                    graph.signatures[op]: Measured(timing.median_seconds, timing.spread)
                    for op, timing in zip(batch, reply.timings, strict=True)
                }
                pace = min(pace, reply.pace_seconds)
                cache.add_costs(key, measured)
                cache.add_probe(_pace_key(key), {"seconds": pace})
                found |= measured
                progress(len(found) / len(ops))
                busy |= _hand(worker, todo, graph, program, pace)
    return found


def start_worker(device: Device) -> Worker:
    """A worker for the device, told to set up; its reply is still to come."""
    threads = len(device.cores)
    entry = "dovetail.costs.worker:serve"
    worker = launch(entry, cores=device.cores, threads=threads, name=device.name)
    worker.send(("set up", threads))
    return worker


def _batches(graph: Graph, ops: list[int], workers: int) -> list[list[int]]:
    """Ops in graph order, cut where a batch grows too long or its inputs too large."""
    most = max(1, min(_BATCH_OPS, -(-len(ops) // workers)))
    batches: list[list[int]] = [[]]
    held = 0
    for op in ops:
        size = int(graph.tensor_bytes[graph.inputs_of(op)].sum())
        if len(batches[-1]) == most or (batches[-1] and held + size > _BATCH_BYTES):
            batches.append([])
            held = 0
        batches[-1].append(op)
        held += size
    return batches


def _pace_key(key: str) -> str:
    return f"{key} | pace"


def _hand(
    worker: Worker, todo: list[list[int]], graph: Graph, program: Program, pace: float
) -> dict[Worker, list[int]]:
    """Give the worker its next batch; {worker: batch}, or nothing when all are given out."""
    if not todo:
        return {}
    batch = todo.pop()
    worker.send(("time", [_entry(graph, program, op) for op in batch], pace))
    return {worker: batch}


def _entry(graph: Graph, program: Program, op: int) -> Entry:
    call = program.calls[op]
    assert call is not None, graph.names[op]
    layouts = _layouts(graph, call)
    held = graph.is_source[graph.producers] & (graph.residences[graph.producers] != HOST)
    lasting = set(graph.storages[held].tolist())
    cold = frozenset(t for t in layouts if int(graph.storages[t]) in lasting)
    return Entry(call, layouts, cold)


def _layouts(graph: Graph, call: Call) -> dict[int, Layout]:
    """Layout of every tensor that the call reads."""
    layouts: dict[int, Layout] = {}

    def visit(value: object) -> None:
        if isinstance(value, Ref):
            t = value.tensor
            layouts[t] = (graph.shapes[t], graph.strides[t], graph.dtypes[t])
        elif isinstance(value, tuple | list):
            for element in value:
                visit(element)
        elif isinstance(value, dict):
            for element in value.values():
                visit(element)

    visit(call.args)
    visit(call.kwargs)
    return layouts
