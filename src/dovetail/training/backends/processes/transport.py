"""Starts server and workers as processes of this machine, links them, and finds out who has died.

A message that cannot be sent is no error here: `wait` reports the process that has died.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from dovetail.errors import ProcessDiedError, ProcessError, UsageError
from dovetail.runtime.parcels import pack_parcel
from dovetail.runtime.processes import Worker, launch, ready
from dovetail.runtime.shared import Block
from dovetail.runtime.stopped import STOPPED_SECONDS
from dovetail.training.backends.contract import (
    Assignment,
    ServerPlan,
    Storage,
    Watcher,
    WorkerPlan,
    check_options,
)
from dovetail.training.backends.messages import (
    AskCopy,
    AskReport,
    Connect,
    Finished,
    RaisedError,
    Ready,
    ServerStart,
    WorkerStart,
    next_copy,
)
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.options import count as check_count
from dovetail.training.records import Outcome
from dovetail.training.supervisor import (
    CenterCopy,
    Gone,
    RunProgress,
    ServerEnded,
    ServerReport,
    Stop,
    Supervisor,
    Word,
    WorkerDied,
    WorkerFinished,
    WorkerRaised,
    temporary_storage,
)

SERVER = -1
"""The server's number among the processes, as in events."""
SERVER_ENTRY = "dovetail.training.backends.processes.server:serve"
WORKER_ENTRY = "dovetail.training.backends.processes.worker:serve"
"""The functions that the processes run: `launch` calls them with a channel."""
POLL_SECONDS = 0.1
"""A report of the server's rows is asked for every so many seconds. Messages that end a run are
heard at once."""
SILENCE_SECONDS = 60.0
"""A server that does not answer for so long counts as hung, and is killed."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Runs the assignment in processes of this machine; see `ProcessesOptions`.

    Without a storage, the server's state is kept in a temporary folder, so that the run still
    survives the server's death. Ctrl-C ends the run and returns what it has reached, marked as
    stopped. Pressed once more, it raises `KeyboardInterrupt`.
    Raises `ProcessError` with the first traceback when a worker raises and the policy does not
    count that as a death, and when the server raises; `NoWorkersError`, `ServerLostError`,
    `DivergedError`.
    """
    chosen = ProcessesOptions.of(options)
    with ExitStack() as stack:
        storage = assignment.storage
        if storage is None and chosen.log:
            storage = stack.enter_context(temporary_storage(assignment))
        transport = stack.enter_context(ProcessesTransport(assignment, chosen, storage))
        return Supervisor(assignment, watcher, transport, late=chosen.late).run()


@dataclass(frozen=True)
class ProcessesOptions:
    """How a run uses this machine.

    cores            sets of cores that workers are pinned to, in turn; (): all cores for each
    threads          threads of each worker
    server_threads   threads of the server process
    late             numbers of samples: at each, one more worker is started
    log              whether a run without a storage keeps its state in a temporary folder. False:
                     it keeps none, which saves writing every commit, but ends with its server
    """

    cores: Sequence[Sequence[int]] = ()
    threads: int = 1
    server_threads: int = 1
    late: Sequence[int] = ()
    log: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ProcessesOptions":
        """Raises `UsageError` for one that is not there."""
        check_options("processes", options, cls.__dataclass_fields__)
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("threads", "server_threads"):
            check_count(name, getattr(self, name))
        for name in ("cores", "late"):
            lists = getattr(self, name)
            if not isinstance(lists, Sequence) or isinstance(lists, str):
                raise UsageError(name, f"must be a list or a tuple, not {lists!r}")


@dataclass
class _WorkerProcess:
    """A worker's present process. `life`: how many processes had its number before."""

    process: Worker
    memory: WorkerMemory
    life: int = 0


