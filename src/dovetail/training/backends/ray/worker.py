"""Runs the worker actor: its learner, its calls of the server, and the loop between them.

    worker 0 ── turn(vector) ──────────────────► server        the center in one piece
    worker 0 ── stage(piece) ─► shards, turn(key) ─► server    the center spread over shards

A call fails when the server's process or node dies. The worker then waits until Ray has restarted
the server, joins again, and repeats its last turn. The server recognises by the commit's number
whether it has taken that turn before.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.backends.ray.messages import StagedCommit
from dovetail.training.backends.ray.shard import cuts
from dovetail.training.checks import checksum
from dovetail.training.learner import MakeLearner
from dovetail.training.liveness import LOOKS, on_alive
from dovetail.training.records import Vector
from dovetail.training.wire import Wire, make_wire
from dovetail.training.worker import Ask, Told, drive, work

AGAIN_SECONDS = 0.1
"""The time between two tries to reach a server or a shard that is being restarted."""

Encode = Callable[[Vector], NDArray[Any]]


class RayWorker:
    """The actor: `run` is its whole life."""

    def __init__(
        self, server: Any, shards: Sequence[Any], plan: WorkerPlan, make: MakeLearner
    ) -> None:
        self._server, self._shards, self._plan, self._make = server, shards, plan, make

    def run(self) -> int:
        """Trains until no sample is left, and returns the worker's number."""
        plan = self._plan
        server = ServerCalls(self._server, self._shards, plan)
        on_alive(server.beat)
        learner = self._make(plan.worker)
        rule = plan.make_rule()
        sequence = server.join()
        steps = work(plan.job, rule, learner, plan.worker, sequence=sequence, clock=server.seconds)
        drive(steps, server.ask, server.beat)
        server.leave()
        return plan.worker


class ServerCalls:
    """A worker's calls of the server. `join` and `ask` wait for the answer, even if Ray has to
    restart the server meanwhile."""

    def __init__(self, server: Any, shards: Sequence[Any], plan: WorkerPlan) -> None:
        self._server, self._plan = server, plan
        self._who = plan.worker, plan.life
        self._center: CenterCalls = (
            ShardedCenterCalls(server, shards, plan) if shards else WholeCenterCalls(server, plan)
        )
        self._ahead_seconds = 0.0  # this process's clock minus the run's clock
        self._beat_seconds = time.monotonic()  # of the last sign of life

    def seconds(self) -> float:
        """Seconds since the run began. The server's clock was read when this worker joined."""
        return time.perf_counter() - self._ahead_seconds

    def beat(self) -> None:
        """Sends a sign of life, if the last one was sent long enough ago."""
        now = time.monotonic()
        if now - self._beat_seconds > self._plan.lease_seconds / LOOKS:
            self._beat_seconds = now
            self._server.alive.remote(*self._who)

    def join(self) -> int:
        """Joins the server and returns the number of the worker's last applied commit."""
        while True:
            asked = time.perf_counter()
            joined = _result_of_server(lambda: self._server.join.remote(*self._who))
            if joined is not None:
                # The server read its clock between these two moments; their middle is the best
                # guess when.
                heard = time.perf_counter()
                self._ahead_seconds = (asked + heard) / 2 - joined.seconds
                return int(joined.sequence)
            # The server is being restarted, or has failed, or knows a newer worker of this number.
            # In the last two cases the supervisor ends this worker.
            time.sleep(AGAIN_SECONDS)

    def ask(self, ask: Ask) -> Told:
        """Sends a turn, again and again until it is answered, and returns the answer."""
        packed = self._center.pack(ask)
        self._beat_seconds = time.monotonic()  # the turn is a sign of life
        while True:
            told = self._center.exchange(ask, packed)
            if told is not None:
                return told
            self.join()

    def leave(self) -> None:
        """Tells the server that this worker has ended. The call is not repeated if it is lost,
        since nothing waits for a worker that has finished."""
        _result_of_server(lambda: self._server.leave.remote(*self._who))


class CenterCalls(Protocol):
    """Sends a worker's turns and vectors, and gets answers and the center.

    `pack` is called once for a turn, then `exchange` until there is an answer. None means that the
    answer was lost with an actor; the worker then joins again and repeats the turn.
    """

    def pack(self, ask: Ask) -> Any: ...

    def exchange(self, ask: Ask, packed: Any) -> Told | None: ...


