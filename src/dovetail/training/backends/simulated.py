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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NoWorkersError, ProcessError, UsageError
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.gate import TurnGate
from dovetail.training.learner import Gradient, Learner
from dovetail.training.records import Outcome, Turn, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.step_times import StepTimes
from dovetail.training.supervisor import (
    CenterCopy,
    Gone,
    RunEnded,
    RunProgress,
    ServerReport,
    Stop,
    Supervisor,
    Word,
    WorkerDied,
    WorkerFinished,
    WorkerRaised,
    report_of,
)
from dovetail.training.wire import Octets, Wire, make_wire
from dovetail.training.worker import Ask, Stepped, Told, Work, work

DEATH, LEASE, JOIN, STEP, TURN, LEAVE = range(6)
"""Things that happen at the same moment happen in this order."""
ROWS = 100
"""The watcher is told of rows in batches of so many; fewer before an evaluation and at the end."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Run the assignment in the `World` of these options.

    Raises `ProcessError` when a worker raises and the policy does not count that as a death,
    `NoWorkersError`, `DivergedError`.
    """
    unknown = sorted(set(options) - set(World.__dataclass_fields__))
    if unknown:
        raise UsageError(unknown[0], "the simulated backend has no such option")
    world = World(**options)
    with closing(SimulatedTransport(assignment, world)) as transport:
        return Supervisor(
            assignment,
            watcher,
            transport,
            workers=sorted({*range(assignment.job.workers), *world.joins}),
            progress=RunProgress.after(watcher, transport.server, transport.now),
        ).run()


