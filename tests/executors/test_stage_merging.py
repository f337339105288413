"""A merged kernel computes what its kernels do; what cannot be merged has no key, or another."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dovetail.executors.stages.merging import can_merge, merged_function
from tests.support.stages_by_hand import Step, assert_equal_values, randomised


class Branches(nn.Module):
    """Each branch of the one input; outputs as they are."""

    def __init__(self, *branches, before=None):
        super().__init__()
        self.before = before or nn.Identity()
        self.branches = nn.ModuleList(branches)

    def forward(self, image):
        image = self.before(image)
        return [branch(image) for branch in self.branches]


def conv(*args, activation=nn.ReLU, **options):
    """Convolution, normalisation, activation."""
    convolution = nn.Conv2d(*args, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), activation())


def pooled():
    return nn.MaxPool2d(3, stride=1, padding=1)


INCEPTION = [
    conv(6, 3, 1, bias=False),
    conv(6, 4, 3, padding=1, bias=False),
    conv(6, 5, 5, padding=2),
]
ALIKE = {
    "inception": (6, INCEPTION),
    "fire": (
        6,
        [
            nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(6, 5, 3, padding=1), nn.ReLU()),
        ],
    ),
    "1x7 and 7x1": (
        3,
        [conv(3, 4, (1, 7), padding=(0, 3)), conv(3, 2, (7, 1), padding=(3, 0))],
    ),
    "stride 2": (3, [conv(3, 4, 3, stride=2, padding=1), conv(3, 4, 1, stride=2)]),
    "dilated": (
        3,
        [conv(3, 4, 3, dilation=2, padding=2), conv(3, 4, 5, dilation=2, padding=4)],
    ),
    "even": (3, [nn.Conv2d(3, 4, 2), nn.Conv2d(3, 2, 4, padding=1, bias=False)]),
    "one leaky, as the other": (
        3,
        [conv(3, 4, 1, activation=lambda: nn.LeakyReLU(0.2)) for _ in range(2)],
    ),
    "own relus before": (
        3,
        [nn.Sequential(nn.ReLU(), nn.Conv2d(3, c, k, padding=k // 2)) for c, k in ((2, 1), (3, 3))],
    ),
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["dense", "channels_last"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ALIKE)
def test_convolutions_of_one_input_are_merged(name, batch, channels_last):
    torch.manual_seed(0)
    channels, branches = ALIKE[name]
    inputs = [torch.randn(batch, channels, 11, 12)]
    module = randomised(Branches(*branches, before=pooled())).eval()
    step = Step(module, inputs, channels_last=channels_last)
    numbers = [n for n, key in enumerate(step.keys) if key is not None]
    assert len(numbers) == len(branches)
    assert can_merge(step.keys, numbers)
    with torch.no_grad():
        expected = module(*inputs)
    assert_equal_values(step.outputs(inputs, step.merged), expected, 1e-5)
    whole = step.values(inputs, step.merged)
    if len(numbers) > 2:
        for subset in itertools.combinations(numbers, 2):
            _, takes, returns = merged_function(step.prepared, subset)
            found = merged_function(step.prepared, subset)[0](*(whole[t] for t in takes))
            assert_equal_values(found, [whole[t] for t in returns], 1e-5)


def one(**options):
    """A 3x3 convolution that keeps the size, but for `options`."""
    return conv(4, 4, **{"kernel_size": 3, "padding": 1} | options)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 4, 3, padding=1)

    def forward(self, image):
        return self.conv(image).relu()


DIFFERENT = {
    "another input": nn.Sequential(pooled(), one()),
    "in groups": one(groups=2),
    "depthwise": one(groups=4),
    "dilated": one(dilation=2, padding=2),
    "stride": one(stride=2),
    "padding": one(padding=0),
    "padding of one side": one(kernel_size=(3, 1), padding=1),
    "even": one(kernel_size=2),
    "another activation": one(activation=nn.Sigmoid),
    "no activation": one(activation=nn.Identity),
    "another slope": one(activation=lambda: nn.LeakyReLU(0.2)),
    "a relu before": nn.Sequential(nn.ReLU(), one()),
    "separable": nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), one(kernel_size=1, padding=0)),
    "transposed": Transposed(),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_not_merged(name):
    activation = (lambda: nn.LeakyReLU(0.1)) if name == "another slope" else nn.ReLU
    module = Branches(one(activation=activation), DIFFERENT[name], before=nn.MaxPool2d(1))
    step = Step(module, [torch.randn(1, 4, 9, 9)])
    assert step.merged == step.alone
    assert any(key is not None for key in step.keys)
    everything = [number for stage in step.alone for number in stage]
    assert not any(can_merge(step.keys, pair) for pair in itertools.combinations(everything, 2))
    assert not can_merge(step.keys, [everything[-1]])


def test_a_weight_that_is_computed_or_written_is_not_merged():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))
            self.register_buffer("buffer", torch.randn(4, 3, 1, 1))

        def forward(self, image):
            made = F.conv2d(image, self.weight * image.mean())
            made = made + F.conv2d(image, self.weight) + F.conv2d(image, self.buffer)
            self.buffer.mul_(2)
            return made

    step = Step(Computed(), [torch.randn(1, 3, 4, 4)])
    assert sum(key is not None for key in step.keys) == 1


SIZES = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(25))
def test_random_convolutions_are_merged_where_their_images_are_of_one_place(seed):
    """All shapes and paddings of a draw: those with one key give what they give alone, and those
    whose shift and parity are equal have one key."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    stride, dilation = rng.choice([1, 2]), rng.choice([1, 1, 2])
    shapes = []
    for _ in range(5):
        sizes = [rng.choice(SIZES) for _ in range(2)]
        shapes.append((sizes, [rng.randrange(3) for _ in sizes]))
    branches = [
        nn.Conv2d(3, rng.randrange(1, 4), size, stride, padding, dilation, bias=rng.random() < 0.5)
        for size, padding in shapes
    ]
    module = Branches(*branches, before=nn.Tanh())
    inputs = [torch.randn(rng.choice([1, 2]), 3, 13, 14)]
    step = Step(module, inputs, channels_last=rng.random() < 0.5)
    with torch.no_grad():
        expected = module(*inputs)
    assert_equal_values(step.outputs(inputs, step.merged), expected, 1e-5)
    places = {
        tuple((2 * p - dilation * (k - 1), k % 2) for k, p in zip(*shape, strict=True))
        for shape in shapes
    }
    keys = {key for key in step.keys if key is not None}
    assert len(keys) == len(places)


