"""Runs a worker process, whose link to the server is a pair of sockets and shared memory.

A link breaks when its server dies. The supervisor then sends an end of a new one.
"""

import socket
from typing import Any

import numpy as np

from dovetail.runtime.parcels import unpack_parcel
from dovetail.runtime.processes import Channel
from dovetail.runtime.shared import Block
from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.backends.links import ServerLink
from dovetail.training.backends.messages import Connect, Finished, WorkerStart
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.checks import checksum, copy_and_checksum
from dovetail.training.records import Refusal, Vector
from dovetail.training.wire import make_wire
from dovetail.training.worker import Ask, Told


def serve(channel: Channel) -> None:
    """Works until no sample is left, then ends when the supervisor closes the channel."""
    start: WorkerStart = channel.receive()
    plan = start.plan
    memory = WorkerMemory(Block(channel.receive_descriptor()), plan.job)
    center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
    make_learner = unpack_parcel(start.learner, channel.receive_descriptor())
    shared_center = center if plan.rule.lock_free else None
    WorkerLink(channel, plan, memory, shared_center).run(make_learner)
    channel.send(Finished(plan.worker))
    channel.receive()  # until the other end is closed


class WorkerLink(ServerLink):
    """The link of a worker process.

    center   the center's block, for a rule without locks, whose workers read and write the center
             itself; None: the server writes a copy of the center to the worker's outbox
    """

    def __init__(
        self, channel: Channel, plan: WorkerPlan, memory: WorkerMemory, center: CenterMemory | None
    ) -> None:
        super().__init__(plan)
        self._channel, self._memory = channel, memory
        self._center = memory.outbox if center is None else center.live
        self._socket: socket.socket | None = None
        # A process that had this worker's number before may have left a lease with the server. The
        # first join says so, and the server takes that lease back.
        self._replaces = plan.life > 0
        self._wire = make_wire(plan.wire, plan.job.size, plan.job.dtype)
        encoded_bytes = 0 if plan.wire == "none" else self._wire.size_bytes
        self._encoded = np.empty(encoded_bytes, np.uint8)

    def show_life(self) -> None:
        """Counts each one: that costs nothing."""
        self._memory.show_life()

    beat = show_life

    def join(self) -> int:
        """Waits for another server as long as the link breaks."""
        while True:
            connect: Connect = self._channel.receive()
            descriptor = self._channel.receive_descriptor()
            if self._socket is not None:
                self._socket.close()
            self._socket = socket.socket(fileno=descriptor)
            self._ahead_seconds = connect.origin
            answer = self._answer(frames.pack(frames.Kind.JOIN, {"replaces": self._replaces}))
            if answer is not None:
                self._replaces = False
                return int(answer["sequence"])

    def pack(self, ask: Ask) -> bytes:
        """Writes the turn's vector to the inbox, and returns the turn's packet."""
        if ask.vector is None or ask.turn.commit is None:
            return frames.pack_turn(ask.turn, None)
        inbox = self._memory.inbox
        if self._plan.wire == "none":
            inbox_checksum = copy_and_checksum(inbox, ask.vector)
        # Shared memory need not be saved, but an encoded vector must give the same numbers here as
        # on other backends.
        else:
            self._wire.encode(ask.vector, self._encoded)
            self._wire.decode(self._encoded, inbox)
            inbox_checksum = checksum(inbox)
        header = frames.VectorHeader(ask.vector.size, ask.vector.dtype.name, inbox_checksum)
        return frames.pack_turn(ask.turn, header)

    def exchange(self, ask: Ask, packed: bytes) -> Told | None:
        """A packet that the server could not read is sent again."""
        while (answer := self._answer(packed)) is not None:
            reply = frames.reply_of(answer)
            # A commit whose vector was changed on its way is refused for its checksum as well, but
            # that answer has a lease for the worker, or says that the run ends.
            ended = reply.done or reply.stop
            if ended or reply.lease is not None or reply.refusal is not Refusal.CHECKSUM:
                return Told(reply, self._center if ask.turn.pull else None)
        return None

    def copy(self) -> Vector | None:
        """A copy of the center [size] as it is now; None if the link broke. It is not a pull: the
        center that the window began from stays as it is. It may not be called within a turn."""
        answer = self._answer(frames.pack(frames.Kind.COPY, {}))
        return None if answer is None else np.array(self._memory.inbox)

    def leave(self) -> None:
        """Tells the server that the worker has ended."""
        assert self._socket is not None
        try:
            self._socket.send(frames.pack(frames.Kind.LEAVE, {}))
        except ConnectionError:
            return  # a server that comes back is told by the supervisor

    def _answer(self, packet: bytes) -> dict[str, Any] | None:
        """Sends the packet and returns the content of the answer; None if the link broke."""
        assert self._socket is not None
        try:
            self._socket.send(packet)
            answer = frames.unpack(self._socket.recv(frames.PACKET_BYTES))
        except ConnectionError:
            return None
        # A link that the server has closed gives an empty packet, which `unpack` cannot read.
        return None if answer is None else answer[1]
