"""Exports a plan for Google's model-explorer: its graph, and node data to lay over it.

    model-explorer view/graph.json       then "Upload node data": view/device.json and the others

One JSON document a file, and one file a quantity, as model-explorer reads them:

    graph.json       the graph: a node an op, in the namespace of its module (layers/0/attn), so
                     that it folds by module; sends between devices are edge overlays
    device.json      where each op runs, in the colour the plan's page has for that device
    seconds.json     predicted seconds of each op there
    bytes.json       bytes of what it makes, and of a parameter or buffer its own
    transfers.json   bytes that each op's outputs send to other devices, of ops that send

Groups show sums and distributions of what is within them. Node data is found by node id, so it fits
this graph and no other: other exporters name nodes their own way.

Formats: `graph_builder.py` (GraphCollection, EdgeOverlaysData) and `node_data_builder.py`
(ModelNodeData, GraphNodeData, NodeDataResult, GradientItem) of
https://github.com/google-ai-edge/model-explorer; ModelNodeData is written as {graph id: data}.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.graph import EVERYWHERE, Graph, Phase
from dovetail.plans import Plan, normalise
from dovetail.units import format_bytes

GRAPH = "graph"
"""The id of the graph in all of the files."""
COOL_TO_HOT = ({"stop": 0, "bgColor": "#fff7ec"}, {"stop": 1, "bgColor": "#b30000"})


def model_explorer(plan: Plan, graph: Graph, colours: Sequence[str]) -> dict[str, Any]:
    """File name -> JSON document. `colours` [devices] are given as #rrggbb."""
    names, placement = plan.machine.device_names, normalise(plan.placement, graph, plan.machine)
    everywhere = graph.is_source & (graph.residences == EVERYWHERE)
    # A source that is resident wherever it is read has the device of its first reader, and none if
    # nothing reads it.
    devices = {
        op: device
        for op, device in enumerate(placement.tolist())
        if not everywhere[op] or any(len(graph.consumers_of(t)) for t in graph.outputs_of(op))
    }
    # (op, device, reader, tensor) of each tensor that is sent to a device, once for all that read
    # it there. In inference, parameters are where they are read, and are not sent.
    sent: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for reader in np.flatnonzero(~graph.is_source).tolist():
        device = int(plan.placement[reader])
        for tensor in graph.inputs_of(reader).tolist():
            maker = int(graph.producers[tensor])
            if not everywhere[maker] and devices.get(maker, device) != device:
                sent.setdefault((tensor, device), (maker, device, reader, tensor))
    carried: dict[int, int] = defaultdict(int)
    pairs: dict[tuple[int, int], list[dict[str, str]]] = defaultdict(list)
    for op, target, reader, tensor in sent.values():
        size = int(graph.tensor_bytes[tensor])
        carried[op] += size
        edge = {"sourceNodeId": graph.names[op], "targetNodeId": graph.names[reader]}
        pairs[devices[op], target].append({**edge, "label": format_bytes(size)})
    # Edge overlays of what is sent, one for each pair of devices.
    overlays = [
        {
            "name": f"{names[source]} to {names[target]}",
            "edgeColor": colours[source],
            "edges": edges,
        }
        for (source, target), edges in sorted(pairs.items())
    ]
    data = {"name": "sends between devices", "type": "edge_overlays", "overlays": overlays}
    drawn = {
        "id": GRAPH,
        "nodes": [_node(graph, op, names, devices) for op in range(len(graph))],
        "tasksData": {"edgeOverlaysDataListLeftPane": [data]} if overlays else {},
    }
    seconds = plan.compute_seconds[np.arange(len(graph)), plan.placement]
    where = {op: {"value": names[d], "bgColor": colours[d]} for op, d in devices.items()}
    spent = {op: float(seconds[op]) for op in np.flatnonzero(~graph.is_source).tolist()}
    output_bytes = {
        op: sum(int(graph.tensor_bytes[t]) for t in graph.outputs_of(op))
        for op in range(len(graph))
    }
    heat = {"gradient": list(COOL_TO_HOT)}
    return {
        "graph.json": {"label": plan.source.model or "plan", "graphs": [drawn]},
        "device.json": _data(graph, "device", where, showExpandedSummaryOnGroupNode=True),
        "seconds.json": _data(graph, "predicted seconds", spent, **heat),
        "bytes.json": _data(graph, "bytes", output_bytes, **heat),
        "transfers.json": _data(graph, "bytes sent to other devices", carried, **heat),
    }


def _node(
    graph: Graph, op: int, names: Sequence[str], devices: Mapping[int, int]
) -> dict[str, Any]:
    facts = {
        "phase": Phase(int(graph.phases[op])).name.lower(),
        "device": names[devices[op]] if op in devices else "",
        "FLOPs": f"{int(graph.flops[op])}",
    }
    makers = [(int(graph.producers[t]), t) for t in graph.inputs_of(op).tolist()]
    return {
        "id": graph.names[op],
        "label": graph.kinds[op].removeprefix("aten."),
        "namespace": graph.modules[op].replace(".", "/"),
        "attrs": [{"key": key, "value": value} for key, value in facts.items() if value],
        "incomingEdges": [
            {
                "sourceNodeId": graph.names[maker],
                "sourceNodeOutputId": str(list(graph.outputs_of(maker)).index(tensor)),
                "targetNodeInputId": str(place),
            }
            for place, (maker, tensor) in enumerate(makers)
        ],
        "outputsMetadata": [
            {
                "id": str(place),
                "attrs": [
                    {"key": "shape", "value": f"{graph.dtypes[t]}{list(graph.shapes[t])}"},
                    {"key": "bytes", "value": f"{int(graph.tensor_bytes[t])}"},
                ],
            }
            for place, t in enumerate(graph.outputs_of(op))
        ],
    }


def _data(graph: Graph, name: str, values: Mapping[int, Any], **options: Any) -> dict[str, Any]:
    """A ModelNodeData: {graph id: GraphNodeData}, without what it leaves to defaults."""
    results = {
        graph.names[op]: value if isinstance(value, dict) else {"value": value}
        for op, value in sorted(values.items())
    }
    return {GRAPH: {"name": name, "results": results, **options}}
