"""ViT: a transformer encoder over the patches of an image.

    images ─► patches ─► linear ─► [class token, patches] + positions ─► layers ─► norm ─► linear
                                                                          of the class token

Paper: Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at
Scale", ICLR 2021, https://arxiv.org/abs/2010.11929, section 3.1 and table 1. The default is
ViT-B/16: 12 layers, hidden 768, 12 heads, inner 3072, 86 M parameters. With 1,000 classes and
images of 224 that is 86,567,656.
Differences: the head is one linear layer, as the paper has it for fine-tuning. Dropout is an
option, and 0 by default.
"""

import torch
from torch import Tensor, nn

from dovetail.networks.images import classification_loss, image_examples
from dovetail.networks.records import Network

EPS = 1e-6
"""Every layer normalisation has this epsilon."""


class ViTAttention(nn.Module):
    """Self-attention of several heads, written as separate ops, so that a placer can place them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, tokens, hidden] of x [batch, tokens, hidden]."""
        parts = self.query_key_value(x).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        weights = torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, dim=3)
        attended: Tensor = self.output((weights @ v).transpose(1, 2).flatten(2))
        return attended


class ViTLayer(nn.Module):
    """Attention, then a feed-forward network. Each reads its input normalised, and its output is
    added to the input."""

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, eps=EPS)
        self.attention = ViTAttention(hidden, heads)
        self.feed_forward_norm = nn.LayerNorm(hidden, eps=EPS)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, hidden)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        fed: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + fed


class ViT(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes].

    patch   size of a patch, of one side

    Raises `ValueError` unless `size` is a multiple of `patch`, and `hidden` of `heads`.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        inner: int,
        patch: int,
        size: int,
        classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if size % patch or hidden % heads:
            raise ValueError(
                f"size {size} must be a multiple of patch {patch}, hidden {hidden} of heads {heads}"
            )
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, hidden))
        nn.init.normal_(self.positions, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(ViTLayer(hidden, heads, inner, dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(hidden, eps=EPS)
        self.linear = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(patches.shape[0], -1, -1)
        x = self.dropout(torch.cat([token, patches], dim=1) + self.positions)
        logits: Tensor = self.linear(self.norm(self.layers(x)[:, 0]))
        return logits


NETWORK = Network(
    name="vit",
    paper="Dosovitskiy et al., ICLR 2021, https://arxiv.org/abs/2010.11929",
    description="transformer encoder over the patches of an image",
    defaults={
        "batch": 32,
        "size": 224,
        "classes": 1000,
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "inner": 3072,
        "patch": 16,
        "dropout": 0.0,
    },
    small={
        "batch": 2,
        "size": 32,
        "classes": 10,
        "layers": 2,
        "hidden": 16,
        "heads": 2,
        "inner": 32,
        "patch": 8,
    },
    modules=ViT,
    examples=image_examples,
    loss=classification_loss,
)
