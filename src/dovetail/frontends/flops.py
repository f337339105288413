"""FLOPs and bytes of one call, from its fake arguments and results.

2 x multiply-adds for matrix products, convolutions and attention, backward too (the registry of
`torch.utils.flop_counter`, and rules for what it lacks); 1 per output element of pointwise ops, 1
per input element of reductions; 0 for views and for what only moves data.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dovetail.frontends.onnx.flops import ONNX_MATRIX_KINDS
from dovetail.frontends.recording import tensors_of
from dovetail.graph import Graph

aten = torch.ops.aten

_MOVES = {
    packet
    for packet in (
        aten.clone, aten.copy, aten.copy_, aten._to_copy, aten.cat, aten.stack, aten.index,
        aten.index_select, aten.gather, aten.embedding, aten.zeros, aten.ones, aten.full,
        aten.empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.zeros_like,
        aten.ones_like, aten.full_like, aten.empty_like, aten.arange, aten.constant_pad_nd,
        aten.slice_scatter, aten.select_scatter, aten.slice_backward, aten.select_backward,
        aten.repeat, aten.flip, aten.roll, aten.scalar_tensor, aten.fill, aten.scatter,
    )
}  # fmt: skip
# These ops read only the rows that they return, not the whole of their first input.
_GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}


def _vector_flops(*args: Any, **_: Any) -> int:
    """2 x elements of the matrix (or vector) that a matrix-vector or dot product reads."""
    return 2 * max(math.prod(shape) for shape in args if isinstance(shape, torch.Size))


def _attention_flops(query: Any, key: Any, value: Any, **_: Any) -> int:
    """Two products: query x key, then scores x value."""
    pairs = math.prod(query[:-1]) * key[-2]
    return int(2 * pairs * (query[-1] + value[-1]))


def _attention_backward_flops(_: Any, query: Any, key: Any, value: Any, **__: Any) -> int:
    """Five products: the scores anew, and gradients by value, scores, query and key."""
    pairs = math.prod(query[:-1]) * key[-2]
    return int(2 * pairs * (3 * query[-1] + 2 * value[-1]))


def _shaped(rule: Callable[..., int]) -> Callable[..., int]:
    def of_tensors(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shapes = [a.shape if isinstance(a, Tensor) else a for a in args]
        return rule(*shapes)

    return of_tensors


_OURS: dict[Any, Callable[..., int]] = {
    aten.mv: _shaped(_vector_flops),
    aten.addmv: _shaped(_vector_flops),
    aten.dot: _shaped(_vector_flops),
    aten.vdot: _shaped(_vector_flops),
    aten._scaled_dot_product_flash_attention_for_cpu: _shaped(
        lambda q, k, v, *_: _attention_flops(q, k, v)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _shaped(
        lambda g, q, k, v, *_: _attention_backward_flops(g, q, k, v)
    ),
}

_MATRIX = set(flop_registry) | set(_OURS)
MATRIX_KINDS = frozenset(str(packet) for packet in _MATRIX) | ONNX_MATRIX_KINDS
"""Kinds of the ops whose multiply-adds are counted."""


def count_flops(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of `target(*args, **kwargs)`, which returned `result`; tensors may be fake."""
    packet = getattr(target, "overloadpacket", target)
    rule = flop_registry.get(packet) or _OURS.get(packet)
    if rule is not None:
        return int(rule(*args, **kwargs, out_val=result))
    outputs = [t.numel() for t in tensors_of(result)]
    if packet in _MOVES or getattr(target, "is_view", False) or not outputs:
        return 0
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return max(outputs)
    return max(outputs + [t.numel() for t in tensors_of((args, kwargs))])


def count_bytes(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes read and written by a call that is no view."""
    packet = getattr(target, "overloadpacket", target)
    written = sum(map(tensor_bytes, tensors_of(result)))
    inputs = tensors_of((args, kwargs))
    if packet in _GATHERS:
        return written + written + sum(map(tensor_bytes, inputs[1:]))
    return written + sum(tensor_bytes(t) for t in {id(t): t for t in inputs}.values())


def matrix_flops(graph: Graph) -> int:
    """FLOPs of matrix products, convolutions and attention alone."""
    return sum(
        flops
        for kind, flops in zip(graph.kinds, graph.flops.tolist(), strict=True)
        if kind in MATRIX_KINDS
    )


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()
