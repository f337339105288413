"""Keeps the processes behind a machine's CPU devices. Starting one takes seconds, so that plans
can share them.

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
from dovetail.runtime.native import build_native
from dovetail.runtime.processes import Worker, launch

ENTRY = "dovetail.executors.worker:serve"
"""The function that a device's process runs, as `launch` takes it."""


class Workers:
    """One pinned process per device, each started when a plan first needs it. A context manager.

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
        """Start those of the devices' processes that do not run yet; return all of them, ready."""
        self.check_open()
        try:
            fresh = [d for d in devices if d not in self._started]
            if fresh:
                build_native()
            for index in fresh:
                device = self.machine.devices[index]
                threads = device.op_threads
                worker = launch(ENTRY, cores=device.cores, threads=threads, name=device.name)
                self._started[index] = self._stack.enter_context(worker)
                worker.send(threads)
            # All are started before any is waited for, so that their imports run at the same time.
            for index in fresh:
                self._started[index].receive()
        except BaseException:
            self.close(kill=True)
            raise
        return [self._started[index] for index in devices]

    def set_threads(self, threads: int) -> None:
        """Have the started processes run each op on this many threads from now on."""
        self.check_open()
        for worker in self._started.values():
            worker.send(UseThreads(threads))
        for worker in self._started.values():
            worker.receive()

    def new_key(self) -> int:
        """A key for one loaded plan, which no other plan had before."""
        self._keys += 1
        return self._keys

    def unsent(self, program: object, device: int, ops: Iterable[int]) -> tuple[int, list[int]]:
        """(key of the program, those of `ops` whose calls the device's process does not have yet).

        The returned ops count as sent from then on. Only calls of the latest program are
        remembered, because plans of one program are usually loaded one after another.
        """
        # The worker forgets the calls of other programs as well, so both sides start again.
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
        """Raise `RunError` if these workers were closed."""
        if self.closed:
            raise RunError("these workers are closed; make new ones with Workers(machine)")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the processes that were started."""
        return tuple(worker.pid for worker in self._started.values())

    def close(self, *, kill: bool = False) -> None:
        """End all processes. With `kill` they get no time to end by themselves."""
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
