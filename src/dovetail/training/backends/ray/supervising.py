"""The caller's side: starts the actors, restarts workers, tells the watcher.

    while not ended:   wait for a result of an actor ─► policy ─► rows, events, evaluations

Everything happens in the calling thread, evaluations too. Ray restarts the server, as often as the
policy allows; workers are started anew here, wherever there is room. The caller owns the actors:
they die with it, whatever kills it, and none outlives the run.
"""

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from dovetail.errors import (
    DivergedError,
    NoWorkersError,
    ProcessError,
    ServerLostError,
    TrainingError,
    UsageError,
)
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.backends.processes.messages import Copied
from dovetail.training.backends.processes.watching import Watch
from dovetail.training.backends.ray.actors import Actors, Died, Lost, Raised
from dovetail.training.backends.ray.messages import Center, Report
from dovetail.training.backends.ray.options import Options, connected
from dovetail.training.backends.survival import temporary_storage
from dovetail.training.records import Event, Outcome, Refusal, Vector

POLL_SECONDS = 0.1
"""How long the server may wait for news before it reports."""
PATIENCE_SECONDS = 2.0
"""For workers to finish after the last sample, before they are killed."""
SILENCE_SECONDS = 60.0
"""A server that does not report for so long is hung, or there is no node for it."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Run the assignment on a cluster; see `Options`.

    The storage's folder must be the same on all nodes that may hold the server. Without a storage
    there is a temporary one on the server's node: the run survives the death of the server's
    process, and ends with an error when the node is lost. Ctrl-C ends the run and returns what it
    has reached, marked as stopped; pressed once more it raises `KeyboardInterrupt`.
    Raises `ProcessError` with the first traceback when a worker raises and the policy does not
    count that as a death, and when the server raises; `NoWorkersError`, `ServerLostError`,
    `DivergedError`, `MissingLibraryError`.
    """
    chosen = Options.of(options)
    if assignment.rule.lock_free:
        raise UsageError("rule", f"{assignment.rule.name} needs memory that all workers share")
    storage = assignment.storage
    if storage is not None and not storage.log and (assignment.shards or 1) > 1:
        raise UsageError("log", "shards find each other's version again by their logs; keep them")
    with ExitStack() as stack:
        if storage is None:
            storage = stack.enter_context(temporary_storage(assignment))
        ray = stack.enter_context(connected(chosen, assignment.job.workers))
        actors = stack.enter_context(Actors(ray, assignment, chosen, storage))
        return _Supervisor(assignment, watcher, actors, chosen).run()


