"""The cost model of kernels: `benchmarks/predictor` says how far off it is; these are its rules."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.costs import analytic_costs
from dovetail.costs.kernels import (
    MOVES_NOTHING,
    ROOFLINE_SPREAD,
    TABLE,
    class_of,
    kernel_model,
    kernel_seconds,
    kernels_of,
    product_seconds,
    rate_dtypes,
    step_spread,
)
from dovetail.errors import MachineError
from dovetail.frontends.flops import MATRIX_KINDS
from dovetail.machine import parse_machine
from tests.support.builders import Op, graph_of, machine_of, source

LAW = kernel_model().laws["product"]


def device(text="v100"):
    return parse_machine(f"{text} + xeon").devices[0]


def seconds_of(text, rows, columns, inner, batches=1, dtype="float32"):
    sizes = np.array([[batches], [rows], [columns], [inner]], float)
    return float(product_seconds(LAW, device(text), sizes, dtype)[0])


def kinds(graph, *names):
    return replace(graph, kinds=names, signatures=tuple(f"{n} {i}" for i, n in enumerate(names)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("aten.addmm", "product"), ("onnx.MatMul", "product"), ("onnx.Conv", "convolution"),
     ("aten.convolution_backward", "convolution"), ("aten._softmax", "softmax"),
     ("aten._scaled_dot_product_flash_attention", "attention"), ("onnx.Attention", "attention"),
     ("aten.native_layer_norm_backward", "normalisation"), ("onnx.ReduceMean", "reduction"),
     ("onnx.LayerNormalization", "normalisation"), ("aten.embedding", "gather"),
     ("dovetail.adam", "update"), ("aten.empty_like", MOVES_NOTHING), ("aten.gelu", "pointwise"),
     ("somebody.op", "pointwise")],
)  # fmt: skip
def test_a_kind_has_a_class(kind, expected):
    assert class_of(kind) == expected


def test_every_class_has_a_spread_and_those_without_data_have_wider_ones():
    model = kernel_model()
    found = ("aten.mm", "aten.convolution", "aten.add", "aten.sum", "aten._softmax", "aten.index",
             "aten.native_layer_norm", "dovetail.sgd")  # fmt: skip
    classes = {class_of(kind) for kind in found}
    assert classes <= set(model.spreads)
    assert model.spreads[MOVES_NOTHING] == 0
    assert all(0 < s < 1 for name, s in model.spreads.items() if name != MOVES_NOTHING)
    unfitted = set(json.loads(TABLE.read_text())["unfitted"])
    assert unfitted == {
        "attention", "gather", "recurrent", "reduction", "tensor cores", "update",
    }  # fmt: skip
    assert min(model.spreads[name] for name in unfitted) > model.spreads["pointwise"]


@pytest.mark.parametrize("kind", sorted(MATRIX_KINDS))
def test_what_multiplies_matrices_is_no_pointwise_op(kind):
    assert class_of(kind) in ("product", "convolution", "attention", "recurrent")


def test_views_are_views_whatever_else_is_in_the_graph():
    graph = graph_of(source("w"), Op("v", ("w",), flops=0, accessed_bytes=0), Op("a", ("v",)))
    kernels = kernels_of(kinds(graph, "parameter", "aten.view", "aten.add"))
    assert kernels.classes[kernels.of_op].tolist() == [MOVES_NOTHING, MOVES_NOTHING, "pointwise"]


def test_a_misspelt_class_of_a_calibration_is_named():
    card = replace(device(), calibration={"prodct": 2.0})
    with pytest.raises(MachineError, match=r"prodct.*none of attention, convolution"):
        kernel_seconds(kernels_of(graph_of(Op("a"))), card)


# Of public record (NeuSight, ASPLOS 2025, MIT licence): the layers of GPT-2 large.
MEASURED = [
    ("v100-pcie", 4096, 5120, 1280, 4.409e-3), ("v100-pcie", 4096, 1280, 5120, 4.228e-3),
    ("v100-pcie", 4096, 3840, 1280, 2.929e-3), ("a100-40gb-pcie", 4096, 1280, 5120, 3.117e-3),
]  # fmt: skip


@pytest.mark.parametrize(("card", "rows", "columns", "inner", "measured"), MEASURED)
def test_products_of_a_network_that_nothing_was_fitted_to(card, rows, columns, inner, measured):
    assert seconds_of(card, rows, columns, inner) == pytest.approx(measured, rel=0.35)


side = st.integers(1, 9000)


@given(side, side, side, st.integers(1, 64), st.sampled_from(["p100", "t4", "h100", "rtx4090"]))
def test_no_product_is_faster_than_peak_and_bandwidth(rows, columns, inner, batches, text):
    found = seconds_of(text, rows, columns, inner, batches)
    card, operands = device(text), rows * inner + inner * columns + rows * columns
    assert found * card.rate("float32") >= 2 * batches * rows * columns * inner
    assert found * card.bandwidth_bytes_per_second >= 4 * batches * operands * (1 - 1e-9)


@given(side, side, side, st.integers(1, 64))
def test_more_batches_rows_or_inner_elements_never_take_less_time(rows, columns, inner, batches):
    before = seconds_of("a100", rows, columns, inner, batches)
    for bigger in (
        (2 * rows, inner, batches),
        (rows, 2 * inner, batches),
        (rows, inner, 2 * batches),
    ):
        assert seconds_of("a100", bigger[0], columns, bigger[1], bigger[2]) >= before * (1 - 1e-9)


def test_a_card_of_less_power_is_slower_and_one_of_unknown_power_runs_at_its_peak():
    card = device("rtx3090")
    sizes = np.array([[1.0], [8192], [8192], [8192]])

    def seconds(watts):
        return float(
            product_seconds(LAW, replace(card, chip=replace(card.chip, watts=watts)), sizes)[0]
        )

    assert seconds(100.0) > seconds(200.0) > seconds(350.0) > seconds(0.0)
    assert seconds(0.0) == seconds(1e6)


def test_half_precision_on_tensor_cores_is_faster_and_not_bound_by_the_power_of_float32():
    assert seconds_of("a100", 8192, 8192, 8192, dtype="float16") < 0.15 * seconds_of(
        "a100", 8192, 8192, 8192
    )


def test_views_and_allocations_take_nothing_on_a_gpu_and_other_ops_their_launch():
    graph = graph_of(
        source("w"),
        Op("view", ("w",), flops=0, accessed_bytes=0),
        Op("empty", ("w",), accessed_bytes=4 * 10**9),
        Op("add", ("w",), accessed_bytes=8),
    )
    graph = kinds(graph, "parameter", "aten.view", "aten.empty_like", "aten.add")
    found = analytic_costs(graph, parse_machine("v100 + xeon")).compute_seconds[:, 0]
    np.testing.assert_array_equal(found[:3], 0.0)
    assert found[3] == pytest.approx(device().op_overhead_seconds, rel=0.01)


def test_ops_of_one_signature_are_one_kernel():
    graph = graph_of(
        source("w"), *(Op(f"a{i}", ("w",), flops=8, accessed_bytes=8) for i in range(5))
    )
    kernels = kernels_of(replace(graph, signatures=("w", *"xyxyx")))
    assert kernels.of_op.tolist() == [0, 1, 2, 1, 2, 1]
    assert len(kernels.flops) == 3


def captured(module, *examples):
    import dovetail as dt

    return dt.capture(module, *examples).graph


def test_sizes_of_products_and_convolutions_of_captured_networks():
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.filters = nn.Linear(48, 80), nn.Conv2d(3, 16, 5, stride=2, bias=False)

        def forward(self, tokens, image, left, right):
            return self.line(tokens), self.filters(image), torch.bmm(left, right)

    shapes = (6, 7, 48), (2, 3, 33, 33), (4, 9, 10), (4, 10, 11)
    kernels = kernels_of(captured(Net().eval(), *(torch.zeros(shape) for shape in shapes)))
    found = {
        tuple(kernels.sizes[:, i].tolist())
        for i, name in enumerate(kernels.classes)
        if name in ("product", "convolution")
    }
    assert found == {(1, 42, 80, 48), (1, 2 * 15 * 15, 16, 3 * 5 * 5), (4, 9, 11, 10)}


def test_an_op_runs_at_the_rate_of_its_widest_number():
    graph = graph_of(
        Op("half", dtype="float16"),
        Op("whole", ("half",), dtype="float32"),
        Op("count", ("whole",), dtype="int64"),
    )
    assert rate_dtypes(graph).tolist() == ["float16", "float32", "float32"]


def test_the_machines_of_papers_keep_the_roofline_that_was_fitted_to_them():
    assert all(d.chip is None for d in parse_machine("rl17/4").devices)
    graph = graph_of(source("w"), Op("a", ("w",), flops=10**12, accessed_bytes=8))
    card = parse_machine("rl17/2").devices[0]
    found = analytic_costs(graph, parse_machine("rl17/2")).compute_seconds[1, 0]
    rate = card.rate("float32") * card.efficiency("aten.op")
    assert found == pytest.approx(card.op_overhead_seconds + 10**12 / rate, rel=1e-3)


def test_the_spread_of_a_step_is_its_kernels_mean_by_their_seconds():
    graph = graph_of(source("w"), *(Op(n, ("w",), accessed_bytes=8 * 10**9) for n in "ab"))
    graph = kinds(graph, "parameter", "aten.add", "aten.index")
    machine, model = parse_machine("v100 + xeon"), kernel_model()
    seconds = np.array([[0.0, 0.0], [3.0, 3.0], [1.0, 1.0]])
    here = np.zeros(3, np.intp)
    mean = (3 * model.spreads["pointwise"] + model.spreads["gather"]) / 4
    assert step_spread(graph, machine, here, seconds) == pytest.approx(mean * model.pooling)
    assert step_spread(graph, machine_of(1), here, seconds) == pytest.approx(ROOFLINE_SPREAD)
    assert step_spread(graph, machine, here, np.zeros_like(seconds)) == 0.0


def test_a_whole_step_on_an_h100_is_within_a_third_of_what_was_measured():
    """BERT-large, 8 x 512 tokens in float32: 69.8 ms (NeuSight). Its work: 24 layers."""
    tokens, hidden, layers = 8 * 512, 1024, 24
    products = 4 * seconds_of("h100", tokens, hidden, hidden) + seconds_of(
        "h100", tokens, 4 * hidden, hidden
    )
    products += seconds_of("h100", tokens, hidden, 4 * hidden)
    attention = seconds_of("h100", 512, 512, 64, 128) + seconds_of("h100", 512, 64, 512, 128)
    assert math.isclose(layers * (products + attention), 69.8e-3, rel_tol=0.33)


def joined(*ops):
    """A graph of ops (name, kind, inputs), each of which reads and writes 4 bytes a tensor."""
    made = [source(name) for name in ("scale", "shift")]
    made += [Op("x", flops=1, accessed_bytes=4)]
    for name, _, inputs in ops:
        made.append(Op(name, inputs, flops=1, accessed_bytes=4 * (len(inputs) + 1)))
    graph = graph_of(*made)
    names = ("parameter", "parameter", "onnx.Conv", *(kind for _, kind, _ in ops))
    kernels = kernels_of(kinds(graph, *names))
    bytes_of = kernels.accessed_bytes[kernels.of_op].tolist()
    joins = kernels.joins[kernels.of_op].tolist()
    return {n: (b, j) for n, b, j in zip(graph.names, bytes_of, joins, strict=True)}


def test_what_onnx_scales_and_shifts_after_a_kernel_runs_within_it():
    size = graph_of(Op("x")).tensor_bytes[0]
    found = joined(
        ("normal", "onnx.InstanceNormalization", ("x",)),
        ("same", "onnx.Reshape", ("normal",)),
        ("scaled", "onnx.Mul", ("same", "scale")),
        ("shifted", "onnx.Add", ("scaled", "shift")),
        ("sum", "onnx.Add", ("shifted", "x")),
    )
    assert [name for name, (_, joins) in found.items() if joins] == ["scaled", "shifted"]
    assert found["normal"][0] == max(0, 8 - size)
    assert found["scaled"][0] == max(0, 12 - 2 * size)
    assert found["sum"][0] == 12


def test_a_bias_joins_its_product_which_writes_once():
    size = graph_of(Op("x")).tensor_bytes[0]
    found = joined(
        ("product", "onnx.MatMul", ("x", "scale")), ("biased", "onnx.Add", ("product", "shift"))
    )
    assert found["product"] == (12, False)
    assert found["biased"] == (max(0, 12 - 2 * size), True)


@pytest.mark.parametrize(
    "ops",
    [
        [("relu", "onnx.Relu", ("x",)), ("y", "onnx.Mul", ("relu", "scale"))],
        [("y", "onnx.Mul", ("x",))],  # a square: an op reads each tensor once
        [("relu", "onnx.Relu", ("x",)), ("y", "onnx.Add", ("x", "relu"))],
        [("all", "onnx.Concat", ("x",)), ("y", "onnx.Add", ("all", "shift"))],
    ],
)
def test_what_torch_runs_by_itself_joins_nothing(ops):
    assert not any(joins for _, joins in joined(*ops).values())


def test_silu_is_one_kernel_and_a_value_that_others_read_is_written():
    silu = joined(("gate", "onnx.Sigmoid", ("x",)), ("silu", "onnx.Mul", ("x", "gate")))
    assert [name for name, (_, joins) in silu.items() if joins] == ["silu"]
    others = joined(
        ("scaled", "onnx.Mul", ("x", "scale")),
        ("gate", "onnx.Sigmoid", ("x",)),
        ("gated", "onnx.Mul", ("scaled", "gate")),
    )
    assert not any(joins for _, joins in others.values())
