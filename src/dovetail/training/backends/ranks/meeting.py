"""How the ranks of a training meet: they find each other by torch's store, which the launcher
keeps, and agree on what they train.

    rank 0 ── addresses, token ──► torch's store ──► rank 1, 2, ...
           ◄─ RANK: facts ───────────────────────── each of them
           ── WELCOME or REFUSED ─────────────────►

The backend `ranks` meets so, and so do the ranks of `dt.Optimizer`.
"""

import hashlib
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, NoReturn

from numpy.typing import NDArray

from dovetail.errors import DovetailError, RankLostError, UsageError
from dovetail.runtime.ranks import (
    JOIN_SECONDS,
    RankPlace,
    address_towards,
    connect_store,
    host_name,
    place_of_ranks,
)
from dovetail.runtime.user_code import line_of
from dovetail.training.backends.contract import Assignment, check_options
from dovetail.training.backends.processes.transport import ProcessesOptions
from dovetail.training.backends.ranks.connections import (
    NOTHING,
    TOKEN_BYTES,
    Address,
    Connection,
    Control,
    Door,
    connect,
)
from dovetail.training.backends.ranks.messages import TrainingMessage
from dovetail.training.rules.contract import Rule

END_SECONDS = 10.0
"""Once a run has ended, the other ranks have this long to take its result."""
_NAP_SECONDS = 0.05
_FACT_CHARACTERS = 1000
_numbers = itertools.count()
"""Numbers the runs of this process. All ranks make theirs in the same order."""


def check_listen(listen: object) -> None:
    """Raise `UsageError` for a `listen` that is no address of this machine alone."""
    if not isinstance(listen, str) or listen in ("0.0.0.0", "::", "*"):
        says = f"is {listen!r}; give one address of this machine, as text"
        raise UsageError("listen", says)


@dataclass(frozen=True)
class RanksOptions(ProcessesOptions):
    """How a run uses its ranks. Each rank pins and counts threads as `ProcessesOptions` has it.

    listen   the address on which rank 0 listens; "": that of the interface which leads to
             MASTER_ADDR
    """

    listen: str = ""

    def __post_init__(self) -> None:
        check_listen(self.listen)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RanksOptions":
        """Raises `UsageError` for one that is not there."""
        check_options("ranks", options, cls.__dataclass_fields__)
        return cls(**options)


def launched_place() -> RankPlace:
    """Which rank a launcher made of this process. Raises `UsageError` if none did."""
    # A rank's host is told when it greets rank 0.
    place = place_of_ranks("")
    if place is None:
        says = "ranks needs several ranks, which torchrun or another launcher starts"
        raise UsageError("backend", says)
    return place


@cache
def _store(place: RankPlace, timeout_seconds: float) -> Any:
    """It lives as long as this process, since it may be the one that rank 0 keeps: a rank that
    connects to one that is about to be given up would hang."""
    return connect_store(place, keeps=True, timeout_seconds=timeout_seconds)


@dataclass(frozen=True)
class MeetingErrors:
    """What a meeting says that fails, in the words of those that meet.

    lost     (host, rank, what is known of it): a rank has ended or failed before all had met
    absent   (host, ranks, seconds): these have not come within this time
    unlike   (host, rank, name, given, expected): how that rank differs from rank 0 in a fact
    """

    lost: Callable[[str, int, str], DovetailError]
    absent: Callable[[str, list[int], float], DovetailError]
    unlike: Callable[[str, int, str, Any, Any], str]


_OF_TRAININGS = MeetingErrors(
    lost=lambda host, rank, said: RankLostError(host, rank, "", said),
    absent=lambda host, ranks, seconds: RankLostError(
        host, min(ranks), "", f"it did not begin within {seconds:g} s"
    ),
    unlike=lambda host, rank, _name, given, expected: (
        f"rank {rank} on host {host} has {given!r}, and rank 0 has {expected!r}; start all ranks "
        "alike"
    ),
)


