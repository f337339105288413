"""Reads and writes published placement instances: graph, machine and costs in one JSON file.

    {"maxSizePerFPGA": bytes, "maxFPGAs": k, "maxCPUs": l,
     "nodes": [{"id", "name", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode",
                "colorClass", "size"}, ...],
     "edges": [{"sourceId", "destId", "cost"}, ...]}

Latencies and costs are milliseconds; `cost` moves the source's whole output between an accelerator
and host memory, and is paid once per (source, device). `size` is bytes on an accelerator.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, sections 3 and 4.

An instance becomes ordinary records. Every accelerator and every CPU is linked to a host that runs
nothing; links of CPUs cost nothing. A node's `size` becomes a parameter that the node alone reads.
Its output occupies no memory, and `Costs.sent_bytes` says what moving it costs. Nodes of one colour
share a colocation id.
"""

import heapq
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.costs import Costs
from dovetail.errors import CycleError, ExportError, FileFormatError
from dovetail.graph import HOST, Graph, Phase, colocate
from dovetail.machine import Device, Link, Machine
from dovetail.runtime.files import read_json, write_atomically
from dovetail.runtime.formats import first_complaint
from dovetail.units import UNLIMITED_BYTES

MILLISECOND = 1e-3
LINK_BYTES_PER_SECOND = 1e9
"""The bandwidth of an accelerator's links. Any figure would do, because the bytes to send are
derived from it."""
FREE_BYTES_PER_SECOND = 1e300
"""The bandwidth of a CPU's links. Transfers over them cost nothing, since host memory is the CPU's
own."""
MOST_DEVICES = 1024
"""A file may name at most this many devices of a kind; with more it is refused."""


@dataclass(frozen=True, eq=False)
class Instance:
    """The records of a published file. `name` is the file's, without folder and ending."""

    name: str
    graph: Graph
    machine: Machine
    costs: Costs


# --- The file's fields, and errors that name the node ---
#
# The fields have the names of the published format.


COST_TOLERANCE_MS = 1e-6
"""The costs on the edges of one source may differ by this much, as in the authors' own programs."""
MOST_MILLISECONDS = 1e15
"""A latency or a cost may be at most this, which is 30,000 years, so that sums stay finite."""
_IGNORING = ConfigDict(extra="ignore", allow_inf_nan=False)
_Milliseconds = Field(default=None, ge=0, le=MOST_MILLISECONDS)


class InstanceNode(BaseModel):
    """A node of the file. A latency may be absent if no device could use it."""

    model_config = _IGNORING
    id: int
    name: str = ""
    supportedOnFpga: bool = True
    cpuLatency: float | None = _Milliseconds
    fpgaLatency: float | None = _Milliseconds
    isBackwardNode: bool = False
    colorClass: int | str | None = None
    size: float = Field(default=0.0, ge=0)


class InstanceEdge(BaseModel):
    model_config = _IGNORING
    sourceId: int
    destId: int
    cost: float = Field(default=0.0, ge=0, le=MOST_MILLISECONDS)


class InstanceFile(BaseModel):
    model_config = _IGNORING
    maxSizePerFPGA: float = Field(ge=0)
    maxFPGAs: int = Field(ge=0, le=MOST_DEVICES)
    maxCPUs: int = Field(ge=0, le=MOST_DEVICES)
    nodes: list[InstanceNode]
    edges: list[InstanceEdge]


