"""Models that command lines in the tests name as `small_models:FUNCTION`."""

import torch
from torch import nn


class Branches(nn.Module):
    """Two branches of linear layers that meet in a sum."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.left = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.right = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        return self.left(x) + self.right(x)


def branches():
    torch.manual_seed(0)
    return Branches(), (torch.randn(8, 32),)


def trained():
    torch.manual_seed(0)
    return Branches(), (torch.randn(8, 32),), nn.functional.mse_loss, (torch.randn(8, 32),)


def of_many_examples():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return module, (torch.randn(1 << 18, 6),), nn.functional.mse_loss, (torch.randn(1 << 18, 3),)


def other():
    torch.manual_seed(0)
    return Branches(depth=2), (torch.randn(8, 32),)
