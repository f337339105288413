"""Workers as threads around the server, in one process and in real time.

    worker thread   work ── Ask ──► Server.take ──► answers, to whose mailboxes they belong
                        ◄── Told ── mailbox
    caller          sleeps until there is news: rows, an evaluation, a worker lost, the end

For tests, and for learners that release the interpreter. Every wait is for a message or a
condition; nothing is polled. Vectors are handed over where they lie: nothing is copied but pulls.
"""

import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from dovetail.errors import DivergedError, NoWorkersError, ProcessError, UsageError
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.backends.watching import Watching
from dovetail.training.liveness import on_alive
from dovetail.training.records import Outcome, Refusal, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.worker import Stepped, Told, work

LOOKS = 8
"""Within so many parts of `lease_seconds` a worker that is doubted must give a sign of life."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Run the assignment to its end; there are no options.

    Of the policy: an exception in a worker counts as its death, `worker_errors` times; a worker
    that is hung loses its samples to the others, but its thread cannot be ended. Raises
    `ProcessError` with the first traceback, `NoWorkersError`, `DivergedError`; whatever a watcher
    raises ends the run too.
    """
    if options:
        raise UsageError(min(options), "the threads backend has no such option")
    if assignment.wire != "none":
        raise UsageError("wire", "threads share their memory: there is nothing to encode")
    return _Run(assignment, watcher).run()


@dataclass
class _Worker:
    """A worker's thread, and what passes between it and the others.

    heard_seconds     of its last sign of life; inf while it waits for an answer
    doubted_seconds   when it had given none for longer than the policy allows; inf: it has
    hung              nor any soon after: the whole process may have stood still before
    """

    index: int
    outbox: Vector | None
    thread: threading.Thread | None = None
    mailbox: SimpleQueue[Told | None] = field(default_factory=SimpleQueue)  # None: the run is over
    heard_seconds: float = math.inf
    doubted_seconds: float = math.inf
    hung: bool = False
    ended: bool = False


