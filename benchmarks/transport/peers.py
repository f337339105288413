"""Ways to bring a commit to a server and the center back, each with a server process of its own.

Each is a context manager; `exchange()` commits one vector, waits until it was added to the center
and the center has come back, and returns the seconds that took on the worker's side.
"""

import contextlib
import copy
import multiprocessing
import os
import pickle
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
SPAWN = multiprocessing.get_context("spawn")
LENGTH = struct.Struct("<Q")
WAIT_SECONDS = 600.0


class Peer(Protocol):
    def __call__(self) -> float:
        """Seconds of one exchange."""
        ...


def vector(size: int) -> Vector:
    return np.full(size, 1e-6, np.float32)


@contextlib.contextmanager
def limit(size: int, _count: int) -> Iterator[Peer]:
    """One in-place add and two copies, in one process: no transport can do with less."""
    theta, pushed, inbox, outbox = (vector(size) for _ in range(4))

    def exchange() -> float:
        began = time.perf_counter()
        np.copyto(inbox, pushed)
        np.add(theta, inbox, out=theta)
        np.copyto(outbox, theta)
        return time.perf_counter() - began

    yield exchange


@contextlib.contextmanager
def add(size: int, _count: int) -> Iterator[Peer]:
    """The in-place add alone."""
    theta, pushed = vector(size), vector(size)

    def exchange() -> float:
        began = time.perf_counter()
        np.add(theta, pushed, out=theta)
        return time.perf_counter() - began

    yield exchange


# ---- ours: a run of the real backend, whose learner waits for a word before each step


class Paced:
    """A learner that computes nothing, one step for each word it hears, and says how long the
    worker waited for the answer to its commit."""

    def __init__(self, size: int, address: str) -> None:
        from dovetail.training.backends.processes.worker import WorkerLink

        self._update = vector(size)
        self._line = Client(address, "AF_UNIX")
        line, ask = self._line, WorkerLink.ask

        def timed(link: Any, asked: Any) -> Any:
            began = time.perf_counter()
            told = ask(link, asked)
            if asked.turn.commit is not None:
                line.send(time.perf_counter() - began)
            return told

        WorkerLink.ask = timed  # type: ignore[method-assign]

    def gradient(self, _theta: Vector, indices: NDArray[np.int64], _epoch: int) -> Any:
        from dovetail.training import Gradient

        self._line.recv()
        return Gradient(self._update, 0.0, len(indices))

    def update(self, _theta: Vector, _gradient: Vector, _epoch: float) -> Vector:
        return self._update

    def rate(self, _epoch: float) -> float:
        return 1.0


class MakePaced:
    """Worker index -> its learner."""

    def __init__(self, size: int, address: str) -> None:
        self._size, self._address = size, address

    def __call__(self, _worker: int) -> Paced:
        return Paced(self._size, self._address)


@contextlib.contextmanager
def shared_memory(
    size: int, count: int, rule: str = "downpour", log: bool = False
) -> Iterator[Peer]:
    """Our `processes` backend, one worker. `count` exchanges must be made."""
    from dovetail.training import Assignment, FailurePolicy, Job, Storage, Watcher, make_rule
    from dovetail.training.backends.processes import run

    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder, "line"))
        assignment = Assignment(
            Job("transport", size, samples=count, epochs=1, batch=1),
            make_rule(rule),
            vector(size),
            MakePaced(size, address),
            policy=FailurePolicy(lease_seconds=WAIT_SECONDS),
            storage=Storage(Path(folder, "run"), log=log, snapshot_commits=8 if log else 10**9),
        )
        failures: list[BaseException] = []
        with Listener(address, "AF_UNIX") as listener:
            thread = threading.Thread(target=_run, args=(run, assignment, Watcher(), failures))
            thread.start()
            line = _accept(listener, failures)

            def exchange() -> float:
                line.send(None)
                while not line.poll(1.0):
                    if failures:
                        raise failures[0]
                seconds: float = line.recv()
                return seconds

            yield exchange
            thread.join()
        if failures:
            raise failures[0]


def _run(run: Any, assignment: Any, watcher: Any, failures: list[BaseException]) -> None:
    try:
        run(assignment, watcher)
    except BaseException as error:
        failures.append(error)


def _accept(listener: Listener, failures: list[BaseException]) -> Connection:
    lines: list[Connection] = []
    waiting = threading.Thread(target=lambda: lines.append(listener.accept()), daemon=True)
    waiting.start()
    while not lines:
        waiting.join(0.1)
        if failures:
            raise failures[0]
    return lines[0]


# ---- the old software's protocol, from its description


def _send_pickled(connection: socket.socket, data: object) -> None:
    content = pickle.dumps(data, -1)
    connection.sendall(str(len(content)).zfill(20).encode())
    connection.sendall(content)


