"""Calls of a captured step as a GPU makes them.

A step is captured on the CPU. Its calls name the CPU where they make tensors, and some of its ops
are kernels that only a CPU has. Those are replaced by functions of ops that every device has, which
take and return the same tensors, so that a forward op and its backward op may be on unlike devices.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.frontends.fused_updates import fused_updates, has_fused_kernel
from dovetail.frontends.program import Call
from dovetail.runtime.torch_versions import pytree


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
    scores = _scores(query, key, is_causal, attn_mask, scale)
    # In memory it is [batch, queries, heads].
    logsumexp = torch.logsumexp(scores, -1).transpose(1, 2).contiguous().transpose(1, 2)
    # A row that may see nothing has weights of zero.
    weights = torch.exp(scores - torch.where(logsumexp.isinf(), 0, logsumexp).unsqueeze(-1))
    return _laid_as(query, torch.matmul(weights.to(value.dtype), value)), logsumexp


def attention_backward(  # noqa: PLR0913  the arguments of the op
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


def _laid_as(like: Tensor, value: Tensor) -> Tensor:
    """The value in the layout that the kernel of CPUs gives its output: that of the query."""
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def _by_position(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient in the layout that the kernel of CPUs gives it: [batch, positions, heads, size]
    in memory."""
    laid = torch.empty_permuted(like.shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device)
    return laid.copy_(gradient)


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
