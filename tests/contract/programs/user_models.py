"""Models as a user of the contract's tests writes them."""

import functools
import os
import time
from pathlib import Path

import torch
from torch import nn


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.randn(8, 16), nn.functional.cross_entropy, torch.randint(0, 4, (8,))


class Classifier(nn.Module):
    """Writes the file that $MARK names once it has been called as often as $MARK_AFTER says, and
    takes its time."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 12), nn.Linear(12, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training and "MARK" in os.environ:
            time.sleep(0.03)
            if self.calls == int(os.environ["MARK_AFTER"]):
                Path(os.environ["MARK"]).touch()
        return self.out(torch.tanh(self.hidden(x)))


def classifier():
    torch.manual_seed(1)
    inputs = torch.randn(120, 6)
    data = inputs, inputs[:, :3].argmax(1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return Classifier(), nn.functional.cross_entropy, optimizer, data, data


class BranchesOnData(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def branching():
    return BranchesOnData(), torch.randn(3)


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("not my day")


def raising():
    return Raises(), torch.randn(3)


def exiting():
    raise SystemExit(0)
