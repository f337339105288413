"""Both ends of a remote worker's connection: the worker itself, and its stand-in beside the server.

    rank k                                    rank 0
    worker ── turn, vector ── TCP ──► stand-in ══ packets, shared memory ══► server
           ◄─ reply, center ────────          ◄═════════════════════════════

To the server a stand-in is a worker of its own machine, by the same link (`WorkerLink`). So the
server knows no network. When it is started again, the stand-in joins it again and repeats the turn,
and the worker sees nothing of that. If the connection breaks, both ends die, and the supervisor
starts another worker.

In a loop of the caller's a rank is a worker itself. Nobody starts its server again, so the links of
all ranks, and of their stand-ins, end with it (`LastLink`, `stand_in_of_loop`).
"""

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dovetail.runtime.parcels import Parcel, unpack_parcel
from dovetail.runtime.processes import Channel
from dovetail.runtime.shared import Block
from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.backends.links import ServerLink
from dovetail.training.backends.messages import Finished, WorkerStart
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import WorkerMemory
from dovetail.training.backends.processes.worker import WorkerLink
from dovetail.training.backends.ranks.connections import Address, Connection, Octets, connect
from dovetail.training.backends.ranks.messages import TrainingMessage
from dovetail.training.records import Job, Vector
from dovetail.training.wire import Wire, make_wire
from dovetail.training.worker import Ask, Told


@dataclass(frozen=True)
class RemoteStart:
    """A remote worker's first message; the descriptor of the learner's block follows.

    address   where rank 0 listens
    token     what all ranks of this run know
    ticket    number of this start of a worker
    """

    plan: WorkerPlan
    learner: Parcel
    address: Address
    token: bytes
    ticket: int


@dataclass(frozen=True)
class LinkLost:
    """The last message of a worker or a stand-in whose connection broke."""

    said: str


def vector_bytes(job: Job) -> int:
    return job.size * np.dtype(job.dtype).itemsize


# ── On the worker's rank ──


def serve(channel: Channel) -> None:
    """Works until no sample is left, then ends when its rank closes the channel."""
    start: RemoteStart = channel.receive()
    plan = start.plan
    make_learner = unpack_parcel(start.learner, channel.receive_descriptor())
    try:
        link = RemoteLink(connect(start.address, start.token), plan, start.ticket)
    except OSError as error:
        channel.send(LinkLost(f"it did not reach rank 0: {error}"))
        return
    try:
        link.run(make_learner)
    except LinkBroken as error:
        channel.send(LinkLost(str(error)))
        return
    channel.send(Finished(plan.worker))
    channel.receive()  # until the other end is closed


class LinkBroken(Exception):
    """The connection with the stand-in or the server broke. Code of the user's that fails by a
    connection of its own raises other exceptions."""


class RemoteLink(ServerLink):
    """The worker's end of the connection. Its methods raise `LinkBroken`."""

    def __init__(self, connection: Connection, plan: WorkerPlan, ticket: int) -> None:
        super().__init__(plan)
        self._connection = connection
        self._wire = make_wire(plan.wire, plan.job.size, plan.job.dtype)
        self._octets = np.empty(self._wire.size_bytes, np.uint8)
        connection.send(TrainingMessage.WORKER, {"ticket": ticket})

    def beat(self) -> None:
        # The next turn says that the connection broke: this may be called by the user's code.
        with suppress(ConnectionError):
            self._connection.send(TrainingMessage.ALIVE, {})

    def join(self) -> int:
        content, _ = self._exchange(TrainingMessage.JOIN, {}, np.zeros(0, np.uint8))
        # The run's clock was read right before the answer was sent.
        self._ahead_seconds = time.perf_counter() - float(content["seconds"])
        return int(content["sequence"])

    def pack(self, ask: Ask) -> Octets:
        """The encoded vector, which is empty if the turn has none."""
        if ask.vector is None or ask.turn.commit is None:
            return self._octets[:0]
        self._wire.encode(ask.vector, self._octets)
        return self._octets

    def exchange(self, ask: Ask, packed: Octets) -> Told:
        content, body = self._exchange(TrainingMessage.TURN, asdict(ask.turn), packed)
        center = body.view(self._plan.job.dtype) if ask.turn.pull and body.size else None
        return Told(frames.reply_of(content), center)

    def copy(self) -> Vector:
        """A copy of the center [size] as it is now; see `WorkerLink.copy`."""
        _, body = self._exchange(TrainingMessage.COPY, {}, np.zeros(0, np.uint8))
        return body.view(self._plan.job.dtype)

    def leave(self) -> None:
        try:
            self._connection.send(TrainingMessage.LEAVE, {})
        except ConnectionError as error:
            raise LinkBroken(str(error)) from error

    def close(self) -> None:
        self._connection.close()

    def _exchange(
        self, kind: str, content: dict[str, Any], octets: Octets
    ) -> tuple[dict[str, Any], Octets]:
        try:
            self._connection.send(kind, content, octets)
            _, answer, body = self._connection.receive(vector_bytes(self._plan.job))
        except ConnectionError as error:
            raise LinkBroken(str(error)) from error
        return answer, body


