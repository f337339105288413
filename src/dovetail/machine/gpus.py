"""The GPUs of the machine that the program runs on."""

from dataclasses import replace
from pathlib import Path

from dovetail.errors import MachineError
from dovetail.machine.records import Device

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these files is there where a driver of GPUs is loaded. Without one torch is not asked, as
importing it takes a second."""
_FLOPS, _BANDWIDTH, _OVERHEAD_SECONDS = {"float32": 1e13, "float64": 5e11}, 5e11, 5e-6
"""Typical rates, which count until the probe has measured."""


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
            free_bytes // logical,
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


def check_gpu(device: Device) -> None:
    """Raise `MachineError` unless torch sees the GPU here. One that the CPU plays is anywhere."""
    if device.torch_device.startswith("played:"):
        return
    # Imported here, because the rest of a machine is described without torch.
    import torch

    number = int(device.torch_device.rpartition(":")[2])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        seen = f"cuda:0 to cuda:{count - 1}" if count else "no GPU"
        raise MachineError(
            f"device {device.name!r} is {device.torch_device}; torch sees {seen} here"
        )
