"""A worker process: its learner, its link to the server, and the loop between them.

A link may break at any time, with its server: the worker waits for another one, joins again, and
says its last turn again. The server tells by the numbers what it has heard already.
"""

import socket
import time

import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.processes import Channel
from dovetail.runtime.shared import Block
from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory, unpack_parcel
from dovetail.training.backends.processes.messages import Connect, Finished, WorkerStart
from dovetail.training.checks import check, copy_and_check
from dovetail.training.liveness import on_alive
from dovetail.training.records import Refusal, Reply
from dovetail.training.wire import make_wire
from dovetail.training.worker import Ask, Told, drive, work


def serve(channel: Channel) -> None:
    """Work until no sample is left; end when the supervisor closes the channel."""
    start: WorkerStart = channel.receive()
    plan = start.plan
    memory = WorkerMemory(Block(channel.receive_descriptor()), plan.job)
    center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
    make = unpack_parcel(start.learner, channel.receive_descriptor())
    rule = plan.make_rule()
    on_alive(memory.show_life)
    learner = make(plan.worker)
    # Called once here so that it is compiled before anyone waits for it.
    copy_and_check(memory.inbox, memory.outbox)
    link = WorkerLink(channel, plan, memory, center if rule.lock_free else None)
    sequence = link.join()
    steps = work(plan.job, rule, learner, plan.worker, sequence=sequence, clock=link.seconds)
    drive(steps, link.ask, memory.show_life)
    link.leave()
    channel.send(Finished(plan.worker))
    channel.receive()  # until the other end is closed


def _was_unreadable(reply: Reply) -> bool:
    """Whether the server could not read the packet; a commit whose vector was changed on its way
    is answered with the worker's lease, or with the end. Policies count both as refusals."""
    ended = reply.done or reply.stop
    return reply.refusal is Refusal.CHECKSUM and reply.lease is None and not ended


class WorkerLink:
    """The worker's end: `ask` blocks until the server has answered, whichever server that is."""

    def __init__(
        self, channel: Channel, plan: WorkerPlan, memory: WorkerMemory, live: CenterMemory | None
    ) -> None:
        self._channel, self._plan, self._memory, self._live = channel, plan, memory, live
        self._socket: socket.socket | None = None
        self._origin = 0.0
        self._replaces = plan.life > 0
        self._wire = make_wire(plan.wire, plan.job.size, plan.job.dtype)
        size_bytes = 0 if plan.wire == "none" else self._wire.size_bytes
        self._octets = np.empty(size_bytes, np.uint8)

    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._origin

    def join(self) -> int:
        """Connect; the number of the last commit that the server has applied."""
        while True:
            connect: Connect = self._channel.receive()
            end = self._channel.receive_descriptor()
            if self._socket is not None:
                self._socket.close()
            self._socket = socket.socket(fileno=end)
            self._origin = connect.origin
            packet = self._exchange(frames.pack(frames.Kind.JOIN, {"replaces": self._replaces}))
            understood = frames.unpack(packet)
            if understood is not None:
                self._replaces = False
                return int(understood[1]["sequence"])

    def ask(self, ask: Ask) -> Told:
        packet = frames.pack_turn(ask.turn, self._post(ask))
        while True:
            understood = frames.unpack(self._exchange(packet))
            if understood is None:
                self.join()
                continue
            reply = frames.reply_of(understood[1])
            if not _was_unreadable(reply):
                return Told(reply, self._center() if ask.turn.pull else None)

    def leave(self) -> None:
        assert self._socket is not None
        try:
            self._socket.send(frames.pack(frames.Kind.LEAVE, {}))
        except ConnectionError:
            return  # a server that comes back is told by the supervisor

    def _post(self, ask: Ask) -> frames.VectorHeader | None:
        """Put the vector where the server finds it."""
        if ask.vector is None or ask.turn.commit is None:
            return None
        inbox = self._memory.inbox
        if self._plan.wire == "none":
            checked = copy_and_check(inbox, ask.vector)
        else:  # nothing need be smaller here, but the numbers are those of other backends
            self._wire.encode(ask.vector, self._octets)
            self._wire.decode(self._octets, inbox)
            checked = check(inbox)
        return frames.VectorHeader(ask.vector.size, ask.vector.dtype.name, checked.checksum)

    def _center(self) -> NDArray[np.floating]:
        return self._memory.outbox if self._live is None else self._live.live

    def _exchange(self, packet: bytes) -> bytes:
        """The answer; empty if the link broke."""
        assert self._socket is not None
        try:
            self._socket.send(packet)
            return self._socket.recv(frames.PACKET_BYTES)
        except ConnectionError:
            return b""
