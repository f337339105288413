"""The ranks of a run on several hosts: which of them this process is, what they tell each other,
and which of them still live.

    rank 0, 1, ...   ── beat: a number, and the op it is at ──►  torch's store
                     ◄─ beats of the others, every half second ─

A launcher starts the ranks, `torchrun` or any that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Texts go through torch's store, which the launcher keeps, as JSON: nothing is unpickled
that another host sent. A rank whose beat stands still, or that says that it failed, is lost. The
first to notice writes that down, so that all ranks name the same one, and then all end.

Who waits for other ranks does so by `Ranks.wait_for`, in a thread of its own: a wait in gloo cannot
be broken off, and the thread that called must hear of a lost rank.

A rank does not outlive the torchrun that started it: see `end_with_launcher`.
"""

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any, Self

from dovetail.errors import DovetailError, RankLostError, UsageError
from dovetail.interrupts import INTERRUPTED
from dovetail.runtime.processes import Channel, launch
from dovetail.runtime.stopped import state_of
from dovetail.runtime.watch import Watch
from dovetail.units import printable

BEAT_SECONDS = 0.5
"""A rank shows its life, and looks at the others, this often."""
SILENT_SECONDS = 20.0
"""A rank whose beat stands still for so long is lost. On busy hosts, a rank that imports or
compiles for the first time has stood still for more than 7 s."""
STOPPED_SECONDS = 24.0
"""A rank that somebody has stopped for so long is killed by its guard. The others have lost it
then."""
JOIN_SECONDS = 300.0
"""The ranks wait so long for each other to begin."""
_STORE_SECONDS = 5.0
"""The store answers within this time, or counts as lost."""
_GRACE_SECONDS = 1.0
"""Once a rank is lost, whoever waits for others has this long to end the run before the process
ends."""
_LINGER_SECONDS = 3.0
"""A rank that keeps the store itself stays this long at most for others that still read it."""
_NAP_SECONDS = 0.02
_QUIET_SECONDS = 1.2
"""A rank to which a connection failed is lost as soon as its beat stands still for so long. One
that goes on beating may be about to say why."""
_LOST = "lost"
_LAUNCHER = os.getppid()
_ORPHAN_SECONDS = 6.0
"""A rank has this long to end by Ctrl-C once its launcher is gone."""


@dataclass(frozen=True)
class RankPlace:
    """Which rank this process is.

    host        name of its host
    address     host and port of torch's store
    attempt     how often the launcher has started these ranks before
    is_spread   the launcher says that the ranks are on several hosts
    is_beside   rank 0 is on this host
    """

    rank: int
    ranks: int
    host: str
    address: tuple[str, int] = ("", 0)
    attempt: int = 0
    is_spread: bool = False
    is_beside: bool = True


def place_of_ranks(host: str, joined: tuple[int, int] | None = None) -> RankPlace | None:
    """Which rank a launcher made of this process; None where it started none or only this one.

    joined   (rank, ranks) of a process group of torch that this process is in already; None: the
             launcher's variables say which rank it is

    Raises `UsageError` if a launcher's variables are not all there, or make no sense.
    """
    ranks = joined[1] if joined else _number("WORLD_SIZE", 1)
    if ranks < 2:
        return None
    variables = ("MASTER_ADDR", "MASTER_PORT") if joined else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in variables if not os.environ.get(name)]:
        says = f"is {ranks}, but {', '.join(missing)} is not set; start the ranks by torchrun"
        raise UsageError("WORLD_SIZE", says)
    rank = joined[0] if joined else _number("RANK", 0)
    if rank >= ranks:
        raise UsageError("RANK", f"is {rank}, but WORLD_SIZE is {ranks}")
    address = (os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0))
    is_spread = _number("GROUP_WORLD_SIZE", 1) > 1 or _number("LOCAL_WORLD_SIZE", ranks) < ranks
    # Where as many ranks of this host have lower numbers as there are lower numbers, rank 0 is one
    # of them.
    is_beside = rank == 0 or not is_spread or _number("LOCAL_RANK", 0) == rank
    attempt = _number("TORCHELASTIC_RESTART_COUNT", 0)
    return RankPlace(rank, ranks, host, address, attempt, is_spread, is_beside)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "") or str(default)
    if not (text.isdecimal() and len(text) < 10):
        raise UsageError(variable, f"must be a whole number, not {text!r}")
    return int(text)


