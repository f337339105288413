"""Holds the center variable theta~ and the rule's own vectors in shards, and executes the ledger's
steps on them.

    execute(Apply, Read, ...)   ──► shard 0   block, block, ...      each shard is one thread, and
                                ──► shard 1   block, block, ...      takes the batches in order

Server functions are elementwise, so a shard can take its vector block by block and do all steps of
a batch on one block before the next. A block fits into a core's cache, so what an `Apply` wrote is
still there when a `Read` copies it. All shards do the same batches in the same order, so every pull
sees one version in all shards. Shards do not wait for each other, so several commits can be in
progress, each in another shard.
"""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import TrainingError
from dovetail.training.checks import Check, check
from dovetail.training.records import Refusal, Vector
from dovetail.training.rules.contract import Arrival, Rule, Slice, new_slots
from dovetail.training.steps import Apply, Combine, Forget, Read, Step

BLOCK_BYTES = 2**18
"""The size of a block of theta~. It is well below a core's cache, which must also hold the block's
part of the commit, of the rule's slots and of the pull."""


@dataclass(frozen=True)
class CommitPayload:
    """A turn's vector and its check, or the reason of a refusal. All three are None if the turn has
    no commit or its commit has no vector."""

    vector: Vector | None = None
    checked: Check | None = None
    refusal: Refusal | None = None

    @property
    def norm(self) -> float:
        """L2 norm of the vector; nan without one."""
        return math.nan if self.checked is None else self.checked.norm


class ServedCenter(Protocol):
    """What a server asks of its center, wherever the vectors lie; see `Center`.

    A center whose vectors lie elsewhere is handed keys in place of vectors. Only one thread at a
    time may call the methods, but for `examine`, `wait` and `done`.
    """

    @property
    def tickets(self) -> int: ...

    @property
    def theta(self) -> Vector: ...

    def attach(self, worker: int, inbox: Vector | None, outbox: Vector | None) -> None: ...

    def inbox(self, worker: int) -> Vector | None: ...

    def examine(self, received: Any, expected: int | None) -> CommitPayload:
        """Returns what came with a commit as a payload, or the reason why it is refused. `expected`
        is its checksum, if the sender gave one."""
        ...

    def stage(self, worker: int, vector: Vector) -> None: ...

    def unstage(self, worker: int) -> None: ...

    def execute(self, *steps: Step, values: Vector | None = None) -> int: ...

    def wait(self, ticket: int) -> None: ...

    def done(self, ticket: int) -> bool: ...

    def flush(self) -> None: ...

    def lost_a_part(self) -> bool:
        """Whether a part of the center was lost and has come back since this was last asked."""
        ...

    def vectors(self) -> dict[str, Vector]: ...

    def counts(self) -> dict[str, int]: ...

    def restore(self, vectors: dict[str, Vector], counts: dict[str, int]) -> None: ...

    def close(self) -> None: ...


@dataclass
class _CenterBlock:
    """Elements [start, stop) of the vector.

    part      the block's view of theta~ and of the rule's slots, with counts of its own
    watched   the slice of the list of watched coordinates that lies in this block
    places    positions of those coordinates, counted from the block's start
    """

    start: int
    stop: int
    part: Slice
    watched: slice
    places: NDArray[np.int64]


Task = Callable[[_CenterBlock], None]


