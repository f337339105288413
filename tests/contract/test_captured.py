"""A step that runs by a plan computes what plain PyTorch computes, over several training steps.

All is in float64: RMSProp and Adam divide by roots of small squares, which magnifies rounding.
"""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import dovetail as dt
from tests.contract.shell import Shell

pytestmark = pytest.mark.usefixtures("forks")
STEPS = 4


class Residual(nn.Module):
    """Branches, batch norm, and dropout that is off."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.head, self.dropout = nn.Linear(8, 5), nn.Dropout(0.0)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = x + self.left(x) + self.right(x).sigmoid()
        return self.head(self.dropout(x.mean((2, 3))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.layers = nn.LSTM(12, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 5)

    def forward(self, x):
        return self.head(self.layers(self.words(x))[0]).flatten(0, 1)


class Attention(nn.Module):
    """An output layer whose weight is that of the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.layer(self.words(x))).flatten(0, 1)


class Unused(nn.Module):
    """A frozen layer, a parameter that nothing reads, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 5)
        self.idle = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.frozen(x)) * (1 + self.calls / 10)


MODELS = {
    "residual": (
        Residual, lambda: torch.randn(4, 3, 8, 8).double(), lambda: torch.randint(0, 5, (4,)),
    ),
    "tagger": (Tagger, lambda: torch.randint(0, 20, (3, 6)), lambda: torch.randint(0, 5, (18,))),
    "attention": (
        Attention, lambda: torch.randint(0, 16, (3, 6)), lambda: torch.randint(0, 16, (18,)),
    ),
    "unused": (
        Unused, lambda: torch.randn(4, 6).double(), lambda: torch.randint(0, 5, (4,)),
    ),
}  # fmt: skip
OPTIMIZERS = {
    "momentum": (
        dt.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "rmsprop": (dt.RMSProp(1e-2), lambda p: torch.optim.RMSprop(p, 1e-2)),
    "adam": (dt.Adam(1e-2), lambda p: torch.optim.Adam(p, 1e-2)),
    "adamw": (dt.AdamW(1e-2), lambda p: torch.optim.AdamW(p, 1e-2)),
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Two devices, each a part of the cores here. A plan for it is not compared with what runs
    without a plan, as it is no text such as here/2."""
    shell = Shell(tmp_path_factory.mktemp("machine"))
    shell.works("machine", "here/2", "--out", "two.toml")
    return dt.load_machine(shell.folder / "two.toml")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(11)


def batches(make_input, make_target):
    return [(make_input(), make_target()) for _ in range(STEPS)]


def plainly(model, loss, optimizer, data):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def assert_same_state(placed, model):
    state, plain = placed.state_dict(), model.state_dict()
    assert set(state) == set(plain)
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *product(["residual"], ["momentum", "rmsprop", "adamw"]),
        *product(["tagger", "attention", "unused"], ["adam"]),
    ],
)
def test_training_steps_are_those_of_plain_pytorch(name, optimizer, machine):
    make, *data = MODELS[name]
    ours, torchs = OPTIMIZERS[optimizer]
    model, loss, steps = make().double(), nn.functional.cross_entropy, batches(*data)
    plain = copy.deepcopy(model)
    losses = plainly(plain, loss, torchs(plain.parameters()), steps)
    step = dt.capture(model, steps[0][0], targets=steps[0][1], loss=loss, train=ours)
    plan = dt.plan(step, machine, placer="balanced", budget="10e")
    assert len(set(plan.placement.tolist())) == 2
    with dt.run(plan, step) as placed:
        found = [float(placed.step(*batch)) for batch in steps]
        assert_same_state(placed, plain)
    assert found == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("name", ["residual", "tagger"])
def test_inference_is_that_of_plain_pytorch(name, machine):
    make, *data = MODELS[name]
    model, steps = make().double().eval(), batches(*data)
    step = dt.capture(model, steps[0][0])
    plan = dt.plan(step, machine, placer="balanced", budget="10e")
    with dt.run(plan, step) as placed:
        for x, _ in steps:
            with torch.no_grad():
                expected = model(x)
            torch.testing.assert_close(placed.step(x), expected, rtol=1e-9, atol=1e-12)


def test_towers_train_as_one_model_with_the_whole_batch(machine):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    loss = nn.functional.mse_loss
    data = batches(lambda: torch.randn(8, 6).double(), lambda: torch.randn(8, 5).double())
    plain = copy.deepcopy(model)
    losses = plainly(plain, loss, torch.optim.SGD(plain.parameters(), 0.1), data)
    x, y = (tensor[:4] for tensor in data[0])
    step = dt.towers(dt.capture(model, x, targets=y, loss=loss, train=dt.SGD(0.1)), 2)
    plan = dt.plan(step, machine, placer="balanced", budget="10e")
    with dt.run(plan, step) as placed:
        found = [float(placed.step(x[:4], x[4:], y[:4], y[4:])) for x, y in data]
        assert_same_state(placed, plain)
    assert found == pytest.approx(losses, rel=1e-9)


def test_what_a_capture_sees_stays_as_it_was():
    model = Residual().double()
    before = copy.deepcopy(model.state_dict())
    x, y = MODELS["residual"][1](), MODELS["residual"][2]()
    torch.manual_seed(5)
    expected_draw = torch.rand(1)
    torch.manual_seed(5)
    dt.capture(model, x, targets=y, loss=nn.functional.cross_entropy, train=dt.Adam(1e-3))
    assert torch.equal(torch.rand(1), expected_draw)
    assert model.training
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
