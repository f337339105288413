"""Supervises a run on any backend: replaces what has died, and decides when and how the run ends.

    Supervisor ── start_server, start_worker, kill_workers, tell ──► Transport: simulated, threads,
               ◄──────────────── turn(progress): words ────────────            processes, ranks, ray

    until the run has ended, for each word of the transport's next turn:

        ServerUp, ServerReport, CenterCopy ─► rows, events, evaluations ─► the caller's watcher
        ServerEnded ────────────────────────► another server, or ServerLostError
        WorkerRaised, WorkerDied ───────────► another worker, or one fewer, or the end by an error
        WorkerFinished, RunEnded ───────────► the outcome

A transport starts the server and the workers, reaches them, and finds out who has died. It decides
nothing: the supervisor alone decides what a failure means, by the run's `FailurePolicy`.

The supervisor and the watcher's evaluations run in the caller's thread. Server and workers go on by
themselves meanwhile. A worker that dies during an evaluation is replaced after it.

The supervisor does not make each commit count exactly once. The ledger's leases and numbers do
that (`ledger`), together with the journal, which is written before anything changes (`server`).
"""

import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from dovetail.errors import DivergedError, NoWorkersError, ProcessError, ServerLostError
from dovetail.interrupts import raises_interrupts
from dovetail.training.backends.contract import Assignment, Storage, Watcher
from dovetail.training.records import Evaluation, Event, Outcome, Refusal, Row, Vector
from dovetail.training.server import Server

PATIENCE_SECONDS = 2.0
"""Workers may take this long to finish after the last sample, before they are killed."""
LOG_BYTES = 1 << 28
"""The log of a run without a folder of its own may grow to this between two snapshots."""


# Words: what a transport tells the supervisor


@dataclass(frozen=True)
class ServerUp:
    """A server is ready to be told things: the first one, or another in place of one that died.

    rows, events   how many of each it has; fewer than before if it kept no log
    done           whether it has seen every sample
    """

    rows: int
    events: int
    done: bool


@dataclass(frozen=True)
class ServerReport:
    """What is new at the server.

    first     the server's index of the first of `rows`, and of the first of `events`
    total     how many of each the server has; a report may leave some to the next one
    samples   samples that were committed so far
    silent    workers that lost their lease because they gave no sign of life, and are not back
    done      every sample was seen, or the run was stopped
    """

    first: tuple[int, int]
    total: tuple[int, int]
    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()
    samples: int = 0
    silent: tuple[int, ...] = ()
    done: bool = False


@dataclass(frozen=True)
class CenterCopy:
    """The center as it was at one moment.

    theta   [size] a copy that belongs to the receiver; from a server process empty, since the copy
            lies in the center's block
    news    returns a report of what has happened up to its call, from transports that can report at
            any time. The supervisor passes it to the watcher between the evaluation and
            `should_stop`.
    final   nothing will be committed any more
    """

    theta: Vector
    clock: int
    samples: int
    seconds: float
    news: Callable[[], ServerReport] | None = None
    final: bool = False


@dataclass(frozen=True)
class ServerEnded:
    """The server is gone. `for_good`: no other may take its place."""

    status: str
    for_good: bool = False


@dataclass(frozen=True)
class WorkerRaised:
    """A worker's learner raised an exception. If the run goes on, `WorkerDied` follows."""

    worker: int
    error: ProcessError


@dataclass(frozen=True)
class WorkerDied:
    """A worker has died, for whatever reason."""

    worker: int
    status: str


@dataclass(frozen=True)
class WorkerFinished:
    """A worker has ended because no sample was left."""

    worker: int


@dataclass(frozen=True)
class Interrupted:
    """Ctrl-C was pressed elsewhere than in the supervisor's process."""


@dataclass(frozen=True)
class RunEnded:
    """Server and workers have ended by themselves. `copy` is the center that they leave."""

    copy: CenterCopy


Word = (
    ServerUp
    | ServerReport
    | CenterCopy
    | ServerEnded
    | WorkerRaised
    | WorkerDied
    | WorkerFinished
    | Interrupted
    | RunEnded
)


# Messages: what the supervisor tells the server through a transport


@dataclass(frozen=True)
class Gone:
    """The worker has ended, so its samples go to others. `for_good`: nobody takes its place."""

    worker: int
    detail: str
    for_good: bool = False


@dataclass(frozen=True)
class Stop:
    """The run ends early, for the reason `detail`: the server takes nothing more."""

    detail: str