class Center:
    """theta~, the rule's slots and counts, each worker's base, and commits that wait for a round.

    theta      [size] is changed in place, and may lie in shared memory
    shards     number of threads that own a part each; 1: the caller's own thread does the work
    watched    coordinates [k], ascending, whose values `execute` can copy out at each version

    Only one thread at a time may call the methods. The shards' threads touch nothing but the blocks
    and the vectors that tasks name.
    """

    def __init__(
        self, theta: Vector, rule: Rule, shards: int = 1, watched: NDArray[np.int64] | None = None
    ) -> None:
        assert theta.ndim == 1
        assert theta.flags.c_contiguous
        self._theta = theta
        self._rule = rule
        self._slots = new_slots(rule.server_slots, theta)
        self._inboxes: dict[int, Vector] = {}
        self._outboxes: dict[int, Vector] = {}
        self._staged: dict[int, Vector] = {}
        self._bases: dict[int, Vector] = {}
        self._watched = np.zeros(0, np.int64) if watched is None else watched
        blocks = list(self._cut())
        self._blocks = blocks
        threads = min(shards, len(blocks))
        ends = [len(blocks) * i // threads for i in range(threads + 1)]
        self._work = _ShardThreads([blocks[a:b] for a, b in pairwise(ends)])

    def _cut(self) -> Iterator[_CenterBlock]:
        names = self._rule.server_counts
        size, length = self._theta.size, max(BLOCK_BYTES // self._theta.itemsize, 1)
        # A center without elements still has one block, which keeps the rule's counts.
        for start in range(0, max(size, 1), length):
            stop = min(start + length, size)
            slots = {name: slot[start:stop] for name, slot in self._slots.items()}
            # Each block counts for itself, because the rule's function runs once in each of them.
            # So all blocks hold the same counts after the same steps.
            part = Slice(self._theta[start:stop], slots, dict.fromkeys(names, 0))
            first, last = np.searchsorted(self._watched, (start, stop)).tolist()
            watched = slice(first, last)
            yield _CenterBlock(start, stop, part, watched, self._watched[watched] - start)

    def attach(self, worker: int, inbox: Vector | None, outbox: Vector | None) -> None:
        """Sets the vectors [size] that a worker's commits lie in and that its pulls are copied to;
        None removes one."""
        for boxes, box in ((self._inboxes, inbox), (self._outboxes, outbox)):
            assert box is None or self.fits(box)
            boxes.pop(worker, None)
            if box is not None:
                boxes[worker] = box

    def inbox(self, worker: int) -> Vector | None:
        """The vector that the worker's commits lie in; None if none is attached."""
        return self._inboxes.get(worker)

    def has_base(self, worker: int) -> bool:
        """Whether the center that the worker pulled last is kept."""
        return worker in self._bases

    def fits(self, vector: Vector) -> bool:
        """Whether the vector has theta's shape and type and is contiguous."""
        theta = self._theta
        same = (vector.shape, vector.dtype) == (theta.shape, theta.dtype)
        return same and vector.flags.c_contiguous

    def examine(self, received: Vector | None, expected: int | None) -> CommitPayload:
        """Returns the vector as a payload, or the reason why the center cannot take it.

        It checks the size and type, the checksum if one is expected, and that all elements are
        finite. A float64 that is too large to be squared counts as a norm too large.
        """
        if received is None or not self.fits(received):
            return CommitPayload(refusal=Refusal.SHAPE)
        checked = check(received)
        if expected is not None and checked.checksum != expected:
            return CommitPayload(refusal=Refusal.CHECKSUM)
        if not checked.finite:
            large = bool(np.isfinite(received).all())
            return CommitPayload(refusal=Refusal.NORM if large else Refusal.NOT_FINITE)
        return CommitPayload(received, checked)

    def stage(self, worker: int, vector: Vector) -> None:
        """Notes the worker's commit [size]. It is not copied, so it must not change until it has
        been applied."""
        self._staged[worker] = vector

    def unstage(self, worker: int) -> None:
        """Drops the worker's staged commit, but keeps its base."""
        self._staged.pop(worker, None)

    def execute(self, *steps: Step, values: Vector | None = None) -> int:
        """Does the steps, or hands them to the shards, and returns a ticket for `wait`. `Answer`
        steps are ignored. `values` [k] is filled with the watched coordinates as the steps left
        them."""
        tasks = [task for step in steps for task in self._tasks(step)]
        if values is not None:
            tasks.append(_watch(values))
        return self._work.put(tasks)

    def wait(self, ticket: int) -> None:
        """Blocks until all shards have done the steps of this ticket."""
        self._work.wait(ticket)

    def done(self, ticket: int) -> bool:
        """Whether all shards have done the steps of this ticket, or one of them has failed."""
        return self._work.done(ticket)

    def flush(self) -> None:
        """Blocks until the shards have done all steps so far."""
        self._work.wait(self._work.tickets)

    def lost_a_part(self) -> bool:
        """Always false: the shards are threads of this process."""
        return False

    @property
    def tickets(self) -> int:
        """The last ticket that `execute` gave."""
        return self._work.tickets

    @property
    def theta(self) -> Vector:
        """theta~ [size] after all steps so far. It is no copy: the next step changes it."""
        self.flush()
        return self._theta

    def _tasks(self, step: Step) -> Iterator[Task]:
        match step:
            case Apply():
                assert self._rule.apply is not None
                yield _apply(self._rule.apply, self._arrival(step))
            case Combine():
                assert self._rule.combine is not None
                arrivals = [self._arrival(arrival) for arrival in step.arrivals]
                yield _combine(self._rule.combine, arrivals)
            case Read(worker):
                if worker in self._outboxes:
                    yield _copy(self._outboxes[worker])
                if self._rule.needs_base:
                    if worker not in self._bases:
                        self._bases[worker] = np.empty_like(self._theta)
                    yield _copy(self._bases[worker])
            case Forget(worker):
                # Tasks in the queues hold these vectors themselves, so they do not miss them.
                self._staged.pop(worker, None)
                self._bases.pop(worker, None)

    def _arrival(self, step: Apply) -> Arrival:
        vector = self._staged.pop(step.worker)
        base = self._bases[step.worker] if self._rule.needs_base else None
        return Arrival(
            vector,
            step.worker,
            step.staleness,
            step.samples,
            step.steps,
            step.rate,
            step.workers,
            base,
        )

    def vectors(self) -> dict[str, Vector]:
        """Every vector of the state by name, after all steps so far. They are no copies."""
        self.flush()
        return (
            {"theta": self._theta}
            | {f"slot {name}": slot for name, slot in self._slots.items()}
            | {f"base {worker}": base for worker, base in sorted(self._bases.items())}
            | {f"staged {worker}": vector for worker, vector in sorted(self._staged.items())}
        )

    def counts(self) -> dict[str, int]:
        """The rule's counts after all steps so far."""
        self.flush()
        return dict(self._blocks[0].part.counts)

    def restore(self, vectors: dict[str, Vector], counts: dict[str, int]) -> None:
        """Takes over copies of the vectors and counts that `vectors()` and `counts()` returned.
        Vectors of other names are ignored, so a caller may keep its own beside them."""
        self.flush()
        self._bases.clear()
        self._staged.clear()
        for name, vector in vectors.items():
            kind, _, key = name.partition(" ")
            if kind == "theta":
                self._theta[:] = vector
            elif kind == "slot":
                self._slots[key][:] = vector
            elif kind in ("base", "staged"):
                kept = self._bases if kind == "base" else self._staged
                kept[int(key)] = np.array(vector)
        for block in self._blocks:
            block.part.counts.update(counts)

    def close(self) -> None:
        """Ends the threads once they have done all steps so far."""
        self._work.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _apply(function: Callable[[Slice, Arrival], None], whole: Arrival) -> Task:
    return lambda block: function(block.part, _part(whole, block))


def _combine(function: Callable[[Slice, Any], None], whole: list[Arrival]) -> Task:
    return lambda block: function(block.part, [_part(arrival, block) for arrival in whole])


def _copy(target: Vector) -> Task:
    return lambda block: np.copyto(target[block.start : block.stop], block.part.theta)


def _watch(values: Vector) -> Task:
    def task(block: _CenterBlock) -> None:
        values[block.watched] = block.part.theta[block.places]

    return task


def _part(whole: Arrival, block: _CenterBlock) -> Arrival:
    """The part of a commit that belongs to a block, as views."""
    start, stop = block.start, block.stop
    return Arrival(
        whole.vector[start:stop],
        whole.worker,
        whole.staleness,
        whole.samples,
        whole.steps,
        whole.rate,
        whole.workers,
        None if whole.base is None else whole.base[start:stop],
    )


class _ShardThreads:
    """One thread per shard, which does the batches of tasks on its blocks in the order of `put`.

    With one shard there is no thread: the caller does the tasks itself in `put`.
    """

    def __init__(self, shards: list[list[_CenterBlock]]) -> None:
        self.tickets = 0
        self._shards = shards
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._done = [0] * len(shards)
        self._queues: list[SimpleQueue[list[Task] | None]] = []
        self._threads: list[threading.Thread] = []
        if len(shards) > 1:
            self._queues = [SimpleQueue() for _ in shards]
            self._threads = [
                threading.Thread(target=self._serve, args=(i,), name=f"shard {i}", daemon=True)
                for i in range(len(shards))
            ]
            for thread in self._threads:
                thread.start()

    def put(self, tasks: list[Task]) -> int:
        self._check()
        self.tickets += 1
        if not self._threads:
            self._run(0, tasks)
            self._done[0] = self.tickets
            self._check()
        for queue in self._queues:
            queue.put(tasks)
        return self.tickets

    def done(self, ticket: int) -> bool:
        # Read without the lock: each entry has one writer and only grows, so the answer can be late
        # but never too early.
        return self._error is not None or min(self._done) >= ticket

    def wait(self, ticket: int) -> None:
        if self._threads and not self.done(ticket):
            with self._changed:
                self._changed.wait_for(lambda: self.done(ticket))
        self._check()

    def _serve(self, index: int) -> None:
        while (tasks := self._queues[index].get()) is not None:
            self._run(index, tasks)
            with self._changed:
                self._done[index] += 1
                self._changed.notify_all()

    def _run(self, index: int, tasks: list[Task]) -> None:
        """Does the tasks on the shard's blocks. After a failure in any shard it does nothing more,
        because the shards would hold different versions."""
        try:
            for block in self._shards[index]:
                for task in tasks if self._error is None else ():
                    task(block)
        except BaseException as error:  # `_check` raises it in the thread that waits
            self._error = error
            # Ctrl-C in the caller's own thread must reach the caller unchanged.
            if not (self._threads or isinstance(error, Exception)):
                raise

    def _check(self) -> None:
        if self._error is not None:
            raise TrainingError("the center failed while it applied a commit") from self._error

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._queues, self._threads = [], []
