"""Numbers that follow from constants alone are known while a step is captured: a model may read
them, and branch on them."""

import copy

import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError
from dovetail.frontends import SGD, capture, initial_values, run_step


class Model(nn.Module):
    """`strides` are a plain tensor, as in YOLOv8, and so is `times`."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)
        self.strides = torch.tensor([8.0, 16.0, 32.0])
        self.times = torch.linspace(0, 1, 4)
        self.register_buffer("held", torch.ones(3))
        self.part = self.held[:2]
        self.function = function

    def forward(self, x):
        return self.function(self, self.layer(x)).square().sum()


def strides_as_numbers(model, h):
    return sum(h[:, :1] * stride.item() for stride in model.strides)


def strides_in_a_loop(model, h):
    for i, stride in enumerate(model.strides):
        if stride > 8:
            h = h / stride + int(stride // 8) * i
    return h


def a_solver_of_fixed_steps(model, h):
    assert (model.times[1:] > model.times[:-1]).all(), "times must grow"
    for before, after in zip(model.times[:-1], model.times[1:], strict=True):
        step = after - before
        h = h + step * torch.tanh(h)
        if after >= 1:
            h = h * 2
    return h


def times_made_in_forward(model, h):
    times = torch.linspace(0, 1, 5)
    if times[0] > times[1]:
        times = -times
    return h * float(times.max()) + times[2].item()


def made_as_the_input_is(model, h):
    mask, scale = torch.ones_like(h, dtype=torch.bool), h.new_full((), 3.0)
    if mask.all() and not h.new_zeros(2, 2).any():
        h = h * scale.item()
    return h


def a_table(model, h):
    table = torch.arange(6.0).reshape(2, 3).sin().exp()
    return h * table.sum().item() + table[1, 2].item()


def a_list(model, h):
    return h * torch.arange(1, 4).float().mul(2).tolist()[2]


@pytest.mark.parametrize("train", [None, SGD(0.01)])
@pytest.mark.parametrize(
    "function",
    [
        strides_as_numbers,
        strides_in_a_loop,
        a_solver_of_fixed_steps,
        times_made_in_forward,
        made_as_the_input_is,
        a_table,
        a_list,
    ],
)
def test_a_step_that_reads_numbers_of_constants_computes_what_plain_pytorch_does(function, train):
    module, x = Model(function), torch.randn(2, 3)
    captured, plain = capture(module, x, train=train), copy.deepcopy(module)
    optimizer, values = torch.optim.SGD(plain.parameters(), 0.01, foreach=False), None
    values = initial_values(captured)
    for step in range(3):
        expected = plain(x)
        if train:
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        found = run_step(captured, values, captured.inputs, step=step)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda _, h: h * _.held.sum().item(), "turns a tensor into a number"),
        (lambda _, h: h * _.part[0].item(), "buffer held is read through a tensor"),
        (lambda _, h: h * torch.rand(2)[0].item(), "turns a tensor into a number"),
        (lambda _, h: h * torch.empty(2)[0].item(), "turns a tensor into a number"),
        (lambda _, h: h * torch.empty_like(h)[0, 0].item(), "turns a tensor into a number"),
        (lambda _, h: h * torch.zeros(3).add_(h.sum())[0].item(), "turns a tensor into a number"),
        (lambda _, h: h * h.shape[0] * h.detach().max().item(), "plain attributes"),
    ],
)
def test_numbers_that_are_not_constant_are_refused(function, reason):
    with pytest.raises(CaptureError, match=reason):
        capture(Model(function), torch.randn(2, 3))


def ctc_loss(lengths):
    def run(model, h):
        log_probs = h.repeat(3, 2).reshape(6, 2, 4).log_softmax(-1)
        labels = torch.tensor([[1, 2, 1], [3, 1, 0]])
        inputs, targets = lengths(h)
        return nn.functional.ctc_loss(log_probs, labels, inputs, target_lengths=targets)

    return run


@pytest.mark.parametrize("train", [None, SGD(0.01)])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(lambda h: ((6, 5), (3, 2)), id="numbers"),
        pytest.param(lambda h: (torch.full((2,), 6), torch.tensor([3, 2])), id="constants"),
    ],
)
def test_a_ctc_loss_with_constant_lengths_is_that_of_plain_pytorch(lengths, train):
    module, x = Model(ctc_loss(lengths)), torch.randn(2, 3)
    captured, plain = capture(module, x, train=train), copy.deepcopy(module)
    optimizer, values = torch.optim.SGD(plain.parameters(), 0.01), initial_values(captured)
    for step in range(3):
        expected = plain(x)
        if train:
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        found = run_step(captured, values, captured.inputs, step=step)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)


def of_data(h):
    return (h.sum(-1) > 0).long() + 3, torch.tensor([3, 2])


def test_lengths_that_are_data_are_refused_with_a_cure():
    with pytest.raises(CaptureError, match="give it its lengths as numbers"):
        capture(Model(ctc_loss(of_data)), torch.randn(2, 3))


class Averaging(nn.Module):
    """Its norms average over all batches, by a count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.flat = nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4, momentum=None)
        self.images = nn.BatchNorm2d(4, momentum=None, affine=False)

    def forward(self, x):
        return self.flat(self.images(self.layer(x)).flatten(2)).square().mean()


@pytest.mark.parametrize("train", [None, SGD(0.1)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norms_without_momentum_average_as_plain_pytorchs_do(train, training, dtype):
    model = Averaging().to(dtype).train(training)
    step = capture(copy.deepcopy(model), torch.randn(5, 3, 6, 6, dtype=dtype), train=train)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    values = initial_values(step)
    rounding = 1e-6 if dtype is torch.float32 else 1e-13
    for number in range(3):
        x = torch.randn(5, 3, 6, 6, dtype=dtype) * (number + 1)
        found = run_step(step, values, (x,), step=number)
        loss = model(x)
        torch.testing.assert_close(found, loss.detach(), rtol=rounding, atol=rounding)
        if train is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    expected = dict(model.named_buffers())
    held = {
        source.name: values[step.graph.outputs_of(op)[0]]
        for op, source in enumerate(step.program.sources)
        if source is not None and source.name in expected
    }
    if training:
        assert held.keys() == expected.keys() and held["flat.num_batches_tracked"] == 3
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name], rtol=rounding, atol=rounding)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("train", [None, SGD(0.01)])
def test_flex_attention_is_refused_with_what_to_use_instead(train, monkeypatch):
    # torch's compiler, which it imports, switches the validation of distributions off.
    kind = torch.distributions.Distribution
    monkeypatch.setattr(kind, "_validate_args", kind._validate_args)
    from torch.nn.attention.flex_attention import flex_attention

    def attended(model, h):
        h = h.reshape(1, 1, *h.shape)
        return flex_attention(h, h, h)

    with pytest.raises(CaptureError, match="use scaled_dot_product_attention with attn_mask="):
        capture(Model(attended), torch.randn(2, 3), train=train)


def test_a_number_that_an_op_has_written_by_name_is_no_longer_known():
    def counted(_, h):
        length = torch.zeros(1, dtype=torch.int64)
        torch.sum((h > 0).long(), (0, 1), out=length[0])
        return h[: length.item()]

    with pytest.raises(CaptureError, match="turns a tensor into a number"):
        capture(Model(counted), torch.randn(2, 3))