@dataclass(frozen=True)
class Meeting:
    """A run's place in torch's store, seen from one of its ranks.

    name              of the run there
    timeout_seconds   how long the ranks wait for each other

    Its methods raise errors of `errors`, also if the store is gone.
    """

    place: RankPlace
    name: str
    errors: MeetingErrors = _OF_TRAININGS
    timeout_seconds: float = JOIN_SECONDS

    # On rank 0

    @contextmanager
    def door(self, listen: str, *, beside: bool = False, abroad: bool = True) -> Iterator[Door]:
        """Listens, and tells the other ranks where.

        listen   address of this machine; "": that of the interface which leads to MASTER_ADDR
        beside   for the ranks on this host that ask for it, at a Unix socket
        abroad   for ranks of any host, by TCP
        """
        token, doors = secrets.token_bytes(TOKEN_BYTES), list[Door]()
        with ExitStack() as stack:
            try:
                hosts = [""] if beside else []
                if abroad:
                    hosts.append(listen or address_towards(self.place.address))
                for host in hosts:
                    doors.append(Door(host, token, doors[0].came if doors else None))
                    stack.callback(doors[-1].close)
            except OSError as error:
                says = f"rank 0 cannot listen on {listen or self.place.address[0]!r}: {error}"
                self.tell_failure(says)
                raise UsageError("listen", says) from error
            told = {"addresses": [door.address for door in doors], "token": token.hex()}
            try:
                self._store().set(self.name, json.dumps(told))
            except RuntimeError as error:
                raise self._store_lost(error) from error
            yield doors[0]

    def forget(self) -> None:
        """Takes the token out of the store, once all ranks have it."""
        with suppress(RuntimeError):  # the store may be gone
            self._store().delete_key(self.name)

    def tell_failure(self, said: str) -> None:
        """Tells the ranks that wait for this one that it failed: those that have not met rank 0, or
        rank 0 itself."""
        rank = self.place.rank
        name, told = (
            (f"{self.name}/failed", [rank, said]) if rank else (self.name, {"failed": said})
        )
        with suppress(DovetailError, RuntimeError):  # the store may be gone
            self._store().set(name, json.dumps(told))

    def check_others(self) -> None:
        """Raises if another rank said that it failed before it had met this one."""
        failed = f"{self.name}/failed"
        try:
            told = json.loads(self._store().get(failed)) if self._store().check([failed]) else None
        except RuntimeError as error:
            raise self._store_lost(error) from error
        if told is not None:
            raise self.errors.lost("unknown", int(told[0]), str(told[1]))

    # On the other ranks

    def join(
        self, facts: Mapping[str, Any], *, beside: bool = False
    ) -> tuple[Connection, Address, bytes]:
        """Greets rank 0. Returns the connection, where rank 0 listens, and the run's token.

        beside   connect by the Unix socket, for ranks on rank 0's host. Raises `UsageError` if
                 rank 0 is not there
        """
        address, token = self._ask(beside)
        try:
            connection = connect(address, token)
            hello = {"rank": self.place.rank, "host": host_name(), "facts": facts}
            connection.send(TrainingMessage.RANK, hello)
        except OSError as error:
            self._ask(beside)  # which says so if rank 0 has failed
            if isinstance(address, str):
                raise self._elsewhere() from error
            where = f"{address[0]}:{address[1]}"
            says = f"rank 0 listens on {where}, which is not reached from here ({error})"
            raise UsageError("listen", f"{says}; name another of its addresses") from error
        return connection, address, token

    def _ask(self, beside: bool) -> tuple[Address, bytes]:
        """Where rank 0 listens, and the run's token. Waits until rank 0 tells."""
        deadline = time.monotonic() + self.timeout_seconds
        host = self.place.address[0]
        try:
            store = self._store()
            while not store.check([self.name]):
                if time.monotonic() > deadline:
                    raise self.errors.absent(host, [0], self.timeout_seconds)
                time.sleep(_NAP_SECONDS)
            told = json.loads(store.get(self.name))
        # torch's store raises these when it is gone.
        except RuntimeError as error:
            raise self._store_lost(error) from error
        if "failed" in told:
            raise self.errors.lost(host, 0, str(told["failed"]))
        for address in told["addresses"]:
            if isinstance(address, str) == beside:
                way = address if beside else (str(address[0]), int(address[1]))
                return way, bytes.fromhex(told["token"])
        raise self._elsewhere()

    def _elsewhere(self) -> UsageError:
        says = "rank 0 is not on this host, or has ended; a launcher of ranks on several hosts must"
        return UsageError("torchrun", f"{says} set LOCAL_WORLD_SIZE and LOCAL_RANK")

    # On all

    def _store(self) -> Any:
        return _store(self.place, self.timeout_seconds)

    def _store_lost(self, error: RuntimeError) -> DovetailError:
        said = f"torch's store cannot be reached: {line_of(error)}"
        return self.errors.lost(self.place.address[0], 0, said)


_announced: list[Meeting] = []


def next_meeting() -> Meeting:
    """The meeting of the process's run: that which is announced, or else another one."""
    return _announced[-1] if _announced else Meeting(launched_place(), f"train/{next(_numbers)}")


@contextmanager
def announced() -> Iterator[None]:
    """A run of all ranks within this block. What is raised before the ranks have met is told to
    those that wait for this one."""
    meeting = Meeting(launched_place(), f"train/{next(_numbers)}")
    _announced.append(meeting)
    try:
        yield
    except BaseException as error:
        meeting.tell_failure(said_of(error))
        raise
    finally:
        _announced.remove(meeting)


def said_of(error: BaseException) -> str:
    """Returns what other ranks are told of the error."""
    return "it was interrupted" if isinstance(error, KeyboardInterrupt) else line_of(error)


