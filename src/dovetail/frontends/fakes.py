"""Fake tensors: shape, strides and dtype without data."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """The tensor's fake twin in `mode`, detached; the tensor itself if it is one already."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor.detach()
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        device = "cpu" if tensor.is_meta else tensor.device
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
    return mode.from_tensor(tensor.detach())


def fake_mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    """The mode of the first fake tensor, or a new one."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """True if the tensor has no data."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
