"""Shapes of what a node makes, and its content where all that it reads is known."""

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UnknownShapeError, UnsupportedOpError
from dovetail.frontends.onnx.gaps import Inputs, Shaped, own_rule
from dovetail.frontends.onnx.reading import onnx_library
from dovetail.frontends.onnx.records import ELEMENT_TYPES, MOST_KNOWN_ELEMENTS, Value

_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
}  # fmt: skip
_AXES = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(f"{_AXES}(,{_AXES})*(->{_AXES})?")
Versions = dict[str, int]
"""Domain -> version of its operators."""


class Inference:
    """Shapes by the rules of the package `onnx`, node by node, with whatever content is known:
    what follows from a shape, a `Reshape` to it for one, is found without exception."""

    def __init__(self, model: str, ir_version: int) -> None:
        self.model = model
        self.ir_version = ir_version
        self.onnx = onnx_library()

    def outputs(
        self, op: str, node: Any, schema: Any, inputs: Inputs, versions: Versions
    ) -> list[Value | None]:
        """A value per output, None where it is left out. Raises `UnknownShapeError`."""
        if fault := _fault(node, inputs):
            raise UnknownShapeError(self.model, op, node.output[0], fault)
        known = _known(node, inputs)
        if known is None:
            found = self._inferred(op, node, schema, inputs, versions)
            known = self._folded(node, found, inputs, versions)
        else:
            found = {}
        values: list[Value | None] = []
        for position, name in enumerate(node.output):
            if not name:
                values.append(None)
            elif known is not None:
                values.append(self._known_value(name, known[position]))
            else:
                own = own_rule(node, inputs) if position == 0 else None
                values.append(self._value(op, name, own or _shaped(found.get(name))))
        return values

    def _inferred(
        self, op: str, node: Any, schema: Any, inputs: Inputs, versions: Versions
    ) -> dict[str, Any]:
        """output -> `TypeProto`."""
        onnx = self.onnx
        named = {name: v for name, v in zip(node.input, inputs, strict=True) if v is not None}
        types = {
            name: onnx.helper.make_tensor_type_proto(value.code, value.shape)
            for name, value in named.items()
        }
        data = {
            name: onnx.numpy_helper.from_array(value.data, name)
            for name, value in named.items()
            if value.data is not None
        }
        opsets = [onnx.helper.make_opsetid(*opset) for opset in versions.items()]
        try:
            found: dict[str, Any] = onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=opsets, ir_version=self.ir_version
            )
        except Exception as error:  # several kinds, RuntimeError among them, none of a common base
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise UnknownShapeError(self.model, op, node.output[0], said[0]) from None
        return found

    def _folded(
        self, node: Any, found: dict[str, Any], inputs: Inputs, versions: Versions
    ) -> list[NDArray[Any]] | None:
        """The outputs' content, where it follows from the file alone and is small."""
        if node.op_type in _RANDOM or any(v is not None and v.data is None for v in inputs):
            return None
        own = own_rule(node, inputs)
        for name in node.output:
            shaped = own if own and name == node.output[0] else _shaped(found.get(name))
            if shaped is not None and math.prod(shaped[1]) > MOST_KNOWN_ELEMENTS:
                return None
        onnx = self.onnx
        graph = onnx.helper.make_graph(
            [node],
            "one node",
            [
                onnx.helper.make_tensor_value_info(name, value.code, value.shape)
                for name, value in dict(zip(node.input, inputs, strict=True)).items()
                if value is not None
            ],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        opsets = [onnx.helper.make_opsetid(*opset) for opset in versions.items()]
        given = {n: v.data for n, v in zip(node.input, inputs, strict=True) if v is not None}
        try:
            model = onnx.helper.make_model(graph, opset_imports=opsets)
            with np.errstate(all="ignore"):
                made = onnx.reference.ReferenceEvaluator(model).run(None, given)
            codes = {onnx.helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype) for a in made}
        except Exception:  # what the reference cannot evaluate is an op like any other
            return None
        arrays = iter(made)
        results = [next(arrays) if name else np.empty(0) for name in node.output]
        tensors = all(isinstance(a, np.ndarray | np.generic) for a in results)
        return [np.asarray(a) for a in results] if tensors and codes <= set(ELEMENT_TYPES) else None

    def _known_value(self, name: str, data: NDArray[Any]) -> Value:
        code = self.onnx.helper.np_dtype_to_tensor_dtype(data.dtype)
        return Value(name, code, data.shape, data, role="constant")

    def _value(self, op: str, name: str, shaped: Shaped | None) -> Value:
        if shaped is None:
            raise UnknownShapeError(self.model, op, name, "it depends on data, or has no rule")
        code, shape = shaped
        if code not in ELEMENT_TYPES:
            raise UnsupportedOpError(self.model, op, f"makes {name!r}, which is text or unknown")
        value = Value(name, code, shape)
        if not value.possible:
            raise UnknownShapeError(self.model, op, name, f"{shape} is impossible")
        return value


def _fault(node: Any, inputs: Inputs) -> str:
    """What is wrong with a node that the package `onnx` does not see, or never returns from."""
    if node.domain not in ("", "ai.onnx"):
        return ""
    recurrent = node.op_type in ("GRU", "LSTM", "RNN")
    if recurrent and any(value is None or len(value.shape) != 3 for value in inputs[:3]):
        return "its first three inputs have three axes each"
    if node.op_type == "Einsum":
        equations = [a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"]
        wrong = [text for text in equations if not _EQUATION.fullmatch(text)]
        return f"{wrong[0]!r} is no equation" if wrong else ""
    return ""


def _known(node: Any, inputs: Inputs) -> list[NDArray[Any]] | None:
    """Of `Shape` and `Size`, which need no content of what they read."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Shape", "Size"):
        return None
    if len(inputs) != 1 or inputs[0] is None:
        return None
    ends = {a.name: a.i for a in node.attribute}
    shape = inputs[0].shape
    if node.op_type == "Size":
        return [np.array(inputs[0].elements, dtype=np.int64)]
    return [np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], dtype=np.int64)]


def _shaped(found: Any) -> Shaped | None:
    """Type and shape of a `TypeProto`; None where one of its axes is not known."""
    if found is None or not found.HasField("tensor_type"):
        return None
    tensor = found.tensor_type
    if not tensor.HasField("shape"):
        return None
    if any(not dim.HasField("dim_value") or dim.dim_value < 0 for dim in tensor.shape.dim):
        return None
    return tensor.elem_type, tuple(dim.dim_value for dim in tensor.shape.dim)
