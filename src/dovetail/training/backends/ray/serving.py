"""The server actor: `training.server.Server` behind calls of Ray.

    turn ─► a thread ─► Server.take ─► deliveries ─► futures ─► answers

One event loop; a turn that is not answered yet is a future that waits, not a thread. A commit is
used where the object store holds it, without a copy. Ray starts the actor again when its process or
node dies, and `__init__` then goes on from the storage: nothing else is needed for that.
"""

import asyncio
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, ProcessError, UsageError
from dovetail.training.backends.processes.messages import Copied, Raised
from dovetail.training.backends.ray.messages import (
    Answered,
    Center,
    Joined,
    Report,
    ServerPlan,
    Staged,
)
from dovetail.training.backends.ray.shard import start_of
from dovetail.training.backends.ray.sharding import FarCenter, ShardedServer
from dovetail.training.checks import checksum
from dovetail.training.records import Turn, Vector
from dovetail.training.rules import make_rule
from dovetail.training.server import Delivery, Server
from dovetail.training.wire import make_wire

THREADS = 4
"""That take turns."""
ROWS = 5000
"""At most so many rows a report."""
LOOKS = 8
"""How often within `lease_seconds` the signs of life are looked at."""
COPY_SECONDS = 0.002
"""Between two looks at whether the center is due to be copied."""
Sent = NDArray[Any] | Staged | None
_NOTHING: Vector = np.zeros(0)
_WRONG = -1  # no checksum
LOCK_SECONDS = 30.0
"""How long a new life waits for its former one to let go of the folder."""


@dataclass
class _Link:
    """A worker, as known here.

    life     how many actors had its number before; older ones are not heard
    inbox    where commits are decoded, if they travel in fewer bytes
    holds    a lease
    answer   what its turn waits for; None while it computes
    """

    life: int
    inbox: Vector
    outbox: Vector
    holds: bool = False
    answer: asyncio.Future[Delivery] | None = None
    seen_seconds: float = 0.0