class LastLink(WorkerLink):
    """The link of a worker beside the server, which no other server will take over."""

    def join(self) -> int:
        """Raises `LinkBroken` if the server is gone."""
        if self._socket is not None:
            raise LinkBroken("the server has ended")
        try:
            return super().join()
        except EOFError:
            raise LinkBroken("the server was not started") from None

    def copy(self) -> Vector:
        """See `WorkerLink.copy`. Raises `LinkBroken` if the server is gone."""
        if (center := super().copy()) is None:
            raise LinkBroken("the server has ended")
        return center

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._channel.close()


# ── On rank 0 ──


def stand_in(channel: Channel) -> None:
    """Does for the server what the remote worker does, until that has left or its connection
    broke."""
    _stand_in(channel, WorkerLink)


def stand_in_of_loop(channel: Channel) -> None:
    """A `stand_in` that ends with the server: no other one will take over its link."""
    _stand_in(channel, LastLink)


def _stand_in(channel: Channel, make_link: type[WorkerLink]) -> None:
    start: WorkerStart = channel.receive()
    memory = WorkerMemory(Block(channel.receive_descriptor()), start.plan.job)
    for _ in range(2):  # the center's and the learner's, which the worker would need
        os.close(channel.receive_descriptor())
    connection = Connection(socket.socket(fileno=channel.receive_descriptor()))
    try:
        # The worker's encoded numbers are decoded here, and go to the server as they are.
        link = make_link(channel, replace(start.plan, wire="none"), memory, None)
        _StandIn(link, start.plan, memory, connection).run()
    except (ConnectionError, LinkBroken) as error:
        channel.send(LinkLost(str(error)))
        return
    channel.send(Finished(start.plan.worker))
    channel.receive()  # until the other end is closed


class _StandIn:
    def __init__(
        self, link: WorkerLink, plan: WorkerPlan, memory: WorkerMemory, connection: Connection
    ) -> None:
        self._link, self._plan, self._memory, self._connection = link, plan, memory, connection
        self._wire: Wire = make_wire(plan.wire, plan.job.size, plan.job.dtype)
        self._vector = np.empty(plan.job.size, plan.job.dtype)

    def run(self) -> None:
        """Raises `ConnectionError` when the connection breaks, or the worker sends nonsense."""
        while True:
            kind, content, body = self._connection.receive(self._wire.size_bytes)
            match kind:
                case TrainingMessage.ALIVE:
                    self._memory.show_life()
                case TrainingMessage.JOIN:
                    sequence = self._link.join()
                    joined = {"sequence": sequence, "seconds": self._link.seconds()}
                    self._connection.send(TrainingMessage.JOINED, joined)
                case TrainingMessage.TURN:
                    self._take(content, body)
                case TrainingMessage.COPY:
                    if (center := self._link.copy()) is None:
                        raise ConnectionError("the server has ended")
                    self._connection.send(TrainingMessage.COPIED, {}, center)
                case TrainingMessage.LEAVE:
                    self._link.leave()
                    return
                case _:
                    raise ConnectionError("it sent what is no frame of ours")

    def _take(self, content: dict[str, Any], body: Octets) -> None:
        understood = frames.turn_of({"turn": content, "payload": None})
        if understood is None or understood[0].worker != self._plan.worker:
            raise ConnectionError("it sent a turn that cannot be read")
        turn, vector = understood[0], None
        if body.size:
            if turn.commit is None or not self._wire.decode(body, self._vector):
                raise ConnectionError("it sent a vector that cannot be read")
            vector = self._vector
        told = self._link.ask(Ask(turn, vector))
        center = told.center if told.center is not None else np.zeros(0, np.uint8)
        self._connection.send(TrainingMessage.REPLY, asdict(told.reply), center)
