"""Calls the user's callbacks while a run goes on, in the caller's process on every backend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import CallbackError, DovetailError, UsageError, UserCodeError
from dovetail.runtime.user_code import UserCode, at, defined_at
from dovetail.training.records import Row


@dataclass(frozen=True)
class RunState:
    """A run at one moment, as callbacks are told of it.

    epoch     passes over all samples that are complete; 0 for a stream of unknown length
    samples   samples that were committed so far
    clock     commits so far, or rounds
    seconds   since the run's start, in the backend's own time
    commits   for `on_commit` the one commit, for `on_epoch` those of the epoch that has ended
    figures   of the last evaluation on the validation set; {} before the first
    """

    epoch: int
    samples: int
    clock: int
    seconds: float
    commits: tuple[Row, ...]
    figures: dict[str, float]

    @property
    def loss(self) -> float:
        """Mean training loss over the samples of `commits`, at the parameters that each worker had;
        nan without samples."""
        samples = sum(row.samples for row in self.commits)
        weighted = sum(row.samples * row.loss for row in self.commits)
        return weighted / samples if samples else math.nan


class Callback:
    """What a run tells its caller. Override one method or both, and give an instance to `Trainer`
    as `callbacks`.

    The methods are called in the caller's process and one at a time, soon after the commits that
    they tell of, while workers train on. One that returns True ends the run, as early stopping
    does. One that raises ends it too: the model keeps what is trained so far, and `fit` raises. A
    resumed run tells nothing of what was committed before.
    """

    def on_epoch(self, state: RunState) -> bool | None:
        """Called once for each epoch, in order; with validation at each epoch's end, after it. If
        validation takes longer than an epoch, epochs share one, and so its figures."""

    def on_commit(self, state: RunState) -> bool | None:
        """Called for each commit that was applied, in order."""


def check_callbacks(callbacks: Sequence[Callback], epoch_samples: int | None) -> None:
    """Raises `UsageError` for what is no callback, or if nobody can tell when an epoch ends."""
    if not isinstance(callbacks, Sequence):
        raise UsageError("callbacks", f"must be a list, not {callbacks!r}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type) and issubclass(callback, Callback)
            says = "is a class; give an instance" if is_class else "is no dovetail.Callback"
            raise UsageError("callbacks", f"{callback!r} {says}{at(callback)}")
        if epoch_samples is None and _overrides(callback, "on_epoch"):
            says = "needs a data set of known length; override on_commit instead"
            raise UsageError("callbacks", f"on_epoch {says}{at(callback)}")


def _overrides(callback: Callback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(Callback, method)


class CallbackCaller:
    """Calls callbacks as a run's commits and evaluations come in.

    callbacks       called in this order
    epoch_samples   samples of an epoch, or None if the number is not known
    waits           epochs are told only after the validation at their end

    stops     a callback wants the run to end
    failure   what a callback has raised; none is called after that
    """

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        epoch_samples: int | None = None,
        waits: bool = False,
    ) -> None:
        self._of_epochs = [each for each in callbacks if _overrides(each, "on_epoch")]
        self._of_commits = [each for each in callbacks if _overrides(each, "on_commit")]
        self._epoch_samples, self._waits = epoch_samples, waits
        self._samples = self._evaluated = self._epochs = 0
        self._commits: list[Row] = []  # since the end of the last epoch
        self._ended: list[RunState] = []  # epochs that wait for their validation
        self._figures: dict[str, float] = {}
        self.stops = False
        self.failure: CallbackError | None = None

    def resume(self, rows: list[Row]) -> None:
        """Takes note of commits that the run had before it was resumed."""
        for row in rows:
            self._add(row)
        self._ended.clear()

    def commit(self, rows: list[Row]) -> None:
        """Tells of commits that were applied."""
        for row in rows:
            state = self._add(row)
            self._call(self._of_commits, "on_commit", state)
        self._tell_epochs()

    def evaluate(self, samples: int, figures: dict[str, float]) -> None:
        """Notes the figures of the center after so many samples."""
        self._evaluated, self._figures = samples, figures
        self._tell_epochs()

    def forget(self, rows: list[Row]) -> None:
        """Notes that a server without a log has lost these commits, the last ones."""
        self._samples -= sum(row.samples for row in rows)
        del self._commits[max(0, len(self._commits) - len(rows)) :]

    def end(self) -> None:
        """Tells of epochs that no validation has followed."""
        self._waits = False
        self._tell_epochs()

    def _add(self, row: Row) -> RunState:
        self._samples += row.samples
        self._commits.append(row)
        length = self._epoch_samples
        epoch = self._samples // length if length else 0
        state = RunState(epoch, self._samples, row.clock, row.seconds, (row,), self._figures)
        # Samples that a server has lost are committed again, but their epoch is told once.
        while self._epochs < epoch:
            self._epochs += 1
            self._ended.append(replace(state, epoch=self._epochs, commits=tuple(self._commits)))
            self._commits.clear()
        return state

    def _tell_epochs(self) -> None:
        while self._ended:
            state, length = self._ended[0], self._epoch_samples
            if self._waits and self._evaluated < state.epoch * (length or 0):
                return
            self._call(self._of_epochs, "on_epoch", replace(state, figures=self._figures))
            del self._ended[0]

    def _call(self, callbacks: list[Callback], method: str, state: RunState) -> None:
        for callback in callbacks:
            if self.failure is not None:
                return
            doing = f"{method} of {type(callback).__name__}"
            try:
                with UserCode(doing, callback):
                    answer = getattr(callback, method)(state)
            except DovetailError as error:
                failure = CallbackError(doing, error.line, defined_at(callback))
                # What the callback has raised is the cause of the failure.
                failure.__cause__ = error
                if isinstance(error, UserCodeError) and error.doing == doing:
                    failure = CallbackError(doing, error.said, error.location)
                    failure.__cause__ = error.__cause__
                self.failure, self.stops = failure, True
            else:
                # Only True means something, and so does numpy's, which its comparisons give.
                # `file.write` returns a number, for example.
                self.stops |= isinstance(answer, bool | np.bool_) and bool(answer)
