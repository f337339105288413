"""Holds all of a server's state. Only inputs change it, so the same inputs build the same state.

    input: header {kind, seconds, ...}, payload ──► ledger ──► steps ──► center, rows, events
                                                                    └──► deliveries

The journal keeps the headers, which are JSON. Their kinds are join, turn, evict, leave, stop,
continue, end_stream, change and restarted. A payload is a vector that the center has examined, or
the reason of a refusal.
"""

import math
import statistics
import struct
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.training.backends.contract import Guard
from dovetail.training.center import Center, CommitPayload, ServedCenter
from dovetail.training.ledger import Ledger
from dovetail.training.momentum import Momentum, adds_plainly
from dovetail.training.records import (
    COLUMNS,
    Commit,
    Event,
    Job,
    Refusal,
    Reply,
    Row,
    Turn,
    Vector,
    Verdict,
)
from dovetail.training.rules.contract import Rule
from dovetail.training.steps import Answer, Apply, Combine, Forget, Read, Step

_ROWS, _MOMENTUM = "rows", "momentum "
"""Names of vectors in a snapshot. The second is a prefix of the momentum's own names."""
NORMS = 100
"""The guard compares a commit's norm with the median norm of the last so many commits."""
FEWEST_NORMS = 10
"""The guard compares no norm with the median before it has seen so many norms."""


class Norms:
    """Keeps the norms of the last applied commits, and judges the norm of the next one."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.last: deque[float] = deque(maxlen=NORMS)

    def refuse(self, norm: float) -> bool:
        """Whether the guard refuses a commit of this norm. A norm is not compared with the median
        of fewer than `FEWEST_NORMS` norms, nor with a median of zero."""
        guard = self._guard
        if guard.norm_limit is not None and norm > guard.norm_limit:
            return True
        if guard.norm_factor is None or len(self.last) < FEWEST_NORMS:
            return False
        return 0 < guard.norm_factor * statistics.median(self.last) < norm


@dataclass(frozen=True)
class Delivery:
    """An answer to send. `pulled`: the center was copied to the worker's outbox."""

    worker: int
    reply: Reply
    pulled: bool = False


@dataclass(frozen=True)
class _CommitHead:
    """The parts of a commit that its row needs. `update` [k] is the commit's vector at the watched
    coordinates."""

    commit: Commit
    norm: float
    update: Vector | None = None


@dataclass(frozen=True)
class _Applied:
    """Commits that the shards still work on, and their rows without the momentum."""

    ticket: int
    rows: tuple[tuple[Row, _CommitHead], ...]


