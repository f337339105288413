"""`here`: the machine we stand on, its cores as one device or split in several.

    here      one device of all cores; how many threads its ops use is measured for each step
    here/1    one device of one core, the last: the system's own work is mostly on the first
    here/n    n devices, which share the cores evenly, a thread a core

GPUs join when an executor for them exists: `here` lists only devices that can be used.
"""

import os
import platform

from dovetail.errors import MachineError
from dovetail.machine.records import Device, Link, Machine

# Before the probe has measured: a core of the last ten years, and a copy through its cache.
_FLOPS_PER_CORE = {"float32": 5e10, "float64": 2.5e10}
_BANDWIDTH_PER_CORE = 1e10
_OP_OVERHEAD_SECONDS = 8e-6
_LATENCY_SECONDS = 2e-5


def local_machine(count: int | None = None) -> Machine:
    """`here` without a count: all cores of this process as one device. Else `here/count`: the
    cores in `count` equal devices; of `here/1`, one core.

    Where cores do not divide evenly, some devices have one more, the last one always and the
    first, the host, never. Memory is what is available now, divided. Raises `MachineError` if
    there are fewer cores than devices.
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
    links = tuple(  # the sender copies into shared memory: it is its own channel
        Link(a, b, _BANDWIDTH_PER_CORE, _LATENCY_SECONDS, a) for a in names for b in names if a != b
    )
    return Machine(name, devices, names[0], links)


def check_local(machine: Machine) -> None:
    """Raise `MachineError` unless the devices are CPUs of the machine we stand on: its model, and
    cores that this process may use, none of them twice."""
    here, seen = os.sched_getaffinity(0), set[int]()
    for device in machine.devices:
        where = f"machine {machine.name!r}: device {device.name!r}"
        if device.kind != "cpu" or device.model != _cpu_model():
            raise MachineError(
                f"{where} is a {device.kind} {device.model!r} with cores, but the cores here are "
                f"of a cpu {_cpu_model()!r}; leave out cores to plan for another machine"
            )
        missing = sorted(set(device.cores) - here)
        if missing:
            raise MachineError(f"{where} has core {missing[0]}; here are {sorted(here)}")
        if len(set(device.cores)) < len(device.cores) or seen & set(device.cores):
            raise MachineError(f"{where}: a core is listed twice; each belongs to one device")
        seen |= set(device.cores)


def available_bytes() -> int:
    """Memory that a new process could use, by the kernel's estimate and the control group's."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            available = next(
                int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
            )
        with open("/sys/fs/cgroup/memory.max") as limit:
            text = limit.read().strip()
            available = min(available, int(text)) if text.isdigit() else available
    except (OSError, StopIteration):
        pass  # not Linux, or no control group: what the machine has
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