def parse(raw: Any, path: str) -> InstanceFile:
    """The file's content, checked except for cycles. Raises `FileFormatError`, which names the node
    or edge."""
    try:
        file = InstanceFile.model_validate(raw)
        if file.maxFPGAs + file.maxCPUs < 1:
            raise ValueError("maxFPGAs and maxCPUs are 0: no device")
        if not file.nodes:
            raise ValueError("nodes: there are none")
        double = [i for i, count in Counter(node.id for node in file.nodes).items() if count > 1]
        if double:
            raise ValueError(f"nodes: two have the id {double[0]}")
        total = 0.0
        for node in file.nodes:
            total += node.size
            if total > UNLIMITED_BYTES:
                raise ValueError(f"{label(node)}: sizes up to here are {total:.3g} bytes in all")
            if node.cpuLatency is None and file.maxCPUs:
                raise ValueError(f"{label(node)} has no cpuLatency, and there are CPUs")
            if node.fpgaLatency is None and file.maxFPGAs and node.supportedOnFpga:
                raise ValueError(f"{label(node)} has no fpgaLatency, and may be on an accelerator")
        node_of = {node.id: node for node in file.nodes}
        costs: dict[int, float] = {}
        for edge in file.edges:
            for end in (edge.sourceId, edge.destId):
                if end not in node_of:
                    raise ValueError(f"edges: {edge.sourceId} -> {edge.destId}: no node {end}")
            cost = costs.setdefault(edge.sourceId, edge.cost)
            if abs(cost - edge.cost) > COST_TOLERANCE_MS:
                raise ValueError(
                    f"{label(node_of[edge.sourceId])}: its edges cost {cost} and {edge.cost}; cost "
                    "moves the whole output, and must be the same on all of them"
                )
    except ValidationError as error:
        raise FileFormatError(path, _complaint(error, raw)) from None
    except ValueError as error:
        raise FileFormatError(path, str(error)) from None
    return file


def label(node: InstanceNode) -> str:
    """The name of a node in errors."""
    return f"node {node.id}" + (f" ({node.name})" if node.name else "")


def _complaint(error: ValidationError, raw: Any) -> str:
    """The first complaint of pydantic, after the name of its node or edge if it is about one."""
    text = first_complaint(error)
    where = error.errors(include_url=False)[0]["loc"]
    if len(where) > 2 and isinstance(where[1], int):
        entry = raw[where[0]][where[1]]
        if where[0] == "nodes" and isinstance(entry, dict) and "id" in entry:
            return f"node {entry['id']}: {text}"
        if where[0] == "edges" and isinstance(entry, dict):
            return f"edge {entry.get('sourceId')} -> {entry.get('destId')}: {text}"
    return text


# --- Reading: files to records ---
#
# Nodes may stand in any order; unknown fields are ignored.


def is_instance(raw: object) -> bool:
    """True if a file's JSON looks like a published instance. Our own files have a "format"."""
    return isinstance(raw, dict) and {"nodes", "edges"} <= raw.keys() and "format" not in raw


def load_instance(path: str | Path) -> Instance:
    """Read an instance from a file. Raises `FileFormatError`, or `CycleError` with the nodes of a
    cycle."""
    return instance_from(read_json(path), str(path))


def instance_from(raw: Any, path: str) -> Instance:
    """The instance of a file's JSON; `path` names it in errors."""
    file = parse(raw, path)
    nodes = _order_nodes(file)
    graph, sent_bytes = _graph(file, nodes)
    # The machine is a star around a host that runs nothing. The rates of its devices mean nothing,
    # since the costs are given.
    size = min(int(file.maxSizePerFPGA), UNLIMITED_BYTES)
    kinds = (
        ("acc", "gpu", "accelerator", file.maxFPGAs, size, LINK_BYTES_PER_SECOND),
        ("cpu", "cpu", "cpu", file.maxCPUs, UNLIMITED_BYTES, FREE_BYTES_PER_SECOND),
    )
    devices, links = [], []
    for prefix, kind, model, count, memory_bytes, rate in kinds:
        for name in (f"{prefix}{i}" for i in range(count)):
            rates = {"float32": 1e12}
            devices.append(Device(name, kind, model, memory_bytes, rates, 1e12, 0.0))
            links.append(Link(name, "host", rate, 0.0, f"{name} out"))
            links.append(Link("host", name, rate, 0.0, f"{name} in"))
    devices.append(Device("host", "host", "host", UNLIMITED_BYTES, {}, 0.0, 0.0))
    stem = Path(path).name.removesuffix(".gz").removesuffix(".json")
    machine = Machine(stem, tuple(devices), "host", tuple(links))
    by_kind = {
        "gpu": [n.fpgaLatency if n.supportedOnFpga else np.inf for n in nodes],
        "cpu": [n.cpuLatency for n in nodes],
        "host": [np.inf] * len(nodes),
    }
    seconds = np.zeros((len(graph), len(devices)))
    for d, device in enumerate(devices):
        seconds[~graph.is_source, d] = np.array(by_kind[device.kind], np.float64) * MILLISECOND
    return Instance(stem, graph, machine, Costs(seconds, "given", sent_bytes))


