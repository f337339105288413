"""Event files for TensorBoard: scalars by step. Needs the extra `tensorboard`, and no torch."""

import os
from typing import Self

from dovetail.errors import MissingLibraryError, UnwritableError


class Scalars:
    """Writes an event file; a context manager. Raises `MissingLibraryError`, and `UnwritableError`
    when it opens or writes the file."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_installed()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = os.fspath(folder)
        try:
            self._writer = EventFileWriter(self.folder)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, tag: str, step: int, value: float, wall_seconds: float) -> None:
        """Write one value, `wall_seconds` since 1970. It reaches the disk some seconds later."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        try:
            self._writer.add_event(Event(wall_time=wall_seconds, step=step, summary=shown))
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Write what is left, and close the file."""
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
