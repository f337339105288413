"""What the watcher is told, and when an evaluation is due."""

import math

import numpy as np

from dovetail.training.backends.contract import Watcher
from dovetail.training.backends.processes.messages import AskCopy, Copied
from dovetail.training.records import Evaluation, Event, Row, Vector


class Watch:
    """Keeps the run's history, and calls the watcher: always in the caller's thread."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.evaluations: list[Evaluation] = []
        watched = watcher.evaluate is not None
        self._due_samples = (watched and watcher.every_samples) or math.inf
        self._due_seconds = (watched and watcher.every_seconds) or math.inf

    def wants(self, seconds: float) -> AskCopy | None:
        """The copy of the center that the next evaluation needs, if one will be."""
        if seconds >= self._due_seconds:
            return AskCopy(0)
        if math.isinf(self._due_samples):
            return None
        return AskCopy(int(self._due_samples))

    def seconds_left(self, seconds: float) -> float:
        """Until the next evaluation that time brings."""
        return max(0.0, self._due_seconds - seconds)

    def add_rows(self, rows: tuple[Row, ...]) -> None:
        if rows:
            self.rows.extend(rows)
            if self._watcher.rows is not None:
                self._watcher.rows(list(rows))

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        if self._watcher.event is not None:
            self._watcher.event(event)

    def evaluate(self, copied: Copied, theta: Vector) -> bool:
        """Evaluate `theta` [size], if that is due; whether the run should stop."""
        watcher = self._watcher
        by_samples = copied.samples >= self._due_samples
        by_seconds = copied.seconds >= self._due_seconds
        if watcher.evaluate is None or not (by_samples or by_seconds):
            return False
        if watcher.every_samples and by_samples:
            every = watcher.every_samples
            self._due_samples = (copied.samples // every + 1) * every
        clock, samples, seconds = copied.clock, copied.samples, copied.seconds
        figures = watcher.evaluate(np.array(theta), clock, samples, seconds)
        self.evaluations.append(Evaluation(clock, samples, seconds, figures))
        if watcher.every_seconds and by_seconds:
            passed = math.floor(seconds / watcher.every_seconds)
            self._due_seconds = (passed + 1) * watcher.every_seconds
        if watcher.should_stop is None:
            return False
        return watcher.should_stop([each.figures for each in self.evaluations])
