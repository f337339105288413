"""Transformer-XL: a decoder whose layers also attend to what they saw in earlier segments.

    tokens ─► embedding ─► layers.0 ──────► layers.1 ──────► ... ─► softmax ─► log-probabilities
                              ▲   └──┐         ▲   └──┐
                        memory 0     └► new  memory 1 └► new    (no gradient through a memory)

Paper: Dai, Yang, Yang, Carbonell, Le and Salakhutdinov, "Transformer-XL: Attentive Language Models
Beyond a Fixed-Length Context", ACL 2019, https://arxiv.org/abs/1901.02860, sections 3.2 and 3.3,
and appendix B for the shift. A layer attends to the m positions of its memory, followed by the
segment. Query i of the segment scores key j of that sequence by content and by the distance
m + i - j:

    A_ij = q_i . k_j + q_i . r_{m+i-j} + u . k_j + v . r_{m+i-j}
         = (q_i + u) . k_j + ((q_i + v) R')_{i, shifted}

Here r_d = W_R R_d, where R_d is the row of sinusoids for distance d, and R' has the r_d as columns.
u and v are one vector per head each, and all layers share them.

Sizes: the 12-layer model of enwik8 (table 2: 41 M parameters) with hidden 512, 8 heads and inner
2048. Segments and memory of 512 and the batch of 22 are from the authors' script for it. This is
the model without an adaptive softmax, whose shapes would depend on the data. Zhou et al., "GDP:
Generalized Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, place it
with 2, 4 and 8 layers and give no other size.
Differences: no dropout; the memory of a layer is an input [batch, memory, hidden], and the memory
for the next segment is an output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.decoder import split_heads
from dovetail.networks.records import Examples, Network


class RelativePositions(nn.Module):
    """Holds what all layers share: R, u and v.

    R [positions, hidden] has a row of sinusoids for each distance from positions - 1 down to 0.
    u and v are [heads, 1, hidden / heads].
    """

    R: Tensor

    def __init__(self, positions: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.empty(heads, 1, hidden // heads))
        self.v = nn.Parameter(torch.empty(heads, 1, hidden // heads))
        for bias in self.parameters():
            nn.init.normal_(bias, std=0.02)
        frequencies = 10_000 ** (-torch.arange(0, hidden, 2) / hidden)
        angles = torch.arange(positions - 1, -1, -1)[:, None] * frequencies
        self.register_buffer("R", torch.cat([angles.sin(), angles.cos()], dim=1))


def shift_relative(scores: Tensor) -> Tensor:
    """Turns scores by distance into scores by key, both [..., queries, n].

    Given are scores[..., i, n - 1 - d] of query i and distance d. Returned are the scores
    [..., i, j] of query i and key j, whose distance is n - queries + i - j. Entries of keys after
    their query are garbage.

    A column of zeros in front makes rows of n + 1. If the same memory is read as rows of n, without
    the first `queries` numbers, row i is shifted left by queries - 1 - i. So no index is needed.
    """
    *outer, queries, n = scores.shape
    padded = F.pad(scores, (1, 0)).view(*outer, n + 1, queries)
    return padded[..., 1:, :].reshape(scores.shape)


class RelativeAttention(nn.Module):
    """Attention of a segment to its memory and itself, by content and by distance."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * hidden, bias=False)
        self.position = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self, x: Tensor, memory: Tensor, positions: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Returns [batch, segment, hidden].

        x is [batch, segment, hidden], memory is [batch, memory, hidden], and positions is (R, u, v)
        of `RelativePositions`.
        """
        R, u, v = positions
        q = split_heads(self.query(x), self.heads)
        k, value = self.key_value(torch.cat([memory, x], dim=1)).chunk(2, dim=2)
        k, value = split_heads(k, self.heads), split_heads(value, self.heads)
        r = split_heads(self.position(R).unsqueeze(0), self.heads)
        content = (q + u) @ k.transpose(2, 3)
        distance = shift_relative((q + v) @ r.transpose(2, 3))
        scores = (content + distance) * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device)
        later = later.triu(1 + memory.shape[1])
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=3)
        attended: Tensor = self.output((weights @ value).transpose(1, 2).flatten(2))
        return attended


class TransformerXLLayer(nn.Module):
    """Attention, then a feed-forward network. The output of each is added to its input, and the sum
    is normalised."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = RelativeAttention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, inner), nn.ReLU(), nn.Linear(inner, hidden)
        )
        self.feed_forward_norm = nn.LayerNorm(hidden)

    def forward(
        self, x: Tensor, memory: Tensor, positions: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, the memory for the next segment).

        The new memory is as long as the old one. It holds the last positions of the old memory and
        the segment.
        """
        # The paper stops the gradient at a memory: none flows into the segment before.
        following = torch.cat([memory, x.detach()], dim=1)[:, x.shape[1] :]
        x = self.attention_norm(x + self.attention(x, memory, positions))
        return self.feed_forward_norm(x + self.feed_forward(x)), following


class TiedSoftmax(nn.Module):
    """Maps x [..., hidden] to log-probabilities [..., vocabulary], with the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(F.linear(x, self.weight, self.bias), dim=-1)


class TransformerXL(nn.Module):
    """The model on one segment. `segment` and `memory` are the lengths that it is called with.

    Raises `ValueError` unless `hidden` is a multiple of 2 x heads.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        inner: int,
        segment: int,
        memory: int,
        vocabulary: int,
    ) -> None:
        super().__init__()
        if hidden % (2 * heads):
            raise ValueError(f"hidden is {hidden}, but must be a multiple of 2 x {heads} heads")
        self.embedding = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = RelativePositions(memory + segment, hidden, heads)
        self.layers = nn.ModuleList(TransformerXLLayer(hidden, heads, inner) for _ in range(layers))
        self.softmax = TiedSoftmax(self.embedding)

    def forward(self, tokens: Tensor, *memories: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns (log-probabilities [batch, segment, vocabulary], new memories).

        tokens is [batch, segment]. There is one memory [batch, memory, hidden] for each layer.
        """
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        positions = (self.positions.R, self.positions.u, self.positions.v)
        following = []
        for layer, memory in zip(self.layers, memories, strict=True):
            x, cached = layer(x, memory, positions)
            following.append(cached)
        return self.softmax(x), tuple(following)


def transformer_xl_loss(output: tuple[Tensor, Sequence[Tensor]], targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of `TransformerXL`'s output and targets [batch, segment]."""
    return F.nll_loss(output[0].flatten(0, 1), targets.flatten())


def transformer_xl_examples(
    *, batch: int, segment: int, memory: int, hidden: int, layers: int, vocabulary: int
) -> Examples:
    tokens, targets = (torch.randint(vocabulary, (batch, segment)) for _ in range(2))
    memories = tuple(torch.randn(batch, memory, hidden) for _ in range(layers))
    return (tokens, *memories), (targets,)


NETWORK = Network(
    name="transformer_xl",
    paper="Dai et al., ACL 2019, https://arxiv.org/abs/1901.02860",
    description="transformer language model with a memory of earlier segments",
    defaults={
        "layers": 12,
        "hidden": 512,
        "heads": 8,
        "inner": 2048,
        "segment": 512,
        "memory": 512,
        "batch": 22,
        "vocabulary": 204,
    },
    small={
        "layers": 2,
        "hidden": 16,
        "heads": 2,
        "inner": 32,
        "segment": 6,
        "memory": 4,
        "batch": 2,
        "vocabulary": 20,
    },
    modules=TransformerXL,
    examples=transformer_xl_examples,
    loss=transformer_xl_loss,
)
