"""Runs an assignment in virtual time: the same rules, server and workers, one event at a time.

    worker    ─ step ─ step ─ step ┐ transfer                          ┌ step ─ step ...
    server                         └────────► wait, apply_seconds ────►┘ transfer

The time of each local step is drawn. A turn takes the transfer of its message and of its answer,
and the server takes one turn at a time, in the order of arrival. The gradients are real. Events of
the same moment happen in this order: deaths, lost leases, joins, steps without locks, turns,
leavings; then by worker. So the same seed gives the same run, bit for bit. Another backend repeats
the run if it is given `Outcome.meta["order"]`, the order of turns.

A worker is computed ahead to its next turn as soon as it has its answer, because nothing that
happens elsewhere meanwhile can reach it. This does not hold without locks, where each step reads
the center as it was when the step began, and writes to it when the step ends.
"""

import heapq
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NoWorkersError, ProcessError, UsageError
from dovetail.runtime.user_code import line_of
from dovetail.training.backends.contract import Assignment, ServerPlan, Watcher, check_options
from dovetail.training.gate import TurnGate
from dovetail.training.learner import Gradient, Learner
from dovetail.training.records import Outcome, Turn, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.serving import Serving, WorkerPort, open_server
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
)
from dovetail.training.wire import Octets, Wire, make_wire
from dovetail.training.worker import Ask, Stepped, Told, Work, work

