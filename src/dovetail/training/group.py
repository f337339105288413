"""Runs one worker as several processes: each computes a part of the batch, and their gradients are
averaged.

    rank 0, the worker     theta, a part of the indices ──► ranks 1 .. k - 1
    every rank             mean gradient of its part, times its share of the samples
    all                    gloo's all-reduce adds them: the mean over the batch

Rank 0 alone talks to the server and applies the optimizer. This is data parallelism within a
worker, as DistributedDataParallel does it, but with one flat vector: there is one all-reduce per
step, which does not overlap with the backward pass. As with DistributedDataParallel, each rank
computes the statistics of batch norms from its own part.

gloo listens on the loopback interface alone. If a rank fails, the worker raises the rank's
traceback. Ranks end with their worker.
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
from dovetail.runtime.processes import Worker, launch
from dovetail.training.learner import Gradient
from dovetail.training.modules import ModuleLearner, ModuleLearners
from dovetail.training.records import Vector

TIMEOUT_SECONDS = 1800.0
"""A rank waits so long for the other ranks' gradients. This is torch's default, too."""


@dataclass(frozen=True)
class GroupLearners:
    """Makes a worker's learner by its index: one that heads a group of `size` processes."""

    learners: ModuleLearners
    size: int

    def __call__(self, worker: int) -> "GroupLearner":
        """Starts the group's other processes and returns the learner of rank 0."""
        return GroupLearner(self.learners, self.size, worker)


class _Reducer:
    """Sends vectors to all ranks and adds vectors over all ranks, by gloo."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        # torch's type stubs lack some of the names that are used here.
        names: Any = dist
        # A process group of its own, because the process's default group belongs to the user.
        gloo = names.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
        store = names.FileStore(str(folder / "store"), size)
        self._group = gloo(store, rank, size, options)
        # After this first sum all ranks are connected, and the store's file may be removed.
        self.add(torch.zeros(1))

    def share(self, vector: Vector) -> None:
        """Send rank 0's vector [size] to all ranks."""
        self._group.broadcast(torch.from_numpy(vector), 0).wait()

    def add(self, vector: torch.Tensor) -> None:
        """Replaces the vector by its sum over all ranks."""
        self._group.allreduce([vector]).wait()


class _Part:
    """Computes a rank's part of each gradient, then the mean over all ranks."""

    def __init__(self, learner: ModuleLearner, reducer: _Reducer) -> None:
        self._learner, self._reducer = learner, reducer
        # [size + 2] the gradient, the number of samples and the sum of their losses. They stand in
        # one vector, so that one all-reduce adds all of them.
        self._sum: Vector = np.zeros(learner.size + 2, learner.dtype)

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """The mean gradient over all ranks' indices; `indices` are this rank's."""
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
            member = launch("dovetail.training.group:GroupMember", name=f"{worker}, rank {rank}")
            self._members.append(member)
            member.begin("make", parcel, worker)
        self._learner = learners(worker)
        # If a rank cannot make its model, its error is raised here, before gloo would wait for it.
        for member in self._members:
            member.receive()
        for rank, member in enumerate(self._members, 1):
            member.post("join", str(self._folder), rank, size)
        self._reducer = _Reducer(self._folder, 0, size)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._part = _Part(self._learner, self._reducer)

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """The mean gradient over these samples; see `ModuleLearner.gradient`."""
        parts = np.array_split(indices, len(self._members) + 1)
        try:
            for member, part in zip(self._members, parts[1:], strict=True):
                member.post("gradient", part, epoch)
            self._reducer.share(theta)
            return self._part.gradient(theta, parts[0], epoch)
        except RuntimeError:
            # gloo raises RuntimeError when a rank is gone. The rank's own error says more, if it
            # reports one within a second.
            for member in self._members:
                with suppress(TimeoutError):
                    member.receive(timeout_seconds=1.0)
            raise

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """U(g) by rank 0's optimizer."""
        return self._learner.update(theta, gradient, epoch)

    def rate(self, epoch: float) -> float:
        """The learning rate at that epoch."""
        return self._learner.rate(epoch)

    def close(self) -> None:
        """Ends the group's processes."""
        self._end()


def _end(members: list[Worker], folder: Path) -> None:
    for member in members:
        with suppress(RunError):
            member.close(kill=True)
    shutil.rmtree(folder, ignore_errors=True)


class GroupMember:
    """What lives in the process of a rank after the first: its part of each gradient."""

    def __init__(self, parcel: bytes, worker: int) -> None:
        from dovetail.runtime.setup import set_up

        set_up(threads=1)
        # The parcel comes from rank 0, the process that started this one.
        self._learner = cloudpickle.loads(parcel)(worker)

    def join(self, folder: str, rank: int, size: int) -> None:
        """Connect with the other ranks, all of which do so at once."""
        self._reducer = _Reducer(Path(folder), rank, size)
        self._part = _Part(self._learner, self._reducer)
        self._theta: Vector = np.empty(self._learner.size, self._learner.dtype)

    def gradient(self, indices: NDArray[np.int64], epoch: int) -> None:
        """Compute this rank's part, by the parameters that rank 0 sends, and add it to the sum."""
        self._reducer.share(self._theta)
        self._part.gradient(self._theta, indices, epoch)
