"""What the graph of an ONNX file says."""

import resource
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper

from dovetail.frontends import matrix_flops
from dovetail.frontends.onnx import is_from_onnx, load_onnx, unknown_flops
from dovetail.graph import Phase, group
from dovetail.graph.files import load_graph, save_graph
from tests.support.onnx_files import (
    OPSET,
    declared,
    external,
    floats,
    model_of,
    node,
    tensor,
    write,
)


@pytest.fixture
def load(tmp_path):
    """load(nodes, inputs, outputs, weights) -> graph."""

    def call(*arguments, shapes=None, **options):
        return load_onnx(write(tmp_path / "model.onnx", *arguments, **options), shapes)

    return call


def op_of(graph, kind):
    (op,) = [i for i, found in enumerate(graph.kinds) if found == f"onnx.{kind}"]
    return op


def sources(graph):
    """name -> (kind, bytes) of every source op."""
    return {
        graph.names[op]: (graph.kinds[op], int(graph.tensor_bytes[graph.outputs_of(op)[0]]))
        for op in np.flatnonzero(graph.is_source).tolist()
    }


def test_a_small_network_becomes_its_graph(load):
    """
    x [2,3,8,8] ─► Conv ─► BatchNormalization ─► Relu ─► GlobalAveragePool ─► Flatten ─► Gemm ─► y
    """
    graph = load(
        [
            node("Conv", "x stem.conv.weight", "a", "/stem/conv/Conv", pads=[1, 1, 1, 1]),
            node(
                "BatchNormalization",
                "a stem.bn.weight stem.bn.bias stem.bn.mean stem.bn.var",
                "b",
                "/stem/bn/BatchNormalization",
            ),
            node("Relu", "b", "c", "/stem/Relu"),
            node("GlobalAveragePool", "c", "d", "/pool/GlobalAveragePool"),
            node("Flatten", "d", "e", "/Flatten"),
            node("Gemm", "e fc.weight fc.bias", "y", "/fc/Gemm", transB=1),
        ],
        {"x": [2, 3, 8, 8]},
        weights=[
            floats("stem.conv.weight", 4, 3, 3, 3),
            *(floats(f"stem.bn.{part}", 4) for part in ("weight", "bias", "mean", "var")),
            floats("fc.weight", 5, 4),
            floats("fc.bias", 5),
        ],
    )
    assert graph.names[8:] == (
        "stem.conv/Conv", "stem.bn/BatchNormalization", "stem/Relu", "pool/GlobalAveragePool",
        "Flatten", "fc/Gemm",
    )  # fmt: skip
    assert graph.modules[8:] == ("stem.conv", "stem.bn", "stem", "pool", "", "fc")
    assert sources(graph) == {
        "stem.conv.weight": ("parameter", 4 * 27 * 4),
        "stem.bn.weight": ("parameter", 16),
        "stem.bn.bias": ("parameter", 16),
        "fc.weight": ("parameter", 80),
        "fc.bias": ("parameter", 20),
        "stem.bn.mean": ("buffer", 16),
        "stem.bn.var": ("buffer", 16),
        "x": ("input", 2 * 3 * 64 * 4),
    }
    pixels = 2 * 4 * 64
    assert graph.flops[8:].tolist() == [
        2 * pixels * 27, pixels, pixels, pixels, 0, 2 * 2 * 5 * 4
    ]  # fmt: skip
    assert graph.accessed_bytes[8:].tolist() == [
        4 * (2 * 3 * 64 + 4 * 27 + pixels),
        4 * (2 * pixels + 4 * 4),
        4 * 2 * pixels,
        4 * (pixels + 8),
        0,
        4 * (8 + 20 + 5 + 10),
    ]
    assert graph.shapes[graph.outputs[0]] == (2, 5)
    assert set(graph.phases[8:].tolist()) == {int(Phase.FORWARD)}
    assert matrix_flops(graph) == 2 * pixels * 27 + 80
    assert is_from_onnx(graph)
    assert not unknown_flops(graph)


