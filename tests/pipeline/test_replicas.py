"""`--replicas` and `--asynchronous`: from the command line to a plan that opens and runs again."""

import json

import numpy as np
import pytest

import dovetail as dt
from dovetail.errors import ExportError, UsageError
from dovetail.graph import layered, save_graph
from dovetail.graph.copies import tower_count, towers_of
from dovetail.pipeline import check_replicas, open_plan, replicated
from dovetail.plans import load_plan
from tests.support.instance_files import edge, file_of, node

TWO_GPUS = ("--machine", "2 x p100 + haswell", "--budget", "30e")
TRAINED = ("tests.support.small_models:trained", "--train", "adam")


@pytest.mark.parametrize("flags", [(), ("--asynchronous",)])
def test_a_plan_of_towers_keeps_how_it_was_made(dovetail, tmp_path, flags):
    path = tmp_path / "plan.json"
    status, out, err = dovetail(
        "plan", *TRAINED, "--replicas", 3, *flags, *TWO_GPUS, "--out", path, "--json"
    )
    assert status == 0, err
    first, *_ = json.loads(path.read_text())["transforms"]
    assert first == {"kind": "towers", "count": 3, "asynchronous": bool(flags)}
    opened, step = open_plan(path, "tests.support.small_models:trained")
    assert tower_count(step.graph) == 3
    assert len(step.graph) == json.loads(out)["ops"]
    assert len(step.inputs) == 3
    assert opened.source == step.source
    assert opened.transforms == step.transforms
    status, _, err = dovetail(
        "report", path, "tests.support.small_models:trained", "--out", tmp_path / "p.html"
    )
    assert status == 0, err
    assert "tower.2" in (tmp_path / "p.html").read_text()


@pytest.mark.usefixtures("forked_workers")
def test_towers_run_here(dovetail, here, tmp_path):
    path = tmp_path / "plan.json"
    status, _, err = dovetail(
        "plan", *TRAINED, "--replicas", 2, "--machine", here, "--budget", "20e", "--out", path
    )
    assert status == 0, err
    status, out, err = dovetail(
        "run", path, "tests.support.small_models:trained", "--steps", 2, "--json"
    )
    assert status == 0, err
    assert json.loads(out)["median_seconds"] > 0


@pytest.mark.parametrize("flags", [(), ("--asynchronous",)])
def test_a_graph_from_a_file_is_replicated_as_well(dovetail, tmp_path, flags):
    graph, path = tmp_path / "g.json.gz", tmp_path / "plan.json"
    save_graph(layered(300, width=2, training=True), graph)
    status, _, err = dovetail("plan", graph, "--replicas", 2, *flags, *TWO_GPUS, "--out", path)
    assert status == 0, err
    opened, step = open_plan(path)
    assert tower_count(step) == 2
    assert opened.source.shapes == ((256, 256),)  # of one tower's input
    assert dovetail("report", path)[0] == 0


def test_capture_saves_towers_that_are_planned_as_they_are(dovetail, tmp_path):
    graph, path = tmp_path / "g.json.gz", tmp_path / "plan.json"
    status, _, err = dovetail("capture", *TRAINED, "--replicas", 2, "--out", graph)
    assert status == 0, err
    saved = dt.load_graph(graph)
    assert set(np.unique(towers_of(saved)).tolist()) == {-1, 0, 1}
    assert dovetail("plan", graph, *TWO_GPUS, "--out", path)[0] == 0
    assert load_plan(path).transforms == ()
    assert dovetail("report", path)[0] == 0
    status, _, err = dovetail("plan", graph, "--replicas", 2, *TWO_GPUS)
    assert status == 2
    assert "replicated already" in err


def test_a_tower_can_be_pinned_to_a_device(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    status, _, err = dovetail(
        "plan", *TRAINED, "--replicas", 2, *TWO_GPUS, "--out", path,
        "--pin", "tower.0=p100:1", "--pin", "tower.1=p100:0",
    )  # fmt: skip
    assert status == 0, err
    opened, step = open_plan(path, "tests.support.small_models:trained")
    for tower, device in ((0, "p100:1"), (1, "p100:0")):
        own = (towers_of(step.graph) == tower) & ~step.graph.is_source
        assert (opened.placement[own] == opened.machine.device_index(device)).all()


def test_a_plan_from_before_there_were_towers_still_opens(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    dovetail("plan", *TRAINED, *TWO_GPUS, "--out", path)
    raw = json.loads(path.read_text())
    assert raw.pop("transforms") == []
    raw["version"] = 1
    path.write_text(json.dumps(raw))
    assert dovetail("report", path, "tests.support.small_models:trained")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*TRAINED, "--asynchronous"), "replicas"),
        ((*TRAINED, "--replicas", "0"), "--replicas"),
        (("tests.support.small_models:branches", "--replicas", "2"), "inference"),
    ],
)
def test_towers_that_cannot_be_are_refused(dovetail, arguments, said, tmp_path):
    status, _, err = dovetail("plan", *arguments, *TWO_GPUS)
    assert status == 2
    assert said in err
    status, _, err = dovetail("capture", *arguments, "--out", tmp_path / "g.json")
    assert status == 2
    assert said in err
    assert not (tmp_path / "g.json").exists()


def test_wrong_counts_and_instances_are_refused_in_python():
    for replicas, asynchronous, option in ((0, False, "replicas"), (1, True, "asynchronous")):
        with pytest.raises(UsageError) as caught:
            check_replicas(replicas, asynchronous)
        assert caught.value.option == option
    graph = layered(100, training=True)
    assert replicated(graph, 1) is graph


def test_towers_are_no_device_map_and_no_split_points(dovetail, tmp_path):
    graph = dt.replicate(layered(200, width=2, training=True), 2).graph
    found = dt.plan(graph, "2 x p100 + haswell", placer="single", budget="1e")
    for export in (dt.device_map, dt.split_points):
        with pytest.raises(ExportError) as caught:
            export(found, graph)
        assert "2 towers" in caught.value.where


def test_an_instance_is_planned_for_as_it_is(dovetail, tmp_path):
    path = tmp_path / "small.json"
    nodes = [node(i, cpu=2.0, acc=1.0, size=4.0, name=f"n{i}") for i in range(1, 3)]
    path.write_text(json.dumps(file_of(nodes, [edge(1, 2, 0.5)])))
    status, _, err = dovetail("plan", path, "--replicas", 2)
    assert status == 2
    assert "instance" in err
