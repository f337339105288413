"""Runs the server actor: `training.server.Server` behind calls of Ray.

    turn ─► a thread ─► Server.take ─► deliveries ─► futures ─► answers

The actor has one event loop. A turn that is not answered yet is a waiting future and holds no
thread. A commit is read where the object store holds it, without a copy. Ray starts the actor again
when its process or node dies, and `__init__` then continues from the storage.

The center may lie in shard actors. The server then has keys of vectors instead of vectors:

    Server ── stage(key), execute(steps), wait ──► FarCenter ── numbered steps ──► shards

Its own journal keeps inputs and keys, from which the same numbered steps follow again after its
death. Shards skip the steps that they have done. The server saves its snapshot after the shards
have saved theirs.
"""

import asyncio
import math
import shutil
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, ProcessError, ServerLostError, UsageError
from dovetail.training.backends.contract import ServerPlan, Storage
from dovetail.training.backends.ray.messages import (
    ActorReport,
    Joined,
    NumberedSteps,
    ShardProgress,
    StagedCommit,
    TurnAnswer,
)
from dovetail.training.backends.ray.shard import numbered, start_of
from dovetail.training.checks import Check, checksum
from dovetail.training.liveness import LOOKS, LeaseClock
from dovetail.training.records import Refusal, Turn, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.state import CommitPayload
from dovetail.training.steps import Apply, Combine, Read, Step
from dovetail.training.supervisor import CenterCopy, report_of
from dovetail.training.wire import make_wire

THREADS = 4
"""The actor takes turns in so many threads."""
ROWS = 5000
"""A report has at most so many rows."""
COPY_SECONDS = 0.002
"""The server checks every so many seconds whether the center is due to be copied."""
LOCK_SECONDS = 30.0
"""A restarted server waits so long for its former process to release the folder's lock."""
AGAIN_SECONDS = 0.1
"""The time between two tries to reach a shard that is being restarted."""

Sent = NDArray[Any] | StagedCommit | None
_NOTHING: Vector = np.zeros(0)
_WRONG = -1
"""No vector has this checksum: a commit that carries it is refused."""


@dataclass
class _WorkerCalls:
    """The server's record of a worker.

    life     how many actors had its number before; calls of older ones are ignored
    inbox    [size] commits are decoded into this vector, if they are encoded
    holds    it has a lease, so its time runs while it computes
    answer   the future that its turn waits for; None while it computes
    """

    life: int
    inbox: Vector
    outbox: Vector
    holds: bool = False
    answer: asyncio.Future[Delivery] | None = None


