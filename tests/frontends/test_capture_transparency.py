"""A captured step's numbers equal plain PyTorch with torch.optim."""

import copy
import functools

import pytest
import torch
from torch import nn

from dovetail.frontends import (
    SGD,
    Adam,
    AdamW,
    RMSProp,
    capture,
    capturing,
    initial_values,
    run_step,
)
from dovetail.networks import NETWORKS

OPTIMIZERS = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1, foreach=False)),
    "momentum": (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.SGD(
            p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, foreach=False
        ),
    ),
    "rmsprop": (
        RMSProp(1e-3, momentum=0.5, centered=True),
        lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True, foreach=False),
    ),
    "adam": (
        Adam(1e-3, weight_decay=1e-2),
        lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-2, foreach=False),
    ),
    "adamw": (AdamW(1e-3), lambda p: torch.optim.AdamW(p, 1e-3, foreach=False)),
}
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}


SMALL = {
    "rnnlm": {"hidden": 8, "steps": 3, "batch": 4, "vocabulary": 20},
    "inception_v3": {"width": 0.1, "size": 75, "batch": 2, "classes": 5, "dropout": 0.0},
}


@functools.cache
def network(name, dtype):
    torch.manual_seed(0)
    without_chance = {"dropout": 0.0} if "dropout" in NETWORKS[name].defaults else {}
    options = SMALL.get(name, NETWORKS[name].small | without_chance)
    module, inputs, loss, targets = NETWORKS[name].build(**options)
    inputs, targets = (
        tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
        for given in (inputs, targets)
    )
    return module.to(dtype).train(), inputs, loss, targets


def relative_error(found, expected):
    if not expected.is_floating_point():
        return float((found != expected).any())
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_equals_plain(captured, module, make_optimizer, tolerance, loss, steps=3):
    """Run both for some steps; compare the loss, every parameter, buffer and optimizer state."""
    plain, values = copy.deepcopy(module), initial_values(captured)
    optimizer = make_optimizer(plain.parameters())
    inputs, targets = captured.inputs, captured.targets
    for step in range(steps):
        optimizer.zero_grad()
        expected = loss(plain(*inputs), *targets)
        expected.backward()
        optimizer.step()
        found = run_step(captured, values, inputs, targets, step=step)
        assert relative_error(found, expected.detach()) <= tolerance
    held = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    compared = 0
    for op, source in enumerate(captured.program.sources):
        if source is None or source.role in ("input", "constant"):
            continue
        if source.role == "state":
            parameter, _, state = source.name.rpartition("/")
            expected = optimizer.state[held[parameter]][state]
        else:
            expected = held[source.name].detach()
        found = values[captured.graph.outputs_of(op)[0]]
        assert relative_error(found, expected) <= tolerance, source.name
        compared += 1
    assert compared >= len(held)


@pytest.fixture(scope="module")
def traces():
    return {}


# Every optimizer in both types on the quick network; on the slow one each type once.
CASES = [("rnnlm", optimizer, dtype) for optimizer in OPTIMIZERS for dtype in TOLERANCES]
CASES += [("inception_v3", "rmsprop", torch.float32), ("inception_v3", "momentum", torch.float64)]


@pytest.mark.parametrize(("name", "optimizer", "dtype"), CASES, ids=str)
def test_three_steps_equal_plain_torch(name, optimizer, dtype, traces, monkeypatch):
    module, inputs, loss, targets = network(name, dtype)
    # Forward and backward are the same whatever the optimizer: trace them once.
    monkeypatch.setattr(capturing, "forget", lambda graph: None)
    monkeypatch.setattr(capturing, "take_back", lambda _made: [])
    if (name, dtype) in traces:
        monkeypatch.setattr(capturing, "trace", lambda request: traces[name, dtype])
    else:
        trace = capturing.trace
        monkeypatch.setattr(
            capturing, "trace", lambda r: traces.setdefault((name, dtype), trace(r))
        )
    train, make_optimizer = OPTIMIZERS[optimizer]
    captured = capture(module, *inputs, targets=targets, loss=loss, train=train)
    assert_equals_plain(captured, module, make_optimizer, TOLERANCES[dtype], loss)


# Other variants of a network that is there are the same code.
VARIANTS = {"nasnet_a_large", "squeezenet_1_0"}


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - set(SMALL) - VARIANTS))
def test_two_steps_of_every_other_network_equal_plain_torch(name):
    module, inputs, loss, targets = network(name, torch.float64)
    train, make_optimizer = OPTIMIZERS["adam"]
    captured = capture(module, *inputs, targets=targets, loss=loss, train=train)
    assert_equals_plain(captured, module, make_optimizer, TOLERANCES[torch.float64], loss, 2)


