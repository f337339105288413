"""SqueezeNet: an image classifier of fire modules, which squeeze to few channels and then expand.

                    ┌─► expand 1x1 ─┐
    x ─► squeeze ───┤               ├─► concatenated
           1x1      └─► expand 3x3 ─┘

Paper: Iandola, Han, Moskewicz, Ashraf, Dally and Keutzer, "SqueezeNet: AlexNet-level accuracy with
50x fewer parameters and <0.5MB model size", 2016, https://arxiv.org/abs/1602.07360, table 1:
1,248,424 parameters. Version 1.1, https://github.com/forresti/SqueezeNet, has 1,235,496 parameters
and needs 2.4 times fewer multiply-adds.
Differences: the first convolution is not padded, as in torchvision, so the grids are 54, 27 and 13
where the paper's table has 55, 27 and 13; `width` scales every number of channels (rounded, at
least 1), so that tests can use a small network.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.images import classification_loss, image_examples
from dovetail.networks.records import Network, Options

POOL = 0
"""This number stands for a pooling layer in the lists of fire modules."""
FIRES_1_0 = (16, 16, 32, POOL, 32, 48, 48, 64, POOL, 64)
FIRES_1_1 = (16, 16, POOL, 32, 32, POOL, 48, 48, 64, 64)
"""Channels to which each fire module squeezes, from table 1 of the paper and the release of version
1.1. Each of a module's two expansions has four times as many."""


class Fire(nn.Module):
    """Maps x [batch, inputs, n, n] to [batch, 2 x expanded, n, n]."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.outputs = 2 * expanded

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


class SqueezeNet(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes].

    The two versions differ in `stem`, the first convolution, and in `fires`.
    """

    def __init__(
        self,
        stem: nn.Conv2d,
        fires: tuple[int, ...],
        classes: int = 1000,
        *,
        width: float = 1.0,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        channels = stem.out_channels
        features: list[nn.Module] = [stem, nn.ReLU(), _pool()]
        for squeezed in fires:
            if squeezed == POOL:
                features.append(_pool())
                continue
            fire = Fire(channels, _scaled(squeezed, width), _scaled(4 * squeezed, width))
            features.append(fire)
            channels = fire.outputs
        self.features = nn.Sequential(*features)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.dropout(self.features(images))
        x = F.relu(self.classifier(x))
        return torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)


def _scaled(channels: int, width: float) -> int:
    return max(1, round(width * channels))


def squeezenet_1_0(classes: int, width: float, dropout: float) -> SqueezeNet:
    stem = nn.Conv2d(3, _scaled(96, width), 7, stride=2)
    return SqueezeNet(stem, FIRES_1_0, classes, width=width, dropout=dropout)


def squeezenet_1_1(classes: int, width: float, dropout: float) -> SqueezeNet:
    stem = nn.Conv2d(3, _scaled(64, width), 3, stride=2)
    return SqueezeNet(stem, FIRES_1_1, classes, width=width, dropout=dropout)


_DEFAULTS: Options = {"batch": 32, "size": 224, "classes": 1000, "width": 1.0, "dropout": 0.5}
_SMALL: Options = {"batch": 2, "size": 40, "classes": 10, "width": 0.2, "dropout": 0.0}

NETWORK_1_0 = Network(
    name="squeezenet_1_0",
    paper="Iandola et al., 2016, https://arxiv.org/abs/1602.07360",
    description="small image classifier of modules that squeeze and expand",
    defaults=_DEFAULTS,
    small=_SMALL,
    modules=squeezenet_1_0,
    examples=image_examples,
    loss=classification_loss,
)
NETWORK_1_1 = Network(
    name="squeezenet_1_1",
    paper="Iandola et al., 2016, https://arxiv.org/abs/1602.07360, and its release 1.1",
    description="SqueezeNet that pools earlier, with 2.4 times fewer multiply-adds",
    defaults=_DEFAULTS,
    small=_SMALL,
    modules=squeezenet_1_1,
    examples=image_examples,
    loss=classification_loss,
)
