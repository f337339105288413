"""The records of a machine: devices, and the links over which tensors are sent."""

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dovetail.errors import MachineError, NoRouteError, UnknownDeviceError
from dovetail.units import MOST_BYTES

_DERIVED = {
    "complex128": ("float64", 4),
    "complex64": ("float32", 4),
    "complex32": ("float16", 4),
    "float64": ("float32", 2),
}
"""dtype -> the dtype whose rate counts where a device gives none for it, and how many times less it
is. A multiply-add of complex numbers is four of their parts, and a vector has half as many doubles.
Any other dtype counts as float32, in which torch and its libraries compute what a device has no
units for, and at whose rate integers count."""
MOST_DEVICES = 4096
"""A machine has at most so many devices. Tables of a number for each two of them then fit into
memory."""


@dataclass(frozen=True)
class Chip:
    """What a GPU physically is.

    multiprocessors   SMs, compute units or cores
    threads           that one of them holds at once
    l2_bytes          of the last cache
    watts             that the card may draw; 0: not known
    nanometres        of the process' generation, as 5 for TSMC's N5 and 4N; 0: not known
    """

    multiprocessors: int
    clock_hz: float
    threads: int
    l2_bytes: int = 0
    watts: float = 0.0
    nanometres: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("l2_bytes", "watts", "nanometres") else 1
            if not least <= value < MOST_BYTES:
                raise MachineError(f"chip: {name} is {value}")


@dataclass(frozen=True)
class Device:
    """One device that runs one op at a time.

    kind            "cpu", "gpu", or "host" for a host that runs nothing
    model           name of the hardware, such as "k80": devices of one model cost the same
    flops_per_second   dtype name -> peak rate, such as {"float32": 4.37e12}; `rate` derives
                    others
    op_overhead_seconds   seconds that every op takes beyond its work
    cores           for a CPU of the machine that the program runs on: the only cores that it may
                    use; () for any other device
    threads         number of threads that an op uses, at most as many as cores; 0: one a core
    torch_device    for a GPU of the machine that the program runs on: what torch calls it, as
                    "cuda:0". Devices of one name share a GPU
    host            of a machine of several hosts: name of the one that has the device
    efficiencies    prefix of kinds of op -> share of `flops_per_second` that these ops reach. The
                    longest prefix that fits counts, and "" fits every kind. If none fits, it is 1
    chip            of a GPU, if known
    calibration     class of kernels as in `costs.kernels` -> factor of the seconds that its ops
                    take beyond their overhead; 1 if the class is not there
    """

    name: Annotated[str, Field(min_length=1)]
    kind: str
    model: str
    memory_bytes: int
    flops_per_second: dict[str, float] = field(default_factory=dict, hash=False)
    bandwidth_bytes_per_second: float = 0.0
    op_overhead_seconds: float = 0.0
    cores: tuple[int, ...] = ()
    efficiencies: dict[str, float] = field(default_factory=dict, hash=False)
    threads: int = 0
    torch_device: str = ""
    host: str = ""
    chip: Chip | None = None
    calibration: dict[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "gpu", "host"):
            raise MachineError(f"device {self.name!r}: kind is {self.kind!r}, not cpu, gpu or host")
        rates = {"memory_bytes": self.memory_bytes, "op_overhead_seconds": self.op_overhead_seconds}
        if self.kind != "host":
            rates["bandwidth_bytes_per_second"] = self.bandwidth_bytes_per_second
            rates |= {f"flops_per_second.{k}": v for k, v in self.flops_per_second.items()}
        if not 0 <= self.memory_bytes <= MOST_BYTES:
            raise MachineError(
                f"device {self.name!r}: memory_bytes is {self.memory_bytes}, not 0 to {MOST_BYTES}"
            )
        for name, value in rates.items():
            positive = name.startswith(("bandwidth", "flops"))
            if not np.isfinite(value) or value < 0 or (positive and value == 0):
                raise MachineError(f"device {self.name!r}: {name} is {value}")
        if self.torch_device and (
            self.kind != "gpu" or not re.fullmatch(r"cuda:[0-9]{1,4}", self.torch_device)
        ):
            raise MachineError(
                f"device {self.name!r}: torch_device is {self.torch_device!r}; a gpu of this "
                "machine has cuda:NUMBER, other devices none"
            )
        if not 0 <= self.threads <= len(self.cores):
            raise MachineError(
                f"device {self.name!r}: threads is {self.threads}, but it has "
                f"{len(self.cores)} cores; use 1 to that, or 0 for one a core"
            )
        for name, factor in self.calibration.items():
            if not 0 < factor < np.inf:
                raise MachineError(
                    f"device {self.name!r}: calibration[{name!r}] is {factor}, not a positive "
                    "number"
                )
        for prefix, share in self.efficiencies.items():
            if not 0 < share <= 1:
                raise MachineError(
                    f"device {self.name!r}: efficiencies[{prefix!r}] is {share}, not above 0 and "
                    "at most 1"
                )

    @property
    def op_threads(self) -> int:
        """The number of threads that an op uses; 0 for a device without cores."""
        return self.threads or len(self.cores)

    def rate(self, dtype: str) -> float:
        """The peak rate in FLOP/s of work in this dtype, given or derived as `rate_source` says.
        Raises `MachineError` if it can be neither."""
        source, times = self.rate_source(dtype)
        if source not in self.flops_per_second:
            raise MachineError(
                f"device {self.name} has no flops_per_second for {dtype}, nor for {source}; add it "
                "to the machine (`dovetail machine NAME --out box.toml` writes one to edit)"
            )
        return self.flops_per_second[source] / times

    def rate_source(self, dtype: str) -> tuple[str, int]:
        """(dtype whose given rate counts for this one, how many times less than that it is)."""
        times = 1
        while dtype not in self.flops_per_second and dtype != "float32":
            dtype, less = _DERIVED.get(dtype, ("float32", 1))
            times *= less
        return dtype, times

    def efficiency(self, kind: str) -> float:
        """The share of the peak rate that ops of this kind reach."""
        prefixes = [prefix for prefix in self.efficiencies if kind.startswith(prefix)]
        return self.efficiencies[max(prefixes, key=len)] if prefixes else 1.0