Look = Callable[[], tuple[str, str] | None]
"""Looks whether this rank hangs: (op, what hangs, as the end of a sentence), or None."""


class Ranks:
    """All ranks of a run, seen from one of them; a context manager.

    doing   returns the name of the op that this rank is at, for its beats
    lost    the error of the rank that was lost, once one was
    """

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.rank, self.ranks, self.host = place.rank, place.ranks, place.host
        self.hosts: tuple[str, ...] = ()
        self.doing: Callable[[], str] = str
        self._looks: list[Look] = []
        self.lost: RankLostError | None = None
        self._ends: list[Callable[[], None]] = []
        self._told: dict[str, int] = {}
        self._suspects: dict[int, str] = {}
        self._waiters = 0
        self._watch = Watch(BEAT_SECONDS)
        self._beat = 0
        # Of the other ranks: the op of the last beat, and the seconds for which there was no other.
        self._ops: dict[int, str] = {}
        self._silent_seconds: dict[int, float] = {}
        self._status = 0
        self._groups = 0
        atexit.register(self._leave)
        end_with_launcher()
        self._answers: SimpleQueue[tuple[bool, Any]] | None = None
        self._tasks: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._store = connect_store(place, keeps=True, timeout_seconds=JOIN_SECONDS)
        # A blocked call of one client keeps its others waiting, so the beats have one of their own.
        self._beats = connect_store(place, keeps=False, timeout_seconds=_STORE_SECONDS)
        self._guard = launch("dovetail.runtime.ranks:guard", name="guard")
        self._guard.send((os.getpid(), STOPPED_SECONDS))
        threading.Thread(target=self._serve, name="ranks", daemon=True).start()
        self._watch.run("ranks", self._look)
        greeted = self.gather("hello", place.host)
        self.hosts = tuple(map(str, greeted))

    # ── What ranks tell each other ──

    def gather(self, name: str, value: Any) -> list[Any]:
        """[ranks] what each rank gave under this name: JSON. All ranks call this in one order.

        Raises `RankLostError`, also if a rank says nothing for `JOIN_SECONDS`.
        """
        name = self.numbered(name)
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            self._store.set(f"{name}/{self.rank}", json.dumps(value))
            given = []
            for rank in range(self.ranks):
                while not self._store.check([f"{name}/{rank}"]):
                    self.check()
                    if time.monotonic() > deadline:
                        host = self.hosts[rank] if self.hosts else "unknown"
                        says = f"it did not begin within {JOIN_SECONDS:g} s"
                        raise RankLostError(host, rank, "", says)
                    time.sleep(_NAP_SECONDS)
                given.append(json.loads(self._store.get(f"{name}/{rank}")))
            return given
        # torch's store raises this when it is gone.
        except RuntimeError as error:
            raise self._store_lost(error) from error

    def numbered(self, name: str) -> str:
        """The name, which may be used again, with how often it was. All ranks call this in one
        order."""
        self._told[name] = self._told.get(name, -1) + 1
        return f"{name}.{self._told[name]}"

    def group(self, name: str, members: tuple[int, ...]) -> Any:
        """A group of these ranks over gloo, which all of them make in one order (see
        `runtime.torch_versions.gloo_group`). Raises `RankLostError`."""
        # Imported here, because a command without ranks has no use for it.
        from dovetail.runtime.torch_versions import gloo_group, named_store

        store = named_store(self.numbered(f"group/{name}"), self._store)
        self._groups += 1
        place, timeout = members.index(self.rank), timedelta(days=30)
        device = interface_of(self.place)
        return self.wait_for(lambda: gloo_group(store, place, len(members), device, timeout))

    def wait_for(self, task: Callable[[], Any]) -> Any:
        """Run a task that waits for other ranks, and return its result. Raises `RankLostError`
        as soon as a rank is lost, and what the task raises."""
        self.check()
        answers: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._answers = answers
        self.check()  # a rank may have been lost before the answers were there to be woken
        with self.waiting():
            self._tasks.put(task)
            is_result, value = answers.get()
        if is_result:
            return value
        if not isinstance(value, RuntimeError):
            raise value
        raise self.lost_behind(str(value))

    def lost_behind(self, said: str, rank: int | None = None) -> RankLostError:
        """The error of the rank that was lost, which is waited for: that a connection failed is
        known before the beats say whose fault it is. See `suspect`."""
        self.suspect(said, rank)
        with self.waiting():
            while self.lost is None:
                time.sleep(_NAP_SECONDS)
        return self.lost

    def suspect(self, said: str, rank: int | None = None) -> None:
        """Say that the connection with a rank failed, or with one that is not known."""
        # Gloo's text begins with a line of its source, and ends with advice.
        said = _one_line(said.rpartition("] ")[2] if said.startswith("[/") else said)
        said = f"its connection failed: {said.partition('. This is')[0]}"
        self._suspects.setdefault(-1 if rank is None else rank, said)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This block waits for other ranks. If it still does a while after one was lost, the
        process ends."""
        self._waiters += 1
        try:
            yield
        finally:
            self._waiters -= 1

    def check(self) -> None:
        """Raise `RankLostError` if a rank was lost."""
        if self.lost is not None:
            raise self.lost

    def on_lost(self, end: Callable[[], None]) -> None:
        """Have `end` called, in another thread, when a rank is lost."""
        self._ends.append(end)

    def off_lost(self, end: Callable[[], None]) -> None:
        """Have `end` called no more."""
        with suppress(ValueError):
            self._ends.remove(end)

    def watch(self, look: Look) -> None:
        """Have `look` called, in another thread, every `BEAT_SECONDS`."""
        self._looks.append(look)

    def unwatch(self, look: Look) -> None:
        """Have `look` called no more."""
        with suppress(ValueError):
            self._looks.remove(look)

    # ── The end ──

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed."""
        by_default = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._status = getattr(error, "exit_status", by_default)
        if self.lost is None:
            said = error.line if isinstance(error, DovetailError) else _one_line(repr(error))
            with suppress(RuntimeError):
                self._write_down(self.rank, getattr(error, "op", "") or self.doing(), said)

    def close(self) -> None:
        """Leave. The others no longer watch this rank."""
        if self._watch.closing.is_set():
            return
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                # It may be this process that keeps the store.
                left = [f"left/{rank}" for rank in range(self.ranks)]
                deadline = time.monotonic() + _LINGER_SECONDS
                while not self._store.check(left) and time.monotonic() < deadline:
                    time.sleep(_NAP_SECONDS)
        self._watch.closing.set()
        self._guard.close(kill=True)

    def _leave(self) -> None:
        """End the process, if threads may still wait in gloo: they would end it by an abort."""
        if self._groups and (self._status or self.lost is not None):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._status or 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    # ── The threads ──

    def _serve(self) -> None:
        """Does what `wait_for` waits for."""
        while True:
            task = self._tasks.get()
            answers = self._answers
            assert answers is not None
            try:
                answers.put((True, task()))
            except BaseException as error:
                answers.put((False, error))

    def _look(self) -> bool:
        """Show life, and look at this rank and the others; False once one of them is lost."""
        try:
            op = ""
            with suppress(Exception):  # of a network that is just being closed
                op = self.doing()
            self._beat += 1
            self._beats.set(f"beat/{self.rank}", json.dumps([self._beat, op]))
            for look in tuple(self._looks):
                with suppress(Exception):  # as above
                    if hung := look():
                        self._write_down(self.rank, *hung)
            lost = self._look_at_others()
        # Any error is told: without this thread nobody would hear of a lost rank.
        except Exception as error:
            if self._watch.closing.is_set():
                return False
            lost = self._store_lost(error)
        if lost is None:
            return True
        # A rank is lost, which ends this rank's part of the run.
        self.lost = lost
        for end in tuple(self._ends):
            end()
        if self._answers is not None:
            self._answers.put((False, lost))
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            if not self._waiters or self._watch.closing.is_set():
                return False
            time.sleep(_NAP_SECONDS)
        sys.stdout.flush()
        sys.stderr.write(printable(f"error: {lost.line}") + "\n")
        sys.stderr.flush()
        os._exit(lost.exit_status)

    def _store_lost(self, error: Exception) -> RankLostError:
        host, port = self.place.address
        said = f"torch's store at {host}:{port} cannot be reached ({_one_line(str(error))})"
        return RankLostError(self.hosts[0] if self.hosts else host, 0, "", said)

    def _look_at_others(self) -> RankLostError | None:
        """The error of a rank that is lost, if one is."""
        store = self._beats
        if store.check([_LOST]):
            return self._read_lost()
        for rank in range(self.ranks):
            # Until its first beat a rank begins, which `gather` waits for.
            if rank == self.rank or not store.check([f"beat/{rank}"]):
                continue
            beat = store.get(f"beat/{rank}")
            self._ops[rank] = json.loads(beat)[1]
            silent_seconds = self._watch.still_seconds(rank, beat)
            self._silent_seconds[rank] = silent_seconds
            if silent_seconds >= SILENT_SECONDS and not store.check([f"left/{rank}"]):
                said = f"it was silent for {SILENT_SECONDS:g} s"
                self._write_down(rank, self._ops[rank], said)
                return self._read_lost()
        if not self._suspects:
            return None
        # A connection has failed. A rank that fails by itself says so, and the process of one that
        # was killed beats no more: what is first known counts.
        rank, said = next(iter(self._suspects.items()))
        suspected_seconds = self._watch.still_seconds("a connection", "failed")
        quiet = [r for r, seconds in self._silent_seconds.items() if seconds > _QUIET_SECONDS]
        if rank < 0 and quiet:
            rank = max(quiet, key=lambda other: self._silent_seconds[other])
        if rank not in quiet and suspected_seconds < SILENT_SECONDS:
            return None
        if rank < 0:  # all live, so it is this rank's own connections
            rank = self.rank
        self._write_down(rank, self._ops.get(rank, ""), said)
        return self._read_lost()

    def _write_down(self, rank: int, op: str, said: str) -> None:
        """Write the lost rank down, unless another one was before."""
        host = self.hosts[rank] if self.hosts else self.host if rank == self.rank else "unknown"
        text = json.dumps([rank, host, op, said])
        self._beats.compare_set(_LOST, "", text)

    def _read_lost(self) -> RankLostError:
        rank, host, op, said = json.loads(self._beats.get(_LOST))
        return RankLostError(str(host), int(rank), str(op), str(said))


