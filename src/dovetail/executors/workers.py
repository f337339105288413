"""The processes behind a machine's CPU devices. Starting one takes seconds: plans can share them.

with Workers(machine) as workers:
    for plan in plans:
        with run(plan, captured, workers=workers) as placed: ...
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from dovetail.errors import RunError, UsageError
from dovetail.executors.worker import UseThreads
from dovetail.machine import Device, Machine
from dovetail.runtime.processes import Worker, launch

ENTRY = "dovetail.executors.worker:serve"
"""What a device's process runs."""


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
        self._program: object = None
        self._program_key = 0
        self._sent: dict[int, set[int]] = {}

    def start(self, devices: tuple[int, ...]) -> list[Worker]:
        """The devices' processes, ready for messages."""
        self.check_open()
        try:
            fresh = [d for d in devices if d not in self._started]
            for index in fresh:
                device = self.machine.devices[index]
                threads = device.op_threads
                worker = launch(ENTRY, cores=device.cores, threads=threads, name=device.name)
                self._started[index] = self._stack.enter_context(worker)
                worker.send(threads)
            for index in fresh:  # their imports run at the same time
                self._started[index].receive()
        except BaseException:
            self.close(kill=True)
            raise
        return [self._started[index] for index in devices]

    def set_threads(self, threads: int) -> None:
        """Have the processes that were started use so many threads an op from here on."""
        self.check_open()
        for worker in self._started.values():
            worker.send(UseThreads(threads))
        for worker in self._started.values():
            worker.receive()

    def new_key(self) -> int:
        """A key for one loaded plan, not used before."""
        self._keys += 1
        return self._keys

    def unsent(self, program: object, device: int, ops: Iterable[int]) -> tuple[int, list[int]]:
        """(key of the program, those of its ops whose calls the device's process does not have);
        they count as sent. Only the latest program's are kept: plans of one are loaded in turn."""
        if program is not self._program:
            self._program, self._program_key, self._sent = program, self._program_key + 1, {}
        sent = self._sent.setdefault(device, set())
        fresh = [op for op in ops if op not in sent]
        sent.update(fresh)
        return self._program_key, fresh

    def serves(self, machine: Machine) -> bool:
        """True if plans for `machine` can run here: the same devices on the same cores, with as
        many threads."""
        return [(d.name, d.cores, d.op_threads) for d in self.machine.devices] == [
            (d.name, d.cores, d.op_threads) for d in machine.devices
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
