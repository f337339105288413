"""The part of the ranks after the first: to start and end workers as rank 0 says, and to tell how
each has ended."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import numpy as np

from dovetail.errors import ProcessDiedError, ProcessError, RankLostError, UsageError
from dovetail.runtime.parcels import pack_parcel
from dovetail.runtime.processes import Worker, launch, ready
from dovetail.runtime.ranks import RankPlace
from dovetail.runtime.stopped import STOPPED_SECONDS
from dovetail.training.backends.contract import Assignment, WorkerPlan
from dovetail.training.backends.ranks.connections import Address, Control, Octets
from dovetail.training.backends.ranks.meeting import (
    RanksOptions,
    check_rule,
    facts_of,
    next_meeting,
)
from dovetail.training.backends.ranks.messages import TrainingMessage
from dovetail.training.backends.ranks.worker import LinkLost, RemoteStart, vector_bytes
from dovetail.training.records import Outcome
from dovetail.training.supervisor import interrupts

WORKER_ENTRY = "dovetail.training.backends.ranks.worker:serve"
_NAP_SECONDS = 0.05
_TRACEBACK_CHARACTERS = 20_000
"""The characters of a traceback's end that rank 0 is told: as JSON less than `HEAD_BYTES`."""


def follow(place: RankPlace, assignment: Assignment, options: RanksOptions) -> Outcome:
    """Runs workers until rank 0 ends the run; see `ranks.run`."""
    check_rule(assignment.rule)
    # Slow preparations come first: from the connection on rank 0 waits for signs of life.
    facts, learner = facts_of(assignment), pack_parcel(assignment.learner)
    try:
        connection, address, token = next_meeting().join(facts)
    except BaseException:
        learner[1].close()
        raise
    control = Control(connection, str(address[0]), vector_bytes(assignment.job))
    with _Follower(place, assignment, options, control, (address, token), learner) as follower:
        return follower.run()


class _Follower:
    """A context manager, which ends this rank's workers."""

    def __init__(
        self,
        place: RankPlace,
        assignment: Assignment,
        options: RanksOptions,
        control: Control,
        door: tuple[Address, bytes],
        learner: tuple[Any, Any],
    ) -> None:
        self._place, self._assignment, self._options = place, assignment, options
        self._control, self._door = control, door
        self._learner, self._learner_block = learner
        self._workers: dict[int, Worker] = {}  # by their tickets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        for process in self._workers.values():
            process.close(kill=True)
        self._learner_block.close()

    def run(self) -> Outcome:
        """Raises `UsageError` if the ranks do not agree, and `RankLostError`."""
        has_told = False
        with interrupts(True) as pressed:
            while True:
                message = self._control.next(0.0 if self._workers else _NAP_SECONDS)
                if message is not None and (outcome := self._hear(*message)) is not None:
                    return outcome
                self._look_at_workers()
                if pressed and not has_told:
                    has_told = True
                    self._control.send(TrainingMessage.INTERRUPTED, {})

    def _hear(self, kind: str, content: dict[str, Any], body: Octets) -> Outcome | None:
        """Does what rank 0 says. Returns the outcome once it says that the run has ended."""
        match kind:
            case TrainingMessage.WELCOME:
                job = replace(self._assignment.job, run=str(content["run"]))
                self._assignment = replace(self._assignment, job=job)
            case TrainingMessage.START:
                self._start(int(content["worker"]), int(content["ticket"]))
            case TrainingMessage.KILL:
                if (process := self._workers.get(int(content["ticket"]))) is not None:
                    os.kill(process.pid, signal.SIGKILL)  # what follows is told as any other end
            case TrainingMessage.END:
                return Outcome(
                    theta=np.array(body.view(self._assignment.job.dtype)),
                    clock=int(content["clock"]),
                    samples=int(content["samples"]),
                    seconds=float(content["seconds"]),
                    stopped=content["stopped"] is True,
                    meta={"backend": "ranks", "rank": self._place.rank, "ranks": self._place.ranks},
                )
            case TrainingMessage.REFUSED:
                raise UsageError(str(content["option"]), str(content["says"]))
            case TrainingMessage.FAILED:
                raise RankLostError(self._control.host, 0, "", str(content["said"]))
            case TrainingMessage.LOST:
                raise RankLostError(self._control.host, 0, "", str(content["said"]))
        return None

    def _start(self, worker: int, ticket: int) -> None:
        cores = self._options.cores
        process = launch(
            WORKER_ENTRY,
            cores=tuple(cores[worker % len(cores)]) if cores else (),
            threads=self._options.threads,
            name=f"worker {worker}",
            patience_seconds=self._assignment.policy.lease_seconds + STOPPED_SECONDS,
        )
        self._workers[ticket] = process
        plan = WorkerPlan.of(self._assignment, worker, 0)
        with suppress(ProcessError, ProcessDiedError):  # it is told when it is looked at
            process.send(RemoteStart(plan, self._learner, *self._door, ticket))
            process.send_descriptor(self._learner_block.descriptor)

    def _look_at_workers(self) -> None:
        """Tells rank 0 of workers that have ended."""
        tickets = {id(process): ticket for ticket, process in self._workers.items()}
        for process in ready(list(self._workers.values()), _NAP_SECONDS) if tickets else ():
            ended: dict[str, Any] = {"ticket": tickets[id(process)]}
            try:
                message = process.receive()
                if isinstance(message, LinkLost):
                    ended["status"] = f"its connection with rank 0 was lost: {message.said}"
                else:
                    ended |= {"status": "left", "left": True}
            except ProcessDiedError as error:
                ended["status"] = error.status
            except ProcessError as error:
                ended["status"] = error.said
                ended["traceback"] = error.traceback[-_TRACEBACK_CHARACTERS:]
            del self._workers[ended["ticket"]]
            process.close()
            self._control.send(TrainingMessage.ENDED, ended)
