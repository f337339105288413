"""Starts worker processes that are pinned to cores, never orphaned, and report their failures.

    with launch("dovetail.costs.measured:MeasuredCores", cores=(0,), threads=1) as worker:
        worker.ask("make", 1)            │ served = MeasuredCores(1)
        rates = worker.ask("rates")      │ served.rates(), and so on until the channel is closed

One object lives in such a process, and its public methods are called from here: `ask` waits for
what the method returns, `post` wants no reply, and `begin` and `receive` are the halves of `ask`,
for calls to several workers at once. An error that a method raises ends the process, and is raised
here by the next call that talks with it. Where the two sides rather exchange messages, the entry is
a function of the process's `Channel`, and `send` and `receive` are its counterparts here.

Workers are started by `subprocess`: forking this process would break OpenMP, and `multiprocessing`
would run the user's script again. Those of one thread are forked by a server that has imported
torch, where one was started (`runtime.forking`). The kernel kills a worker when the *thread* that
launched it ends, so launch from a thread that stays. Linux only.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Self

from dovetail.errors import ProcessDiedError, ProcessError
from dovetail.runtime import stopped
from dovetail.runtime.forking import ForkedProcess, end_fork_server, environment_of, fork_server


@dataclass(frozen=True)
class Failure:
    """The message that a worker sends instead of a reply when its entry function raised.

    said   the exception in one line
    """

    traceback: str
    said: str = ""


@dataclass(frozen=True)
class Exiting:
    """The message that a worker sends before the user's code ends it by `os._exit`.

    location   the line that does so
    """

    location: str


class Channel:
    """Sends and receives objects and file descriptors, in order.

    Both ends are our own processes, so pickles are safe. They are plain pickles: `Connection.send`
    would pass tensors by torch's own sharing, whose files outlive a killed process.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: object) -> None:
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """The next message. Raises `EOFError` once the other end is closed."""
        try:
            content = self._connection.recv_bytes()
        # If the other end closed before it read all of our messages, the connection is reset.
        except ConnectionError as error:
            raise EOFError from error
        return pickle.loads(content)

    def poll(self, timeout_seconds: float) -> bool:
        """True if `receive` would not block."""
        return self._connection.poll(timeout_seconds)

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other process a copy of an open file; it calls `receive_descriptor`."""
        send_handle(self._connection, descriptor, None)

    def receive_descriptor(self) -> int:
        return recv_handle(self._connection)

    def close(self) -> None:
        self._connection.close()


GRACE_SECONDS = 5.0
"""After its channel was closed, a worker has this long to end by itself before it is killed."""
_SPIN_VARIABLES = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
_SPINS = 10_000
"""An OpenMP thread looks this often for its next piece of work before it sleeps: about 0.1 ms.

OpenMP's default is 30 times as often. If another program takes one of the cores, the threads then
wait for each other through whole time slices: ops of 40 us took 8 ms. Sleeping at once would cost
every small op some 90 us (see `benchmarks/spinning`).
"""


class Worker:
    """The parent's handle of a worker process; a context manager that ends it. The process also
    ends once nobody holds the handle.

    Each of its methods that talks with the process raises `ProcessError` with the worker's
    traceback, or `ProcessDiedError`. A worker that somebody stops for `patience_seconds` is killed
    (`runtime.stopped`).
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes] | ForkedProcess,
        channel: Channel,
        patience_seconds: float = stopped.STOPPED_SECONDS,
    ) -> None:
        self.name = name
        self._process = process
        self._channel = channel
        self._patience_seconds = patience_seconds
        self._was_stopped = False
        stopped.watch(process.pid, self._end_stopped, patience_seconds)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    def ask(self, method: str, *arguments: object, files: Sequence[int] = ()) -> Any:
        """Call a method of the object in the process, and return what it returns. See `begin`."""
        self.begin(method, *arguments, files=files)
        return self.receive()

    def post(self, method: str, *arguments: object, files: Sequence[int] = ()) -> None:
        """Call a method of the object in the process, without a reply. See `begin`."""
        self.begin(method, *arguments, files=files, replies=False)

    def begin(
        self, method: str, *arguments: object, files: Sequence[int] = (), replies: bool = True
    ) -> None:
        """Call a method of the object in the process; `receive` returns what it returns.

        The first call is "make", which makes the object: its arguments are those of the class, and
        the reply is None. `files` are descriptors of open files. The method gets copies of them
        after its other arguments, and owns these.
        """
        self.send((method, arguments, len(files), replies))
        for descriptor in files:
            self.send_descriptor(descriptor)

    def send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except ConnectionError:
            raise self._explain_failure() from None

    def send_descriptor(self, descriptor: int) -> None:
        try:
            self._channel.send_descriptor(descriptor)
        except ConnectionError:
            raise self._explain_failure() from None

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """The worker's next reply or message. Raises `TimeoutError` after `timeout_seconds`."""
        location = ""
        try:
            if timeout_seconds is not None and not self._channel.poll(timeout_seconds):
                raise TimeoutError(f"process {self.name}: no reply in {timeout_seconds} s")
            message = self._channel.receive()
            if isinstance(message, Exiting):
                location = message.location
                message = self._channel.receive()
        except EOFError:
            raise self._explain_death(location) from None
        if isinstance(message, Failure):
            raise ProcessError(self.name, message.traceback, message.said)
        return message

    def close(self, *, kill: bool = False) -> None:
        """End the process by closing its channel. It is killed after a grace period, or at once."""
        stopped.unwatch(self.pid)
        self._channel.close()
        if kill:
            self._process.kill()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(kill=error is not None)

    def _end_stopped(self) -> None:
        self._was_stopped = True
        self._process.kill()

    def _explain_failure(self) -> ProcessError | ProcessDiedError:
        """Why nothing can be sent: the failure that the worker reported last, or how it ended."""
        try:
            while True:
                self.receive()
        except (ProcessError, ProcessDiedError) as error:
            return error

    def _explain_death(self, location: str = "") -> ProcessDiedError:
        """How the process has ended.

        location   the line of the user's own code that has ended it; "" if none is known to
        """
        stopped.unwatch(self.pid)
        try:
            status = self._process.wait(GRACE_SECONDS)
        # The worker closed its channel but lives on.
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._was_stopped:
            return ProcessDiedError(self.name, stopped.describe_stop(self._patience_seconds))
        where = f" at {location}" if location else ""
        return ProcessDiedError(self.name, describe_status(status) + where)