class Transport(Protocol):
    """Starts a server and workers, carries their messages, and finds out who has died.

    name              name of the backend
    server_restarts   how many servers may be started after the first
    mercy_seconds     workers are killed once all have been silent for so long
    interruptible     whether Ctrl-C ends the run early and in order, not by `KeyboardInterrupt`
    """

    name: str
    server_restarts: int
    mercy_seconds: float
    interruptible: bool

    def start_server(self, died: str | None = None) -> None:
        """Starts the server, or another in place of one that died with the status `died`. The word
        `ServerUp` follows."""
        ...

    def start_worker(self, worker: int) -> None:
        """Starts a worker of that number, in place of a dead one if there was one."""
        ...

    def kill_workers(self, workers: set[int]) -> None:
        """Ends workers that hang. The words `WorkerDied` follow. Raises `NoWorkersError` if the
        transport cannot end a worker."""
        ...

    def tell(self, message: Gone | Stop) -> None:
        """Sends the message to the server, if there is one."""
        ...

    def turn(self, progress: "RunProgress") -> Iterator[Word]:
        """Waits a while for something to happen, and yields what has happened. The supervisor acts
        on each word before it asks for the next, and may change `progress` by that."""
        ...

    def facts(self) -> dict[str, Any]:
        """Entries that this transport adds to the outcome's `meta`."""
        ...


# Progress: what the watcher has been told


