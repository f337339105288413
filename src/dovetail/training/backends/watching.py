"""Calls the caller's watcher when it is due: evaluations, new rows, events, and whether to stop."""

import math

from dovetail.training.backends.contract import Watcher
from dovetail.training.records import Evaluation
from dovetail.training.server import Server

ROWS = 100  # a batch of what the watcher is told


class Watching:
    """Calls the caller's watcher when it is due.

    due_samples, due_seconds   of the next evaluation
    """

    def __init__(self, watcher: Watcher, server: Server, seconds: float) -> None:
        self.watcher, self.server = watcher, server
        self.evaluations: list[Evaluation] = []
        self.stopped = False
        self.due_samples = self.due_seconds = math.inf
        self._look_ahead(server.samples, seconds)
        # That the watcher was told; a run that is continued told the former part before.
        self._rows, self._events = len(server.rows), len(server.events)

    def _look_ahead(self, samples: int, seconds: float) -> None:
        """When to evaluate after now: whole multiples, whatever was skipped."""
        watcher = self.watcher
        if watcher.evaluate is not None and watcher.every_samples:
            self.due_samples = (samples // watcher.every_samples + 1) * watcher.every_samples
        if watcher.evaluate is not None and watcher.every_seconds:
            passed = math.floor(seconds / watcher.every_seconds + 1e-9)
            self.due_seconds = (passed + 1) * watcher.every_seconds

    def at(self, seconds: float) -> bool:
        """Evaluate the center now; whether the run should stop."""
        watcher, server = self.watcher, self.server
        assert watcher.evaluate is not None
        theta, clock, samples = server.copy()
        self._look_ahead(samples, seconds)
        figures = watcher.evaluate(theta, clock, samples, seconds)
        self.evaluations.append(Evaluation(clock, samples, seconds, figures))
        self.flush()
        if watcher.should_stop is None:
            return False
        return watcher.should_stop([evaluation.figures for evaluation in self.evaluations])

    def flush(self, least: int = 1) -> None:
        """Tell of what is new, once there are so many new rows."""
        watcher, server = self.watcher, self.server
        if watcher.event is not None:
            for event in server.events[self._events :]:  # more may come from threads meanwhile
                self._events += 1
                watcher.event(event)
        rows = server.rows[self._rows :]
        if watcher.rows is not None and len(rows) >= least:
            self._rows += len(rows)
            watcher.rows(rows)
