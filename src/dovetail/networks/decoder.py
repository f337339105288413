"""Parts that the decoders share: causal attention by heads, next-token loss and examples."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.networks.records import Examples


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Splits x [batch, length, heads x size] into [batch, heads, length, size]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns [batch, length, heads x size], where each position attends to those up to its own.

    query, key and value are [batch, heads, length, size]. The attention is one op, because networks
    run it as one. So a placer cannot place the scores by themselves.
    """
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [batch, length, vocabulary] and targets
    [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_examples(batch: int, context: int, vocabulary: int) -> Examples:
    """Draws ((tokens,), (next tokens,)), each [batch, context]."""
    tokens, following = (torch.randint(vocabulary, (batch, context)) for _ in range(2))
    return (tokens,), (following,)
