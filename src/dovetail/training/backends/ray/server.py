"""Runs the server actor: `training.server.Server` behind calls of Ray.

    turn ─► a thread ─► Serving.take ─► Server ─► deliveries ─► futures ─► answers

The actor has one event loop. A turn that is not answered yet is a waiting future and holds no
thread. A commit is read where the object store holds it, without a copy. Ray starts the actor again
when its process or node dies, and `__init__` then continues from the storage.

The center may lie in shard actors; see `far_center`.
"""

import asyncio
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, ProcessError
from dovetail.training.backends.contract import ServerPlan
from dovetail.training.backends.ray.far_center import FarCenter
from dovetail.training.backends.ray.messages import (
    ActorReport,
    Joined,
    StagedCommit,
    TurnAnswer,
)
from dovetail.training.backends.ray.shard import open_again, start_of
from dovetail.training.checks import checksum
from dovetail.training.liveness import LOOKS
from dovetail.training.records import Turn, Vector
from dovetail.training.server import Delivery, Server
from dovetail.training.serving import Serving, WorkerPort
from dovetail.training.supervisor import CenterCopy
from dovetail.training.wire import make_wire

THREADS = 4
"""The actor takes turns in so many threads."""
ROWS = 5000
"""A report has at most so many rows."""
COPY_SECONDS = 0.002
"""The server checks every so many seconds whether the center is due to be copied."""

Sent = NDArray[Any] | StagedCommit | None
_NOTHING: Vector = np.zeros(0)
_WRONG = -1
"""No vector has this checksum: a commit that carries it is refused."""


