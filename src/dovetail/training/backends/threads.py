"""Runs workers as threads around the server, in one process and in real time.

    worker thread   work ── Ask ──► Serving.take ─► answers, each to its worker's mailbox
                        ◄── Told ── mailbox
    caller          sleeps until there is news: rows, an evaluation, a worker lost, the end

This backend is for tests, and for learners that release the interpreter's lock. Every wait is for a
message or a condition; nothing is polled. Commits are read where they lie, and only pulls are
copied.
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from dovetail.errors import NoWorkersError, ProcessError, UsageError
from dovetail.runtime.user_code import line_of
from dovetail.training.backends.contract import Assignment, ServerPlan, Watcher, check_options
from dovetail.training.liveness import LOOKS, on_alive
from dovetail.training.records import Outcome
from dovetail.training.server import Delivery
from dovetail.training.serving import Serving, WorkerPort, open_server
from dovetail.training.supervisor import (
    CenterCopy,
    Gone,
    RunEnded,
    RunProgress,
    Stop,
    Supervisor,
    Word,
    WorkerDied,
    WorkerFinished,
    WorkerRaised,
)
from dovetail.training.worker import Stepped, Told, work


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Runs the assignment to its end. There are no options.

    The first `worker_errors` exceptions in workers count as deaths. A worker that hangs loses its
    samples to the others, but its thread cannot be ended. Raises `ProcessError` with the first
    traceback, `NoWorkersError`, `DivergedError`. An exception of the watcher ends the run too.
    """
    check_options("threads", options, ())
    if assignment.wire != "none":
        raise UsageError("wire", "threads share their memory: there is nothing to encode")
    with closing(ThreadsTransport(assignment)) as transport:
        progress = RunProgress.after(watcher, transport.server, transport.server.seconds())
        return Supervisor(assignment, watcher, transport, progress=progress).run()


@dataclass
class _WorkerThread:
    """One life of a worker, with its messages.

    mailbox   answers to the worker's turns; None: the run is over
    ended     the worker has ended and the supervisor has been told
    """

    index: int
    thread: threading.Thread | None = None
    mailbox: SimpleQueue[Told | None] = field(default_factory=SimpleQueue)
    ended: bool = False


