"""Steps in every dtype that torch has: planned on presets and here, and run with plain numbers."""

import copy

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.executors import Workers, run
from dovetail.frontends import fused
from tests.support.placing import plan_for, random_order, random_placement, two_devices

pytestmark = pytest.mark.usefixtures("forked_workers")
STEPS = 3
OPTIMIZERS = {
    "sgd": (
        dt.SGD(0.05, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "rmsprop": (
        dt.RMSProp(1e-3, momentum=0.9, centered=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    ),
    "adam": (
        dt.Adam(1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    ),
    "adamw": (dt.AdamW(1e-3), lambda p: torch.optim.AdamW(p, lr=1e-3)),
}


class RotaryAttention(nn.Module):
    """Positions as angles of complex numbers, as in Meta's code of Llama."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(16, 48), nn.Linear(16, 1)
        angles = torch.outer(torch.arange(6.0), 10.0 ** -torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, x):
        split = [a.view(2, 6, 2, 8).transpose(1, 2) for a in self.project(x).chunk(3, -1)]
        query, key = self.turned(split[0]), self.turned(split[1])
        y = nn.functional.scaled_dot_product_attention(query, key, split[2])
        return self.head(y.transpose(1, 2).reshape(2, 6, 16))


class FourierMixer(nn.Module):
    """A layer of FNet: the real part of transforms over features and positions."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        return self.head(self.inner(x).relu())


class SpectralConvolution(nn.Module):
    """A layer of a Fourier neural operator, whose weights are complex, and that conjugates."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 3, dtype=torch.complex64) / 16)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        modes = torch.fft.rfft(x.transpose(1, 2))
        mixed = torch.zeros(2, 16, modes.shape[-1], dtype=torch.complex64)
        mixed[..., :3] = torch.einsum("bix,iox->box", modes[..., :3].conj(), self.weight)
        y = torch.fft.irfft(mixed, n=x.shape[1]).transpose(1, 2)
        return self.head((y + self.inner(x)).relu())


@pytest.fixture(scope="module")
def workers(forked_workers):
    """The processes of two devices. Those of other modules are not forked, and outlive these."""
    with Workers(two_devices()) as started:
        yield started


def squared(output, target):
    return ((output - target) ** 2).mean()


def drawn(count=STEPS):
    return [(torch.randn(2, 6, 16), torch.randn(2, 6, 1)) for _ in range(count)]


def captured(module, optimizer="adam"):
    torch.manual_seed(0)
    model = module()
    inputs, targets = drawn(1)[0]
    step = dt.capture(model, inputs, targets=targets, loss=squared, train=OPTIMIZERS[optimizer][0])
    return model, step


def assert_trains_as_plain(running, model, optimizer):
    plain = copy.deepcopy(model)
    updates = OPTIMIZERS[optimizer][1](plain.parameters())
    for inputs, targets in drawn():
        loss = squared(plain(inputs), targets)
        updates.zero_grad()
        loss.backward()
        updates.step()
        assert torch.equal(running.step(inputs, targets), loss.detach())
    for name, value in running.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


CASES = [
    (RotaryAttention, "adam"),
    (FourierMixer, "adam"),
    *((SpectralConvolution, optimizer) for optimizer in OPTIMIZERS),
]


@pytest.mark.parametrize(("module", "optimizer"), CASES)
def test_complex_numbers_train_on_two_devices_as_in_plain_torch(
    module, optimizer, workers, one_thread
):
    model, step = captured(module, optimizer)
    placement = random_placement(step.graph, 1)
    plan = plan_for(step, placement, random_order(step.graph, placement, 1))
    with run(plan, step, workers=workers) as running:
        assert_trains_as_plain(running, model, optimizer)


@pytest.mark.parametrize("module", [RotaryAttention, FourierMixer, SpectralConvolution])
def test_complex_numbers_are_planned_on_presets(module):
    _, step = captured(module)
    assert dt.plan(step, "2 x p100 + haswell", placer="etf", budget="1e").value > 0


def test_complex_numbers_are_measured_and_run_here(one_thread):
    model, step = captured(SpectralConvolution)
    plan = dt.plan(step, "here/1", placer="single", budget="1e", compile_budget="0s")
    assert plan.costs_source == "measured"
    with dt.run(plan, step) as running:
        assert_trains_as_plain(running, model, "adam")


def test_complex_numbers_are_not_compiled():
    graph, program = (step := captured(FourierMixer)[1]).graph, step.program
    for op in range(len(graph)):
        tensors = [*graph.inputs_of(op).tolist(), *graph.outputs_of(op)]
        if any(graph.dtypes[t] == "complex64" for t in tensors):
            assert not fused.may_be_fused(graph, program, op)


class Through(nn.Module):
    """Numbers that are kept in another dtype for a while."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.inner = dtype, nn.Linear(16, 16)

    def forward(self, x):
        kept = (self.inner(x).abs() + 1).to(self.dtype)
        return kept.view(4, 3, 16).to(torch.complex64).abs() + x.view(4, 3, 16)


DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
        and str(value) not in ("torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2")
        and not str(value).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))
    }
    | {torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint32, torch.uint64, torch.int64},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_is_planned_on_a_preset_and_sent_between_devices(dtype, workers, one_thread):
    torch.manual_seed(0)
    module, inputs = Through(dtype), torch.randn(2, 6, 16)
    step = dt.capture(module, inputs)
    assert dt.plan(step, "2 x k80", placer="single", budget="1e").value > 0
    placement = random_placement(step.graph, 2)
    with run(plan_for(step, placement), step, workers=workers) as running:
        assert torch.equal(running.step(inputs), module(inputs))
