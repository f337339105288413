"""Transformer-XL over groups in graph order: attention to one's own segment and the one before.

Z. Dai et al., "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", ACL 2019,
https://arxiv.org/abs/1901.02860, section 3.2, as the placer of Y. Zhou et al., "GDP: Generalized
Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, sections 3.2 and 3.3:

    z(s, l) = [stop_gradient(h(s - 1, l - 1)), h(s, l - 1)]       s: segment, l: layer
    h(s, l) = layer(queries from h(s, l - 1), keys and values from z(s, l))

No positional embedding: a graph has no positions, and what order says stands in the features. No
causal mask: all groups of a segment see each other. Superposition: every dense layer of the placer
sees c(x0) * x instead of x, with x0 the graph embedding and c one more such layer.

The states of layer l - 1 of all segments are known before layer l, so that all segments are worked
on at once; the result is that of one after the other.

Differences: layers normalise their input, not their output; c is 1 at the start and departs from
there, so that an untrained placer is one without superposition; where a dense layer's input is
wider than c(x0), c(x0) is repeated.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 2
"""Width of the feed-forward part over the hidden width."""


@dataclass(frozen=True, eq=False)
class Segments:
    """How groups are cut: `count` segments of `length`, the last one padded.

    keys   [count, 1, 1, 2 x length] which of (previous, own) are there; None: all, and no previous
    """

    groups: int
    count: int
    length: int
    keys: Tensor | None

    def cut(self, x: Tensor) -> Tensor:
        """[groups, width] -> [count, length, width], zeros behind the last."""
        missing = self.count * self.length - self.groups
        return F.pad(x, (0, 0, 0, missing)).view(self.count, self.length, x.shape[1])

    def join(self, x: Tensor) -> Tensor:
        """[count, length, width] -> [groups, width]."""
        return x.reshape(-1, x.shape[2])[: self.groups]


def segments_of(groups: int, length: int, device: torch.device) -> Segments:
    """Segments of at most `length`; a graph that fits into one has no padding."""
    if groups <= length:
        return Segments(groups, 1, groups, None)
    count = -(-groups // length)
    own = torch.arange(count * length, device=device).view(count, length) < groups
    previous = torch.cat([torch.zeros_like(own[:1]), own[:-1]])
    return Segments(groups, count, length, torch.cat([previous, own], dim=1)[:, None, None, :])


class Layer(nn.Module):
    """h -> h' [count, length, hidden]. `attention=False` leaves the feed-forward part only."""

    def __init__(self, hidden: int, heads: int, *, attention: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.attends = attention
        if attention:
            self.norm = nn.LayerNorm(hidden)
            self.query = nn.Linear(hidden, hidden)
            self.key_value = nn.Linear(hidden, 2 * hidden)
            self.out = nn.Linear(hidden, hidden)
        self.norm_inner = nn.LayerNorm(hidden)
        self.inner = nn.Linear(hidden, EXPANSION * hidden)
        self.outer = nn.Linear(EXPANSION * hidden, hidden)

    def forward(self, h: Tensor, segments: Segments, condition: Tensor | None = None) -> Tensor:
        """`condition` [count, length, hidden]: c(x0); None: no superposition."""
        if self.attends:
            seen = self._attend(_times(self.norm(h), condition), segments)
            h = h + self.out(_times(seen, condition))
        inner = torch.relu(self.inner(_times(self.norm_inner(h), condition)))
        return h + self.outer(_times(inner, condition))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, segments: Segments) -> Tensor:
        keyed = x
        if segments.count > 1:
            cached = x.detach()
            previous = torch.cat([torch.zeros_like(cached[:1]), cached[:-1]])
            keyed = torch.cat([previous, x], dim=1)
        keys, values = self.key_value(keyed).chunk(2, dim=2)
        seen = F.scaled_dot_product_attention(
            self._by_head(self.query(x)),
            self._by_head(keys),
            self._by_head(values),
            attn_mask=segments.keys,
        )
        return seen.transpose(1, 2).reshape(x.shape)

    def _by_head(self, x: Tensor) -> Tensor:
        """[count, length, hidden] -> [count, heads, length, hidden / heads]."""
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


class TransformerXL(nn.Module):
    """Graph embedding x0 [groups, hidden] -> (states, condition), both [groups, hidden]; condition
    None without superposition."""

    def __init__(
        self,
        hidden: int,
        *,
        layers: int,
        heads: int,
        segment: int,
        attention: bool = True,
        superposition: bool = True,
    ) -> None:
        super().__init__()
        self.segment = segment
        self.layers = nn.ModuleList(
            Layer(hidden, heads, attention=attention) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.conditioning = None
        if superposition:
            self.conditioning = Layer(hidden, heads, attention=attention)
            self.scale = nn.Linear(hidden, hidden)
            nn.init.normal_(self.scale.weight, std=0.1 * hidden**-0.5)
            nn.init.ones_(self.scale.bias)

    def forward(self, x0: Tensor) -> tuple[Tensor, Tensor | None]:
        segments = segments_of(len(x0), self.segment, x0.device)
        h = segments.cut(x0)
        condition = None
        if self.conditioning is not None:
            condition = self.scale(self.conditioning(h, segments))
        for layer in self.layers:
            h = layer(h, segments, condition)
        states = segments.join(self.norm(h))
        return states, None if condition is None else segments.join(condition)


def _times(x: Tensor, condition: Tensor | None) -> Tensor:
    """c(x0) * x, c(x0) repeated to the width of x."""
    if condition is None:
        return x
    repeats = x.shape[-1] // condition.shape[-1]
    return x * (condition if repeats == 1 else condition.repeat(1, 1, repeats))