class Attention(nn.Module):
    """Query, key and value of different widths, and two of a gate with activations."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.value = nn.Linear(8, 4)
        self.gate, self.up = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, tokens):
        tokens = self.norm(tokens)
        query = self.query(tokens).view(2, 5, 2, 4).transpose(1, 2)
        key, value = self.key(tokens), self.value(tokens)
        attended = (query @ key[:, None].transpose(2, 3)).softmax(-1) @ value[:, None]
        return attended, F.gelu(self.gate(tokens)) * self.up(tokens)


def test_products_of_equal_views_of_one_tensor_are_merged():
    torch.manual_seed(0)
    module, inputs = Attention(), [torch.randn(2, 5, 8)]
    step = Step(module, inputs)
    with torch.no_grad():
        expected = module(*inputs)
    assert_equal_values(step.outputs(inputs, step.merged), expected, 1e-5)
    assert [len(stage) for stage in step.merged if len(stage) > 1] == [5]


def test_products_with_one_activation_are_merged():
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(6, n), nn.Tanh()) for n in (3, 4)]
    module = Branches(*branches, nn.Linear(6, 2), before=nn.LayerNorm(6))
    inputs = [torch.randn(7, 6)]
    step = Step(module, inputs)
    with torch.no_grad():
        assert_equal_values(step.outputs(inputs, step.merged), module(*inputs), 1e-5)
    assert [len(stage) for stage in step.merged if len(stage) > 1] == [2]


def test_equal_views_that_two_kernels_make_are_two_inputs():
    """The second view may come after the first product."""
    module = Branches(nn.Linear(6, 2), nn.Linear(6, 3))
    step = Step(module, [torch.randn(2, 5, 6)])
    assert len(step.alone) == 4
    assert step.merged == step.alone


@pytest.mark.parametrize("channels_last", [False, True], ids=["dense", "channels_last"])
def test_what_a_convolution_reads_is_copied_once_and_a_sum_reads_the_split(channels_last):
    class Readers(Branches):
        def forward(self, image):
            image = self.before(image)
            one, two, three = (branch(image) for branch in self.branches[:3])
            return one + two, torch.cat([one, two], 1), self.branches[3](three)

    module = Readers(*(conv(3, 4, 1) for _ in range(3)), pooled(), before=pooled())
    inputs = [torch.randn(2, 3, 6, 6)]
    step = Step(module, inputs, channels_last=channels_last)
    stage = next(stage for stage in step.merged if len(stage) == 3)
    values = step.values(inputs, step.merged)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    _, _, returns = merged_function(step.prepared, stage)
    dense = [values[t].is_contiguous(memory_format=layout) for t in returns]
    assert dense == [False, False, True]
    assert values[returns[0]].untyped_storage().data_ptr() == (
        values[returns[1]].untyped_storage().data_ptr()
    )


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: torch.addmm(b, x, w, beta=2),
        lambda x, w, b: torch.addmm(b.expand(7, 3), x, w),
        lambda x, w, b: torch.addmm(b * x.mean(), x, w),
        lambda x, w, b: torch.mm(x, w * x.mean()),
        lambda x, w, b: torch.mm(w.t(), x.t()),
    ],
    ids=["scaled", "bias of two dimensions", "bias made", "weight made", "right operand"],
)
def test_other_products_are_not_merged(product):
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))

        def forward(self, rows):
            rows = rows.cumsum(0)
            return torch.mm(rows, self.weight), product(rows, self.weight, self.bias)

    step = Step(Products(), [torch.randn(7, 6)])
    assert sum(key is not None for key in step.keys) == 1
