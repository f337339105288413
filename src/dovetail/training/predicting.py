"""Applies a model to a data set with many workers: its outputs, or its figures.

    data set ─► batches 0, 1, 2, ... ─► whichever worker is free ─► results, in the data set's order

These are the predictors and evaluators of Distributed Keras (J. Hermans, CERN,
https://github.com/cerndb/dist-keras, `predictors.py` and `evaluators.py`), which apply a model to
each partition of a Spark data frame. Differences: there is no data frame, and a batch goes to
whichever worker is free. How the data set is cut into batches does not depend on the workers, so
neither do the results, as long as an op uses as many threads.

The model is in evaluation mode, and each worker has a copy of it. The CPU computes, whatever the
request's `device` is. Workers read indexed data sets themselves. A stream is read by the caller's
process, which sends them its batches. A batch of a worker that died is given to another;
`FailurePolicy` says how many may die.
"""

import concurrent.futures
import copy
import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.errors import ModelError, NoWorkersError, ProcessDiedError, ProcessError, UsageError
from dovetail.runtime.parcels import Parcel, pack_parcel, unpack_parcel
from dovetail.runtime.processes import Worker, launch, ready
from dovetail.runtime.user_code import at, line_of
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import FailurePolicy, check_options
from dovetail.training.backends.processes.transport import ProcessesOptions
from dovetail.training.backends.simulated import World
from dovetail.training.datasets import Collate, open_dataset
from dovetail.training.modules import check_module, outputs
from dovetail.training.pickling import check_travels
from dovetail.training.request import TrainRequest
from dovetail.training.validation import batches_of, figures_of, mean_of, resolve_metrics

if TYPE_CHECKING:
    from dovetail.training.backends.ray.transport import RayOptions


def predict(request: TrainRequest, dataset: Any) -> Any:
    """Returns the outputs of the request's model over a data set, in the data set's order.

    dataset   any kind that `datasets` can read; targets are ignored

    The result is a tensor [samples, ...] on the CPU, or a tuple or dict of such tensors if the
    model returns one. It is what the model returns for the same batches in evaluation mode.
    Raises `UsageError`, `ModelError`, `ProcessError` with the traceback of a worker, and
    `NoWorkersError`.
    """
    name = type(request.model).__name__
    parts = []
    # The workers end at once if an output is refused.
    with closing(_applied(request, dataset, _outputs)) as results:
        for output, samples in results:
            _check_rows(name, output, samples, at(request.model))
            parts.append(output)
    return _join(parts)


def evaluate(request: TrainRequest, dataset: Any) -> dict[str, float]:
    """Returns the request's loss and metrics over a data set: means over its samples.

    The statistics of batch norms are the model's own, as `train` leaves them. Raises as `predict`
    does.
    """
    metrics = resolve_metrics(request.metrics)
    function = partial(_figures, loss=request.loss, metrics=metrics)
    # A sum in the order of the batches is the same with any number of workers.
    return mean_of(("loss", *metrics), _applied(request, dataset, function))


# What is done to a batch

Function = Callable[[nn.Module, Any], Any]
"""function(module, batch): what is sent back."""


def _outputs(module: nn.Module, batch: Any) -> Any:
    return _plain(outputs(module, batch)[0])


def _figures(module: nn.Module, batch: Any, *, loss: Any, metrics: Any) -> dict[str, float]:
    return figures_of(module, loss, metrics, batch)


def _plain(output: Any) -> Any:
    """The output with tensors that are by themselves, in tuples and dicts; the name of its type for
    anything else."""
    if isinstance(output, Tensor):
        return output.detach().cpu().clone()
    if isinstance(output, Mapping):
        return {key: _plain(inner) for key, inner in output.items()}
    if isinstance(output, tuple | list):
        return tuple(_plain(inner) for inner in output)
    return type(output).__name__