LSTM = {"x": [7, 2, 3]}
FLOPS = [
    ("MatMul", {"a": [3, 4], "b": [4, 5]}, {}, 2 * 3 * 4 * 5),
    ("MatMul", {"a": [2, 3, 4], "b": [4, 5]}, {}, 2 * 2 * 3 * 4 * 5),
    ("MatMul", {"a": [4], "b": [4]}, {}, 2 * 4),
    ("Gemm", {"a": [4, 3], "b": [4, 5], "c": [5]}, {"transA": 1}, 2 * 3 * 4 * 5),
    ("Gemm", {"a": [3, 4], "b": [5, 4]}, {"transB": 1}, 2 * 3 * 4 * 5),
    ("Conv", {"x": [2, 4, 8, 8], "w": [6, 2, 3, 3]}, {"group": 2}, 2 * (2 * 6 * 36) * 2 * 9),
    ("Conv", {"x": [1, 1, 9], "w": [2, 1, 3]}, {"strides": [2]}, 2 * (2 * 4) * 3),
    ("ConvTranspose", {"x": [2, 4, 5, 5], "w": [4, 3, 2, 2]}, {}, 2 * (2 * 4 * 25) * 3 * 4),
    ("Einsum", {"a": [3, 4], "b": [4, 5]}, {"equation": "ij,jk->ik"}, 2 * 3 * 4 * 5),
    ("Einsum", {"a": [3, 4], "b": [4, 5]}, {"equation": "ij, jk"}, 2 * 3 * 4 * 5),
    ("Einsum", {"a": [2, 7, 3, 4], "b": [1, 7, 4, 5]}, {"equation": "...ij,...jk->...ik"}, 2 * 840),
    ("Einsum", {"a": [3, 4], "b": [3, 4]}, {"equation": "ij,ij->ij"}, 12),
    ("Einsum", {"a": [3, 4]}, {"equation": "ij->ji"}, 0),
    ("Einsum", {"a": [3, 4]}, {"equation": "ij->i"}, 12),
    (
        "Einsum",
        {"a": [2, 3], "b": [3, 4], "c": [4, 5]},
        {"equation": "ij,jk,kl->il"},
        2 * 2 * 3 * 4 + 2 * 2 * 4 * 5,
    ),
    ("Add", {"a": [3, 1], "b": [4]}, {}, 12),
    ("Where", {"a": ([3, 4], TensorProto.BOOL), "b": [3, 4], "c": [1]}, {}, 12),
    ("Gelu", {"a": [3, 4]}, {}, 12),
    ("Softmax", {"a": [3, 4]}, {}, 12),
    ("LayerNormalization", {"a": [3, 4], "b": [4]}, {}, 12),
    ("ReduceMean", {"a": [3, 4]}, {}, 12),
    ("MaxPool", {"a": [1, 2, 8, 8]}, {"kernel_shape": [2, 2], "strides": [2, 2]}, 128),
    ("Transpose", {"a": [3, 4]}, {}, 0),
    ("Concat", {"a": [3, 4], "b": [3, 4]}, {"axis": 0}, 0),
    ("Cast", {"a": [3, 4]}, {"to": TensorProto.FLOAT16}, 0),
    (
        "LSTM",
        LSTM | {"w": [2, 20, 3], "r": [2, 20, 5]},
        {"hidden_size": 5, "direction": "bidirectional"},
        7 * 2 * 2 * (2 * 20 * 8 + 13 * 5),
    ),
    ("GRU", LSTM | {"w": [1, 15, 3], "r": [1, 15, 5]}, {"hidden_size": 5}, 14 * (2 * 15 * 8 + 55)),
    ("RNN", LSTM | {"w": [1, 5, 3], "r": [1, 5, 5]}, {"hidden_size": 5}, 14 * (2 * 5 * 8 + 10)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attributes", "expected"), FLOPS)
def test_flops_follow_the_formula(load, kind, inputs, attributes, expected):
    graph = load([node(kind, " ".join(inputs), "y", **attributes)], inputs)
    assert int(graph.flops.sum()) == expected


ATTENTION = 2 * 2 * 4 * 6 * 7 * (8 + 9)


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        ({"q": [2, 4, 6, 8], "k": [2, 4, 7, 8], "v": [2, 4, 7, 9]}, {}),
        ({"q": [2, 4, 6, 8], "k": [2, 2, 7, 8], "v": [2, 2, 7, 9]}, {}),
        (
            {"q": [2, 6, 32], "k": [2, 7, 16], "v": [2, 7, 18]},
            {"q_num_heads": 4, "kv_num_heads": 2},
        ),
    ],
)
def test_attention_counts_both_products(load, inputs, attributes):
    graph = load([node("Attention", "q k v", "y", **attributes)], inputs, opsets=[("", 23)])
    assert matrix_flops(graph) == int(graph.flops.sum()) == ATTENTION


