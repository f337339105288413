"""The processes behind a machine's CPU devices. Starting one takes seconds: plans can share them.

with Workers(machine) as workers:
    for plan in plans:
        with run(plan, captured, workers=workers) as placed: ...
"""

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from dovetail.errors import RunError, UsageError
from dovetail.machine import Device, Machine
from dovetail.runtime.processes import Worker, launch

ENTRY = "dovetail.executors.worker:serve"


class Workers:
    """One pinned process per device, started when a plan first needs it. A context manager.

    Raises `UsageError` for a machine whose devices are not sets of this machine's cores.
    """

    def __init__(self, machine: Machine) -> None:
        for device in machine.devices:
            check_here(device)
        self.machine = machine
        self.closed = False
        self._stack = ExitStack()
        self._started: dict[int, Worker] = {}
        self._keys = 0

    def start(self, devices: tuple[int, ...]) -> list[Worker]:
        """The devices' processes, ready for messages."""
        self.check_open()
        try:
            fresh = [d for d in devices if d not in self._started]
            for index in fresh:
                device = self.machine.devices[index]
                threads = len(device.cores)
                worker = launch(ENTRY, cores=device.cores, threads=threads, name=device.name)
                self._started[index] = self._stack.enter_context(worker)
                worker.send(threads)
            for index in fresh:  # their imports run at the same time
                self._started[index].receive()
        except BaseException:
            self.close(kill=True)
            raise
        return [self._started[index] for index in devices]

    def new_key(self) -> int:
        """A key for one loaded plan, not used before."""
        self._keys += 1
        return self._keys

    def serves(self, machine: Machine) -> bool:
        """True if plans for `machine` can run here: the same devices on the same cores."""
        return [(d.name, d.cores) for d in self.machine.devices] == [
            (d.name, d.cores) for d in machine.devices
        ]

    def check_open(self) -> None:
        if self.closed:
            raise RunError("these workers are closed; make new ones with Workers(machine)")

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that were started."""
        return tuple(worker.pid for worker in self._started.values())

    def close(self, *, kill: bool = False) -> None:
        """End all processes; at once, if `kill`."""
        self.closed = True
        for worker in self._started.values():
            worker.close(kill=kill)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=error is not None)


def check_here(device: Device) -> None:
    """Raise `UsageError` unless the device is a set of cores that this process may use."""
    if not device.cores:
        raise UsageError(
            "machine",
            f"device {device.name!r} is not part of the machine we stand on, so that its plan "
            "can be simulated but not run; plan for here or here/2",
        )
    missing = set(device.cores) - os.sched_getaffinity(0)
    if missing:
        raise UsageError(
            "machine",
            f"device {device.name!r} wants cores {sorted(missing)}, which are not here; this "
            f"process may use {sorted(os.sched_getaffinity(0))}. Plan again for here/N",
        )