class _Supervisor:
    def __init__(
        self, assignment: Assignment, watcher: Watcher, actors: Actors, options: Options
    ) -> None:
        self.assignment, self.policy, self.actors = assignment, assignment.policy, actors
        self.watch = Watch(watcher)
        self.finished: set[int] = set()
        self.lost: set[int] = set()
        self.killed: set[int] = set()  # as hung, and reported so since
        self.late = sorted(options.late)
        self.deaths = self.errors = self.refusals = 0
        self.first: ProcessError | None = None
        self.stopped = self.done = self.complete = False
        self.patience = 0.0  # until when finishing workers are waited for
        self.life = ""  # of the server
        self.heard = time.monotonic()  # of the server
        self.away = False  # it was lost, and has not reported since
        self.ahead_seconds = -time.time()  # the run's clock, before this machine's
        self.asked_samples = -1
        self.final: Copied | None = None
        self.theta: Vector | None = None

    def run(self) -> Outcome:
        self.actors.start_server()
        for worker in range(self.assignment.job.workers):
            self.actors.start_worker(worker)
        try:
            self._until_ended()
        except KeyboardInterrupt:
            if not self.life or self.stopped:
                raise
            self._stop()
            self._until_ended()
        return self._outcome()

    def _until_ended(self) -> None:
        while not self._has_ended():
            self._ask()
            words = list(self.actors.wait(POLL_SECONDS))
            for word in words:
                match word:
                    case Report():
                        self._reported(word)
                    case Center():
                        self._copied(word)
                    case (worker, end):
                        self._worker_ended(worker, end)
                    case Lost():
                        self._server_is_away(word)
            silent = time.monotonic() > self.heard + SILENCE_SECONDS
            if silent and not words:  # an evaluation may have taken as long: then listen first
                self._server_is_silent()

    def _has_ended(self) -> bool:
        if self.final is None or not self.complete:
            return False
        working = self.actors.workers.keys() - self.finished - self.lost
        return not working or self.stopped or time.monotonic() > self.patience

    # -- questions to the server

    def _ask(self) -> None:
        known = len(self.watch.rows), len(self.watch.events)
        self.actors.poll(self.life, *known, POLL_SECONDS)
        if not self.life or self.final is not None:
            return
        wanted = self.watch.wants(time.time() + self.ahead_seconds)
        if self.done:
            self.actors.copy(0, final=True)
        elif wanted is not None:
            self.actors.copy(wanted.samples, final=False)

    def _stop(self) -> None:
        self.stopped = True
        self.actors.tell_server("stop")

    # -- the server's words

    def _reported(self, report: Report) -> None:
        self.heard, self.away = time.monotonic(), False
        if report.raised is not None:
            raise report.raised.error()
        self.ahead_seconds = report.seconds - time.time()
        if report.life != self.life:
            self._server_is_up(report)
        rows, events = self.watch.rows, self.watch.events
        self.watch.add_rows(report.rows[max(0, len(rows) - report.first[0]) :])
        for event in report.events[max(0, len(events) - report.first[1]) :]:
            self._happened(event)
        more = len(rows) < report.total[0] or len(events) < report.total[1]
        self.complete = report.done and not more
        while self.late and report.samples >= self.late[0]:
            self.late.pop(0)
            self.actors.start_worker(max(self.actors.workers) + 1)
        if report.done and not self.done:
            self.done = True
            self.patience = time.monotonic() + PATIENCE_SECONDS
        self._wake(set(report.silent))

    def _wake(self, silent: set[int]) -> None:
        """Kill those that are hung where nobody is left to do their work. Once: a report that was
        on its way then still knows nothing of who takes their place."""
        self.killed &= silent
        working = self.actors.workers.keys() - self.finished - self.lost
        if self.done or not working <= silent:
            return
        for worker in working - self.killed:
            self.killed.add(worker)
            self.actors.kill_worker(worker)

    def _server_is_up(self, report: Report) -> None:
        if self.life and not report.found:
            raise TrainingError(
                f"the server was restarted on node {report.node}, which does not have the run's "
                "folder; give a storage on a file system that all nodes share"
            )
        self.life = report.life
        del self.watch.rows[report.total[0] :]  # lost with the server, if no log was kept
        del self.watch.events[report.total[1] :]
        for worker in self.lost:
            self.actors.tell_server("gone", worker, True)
        if self.stopped:
            self.actors.tell_server("stop")
        elif not report.done:  # without a log it has lost what those did who had finished
            self.done = False
            for worker in sorted(self.finished):
                self.finished.discard(worker)
                self.actors.start_worker(worker)

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

    def _copied(self, center: Center) -> None:
        if center.copied.final:
            self.final, self.theta = center.copied, np.array(center.theta)
        if self.watch.evaluate(center.copied, center.theta) and not self.done and not self.stopped:
            self._stop()

    def _server_is_away(self, lost: Lost) -> None:
        """Ray starts it again, unless that was its last life."""
        if lost.for_good:
            raise ServerLostError(self.policy.server_restarts, lost.status) from self.first
        self.away = True
        time.sleep(POLL_SECONDS / 2)

    def _server_is_silent(self) -> None:
        if self.away or not self.life:
            status = f"no node of the cluster has had room for it for {SILENCE_SECONDS:.0f} s"
            raise ServerLostError(self.policy.server_restarts, status) from self.first
        self.heard, self.away = time.monotonic(), True
        self.actors.restart_server()

    # -- the workers' ends

    def _worker_ended(self, worker: int, end: Raised | Died | None) -> None:
        match end:
            case None:
                self.finished.add(worker)
            case Died(status):
                self._worker_died(worker, status)
            case Raised(traceback):
                self.errors += 1
                error = ProcessError(f"worker {worker}", traceback)
                self.first = self.first or error
                if self.errors > self.policy.worker_errors:
                    raise self.first
                self._worker_died(worker, traceback.strip().splitlines()[-1])

    def _worker_died(self, worker: int, status: str) -> None:
        """Start it anew, or do without it, as the policy allows."""
        if self.done or self.stopped:
            self.lost.add(worker)
            return
        self.deaths += 1
        if self.deaths <= self.policy.worker_restarts:
            self.actors.tell_server("gone", worker, False)
            self.actors.start_worker(worker)
            return
        self.lost.add(worker)
        others = self.actors.workers.keys() - self.lost - self.finished
        if self.deaths - self.policy.worker_restarts > self.policy.worker_losses or not others:
            raise NoWorkersError(self.deaths, status) from self.first
        self.actors.tell_server("gone", worker, True)

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
            stopped=self.stopped,
            meta={
                "backend": "ray",
                "rule": assignment.rule.name,
                "options": dict(assignment.rule.options),
                "job": asdict(assignment.job),
            },
        )
