"""Lays the graph out as a picture: nodes in columns and lanes.

Columns are layers: a forward node stands one column to the right of the rightmost node that it
reads. A backward or update node stands in the column of the forward node that it belongs to. So the
forward pass of a training step reads to the right, and the backward pass below it to the left:

    cpu0 forward    [embed]──►[lstm.0]                       lanes: one per device and phase
    cpu0 backward   [embed]◄──[lstm.0]
    cpu1 forward                      └►[softmax]
    cpu1 backward              ▲────────[softmax]

A graph of more than `MOST_OPS` ops is drawn by module alone (`folding.py`, `assets/folds.js`).
A node of several ops can read from a node whose first op comes later. Such an edge is drawn, but
columns are computed without it.
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
    """The part of a `Plan` that a picture needs: placement [ops] and compute_seconds
    [ops, devices]."""

    @property
    def machine(self) -> Machine: ...
    @property
    def placement(self) -> Int32: ...
    @property
    def compute_seconds(self) -> NDArray[np.float64]: ...


@dataclass(frozen=True, eq=False)
class GraphView:
    """One picture of the graph. Its nodes are in the order of their first op.

    labels, details    [nodes] the node's name, and a text with its kind or number of ops
    devices, phases, ops, flops, seconds   [nodes]; `ops` is the number of ops
    columns, rows      [nodes] the node's place; rows count through all lanes
    edges              [edges, 2] nodes (from, to); edge_bytes [edges] is what each carries
    lanes              (label, device, first row, number of rows), from the top
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
    """The picture of the graph op by op; none if it has more than `MOST_OPS` ops. `folding` draws
    it by module."""
    real = np.flatnonzero(~graph.is_source)
    if len(real) > MOST_OPS:
        return []
    of_op = np.full(len(graph), -1, dtype=np.int32)
    of_op[real] = np.arange(len(real))
    return [view("ops", graph, plan, of_op, graph.names)]


def view(
    name: str, graph: Graph, plan: PricedPlacement, of_op: Int32, labels: tuple[str, ...]
) -> GraphView:
    """The picture of a graph whose ops are joined to nodes.

    of_op    [ops] the node of each op, numbered by first op; -1: it is left out. The ops of a node
             must have one phase and one device
    labels   [ops] the label of a node is that of its first op
    """
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
    """(edges [edges, 2], bytes [edges]): the distinct edges between nodes, in ascending order, and
    the bytes that each carries."""
    producers = of_op[graph.producers[graph.input_tensors]]
    readers = of_op[graph.readers]
    between = (producers >= 0) & (readers >= 0) & (producers != readers)
    pairs = np.stack([producers[between], readers[between]], axis=1)
    edges, inverse = np.unique(pairs, axis=0, return_inverse=True)
    sizes = graph.tensor_bytes[graph.input_tensors][between]
    carried = np.bincount(inverse.ravel(), weights=sizes, minlength=len(edges))
    return edges.astype(np.int32).reshape(-1, 2), carried.astype(np.int64)


def _columns(graph: Graph, of_op: Int32, edges: Int32, phases: Int32) -> Int32:
    """[nodes] the layer of each forward node; for other nodes the column of the forward node that
    they belong to."""
    forward = (phases == Phase.FORWARD).tolist()
    columns = [0] * len(phases)
    first_reader = [len(graph)] * len(phases)
    # [nodes] False: no edge and no anchor says where the node belongs.
    settled = np.zeros(len(phases), dtype=bool)
    # Edges are sorted by their first node, so a node's column is final before others read it.
    for a, b in edges.tolist():
        if a < b and forward[a] and forward[b]:
            columns[b] = max(columns[b], columns[a] + 1)
            settled[a] = settled[b] = True
    for a, b in edges.tolist():
        if a < b and forward[a] and forward[b]:
            first_reader[a] = min(first_reader[a], columns[b])
    for node, reader in enumerate(first_reader):
        # A node that waits for nothing stands beside its first reader, not far left of it.
        if columns[node] == 0 and reader < len(graph):
            columns[node] = reader - 1
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
    """[nodes] the columns, in which a node that is not settled stands in the column of the first
    settled node of its module. Changes `columns` in place."""
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
    """[ops] the anchor of each op, which is the forward op that it belongs to; -1: none.

    A forward op is its own anchor. The anchor of a gradient is the op whose gradient it is. The
    anchor of a parameter is its first forward reader. Any other op has the anchor of one of its
    inputs: the first anchor in the op's own module, else the first anchor of all, where parameters
    come before other inputs.
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
    """(rows [nodes], lanes). Nodes of one column and lane stand below each other, ordered by the
    mean row of the nodes that they read, then by number."""
    # [nodes] each node's row within its lane.
    inside = np.zeros(len(columns), dtype=np.float64)
    readings: dict[int, list[int]] = defaultdict(list)
    for a, b in edges.tolist():
        readings[b].append(a)
    cells: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for node in range(len(columns)):
        cells[int(columns[node]), int(devices[node]), int(phases[node])].append(node)
    # Columns are handled from left to right, so the nodes that a node reads mostly have their rows.
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