class _Run:
    def __init__(self, assignment: Assignment, watcher: Watcher) -> None:
        self.assignment = assignment
        self.lease_seconds = assignment.policy.lease_seconds
        self.start_seconds = time.perf_counter()
        self.theta = np.array(assignment.theta)  # the center itself
        storage = assignment.storage
        resumes = storage is not None and storage.resume
        open_server: Callable[..., Server] = Server.resume if resumes else Server
        self.server = open_server(
            assignment.job,
            assignment.rule,
            self.theta,
            guard=assignment.guard,
            storage=storage,
            shards=assignment.shards or 1,
            order=assignment.order,
            clock=self.seconds,
        )
        if resumes:
            self.server.dismiss_late()
        self.watch = Watching(watcher, self.server, self.seconds())
        live = assignment.rule.lock_free
        self.workers = [
            _Worker(index, None if live else np.zeros_like(self.theta))
            for index in range(assignment.job.workers)
        ]
        self.news = threading.Condition()
        self.is_news = False
        self.over = threading.Event()
        self.error: BaseException | None = None  # the first
        self.deaths = 0

    def seconds(self) -> float:
        """Since the run's start."""
        return time.perf_counter() - self.start_seconds

    def run(self) -> Outcome:
        try:
            for worker in self.workers:
                name = f"worker {worker.index}"
                worker.thread = threading.Thread(
                    target=self._live, args=(worker,), name=name, daemon=True
                )
                worker.thread.start()
            while self._goes_on():
                with self.news:
                    self.news.wait_for(lambda: self.is_news, self._seconds_left())
                    self.is_news = False
                self._supervise()
            if self.error is not None:
                raise self.error
            self._supervise()
            if not (self.server.done or self.server.stopped):
                hung = sum(worker.hung for worker in self.workers)
                raise NoWorkersError(hung, f"hung for {self.lease_seconds:g} s")
            return self._outcome()
        finally:
            self._end()

    # In the caller's thread

    def _goes_on(self) -> bool:
        there = any(not worker.ended and not worker.hung for worker in self.workers)
        return there and self.error is None

    def _seconds_left(self) -> float | None:
        """Until something is due that no message brings."""
        due = [
            worker.heard_seconds + self.lease_seconds
            if math.isinf(worker.doubted_seconds)
            else worker.doubted_seconds + self.lease_seconds / LOOKS
            for worker in self.workers
            if not worker.hung
        ]
        seconds = min([*due, self.watch.due_seconds]) - self.seconds()
        return None if math.isinf(seconds) else min(max(0.0, seconds), threading.TIMEOUT_MAX)

    def _supervise(self) -> None:
        self._look_for_life()
        refused = self.server.refusals
        count = sum(refused.values()) - refused[Refusal.LEASE]
        if count > self.assignment.policy.refusals:
            reasons = ", ".join(f"{n} as {reason}" for reason, n in sorted(refused.items()))
            raise DivergedError(self.assignment.rule.name, f"commits were refused: {reasons}")
        self.watch.flush()
        watch, seconds = self.watch, self.seconds()
        due = self.server.samples >= watch.due_samples or seconds >= watch.due_seconds
        if due and watch.at(seconds) and not (self.server.stopped or self.server.done):
            self._deliver(self.server.stop())

    def _look_for_life(self) -> None:
        for worker in self.workers:
            seconds = self.seconds()
            if worker.hung or seconds - worker.heard_seconds <= self.lease_seconds:
                worker.doubted_seconds = math.inf
            elif math.isinf(worker.doubted_seconds):
                worker.doubted_seconds = seconds
            elif seconds >= worker.doubted_seconds + self.lease_seconds / LOOKS:
                worker.hung, worker.doubted_seconds = True, math.inf
                self._deliver(self.server.evict(worker.index))

    def _outcome(self) -> Outcome:
        assignment, server = self.assignment, self.server
        return Outcome(
            theta=np.array(server.theta),
            clock=server.clock,
            samples=server.samples,
            seconds=self.seconds(),
            rows=tuple(server.rows),
            events=tuple(server.events),
            evaluations=tuple(self.watch.evaluations),
            stopped=server.stopped,
            meta={
                "backend": "threads",
                "rule": assignment.rule.name,
                "options": dict(assignment.rule.options),
                "job": asdict(assignment.job),
            },
        )

    def _end(self) -> None:
        """Whatever happened: no thread goes on, but one that is hung in the learner's code."""
        self.over.set()
        for worker in self.workers:
            worker.mailbox.put(None)
        for worker in self.workers:
            if worker.thread is None or worker.hung:
                continue
            silent_seconds = self.seconds() - worker.heard_seconds  # -inf: about to read the None
            left_seconds = self.lease_seconds - silent_seconds
            worker.thread.join(min(max(0.0, left_seconds), threading.TIMEOUT_MAX))
        self.server.close()

    # In any thread

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            worker = self.workers[delivery.worker]
            center = self.theta if worker.outbox is None else worker.outbox
            worker.mailbox.put(Told(delivery.reply, center if delivery.pulled else None))

    def _tell(self) -> None:
        with self.news:
            self.is_news = True
            self.news.notify()

    # In the worker's thread

    def _live(self, worker: _Worker) -> None:
        def beat() -> None:
            worker.heard_seconds, worker.hung = self.seconds(), False

        on_alive(beat)
        try:
            again = True
            while again:
                again = self._life(worker)
        except BaseException as error:  # whatever it is, the run must not go on without it
            self.error = self.error or error
        worker.ended, worker.heard_seconds = True, math.inf
        self._tell()

    def _life(self, worker: _Worker) -> bool:
        """From a new learner to the last lease; whether there is another life after it."""
        try:
            self._train(worker)
        except Exception as error:
            return self._failed(worker, error)
        if not self.over.is_set():
            self._deliver(self.server.leave(worker.index))
        return False

    def _train(self, worker: _Worker) -> None:
        assignment, index = self.assignment, worker.index
        worker.heard_seconds = self.seconds()
        learner = assignment.learner(index)
        sequence = self.server.join(index, None, worker.outbox)
        steps = work(
            assignment.job,
            assignment.rule,
            learner,
            index,
            sequence=sequence,
            clock=self.seconds,
        )
        told: Told | None = None
        while True:
            try:
                asked = steps.send(told)
            except StopIteration:
                return
            told = None
            worker.heard_seconds, worker.hung = self.seconds(), False
            if self.over.is_set():
                return
            if isinstance(asked, Stepped):
                continue
            worker.heard_seconds = math.inf
            self._deliver(self.server.take(asked.turn, vector=asked.vector))
            self._tell()
            told = worker.mailbox.get()
            if told is None:
                return
            worker.heard_seconds = self.seconds()

    def _failed(self, worker: _Worker, error: Exception) -> bool:
        """Whether the policy starts the worker again; what it does not allow ends the run."""
        policy = self.assignment.policy
        with self.news:
            self.deaths += 1
            deaths = self.deaths
        if deaths > policy.worker_errors:
            raise ProcessError(f"worker {worker.index}", traceback.format_exc()) from error
        self._deliver(self.server.evict(worker.index))
        self._tell()
        if deaths <= policy.worker_restarts:
            return True
        others = any(not other.ended for other in self.workers if other is not worker)
        if deaths - policy.worker_restarts > policy.worker_losses or not others:
            raise NoWorkersError(deaths, f"by {error!r}") from error
        return False
