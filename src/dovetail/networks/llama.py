"""Llama: a transformer decoder with RMSNorm, rotary positions, SwiGLU and grouped queries.

    tokens ─► embedding ─► layers.0 ─► ... ─► layers.N ─► norm ─► logits
                              x + attention(norm(x)), x + feed_forward(norm(x))

Papers:

* Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023,
  https://arxiv.org/abs/2302.13971, section 2.2.
* Grouped queries: Ainslie et al., "GQA", EMNLP 2023, https://arxiv.org/abs/2305.13245.
* Rotary positions: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864, section 3.2.2.
* Default sizes: Llama 3.2 1B. Grattafiori et al., "The Llama 3 Herd of Models", 2024,
  https://arxiv.org/abs/2407.21783, and its model card: 1.23 B parameters, where the logits use the
  embedding's weight.

The options of two other sizes are

    Llama 3.1 8B   layers=32, hidden=4096, heads=32, key_heads=8, inner=14336, tied=false
    Llama 2 7B     layers=32, hidden=4096, heads=32, key_heads=32, inner=11008, vocabulary=32000,
                   theta=10000, tied=false

Differences: rotary frequencies are not rescaled for contexts beyond 8192; float32. The context of
2048 and the batch of 1 are our choice.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.decoder import causal_attention, split_heads, token_examples, token_loss
from dovetail.networks.records import Network


class RMSNorm(nn.Module):
    """Returns weight * x / sqrt(mean(x^2) + eps). The mean is over the last dimension."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps))


class Rotary(nn.Module):
    """Holds the cosines and sines [context, size / 2] of the angles position * theta^(-2i / size),
    for i from 0 to size / 2 - 1."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, context: int, size: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(context)[:, None] * frequencies
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i + size / 2}) of x [..., length, size] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1)


class LlamaAttention(nn.Module):
    """Causal self-attention in which groups of queries share a key and a value.

    There are `heads` queries and `key_heads` keys, so heads / key_heads queries share each key.
    """

    def __init__(self, hidden: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        size = hidden // heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, key_heads * size, bias=False)
        self.value = nn.Linear(hidden, key_heads * size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Returns [batch, length, hidden] of x [batch, length, hidden].

        cosines and sines are [length, size / 2], where size is that of a head.
        """
        query = rotate(split_heads(self.query(x), self.heads), cosines, sines)
        key = rotate(split_heads(self.key(x), self.key_heads), cosines, sines)
        value = split_heads(self.value(x), self.key_heads)
        attended = causal_attention(query, self._repeated(key), self._repeated(value))
        return self.output(attended)  # type: ignore[no-any-return]

    def _repeated(self, x: Tensor) -> Tensor:
        """Repeats each head of x [batch, key_heads, length, size]: [batch, heads, length, size]."""
        if self.heads == self.key_heads:
            return x
        shared = self.heads // self.key_heads
        return x.unsqueeze(2).expand(-1, -1, shared, -1, -1).flatten(1, 2)


class SwiGLU(nn.Module):
    """A feed-forward network with a gate: it returns down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class LlamaLayer(nn.Module):
    """Attention, then a feed-forward network. Each reads its input normalised, and its output is
    added to the input."""

    def __init__(self, hidden: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = LlamaAttention(hidden, heads, key_heads)
        self.feed_forward_norm = RMSNorm(hidden)
        self.feed_forward = SwiGLU(hidden, inner)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class RotaryDecoder(nn.Module):
    """A decoder around its layers: embedding, rotary positions, norm and logits.

    tied   the logits use the embedding's weight
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        hidden: int,
        heads: int,
        context: int,
        vocabulary: int,
        theta: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(context, hidden // heads, theta)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden)
        self.logits = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.logits.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the first layer takes: the embedded tokens, and their positions' cosines and
        sines."""
        length = tokens.shape[1]
        cosines, sines = self.rotary.cosines[:length], self.rotary.sines[:length]
        return self.embedding(tokens), cosines, sines


class Llama(RotaryDecoder):
    """Maps tokens [batch, length] to logits [batch, length, vocabulary], for length <= context.

    Raises `ValueError` as `check_heads` does.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        key_heads: int,
        inner: int,
        context: int,
        vocabulary: int,
        theta: float = 500_000.0,
        tied: bool = True,
    ) -> None:
        check_heads(hidden, heads, key_heads)
        # They are made one by one behind the embedding, in the order in which weights are drawn.
        made = (LlamaLayer(hidden, heads, key_heads, inner) for _ in range(layers))
        super().__init__(
            made, hidden=hidden, heads=heads, context=context, vocabulary=vocabulary, theta=theta,
            tied=tied,
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        x, cosines, sines = self.begin(tokens)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


def check_heads(hidden: int, heads: int, key_heads: int) -> None:
    """Raises `ValueError` unless `hidden` is a multiple of 2 x heads, and `heads` of key_heads.

    The factor of 2 is there because rotary positions turn pairs of a head's numbers.
    """
    if hidden % (2 * heads) or heads % key_heads:
        raise ValueError(
            f"hidden, heads and key_heads are {hidden}, {heads} and {key_heads}, but hidden must "
            "be a multiple of 2 x heads, and heads of key_heads"
        )


NETWORK = Network(
    name="llama",
    paper="Touvron et al., 2023, https://arxiv.org/abs/2302.13971",
    description="Llama style transformer decoder",
    defaults={
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "key_heads": 8,
        "inner": 8192,
        "context": 2048,
        "batch": 1,
        "vocabulary": 128_256,
        "theta": 500_000.0,
        "tied": True,
    },
    small={
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "key_heads": 2,
        "inner": 32,
        "context": 8,
        "batch": 2,
        "vocabulary": 50,
    },
    modules=Llama,
    examples=token_examples,
    loss=token_loss,
)