def _order_nodes(file: InstanceFile) -> list[InstanceNode]:
    """The nodes in topological order. Of nodes that wait for none, the one that comes first in the
    file comes first. Raises `CycleError`."""
    position = {node.id: i for i, node in enumerate(file.nodes)}
    after: list[list[int]] = [[] for _ in file.nodes]
    waits = [0] * len(file.nodes)
    for a, b in sorted({(position[e.sourceId], position[e.destId]) for e in file.edges}):
        after[a].append(b)
        waits[b] += 1
    free = [i for i, count in enumerate(waits) if not count]
    order = []
    while free:
        i = heapq.heappop(free)
        order.append(i)
        for b in after[i]:
            waits[b] -= 1
            if not waits[b]:
                heapq.heappush(free, b)
    if len(order) < len(file.nodes):
        # Each node that is left has a predecessor that is left, so going back from one must close a
        # circle.
        left = {i for i, count in enumerate(waits) if count}
        before = {b: a for a in sorted(left) for b in after[a] if b in left}
        path = [min(left)]
        while path[-1] not in path[:-1]:
            path.append(before[path[-1]])
        circle = path[path.index(path[-1]) :][::-1]
        raise CycleError(tuple(file.nodes[i].name or str(file.nodes[i].id) for i in circle))
    return [file.nodes[i] for i in order]


def _graph(file: InstanceFile, nodes: list[InstanceNode]) -> tuple[Graph, NDArray[np.float64]]:
    """(graph, [tensors] bytes that a send moves)."""
    # The costs on a source's edges may differ a little. The first one in the file counts, which
    # the dict takes last.
    costs = {edge.sourceId: edge.cost for edge in reversed(file.edges)}
    inputs: dict[int, dict[int, None]] = {node.id: {} for node in nodes}
    for edge in file.edges:
        inputs[edge.destId][edge.sourceId] = None
    names = _unique_names(nodes)
    colours = {
        c: i for i, c in enumerate(dict.fromkeys(n.colorClass for n in nodes)) if c is not None
    }
    # (name, kind, phase, colour, kinds of device) of each op, in order.
    rows: list[tuple[str, str, int, int, tuple[str, ...]]] = []
    reads: list[list[int]] = []
    tensor_of: dict[int, int] = {}
    sizes: list[int] = []
    sent: list[float] = []
    for node, name in zip(nodes, names, strict=True):
        kinds = () if node.supportedOnFpga else ("cpu",)
        colour = -1 if node.colorClass is None else colours[node.colorClass]
        weights = []
        if node.size > 0:
            rows.append((f"{name}.size", "parameter", Phase.SOURCE, -1, ()))
            reads.append([])
            weights.append(len(sizes))
            sizes.append(round(node.size))
            sent.append(0.0)
        phase = Phase.BACKWARD if node.isBackwardNode else Phase.FORWARD
        rows.append((name, "node", phase, colour, kinds))
        reads.append(weights + [tensor_of[before] for before in inputs[node.id]])
        tensor_of[node.id] = len(sizes)
        sizes.append(0)
        sent.append(costs.get(node.id, 0.0) * MILLISECOND * LINK_BYTES_PER_SECOND)
    tensors = len(sizes)
    graph = Graph(
        names=tuple(row[0] for row in rows),
        kinds=tuple(row[1] for row in rows),
        signatures=tuple(row[0] for row in rows),
        phases=np.array([row[2] for row in rows]),
        colocation=np.array([row[3] for row in rows]),
        device_kinds=tuple(row[4] for row in rows),
        producers=np.arange(tensors, dtype=np.int32),
        shapes=((),) * tensors,
        strides=((),) * tensors,
        dtypes=("uint8",) * tensors,
        tensor_bytes=np.array(sizes),
        storages=np.arange(tensors, dtype=np.int32),
        input_offsets=np.cumsum([0] + [len(of_op) for of_op in reads]),
        input_tensors=np.array([tensor for of_op in reads for tensor in of_op], np.int32),
    )
    return graph, np.array(sent)