@dataclass(frozen=True)
class World:
    """How long things take, and what happens to the workers. All times are virtual seconds.

    times            the distribution of step times
    slow             worker -> factor on its step times
    latency_seconds, bandwidth_bytes_per_second   of each message, each way; links are not shared
    apply_seconds    how long the server takes for each commit
    deaths           worker -> when it dies, once
    joins            worker -> when it joins, instead of at 0; may lie beyond the job's workers
    restart_seconds  from a death to the new worker's start
    """

    times: StepTimes = field(default_factory=StepTimes)
    slow: Mapping[int, float] = field(default_factory=dict)
    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf
    apply_seconds: float = 0.0
    deaths: Mapping[int, float] = field(default_factory=dict)
    joins: Mapping[int, float] = field(default_factory=dict)
    restart_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "apply_seconds", "restart_seconds"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) < math.inf):
                raise UsageError(name, "must be finite and not negative")
        if not isinstance(self.times, StepTimes):
            raise UsageError("times", f"must be StepTimes, not {self.times!r}")
        for name in ("slow", "deaths", "joins"):
            mapping = getattr(self, name)
            if not (isinstance(mapping, Mapping) and all(map(_is_number, mapping.values()))):
                raise UsageError(name, f"must be a dict of worker: number, not {mapping!r}")
        bandwidth = self.bandwidth_bytes_per_second
        if not (_is_number(bandwidth) and bandwidth > 0):
            raise UsageError("bandwidth_bytes_per_second", "must be positive")
        if any(not 0 < factor < math.inf for factor in self.slow.values()):
            raise UsageError("slow", "factors must be positive and finite")

    def transfer_seconds(self, vector_bytes: float) -> float:
        """One message, with a vector of so many bytes or without one (0)."""
        return self.latency_seconds + vector_bytes / self.bandwidth_bytes_per_second


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass
class _VirtualWorker:
    """A life of a worker: another one begins with each start.

    seconds     virtual time on its own clock
    dies        when
    asked       the turn that waits for an answer
    silences    from when to when it counts as hung, since its last turn
    wire, sent  how its commits are encoded, and the one on its way; None: they travel as they are
    told, left, stale   without locks: what its next step begins with, samples of its lease that are
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
    stale: "_StaleLearner | None" = None

    def clock(self) -> float:
        return self.seconds

    def hung(self, seconds: float) -> bool:
        return any(begin <= seconds < end for begin, end in self.silences)


class SimulatedTransport:
    """Server and workers in virtual time. A turn is one entry of the agenda.

    now     virtual seconds
    ended   when the server has taken its last turn
    """

    name = "simulated"
    server_restarts = 0
    mercy_seconds = 0.0
    interruptible = False

    def __init__(self, assignment: Assignment, world: World) -> None:
        self.assignment, self.world = assignment, world
        self.now = self.ended = 0.0
        self.theta = np.array(assignment.theta)  # the center itself
        self.server = self._server()
        self.gate = TurnGate(assignment.order or (), waiting=lambda: self.server.waiting)
        self.progress = RunProgress(Watcher())
        self.workers: dict[int, _VirtualWorker] = {}
        self.planned: set[int] = set()  # workers that were ever started
        self.agenda: list[tuple[float, int, int, int, _VirtualWorker | None]] = []
        self.serials = count()
        self.order: list[int] = []
        self.raised: list[WorkerRaised] = []  # not told yet
        self.told_done = False
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

    # What the supervisor asks for

    def start_server(self, died: str | None = None) -> None:
        """The server is there from the beginning: virtual time begins with it."""

    def start_worker(self, worker: int) -> None:
        if worker in self.planned:
            begins = self.now + self.world.restart_seconds
        else:
            begins = max(self.now, self.world.joins.get(worker, 0.0))
        self.planned.add(worker)
        self._plan(begins, JOIN, worker, None)

    def kill_workers(self, workers: set[int]) -> None:
        """Nothing ends a hung worker here, so neither would the run."""
        silent = f"silent for {self.assignment.policy.lease_seconds:g} s"
        raise NoWorkersError(len(workers), silent)

    def tell(self, message: Gone | Stop) -> None:
        if isinstance(message, Stop):
            self._deliver(self.server.stop())

    def turn(self, progress: RunProgress) -> Iterator[Word]:
        self.progress = progress
        if self.agenda:
            yield from self._happen(*heapq.heappop(self.agenda))
            while self.raised:
                yield self.raised.pop(0)
            return
        assert self.server.done or self.server.stopped, "workers wait for each other"
        yield self._report()
        theta, clock, samples = self.server.copy()
        yield RunEnded(CenterCopy(theta, clock, samples, self.ended, final=True))

    def facts(self) -> dict[str, Any]:
        return {"order": tuple(self.order)}

    def close(self) -> None:
        self.server.close()

    # What is told

    def _report(self, silent: Iterable[int] = (), least_rows: int = 1) -> ServerReport:
        return report_of(
            self.server,
            self.progress.known,
            done=self.told_done,
            silent=silent,
            least_rows=least_rows,
        )

    def _news(self) -> Iterator[ServerReport]:
        """A report, where it would say anything."""
        server, progress = self.server, self.progress
        done = server.done or server.stopped
        rows = len(server.rows) - len(progress.rows)
        if rows >= ROWS or len(server.events) > len(progress.events) or done != self.told_done:
            self.told_done = done
            yield self._report(least_rows=ROWS)

    def _copy(self) -> CenterCopy:
        return CenterCopy(*self.server.copy(), self.now, news=self._report)

    # What happens

    def _plan(self, seconds: float, kind: int, index: int, worker: _VirtualWorker | None) -> None:
        heapq.heappush(self.agenda, (seconds, kind, index, next(self.serials), worker))

    def _happen(
        self, seconds: float, kind: int, index: int, _serial: int, worker: _VirtualWorker | None
    ) -> Iterator[Word]:
        if kind == TURN and worker is not None:
            yield from self._serve(seconds, worker)
            return
        if worker is not None and not worker.alive:
            return
        yield from self._pass(seconds)
        if kind == JOIN:
            self._join(seconds, index)
        elif kind == STEP and worker is not None:
            self._end_step(worker, seconds)
        elif kind == LEASE:
            yield from self._lose(index, seconds)
        elif worker is not None:
            worker.alive = False
            yield from self._end(worker, kind)

    def _end(self, worker: _VirtualWorker, kind: int) -> Iterator[Word]:
        """Hand out again what a dead worker held; one that leaves holds nothing."""
        index = worker.index
        leave = self.server.evict if kind == DEATH else self.server.leave
        self._deliver(leave(index))
        yield from self._passed(self.gate.drop(index))
        if kind == DEATH:
            yield WorkerDied(index, f"at {self.now:g} s of virtual time")
        else:
            yield WorkerFinished(index)

    def _pass(self, seconds: float) -> Iterator[Word]:
        """Let time pass; evaluations that are due meanwhile come first."""
        while self.progress.due_seconds < seconds:
            self.now = self.progress.due_seconds
            yield self._copy()
        self.now = max(self.now, seconds)

    def _join(self, seconds: float, index: int) -> None:
        job, world = self.assignment.job, self.world
        if index not in self.streams:
            slow = world.slow.get(index, 1.0)
            self.streams[index] = world.times.stream(job.seed, index, slow)
        first = index not in self.workers
        wire = make_wire(self.assignment.wire, job.size, job.dtype)
        worker = _VirtualWorker(
            index, seconds, self.streams[index], np.empty_like(self.theta), wire
        )
        self.workers[index] = worker
        if first and world.deaths.get(index, -math.inf) >= seconds:
            worker.dies = world.deaths[index]
            self._plan(worker.dies, DEATH, index, worker)
        learner = self.assignment.learner(index)
        if self.assignment.rule.lock_free:
            learner = worker.stale = _StaleLearner(learner, self.theta)
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

    def _lose(self, index: int, seconds: float) -> Iterator[Word]:
        """The worker is silent: its samples go to others, if there are any."""
        if self.server.done or self.server.stopped:
            return
        self._deliver(self.server.evict(index))
        yield from self._passed(self.gate.drop(index))
        workers = self.workers.values()
        silent = [worker.index for worker in workers if worker.alive and worker.hung(seconds)]
        yield self._report(silent, least_rows=ROWS)

    def _advance(self, worker: _VirtualWorker, told: Told | None) -> None:
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

    def _send(self, worker: _VirtualWorker, event: Ask) -> None:
        """Its turn is on its way."""
        worker.asked, sent_bytes = event, 0
        if event.vector is not None:
            sent_bytes = worker.wire.size_bytes
            if self.assignment.wire != "none":
                worker.sent = np.empty(sent_bytes, np.uint8)
                worker.wire.encode(event.vector, worker.sent)
        arrival_seconds = worker.seconds + self.world.transfer_seconds(sent_bytes)
        self._plan(arrival_seconds, TURN, worker.index, worker)

    def _step_seconds(self, worker: _VirtualWorker) -> float:
        """How long its step takes that begins now; longer than a lease, and the lease is lost."""
        step_seconds, hung = worker.draw(), self.assignment.policy.lease_seconds
        if step_seconds > hung:
            worker.silences.append((worker.seconds + hung, worker.seconds + step_seconds))
            self._plan(worker.seconds + hung, LEASE, worker.index, worker)
        return step_seconds

    def _begin_step(self, worker: _VirtualWorker) -> None:
        """Without locks: the step sees the center as it is now."""
        assert worker.stale is not None
        np.copyto(worker.stale.theta, self.theta)
        self._plan(worker.seconds + self._step_seconds(worker), STEP, worker.index, worker)

    def _end_step(self, worker: _VirtualWorker, seconds: float) -> None:
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

    def _failed(self, worker: _VirtualWorker, error: Exception) -> None:
        """The learner has raised: if the run goes on, the worker dies of it."""
        raised = ProcessError(f"worker {worker.index}", traceback.format_exc())
        raised.__cause__ = error
        self.raised.append(WorkerRaised(worker.index, raised))
        worker.dies = worker.seconds
        self._plan(worker.seconds, DEATH, worker.index, worker)

    def _serve(self, seconds: float, worker: _VirtualWorker) -> Iterator[Word]:
        """A turn has arrived; the server takes it when it is free of those before it."""
        if not worker.alive:
            return  # on its way when its worker died
        ask = worker.asked
        assert ask is not None
        yield from self._pass(seconds)
        yield from self._passed(self.gate.push(ask.turn))

    def _passed(self, turns: Iterable[Turn]) -> Iterator[Word]:
        """Take the turns that the forced order lets pass: without one, the turn that came."""
        for turn in turns:
            apply_seconds = self.world.apply_seconds if turn.commit is not None else 0.0
            yield from self._pass(self.now + apply_seconds)
            self.ended = self.now
            self.order.append(turn.worker)
            self._deliver(self.server.take(turn, vector=self._received(self.workers[turn.worker])))
            if self.server.samples >= self.progress.due_samples:
                yield self._copy()
        yield from self._news()

    def _received(self, worker: _VirtualWorker) -> Vector | None:
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


class _StaleLearner:
    """A learner whose gradients are taken at `theta` [size]: where the center stood when the step
    began, not where it stands when the gradient is written."""

    def __init__(self, learner: Learner, center: Vector) -> None:
        self.theta = center.copy()
        self._learner = learner
        self.update, self.rate = learner.update, learner.rate

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        return self._learner.gradient(self.theta, indices, epoch)
