"""What torch's exporter writes counts as what is captured directly."""

import io
import warnings

import numpy as np
import onnx
import pytest
import torch

from dovetail.frontends import capture, matrix_flops
from dovetail.frontends.onnx import load_onnx, unknown_flops
from dovetail.networks import NETWORKS

# Of sizes at which what the exporter changes is small beside the rest, as at the papers' sizes: it
# folds batch norms into convolutions, and spells out the softmax of an attention.
SIZES = {
    "gpt2": {"hidden": 64, "context": 16, "vocabulary": 200},
    "inception_v3": {"width": 0.3},
    "rnnlm": {"hidden": 32},
    "squeezenet_1_1": {},
    "two_tower": {},
    "vit": {"hidden": 64, "inner": 256},
    "wavenet": {"residual": 32, "gated": 32, "skip": 64},
}


def parameter_bytes(graph):
    return sum(
        int(graph.tensor_bytes[graph.outputs_of(op)[0]])
        for op, kind in enumerate(graph.kinds)
        if kind == "parameter"
    )


def built(name, options):
    torch.manual_seed(0)
    network = NETWORKS[name]
    module, inputs, _, _ = network.build(**(network.small | options))
    return module.eval(), inputs


def export(path, module, inputs, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own, about its future
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
        program.save(path, external_data=True)
    return path


@pytest.mark.parametrize("name", SIZES)
def test_an_exported_network_counts_as_the_captured_one(name, tmp_path):
    module, inputs = built(name, SIZES[name])
    graph = load_onnx(export(tmp_path / "model.onnx", module, inputs))
    direct = capture(module, *inputs).graph
    assert matrix_flops(graph) == matrix_flops(direct)
    assert int(graph.flops.sum()) == pytest.approx(int(direct.flops.sum()), rel=0.01)
    assert parameter_bytes(graph) == pytest.approx(parameter_bytes(direct), rel=0.01)
    assert graph.shapes[graph.outputs[0]] == direct.shapes[direct.outputs[0]]
    assert not unknown_flops(graph)


def test_without_the_exporters_optimizer_the_counts_are_equal(tmp_path):
    module, inputs = built("transformer_xl", {})
    graph = load_onnx(export(tmp_path / "model.onnx", module, inputs, optimize=False))
    direct = capture(module, *inputs).graph
    assert matrix_flops(graph) == matrix_flops(direct)
    assert parameter_bytes(graph) == parameter_bytes(direct)
    modules = {m for m, source in zip(direct.modules, direct.is_source, strict=True) if not source}
    assert modules == {m for m, s in zip(graph.modules, graph.is_source, strict=True) if not s}


def test_what_an_exporter_folds_beforehand_is_not_counted(tmp_path):
    """Batch norm in its own op: equal to the last FLOP and byte."""
    module, inputs = built("squeezenet_1_0", {})
    module = torch.nn.Sequential(module, torch.nn.BatchNorm1d(10)).eval()
    graph = load_onnx(export(tmp_path / "model.onnx", module, inputs, optimize=False))
    direct = capture(module, *inputs).graph
    assert int(graph.flops.sum()) == int(direct.flops.sum())
    assert parameter_bytes(graph) == parameter_bytes(direct)
    assert graph.kinds.count("buffer") == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_export_has_half_the_bytes(tmp_path, dtype):
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
    ).to(dtype)
    x = torch.randn(8, 64, dtype=dtype)
    graph = load_onnx(export(tmp_path / "model.onnx", module, (x,)))
    direct = capture(module, x).graph
    assert set(graph.dtypes) == {str(dtype).removeprefix("torch.")}
    assert parameter_bytes(graph) == parameter_bytes(direct) == 2 * (64 * 128 + 128 + 128 * 32 + 32)
    assert int(graph.flops.sum()) == int(direct.flops.sum())


def test_an_open_batch_is_given_by_name(tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.ReLU())
    batch = torch.export.Dim("batch")
    path = export(
        tmp_path / "model.onnx", module, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},)
    )
    (name,) = [value.name for value in onnx.load(path).graph.input]
    graph = load_onnx(path, {name: (5, 3, 8, 8)})
    assert graph.shapes[graph.outputs[0]] == (5, 4 * 36)
    assert int(graph.flops.sum()) == 2 * (5 * 4 * 36) * 27 + 5 * 4 * 36


def test_the_older_exporter_is_read_as_well(tmp_path):
    module, inputs = built("rnnlm", {})
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, file, dynamo=False)
    (tmp_path / "model.onnx").write_bytes(file.getvalue())
    graph, direct = load_onnx(tmp_path / "model.onnx"), capture(module, *inputs).graph
    assert int(graph.flops.sum()) == int(direct.flops.sum())
    assert parameter_bytes(graph) == parameter_bytes(direct)
    forward = np.flatnonzero(~graph.is_source)
    assert {"lstm.0", "lstm.1", "softmax"} <= {graph.modules[op] for op in forward}
