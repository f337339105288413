"""The probe: what the devices of this machine, and the links between them, really do.

Takes a few seconds, most of them to start processes; the cache keeps what it finds.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail.costs.cache import CostCache
from dovetail.costs.measured import device_key, start_worker
from dovetail.costs.worker import HOP_BYTES
from dovetail.errors import MachineError
from dovetail.machine import Machine
from dovetail.runtime.neighbours import Neighbours, disturbs
from dovetail.runtime.processes import Worker
from dovetail.runtime.shared import Block

_BLOCK_BYTES = 256 + 2 * max(HOP_BYTES)


def probed_machine(
    machine: Machine,
    cache: CostCache,
    *,
    fresh: bool = False,
    beside: Callable[[float], None] = lambda _cores: None,
) -> Machine:
    """The machine with measured rates, from the cache unless `fresh`.

    Devices are measured at the same time, as they will work. Links are taken to be alike: one pair
    is measured and stands for all. Rates that were measured while other programs used these cores
    are not kept; `beside` is told how many cores those used.
    """
    key = f"{machine.name} | {machine.fingerprint} | {device_key(machine.devices[0], machine)}"
    rates = None if fresh else cache.probe(key)
    if rates is not None:
        try:
            return _with_rates(machine, rates)
        except (KeyError, TypeError, ValueError, MachineError):
            pass  # a row that does not fit, from another version say: measure anew
    rates, others_cores = _measure(machine)
    if disturbs(others_cores):
        beside(others_cores)
    else:
        cache.add_probe(key, rates)
    return _with_rates(machine, rates)


def _with_rates(machine: Machine, rates: dict[str, Any]) -> Machine:
    devices = tuple(
        replace(device, **found)
        for device, found in zip(machine.devices, rates["devices"], strict=True)
    )
    links = tuple(replace(link, **rates["link"]) for link in machine.links)
    return replace(machine, devices=devices, links=links)


def fit_link(hop_seconds: dict[int, float]) -> dict[str, float]:
    """Latency and bandwidth with the least squared *relative* error over the measured sizes:
    (latency + bytes / bandwidth) / seconds = 1. Neither comes out negative."""
    sizes = np.array(sorted(hop_seconds), dtype=np.float64)
    seconds = np.array([hop_seconds[int(size)] for size in sizes])
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    if latency <= 0 or per_byte <= 0:
        latency = seconds[0]
        per_byte = max(seconds[-1] - seconds[0], 1e-12) / sizes[-1]
    return {"latency_seconds": float(latency), "bandwidth_bytes_per_second": float(1 / per_byte)}


def _measure(machine: Machine) -> tuple[dict[str, Any], float]:
    """(rates of devices and links, cores that other programs used meanwhile)."""
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(device)) for device in machine.devices]
        for worker in workers:
            worker.receive()
        cores = [core for device in machine.devices for core in device.cores]
        neighbours = Neighbours(cores, [worker.pid for worker in workers])
        for worker in workers:
            worker.send(("rates",))
        devices = [worker.receive() for worker in workers]
        link = fit_link(_hops(workers[0], workers[1])) if machine.links else {}
        return {"devices": devices, "link": link}, neighbours.settled() or 0.0


def _hops(first: Worker, second: Worker) -> dict[int, float]:
    block = Block.create(_BLOCK_BYTES)
    for worker in (first, second):
        worker.send(("block",))
        worker.send_descriptor(block.descriptor)
        worker.receive()
    seconds: dict[int, float] = {}
    for round_base in (0, 10**6):  # the first game warms up
        for worker in (first, second):
            worker.send(("hops", worker is first, round_base))
        seconds = first.receive()
        second.receive()
    block.close()
    return seconds
