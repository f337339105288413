"""Rank 0's part: the supervisor, the server, its own workers, and the way to the other ranks.

The transport is that of the backend `processes`. A worker of another rank has a process here too,
its stand-in. How such a worker has ended is told by its own rank, and only if that rank is lost is
it told by nobody.
"""

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ProcessDiedError, ProcessError, RankLostError, UsageError
from dovetail.runtime.ranks import JOIN_SECONDS, RankPlace, address_towards
from dovetail.runtime.user_code import line_of
from dovetail.training.backends.contract import Assignment, Storage, Watcher
from dovetail.training.backends.processes.messages import Finished
from dovetail.training.backends.processes.transport import ProcessesTransport
from dovetail.training.backends.ranks.connections import TOKEN_BYTES, Connection, Control, Door
from dovetail.training.backends.ranks.meeting import (
    RanksOptions,
    check_others,
    check_rule,
    facts_of,
    forget_address,
    run_name,
    tell_address,
    tell_failure,
)
from dovetail.training.backends.ranks.messages import TrainingMessage
from dovetail.training.backends.ranks.worker import LinkLost
from dovetail.training.records import Outcome, Vector
from dovetail.training.supervisor import (
    Interrupted,
    RunProgress,
    Supervisor,
    Word,
    WorkerDied,
    WorkerRaised,
    temporary_storage,
)

STAND_IN_ENTRY = "dovetail.training.backends.ranks.worker:stand_in"
END_SECONDS = 10.0
"""Once the run has ended, the other ranks have this long to take its result."""
_NAP_SECONDS = 0.1


def lead(
    place: RankPlace, assignment: Assignment, watcher: Watcher, options: RanksOptions
) -> Outcome:
    """Runs the assignment with the other ranks, and gives them its result; see `ranks.run`."""
    check_rule(assignment)
    name, token = run_name(), secrets.token_bytes(TOKEN_BYTES)
    with ExitStack() as stack:
        try:
            door = Door(options.listen or address_towards(place.address), token)
        except OSError as error:
            says = f"rank 0 cannot listen on {options.listen or place.address[0]!r}: {error}"
            tell_failure(place, name, says)
            raise UsageError("listen", says) from error
        stack.callback(door.close)
        tell_address(place, name, door.address, token)
        team = Team(place.ranks)
        stack.callback(team.close)
        try:
            team.gather(
                door, facts_of(assignment), assignment.job.run, lambda: check_others(place, name)
            )
            forget_address(place, name)
            storage = assignment.storage
            if storage is None and options.log:
                storage = stack.enter_context(temporary_storage(assignment))
            transport = RanksTransport(assignment, options, storage, door, team)
            stack.enter_context(transport)
            outcome = Supervisor(assignment, watcher, transport, late=options.late).run()
            theta = outcome.theta if watcher.result is None else watcher.result(outcome)
        except BaseException as error:
            said = "it was interrupted" if isinstance(error, KeyboardInterrupt) else line_of(error)
            team.tell(TrainingMessage.FAILED, {"said": said})
            # For a rank that comes later.
            tell_failure(place, name, said)
            raise
        team.end(outcome, theta)
    return outcome


