"""Runs one shard of the center as an actor, if the vector is spread over several.

    worker ── stage(key, piece) ──► check, journal                    the center is as it was
    ledger ── execute(n, steps) ──► journal, apply staged pieces      in the ledger's order
    worker ── fetch(n) ◄── what step n copied for it

The ledger numbers its steps, and every shard does them in that order, each once. So at each number
all shards have the same version. A shard that Ray starts again rebuilds itself from its own
snapshot and log. The server sends the steps again that it missed, and it skips steps that it has
done.
"""

import uuid
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import TrainingError
from dovetail.training.backends.contract import ServerPlan
from dovetail.training.backends.messages import NumberedSteps, ShardProgress
from dovetail.training.backends.ray.actors import cuts, decoded, open_again, start_of
from dovetail.training.center import Center, CommitPayload
from dovetail.training.journal import Journal
from dovetail.training.records import Vector
from dovetail.training.steps import Apply, Combine, Forget, Read
from dovetail.training.wire import make_wire

KEPT = 2
"""The pieces that are kept for each worker's number. A worker that was thought dead may stage one
beside its replacement's."""
_KINDS: dict[str, type[Apply] | type[Read] | type[Forget]] = {
    "Apply": Apply,
    "Read": Read,
    "Forget": Forget,
}


class Shard:
    """The actor. It has one thread, so the calls of one caller are done in their order."""

    def __init__(self, plan: ServerPlan, theta: Vector | list[Any], index: int) -> None:
        import ray

        self._again: bool = ray.get_runtime_context().was_current_actor_reconstructed
        start, stop = cuts(plan.job.size, plan.shards)[index]
        self._job = replace(plan.job, size=stop - start)
        self._wire = None
        if plan.wire != "none":
            self._wire = make_wire(plan.wire, self._job.size, plan.job.dtype)
        rule = plan.rule
        self._center = Center(np.array(start_of(theta)[start:stop]), rule)
        self._pieces: dict[str, tuple[int, Vector]] = {}  # by key, with their workers
        self._pulls: dict[int, tuple[int, Vector]] = {}  # by worker, with their numbers
        self._life = uuid.uuid4().hex
        self._number = 0  # of the last steps that were done
        assert plan.storage is not None, "an actor's run keeps a folder"
        folder = plan.storage.folder / f"shard-{index}"
        self._storage = replace(plan.storage, folder=folder)
        resumes = self._again or self._storage.resume
        self._journal = open_again(
            lambda: Journal(self._storage, self._job, rule, resume=resumes), self._again
        )
        self._rebuild()

    def _rebuild(self) -> None:
        snapshot = self._journal.load()
        if snapshot is None:
            self.snapshot()
            return
        state, vectors = snapshot
        for key, worker in state["pieces"]:
            self._pieces[key] = worker, vectors.pop(f"piece {key}")
        self._center.restore(vectors, state["counts"])
        self._number = state["number"]
        for record in self._journal.records():
            header = record.header
            if record.vector is None:
                steps = tuple((kind, fields) for kind, fields in header["steps"])
                self._do(NumberedSteps(header["number"], steps, header["keys"]))
            else:
                self._keep(header["key"], header["worker"], record.vector)

    # Workers'

    def stage(self, worker: int, key: str, expected: int, sent: NDArray[Any]) -> CommitPayload:
        """Checks a piece of a commit and keeps it under its key until a step applies it. Returns
        what was found, without the vector. `expected` is the checksum of `sent`."""
        # Kept until it is applied, so each piece has a vector of its own.
        piece = np.empty(0 if self._wire is None else self._job.size, self._job.dtype)
        payload = self._center.examine(*decoded(self._wire, sent, expected, piece))
        if payload.vector is not None and payload.checked is not None:
            header = {"worker": worker, "key": key}
            self._journal.append(header, payload.vector, payload.checked.checksum)
            self._keep(key, worker, payload.vector)
        return replace(payload, vector=None)

    def _keep(self, key: str, worker: int, vector: Vector) -> None:
        self._pieces.pop(key, None)
        self._pieces[key] = worker, vector
        mine = [each for each, (owner, _) in self._pieces.items() if owner == worker]
        for old in mine[:-KEPT]:
            del self._pieces[old]

    def fetch(self, worker: int, number: int) -> Vector | None:
        """The part of the center that the steps of that number copied for the worker; None if this
        shard does not have it, as after a restart."""
        pulled = self._pulls.get(worker)
        return pulled[1] if pulled is not None and pulled[0] == number else None

    # The ledger's

    def execute(self, numbered: NumberedSteps) -> ShardProgress:
        """Does the steps if they are the next ones, and returns how far the shard is."""
        if numbered.number == self._number + 1:
            header = {"number": numbered.number, "steps": numbered.steps, "keys": numbered.keys}
            self._journal.append(header)
            self._do(numbered)
            if self._journal.long:
                self.snapshot()
        return self.done()

    def _do(self, numbered: NumberedSteps) -> None:
        for worker, key in numbered.keys:
            if key not in self._pieces:
                raise TrainingError(
                    f"a shard has lost what worker {worker} committed; give a storage with sync, "
                    "on a disk that outlives its machine"
                )
            self._center.stage(worker, self._pieces.pop(key)[1])
        steps = [
            Combine(tuple(Apply(**each) for each in fields["arrivals"]))
            if kind == "Combine"
            else _KINDS[kind](**fields)
            for kind, fields in numbered.steps
        ]
        pulling = [step.worker for step in steps if isinstance(step, Read)]
        for worker in pulling:
            if worker not in self._pulls:
                self._pulls[worker] = 0, np.empty(self._job.size, self._job.dtype)
            self._center.attach(worker, None, self._pulls[worker][1])
        self._center.execute(*steps)
        self._number = numbered.number
        for worker in pulling:
            self._pulls[worker] = numbered.number, self._pulls[worker][1]

    def done(self) -> ShardProgress:
        """How far the shard is."""
        return ShardProgress(self._life, self._number)

    def theta(self) -> Vector:
        """The shard's part of the center."""
        return self._center.theta

    def snapshot(self) -> None:
        """Saves the state and begins a new log."""
        pieces = [(key, worker) for key, (worker, _) in self._pieces.items()]
        state = {"number": self._number, "counts": self._center.counts(), "pieces": pieces}
        staged = {f"piece {key}": vector for key, (_, vector) in self._pieces.items()}
        self._journal.snapshot(state, self._center.vectors() | staged)

    def close(self) -> None:
        """Closes the journal, so that the folder is free."""
        self._journal.close()