def _check_rows(name: str, output: Any, samples: int, where: str) -> None:
    """Raises `ModelError` for an output that has no row for each sample.

    where   the model's definition, to be added to the message
    """
    if isinstance(output, dict | tuple):
        for inner in output.values() if isinstance(output, dict) else output:
            _check_rows(name, inner, samples, where)
    elif isinstance(output, str):
        says = f"returns a {output}; only tensors can be joined to predictions"
        raise ModelError(name, f"{says}{where}")
    elif output.ndim == 0 or len(output) != samples:
        shape = tuple(output.shape)
        says = f"returns shape {shape} for {samples} samples, not a row for each"
        raise ModelError(name, f"{says}{where}")


def _join(parts: list[Any]) -> Any:
    """The outputs of several batches as one."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(_join(list(inner)) for inner in zip(*parts, strict=True))
    return torch.cat(parts)


# Batches in order


@dataclass(frozen=True)
class Portion:
    """A batch of the data set: its samples [samples], or the batch itself, which is of a stream."""

    indices: NDArray[np.int64] | None
    batch: Any = None


@dataclass(frozen=True)
class Applier:
    """All that a worker needs to apply a model; it is sent to the worker's process.

    dataset   None: portions bring their batches
    """

    module: nn.Module
    function: Function
    dataset: Any
    collate: Collate | None

    def open(self) -> Callable[[Portion], Any]:
        """The function that a worker calls for each portion. It has its own copy of the module."""
        module = copy.deepcopy(self.module).eval()
        source = None if self.dataset is None else open_dataset(self.dataset, self.collate)

        @torch.no_grad()
        def apply(portion: Portion) -> Any:
            batch = portion.batch
            if source is not None:
                assert portion.indices is not None
                batch, _ = source.batch(portion.indices, 0)
            return self.function(module, batch)

        return apply


class Pool(Protocol):
    """Workers that apply a model to portions, `workers` of them at once."""

    @property
    def workers(self) -> int: ...

    def start(self, number: int, portion: Portion) -> None:
        """Gives a portion to a worker that is free. At most `workers` are underway."""
        ...

    def finished(self) -> Iterator[tuple[int, Any]]:
        """Waits for a portion, and yields (number, result) of one or more."""
        ...


def _applied(
    request: TrainRequest, dataset: Any, function: Function
) -> Generator[tuple[Any, int], None, None]:
    """Yields (result, samples) of each batch, in the data set's order."""
    check_module(request.model)
    source = open_dataset(dataset, request.collate)
    is_stream = source.samples is None
    applier = Applier(request.model, function, None if is_stream else dataset, request.collate)
    counts: list[int] = []

    def portions() -> Iterator[Portion]:
        if source.samples is None:
            for batch, samples in batches_of(source, request.batch):
                counts.append(samples)
                yield Portion(None, batch)
            return
        for start in range(0, source.samples, request.batch):
            stop = min(start + request.batch, source.samples)
            counts.append(stop - start)
            yield Portion(np.arange(start, stop, dtype=np.int64))

    with _pool(request, applier) as pool:
        for number, result in enumerate(_in_order(portions(), pool)):
            yield result, counts[number]
    if not counts:
        raise UsageError("dataset", "is empty")


def _in_order(portions: Iterable[Portion], pool: Pool) -> Iterator[Any]:
    """Yields the results in the order of the portions."""
    numbered = enumerate(portions)
    early: dict[int, Any] = {}  # results that came before their turn
    following = underway = 0
    while True:
        while underway < pool.workers and (given := next(numbered, None)) is not None:
            pool.start(*given)
            underway += 1
        if not underway:
            return
        for number, result in pool.finished():
            early[number] = result
            underway -= 1
        while following in early:
            yield early.pop(following)
            following += 1


# Workers


