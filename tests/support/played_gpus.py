"""Machines whose GPUs the CPU plays, where `tests.support.played_cuda.played` is entered."""

import os
from itertools import permutations

from dovetail.machine import Device, Link, Machine

RATES = {"float32": 1e10, "float64": 1e10}


def gpu(number):
    name = f"gpu{number}"
    return Device(name, "gpu", "test", 1 << 33, RATES, 1e10, 1e-6, torch_device="cuda:0")


def cpu(number):
    cores = sorted(os.sched_getaffinity(0))
    core = (cores[number % len(cores)],)
    return Device(f"cpu{number}", "cpu", "test", 1 << 33, RATES, 1e10, 1e-6, core)


def linked(name, *devices):
    pairs = permutations([device.name for device in devices], 2)
    links = tuple(Link(a, b, 1e10, 1e-6) for a, b in pairs)
    return Machine(name, devices, devices[0].name, links)


HOST = Device("host", "host", "host", 1 << 33)
MACHINES = {
    "a CPU and a GPU": linked("beside", cpu(0), gpu(0)),
    "two GPUs": linked("gpus", HOST, gpu(0), gpu(1)),
    "a GPU that is the host": linked("hosting", gpu(0), cpu(0)),
    "two CPUs and two GPUs": linked("mixed", cpu(0), cpu(1), gpu(0), gpu(1)),
}