def test_momentum_starts_from_the_gradient_bit_for_bit():
    # A gradient of -0.0 makes a buffer of -0.0, as in torch.optim; from +0.0 it would not.
    module = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -0.0]]))
    inputs = (torch.tensor([[1.0, -0.0]]),)
    captured = capture(module, *inputs, loss=lambda out: out.sum(), train=SGD(0.1, momentum=0.9))
    values = initial_values(captured)
    run_step(captured, values, inputs)
    state = captured.graph.index["weight/momentum_buffer"]
    buffer = values[captured.graph.outputs_of(state)[0]]
    plain = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    module(*inputs).sum().backward()
    plain.step()
    expected = plain.state[module.weight]["momentum_buffer"]
    assert torch.equal(torch.signbit(buffer), torch.signbit(expected))
    assert torch.equal(buffer, expected)


class Awkward(nn.Module):
    """In-place ops, a tied weight, a frozen layer, a parameter without a use, a constant, buffers
    written in place and by assignment, and views of it all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x, y):
        x += 1
        x = self.first(x).relu_()
        x = x + self.frozen(self.tied(x)) * torch.tensor([2.0])
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.norm(x) + 0
        x[:, :3].mul_(2)
        left, right = x.chunk(2, dim=1)
        turned = torch.cat([left, right[:, [2, 0, 1]]], 1).t().reshape(6, -1)
        return turned * y.sum() - self.mean[:, None]


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_an_awkward_module_equals_plain_torch(optimizer):
    torch.manual_seed(1)
    module = Awkward()
    inputs = (torch.randn(6, 6), torch.randn(3))
    train, make_optimizer = OPTIMIZERS[optimizer]
    loss = lambda out: (out**2).mean()  # noqa: E731  (a loss reads best as an expression)
    captured = capture(module, *inputs, loss=loss, train=train)
    plain, values = copy.deepcopy(module), initial_values(captured)
    torch_optimizer = make_optimizer(plain.parameters())
    for step in range(3):
        torch_optimizer.zero_grad()
        expected = loss(plain(*(x.clone() for x in inputs)))
        expected.backward()
        torch_optimizer.step()
        found = run_step(captured, values, [x.clone() for x in inputs], step=step)
        assert relative_error(found, expected.detach()) <= 1e-4
    held = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.role in ("parameter", "buffer"):
            found = values[captured.graph.outputs_of(op)[0]]
            assert relative_error(found, held[source.name].detach()) <= 1e-4, source.name
    updated = {name for name in captured.graph.names if name.endswith(f"/{train.name}")}
    assert updated == {
        f"{name}/{train.name}"
        for name in ("first.weight", "first.bias", "tied.bias", "norm.weight", "norm.bias")
    }
    assert captured.program.aliases == {"tied.weight": "first.weight"}


def test_inference_equals_the_plain_model_in_its_own_structure():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2)

        def forward(self, x):
            outputs, (h, c) = self.lstm(x)
            return {"outputs": outputs, "last": [h, c], "none": None}

    torch.manual_seed(0)
    module, x = Two().eval(), torch.randn(3, 2, 4)
    captured = capture(module, x)
    found = run_step(captured, initial_values(captured), (x,))
    expected = module(x)
    assert found["none"] is None
    assert torch.allclose(found["outputs"], expected["outputs"], atol=1e-6)
    for a, b in zip(found["last"], expected["last"], strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_random_ops_depend_on_seed_and_step_only():
    module = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5)).train()
    x = torch.ones(4, 50)
    captured = capture(module, x, loss=lambda out: out.sum(), train=SGD(0.0))
    assert any(call is not None and call.random for call in captured.program.calls)

    def loss(seed, step):
        torch.rand(3)  # whatever was drawn before must not matter
        return run_step(captured, initial_values(captured), (x,), seed=seed, step=step).item()

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(0, 1), loss(1, 0)}) == 3


def test_evaluation_mode_is_kept():
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)).eval()
    captured = capture(module, torch.randn(4, 3))
    assert not any(call is not None and call.random for call in captured.program.calls)
    assert not captured.graph.overwrites.any()


@pytest.mark.parametrize("shape", [(4, 4), (3, 4), (4, 3)])
def test_a_diagonal_is_filled(shape):
    class Fills(nn.Module):
        def forward(self, x):
            table = torch.zeros(shape).fill_diagonal_(2.0)
            parts = x * 3
            parts.t().fill_diagonal_(-1.0)
            return table + parts, x.as_strided((2,), (2,))

    x = torch.randn(shape)
    captured = capture(Fills(), x)
    found = run_step(captured, initial_values(captured), (x,))
    assert all(map(torch.equal, found, Fills()(x)))
