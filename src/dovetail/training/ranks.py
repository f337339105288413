"""Links the ranks of a program that `torchrun` started to one parameter server.

    rank 0 ─┬─► server process ══ links ══ rank 0, 1, ...    as those of the backend `processes`
            └── channels ───────────────── rank 0, 1, ...    greeting, links, meetings, the end

Ranks find rank 0 by a name in torch's store (`torch.distributed`). It is the name of a
Unix socket that exists only in the kernel and only until all ranks have connected. No port is
opened, and a process of another user is refused. Vectors are in memory that only these processes
map. So nothing is left behind, whatever ends them. All ranks must be on one host.

A rank that dies is noticed by its link, and the others go on. If rank 0 or the server dies, all
other ranks fail at their next commit, with one error. Nobody starts either of them again: the ranks
are processes of the caller's, as `torchrun --max-restarts` starts them again.
"""

import itertools
import os
import secrets
import socket
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

import numpy as np
import torch.distributed
from torch.distributed.rendezvous import rendezvous

from dovetail.errors import (
    DovetailError,
    ProcessDiedError,
    ProcessError,
    ServerLostError,
    TrainingError,
    UsageError,
)
from dovetail.runtime.processes import Channel, Worker, launch
from dovetail.runtime.shared import Block
from dovetail.training.backends.contract import Guard, ServerPlan, WorkerPlan
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.backends.processes.messages import (
    AskCopy,
    Connect,
    Copied,
    RaisedError,
    Ready,
    ServerStart,
)
from dovetail.training.backends.processes.transport import SERVER_ENTRY
from dovetail.training.backends.processes.worker import WorkerLink
from dovetail.training.liveness import on_alive
from dovetail.training.records import Job, Vector
from dovetail.training.rules.contract import Rule
from dovetail.training.server import Delivery, Server
from dovetail.training.serving import Serving, WorkerPort
from dovetail.training.worker import Ask, Told

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process, user and group at the other end of a Unix socket."""
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


def open_center(rule: Rule, facts: CenterFacts, timeout_seconds: float) -> RankCenter:
    """The center of this program: shared by torchrun's ranks, or of this process alone.

    timeout_seconds   how long the ranks wait for each other to begin, and how long one may be
                      silent before it counts as hung
    """
    rank, ranks = _place()
    if ranks == 1:
        return LoneCenter(rule, facts)
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        says = f"there are {ranks} ranks, but {', '.join(missing)} is not set; start with torchrun"
        raise UsageError("torchrun", says)
    hosts = _number("GROUP_WORLD_SIZE", 1)
    if hosts != 1:
        says = f"the ranks are on {hosts} hosts; all must be on one, for now"
        raise UsageError("torchrun", says)
    return SharedCenter(rule, facts, rank, ranks, timeout_seconds)


def _place() -> tuple[int, int]:
    """This rank's number, and how many ranks there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    ranks = _number("WORLD_SIZE", 1)
    if ranks > 1 and "RANK" not in os.environ:
        raise UsageError("torchrun", f"WORLD_SIZE is {ranks}, but RANK is not set")
    return _number("RANK", 0), ranks


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "") or str(default)
    if not text.isdecimal():
        raise UsageError(variable, f"must be a whole number, not {text!r}")
    return int(text)


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


# Messages on the channel between rank 0 and a rank


@dataclass(frozen=True)
class Hello:
    """A rank's first message."""

    rank: int
    facts: CenterFacts


@dataclass(frozen=True)
class Welcome:
    """The answer to it. The descriptors of the rank's block and of the center's follow."""

    plan: WorkerPlan


@dataclass(frozen=True)
class Arrived:
    """A rank waits at a meeting. The answer is the same once all do."""


@dataclass(frozen=True)
class RankFinished:
    """A rank has left, and the center that it pulled last had this clock. The answer is `Arrived`
    once all ranks have left.

    brings_theta   its parameters lie in its inbox
    """

    clock: int
    brings_theta: bool


