"""Runs the server process: links to workers on one side, the supervisor's channel on the other.

    worker ══ packets ══►┐                       ┌► Serving ─► Server ─► packets ══► workers
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
from functools import partial
from pathlib import Path

import numpy as np

from dovetail.errors import DovetailError, JournalError
from dovetail.runtime.processes import Channel
from dovetail.runtime.shared import Block
from dovetail.training.backends.messages import (
    AskCopy,
    AskReport,
    Connect,
    RaisedError,
    Ready,
    ServerStart,
)
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.liveness import LOOKS
from dovetail.training.records import Refusal
from dovetail.training.serving import Serving, WorkerPort, open_server
from dovetail.training.supervisor import CenterCopy, Gone, ServerUp, Stop

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


class _ServerProcess:
    def __init__(self, channel: Channel, start: ServerStart, center: CenterMemory) -> None:
        self.channel, self.plan, self.center = channel, start.plan, center
        origin = time.perf_counter() if start.origin is None else start.origin
        self.server = open_server(
            start.plan,
            center.live,
            lambda: time.perf_counter() - origin,
            restarted=start.restart is not None,
        )
        storage = start.plan.storage
        if start.origin is not None and storage is not None and not self.server.events:
            raise JournalError(str(storage.folder), "it was emptied while the run went on")
        self.serving = Serving(self.server, self.plan.lease_seconds, restart=start.restart)
        self.serving.explain(-1, start.restart or "resumed", len(self.server.events) - 1)
        if start.origin is None:
            self.server.dismiss_late()
        self.asked: AskCopy | None = None
        self.told = False
        self._no_vector = np.zeros(0, self.plan.job.dtype)  # of no commit's shape
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ, self._control)
        up = ServerUp(len(self.server.rows), len(self.server.events), self.server.done)
        # The clock of a resumed run goes on, so the others' do too.
        channel.send(Ready(origin - self.server.ahead_seconds, up))

    def loop(self) -> None:
        """Serves until the channel ends, which raises `EOFError`."""
        while True:
            # While no worker computes, no signs of life are looked for.
            computes = self.serving.life.computing
            look_seconds = self.plan.lease_seconds / LOOKS if computes else None
            for key, _ in self.selector.select(look_seconds):
                key.data()
            self.serving.look_for_life()
            self._tell()

    # -- the supervisor's side

    def _control(self) -> None:
        message = self.channel.receive()
        match message:
            case Connect():
                ends = self.channel.receive_descriptor(), self.channel.receive_descriptor()
                self._connect(message, *ends)
            case Gone():
                self.serving.evict(message.worker, message.detail)
                if message.for_good:
                    self.serving.leave(message.worker)
            case AskReport():
                self._report(message.rows, message.events)
            case AskCopy():
                self.asked = message
            case Stop():
                self.serving.end(message.detail)

    def _report(self, rows: int, events: int) -> None:
        self.channel.send(self.serving.report((rows, events), most=ITEMS))

    def _tell(self) -> None:
        """Sends the copy that was asked for if it is due, and reports once that the run is done."""
        server, request = self.server, self.asked
        if request is not None and self.serving.is_due(request.samples):
            self.asked = None
            np.copyto(self.center.copy, server.theta)
            facts = server.clock, server.samples, server.seconds()
            # The supervisor maps the center's block, so the vector is not sent.
            self.channel.send(CenterCopy(self._no_vector, *facts, final=request.final))
        if self.serving.done and not self.told:
            self.told = True
            self._report(len(server.rows), len(server.events))

    # -- the workers' side

    def _connect(self, message: Connect, end: int, block: int) -> None:
        worker, link = message.worker, socket.socket(fileno=end)
        memory = WorkerMemory(Block(block), self.plan.job)
        link.setblocking(False)

        def close() -> None:
            self.selector.unregister(link)
            link.close()

        port = WorkerPort(
            send=lambda delivery: _send(link, frames.pack_reply(delivery.reply)),
            inbox=memory.inbox,
            outbox=memory.outbox,
            count_life=lambda: int(memory.beat[0]),
            close=close,
            detail=message.detail,
        )
        self.serving.connect(worker, port)
        hear = partial(self._hear, worker, port, link, memory)
        self.selector.register(link, selectors.EVENT_READ, hear)

    def _hear(
        self, worker: int, port: WorkerPort, link: socket.socket, memory: WorkerMemory
    ) -> None:
        """Reads one packet of a worker and acts on it."""
        if self.serving.ports.get(worker) is not port:  # lost since the selector woke
            return
        try:
            packet = link.recv(frames.PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self.serving.evict(worker, "its link broke")
            return
        match frames.unpack(packet):
            case (frames.Kind.JOIN, content):
                sequence = self.serving.join(worker, replaces=content.get("replaces") is True)
                _send(link, frames.pack(frames.Kind.JOINED, {"sequence": sequence}))
            case (frames.Kind.LEAVE, _):
                self.serving.leave(worker)
            case (frames.Kind.TURN, content):
                understood = frames.turn_of(content)
                if understood is None or understood[0].worker != worker:
                    self.serving.refuse(worker, Refusal.CHECKSUM)
                    return
                turn, header = understood
                layout = self.plan.job.size, self.plan.job.dtype
                fits = header is not None and (header.elements, header.dtype) == layout
                expected = None if header is None else header.checksum
                self.serving.take(turn, expected, None if fits else self._no_vector)
            case (frames.Kind.COPY, _):
                # Within a window nothing lies in the inbox. The outbox holds the center that the
                # worker's present window began from, which rules may still need.
                np.copyto(memory.inbox, self.server.theta)
                _send(link, frames.pack(frames.Kind.COPIED, {}))
            case _:
                self.serving.refuse(worker, Refusal.CHECKSUM)


def _send(link: socket.socket, packet: bytes) -> bool:
    """Sends the packet to a worker. Returns whether it could be reached."""
    try:
        link.send(packet)
    except (ConnectionError, BlockingIOError):  # it is gone, or does not read
        return False
    return True