def _unique_names(nodes: list[InstanceNode]) -> list[str]:
    """[nodes] a unique name for each node: its own name if no other node has it, else the name with
    the id. If names could then still be mistaken for one another or for a node's size, all have
    their ids added; if even that is not enough, the names are the ids alone."""
    count: dict[str, int] = {}
    for node in nodes:
        count[node.name] = count.get(node.name, 0) + 1
    short = [n.name if n.name and count[n.name] == 1 else f"{n.name}#{n.id}" for n in nodes]
    for names in (short, [f"{n.name}#{n.id}" for n in nodes]):
        taken = {*names, *(f"{name}.size" for name in names)}
        if len(taken) == 2 * len(names):
            return names
    return [f"#{n.id}" for n in nodes]


# --- Writing: records to files ---
#
# An instance that was read from a file loses nothing: every placement has the same value in the
# file that is written. Any other graph and machine lose what the format cannot say:
#
# * Links between accelerators. In the format everything goes through the host.
# * The cost of transfers for CPUs, limits of CPU memory, and the order on links' channels.
# * Memory that is occupied only for a while. A node's size is its parameters, state and buffers,
#   and the part of its output that is kept for backward. A parameter that several nodes read is
#   counted at the first.
# * Moving one output of several. A node's cost is that of all its outputs that are read.
# * The kinds of edges and phases. Control edges become edges, and updates become backward nodes.
#
# Inputs become nodes without latency that only a CPU may run.


FORMAT = "a placement instance"


def save_instance(graph: Graph, machine: Machine, costs: Costs, path: str | Path) -> None:
    """Write an instance, whole or not at all. Raises `UnwritableError`, and `ExportError` for a
    machine or costs that the format cannot express."""
    text = json.dumps(instance_to_dict(graph, machine, costs), allow_nan=False)
    write_atomically(path, text)


def instance_to_dict(graph: Graph, machine: Machine, costs: Costs) -> dict[str, Any]:
    """The file's JSON. A node's id is the index of its op. Edges are sorted by source, then target.

    Raises `ExportError` if accelerators, their links, or CPUs are unlike one another, or if an op
    can run on accelerators alone.
    """
    costs.check(graph)
    accelerators = [d for d, device in enumerate(machine.devices) if device.kind == "gpu"]
    cpus = [d for d, device in enumerate(machine.devices) if device.kind == "cpu"]
    names = machine.device_names
    memories = {machine.devices[d].memory_bytes for d in accelerators}
    if len(memories) > 1:
        where = f"accelerator {names[accelerators[-1]]}"
        raise ExportError(FORMAT, where, "has other memory than the rest")
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
    # [ops] milliseconds of moving all outputs of an op that are read, to or from any accelerator.
    rates = set()
    for device in accelerators:
        for a, b in ((device, machine.host_index), (machine.host_index, device)):
            if machine.link_index[a, b] < 0:
                where = f"accelerator {names[device]}"
                raise ExportError(FORMAT, where, "has no link with the host")
            link = machine.links[machine.link_index[a, b]]
            rates.add((link.latency_seconds, link.bandwidth_bytes_per_second))
    if len(rates) > 1:
        raise ExportError(FORMAT, f"machine {machine.name}", "has unlike links to its accelerators")
    latency, bandwidth = rates.pop() if rates else (0.0, np.inf)
    read = np.zeros(graph.tensors, bool)
    read[graph.input_tensors] = True
    seconds = np.where(read, latency + costs.sends_of(graph) / bandwidth, 0.0)
    move_ms = np.bincount(graph.producers, seconds, minlength=len(graph)) / MILLISECOND
    ends = np.stack([graph.producers[graph.input_tensors], graph.readers], axis=1)
    ends = np.unique(np.concatenate([ends, graph.control]), axis=0)
    ends = ends[np.isin(ends[:, 0], kept)]
    return {
        "maxSizePerFPGA": memories.pop() if memories else UNLIMITED_BYTES,
        "maxFPGAs": len(accelerators),
        "maxCPUs": len(cpus),
        "nodes": nodes,
        "edges": [
            {"sourceId": a, "destId": b, "cost": float(move_ms[a])} for a, b in ends.tolist()
        ],
    }


def _column(graph: Graph, machine: Machine, costs: Costs, alike: list[int]) -> NDArray[np.float64]:
    """[ops] the seconds of each op on any of the devices `alike`; 0 if there are none. Raises
    `ExportError` if the devices differ."""
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


def _sizes(graph: Graph) -> NDArray[np.int64]:
    """[ops] bytes that stay in memory with each op: sources that live with it or that it reads
    first, and forward outputs of its own that backward reads or that are the step's results."""
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
