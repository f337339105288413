"""The server process: links to workers on one side, the supervisor's channel on the other.

    worker ══ packets ══►┐                       ┌► Server.take ─► deliveries ══► workers
    worker ══ packets ══►┤ selector, blocking ───┤
    supervisor ─ channel►┘                       └► reports, copies of the center

One thread; it sleeps until something arrives or a lease may have run out. It imports no torch, so
that a new one is up in about a second.
"""

import ctypes
import os
import selectors
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import DovetailError, JournalError
from dovetail.runtime.processes import Channel
from dovetail.runtime.shared import Block
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.backends.processes.messages import (
    AskCopy,
    AskReport,
    Connect,
    Copied,
    Gone,
    Raised,
    Ready,
    Report,
    ServerPlan,
    Stop,
)
from dovetail.training.records import Event, Refusal, Reply, Verdict
from dovetail.training.rules import make_rule
from dovetail.training.server import Delivery, Server

ITEMS = 300
"""At most so many rows a report, and events: less than the channel holds while nobody reads it."""
LOOKS = 8
"""How often within `lease_seconds` the signs of life are looked at."""
ORPHAN_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


def serve(channel: Channel) -> None:
    """Serve until the supervisor is gone."""
    plan: ServerPlan = channel.receive()
    center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
    temporary = plan.storage.folder if plan.storage and plan.temporary else None
    if temporary:
        _remove_if_orphaned(temporary)
    try:
        _Serving(channel, plan, center).loop()
    except DovetailError as error:  # what the caller may mend: a folder of another run
        channel.send(Raised.of(error))
    except EOFError:  # the supervisor has closed the channel, or died
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_if_orphaned(folder: Path) -> None:
    """Have the kernel say when the supervisor ends, instead of killing this process at once."""

    parent = os.getppid()

    def end(_signal: int, _frame: object) -> None:
        # The signal comes with the death of the thread that launched us; the others of a killed
        # process follow. If none does, somebody else wants this process to end.
        patience = time.monotonic() + ORPHAN_SECONDS
        while os.getppid() == parent and time.monotonic() < patience:
            time.sleep(0.01)
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end(signal.SIGTERM, None)


@dataclass
class _Link:
    """A worker's end here.

    holds      a lease
    waits      for an answer
    """

    socket: socket.socket
    memory: WorkerMemory
    detail: str
    joined: bool = False
    holds: bool = False
    waits: bool = False
    beat: int = 0
    beat_seconds: float = 0.0