@dataclass
class _WorkerCalls:
    """What the actor knows of a worker's calls.

    life     how many actors had its number before; calls of older ones are ignored
    inbox    [size] commits are decoded into this vector, if they are encoded
    outbox   [size] its pulls
    answer   the future that its turn waits for; None while it computes
    """

    life: int
    inbox: Vector
    outbox: Vector
    answer: asyncio.Future[Delivery] | None = None

    def hear(self, delivery: Delivery) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(delivery)


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
        self._calls: dict[int, _WorkerCalls] = {}
        self._changed = asyncio.Event()
        self._raised: DovetailError | None = None
        self._watch: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(THREADS, "turn")
        self._far = FarCenter(shards, job.dtype, plan.server_restarts) if shards else None
        self._began = time.monotonic()
        assert plan.storage is not None, "an actor's run keeps a folder"
        self._storage = plan.storage
        self._found = (self._storage.folder / "run.json").exists()
        try:
            again: bool = context.was_current_actor_reconstructed
            self._server = open_again(partial(self._make, again or self._storage.resume), again)
            if self._storage.resume and not again:
                self._server.dismiss_late()
            self._serving = Serving(self._server, plan.lease_seconds)
        except Exception as error:  # whatever it is, the supervisor tells
            self._fail(error)

    def _make(self, resume: bool) -> Server:
        plan = self._plan
        rule = plan.make_rule()
        common: dict[str, Any] = {
            "guard": plan.guard,
            "storage": self._storage,
            "order": plan.order,
            "clock": lambda: time.monotonic() - self._began,
        }
        make = Server.resume if resume else Server
        center = self._far or np.array(self._theta)
        return make(plan.job, rule, center, **common)

    # The workers' side

    async def join(self, worker: int, life: int) -> Joined | None:
        """Adds a worker that begins, or goes on after a restart of the server. Returns None if the
        server has failed or a newer worker has this number."""
        calls = self._calls.get(worker)
        if self._raised is not None or (calls is not None and calls.life > life):
            return None
        self._watch = self._watch or asyncio.create_task(self._look_for_life())
        port = None
        # The port is there unless a former call of this was lost on its way.
        if calls is None or calls.life < life or worker not in self._serving.ports:
            outbox = np.empty_like(self._theta)
            inbox = outbox if self._wire is None else np.empty_like(outbox)
            calls = self._calls[worker] = _WorkerCalls(life, inbox, outbox)
            port = WorkerPort(self._sender(calls), outbox=outbox)
        calls.answer = None
        self._serving.life.stop(worker)  # until it holds a lease
        sequence = await self._do(self._serving.join, worker, port)
        self._changed.set()
        return Joined(sequence, self._server.seconds())

    def _sender(self, calls: _WorkerCalls) -> Callable[[Delivery], bool]:
        """A function that threads may call to answer a turn, whose call waits in this loop."""
        loop = asyncio.get_running_loop()

        def send(delivery: Delivery) -> bool:
            loop.call_soon_threadsafe(calls.hear, delivery)
            return True

        return send

    async def turn(
        self, worker: int, life: int, turn: Turn, expected: int, sent: Sent
    ) -> TurnAnswer | None:
        """Takes a turn and waits for its answer; None: the worker must join first."""
        calls = self._calls.get(worker)
        if self._raised is not None or calls is None or calls.life != life or turn.worker != worker:
            return None
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        calls.answer = answer
        self._serving.life.stop(worker)  # though its turn may wait for a thread
        await self._serve(self._take, calls, turn, expected, sent)
        delivery = await answer
        calls.answer = None
        if self._far is not None:
            number = self._far.read(worker) if delivery.pulled else 0
            return TurnAnswer(delivery.reply, number=number)
        return TurnAnswer(delivery.reply, calls.outbox if delivery.pulled else None)

    def _take(self, calls: _WorkerCalls, turn: Turn, expected: int, sent: Sent) -> None:
        """Gives the turn to the server. `sent` is the vector or its encoding, whose checksum is
        `expected`, or the key of a staged commit."""
        take = self._serving.take
        if self._far is not None:
            take(turn, None, sent)
        elif sent is None or isinstance(sent, StagedCommit):
            take(turn, None, _NOTHING)
        elif self._wire is None:
            take(turn, expected, sent)
        elif checksum(sent) != expected:
            take(turn, _WRONG, calls.inbox)
        else:
            right = self._wire.decode(sent, calls.inbox)
            take(turn, None, calls.inbox if right else _NOTHING)

    async def alive(self, worker: int, life: int) -> None:
        """A sign of life."""
        if worker in self._calls and self._calls[worker].life == life:
            self._serving.life.beat(worker, self._server.seconds())

    async def leave(self, worker: int, life: int) -> None:
        """The worker has finished."""
        if worker in self._calls and self._calls[worker].life == life:
            del self._calls[worker]
            await self._serve(self._serving.leave, worker)

    async def _look_for_life(self) -> None:
        """Takes the lease of each worker that computes but gave no sign of life for too long."""
        while True:
            await asyncio.sleep(self._plan.lease_seconds / LOOKS)
            # Asked in this loop, so that no turn arrives between a worker's time and its silence.
            for worker, detail in self._serving.overdue():
                await self._serve(self._serving.take_back, worker, detail)

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
        report = self._serving.report((rows, events), most=ROWS)
        return ActorReport(*who, self._server.seconds(), report)

    async def copy(self, samples: int, final: bool) -> CenterCopy | None:
        """A copy of the center as soon as it has seen so many samples, or the run is done."""
        while self._raised is None and not self._serving.is_due(samples):
            await asyncio.sleep(COPY_SECONDS)
        if self._raised is not None:
            return None
        theta, clock, applied_samples = await self._do(self._server.copy)
        return CenterCopy(theta, clock, applied_samples, self._server.seconds(), final=final)

    async def gone(self, worker: int, for_good: bool) -> None:
        """Notes that the worker's actor has ended. `for_good`: no other takes its place."""
        self._calls.pop(worker, None)
        if self._raised is None:
            await self._serve(partial(self._serving.evict, worker, surely=for_good))

    async def stop(self) -> None:
        """End the run early."""
        if self._raised is None:
            await self._serve(self._serving.stop)

    async def close(self) -> None:
        """Closes the journal, so that the folder is free."""
        if self._raised is None:
            await self._do(self._server.close)
        if self._plan.temporary:
            shutil.rmtree(self._storage.folder, ignore_errors=True)

    async def _serve(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Does what `_do` does, after which there may be news."""
        await self._do(function, *arguments)
        self._changed.set()

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
