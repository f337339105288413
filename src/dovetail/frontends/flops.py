"""Counts FLOPs and bytes of one call, from its fake arguments and results.

* Matrix products, convolutions and attention, forward and backward, count 2 x multiply-adds. The
  registry of `torch.utils.flop_counter` has most rules, and `_OURS` those that it lacks.
* Pointwise ops count 1 per output element.
* Reductions and all other ops count 1 per element of their largest tensor.
* Views and ops that only move data count 0.
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
_GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""These ops read only the rows that they return, not the whole of their first input."""


def _vector_flops(*args: Any, **_: Any) -> int:
    """Return the FLOPs of a matrix-vector or dot product: 2 x elements of the largest operand."""
    return 2 * max(math.prod(shape) for shape in args if isinstance(shape, torch.Size))


def _attention_flops(query: Any, key: Any, value: Any, *_: Any) -> int:
    """Return the FLOPs of attention, which has two products: query x key and scores x value."""
    pairs = math.prod(query[:-1]) * key[-2]
    return int(2 * pairs * (query[-1] + value[-1]))


def _attention_backward_flops(_: Any, query: Any, key: Any, value: Any, *__: Any) -> int:
    """Return the FLOPs of attention's backward pass, which has five products: it computes the
    scores again, and the gradients of value, scores, query and key."""
    pairs = math.prod(query[:-1]) * key[-2]
    return int(2 * pairs * (3 * query[-1] + 2 * value[-1]))


def _recurrent_flops(values: Any, inputs: Any, hidden: Any, *_: Any) -> int:
    """Return the FLOPs of a recurrent layer's products, whose weights are `inputs` and `hidden`."""
    return int(2 * math.prod(values[:-1]) * (math.prod(inputs) + math.prod(hidden)))


def _rule_on_tensors(rule: Callable[..., int]) -> Callable[..., int]:
    """Return the rule on shapes as one on tensors, called as those of torch's registry are."""

    def of_tensors(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shapes = [a.shape if isinstance(a, Tensor) else a for a in args]
        return rule(*shapes)

    return of_tensors


_OURS: dict[Any, Callable[..., int]] = {
    aten.mv: _rule_on_tensors(_vector_flops),
    aten.addmv: _rule_on_tensors(_vector_flops),
    aten.dot: _rule_on_tensors(_vector_flops),
    aten.vdot: _rule_on_tensors(_vector_flops),
    aten._scaled_dot_product_flash_attention_for_cpu: _rule_on_tensors(_attention_flops),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _rule_on_tensors(
        _attention_backward_flops
    ),
    aten.mkldnn_rnn_layer: _rule_on_tensors(_recurrent_flops),
    # A product for the gradient of each factor.
    aten.mkldnn_rnn_layer_backward: _rule_on_tensors(lambda *given: 2 * _recurrent_flops(*given)),
}

_MATRIX = set(flop_registry) | set(_OURS)
MATRIX_KINDS = frozenset(str(packet) for packet in _MATRIX) | ONNX_MATRIX_KINDS
"""The kinds of ops whose FLOPs are 2 x multiply-adds, of captured and of ONNX graphs."""


def count_flops(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of `target(*args, **kwargs)`, which returned `result`; tensors may be
    fake."""
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
    """Return the bytes that a call reads and writes; the call must not be a view."""
    packet = getattr(target, "overloadpacket", target)
    written = sum(map(tensor_bytes, tensors_of(result)))
    inputs = tensors_of((args, kwargs))
    if packet in _GATHERS:
        # It reads as many bytes of the first input as it writes, and the indices.
        return written + written + sum(map(tensor_bytes, inputs[1:]))
    # A tensor that is given as several arguments is read once.
    return written + sum(tensor_bytes(t) for t in {id(t): t for t in inputs}.values())


def matrix_flops(graph: Graph) -> int:
    """Return the FLOPs of the graph's matrix products, convolutions and attention alone."""
    return sum(
        flops
        for kind, flops in zip(graph.kinds, graph.flops.tolist(), strict=True)
        if kind in MATRIX_KINDS
    )


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()
