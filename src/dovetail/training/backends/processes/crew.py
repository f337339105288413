"""The processes of a run, their memory and their links."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from dovetail.errors import ProcessDiedError, ProcessError, UsageError
from dovetail.runtime.processes import Worker, launch, ready
from dovetail.runtime.shared import Block
from dovetail.training.backends.contract import Assignment, Storage
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.backends.processes.messages import Connect, ServerPlan, WorkerPlan
from dovetail.training.backends.processes.parcels import pack
from dovetail.training.options import count as check_count

SERVER = -1
"""Its number among the processes, as in events."""
SERVER_ENTRY = "dovetail.training.backends.processes.serving:serve"
WORKER_ENTRY = "dovetail.training.backends.processes.connecting:serve"
"""The functions that the processes run."""


@dataclass(frozen=True)
class Options:
    """cores      that workers are pinned to, in turn; () for all
    threads       of each worker
    server_threads   that apply shards of the center at once
    late          one more worker is started each time the center has seen so many samples
    log           without a folder of its own, a run keeps its state in a temporary one; False: it
                  keeps none, which saves a write of every commit, and ends with its server
    """

    cores: Sequence[Sequence[int]] = ()
    threads: int = 1
    server_threads: int = 1
    late: Sequence[int] = ()
    log: bool = True

    def __post_init__(self) -> None:
        for name in ("threads", "server_threads"):
            check_count(name, getattr(self, name))
        for name in ("cores", "late"):
            found = getattr(self, name)
            if not isinstance(found, Sequence) or isinstance(found, str):
                raise UsageError(name, f"must be a list or a tuple, not {found!r}")


@dataclass
class _Member:
    """A worker's present process. `life`: how many it had before."""

    process: Worker
    memory: WorkerMemory
    life: int = 0


@dataclass
class Crew:
    """Starts, links and ends processes. A context manager: it leaves none behind.

    What cannot be sent is not an error here: `wait` tells of whoever has died.
    """

    assignment: Assignment
    options: Options
    storage: Storage | None
    temporary: bool
    workers: dict[int, _Member] = field(default_factory=dict)
    origin: float | None = None
    is_up: bool = False

    def __post_init__(self) -> None:
        job = self.assignment.job
        self.center = CenterMemory.create(job, self.assignment.theta)
        self._learner, self._learner_block = pack(self.assignment.learner)
        self._server: Worker | None = None
        self._listened: set[int] = set()  # those whose end was not told yet
        self._errors: dict[int, ProcessError | ProcessDiedError] = {}  # a death is told once

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.workers.values():
            member.process.close(kill=True)
            member.memory.close()
        if self._server is not None:
            self._server.close(kill=True)
        self._learner_block.close()
        self.center.close()

    def start_server(self, restart: str | None = None) -> None:
        """A new server, in place of a dead one if there was one; `restart`: how it died."""
        assignment = self.assignment
        self.is_up = False
        if self._server is not None:
            self._server.close(kill=True)
        self._server = launch(
            SERVER_ENTRY, threads=self.options.server_threads, name="parameter server"
        )
        plan = ServerPlan(
            job=assignment.job,
            rule=assignment.rule.name,
            options=dict(assignment.rule.options),
            guard=assignment.guard,
            storage=self.storage,
            restart=restart,
            shards=assignment.shards,
            order=assignment.order,
            lease_seconds=assignment.policy.lease_seconds,
            origin=self.origin,
            temporary=self.temporary,
        )
        self._listened.add(SERVER)
        self._send(SERVER, plan, self.center.block)

    def start_worker(self, worker: int) -> None:
        """A new process for that number, in place of a dead one if there was one."""
        assignment, options = self.assignment, self.options
        old = self.workers.get(worker)
        if old is not None:
            old.process.close(kill=True)
            old.memory.close()
        cores = options.cores[worker % len(options.cores)] if options.cores else ()
        process = launch(
            WORKER_ENTRY,
            cores=tuple(cores),
            threads=options.threads,
            name=f"worker {worker}",
        )
        life = 0 if old is None else old.life + 1
        member = _Member(process, WorkerMemory.create(assignment.job), life)
        self.workers[worker] = member
        self._listened.add(worker)
        plan = WorkerPlan(
            job=assignment.job,
            rule=assignment.rule.name,
            options=dict(assignment.rule.options),
            worker=worker,
            life=life,
            wire=assignment.wire,
            learner=self._learner,
        )
        self._send(worker, plan, member.memory.block, self.center.block, self._learner_block)
        if self.is_up:
            self.connect(worker)

    def connect(self, worker: int) -> None:
        """Give the worker and the server the ends of a new link."""
        assert self.origin is not None
        member = self.workers[worker]
        message = Connect(worker, self.origin, f"process {member.process.pid}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._send(SERVER, message, ours, member.memory.block)
            self._send(worker, message, theirs)

    def tell_server(self, message: object) -> None:
        self._send(SERVER, message)

    def retire(self, worker: int) -> None:
        """The worker has finished."""
        self._listened.discard(worker)
        self.workers[worker].process.close()

    def kill(self, number: int) -> None:
        """End a process that does not react; `wait` tells of it as of any other death."""
        os.kill(self._process(number).pid, 9)

    def wait(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        """What processes have said, (number, message): their last word is how they ended, a
        `ProcessError` or a `ProcessDiedError`."""
        said: list[tuple[int, Any]] = list(self._errors.items())
        self._errors.clear()
        ended = {number for number, _ in said}
        numbers = {id(self._process(n)): n for n in self._listened - ended}
        waiting = [self._process(n) for n in numbers.values()]
        for process in ready(waiting, 0.0 if said else timeout_seconds):
            number = numbers[id(process)]
            try:
                said.append((number, process.receive()))
            except (ProcessError, ProcessDiedError) as error:
                said.append((number, error))
        self._listened -= {n for n, word in said if isinstance(word, Exception)}
        return said

    def _process(self, number: int) -> Worker:
        if number == SERVER:
            assert self._server is not None
            return self._server
        return self.workers[number].process

    def _send(self, number: int, message: object, *open_files: Any) -> None:
        process = self._process(number)
        try:
            process.send(message)
            for file in open_files:
                process.send_descriptor(_descriptor(file))
        except (ProcessError, ProcessDiedError) as error:
            if number in self._listened:
                self._errors.setdefault(number, error)


def _descriptor(file: Block | socket.socket) -> int:
    return file.descriptor if isinstance(file, Block) else file.fileno()
