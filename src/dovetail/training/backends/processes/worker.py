"""Runs a worker process: its learner, its link to the server, and the loop between them.

A link breaks when its server dies. The worker then waits for a new link, joins again, and repeats
its last turn. The server recognises by the commit's number whether it has taken that turn before.
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
from dovetail.training.checks import checksum, copy_and_checksum
from dovetail.training.liveness import on_alive
from dovetail.training.records import Refusal, Reply
from dovetail.training.wire import make_wire
from dovetail.training.worker import Ask, Told, drive, work


def serve(channel: Channel) -> None:
    """Works until no sample is left, then ends when the supervisor closes the channel."""
    start: WorkerStart = channel.receive()
    plan = start.plan
    memory = WorkerMemory(Block(channel.receive_descriptor()), plan.job)
    center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
    make = unpack_parcel(start.learner, channel.receive_descriptor())
    rule = plan.make_rule()
    on_alive(memory.show_life)
    learner = make(plan.worker)
    link = WorkerLink(channel, plan, memory, center if rule.lock_free else None)
    sequence = link.join()
    steps = work(plan.job, rule, learner, plan.worker, sequence=sequence, clock=link.seconds)
    drive(steps, link.ask, memory.show_life)
    link.leave()
    channel.send(Finished(plan.worker))
    channel.receive()  # until the other end is closed


def _was_unreadable(reply: Reply) -> bool:
    """Whether the server could not read the packet. (If a commit's vector was changed on its way,
    the answer has the worker's lease or the end of the run.) Policies count both as refusals."""
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
        """Seconds since the run began."""
        return time.perf_counter() - self._origin

    def join(self) -> int:
        """Connects to the server and returns the number of the worker's last applied commit. Waits
        for another server as long as the link breaks."""
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
        """Writes the vector to the inbox, and returns its header."""
        if ask.vector is None or ask.turn.commit is None:
            return None
        inbox = self._memory.inbox
        if self._plan.wire == "none":
            checked = copy_and_checksum(inbox, ask.vector)
        # Shared memory need not be saved, but an encoded vector must give the same numbers here as
        # on other backends.
        else:
            self._wire.encode(ask.vector, self._octets)
            self._wire.decode(self._octets, inbox)
            checked = checksum(inbox)
        return frames.VectorHeader(ask.vector.size, ask.vector.dtype.name, checked)

    def _center(self) -> NDArray[np.floating]:
        return self._memory.outbox if self._live is None else self._live.live

    def _exchange(self, packet: bytes) -> bytes:
        """Sends the packet and returns the answer; b"" if the link broke."""
        assert self._socket is not None
        try:
            self._socket.send(packet)
            return self._socket.recv(frames.PACKET_BYTES)
        except ConnectionError:
            return b""
