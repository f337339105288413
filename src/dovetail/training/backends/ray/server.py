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
from dovetail.training.backends.messages import (
    ActorReport,
    AskCopy,
    AskReport,
    Joined,
    RaisedError,
    StagedCommit,
    TurnAnswer,
)
from dovetail.training.backends.ray.actors import NOTHING, decoded, open_again, start_of
from dovetail.training.backends.ray.far_center import FarCenter
from dovetail.training.liveness import LOOKS
from dovetail.training.records import Turn, Vector
from dovetail.training.server import Delivery
from dovetail.training.serving import Serving, WorkerPort, open_server
from dovetail.training.supervisor import CenterCopy, Gone, Stop
from dovetail.training.wire import make_wire

THREADS = 4
"""The actor takes turns in so many threads."""
ROWS = 5000
"""A report has at most so many rows."""
COPY_SECONDS = 0.002
"""The server checks every so many seconds whether the center is due to be copied."""

Sent = NDArray[Any] | StagedCommit | None


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
    """The actor. If the server itself fails, the supervisor is told the error instead of the next
    report, and no worker is answered any more."""

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
            self._server = open_again(
                # A center in one piece begins anew at each try.
                lambda: open_server(
                    plan,
                    self._far or np.array(self._theta),
                    lambda: time.monotonic() - self._began,
                    restarted=again,
                ),
                again,
            )
            if self._storage.resume and not again:
                self._server.dismiss_late()
            self._serving = Serving(self._server, plan.lease_seconds)
        except Exception as error:  # whatever it is, the supervisor tells
            self._fail(error)

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
            loop, hear = asyncio.get_running_loop(), calls.hear

            def send(delivery: Delivery) -> bool:
                """Answers the turn whose call waits in this loop. Threads call it."""
                loop.call_soon_threadsafe(hear, delivery)
                return True

            port = WorkerPort(send, outbox=outbox)
        calls.answer = None
        self._serving.life.stop(worker)  # until it holds a lease
        sequence = await self._do(self._serving.join, worker, port)
        self._changed.set()
        return Joined(sequence, self._server.seconds())

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
        if self._far is not None:
            self._serving.take(turn, None, sent)
        elif sent is None or isinstance(sent, StagedCommit):
            self._serving.take(turn, None, NOTHING)
        else:
            vector, vector_checksum = decoded(self._wire, sent, expected, calls.inbox)
            self._serving.take(turn, vector_checksum, vector)

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

    async def report(self, ask: AskReport, life: str, seconds: float) -> ActorReport | RaisedError:
        """Reports what is new. Waits at most so many seconds for news, unless the caller knows
        another life of the server, whose counts may not hold."""
        if life == self._life and self._raised is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
            self._changed.clear()
        if self._raised is not None:
            return RaisedError(self._raised)
        report = self._serving.report((ask.rows, ask.events), most=ROWS)
        now = self._server.seconds()
        return ActorReport(self._life, self._node, self._found, now, report)

    async def copy(self, ask: AskCopy) -> CenterCopy | None:
        """A copy of the center as soon as it is due; None if the server has failed."""
        while self._raised is None and not self._serving.is_due(ask.samples):
            await asyncio.sleep(COPY_SECONDS)
        if self._raised is not None:
            return None
        theta, clock, applied_samples = await self._do(self._server.copy)
        seconds = self._server.seconds()
        return CenterCopy(theta, clock, applied_samples, seconds, final=ask.final)

    async def tell(self, message: Gone | Stop) -> None:
        """Takes a message of the supervisor, which is not answered."""
        if isinstance(message, Gone):
            self._calls.pop(message.worker, None)
        if self._raised is not None:
            return
        match message:
            case Gone(worker, detail, for_good):
                evict = partial(self._serving.evict, worker, detail, surely=for_good)
                await self._serve(evict)
            case Stop():
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
