"""The GPUs of the machine that the program runs on. `machine/gpu_rates.py` measures them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.errors import MachineError
from dovetail.machine.records import Device

RESERVED_BYTES = 2**30
"""Of a GPU's free memory so much is left to CUDA's context, libraries' workspaces and gaps."""
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these files is there where a driver of GPUs is loaded. Without one torch is not asked, as
importing it takes a second."""
_FLOPS, _BANDWIDTH, _OVERHEAD_SECONDS = {"float32": 1e13, "float64": 5e11}, 5e11, 5e-6
"""Typical rates, which count until the probe has measured."""


@dataclass(frozen=True)
class GpuMeasurement:
    """What was measured of one GPU.

    torch_device       what torch calls it
    devices            the names of the machine's devices on this GPU
    model              the name of the hardware
    memory_bytes       all of its memory, free or not
    flops_per_second   dtype -> FLOP/s of a matrix product; without dtypes that it cannot compute in
    copies             (way, memory) -> bytes/s of a copy "to" or "from" the GPU, whose other end is
                       "pinned" or "pageable" memory of the host
    peers              the GPUs whose memory it reads and writes without the host, as torch calls
                       them
    """

    torch_device: str
    devices: tuple[str, ...]
    model: str
    memory_bytes: int
    flops_per_second: dict[str, float]
    copies: dict[tuple[str, str], float]
    peers: tuple[str, ...]


def gpus_here(logical: int = 1) -> tuple[Device, ...]:
    """The GPUs that torch sees, each as so many devices with equal shares of its free memory. They
    are called gpu0, gpu1, and so on; several of one GPU gpu0.0, gpu0.1."""
    if not any(Path(file).exists() for file in _DRIVERS):
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for number in range(torch.cuda.device_count()):
        free_bytes, _ = torch.cuda.mem_get_info(number)
        device = Device(
            f"gpu{number}",
            "gpu",
            torch.cuda.get_device_name(number),
            max(0, free_bytes - RESERVED_BYTES) // logical,
            dict(_FLOPS),
            _BANDWIDTH,
            _OVERHEAD_SECONDS,
            torch_device=f"cuda:{number}",
        )
        if logical == 1:
            found.append(device)
        else:
            found += [replace(device, name=f"gpu{number}.{part}") for part in range(logical)]
    return tuple(found)


def card_of(device: Device) -> str:
    """What tells the hardware of a GPU from all other, also on other hosts."""
    from dovetail.runtime.cuda import cuda_here

    return str(cuda_here().get_device_properties(device.torch_device).uuid)


def check_gpu(device: Device, cuda: Any = None) -> None:
    """Raise `MachineError` unless the GPU is here.

    cuda   as `runtime.cuda.cuda_here` returns it; None: that
    """
    # Imported here, because the rest of a machine is described without torch.
    from dovetail.runtime.cuda import cuda_here

    cuda = cuda or cuda_here()
    number = int(device.torch_device.rpartition(":")[2])
    count = cuda.device_count() if cuda.is_available() else 0
    if number >= count:
        seen = f"cuda:0 to cuda:{count - 1}" if count else "no GPU"
        raise MachineError(
            f"device {device.name!r} is {device.torch_device}; torch sees {seen} here"
        )