class Team:
    """The other ranks, seen from rank 0, as far as they live: rank -> its control connection.

    control   makes a rank's `Control` of its connection and the name of its host
    """

    def __init__(
        self, meeting: Meeting, control: Callable[[Connection, str], Control] = Control
    ) -> None:
        self.ranks = meeting.place.ranks
        self.living: dict[int, Control] = {}
        self._meeting, self._control = meeting, control

    def gather(self, door: Door, facts: Mapping[str, Any], run: str) -> None:
        """Waits until all ranks are there, and welcomes them. Raises `UsageError` if one of them
        would train something else, the meeting's errors, and `KeyboardInterrupt`."""
        meeting = self._meeting
        deadline = time.monotonic() + meeting.timeout_seconds
        while len(self.living) < self.ranks - 1:
            if (came := door.next(_NAP_SECONDS)) is not None:
                self._let_in(*came, facts)
            self.check()
            meeting.check_others()
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, self.ranks)) - set(self.living))
                raise meeting.errors.absent("unknown", missing, meeting.timeout_seconds)
        meeting.forget()
        self.tell(TrainingMessage.WELCOME, {"run": run})

    def _let_in(
        self, connection: Connection, kind: str, content: dict[str, Any], facts: Mapping[str, Any]
    ) -> None:
        rank = content.get("rank")
        if kind != TrainingMessage.RANK or not isinstance(rank, int):
            connection.close()
            return
        control = self._control(connection, str(content.get("host")))
        if rank in self.living or not 0 < rank < self.ranks:
            says = f"is {rank} in two processes, or not one of {self.ranks}"
            control.send(TrainingMessage.REFUSED, {"option": "RANK", "says": says})
            control.close()
            self._refuse("RANK", says)
        self.living[rank] = control
        theirs = content.get("facts")
        given: dict[str, Any] = theirs if isinstance(theirs, dict) else {}
        for name, expected in facts.items():
            if json.dumps(given.get(name)) != json.dumps(expected):
                unlike = self._meeting.errors.unlike
                self._refuse(name, unlike(control.host, rank, name, given.get(name), expected))

    def _refuse(self, option: str, says: str) -> NoReturn:
        self.tell(TrainingMessage.REFUSED, {"option": option, "says": says})
        raise UsageError(option, says)

    def check(self) -> None:
        """Raises if a rank has ended, or Ctrl-C was pressed there, before the run has begun."""
        for rank, control in self.living.items():
            if (message := control.next()) is None:
                continue
            if message[0] == TrainingMessage.INTERRUPTED:
                raise KeyboardInterrupt
            raise self._meeting.errors.lost(control.host, rank, str(message[1].get("said")))

    def tell(
        self, kind: TrainingMessage, content: dict[str, Any], vector: NDArray[Any] = NOTHING
    ) -> None:
        """Sends all ranks a message."""
        for control in self.living.values():
            control.send(kind, content, vector)

    @contextmanager
    def told_failures(self) -> Iterator[None]:
        """What is raised within this block is told to the other ranks, also to one that comes
        later."""
        try:
            yield
        except BaseException as error:
            self.tell(TrainingMessage.FAILED, {"said": said_of(error)})
            self._meeting.tell_failure(said_of(error))
            raise

    def close(self, patience_seconds: float = END_SECONDS) -> None:
        """Closes the connections, once the others have read all that was sent."""
        deadline = time.monotonic() + patience_seconds
        for control in self.living.values():
            while time.monotonic() < deadline:
                message = control.next(_NAP_SECONDS)
                if message is not None and message[0] == TrainingMessage.LOST:
                    break
            control.close()
        self.living.clear()


def check_rule(rule: Rule) -> None:
    """Raises `UsageError` for a rule whose workers share the center's memory."""
    if rule.lock_free:
        raise UsageError("rule", f"{rule.name} needs memory that all workers share")


def facts_of(assignment: Assignment) -> dict[str, Any]:
    """What all ranks must agree on in a training."""
    return comparable(
        {
            "rule": assignment.rule.name,
            "option": dict(assignment.rule.options),
            "wire": assignment.wire,
            **assignment.job.facts(),
            **assignment.facts,
        }
    )


def comparable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, and the versions of what computes: name -> JSON, or its digest where that is
    long."""
    # Vectors go as they lie in memory, and samples are drawn by NumPy's generators.
    versions = [version("dovetail"), version("torch"), version("numpy"), sys.byteorder]
    facts = {**facts, "versions": versions}
    texts = {name: json.dumps(fact, default=str) for name, fact in facts.items()}
    return {
        name: json.loads(text)
        if len(text) <= _FACT_CHARACTERS
        else hashlib.sha256(text.encode()).hexdigest()
        for name, text in texts.items()
    }