class ProcessesTransport:
    """A server process and worker processes. A context manager, which ends all of them.

    origin   `time.perf_counter()` when the run began; None until the server has reported it
    is_up    whether the server can be linked to workers
    """

    name = "processes"
    interruptible = True

    def __init__(
        self, assignment: Assignment, options: ProcessesOptions, storage: Storage | None
    ) -> None:
        self.assignment, self.options, self.storage = assignment, options, storage
        self.server_restarts = assignment.policy.server_restarts if storage is not None else 0
        self.mercy_seconds = assignment.policy.lease_seconds
        self.origin: float | None = None
        self.is_up = False
        self.workers: dict[int, _WorkerProcess] = {}
        self.center = CenterMemory.create(assignment.job, assignment.theta)
        self._learner, self._learner_block = pack_parcel(assignment.learner)
        self._server: Worker | None = None
        self._listened: set[int] = set()  # processes whose end was not reported yet
        self._errors: dict[int, ProcessError | ProcessDiedError] = {}  # met while sending
        # What the server was asked for, and what it has reported
        self._asked_seconds = 0.0  # when a report was asked for; 0: none is awaited
        self._next_seconds = 0.0  # when to ask for the next one
        self._asked_copy: AskCopy | None = None
        self._done = self._complete = self._copied_final = False
        # A finished worker is reported to the supervisor only after the server has reported that it
        # left. Otherwise the run could end before that event was told.
        self._leaving: list[int] = []
        self._left: list[int] = []  # before the report that is awaited was asked for

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.process.close(kill=True)
            worker.memory.close()
        if self._server is not None:
            self._server.close(kill=True)
        self._learner_block.close()
        self.center.close()

    # What the supervisor asks for

    def start_server(self, died: str | None = None) -> None:
        self.is_up = False
        if self._server is not None:
            self._server.close(kill=True)
        self._server = launch(
            SERVER_ENTRY, threads=self.options.server_threads, name="parameter server"
        )
        self._listened.add(SERVER)
        plan = ServerPlan.of(self.assignment, self.storage)
        self._send(SERVER, ServerStart(plan, died, self.origin), self.center.block)

    def start_worker(self, worker: int) -> None:
        self.launch_worker(worker, WORKER_ENTRY)

    def launch_worker(self, worker: int, entry: str, *open_files: Any) -> None:
        """Starts a process for that number, in place of a dead one if there was one. `open_files`
        are sent after its blocks."""
        options, old = self.options, self.workers.get(worker)
        if old is not None:
            old.process.close(kill=True)
            old.memory.close()
        cores = options.cores[worker % len(options.cores)] if options.cores else ()
        # A worker that is stopped loses its lease first, and may go on while others do its work.
        patience_seconds = self.assignment.policy.lease_seconds + STOPPED_SECONDS
        process = launch(
            entry, cores=tuple(cores), threads=options.threads, name=f"worker {worker}",
            patience_seconds=patience_seconds,
        )  # fmt: skip
        life = 0 if old is None else old.life + 1
        new = _WorkerProcess(process, WorkerMemory.create(self.assignment.job), life)
        self.workers[worker] = new
        self._listened.add(worker)
        start = WorkerStart(WorkerPlan.of(self.assignment, worker, life), self._learner)
        blocks = new.memory.block, self.center.block, self._learner_block
        self._send(worker, start, *blocks, *open_files)
        if self.is_up:
            self._connect(worker)

    def kill_workers(self, workers: set[int]) -> None:
        for worker in workers:
            self.kill(worker)

    def tell(self, message: Gone | Stop) -> None:
        self._send(SERVER, message)

    def turn(self, progress: RunProgress) -> Iterator[Word]:
        if self.is_up:
            self._ask(progress)
        patience_seconds = POLL_SECONDS
        if self.is_up and not self._asked_seconds and not self._complete:
            report_seconds = self._next_seconds - time.perf_counter()
            evaluation_seconds = max(0.0, progress.due_seconds - self._seconds())
            patience_seconds = max(min(report_seconds, evaluation_seconds), 0.001)
        words = self.wait(patience_seconds)
        for number, word in words:
            if number == SERVER:
                yield from self._hear_server(word, progress)
            else:
                yield from self._hear_worker(number, word)
        asked_seconds = self._asked_seconds
        # If messages have just come, the server is not silent: this process itself may have been
        # busy with a long evaluation.
        if asked_seconds and not words and time.perf_counter() > asked_seconds + SILENCE_SECONDS:
            self._asked_seconds = 0.0
            self.kill(SERVER)

    def facts(self) -> dict[str, Any]:
        return {"origin": self.origin}  # of all seconds, by `time.perf_counter`

    # What is said

    def _seconds(self) -> float:
        return time.perf_counter() - (self.origin or time.perf_counter())

    def _ask(self, progress: RunProgress) -> None:
        """Asks for the next report, and for the copy that the next evaluation needs."""
        now = time.perf_counter()
        wants = self._leaving or not self._complete
        if wants and not self._asked_seconds and now >= self._next_seconds:
            self._asked_seconds = now
            self._left += self._leaving
            self._leaving.clear()
            self._send(SERVER, AskReport(*progress.known))
        copy = next_copy(progress, self._seconds(), self._done)
        if copy is not None and copy != self._asked_copy and not self._copied_final:
            self._asked_copy = copy
            self._send(SERVER, copy)

    def _hear_server(self, word: object, progress: RunProgress) -> Iterator[Word]:
        match word:
            case Ready(origin, up):
                self.origin = origin
                self._asked_copy, self._asked_seconds = None, 0.0
                self._done = self._complete = False
                yield up
                # Links follow only now, after the supervisor has told the server which workers will
                # not come back.
                self.is_up = True
                for worker in sorted(self._listened - {SERVER}):
                    self._connect(worker)
            case ServerReport():
                self._asked_seconds = 0.0
                yield word
                self._done = word.done
                more = not progress.has(word)
                self._complete = word.done and not more
                soon = more or self._leaving
                self._next_seconds = time.perf_counter() + (0.0 if soon else POLL_SECONDS)
                yield from self._tell_finished(self._left)
            case CenterCopy():
                self._asked_copy = None
                self._copied_final = word.final
                yield replace(word, theta=np.array(self.center.copy))
            case RaisedError():
                raise word.error
            case ProcessDiedError():
                self.is_up = False
                self._asked_seconds = self._next_seconds = 0.0
                self._asked_copy = None
                yield from self._tell_finished(self._left + self._leaving)
                yield ServerEnded(word.status)
            case ProcessError():
                raise word

    def _tell_finished(self, workers: list[int]) -> Iterator[Word]:
        for worker in workers:
            yield WorkerFinished(worker)
        self._left = [worker for worker in self._left if worker not in workers]
        self._leaving = [worker for worker in self._leaving if worker not in workers]

    def _hear_worker(self, worker: int, word: object) -> Iterator[Word]:
        match word:
            case Finished():
                self._listened.discard(worker)
                self.workers[worker].process.close()
                self._leaving.append(worker)
                self._next_seconds = 0.0
                if not self.is_up:
                    yield from self._tell_finished([worker])
            case ProcessDiedError():
                yield WorkerDied(worker, word.status)
            case ProcessError():
                yield WorkerRaised(worker, word)
                yield WorkerDied(worker, word.said)

    # The processes

    def _connect(self, worker: int) -> None:
        """Gives the worker and the server the ends of a new link."""
        assert self.origin is not None
        process = self.workers[worker]
        message = Connect(worker, self.origin, f"process {process.process.pid}")
        server_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end, worker_end:
            self._send(SERVER, message, server_end, process.memory.block)
            self._send(worker, message, worker_end)

    def kill(self, number: int) -> None:
        """Kills a process that does not react. `wait` reports it like any other death."""
        os.kill(self._process(number).pid, 9)

    def wait(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        """Waits for messages of processes and returns them as (number, message). A process's last
        message is the way it ended: a `ProcessError` or a `ProcessDiedError`."""
        words: list[tuple[int, Any]] = list(self._errors.items())
        self._errors.clear()
        ended = {number for number, _ in words}
        numbers = {id(self._process(n)): n for n in self._listened - ended}
        waiting = [self._process(n) for n in numbers.values()]
        for process in ready(waiting, 0.0 if words else timeout_seconds):
            number = numbers[id(process)]
            try:
                words.append((number, process.receive()))
            except (ProcessError, ProcessDiedError) as error:
                words.append((number, error))
        self._listened -= {n for n, word in words if isinstance(word, Exception)}
        return words

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
                is_block = isinstance(file, Block)
                process.send_descriptor(file.descriptor if is_block else file.fileno())
        except (ProcessError, ProcessDiedError) as error:
            if number in self._listened:
                self._errors.setdefault(number, error)