def _receive_all(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += connection.recv(size - len(content))
    return content


def _receive_pickled(connection: socket.socket) -> Any:
    size = int(_receive_all(connection, 20))
    return pickle.loads(_receive_all(connection, size))


def serve_pickled(port: Connection, size: int) -> None:
    """Commits are added under a lock, pulls answered with the whole center."""
    center, lock = [vector(size)], threading.Lock()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while action := connection.recv(1):
                if action == b"c":
                    data = _receive_pickled(connection)
                    with lock:
                        center = [a + b for a, b in zip(center, data["residual"], strict=True)]
                else:
                    with lock:
                        copied = copy.deepcopy(center)
                    _send_pickled(connection, copied)


@contextlib.contextmanager
def pickle_over_tcp(size: int, _count: int) -> Iterator[Peer]:
    """dist-keras' way: pickles over a TCP socket, received by `bytes +=`."""
    pushed = vector(size)
    with _server(serve_pickled, size) as connection:

        def exchange() -> float:
            began = time.perf_counter()
            connection.sendall(b"c")
            _send_pickled(connection, {"worker_id": 0, "residual": [pushed]})
            connection.sendall(b"p")
            _receive_pickled(connection)
            return time.perf_counter() - began

        yield exchange


# ---- the plainest protocol over TCP


def _receive_into(connection: socket.socket, target: Vector) -> bool:
    head = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        return False
    view, done = memoryview(target).cast("B"), 0
    assert LENGTH.unpack(head)[0] == len(view)
    while done < len(view):
        done += connection.recv_into(view[done:])
    return True


def _send_raw(connection: socket.socket, content: Vector) -> None:
    connection.sendall(LENGTH.pack(content.nbytes))
    connection.sendall(memoryview(content).cast("B"))


def serve_raw(port: Connection, size: int) -> None:
    """Every vector is added to the center, which is sent back."""
    center, inbox = vector(size), vector(size)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while _receive_into(connection, inbox):
                np.add(center, inbox, out=center)
                _send_raw(connection, center)


@contextlib.contextmanager
def raw_tcp(size: int, _count: int) -> Iterator[Peer]:
    """A length, then the bytes, received in place."""
    pushed, pulled = vector(size), vector(size)
    with _server(serve_raw, size) as connection:

        def exchange() -> float:
            began = time.perf_counter()
            _send_raw(connection, pushed)
            _receive_into(connection, pulled)
            return time.perf_counter() - began

        yield exchange


@contextlib.contextmanager
def _server(target: Any, size: int) -> Iterator[socket.socket]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, size), daemon=True)
    process.start()
    try:
        with socket.create_connection(("127.0.0.1", ours.recv())) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
        process.join(WAIT_SECONDS)
    finally:
        process.kill()


# ---- gloo


def _join_group(store: str, rank: int) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    return distributed


def serve_gloo(store: str, size: int, count: int) -> None:
    import torch

    distributed = _join_group(store, 1)
    center, inbox = torch.from_numpy(vector(size)), torch.from_numpy(vector(size))
    for _ in range(count):
        distributed.recv(inbox, 0)
        center += inbox
        distributed.send(center, 0)
    distributed.destroy_process_group()


@contextlib.contextmanager
def gloo(size: int, count: int) -> Iterator[Peer]:
    """torch.distributed's send and recv over gloo. `count` exchanges must be made."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        process = SPAWN.Process(target=serve_gloo, args=(store, size, count), daemon=True)
        process.start()
        distributed = _join_group(store, 0)
        pushed, pulled = torch.from_numpy(vector(size)), torch.from_numpy(vector(size))

        def exchange() -> float:
            began = time.perf_counter()
            distributed.send(pushed, 1)
            distributed.recv(pulled, 1)
            return time.perf_counter() - began

        try:
            yield exchange
            process.join(WAIT_SECONDS)
            distributed.destroy_process_group()
        finally:
            process.kill()


# ---- Ray


@contextlib.contextmanager
def ray_actor(size: int, _count: int) -> Iterator[Peer]:
    """A call of an actor; vectors go through the object store, in place where Ray can."""
    import ray

    store_bytes = max(8 * 4 * size, 100 << 20)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=store_bytes,
        log_to_driver=False,
    )

    class Server:
        def __init__(self) -> None:
            self.center = vector(size)

        def commit(self, pushed: Vector) -> Vector:
            self.center += pushed
            return self.center

    actor = ray.remote(Server).remote()
    pushed = vector(size)

    def exchange() -> float:
        began = time.perf_counter()
        ray.get(actor.commit.remote(pushed))
        return time.perf_counter() - began

    try:
        yield exchange
    finally:
        ray.shutdown()