class WholeCenterCalls:
    """For a center in one piece: the vector is an argument of the turn, the center part of its
    answer."""

    def __init__(self, server: Any, plan: WorkerPlan) -> None:
        self._server = server
        self._who = plan.worker, plan.life
        self._encode = _encoder(plan, plan.job.size)

    def pack(self, ask: Ask) -> tuple[int, NDArray[Any] | None]:
        """(checksum, encoded vector): the last two arguments of the server's `turn`."""
        if ask.vector is None:
            return 0, None
        encoded = self._encode(ask.vector)
        return checksum(encoded), encoded

    def exchange(self, ask: Ask, packed: Any) -> Told | None:
        answer = _result_of_server(lambda: self._server.turn.remote(*self._who, ask.turn, *packed))
        return None if answer is None else Told(answer.reply, answer.center)


class ShardedCenterCalls:
    """For a center in shards: the pieces are staged at the shards before the turn names their key,
    and the center is fetched from the shards."""

    def __init__(self, server: Any, shards: Sequence[Any], plan: WorkerPlan) -> None:
        self._server, self._shards = server, shards
        self._who = plan.worker, plan.life
        self._cuts = cuts(plan.job.size, len(shards))
        self._encoders = [_encoder(plan, stop - start) for start, stop in self._cuts]
        self._center: Vector = np.empty(plan.job.size, plan.job.dtype)

    def pack(self, ask: Ask) -> list[NDArray[Any]] | None:
        """The encoded piece of each shard; None if the turn has no vector."""
        vector = ask.vector
        if vector is None:
            return None
        pieces = zip(self._encoders, self._cuts, strict=True)
        return [encode(vector[start:stop]) for encode, (start, stop) in pieces]

    def exchange(self, ask: Ask, packed: Any) -> Told | None:
        staged = None
        if packed is not None:
            staged = self._stage(ask, packed)
            if staged is None:
                return None
        # The checksum is 0, because the shards have checked the pieces.
        answer = _result_of_server(
            lambda: self._server.turn.remote(*self._who, ask.turn, 0, staged)
        )
        if answer is None:
            return None
        if not answer.number:
            return Told(answer.reply)
        worker = self._who[0]
        pieces = _result(
            lambda: [shard.fetch.remote(worker, answer.number) for shard in self._shards]
        )
        # A restarted shard has no copy of the center any more. The repeated turn makes another.
        if pieces is None or any(piece is None for piece in pieces):
            return None
        return Told(answer.reply, np.concatenate(pieces, out=self._center))

    def _stage(self, ask: Ask, pieces: list[NDArray[Any]]) -> StagedCommit | None:
        """Stages the pieces at the shards. The key contains the worker's life, so that a worker
        that was thought dead and its replacement have different keys."""
        key = hashlib.blake2b(repr((self._who, ask.turn)).encode(), digest_size=8).hexdigest()
        worker = self._who[0]
        checks = _result(
            lambda: [
                shard.stage.remote(worker, key, checksum(piece), piece)
                for shard, piece in zip(self._shards, pieces, strict=True)
            ]
        )
        return None if checks is None else StagedCommit(key, tuple(checks))


def _encoder(plan: WorkerPlan, size: int) -> Encode:
    """A function that encodes a vector [size] as the plan's wire says."""
    if plan.wire == "none":
        return lambda vector: vector
    wire: Wire = make_wire(plan.wire, size, plan.job.dtype)

    def encode(vector: Vector) -> NDArray[Any]:
        octets = np.empty(wire.size_bytes, np.uint8)
        wire.encode(vector, octets)
        return octets

    return encode


def _result_of_server(call: Callable[[], Any]) -> Any:
    """Does what `_result` does for a call of the server. Also returns None if the server's method
    raised: the server reports that error to the supervisor, which ends the run with it."""
    from ray.exceptions import RayTaskError

    try:
        return _result(call)
    except RayTaskError:
        time.sleep(AGAIN_SECONDS)
        return None


def _result(call: Callable[[], Any]) -> Any:
    """The result of calls of actors; None, after a pause, if an actor was lost meanwhile. It may
    have done the call or not.

    call   makes the calls and returns their references. Making a call may fail like its result

    Raises `ActorDiedError` if Ray does not restart the actor, and `RayTaskError` if its method
    raised.
    """
    import ray
    from ray.exceptions import ActorDiedError, RayError, RayTaskError

    try:
        return ray.get(call())
    except (ActorDiedError, RayTaskError):
        raise
    except RayError:
        time.sleep(AGAIN_SECONDS)
        return None
