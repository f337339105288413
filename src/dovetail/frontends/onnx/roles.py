"""Which constants of a file are parameters, and which are buffers: it tells neither."""

from collections.abc import Iterable
from typing import Any

from dovetail.frontends.onnx.records import Op, Value

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_STATISTICS = {"BatchNormalization": (3, 4)}
"""Inputs that training writes: mean and variance."""
_WEIGHTS = {
    "BatchNormalization": (1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2), "GRU": (1, 2, 3),
    "Gather": (0,), "Gemm": (1, 2), "InstanceNormalization": (1, 2), "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2), "MatMul": (1,), "RNN": (1, 2, 3),
}  # fmt: skip
"""Inputs that are learned. A constant made by a node is one only if it stands here."""


def settle_roles(graph: Any, values: dict[str, Any], ops: Iterable[Op]) -> None:
    """Give buffers their role (what torch's exporter says is one, and the statistics of batch
    normalisations), and theirs to weights that stand in a node and not among the initializers."""
    for info in graph.value_info:
        kinds = [entry.value for entry in info.metadata_props if entry.key == _KIND]
        value = values.get(info.name)
        if kinds == ["BUFFER"] and isinstance(value, Value) and value.op is None:
            value.role = "buffer"
    for op in ops:
        kind = op.kind.removeprefix("onnx.")
        for value in _at(op, _STATISTICS.get(kind, ())):
            if value.role == "parameter":
                value.role = "buffer"
        for value in _at(op, _WEIGHTS.get(kind, ())):
            if value.literal and value.floating and value.shape:
                value.role = "parameter"


def _at(op: Op, positions: tuple[int, ...]) -> list[Value]:
    """What stands behind the inputs at these positions."""
    inputs = [op.inputs[position] for position in positions if position < len(op.inputs)]
    return [value.root for value in inputs if value is not None]
