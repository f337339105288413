"""The parameter server, whoever carries its messages: takes turns, gives answers.

    turn ──► examine ──► journal ──► state: ledger ──► center ──► deliveries
             refused?    before             who        apply,     vectors lie in the
                         anything           counts     read       workers' outboxes
                         changes            what

A refused commit changes nothing of the center. All that happens to the ledger is written to the
journal first, so that a server that died is rebuilt by doing it again, through the same code.

`take` may be called by several threads, one per worker. Turns are ordered under a lock; the shards
then work on several of them at once.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from dovetail.training.backends.contract import Guard, Storage
from dovetail.training.checks import Check
from dovetail.training.gate import TurnGate
from dovetail.training.journal import Journal, JournalRecord
from dovetail.training.records import Event, Job, Refusal, Row, Turn, Vector, Verdict
from dovetail.training.rules.contract import Rule
from dovetail.training.state import (
    CommitPayload,
    Delivery,
    ServerState,
    examine,
    turn_fields,
    turn_of,
)

__all__ = ["Delivery", "Server"]

NO_PAYLOAD = CommitPayload()
"""The payload of an input that has no vector."""


class Server:
    """A run's center, its ledger, and their history.

    theta      [size] where the center starts; changed in place from then on
    storage    the folder that keeps the state, new or empty; None: the state is not kept
    order      the order of workers in which turns are taken; None: as they come
    clock      tells the seconds since the run's start
    """

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        job: Job,
        rule: Rule,
        theta: Vector,
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
        self._ahead_seconds = 0.0
        self._lock = threading.RLock()
        self._order = order
        self._held: dict[int, CommitPayload] = {}
        self._here: set[int] = set()  # who joined this server, not only a former self
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
        theta: Vector,
        *,
        storage: Storage,
        keeps_theta: bool = False,
        **options: Any,
    ) -> Self:
        """The server whose state the storage's folder holds, or a new one if it holds none.

        `theta` [size] is overwritten with the center. With `keeps_theta` it is kept: it is then a
        lock-free center in memory that outlived the server, and no log knows what is in it. A run
        that was stopped goes on; whoever still wants its end stops it again.

        Raises `JournalError`, `RunMismatchError`, and `UsageError` if another server has the
        folder.
        """
        server = cls(job, rule, theta, **options)
        try:
            server._open(storage, resume=True)
            server._rebuild(theta.copy() if keeps_theta else None)
        except BaseException:
            server.close()
            raise
        return server

    # What workers do

    def join(self, worker: int, inbox: Vector | None = None, outbox: Vector | None = None) -> int:
        """The number of the worker's last applied commit; 0 for a new worker.

        Its commits will lie in `inbox` [size], unless `take` is given them. Its pulls go to
        `outbox` [size].
        """
        with self._lock:
            self._here.add(worker)
            self._state.center.attach(worker, inbox, outbox)
            header = self._log({"kind": "join", "worker": worker})
            return self._state.join(worker, header["seconds"])

    def take(
        self, turn: Turn, checksum: int | None = None, vector: Vector | None = None
    ) -> list[Delivery]:
        """The answers that follow from a turn: to its worker, to others, or none yet.

        checksum   of the vector, by `checks.checksum`, if the worker sent one
        vector     the commit's, if it is not in the inbox; used where it lies, so it must not
                   change until the turn is answered
        """
        # Looking at a vector takes time, and needs nothing that another turn may change: it is done
        # outside of the lock, so that the vectors of several workers are looked at at once.
        payload = self._examine(turn, checksum, vector)
        with self._lock:
            deliveries = self._turns(self._pass(turn, payload))
            ticket = self._state.center.tickets
        return self._finish(ticket, deliveries)

    def evict(self, worker: int) -> list[Delivery]:
        """The worker is dead or hung: its samples go to others."""
        return self._remove(worker, "evict")

    def leave(self, worker: int) -> list[Delivery]:
        """The worker has ended."""
        return self._remove(worker, "leave")

    # What the run does

    def dismiss_late(self) -> None:
        """Evict the workers that joined beyond the job's: in a run that is continued, nobody takes
        their place."""
        for worker in {e.worker for e in self.events if e.worker >= self.job.workers}:
            self.evict(worker)

    def stop(self) -> list[Delivery]:
        """End the run early. Workers that wait are told now, the others when they ask."""
        return self._do({"kind": "stop"})

    def end_stream(self, samples: int) -> list[Delivery]:
        """The stream ends after so many samples."""
        return self._do({"kind": "end_stream", "samples": samples})

    def snapshot(self) -> None:
        """Keep the state as it is now, where the run has a folder."""
        if self._journal is not None:
            with self._lock:
                state, vectors = self._state.save()
                if self.rule.lock_free:
                    # Workers write to the center meanwhile: its checksum would not fit.
                    vectors["theta"] = vectors["theta"].copy()
                state["position"] = self._gate and self._gate.position
                state["passed"] = [turn_fields(t) for t in self._gate.passed] if self._gate else []
                state["seconds"] = self._seconds()
                self._journal.snapshot(state, vectors)
                self._saved_rows = len(self._state.rows)

    def close(self) -> None:
        """End the threads, and let another server have the folder."""
        try:
            self._state.center.close()
        finally:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def theta(self) -> Vector:
        """The center [size] itself, after all commits that were taken; the next one changes it."""
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
        """Who joined, left, was lost; what was refused; when this server was restarted."""
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
        """Whether the run was ended before."""
        return self._state.ledger.stopped

    @property
    def waiting(self) -> tuple[int, ...]:
        """Workers that wait for an answer: they are silent without being hung."""
        with self._lock:
            return self._state.ledger.waiting

    @property
    def holders(self) -> tuple[int, ...]:
        """Workers that hold a lease."""
        with self._lock:
            return tuple(self._state.ledger.leases)

    # Before anything changes

    def _examine(self, turn: Turn, checksum: int | None, vector: Vector | None) -> CommitPayload:
        commit, state = turn.commit, self._state
        if commit is None or commit.steps == 0 or self.rule.lock_free:
            return CommitPayload()
        with self._lock:
            if state.ledger.check(commit) is not None:
                return CommitPayload()
            received = state.center.inbox(turn.worker) if vector is None else vector
        return examine(state.center, received, checksum)

    def _pass(self, turn: Turn, payload: CommitPayload) -> Iterable[Turn]:
        """The turns that may be taken now, their payloads in `_held`."""
        self._held[turn.worker] = payload
        ledger = self._state.ledger
        again = turn.commit is not None and ledger.check(turn.commit) is Verdict.DUPLICATE
        return [turn] if self._gate is None or again else self._gate.push(turn)

    def _turns(self, turns: Iterable[Turn]) -> list[Delivery]:
        deliveries = []
        for turn in turns:
            payload = self._judge(turn, self._held.pop(turn.worker))
            header = {"kind": "turn", "turn": turn_fields(turn), "refusal": payload.refusal}
            self._log(header, payload)
            deliveries += self._enact(header, payload)
        return deliveries

    def _judge(self, turn: Turn, payload: CommitPayload) -> CommitPayload:
        """The payload, or a refusal in its place."""
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
        if payload.vector is None:  # its lease was not held yet when it came
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
        """The header with its time, which is in the journal by now."""
        header["seconds"] = self._seconds()
        if self._gate is not None:
            header["position"] = self._gate.position
        checksum = 0
        if payload.checked is not None:
            checksum, header["squares"] = payload.checked.checksum, payload.checked.squares
        if self._journal is not None:
            self._journal.append(header, payload.vector, checksum)
        return header

    def _enact(self, header: dict[str, Any], payload: CommitPayload = NO_PAYLOAD) -> list[Delivery]:
        """Do what an input asks; the answers for workers that have joined this server."""
        # The input may answer a turn that was left by the server before this one. Its worker has
        # not joined yet, and will ask again: an answer now would be taken for the one to that.
        return [d for d in self._state.enact(header, payload) if d.worker in self._here]

    def _seconds(self) -> float:
        return self._clock() + self._ahead_seconds

    def _finish(self, ticket: int, deliveries: list[Delivery]) -> list[Delivery]:
        """The deliveries, once the shards have done their part; keeps a snapshot if it is due."""
        state = self._state
        state.center.wait(ticket)
        with self._lock:
            state.settle()
            if self._due():
                self.snapshot()
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

    def _rebuild(self, theta: Vector | None) -> None:
        """Take over the snapshot's state, then do again all that was logged since. `theta` [size]:
        the center, if it is known without the log."""
        journal, state = self._journal, self._state
        assert journal is not None
        snapshot = journal.load()
        if snapshot is None:
            self.snapshot()
            return
        fields, vectors = snapshot
        state.restore(fields, vectors)
        self._saved_rows = len(state.rows)
        last = {"seconds": fields["seconds"], "position": fields["position"]}
        passed = {turn["worker"]: turn for turn in fields["passed"]}
        for record in journal.records():
            last |= record.header
            if record.header["kind"] == "turn":
                passed[record.header["turn"]["worker"]] = record.header["turn"]
            state.enact(record.header, _payload(record))
            state.center.flush()
            state.settle()
        if self._order is not None:
            self._gate = TurnGate(self._order, last["position"] or 0, lambda: self.waiting)
            for turn in passed.values():  # whoever was not answered says it again
                self._gate.recall(turn_of(turn))
        if theta is not None:
            state.center.theta[:] = theta
        self._ahead_seconds = max(0.0, last["seconds"] - self._clock())
        if self.stopped:
            state.enact(self._log({"kind": "continue"}), CommitPayload())
        state.enact(self._log({"kind": "restarted"}), CommitPayload())


def _payload(record: JournalRecord) -> CommitPayload:
    """The payload, or the refusal, of a turn that was logged."""
    refusal, squares = record.header.get("refusal"), record.header.get("squares")
    checked = None if squares is None else Check(0, squares)
    return CommitPayload(record.vector, checked, refusal and Refusal(refusal))
