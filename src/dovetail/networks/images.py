"""Parts that the image classifiers share: examples, losses, and the layer that halves the grid."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.records import Examples


class FactorizedReduce(nn.Module):
    """Halves the grid: half of the channels come from the even pixels, half from the odd ones.

    Paper: Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", CVPR
    2018, https://arxiv.org/abs/1707.07012. AmoebaNet took the layer over.
    """

    def __init__(self, inputs: int, outputs: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, outputs, ceil(n / 2), ceil(n / 2)] of x [batch, inputs, n, n]."""
        x = F.relu(x)
        # Without its first row and column, the even pixels are the odd ones of x. The padding keeps
        # the size, so that both halves have the same grid.
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        halved: Tensor = self.bn(torch.cat([self.even(x), self.odd(shifted)], 1))
        return halved


def image_examples(batch: int, size: int, classes: int) -> Examples:
    """Draws images [batch, 3, size, size] and their classes [batch]."""
    return (torch.randn(batch, 3, size, size),), (torch.randint(classes, (batch,)),)


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [batch, classes] and targets [batch]."""
    return F.cross_entropy(logits, targets)


def auxiliary_loss(output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [batch, classes] and targets [batch].

    If the output is (logits, auxiliary logits), the auxiliary cross entropy is added, times .4.
    """
    if isinstance(output, tuple):
        logits, auxiliary = output
        return F.cross_entropy(logits, targets) + 0.4 * F.cross_entropy(auxiliary, targets)
    return F.cross_entropy(output, targets)
