"""Trains a module: takes a request and a data set, and returns the run's history.

request ─► prepare ─► backend ─► center ─► the module, its batch norms' statistics computed
                       │  ▲
                evaluations, early stop, divergence: `RunMonitor`
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dovetail.errors import DivergedError, UserCodeError
from dovetail.training.backends.contract import Watcher
from dovetail.training.callbacks import CallbackCaller
from dovetail.training.checkpoint import RunFolder
from dovetail.training.divergence import LossWatch, remedy
from dovetail.training.history import History, lower_is_better
from dovetail.training.modules import unflatten
from dovetail.training.predicting import evaluate, predict
from dovetail.training.preparing import gpus_of, prepare
from dovetail.training.records import Evaluation, Event, Outcome, Row, Vector
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
    meeting: AbstractContextManager[None] = nullcontext()
    if request.backend == "ranks":
        # Imported here, because few runs need it.
        from dovetail.training.backends.ranks.meeting import announced

        # It tells the other ranks what fails before all have met.
        meeting = announced()
    # The caller's random state must not change by a model's trial runs and evaluations, on the CPU
    # or on a GPU.
    with meeting, torch.random.fork_rng(devices=gpus_of(request)):
        prepared = prepare(request, dataset, validation)
        request, evaluator = prepared.request, prepared.evaluator
        rule, job = prepared.assignment.rule, prepared.assignment.job
        advice = remedy(rule.name, job.window, job.workers)
        has_figures = bool(evaluator.figures)
        waits = request.validate == "epoch" and has_figures
        monitor = RunMonitor(
            evaluator,
            request.monitor,
            request.patience,
            prepared.folder,
            also=watcher or Watcher(),
            callbacks=CallbackCaller(request.callbacks, prepared.epoch_samples, waits),
            losses=LossWatch(request.workers),
            advice=advice,
        )
        if request.resume:
            monitor.resume()

        def evaluate_end(outcome: Outcome) -> Outcome:
            """Evaluates the last center if that was not done. The outcome's theta is then the best
            center if the request has a patience, else the last one."""
            # An interrupted run's outcome has the best center and all evaluations already.
            if outcome.meta.get("interrupted"):
                return outcome
            evaluated = monitor.evaluations[-1].clock if monitor.evaluations else -1
            if has_figures and evaluated != outcome.clock:
                monitor.on_evaluation(
                    outcome.theta, outcome.clock, outcome.samples, outcome.seconds
                )
            theta = outcome.theta
            if request.patience is not None and monitor.theta is not None:
                theta = monitor.theta
            # Some backends handle Ctrl-C themselves and end the run in order; their event tells.
            ends = [event.detail for event in outcome.events if event.kind == "stopped"]
            by_user = outcome.stopped and ends[-1:] == ["interrupted"]
            meta = outcome.meta | ({"interrupted": True} if by_user else {})
            kept = tuple(each for each in monitor.evaluations if each.figures)
            return replace(outcome, theta=theta, evaluations=kept, meta=meta)

        told = monitor.watcher(*request.evaluation_times(prepared.epoch_samples))
        told.result = lambda outcome: evaluate_end(outcome).theta
        try:
            outcome = prepared.run(prepared.assignment, told)
        except KeyboardInterrupt:
            outcome = monitor.interrupted()
        except DivergedError as error:
            if error.advice:
                raise
            if "not finite" in error.detail:
                remedies = "look for NaN or infinities in the data"
                advice += f"; if its loss did not grow before, {remedies}"
            raise DivergedError(error.rule, error.detail, advice) from error
        # Rank 0 alone evaluates.
        if not outcome.meta.get("rank"):
            outcome = evaluate_end(outcome)
        unflatten(request.model, outcome.theta)
        evaluator.refresh(request.model)
        monitor.callbacks.end()
    if monitor.callbacks.failure is not None:
        raise monitor.callbacks.failure
    backend = request.backend
    ran = {
        "name": request.name or rule.name,
        "rule": rule.name,
        "options": dict(rule.options),
        "backend": backend if isinstance(backend, str) else getattr(backend, "__name__", "own"),
        "job": asdict(job),
        "model": type(request.model).__name__,
    }
    return History(replace(outcome, meta=outcome.meta | ran))


Evaluate = Callable[[Vector], dict[str, float]]


class DivergenceWarning(RuntimeWarning):
    """Warns that the loss of a run grows without end."""


@dataclass
class RunMonitor:
    """Collects a run's evaluations, commits and events. The backend calls it through `watcher`.

    evaluate   theta -> figures; {} without a validation set
    monitor    name of the figure that decides which evaluation is the best
    patience   the run stops after so many evaluations without a better one (None: never)
    folder     where evaluations and the best center are saved; None: nowhere
    also       the caller's own watcher, which is called too
    callbacks  the request's callbacks
    losses     looks for divergence
    advice     what to do about divergence, for the warning
    """

    evaluate: Evaluate
    monitor: str
    patience: int | None = None
    folder: RunFolder | None = None
    also: Watcher = field(default_factory=Watcher)
    callbacks: CallbackCaller = field(default_factory=CallbackCaller)
    losses: LossWatch = field(default_factory=LossWatch)
    advice: str = ""

    evaluations: list[Evaluation] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    # Index of the best evaluation, and the center [size] at it.
    best: int | None = None
    theta: Vector | None = None

    def resume(self) -> None:
        """Takes over the evaluations and the best center that the folder holds."""
        if self.folder is not None:
            self.evaluations, self.best, self.theta = self.folder.load()

    def watcher(self, every_samples: int | None, every_seconds: float | None) -> Watcher:
        """The watcher that the backend is given."""
        return Watcher(
            every_samples=every_samples,
            every_seconds=every_seconds,
            evaluate=self.on_evaluation,
            should_stop=self.should_stop,
            rows=self.on_rows,
            resumed=self.on_resumed,
            forgotten=self.on_forgotten,
            event=self.on_event,
        )

    def on_evaluation(
        self, theta: Vector, clock: int, samples: int, seconds: float
    ) -> dict[str, float]:
        """Evaluate `theta`, keep the figures, and keep `theta` too if it is the best so far."""
        figures = self.evaluate(theta)
        if self.also.evaluate is not None:
            figures = figures | self.also.evaluate(theta, clock, samples, seconds)
        self.evaluations.append(Evaluation(clock, samples, seconds, figures))
        # Figures without the monitored one count as better: the last evaluation is then the best.
        better = self.best is None or self.monitor not in figures
        if self.best is not None and not better:
            sign = 1 if lower_is_better(self.monitor) else -1
            new = sign * figures[self.monitor]
            old = sign * self.evaluations[self.best].figures.get(self.monitor, math.inf)
            better = new < old or math.isnan(old)
        if better:
            self.best, self.theta = len(self.evaluations) - 1, theta.copy()
        if self.folder is not None:
            self.folder.save(self.evaluations, self.best, self.theta if better else None)
        self.callbacks.evaluate(samples, figures)
        return figures

    def should_stop(self, figures: list[dict[str, float]]) -> bool:
        """True if no evaluation was better for `patience` evaluations, or if the caller says so."""
        caller_stops = self.also.should_stop
        if (caller_stops is not None and caller_stops(figures)) or self.callbacks.stops:
            return True
        if self.patience is None or self.best is None:
            return False
        return len(self.evaluations) - 1 - self.best >= self.patience

    def on_rows(self, rows: list[Row]) -> bool:
        """Keep the commits, and warn once if the loss grows without end. True if the caller or a
        callback says to stop."""
        self.rows += rows
        caller_stops = self.also.rows is not None and self.also.rows(rows) is True
        self.callbacks.commit(rows)
        divergence = self.losses.add(rows)
        if divergence is not None:
            text = f"training diverges: {divergence.detail}" + (self.advice and f"; {self.advice}")
            warnings.warn(text, DivergenceWarning, stacklevel=2)
        return caller_stops or self.callbacks.stops

    def on_resumed(self, rows: list[Row]) -> None:
        """Keep the commits from before the run was resumed."""
        self.rows += rows
        self.callbacks.resume(rows)
        if self.also.resumed is not None:
            self.also.resumed(rows)

    def on_forgotten(self, kept: int) -> None:
        """Drop all commits but the first so many."""
        self.callbacks.forget(self.rows[kept:])
        del self.rows[kept:]
        if self.also.forgotten is not None:
            self.also.forgotten(kept)

    def on_event(self, event: Event) -> None:
        """Keeps the event."""
        self.events.append(event)
        if self.also.event is not None:
            self.also.event(event)

    def interrupted(self) -> Outcome:
        """The outcome of a run that Ctrl-C ended, with the best center so far. Raises
        `KeyboardInterrupt` if nothing was evaluated yet."""
        if self.best is None or self.theta is None:
            raise KeyboardInterrupt
        kept = self.evaluations[self.best]
        rows, events = tuple(self.rows), tuple(self.events)
        return Outcome(
            self.theta, kept.clock, kept.samples, kept.seconds, rows, events,
            tuple(self.evaluations), stopped=True, meta={"interrupted": True},
        )  # fmt: skip


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