DEATH, LEASE, JOIN, STEP, TURN, LEAVE = range(6)
"""Kinds of events. Events of the same moment happen in this order."""
ROWS = 100
"""The watcher is told of so many rows at once, or of fewer before an evaluation and at the end."""


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Runs the assignment in the `World` of these options.

    Raises `ProcessError` if a worker raises and the policy does not count that as a death,
    `NoWorkersError`, `DivergedError`.
    """
    check_options("simulated", options, World.__dataclass_fields__)
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
    latency_seconds, bandwidth_bytes_per_second   of each message, each way; messages of different
                     workers do not slow each other
    apply_seconds    how long the server takes for each commit
    deaths           worker -> when it dies; its replacement does not die
    joins            worker -> when it joins, instead of at 0; may name workers beyond the job's
    restart_seconds  time from a death to the new worker's start
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
        """Seconds of one message with a vector of so many bytes; 0 bytes: without a vector."""
        return self.latency_seconds + vector_bytes / self.bandwidth_bytes_per_second


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass
class _VirtualWorker:
    """One life of a worker: each start makes a new one.

    seconds     virtual time up to which the worker has been computed
    dies        virtual time of its death
    asked       the turn that waits for an answer
    silences    times [begin, end) in which it counts as hung, since its last turn
    wire, sent  the encoding of its commits, and the encoded commit on its way; None: not encoded
    told        without locks: the answer that its next step begins with
    left        without locks: samples of its lease that are not trained yet
    stale       without locks: the learner that sees the center as it was
    """

    index: int
    seconds: float
    draw: Callable[[], float]
    outbox: Vector
    wire: Wire
    sent: Octets | None = None
    dies: float = math.inf
    ask: Ask | None = None
    alive: bool = True
    silences: list[tuple[float, float]] = field(default_factory=list)
    work: Work | None = None
    answer: Told | None = None
    left: int = 0
    stale: "_StaleLearner | None" = None

    def clock(self) -> float:
        return self.seconds

    def hung(self, seconds: float) -> bool:
        return any(begin <= seconds < end for begin, end in self.silences)


class SimulatedTransport:
    """Server and workers in virtual time. Each call of `turn` does one entry of the agenda.

    now     virtual seconds
    ended   virtual time at which the server has taken its last turn
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
        self.serving = Serving(self.server)
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
        """Makes a new server, or one that resumes a run. Virtual time then goes on from the run's
        last event."""
        assignment, began = self.assignment, 0.0
        # The transport's own gate forces the order of turns.
        plan = replace(ServerPlan.of(assignment, assignment.storage), order=None)
        server = open_server(plan, self.theta, lambda: self.now - began, restarted=False)
        if plan.storage is not None and plan.storage.resume:
            server.dismiss_late()
            began = max((event.seconds for event in server.events), default=0.0)
            self.now = self.ended = began
        return server

    # What the supervisor asks for

    def start_server(self, died: str | None = None) -> None:
        """Does nothing: the server exists from the beginning."""

    def start_worker(self, worker: int) -> None:
        if worker in self.planned:
            begins = self.now + self.world.restart_seconds
        else:
            begins = max(self.now, self.world.joins.get(worker, 0.0))
        self.planned.add(worker)
        self._plan(begins, JOIN, worker, None)

    def kill_workers(self, workers: set[int]) -> None:
        """Raises, because a simulated worker that hangs cannot be ended, and the run would not."""
        silent = f"silent for {self.assignment.policy.lease_seconds:g} s"
        raise NoWorkersError(len(workers), silent)

    def tell(self, message: Gone | Stop) -> None:
        if isinstance(message, Stop):
            self.serving.stop()

    def turn(self, progress: RunProgress) -> Iterator[Word]:
        self.progress = progress
        if self.agenda:
            yield from self._handle(*heapq.heappop(self.agenda))
            while self.raised:
                yield self.raised.pop(0)
            return
        assert self.serving.done, "workers wait for each other"
        yield self._report()
        theta, clock, samples = self.server.copy()
        yield RunEnded(CenterCopy(theta, clock, samples, self.ended, final=True))

    def facts(self) -> dict[str, Any]:
        return {"order": tuple(self.order)}

    def close(self) -> None:
        self.server.close()

    # What is told

    def _report(self, silent: Iterable[int] = (), least_rows: int = 1) -> ServerReport:
        known = self.progress.known
        return self.serving.report(known, done=self.told_done, silent=silent, least_rows=least_rows)

    def _report_news(self) -> Iterator[ServerReport]:
        """Yields a report if there are enough new rows, new events, or the run is done."""
        server, progress = self.server, self.progress
        done = self.serving.done
        rows = len(server.rows) - len(progress.rows)
        if rows >= ROWS or len(server.events) > len(progress.events) or done != self.told_done:
            self.told_done = done
            yield self._report(least_rows=ROWS)

    def _copy(self) -> CenterCopy:
        return CenterCopy(*self.server.copy(), self.now, news=self._report)

    # What happens

    def _plan(self, seconds: float, kind: int, index: int, worker: _VirtualWorker | None) -> None:
        # The serial number keeps equal entries in order, and workers from being compared.
        heapq.heappush(self.agenda, (seconds, kind, index, next(self.serials), worker))

    def _handle(
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
        """Ends a worker's life. A dead worker's samples go to others; one that leaves has none."""
        index = worker.index
        if kind == DEATH:
            self.serving.evict(index)
        else:
            self.serving.leave(index)
        yield from self._take_turns(self.gate.drop(index))
        if kind == DEATH:
            yield WorkerDied(index, f"at {self.now:g} s of virtual time")
        else:
            yield WorkerFinished(index)

    def _pass(self, seconds: float) -> Iterator[Word]:
        """Advances virtual time, and yields the center for evaluations that are due before."""
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
        port = WorkerPort(partial(self._answer, worker), outbox=worker.outbox)
        sequence = self.serving.join(index, port)
        worker.work = work(
            job, self.assignment.rule, learner, index, sequence=sequence, clock=worker.clock
        )
        self._advance(worker, None)

    def _lose(self, index: int, seconds: float) -> Iterator[Word]:
        """Takes the lease of a silent worker, so that its samples go to others."""
        if self.serving.done:
            return
        self.serving.take_back(index)
        yield from self._take_turns(self.gate.drop(index))
        workers = self.workers.values()
        silent = [worker.index for worker in workers if worker.alive and worker.hung(seconds)]
        yield self._report(silent, least_rows=ROWS)

    def _advance(self, worker: _VirtualWorker, answer: Told | None) -> None:
        """Computes `worker` up to its next turn, or up to its death."""
        assert worker.work is not None
        try:
            event = worker.work.send(answer)
            while isinstance(event, Stepped):
                worker.seconds += self._step_seconds(worker)
                if worker.seconds > worker.dies:
                    return
                event = worker.work.send(None)
        except StopIteration:
            self._plan(worker.seconds, LEAVE, worker.index, worker)
            return
        except Exception as error:
            self._note_failure(worker, error)
            return
        self._send(worker, event)

    def _send(self, worker: _VirtualWorker, event: Ask) -> None:
        """Encodes the worker's vector and plans the arrival of its turn."""
        worker.ask, sent_bytes = event, 0
        if event.vector is not None:
            sent_bytes = worker.wire.size_bytes
            if self.assignment.wire != "none":
                worker.sent = np.empty(sent_bytes, np.uint8)
                worker.wire.encode(event.vector, worker.sent)
        arrival_seconds = worker.seconds + self.world.transfer_seconds(sent_bytes)
        self._plan(arrival_seconds, TURN, worker.index, worker)

    def _step_seconds(self, worker: _VirtualWorker) -> float:
        """Draws the seconds of the step that begins now. If it takes longer than a lease, the loss
        of the lease is planned."""
        step_seconds, hung = worker.draw(), self.assignment.policy.lease_seconds
        if step_seconds > hung:
            worker.silences.append((worker.seconds + hung, worker.seconds + step_seconds))
            self._plan(worker.seconds + hung, LEASE, worker.index, worker)
        return step_seconds

    def _begin_step(self, worker: _VirtualWorker) -> None:
        """Without locks: copies the center for the step that begins now, and plans its end."""
        assert worker.stale is not None
        np.copyto(worker.stale.theta, self.theta)
        self._plan(worker.seconds + self._step_seconds(worker), STEP, worker.index, worker)

    def _end_step(self, worker: _VirtualWorker, seconds: float) -> None:
        """Without locks: computes the step and lets it write to the center, both at its end."""
        assert worker.work is not None
        answer, worker.answer = worker.answer, None
        try:
            event = worker.work.send(answer)
        except Exception as error:
            self._note_failure(worker, error)
            return
        worker.seconds = seconds
        # The worker asks at once if a stream had ended before this step.
        if not isinstance(event, Stepped):
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

    def _note_failure(self, worker: _VirtualWorker, error: Exception) -> None:
        """Notes that the learner has raised. If the run goes on, the worker dies at this moment."""
        raised = ProcessError(f"worker {worker.index}", traceback.format_exc(), line_of(error))
        raised.__cause__ = error
        self.raised.append(WorkerRaised(worker.index, raised))
        worker.dies = worker.seconds
        self._plan(worker.seconds, DEATH, worker.index, worker)

    def _serve(self, seconds: float, worker: _VirtualWorker) -> Iterator[Word]:
        """Lets the server take a turn that has arrived."""
        # The turn of a worker that died while it was on its way is lost.
        if not worker.alive:
            return
        ask = worker.ask
        assert ask is not None
        yield from self._pass(seconds)
        yield from self._take_turns(self.gate.push(ask.turn))

    def _take_turns(self, turns: Iterable[Turn]) -> Iterator[Word]:
        """Takes the turns that the forced order lets pass; without an order, all that come."""
        for turn in turns:
            apply_seconds = self.world.apply_seconds if turn.commit is not None else 0.0
            yield from self._pass(self.now + apply_seconds)
            self.ended = self.now
            self.order.append(turn.worker)
            vector = self._decode_vector(self.workers[turn.worker])
            self.serving.take(turn, vector=vector)
            if self.server.samples >= self.progress.due_samples:
                yield self._copy()
        yield from self._report_news()

    def _decode_vector(self, worker: _VirtualWorker) -> Vector | None:
        """The vector of the worker's commit, decoded if it was encoded."""
        if worker.sent is None:
            return None if worker.ask is None else worker.ask.vector
        vector = np.empty_like(self.theta)
        worker.wire.decode(worker.sent, vector)
        worker.sent = None
        return vector

    def _answer(self, worker: _VirtualWorker, delivery: Delivery) -> bool:
        """Carries an answer to the worker, which goes on as soon as it arrives."""
        reply = delivery.reply
        if worker.alive and worker.ask is not None:
            worker.ask = None
            worker.silences.clear()
            worker.seconds = self.now + self.world.transfer_seconds(
                self.theta.nbytes if delivery.pulled else 0
            )
            if self.assignment.rule.lock_free and reply.lease is not None:
                worker.answer = Told(reply, self.theta)
                worker.left = reply.lease.stop - reply.lease.start
                self._begin_step(worker)
            else:
                self._advance(worker, Told(reply, worker.outbox if delivery.pulled else None))
        return True


class _StaleLearner:
    """A learner that computes its gradients at `theta` [size], the center as it was when the step
    began, and not at the center as it is when the step ends."""

    def __init__(self, learner: Learner, center: Vector) -> None:
        self.theta = center.copy()
        self._learner = learner
        self.update, self.rate = learner.update, learner.rate

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        return self._learner.gradient(self.theta, indices, epoch)
