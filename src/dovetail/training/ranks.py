"""Links the ranks of a program that `torchrun` started to one parameter server.

    rank 0 ─┬─► server process ══ shared memory ══ rank 0, and each rank on its host
            │                  ══ stand-ins ══ TCP ══ ranks on other hosts
            └── control ──────────────────────── rank 1, 2, ...: greeting, waits for all, the end

The ranks meet as those of the backend `ranks` do (`backends.ranks.meeting`). A rank on rank 0's
host connects by a Unix socket, whose name exists only in the kernel and only until all ranks have
connected, and has the link of a worker of the backend `processes`. A rank on another host connects
by TCP, and has a stand-in beside the server, as a remote worker of the backend `ranks` has. If all
ranks are on one host, no port is opened.

A rank that dies is noticed by its link, and the others go on. If rank 0 or the server dies, all
other ranks fail at their next commit, with one error. Nobody starts either of them again: the ranks
are processes of the caller's, as `torchrun --max-restarts` starts them again.
"""

import itertools
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

import numpy as np
import torch.distributed

from dovetail.errors import (
    ProcessDiedError,
    ProcessError,
    ServerLostError,
    TrainingError,
    UsageError,
)
from dovetail.runtime.parcels import pack_parcel
from dovetail.runtime.processes import Channel, Worker, launch
from dovetail.runtime.ranks import RankPlace, place_of_ranks
from dovetail.runtime.shared import Block
from dovetail.runtime.stopped import STOPPED_SECONDS
from dovetail.training.backends.contract import FailurePolicy, ServerPlan, WorkerPlan
from dovetail.training.backends.messages import (
    AskCopy,
    Connect,
    RaisedError,
    Ready,
    ServerStart,
    WorkerStart,
)
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.backends.processes.transport import SERVER_ENTRY
from dovetail.training.backends.ranks.connections import (
    NOTHING,
    Connection,
    Control,
    Octets,
    connect,
)
from dovetail.training.backends.ranks.meeting import (
    END_SECONDS,
    Meeting,
    MeetingErrors,
    Team,
    check_rule,
    comparable,
    said_of,
)
from dovetail.training.backends.ranks.messages import TrainingMessage
from dovetail.training.backends.ranks.worker import LastLink, LinkBroken, RemoteLink, vector_bytes
from dovetail.training.liveness import on_alive
from dovetail.training.records import Job, Vector
from dovetail.training.rules.contract import Rule
from dovetail.training.server import Delivery, Server
from dovetail.training.serving import Serving, WorkerPort
from dovetail.training.supervisor import CenterCopy
from dovetail.training.worker import Ask, Told

_STAND_IN_ENTRY = "dovetail.training.backends.ranks.worker:stand_in_of_loop"
_NAP_SECONDS = 0.02
_numbers = itertools.count()
"""Numbers the centers of this process. All ranks make theirs in the same order."""


@dataclass(frozen=True)
class CenterFacts:
    """What all ranks must agree on.

    parameters   the parameters' shapes, in order
    window       local steps between commits
    """

    rule: str
    options: dict[str, Any]
    window: int
    dtype: str
    parameters: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.parameters)

    def job(self, workers: int) -> Job:
        """A stream of local steps that does not end: each counts as one sample."""
        return Job(uuid.uuid4().hex, self.size, None, 1, 1, self.window, workers, dtype=self.dtype)


class RankCenter(Protocol):
    """A rank's way to the center.

    rank, ranks   the rank's number, and how many there are
    job           known from the beginning
    """

    rank: int
    ranks: int
    job: Job

    def share(self, theta: Vector) -> Vector:
        """Returns rank 0's `theta` [size]."""
        ...

    def start(self, theta: Vector) -> None:
        """Begins with rank 0's `theta` [size] as the center, once all ranks call this. Raises
        `UsageError` if this rank's is another one."""
        ...

    def meet(self) -> None:
        """Waits until all ranks call this. Raises `TrainingError` if one has ended."""
        ...

    def seconds(self) -> float: ...

    def ask(self, ask: Ask) -> Told: ...

    def show_life(self) -> None: ...

    def copy(self) -> Vector:
        """A copy of the center [size] as it is now."""
        ...

    def finish(self, clock: int, theta: Vector | None) -> Vector:
        """Leaves, waits until all ranks have left or died, and returns the last center [size]; with
        `theta` [size], instead of the center, that of the rank whose `clock` is highest."""
        ...

    def close(self) -> None:
        """Ends whatever is left. May be called twice."""
        ...