@dataclass
class RunProgress:
    """What has happened so far, of which the watcher is told once, and when to evaluate next.

    due_samples, due_seconds   when the next evaluation is due: whole multiples of the watcher's
                               interval, even if evaluations in between were skipped
    old_rows                   rows that the run had when it was resumed
    stops                      the watcher wants the run to end, because of a commit
    """

    watcher: Watcher
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    due_samples: float = math.inf
    due_seconds: float = math.inf
    old_rows: int = 0
    stops: bool = False

    @classmethod
    def after(cls, watcher: Watcher, server: Server, seconds: float) -> Self:
        """The progress of a resumed run, whose watcher is not told of events before."""
        progress = cls(watcher, events=list(server.events), old_rows=len(server.rows))
        progress._add_rows(list(server.rows))
        progress.look_ahead(server.samples, seconds)
        return progress

    def look_ahead(self, samples: int = 0, seconds: float = 0.0) -> None:
        """Sets when to evaluate next, given that so many samples and seconds have passed."""
        watcher = self.watcher
        if watcher.evaluate is None:
            return
        if watcher.every_samples:
            self.due_samples = (samples // watcher.every_samples + 1) * watcher.every_samples
        if watcher.every_seconds:
            # Virtual time is a sum of floats, so a whole multiple of the interval may come out
            # slightly too small.
            passed = math.floor(seconds / watcher.every_seconds + 1e-9)
            self.due_seconds = (passed + 1) * watcher.every_seconds

    def wanted_samples(self, seconds: float) -> int | None:
        """The number of samples at which the center is to be copied for the next evaluation; 0: it
        is due now; None: it depends on time alone."""
        if seconds >= self.due_seconds:
            return 0
        return None if math.isinf(self.due_samples) else int(self.due_samples)

    def is_due(self, samples: int, seconds: float) -> bool:
        return samples >= self.due_samples or seconds >= self.due_seconds

    @property
    def known(self) -> tuple[int, int]:
        """How many rows and events the watcher has been told of."""
        return len(self.rows), len(self.events)

    def has(self, report: ServerReport) -> bool:
        """Whether the watcher has been told of all rows and events that the report counts."""
        return len(self.rows) >= report.total[0] and len(self.events) >= report.total[1]

    def add(self, report: ServerReport) -> tuple[Event, ...]:
        """Tells the watcher what is new in the report, and returns the new events."""
        # A report may overlap an earlier one, so the entries that are known are left out.
        events = report.events[max(0, len(self.events) - report.first[1]) :]
        for event in events:
            self.events.append(event)
            if self.watcher.event is not None:
                self.watcher.event(event)
        self._add_rows(list(report.rows[max(0, len(self.rows) - report.first[0]) :]))
        return events

    def _add_rows(self, rows: list[Row]) -> None:
        old = max(0, self.old_rows - len(self.rows))
        self.rows.extend(rows)
        if rows[:old] and self.watcher.resumed is not None:
            self.watcher.resumed(rows[:old])
        if rows[old:] and self.watcher.rows is not None:
            self.stops |= self.watcher.rows(rows[old:]) is True

    def forget_beyond(self, rows: int, events: int) -> None:
        """Drops the rows and events that a server without a log has lost."""
        if rows < len(self.rows) and self.watcher.forgotten is not None:
            self.watcher.forgotten(rows)
        del self.rows[rows:], self.events[events:]

    def evaluate(self, copy: CenterCopy) -> None:
        assert self.watcher.evaluate is not None
        self.look_ahead(copy.samples, copy.seconds)
        figures = self.watcher.evaluate(copy.theta, copy.clock, copy.samples, copy.seconds)
        self.evaluations.append(Evaluation(copy.clock, copy.samples, copy.seconds, figures))

    def should_stop(self) -> bool:
        """Asks the watcher whether the run should stop; called after an evaluation."""
        if self.watcher.should_stop is None:
            return False
        return self.watcher.should_stop([each.figures for each in self.evaluations])


class Supervisor:
    """Runs an assignment over a transport. `run` may be called once.

    workers   numbers of the workers that are started at the beginning; None: all of the job's
    late      numbers of samples: at each, one more worker is started
    progress  the progress of a resumed run
    """

    def __init__(
        self,
        assignment: Assignment,
        watcher: Watcher,
        transport: Transport,
        *,
        workers: Iterable[int] | None = None,
        late: Iterable[int] = (),
        progress: RunProgress | None = None,
    ) -> None:
        self.assignment, self.policy, self.transport = assignment, assignment.policy, transport
        self.progress = progress or RunProgress(watcher)
        if progress is None:
            self.progress.look_ahead()
        self.first_workers = range(assignment.job.workers) if workers is None else workers
        self.late = sorted(late)
        self.started: set[int] = set()
        self.finished: set[int] = set()
        self.lost: set[int] = set()  # and nobody took their place
        self.killed: set[int] = set()  # as hung, and reported silent since
        self.server_deaths = self.worker_deaths = self.errors = self.refusals = 0
        self.first_error: ProcessError | None = None
        self.up = self.has_been_up = False  # a server can be told things
        self.interrupted = False  # by a word of the transport
        self.stopped = ""  # why
        self.done = False  # every sample was seen, or the run was stopped
        self.complete = False  # and all rows and events of it are here
        self.patience_ends = 0.0  # when finishing workers are not waited for any more
        self.silent_since = time.monotonic()
        self.final: CenterCopy | None = None
        self.ended = False

    def run(self) -> Outcome:
        self.transport.start_server()
        for worker in self.first_workers:
            self._start(worker)
        with interrupts(self.transport.interruptible) as pressed:
            while not self.ended:
                if self.final is not None and self.complete:
                    impatient = self.stopped or time.monotonic() > self.patience_ends
                    if impatient or not self._working():
                        break
                for word in self.transport.turn(self.progress):
                    self._hear(word)
                if (pressed or self.interrupted) and not self.stopped:
                    if not self.up:  # nothing was reached yet that could be returned
                        raise KeyboardInterrupt
                    self._stop("interrupted")
        assignment, final, progress = self.assignment, self.final, self.progress
        assert final is not None
        return Outcome(
            theta=final.theta,
            clock=final.clock,
            samples=final.samples,
            seconds=final.seconds,
            rows=tuple(progress.rows),
            events=tuple(progress.events),
            evaluations=tuple(progress.evaluations),
            stopped=bool(self.stopped),
            meta={
                "backend": self.transport.name,
                "rule": assignment.rule.name,
                "options": dict(assignment.rule.options),
                "job": asdict(assignment.job),
                "server_restarts": self.server_deaths,
                "worker_deaths": self.worker_deaths,
            }
            | self.transport.facts(),
        )

    def _working(self) -> set[int]:
        return self.started - self.finished - self.lost

    def _start(self, worker: int) -> None:
        self.started.add(worker)
        self.transport.start_worker(worker)

    def _stop(self, detail: str) -> None:
        self.stopped = detail
        self.transport.tell(Stop(detail))

    def _hear(self, word: Word) -> None:
        match word:
            case ServerUp():
                self._server_is_up(word)
            case ServerReport():
                self._take_report(word)
            case CenterCopy():
                if word.final:
                    self.final = word
                if self.progress.is_due(word.samples, word.seconds):
                    self.progress.evaluate(word)
                    if word.news is not None:
                        self._take_report(word.news())
                    if self.progress.should_stop():
                        self._stop_early()
            case ServerEnded():
                self.server_deaths += 1
                self.up = False
                # With the final center and all rows here, the server is not needed any more.
                if self.final is None or not self.complete:
                    restarts = self.transport.server_restarts
                    if word.for_good or self.server_deaths > restarts:
                        raise ServerLostError(restarts, word.status) from self.first_error
                    self.transport.start_server(word.status)
            case WorkerRaised():
                # The first error is raised once there are more than the policy treats as deaths.
                self.errors += 1
                self.first_error = self.first_error or word.error
                if self.errors > self.policy.worker_errors:
                    raise self.first_error
            case WorkerDied():
                self._worker_died(word)
            case WorkerFinished(worker):
                self.finished.add(worker)
            case Interrupted():
                self.interrupted = True
            case RunEnded(copy):
                self.final, self.ended = copy, True

    # The server

    def _server_is_up(self, up: ServerUp) -> None:
        """Tells a new server what its log may lack: which workers are gone, and that the run is to
        end."""
        storage = self.assignment.storage
        # All that the first server of a resumed run has comes from before.
        if not self.has_been_up and storage is not None and storage.resume:
            self.progress.old_rows = up.rows
        self.up = self.has_been_up = True
        self.progress.forget_beyond(up.rows, up.events)
        for worker in sorted(self.lost):
            self.transport.tell(Gone(worker, "lost", for_good=True))
        if self.stopped:
            self.transport.tell(Stop(self.stopped))
        elif not up.done:
            # Without a log the server has lost the work of workers that had finished, so samples
            # are left again, and these workers are started anew.
            self.done = False
            for worker in sorted(self.finished):
                self.finished.discard(worker)
                self._start(worker)

    def _take_report(self, report: ServerReport) -> None:
        progress = self.progress
        for event in progress.add(report):
            # A lost lease is no sign of divergence; any other reason of a refusal may be one.
            if event.kind == "refused" and event.detail != Refusal.LEASE.value:
                self.refusals += 1
                if self.refusals > self.policy.refusals:
                    raise DivergedError(
                        self.assignment.rule.name,
                        f"{self.refusals} commits were refused, the last one as {event.detail}",
                    )
        self.complete = report.done and progress.has(report)
        while self.late and report.samples >= self.late[0]:
            self.late.pop(0)
            self._start(max(self.started) + 1)
        if report.done and not self.done:
            self.done = True
            self.patience_ends = time.monotonic() + PATIENCE_SECONDS
        # Silent workers are killed if no other worker is left to do their work. A hung worker among
        # others is left alone: its samples have gone to them, and it may wake up. Each worker is
        # killed once. A report that was made before the replacement joined still lists the number
        # as silent, and must not kill the replacement.
        silent = set(report.silent)
        self.killed &= silent
        now, working = time.monotonic(), self._working()
        if self.done or not working or not working <= silent:
            self.silent_since = now
        elif now - self.silent_since >= self.transport.mercy_seconds and working - self.killed:
            self.silent_since = now
            victims = working - self.killed
            self.killed |= victims
            self.transport.kill_workers(victims)
        if progress.stops:
            self._stop_early()

    def _stop_early(self) -> None:
        """Ends the run because the watcher wants it, unless it ends by itself."""
        if not self.done and not self.stopped:
            self._stop("by the watcher")

    # The workers

    def _worker_died(self, word: WorkerDied) -> None:
        """Starts the worker anew, or goes on without it, or raises, as the policy says."""
        worker, policy = word.worker, self.policy
        if self.done or self.stopped:  # nobody's work is missed any more
            self.lost.add(worker)
            return
        self.worker_deaths += 1
        if self.worker_deaths <= policy.worker_restarts:
            self.transport.tell(Gone(worker, word.status))
            self._start(worker)
            return
        self.lost.add(worker)
        losses = self.worker_deaths - policy.worker_restarts
        if losses > policy.worker_losses or not self._working():
            raise NoWorkersError(self.worker_deaths, word.status) from self.first_error
        self.transport.tell(Gone(worker, word.status, for_good=True))


@contextmanager
def interrupts(collects: bool) -> Iterator[list[int]]:
    """Collects Ctrl-C in the list, so that it does not interrupt a message; the second one raises.

    It does nothing if `collects` is false, if the caller has a handler of its own, or if this is
    not the main thread, which alone may set a handler.
    """
    pressed: list[int] = []

    def press(number: int, _frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    main = threading.current_thread() is threading.main_thread()
    if not (collects and main and raises_interrupts()):
        yield pressed
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def temporary_storage(assignment: Assignment) -> Iterator[Storage]:
    """A storage in a temporary folder, which is removed after the run. With it, the run survives
    the death of its server."""
    folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
    try:
        commits = LOG_BYTES // max(assignment.theta.nbytes, 1)
        yield Storage(folder, snapshot_commits=min(max(commits, 4), 1000))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
