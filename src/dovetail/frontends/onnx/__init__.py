"""Reads ONNX files into graphs with shapes, FLOPs, bytes and module paths.

There is no program: a network from an ONNX file is planned for but not run.

    file ──► model ──► inputs with their shapes ──► ops ──► graph
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import FileFormatError, ModelError
from dovetail.frontends.onnx.flops import ONNX_MATRIX_KINDS, count_bytes, count_flops, unknown_flops
from dovetail.frontends.onnx.reading import (
    Op,
    Shapes,
    Value,
    Weights,
    input_values,
    onnx_library,
    parse_shapes,
    read_model,
)
from dovetail.frontends.onnx.walking import NodeReader, module_of_weight, top_scope
from dovetail.graph import Graph, Phase
from dovetail.units import MOST_BYTES

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
    _settle_roles(graph, scope.values, reader.ops)
    return _build(str(path), reader.ops, inputs, outputs)


def is_from_onnx(graph: Graph) -> bool:
    """Return True if the graph comes from an ONNX file."""
    return any(kind.startswith("onnx.") for kind in graph.kinds)


# The graph: sources come first, names are made unique, and ops that no output needs are left out.


_ORDER = ("parameter", "buffer", "input", "constant")


def _build(
    model: str, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value]
) -> Graph:
    """Return the graph of all inputs and of the ops that `outputs` need. O(ops + tensors)."""
    makers = {value.op for value in outputs if value.op is not None}
    for op in reversed(ops):
        if op in makers:
            makers.update(value.op for value in op.reads if value.op is not None)
    needed = [op for op in ops if op in makers]
    # The weights and constants that are read, and all inputs.
    read = dict.fromkeys(value for op in needed for value in op.reads if value.op is None)
    read.update(dict.fromkeys(value for value in outputs if value.op is None))
    of_graph = [*(value for value in read if value.role != "input"), *inputs]
    sources = sorted(of_graph, key=lambda value: _ORDER.index(value.role))
    first = len(sources)
    taken: dict[str, int] = {}
    paths = (f"{op.module}/{op.leaf}" if op.module else op.leaf for op in needed)
    names = [_unique(name, taken) for name in (*(s.name for s in sources), *paths)]
    values = [*sources, *(value for op in needed for value in op.outputs)]
    producers = [*range(first)]
    producers += [first + i for i, op in enumerate(needed) for _ in op.outputs]
    tensor = {value: i for i, value in enumerate(values)}
    reads: list[list[int]] = [[] for _ in sources]
    reads += [[tensor[value] for value in op.reads] for op in needed]
    flops = [0] * first + [count_flops(op) for op in needed]
    accessed = [0] * first + [count_bytes(op) for op in needed]
    for name, *counts in zip(names, flops, accessed, strict=True):
        if max(counts) >= MOST_BYTES:  # a column has 64 bits
            raise ModelError(
                model, f"op {name!r} has impossible work: {max(counts)} FLOPs or bytes"
            )
    storage: dict[Value, int] = {}  # a view has its base's
    for value in values:
        storage[value] = len(storage) if value.base is None else storage[value.base]
    index = {number: i for i, number in enumerate(dict.fromkeys(storage.values()))}
    of_sources = (
        module_of_weight(source.name) if source.role in ("parameter", "buffer") else ""
        for source in sources
    )
    return Graph(
        names=tuple(names),
        kinds=(*(s.role for s in sources), *(op.kind for op in needed)),
        signatures=(*(s.role for s in sources), *(op.signature for op in needed)),
        modules=(*of_sources, *(op.module for op in needed)),
        phases=np.array([Phase.SOURCE] * first + [Phase.FORWARD] * len(needed), dtype=np.int8),
        flops=np.array(flops, dtype=np.int64),
        accessed_bytes=np.array(accessed, dtype=np.int64),
        producers=np.array(producers, dtype=np.int32),
        shapes=tuple(value.shape for value in values),
        strides=tuple(_strides(value.shape) for value in values),
        dtypes=tuple(value.dtype for value in values),
        tensor_bytes=np.array([value.size_bytes for value in values], dtype=np.int64),
        storages=np.array([index[number] for number in storage.values()], dtype=np.int32),
        input_offsets=np.cumsum([0, *map(len, reads)]),
        input_tensors=np.array([t for of_op in reads for t in of_op], dtype=np.int32),
        outputs=np.array([tensor[value] for value in outputs], dtype=np.int32),
    )


def _unique(name: str, taken: dict[str, int]) -> str:
    """Return the name, with _1, _2, ... appended where it is taken."""
    while name in taken:
        taken[name] += 1
        name = f"{name}_{taken[name]}"
    taken[name] = 0
    return name


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# Roles of constants. A file does not say which ones are parameters and which are buffers.


_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_STATISTICS = {"BatchNormalization": (3, 4)}
"""Kind of op -> positions of the inputs that training writes: mean and variance."""
_WEIGHTS = {
    "BatchNormalization": (1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2), "GRU": (1, 2, 3),
    "Gather": (0,), "Gemm": (1, 2), "InstanceNormalization": (1, 2), "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2), "MatMul": (1,), "RNN": (1, 2, 3),
}  # fmt: skip
"""Kind of op -> positions of the inputs that are learned. A constant that stands in a node is a
parameter only if an op reads it at such a position."""


def _settle_roles(graph: Any, values: dict[str, Any], ops: Iterable[Op]) -> None:
    """Set the role of buffers, and of weights that stand in a node.

    A buffer is what torch's exporter calls one, or a statistic of a batch normalisation. A constant
    that stands in a node becomes a parameter if an op reads it as a weight.
    """
    for info in graph.value_info:
        kinds = [entry.value for entry in info.metadata_props if entry.key == _KIND]
        value = values.get(info.name)
        if kinds == ["BUFFER"] and isinstance(value, Value) and value.op is None:
            value.role = "buffer"
    for op in ops:
        kind = op.kind.removeprefix("onnx.")
        for value in _inputs_at(op, _STATISTICS.get(kind, ())):
            if value.role == "parameter":
                value.role = "buffer"
        for value in _inputs_at(op, _WEIGHTS.get(kind, ())):
            if value.literal and value.floating and value.shape:
                value.role = "parameter"


def _inputs_at(op: Op, positions: tuple[int, ...]) -> list[Value]:
    """Return the root values of the op's inputs at these positions."""
    inputs = [op.inputs[position] for position in positions if position < len(op.inputs)]
    return [value.root for value in inputs if value is not None]