def open_center(
    rule: Rule, facts: CenterFacts, timeout_seconds: float, listen: str = ""
) -> RankCenter:
    """The center of this program: shared by torchrun's ranks, or of this process alone.

    timeout_seconds   how long the ranks wait for each other to begin, and how long one may be
                      silent before it counts as hung
    listen            the address on which rank 0 listens for ranks on other hosts; see
                      `RanksOptions`
    """
    joined = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        joined = torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = place_of_ranks("", joined)
    if place is None:
        return LoneCenter(rule, facts)
    if place.is_spread:
        check_rule(rule)
    return SharedCenter(rule, facts, place, timeout_seconds, listen)


class LoneCenter:
    """The server in this process, for a program of one rank; see `RankCenter`."""

    def __init__(self, rule: Rule, facts: CenterFacts) -> None:
        self.rank, self.ranks, self.job = 0, 1, facts.job(1)
        self._rule = rule
        self._start_seconds = time.perf_counter()
        self._serving: Serving | None = None
        self._answers: deque[Delivery] = deque()

    def share(self, theta: Vector) -> Vector:
        return theta

    def start(self, theta: Vector) -> None:
        center = theta.copy()
        self._serving = Serving(Server(self.job, self._rule, center, clock=self.seconds))
        # Without locks the worker writes to the center itself.
        outbox = None if self._rule.lock_free else np.empty_like(theta)
        self._pulled = center if outbox is None else outbox
        self._serving.join(0, WorkerPort(self._answer, outbox=outbox))

    def _answer(self, delivery: Delivery) -> bool:
        self._answers.append(delivery)
        return True

    def meet(self) -> None: ...

    def seconds(self) -> float:
        return time.perf_counter() - self._start_seconds

    def ask(self, ask: Ask) -> Told:
        assert self._serving is not None
        self._serving.take(ask.turn, vector=ask.vector)
        delivery = self._answers.popleft()
        return Told(delivery.reply, self._pulled if delivery.pulled else None)

    def show_life(self) -> None: ...

    def copy(self) -> Vector:
        assert self._serving is not None
        return self._serving.server.copy()[0]

    def finish(self, clock: int, theta: Vector | None) -> Vector:
        return self.copy() if theta is None else theta

    def close(self) -> None:
        if self._serving is not None:
            self._serving.server.close()


def _absent(_host: str, ranks: list[int], seconds: float) -> TrainingError:
    if ranks == [0]:
        return TrainingError(f"rank 0 made no optimizer within {seconds:g} s")
    missing = ", ".join(map(str, ranks))
    return TrainingError(f"no optimizer of rank {missing} within {seconds:g} s")


def _ended(rank: int) -> TrainingError:
    return TrainingError(f"rank {rank} has ended while the other ranks wait for it")


_ERRORS = MeetingErrors(
    lost=lambda _host, rank, said: _ended(rank) if rank else TrainingError(said),
    absent=_absent,
    unlike=lambda _host, rank, name, given, expected: (
        f"rank {rank} has others than rank 0"
        if name == "parameters"
        else f"rank {rank} has {given!r}, and rank 0 {expected!r}"
    ),
)


