"""How a worker's vectors reach the server and the center comes back: in one piece, or shard by
shard. What is `None` was lost with an actor; the worker joins again and repeats its turn."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.training.backends.ray.messages import Answered, Staged, WorkerPlan
from dovetail.training.backends.ray.shard import cuts
from dovetail.training.checks import checksum
from dovetail.training.records import Vector
from dovetail.training.wire import Wire, make_wire
from dovetail.training.worker import Ask

Encode = Callable[[Vector], NDArray[Any]]
Call = Callable[[Callable[[], Any]], Any]
"""Gets the result of a call of Ray; None if the actor was lost meanwhile."""


class Transport(Protocol):
    """`pack` once for a turn; then `exchange`, until there is an answer."""

    def pack(self, ask: Ask) -> Any: ...

    def exchange(self, ask: Ask, packed: Any) -> tuple[Answered, Vector | None] | None: ...


def make_transport(server: Any, shards: Sequence[Any], plan: WorkerPlan, call: Call) -> Transport:
    if shards:
        return InPieces(server, shards, plan, call)
    return InOne(server, plan, call)


class InOne:
    """The vector is an argument of the turn, the center part of its answer."""

    def __init__(self, server: Any, plan: WorkerPlan, call: Call) -> None:
        self._server, self._call = server, call
        self._who = plan.worker, plan.life
        self._encode = _encoder(plan, plan.job.size)

    def pack(self, ask: Ask) -> tuple[int, NDArray[Any] | None]:
        if ask.vector is None:
            return 0, None
        sent = self._encode(ask.vector)
        return checksum(sent), sent

    def exchange(self, ask: Ask, packed: Any) -> tuple[Answered, Vector | None] | None:
        answered = self._call(lambda: self._server.turn.remote(*self._who, ask.turn, *packed))
        return None if answered is None else (answered, answered.center)


class InPieces:
    """The pieces are staged at the shards, then the turn says so; the center is fetched there."""

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

    def exchange(self, ask: Ask, packed: Any) -> tuple[Answered, Vector | None] | None:
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

    def _stage(self, ask: Ask, pieces: list[NDArray[Any]]) -> Staged | None:
        """Two workers of one number, of which one was thought dead, have different keys."""
        key = hashlib.blake2b(repr((self._who, ask.turn)).encode(), digest_size=8).hexdigest()
        worker = self._who[0]
        looked = self._call(
            lambda: [
                shard.stage.remote(worker, key, checksum(piece), piece)
                for shard, piece in zip(self._shards, pieces, strict=True)
            ]
        )
        return None if looked is None else Staged(key, tuple(looked))


def _encoder(plan: WorkerPlan, size: int) -> Encode:
    """A vector as it travels."""
    if plan.wire == "none":
        return lambda vector: vector
    wire: Wire = make_wire(plan.wire, size, plan.job.dtype)

    def encode(vector: Vector) -> NDArray[Any]:
        octets = np.empty(wire.size_bytes, np.uint8)
        wire.encode(vector, octets)
        return octets

    return encode