class ParameterServer:
    """The actor, whose methods `messages` lists. If the server itself fails, the error is kept for
    the supervisor's next poll, and no worker is answered any more."""

    def __init__(self, plan: ServerPlan, theta: Vector | list[Any], shards: Sequence[Any]) -> None:
        import ray

        context, job = ray.get_runtime_context(), plan.job
        self._plan, self._theta = plan, start_of(theta)
        self._wire = None if plan.wire == "none" else make_wire(plan.wire, job.size, job.dtype)
        self._life = uuid.uuid4().hex
        self._node = context.get_node_id()
        self._links: dict[int, _WorkerCalls] = {}
        self._lease_clock = LeaseClock(plan.lease_seconds)
        self._changed = asyncio.Event()
        self._raised: DovetailError | None = None
        self._watch: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(THREADS, "turn")
        self._far = FarCenter(shards, plan.server_restarts) if shards else None
        self._began = time.monotonic()
        self._ahead_seconds = 0.0
        assert plan.storage is not None, "an actor's run keeps a folder"
        self._storage = plan.storage
        self._found = (self._storage.folder / "run.json").exists()
        try:
            again: bool = context.was_current_actor_reconstructed
            self._server = self._start(again)
            if self._storage.resume and not again:
                self._server.dismiss_late()
            if self._server.events:  # its clock goes on after that of a former life
                self._ahead_seconds = max(0.0, self._server.events[-1].seconds - self._seconds())
        except Exception as error:  # whatever it is, the supervisor tells
            self._fail(error)

    def _start(self, again: bool) -> Server:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return self._make(again or self._storage.resume)
            except UsageError as error:
                if not again or error.option != "storage" or time.monotonic() > until:
                    raise
                time.sleep(0.1)  # its former life has not ended yet

    def _make(self, resume: bool) -> Server:
        plan = self._plan
        rule = plan.make_rule()
        common: dict[str, Any] = {
            "guard": plan.guard,
            "storage": self._storage,
            "order": plan.order,
            "clock": lambda: time.monotonic() - self._began,
        }
        if self._far is not None:
            return ShardedServer.start(self._far, plan.job, rule, resume=resume, **common)
        make = Server.resume if resume else Server
        return make(plan.job, rule, np.array(self._theta), **common)

    def _seconds(self) -> float:
        return time.monotonic() - self._began + self._ahead_seconds

    # The workers' side

    async def join(self, worker: int, life: int) -> Joined | None:
        """Adds a worker that begins, or goes on after a restart of the server. Returns None if the
        server has failed or a newer worker has this number."""
        link = self._links.get(worker)
        if self._raised is not None or (link is not None and link.life > life):
            return None
        self._watch = self._watch or asyncio.create_task(self._look_for_life())
        if link is not None and link.life < life:
            await self._evict(worker)
        outbox = np.empty_like(self._theta)
        inbox = outbox if self._wire is None else np.empty_like(outbox)
        self._links[worker] = _WorkerCalls(life, inbox, outbox)
        self._lease_clock.stop(worker)  # until it holds a lease
        sequence = await self._do(self._server.join, worker, None, outbox)
        return Joined(sequence, self._seconds())

    async def turn(
        self, worker: int, life: int, turn: Turn, expected: int, sent: Sent
    ) -> TurnAnswer | None:
        """Takes a turn and waits for its answer; None: the worker must join first."""
        link = self._links.get(worker)
        if self._raised is not None or link is None or link.life != life or turn.worker != worker:
            return None
        if worker in self._lease_clock.silent:  # it was thought hung, and is back
            self._lease_clock.silent.discard(worker)
            await self._do(self._server.join, worker, None, link.outbox)
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        link.answer = answer
        self._lease_clock.stop(worker)
        self._deliver(await self._do(self._take, link, turn, expected, sent))
        delivery = await answer
        reply = delivery.reply
        if reply.verdict is not None or reply.lease is not None:
            link.holds = reply.lease is not None
        link.answer = None
        if link.holds:
            self._lease_clock.start(worker, time.monotonic())
        if self._far is not None:
            return TurnAnswer(reply, number=self._far.read(worker) if delivery.pulled else 0)
        return TurnAnswer(reply, link.outbox if delivery.pulled else None)

    def _take(self, link: _WorkerCalls, turn: Turn, expected: int, sent: Sent) -> list[Delivery]:
        """Gives the turn to the server. `sent` is the vector or its encoding, whose checksum is
        `expected`, or the key of a staged commit."""
        if isinstance(self._server, ShardedServer):
            return self._server.take_staged(turn, sent if isinstance(sent, StagedCommit) else None)
        if sent is None or isinstance(sent, StagedCommit):
            return self._server.take(turn, None, _NOTHING)
        if self._wire is None:
            return self._server.take(turn, expected, sent)
        if checksum(sent) != expected:
            return self._server.take(turn, _WRONG, link.inbox)
        right = self._wire.decode(sent, link.inbox)
        return self._server.take(turn, None, link.inbox if right else _NOTHING)

    async def alive(self, worker: int, life: int) -> None:
        """A sign of life."""
        link = self._links.get(worker)
        if link is not None and link.life == life:
            self._lease_clock.beat(worker, time.monotonic())

    async def leave(self, worker: int, life: int) -> None:
        """The worker has finished."""
        if worker in self._links and self._links[worker].life == life:
            del self._links[worker]
            self._lease_clock.stop(worker)
            self._deliver(await self._do(self._server.leave, worker))

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            link = self._links.get(delivery.worker)
            if link is not None and link.answer is not None and not link.answer.done():
                link.answer.set_result(delivery)
        self._changed.set()

    async def _evict(self, worker: int) -> None:
        self._deliver(await self._do(self._server.evict, worker))

    async def _look_for_life(self) -> None:
        """Takes the lease of each worker that computes but gave no sign of life for too long."""
        while True:
            await asyncio.sleep(self._plan.lease_seconds / LOOKS)
            for worker in self._lease_clock.overdue(time.monotonic()):
                if worker in self._links:
                    self._links[worker].holds = False
                    await self._evict(worker)

    # The supervisor's side

    async def poll(self, life: str, rows: int, events: int, seconds: float) -> ActorReport:
        """Reports what is new beyond so many rows and events. Waits at most so many seconds for
        news, unless the caller knows another life of the server, whose counts may not hold."""
        if life == self._life and self._raised is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
            self._changed.clear()
        who = self._life, self._node, self._found
        if self._raised is not None:
            return ActorReport(*who, raised=self._raised)
        report = report_of(
            self._server,
            (rows, events),
            done=self._is_done(),
            silent=self._lease_clock.silent,
            most=ROWS,
        )
        return ActorReport(*who, self._seconds(), report)

    async def copy(self, samples: int, final: bool) -> CenterCopy | None:
        """A copy of the center as soon as it has seen so many samples, or the run is done."""
        while self._raised is None and not self._is_done() and self._server.samples < samples:
            await asyncio.sleep(COPY_SECONDS)
        if self._raised is not None:
            return None
        theta, clock, applied_samples = await self._do(self._server.copy)
        return CenterCopy(theta, clock, applied_samples, self._seconds(), final=final)

    async def gone(self, worker: int, for_good: bool) -> None:
        """Notes that the worker's actor has ended. `for_good`: no other takes its place."""
        had_joined = self._links.pop(worker, None) is not None
        self._lease_clock.stop(worker)
        self._lease_clock.silent.discard(worker)
        if had_joined or for_good:  # whoever never joined is still waited for
            await self._evict(worker)

    async def stop(self) -> None:
        """End the run early."""
        if self._raised is None:
            self._deliver(await self._do(self._server.stop))

    async def close(self) -> None:
        """Closes the journal, so that the folder is free."""
        if self._raised is None:
            await self._do(self._server.close)
        if self._plan.temporary:
            shutil.rmtree(self._storage.folder, ignore_errors=True)

    def _is_done(self) -> bool:
        return self._server.done or self._server.stopped

    async def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function in a thread. If it fails, the run fails."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, function, *arguments)
        except Exception as error:
            self._fail(error)
            self._changed.set()
            raise

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, DovetailError):
            error = ProcessError("parameter server", "".join(traceback.format_exception(error)))
        self._raised = self._raised or error


