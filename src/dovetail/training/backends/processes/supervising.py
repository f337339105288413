"""The caller's side: starts the processes, restarts what dies, tells the watcher.

    while not ended:   wait for a word of server or workers ─► policy ─► rows, events, evaluations

Everything happens in the calling thread, evaluations too; meanwhile server and workers go on by
themselves, and what has died waits for its restart until the evaluation is over.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from dovetail.errors import (
    DivergedError,
    NoWorkersError,
    ProcessDiedError,
    ProcessError,
    ServerLostError,
    UsageError,
)
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.backends.processes.crew import SERVER, Crew, Options
from dovetail.training.backends.processes.messages import (
    AskCopy,
    AskReport,
    Copied,
    Finished,
    Gone,
    Raised,
    Ready,
    Report,
    Stop,
)
from dovetail.training.backends.processes.watching import Watch
from dovetail.training.backends.survival import temporary_storage
from dovetail.training.records import Event, Outcome, Refusal, Vector

POLL_SECONDS = 0.1
"""Between two looks at the server's rows; what ends a run is heard at once."""
PATIENCE_SECONDS = 2.0
"""For workers to finish after the last sample, before they are killed."""
SILENCE_SECONDS = 60.0
"""A server that does not answer for so long is hung."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Run the assignment in processes of this machine; see `Options`.

    Without a storage the server's state is kept in a temporary folder, so that the run survives the
    server's death all the same. Ctrl-C ends the run and returns what it has reached, marked as
    stopped; pressed once more it raises `KeyboardInterrupt`.
    Raises `ProcessError` with the first traceback when a worker raises and the policy does not
    count that as a death, and when the server raises; `NoWorkersError`, `ServerLostError`,
    `DivergedError`.
    """
    unknown = sorted(set(options) - set(Options.__dataclass_fields__))
    if unknown:
        raise UsageError(unknown[0], "the processes backend has no such option")
    chosen = Options(**options)
    with ExitStack() as stack:
        storage = assignment.storage
        temporary = storage is None and chosen.log
        if temporary:
            storage = stack.enter_context(temporary_storage(assignment))
        crew = Crew(assignment, chosen, storage, temporary)
        return _Supervisor(assignment, watcher, stack.enter_context(crew)).run()


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C instead of raising it amid a message; the second one raises. Not where the
    caller has a handler of its own, or another thread than the main one runs us."""
    pressed: list[int] = []

    def press(number: int, _frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Supervisor:
    def __init__(self, assignment: Assignment, watcher: Watcher, crew: Crew) -> None:
        self.assignment, self.policy, self.crew = assignment, assignment.policy, crew
        self.watch = Watch(watcher)
        self.finished: set[int] = set()
        self.lost: set[int] = set()
        self.late = sorted(crew.options.late)
        self.server_deaths = self.deaths = self.errors = self.refusals = 0
        self.first: ProcessError | None = None
        self.stopped = ""  # why
        self.done = self.complete = False  # all samples seen; all rows here
        self.owed = False  # a report since the last worker has left
        self.patience = 0.0  # until when finishing workers are waited for
        self.asked_rows = 0.0  # when; 0: no answer is awaited
        self.next_rows = 0.0
        self.hung_since = time.perf_counter()
        self.asked_copy: AskCopy | None = None
        self.final: Copied | None = None
        self.theta: Vector | None = None

    def run(self) -> Outcome:
        self.crew.start_server()
        for worker in range(self.assignment.job.workers):
            self.crew.start_worker(worker)
        with interrupts() as pressed:
            while not self._has_ended():
                self._ask()
                self._hear(self.crew.wait(self._patience_seconds()))
                if pressed and not self.stopped:
                    if not self.crew.is_up:
                        raise KeyboardInterrupt
                    self._stop("interrupted")
        return self._outcome()

    def _hear(self, words: list[tuple[int, Any]]) -> None:
        for number, word in words:
            if number == SERVER:
                self._hear_server(word)
            else:
                self._hear_worker(number, word)
        hung = self.asked_rows and time.perf_counter() > self.asked_rows + SILENCE_SECONDS
        if hung and not words:
            self.asked_rows = 0.0
            self.crew.kill(SERVER)

    def _has_ended(self) -> bool:
        if self.final is None or not self.complete:
            return False
        working = self.crew.workers.keys() - self.finished - self.lost
        if self.stopped or time.perf_counter() > self.patience:
            return True
        return not working and not self.owed

    def _patience_seconds(self) -> float:
        if not self.crew.is_up:
            return POLL_SECONDS
        if self.asked_rows or self.complete:
            return POLL_SECONDS
        due = min(self.next_rows - time.perf_counter(), self.watch.seconds_left(self._seconds()))
        return max(due, 0.001)

    def _seconds(self) -> float:
        return time.perf_counter() - (self.crew.origin or time.perf_counter())

    # -- questions to the server

    def _ask(self) -> None:
        if not self.crew.is_up:
            return
        now = time.perf_counter()
        wants = self.owed or not self.complete
        if wants and not self.asked_rows and now >= self.next_rows:
            self.asked_rows, self.owed = now, False
            self.crew.tell_server(AskReport(len(self.watch.rows), len(self.watch.events)))
        copy = self.watch.wants(self._seconds())
        if self.done:
            copy = AskCopy(0, final=True)
        if copy is not None and copy != self.asked_copy and self.final is None:
            self.asked_copy = copy
            self.crew.tell_server(copy)

    def _stop(self, detail: str) -> None:
        self.stopped = detail
        self.crew.tell_server(Stop(detail))

    # -- the server's words

    def _hear_server(self, word: object) -> None:
        match word:
            case Ready():
                self._server_is_up(word)
            case Report():
                self._reported(word)
            case Copied():
                self._copied(word)
            case Raised():
                raise word.error()
            case ProcessDiedError():
                self._server_died(word.status)
            case ProcessError():
                raise word

    def _server_is_up(self, ready: Ready) -> None:
        self.crew.origin, self.crew.is_up = ready.origin, True
        del self.watch.rows[ready.rows :]  # lost with the server, if no log was kept
        del self.watch.events[ready.events :]
        self.asked_copy, self.asked_rows = None, 0.0
        for worker in self.lost:
            self.crew.tell_server(Gone(worker, "lost", for_good=True))
        for worker in self.crew.workers.keys() - self.finished - self.lost:
            self.crew.connect(worker)
        if self.stopped:
            self.crew.tell_server(Stop(self.stopped))
        elif not ready.done:  # without a log it has lost what those did who had finished
            self.done = False
            for worker in sorted(self.finished):
                self.finished.discard(worker)
                self.crew.start_worker(worker)

    def _reported(self, report: Report) -> None:
        self.asked_rows = 0.0
        rows, events = self.watch.rows, self.watch.events
        for event in report.events[max(0, len(events) - report.first[1]) :]:
            self._happened(event)
        self.watch.add_rows(report.rows[max(0, len(rows) - report.first[0]) :])
        more = len(rows) < report.total[0] or len(events) < report.total[1]
        self.complete = report.done and not more
        self.next_rows = time.perf_counter() + (0.0 if more else POLL_SECONDS)
        while self.late and report.samples >= self.late[0]:
            self.late.pop(0)
            self.crew.start_worker(max(self.crew.workers) + 1)
        if report.done and not self.done:
            self.done = True
            self.patience = time.perf_counter() + PATIENCE_SECONDS
        self._wake(set(report.silent))

    def _wake(self, silent: set[int]) -> None:
        """Kill those that are hung where nobody is left to do their work, and stays so."""
        now = time.perf_counter()
        working = self.crew.workers.keys() - self.finished - self.lost
        if self.done or not working or not working <= silent:
            self.hung_since = now
        elif now - self.hung_since > self.policy.lease_seconds:
            self.hung_since = now
            for worker in working:
                self.crew.kill(worker)

    def _happened(self, event: Event) -> None:
        self.watch.add_event(event)
        if event.kind != "refused" or event.detail == Refusal.LEASE.value:
            return
        self.refusals += 1
        if self.refusals > self.policy.refusals:
            raise DivergedError(
                self.assignment.rule.name,
                f"{self.refusals} commits were refused, the last one as {event.detail}",
            )

    def _copied(self, copied: Copied) -> None:
        self.asked_copy = None
        theta = self.crew.center.copy
        if copied.final:
            self.final, self.theta = copied, np.array(theta)
        if self.watch.evaluate(copied, theta) and not self.done and not self.stopped:
            self._stop("by the watcher")

    def _server_died(self, status: str) -> None:
        self.server_deaths += 1
        self.crew.is_up = False
        if self.final is not None and self.complete:  # it has said all there is to say
            self.owed = False
            return
        restarts = self.policy.server_restarts if self.crew.storage is not None else 0
        if self.server_deaths > restarts:
            raise ServerLostError(restarts, status) from self.first
        self.asked_rows = self.next_rows = 0.0
        self.asked_copy = None
        self.crew.start_server(restart=status)

    # -- the workers' words

    def _hear_worker(self, worker: int, word: object) -> None:
        match word:
            case Finished():
                self.finished.add(worker)
                self.crew.retire(worker)
                self.owed, self.next_rows = self.crew.is_up, 0.0
            case ProcessDiedError():
                self._worker_died(worker, word.status)
            case ProcessError():
                self.errors += 1
                self.first = self.first or word
                if self.errors > self.policy.worker_errors:
                    raise self.first
                self._worker_died(worker, word.traceback.strip().splitlines()[-1])

    def _worker_died(self, worker: int, status: str) -> None:
        """Start it anew, or do without it, as the policy allows."""
        if self.done or self.stopped:
            self.lost.add(worker)
            return
        self.deaths += 1
        if self.deaths <= self.policy.worker_restarts:
            self.crew.tell_server(Gone(worker, status))
            self.crew.start_worker(worker)
            return
        self.lost.add(worker)
        others = self.crew.workers.keys() - self.lost - self.finished
        if self.deaths - self.policy.worker_restarts > self.policy.worker_losses or not others:
            raise NoWorkersError(self.deaths, status) from self.first
        self.crew.tell_server(Gone(worker, status, for_good=True))

    def _outcome(self) -> Outcome:
        assert self.final is not None
        assert self.theta is not None
        assignment = self.assignment
        return Outcome(
            theta=self.theta,
            clock=self.final.clock,
            samples=self.final.samples,
            seconds=self.final.seconds,
            rows=tuple(self.watch.rows),
            events=tuple(self.watch.events),
            evaluations=tuple(self.watch.evaluations),
            stopped=bool(self.stopped),
            meta={
                "backend": "processes",
                "rule": assignment.rule.name,
                "options": dict(assignment.rule.options),
                "job": asdict(assignment.job),
                "origin": self.crew.origin,  # of all seconds, by `time.perf_counter`
                "server_restarts": self.server_deaths,
                "worker_deaths": self.deaths,
            },
        )
