"""Convolutions of kernels are the same op on one thread as on several."""

import pytest
import torch
from torch import nn

from tests.support.cpu_steps import Ready

WIDE = [torch.linspace(-1, 1, 24 * 32 * 32).reshape(1, 24, 32, 32)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def operators(ready):
    """Of the kernels' calls."""
    return {
        call.target._schema.name
        for kernel in range(len(ready.block))
        for call in ready.functions.of([kernel]).calls
    }


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(24, 8, 1),
        nn.Conv2d(24, 8, 1, stride=2, bias=False),
        nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.Conv2d(24, 8, (1, 5), padding="same", dilation=2),
    ],
    ids=["1x1", "strided", "depthwise", "same"],
)
def test_one_dnn_computes_convolutions_of_large_images(layer, threads):
    ready = Ready(nn.Sequential(layer, nn.ReLU()), WIDE, channels_last=True)
    found = operators(ready)
    assert "aten::mkldnn_convolution" in found
    assert not found & {"aten::convolution", "aten::_convolution"}
    torch.testing.assert_close(ready.streamed(1)(*WIDE), ready.plain(*WIDE))


def test_what_it_would_not_be_given_stays_with_aten(threads):
    small = [value[:, :, :4, :4].contiguous() for value in WIDE]
    for layer, inputs in (
        (nn.Conv2d(24, 8, 1), small),
        (nn.Conv2d(24, 8, 1).double(), [WIDE[0].double()]),
        (nn.ConvTranspose2d(24, 8, 2), WIDE),
        (nn.Conv1d(24, 8, 3), [WIDE[0].flatten(2)]),
    ):
        ready = Ready(layer, inputs)
        assert "aten::mkldnn_convolution" not in operators(ready)
        torch.testing.assert_close(ready.streamed(1)(*inputs), ready.plain(*inputs))