@dataclass(frozen=True)
class Link:
    """A directed link. Links with the same `channel` carry one transfer at a time between them.

    A channel that has the name of the links' source *is* that device: it makes the copies itself,
    as a CPU does into shared memory, and runs no op meanwhile. A link without a channel gets one of
    its own.

    send_seconds, receive_seconds   the time that each message takes of whoever sends it, and of
                                    whoever receives it. A CPU sends and receives by itself, and
                                    runs no op meanwhile. For GPUs a thread of their host does,
                                    which also copies to them from the host's memory
    """

    source: str
    destination: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    channel: str = ""
    send_seconds: float = 0.0
    receive_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.channel:
            object.__setattr__(self, "channel", f"{self.source}->{self.destination}")
        if not (self.bandwidth_bytes_per_second > 0 and 0 <= self.latency_seconds < np.inf):
            raise MachineError(
                f"link {self.source} -> {self.destination}: bandwidth must be positive and "
                "latency finite and not negative"
            )
        for name in ("send_seconds", "receive_seconds"):
            if not 0 <= getattr(self, name) < np.inf:
                raise MachineError(
                    f"link {self.source} -> {self.destination}: {name} is {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Machine:
    """Devices, one of them the host where inputs start, and links between them.

    Two devices without a link reach each other through the host in two hops. Raises `NoRouteError`
    if one of these hops has no link either, and `MachineError` or `UnknownDeviceError` for names
    and links that do not agree.
    """

    name: str
    devices: tuple[Device, ...]
    host: str
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        names = self.device_names
        if not 0 < len(names) <= MOST_DEVICES:
            raise MachineError(
                f"machine {self.name!r} has {len(names) or 'no'} devices; it may have 1 to "
                f"{MOST_DEVICES}"
            )
        if len(set(names)) < len(names):
            raise MachineError(f"machine {self.name!r}: two devices share a name")
        linked: set[tuple[str, str]] = set()
        ends_of_links = (n for link in self.links for n in (link.source, link.destination))
        for name in dict.fromkeys((self.host, *ends_of_links)):
            self.device_index(name)
        devices = set(names)
        for link in self.links:
            ends = (link.source, link.destination)
            if link.source == link.destination or ends in linked:
                raise MachineError(f"link {link.source} -> {link.destination} is double or a loop")
            if link.channel in devices and link.channel != link.source:
                raise MachineError(
                    f"link {link.source} -> {link.destination}: of the devices only its source "
                    f"can be its channel, not {link.channel}"
                )
            linked.add(ends)
        # Two devices without a link need the host's, both of them.
        to_host = {a for a in names if a == self.host or (a, self.host) in linked}
        apart = [b for b in names if b != self.host and (self.host, b) not in linked]
        for a in names:
            # Of most machines every device has both links, which leaves nothing to look for.
            for b in apart if a in to_host else names:
                if a != b and (a, b) not in linked:
                    raise NoRouteError(a, b)

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def host_index(self) -> int:
        return self.device_index(self.host)

    @property
    def local(self) -> bool:
        """True if every device has cores or is a GPU that torch has a name for, so that plans can
        run on the machine that has them. `machine.check_local` checks whether that is the machine
        that the program runs on."""
        return any(device.kind != "host" for device in self.devices) and all(
            device.cores or device.torch_device or device.kind == "host" for device in self.devices
        )

    def device_index(self, name: str) -> int:
        """Index of the device called `name`. Raises `UnknownDeviceError`."""
        try:
            return self.device_names.index(name)
        except ValueError:
            raise UnknownDeviceError(name, self.device_names) from None

    @cached_property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels, in order of first use."""
        return tuple(dict.fromkeys(link.channel for link in self.links))

    @cached_property
    def link_index(self) -> NDArray[np.int32]:
        """[devices, devices] index into `links` from row to column; -1: no link."""
        index = np.full((len(self.devices),) * 2, -1, dtype=np.int32)
        of_name = {name: i for i, name in enumerate(self.device_names)}
        for i, link in enumerate(self.links):
            index[of_name[link.source], of_name[link.destination]] = i
        return index

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over the machine's devices and links without their rates, so that a new
        measurement does not change them."""
        parts = (
            [(d.name, d.kind, d.model, len(d.cores)) for d in self.devices],
            self.host,
            [(link.source, link.destination, link.channel) for link in self.links],
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