class ServerState:
    """Ledger, center and history. Only one thread at a time may use it.

    rows       rows of the commits that are applied; `settle` adds them
    present    worker -> whether it has joined and was neither lost nor has left since
    """

    def __init__(
        self, job: Job, rule: Rule, theta: Vector | ServedCenter, guard: Guard, shards: int
    ) -> None:
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.refusals: Counter[Refusal] = Counter()
        self.present: dict[int, bool] = {}
        self.ledger = Ledger(job, rule)
        # The estimate needs the values of some coordinates at each commit, so there is none for a
        # center that lies elsewhere.
        self.momentum: Momentum | None = None
        if not isinstance(theta, np.ndarray):
            self.center: ServedCenter = theta
        else:
            if adds_plainly(rule, theta.dtype):
                self.momentum = Momentum(theta)
            watched = None if self.momentum is None else self.momentum.coordinates
            self.center = Center(theta, rule, shards, watched)
        self.norms = Norms(guard)
        self._heads: dict[int, _CommitHead] = {}
        self._applied: deque[_Applied] = deque()
        self._packed = bytearray()

    # Inputs

    def enact(self, header: dict[str, Any], payload: CommitPayload) -> list[Delivery]:
        """Does what an input asks and returns the answers that follow. They may be sent once the
        center has done its part. `payload` is the turn's vector, or its refusal."""
        seconds, worker = header["seconds"], header.get("worker", -1)
        match header["kind"]:
            case "turn":
                return self._offer(turn_of(header["turn"]), payload, seconds)
            case "join":
                self.join(worker, seconds)
                return []
            case "evict":
                self._drop(worker, "lost", seconds)
                return self._execute(self.ledger.evict(worker), seconds)
            case "leave":
                self._drop(worker, "left", seconds)
                return self._execute(self.ledger.leave(worker), seconds)
            case "stop":
                self._add_event("stopped", -1, seconds)
                return self._execute(self.ledger.stop(), seconds)
            case "continue":
                self.ledger.stopped = False
                return []
            case "change":
                self.present.clear()
                self._heads.clear()
                steps = self.ledger.change(header["epochs"], header["workers"])
                return self._execute(steps, seconds)
            case "end_stream":
                return self._execute(self.ledger.end_stream(header["samples"]), seconds)
        # Of a shard that was lost, or in logs of earlier versions, it names no number.
        self.ledger.restart(header.get("leases"))
        self._add_event("server_restarted", -1, seconds)
        return []

    def join(self, worker: int, seconds: float) -> int:
        """Notes that the worker has joined and returns the number of its last applied commit."""
        if not self.present.get(worker):
            self._add_event("restarted" if worker in self.present else "joined", worker, seconds)
        self.present[worker] = True
        self._heads.pop(worker, None)
        self.center.unstage(worker)
        return self.ledger.join(worker)

    def _offer(self, turn: Turn, payload: CommitPayload, seconds: float) -> list[Delivery]:
        commit, refusal, ledger = turn.commit, payload.refusal, self.ledger
        if refusal is not None:
            self.refusals[refusal] += 1
            self._add_event("refused", turn.worker, seconds, str(refusal))
        # The sender belongs to another run, so the ledger must not take it for a worker.
        if refusal is Refusal.RUN:
            reply = Reply(Verdict.REFUSED, refusal, clock=ledger.clock, samples=ledger.samples)
            return [Delivery(turn.worker, reply)]
        if commit is not None and payload.vector is not None:
            self.center.stage(turn.worker, payload.vector)
            update = None
            if self.momentum is not None:
                update = payload.vector[self.momentum.coordinates]
            self._heads[turn.worker] = _CommitHead(commit, payload.norm, update)
        clock = ledger.clock
        steps = ledger.offer(turn, refusal)
        # A lock-free commit has no step to apply, so its row is written here.
        if commit is not None and ledger.rule.lock_free and ledger.clock > clock:
            staleness = max(0, clock - max(0, commit.base_clock))
            self._keep(make_row(ledger.clock, staleness, commit, math.nan, seconds))
        return self._execute(steps, seconds)

    def _drop(self, worker: int, kind: str, seconds: float) -> None:
        if self.present.get(worker):
            self._add_event(kind, worker, seconds)
        self.present[worker] = False
        self._heads.pop(worker, None)

    def _execute(self, steps: list[Step], seconds: float) -> list[Delivery]:
        """Hands the steps to the center, prepares the rows, and returns the answers."""
        applied: list[Apply] = []
        for step in steps:
            if isinstance(step, Apply):
                applied.append(step)
            elif isinstance(step, Combine):
                applied += step.arrivals
        works = [step for step in steps if isinstance(step, Apply | Combine | Read | Forget)]
        values = self.momentum.version(self.ledger.clock) if self.momentum and applied else None
        if works:
            self.center.execute(*works, values=values)
        if applied:
            heads = [self._heads.pop(step.worker) for step in applied]
            self.norms.last.extend(head.norm for head in heads)
            clock = self.ledger.clock
            rows = tuple(
                (make_row(clock, step.staleness, head.commit, head.norm, seconds), head)
                for step, head in zip(applied, heads, strict=True)
            )
            self._applied.append(_Applied(self.center.tickets, rows))
        pulled = {step.worker for step in steps if isinstance(step, Read)}
        answers = [step for step in steps if isinstance(step, Answer)]
        return [Delivery(step.worker, step.reply, step.worker in pulled) for step in answers]

    def _add_event(self, kind: str, worker: int, seconds: float, detail: str = "") -> None:
        self.events.append(Event(kind, worker, seconds, detail))

    def settle(self) -> None:
        """Adds the rows of all commits that the center has applied, in their order."""
        while self._applied and self.center.done(self._applied[0].ticket):
            for row, head in self._applied.popleft().rows:
                # The estimate needs the center after the commit, which the shards have copied now.
                if self.momentum is not None and head.update is not None:
                    estimate = self.momentum.add(head.commit.base_clock, head.update)
                    row = replace(row, momentum=estimate)
                self._keep(row)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self._packed += pack_row(row)

    # Snapshots

    def save(self) -> tuple[dict[str, Any], dict[str, Vector]]:
        """The whole state: values that JSON can hold, and vectors, which are not copies."""
        vectors = self.center.vectors()
        counts = self.center.counts()
        self.settle()
        vectors[_ROWS] = np.frombuffer(bytes(self._packed), np.float64)
        heads = [[w, vars(head.commit), head.norm] for w, head in self._heads.items()]
        state: dict[str, Any] = {
            "ledger": self.ledger.state(),
            "counts": counts,
            "norms": list(self.norms.last),
            "heads": heads,
            "present": list(self.present.items()),
            "refusals": list(self.refusals.items()),
            "events": [list(vars(event).values()) for event in self.events],
            "momentum": None,
        }
        if self.momentum is not None:
            state["momentum"], more = self.momentum.save()
            vectors |= {_MOMENTUM + name: vector for name, vector in more.items()}
        return state, vectors

    def restore(self, state: dict[str, Any], vectors: dict[str, Vector]) -> None:
        """Takes over a state that `save` returned."""
        packed = vectors[_ROWS]
        if self.momentum is not None:
            cut = len(_MOMENTUM)
            more = {name[cut:]: v for name, v in vectors.items() if name.startswith(_MOMENTUM)}
            self.momentum.restore(state["momentum"], more)
        self.center.restore(vectors, state["counts"])
        self._packed = bytearray(packed.tobytes())
        self.rows[:] = unpack_rows(packed.astype(np.float64))
        self.events[:] = [Event(*values) for values in state["events"]]
        self.refusals = Counter({Refusal(name): count for name, count in state["refusals"]})
        self.present = dict(state["present"])
        self.norms.last.extend(state["norms"])
        self._heads = {w: _CommitHead(Commit(**commit), norm) for w, commit, norm in state["heads"]}
        self.ledger = Ledger.restore(self.ledger.job, self.ledger.rule, state["ledger"])


