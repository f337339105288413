"""Writes event files for TensorBoard: scalars by step. Needs the extra `tensorboard`, not torch."""

import os
from typing import Self

from dovetail.errors import MissingLibraryError, UnwritableError


class Scalars:
    """Writes an event file; a context manager. Raises `MissingLibraryError`, and `UnwritableError`
    if the file cannot be opened or written."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_tensorboard()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = os.fspath(folder)
        try:
            self._writer = EventFileWriter(self.folder)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, tag: str, step: int, value: float, wall_seconds: float) -> None:
        """Writes one value with the time `wall_seconds` since 1970. It reaches the disk some
        seconds later."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        try:
            self._writer.add_event(Event(wall_time=wall_seconds, step=step, summary=shown))
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Writes what is left and closes the file."""
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


def check_tensorboard() -> None:
    """Raises `MissingLibraryError` if tensorboard is not installed."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError("tensorboard", "pip install 'dovetail[tensorboard]'") from error
