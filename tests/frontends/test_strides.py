"""What a graph says of the layout of its tensors is what torch's kernels make."""

import copy

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.executors import compiling
from dovetail.executors.generated import GeneratedCode
from dovetail.frontends import initial_values, run_step
from dovetail.frontends.fused import FusedCall
from dovetail.frontends.interpret import run_call


class NormalisedSteps(nn.Module):
    """Batch normalisation over features that lie last, and a view of all steps of a batch."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 1)

    def forward(self, x):  # [batch, steps, width]
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(y.reshape(-1, x.shape[2])).view(x.shape[:2])


class Transposed(nn.Module):
    """Gradients by kernels that read one tensor row by row and another one by columns."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)

    def forward(self, x):
        y = nn.functional.softplus(self.first(x)).transpose(1, 2)
        return (y * torch.ones(y.shape)).transpose(1, 2).sum(2)


class Columns(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)

    def forward(self, x):
        return self.first(x).transpose(1, 2)


class MixedNorm(nn.Module):
    """Statistics are float32 where weights are, whatever is normalised."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x.bfloat16()).float()


class Slices(nn.Module):
    """Between the rows of what is written over lies the rest of a table."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)

    def forward(self, x):
        table = torch.zeros(*x.shape[:2], 2 * x.shape[2])
        rows = table[..., : x.shape[2]]
        rows.copy_(self.first(x))
        turned = rows.transpose(0, 1)
        turned.clamp_(max=0.5)
        return turned * 2 + table[..., x.shape[2] :].transpose(0, 1)


class Pyramid(nn.Module):
    """An image's mean is an image of one pixel; kernels lay what is made larger from it by strides
    of dimensions of one element."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):  # [batch, width, rows, columns]
        pixel = nn.functional.adaptive_avg_pool2d(x, 1)
        pixel = torch.relu(self.norm(self.conv(pixel)))
        large = nn.functional.interpolate(pixel, x.shape[2:], mode="bilinear")
        return torch.cat([large, x], 1)


def different(step):
    """(op, strides, dtype) of what calls return otherwise than the graph says."""
    graph, tensors, found = step.graph, initial_values(step), []
    for op, source in enumerate(step.program.sources):
        if source is not None and source.role == "input":
            kind, _, number = source.name.partition(".")
            given = step.inputs if kind == "input" else step.targets
            tensors[graph.outputs_of(op)[0]] = given[int(number)]
    with torch.no_grad():
        for op, call in enumerate(step.program.calls):
            if call is not None:
                run_call(call, tensors, 0)
                for tensor in graph.outputs_of(op):
                    value = tensors[tensor]
                    if value is None or not value.numel():  # a gradient that nobody asked for
                        continue
                    pairs = zip(value.shape, value.stride(), graph.strides[tensor], strict=True)
                    as_said = all(size == 1 or one == other for size, one, other in pairs)
                    if not as_said or value.dtype != getattr(torch, graph.dtypes[tensor]):
                        found.append((graph.names[op], value.stride(), value.dtype))
    return found


SIZES = [(3, 4, 5), (8, 40, 32)]
"""Of a few elements, and of so many that the kernel is asked on smaller ones."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("module", [NormalisedSteps, Transposed, Columns, MixedNorm, Slices])
def test_a_training_step_lays_its_tensors_as_its_graph_says(module, sizes):
    inputs = torch.randn(sizes)
    model = module(sizes[2])
    targets = torch.randn(model(inputs).shape)
    step = dt.capture(model, inputs, targets=targets, loss=nn.functional.mse_loss, train=dt.Adam())
    assert not different(step)


@pytest.mark.parametrize("sizes", SIZES)
def test_inference_lays_its_tensors_as_its_graph_says(sizes):
    inputs = torch.randn(sizes)
    assert not different(dt.capture(NormalisedSteps(sizes[2]).eval(), inputs))


@pytest.mark.parametrize("width", [8, 600])
def test_what_is_made_of_an_image_of_one_pixel_lies_as_the_graph_says(width):
    image = torch.randn(2, width, 6, 6).to(memory_format=torch.channels_last)
    model = Pyramid(width).eval().to(memory_format=torch.channels_last)
    step = dt.capture(model, image)
    assert not different(step)
    assert torch.equal(run_step(step, initial_values(step), (image,), ()), model(image))


def test_views_of_what_a_kernel_lays_in_its_own_way_train_as_in_plain_torch():
    torch.manual_seed(0)
    model, inputs, targets = NormalisedSteps(5), torch.randn(3, 4, 5), torch.randn(3, 4)
    step = dt.capture(
        model, inputs, targets=targets, loss=nn.functional.mse_loss, train=dt.SGD(0.1)
    )
    values, plain = initial_values(step), copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = nn.functional.mse_loss(plain(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(run_step(step, values, (inputs,), (targets,)), loss.detach())


def test_code_that_lays_a_result_otherwise_than_its_calls_is_not_used():
    step = dt.capture(NormalisedSteps(5).eval(), torch.randn(3, 4, 5))
    norm = next(op for op, kind in enumerate(step.graph.kinds) if "batch_norm" in kind)
    call, _ = FusedCall.of(step.graph, step.program, [norm])
    examples = call.examples()

    def columns(given):
        return [value.mT.contiguous().mT for value in call(*given)]

    compiling._check_laid(GeneratedCode(lambda given: list(call(*given))), call, examples)
    with pytest.raises(ValueError, match="strides"):
        compiling._check_laid(GeneratedCode(columns), call, examples)
