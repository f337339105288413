"""Describes `here`, the machine that the program runs on: its cores as one device or several, and
its GPUs.

    here         all cores as one device, and each GPU; the number of threads of an op on the cores
                 is measured for each step
    here/cpu     all cores as one device, without the GPUs
    here/1       one device of one core, the last: the system's own work is mostly on the first
    here/n       n devices that share the cores evenly; an op has one thread for each core
    here/gpu     the GPUs alone; inputs come from a host that runs nothing
    here/gpu*2   the same, each GPU as two devices with half of its memory

Without GPUs `here` and `here/cpu` are the same.
"""

import os
import platform
import re

from dovetail.errors import MachineError
from dovetail.machine.gpus import check_gpu, gpus_here
from dovetail.machine.records import Device, Link, Machine
from dovetail.runtime.ranks import host_name
from dovetail.units import HERE

# Typical rates, which count until the probe has measured: those of a core of the last ten years,
# and of a copy through its cache.
_FLOPS_PER_CORE = {"float32": 5e10, "float64": 2.5e10}
_BANDWIDTH_PER_CORE = 1e10
_OP_OVERHEAD_SECONDS = 8e-6
_LATENCY_SECONDS = 2e-5
GPU_SEND_SECONDS = 6e-5
"""What the thread that issues to GPUs needs for each message: 45 to 75 us were measured for each
tensor that a GPU reads (benchmarks/gpu). One that a CPU reads is assumed to take as long."""
# Of pinned copies over PCIe 4.0 x16, and of copies from GPU to GPU.
_TO_GPU, _BETWEEN_GPUS, _GPU_LATENCY_SECONDS = 2e10, 5e10, 1e-5
_HERE = re.compile(r"here(/([0-9]{1,9}|cpu|gpu(\*[0-9]{1,3})?))?")


def names_here(text: str) -> bool:
    """True if the text names the machine that the program runs on, such as "here" or "here/2"."""
    return _HERE.fullmatch(text) is not None


def local_machine(text: str = HERE) -> Machine:
    """The machine that a text names for which `names_here` is true.

    If the cores do not divide evenly, some devices have one core more, always the last device and
    never the first, which is the host. The memory that is available now is divided among the
    devices. Raises `MachineError` if there are fewer cores than devices, and for "here/gpu" where
    torch sees no GPU.
    """
    part = text.removeprefix(HERE).removeprefix("/")
    if part.startswith("gpu"):
        gpus = gpus_here(int(part.removeprefix("gpu").removeprefix("*") or 1))
        if not gpus:
            raise MachineError(
                f"{text}: torch sees no GPU here; use here, or here/2 for two sets of cores"
            )
        host = Device("host", "host", _cpu_model(), available_bytes())
        return Machine(text, (host, *gpus), "host", _links((host,), gpus))
    if part.isdecimal():
        return Machine(text, cpus := _cpus(int(part)), cpus[0].name, _links(cpus, ()))
    cpus, gpus = _cpus(None), gpus_here()
    if not gpus:
        # One machine has one name, under which its rates are kept.
        text = HERE
    elif part == "cpu":
        gpus = ()
    return Machine(text, (*cpus, *gpus), cpus[0].name, _links(cpus, gpus))


def _cpus(count: int | None) -> tuple[Device, ...]:
    """All cores as one device (None), or as so many; one device of one core for 1."""
    cores = sorted(os.sched_getaffinity(0))
    if count is not None and not 1 <= count <= len(cores):
        raise MachineError(
            f"{HERE}/{count}: there are {len(cores)} cores here; use here/1 to here/{len(cores)}, "
            "or here for all as one device"
        )
    if count == 1:
        cores = cores[-1:]
    count = count or 1
    memory_bytes = available_bytes() // count
    shares = [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]
    return tuple(
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


def _links(cpus: tuple[Device, ...], gpus: tuple[Device, ...]) -> tuple[Link, ...]:
    """Links between all pairs of devices, with typical rates."""
    links = []
    for a in (*cpus, *gpus):
        for b in (*cpus, *gpus):
            if a is b:
                continue
            if a in cpus and b in cpus:
                # The sender itself copies into shared memory, so each link's channel is its source.
                link = Link(a.name, b.name, _BANDWIDTH_PER_CORE, _LATENCY_SECONDS, a.name)
            elif a in gpus and b in gpus:
                link = Link(
                    a.name, b.name, _BETWEEN_GPUS, _GPU_LATENCY_SECONDS, "", GPU_SEND_SECONDS
                )
            else:
                # A GPU has one engine for copies from the host and one for copies to it. Devices of
                # one GPU share them.
                gpu, way = (b, "to") if a in cpus else (a, "from")
                channel = f"{way} {gpu.torch_device}"
                link = Link(
                    a.name, b.name, _TO_GPU, _GPU_LATENCY_SECONDS, channel, GPU_SEND_SECONDS
                )
            links.append(link)
    return tuple(links)


def check_local(machine: Machine) -> None:
    """Raise `MachineError` unless all devices are of the machine that the program runs on: CPUs
    must have its model and cores that this process may use, and no core may be listed twice; GPUs
    must be those that torch sees. Devices of other hosts are theirs to check."""
    usable_cores, listed_cores = os.sched_getaffinity(0), set[int]()
    for device in machine.devices:
        if device.host not in ("", host_name()):
            continue
        if device.torch_device:
            check_gpu(device)
        if device.torch_device or device.kind == "host":
            continue
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
    limit of the control group.

    `psutil.virtual_memory` gives the same estimate and not the limit, and takes 40 ms to import.
    """
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
