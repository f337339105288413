"""The graph as a picture: nodes in columns and lanes.

Columns are layers: a forward node stands one column right of the last node it reads. A backward
or update node stands in the column of the forward node it belongs to, so that a training step
reads forwards on top and backwards below:

    cpu0 forward    [embed]──►[lstm.0]                       lanes: one per device and phase
    cpu0 backward   [embed]◄──[lstm.0]
    cpu1 forward                      └►[softmax]
    cpu1 backward              ▲────────[softmax]

A graph of more than `MOST_OPS` ops is drawn by module alone (`folding.py`, `assets/folds.js`).
Edges that go against the order of first ops are drawn, but do not count for columns.
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.records import Phase
from dovetail.machine import Machine

MOST_OPS = 1500
Int32 = NDArray[np.int32]


class PricedPlacement(Protocol):
    """What of a `Plan` a picture needs: placement [ops], compute_seconds [ops, devices]."""

    @property
    def machine(self) -> Machine: ...
    @property
    def placement(self) -> Int32: ...
    @property
    def compute_seconds(self) -> NDArray[np.float64]: ...


@dataclass(frozen=True, eq=False)
class GraphView:
    """One picture. Nodes in the order of their first op.

    labels, details    what a node is called, and what else there is to say
    devices, phases, ops (how many), flops, seconds   [nodes]
    columns, rows      [nodes] place; rows count through all lanes
    edges              [edges, 2] from, to; edge_bytes [edges]
    lanes              (label, device, first row, rows) from the top
    """

    name: str
    labels: tuple[str, ...]
    details: tuple[str, ...]
    devices: Int32
    phases: Int32
    ops: Int32
    flops: NDArray[np.int64]
    seconds: NDArray[np.float64]
    columns: Int32
    rows: Int32
    edges: Int32
    edge_bytes: NDArray[np.int64]
    lanes: tuple[tuple[str, int, int, int], ...]


def draw(graph: Graph, plan: PricedPlacement) -> list[GraphView]:
    """The graph op by op, where it is small enough; `folding` has it by module."""
    real = np.flatnonzero(~graph.is_source)
    if len(real) > MOST_OPS:
        return []
    of_op = np.full(len(graph), -1, dtype=np.int32)
    of_op[real] = np.arange(len(real))
    return [view("ops", graph, plan, of_op, graph.names)]


def view(
    name: str, graph: Graph, plan: PricedPlacement, of_op: Int32, labels: tuple[str, ...]
) -> GraphView:
    """The picture of the nodes `of_op` [ops], numbered by first op, -1 for what is left out; ops of
    one node have one phase and device. labels [ops]: of a node that of its first op."""
    real = np.flatnonzero(of_op >= 0)
    nodes = of_op[real]
    count = int(nodes.max(initial=-1)) + 1
    first = np.full(count, len(graph), dtype=np.int64)
    np.minimum.at(first, nodes, real)
    sizes = np.bincount(nodes, minlength=count).astype(np.int32)
    spent = plan.compute_seconds[real, plan.placement[real]]
    edges, edge_bytes = edges_between(graph, of_op)
    phases = graph.phases[first].astype(np.int32)
    devices = plan.placement[first].astype(np.int32)
    columns = _columns(graph, of_op, edges, phases)
    rows, lanes = _rows(plan, columns, devices, phases, edges)
    return GraphView(
        name=name,
        labels=tuple(labels[op] for op in first.tolist()),
        details=_details(graph, first, sizes),
        devices=devices,
        phases=phases,
        ops=sizes,
        flops=np.bincount(nodes, weights=graph.flops[real], minlength=count).astype(np.int64),
        seconds=np.bincount(nodes, weights=spent, minlength=count).astype(np.float64),
        columns=columns,
        rows=rows,
        edges=edges,
        edge_bytes=edge_bytes,
        lanes=lanes,
    )


def _details(graph: Graph, first: NDArray[np.int64], sizes: Int32) -> tuple[str, ...]:
    return tuple(
        f"{size} ops" if size > 1 else f"{graph.names[op]}: {graph.kinds[op]}"
        for op, size in zip(first.tolist(), sizes.tolist(), strict=True)
    )


def edges_between(graph: Graph, of_op: Int32) -> tuple[Int32, NDArray[np.int64]]:
    """Distinct edges between nodes, and the bytes of the tensors they carry."""
    producers = of_op[graph.producers[graph.input_tensors]]
    readers = of_op[graph.readers]
    between = (producers >= 0) & (readers >= 0) & (producers != readers)
    pairs = np.stack([producers[between], readers[between]], axis=1)
    edges, inverse = np.unique(pairs, axis=0, return_inverse=True)
    sizes = graph.tensor_bytes[graph.input_tensors][between]
    carried = np.bincount(inverse.ravel(), weights=sizes, minlength=len(edges))
    return edges.astype(np.int32).reshape(-1, 2), carried.astype(np.int64)


def _columns(graph: Graph, of_op: Int32, edges: Int32, phases: Int32) -> Int32:
    """[nodes] layer of each forward node; of the others that of the forward node they belong to."""
    forward = (phases == Phase.FORWARD).tolist()
    columns = [0] * len(phases)
    first_reader = [len(graph)] * len(phases)
    settled = np.zeros(len(phases), dtype=bool)  # False: nothing says where it belongs
    for a, b in edges.tolist():  # sorted by a: whatever precedes a has been settled
        if a < b and forward[a] and forward[b]:
            columns[b] = max(columns[b], columns[a] + 1)
            settled[a] = settled[b] = True
    for a, b in edges.tolist():
        if a < b and forward[a] and forward[b]:
            first_reader[a] = min(first_reader[a], columns[b])
    for node, reader in enumerate(first_reader):
        if columns[node] == 0 and reader < len(graph):
            columns[node] = reader - 1  # what waits for nothing stands beside what reads it
    anchors = _anchors(graph)
    anchored: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero((of_op >= 0) & (anchors >= 0)).tolist():
        if not forward[of_op[op]] and settled[of_op[anchors[op]]]:
            anchored[int(of_op[op])].append(columns[of_op[anchors[op]]])
    for node, places in anchored.items():
        columns[node] = round(median(places))
        settled[node] = True
    return _beside_their_module(graph, of_op, np.array(columns, dtype=np.int32), settled)


def _beside_their_module(
    graph: Graph, of_op: Int32, columns: Int32, settled: NDArray[np.bool_]
) -> Int32:
    """Columns where a node that no edge places stands with the first other one of its module."""
    places: dict[str, int] = {}
    real = np.flatnonzero(of_op >= 0).tolist()
    for op in real:
        if settled[of_op[op]]:
            places.setdefault(graph.modules[op], int(columns[of_op[op]]))
    for op in real:
        if not settled[of_op[op]]:
            columns[of_op[op]] = places.get(graph.modules[op], columns[of_op[op]])
    return columns


def _anchors(graph: Graph) -> Int32:
    """[ops] the forward op that an op belongs to; -1: none.

    Itself, or the op whose gradient it computes; of others the anchor of an input: of the first
    in the same module, else of a parameter (its first forward reader), else of the first.
    """
    phases = graph.phases.tolist()
    anchors: list[int] = np.where(
        graph.phases == Phase.FORWARD, np.arange(len(graph)), graph.gradient_of
    ).tolist()
    for op in np.flatnonzero(graph.is_source).tolist():
        readers = [r for t in graph.outputs_of(op) for r in graph.consumers_of(t).tolist()]
        if graph.kinds[op] == "parameter":
            anchors[op] = next((r for r in readers if phases[r] == int(Phase.FORWARD)), -1)
    makers = graph.producers[graph.input_tensors].tolist()
    offsets = graph.input_offsets.tolist()
    for op in np.flatnonzero(~graph.is_source).tolist():
        if anchors[op] < 0:
            inputs = makers[offsets[op] : offsets[op + 1]]
            inputs.sort(key=lambda maker: graph.kinds[maker] != "parameter")
            reached = [anchors[maker] for maker in inputs if anchors[maker] >= 0]
            in_module = (a for a in reached if graph.modules[a] == graph.modules[op])
            anchors[op] = next(in_module, reached[0] if reached else -1)
    return np.array(anchors, dtype=np.int32)


def _rows(
    plan: PricedPlacement, columns: Int32, devices: Int32, phases: Int32, edges: Int32
) -> tuple[Int32, tuple[tuple[str, int, int, int], ...]]:
    """Nodes of one column and lane stand below each other, in the order of what they read."""
    inside = np.zeros(len(columns), dtype=np.float64)  # row within its lane
    readings: dict[int, list[int]] = defaultdict(list)
    for a, b in edges.tolist():
        readings[b].append(a)
    cells: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for node in range(len(columns)):
        cells[int(columns[node]), int(devices[node]), int(phases[node])].append(node)
    for cell in sorted(cells):
        weights = {
            n: float(np.mean([inside[a] for a in readings[n]])) if readings[n] else 0.0
            for n in cells[cell]
        }
        for row, node in enumerate(sorted(cells[cell], key=lambda n: (weights[n], n))):
            inside[node] = row
    lanes: list[tuple[str, int, int, int]] = []
    rows = np.zeros(len(columns), dtype=np.int32)
    top = 0
    for device, name in enumerate(plan.machine.device_names):
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
            of = (devices == device) & (phases == phase)
            if of.any():
                rows[of] = top + inside[of].astype(np.int32)
                height = int(inside[of].max()) + 1
                lanes.append((f"{name} {phase.name.lower()}", device, top, height))
                top += height
    return rows, tuple(lanes)
