"""The worker's loop as a generator, which is the same on every backend.

    pull ─► window x [theta_k += U(g_k)] ─► commit v ─► pull ...

It yields `Ask` (a turn and its vector; the driver sends `Told`) and `Stepped` (one local step was
computed; the driver sends None). The driver may be a socket, a virtual clock or a function call,
and decides how long each takes. `loop` also yields `Look` (a gradient is wanted; the driver sends
it), for callers whose own loop computes the gradients.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import TrainingError
from dovetail.training.learner import Gradient, Learner, Stepper
from dovetail.training.positions import Positions, Stretch
from dovetail.training.records import Commit, Job, Lease, Refusal, Reply, Turn, Vector, Verdict
from dovetail.training.rules.contract import Local, Rule, new_slots


@dataclass(frozen=True)
class Ask:
    """A turn for the server. `vector` [size] is its commit's. It stays as it is until the turn is
    answered."""

    turn: Turn
    vector: Vector | None = None


@dataclass(frozen=True)
class Told:
    """The answer to a turn. `center` [size] is there if it was asked for, and is valid until the
    next answer; only by a lock-free rule does it change meanwhile."""

    reply: Reply
    center: Vector | None = None


@dataclass(frozen=True)
class Stepped:
    """One local step, over `samples` samples with this mean loss."""

    samples: int
    loss: float


@dataclass(frozen=True)
class Look:
    """The mean gradient at `theta` [size] over the samples at `indices` is wanted. The driver sends
    None if there will be no more gradients: the window then ends early, and the work with it."""

    theta: Vector
    indices: NDArray[np.int64]
    epoch: int


Work = Generator[Ask | Stepped, Told | None, None]
Loop = Generator[Ask | Stepped | Look, Told | Gradient | None, None]


def work(
    job: Job,
    rule: Rule,
    learner: Learner,
    worker: int,
    *,
    sequence: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Work:
    """Runs a worker from its first lease until no sample is left or the run is stopped.

    sequence   number of the last applied commit of the worker that this one replaces; 0: none
    clock      returns seconds; read when a window begins and when its last step is done

    If a commit is refused, its window is dropped together with the rule's own vectors, and the
    worker starts again from a fresh center. (Hogwild!'s steps are in the center already, so their
    samples are trained twice.) Raises TrainingError if the server belongs to another run.
    """
    events = loop(job, rule, learner, worker, sequence=sequence, clock=clock)
    answer: Told | Gradient | None = None
    while True:
        try:
            event = events.send(answer)
        except StopIteration:
            return
        if isinstance(event, Look):
            answer = learner.gradient(event.theta, event.indices, event.epoch)
        else:
            answer = yield event


def loop(
    job: Job,
    rule: Rule,
    stepper: Stepper,
    worker: int,
    *,
    sequence: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Loop:
    """`work` without a learner's gradients: the driver sends them."""
    state = _WorkerLoop(job, rule, stepper, worker, clock)
    fresh = Turn(worker, lease=True, pull=True)
    answer = yield from _ask(fresh)
    while answer.reply.lease is not None:
        state.adopt(answer)
        lease = answer.reply.lease
        goes_on = yield from state.train(lease)
        if not goes_on and not state.steps:
            return
        # Rules that pull first compare the worker's parameters with the present center to compute
        # their commit.
        if rule.pulls_first:
            answer = yield from _ask(Turn(worker, pull=True))
            state.adopt(answer)
            if answer.reply.stop:
                return
        commit, vector = state.commit(lease, sequence + 1, ends=not goes_on)
        turn = Turn(worker, commit, lease=goes_on, pull=not rule.pulls_first)
        answer = yield from _ask(turn, vector)
        if answer.reply.verdict is not Verdict.REFUSED:
            sequence += 1
            if not goes_on:
                state.adopt(answer)
                state.begin()
            continue
        if answer.reply.refusal is Refusal.RUN:
            raise TrainingError(f"the server that was asked does not train run {job.run!r}")
        state.forget()
        # A rule that pulls first got no center with this answer, but must now start from one.
        if answer.reply.lease is not None and answer.center is None:
            answer = yield from _ask(fresh)


def drive(steps: Work, ask: Callable[[Ask], Told], beat: Callable[[], None]) -> None:
    """Runs a worker to its end. `ask` blocks until the answer is there, and `beat` is called after
    each local step."""
    answer: Told | None = None
    try:
        while True:
            event = steps.send(answer)
            answer = None
            if isinstance(event, Stepped):
                beat()
            else:
                answer = ask(event)
    except StopIteration:
        return


