"""The parameter server when its center lies in shard actors: what it has of a vector is a key.

    Server ── stage(key), execute(steps), wait ──► FarCenter ── numbered steps ──► shards

The server's own journal keeps inputs and keys, from which the same numbered steps follow again
after its death; shards pass over those they have done. Its snapshot comes after theirs.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from dovetail.errors import ServerLostError, UsageError
from dovetail.training.backends.contract import Storage
from dovetail.training.backends.ray.messages import Done, Numbered, Staged
from dovetail.training.backends.ray.shard import numbered
from dovetail.training.checks import Check, checksum
from dovetail.training.payloads import Payload
from dovetail.training.records import Refusal, Turn, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.steps import Apply, Combine, Read, Step

AGAIN_SECONDS = 0.1
"""Between two tries to reach a shard that is being restarted."""


class FarCenter:
    """What `Center` is, of shards that are actors.

    tickets   the number of the last steps that were sent
    losses    shards that were found restarted since this was last set to 0
    """

    def __init__(self, shards: Sequence[Any], restarts: int) -> None:
        self.tickets = 0
        self.losses = 0
        self._shards, self._restarts = shards, restarts
        self._lock = threading.Lock()
        self._done = 0
        self._log: dict[int, Numbered] = {}  # since the shards' snapshots
        self._sent: deque[tuple[int, list[Any]]] = deque()
        self._staged: dict[int, Vector] = {}
        self._reads: dict[int, int] = {}
        self._lives: dict[int, str] = {}

    def attach(self, worker: int, inbox: Vector | None, outbox: Vector | None) -> None:
        """Workers fetch from the shards."""

    def read(self, worker: int) -> int:
        """The number of the steps that copied the center for the worker last."""
        return self._reads.get(worker, 0)

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
        message = self._log[self.tickets] = numbered(self.tickets, steps, keys)
        refs = [shard.execute.remote(message) for shard in self._shards]
        self._sent.append((self.tickets, refs))
        return self.tickets

    def wait(self, ticket: int) -> None:
        with self._lock:
            while self._done < ticket:
                number, refs = self._sent.popleft()
                for index, ref in enumerate(refs):
                    if self._reached(index, ref) < number:
                        self._repeat(index, number)
                self._done = number

    def _repeat(self, index: int, number: int) -> None:
        """Send a shard that was lost what it has missed."""
        shard = self._shards[index]
        while (reached := self._reached(index, shard.done.remote())) < number:
            if reached < 0:
                time.sleep(AGAIN_SECONDS)
            else:
                self._reached(index, shard.execute.remote(self._log[reached + 1]))

    def _reached(self, index: int, ref: Any) -> int:
        """How far a shard is by its answer; -1 if it was lost, and is being restarted."""
        import ray
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        try:
            done: Done = ray.get(ref)
        except ActorDiedError as error:
            raise ServerLostError(self._restarts, f"shard {index} of it: {error}") from error
        except RayTaskError:
            raise
        except RayError:
            return -1
        if self._lives.setdefault(index, done.life) != done.life:
            self._lives[index] = done.life
            self.losses += 1
        return done.number

    def done(self, ticket: int) -> bool:
        return self._done >= ticket

    def flush(self) -> None:
        self.wait(self.tickets)

    @property
    def theta(self) -> Vector:
        """A copy of the center [size], after all that was executed."""
        return np.concatenate(self._all("theta"))

    def _all(self, method: str) -> list[Any]:
        """What every shard answers, all having done the same steps."""
        import ray
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        while True:
            self.flush()
            try:
                for index in range(len(self._shards)):
                    self._repeat(index, self.tickets)
                return list(ray.get([getattr(shard, method).remote() for shard in self._shards]))
            except (ActorDiedError, RayTaskError):
                raise
            except RayError:
                time.sleep(AGAIN_SECONDS)

    def vectors(self) -> dict[str, Vector]:
        """Has the shards keep snapshots; what is left to keep here are keys."""
        self._all("snapshot")
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


class ShardedServer(Server):
    """A server whose vectors are elsewhere; `take_staged` in place of `take`."""

    def __init__(self, *fields: Any, **options: Any) -> None:
        super().__init__(*fields, **options)
        self._looked: dict[int, Staged] = {}

    @classmethod
    def start(cls, far: FarCenter, job: Any, rule: Any, storage: Storage, **options: Any) -> Self:
        """A new server, or the one whose state the storage holds. `options`: as of `Server`.
        No estimate of momentum: it would need the values of some coordinates at each commit."""
        resume = options.pop("resume")
        server = cls(job, rule, np.zeros(1, job.dtype), **options)
        state: Any = server._state
        state.center, state.momentum = far, None
        try:
            server._open(storage, resume=resume)
            server._rebuild(None)
        except BaseException:
            server.close()
            raise
        return server

    def take_staged(self, turn: Turn, staged: Staged | None) -> list[Delivery]:
        """As `take`; `staged`: the commit's key, and what the shards found in its pieces."""
        if staged is not None:
            self._looked[turn.worker] = staged
        return self.take(turn)

    def _examine(self, turn: Turn, checksum_: int | None, vector: Vector | None) -> Payload:
        commit = turn.commit
        if commit is None or commit.steps == 0:
            return Payload()
        with self._lock:
            if self._state.ledger.check(commit) is not None:
                return Payload()
        staged = self._looked.pop(turn.worker, None)
        if staged is None:
            return Payload(refusal=Refusal.SHAPE)
        for looked in staged.looked:
            if looked.refusal is not None:
                return Payload(refusal=looked.refusal)
        squares = math.fsum(looked.squares for looked in staged.looked)
        if not math.isfinite(squares):
            return Payload(refusal=Refusal.NORM)
        token = np.frombuffer(bytes.fromhex(staged.key), self.job.dtype)
        return Payload(token, Check(checksum(token), squares))

    def _finish(self, ticket: int, deliveries: list[Delivery]) -> list[Delivery]:
        deliveries = super()._finish(ticket, deliveries)
        far: Any = self._state.center
        if far.losses:
            with self._lock:
                far.losses = 0
                self._do({"kind": "restarted"})
        return deliveries
