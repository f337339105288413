"""Sequences of tensors, unrolled while the file is read: positions and lengths must be known."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.errors import UnsupportedOpError
from dovetail.frontends.onnx.records import MOST_KNOWN_ELEMENTS, Found, Value
from dovetail.frontends.onnx.scopes import label

if TYPE_CHECKING:
    from dovetail.frontends.onnx.walking import Scope, Walk

NodeRule = Callable[["Walk", Any, list[Found], "Scope"], list[Found]]
"""Returns what a node's outputs stand for."""


def _sequence_of(walk: "Walk", node: Any, found: Found) -> list[Value]:
    if not isinstance(found, list):
        raise UnsupportedOpError(walk.path, label(node), "reads a sequence that is not known")
    return found


def _tensor_of(walk: "Walk", node: Any, found: Found) -> Value:
    if not isinstance(found, Value):
        raise UnsupportedOpError(walk.path, label(node), "lacks a tensor to read")
    return found


def _axis_of(walk: "Walk", node: Any, axis: int | None, axes: int) -> int:
    if axis is None or not -axes <= axis < axes:
        raise UnsupportedOpError(walk.path, label(node), f"has the axis {axis} of {axes}")
    return axis % axes


def _position(walk: "Walk", node: Any, found: Found, default: int) -> int:
    if found is None:
        return default
    if isinstance(found, list) or found.number is None:
        raise UnsupportedOpError(walk.path, label(node), "takes a position that depends on data")
    return found.number


def _sequence_construct(walk: "Walk", node: Any, inputs: list[Found], _: "Scope") -> list[Found]:
    return [[_tensor_of(walk, node, found) for found in inputs]]


def _sequence_at(walk: "Walk", node: Any, inputs: list[Found], _: "Scope") -> list[Found]:
    values = _sequence_of(walk, node, inputs[0])
    position = _position(walk, node, inputs[1], 0)
    if not -len(values) <= position < len(values):
        raise UnsupportedOpError(walk.path, label(node), f"takes {position} of {len(values)}")
    return [values[position]]


def _sequence_insert(walk: "Walk", node: Any, inputs: list[Found], _: "Scope") -> list[Found]:
    values = list(_sequence_of(walk, node, inputs[0]))
    position = _position(walk, node, inputs[2] if len(inputs) > 2 else None, len(values))
    values.insert(position, _tensor_of(walk, node, inputs[1]))
    return [values]


def _sequence_length(walk: "Walk", node: Any, inputs: list[Found], _: "Scope") -> list[Found]:
    data = np.array(len(_sequence_of(walk, node, inputs[0])), dtype=np.int64)
    return [Value(node.output[0], 7, (), data, "constant")]


def _split_to_sequence(walk: "Walk", node: Any, inputs: list[Found], scope: "Scope") -> list[Found]:
    whole, options = _tensor_of(walk, node, inputs[0]), {a.name: a.i for a in node.attribute}
    axis = _axis_of(walk, node, options.get("axis", 0), len(whole.shape))
    given = inputs[1] if len(inputs) > 1 else None
    keep = given is not None or bool(options.get("keepdims", 1))
    sizes = _sizes(walk, node, whole.shape[axis], given)
    before, after = whole.shape[:axis], whole.shape[axis + 1 :]
    parts = [
        Value(f"{node.output[0]}/{i}", whole.code, (*before, *([size] if keep else ()), *after))
        for i, size in enumerate(sizes)
    ]
    walk.add(node, "onnx.SplitToSequence", [whole], list(parts), scope, {"axis": axis})
    return [parts]


def _sizes(walk: "Walk", node: Any, length: int, given: Found) -> list[int]:
    """Sizes of the parts of an axis: those given, or all of the one size given, or 1 each."""
    if given is not None and (isinstance(given, list) or given.data is None):
        raise UnsupportedOpError(walk.path, label(node), "splits by sizes that depend on data")
    if given is not None and given.data is not None and given.shape:
        sizes = [int(size) for size in given.data.reshape(-1)]
        if len(given.shape) != 1 or sum(sizes) != length or min(sizes, default=0) < 0:
            detail = f"splits {length} into {given.data.tolist()}"
            raise UnsupportedOpError(walk.path, label(node), detail)
        return sizes
    size = 1 if given is None else max(given.number or 1, 1)
    if length > size * MOST_KNOWN_ELEMENTS:
        raise UnsupportedOpError(walk.path, label(node), f"splits {length} into parts of {size}")
    return [min(size, length - start) for start in range(0, length, size)]


def _concat_from_sequence(
    walk: "Walk", node: Any, inputs: list[Found], scope: "Scope"
) -> list[Found]:
    values, options = _sequence_of(walk, node, inputs[0]), {a.name: a.i for a in node.attribute}
    if not values:
        raise UnsupportedOpError(walk.path, label(node), "joins an empty sequence")
    shape, new_axis = list(values[0].shape), bool(options.get("new_axis", 0))
    axis = _axis_of(walk, node, options.get("axis"), len(shape) + new_axis)
    joined_axis = -1 if new_axis else axis
    around = {tuple(-1 if i == joined_axis else n for i, n in enumerate(v.shape)) for v in values}
    if len(around) > 1:
        raise UnsupportedOpError(walk.path, label(node), "joins tensors of unlike shapes")
    if new_axis:
        shape.insert(axis, len(values))
    else:
        shape[axis] = sum(value.shape[axis] for value in values)
    joined = Value(node.output[0], values[0].code, tuple(shape))
    kind, attributes = "onnx.ConcatFromSequence", {"axis": axis, "new_axis": int(new_axis)}
    return walk.add(node, kind, list(values), [joined], scope, attributes)


SEQUENCE_RULES: dict[str, NodeRule] = {
    "ConcatFromSequence": _concat_from_sequence,
    "SequenceAt": _sequence_at,
    "SequenceConstruct": _sequence_construct,
    "SequenceEmpty": _sequence_construct,
    "SequenceInsert": _sequence_insert,
    "SequenceLength": _sequence_length,
    "SplitToSequence": _split_to_sequence,
}
