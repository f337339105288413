"""A history as an event file of TensorBoard's. Needs the extra `tensorboard`, and no torch.

Scalars, their step the samples that the center has seen:

    train/loss, train/norm, train/staleness, train/implicit_momentum     of commits
    evaluation/NAME                                                      of evaluations
"""

import os
from typing import TYPE_CHECKING, Self

import numpy as np

from dovetail.errors import MissingLibraryError, UnwritableError

if TYPE_CHECKING:
    from dovetail.training.history import Column, History

POINTS = 5000
"""Of one scalar. Of more commits than that each point is the mean of some in a row."""
_OF_COMMITS = {
    "loss": "loss",
    "norm": "norm",
    "staleness": "staleness",
    "implicit_momentum": "momentum",
}


def write_events(history: "History", folder: str | os.PathLike[str]) -> None:
    """Write the history's scalars to `folder`, which is made. Raises `MissingLibraryError`,
    `UnwritableError`."""
    start = history.outcome.meta.get("start_seconds")  # since 1970, where the backend's are real
    origin = float(start) if isinstance(start, int | float) else 0.0
    with Scalars(folder) as scalars:
        for tag, (seconds, samples, values) in _scalars(history).items():
            for moment, step, value in zip(seconds, samples, values, strict=True):
                scalars.add(tag, int(step), float(value), origin + float(moment))


class Scalars:
    """An event file that is written; a context manager. Raises `MissingLibraryError`, and
    `UnwritableError` here or when it writes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_installed()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = os.fspath(folder)
        try:
            self._writer = EventFileWriter(self.folder)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, tag: str, step: int, value: float, wall_seconds: float) -> None:
        """One value; `wall_seconds` since 1970. It reaches the disk some seconds later."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        try:
            self._writer.add_event(Event(wall_time=wall_seconds, step=step, summary=shown))
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Write what is left."""
        try:
            self._writer.close()
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> UnwritableError:
        return UnwritableError(self.folder, error.strerror or str(error))


def check_installed() -> None:
    """Raise `MissingLibraryError` where tensorboard is missing."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError("tensorboard", "pip install 'dovetail[tensorboard]'") from error


def _scalars(history: "History") -> "dict[str, tuple[Column, Column, Column]]":
    """tag -> (seconds, samples, values)."""
    columns = history.columns
    found = {}
    for tag, name in _OF_COMMITS.items():
        known = np.isfinite(columns[name])
        if known.any():
            values = columns[name][known].astype(np.float64)
            found[f"train/{tag}"] = _thinned(
                columns["seconds"][known], columns["seen"][known], values
            )
    for figure in history.figures:
        found[f"evaluation/{figure}"] = history.curve(figure)
    return found


def _thinned(
    seconds: "Column", samples: "Column", values: "Column"
) -> "tuple[Column, Column, Column]":
    """At most `POINTS` means of commits in a row, each at the last of them."""
    if len(values) <= POINTS:
        return seconds, samples, values
    starts = np.linspace(0, len(values), POINTS, endpoint=False).astype(np.int64)
    last = np.append(starts[1:], len(values)) - 1
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
    return seconds[last], samples[last], means