def turn_fields(turn: Turn) -> dict[str, Any]:
    """A turn as values that JSON can hold."""
    commit = turn.commit and vars(turn.commit)
    return {"worker": turn.worker, "commit": commit, "lease": turn.lease, "pull": turn.pull}


def turn_of(fields: dict[str, Any]) -> Turn:
    """The turn that has these `turn_fields`."""
    commit = fields["commit"] and Commit(**fields["commit"])
    return Turn(fields["worker"], commit, fields["lease"], fields["pull"])


# Rows as flat numbers, for snapshots

_STRUCT = struct.Struct(f"={len(COLUMNS)}d")


def make_row(clock: int, staleness: int, commit: Commit, norm: float, seconds: float) -> Row:
    """A commit's row, without momentum."""
    return Row(
        clock=clock,
        worker=commit.worker,
        sequence=commit.sequence,
        staleness=staleness,
        steps=commit.steps,
        samples=commit.samples,
        loss=commit.loss,
        norm=norm,
        seconds=seconds,
        begin_seconds=commit.begin_seconds,
        end_seconds=commit.end_seconds,
    )


def pack_row(row: Row) -> bytes:
    """A row as float64 numbers. Its integers stay exact up to 2^53."""
    return _STRUCT.pack(*vars(row).values())


def unpack_rows(packed: NDArray[np.float64]) -> list[Row]:
    """The rows that `pack_row` has packed one after the other."""
    return [
        Row(*(kind(value) for kind, value in zip(COLUMNS.values(), values, strict=True)))
        for values in packed.reshape(-1, len(COLUMNS)).tolist()
    ]
