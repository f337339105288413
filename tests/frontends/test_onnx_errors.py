"""What is wrong with a file is its own error, and names what it is about."""

import os
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper

from dovetail.errors import (
    EscapingDataError,
    ExternalDataError,
    FileFormatError,
    MissingLibraryError,
    ModelError,
    OpenAxisError,
    UnknownOpError,
    UnknownShapeError,
    UnsupportedOpError,
    UsageError,
)
from dovetail.frontends.onnx import load_onnx, parse_shapes
from dovetail.pipeline import resolve_model
from tests.support.onnx_files import OPSET, external, floats, node, tensor, write

PRODUCT = [node("MatMul", "x w", "y", "product")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def test_a_truncated_file_is_an_error(path):
    whole = write(path, PRODUCT, {"x": [2, 30]}, weights=[floats("w", 30, 30)]).read_bytes()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError) as raised:
            load_onnx(path)
        assert raised.value.path == str(path)


@pytest.mark.parametrize("content", [b"not a model at all", b"\x00" * 64, b"{}", b"\x08\x0a"])
def test_what_is_no_model_is_an_error(path, content):
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="not an ONNX model"):
        load_onnx(path)


def test_names_that_are_no_text_and_nodes_without_ends_are_an_error(path):
    whole = write(path, PRODUCT, {"x": [2, 3]}, weights=[floats("w", 3, 3)]).read_bytes()
    path.write_bytes(whole.replace(b"product", b"prod\xffct"))
    with pytest.raises(FileFormatError, match="a name that is not text"):
        load_onnx(path)
    with pytest.raises(FileFormatError, match="lacks an input or an output"):
        load_onnx(write(path, [node("SplitToSequence", "", "y")], {"x": [2]}))


def test_a_missing_file_or_a_folder_is_an_error(path):
    with pytest.raises(FileFormatError, match="no such file"):
        load_onnx(path)
    path.mkdir()
    with pytest.raises(FileFormatError):
        load_onnx(path)


def test_a_weight_with_less_bytes_than_its_shape_is_an_error(path):
    weight = floats("w", 3, 3)
    weight.dims[0] = 4
    with pytest.raises(FileFormatError, match="tensor 'w' holds 36 bytes, not 48"):
        load_onnx(write(path, PRODUCT, {"x": [2, 4]}, weights=[weight]))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0] * 4)
    weight.float_data.pop()
    with pytest.raises(FileFormatError, match="tensor 'w' holds 3 numbers, not 4"):
        load_onnx(write(path, PRODUCT, {"x": [2, 2]}, weights=[weight]))


def test_a_missing_external_file_is_an_error(path):
    weight = external("w", [3, 3], "weights.bin")
    with pytest.raises(ExternalDataError, match="a file that is not there") as raised:
        load_onnx(write(path, PRODUCT, {"x": [2, 3]}, weights=[weight]))
    assert (raised.value.tensor, raised.value.location) == ("w", "weights.bin")
    assert raised.value.path == str(path)
    assert not isinstance(raised.value, EscapingDataError)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({}, "cut short"),
        ({"offset": 8, "length": 36}, "cut short"),
        ({"length": 20}, "does not fit its 36 bytes"),
        ({"offset": -4, "length": 36}, "does not fit"),
        ({"offset": "far"}, "does not fit"),
    ],
)
def test_an_external_file_without_all_the_bytes_is_an_error(path, entries, complaint):
    (path.parent / "weights.bin").write_bytes(bytes(35))
    weight = external("w", [3, 3], "weights.bin", **entries)
    with pytest.raises(ExternalDataError, match=complaint):
        load_onnx(write(path, PRODUCT, {"x": [2, 3]}, weights=[weight]))


@pytest.mark.parametrize(
    "location",
    [
        "{outside}/weights.bin", "../weights.bin", "data/../../weights.bin", "..\\weights.bin",
        "C:\\weights.bin", "C:weights.bin", "\\\\host\\weights.bin", "link.bin",
        "linked/weights.bin", "", "a\0b",
    ],
)  # fmt: skip
def test_a_path_that_leaves_the_folder_is_an_error(tmp_path, location):
    (tmp_path / "weights.bin").write_bytes(bytes(36))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    (folder / "linked").symlink_to(tmp_path)
    location = location.format(outside=tmp_path)
    weight = external("w", [3, 3], location)
    with pytest.raises(EscapingDataError) as raised:
        load_onnx(write(folder / "model.onnx", PRODUCT, {"x": [2, 3]}, weights=[weight]))
    assert (raised.value.tensor, raised.value.location) == ("w", location)


