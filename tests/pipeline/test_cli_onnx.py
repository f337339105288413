"""ONNX files on the command line."""

import json

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from dovetail.errors import GraphMismatchError
from dovetail.pipeline import open_plan

TWO_GPUS = ("--machine", "2 x p100 + haswell", "--budget", "50e", "--placer", "etf")


def write(path, width=8, kind="Relu"):
    """x [batch, 8] ─► left MatMul ─► kind ─► y, with an open batch."""
    weights = [
        numpy_helper.from_array(np.ones((8, width), np.float32), "left.weight"),
        numpy_helper.from_array(np.ones((width, width), np.float32), "right.weight"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "left.weight"], ["a"], "/left/MatMul"),
        helper.make_node("MatMul", ["a", "right.weight"], ["b"], "/right/MatMul"),
        helper.make_node(kind, ["b"], ["y"], "/right/act"),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    graph = helper.make_graph(nodes, "g", [given], [helper.ValueInfoProto(name="y")], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model.onnx")


def test_a_plan_of_an_onnx_file_is_made_reopened_reported_and_exported(dovetail, model, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = dovetail(
        "plan", model, "--shape", "x=4x8", *TWO_GPUS, "--pin", "right=p100:1", "--pin",
        "left=p100:0", "--json", "--out", path,
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(out)["model"] == str(model)
    source = json.loads(path.read_text())["source"]
    assert (source["model"], source["shapes"]) == (str(model), [[4, 8]])
    for named in ((), (model,)):
        status, _, err = dovetail("report", path, *named)
        assert status == 0, err
    status, out, err = dovetail("export", path, "--to", "device-map")
    assert status == 0, err
    assert json.loads(out) == {"device_map": {"left": 0, "right": 1}, "main_device": 0}


def test_a_file_that_changed_is_not_the_plans(dovetail, model, tmp_path):
    path = tmp_path / "plan.json"
    assert dovetail("plan", model, "--shape", "x=4x8", *TWO_GPUS, "--out", path)[0] == 0
    write(model, kind="Tanh")
    with pytest.raises(GraphMismatchError):
        open_plan(path)


def test_an_onnx_graph_is_not_run(dovetail, model, tmp_path):
    path = tmp_path / "plan.json"
    assert dovetail("plan", model, "--shape", "x=4x8", *TWO_GPUS, "--out", path)[0] == 0
    status, out, err = dovetail("run", path)
    assert (status, out) == (2, "")
    assert "an ONNX graph is planned for, not run" in err


def test_an_onnx_graph_has_analytic_costs_here(dovetail, model, tmp_path):
    path = tmp_path / "plan.json"
    arguments = ("--machine", "here", "--budget", "5e", "--placer", "single", "--out", path)
    status, _, err = dovetail("plan", model, "--shape", "x=4x8", *arguments)
    assert status == 0, err
    assert json.loads(path.read_text())["costs"]["source"] == "analytic"


def test_capture_saves_the_graph_and_lists_what_has_no_rule(dovetail, tmp_path):
    model, path = write(tmp_path / "model.onnx", kind="Det"), tmp_path / "g.json"
    status, _, err = dovetail("capture", model, "--shape", "x=8x8", "--out", path)
    assert status == 0, err
    assert "no rule for the FLOPs of 1 x onnx.Det" in err
    status, out, err = dovetail("plan", path, *TWO_GPUS, "--json")
    assert status == 0, err
    assert json.loads(out)["ops"] == 6
    assert "no rule for the FLOPs of 1 x onnx.Det" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "say its sizes, as --shape x=1x8"),
        (("--shape", "x=4"), "which 4 does not fit"),
        (("--shape", "z=4x8"), "has no input 'z'"),
        (("--shape", "x"), "--shape: 'x' is not like image=1x3x224x224"),
        (("--shape", "x=4x8", "--train", "adam"), "holds no training step"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "capture"])
def test_wrong_options_exit_with_2_and_say_what_is_wrong(
    dovetail, model, tmp_path, command, arguments, complaint
):
    rest = TWO_GPUS if command == "plan" else ("--out", tmp_path / "g.json")
    status, out, err = dovetail(command, model, *arguments, *rest)
    assert (status, out) == (2, "")
    assert complaint in err


def test_a_shape_of_what_is_no_onnx_file_exits_with_2(dovetail, tmp_path):
    status, _, err = dovetail(
        "plan", "tests.support.small_models:branches", "--shape", "x=1", *TWO_GPUS
    )
    assert status == 2
    assert "no .onnx file" in err
