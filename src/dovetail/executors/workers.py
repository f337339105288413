"""Keeps the processes behind a machine's devices. Starting one takes seconds, so that plans can
share them. Each CPU device has one, and all GPUs have one together. A device that is the machine's
only one and has all cores of this process is served within this process.

with Workers(machine) as workers:
    for plan in plans:
        with run(plan, captured, workers=workers) as placed: ...
"""

import os
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, Self

import torch

from dovetail.errors import ProcessError, RunError, UsageError
from dovetail.executors.worker import ServedDevice
from dovetail.machine import Device, Machine
from dovetail.machine.gpus import check_gpu
from dovetail.runtime.cuda import cuda_maker
from dovetail.runtime.native import build_native
from dovetail.runtime.neighbours import Spinning
from dovetail.runtime.processes import Worker, launch
from dovetail.runtime.setup import keep_freed_memory, op_threads, trim_memory
from dovetail.runtime.user_code import line_of

ENTRY = "dovetail.executors.worker:DeviceProcess"
"""What lives in a CPU device's process, as `launch` takes it."""
GPUS_ENTRY = "dovetail.executors.gpus.worker:ServedGpus"
"""What lives in the process of all GPUs."""


def is_this_process(machine: Machine) -> bool:
    """True if the machine is one device with all cores of this process, so that a step on it needs
    no process of its own."""
    cores = [device.cores for device in machine.devices]
    return len(cores) == 1 and frozenset(cores[0]) == os.sched_getaffinity(0)


class Served(Protocol):
    """What a process would have, and whose public methods are called."""

    @property
    def infers(self) -> bool:
        """True if its steps run in inference mode by themselves."""

    @property
    def draws(self) -> bool:
        """True if its steps may draw random numbers."""

    def pause(self) -> None:
        """Note that nothing is to be done until the next call."""

    def close(self) -> None:
        """Forget all that was loaded."""


class LocalWorker:
    """Serves calls within this process, with the methods of `Worker`.

    A step leaves the caller's number of threads, its random numbers and its modes of grad and
    autocast as they were, and none of them touches the step.

    threads   on which each op runs
    """

    def __init__(self, name: str, threads: int, served: Served) -> None:
        self.name, self.pid = name, os.getpid()
        self._threads, self._served = threads, served
        self._reply: object = None
        keep_freed_memory()

    def ask(self, method: str, *arguments: object, files: Sequence[int] = ()) -> Any:
        self.begin(method, *arguments, files=files)
        return self.receive()

    def begin(self, method: str, *arguments: Any, files: Sequence[int] = ()) -> None:
        if method == "use_threads":
            # Each call sets the threads, and puts the caller's back.
            (self._threads,) = arguments
            return
        self.answer(getattr(self._served, method), *arguments, *map(os.dup, files))
        self._served.pause()

    def post(self, method: str, *arguments: object, files: Sequence[int] = ()) -> None:
        self.begin(method, *arguments, files=files)
        self._reply = None

    def answer(self, function: Callable[..., object], *args: object) -> None:
        """Note what the function returns as the reply."""
        self._reply = self._shielded(function, *args)

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """The reply to the last call. Raises `ProcessError` if that raised."""
        reply, self._reply = self._reply, None
        if isinstance(reply, ProcessError):
            raise reply
        return reply

    def close(self, *, kill: bool = False) -> None:
        """Forget all that was loaded."""
        self._served.close()
        trim_memory()

    def _shielded(self, function: Callable[..., object], *args: object) -> object:
        """Call the function. Return its result, or the `ProcessError` for what it raises."""
        # Another thread may draw numbers meanwhile, which must not be drawn again for nothing.
        numbers = torch.default_generator.get_state() if self._served.draws else None
        # Most callers have no mode on, and each context takes a part of a small step's time.
        sets_modes = self._served.infers
        is_usual = (
            (sets_modes or (torch.is_grad_enabled() and not torch.is_inference_mode_enabled()))
            and not torch.is_autocast_enabled("cpu")
            and torch.get_num_threads() == self._threads
        )
        try:
            if is_usual:
                return function(*args)
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                op_threads(self._threads),
            ):
                return function(*args)
        except Exception as error:
            return ProcessError(self.name, traceback.format_exc(), line_of(error))
        finally:
            if numbers is not None:
                torch.default_generator.set_state(numbers)


DeviceWorker = Worker | LocalWorker


class Workers:
    """One pinned process per CPU device and one for all GPUs, each started when a plan first needs
    it. A context manager.

    devices   indices of those devices of the machine that this host has; all by default

    Raises `UsageError` or `MachineError` for devices that are not of the machine that we run on.
    """

    def __init__(self, machine: Machine, devices: Collection[int] | None = None) -> None:
        self.devices = tuple(range(len(machine.devices)) if devices is None else devices)
        for index in self.devices:
            if machine.devices[index].kind != "host":
                check_here(machine.devices[index])
        self.machine = machine
        self.closed = False
        self.is_local = is_this_process(machine)
        self._started: dict[int, DeviceWorker] = {}
        self._keys = 0
        self._program: object = None
        self._program_key = 0
        self._sent: dict[int, set[int]] = {}

    def start(self, devices: tuple[int, ...]) -> list[DeviceWorker]:
        """Start those of the devices' processes that do not run yet; return all of them, ready. Of
        the GPUs the first one's number stands for all."""
        self.check_open()
        try:
            fresh = [d for d in devices if d not in self._started]
            if fresh:
                build_native()
            for index in fresh:
                device = self.machine.devices[index]
                if self.is_local:
                    # Other programs are watched as in a device's own process. Beside one that
                    # computed, a step of SqueezeNet on two threads took 62 ms, and 8 without it.
                    served = ServedDevice(Spinning(device.cores, device.op_threads))
                    self._started[index] = LocalWorker(device.name, device.op_threads, served)
                elif device.torch_device:
                    self._started[index] = worker = launch(GPUS_ENTRY, name="GPUs")
                    worker.begin("make", cuda_maker())
                else:
                    threads = device.op_threads
                    self._started[index] = worker = launch(
                        ENTRY, cores=device.cores, threads=threads, name=device.name
                    )
                    worker.begin("make", threads)
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
        on_cores = [w for d, w in self._started.items() if self.machine.devices[d].cores]
        for worker in on_cores:
            worker.begin("use_threads", threads)
        for worker in on_cores:
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
        many threads, and on the same GPUs."""
        own, other = (
            [(d.name, d.cores, d.op_threads, d.torch_device) for d in each.devices]
            for each in (self.machine, machine)
        )
        return own == other

    def check_open(self) -> None:
        """Raise `RunError` if these workers were closed."""
        if self.closed:
            raise RunError("these workers are closed; make new ones with Workers(machine)")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the processes that were started."""
        return tuple(w.pid for w in self._started.values() if isinstance(w, Worker))

    def close(self, *, kill: bool = False) -> None:
        """End all processes. With `kill` they get no time to end by themselves."""
        self.closed = True
        for worker in self._started.values():
            worker.close(kill=kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(kill=error is not None)


def check_here(device: Device) -> None:
    """Raise `UsageError` unless the device is a set of cores that this process may use, or a GPU
    that is here."""
    if device.torch_device:
        check_gpu(device)
        return
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
