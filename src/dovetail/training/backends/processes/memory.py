"""Lays out a run's shared memory: a block for each worker, one for the center, one for the learner.

    worker's block    beat │ inbox [size]  worker writes │ outbox [size]  server writes
    center's block    live [size]  server (and workers, of rules without locks) │ copy [size]

The supervisor makes the blocks and hands on their descriptors. So they outlive server and workers,
and no death leaves anything behind.
"""

import numpy as np

from dovetail.runtime.shared import Block, Layout
from dovetail.training.records import Job, Vector


class WorkerMemory:
    """A worker's block. `beat` [1] counts signs of life. The worker alone writes it and the server
    only compares it with its last value, so no lock is needed."""

    def __init__(self, block: Block, job: Job) -> None:
        beat, inbox, outbox, _ = _slots(job)
        self.block = block
        self.beat = block.view(beat, (1,), np.int64)
        self.inbox: Vector = block.view(inbox, (job.size,), job.dtype)
        self.outbox: Vector = block.view(outbox, (job.size,), job.dtype)

    @classmethod
    def create(cls, job: Job) -> "WorkerMemory":
        return cls(Block.create(_slots(job)[-1]), job)

    def show_life(self) -> None:
        """Gives a sign of life."""
        self.beat[0] += 1

    def close(self) -> None:
        del self.beat, self.inbox, self.outbox
        self.block.close()


class CenterMemory:
    """The center's block: the center itself, and a copy for the supervisor to read."""

    def __init__(self, block: Block, job: Job) -> None:
        _, live, copy, _ = _slots(job)
        self.block = block
        self.live: Vector = block.view(live, (job.size,), job.dtype)
        self.copy: Vector = block.view(copy, (job.size,), job.dtype)

    @classmethod
    def create(cls, job: Job, theta: Vector) -> "CenterMemory":
        """Makes the block. `theta` [size] is the initial center."""
        memory = cls(Block.create(_slots(job)[-1]), job)
        memory.live[:] = theta
        return memory

    def close(self) -> None:
        del self.live, self.copy
        self.block.close()


def _slots(job: Job) -> tuple[int, int, int, int]:
    """Offsets of an int64 and of two vectors, and the size of the block, all in bytes."""
    layout = Layout()
    vector_bytes = job.size * np.dtype(job.dtype).itemsize
    sizes = (8, vector_bytes, vector_bytes)
    beat, first, second = (layout.reserve(size_bytes) for size_bytes in sizes)
    return beat, first, second, layout.size_bytes
