"""Runs a worker process: its learner, its link to the server, and the loop between them.

A link breaks when its server dies. The worker then waits for a new link, joins again, and repeats
its last turn. The server recognises by the commit's number whether it has taken that turn before.
"""

import socket
import time
from typing import Any

import numpy as np

from dovetail.runtime.parcels import unpack_parcel
from dovetail.runtime.processes import Channel
from dovetail.runtime.shared import Block
from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.backends.processes.messages import Connect, Finished, WorkerStart
from dovetail.training.checks import checksum, copy_and_checksum
from dovetail.training.liveness import on_alive
from dovetail.training.records import Refusal, Vector
from dovetail.training.wire import make_wire
from dovetail.training.worker import Ask, Told, drive, work


def serve(channel: Channel) -> None:
    """Works until no sample is left, then ends when the supervisor closes the channel."""
    start: WorkerStart = channel.receive()
    plan = start.plan
    memory = WorkerMemory(Block(channel.receive_descriptor()), plan.job)
    center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
    make_learner = unpack_parcel(start.learner, channel.receive_descriptor())
    rule = plan.make_rule()
    # Making a learner may take long, so `alive()` works from here on.
    on_alive(memory.show_life)
    learner = make_learner(plan.worker)
    link = WorkerLink(channel, plan, memory, center if rule.lock_free else None)
    sequence = link.join()
    steps = work(plan.job, rule, learner, plan.worker, sequence=sequence, clock=link.seconds)
    drive(steps, link.ask, memory.show_life)
    link.leave()
    channel.send(Finished(plan.worker))
    channel.receive()  # until the other end is closed


class WorkerLink:
    """The worker's end of the link: `ask` blocks until a server has answered, the present one or
    one that takes its place.

    center   the center's block, for a rule without locks, whose workers read and write the center
             itself; None: the server writes a copy of the center to the worker's outbox
    """

    def __init__(
        self, channel: Channel, plan: WorkerPlan, memory: WorkerMemory, center: CenterMemory | None
    ) -> None:
        self._channel, self._plan, self._memory = channel, plan, memory
        self._center = memory.outbox if center is None else center.live
        self._socket: socket.socket | None = None
        self._origin = 0.0
        # A process that had this worker's number before may have left a lease with the server. The
        # first join says so, and the server takes that lease back.
        self._replaces = plan.life > 0
        self._wire = make_wire(plan.wire, plan.job.size, plan.job.dtype)
        encoded_bytes = 0 if plan.wire == "none" else self._wire.size_bytes
        self._encoded = np.empty(encoded_bytes, np.uint8)

    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._origin

    def join(self) -> int:
        """Connects to the server and returns the number of the worker's last applied commit. Waits
        for another server as long as the link breaks."""
        while True:
            connect: Connect = self._channel.receive()
            descriptor = self._channel.receive_descriptor()
            if self._socket is not None:
                self._socket.close()
            self._socket = socket.socket(fileno=descriptor)
            self._origin = connect.origin
            answer = self._exchange(frames.pack(frames.Kind.JOIN, {"replaces": self._replaces}))
            if answer is not None:
                self._replaces = False
                return int(answer["sequence"])

    def ask(self, ask: Ask) -> Told:
        """Sends the turn and returns the answer to it. The same packet is sent again if the server
        could not read it, or after the link broke."""
        packet = frames.pack_turn(ask.turn, self._post(ask))
        while True:
            answer = self._exchange(packet)
            if answer is None:
                self.join()
                continue
            reply = frames.reply_of(answer)
            # A packet that the server could not read is sent again. A commit whose vector was
            # changed on its way is refused for its checksum as well, but that answer has a lease
            # for the worker, or says that the run ends.
            ended = reply.done or reply.stop
            if ended or reply.lease is not None or reply.refusal is not Refusal.CHECKSUM:
                return Told(reply, self._center if ask.turn.pull else None)

    def copy(self) -> Vector | None:
        """A copy of the center [size] as it is now; None if the link broke. It is not a pull: the
        center that the window began from stays as it is. It may not be called within a turn."""
        answer = self._exchange(frames.pack(frames.Kind.COPY, {}))
        return None if answer is None else np.array(self._memory.inbox)

    def leave(self) -> None:
        """Tells the server that the worker has ended."""
        assert self._socket is not None
        try:
            self._socket.send(frames.pack(frames.Kind.LEAVE, {}))
        except ConnectionError:
            return  # a server that comes back is told by the supervisor

    def _post(self, ask: Ask) -> frames.VectorHeader | None:
        """Writes the turn's vector to the inbox, and returns its header; None if it has none."""
        if ask.vector is None or ask.turn.commit is None:
            return None
        inbox = self._memory.inbox
        if self._plan.wire == "none":
            inbox_checksum = copy_and_checksum(inbox, ask.vector)
        # Shared memory need not be saved, but an encoded vector must give the same numbers here as
        # on other backends.
        else:
            self._wire.encode(ask.vector, self._encoded)
            self._wire.decode(self._encoded, inbox)
            inbox_checksum = checksum(inbox)
        return frames.VectorHeader(ask.vector.size, ask.vector.dtype.name, inbox_checksum)

    def _exchange(self, packet: bytes) -> dict[str, Any] | None:
        """Sends the packet and returns the content of the answer; None if the link broke."""
        assert self._socket is not None
        try:
            self._socket.send(packet)
            answer = frames.unpack(self._socket.recv(frames.PACKET_BYTES))
        except ConnectionError:
            return None
        # A link that the server has closed gives an empty packet, which `unpack` cannot read.
        return None if answer is None else answer[1]
