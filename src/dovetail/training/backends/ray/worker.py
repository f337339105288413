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
from dovetail.training.backends.ray.messages import StagedCommit, TurnAnswer
from dovetail.training.backends.ray.shard import cuts
from dovetail.training.checks import checksum
from dovetail.training.learner import MakeLearner
from dovetail.training.liveness import LOOKS, on_alive
from dovetail.training.records import Vector
from dovetail.training.wire import Wire, make_wire
from dovetail.training.worker import Ask, Told, drive, work

AGAIN_SECONDS = 0.1
"""The time between two tries to reach a server that is being restarted."""

Encode = Callable[[Vector], NDArray[Any]]
Call = Callable[[Callable[[], Any]], Any]
"""A function that gets the result of a call of Ray, or None if the actor was lost meanwhile."""


class RayWorker:
    """The actor: `run` is its whole life."""

    def __init__(
        self, server: Any, shards: Sequence[Any], plan: WorkerPlan, make: MakeLearner
    ) -> None:
        self._server, self._shards, self._plan, self._make = server, shards, plan, make

    def run(self) -> int:
        """Trains until no sample is left, and returns the worker's number."""
        plan = self._plan
        link = ServerCalls(self._server, self._shards, plan)
        on_alive(link.beat)
        learner = self._make(plan.worker)
        rule = plan.make_rule()
        sequence = link.join()
        steps = work(plan.job, rule, learner, plan.worker, sequence=sequence, clock=link.seconds)
        drive(steps, link.ask, link.beat)
        link.leave()
        return plan.worker


class ServerCalls:
    """The worker's end: `ask` blocks until the server has answered, whichever life that is of."""

    def __init__(self, server: Any, shards: Sequence[Any], plan: WorkerPlan) -> None:
        self._server, self._plan = server, plan
        self._who = plan.worker, plan.life
        self._center = _center_calls(server, shards, plan, self._call)
        self._ahead_seconds = 0.0  # this process's clock minus the run's clock
        self._beaten = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the run began. The server's clock was read when this worker joined."""
        return time.perf_counter() - self._ahead_seconds

    def beat(self) -> None:
        """Sends a sign of life, if the last one was sent long enough ago."""
        now = time.monotonic()
        if now - self._beaten > self._plan.lease_seconds / LOOKS:
            self._beaten = now
            self._server.alive.remote(*self._who)

    def join(self) -> int:
        """Joins the server and returns the number of the worker's last applied commit."""
        while True:
            asked = time.perf_counter()
            joined = self._call(lambda: self._server.join.remote(*self._who))
            if joined is not None:
                # The server read its clock between these two moments; their middle is the best
                # guess when.
                heard = time.perf_counter()
                self._ahead_seconds = (asked + heard) / 2 - joined.seconds
                return int(joined.sequence)
            time.sleep(AGAIN_SECONDS)

    def ask(self, ask: Ask) -> Told:
        packed = self._center.pack(ask)
        self._beaten = time.monotonic()
        while True:
            exchanged = self._center.exchange(ask, packed)
            if exchanged is not None:
                return Told(exchanged[0].reply, exchanged[1])
            self.join()

    def leave(self) -> None:
        self._call(lambda: self._server.leave.remote(*self._who))

    def _call(self, call: Callable[[], Any]) -> Any:
        """The call's result; None if the actor was lost meanwhile. It may have done the call or
        not."""
        import ray
        from ray.exceptions import ActorDiedError, RayError

        try:
            return ray.get(call())
        except ActorDiedError:  # no other life follows
            raise
        except RayError:
            time.sleep(AGAIN_SECONDS)
            return None


class CenterCalls(Protocol):
    """Sends a worker's turns and vectors, and gets answers and the center.

    `pack` is called once for a turn, then `exchange` until there is an answer. None means that the
    answer was lost with an actor; the worker then joins again and repeats the turn.
    """

    def pack(self, ask: Ask) -> Any: ...

    def exchange(self, ask: Ask, packed: Any) -> tuple[TurnAnswer, Vector | None] | None: ...


def _center_calls(server: Any, shards: Sequence[Any], plan: WorkerPlan, call: Call) -> CenterCalls:
    if shards:
        return ShardedCenterCalls(server, shards, plan, call)
    return WholeCenterCalls(server, plan, call)


class WholeCenterCalls:
    """For a center in one piece: the vector is an argument of the turn, the center part of its
    answer."""

    def __init__(self, server: Any, plan: WorkerPlan, call: Call) -> None:
        self._server, self._call = server, call
        self._who = plan.worker, plan.life
        self._encode = _encoder(plan, plan.job.size)

    def pack(self, ask: Ask) -> tuple[int, NDArray[Any] | None]:
        if ask.vector is None:
            return 0, None
        sent = self._encode(ask.vector)
        return checksum(sent), sent

    def exchange(self, ask: Ask, packed: Any) -> tuple[TurnAnswer, Vector | None] | None:
        answered = self._call(lambda: self._server.turn.remote(*self._who, ask.turn, *packed))
        return None if answered is None else (answered, answered.center)


class ShardedCenterCalls:
    """For a center in shards: the pieces are staged at the shards before the turn names their key,
    and the center is fetched from the shards."""

    def __init__(self, server: Any, shards: Sequence[Any], plan: WorkerPlan, call: Call) -> None:
        self._server, self._shards, self._call = server, shards, call
        self._who = plan.worker, plan.life
        self._cuts = cuts(plan.job.size, len(shards))
        self._encoders = [_encoder(plan, stop - start) for start, stop in self._cuts]
        self._center: Vector = np.empty(plan.job.size, plan.job.dtype)

    def pack(self, ask: Ask) -> list[NDArray[Any]] | None:
        vector = ask.vector
        if vector is None:
            return None
        pieces = zip(self._encoders, self._cuts, strict=True)
        return [encode(vector[start:stop]) for encode, (start, stop) in pieces]

    def exchange(self, ask: Ask, packed: Any) -> tuple[TurnAnswer, Vector | None] | None:
        staged = None
        if packed is not None:
            staged = self._stage(ask, packed)
            if staged is None:
                return None
        turn = ask.turn
        answered = self._call(lambda: self._server.turn.remote(*self._who, turn, 0, staged))
        if answered is None or not answered.number:
            return None if answered is None else (answered, None)
        worker, number = self._who[0], answered.number
        pieces = self._call(lambda: [shard.fetch.remote(worker, number) for shard in self._shards])
        if pieces is None or any(piece is None for piece in pieces):
            return None
        return answered, np.concatenate(pieces, out=self._center)

    def _stage(self, ask: Ask, pieces: list[NDArray[Any]]) -> StagedCommit | None:
        """Stages the pieces at the shards. The key contains the worker's life, so that a worker
        that was thought dead and its replacement have different keys."""
        key = hashlib.blake2b(repr((self._who, ask.turn)).encode(), digest_size=8).hexdigest()
        worker = self._who[0]
        looked = self._call(
            lambda: [
                shard.stage.remote(worker, key, checksum(piece), piece)
                for shard, piece in zip(self._shards, pieces, strict=True)
            ]
        )
        return None if looked is None else StagedCommit(key, tuple(looked))


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
