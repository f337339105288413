"""Small models and data that the trainer's tests share."""

import functools

import numpy as np
import torch
from torch import nn

SGD = functools.partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
}
cross_entropy = nn.functional.cross_entropy


def perceptron(inputs=6, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))


def table(rows=40, inputs=6, classes=3, seed=0):
    """Features [rows, inputs] and classes [rows] that a linear map separates."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, inputs)).astype(np.float32)
    labels = (features @ rng.normal(size=(inputs, classes))).argmax(1)
    return torch.from_numpy(features), torch.from_numpy(labels)


def relative(found, expected):
    """Relative L2 distance."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


class Numbers(torch.utils.data.IterableDataset):
    """(features, label) pairs of a table, one by one; counts the items it has made."""

    def __init__(self, features, labels):
        self.features, self.labels, self.made = features, labels, 0

    def __iter__(self):
        for pair in zip(self.features, self.labels, strict=True):
            self.made += 1
            yield pair
