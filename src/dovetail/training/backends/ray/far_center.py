"""Reaches a center that lies in shard actors, on behalf of the server's actor.

    Server ── stage(key), execute(steps), wait ──► FarCenter ── numbered steps ──► shards

The server has keys of vectors instead of vectors. Its own journal keeps inputs and keys, from which
the same numbered steps follow again after its death. Shards skip the steps that they have done. The
server saves its snapshot after the shards have saved theirs.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dovetail.errors import ServerLostError, UsageError
from dovetail.training.backends.messages import NumberedSteps, ShardProgress, StagedCommit
from dovetail.training.backends.ray.actors import result_of
from dovetail.training.center import CommitPayload
from dovetail.training.checks import Check, checksum
from dovetail.training.records import Refusal, Vector
from dovetail.training.steps import Apply, Combine, Read, Step


class FarCenter:
    """Does what `Center` does, with shards that are actors.

    tickets   number of the last steps that were sent
    """

    def __init__(self, shards: Sequence[Any], dtype: str, restarts: int) -> None:
        self.tickets = 0
        self._has_lost = False  # a shard that was started again, since this was last asked
        self._shards, self._dtype, self._restarts = shards, dtype, restarts
        self._lock = threading.Lock()
        self._done = 0
        self._log: dict[int, NumberedSteps] = {}  # since the shards' snapshots
        self._sent: deque[tuple[int, list[Any]]] = deque()
        self._staged: dict[int, Vector] = {}
        self._reads: dict[int, int] = {}
        self._lives: dict[int, str] = {}

    def attach(self, worker: int, inbox: Vector | None, outbox: Vector | None) -> None:
        """Workers fetch from the shards."""

    def read(self, worker: int) -> int:
        """The number of the steps that copied the center for the worker last."""
        return self._reads.get(worker, 0)

    def inbox(self, worker: int) -> None:
        """None: commits lie with the shards."""

    def examine(self, received: Any, expected: int | None) -> CommitPayload:
        """The key of a staged commit as a payload, by the shards' checks of its pieces."""
        if not isinstance(received, StagedCommit):
            return CommitPayload(refusal=Refusal.SHAPE)
        for piece in received.pieces:
            if piece.refusal is not None:
                return piece
        checks = [piece.checked for piece in received.pieces if piece.checked is not None]
        squares = math.fsum(check.squares for check in checks)
        if not math.isfinite(squares):
            return CommitPayload(refusal=Refusal.NORM)
        token = np.frombuffer(bytes.fromhex(received.key), self._dtype)
        return CommitPayload(token, Check(checksum(token), squares))

    def stage(self, worker: int, token: Vector) -> None:
        """The key of the worker's commit, as a vector's bytes."""
        self._staged[worker] = token

    def unstage(self, worker: int) -> None:
        self._staged.pop(worker, None)

    def execute(self, *steps: Step, values: Vector | None = None) -> int:
        assert values is None
        self.tickets += 1
        keys = {}
        for step in steps:
            arrivals = step.arrivals if isinstance(step, Combine) else [step]
            for arrival in arrivals:
                if isinstance(arrival, Apply):
                    token = self._staged.pop(arrival.worker)
                    keys[arrival.worker] = token.tobytes().hex()
                elif isinstance(arrival, Read):
                    self._reads[arrival.worker] = self.tickets
        named = tuple((type(step).__name__, asdict(step)) for step in steps)
        message = NumberedSteps(self.tickets, named, tuple(keys.items()))
        self._log[self.tickets] = message
        refs = [shard.execute.remote(message) for shard in self._shards]
        self._sent.append((self.tickets, refs))
        return self.tickets

    def wait(self, ticket: int) -> None:
        with self._lock:
            while self._done < ticket:
                number, refs = self._sent.popleft()
                for index, ref in enumerate(refs):
                    if self._await_steps(index, ref) < number:
                        self._repeat(index, number)
                self._done = number

    def _repeat(self, index: int, number: int) -> None:
        """Sends a restarted shard the steps that it has missed, until it has done them all."""
        shard = self._shards[index]
        while (reached := self._await_steps(index, shard.done.remote())) < number:
            if reached >= 0:
                self._await_steps(index, shard.execute.remote(self._log[reached + 1]))

    def _await_steps(self, index: int, ref: Any) -> int:
        """The number of the last steps that a shard has done, by its answer; -1 if the shard was
        lost and is being restarted."""
        from ray.exceptions import ActorDiedError

        try:
            done: ShardProgress | None = result_of(lambda: ref)
        except ActorDiedError as error:
            raise ServerLostError(self._restarts, f"shard {index} of it: {error}") from error
        if done is None:
            return -1
        if self._lives.setdefault(index, done.life) != done.life:
            self._lives[index] = done.life
            self._has_lost = True
        return done.number

    def done(self, ticket: int) -> bool:
        return self._done >= ticket

    def lost_a_part(self) -> bool:
        lost, self._has_lost = self._has_lost, False
        return lost

    def flush(self) -> None:
        self.wait(self.tickets)

    @property
    def theta(self) -> Vector:
        """A copy of the center [size], after all that was executed."""
        return np.concatenate(self._call_all("theta"))

    def _call_all(self, method: str) -> list[Any]:
        """The answers of all shards to a call, once all have done the same steps."""

        def call() -> list[Any]:
            for index in range(len(self._shards)):
                self._repeat(index, self.tickets)
            return [getattr(shard, method).remote() for shard in self._shards]

        while True:
            self.flush()
            answers = result_of(call)
            if answers is not None:
                return list(answers)

    def vectors(self) -> dict[str, Vector]:
        """Lets the shards save snapshots, and returns the keys, which are all that is left to save
        here. Steps before the snapshots need not be sent again, so their log is dropped."""
        self._call_all("snapshot")
        self._log.clear()
        return {f"staged {worker}": token for worker, token in sorted(self._staged.items())}

    def counts(self) -> dict[str, int]:
        return {"steps": self.tickets}

    def restore(self, vectors: dict[str, Vector], counts: dict[str, int]) -> None:
        if "steps" not in counts:
            raise UsageError("shards", "the stored run has its center in one piece; resume it so")
        self.tickets = self._done = counts["steps"]
        for name, vector in vectors.items():
            kind, _, worker = name.partition(" ")
            if kind == "staged":
                self._staged[int(worker)] = np.array(vector)

    def close(self) -> None:
        """The caller ends the shards."""
