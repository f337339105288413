"""Runs one worker as several processes: each computes a part of the batch, and their gradients are
averaged.

    rank 0, the worker     theta, a part of the indices ──► ranks 1 .. k - 1
    every rank             mean gradient of its part, times its share of the samples
    all                    gloo's all-reduce adds them: the mean over the batch

Rank 0 alone talks to the server and applies the optimizer. This is data parallelism within a
worker, as DistributedDataParallel does it, but with one flat vector: one all-reduce per step, which
does not overlap with the backward pass. Each rank computes the statistics of batch norms from its
own part, as there.

gloo listens on the loopback interface alone. A rank that fails ends the worker with its traceback;
ranks die with their worker.
"""

import shutil
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dovetail.errors import RunError
from dovetail.runtime.processes import Channel, Worker, launch
from dovetail.training.learner import Gradient
from dovetail.training.modules import ModuleLearner, ModuleLearners
from dovetail.training.records import Vector

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others' gradients. It is torch's own default, too."""


@dataclass(frozen=True)
class GroupLearners:
    """Worker index -> the learner that heads its group of `size` processes."""

    learners: ModuleLearners
    size: int

    def __call__(self, worker: int) -> "GroupLearner":
        """Starts the group's other processes."""
        return GroupLearner(self.learners, self.size, worker)


class _Reducer:
    """Adds vectors over all ranks by gloo."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        # torch's stubs know only some of its names.
        names: Any = dist
        # A group of this object's own: the default group of the process is the user's.
        gloo = names.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
        store = names.FileStore(str(folder / "store"), size)
        self._group = gloo(store, rank, size, options)
        # After a first sum all ranks are connected, and the store's file may go.
        self.add(torch.zeros(1))

    def share(self, vector: Vector) -> None:
        """Send rank 0's vector [size] to all ranks."""
        self._group.broadcast(torch.from_numpy(vector), 0).wait()

    def add(self, vector: torch.Tensor) -> None:
        """Replace the vector by the sum over all ranks."""
        self._group.allreduce([vector]).wait()


class _Part:
    """Computes a rank's part of each gradient, and the sum over all ranks."""

    def __init__(self, learner: ModuleLearner, reducer: _Reducer) -> None:
        self._learner, self._reducer = learner, reducer
        # [size + 2] the gradient, then the samples, then their loss: one all-reduce for all.
        self._sum: Vector = np.zeros(learner.size + 2, learner.dtype)

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """The gradient over all ranks' indices."""
        total = self._sum
        total[:] = 0
        if len(indices):
            partial = self._learner.gradient(theta, indices, epoch)
            np.multiply(partial.vector, partial.samples, out=total[:-2])
            total[-2:] = partial.samples, partial.samples * partial.loss
        self._reducer.add(torch.from_numpy(total))
        samples = round(float(total[-2]))
        total[:-2] /= max(samples, 1)
        return Gradient(total[:-2], float(total[-1]) / max(samples, 1), samples)


class GroupLearner:
    """Rank 0 of a group, a `Learner` like any other."""

    def __init__(self, learners: ModuleLearners, size: int, worker: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dovetail-group-"))
        parcel = cloudpickle.dumps(learners)
        self._members: list[Worker] = []
        self._end = weakref.finalize(self, _end, self._members, self._folder)
        for rank in range(1, size):
            member = launch("dovetail.training.group:serve", name=f"{worker}, rank {rank}")
            self._members.append(member)
            member.send((parcel, worker, str(self._folder), rank, size))
        self._learner = learners(worker)
        # A model that fails in a rank fails here, before gloo waits for it.
        for member in self._members:
            member.receive()
        self._reducer = _Reducer(self._folder, 0, size)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._part = _Part(self._learner, self._reducer)

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """The mean gradient over these samples; see `ModuleLearner.gradient`."""
        parts = np.array_split(indices, len(self._members) + 1)
        try:
            for member, part in zip(self._members, parts[1:], strict=True):
                member.send((part, epoch))
            self._reducer.share(theta)
            return self._part.gradient(theta, parts[0], epoch)
        except RuntimeError:
            # gloo raises this when a rank is gone; the rank's own error says more.
            self._raise_theirs()
            raise

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """U(g) by rank 0's optimizer."""
        return self._learner.update(theta, gradient, epoch)

    def rate(self, epoch: float) -> float:
        """The learning rate there."""
        return self._learner.rate(epoch)

    def close(self) -> None:
        """End the group's processes."""
        self._end()

    def _raise_theirs(self) -> None:
        """Raise what a rank said of its failure, if one did."""
        for member in self._members:
            with suppress(TimeoutError):
                member.receive(timeout_seconds=1.0)


def _end(members: list[Worker], folder: Path) -> None:
    for member in members:
        with suppress(RunError):
            member.close(kill=True)
    shutil.rmtree(folder, ignore_errors=True)


def serve(channel: Channel) -> None:
    """Run a rank's process: compute its part of each gradient until the channel closes."""
    from dovetail.runtime.setup import set_up

    set_up(threads=1)
    first: Any = channel.receive()
    parcel, worker, folder, rank, size = first
    # The parcel comes from rank 0, the process that started this one.
    learner = cloudpickle.loads(parcel)(worker)
    channel.send("ready")
    part = _Part(learner, _Reducer(Path(folder), rank, size))
    theta: Vector = np.empty(learner.size, learner.dtype)
    while True:
        indices, epoch = channel.receive()
        part._reducer.share(theta)
        part.gradient(theta, indices, epoch)
