"""A run in virtual time: the same rules, server and workers, one event after the other.

    worker    ─ step ─ step ─ step ┐ transfer                          ┌ step ─ step ...
    server                         └────────► wait, apply_seconds ────►┘ transfer

Every local step takes a drawn time, a turn the transfer of what it carries and of its answer, and
the server takes one turn at a time, in the order of arrival. The gradients are real. What happens
at the same moment happens in this order: deaths, lost leases, joins, steps without locks, turns,
leavings; then by worker. So the
same seed gives the same run, bit for bit, and `Outcome.meta["order"]` is the order of turns that
makes another backend repeat it.

A worker is computed ahead to its next turn as soon as it has its answer: nothing that happens
elsewhere meanwhile can reach it. Not so without locks, where each step reads the center as it was
when the step began, and writes when it ends.
"""

import heapq
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DivergedError, NoWorkersError, ProcessError, UsageError
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.backends.watching import ROWS, Watching
from dovetail.training.backends.world import World
from dovetail.training.gate import Gate
from dovetail.training.learner import Gradient, Learner
from dovetail.training.records import Outcome, Refusal, Turn, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.wire import Octets, Wire, make_wire
from dovetail.training.worker import Ask, Stepped, Told, Work, work

DEATH, LEASE, JOIN, STEP, TURN, LEAVE = range(6)
"""What happens at the same moment happens in this order."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Run the assignment in the `World` of these options.

    Raises `ProcessError` when a worker raises and the policy does not count that as a death,
    `NoWorkersError`, `DivergedError`.
    """
    unknown = sorted(set(options) - set(World.__dataclass_fields__))
    if unknown:
        raise UsageError(unknown[0], "the simulated backend has no such option")
    return _Simulation(assignment, watcher, World(**options)).run()


@dataclass
class _Worker:
    """A life of a worker: another one begins with each start.

    seconds     virtual time on its own clock
    dies        when
    asked       the turn that waits for an answer
    silences    from when to when it counts as hung, since its last turn
    wire, sent  how its commits are encoded, and the one on its way; None: they travel as they are
    told, left, seen   without locks: what its next step begins with, samples of its lease that are
                left, and the learner that sees the center as it was
    """

    index: int
    seconds: float
    draw: Callable[[], float]
    outbox: Vector
    wire: Wire
    sent: Octets | None = None
    dies: float = math.inf
    asked: Ask | None = None
    alive: bool = True
    silences: list[tuple[float, float]] = field(default_factory=list)
    work: Work | None = None
    told: Told | None = None
    left: int = 0
    seen: "_Seen | None" = None

    def clock(self) -> float:
        return self.seconds

    def hung(self, seconds: float) -> bool:
        return any(begin <= seconds < end for begin, end in self.silences)


