"""Records -> files of published instances.

Of an imported instance nothing is lost but what it does not hold: every placement has the same
value in the file that is written. Of another graph on another machine this is lost:

* links between accelerators: there everything goes through the host;
* what CPUs pay for transfers, limits of CPU memory, and the order of links' channels;
* memory that is only occupied for a while: a node's size is its parameters, state and buffers, and
  what of its output is kept for backward; what several nodes read is counted at the first;
* one output of several that is moved alone: a node's cost is that of all its outputs that are read;
* control edges are edges like others, and updates are backward nodes.

Inputs become nodes without latency that only a CPU may run.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import ExportError
from dovetail.graph import HOST, Graph, Phase, colocate
from dovetail.instances.records import MILLISECOND
from dovetail.machine import Machine
from dovetail.runtime.atomic import write_atomically
from dovetail.units import UNLIMITED_BYTES

FORMAT = "a placement instance"


def save_instance(graph: Graph, machine: Machine, costs: Costs, path: str | Path) -> None:
    """Write an instance, whole or not at all. Raises `UnwritableError`, and `ExportError` for a
    machine or costs that the format cannot express."""
    text = json.dumps(instance_to_dict(graph, machine, costs), allow_nan=False)
    write_atomically(path, text)


def instance_to_dict(graph: Graph, machine: Machine, costs: Costs) -> dict[str, Any]:
    """The file's JSON. Nodes have the index of their op as id, edges stand by source, then target.

    Raises `ExportError`, where accelerators or CPUs are unlike one another, or an op can run on
    accelerators alone.
    """
    costs.check(graph)
    accelerators = [d for d, one in enumerate(machine.devices) if one.kind == "gpu"]
    cpus = [d for d, one in enumerate(machine.devices) if one.kind == "cpu"]
    memory = _memory(machine, accelerators)
    to_ms = 1 / MILLISECOND
    on_accelerator = _column(graph, machine, costs, accelerators) * to_ms
    on_cpu = _column(graph, machine, costs, cpus) * to_ms
    if cpus and (~np.isfinite(on_cpu) & ~graph.is_source).any():
        op = int(np.flatnonzero(~np.isfinite(on_cpu) & ~graph.is_source)[0])
        raise ExportError(FORMAT, f"op {graph.names[op]!r}", "cannot run on a CPU; any node can")
    inputs = graph.is_source & (graph.residences == HOST) & bool(cpus)
    kept = np.flatnonzero(~graph.is_source | inputs)
    sizes, groups = _sizes(graph), colocate(graph)
    alone = np.bincount(groups.of_op[~graph.is_source], minlength=groups.count) < 2
    nodes = []
    for op in kept.tolist():
        supported = bool(np.isfinite(on_accelerator[op])) and not inputs[op]
        node: dict[str, Any] = {
            "id": op,
            "name": graph.names[op],
            "supportedOnFpga": supported,
            "cpuLatency": float(on_cpu[op]) if cpus else 0.0,
            "fpgaLatency": float(on_accelerator[op]) if supported and accelerators else 0.0,
            "isBackwardNode": bool(graph.phases[op] >= Phase.BACKWARD),
            "size": 0 if inputs[op] else int(sizes[op]),
        }
        if not inputs[op] and not alone[groups.of_op[op]]:
            node["colorClass"] = int(groups.of_op[op])
        nodes.append(node)
    return {
        "maxSizePerFPGA": memory,
        "maxFPGAs": len(accelerators),
        "maxCPUs": len(cpus),
        "nodes": nodes,
        "edges": _edges(graph, _move_ms(graph, machine, costs, accelerators), kept),
    }


def _memory(machine: Machine, accelerators: list[int]) -> int:
    sizes = {machine.devices[d].memory_bytes for d in accelerators}
    if len(sizes) > 1:
        name = machine.device_names[accelerators[-1]]
        raise ExportError(FORMAT, f"accelerator {name}", "has other memory than the rest")
    return sizes.pop() if sizes else UNLIMITED_BYTES


def _column(graph: Graph, machine: Machine, costs: Costs, alike: list[int]) -> NDArray[np.float64]:
    """[ops] seconds on any of the devices, where they agree; 0 where there is no device."""
    if not alike:
        return np.zeros(len(graph))
    seconds = np.where(graph.is_source[:, None], 0.0, costs.compute_seconds[:, alike])
    for kind in {machine.devices[d].kind for d in alike}:
        seconds[~graph.runs_on(kind) & ~graph.is_source] = np.inf
    for i, device in enumerate(alike):
        unlike = np.flatnonzero(seconds[:, i] != seconds[:, 0])
        if len(unlike):
            names = machine.device_names
            raise ExportError(
                FORMAT,
                f"op {graph.names[int(unlike[0])]!r}",
                f"takes other time on {names[alike[0]]} than on {names[device]}; all "
                "accelerators must be alike, and all CPUs",
            )
    return np.ascontiguousarray(seconds[:, 0])


def _move_ms(
    graph: Graph, machine: Machine, costs: Costs, accelerators: list[int]
) -> NDArray[np.float64]:
    """[ops] of moving all that is read of an op's output, to or from any accelerator."""
    rates = set()
    for device in accelerators:
        for a, b in ((device, machine.host_index), (machine.host_index, device)):
            if machine.link_index[a, b] < 0:
                name = machine.device_names[device]
                raise ExportError(FORMAT, f"accelerator {name}", "has no link with the host")
            link = machine.links[machine.link_index[a, b]]
            rates.add((link.latency_seconds, link.bandwidth_bytes_per_second))
    if len(rates) > 1:
        raise ExportError(FORMAT, f"machine {machine.name}", "has unlike links to its accelerators")
    latency, bandwidth = rates.pop() if rates else (0.0, np.inf)
    read = np.zeros(graph.tensors, bool)
    read[graph.input_tensors] = True
    seconds = np.where(read, latency + costs.sends_of(graph) / bandwidth, 0.0)
    sums = np.bincount(graph.producers, seconds, minlength=len(graph))
    return np.asarray(sums / MILLISECOND, np.float64)


def _sizes(graph: Graph) -> NDArray[np.int64]:
    """[ops] bytes that stay: what lives with an op or is read first by it, what of its output
    backward reads, and what of it is the step's result."""
    sizes = np.zeros(len(graph), np.int64)
    late = graph.phases[graph.readers] >= Phase.BACKWARD
    stays = np.zeros(graph.tensors, bool)
    stays[graph.input_tensors[late]] = True
    stays[graph.outputs] = True
    forward = graph.phases[graph.producers] == Phase.FORWARD
    for tensor in np.flatnonzero((graph.bases < 0) & ~graph.overwrites).tolist():
        op = int(graph.producers[tensor])
        readers = graph.consumers_of(tensor)
        if not graph.is_source[op]:
            sizes[op] += graph.tensor_bytes[tensor] if stays[tensor] and forward[tensor] else 0
        elif graph.residences[op] >= 0:
            sizes[graph.residences[op]] += graph.tensor_bytes[tensor]
        elif graph.residences[op] != HOST and len(readers):
            sizes[readers[0]] += graph.tensor_bytes[tensor]
    return sizes


def _edges(
    graph: Graph, cost_ms: NDArray[np.float64], kept: NDArray[np.integer[Any]]
) -> list[dict[str, Any]]:
    ends = np.stack([graph.producers[graph.input_tensors], graph.readers], axis=1)
    ends = np.unique(np.concatenate([ends, graph.control]), axis=0)
    ends = ends[np.isin(ends[:, 0], kept)]
    return [{"sourceId": a, "destId": b, "cost": float(cost_ms[a])} for a, b in ends.tolist()]
