"""The parameter server: takes turns and gives answers, whichever transport carries them.

    turn ──► examine ──► journal ──► state: ledger ──► center ──► deliveries
             refused?    before             who        apply,     vectors lie in the
                         anything           counts     read       workers' outboxes
                         changes            what

A refused commit does not change the center. Every input of the ledger is written to the journal
before it takes effect, so that a server that died is rebuilt by doing the same inputs again,
through the same code.

`take` may be called by several threads, one per worker. Turns are ordered under a lock. The shards
then work on several of them at once.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self

from dovetail.errors import RunMismatchError
from dovetail.training.backends.contract import Guard, Storage
from dovetail.training.center import Center, CommitPayload, ServedCenter
from dovetail.training.checks import Check
from dovetail.training.gate import TurnGate
from dovetail.training.journal import Journal
from dovetail.training.ledger import Ledger
from dovetail.training.records import (
    CHANGING,
    LEASED,
    Event,
    Job,
    Refusal,
    Row,
    Turn,
    Vector,
    Verdict,
)
from dovetail.training.rules.contract import Rule
from dovetail.training.state import Delivery, ServerState, turn_fields, turn_of

__all__ = ["Delivery", "Server"]

NO_PAYLOAD = CommitPayload()
"""The payload of an input that has no vector."""


class Server:
    """A run's center, its ledger, and their history.

    theta      [size] the initial center; it is changed in place from then on. Or a center whose
               vectors lie elsewhere
    storage    a new or empty folder that keeps the state; None: the state is not kept
    order      turns are taken in this order of workers; None: as they come
    clock      returns the seconds since the run's start

    ahead_seconds   the seconds that a resumed run had taken before: its time goes on from there
    """

    def __init__(
        self,
        job: Job,
        rule: Rule,
        theta: Vector | ServedCenter,
        *,
        guard: Guard | None = None,
        storage: Storage | None = None,
        shards: int = 1,
        order: tuple[int, ...] | None = None,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.rule = rule
        self._clock = clock
        self.ahead_seconds = 0.0
        self._lock = threading.RLock()
        self._order = order
        self._held: dict[int, CommitPayload] = {}
        # Workers that joined this server itself, and not only the one that it was rebuilt from.
        self._here: set[int] = set()
        self._journal: Journal | None = None
        self._storage = storage
        self._saved_rows = 0  # rows at the last snapshot
        self._state = ServerState(job, rule, theta, guard or Guard(), shards)
        self._gate = None if order is None else TurnGate(order, waiting=lambda: self.waiting)
        if storage is not None:
            try:
                self._open(storage, resume=False)
                self.snapshot()
            except BaseException:
                self.close()
                raise

    @classmethod
    def resume(
        cls,
        job: Job,
        rule: Rule,
        theta: Vector | ServedCenter,
        *,
        storage: Storage,
        keeps_theta: bool = False,
        **options: Any,
    ) -> Self:
        """The server whose state the storage's folder holds, or a new one if it holds none.

        `theta` [size] is overwritten with the center. With `keeps_theta` it is kept: it is then a
        lock-free center in shared memory that outlived the server, whose content is in no log. A
        run that was stopped goes on; a caller who still wants to end it stops it again. `job` may
        have more epochs than the state, or without shares another number of workers.

        Raises `JournalError`, `RunMismatchError`, and `UsageError` if another server uses the
        folder.
        """
        server = cls(job, rule, theta, **options)
        try:
            server._open(storage, resume=True)
            server._rebuild(keeps_theta=keeps_theta)
        except BaseException:
            server.close()
            raise
        return server

    # What workers do

    def join(self, worker: int, inbox: Vector | None = None, outbox: Vector | None = None) -> int:
        """Adds the worker and returns the number of its last applied commit; 0 for a new worker.

        The worker's commits lie in `inbox` [size], unless `take` is given them. Its pulls are
        copied to `outbox` [size].
        """
        with self._lock:
            self._here.add(worker)
            self._state.center.attach(worker, inbox, outbox)
            header = self._log({"kind": "join", "worker": worker})
            return self._state.join(worker, header["seconds"])

    def take(self, turn: Turn, checksum: int | None = None, vector: Any = None) -> list[Delivery]:
        """Takes a turn and returns the answers that follow from it: to its worker, to others, or
        none yet.

        checksum   the vector's, by `checks.checksum`, if the worker sent one
        vector     the commit's vector, if it is not in the inbox. It is not copied, so it must not
                   change until the turn is answered. If the vectors lie elsewhere: what the center
                   knows of it
        """
        # Examining a vector takes time, and depends on nothing that another turn may change. It is
        # done outside of the lock, so that vectors of several workers are examined at once.
        payload = self._examine(turn, checksum, vector)
        with self._lock:
            self._held[turn.worker] = payload
            # A repeated turn was in the order before. It passes at once and takes no entry again.
            ledger = self._state.ledger
            again = turn.commit is not None and ledger.check(turn.commit) is Verdict.DUPLICATE
            passes = [turn] if self._gate is None or again else self._gate.push(turn)
            deliveries = self._turns(passes)
            ticket = self._state.center.tickets
        return self._finish(ticket, deliveries)

    def evict(self, worker: int) -> list[Delivery]:
        """Notes that the worker is dead or hung: its samples go to others."""
        return self._remove(worker, "evict")

    def leave(self, worker: int) -> list[Delivery]:
        """Notes that the worker has ended."""
        return self._remove(worker, "leave")

    # What the run does

    def dismiss_late(self) -> None:
        """Evicts workers that joined beyond the job's number. In a run that is resumed, nobody
        takes their place, so their leases would never be committed."""
        for worker in [each for each in self._state.present if each >= self.job.workers]:
            self.evict(worker)

    def stop(self) -> list[Delivery]:
        """Ends the run early. Workers that wait are told now, the others when they ask."""
        return self._do({"kind": "stop"})

    def end_stream(self, samples: int) -> list[Delivery]:
        """Notes that the stream ends after so many samples."""
        return self._do({"kind": "end_stream", "samples": samples})

    def snapshot(self) -> None:
        """Saves the present state, if the run has a folder."""
        if self._journal is not None:
            with self._lock:
                state, vectors = self._state.save()
                if self.rule.lock_free:
                    # Workers write to the center while it is saved, so the checksum of the center
                    # itself would not fit what is written.
                    vectors["theta"] = vectors["theta"].copy()
                state["position"] = self._gate and self._gate.position
                state["passed"] = [turn_fields(t) for t in self._gate.passed] if self._gate else []
                state["seconds"] = self.seconds()
                self._journal.snapshot(state, vectors)
                self._saved_rows = len(self._state.rows)

    def close(self) -> None:
        """Ends the shards' threads and closes the journal, so that another server can use its
        folder."""
        try:
            self._state.center.close()
        finally:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds(self) -> float:
        """The run's time: the seconds since its start, with those before it was resumed."""
        return self._clock() + self.ahead_seconds

    @property
    def theta(self) -> Vector:
        """The center [size] after all commits so far. It is no copy: the next commit changes it."""
        with self._lock:
            return self._state.center.theta

    def copy(self) -> tuple[Vector, int, int]:
        """A copy of the center [size], its clock and its samples, all of one version."""
        with self._lock:
            return self._state.center.theta.copy(), self.clock, self.samples

    @property
    def rows(self) -> list[Row]:
        """The rows of all commits that were applied, in order."""
        return self._state.rows

    @property
    def events(self) -> list[Event]:
        """The run's events, in order, such as workers that joined and commits that were refused."""
        return self._state.events

    @property
    def refusals(self) -> Counter[Refusal]:
        """How many commits were refused, by reason."""
        return self._state.refusals

    @property
    def clock(self) -> int:
        """Commits, or rounds, so far."""
        return self._state.ledger.clock

    @property
    def samples(self) -> int:
        """How many samples were committed so far."""
        return self._state.ledger.samples

    @property
    def done(self) -> bool:
        """Whether every sample of every epoch is committed."""
        return self._state.ledger.done

    @property
    def stopped(self) -> bool:
        """Whether the run was ended before its epochs."""
        return self._state.ledger.stopped

    @property
    def waiting(self) -> tuple[int, ...]:
        """Workers that wait for an answer. They are silent without being hung."""
        with self._lock:
            return self._state.ledger.waiting

    @property
    def holders(self) -> tuple[int, ...]:
        """Workers that hold a lease."""
        with self._lock:
            return tuple(self._state.ledger.leases)

    # Before anything changes

    def _examine(self, turn: Turn, checksum: int | None, vector: Any) -> CommitPayload:
        commit, state = turn.commit, self._state
        if commit is None or commit.steps == 0 or self.rule.lock_free:
            return CommitPayload()
        with self._lock:
            if state.ledger.check(commit) is not None:
                return CommitPayload()
            received = state.center.inbox(turn.worker) if vector is None else vector
        return state.center.examine(received, checksum)

    def _turns(self, turns: Iterable[Turn]) -> list[Delivery]:
        deliveries = []
        # The gate decides on each turn only after the one before has been enacted.
        for turn in turns:
            payload = self._judge(turn, self._held.pop(turn.worker))
            header = {"kind": "turn", "turn": turn_fields(turn), "refusal": payload.refusal}
            self._log(header, payload)
            deliveries += self._enact(header, payload)
        return deliveries

    def _judge(self, turn: Turn, payload: CommitPayload) -> CommitPayload:
        """The payload, or a refusal in its place. The ledger is asked again, under the lock: it may
        have changed since the vector was examined."""
        commit = turn.commit
        if commit is None or payload.refusal is not None:
            return payload
        if commit.worker != turn.worker:
            return CommitPayload(refusal=Refusal.LEASE)
        verdict = self._state.ledger.check(commit)
        if isinstance(verdict, Refusal):
            return CommitPayload(refusal=verdict)
        if verdict is Verdict.DUPLICATE or commit.steps == 0 or self.rule.lock_free:
            return CommitPayload()
        # The vector was not examined, because the lease was not held when the turn came.
        if payload.vector is None:
            return CommitPayload(refusal=Refusal.LEASE)
        return (
            CommitPayload(refusal=Refusal.NORM)
            if self._state.norms.refuse(payload.norm)
            else payload
        )

    def _remove(self, worker: int, kind: str) -> list[Delivery]:
        with self._lock:
            self._held.pop(worker, None)
            passed = () if self._gate is None else self._gate.drop(worker)
            header = self._log({"kind": kind, "worker": worker})
            deliveries = self._enact(header) + self._turns(passed)
            ticket = self._state.center.tickets
        return self._finish(ticket, deliveries)

    def _do(self, header: dict[str, Any]) -> list[Delivery]:
        with self._lock:
            deliveries = self._enact(self._log(header))
            ticket = self._state.center.tickets
        return self._finish(ticket, deliveries)

    def _log(self, header: dict[str, Any], payload: CommitPayload = NO_PAYLOAD) -> dict[str, Any]:
        """Adds the time to the header, writes it to the journal and returns it."""
        header["seconds"] = self.seconds()
        if self._gate is not None:
            header["position"] = self._gate.position
        checksum = 0
        if payload.checked is not None:
            checksum, header["squares"] = payload.checked.checksum, payload.checked.squares
        if self._journal is not None:
            self._journal.append(header, payload.vector, checksum)
        return header

    def _enact(self, header: dict[str, Any], payload: CommitPayload = NO_PAYLOAD) -> list[Delivery]:
        """Does what an input asks and returns the answers for workers that joined this server."""
        # The input may answer a turn that the server before this one left unanswered. Its worker
        # has not joined this server yet and will repeat the turn. An answer sent now would be taken
        # for the answer to the repeated turn.
        return [d for d in self._state.enact(header, payload) if d.worker in self._here]

    def _finish(self, ticket: int, deliveries: list[Delivery]) -> list[Delivery]:
        """Waits for the shards, saves a snapshot if one is due, and returns the deliveries."""
        state = self._state
        # Waiting outside of the lock lets other turns be ordered while the shards work.
        state.center.wait(ticket)
        with self._lock:
            state.settle()
            if self._due():
                self.snapshot()
            if state.center.lost_a_part():
                self._do({"kind": "restarted"})
        return deliveries

    def _due(self) -> bool:
        if self._storage is None or self._journal is None:
            return False
        new = len(self._state.rows) - self._saved_rows
        return new >= self._storage.snapshot_commits or self._journal.long

    # Coming back

    def _open(self, storage: Storage, *, resume: bool) -> None:
        self._storage = storage
        self._journal = Journal(storage, self.job, self.rule, resume=resume)
        # The state is that of the job that the run began with, until it is changed.
        began = replace(self.job, **self._journal.began)
        self._check_change(began)
        self._state.ledger = Ledger(began, self.rule)

    def _rebuild(self, *, keeps_theta: bool) -> None:
        """Takes over the snapshot's state, then does all inputs again that were logged since."""
        journal, state = self._journal, self._state
        theta = state.center.theta.copy() if keeps_theta else None
        assert journal is not None
        snapshot = journal.load()
        if snapshot is None:
            self.snapshot()
            return
        fields, vectors = snapshot
        # Imported here, because pydantic takes a while and only a server that comes back needs it.
        from dovetail.training.restoring import check_record, check_snapshot

        # Of a center whose shards are elsewhere only keys are here.
        center = state.center if isinstance(state.center, Center) else None
        if center is not None:
            check_snapshot(
                journal.snapshot_path, fields, vectors, state.ledger, center, state.momentum
            )
        state.restore(fields, vectors)
        self._saved_rows = len(state.rows)
        last = {"seconds": fields["seconds"], "position": fields["position"]}
        passed = {turn["worker"]: turn for turn in fields["passed"]}
        for record in journal.records():
            if center is not None:
                number = journal.number - 1
                vector = record.vector
                check_record(journal.log_path, number, record.header, vector, state.ledger, center)
            last |= record.header
            if record.header["kind"] == "turn":
                passed[record.header["turn"]["worker"]] = record.header["turn"]
            # The payload, or the refusal, of a turn. The journal has compared the checksum when it
            # read the record, so 0 stands for it here.
            refusal, squares = record.header.get("refusal"), record.header.get("squares")
            checked = None if squares is None else Check(0, squares)
            payload = CommitPayload(record.vector, checked, refusal and Refusal(refusal))
            state.enact(record.header, payload)
            state.center.flush()
            state.settle()
        changes = state.ledger.job != self.job
        self._check_change(state.ledger.job)
        if self._order is not None:
            self._gate = TurnGate(self._order, last["position"] or 0, lambda: self.waiting)
            # A worker that was not answered sends its last turn again: the gate must know it.
            for turn in passed.values() if not changes else ():
                self._gate.recall(turn_of(turn))
        if theta is not None:
            state.center.theta[:] = theta
        # The run's time goes on from the last input, so that it never runs backwards.
        self.ahead_seconds = max(0.0, last["seconds"] - self._clock())
        if changes:
            header = {"kind": "change", "epochs": self.job.epochs, "workers": self.job.workers}
            state.enact(self._log(header), CommitPayload())
        if self.stopped:
            state.enact(self._log({"kind": "continue"}), CommitPayload())
        # Commits that were on their way to the server before this one name leases that it may not
        # know of. Numbers from anywhere else keep those apart from the leases that follow.
        leases = int.from_bytes(os.urandom(6), "big")
        state.enact(self._log({"kind": "restarted", "leases": leases}), CommitPayload())

    def _check_change(self, job: Job) -> None:
        """Raises `RunMismatchError` if a run with the state's job cannot go on with this server's.

        A share belongs to a worker, and the end of a stream may have been met already."""
        fixed = "epochs" if job.samples is None else "workers" if job.partition != LEASED else ""
        for name in CHANGING:
            expected, found = getattr(self.job, name), getattr(job, name)
            is_less = name == "epochs" and expected < found
            if is_less or (name == fixed and expected != found):
                assert self._storage is not None
                folder = os.fspath(self._storage.folder)
                raise RunMismatchError(folder, name, expected, found)