def test_attention_counts_past_keys(load):
    inputs = {
        "q": [2, 4, 6, 8], "k": [2, 4, 3, 8], "v": [2, 4, 3, 9], "p": [2, 4, 4, 8],
        "w": [2, 4, 4, 9],
    }  # fmt: skip
    graph = load([node("Attention", "q k v - p w", "y pk pv")], inputs, "y pk", opsets=[("", 23)])
    assert int(graph.flops.sum()) == ATTENTION
    assert graph.shapes[graph.outputs[1]] == (2, 4, 7, 8)


def test_an_op_without_a_rule_is_listed_and_never_zero(load, tmp_path):
    graph = load(
        [node("Det", "x", "a"), node("Det", "x", "b"), node("Add", "a b", "y")], {"x": [5, 3, 3]}
    )
    assert unknown_flops(graph) == {"onnx.Det": 2}
    assert graph.flops.tolist() == [0, 45, 45, 5]
    save_graph(graph, tmp_path / "g.json")
    assert unknown_flops(load_graph(tmp_path / "g.json")) == {"onnx.Det": 2}


def test_what_follows_from_shapes_has_no_op(load):
    """y = reshape(x, [shape(x)[0], -1]) * the square root of its width"""
    graph = load(
        [
            node("Shape", "x", "s"),
            node("Gather", "s zero", "batch"),
            node("Unsqueeze", "batch axis", "batches"),
            node("Concat", "batches rest", "wanted", axis=0),
            node("Reshape", "x wanted", "flat"),
            node("Cast", "batch", "number", to=TensorProto.FLOAT),
            node("Sqrt", "number", "root"),
            node("Mul", "flat root", "y"),
        ],
        {"x": [2, 3, 4]},
        weights=[
            tensor("zero", np.int64(0)),
            tensor("axis", np.array([0])),
            tensor("rest", np.array([-1])),
        ],
    )
    assert graph.kinds == ("input", "onnx.Reshape", "onnx.Mul")
    assert graph.shapes == ((2, 3, 4), (2, 12), (2, 12))
    assert graph.storages.tolist() == [0, 0, 1]
    assert graph.flops.tolist() == [0, 0, 24]
    assert "1.414" in graph.signatures[2]


def test_a_large_constant_is_not_computed(load):
    """Ones of 512 x 512 stay an op; those of 4 x 4 are a constant."""
    ones = [node("ConstantOfShape", name, f"o_{name}") for name in ("large", "small")]
    adds = [node("Add", "x o_large", "y"), node("Add", "z o_small", "w")]
    weights = [tensor("large", np.array([512, 512])), tensor("small", np.array([4, 4]))]
    graph = load([*ones, *adds], {"x": [512, 512], "z": [4, 4]}, "y w", weights=weights)
    assert graph.kinds.count("onnx.ConstantOfShape") == 1
    assert sources(graph)["o_small"] == ("constant", 64)


