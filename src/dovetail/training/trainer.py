"""Trains a module: takes a request and a data set, and returns the run's history.

request ─► prepare ─► backend ─► center ─► the module, its batch norms' statistics computed
                       │  ▲
                evaluations, early stop
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from dovetail.errors import DivergedError, UserCodeError
from dovetail.training.backends.contract import Watcher
from dovetail.training.callbacks import CallbackCaller
from dovetail.training.divergence import LossWatch, remedy
from dovetail.training.history import History
from dovetail.training.modules import unflatten
from dovetail.training.monitor import RunMonitor
from dovetail.training.predicting import evaluate, predict
from dovetail.training.preparing import PreparedTraining, gpus_of, prepare
from dovetail.training.records import Evaluation, Outcome
from dovetail.training.request import TrainRequest


def train(
    request: TrainRequest, dataset: Any, validation: Any = None, *, watcher: Watcher | None = None
) -> History:
    """Trains the request's model on `dataset` and returns the run's history. The model stays in the
    mode that it was in.

    dataset, validation   any kind that `datasets` can read
    watcher               is told all that happens, and may stop the run; its figures are added to
                          those of the validation

    Ctrl-C ends the run and keeps the best center so far, or the last one without a validation set.
    If there is no center yet, `KeyboardInterrupt` is raised. Raises `InvalidError`, before anything
    starts, for what cannot be trained, and `UserCodeError` for what the caller's own code raises in
    this process; if a callback raised, the run ends early and the model has its result. Raises
    `TrainingError` or `RunError` if the run failed; the model is then as it was.

    With the backend `ranks` all ranks call this. The first one does all of the above. On the others
    `watcher`, `folder` and callbacks are not used, the history has no commits and no evaluations,
    and the model ends with the same weights. Its batch norms' statistics are computed on each.
    """
    # The caller's random state must not change by a model's trial runs and evaluations, on the CPU
    # or on a GPU.
    with _announced(request), torch.random.fork_rng(devices=gpus_of(request)):
        prepared = prepare(request, dataset, validation)
        progress = _open_progress(prepared, watcher)
        outcome = _run(prepared, progress)
        # Rank 0 alone evaluates.
        if not outcome.meta.get("rank"):
            outcome = _evaluate_end(prepared, progress, outcome)
        unflatten(request.model, outcome.theta)
        prepared.evaluator.refresh(request.model)
        progress.callbacks.end()
    if progress.callbacks.failure is not None:
        raise progress.callbacks.failure
    return History(_describe(prepared, outcome))


def _announced(request: TrainRequest) -> AbstractContextManager[None]:
    """With the backend `ranks`, tells the other ranks what fails before all have met."""
    if request.backend != "ranks":
        return nullcontext()
    # Imported here, because few runs need it.
    from dovetail.training.backends.ranks.meeting import announced

    return announced()


class Trainer:
    """Calls `train` with keywords: `Trainer(model, loss, optimizer, workers=4, ...).fit(dataset)`.

    The arguments are the fields of `TrainRequest`, which is kept as `request`. What the caller's
    own code raises in this process goes through as it is, not as the `UserCodeError` of `train`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.request = TrainRequest(*arguments, **settings)

    def fit(
        self, dataset: Any, validation: Any = None, *, watcher: Watcher | None = None
    ) -> History:
        """Trains the request's model, which then holds the result; see `train`."""
        with _users_own():
            return train(self.request, dataset, validation, watcher=watcher)

    def predict(self, dataset: Any) -> Any:
        """The model's outputs over a data set, by many workers; see `predicting.predict`."""
        with _users_own():
            return predict(self.request, dataset)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """The model's loss and metrics over a data set, by many workers; see
        `predicting.evaluate`."""
        with _users_own():
            return evaluate(self.request, dataset)


@contextmanager
def _users_own() -> Iterator[None]:
    """Raises what the user's code has raised, in place of a `UserCodeError`."""
    try:
        yield
    except UserCodeError as error:
        own = error.__cause__
        if own is None:
            raise
        raise own from own.__cause__


# help() and editors show this signature: the settings, each with its default.
Trainer.__signature__ = inspect.signature(TrainRequest)  # type: ignore[attr-defined]


def _open_progress(prepared: PreparedTraining, watcher: Watcher | None) -> RunMonitor:
    request = prepared.request
    progress = RunMonitor(
        prepared.evaluator,
        request.monitor,
        request.patience,
        prepared.folder,
        also=watcher or Watcher(),
        callbacks=CallbackCaller(
            request.callbacks,
            prepared.epoch_samples,
            waits=request.validate == "epoch" and bool(prepared.evaluator.figures),
        ),
        losses=LossWatch(request.workers),
        advice=_advice(prepared),
    )
    if request.resume:
        progress.resume()
    return progress


def _run(prepared: PreparedTraining, progress: RunMonitor) -> Outcome:
    watcher = progress.watcher(prepared.every_samples, prepared.every_seconds)
    watcher.result = lambda outcome: _evaluate_end(prepared, progress, outcome).theta
    try:
        return prepared.run(prepared.assignment, watcher)
    except KeyboardInterrupt:
        return progress.interrupted()
    except DivergedError as error:
        if error.advice:
            raise
        advice = _advice(prepared)
        if "not finite" in error.detail:
            advice += "; if its loss did not grow before, look for NaN or infinities in the data"
        raise DivergedError(error.rule, error.detail, advice) from error


def _evaluate_end(prepared: PreparedTraining, progress: RunMonitor, outcome: Outcome) -> Outcome:
    """Evaluates the last center if that was not done, and returns the outcome. Its theta is the
    best center if the request has a patience, else the last one."""
    # An interrupted run's outcome has the best center and all evaluations already.
    if outcome.meta.get("interrupted"):
        return outcome
    evaluated = progress.evaluations[-1].clock if progress.evaluations else -1
    if prepared.evaluator.figures and evaluated != outcome.clock:
        progress.on_evaluation(outcome.theta, outcome.clock, outcome.samples, outcome.seconds)
    theta = outcome.theta
    if progress.patience is not None and progress.theta is not None:
        theta = progress.theta
    kept: tuple[Evaluation, ...] = tuple(e for e in progress.evaluations if e.figures)
    # Some backends handle Ctrl-C themselves and end the run in order; their event tells.
    ends = [event.detail for event in outcome.events if event.kind == "stopped"]
    by_user = outcome.stopped and ends[-1:] == ["interrupted"]
    meta = {**outcome.meta, **({"interrupted": True} if by_user else {})}
    return replace(outcome, theta=theta, evaluations=kept, meta=meta)


def _describe(prepared: PreparedTraining, outcome: Outcome) -> Outcome:
    """The outcome with entries in `meta` that say what ran."""
    request, assignment = prepared.request, prepared.assignment
    backend = request.backend
    meta = {
        "name": request.name or assignment.rule.name,
        "rule": assignment.rule.name,
        "options": dict(assignment.rule.options),
        "backend": backend if isinstance(backend, str) else getattr(backend, "__name__", "own"),
        "job": asdict(assignment.job),
        "model": type(request.model).__name__,
    }
    return replace(outcome, meta={**outcome.meta, **meta})


def _advice(prepared: PreparedTraining) -> str:
    """What to do if this run diverges."""
    job = prepared.assignment.job
    return remedy(prepared.assignment.rule.name, job.window, job.workers)