@contextmanager
def _pool(request: TrainRequest, applier: Applier) -> Iterator[Pool]:
    """The workers of the request's backend, which end with the block."""
    workers, policy, options = request.workers, request.policy, dict(request.backend_options)
    if not isinstance(request.backend, str):
        raise UsageError("backend", "a function of one's own only trains; name a backend")
    load_backend(request.backend)  # raises for a name that is not there
    if request.backend in ("simulated", "threads"):
        # Virtual time has no use here, where nothing depends on it.
        known = World.__dataclass_fields__ if request.backend == "simulated" else ()
        check_options(request.backend, options, known)
        with closing(_ThreadPool(applier, workers if request.backend == "threads" else 1)) as pool:
            yield pool
        return
    parts = {"model": applier.module, "dataset": applier.dataset, "collate": applier.collate}
    check_travels(parts | {"loss": applier.function})
    # Each rank that calls this computes by itself, on its own machine.
    if request.backend in ("processes", "ranks"):
        own = {name: value for name, value in options.items() if name != "listen"}
        processes = _Processes(applier, ProcessesOptions.of(own))
        with closing(_FarPool(processes, workers, policy)) as far:
            yield far
        return
    # Imported here, so that the other backends do not wait for it.
    from dovetail.training.backends.ray.transport import RayOptions, connected

    chosen = RayOptions.of(options)
    with (
        connected(chosen, workers) as ray,
        closing(_FarPool(_Actors(ray, applier, chosen), workers, policy)) as far,
    ):
        yield far


class _ThreadPool:
    """Threads of this process, each with its own copy of the module."""

    def __init__(self, applier: Applier, workers: int) -> None:
        self.workers = workers
        self._applier, self._own = applier, threading.local()
        self._executor = concurrent.futures.ThreadPoolExecutor(workers)
        self._underway: dict[concurrent.futures.Future[Any], int] = {}

    def start(self, number: int, portion: Portion) -> None:
        self._underway[self._executor.submit(self._apply, portion)] = number

    def finished(self) -> Iterator[tuple[int, Any]]:
        first = concurrent.futures.FIRST_COMPLETED
        for future in concurrent.futures.wait(self._underway, return_when=first).done:
            yield self._underway.pop(future), future.result()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def _apply(self, portion: Portion) -> Any:
        try:
            if not hasattr(self._own, "apply"):
                self._own.apply = self._applier.open()
            return self._own.apply(portion)
        except Exception as error:
            raise ProcessError("a worker", traceback.format_exc(), line_of(error)) from error


class FarWorkers(Protocol):
    """Workers in other processes. A worker is whatever `launch` returns."""

    def launch(self, number: int) -> Any:
        """A new worker, the one of that number since the start."""
        ...

    def send(self, worker: Any, portion: Portion) -> None:
        """Gives the worker a portion. If the worker has died, `receive` says so."""
        ...

    def ready(self, workers: list[Any]) -> list[Any]:
        """Waits until some of these workers have a result or have died, and returns them."""
        ...

    def receive(self, worker: Any) -> Any:
        """The worker's result. Raises `ProcessDiedError`, and `ProcessError` if the worker
        raised."""
        ...

    def end(self, worker: Any) -> None: ...


class _FarPool:
    """Workers in other processes, of which some may die."""

    def __init__(self, far: FarWorkers, workers: int, policy: FailurePolicy) -> None:
        self._far, self._policy = far, policy
        self._numbers = itertools.count()
        self._deaths = 0
        self._waiting: deque[tuple[int, Portion]] = deque()  # of workers that died
        self._underway: dict[Any, tuple[int, Portion]] = {}
        self._free: list[Any] = []
        try:
            for _ in range(workers):
                self._free.append(far.launch(next(self._numbers)))
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return len(self._free) + len(self._underway)

    def start(self, number: int, portion: Portion) -> None:
        worker = self._free.pop()
        self._underway[worker] = number, portion
        self._far.send(worker, portion)

    def finished(self) -> Iterator[tuple[int, Any]]:
        results = []
        for worker in self._far.ready(list(self._underway)):
            try:
                result = self._far.receive(worker)
            except ProcessDiedError as error:
                self._waiting.append(self._underway.pop(worker))
                self._far.end(worker)
                # Another one is started in its place, or it goes on without it, by the policy.
                self._deaths += 1
                losses = self._deaths - self._policy.worker_restarts
                if losses <= 0:
                    self._free.append(self._far.launch(next(self._numbers)))
                elif losses > self._policy.worker_losses or not self.workers:
                    raise NoWorkersError(self._deaths, error.status) from error
            else:
                results.append((self._underway.pop(worker)[0], result))
                self._free.append(worker)
        while self._waiting and self._free:
            self.start(*self._waiting.popleft())
        yield from results

    def close(self) -> None:
        for worker in (*self._free, *self._underway):
            self._far.end(worker)


