"""Describes `here`, the machine that the program runs on: its cores as one device or several.

    here      one device of all cores; the number of threads of an op is measured for each step
    here/1    one device of one core, the last, since the system's own work is mostly on the first
    here/n    n devices that share the cores evenly; an op has one thread for each core

GPUs will join when an executor for them exists: `here` lists only devices that can be used.
"""

import os
import platform

from dovetail.errors import MachineError
from dovetail.machine.records import Device, Link, Machine

# Typical rates, which count until the probe has measured: those of a core of the last ten years,
# and of a copy through its cache.
_FLOPS_PER_CORE = {"float32": 5e10, "float64": 2.5e10}
_BANDWIDTH_PER_CORE = 1e10
_OP_OVERHEAD_SECONDS = 8e-6
_LATENCY_SECONDS = 2e-5


def local_machine(count: int | None = None) -> Machine:
    """The machine `here`, or `here/count` with a count.

    `here` has all cores of this process as one device. `here/count` has them split into `count`
    equal devices, and `here/1` has one core. If the cores do not divide evenly, some devices have
    one core more, always the last device and never the first, which is the host. The memory that
    is available now is divided among the devices. Raises `MachineError` if there are fewer cores
    than devices.
    """
    cores = sorted(os.sched_getaffinity(0))
    name = "here" if count is None else f"here/{count}"
    if count is not None and not 1 <= count <= len(cores):
        raise MachineError(
            f"{name}: there are {len(cores)} cores here; use here/1 to here/{len(cores)}, or "
            "here for all as one device"
        )
    if count == 1:
        cores = cores[-1:]
    count = count or 1
    memory_bytes = available_bytes() // count
    shares = [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]
    devices = tuple(
        Device(
            f"cpu{i}",
            "cpu",
            _cpu_model(),
            memory_bytes,
            {dtype: rate * len(share) for dtype, rate in _FLOPS_PER_CORE.items()},
            _BANDWIDTH_PER_CORE * len(share),
            _OP_OVERHEAD_SECONDS,
            tuple(share),
        )
        for i, share in enumerate(shares)
    )
    names = [device.name for device in devices]
    # The sender itself copies into shared memory, so each link's channel is its source.
    links = tuple(
        Link(a, b, _BANDWIDTH_PER_CORE, _LATENCY_SECONDS, a) for a in names for b in names if a != b
    )
    return Machine(name, devices, names[0], links)


def check_local(machine: Machine) -> None:
    """Raise `MachineError` unless all devices are CPUs of the machine that the program runs on:
    they must have its model and cores that this process may use, and no core may be listed
    twice."""
    usable_cores, listed_cores = os.sched_getaffinity(0), set[int]()
    for device in machine.devices:
        where = f"machine {machine.name!r}: device {device.name!r}"
        if device.kind != "cpu" or device.model != _cpu_model():
            raise MachineError(
                f"{where} is a {device.kind} {device.model!r} with cores, but the cores here are "
                f"of a cpu {_cpu_model()!r}; leave out cores to plan for another machine"
            )
        missing = sorted(set(device.cores) - usable_cores)
        if missing:
            raise MachineError(f"{where} has core {missing[0]}; here are {sorted(usable_cores)}")
        if len(set(device.cores)) < len(device.cores) or listed_cores & set(device.cores):
            raise MachineError(f"{where}: a core is listed twice; each belongs to one device")
        listed_cores |= set(device.cores)


def available_bytes() -> int:
    """The bytes of memory that a new process could use: the kernel's estimate, but at most the
    limit of the control group."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            available = next(
                int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
            )
        with open("/sys/fs/cgroup/memory.max") as limit:
            text = limit.read().strip()
            available = min(available, int(text)) if text.isdigit() else available
    # Without Linux's files, the machine's whole memory counts. Without a control group's limit,
    # the kernel's estimate does.
    except (OSError, StopIteration):
        pass
    return available


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
