"""A model may write over its parameters while it runs: the update applies to what was written."""

import copy

import pytest
import torch
from torch import nn

from dovetail.errors import ReplicationError
from dovetail.frontends import SGD, Adam, GradScaler, capture, initial_values, run_step
from dovetail.transforms import micro_batched


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)
        self.words = nn.Embedding(5, 3, max_norm=0.7)

    def forward(self, x):
        self.write()
        return self.outer(self.inner(x).tanh()).square().sum()

    def write(self):
        pass


class Clipped(Base):
    def write(self):
        self.inner.weight.data.clamp_(-0.3, 0.3)


class Normalised(Base):
    def write(self):
        with torch.no_grad():
            self.inner.weight.div_(self.inner.weight.norm())
            self.outer.weight.renorm_(2, 0, 0.5)


class Assigned(Base):
    def write(self):
        self.inner.weight.data = self.inner.weight.data / 2


class OfLimitedNorm(Base):
    def forward(self, x):
        return super().forward(x[:1] + self.words(torch.tensor([1, 2, 1])))


class WrittenLater(Base):
    def forward(self, x):
        loss = super().forward(x)
        self.outer.bias.data.mul_(0.5)
        self.words.weight.data.add_(1)
        return loss


class WrittenAsOut(Base):
    def write(self):
        with torch.no_grad():
            torch.mul(self.inner.weight, 0.5, out=self.inner.weight)
            torch._foreach_mul_([self.outer.weight, self.outer.bias], 0.5)


MODELS = [WrittenAsOut, Clipped, Normalised, Assigned, OfLimitedNorm, WrittenLater]
OPTIMIZERS = {
    "inference": (None, None),
    "momentum": (
        SGD(0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    ),
    "adam": (Adam(0.1), lambda p: torch.optim.Adam(p, 0.1, foreach=False)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_writes_over_parameters_computes_what_plain_pytorch_does(kind, name):
    module, x = kind(), torch.randn(2, 3)
    train, make = OPTIMIZERS[name]
    captured, plain = capture(module, x, train=train), copy.deepcopy(module)
    optimizer, values = make and make(plain.parameters()), initial_values(captured)
    for step in range(3):
        expected = plain(x)
        if optimizer is not None:
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        assert torch.equal(run_step(captured, values, [x], step=step), expected.detach())
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.role == "parameter":
            found = values[captured.graph.outputs_of(op)[0]]
            assert torch.equal(found, plain.get_parameter(source.name)), source.name


def test_a_step_that_a_scaler_skips_leaves_what_the_model_has_written():
    module = Clipped()
    captured = capture(module, torch.randn(2, 3), train=SGD(0.1), scaler=GradScaler())
    values = initial_values(captured)
    run_step(captured, values, [torch.full((2, 3), float("inf"))])
    module.write()
    (weight,) = (
        values[captured.graph.outputs_of(op)[0]]
        for op, source in enumerate(captured.program.sources)
        if source is not None and source.name == "inner.weight"
    )
    assert torch.equal(weight, module.inner.weight)


def test_micro_batches_of_a_model_that_writes_over_parameters_are_refused():
    captured = capture(Clipped(), torch.randn(2, 3), train=SGD(0.1))
    with pytest.raises(ReplicationError, match=r"writes over the parameter of .inner.weight/sgd"):
        micro_batched(captured.graph, 2)