class SharedCenter:
    """A rank's way to the server that rank 0 started; see `RankCenter`."""

    def __init__(
        self, rule: Rule, facts: CenterFacts, place: RankPlace, timeout_seconds: float, listen: str
    ) -> None:
        self.rank, self.ranks, self.job = place.rank, place.ranks, facts.job(place.ranks)
        self._host: _Host | None = None
        self._control: Control | None = None
        self._link: LastLink | RemoteLink | None = None
        # The function that `alive()` called before this began, and whether it calls this.
        self._alive_before: Callable[[], None] | None = None
        self._is_heard = False
        meeting = Meeting(place, f"optimizer/{next(_numbers)}", _ERRORS, timeout_seconds)
        agreed = comparable(vars(facts))
        policy = FailurePolicy(lease_seconds=timeout_seconds)
        plan = WorkerPlan(self.job, rule, self.rank, 0, policy=policy)
        try:
            if place.rank == 0:
                self._host = _Host(meeting, plan)
                self._link = self._link_beside(self._host.gather(agreed, listen), plan)
            else:
                self._link = self._join(meeting, agreed, plan)
        except BaseException as error:
            if place.rank:
                # Rank 0 may still wait for this one.
                meeting.tell_failure(said_of(error))
            self.close()
            raise

    def _join(
        self, meeting: Meeting, agreed: dict[str, Any], plan: WorkerPlan
    ) -> LastLink | RemoteLink:
        """Greets rank 0, and opens this rank's link once all ranks are there."""
        is_beside = meeting.place.is_beside
        connection, address, token = meeting.join(agreed, beside=is_beside)
        self._control = _control(connection, "", self.job)
        welcome, _ = self._hear(TrainingMessage.WELCOME)
        self.job = replace(self.job, run=str(welcome["run"]))
        plan = replace(plan, job=self.job)
        try:
            link = connect(address, token)
            if not is_beside:
                remote = RemoteLink(link, plan, self.rank)
                # Until all are connected, rank 0 takes any other message for this rank's end.
                self._hear(TrainingMessage.ARRIVED)
                return remote
            link.send(TrainingMessage.WORKER, {"ticket": self.rank})
            return self._link_beside(Channel(link.detach()), plan)
        except (OSError, EOFError):
            # Rank 0 says why, or is gone.
            self._hear(TrainingMessage.END)
            raise _server_lost() from None

    def _link_beside(self, channel: Channel, plan: WorkerPlan) -> LastLink:
        """The link of a rank on rank 0's host, which gives the descriptors of this rank's block
        and, by a rule without locks, of the center's."""
        memory = WorkerMemory(Block(channel.receive_descriptor()), plan.job)
        center = None
        if plan.rule.lock_free:
            center = CenterMemory(Block(channel.receive_descriptor()), plan.job)
        return LastLink(channel, plan, memory, center)

    def share(self, theta: Vector) -> Vector:
        if self._host is not None:
            self._host.meet(theta)
            return theta.copy()
        return self._arrive().view(theta.dtype)

    def start(self, theta: Vector) -> None:
        if self._host is not None:
            self._host.start_server(theta)
        with _until_lost():
            self._opened.join()
            # Nobody has committed yet.
            is_rank_0s = self._opened.copy().tobytes() == theta.tobytes()
        if not is_rank_0s:
            raise UsageError(
                "parameters",
                f"those of rank {self.rank} were changed since its optimizer was made and are not "
                "those of rank 0; load the same weights on every rank",
            )
        self._alive_before = on_alive(self.show_life)
        self._is_heard = True
        self.meet()

    def meet(self) -> None:
        if self._host is not None:
            self._host.meet()
        else:
            self._arrive()

    def seconds(self) -> float:
        return self._opened.seconds()

    def ask(self, ask: Ask) -> Told:
        with _until_lost():
            return self._opened.ask(ask)

    def show_life(self) -> None:
        self._opened.show_life()
        # Another optimizer of this program lives as well.
        if self._alive_before is not None:
            self._alive_before()

    def copy(self) -> Vector:
        with _until_lost():
            return self._opened.copy()

    def finish(self, clock: int, theta: Vector | None) -> Vector:
        with suppress(LinkBroken):  # what broke it is heard below
            self._opened.leave()
        if self._host is not None:
            return self._host.end(clock, theta)
        assert self._control is not None
        brought = NOTHING if theta is None else theta
        self._control.send(TrainingMessage.FINISHED, {"clock": clock}, brought)
        return self._hear(TrainingMessage.END)[1].view(self.job.dtype)

    def close(self) -> None:
        if self._is_heard:
            on_alive(self._alive_before)
            self._is_heard = False
        if self._link is not None:
            self._link.close()
        if self._host is not None:
            self._host.close()
        if self._control is not None:
            self._control.close()

    @property
    def _opened(self) -> LastLink | RemoteLink:
        assert self._link is not None
        return self._link

    def _arrive(self) -> Octets:
        """Waits, on another rank than rank 0, until all ranks call this, and returns the vector
        that rank 0 gives."""
        assert self._control is not None
        self._control.send(TrainingMessage.ARRIVED, {})
        return self._hear(TrainingMessage.ARRIVED)[1]

    def _hear(self, awaited: TrainingMessage) -> tuple[dict[str, Any], Octets]:
        """Rank 0's next message, which is of this kind. Raises the error that it sent, or that it
        is gone."""
        assert self._control is not None
        while (message := self._control.next(_NAP_SECONDS)) is None:
            pass
        kind, content, body = message
        if kind == TrainingMessage.REFUSED:
            raise UsageError(str(content["option"]), str(content["says"]))
        if kind == TrainingMessage.FAILED:
            raise TrainingError(str(content["said"]))
        if kind != awaited:
            raise _server_lost()
        return content, body