class Team:
    """The other ranks, as far as they live: rank -> its control connection."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.living: dict[int, Control] = {}

    def gather(
        self, door: Door, facts: Mapping[str, Any], run: str, check_others: Callable[[], None]
    ) -> None:
        """Waits until all ranks are there, and welcomes them. Raises `UsageError` if one of them
        would train something else, `RankLostError`, and `KeyboardInterrupt`.

        check_others   raises if a rank that has not come yet says that it failed
        """
        deadline = time.monotonic() + JOIN_SECONDS
        while len(self.living) < self.ranks - 1:
            if (came := door.next(_NAP_SECONDS)) is not None:
                self._let_in(*came, facts)
            for rank, control in self.living.items():
                self._check(rank, control)
            check_others()
            if time.monotonic() > deadline:
                missing = min(set(range(1, self.ranks)) - set(self.living))
                said = f"it did not begin within {JOIN_SECONDS:g} s"
                raise RankLostError("unknown", missing, "", said)
        self.tell(TrainingMessage.WELCOME, {"run": run})

    def _let_in(
        self, connection: Connection, kind: str, content: dict[str, Any], facts: Mapping[str, Any]
    ) -> None:
        rank = content.get("rank")
        if kind != TrainingMessage.RANK or not isinstance(rank, int):
            connection.close()
            return
        control = Control(connection, str(content.get("host")))
        if rank in self.living or not 0 < rank < self.ranks:
            says = f"is {rank} in two processes, or not one of {self.ranks}"
            self._refuse("RANK", says, control)
        self.living[rank] = control
        theirs = content.get("facts")
        given: dict[str, Any] = theirs if isinstance(theirs, dict) else {}
        for name, expected in facts.items():
            if json.dumps(given.get(name)) != json.dumps(expected):
                says = f"rank {rank} on host {control.host} has {given.get(name)!r}, and rank 0 has"
                self._refuse(name, f"{says} {expected!r}; start all ranks alike")

    def _refuse(self, option: str, says: str, control: Control | None = None) -> None:
        message = {"option": option, "says": says}
        if control is not None:
            control.send(TrainingMessage.REFUSED, message)
            control.close()
        self.tell(TrainingMessage.REFUSED, message)
        raise UsageError(option, says)

    def _check(self, rank: int, control: Control) -> None:
        message = control.next()
        if message is None:
            return
        if message[0] == TrainingMessage.INTERRUPTED:
            raise KeyboardInterrupt
        raise RankLostError(control.host, rank, "", str(message[1].get("said")))

    def tell(self, kind: TrainingMessage, content: dict[str, Any]) -> None:
        for control in self.living.values():
            control.send(kind, content)

    def end(self, outcome: Outcome, theta: Vector) -> None:
        """Gives all ranks the result, `theta` [size]."""
        content = {
            "clock": outcome.clock,
            "samples": outcome.samples,
            "seconds": outcome.seconds,
            "stopped": outcome.stopped,
        }
        for control in self.living.values():
            control.send(TrainingMessage.END, content, theta)

    def close(self) -> None:
        """Closes the connections, once the others have read all that was sent."""
        deadline = time.monotonic() + END_SECONDS
        for control in self.living.values():
            while time.monotonic() < deadline:
                message = control.next(_NAP_SECONDS)
                if message is not None and message[0] == TrainingMessage.LOST:
                    break
            control.close()
        self.living.clear()


@dataclass
class _RemoteWorker:
    """A worker of another rank.

    ticket   number of this start of it
    is_here  it has connected, and has a stand-in
    has_left its rank says that it found no sample left
    """

    rank: int
    ticket: int
    is_here: bool = False
    has_left: bool = False


class RanksTransport(ProcessesTransport):
    """A server process, worker processes on all ranks, and stand-ins for those of other ranks."""

    name = "ranks"

    def __init__(
        self,
        assignment: Assignment,
        options: RanksOptions,
        storage: Storage | None,
        door: Door,
        team: Team,
    ) -> None:
        super().__init__(assignment, options, storage)
        self._door, self._team = door, team
        self._remote: dict[int, _RemoteWorker] = {}
        self._rank_of: dict[int, int] = {}
        self._tickets = itertools.count(1)

    # What the supervisor asks for

    def start_worker(self, worker: int) -> None:
        rank = self._rank_of[worker] = self._choose_rank(worker)
        if rank == 0:
            super().start_worker(worker)
            return
        self._remote[worker] = _RemoteWorker(rank, next(self._tickets))
        start = {"worker": worker, "ticket": self._remote[worker].ticket}
        self._team.living[rank].send(TrainingMessage.START, start)

    def _choose_rank(self, worker: int) -> int:
        """The rank that the worker had; at first neighbours have the same one. If that rank is
        lost, the one with the fewest workers."""
        workers, ranks = self.assignment.job.workers, self._team.ranks
        first = worker * ranks // workers if worker < workers else worker % ranks
        rank = self._rank_of.get(worker, first)
        living = [0, *self._team.living]
        if rank in living:
            return rank
        counts = [other for number, other in self._rank_of.items() if number != worker]
        return min(living, key=lambda other: (counts.count(other), other))

    def kill(self, number: int) -> None:
        if number in self._remote:
            self._kill_remote(self._remote[number])
        else:
            super().kill(number)

    def _kill_remote(self, remote: _RemoteWorker) -> None:
        """Has its rank end a worker. That rank tells when it has ended."""
        self._team.living[remote.rank].send(TrainingMessage.KILL, {"ticket": remote.ticket})

    def turn(self, progress: RunProgress) -> Iterator[Word]:
        yield from super().turn(progress)
        while (came := self._door.next(0.0)) is not None:
            self._let_in(*came)
        for rank, control in list(self._team.living.items()):
            while (message := control.next()) is not None:
                yield from self._hear_rank(rank, control, *message[:2])

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"ranks": self._team.ranks}

    # What is said

    def _let_in(self, connection: Connection, kind: str, content: dict[str, Any]) -> None:
        """Starts the stand-in of a worker that has connected."""
        worker = self._worker_of(content.get("ticket")) if kind == TrainingMessage.WORKER else None
        if worker is None or self._remote[worker].is_here:
            connection.close()
            return
        self._remote[worker].is_here = True
        self.launch_worker(worker, STAND_IN_ENTRY, connection)
        os.close(connection.detach())  # the stand-in has it

    def _worker_of(self, ticket: Any) -> int | None:
        return next((n for n, remote in self._remote.items() if remote.ticket == ticket), None)

    def _hear_worker(self, worker: int, word: object) -> Iterator[Word]:
        remote = self._remote.get(worker)
        if remote is not None:
            match word:
                case LinkLost() | ProcessDiedError():
                    self._listened.discard(worker)
                    if remote.has_left:  # but the server was not told
                        said = word.said if isinstance(word, LinkLost) else word.status
                        yield from self._lose(worker, said)
                    else:
                        self._kill_remote(remote)
                    return
                case Finished():
                    del self._remote[worker]
                case ProcessError():
                    self._kill_remote(self._remote.pop(worker))
        yield from super()._hear_worker(worker, word)

    def _hear_rank(
        self, rank: int, control: Control, kind: str, content: dict[str, Any]
    ) -> Iterator[Word]:
        if kind == TrainingMessage.INTERRUPTED:
            yield Interrupted()
        elif kind == TrainingMessage.ENDED:
            yield from self._hear_end(content)
        elif kind == TrainingMessage.LOST and rank in self._team.living:
            del self._team.living[rank]
            control.close()
            said = f"rank {rank} on host {control.host} was lost: {content['said']}"
            for worker in [n for n, remote in self._remote.items() if remote.rank == rank]:
                yield from self._lose(worker, said)

    def _hear_end(self, content: dict[str, Any]) -> Iterator[Word]:
        """A rank says how one of its workers has ended."""
        worker = self._worker_of(content.get("ticket"))
        if worker is None:
            return
        remote, status = self._remote[worker], str(content.get("status"))
        if content.get("left") is True:
            remote.has_left = True
            if worker in self._listened:  # the stand-in tells the rest
                return
        traceback = str(content.get("traceback") or "")
        if traceback:
            name = f"worker {worker} on rank {remote.rank}"
            yield WorkerRaised(worker, ProcessError(name, traceback, status))
        yield from self._lose(worker, status)

    def _lose(self, worker: int, said: str) -> Iterator[Word]:
        """Ends what is here of a remote worker, which has died."""
        if self._remote.pop(worker).is_here:
            self._listened.discard(worker)
            self._errors.pop(worker, None)  # of sending to it, and not to its successor
            self.workers[worker].process.close(kill=True)
        yield WorkerDied(worker, said)