class ThreadsTransport:
    """The server in this process, and a thread for each worker."""

    name = "threads"
    server_restarts = 0
    mercy_seconds = 0.0
    interruptible = False

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        start_seconds = time.perf_counter()
        self.theta = np.array(assignment.theta)  # the center itself
        plan = ServerPlan.of(assignment, assignment.storage)
        self.server = open_server(
            plan, self.theta, lambda: time.perf_counter() - start_seconds, restarted=False
        )
        if plan.storage is not None and plan.storage.resume:
            self.server.dismiss_late()
        lease_seconds = assignment.policy.lease_seconds
        self.serving = Serving(self.server, lease_seconds, doubt_seconds=lease_seconds / LOOKS)
        self.life = self.serving.life
        self.workers: dict[int, _WorkerThread] = {}
        self.ends: deque[WorkerRaised | WorkerDied | WorkerFinished] = deque()  # not told yet
        self.news = threading.Condition()
        self.is_news = False
        self.over = threading.Event()
        self.error: BaseException | None = None  # the first that no policy allows

    # In the caller's thread

    def start_server(self, died: str | None = None) -> None:
        """Does nothing: the server exists from the beginning."""

    def start_worker(self, worker: int) -> None:
        outbox = None if self.assignment.rule.lock_free else np.zeros_like(self.theta)
        life = self.workers[worker] = _WorkerThread(worker)
        center = self.theta if outbox is None else outbox

        def send(delivery: Delivery) -> bool:
            life.mailbox.put(Told(delivery.reply, center if delivery.pulled else None))
            return True

        self.serving.connect(worker, WorkerPort(send, outbox=outbox))
        life.thread = threading.Thread(
            target=self._live, args=(life,), name=f"worker {worker}", daemon=True
        )
        life.thread.start()

    def kill_workers(self, workers: set[int]) -> None:
        """Raises, because a thread cannot be ended from outside."""
        raise NoWorkersError(len(workers), f"hung for {self.life.lease_seconds:g} s")

    def tell(self, message: Gone | Stop) -> None:
        """Stops the server. `Gone` needs nothing: `turn` evicts a dead worker before it says so."""
        if isinstance(message, Stop):
            self.serving.stop()

    def turn(self, progress: RunProgress) -> Iterator[Word]:
        # Until there is news, a lease runs out, or an evaluation is due.
        seconds = min(self.life.due_seconds(), progress.due_seconds) - self.server.seconds()
        limited = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        with self.news:
            self.news.wait_for(lambda: self.is_news, None if math.isinf(seconds) else limited)
            self.is_news = False
        if self.error is not None:
            raise self.error
        while self.ends:
            end = self.ends.popleft()
            self.workers[end.worker].ended = not isinstance(end, WorkerRaised)
            if isinstance(end, WorkerDied):
                # The eviction comes only now, after the supervisor has accepted `WorkerRaised`. An
                # exception that ends the run leaves no trace in the journal, so the run can be
                # resumed as if it had not happened.
                self.serving.evict(end.worker, surely=True)
            yield end
        self.serving.look_for_life()
        # This must be read before the last report: once no worker goes on, nothing follows, so the
        # report is complete.
        goes_on = any(not w.ended and w.index not in self.life.silent for w in self._lives())
        yield self.serving.report(progress.known)
        seconds = self.server.seconds()
        # After a stop there is no further evaluation, though workers may have passed its mark
        # before they heard of the stop.
        if progress.is_due(self.server.samples, seconds) and not self.server.stopped:
            copy = CenterCopy(*self.server.copy(), seconds)
            yield replace(copy, news=lambda: self.serving.report(progress.known))
        if not goes_on:
            yield RunEnded(CenterCopy(*self.server.copy(), self.server.seconds(), final=True))

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Ends all threads, whatever happened, except one that hangs in the learner's code."""
        self.over.set()
        for worker in self._lives():
            worker.mailbox.put(None)
        for worker in self._lives():
            if worker.thread is not None and worker.index not in self.life.silent:
                left_seconds = self.life.left_seconds(worker.index, self.server.seconds())
                worker.thread.join(min(max(0.0, left_seconds), threading.TIMEOUT_MAX))
        self.server.close()

    def _lives(self) -> list[_WorkerThread]:
        return list(self.workers.values())

    # In any thread

    def _tell_caller(self) -> None:
        with self.news:
            self.is_news = True
            self.news.notify()

    # In the worker's thread

    def _live(self, worker: _WorkerThread) -> None:
        """Runs a worker's life, from a new learner to the last lease or to an exception."""
        try:
            try:
                self._train(worker)
            except Exception as error:
                name = f"worker {worker.index}"
                raised = ProcessError(name, traceback.format_exc(), line_of(error))
                raised.__cause__ = error
                self.life.stop(worker.index)
                self.ends.append(WorkerRaised(worker.index, raised))
                self.ends.append(WorkerDied(worker.index, f"by {line_of(error)}"))
            else:
                if not self.over.is_set():
                    self.serving.leave(worker.index)
                self.ends.append(WorkerFinished(worker.index))
        except BaseException as error:  # whatever it is, the run must not go on without it
            self.error = self.error or error
        self.life.stop(worker.index)
        self._tell_caller()

    def _train(self, worker: _WorkerThread) -> None:
        assignment, index = self.assignment, worker.index

        def hear() -> None:
            self.life.silent.discard(index)
            self.life.start(index, self.server.seconds())

        on_alive(hear)
        hear()
        learner = assignment.learner(index)
        sequence = self.serving.join(index)
        steps = work(
            assignment.job,
            assignment.rule,
            learner,
            index,
            sequence=sequence,
            clock=self.server.seconds,
        )
        answer: Told | None = None
        while True:
            try:
                event = steps.send(answer)
            except StopIteration:
                return
            answer = None
            hear()
            if self.over.is_set():
                return
            if isinstance(event, Stepped):
                continue
            self.life.stop(index)
            self.serving.take(event.turn, vector=event.vector)
            self._tell_caller()
            answer = worker.mailbox.get()
            if answer is None:
                return
            hear()