class _Serving:
    def __init__(self, channel: Channel, plan: ServerPlan, center: CenterMemory) -> None:
        self.channel, self.plan, self.center = channel, plan, center
        self.origin = time.perf_counter() if plan.origin is None else plan.origin
        self.details: dict[int, str] = {}  # of events, by their index
        self.told_origin = self.origin
        self.server = self._make()
        self._note(plan.restart or "resumed", len(self.server.events) - 1)
        self.links: dict[int, _Link] = {}
        self.silent: set[int] = set()
        self.asked: AskCopy | None = None
        self.stopped = self.told = False
        self._no_vector = np.zeros(0, plan.job.dtype)  # of no commit's shape
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ, self._control)
        known = len(self.server.rows), len(self.server.events)
        channel.send(Ready(self.told_origin, *known, self.server.done))

    def _make(self) -> Server:
        """The server, as it was before if the folder says how."""
        plan = self.plan
        rule = make_rule(plan.rule, **plan.options)
        common: dict[str, Any] = {
            "guard": plan.guard,
            "storage": plan.storage,
            "shards": plan.shards or 1,
            "order": plan.order,
            "clock": self._seconds,
            "crash": _killer(*plan.kill) if plan.kill else None,
        }
        if plan.storage is None or (plan.restart is None and not plan.storage.resume):
            return Server(plan.job, rule, self.center.live, **common)
        keeps_theta = rule.lock_free and plan.restart is not None
        server = Server.resume(plan.job, rule, self.center.live, keeps_theta=keeps_theta, **common)
        if plan.origin is not None and not server.events:
            raise JournalError(str(plan.storage.folder), "it was emptied while the run went on")
        if server.events and plan.origin is None:  # its clock goes on, so let the others' do too
            self.told_origin -= max(0.0, server.events[-1].seconds - self._seconds())
            server.dismiss_late()
        return server

    def _seconds(self) -> float:
        return time.perf_counter() - self.origin

    def loop(self) -> None:
        """Until the channel's end, which raises `EOFError`."""
        while True:
            for key, _ in self.selector.select(self._patience_seconds()):
                key.data()
            self._look_for_life()
            self._tell()

    # -- the supervisor's side

    def _control(self) -> None:
        message = self.channel.receive()
        match message:
            case Connect():
                ends = self.channel.receive_descriptor(), self.channel.receive_descriptor()
                self._connect(message, *ends)
            case Gone():
                self._lose(message.worker, message.detail)
                if message.for_good:
                    self._deliver(self.server.leave(message.worker))
            case AskReport():
                self.channel.send(self._report(message.rows, message.events))
            case AskCopy():
                self.asked = message
            case Stop():  # not the ledger's: who resumes the run from its folder goes on
                if not self.stopped:
                    self.stopped = True
                    self._event("stopped", -1, message.detail)

    def _report(self, rows: int, events: int) -> Report:
        known, happened = self.server.rows, self.server.events
        news = enumerate(happened[events : events + ITEMS], events)
        return Report(
            first=(rows, events),
            total=(len(known), len(happened)),
            rows=tuple(known[rows : rows + ITEMS]),
            events=tuple(replace(e, detail=self.details.get(i, e.detail)) for i, e in news),
            samples=self.server.samples,
            silent=tuple(sorted(self.silent)),
            done=self._is_done(),
        )

    def _is_done(self) -> bool:
        return self.stopped or self.server.stopped or self.server.done

    def _tell(self) -> None:
        """Send the copy that was asked for once it is due, and say once that all is done."""
        done = self._is_done()
        asked = self.asked
        if asked is not None and (done or self.server.samples >= asked.samples):
            self.asked = None
            np.copyto(self.center.copy, self.server.theta)
            copied = (
                self.server.clock,
                self.server.samples,
                time.perf_counter() - self.told_origin,
                asked.final,
            )
            self.channel.send(Copied(*copied))
        if done and not self.told:
            self.told = True
            self.channel.send(self._report(len(self.server.rows), len(self.server.events)))

    def _event(self, kind: str, worker: int, detail: str) -> None:
        """One that the server does not know of, and its journal does not keep."""
        seconds = time.perf_counter() - self.told_origin
        self.server.events.append(Event(kind, worker, seconds, detail))

    def _note(self, detail: str, events: int) -> None:
        """Say more of the events from that index on, where the server has said nothing."""
        for index in range(max(events, 0), len(self.server.events)):
            if not self.server.events[index].detail:
                self.details[index] = detail

    def _do(self, act: Callable[[], list[Delivery]], detail: str) -> None:
        """Let the server do something, and send the answers that follow."""
        events = len(self.server.events)
        deliveries = act()
        self._note(detail, events)
        self._deliver(deliveries)

    # -- the workers' side

    def _connect(self, message: Connect, end: int, block: int) -> None:
        worker = message.worker
        self._lose(worker, "replaced")
        link = _Link(
            socket.socket(fileno=end), WorkerMemory(Block(block), self.plan.job), message.detail
        )
        link.beat, link.beat_seconds = int(link.memory.beat[0]), time.perf_counter()
        link.holds = link.beat > 0 and worker in self.server.holders  # of a server that died
        link.socket.setblocking(False)
        self.links[worker] = link
        self.selector.register(link.socket, selectors.EVENT_READ, partial(self._hear, worker))

    def _hear(self, worker: int) -> None:
        """One packet of a worker's."""
        link = self.links.get(worker)
        if link is None:  # lost since the selector woke
            return
        try:
            packet = link.socket.recv(frames.PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self._lose(worker, "its link broke")
            return
        frame = frames.unpack(packet)
        match frame:
            case (frames.Kind.JOIN, content):
                self._join(worker, link, content.get("replaces") is True)
            case (frames.Kind.LEAVE, _):
                self._leave(worker)
            case (frames.Kind.TURN, content):
                self._take(worker, link, content)
            case _:
                self._refuse(worker, Refusal.CHECKSUM)

    def _join(self, worker: int, link: _Link, replaces: bool) -> None:
        if replaces:  # a new process: what its predecessor held is free again
            self._do(partial(self.server.evict, worker), "it was replaced")
        events = len(self.server.events)
        sequence = self.server.join(worker, link.memory.inbox, link.memory.outbox)
        self._note(link.detail, events)
        link.joined = True
        self._send(worker, frames.pack(frames.Kind.JOINED, {"sequence": sequence}))

    def _leave(self, worker: int) -> None:
        self._drop(worker)
        self._deliver(self.server.leave(worker))

    def _take(self, worker: int, link: _Link, content: dict[str, Any]) -> None:
        understood = frames.turn_of(content)
        if understood is None or understood[0].worker != worker:
            self._refuse(worker, Refusal.CHECKSUM)
            return
        turn, payload = understood
        if worker in self.silent:  # it was thought hung, and is back
            self.silent.discard(worker)
            events = len(self.server.events)
            self.server.join(worker, link.memory.inbox, link.memory.outbox)
            self._note("it woke up", events)
        link.waits = True
        if self.stopped:  # nothing counts any more; the supervisor ends us all
            return
        job = self.plan.job
        if payload is None:
            self._deliver(self.server.take(turn, None, self._no_vector))
        elif (payload.elements, payload.dtype) != (job.size, job.dtype):
            self._deliver(self.server.take(turn, payload.checksum, self._no_vector))
        else:
            self._deliver(self.server.take(turn, payload.checksum))

    def _refuse(self, worker: int, refusal: Refusal) -> None:
        """Answer what could not be read: nothing was changed."""
        self.server.refusals[refusal] += 1
        self._event("refused", worker, refusal.value)
        reply = Reply(Verdict.REFUSED, refusal, None, False, self.server.clock, self.server.samples)
        self._deliver([Delivery(worker, reply)])

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Send the answers. Whoever cannot be reached is lost, and that may free other answers."""
        waiting = deque(deliveries)
        while waiting:
            delivery = waiting.popleft()
            worker, reply = delivery.worker, delivery.reply
            link = self.links.get(worker)
            if link is None:
                continue
            if self._send(worker, frames.pack_reply(reply)):
                link.waits = False
                if reply.verdict is not None or reply.lease is not None:
                    link.holds = reply.lease is not None
                link.beat_seconds = time.perf_counter()
                link.beat = int(link.memory.beat[0])
            else:
                waiting.extend(self._lost(worker, "its link broke"))

    def _send(self, worker: int, packet: bytes) -> bool:
        try:
            self.links[worker].socket.send(packet)
        except (ConnectionError, BlockingIOError):  # it is gone, or does not read
            return False
        return True

    def _lose(self, worker: int, detail: str) -> None:
        self._deliver(self._lost(worker, detail))

    def _lost(self, worker: int, detail: str) -> list[Delivery]:
        """Free what a worker held. Once only, whoever notices first: its link or its parent."""
        if worker not in self.links:
            return []
        known = self.links[worker].joined or self.plan.restart is not None
        self._drop(worker)
        if not known:  # whoever never joined is still waited for
            return []
        events = len(self.server.events)
        deliveries = self.server.evict(worker)
        self._note(detail, events)
        return deliveries

    def _drop(self, worker: int) -> None:
        link = self.links.pop(worker)
        self.selector.unregister(link.socket)
        link.socket.close()
        self.silent.discard(worker)

    # -- signs of life

    def _patience_seconds(self) -> float | None:
        """How long nothing need be done: for ever, while nobody computes."""
        if any(link.holds and not link.waits for link in self.links.values()):
            return self.plan.lease_seconds / LOOKS
        return None

    def _look_for_life(self) -> None:
        """Take the lease of whoever computes but has not moved for too long."""
        now = time.perf_counter()
        for worker, link in list(self.links.items()):
            if link.waits or not link.holds:
                continue
            beat = int(link.memory.beat[0])
            if beat != link.beat:
                link.beat, link.beat_seconds = beat, now
            elif now - link.beat_seconds > self.plan.lease_seconds:
                link.holds = False
                self.silent.add(worker)
                detail = f"no sign of life for {now - link.beat_seconds:.3g} s"
                self._do(partial(self.server.evict, worker), detail)


def _killer(point: str, count: int) -> Callable[[str], None]:
    """A hook that kills this process when it passes `point` for the count-th time."""
    passed = 0

    def crash(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return crash