def guard(channel: Channel) -> None:
    """Kills the process of the rank once somebody has stopped it for so long: the other ranks have
    lost it, and nobody may be there to let it go on. The first message is its number and the
    seconds."""
    (pid, stopped_seconds), watch = channel.receive(), Watch(BEAT_SECONDS)
    while not channel.poll(BEAT_SECONDS):
        watch.tick()
        state = state_of(pid)
        if watch.still_seconds(pid, state) >= stopped_seconds and state == "T":
            os.kill(pid, signal.SIGKILL)


@cache
def end_with_launcher() -> None:
    """Have this process end once torchrun, which started it, is gone: nobody else would end it.

    It ends as by Ctrl-C, so that it leaves nothing behind, or else after `_ORPHAN_SECONDS`. Other
    launchers may start ranks and be done. A launcher that was gone before this module was imported
    is not missed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def look() -> bool:
        if os.getppid() == _LAUNCHER:
            return True
        with suppress(OSError):
            sys.stderr.write("error: torchrun has ended, and so do its ranks\n")
            sys.stderr.flush()
        if main := threading.main_thread().ident:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(_ORPHAN_SECONDS)
        os._exit(1)

    Watch(BEAT_SECONDS).run("launcher", look)


def connect_store(place: RankPlace, *, keeps: bool, timeout_seconds: float) -> Any:
    """A connection with torch's store. `torchrun` keeps the store; without it rank 0 does, by the
    connection that `keeps` it. Raises `UsageError`."""
    from dovetail.runtime.torch_versions import named_store, tcp_store

    host, port = place.address
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        is_kept = keeps and place.rank == 0 and not by_launcher
        store = tcp_store(host, port, is_kept, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        said = f"torch's store at {host}:{port} cannot be reached: {_one_line(str(error))}"
        raise UsageError("MASTER_ADDR", said) from error
    return named_store(f"dovetail/{place.attempt}", store)


def interface_of(place: RankPlace) -> Any:
    """The interface that gloo listens on: what the user named, else the one that leads to the
    store, so that a run on one machine stays on its loopback."""
    from dovetail.runtime.torch_versions import gloo_device

    if interface := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return gloo_device("", interface)
    return gloo_device(address_towards(place.address))


def host_name() -> str:
    """The name of this host in machines of several: `DOVETAIL_HOST` if that is set, else the one
    that the system has."""
    return os.environ.get("DOVETAIL_HOST") or socket.gethostname()


def address_towards(address: tuple[str, int]) -> str:
    """The address of this host's interface that leads to a host and port."""
    family, _, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(found)  # sends nothing
        return str(way.getsockname()[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
