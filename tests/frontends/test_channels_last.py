"""A step captured channels last computes what the module does, in another layout."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dovetail.frontends import SGD, capture, resolve
from dovetail.frontends.capturing import recaptured
from dovetail.frontends.interpret import example_values, initial_values, run_step
from dovetail.transforms import Form
from tests.support.plain_steps import plain_steps


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, groups=2)
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        y = nn.functional.max_pool2d(self.second(torch.cat([y, y], 1)[:, 4:12]), 2)
        return self.head(y.flatten(1))


def examples():
    torch.manual_seed(1)
    return torch.randn(4, 3, 14, 14, dtype=torch.float64), torch.tensor([0, 1, 2, 3])


def trained():
    images, labels = examples()
    model = Images().double().train()
    return capture(
        model, images, loss=cross_entropy, targets=labels, train=SGD(lr=0.1, momentum=0.9)
    )


def test_images_and_weights_lie_channels_last():
    step = Form(channels_last=True).apply(trained())
    graph = step.graph
    assert step.transforms == (Form(channels_last=True),)
    convolutions = [op for op, kind in enumerate(graph.kinds) if kind == "aten.convolution"]
    assert len(convolutions) == 2
    for op in convolutions:
        for tensor in graph.inputs_of(op)[:2]:
            assert graph.strides[tensor][1] == 1
    # What the user gives lies as it did.
    assert graph.strides[graph.outputs_of(graph.names.index("input.0"))[0]] == (588, 196, 14, 1)


def test_several_training_steps_equal_plain_ones():
    step = recaptured(trained(), channels_last=True)
    values, plain = initial_values(step), copy.deepcopy(step.module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    images, labels = examples()
    losses = plain_steps(optimizer, lambda: cross_entropy(plain(images), labels), 5)
    for number, loss in enumerate(losses):
        own = run_step(step, values, [images], [labels], step=number)
        torch.testing.assert_close(own, loss, rtol=1e-10, atol=1e-12)
    names = {source.name: op for op, source in enumerate(step.program.sources) if source}
    for name, value in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        tensor = step.graph.outputs_of(names[name])[0]
        if name in ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var"):
            continue  # assigned, so their new values are other tensors of the graph
        torch.testing.assert_close(values[tensor], value.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "model",
    [
        "zoo:inception_v3?batch=1&size=107&width=0.125",
        "zoo:squeezenet_1_1?size=64&batch=1",
        "zoo:randwire?batch=1&size=64&channels=8",
    ],
)
def test_networks_of_the_zoo_compute_the_same(model):
    step = resolve(model)
    other = recaptured(step, channels_last=True)
    inputs, _ = example_values(step)
    wanted = run_step(step, initial_values(step), inputs)
    own = run_step(other, initial_values(other), inputs)
    torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-5)


def test_a_step_without_images_is_captured_as_it_was():
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    step = capture(model, x)
    assert recaptured(step, channels_last=True).graph.signatures == step.graph.signatures


def test_autocast_is_kept():
    model = Images().eval()
    images = torch.randn(1, 3, 14, 14)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = capture(model, images)
    assert recaptured(step).graph.signatures == step.graph.signatures


def test_what_a_step_returns_lies_as_the_modules_own_results():
    model = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 6, 6)
    step = recaptured(capture(model, images), channels_last=True)
    own = run_step(step, initial_values(step), [images])
    assert own.stride() == model(images).stride()
    torch.testing.assert_close(own, model(images).detach())