class FarCenter:
    """Does what `Center` does, with shards that are actors.

    tickets   number of the last steps that were sent
    losses    number of restarts of shards that were noticed since this was last set to 0
    """

    def __init__(self, shards: Sequence[Any], restarts: int) -> None:
        self.tickets = 0
        self.losses = 0
        self._shards, self._restarts = shards, restarts
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
                    if self._await_steps(index, ref) < number:
                        self._repeat(index, number)
                self._done = number

    def _repeat(self, index: int, number: int) -> None:
        """Sends a restarted shard the steps that it has missed, until it has done them all."""
        shard = self._shards[index]
        while (reached := self._await_steps(index, shard.done.remote())) < number:
            if reached < 0:
                time.sleep(AGAIN_SECONDS)
            else:
                self._await_steps(index, shard.execute.remote(self._log[reached + 1]))

    def _await_steps(self, index: int, ref: Any) -> int:
        """The number of the last steps that a shard has done, by its answer; -1 if the shard was
        lost and is being restarted."""
        import ray
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        try:
            done: ShardProgress = ray.get(ref)
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
        return np.concatenate(self._call_all("theta"))

    def _call_all(self, method: str) -> list[Any]:
        """The answers of all shards to a call, once all have done the same steps."""
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


class ShardedServer(Server):
    """A server whose vectors are elsewhere; `take_staged` in place of `take`."""

    def __init__(self, *fields: Any, **options: Any) -> None:
        super().__init__(*fields, **options)
        self._staged: dict[int, StagedCommit] = {}

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

    def take_staged(self, turn: Turn, staged: StagedCommit | None) -> list[Delivery]:
        """Does what `take` does. `staged` has the commit's key and the shards' checks of its
        pieces."""
        if staged is not None:
            self._staged[turn.worker] = staged
        return self.take(turn)

    def _examine(self, turn: Turn, checksum_: int | None, vector: Vector | None) -> CommitPayload:
        commit = turn.commit
        if commit is None or commit.steps == 0:
            return CommitPayload()
        with self._lock:
            if self._state.ledger.check(commit) is not None:
                return CommitPayload()
        staged = self._staged.pop(turn.worker, None)
        if staged is None:
            return CommitPayload(refusal=Refusal.SHAPE)
        for check in staged.checks:
            if check.refusal is not None:
                return CommitPayload(refusal=check.refusal)
        squares = math.fsum(check.squares for check in staged.checks)
        if not math.isfinite(squares):
            return CommitPayload(refusal=Refusal.NORM)
        token = np.frombuffer(bytes.fromhex(staged.key), self.job.dtype)
        return CommitPayload(token, Check(checksum(token), squares))

    def _finish(self, ticket: int, deliveries: list[Delivery]) -> list[Delivery]:
        deliveries = super()._finish(ticket, deliveries)
        far: Any = self._state.center
        if far.losses:
            with self._lock:
                far.losses = 0
                self._do({"kind": "restarted"})
        return deliveries
