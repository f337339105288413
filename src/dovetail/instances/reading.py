"""Files -> records. Nodes may stand in any order, fields that nobody needs are ignored."""

import heapq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import CycleError
from dovetail.graph import Graph, Phase
from dovetail.instances.format import File, Node, parse
from dovetail.instances.records import (
    FREE_BYTES_PER_SECOND,
    LINK_BYTES_PER_SECOND,
    MILLISECOND,
    Instance,
)
from dovetail.machine import Device, Link, Machine
from dovetail.runtime.reading import read_json
from dovetail.units import UNLIMITED_BYTES


def is_instance(raw: object) -> bool:
    """Does a file's JSON look like a published instance?"""
    return isinstance(raw, dict) and {"nodes", "edges"} <= raw.keys() and "format" not in raw


def load_instance(path: str | Path) -> Instance:
    """Read an instance. Raises `FileFormatError`, or `CycleError` with the nodes of a cycle."""
    return instance_from(read_json(path), str(path))


def instance_from(raw: Any, path: str) -> Instance:
    """The instance of a file's JSON; `path` names it in errors."""
    file = parse(raw, path)
    nodes = _ordered(file)
    graph, sent_bytes = _graph(file, nodes)
    machine = _machine(Path(path).name.removesuffix(".gz").removesuffix(".json"), file)
    costs = Costs(_seconds(graph, machine, nodes), "given", sent_bytes)
    return Instance(machine.name, graph, machine, costs)


def _ordered(file: File) -> list[Node]:
    """Nodes in topological order; of those that are free the first of the file comes first."""
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
        raise CycleError(_cycle(file, after, {i for i, count in enumerate(waits) if count}))
    return [file.nodes[i] for i in order]


def _cycle(file: File, after: list[list[int]], left: set[int]) -> tuple[str, ...]:
    """Every node that is left has one before it that is left; going back must close a circle."""
    before = {b: a for a in sorted(left) for b in after[a] if b in left}
    path = [min(left)]
    while path[-1] not in path[:-1]:
        path.append(before[path[-1]])
    circle = path[path.index(path[-1]) :][::-1]
    return tuple(file.nodes[i].name or str(file.nodes[i].id) for i in circle)


def _graph(file: File, nodes: list[Node]) -> tuple[Graph, NDArray[np.float64]]:
    """The graph, and [tensors] bytes that a send moves."""
    costs = {edge.sourceId: edge.cost for edge in reversed(file.edges)}  # the first one counts
    inputs: dict[int, dict[int, None]] = {node.id: {} for node in nodes}
    for edge in file.edges:
        inputs[edge.destId][edge.sourceId] = None
    names = _unique_names(nodes)
    colours = {
        c: i for i, c in enumerate(dict.fromkeys(n.colorClass for n in nodes)) if c is not None
    }
    rows: list[tuple[str, str, int, int, tuple[str, ...]]] = []  # one an op, in order
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
    ops, tensors = len(rows), len(sizes)
    graph = Graph(
        names=tuple(row[0] for row in rows),
        kinds=tuple(row[1] for row in rows),
        signatures=tuple(row[0] for row in rows),
        modules=("",) * ops,
        phases=np.array([row[2] for row in rows]),
        flops=np.zeros(ops, np.int64),
        accessed_bytes=np.zeros(ops, np.int64),
        colocation=np.array([row[3] for row in rows]),
        gradient_of=np.full(ops, -1),
        device_kinds=tuple(row[4] for row in rows),
        producers=np.arange(tensors, dtype=np.int32),
        shapes=((),) * tensors,
        strides=((),) * tensors,
        dtypes=("uint8",) * tensors,
        tensor_bytes=np.array(sizes),
        storages=np.arange(tensors, dtype=np.int32),
        overwrites=np.zeros(tensors, bool),
        input_offsets=np.cumsum([0] + [len(of_op) for of_op in reads]),
        input_tensors=np.array([tensor for of_op in reads for tensor in of_op], np.int32),
        outputs=np.zeros(0, np.int32),
        control=np.zeros((0, 2), np.int32),
    )
    return graph, np.array(sent)


def _unique_names(nodes: list[Node]) -> list[str]:
    """A node's own name where no other has it, else with its id; only ids where names would still
    be mistaken for one another or for a node's size."""
    count: dict[str, int] = {}
    for node in nodes:
        count[node.name] = count.get(node.name, 0) + 1
    own = [n.name if n.name and count[n.name] == 1 else f"{n.name}#{n.id}" for n in nodes]
    for names in (own, [f"{n.name}#{n.id}" for n in nodes]):
        taken = {*names, *(f"{name}.size" for name in names)}
        if len(taken) == 2 * len(names):
            return names
    return [f"#{n.id}" for n in nodes]


def _machine(name: str, file: File) -> Machine:
    size = min(int(file.maxSizePerFPGA), UNLIMITED_BYTES)
    devices = [_device(f"acc{i}", "gpu", size) for i in range(file.maxFPGAs)]
    devices += [_device(f"cpu{i}", "cpu", UNLIMITED_BYTES) for i in range(file.maxCPUs)]
    links = []
    for device in devices:
        rate = LINK_BYTES_PER_SECOND if device.kind == "gpu" else FREE_BYTES_PER_SECOND
        links.append(Link(device.name, "host", rate, 0.0, f"{device.name} out"))
        links.append(Link("host", device.name, rate, 0.0, f"{device.name} in"))
    host = Device("host", "host", "host", UNLIMITED_BYTES, {}, 0.0, 0.0)
    return Machine(name, (*devices, host), "host", tuple(links))


def _device(name: str, kind: str, memory_bytes: int) -> Device:
    """A device whose rates stand for nothing: the costs are given."""
    model = "accelerator" if kind == "gpu" else "cpu"
    return Device(name, kind, model, memory_bytes, {"float32": 1e12}, 1e12, 0.0)


def _seconds(graph: Graph, machine: Machine, nodes: list[Node]) -> NDArray[np.float64]:
    """[ops, devices]"""
    by_kind = {
        "gpu": [n.fpgaLatency if n.supportedOnFpga else np.inf for n in nodes],
        "cpu": [n.cpuLatency for n in nodes],
        "host": [np.inf] * len(nodes),
    }
    seconds = np.zeros((len(graph), len(machine.devices)))
    for d, device in enumerate(machine.devices):
        seconds[~graph.is_source, d] = np.array(by_kind[device.kind], np.float64) * MILLISECOND
    return seconds