class _Processes:
    """Processes of this machine. They apply parameters in memory that all of them share."""

    def __init__(self, applier: Applier, options: ProcessesOptions) -> None:
        self._options = options
        self._parcel, self._block = pack_parcel(applier)

    def launch(self, number: int) -> Worker:
        cores = self._options.cores
        worker = launch(
            "dovetail.training.predicting:ApplyingProcess",
            cores=tuple(cores[number % len(cores)]) if cores else (),
            threads=self._options.threads,
            name=f"worker {number}",
        )
        block = self._block.descriptor
        worker.post("make", self._parcel, self._options.threads, files=(block,))
        return worker

    def send(self, worker: Worker, portion: Portion) -> None:
        with suppress(ProcessDiedError):
            worker.begin("apply", portion)

    def ready(self, workers: list[Worker]) -> list[Worker]:
        return ready(workers)

    def receive(self, worker: Worker) -> Any:
        return worker.receive()

    def end(self, worker: Worker) -> None:
        worker.close(kill=True)


class ApplyingProcess:
    """What lives in a worker's process: the model of the `Applier` in the parcel."""

    def __init__(self, parcel: Parcel, threads: int, descriptor: int) -> None:
        from dovetail.runtime.setup import set_up

        set_up(threads=threads)
        self._apply: Callable[[Portion], Any] = unpack_parcel(parcel, descriptor).open()

    def apply(self, portion: Portion) -> Any:
        """The result of a portion."""
        return self._apply(portion)


class _Actors:
    """Actors of Ray, on one machine or on many."""

    def __init__(self, ray: Any, applier: Applier, options: "RayOptions") -> None:
        self._ray, self._options = ray, options
        self._applier = ray.put(applier)
        self._asked: dict[Any, Any] = {}  # actor -> the result that it owes

    def launch(self, number: int) -> Any:
        options = self._options
        kind = self._ray.remote(Actor).options(
            num_cpus=options.worker_cores,
            resources=dict(options.worker_resources) or None,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD" if options.spread else "DEFAULT",
        )
        return kind.remote(self._applier)

    def send(self, worker: Any, portion: Portion) -> None:
        self._asked[worker] = worker.apply.remote(portion)

    def ready(self, workers: list[Any]) -> list[Any]:
        by_result = {self._asked[worker]: worker for worker in workers}
        return [by_result[result] for result in self._ray.wait(list(by_result))[0]]

    def receive(self, worker: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        from dovetail.training.backends.ray.transport import shorten

        try:
            return self._ray.get(self._asked.pop(worker))
        except RayTaskError as error:
            raise ProcessError("a worker", str(error), line_of(error.cause)) from error
        except RayError as error:
            raise ProcessDiedError("a worker", shorten(error)) from error

    def end(self, worker: Any) -> None:
        self._ray.kill(worker)


class Actor:
    """A worker's actor."""

    def __init__(self, applier: Applier) -> None:
        from dovetail.runtime.setup import set_up

        set_up(threads=1)
        self._applier = applier
        self._apply: Callable[[Portion], Any] | None = None

    def apply(self, portion: Portion) -> Any:
        """The result of a portion."""
        # Opened here, because Ray hands on the whole traceback of a call, and of a constructor
        # only that the actor died.
        if self._apply is None:
            self._apply = self._applier.open()
        return self._apply(portion)
