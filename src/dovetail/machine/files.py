"""Machines as TOML.

name = "box"
host = "cpu0"

[[devices]]
name = "cpu0"
kind = "cpu"                       # cpu | gpu | host
model = "haswell"                  # devices of one model cost the same
memory_bytes = 50000000000
bandwidth_bytes_per_second = 68e9
op_overhead_seconds = 1e-6
flops_per_second = { float32 = 1.3e12 }
cores = [0, 1]                     # only of a CPU of the machine the file is used on, which can
                                   # run plans then; its rates are taken as they stand here
threads = 1                        # an op uses so many threads; default: one a core
efficiencies = { "" = 0.4, "aten.convolution" = 0.1 }    # share of flops_per_second that ops
                                   # reach whose kind begins so; the longest counts; default: 1

[[links]]
source = "cpu0"
destination = "gpu0"
bandwidth_bytes_per_second = 11e9
latency_seconds = 25e-6
channel = "pcie"                   # links with one channel take turns; default: its own
"""

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.errors import FileFormatError
from dovetail.machine.records import Device, Link, Machine
from dovetail.runtime.files import write_atomically

_STRICT = ConfigDict(extra="forbid")


class _Device(BaseModel):
    model_config = _STRICT
    name: str = Field(min_length=1)
    kind: str
    model: str
    memory_bytes: int
    bandwidth_bytes_per_second: float = 0.0
    op_overhead_seconds: float = 0.0
    flops_per_second: dict[str, float] = {}
    cores: tuple[int, ...] = ()
    efficiencies: dict[str, float] = {}
    threads: int = 0


class _Link(BaseModel):
    model_config = _STRICT
    source: str
    destination: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    channel: str = ""


class _Machine(BaseModel):
    model_config = _STRICT
    name: str
    host: str
    devices: list[_Device]
    links: list[_Link] = []


def machine_from_dict(raw: Any) -> Machine:
    """A machine from parsed TOML or JSON. Raises `MachineError` or pydantic's `ValidationError`."""
    file = _Machine.model_validate(raw)
    devices = tuple(Device(**device.model_dump()) for device in file.devices)
    links = tuple(
        Link(
            **{**link.model_dump(), "channel": link.channel or f"{link.source}->{link.destination}"}
        )
        for link in file.links
    )
    return Machine(file.name, devices, file.host, links)


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """What `machine_from_dict` reads back to an equal machine."""
    return {
        "name": machine.name,
        "host": machine.host,
        "devices": [_device_to_dict(device) for device in machine.devices],
        "links": [asdict(link) for link in machine.links],
    }


def _device_to_dict(device: Device) -> dict[str, Any]:
    raw = {**asdict(device), "cores": list(device.cores)}
    for optional in ("efficiencies", "threads"):
        if not raw[optional]:
            del raw[optional]
    return raw


def load_machine(path: Path | str) -> Machine:
    """Read a machine from TOML. Raises `FileFormatError` or `MachineError`."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return machine_from_dict(raw)
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(str(path), getattr(error, "strerror", None) or str(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(str(path), f"not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(str(path), f"{where}: {first['msg']}") from None


def save_machine(machine: Machine, path: Path | str) -> None:
    """Write the machine as TOML, whole or not at all. Raises `UnwritableError`."""
    write_atomically(path, tomli_w.dumps(machine_to_dict(machine)))
