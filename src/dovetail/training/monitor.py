"""Follows a run while it goes on: evaluations, the best so far, early stop, divergence."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.training.backends.contract import Watcher
from dovetail.training.callbacks import CallbackCaller
from dovetail.training.checkpoint import RunFolder
from dovetail.training.divergence import LossWatch
from dovetail.training.history import lower_is_better
from dovetail.training.records import Evaluation, Event, Outcome, Row, Vector

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
        better = self._is_better(figures)
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

    def _is_better(self, figures: dict[str, Any]) -> bool:
        """Whether these figures are better than the best so far. They count as better if they lack
        the monitored figure, so that the last evaluation is then the best."""
        if self.best is None or self.monitor not in figures:
            return True
        sign = 1 if lower_is_better(self.monitor) else -1
        new = sign * figures[self.monitor]
        old = sign * self.evaluations[self.best].figures.get(self.monitor, math.inf)
        return new < old or math.isnan(old)
