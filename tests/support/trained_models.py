"""Small models and their data, as `dovetail train` is given them."""

import os
import signal

import numpy as np
import torch
from torch import nn

from dovetail.training.trainer import Trainer


def arrays(samples=240, seed=0):
    """Four classes by the signs of two features."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(samples, 4)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int64) + 2 * (inputs[:, 1] > 0)
    return inputs, labels


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def quadrants():
    return network(), nn.functional.cross_entropy, torch.optim.Adam, arrays(), arrays(80, 1)


def share_of_first_class(output, target):
    return (output.argmax(1) == 0).float().mean()


def tied():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second, nn.Linear(4, 4))
    return model, nn.functional.cross_entropy, torch.optim.Adam, arrays()


class WithState(nn.Sequential):
    """Keeps a text beside its tensors."""

    def get_extra_state(self):
        return "a text"

    def set_extra_state(self, state):
        assert state == "a text"


def with_state():
    return WithState(network()), nn.functional.cross_entropy, torch.optim.Adam, arrays()


def without_validation():
    return quadrants()[:4]


def as_plan():
    """The form that only `dovetail plan` takes."""
    model, loss, _, (inputs, labels) = quadrants()[:4]
    return model, torch.from_numpy(inputs[:32]), loss, torch.from_numpy(labels[:32])


def as_inference():
    return as_plan()[:2]


def with_nothing():
    model, loss, optimizer = quadrants()[:3]
    return model, loss, optimizer, torch.utils.data.TensorDataset(torch.zeros(0, 4))


class Nothing(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def with_an_empty_stream():
    return *quadrants()[:3], Nothing()


def as_trainer():
    trainer = Trainer(
        network(), nn.functional.cross_entropy, "sgd", rule="downpour", backend="simulated",
        batch=24, window=2, lr=0.1,
    )  # fmt: skip
    return trainer, arrays()


def steep():
    """Least squares whose largest curvature is 1: descent diverges at steps above 2."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(2000, 2)).astype(np.float32)
    targets = inputs @ np.array([[3.0], [-2.0]], np.float32)
    torch.manual_seed(0)
    return nn.Linear(2, 1), nn.functional.mse_loss, torch.optim.SGD, (inputs, targets)


class Failing(nn.Module):
    """Fails after so many calls."""

    def __init__(self, calls):
        super().__init__()
        self.inner, self.calls = network(), calls

    def forward(self, inputs):
        self.calls -= 1
        if self.calls < 0:
            raise ArithmeticError("this layer has had enough")
        return self.inner(inputs)


def failing():
    return Failing(4), *quadrants()[1:]


class Interrupting:
    """A data set that presses Ctrl-C in its second epoch."""

    def __init__(self):
        self.inputs, self.labels = arrays()
        self.seen = 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.seen += 1
        if self.seen == 400:
            os.kill(os.getpid(), signal.SIGINT)
        return self.inputs[index], self.labels[index]


def interrupted():
    model, loss, optimizer, _, held = quadrants()
    return model, loss, optimizer, Interrupting(), held


def interrupted_at_once():
    model, loss, optimizer, _, _ = quadrants()
    data = Interrupting()
    data.seen = 300
    return model, loss, optimizer, data


def nonsense():
    return 3


def too_short():
    return network(), nn.functional.cross_entropy


def a_trainer_alone():
    return as_trainer()[:1]