def test_external_data_in_the_folder_is_fine_wherever_one_stands(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "weights.bin").write_bytes(bytes(36))
    weight = external("w", [3, 3], "data/weights.bin")
    write(folder / "model.onnx", PRODUCT, {"x": [2, 3]}, weights=[weight])
    monkeypatch.chdir(tmp_path)
    assert len(load_onnx(os.path.join("model", "model.onnx"))) == 3
    monkeypatch.chdir(folder)
    assert len(load_onnx("model.onnx")) == 3


@pytest.mark.parametrize(
    ("domain", "kind", "opsets"),
    [
        ("com.microsoft", "FusedConv", [("", OPSET), ("com.microsoft", 1)]),
        ("com.microsoft", "FusedConv", [("", OPSET)]),
        ("", "Convolve", [("", OPSET)]),
        ("", "Upsample", [("", OPSET)]),
        ("", "Gelu", [("", 19)]),
    ],
)
def test_an_unknown_op_is_an_error(path, domain, kind, opsets):
    nodes = [node(kind, "x", "y", "layer/odd", domain=domain)]
    with pytest.raises(UnknownOpError, match="layer/odd") as raised:
        load_onnx(write(path, nodes, {"x": [2, 3]}, opsets=opsets))
    assert (raised.value.op, raised.value.domain, raised.value.kind) == ("layer/odd", domain, kind)


def test_an_opset_from_the_future_is_an_error(path):
    with pytest.raises(ModelError, match="is of opset 999"):
        load_onnx(write(path, [node("Relu", "x", "y")], {"x": [2]}, opsets=[("", 999)]))


@pytest.mark.parametrize(
    ("shape", "axes", "advice"),
    [
        (["batch", 3, None], ("batch", 3, ""), "batchx3x?: say its sizes, as --shape x=1x3x1"),
        (None, None, "any shape: say its sizes, as --shape x="),
    ],
)
def test_an_open_axis_without_a_size_is_an_error(path, shape, axes, advice):
    write(path, [node("Relu", "x", "y")], {"x": shape})
    with pytest.raises(OpenAxisError) as raised:
        load_onnx(path)
    assert (raised.value.input, raised.value.axes) == ("x", axes)
    assert advice in str(raised.value)
    assert load_onnx(path, {"x": (1, 3, 4)}).shapes[0] == (1, 3, 4)


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"z": (1,)}, "has no input 'z'; it has x, mask"),
        ({"x": (2, 4)}, "input 'x' is batchx3, which 2x4 does not fit"),
        ({"x": (2, 3, 1)}, "which 2x3x1 does not fit"),
        ({"x": (2, 3), "mask": (4,)}, "input 'mask' is batch, which 4 does not fit"),
        ({"x": (-1, 3)}, "cannot have the shape"),
        ({"x": (0, 3)}, "must be positive"),
        (((2, 3),), "has 2 inputs, but 1 shapes are given"),
        ({"x": (2**40, 3), "mask": (2**40,)}, None),
        ({"x": (2**62, 3)}, "impossible"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(path, shapes, complaint):
    nodes = [node("Relu", "x", "y"), node("Relu", "mask", "z")]
    write(path, nodes, {"x": ["batch", 3], "mask": ["batch"]}, "y z")
    if complaint is None:
        assert load_onnx(path, shapes).tensor_bytes[0] == 12 * 2**40
        return
    with pytest.raises(ModelError) as raised:
        load_onnx(path, shapes)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("text", ["x", "x=", "=1x2", "x=1x", "x=1,2", "x=-1", "x=1xa", "x=²"])
def test_a_shape_that_cannot_be_read_is_an_error(text):
    with pytest.raises(UsageError) as raised:
        parse_shapes([text])
    assert raised.value.option == "--shape"


def test_shapes_are_read_by_name():
    assert parse_shapes(["a=1x3x224", "layer=0/b=5"]) == {"a": (1, 3, 224), "layer=0/b": (5,)}
    with pytest.raises(UsageError, match="two shapes"):
        parse_shapes(["a=1", "a=2"])


def body(*nodes):
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    outputs = [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    return helper.make_graph(list(nodes), "body", inputs, outputs)


def test_a_loop_is_an_error(path):
    nodes = [node("Loop", "n t", "", "steps", body=body())]
    nodes[0].output.append("y")
    weights = [tensor("n", np.int64(3)), tensor("t", np.bool_(True))]
    with pytest.raises(UnsupportedOpError, match="a graph has no loops") as raised:
        load_onnx(write(path, nodes, {"x": [2]}, weights=weights))
    assert raised.value.op == "steps"


def test_a_branch_on_data_is_an_error(path):
    branch = helper.make_graph([node("Relu", "x", "o")], "b", [], [helper.ValueInfoProto(name="o")])
    nodes = [node("If", "c", "y", "choice", then_branch=branch, else_branch=branch)]
    with pytest.raises(UnsupportedOpError, match="branches on data") as raised:
        load_onnx(write(path, nodes, {"x": [2], "c": ([], TensorProto.BOOL)}))
    assert raised.value.op == "choice"


@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        ([node("NonZero", "x", "y", "odd")], "y"),
        ([node("Reshape", "x s", "y", "odd")], "y"),
        ([node("MatMul", "x x", "y", "odd")], "y"),
        ([node("Relu", "x", "a"), node("Concat", "x", "y", "odd")], "y"),
    ],
)
def test_a_shape_that_cannot_be_found_is_an_error(path, nodes, output):
    inputs = {"x": [2, 3], "s": ([2], TensorProto.INT64)}
    with pytest.raises(UnknownShapeError) as raised:
        load_onnx(write(path, nodes, inputs))
    assert (raised.value.op, raised.value.output) == ("odd", output)


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ([node("Relu", "nothing", "y")], "reads 'nothing', which nothing before it makes"),
        ([node("Relu", "a", "y"), node("Relu", "x", "a")], "reads 'a'"),
        ([node("Relu", "x", "y"), node("Tanh", "x", "y")], "two nodes make 'y'"),
        ([node("Relu", "x", "a")], "nothing makes the output 'y'"),
    ],
)
def test_nodes_that_make_no_graph_are_an_error(path, nodes, complaint):
    with pytest.raises(FileFormatError, match=complaint):
        load_onnx(write(path, nodes, {"x": [2]}))


