"""Prepared kernels, alone or merged, compute what the plain module does."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dovetail.executors.stages.preparing import prepare
from dovetail.frontends import capture, initial_values, run_step
from dovetail.graph.kernels import fuse, single
from dovetail.networks import NETWORKS
from tests.support.stages_by_hand import Step, assert_equal_values, randomised

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}


@functools.cache
def network(name, dtype):
    """(captured, inputs, the plain outputs) of a small one from the zoo."""
    torch.manual_seed(0)
    module, inputs, _, _ = NETWORKS[name].build(**NETWORKS[name].small)
    module = randomised(module).to(dtype).eval()
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        return capture(module, *inputs), inputs, module(*inputs)


@pytest.mark.parametrize("channels_last", [False, True], ids=["dense", "channels_last"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_of_the_zoo_compute_what_its_modules_do(name, dtype, channels_last, one_thread):
    captured, inputs, expected = network(name, dtype)
    step = Step(None, inputs, channels_last=channels_last, captured=captured)
    for stages in (step.alone, step.merged):
        assert_equal_values(step.outputs(inputs, stages), expected, TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("name", "kernels", "merged"),
    # of 8 fire modules their two expansions; of InceptionV3 the three 1x1 that read a block's input
    # (9 blocks; one has two), and 1x3 with 3x1 (4 times); query, key, value, and gate, up, twice
    [
        ("squeezenet_1_0", 38, 38 - 8),
        ("inception_v3", 124, 124 - 9 * 2 - 1 - 4),
        ("llama", 57, 57 - 2 * (2 + 1)),
    ],
)
def test_what_can_be_merged_is(name, kernels, merged):
    captured, inputs, _ = network(name, torch.float32)
    step = Step(None, inputs, captured=captured)
    assert (len(step.alone), len(step.merged)) == (kernels, merged)


class Several(nn.Module):
    """Outputs that are an input, a constant, a view of an input and two that are one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, first, unused, last):
        made = F.linear(last, self.weight).relu()
        both = {"made": made, "again": made}
        return first, self.weight, self.weight * 2, first[1:], both, made.argmax(1)


class InPlace(nn.Module):
    def forward(self, first, *_):
        made = first.clone()
        made[:, 0] = 0
        flat = made.view(-1)
        flat.mul_(2)
        return made, flat


class Tied(nn.Module):
    """One weight as a convolution's before two normalisations, and as a matrix."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.two.weight = self.one.weight
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)])

    def forward(self, first, *_):
        image = first[:, :, None, None] * torch.ones(5, 7)
        one = self.norms[0](self.one(image)).relu()
        two = self.norms[1](self.two(one))
        return F.linear(two.mean((2, 3)), self.one.weight.flatten(1))


class Made(nn.Module):
    """A convolution whose weight depends on the input, before a normalisation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, first, *_):
        image = first[:, :, None, None] * torch.ones(2, 2)
        return self.norm(F.conv2d(image, self.weight * first.mean()))


class Strided(nn.Module):
    """Views that depend on how an image is laid out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, first, *_):
        image = self.conv(first[:, :, None, None] * torch.ones(5, 6))
        return torch.as_strided(image, (2, 5), (60, 1), 3), image.flatten(1), image.view(2, 2, -1)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose2d(3, 3, 2, stride=2), nn.BatchNorm2d(3)

    def forward(self, first, *_):
        return self.norm(self.conv(first[:, :, None, None]))


class Lone(nn.Module):
    """No kernel at all."""

    def forward(self, first, *_):
        return first


@pytest.mark.parametrize("channels_last", [False, True], ids=["dense", "channels_last"])
@pytest.mark.parametrize(
    "make", [Several, InPlace, Tied, Made, Strided, Transposed, Lone], ids=lambda m: m.__name__
)
def test_rare_forms_compute_what_their_modules_do(make, channels_last):
    torch.manual_seed(0)
    module = randomised(make()).eval()
    inputs = [torch.randn(4, 3) for _ in range(3)]
    with torch.no_grad():
        expected = module(*inputs)
    step = Step(module, inputs, channels_last=channels_last)
    assert_equal_values(step.outputs(inputs, step.alone), expected, 1e-5)


class Counting(nn.Module):
    """Reads a buffer, and what is made of it, before and after it writes it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, values):
        self.steps += 1
        before = self.total * 2 + values
        self.total.add_(values)
        return before + self.total, self.steps * 3


def test_buffers_that_a_step_writes_are_no_constants():
    plain, values = Counting(), torch.randn(3)
    step = Step(copy.deepcopy(plain), [values])
    for _ in range(3):
        assert_equal_values(step.outputs([values], step.alone), plain(values), 1e-6)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50))

    def forward(self, values):
        kept = F.dropout(values, 0.5) + torch.rand_like(self.weight)
        return kept + torch.randn(50)


def test_random_numbers_are_those_of_the_first_step():
    module, values = Drawing(), torch.ones(50)
    step = Step(module, [values])
    expected = run_step(step.captured, initial_values(step.captured), [values])
    for _ in range(2):
        assert torch.equal(step.outputs([values], step.alone), expected)


def test_attention_without_dropout_leaves_the_generator_alone():
    captured, inputs, _ = network("gpt2", torch.float32)
    assert not captured.program.random_ops
    step = Step(None, inputs, captured=captured)
    state = torch.get_rng_state()
    step.outputs(inputs, step.alone)
    assert torch.equal(torch.get_rng_state(), state)


def test_normalisations_are_folded_and_their_constants_forgotten():
    module = randomised(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)))
    captured = capture(module.eval(), torch.randn(1, 3, 5, 5))
    folded = prepare(captured, fuse(captured.graph))
    assert [len(kernel.calls) for kernel in folded.kernels] == [1]
    assert len(folded.constants) == 2
    unfolded = prepare(captured, single(captured.graph))
    assert [len(kernel.calls) for kernel in unfolded.kernels] == [1, 1]
    assert len(unfolded.constants) == 5
