"""Files that protobuf reads, but whose nodes and tensors say what cannot be: a typed error each."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from dovetail.errors import (
    EscapingDataError,
    FileFormatError,
    ModelError,
    UnknownShapeError,
    UnsupportedOpError,
)
from dovetail.frontends.onnx import load_onnx
from tests.support.onnx_files import OPSET, external, floats, node, tensor, write

INPUTS = {"x": [2, 3], "z": []}
WEIGHTS = [
    tensor("none", np.array([], np.int64)),
    tensor("two", np.array([-5, 7])),
    tensor("matrix", np.array([[1, 1]])),
    tensor("more", np.array([100, 100])),
    tensor("zero", np.array(0)),
    tensor("huge", np.array([10**10])),
    tensor("values", np.array([0.0, 1.0], np.float32)),
    floats("flat", 3),
]
EMPTY = helper.make_graph([], "empty", [], [])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def sequence(*nodes):
    return [node("SequenceConstruct", "x x", "s"), *nodes, node("SequenceAt", "t zero", "y")]


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        (sequence(node("SequenceInsert", "s s", "t")), "lacks a tensor"),
        (sequence(node("SequenceInsert", "s -", "t")), "lacks a tensor"),
        (sequence(node("SplitToSequence", "s", "t")), "lacks a tensor"),
        (sequence(node("SplitToSequence", "x", "t", axis=9)), "has the axis 9 of 2"),
        (sequence(node("SplitToSequence", "z", "t")), "has the axis 0 of 0"),
        (sequence(node("SplitToSequence", "x two", "t")), r"splits 2 into \[-5, 7\]"),
        (sequence(node("SplitToSequence", "x matrix", "t")), r"splits 2 into \[\[1, 1\]\]"),
        ([*sequence()[:1], node("ConcatFromSequence", "s", "y")], "has the axis None of 2"),
        ([*sequence()[:1], node("ConcatFromSequence", "s", "y", axis=2)], "has the axis 2 of 2"),
        (
            [node("SequenceConstruct", "x z", "s"), node("ConcatFromSequence", "s", "y", axis=1)],
            "unlike shapes",
        ),
        ([node("Constant", "", "y", other="text")], "is a constant of text"),
        ([node("Constant", "", "y", other=EMPTY)], "is a constant of text"),
        ([node("If", "none", "y", then_branch=EMPTY, else_branch=EMPTY)], "branches on data"),
        ([node("Cast", "two", "y", to=TensorProto.STRING)], "text or unknown"),
    ],
)
def test_a_node_that_is_decided_while_it_is_read_is_checked(path, nodes, complaint):
    with pytest.raises(UnsupportedOpError, match=complaint):
        load_onnx(write(path, nodes, INPUTS, weights=WEIGHTS))


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ([node("OneHot", "two none values", "y")], "depends on data"),
        ([node("Reshape", "x more", "y")], "not as many elements"),
        ([node("Einsum", "x", "y", equation="i.j")], "'i.j' is no equation"),
        ([node("Einsum", "x", "y", equation="ij-")], "'ij-' is no equation"),
        ([node("LSTM", "q flat flat", "y", hidden_size=3)], "three axes each"),
        ([node("MaxUnpool", "u indices bad", "y", kernel_shape=[1])], "impossible"),
    ],
)
def test_a_shape_that_no_tensor_has_is_an_error(path, nodes, complaint):
    more = {"q": [3, 2, 2], "u": [1, 1, 4], "indices": ([1, 1, 4], TensorProto.INT64)}
    weights = [*WEIGHTS, tensor("bad", np.array([1, 1, -4]))]
    with pytest.raises(UnknownShapeError, match=complaint):
        load_onnx(write(path, nodes, {**INPUTS, **more}, weights=weights))


def test_a_huge_result_of_known_inputs_is_not_computed(path, monkeypatch):
    from onnx.reference import ReferenceEvaluator

    def run(*_):
        raise AssertionError("computed")

    monkeypatch.setattr(ReferenceEvaluator, "run", run)
    graph = load_onnx(
        write(path, [node("OneHot", "two huge values", "y")], INPUTS, weights=WEIGHTS)
    )
    assert graph.shapes[graph.outputs[0]] == (2, 10**10)


def test_an_if_without_its_branch_is_an_error(path):
    weights = [tensor("condition", np.array(True))]
    with pytest.raises(FileFormatError, match="lacks its then_branch"):
        load_onnx(write(path, [node("If", "condition", "y")], {}, weights=weights))


@pytest.mark.parametrize("shape", [[0, 2**61, 2**61], [-1]])
def test_a_weight_of_an_impossible_shape_is_an_error_though_it_is_empty(path, shape):
    weight = TensorProto(name="w", data_type=1, dims=shape, raw_data=b"")
    with pytest.raises(FileFormatError, match="impossible shape"):
        load_onnx(write(path, [node("Identity", "w", "y")], {}, weights=[weight]))


def test_a_location_that_is_no_text_is_an_error(path):
    weight = external("w", (3,), "somewhere")
    whole = write(path, [node("Add", "x w", "y")], {"x": [3]}, weights=[weight]).read_bytes()
    path.write_bytes(whole.replace(b"somewhere", b"some\xffhere"))
    with pytest.raises(EscapingDataError) as raised:
        load_onnx(path)
    assert raised.value.tensor == "w"


def test_functions_within_very_many_functions_are_an_error(path):
    ours, standard = helper.make_opsetid("ours", 1), helper.make_opsetid("", OPSET)
    calls = [node(f"F{i + 1}", "v", "o", domain="ours") for i in range(2000)]
    functions = [
        helper.make_function("ours", f"F{i}", ["v"], ["o"], [call], [ours, standard])
        for i, call in enumerate([*calls, node("Relu", "v", "o")])
    ]
    nodes, opsets = [node("F0", "x", "y", domain="ours")], [("", OPSET), ("ours", 1)]
    with pytest.raises(ModelError, match="more than 100 functions"):
        load_onnx(write(path, nodes, {"x": [2]}, opsets=opsets, functions=functions))


def test_a_long_chain_of_views_is_read(path):
    nodes = [node("Unsqueeze", "x0 axis", "x1")]
    for i in range(1, 2000):
        kind = ("Unsqueeze", "Squeeze")[i % 2]
        nodes.append(node(kind, f"x{i} axis", f"x{i + 1}"))
    weights = [tensor("axis", np.array([0])), floats("x0", 2, 3)]
    graph = load_onnx(write(path, nodes, {}, "x2000", weights=weights))
    assert graph.shapes[graph.outputs[0]] == (2, 3)