@pytest.mark.parametrize(
    ("code", "dtype", "size"),
    [
        (TensorProto.FLOAT16, "float16", 2 * 35),
        (TensorProto.BFLOAT16, "bfloat16", 2 * 35),
        (TensorProto.DOUBLE, "float64", 8 * 35),
        (TensorProto.INT8, "int8", 35),
        (TensorProto.INT4, "int4", 18),
        (TensorProto.FLOAT8E4M3FN, "float8_e4m3fn", 35),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_weights_have_the_bytes_of_their_type(load, code, dtype, size, raw):
    if raw:
        weight = helper.make_tensor("w", code, [5, 7], bytes(size), raw=True)
    else:
        weight = helper.make_tensor("w", code, [5, 7], [1] * 35)
    kind = "Cast" if code not in (TensorProto.INT4, TensorProto.INT8) else "DequantizeLinear"
    rest = {"to": TensorProto.FLOAT} if kind == "Cast" else {}
    graph = load(
        [
            node(kind, "w" if kind == "Cast" else "w scale", "f", **rest),
            node("MatMul", "x f", "y"),
        ],
        {"x": [3, 5]},
        weights=[weight, tensor("scale", np.float32(0.5))],
        opsets=[("", 21)],
    )
    assert sources(graph)["w"] == ("parameter", size)
    assert graph.dtypes[0] == dtype


@pytest.mark.parametrize("code", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_of_half_precision_halves_every_byte(load, code):
    def built(code):
        weight = helper.make_tensor("fc.weight", code, [6, 5], [1.0] * 30)
        nodes = [node("MatMul", "x fc.weight", "a"), node("Relu", "a", "y")]
        return load(nodes, {"x": ([3, 6], code)}, weights=[weight])

    whole, half = built(TensorProto.FLOAT), built(code)
    assert (2 * half.tensor_bytes == whole.tensor_bytes).all()
    assert (2 * half.accessed_bytes == whole.accessed_bytes).all()
    assert (half.flops == whole.flops).all()


def test_a_weight_is_turned_in_place_and_shared_by_its_readers(load):
    """As `nn.Linear` and a tied embedding are exported: w is one parameter."""
    graph = load(
        [
            node("Gather", "embedding.weight tokens", "a"),
            node("Transpose", "embedding.weight", "t", perm=[1, 0]),
            node("MatMul", "a t", "y"),
        ],
        {"tokens": ([6], TensorProto.INT64)},
        weights=[floats("embedding.weight", 50, 32)],
    )
    assert sources(graph)["embedding.weight"] == ("parameter", 6400)
    transpose = op_of(graph, "Transpose")
    assert graph.accessed_bytes[transpose] == 0
    assert graph.storages[graph.outputs_of(transpose)[0]] == graph.storages[0]
    assert graph.accessed_bytes[op_of(graph, "Gather")] == 2 * 6 * 32 * 4 + 6 * 8
    assert set(graph.modules[2:]) == {"embedding"}


def test_an_activation_is_turned_by_a_copy(load):
    graph = load([node("Transpose", "x", "y")], {"x": [3, 4]})
    assert graph.accessed_bytes[1] == 2 * 48
    assert graph.storages.tolist() == [0, 1]


def test_a_constant_of_a_node_is_a_weight_where_it_is_used_as_one(load):
    value = helper.make_tensor("v", TensorProto.FLOAT, [4, 5], [1.0] * 20)
    graph = load(
        [
            node("Constant", "", "weight", value=value),
            node("Constant", "", "shift", value=value),
            node("MatMul", "x weight", "a"),
            node("Add", "z shift", "b"),
        ],
        {"x": [3, 4], "z": [4, 5]},
        "a b",
    )
    assert sources(graph)["weight"] == ("parameter", 80)
    assert sources(graph)["shift"] == ("constant", 80)


def test_what_no_output_needs_is_left_out(load):
    graph = load(
        [node("Relu", "x", "y"), node("MatMul", "x unused.weight", "z")],
        {"x": [2, 3], "unused": [4]},
        weights=[floats("unused.weight", 3, 3)],
    )
    assert graph.names == ("x", "unused", "Relu")


def test_no_ops_disappear(load):
    graph = load(
        [
            node("Identity", "x", "a"),
            node("Dropout", "a", "b"),
            node("Cast", "b", "c", to=TensorProto.FLOAT),
            node("Reshape", "c shape", "d"),
            node("Relu", "d", "y"),
        ],
        {"x": [2, 3]},
        weights=[tensor("shape", np.array([2, 3]))],
    )
    assert graph.kinds == ("input", "onnx.Relu")


def branch(name, *nodes):
    return helper.make_graph(list(nodes), name, [], [helper.ValueInfoProto(name="out")])


@pytest.mark.parametrize(("rank", "kind"), [(2, "onnx.Relu"), (3, "onnx.Tanh")])
def test_an_if_that_a_shape_decides_is_one_of_its_branches(load, rank, kind):
    graph = load(
        [
            node("Shape", "x", "s"),
            node("Size", "s", "rank"),
            node("Equal", "rank two", "flat"),
            node(
                "If",
                "flat",
                "y",
                then_branch=branch("then", node("Relu", "x", "out")),
                else_branch=branch("else", node("Tanh", "x", "out")),
            ),
        ],
        {"x": [4] * rank},
        weights=[tensor("two", np.int64(2))],
    )
    assert graph.kinds == ("input", kind)


def test_functions_are_opened_with_the_attributes_of_their_call(load):
    shifted = node("Add", "scaled shift", "out")
    softmax = helper.make_node("Softmax", ["v"], ["scaled"])
    softmax.attribute.append(
        helper.AttributeProto(name="axis", ref_attr_name="dim", type=helper.AttributeProto.INT)
    )
    function = helper.make_function(
        "ours", "Shifted", ["v", "shift"], ["out"], [softmax, shifted],
        [helper.make_opsetid("", OPSET)], ["dim"],
    )  # fmt: skip
    twice = helper.make_function(
        "ours", "Twice", ["v", "shift"], ["out"],
        [
            node("Shifted", "v shift", "once", domain="ours", dim=0),
            node("Shifted", "once shift", "out", domain="ours", dim=1),
        ],
        [helper.make_opsetid("ours", 1)],
    )  # fmt: skip
    graph = load(
        [node("Twice", "x b", "y", "/head/block/Twice", domain="ours")],
        {"x": [3, 4]},
        weights=[floats("b", 4)],
        opsets=[("", OPSET), ("ours", 1)],
        functions=[function, twice],
    )
    assert graph.kinds[2:] == ("onnx.Softmax", "onnx.Add") * 2
    assert set(graph.modules[2:]) == {"head.block"}
    axes = [text.partition("axis=")[2] for text in graph.signatures if "Softmax" in text]
    assert axes == ["0)", "1)"]


def test_sequences_are_unrolled(load):
    """A split along the steps, each step used, and joined again."""
    graph = load(
        [
            node("SplitToSequence", "x", "parts", axis=0, keepdims=0),
            node("SequenceAt", "parts zero", "a"),
            node("SequenceAt", "parts last", "b"),
            node("Relu", "b", "c"),
            node("SequenceConstruct", "a c", "made"),
            node("ConcatFromSequence", "made", "y", axis=0, new_axis=1),
            node("SequenceLength", "made", "length"),
        ],
        {"x": [3, 2, 4]},
        weights=[tensor("zero", np.int64(0)), tensor("last", np.int64(-1))],
    )
    assert graph.kinds == (
        "input", "onnx.SplitToSequence", "onnx.Relu", "onnx.ConcatFromSequence"
    )  # fmt: skip
    assert [graph.shapes[t] for t in graph.outputs_of(1)] == [(2, 4)] * 3
    assert graph.shapes[graph.outputs[0]] == (2, 2, 4)


def test_scopes_become_module_paths(load):
    names = [
        "/layer1/layer1.0/conv1/Conv",
        "/layer1/layer1.0/conv1_1/Conv",
        "/conv_2/Conv",
        "Conv_7",
    ]
    weights = ["layer1.0.conv1.weight", "layer1.0.conv1.weight", "conv_2.weight", "tail.weight"]
    nodes = [
        node("Conv", f"x{i} {weight}", f"x{i + 1}", name)
        for i, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]
    scoped = node("Relu", "x4", "y", "node_relu_1")
    scoped.metadata_props.add(
        key="pkg.torch.onnx.name_scopes", value="['', 'layers', 'layers.3', 'relu_1']"
    )
    held = [floats(name, 1, 1, 1) for name in dict.fromkeys(weights)]
    graph = load([*nodes, scoped], {"x0": [1, 1, 4]}, weights=held)
    assert graph.names[4:] == (
        "layer1.0.conv1/Conv", "layer1.0.conv1/Conv_1", "conv_2/Conv", "tail/Conv_7",
        "layers.3/Relu",
    )  # fmt: skip
    assert graph.modules[4:] == ("layer1.0.conv1",) * 2 + ("conv_2", "tail", "layers.3")
    assert 1 <= group(graph).count <= 5


def test_open_axes_take_their_sizes_from_shapes_or_from_their_names(load):
    graph = load(
        [node("Add", "a b", "y")],
        {"a": ["batch", None, 4], "b": ["batch", 3, 4]},
        shapes={"a": (5, 3, 4)},
    )
    assert graph.shapes[:2] == ((5, 3, 4), (5, 3, 4))
    again = load(
        [node("Add", "a b", "y")],
        {"a": ["batch", None, 4], "b": ["batch", 3, 4]},
        shapes=graph.shapes[:2],
    )
    assert again.fingerprint == graph.fingerprint


def test_the_same_file_gives_the_same_graph(load):
    arguments = ([node("MatMul", "x w", "y")], {"x": [2, 3]})
    graphs = [load(*arguments, weights=[floats("w", 3, 3)]) for _ in range(2)]
    assert graphs[0].fingerprint == graphs[1].fingerprint


def test_external_data_is_not_read_but_for_small_integers(tmp_path):
    """A hole of 10 GB is a weight of 10 GB, in no memory; the shape after it is read."""
    rows = 2_500_000
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(rows * 4096)
        file.seek(rows * 4096)
        file.write(np.array([2, 500]).tobytes())
    weights = [
        external("w", [1000, rows], "weights.bin", length=rows * 4000),
        external("shape", [2], "weights.bin", TensorProto.INT64, offset=rows * 4096, length=16),
    ]
    nodes = [node("Gather", "w i", "b"), node("Reshape", "x shape", "a")]
    path = write(
        tmp_path / "model.onnx", nodes, {"x": [1000], "i": ([], TensorProto.INT64)}, "a b",
        weights=weights,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = load_onnx(path)
    scale = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * scale < 1e9
    assert sources(graph)["w"] == ("parameter", 10**10)
    assert [graph.shapes[t] for t in graph.outputs] == [(2, 500), (rows,)]


def test_shapes_that_onnx_leaves_open_are_found(load):
    depth, mask = tensor("depth", np.int64(7)), tensor("mask", np.array([True, False, True]))
    values, step = tensor("values", np.array([0.0, 1.0])), tensor("step", np.int64(8))
    graph = load(
        [
            node("OneHot", "i depth values", "a"),
            node("Compress", "x mask", "b", axis=0),
            node("STFT", "signal step - frame", "c"),
            node("MeanVarianceNormalization", "image", "d"),
        ],
        {"i": ([3], TensorProto.INT64), "x": [3, 5], "signal": [1, 128, 1], "image": [1, 2, 3, 3]},
        "a b c d",
        weights=[depth, mask, values, step, tensor("frame", np.int64(16))],
    )
    shapes = [graph.shapes[t] for t in graph.outputs]
    assert shapes == [(3, 7), (2, 5), (1, 15, 9, 2), (1, 2, 3, 3)]


def test_an_input_that_is_an_initializer_is_a_weight(tmp_path):
    model = model_of(
        [node("MatMul", "x w", "y")], {"x": [2, 3], "w": [3, 3]}, weights=[floats("w", 3, 3)]
    )
    model.graph.output[0].CopyFrom(declared("y", [2, 3]))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert load_onnx(tmp_path / "m.onnx").kinds == ("parameter", "input", "onnx.MatMul")
