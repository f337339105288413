"""Rank 0's part: the supervisor, the server, its own workers, and the way to the other ranks.

The transport is that of the backend `processes`. A worker of another rank has a process here too,
its stand-in. How such a worker has ended is told by its own rank, and only if that rank is lost is
it told by nobody.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ProcessDiedError, ProcessError
from dovetail.training.backends.contract import Assignment, Storage, Watcher
from dovetail.training.backends.messages import Finished
from dovetail.training.backends.processes.transport import ProcessesTransport
from dovetail.training.backends.ranks.connections import Connection, Control, Door
from dovetail.training.backends.ranks.meeting import (
    RanksOptions,
    Team,
    check_rule,
    facts_of,
    next_meeting,
)
from dovetail.training.backends.ranks.messages import TrainingMessage
from dovetail.training.backends.ranks.worker import LinkLost
from dovetail.training.records import Outcome
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


def lead(assignment: Assignment, watcher: Watcher, options: RanksOptions) -> Outcome:
    """Runs the assignment with the other ranks, and gives them its result; see `ranks.run`."""
    check_rule(assignment.rule)
    meeting = next_meeting()
    with ExitStack() as stack:
        door = stack.enter_context(meeting.door(options.listen))
        team = Team(meeting)
        stack.callback(team.close)
        with team.told_failures():
            team.gather(door, facts_of(assignment), assignment.job.run)
            storage = assignment.storage
            if storage is None and options.log:
                storage = stack.enter_context(temporary_storage(assignment))
            transport = RanksTransport(assignment, options, storage, door, team)
            stack.enter_context(transport)
            outcome = Supervisor(assignment, watcher, transport, late=options.late).run()
            theta = outcome.theta if watcher.result is None else watcher.result(outcome)
        ended = {
            "clock": outcome.clock,
            "samples": outcome.samples,
            "seconds": outcome.seconds,
            "stopped": outcome.stopped,
        }
        team.tell(TrainingMessage.END, ended, theta)
    return outcome


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