def test_text_and_sequences_as_inputs_are_an_error(path):
    with pytest.raises(ModelError, match="input 'x' is text"):
        load_onnx(write(path, [node("Identity", "x", "y")], {"x": ([2], TensorProto.STRING)}))
    with pytest.raises(UnsupportedOpError, match="constant of text"):
        load_onnx(write(path, [node("Constant", "", "y", value_string="a")], {}))


def test_a_function_that_calls_itself_is_an_error(path):
    opsets = [helper.make_opsetid("ours", 1)]
    functions = [
        helper.make_function("ours", name, ["v"], ["o"], [call], opsets)
        for name, call in (
            ("Ping", node("Pong", "v", "o", domain="ours")),
            ("Pong", node("Ping", "v", "o", domain="ours")),
        )
    ]
    nodes = [node("Ping", "x", "y", domain="ours")]
    imports = [("", OPSET), ("ours", 1)]
    with pytest.raises(ModelError, match="calls itself"):
        load_onnx(write(path, nodes, {"x": [2]}, opsets=imports, functions=functions))


def test_functions_that_unfold_without_end_are_an_error(path, monkeypatch):
    monkeypatch.setattr("dovetail.frontends.onnx.walking._MOST_NODES", 1000)
    functions = []
    for i in range(40):
        calls = [node(f"F{i + 1}", *ends, domain="ours") for ends in (("v", "a"), ("a", "o"))]
        imports = [helper.make_opsetid("ours", 1)]
        functions.append(helper.make_function("ours", f"F{i}", ["v"], ["o"], calls, imports))
    end = helper.make_function(
        "ours", "F40", ["v"], ["o"], [node("Relu", "v", "o")], [helper.make_opsetid("", OPSET)]
    )
    nodes, imports = [node("F0", "x", "y", domain="ours")], [("", OPSET), ("ours", 1)]
    with pytest.raises(ModelError, match="unfolds to more than"):
        load_onnx(write(path, nodes, {"x": [2]}, opsets=imports, functions=[*functions, end]))


def test_an_op_beyond_all_numbers_is_an_error(path):
    with pytest.raises(ModelError, match="impossible"):
        load_onnx(
            write(path, [node("MatMul", "a b", "y")], {"a": [2**30, 2**28], "b": [2**28, 2**29]})
        )


def test_sparse_weights_are_an_error(path):
    write(path, PRODUCT, {"x": [2, 3]}, weights=[floats("w", 3, 3)])
    from onnx import load, save

    model = load(path)
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(floats("few", 2))
    save(model, path)
    with pytest.raises(ModelError, match="weight 'few' is sparse"):
        load_onnx(path)


def test_without_the_library_the_extra_is_named(path, monkeypatch):
    write(path, PRODUCT, {"x": [2, 3]}, weights=[floats("w", 3, 3)])
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'dovetail\[onnx\]'") as raised:
        load_onnx(path)
    assert raised.value.library == "onnx"


def test_an_onnx_file_cannot_be_trained(path):
    with pytest.raises(ModelError, match="holds no training step") as raised:
        resolve_model(str(path), "adam")
    assert raised.value.model == str(path)


def test_shapes_are_for_onnx_files_alone():
    with pytest.raises(UsageError, match=r"no \.onnx file"):
        resolve_model("zoo:rnnlm", shapes={"x": (1,)})