class _Simulation:
    def __init__(self, assignment: Assignment, watcher: Watcher, world: World) -> None:
        self.assignment, self.world = assignment, world
        self.now = self.ended = 0.0
        self.theta = np.array(assignment.theta)  # the center itself
        self.server = self._server()
        self.gate = Gate(assignment.order or (), waiting=lambda: self.server.waiting)
        self.watch = Watching(watcher, self.server, self.now)
        self.workers: dict[int, _Worker] = {}
        self.agenda: list[tuple[float, int, int, int, _Worker | None]] = []
        self.serials = count()
        self.order: list[int] = []
        self.deaths = self.refusals = self.errors = 0
        self.streams: dict[int, Callable[[], float]] = {}

    def _server(self) -> Server:
        """A new one, or one that continues a run: virtual time then goes on where it ended."""
        assignment, began = self.assignment, 0.0
        options: dict[str, Any] = {
            "guard": assignment.guard,
            "storage": assignment.storage,
            "shards": assignment.shards or 1,
            "clock": lambda: self.now - began,
        }
        if assignment.storage is None or not assignment.storage.resume:
            return Server(assignment.job, assignment.rule, self.theta, **options)
        server = Server.resume(assignment.job, assignment.rule, self.theta, **options)
        server.dismiss_late()
        self.now = self.ended = began = max((event.seconds for event in server.events), default=0.0)
        return server

    def run(self) -> Outcome:
        job, world = self.assignment.job, self.world
        for index in sorted({*range(job.workers), *world.joins}):
            self._plan(max(self.now, world.joins.get(index, 0.0)), JOIN, index, None)
        try:
            while self.agenda:
                self._happen(*heapq.heappop(self.agenda))
            assert self.server.done or self.server.stopped, "workers wait for each other"
            self.watch.flush()
            return self._outcome()
        finally:
            self.server.close()

    def _plan(self, seconds: float, kind: int, index: int, worker: _Worker | None) -> None:
        heapq.heappush(self.agenda, (seconds, kind, index, next(self.serials), worker))

    def _happen(
        self, seconds: float, kind: int, index: int, _serial: int, worker: _Worker | None
    ) -> None:
        if kind == TURN and worker is not None:
            self._serve(seconds, worker)
            return
        if worker is not None and not worker.alive:
            return
        self._pass(seconds)
        if kind == JOIN:
            self._join(seconds, index)
        elif kind == STEP and worker is not None:
            self._end_step(worker, seconds)
        elif kind == LEASE:
            self._lose(index, seconds)
        elif worker is not None:
            worker.alive = False
            if kind == DEATH:
                self._bury(worker)
            else:
                self._deliver(self.server.leave(index))
                self._passed(self.gate.drop(index))

    def _pass(self, seconds: float) -> None:
        """Let time pass; evaluations that were due meanwhile come first."""
        while self.watch.due_seconds < seconds:
            self.now = self.watch.due_seconds
            self._evaluated(self.watch.at(self.now))
        self.now = max(self.now, seconds)

    def _evaluated(self, stop: bool) -> None:
        if stop and not self.watch.stopped:
            self.watch.stopped = True
            self._deliver(self.server.stop())

    def _join(self, seconds: float, index: int) -> None:
        job, world = self.assignment.job, self.world
        if index not in self.streams:
            slow = world.slow.get(index, 1.0)
            self.streams[index] = world.times.stream(job.seed, index, slow)
        first = index not in self.workers
        wire = make_wire(self.assignment.wire, job.size, job.dtype)
        worker = _Worker(index, seconds, self.streams[index], np.empty_like(self.theta), wire)
        self.workers[index] = worker
        if first and world.deaths.get(index, -math.inf) >= seconds:
            worker.dies = world.deaths[index]
            self._plan(worker.dies, DEATH, index, worker)
        learner = self.assignment.learner(index)
        if self.assignment.rule.lock_free:
            learner = worker.seen = _Seen(learner, self.theta)
        sequence = self.server.join(index, None, worker.outbox)
        worker.work = work(
            job,
            self.assignment.rule,
            learner,
            index,
            sequence=sequence,
            clock=worker.clock,
        )
        self._advance(worker, None)

    def _lose(self, index: int, seconds: float) -> None:
        """The worker is silent: its samples go to others, if there are any."""
        if self.server.done or self.server.stopped:
            return
        self._deliver(self.server.evict(index))
        self._passed(self.gate.drop(index))
        living = [worker for worker in self.workers.values() if worker.alive]
        if not self._are_coming() and all(worker.hung(seconds) for worker in living):
            silent = f"silent for {self.assignment.policy.lease_seconds:g} s"
            raise NoWorkersError(len(living), silent)

    def _are_coming(self) -> bool:
        """Whether there are workers yet to join."""
        return any(kind == JOIN for _, kind, *_ in self.agenda)

    def _bury(self, worker: _Worker) -> None:
        """Hand out its samples again; start it anew, or do without it, as the policy allows."""
        policy = self.assignment.policy
        self.deaths += 1
        self._deliver(self.server.evict(worker.index))
        self._passed(self.gate.drop(worker.index))
        if self.server.done or self.server.stopped:
            return
        if self.deaths <= policy.worker_restarts:
            self._plan(self.now + self.world.restart_seconds, JOIN, worker.index, None)
            return
        away = self.deaths - policy.worker_restarts
        others = any(other.alive for other in self.workers.values())
        if away > policy.worker_losses or not (others or self._are_coming()):
            raise NoWorkersError(self.deaths, f"at {self.now:g} s of virtual time")

    def _advance(self, worker: _Worker, told: Told | None) -> None:
        """Run `worker` up to its next turn, or to its death."""
        assert worker.work is not None
        try:
            event = worker.work.send(told)
            while isinstance(event, Stepped):
                worker.seconds += self._step_seconds(worker)
                if worker.seconds > worker.dies:
                    return
                event = worker.work.send(None)
        except StopIteration:
            self._plan(worker.seconds, LEAVE, worker.index, worker)
            return
        except Exception as error:
            self._failed(worker, error)
            return
        self._send(worker, event)

    def _send(self, worker: _Worker, event: Ask) -> None:
        """Its turn is on its way."""
        worker.asked, sent_bytes = event, 0
        if event.vector is not None:
            sent_bytes = worker.wire.size_bytes
            if self.assignment.wire != "none":
                worker.sent = np.empty(sent_bytes, np.uint8)
                worker.wire.encode(event.vector, worker.sent)
        arrival_seconds = worker.seconds + self.world.transfer_seconds(sent_bytes)
        self._plan(arrival_seconds, TURN, worker.index, worker)

    def _step_seconds(self, worker: _Worker) -> float:
        """How long its step takes that begins now; longer than a lease, and the lease is lost."""
        step_seconds, hung = worker.draw(), self.assignment.policy.lease_seconds
        if step_seconds > hung:
            worker.silences.append((worker.seconds + hung, worker.seconds + step_seconds))
            self._plan(worker.seconds + hung, LEASE, worker.index, worker)
        return step_seconds

    def _begin_step(self, worker: _Worker) -> None:
        """Without locks: the step sees the center as it is now."""
        assert worker.seen is not None
        np.copyto(worker.seen.theta, self.theta)
        self._plan(worker.seconds + self._step_seconds(worker), STEP, worker.index, worker)

    def _end_step(self, worker: _Worker, seconds: float) -> None:
        """Without locks: the step is computed and writes to the center, all at its end."""
        assert worker.work is not None
        told, worker.told = worker.told, None
        try:
            event = worker.work.send(told)
        except Exception as error:
            self._failed(worker, error)
            return
        worker.seconds = seconds
        if not isinstance(event, Stepped):  # a stream had ended before this step
            assert isinstance(event, Ask)
            self._send(worker, event)
            return
        job = self.assignment.job
        ends = job.samples is None and event.samples < min(job.batch, worker.left)
        worker.left = 0 if ends else worker.left - event.samples
        if worker.left > 0:
            self._begin_step(worker)
        else:
            self._advance(worker, None)

    def _failed(self, worker: _Worker, error: Exception) -> None:
        self.errors += 1
        if self.errors > self.assignment.policy.worker_errors:
            raise ProcessError(f"worker {worker.index}", traceback.format_exc()) from error
        worker.dies = worker.seconds
        self._plan(worker.seconds, DEATH, worker.index, worker)

    def _serve(self, seconds: float, worker: _Worker) -> None:
        """A turn has arrived; the server takes it when it is free of those before it."""
        if not worker.alive:
            return  # on its way when its worker died
        ask = worker.asked
        assert ask is not None
        self._pass(seconds)
        self._passed(self.gate.push(ask.turn))

    def _passed(self, turns: Iterable[Turn]) -> None:
        """Take the turns that the forced order lets pass: without one, the turn that came."""
        for turn in turns:
            self._pass(self.now + (self.world.apply_seconds if turn.commit is not None else 0.0))
            self.ended = self.now
            self.order.append(turn.worker)
            self._deliver(self.server.take(turn, vector=self._received(self.workers[turn.worker])))
            if self.server.samples >= self.watch.due_samples:
                self._evaluated(self.watch.at(self.now))
        self.watch.flush(ROWS)

    def _received(self, worker: _Worker) -> Vector | None:
        """The vector of the worker's commit, as it comes out of the wire."""
        if worker.sent is None:
            return None if worker.asked is None else worker.asked.vector
        vector = np.empty_like(self.theta)
        worker.wire.decode(worker.sent, vector)
        worker.sent = None
        return vector

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            worker, reply = self.workers[delivery.worker], delivery.reply
            if reply.refusal not in (None, Refusal.LEASE):
                self._refused(str(reply.refusal))
            if not worker.alive or worker.asked is None:
                continue
            worker.asked = None
            worker.silences.clear()
            worker.seconds = self.now + self.world.transfer_seconds(
                self.theta.nbytes if delivery.pulled else 0
            )
            if self.assignment.rule.lock_free and reply.lease is not None:
                worker.told = Told(reply, self.theta)
                worker.left = reply.lease.stop - reply.lease.start
                self._begin_step(worker)
            else:
                self._advance(worker, Told(reply, worker.outbox if delivery.pulled else None))

    def _refused(self, detail: str) -> None:
        self.refusals += 1
        if self.refusals > self.assignment.policy.refusals:
            raise DivergedError(
                self.assignment.rule.name,
                f"{self.refusals} commits were refused, the last one as {detail}",
            )

    def _outcome(self) -> Outcome:
        assignment, server = self.assignment, self.server
        return Outcome(
            theta=np.array(server.theta),
            clock=server.clock,
            samples=server.samples,
            seconds=self.ended,
            rows=tuple(server.rows),
            events=tuple(server.events),
            evaluations=tuple(self.watch.evaluations),
            stopped=self.watch.stopped,
            meta={
                "backend": "simulated",
                "rule": assignment.rule.name,
                "options": dict(assignment.rule.options),
                "job": asdict(assignment.job),
                "order": tuple(self.order),
            },
        )


class _Seen:
    """A learner whose gradients are taken at `theta` [size]: where the center stood when the step
    began, not where it stands when the gradient is written."""

    def __init__(self, learner: Learner, center: Vector) -> None:
        self.theta = center.copy()
        self._learner = learner
        self.update, self.rate = learner.update, learner.rate

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        return self._learner.gradient(self.theta, indices, epoch)
