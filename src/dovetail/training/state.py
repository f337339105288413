"""All of a server's state. It changes by inputs only, so the same inputs build the same state.

    input: header {kind, seconds, ...}, payload ──► ledger ──► steps ──► center, rows, events
                                                                    └──► deliveries

Headers are JSON, and are what the journal keeps. Kinds: join, turn, evict, leave, stop, continue,
end_stream, restarted.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.training.backends.contract import Guard
from dovetail.training.center import Center
from dovetail.training.ledger import Ledger
from dovetail.training.momentum import Momentum, adds_plainly
from dovetail.training.payloads import Norms, Payload
from dovetail.training.records import (
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
from dovetail.training.rows import make_row, pack, unpack
from dovetail.training.rules.contract import Rule
from dovetail.training.steps import Answer, Apply, Combine, Forget, Read, Step

_ROWS, _MOMENTUM = "rows", "momentum "


@dataclass(frozen=True)
class Delivery:
    """An answer to send; `pulled`: the center lies in the worker's outbox."""

    worker: int
    reply: Reply
    pulled: bool = False


@dataclass(frozen=True)
class _Head:
    """What a row will say of a commit; `update` [k]: its values at the watched coordinates."""

    commit: Commit
    norm: float
    update: Vector | None = None


@dataclass(frozen=True)
class _Applied:
    """Commits that the shards are at work on, and their rows but for the momentum."""

    ticket: int
    rows: tuple[tuple[Row, _Head], ...]


class State:
    """Ledger, center and history. One thread at a time.

    rows       of commits that are applied, as `settle` found them done
    present    by worker: joined, and neither lost nor gone
    """

    def __init__(self, job: Job, rule: Rule, theta: Vector, guard: Guard, shards: int) -> None:
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.refusals: Counter[Refusal] = Counter()
        self.present: dict[int, bool] = {}
        self.ledger = Ledger(job, rule)
        self.momentum = Momentum(theta) if adds_plainly(rule, theta.dtype) else None
        watched = None if self.momentum is None else self.momentum.coordinates
        self.center = Center(theta, rule, shards, watched)
        self.norms = Norms(guard)
        self._heads: dict[int, _Head] = {}
        self._applied: deque[_Applied] = deque()
        self._packed = bytearray()

    # Inputs

    def enact(self, header: dict[str, Any], payload: Payload) -> list[Delivery]:
        """Do what an input asks; the answers that follow, once the center has done its part.
        `payload`: the turn's vector, and its refusal if it has one."""
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
                self._event("stopped", -1, seconds)
                return self._execute(self.ledger.stop(), seconds)
            case "continue":
                self.ledger.stopped = False
                return []
            case "end_stream":
                return self._execute(self.ledger.end_stream(header["samples"]), seconds)
        self._event("server_restarted", -1, seconds)
        return []

    def join(self, worker: int, seconds: float) -> int:
        """The worker is here; the number of its last applied commit."""
        if not self.present.get(worker):
            self._event("restarted" if worker in self.present else "joined", worker, seconds)
        self.present[worker] = True
        self._heads.pop(worker, None)
        self.center.unstage(worker)
        return self.ledger.join(worker)

    def _offer(self, turn: Turn, payload: Payload, seconds: float) -> list[Delivery]:
        commit, refusal, ledger = turn.commit, payload.refusal, self.ledger
        if refusal is not None:
            self.refusals[refusal] += 1
            self._event("refused", turn.worker, seconds, str(refusal))
        if refusal is Refusal.RUN:  # of nobody that the ledger should know
            reply = Reply(Verdict.REFUSED, refusal, clock=ledger.clock, samples=ledger.samples)
            return [Delivery(turn.worker, reply)]
        if commit is not None and payload.vector is not None:
            self.center.stage(turn.worker, payload.vector)
            update = None
            if self.momentum is not None:
                update = payload.vector[self.momentum.coordinates]
            self._heads[turn.worker] = _Head(commit, payload.norm, update)
        clock = ledger.clock
        steps = ledger.offer(turn, refusal)
        if commit is not None and ledger.rule.lock_free and ledger.clock > clock:
            staleness = max(0, clock - max(0, commit.base_clock))
            self._keep(make_row(ledger.clock, staleness, commit, math.nan, seconds))
        return self._execute(steps, seconds)

    def _drop(self, worker: int, kind: str, seconds: float) -> None:
        if self.present.get(worker):
            self._event(kind, worker, seconds)
        self.present[worker] = False
        self._heads.pop(worker, None)

    def _execute(self, steps: list[Step], seconds: float) -> list[Delivery]:
        """Have the center do the steps; prepare the rows and the answers."""
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

    def _event(self, kind: str, worker: int, seconds: float, detail: str = "") -> None:
        self.events.append(Event(kind, worker, seconds, detail))

    def settle(self) -> None:
        """Write the rows of all commits that the center is done with, in their order."""
        while self._applied and self.center.done(self._applied[0].ticket):
            for row, head in self._applied.popleft().rows:
                if self.momentum is not None and head.update is not None:
                    estimate = self.momentum.add(head.commit.base_clock, head.update)
                    row = replace(row, momentum=estimate)
                self._keep(row)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self._packed += pack(row)

    # Snapshots

    def save(self) -> tuple[dict[str, Any], dict[str, Vector]]:
        """All of it: as JSON knows it, and as vectors, which are not copies."""
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
        """Take over what `save` gave."""
        packed = vectors[_ROWS]
        if self.momentum is not None:
            cut = len(_MOMENTUM)
            more = {name[cut:]: v for name, v in vectors.items() if name.startswith(_MOMENTUM)}
            self.momentum.restore(state["momentum"], more)
        self.center.restore(vectors, state["counts"])
        self._packed = bytearray(packed.tobytes())
        self.rows[:] = unpack(packed.astype(np.float64))
        self.events[:] = [Event(*values) for values in state["events"]]
        self.refusals = Counter({Refusal(name): count for name, count in state["refusals"]})
        self.present = dict(state["present"])
        self.norms.last.extend(state["norms"])
        self._heads = {w: _Head(Commit(**commit), norm) for w, commit, norm in state["heads"]}
        self.ledger = Ledger.restore(self.ledger.job, self.ledger.rule, state["ledger"])


def turn_fields(turn: Turn) -> dict[str, Any]:
    """A turn as JSON knows it."""
    commit = turn.commit and vars(turn.commit)
    return {"worker": turn.worker, "commit": commit, "lease": turn.lease, "pull": turn.pull}


def turn_of(fields: dict[str, Any]) -> Turn:
    """The turn whose `turn_fields` those are."""
    commit = fields["commit"] and Commit(**fields["commit"])
    return Turn(fields["worker"], commit, fields["lease"], fields["pull"])
