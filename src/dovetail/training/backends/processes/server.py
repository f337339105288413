"""Runs the server process: links to workers on one side, the supervisor's channel on the other.

    worker ══ packets ══►┐                       ┌► Server.take ─► deliveries ══► workers
    worker ══ packets ══►┤ selector, blocking ───┤
    supervisor ─ channel►┘                       └► reports, copies of the center

It has one thread, which sleeps until something arrives or a lease may have run out. It imports no
torch, so that a new server is up in about a second.
"""

import ctypes
import os
import select
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
    RaisedError,
    Ready,
    ServerStart,
)
from dovetail.training.liveness import LOOKS, LeaseClock
from dovetail.training.records import Event, Refusal, Reply, Verdict
from dovetail.training.server import Delivery, Server
from dovetail.training.supervisor import Gone, ServerReport, ServerUp, Stop, report_of

ITEMS = 300
"""A report has at most so many rows and so many events. That is less than the channel holds while
the supervisor does not read it, so the server does not block."""
ORPHAN_SECONDS = 2.0
"""After the signal that its parent has died, the server waits so long for the supervisor's end."""
_PR_SET_PDEATHSIG = 1


def serve(channel: Channel) -> None:
    """Serves until the supervisor is gone."""
    start: ServerStart = channel.receive()
    plan = start.plan
    center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
    temporary = plan.storage.folder if plan.storage and plan.temporary else None
    if temporary:
        _remove_if_orphaned(temporary, channel)
    try:
        _ServerProcess(channel, start, center).loop()
    except DovetailError as error:  # what the caller may mend: a folder of another run
        channel.send(RaisedError(error))
    except EOFError:  # the supervisor has closed the channel, or died
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_if_orphaned(folder: Path, channel: Channel) -> None:
    """Asks the kernel for a signal when the supervisor dies, so that the folder is removed then."""

    parent, other_end = os.getppid(), select.poll()
    other_end.register(channel, 0)  # asks for nothing but that it was closed

    def end(_signal: int, _frame: object) -> None:
        # The signal comes when what launched this process dies: a thread of the supervisor's
        # process, or its fork server. If the supervisor's process was killed, it closes the channel
        # soon. If not, it goes on, and the next server needs the folder.
        if other_end.poll(1000 * ORPHAN_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end(signal.SIGTERM, None)


@dataclass
class _ServerLink:
    """The server's end of a worker's link.

    detail   names the worker's process, for events
    joined   the worker has joined over this link
    holds    the worker has a lease, so its time runs whenever it does not wait for an answer
    beat     the worker's count of signs of life when it was last read
    """

    socket: socket.socket
    memory: WorkerMemory
    detail: str
    joined: bool = False
    holds: bool = False
    beat: int = 0


class _ServerProcess:
    def __init__(self, channel: Channel, start: ServerStart, center: CenterMemory) -> None:
        self.channel, self.plan, self.center = channel, start.plan, center
        self.restart, self.began = start.restart, start.origin
        self.origin = time.perf_counter() if start.origin is None else start.origin
        self.details: dict[int, str] = {}  # of events, by their index
        self.told_origin = self.origin
        self.server = self._make()
        self._note(self.restart or "resumed", len(self.server.events) - 1)
        self.links: dict[int, _ServerLink] = {}
        self.life = LeaseClock(self.plan.lease_seconds)
        self.asked: AskCopy | None = None
        self.stopped = self.told = False
        self._no_vector = np.zeros(0, self.plan.job.dtype)  # of no commit's shape
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ, self._control)
        has = len(self.server.rows), len(self.server.events)
        channel.send(Ready(self.told_origin, ServerUp(*has, self.server.done)))

    def _make(self) -> Server:
        """The server: a new one, or one with the state that its folder holds."""
        plan = self.plan
        rule = plan.make_rule()
        common: dict[str, Any] = {
            "guard": plan.guard,
            "storage": plan.storage,
            "shards": plan.shards,
            "order": plan.order,
            "clock": self._seconds,
        }
        if plan.storage is None or (self.restart is None and not plan.storage.resume):
            return Server(plan.job, rule, self.center.live, **common)
        keeps_theta = rule.lock_free and self.restart is not None
        server = Server.resume(plan.job, rule, self.center.live, keeps_theta=keeps_theta, **common)
        if self.began is not None and not server.events:
            raise JournalError(str(plan.storage.folder), "it was emptied while the run went on")
        if server.events and self.began is None:  # its clock goes on, so let the others' do too
            self.told_origin -= max(0.0, server.events[-1].seconds - self._seconds())
            server.dismiss_late()
        return server

    def _seconds(self) -> float:
        return time.perf_counter() - self.origin

    def loop(self) -> None:
        """Serves until the channel ends, which raises `EOFError`."""
        while True:
            # While no worker computes, no signs of life are looked for.
            computes = self.life.computing
            look_seconds = self.plan.lease_seconds / LOOKS if computes else None
            for key, _ in self.selector.select(look_seconds):
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
            # The ledger is not stopped, so that a run that is resumed from the folder goes on.
            case Stop():
                if not self.stopped:
                    self.stopped = True
                    self._add_event("stopped", -1, message.detail)

    def _report(self, rows: int, events: int) -> ServerReport:
        report = report_of(
            self.server,
            (rows, events),
            done=self._is_done(),
            silent=self.life.silent,
            most=ITEMS,
        )
        news = enumerate(report.events, report.first[1])
        detailed = (replace(e, detail=self.details.get(i, e.detail)) for i, e in news)
        return replace(report, events=tuple(detailed))

    def _is_done(self) -> bool:
        return self.stopped or self.server.stopped or self.server.done

    def _tell(self) -> None:
        """Sends the copy that was asked for if it is due, and reports once that the run is done."""
        done = self._is_done()
        request = self.asked
        if request is not None and (done or self.server.samples >= request.samples):
            self.asked = None
            np.copyto(self.center.copy, self.server.theta)
            copied = (
                self.server.clock,
                self.server.samples,
                time.perf_counter() - self.told_origin,
                request.final,
            )
            self.channel.send(Copied(*copied))
        if done and not self.told:
            self.told = True
            self.channel.send(self._report(len(self.server.rows), len(self.server.events)))

    def _add_event(self, kind: str, worker: int, detail: str) -> None:
        """Adds an event that the journal does not keep."""
        seconds = time.perf_counter() - self.told_origin
        self.server.events.append(Event(kind, worker, seconds, detail))

    def _note(self, detail: str, events: int) -> None:
        """Adds a detail to events without one, from the index `events` on."""
        for index in range(max(events, 0), len(self.server.events)):
            if not self.server.events[index].detail:
                self.details[index] = detail

    def _do(self, act: Callable[[], list[Delivery]], detail: str) -> None:
        """Lets the server do something, and sends the answers that follow."""
        events = len(self.server.events)
        deliveries = act()
        self._note(detail, events)
        self._deliver(deliveries)

    # -- the workers' side

    def _connect(self, message: Connect, end: int, block: int) -> None:
        worker = message.worker
        self._lose(worker, "replaced")
        link = _ServerLink(
            socket.socket(fileno=end), WorkerMemory(Block(block), self.plan.job), message.detail
        )
        link.beat = int(link.memory.beat[0])
        link.holds = link.beat > 0 and worker in self.server.holders  # of a server that died
        if link.holds:
            self.life.start(worker, time.perf_counter())
        link.socket.setblocking(False)
        self.links[worker] = link
        self.selector.register(link.socket, selectors.EVENT_READ, partial(self._hear, worker))

    def _hear(self, worker: int) -> None:
        """Reads one packet of a worker and acts on it."""
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
                self._drop(worker)
                self._deliver(self.server.leave(worker))
            case (frames.Kind.TURN, content):
                self._take(worker, link, content)
            case (frames.Kind.COPY, _):
                # Within a window nothing lies in the inbox. The outbox holds the center that the
                # worker's present window began from, which rules may still need.
                np.copyto(link.memory.inbox, self.server.theta)
                self._send(worker, frames.pack(frames.Kind.COPIED, {}))
            case _:
                self._refuse(worker, Refusal.CHECKSUM)

    def _join(self, worker: int, link: _ServerLink, replaces: bool) -> None:
        # The worker is a new process, so the lease of the one before it is free again.
        if replaces:
            self._do(partial(self.server.evict, worker), "it was replaced")
        events = len(self.server.events)
        sequence = self.server.join(worker, link.memory.inbox, link.memory.outbox)
        self._note(link.detail, events)
        link.joined = True
        self._send(worker, frames.pack(frames.Kind.JOINED, {"sequence": sequence}))

    def _take(self, worker: int, link: _ServerLink, content: dict[str, Any]) -> None:
        understood = frames.turn_of(content)
        if understood is None or understood[0].worker != worker:
            self._refuse(worker, Refusal.CHECKSUM)
            return
        turn, payload = understood
        if worker in self.life.silent:  # it was thought hung, and is back
            self.life.silent.discard(worker)
            events = len(self.server.events)
            self.server.join(worker, link.memory.inbox, link.memory.outbox)
            self._note("it woke up", events)
        self.life.stop(worker)
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
        """Answers a packet that could not be read with a refusal. Nothing was changed by it."""
        self.server.refusals[refusal] += 1
        self._add_event("refused", worker, refusal.value)
        reply = Reply(Verdict.REFUSED, refusal, None, False, self.server.clock, self.server.samples)
        self._deliver([Delivery(worker, reply)])

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Sends the answers. A worker that cannot be reached is lost, and its samples may allow
        further answers."""
        waiting = deque(deliveries)
        while waiting:
            delivery = waiting.popleft()
            worker, reply = delivery.worker, delivery.reply
            link = self.links.get(worker)
            if link is None:
                continue
            if self._send(worker, frames.pack_reply(reply)):
                if reply.verdict is not None or reply.lease is not None:
                    link.holds = reply.lease is not None
                link.beat = int(link.memory.beat[0])
                if link.holds:
                    self.life.start(worker, time.perf_counter())
            else:
                waiting.extend(self._evict(worker, "its link broke"))

    def _send(self, worker: int, packet: bytes) -> bool:
        try:
            self.links[worker].socket.send(packet)
        except (ConnectionError, BlockingIOError):  # it is gone, or does not read
            return False
        return True

    def _lose(self, worker: int, detail: str) -> None:
        self._deliver(self._evict(worker, detail))

    def _evict(self, worker: int, detail: str) -> list[Delivery]:
        """Evicts a worker and returns the answers that follow. Only the first call does so, since
        both the link and the supervisor may notice a death."""
        if worker not in self.links:
            return []
        had_joined = self.links[worker].joined or self.restart is not None
        self._drop(worker)
        # A worker that never joined holds nothing, and its replacement is still expected.
        if not had_joined:
            return []
        events = len(self.server.events)
        deliveries = self.server.evict(worker)
        self._note(detail, events)
        return deliveries

    def _drop(self, worker: int) -> None:
        link = self.links.pop(worker)
        self.selector.unregister(link.socket)
        link.socket.close()
        self.life.stop(worker)
        self.life.silent.discard(worker)

    # -- signs of life

    def _look_for_life(self) -> None:
        """Takes the lease of each worker that computes but has given no sign of life for too
        long."""
        now = time.perf_counter()
        for worker in self.life.computing:
            link = self.links[worker]
            beat = int(link.memory.beat[0])
            if beat != link.beat:
                link.beat = beat
                self.life.beat(worker, now)
        for worker, silent_seconds in self.life.overdue(now).items():
            if worker in self.links:  # else another one's answer has found it dead
                self.links[worker].holds = False
                detail = f"no sign of life for {silent_seconds:.3g} s"
                self._do(partial(self.server.evict, worker), detail)
