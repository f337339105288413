"""Shapes that the package `onnx` leaves open, or, of `STFT`, finds wrong."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dovetail.frontends.onnx.records import Value

_BOOL = 9
Inputs = Sequence[Value | None]
Shaped = tuple[int, tuple[int, ...]]
"""Element type and shape."""


def own_rule(node: Any, inputs: Inputs) -> Shaped | None:
    """Type and shape of a node's first output by our own rules; None where there is none."""
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    attributes = {a.name: a.i for a in node.attribute}
    return rule(list(inputs), attributes) if rule is not None else None


def _like_first(inputs: list[Value | None], _: dict[str, int]) -> Shaped | None:
    first = inputs[0]
    return None if first is None else (first.code, first.shape)


def _compared(inputs: list[Value | None], _: dict[str, int]) -> Shaped | None:
    shapes = [value.shape for value in inputs if value is not None]
    try:
        return _BOOL, tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        return None


def _compressed(inputs: list[Value | None], attributes: dict[str, int]) -> Shaped | None:
    first, condition = inputs[0], inputs[1]
    if first is None or condition is None or condition.data is None:
        return None
    if "axis" not in attributes:
        return first.code, (int(np.count_nonzero(condition.data)),)
    axis = attributes["axis"] % len(first.shape)
    kept = int(np.count_nonzero(condition.data[: first.shape[axis]]))
    return first.code, (*first.shape[:axis], kept, *first.shape[axis + 1 :])


def _one_hot(inputs: list[Value | None], attributes: dict[str, int]) -> Shaped | None:
    indices, depth, values = inputs
    size = None if depth is None else depth.number
    if indices is None or values is None or size is None:
        return None
    axis = attributes.get("axis", -1) % (len(indices.shape) + 1)
    return values.code, (*indices.shape[:axis], size, *indices.shape[axis:])


def _unpooled(inputs: list[Value | None], _: dict[str, int]) -> Shaped | None:
    shape = inputs[2] if len(inputs) > 2 else None
    if inputs[0] is None or shape is None or shape.data is None:
        return None
    return inputs[0].code, tuple(shape.data.tolist())


def _stft(inputs: list[Value | None], attributes: dict[str, int]) -> Shaped | None:
    """[batch, frames, bins, 2]"""
    signal, step, window, length = (*inputs, None, None)[:4]
    pace = None if step is None else step.number
    frame = None if length is None else length.number
    if frame is None and window is not None:
        frame = math.prod(window.shape)
    if signal is None or pace is None or frame is None:
        return None
    bins = frame // 2 + 1 if attributes.get("onesided", 1) else frame
    frames = (signal.shape[1] - frame) // max(pace, 1) + 1
    return signal.code, (signal.shape[0], frames, bins, 2)


_RULES: dict[str, Callable[[list[Value | None], dict[str, int]], Shaped | None]] = {
    "Compress": _compressed,
    "GreaterOrEqual": _compared,
    "GroupNormalization": _like_first,
    "LessOrEqual": _compared,
    "MaxUnpool": _unpooled,
    "MeanVarianceNormalization": _like_first,
    "OneHot": _one_hot,
    "STFT": _stft,
}