class SharedCenter:
    """A rank's way to the server that rank 0 started; see `RankCenter`."""

    def __init__(
        self, rule: Rule, facts: CenterFacts, rank: int, ranks: int, timeout_seconds: float
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._host: _Host | None = None
        self._channel: Channel | None = None
        self._rule = rule
        # The function that `alive()` called before this began, and whether it calls this.
        self._alive_before: Callable[[], None] | None = None
        self._is_heard = False
        deadline = time.monotonic() + timeout_seconds
        try:
            name = f"dovetail/{next(_numbers)}"
            if rank == 0:
                self._host = _Host(facts, ranks)
                self._channel = self._host.gather(name, timeout_seconds, deadline)
            else:
                self._channel = Channel(_connect(name, timeout_seconds).detach())
                self._channel.send(Hello(rank, facts))
            welcome: Welcome = self._hear()
            plan, self.job = welcome.plan, welcome.plan.job
            self._memory = WorkerMemory(Block(self._channel.receive_descriptor()), self.job)
            self._center = CenterMemory(Block(self._channel.receive_descriptor()), self.job)
        except BaseException:
            self.close()
            raise
        live = self._center if rule.lock_free else None
        self._link = _RankLink(self._channel, plan, self._memory, live)

    def share(self, theta: Vector) -> Vector:
        if self._host is not None:
            self._center.copy[:] = theta
        self.meet()
        return np.array(self._center.copy)

    def start(self, theta: Vector) -> None:
        if self._host is not None:
            self._center.copy[:] = self._center.live[:] = theta
            self._host.start_server(self._rule)
        self._link.join()
        if self._center.copy.tobytes() != theta.tobytes():
            raise UsageError(
                "parameters",
                f"those of rank {self.rank} were changed since its optimizer was made and are not "
                "those of rank 0; load the same weights on every rank",
            )
        self._alive_before = on_alive(self.show_life)
        self._is_heard = True
        self.meet()

    def meet(self) -> None:
        assert self._channel is not None
        with suppress(ConnectionError):  # `_hear` says what ended it
            self._channel.send(Arrived())
        if self._host is not None:
            self._host.meet()
        self._hear()

    def seconds(self) -> float:
        return self._link.seconds()

    def ask(self, ask: Ask) -> Told:
        return self._link.ask(ask)

    def show_life(self) -> None:
        self._memory.show_life()
        # Another optimizer of this program lives as well.
        if self._alive_before is not None:
            self._alive_before()

    def copy(self) -> Vector:
        center = self._link.copy()
        if center is None:
            raise _server_lost()
        return center

    def finish(self, clock: int, theta: Vector | None) -> Vector:
        assert self._channel is not None
        self._link.leave()
        if theta is not None:
            self._memory.inbox[:] = theta
        with suppress(ConnectionError):
            self._channel.send(RankFinished(clock, theta is not None))
        if self._host is not None:
            self._host.end()
        self._hear()
        return np.array(self._center.copy)

    def close(self) -> None:
        if self._is_heard:
            on_alive(self._alive_before)
            self._is_heard = False
        if self._host is not None:
            self._host.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _hear(self) -> Any:
        """Rank 0's next message. Raises the error that it sent, or that it is gone."""
        assert self._channel is not None
        try:
            message = self._channel.receive()
        except EOFError:
            raise _server_lost() from None
        if isinstance(message, RaisedError):
            raise message.error
        return message


class _RankLink(WorkerLink):
    """A link that no other server will take over."""

    def join(self) -> int:
        if self._socket is not None:
            raise _server_lost()
        try:
            return super().join()
        except EOFError:
            raise _server_lost() from None


def _server_lost() -> ServerLostError:
    return ServerLostError(0, "by itself or with rank 0")


def _connect(name: str, timeout_seconds: float) -> socket.socket:
    """A connection with rank 0, whose address the store has under this name."""
    store = _store(timeout_seconds)
    try:
        store.wait([name], timedelta(seconds=timeout_seconds))
        address = store.get(name)
    except RuntimeError as error:
        says = f"rank 0 made no optimizer within {timeout_seconds:g} s"
        raise TrainingError(says) from error
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(b"\0" + address)
        if _user_of(link) != os.getuid():
            raise ConnectionError
    except ConnectionError:
        link.close()
        says = "rank 0 is not on this host, or has ended; all ranks must be on one host, for now"
        raise UsageError("torchrun", says) from None
    return link


@cache
def _store(timeout_seconds: float) -> Any:
    """torch's store, which torchrun keeps; without torchrun rank 0 does. It lives as long as this
    process: a rank that connects to one that rank 0 is about to give up would hang."""
    timeout = timedelta(seconds=timeout_seconds)
    try:
        rank, ranks = _place()
        address = f"env://?rank={rank}&world_size={ranks}"
        return next(iter(rendezvous(address, timeout=timeout)))[0]
    except (RuntimeError, ValueError, OSError) as error:
        says = f"torch's store cannot be reached: {' '.join(str(error).split())[:200]}"
        raise UsageError("torchrun", says) from error


def _user_of(link: socket.socket) -> int:
    """The user of the process at the other end."""
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


@dataclass
class _RankSeat:
    """Rank 0's end of a rank's channel, and the rank's block."""

    channel: Channel
    memory: WorkerMemory | None = None


class _Host:
    """What rank 0 does for all ranks, its own rank too."""

    def __init__(self, facts: CenterFacts, ranks: int) -> None:
        self._facts, self._ranks, self._job = facts, ranks, facts.job(ranks)
        self._center = CenterMemory.create(self._job, np.zeros(facts.size, facts.dtype))
        self._seats: dict[int, _RankSeat] = {}
        self._server: Worker | None = None
        self._timeout_seconds = 0.0

    def gather(self, name: str, timeout_seconds: float, deadline: float) -> Channel:
        """Waits until all ranks are connected, welcomes them, and returns rank 0's own end."""
        self._timeout_seconds = timeout_seconds
        store = _store(timeout_seconds)
        ours, theirs = socket.socketpair()
        self._seats[0] = _RankSeat(Channel(theirs.detach()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
                address = f"dovetail-{secrets.token_hex(16)}".encode()
                door.bind(b"\0" + address)
                door.listen(self._ranks)
                store.set(name, address)
                while len(self._seats) < self._ranks:
                    self._let_in(door, deadline)
            for rank, seat in sorted(self._seats.items()):
                self._welcome(rank, seat)
        except DovetailError as error:
            self._tell_all(RaisedError(error))
            raise
        return Channel(ours.detach())

    def _let_in(self, door: socket.socket, deadline: float) -> None:
        door.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            link, _ = door.accept()
        except TimeoutError:
            missing = sorted(set(range(self._ranks)) - set(self._seats))
            says = f"no optimizer of rank {', '.join(map(str, missing))} within "
            raise TrainingError(f"{says}{self._timeout_seconds:g} s") from None
        if _user_of(link) != os.getuid():
            link.close()
            return
        link.settimeout(None)
        channel = Channel(link.detach())
        try:
            if not wait([channel.fileno()], max(deadline - time.monotonic(), 0.0)):
                says = f"a rank said nothing within {self._timeout_seconds:g} s"
                raise TrainingError(says)
            hello: Hello = channel.receive()
        except EOFError:
            raise TrainingError("a rank has ended before its optimizer was made") from None
        if hello.rank in self._seats or not 0 < hello.rank < self._ranks:
            says = f"is {hello.rank} in two processes, or not one of {self._ranks}"
            raise UsageError("RANK", says)
        self._seats[hello.rank] = _RankSeat(channel)
        for field, expected in vars(self._facts).items():
            given = getattr(hello.facts, field)
            if given != expected:
                says = f"rank {hello.rank} has others than rank 0"
                if field != "parameters":
                    says = f"rank {hello.rank} has {given!r}, and rank 0 {expected!r}"
                raise UsageError(field, says)

    def _welcome(self, rank: int, seat: _RankSeat) -> None:
        facts = self._facts
        plan = WorkerPlan(
            self._job, facts.rule, facts.options, rank, 0, "none", self._timeout_seconds
        )
        seat.memory = WorkerMemory.create(self._job)
        try:
            seat.channel.send(Welcome(plan))
            seat.channel.send_descriptor(seat.memory.block.descriptor)
            seat.channel.send_descriptor(self._center.block.descriptor)
        except ConnectionError:
            raise self._ended(rank) from None

    def start_server(self, rule: Rule) -> None:
        """Starts the server with the center's present values, and links all ranks to it."""
        plan = ServerPlan(
            self._job, rule.name, dict(rule.options), Guard(), None, 1, None, "none",
            self._timeout_seconds,
        )  # fmt: skip
        self._server = launch(SERVER_ENTRY, name="parameter server")
        self._server.send(ServerStart(plan))
        self._server.send_descriptor(self._center.block.descriptor)
        ready: Ready = self._hear_server()
        for rank, seat in self._seats.items():
            assert seat.memory is not None
            connect = Connect(rank, ready.origin, f"rank {rank}")
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ends[0], ends[1]:
                self._server.send(connect)
                self._server.send_descriptor(ends[0].fileno())
                self._server.send_descriptor(seat.memory.block.descriptor)
                try:
                    seat.channel.send(connect)
                    seat.channel.send_descriptor(ends[1].fileno())
                except ConnectionError:
                    raise self._ended(rank) from None

    def meet(self) -> None:
        """Waits until all ranks have arrived, and tells them so."""
        for rank, seat in self._seats.items():
            try:
                heard = seat.channel.receive()
            except EOFError:
                raise self._ended(rank) from None
            if not isinstance(heard, Arrived):
                self._refuse(rank, "has finished, and others wait for it")
        self._tell_all(Arrived())

    def _refuse(self, rank: int, says: str) -> NoReturn:
        """Ends the run on all ranks: one does not do what the others do."""
        error = TrainingError(f"rank {rank} {says}; all ranks must do the same")
        self._tell_all(RaisedError(error))
        raise error

    def _ended(self, rank: int) -> TrainingError:
        return TrainingError(f"rank {rank} has ended while the other ranks wait for it")

    def end(self) -> None:
        """Waits until all ranks have finished or died, then puts the result into the center's
        copy and tells them so."""
        assert self._server is not None
        running, finished = dict(self._seats), dict[int, RankFinished]()
        while running:
            ranks = {seat.channel.fileno(): rank for rank, seat in running.items()}
            for descriptor in wait([*ranks, self._server.fileno()]):
                assert isinstance(descriptor, int)
                if descriptor not in ranks:
                    self._hear_server()
                    continue
                rank = ranks[descriptor]
                with suppress(EOFError):  # it has died; the others are waited for all the same
                    heard = running[rank].channel.receive()
                    if not isinstance(heard, RankFinished):
                        self._refuse(rank, "waits for others, which have finished")
                    finished[rank] = heard
                del running[rank]
        last = max(sorted(finished), key=lambda rank: finished[rank].clock)
        memory = self._seats[last].memory
        if finished[last].brings_theta:
            assert memory is not None
            np.copyto(self._center.copy, memory.inbox)
        else:
            self._server.send(AskCopy(0, final=True))
            while not isinstance(self._hear_server(), Copied):
                pass
        self._tell_all(Arrived())

    def _hear_server(self) -> Any:
        assert self._server is not None
        try:
            return self._server.receive()
        except (ProcessDiedError, ProcessError) as error:
            raise ServerLostError(0, error.line) from None

    def _tell_all(self, message: object) -> None:
        for seat in self._seats.values():
            with suppress(ConnectionError):  # of a rank that has died
                seat.channel.send(message)

    def close(self) -> None:
        if self._server is not None:
            self._server.close(kill=True)
            self._server = None
        for seat in self._seats.values():
            seat.channel.close()
        self._seats.clear()