class ParameterServer:
    """The actor. Its methods are what `messages` lists; a failure of the server's own is kept for
    the supervisor to ask for, and no worker is answered any more."""

    def __init__(self, plan: ServerPlan, theta: Vector | list[Any], shards: Sequence[Any]) -> None:
        import ray

        context, job = ray.get_runtime_context(), plan.job
        self._plan, self._theta = plan, start_of(theta)
        self._wire = None if plan.wire == "none" else make_wire(plan.wire, job.size, job.dtype)
        self._life = uuid.uuid4().hex
        self._node = context.get_node_id()
        self._links: dict[int, _Link] = {}
        self._silent: set[int] = set()
        self._changed = asyncio.Event()
        self._raised: Raised | None = None
        self._watch: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(THREADS, "turn")
        self._far = FarCenter(shards, plan.restarts) if shards else None
        self._began = time.monotonic()
        self._ahead_seconds = 0.0
        self._found = (plan.storage.folder / "run.json").exists()
        try:
            again: bool = context.was_current_actor_reconstructed
            self._server = self._start(again)
            if plan.storage.resume and not again:
                self._server.dismiss_late()
            if self._server.events:  # its clock goes on after that of a former life
                self._ahead_seconds = max(0.0, self._server.events[-1].seconds - self._seconds())
        except Exception as error:  # whatever it is, the supervisor tells
            self._fail(error)

    def _start(self, again: bool) -> Server:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return self._make(again or self._plan.storage.resume)
            except UsageError as error:
                if not again or error.option != "storage" or time.monotonic() > until:
                    raise
                time.sleep(0.1)  # its former life has not ended yet

    def _make(self, resume: bool) -> Server:
        plan = self._plan
        rule = make_rule(plan.rule, **plan.options)
        common: dict[str, Any] = {
            "guard": plan.guard,
            "storage": plan.storage,
            "order": plan.order,
            "clock": lambda: time.monotonic() - self._began,
        }
        if self._far is not None:
            return ShardedServer.start(self._far, plan.job, rule, resume=resume, **common)
        make = Server.resume if resume else Server
        return make(plan.job, rule, np.array(self._theta), **common)

    def _seconds(self) -> float:
        return time.monotonic() - self._began + self._ahead_seconds

    # -- the workers' side

    async def join(self, worker: int, life: int) -> Joined | None:
        """A worker begins, or goes on after this server was lost; None if there is none."""
        if self._raised is not None or self._is_older(worker, life):
            return None
        self._watch = self._watch or asyncio.create_task(self._look_for_life())
        link = self._links.get(worker)
        if link is not None and link.life < life:
            await self._evict(worker)
        outbox = np.empty_like(self._theta)
        inbox = outbox if self._wire is None else np.empty_like(outbox)
        self._links[worker] = _Link(life, inbox, outbox, seen_seconds=time.monotonic())
        sequence = await self._do(self._server.join, worker, None, outbox)
        return Joined(sequence, self._seconds())

    async def turn(
        self, worker: int, life: int, turn: Turn, expected: int, sent: Sent
    ) -> Answered | None:
        """The answer, whenever there is one; None: join first."""
        link = self._links.get(worker)
        if self._raised is not None or link is None or link.life != life or turn.worker != worker:
            return None
        if worker in self._silent:  # it was thought hung, and is back
            self._silent.discard(worker)
            await self._do(self._server.join, worker, None, link.outbox)
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        link.answer = answer
        self._deliver(await self._do(self._take, link, turn, expected, sent))
        delivery = await answer
        reply = delivery.reply
        if reply.verdict is not None or reply.lease is not None:
            link.holds = reply.lease is not None
        link.answer, link.seen_seconds = None, time.monotonic()
        if self._far is not None:
            return Answered(reply, number=self._far.read(worker) if delivery.pulled else 0)
        return Answered(reply, link.outbox if delivery.pulled else None)

    def _take(self, link: _Link, turn: Turn, expected: int, sent: Sent) -> list[Delivery]:
        """`sent`: the vector, or its encoding, whose checksum is `expected`; or its key."""
        if isinstance(self._server, ShardedServer):
            return self._server.take_staged(turn, sent if isinstance(sent, Staged) else None)
        if sent is None or isinstance(sent, Staged):
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
            link.seen_seconds = time.monotonic()

    async def leave(self, worker: int, life: int) -> None:
        """The worker has finished."""
        if worker in self._links and self._links[worker].life == life:
            del self._links[worker]
            self._deliver(await self._do(self._server.leave, worker))

    def _is_older(self, worker: int, life: int) -> bool:
        return worker in self._links and self._links[worker].life > life

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            link = self._links.get(delivery.worker)
            if link is not None and link.answer is not None and not link.answer.done():
                link.answer.set_result(delivery)
        self._changed.set()

    async def _evict(self, worker: int) -> None:
        self._deliver(await self._do(self._server.evict, worker))

    async def _look_for_life(self) -> None:
        """Take the lease of whoever computes but gave no sign of life for too long."""
        while True:
            await asyncio.sleep(self._plan.lease_seconds / LOOKS)
            now = time.monotonic()
            for worker, link in list(self._links.items()):
                quiet_seconds = now - link.seen_seconds
                computes = link.holds and link.answer is None
                if computes and quiet_seconds > self._plan.lease_seconds:
                    link.holds = False
                    self._silent.add(worker)
                    await self._evict(worker)

    # -- the supervisor's side

    async def poll(self, life: str, rows: int, events: int, seconds: float) -> Report:
        """What is new beyond so many rows and events, known of that life; waits for it, but no
        longer than so many seconds."""
        if life == self._life and self._raised is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
            self._changed.clear()
        if self._raised is not None:
            return Report(self._life, self._node, self._found, raised=self._raised)
        server = self._server
        total = len(server.rows), len(server.events)
        first = min(rows, total[0]), min(events, total[1])
        return Report(
            life=self._life,
            node=self._node,
            found=self._found,
            first=first,
            rows=tuple(server.rows[first[0] : min(first[0] + ROWS, total[0])]),
            events=tuple(server.events[first[1] : total[1]]),
            total=total,
            samples=server.samples,
            seconds=self._seconds(),
            silent=tuple(sorted(self._silent)),
            done=self._is_done(),
        )

    async def copy(self, samples: int, final: bool) -> Center | None:
        """The center, as soon as it has seen so many samples, or all."""
        while self._raised is None and not self._is_done() and self._server.samples < samples:
            await asyncio.sleep(COPY_SECONDS)
        if self._raised is not None:
            return None
        theta, clock, seen = await self._do(self._server.copy)
        return Center(theta, Copied(clock, seen, self._seconds(), final))

    async def gone(self, worker: int, for_good: bool) -> None:
        """The worker's actor has ended; `for_good`: and no other takes its place."""
        known = self._links.pop(worker, None) is not None
        self._silent.discard(worker)
        if known or for_good:  # whoever never joined is still waited for
            await self._evict(worker)

    async def stop(self) -> None:
        """End the run early."""
        if self._raised is None:
            self._deliver(await self._do(self._server.stop))

    async def close(self) -> None:
        """Let go of the folder."""
        if self._raised is None:
            await self._do(self._server.close)
        if self._plan.temporary:
            shutil.rmtree(self._plan.storage.folder, ignore_errors=True)

    def _is_done(self) -> bool:
        return self._server.done or self._server.stopped

    async def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it in a thread; a failure is the run's."""
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
        self._raised = self._raised or Raised.of(error)