def _ask(turn: Turn, vector: Vector | None = None) -> Generator[Ask, Told | Gradient | None, Told]:
    answer = yield Ask(turn, vector)
    assert isinstance(answer, Told), "a turn is answered"
    return answer


class _WorkerLoop:
    """One worker's parameters, and the samples, loss and times of its present window."""

    def __init__(
        self, job: Job, rule: Rule, stepper: Stepper, worker: int, clock: Callable[[], float]
    ) -> None:
        self._job = job
        self._rule = rule
        self._stepper = stepper
        self._worker = worker
        self._clock = clock
        self._local: Local | None = None
        self._base_clock = 0
        self._samples = 0
        self._loss = 0.0  # sum over these samples
        self._seconds = (0.0, 0.0)
        self._positions = Positions(job)
        self._stretch: Stretch | None = None  # whose order is kept
        self._order: NDArray[np.int64] | None = None

    def adopt(self, answer: Told) -> None:
        """Takes over the center that was pulled, if the answer has one."""
        if answer.center is None:
            return
        self._base_clock = answer.reply.clock
        if self._local is None:
            # Without locks, the worker's parameters are the center itself, in shared memory.
            theta = answer.center if self._rule.lock_free else answer.center.copy()
            slots = new_slots(self._rule.worker_slots, theta)
            self._local = Local(theta, answer.center, slots)
            return
        self._local.center = answer.center
        if self._rule.lock_free:
            self._local.theta = answer.center
        elif not self._rule.keeps_theta:
            np.copyto(self._local.theta, answer.center)

    def forget(self) -> None:
        """Drops the worker's own parameters and vectors: the next center replaces them."""
        self._local = None

    @property
    def steps(self) -> int:
        """Local steps of the present window so far."""
        return 0 if self._local is None else self._local.steps

    def begin(self) -> None:
        """Begins a window by the rule, after its first or another pull."""
        local = self._local
        assert local is not None, "the first turn pulls"
        local.steps = self._samples = 0
        self._loss = 0.0
        self._rule.begin(local)

    def train(self, lease: Lease) -> Generator[Stepped | Look, Told | Gradient | None, bool]:
        """Does the local steps of a window, and yields each. Returns whether there may be another
        window."""
        begin_seconds = self._clock()
        self.begin()
        goes_on = True
        for start, stop in self._positions.batches(lease.start, lease.stop):
            stepped = yield from self._step(start, stop)
            if stepped is None:
                goes_on = False
                break
            if stepped.samples:
                yield stepped
            if stepped.samples < stop - start:
                break  # the stream ends here
        self._seconds = (begin_seconds, self._clock())
        return goes_on

    def _step(
        self, start: int, stop: int
    ) -> Generator[Look, Told | Gradient | None, Stepped | None]:
        local = self._local
        assert local is not None
        stretch, fraction = self._positions.stretch(start), self._positions.passes(start)
        if self._stretch != stretch:
            self._stretch, self._order = stretch, self._positions.order(stretch)
        indices = np.arange(start, stop)
        if self._order is not None:
            indices = self._order[start - stretch.start : stop - stretch.start]
        stepper = self._stepper
        gradient = yield Look(self._rule.look(local), indices, stretch.epoch)
        if gradient is None:
            return None
        assert isinstance(gradient, Gradient), "a look is answered by a gradient"
        if gradient.samples:
            local.rate = stepper.rate(fraction)
            self._rule.step(local, gradient.vector, lambda t, g: stepper.update(t, g, fraction))
            local.steps += 1
            self._samples += gradient.samples
            self._loss += gradient.loss * gradient.samples
        return Stepped(gradient.samples, gradient.loss)

    def commit(
        self, lease: Lease, sequence: int, *, ends: bool = False
    ) -> tuple[Commit, Vector | None]:
        """The window's commit and its vector. A commit of no steps only says that the stream has
        ended; its vector is zeros.

        ends   the worker ends within the window. Its commit counts all samples of the lease: with
               fewer it would end the stream for all workers
        """
        local = self._local
        assert local is not None
        begin_seconds, end_seconds = self._seconds
        commit = Commit(
            run=self._job.run,
            worker=self._worker,
            sequence=sequence,
            base_clock=self._base_clock,
            lease=lease.number,
            samples=lease.stop - lease.start if ends else self._samples,
            steps=local.steps,
            rate=float(local.rate),
            loss=float(self._loss / max(1, self._samples)),
            begin_seconds=begin_seconds,
            end_seconds=end_seconds,
        )
        if self._rule.lock_free:
            return commit, None
        return commit, self._rule.message(local) if local.steps else np.zeros_like(local.theta)
