"""Reads and writes machines as TOML, whose tables and keys are the fields of the records.

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
torch_device = "cuda:0"            # only of a GPU of the machine the file is used on
host = "box1"                      # of a machine of several hosts: the one that has the device;
                                   # cores and torch_device are its own then
threads = 1                        # an op uses so many threads; default: one a core
efficiencies = { "" = 0.4, "aten.convolution" = 0.1 }    # share of flops_per_second that ops
                                   # reach whose kind begins so; the longest counts; default: 1
chip = { multiprocessors = 82, clock_hz = 1.695e9, threads = 1536 }    # of a GPU; also l2_bytes,
                                   # watts, nanometres
calibration = { product = 1.2 }    # class of kernels -> factor of its seconds beyond the overhead,
                                   # as `dovetail machine --calibrate` writes; default: 1

[[links]]
source = "cpu0"
destination = "gpu0"
bandwidth_bytes_per_second = 11e9
latency_seconds = 25e-6
channel = "pcie"                   # links with one channel take turns; default: its own
send_seconds = 60e-6               # time that each message takes of whoever sends it: the CPU, or
                                   # the thread that issues the GPUs' work; default: 0
receive_seconds = 0                # the same of whoever receives it
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from dovetail.errors import FileFormatError
from dovetail.machine.records import Machine
from dovetail.runtime.files import files_only, write_atomically
from dovetail.runtime.formats import file_type, first_complaint, to_file
from dovetail.units import format_bytes

MOST_FILE_BYTES = 2**26
"""No larger file is read. A machine of 500 devices, each linked with every other, takes half."""
MOST_KEY_PARTS = 16
# tomllib takes memory of the square of a key's parts: gigabytes for a.a.a... of 200 kB. The look
# behind keeps the search from starting again within a long name.
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_DOTTED = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_PART}\.[ \t]*)+")
_FILE: TypeAdapter[Machine] = TypeAdapter(file_type(Machine))


def machine_from_dict(raw: Any) -> Machine:
    """A machine from parsed TOML or JSON. Raises `MachineError` or pydantic's `ValidationError`."""
    return _FILE.validate_python(raw)


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """The machine as a dict that `machine_from_dict` reads back to an equal one."""
    raw: dict[str, Any] = to_file(machine)
    for device in raw["devices"]:
        # Most devices have none of these fields. A file without them is shorter and means the same.
        for optional in ("efficiencies", "threads", "torch_device", "host", "chip", "calibration"):
            if not device[optional]:
                del device[optional]
    for link in raw["links"]:
        for optional in ("send_seconds", "receive_seconds"):
            if not link[optional]:
                del link[optional]
    return raw


def load_machine(path: Path | str) -> Machine:
    """Read a machine from TOML. Raises `FileFormatError` or `MachineError`."""
    try:
        with open(path, "rb", opener=files_only) as file:
            data = file.read(MOST_FILE_BYTES + 1)
        if len(data) > MOST_FILE_BYTES:
            limit = format_bytes(MOST_FILE_BYTES)
            raise FileFormatError(str(path), f"it is larger than {limit}")
        text = data.decode()
        if any(key[0].count(".") >= MOST_KEY_PARTS for key in _DOTTED.finditer(text)):
            raise FileFormatError(str(path), f"it has a key of more than {MOST_KEY_PARTS} parts")
        return machine_from_dict(tomllib.loads(text))
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(str(path), getattr(error, "strerror", None) or str(error)) from None
    except ValidationError as error:
        raise FileFormatError(str(path), first_complaint(error)) from None
    # `TOMLDecodeError` is one; a plain one comes of a NUL in the name, and of an integer of more
    # digits than Python converts.
    except ValueError as error:
        raise FileFormatError(str(path), f"not TOML: {error}") from None
    except RecursionError:
        raise FileFormatError(str(path), "nested too deeply") from None


def save_machine(machine: Machine, path: Path | str) -> None:
    """Write the machine as TOML, whole or not at all. Raises `UnwritableError`."""
    write_atomically(path, tomli_w.dumps(machine_to_dict(machine)))
