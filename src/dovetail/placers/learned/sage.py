"""GraphSAGE with max pooling: what each group knows of its surroundings.

W. L. Hamilton, R. Ying, J. Leskovec, "Inductive Representation Learning on Large Graphs", NIPS
2017, https://arxiv.org/abs/1706.02216, section 3.3, as used by Y. Zhou et al., "GDP: Generalized
Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, section 3.1:

    h_N(v) = max over u in N(v) of sigmoid(W h_u + b)        elementwise
    h'(v)  = f(concat(h(v), h_N(v)))

Differences: producers and consumers are two neighbourhoods with weights of their own, so that f
sees concat(h, h_N(producers), h_N(consumers)): one neighbourhood cannot tell what comes before from
what comes after. No neighbour is left out, where GraphSAGE samples some. f is a dense layer and a
ReLU, added to h and normalised. Of equal maxima each gets the gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Edges:
    """Who reads from whom. [edges] each."""

    sources: Tensor
    destinations: Tensor


class _MaxPool(torch.autograd.Function):
    """[groups, width]: the maximum over each group's neighbours; 0 where it has none.

    torch's own backward of `scatter_reduce` is several times slower on a CPU.
    """

    @staticmethod
    def forward(ctx, x: Tensor, sources: Tensor, owners: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        sent = x.index_select(0, sources)
        pooled = torch.zeros_like(x)
        pooled.scatter_reduce_(0, owners[:, None].expand_as(sent), sent, "amax")
        if x.requires_grad:
            ctx.save_for_backward(sent == pooled.index_select(0, owners), sources, owners)
        return pooled

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        highest, sources, owners = ctx.saved_tensors
        sent = gradient.index_select(0, owners) * highest
        return torch.zeros_like(gradient).index_add_(0, sources, sent), None, None


def max_pool(x: Tensor, sources: Tensor, owners: Tensor) -> Tensor:
    """[groups, width] the elementwise maximum of x >= 0 over `sources` for each of `owners`; 0
    where there is none. O(edges x width)."""
    return _MaxPool.apply(x, sources, owners)  # type: ignore[no-any-return, no-untyped-call]


class SageLayer(nn.Module):
    """h -> h', both [groups, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pool = nn.Linear(hidden, 2 * hidden)
        self.mix = nn.Linear(3 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, h: Tensor, edges: Edges) -> Tensor:
        out, back = torch.sigmoid(self.pool(h)).chunk(2, dim=1)
        before = max_pool(out, edges.sources, edges.destinations)
        after = max_pool(back, edges.destinations, edges.sources)
        mixed = torch.relu(self.mix(torch.cat([h, before, after], dim=1)))
        return self.norm(h + mixed)  # type: ignore[no-any-return]