def launch(
    entry: str,
    *,
    cores: tuple[int, ...] = (),
    threads: int = 1,
    name: str = "",
    spins_briefly: bool = True,
    patience_seconds: float = stopped.STOPPED_SECONDS,
) -> Worker:
    """Start a process with an object of a class, "package.module:Class", whose methods are then
    called; or one that runs a function, "package.module:function", with the process's `Channel`.

    Returns at once; the worker imports what it needs meanwhile. `cores` are those that it may run
    on, () for all. `threads` is the number that OpenMP and the BLAS libraries are told. Where
    `spins_briefly` is False, OpenMP's threads wait for work as OpenMP itself has it. The worker is
    killed once somebody has stopped it for `patience_seconds`.
    """
    parent_end, child_end = socket.socketpair()
    with child_end:
        server = fork_server(threads)
        if server is not None:
            forked = server.fork(entry, cores, child_end.fileno(), threads)
            if forked is not None:
                channel = Channel(parent_end.detach())
                return Worker(name or entry, forked, channel, patience_seconds)
            end_fork_server()
        environment = environment_of(threads)
        # The user's own settings of spinning stand.
        if spins_briefly and threads > 1 and not environment.keys() & _SPIN_VARIABLES:
            environment["GOMP_SPINCOUNT"] = str(_SPINS)
        process = subprocess.Popen(
            [
                # -P keeps the folder of child.py off sys.path, where it would hide other modules.
                sys.executable,
                "-P",
                str(Path(__file__).with_name("child.py")),
                str(child_end.fileno()),
                str(os.getpid()),
                ",".join(map(str, cores)),
                entry,
                json.dumps(sys.path),
            ],
            pass_fds=(child_end.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            # Workers print to standard error, because standard output is the parent's alone. A
            # process group of their own keeps the terminal's Ctrl-C from them.
            stdout=2,
            process_group=0,
        )
    return Worker(name or entry, process, Channel(parent_end.detach()), patience_seconds)


def serve_calls(channel: Channel, make: Callable[..., object]) -> None:
    """Answer calls until the other end of the channel is closed, which raises `EOFError`.

    The first call, "make", makes the object. The others are of its public methods. If it has a
    method `pause`, this is called whenever the process begins to wait for the next call, and so
    after the reply, which it does not hold up.
    """
    methods: dict[str, Callable[..., object]] = {"make": make}
    pause: Callable[[], object] | None = None
    while True:
        method, arguments, files, replies = channel.receive()
        descriptors = [channel.receive_descriptor() for _ in range(files)]
        reply = methods[method](*arguments, *descriptors)
        if method == "make":
            served, reply = reply, None
            public = [name for name in dir(type(served)) if not name.startswith("_")]
            # Properties are looked up in the class, and so not computed.
            methods = {
                name: getattr(served, name)
                for name in public
                if callable(getattr(type(served), name))
            }
            pause = methods.get("pause")
        if replies:
            channel.send(reply)
        # They may be large, and the next call may take long to come.
        del arguments, reply
        if pause is not None:
            pause()


def ready(workers: Iterable[Worker], timeout_seconds: float | None = None) -> list[Worker]:
    """Block until some worker has a message or has died; return those workers."""
    by_descriptor = {worker.fileno(): worker for worker in workers}
    return [
        by_descriptor[d] for d in wait(list(by_descriptor), timeout_seconds) if isinstance(d, int)
    ]


def describe_status(status: int) -> str:
    """A return code of `subprocess` in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
