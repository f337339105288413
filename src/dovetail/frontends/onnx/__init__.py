"""Reads ONNX files into graphs with shapes, FLOPs, bytes and module paths.

There is no program: a network from an ONNX file is planned for but not run.

    file ──► model ──► inputs with their shapes ──► ops ──► graph
"""

from pathlib import Path

from dovetail.errors import FileFormatError
from dovetail.frontends.onnx.building import build, settle_roles
from dovetail.frontends.onnx.flops import ONNX_MATRIX_KINDS, unknown_flops
from dovetail.frontends.onnx.reading import (
    Shapes,
    Weights,
    input_values,
    onnx_library,
    parse_shapes,
    read_model,
)
from dovetail.frontends.onnx.walking import NodeReader, top_scope
from dovetail.graph import Graph

__all__ = [
    "ONNX_MATRIX_KINDS",
    "Shapes",
    "is_from_onnx",
    "load_onnx",
    "parse_shapes",
    "unknown_flops",
]


def load_onnx(path: str | Path, shapes: Shapes | None = None) -> Graph:
    """Return the graph of an ONNX file.

    shapes   {input: shape} for inputs with open axes, or the shapes of all inputs in order

    Weights are not read, so a model of any size takes little memory. Values that follow from the
    file alone (shapes, indices) are computed now and have no op. Ops that no output needs are left
    out. `unknown_flops` lists the ops without a rule for their FLOPs. Takes about .1 ms per op and
    1 ms per op that is computed now.

    Raises `FileFormatError` (`ExternalDataError`), or `ModelError`: `OpenAxisError`,
    `UnknownOpError`, `UnsupportedOpError`, `UnknownShapeError`; without the extra `dovetail[onnx]`
    `MissingLibraryError`.
    """
    onnx = onnx_library()
    path = Path(path)
    model = read_model(path)
    graph = model.graph
    initialized = {tensor.name for tensor in graph.initializer}
    given = [value for value in graph.input if value.name not in initialized]
    inputs = input_values(str(path), given, shapes if shapes is not None else {})
    reader, scope = NodeReader(onnx, model, Weights(path)), top_scope(model, inputs)
    reader.open_graph(graph, scope)
    outputs = []
    for output in graph.output:
        value = scope.values.get(output.name)
        if value is None:
            raise FileFormatError(str(path), f"nothing makes the output {output.name!r}")
        outputs += value if isinstance(value, list) else [value]
    settle_roles(graph, scope.values, reader.ops)
    return build(str(path), reader.ops, inputs, outputs)


def is_from_onnx(graph: Graph) -> bool:
    """Return True if the graph comes from an ONNX file."""
    return any(kind.startswith("onnx.") for kind in graph.kinds)
