"""Forks worker processes from one process that has imported what they need.

    this process ── request, descriptors ──► fork server ── fork ──► worker
                 ◄── pid; later its status ──     │ has imported torch, and has one thread

Importing torch takes each new process one to two seconds of a core; a fork takes some milliseconds.
A fork is safe from a process without threads that has not used OpenMP: the fork server does nothing
but import and fork. The environment that libraries read when they are imported, above all the
number of threads, is that of the server's start, so it serves workers of one thread.

The server dies with the thread that started it, and workers with the server. So only the main
thread starts one and uses it. Commands that start many workers do so first, so that the server
imports while they do. Programs that use this package have no server unless they start one.

`multiprocessing` has a fork server too. Its workers run the user's `__main__` again, have the
environment and the standard error of the server's start, and outlive a parent that is killed. loky
starts an interpreter for each worker, which imports torch itself.
"""

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dovetail.runtime.stopped import watched

SWITCH = "DOVETAIL_FORK"
"""A variable of the environment; "0" has every worker start by itself."""
for_workers: dict[str, str] = {}
"""What the environment of this process's workers has besides."""
_MOST_BYTES = 2**20
"""A request is at most so long. The environment is a part of it."""
_LENGTH_BYTES = 8
"""A request follows its length in so many bytes, as `fork_server` has it."""


class ForkedProcess:
    """A worker that was forked by the server, with what `Worker` needs of `subprocess.Popen`.

    returncode   as of `Popen`; None: it was not waited for yet
    """

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self._server = server
        self.returncode: int | None = None
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
            self._close = weakref.finalize(self, os.close, self._descriptor)
            # Others may still end the process then.
            self._close.atexit = False
        except ProcessLookupError:  # it has ended, and the server has noticed
            self._descriptor = None

    def kill(self) -> None:
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its status, once it has ended. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if self._descriptor is not None:
                limit = None if timeout is None else 1000 * timeout
                poll = select.poll()
                poll.register(self._descriptor, select.POLLIN)
                if not poll.poll(limit):
                    raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
                self._close()
                self._descriptor = None
            self.returncode = self._server.status_of(self.pid)
        return self.returncode


class ForkServer:
    """This process's end of its fork server, which runs as long as it does.

    modules   what the server imports before its first fork
    """

    most_threads = 1
    """It serves workers of at most so many threads: libraries have read the environment of one."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = launch_server(other.fileno(), modules)
        self._socket = own
        # Else Python warns of a process that runs on.
        atexit.register(self.close)

    def fork(
        self, entry: str, cores: tuple[int, ...], descriptor: int, threads: int = 1
    ) -> ForkedProcess | None:
        """A worker that runs `entry` with the channel's descriptor; None if the server is gone."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:  # it was removed
            folder = ""
        request = {
            "entry": entry,
            "cores": list(cores) or sorted(os.sched_getaffinity(0)),
            "paths": sys.path,
            "environment": environment_of(threads),
            "folder": folder,
        }
        content = json.dumps(request).encode()
        if len(content) > _MOST_BYTES:
            return None
        with self._lock, watched(self._process.pid, self._process.kill):
            try:
                # A packet holds less than a request may need, so a request follows its length.
                self._socket.sendmsg(
                    [len(content).to_bytes(_LENGTH_BYTES, "little")],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (descriptor, 2)))],
                )
                for start in range(0, len(content), 2**15):
                    self._socket.send(content[start : start + 2**15])
                pid = None
                while pid is None and (message := self._message()) is not None:
                    pid = message.get("forked")
            except OSError:
                return None
        return None if pid is None else ForkedProcess(self, pid)

    def status_of(self, pid: int) -> int:
        """The status of a worker that has ended; of one whose server is gone, that of a kill."""
        with self._lock, watched(self._process.pid, self._process.kill):
            while pid not in self._statuses:
                if self._message() is None:
                    return -signal.SIGKILL
            return self._statuses.pop(pid)

    def _message(self) -> dict[str, int] | None:
        """The server's next message, of which statuses are kept; None if it is gone."""
        try:
            content = self._socket.recv(4096)
        except OSError:  # it died before it read all, or was closed
            return None
        if not content:
            return None
        message: dict[str, int] = json.loads(content)
        if "ended" in message:
            self._statuses[message["ended"]] = message["status"]
        return message

    def close(self) -> None:
        """End the server, and with it the workers that run."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.kill()
        self._process.wait()


def launch_server(descriptor: int, modules: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the process that forks, which has this descriptor of its end of the socket."""
    return subprocess.Popen(
        [
            sys.executable, "-P", str(Path(__file__).with_name("fork_server.py")),
            str(descriptor), str(os.getpid()), json.dumps(sys.path), json.dumps(list(modules)),
        ],
        pass_fds=(descriptor,), env=environment_of(1),
        stdin=subprocess.DEVNULL, stdout=2, process_group=0,
    )  # fmt: skip


_server: ForkServer | None = None


def start_fork_server(modules: Sequence[str] = ()) -> None:
    """Start the fork server, from which this process's workers come from now on. Does nothing where
    there can be none, in another thread than the main one, or if it runs.

    modules   what it imports beforehand
    """
    global _server
    may = (
        os.environ.get(SWITCH) != "0"
        and threading.current_thread() is threading.main_thread()
        and hasattr(os, "pidfd_open")
    )
    if may and (_server is None or _server.owner != os.getpid()):
        _server = ForkServer(modules)


def fork_server(threads: int = 1) -> ForkServer | None:
    """The fork server for workers of so many threads, if it was started and may be used in this
    thread."""
    if _server is None or _server.owner != os.getpid() or threads > _server.most_threads:
        return None
    return _server if threading.current_thread() is threading.main_thread() else None


def end_fork_server() -> None:
    """End the fork server, and the workers that it has forked."""
    global _server
    if _server is not None and _server.owner == os.getpid():
        _server.close()
    _server = None


def environment_of(threads: int) -> dict[str, str]:
    """This process's environment for workers of so many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict(os.environ) | dict.fromkeys(names, str(threads)) | for_workers
