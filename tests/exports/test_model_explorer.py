"""Against model-explorer's own definition of its files (node_data_builder.py, graph_builder.py of
google-ai-edge/model-explorer), written down here as strict records."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter
from torch import nn

import dovetail as dt
from dovetail.errors import FileFormatError
from dovetail.exports import model_explorer
from dovetail.reports import device_colours
from tests.support.planned import blocks_step, captured, plan_of


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NodeDataResult(Strict):
    value: float | int | str
    bgColor: str | None = None
    textColor: str | None = None


class ThresholdItem(Strict):
    value: float | int
    bgColor: str
    textColor: str | None = None


class GradientItem(Strict):
    stop: float | int
    bgColor: str | None = None
    textColor: str | None = None


class GraphNodeData(Strict):
    results: dict[str, NodeDataResult]
    name: str | None = None
    thresholds: list[ThresholdItem] = []
    gradient: list[GradientItem] = []
    hideInAggregatedStatsTable: bool = False
    hideInChildrenStatsTable: bool = False
    hideAggregatedStats: list[Literal["min", "max", "sum", "avg"]] | None = None
    showExpandedSummaryOnGroupNode: bool = False
    showLabelCountColumnsInChildrenStatsTable: bool = False


class KeyValue(Strict):
    key: str
    value: str


class MetadataItem(Strict):
    id: str
    attrs: list[KeyValue] = []


class IncomingEdge(Strict):
    sourceNodeId: str
    sourceNodeOutputId: str = "0"
    targetNodeInputId: str = "0"


class GraphNode(Strict):
    id: str
    label: str
    namespace: str = ""
    attrs: list[KeyValue] = []
    incomingEdges: list[IncomingEdge] = []
    outputsMetadata: list[MetadataItem] = []


class Edge(Strict):
    sourceNodeId: str
    targetNodeId: str
    label: str | None = None


class EdgeOverlay(Strict):
    name: str
    edgeColor: str
    edges: list[Edge]


class EdgeOverlaysData(Strict):
    name: str
    type: Literal["edge_overlays"]
    overlays: list[EdgeOverlay]


class TasksData(Strict):
    edgeOverlaysDataListLeftPane: list[EdgeOverlaysData] = []


class OneGraph(Strict):
    id: str
    nodes: list[GraphNode]
    tasksData: TasksData


class GraphCollection(Strict):
    label: str
    graphs: list[OneGraph]


NODE_DATA = TypeAdapter(dict[str, GraphNodeData])
COLOURS = device_colours(3)


def view(step, device_of) -> dict[str, Any]:
    plan = plan_of(step, device_of)
    return json.loads(json.dumps(model_explorer(plan, step.graph, COLOURS)))


@pytest.fixture(scope="module")
def blocks():
    _, _, step = blocks_step()
    return step, view(step, lambda path, _: int(path.startswith(("blocks.3", "head"))))


def test_every_file_is_what_model_explorer_defines(blocks):
    step, files = blocks
    (graph,) = GraphCollection.model_validate(files["graph.json"]).graphs
    ids = {node.id for node in graph.nodes}
    assert len(ids) == len(graph.nodes) == len(step.graph)
    assert all(edge.sourceNodeId in ids for node in graph.nodes for edge in node.incomingEdges)
    for name in ("device.json", "seconds.json", "bytes.json", "transfers.json"):
        data = NODE_DATA.validate_python(files[name])
        assert set(data) == {graph.id}, name
        found = data[graph.id]
        assert set(found.results) <= ids, name
        stops = [item.stop for item in found.gradient]
        assert stops in ([], [0, 1]), "stops for 0 and 1 are always given"


def test_nodes_fold_by_module_and_say_where_they_run_in_the_devices_colour(blocks):
    _, files = blocks
    nodes = {node["id"]: node for node in files["graph.json"]["graphs"][0]["nodes"]}
    assert nodes["blocks.3.0/addmm"]["namespace"] == "blocks/3/0"
    assert nodes["add"]["namespace"] == ""
    where = files["device.json"]["graph"]["results"]
    assert where["blocks.3.0/addmm"] == {"value": "p100:1", "bgColor": COLOURS[1]}
    assert where["blocks.3.0.weight"]["value"] == "p100:1"
    assert where["embedding.weight"]["value"] == "p100:0"
    assert where["input.0"]["value"] == "haswell"


def test_seconds_bytes_and_what_is_sent_are_the_plans(blocks):
    step, files = blocks
    graph = step.graph
    seconds = files["seconds.json"]["graph"]["results"]
    assert "embedding.weight" not in seconds
    assert seconds["embedding/addmm"]["value"] > 0
    assert files["bytes.json"]["graph"]["results"]["embedding.weight"]["value"] == 8 * 8 * 4
    sent = files["transfers.json"]["graph"]["results"]
    boundary = next(  # what the last block on the first device hands over
        graph.names[int(graph.producers[t])]
        for t in graph.inputs_of(graph.names.index("blocks.3.0/addmm")).tolist()
        if not graph.modules[int(graph.producers[t])].startswith("blocks.3")
    )
    assert sent == {"input.0": {"value": 128}, boundary: {"value": 128}}
    (overlays,) = files["graph.json"]["graphs"][0]["tasksData"]["edgeOverlaysDataListLeftPane"]
    assert [(o["name"], o["edgeColor"], len(o["edges"])) for o in overlays["overlays"]] == [
        ("p100:0 to p100:1", COLOURS[0], 1),
        ("haswell to p100:0", COLOURS[2], 1),
    ]
    assert overlays["overlays"][0]["edges"][0]["label"] == "128 B"


def test_a_plan_that_sends_nothing_has_no_overlay():
    import torch

    step = captured(nn.Linear(2, 2), torch.randn(3, 2))
    files = view(step, lambda *_: 2)
    assert files["graph.json"]["graphs"][0]["tasksData"] == {}
    assert files["transfers.json"]["graph"]["results"] == {}


def test_the_export_writes_a_folder_again_and_again(tmp_path):
    _, _, step = blocks_step()
    plan = plan_of(step, lambda *_: 0)
    for _ in range(2):
        written = dt.export(plan, step, "model-explorer", tmp_path / "view")
    assert {path.name for path in (tmp_path / "view").iterdir()} == set(written)
    assert json.loads((tmp_path / "view" / "device.json").read_text()) == written["device.json"]
    (tmp_path / "view" / "device.json").rename(tmp_path / "outside")
    (tmp_path / "view" / "device.json").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_text("of somebody's")
    with pytest.raises(FileFormatError, match="a link"):
        dt.export(plan, step, "model-explorer", tmp_path / "view")
    assert (tmp_path / "outside").read_text() == "of somebody's"
