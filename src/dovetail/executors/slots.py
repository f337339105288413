"""Tensors that lie in a block of shared memory."""

import numpy as np
import torch
from torch import Tensor

from dovetail.executors.shares import Slot
from dovetail.runtime.shared import Block


def tensor_at(block: Block, slot: Slot, skew_bytes: int = 0) -> Tensor:
    """The slot as a tensor of its shape and strides, `skew_bytes` into the slot.

    Each has a torch storage of its own, as ops that address storage expect.
    """
    memory = block.view(slot.offset + skew_bytes, (slot.bytes,), np.uint8)
    flat = torch.from_numpy(memory).view(getattr(torch, slot.dtype))
    return flat.as_strided(slot.shape, slot.strides)


def distinct(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The part of the tensor that holds all its elements, if it is laid out by `strides`.

    Dimensions of stride 0 (expanded ones) are cut to one: torch refuses to write the whole.
    """
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
