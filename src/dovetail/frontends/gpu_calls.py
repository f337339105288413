"""Calls of a captured step as a GPU makes them.

A step is captured on the CPU. Its calls name the CPU where they make tensors, and some of its ops
are kernels that only a CPU has. Those are replaced by functions of ops that every device has, which
take and return the same tensors, so that a forward op and its backward op may be on unlike devices.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dovetail.frontends.fused_updates import fused_updates, has_fused_kernel
from dovetail.frontends.program import Call
from dovetail.runtime.torch_versions import pytree

aten = torch.ops.aten
_ROWS_OF_SUMS = 32
"""torch's memory-efficient attention pads the rows of its sums to a multiple of this."""
_ALIGNED = 8
_OLDEST_CAPABILITY = {torch.float32: (5, 0), torch.float16: (5, 0), torch.bfloat16: (8, 0)}
"""dtype -> the capability that a GPU needs for that kernel."""


def on_gpu(call: Call, device: torch.device) -> Call:
    """The call with `device` in place of the CPU, and with ops that a GPU has."""
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: device, (call.args, call.kwargs))
    moved = replace(call, args=args, kwargs=kwargs)
    if device.type == "cpu":
        return moved
    # The fused kernels of updates count steps on the GPU, where the functions of single parameters
    # would wait for the count.
    if has_fused_kernel(call.target):
        return fused_updates([moved])
    return replace(moved, target=_REPLACED.get(call.target, call.target))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu`: (output, [batch, heads, queries] the
    logarithm of the sum of the exponentials of the scores)."""
    if dropout_p:
        raise RuntimeError("the kernel of CPUs has no dropout")
    if _has_kernel(query, key, value, attn_mask):
        output, padded, _, _ = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        sums = padded[..., : query.shape[-2]].transpose(1, 2).contiguous().transpose(1, 2)
        return _laid_as(query, output), sums
    scores = _scores(query, key, is_causal, attn_mask, scale)
    # In memory it is [batch, queries, heads].
    logsumexp = torch.logsumexp(scores, -1).transpose(1, 2).contiguous().transpose(1, 2)
    # A row that may see nothing has weights of zero.
    weights = torch.exp(scores - torch.where(logsumexp.isinf(), 0, logsumexp).unsqueeze(-1))
    return _laid_as(query, torch.matmul(weights.to(value.dtype), value)), logsumexp


def attention_backward(  # noqa: PLR0917  the arguments of the op
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu_backward`: gradients of query, key and
    value. Dao et al., "FlashAttention", NeurIPS 2022, appendix B.2."""
    if _has_kernel(query, key, value, attn_mask):
        rows = logsumexp.shape[-1]
        # The kernel reads the sums of a head one after another.
        padded = pad(logsumexp, (0, -rows % _ROWS_OF_SUMS), value=torch.inf).contiguous()
        # Nothing is dropped, so the numbers of the random state are not read.
        state = torch.empty((), dtype=torch.int64, device=query.device)
        if not _is_aligned(grad_out):
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        gradients = aten._scaled_dot_product_efficient_attention_backward.default(
            grad_out, query, key, value, None, out, padded, state, state, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        of_query, of_key, of_value = map(_by_position, gradients[:3], (query, key, value))
        return of_query, of_key, of_value
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = torch.exp(scores - torch.where(logsumexp.isinf(), 0, logsumexp).unsqueeze(-1))
    grad, out = grad_out.to(scores.dtype), out.to(scores.dtype)
    grad_value = torch.matmul(weights.mT, grad)
    grad_weights = torch.matmul(grad, value.to(scores.dtype).mT)
    row = (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row) * _scale(query, scale)
    grad_query = torch.matmul(grad_scores, key.to(scores.dtype))
    grad_key = torch.matmul(grad_scores.mT, query.to(scores.dtype))
    pairs = ((grad_query, query), (grad_key, key), (grad_value, value))
    of_query, of_key, of_value = (_by_position(gradient, like) for gradient, like in pairs)
    return of_query, of_key, of_value


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """True if torch's memory-efficient attention takes these. It never has all scores in memory."""
    if query.device.type != "cuda" or attn_mask is not None:
        return False
    oldest = _OLDEST_CAPABILITY.get(query.dtype)
    return (
        oldest is not None
        and torch.cuda.get_device_capability(query.device) >= oldest
        and all(map(_is_aligned, (query, key, value)))
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and 0 not in (*query.shape, *key.shape)
    )


def _is_aligned(tensor: Tensor) -> bool:
    """True if each head of each position begins at a multiple of `_ALIGNED` elements and has a
    multiple of them, one after another."""
    begins = (tensor.storage_offset(), *tensor.stride()[:-1], tensor.shape[-1])
    return tensor.stride(-1) == 1 and not any(number % _ALIGNED for number in begins)


def _laid_as(like: Tensor, value: Tensor) -> Tensor:
    """The value in the layout that the kernel of CPUs gives its output: that of the query."""
    laid = torch.empty_like(like, dtype=value.dtype)
    return value if value.stride() == laid.stride() else laid.copy_(value)


def _by_position(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient in the layout that the kernel of CPUs gives it: [batch, positions, heads, size]
    in memory."""
    laid = torch.empty_permuted(like.shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device)
    is_laid = (gradient.dtype, gradient.stride()) == (laid.dtype, laid.stride())
    return gradient if is_laid else laid.copy_(gradient)


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """[batch, heads, queries, keys] what the softmax is of, in float32 at least."""
    wide = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    scores = torch.matmul(query.to(wide), key.to(wide).mT) * _scale(query, scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


_REPLACED: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
