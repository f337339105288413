"""Updates parameters by RMSprop in one pass over memory. torch has no fused kernel for it.

    g' = g + weight_decay p
    s  = alpha s + (1 - alpha) g'^2
    m  = m + (1 - alpha) (g' - m)                 only if centered
    a  = sqrt(s) + eps, or sqrt(s - m^2) + eps if centered
    p  = p - lr b, where b = momentum b + g' / a  or, without momentum, b = g' / a

That is what `torch.optim.RMSprop` computes, but for rounding: torch makes ten passes, with
temporaries in between. It stays for its speed: on one thread 2 million float32 take 1.9 ms, by
torch's single-tensor function 5.2 and by its `foreach` 6.4; with momentum 2.7, 8.0 and 10.6.

T. Tieleman and G. Hinton, Neural Networks for Machine Learning, lecture 6e, 2012; centered: A.
Graves, Generating Sequences With Recurrent Neural Networks, 2013, https://arxiv.org/abs/1308.0850,
equations 38 to 45. Like torch, it adds eps to the root, where Graves adds it below the root.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from dovetail.runtime.compiling import inlined, kernel

_FLOATS = {
    torch.float32: (np.float32, types.float32, ir.FloatType()),
    torch.float64: (np.float64, types.float64, ir.DoubleType()),
}
# numba itself passes the first argument of an intrinsic. Its type stubs do not know that.
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


@_intrinsic
def _get(typing: Any, address: Any, index: Any, like: Any) -> Any:
    """The element of an array at an address; `like` has its type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_element(builder, arguments[0], arguments[1], like))

    return like(types.int64, types.int64, like), generate


@_intrinsic
def _set(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Write an element of an array at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _element(builder, arguments[0], arguments[1], value))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), generate


def _element(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    inner = {kind: inner for _, kind, inner in _FLOATS.values()}[kind]
    return builder.gep(builder.inttoptr(address, inner.as_pointer()), [index])


# `at` are the addresses of one parameter's tensors: itself, its gradient, `s`, the momentum buffer
# and `m`. `settings` are lr, alpha, 1 - alpha, eps, weight_decay and momentum.


@inlined
def _decayed(at: Any, i: Any, lr: Any, weight_decay: Any) -> Any:
    # Without decay nothing is added: 0 times an infinite parameter would be NaN.
    if weight_decay == 0:
        return _get(at[1], i, lr)
    return _get(at[1], i, lr) + weight_decay * _get(at[0], i, lr)


@inlined
def _update(at: Any, size: Any, settings: Any) -> None:
    lr, alpha, rest, eps, weight_decay, _ = settings
    for i in range(size):
        gradient = _decayed(at, i, lr, weight_decay)
        square = alpha * _get(at[2], i, lr) + rest * gradient * gradient
        _set(at[2], i, square)
        _set(at[0], i, _get(at[0], i, lr) - lr * (gradient / (math.sqrt(square) + eps)))


@inlined
def _update_with_momentum(at: Any, size: Any, settings: Any) -> None:
    lr, alpha, rest, eps, weight_decay, momentum = settings
    for i in range(size):
        gradient = _decayed(at, i, lr, weight_decay)
        square = alpha * _get(at[2], i, lr) + rest * gradient * gradient
        change = momentum * _get(at[3], i, lr) + gradient / (math.sqrt(square) + eps)
        _set(at[2], i, square)
        _set(at[3], i, change)
        _set(at[0], i, _get(at[0], i, lr) - lr * change)


@inlined
def _update_centered(at: Any, size: Any, settings: Any) -> None:
    """Without momentum there is no buffer."""
    lr, alpha, rest, eps, weight_decay, momentum = settings
    for i in range(size):
        gradient = _decayed(at, i, lr, weight_decay)
        square = alpha * _get(at[2], i, lr) + rest * gradient * gradient
        mean = _get(at[4], i, lr) + rest * (gradient - _get(at[4], i, lr))
        change = gradient / (math.sqrt(square - mean * mean) + eps)
        _set(at[2], i, square)
        _set(at[4], i, mean)
        if momentum > 0:
            change += momentum * _get(at[3], i, lr)
            _set(at[3], i, change)
        _set(at[0], i, _get(at[0], i, lr) - lr * change)


@kernel
def _update_all(addresses: Any, sizes: Any, settings: Any, centered: Any) -> None:
    for row in range(len(sizes)):
        at = (
            addresses[0, row], addresses[1, row], addresses[2, row], addresses[3, row],
            addresses[4, row],
        )  # fmt: skip
        if centered:
            _update_centered(at, sizes[row], settings)
        elif settings[5] > 0:
            _update_with_momentum(at, sizes[row], settings)
        else:
            _update(at, sizes[row], settings)


def fused_rmsprop(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], square_avgs: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor], grad_avgs: Sequence[Tensor],
    *, lr: float, alpha: float, eps: float, weight_decay: float, momentum: float, centered: bool,
) -> None:  # fmt: skip
    """Update all parameters and their states, which are of one type, float32 or float64.

    The tensors of one parameter have one layout in memory, without gaps. `momentum_buffers` is
    empty without momentum, and `grad_avgs` is if it is not centered.
    """
    number = _FLOATS[parameters[0].dtype][0]
    columns = (
        parameters, gradients, square_avgs, momentum_buffers or square_avgs,
        grad_avgs or square_avgs,
    )  # fmt: skip
    addresses = np.array([[t.data_ptr() for t in column] for column in columns], np.int64)
    sizes = np.array([parameter.numel() for parameter in parameters], np.int64)
    settings = tuple(map(number, (lr, alpha, 1 - alpha, eps, weight_decay, momentum)))
    _update_all(addresses, sizes, settings, centered)
