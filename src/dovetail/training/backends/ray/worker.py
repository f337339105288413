"""Runs the worker actor, whose link to the server is calls of actors.

    worker 0 ── turn(vector) ──────────────────► server        the center in one piece
    worker 0 ── stage(piece) ─► shards, turn(key) ─► server    the center spread over shards

A call fails when the server's process or node dies. Ray then starts the server again.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.backends.links import ServerLink
from dovetail.training.backends.messages import Joined, StagedCommit, TurnAnswer
from dovetail.training.backends.ray.actors import AGAIN_SECONDS, cuts, result_of
from dovetail.training.checks import checksum
from dovetail.training.learner import MakeLearner
from dovetail.training.records import Vector
from dovetail.training.wire import make_wire
from dovetail.training.worker import Ask, Told

Piece = tuple[int, NDArray[Any]]
"""The checksum and the encoded elements of a part of a vector."""


class RayWorker:
    """The actor: `run` is its whole life."""

    def __init__(
        self, server: Any, shards: Sequence[Any], plan: WorkerPlan, make: MakeLearner
    ) -> None:
        self._server, self._shards, self._plan, self._make = server, shards, plan, make

    def run(self) -> int:
        """Trains until no sample is left, and returns the worker's number."""
        ActorLink(self._server, self._shards, self._plan).run(self._make)
        return self._plan.worker


class ActorLink(ServerLink):
    """The link of a worker actor.

    shards   the actors that the center is spread over; (): it is in one piece, at the server
    """

    def __init__(self, server: Any, shards: Sequence[Any], plan: WorkerPlan) -> None:
        super().__init__(plan)
        self._server, self._shards = server, shards
        self._who = plan.worker, plan.life
        size, dtype = plan.job.size, plan.job.dtype
        self._cuts = cuts(size, len(shards))
        # What an encoding leaves out of a piece stays for the next piece of the same shard.
        self._wires = [
            None if plan.wire == "none" else make_wire(plan.wire, stop - start, dtype)
            for start, stop in self._cuts
        ]
        self._center: Vector = np.empty(size if shards else 0, dtype)

    def beat(self) -> None:
        self._server.alive.remote(*self._who)

    def join(self) -> int:
        while True:
            asked = time.perf_counter()
            joined: Joined | None = _result_of_server(lambda: self._server.join.remote(*self._who))
            if joined is not None:
                # The server read its clock between these two moments; their middle is the best
                # guess when.
                heard = time.perf_counter()
                self._ahead_seconds = (asked + heard) / 2 - joined.seconds
                return int(joined.sequence)
            # The server is being restarted, or has failed, or knows a newer worker of this number.
            # In the last two cases the supervisor ends this worker.
            time.sleep(AGAIN_SECONDS)

    def pack(self, ask: Ask) -> list[Piece] | None:
        """The piece of each shard, or the whole as one; None if the turn has no vector."""
        if ask.vector is None:
            return None
        pieces = []
        for wire, (start, stop) in zip(self._wires, self._cuts, strict=True):
            encoded: NDArray[Any] = ask.vector[start:stop]
            if wire is not None:
                encoded = np.empty(wire.size_bytes, np.uint8)
                wire.encode(ask.vector[start:stop], encoded)
            pieces.append((checksum(encoded), encoded))
        return pieces

    def exchange(self, ask: Ask, packed: list[Piece] | None) -> Told | None:
        worker, _ = self._who
        expected = 0
        sent: NDArray[Any] | StagedCommit | None = None
        if packed is not None and not self._shards:
            expected, sent = packed[0]
        elif packed is not None:
            # The pieces are staged before the turn names their key. The key contains the worker's
            # life, so that a worker that was thought dead and its replacement have different keys.
            text = repr((self._who, ask.turn))
            key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            checks = result_of(
                lambda: [
                    shard.stage.remote(worker, key, *piece)
                    for shard, piece in zip(self._shards, packed, strict=True)
                ]
            )
            if checks is None:
                return None
            sent = StagedCommit(key, tuple(checks))
        answer: TurnAnswer | None = _result_of_server(
            lambda: self._server.turn.remote(*self._who, ask.turn, expected, sent)
        )
        if answer is None:
            return None
        if not answer.number:
            return Told(answer.reply, answer.center)
        pieces = result_of(
            lambda: [shard.fetch.remote(worker, answer.number) for shard in self._shards]
        )
        # A restarted shard has no copy of the center any more. The repeated turn makes another.
        if pieces is None or any(piece is None for piece in pieces):
            return None
        return Told(answer.reply, np.concatenate(pieces, out=self._center))

    def leave(self) -> None:
        _result_of_server(lambda: self._server.leave.remote(*self._who))


def _result_of_server(call: Callable[[], Any]) -> Any:
    """Does what `result_of` does for a call of the server. Also returns None if the server's method
    raised: the server reports that error to the supervisor, which ends the run with it."""
    from ray.exceptions import RayTaskError

    try:
        return result_of(call)
    except RayTaskError:
        time.sleep(AGAIN_SECONDS)
        return None
