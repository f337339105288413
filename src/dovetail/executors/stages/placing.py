"""Places a prepared network on another device, in another precision."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.executors.stages.issuing import readers_of
from dovetail.executors.stages.preparing import PreparedKernels
from dovetail.frontends.checks import CHECK
from dovetail.frontends.interpret import Values
from dovetail.frontends.program import Call, Ref
from dovetail.runtime.torch_versions import pytree
from dovetail.schedulers.records import KernelBlock, OpSet


@dataclass(frozen=True, eq=False)
class PlacedKernels:
    """Kernels on a device.

    prepared   the kernels, with their constants on the device
    inputs     tensor -> its example value on the device
    """

    prepared: PreparedKernels
    inputs: Values

    @property
    def block(self) -> KernelBlock:
        """Which kernels wait for which, by the tensors they read."""
        kernels = self.prepared.kernels
        return readers_of([k.reads for k in kernels], [k.writes for k in kernels])

    @property
    def outputs(self) -> OpSet:
        """Kernels that write a tensor which the caller wants."""
        return sum(
            1 << number
            for number, kernel in enumerate(self.prepared.kernels)
            if self.wanted & set(kernel.writes)
        )

    @property
    def wanted(self) -> set[int]:
        """The tensors that the caller wants: those in `prepared.outputs`."""
        leaves = pytree.tree_leaves(self.prepared.outputs)
        return {leaf.tensor for leaf in leaves if isinstance(leaf, Ref)}


def place(
    prepared: PreparedKernels,
    inputs: Sequence[Tensor],
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.float32,
) -> PlacedKernels:
    """Move constants and inputs to a device; float32 becomes `dtype` (such as `torch.float16`).

    Raises `UsageError` if there is no such device, and for a network whose step draws random
    numbers, writes over its state or checks data, because a replayed CUDA graph can do none of
    these.
    """
    if str(device).startswith("cuda"):
        require(torch.cuda, str(device))
    for kernel in prepared.kernels:
        for call in kernel.calls:
            if call.target is CHECK:
                what = "reads data to check them"
            elif call.random:
                what = "draws random numbers"
            elif call.in_place:
                what = "writes over its arguments"
            else:
                continue
            raise UsageError("MODEL", f"{call.target} {what}; such a step is not captured")

    def moved(value: Tensor) -> Tensor:
        return value.to(device, dtype if value.dtype == torch.float32 else value.dtype)

    def named(value: torch.device | torch.dtype) -> torch.device | torch.dtype:
        if isinstance(value, torch.device):
            return torch.device(device)
        return dtype if value == torch.float32 else value

    def move(call: Call) -> Call:
        # Calls that name a device or a precision, such as `aten.full`, are given the new one.
        args, kwargs = pytree.tree_map_only(
            (torch.device, torch.dtype), named, (call.args, call.kwargs)
        )
        return replace(call, args=args, kwargs=kwargs)

    with torch.no_grad():
        constants = {tensor: moved(value) for tensor, value in prepared.constants.items()}
        given = {t: moved(v) for t, v in zip(prepared.inputs, inputs, strict=True)}
        if prepared.channels_last:
            images = {t: value for t, value in given.items() if value.dim() == 4}
            for tensor, value in images.items():
                given[tensor] = value.contiguous(memory_format=torch.channels_last)
    kernels = tuple(replace(k, calls=tuple(map(move, k.calls))) for k in prepared.kernels)
    return PlacedKernels(replace(prepared, kernels=kernels, constants=constants), given)


def require(cuda: Any, device: str = "cuda") -> None:
    """Raise `UsageError` if `cuda` (`torch.cuda` or a fake of it) sees no device, or not the one
    with the number that "cuda:1" names."""
    if not cuda.is_available():
        raise UsageError(
            "device", "torch sees no CUDA device here; run on a machine with a GPU and its torch"
        )
    _, numbered, number = device.partition(":")
    if numbered and not (number.isdecimal() and int(number) < cuda.device_count()):
        last = cuda.device_count() - 1
        raise UsageError("device", f"{device!r} is not here; torch sees cuda:0 to cuda:{last}")