def _server_lost() -> ServerLostError:
    return ServerLostError(0, "by itself or with rank 0")


@contextmanager
def _until_lost() -> Iterator[None]:
    try:
        yield
    except LinkBroken:
        raise _server_lost() from None


def _control(connection: Connection, host: str, job: Job) -> Control:
    # A rank runs the caller's own code, which may hold its interpreter for long.
    return Control(connection, host, vector_bytes(job), beats=False)


@dataclass(frozen=True)
class _Seat:
    """A rank's place at the server.

    way      rank 0's way to the rank itself, or to its stand-in
    memory   the block that the rank or its stand-in shares with the server
    """

    way: Channel | Worker
    memory: WorkerMemory


class _Host:
    """What rank 0 does for all ranks, its own rank too."""

    def __init__(self, meeting: Meeting, plan: WorkerPlan) -> None:
        self._meeting, self._plan, self._job = meeting, plan, plan.job
        self._center = CenterMemory.create(self._job, np.zeros(self._job.size, self._job.dtype))
        self._team = Team(meeting, partial(_control, job=self._job))
        self._seats: dict[int, _Seat] = {}
        self._server: Worker | None = None
        # How long the others have, at the end, to read what they were told last.
        self._patience_seconds = END_SECONDS

    def gather(self, agreed: dict[str, Any], listen: str) -> Channel:
        """Waits until all ranks are connected, welcomes them, and returns rank 0's own end of its
        link's channel."""
        meeting, team = self._meeting, self._team
        ours, theirs = (Channel(end.detach()) for end in socket.socketpair())
        is_spread = meeting.place.is_spread
        with meeting.door(listen, beside=True, abroad=is_spread) as door, team.told_failures():
            team.gather(door, agreed, self._job.run)
            links: dict[int, Connection] = {}
            deadline = time.monotonic() + meeting.timeout_seconds
            try:
                while missing := sorted(set(team.living) - set(links)):
                    team.check()
                    if time.monotonic() > deadline:
                        raise meeting.errors.absent("unknown", missing, meeting.timeout_seconds)
                    if (came := door.next(_NAP_SECONDS)) is None:
                        continue
                    connection, kind, content = came
                    rank = content.get("ticket")
                    if kind == TrainingMessage.WORKER and rank in missing:
                        links[rank] = connection
                    else:
                        connection.close()
            except BaseException:
                # Ranks that wait here for their descriptors hear only then what they are told.
                for connection in links.values():
                    connection.close()
                raise
            self._seat_beside(0, theirs)
            for rank, connection in sorted(links.items()):
                if connection.is_beside:
                    self._seat_beside(rank, Channel(connection.detach()))
                else:
                    self._seat_stand_in(rank, connection)
                    self._team.living[rank].send(TrainingMessage.ARRIVED, {})
        self._patience_seconds = 0.0
        return ours

    def _seat_beside(self, rank: int, channel: Channel) -> None:
        memory = WorkerMemory.create(self._job)
        self._seats[rank] = _Seat(channel, memory)
        try:
            channel.send_descriptor(memory.block.descriptor)
            if self._plan.rule.lock_free:
                channel.send_descriptor(self._center.block.descriptor)
        except ConnectionError:
            raise _ended(rank) from None

    def _seat_stand_in(self, rank: int, connection: Connection) -> None:
        memory = WorkerMemory.create(self._job)
        patience_seconds = self._meeting.timeout_seconds + STOPPED_SECONDS
        process = launch(
            _STAND_IN_ENTRY, name=f"stand-in of rank {rank}", patience_seconds=patience_seconds
        )
        self._seats[rank] = _Seat(process, memory)
        # A stand-in is sent what any worker is, and has no use for a learner.
        learner, block = pack_parcel(None)
        try:
            process.send(WorkerStart(replace(self._plan, worker=rank), learner))
            for each in (memory.block, self._center.block, block):
                process.send_descriptor(each.descriptor)
            process.send_descriptor(connection.fileno())
        except (ProcessError, ProcessDiedError):
            raise _ended(rank) from None
        finally:
            block.close()
            os.close(connection.detach())  # the stand-in has it

    def start_server(self, theta: Vector) -> None:
        """Starts the server with these values as the center, and links all ranks to it."""
        self._center.live[:] = theta
        self._server = launch(SERVER_ENTRY, name="parameter server")
        self._server.send(ServerStart(ServerPlan.of(self._plan, None)))
        self._server.send_descriptor(self._center.block.descriptor)
        ready: Ready = self._hear_server()
        for rank, seat in self._seats.items():
            connect = Connect(rank, ready.origin, f"rank {rank}")
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ends[0], ends[1]:
                self._server.send(connect)
                self._server.send_descriptor(ends[0].fileno())
                self._server.send_descriptor(seat.memory.block.descriptor)
                try:
                    seat.way.send(connect)
                    seat.way.send_descriptor(ends[1].fileno())
                except (ConnectionError, ProcessError, ProcessDiedError):
                    raise _ended(rank) from None

    def meet(self, theta: Octets | Vector = NOTHING) -> None:
        """Waits until all ranks have arrived, and tells them so, with this vector."""
        for rank, control in self._team.living.items():
            while (message := control.next(_NAP_SECONDS)) is None:
                pass
            if message[0] == TrainingMessage.LOST:
                raise _ended(rank)
            if message[0] != TrainingMessage.ARRIVED:
                self._refuse(rank, "has finished, and others wait for it")
        self._team.tell(TrainingMessage.ARRIVED, {}, theta)

    def _refuse(self, rank: int, says: str) -> NoReturn:
        """Ends the run on all ranks: one does not do what the others do."""
        error = TrainingError(f"rank {rank} {says}; all ranks must do the same")
        self._patience_seconds = END_SECONDS
        self._team.tell(TrainingMessage.FAILED, {"said": str(error)})
        raise error

    def end(self, clock: int, theta: Vector | None) -> Vector:
        """Waits until all ranks have finished or died, gives them the result, and returns it:
        `theta` [size] of the rank whose center was pulled last, or without any the center."""
        assert self._server is not None
        running, last = set(self._team.living), 0
        while running:
            for rank in sorted(running):
                if (message := self._team.living[rank].next()) is None:
                    continue
                kind, content, body = message
                if kind == TrainingMessage.FINISHED:
                    if (int(content["clock"]), -rank) > (clock, -last):
                        clock, last = int(content["clock"]), rank
                        theta = body.view(self._job.dtype) if body.size else None
                elif kind == TrainingMessage.LOST:  # it has died, and is not waited for
                    self._team.living.pop(rank).close()
                else:
                    self._refuse(rank, "waits for others, which have finished")
                running.discard(rank)
            if wait([self._server.fileno()], _NAP_SECONDS if running else 0.0):
                self._hear_server()
        if theta is None:
            self._server.send(AskCopy(0, final=True))
            while not isinstance(self._hear_server(), CenterCopy):
                pass
            theta = np.array(self._center.copy)
        self._patience_seconds = END_SECONDS
        self._team.tell(TrainingMessage.END, {}, theta)
        return theta

    def _hear_server(self) -> Any:
        assert self._server is not None
        try:
            message = self._server.receive()
        except (ProcessDiedError, ProcessError) as error:
            raise ServerLostError(0, error.line) from None
        if isinstance(message, RaisedError):
            raise message.error
        return message

    def close(self) -> None:
        if self._server is not None:
            self._server.close(kill=True)
            self._server = None
        for seat in self._seats.values():
            if isinstance(seat.way, Worker):
                seat.way.close(kill=True)
            else:
                seat.way.close()
        self._seats.clear()
        self._team.close(self._patience_seconds)
