"""Calls the user's own code, and says in one line what went wrong in it.

    with UserCode("importing mymodels"):       whatever is raised here becomes a `UserCodeError`:
        importlib.import_module("mymodels")    importing mymodels failed: ValueError: no weights
                                               (at mymodels.py:3: raise ValueError("no weights"))

The user's code may raise anything: exceptions whose text cannot be read, `SystemExit`, or
`StopIteration`, which would end one of our own loops as if all had gone well. So the blocks stand
directly around its calls, in the command's process and in workers. Nothing here imports torch.
"""

import functools
import inspect
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from dovetail.errors import DovetailError, UserCodeError

MOST_CHARACTERS = 200
"""At most so many characters of an exception's text are shown."""


class UserCode:
    """A context manager around calls of the user's code. It raises `UserCodeError` in place of
    whatever is raised within. Errors of this package, Ctrl-C and the end of a generator pass.

    doing   what is being done, as a text or as a function that is called only for an error
    owners  objects whose code it is. The first definition that is the user's own is named where no
            line of the user's code was running, as when torch refuses what a data set returns
    """

    __slots__ = ("_doing", "_owners")

    def __init__(self, doing: str | Callable[[], str], *owners: object) -> None:
        self._doing, self._owners = doing, owners

    def __enter__(self) -> None:
        _inside.blocks += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _inside.blocks -= 1
        if error is None or isinstance(error, DovetailError | KeyboardInterrupt | GeneratorExit):
            return
        doing = self._doing if isinstance(self._doing, str) else self._doing()
        location = location_of(error)
        for owner in self._owners:
            location = location or defined_at(owner)
        raise UserCodeError(doing, said(error), location) from error


class _Inside(threading.local):
    """How many blocks of `UserCode` this thread is in."""

    blocks = 0


_inside = _Inside()


# What is said of an exception


def line_of(error: BaseException) -> str:
    """Any exception in one line, with the innermost line of the user's own code."""
    if isinstance(error, DovetailError):
        return error.line
    location = location_of(error)
    return said(error) + (f" (at {location})" if location else "")


def said(error: BaseException) -> str:
    """The exception in one line, such as "ValueError: the first line of its text"."""
    if isinstance(error, DovetailError):
        return error.line
    if isinstance(error, ExitCalled):
        return f"it ends the program (os._exit({error.status}))"
    if isinstance(error, SystemExit):
        return f"it ends the program (SystemExit {_first_line(error)})"
    text = _first_line(error)
    return type(error).__name__ + (f": {text}" if text else "")


def text_of(error: BaseException) -> str:
    """The exception's own text, as far as it can be had."""
    try:
        return str(error).strip()
    except KeyboardInterrupt:
        raise
    # Its `__str__` is the user's code as well, and may raise anything.
    except BaseException as second:
        return f"its text cannot be shown, because __str__ raises {type(second).__name__}"


def _first_line(error: BaseException) -> str:
    lines = text_of(error).splitlines()
    return lines[0][:MOST_CHARACTERS] if lines else ""


# Whose code a file is


class _Whose(IntEnum):
    """Whose code a file is. A higher number is closer to the user."""

    PLATFORM = 0  # this package, torch and Python itself
    LIBRARY = 1
    USER = 2


_OURS = str(Path(__file__).parents[1]) + os.sep


@functools.cache
def _python_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)}
    return tuple(folder + os.sep for folder in folders)


def _whose(path: str) -> _Whose:
    # Code that was made from a text, as torch's own graphs are, has a name such as "<string>".
    if path.startswith(("<", _OURS)):
        return _Whose.PLATFORM
    # Libraries may lie below the folder of Python's own modules, so they are looked for first.
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = path.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return _Whose.PLATFORM if rest.startswith("torch" + os.sep) else _Whose.LIBRARY
    return _Whose.PLATFORM if path.startswith(_python_folders()) else _Whose.USER


# Where it is


def location_of(error: BaseException, *, libraries: bool = True) -> str:
    """ "file.py:12: the line", the innermost line of the user's own code that was running, in this
    exception's traceback or in those of its causes.

    Without one it is the innermost line of a library, if `libraries` is true, or "". The lines of
    this package, of torch and of Python itself do not count.
    """
    least = _Whose.LIBRARY if libraries else _Whose.USER
    best: tuple[_Whose, str, int] | None = None
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        innermost = max(reversed([*_lines_of(cause)]), key=lambda line: line[0], default=None)
        if innermost is not None and innermost[0] >= least:
            # A line of a cause counts only if it is closer to the user.
            best = innermost if best is None else max(best, innermost, key=lambda line: line[0])
        cause = cause.__cause__ or cause.__context__
    return "" if best is None else _location(best[1], best[2])


def raised_by_user(error: BaseException) -> bool:
    """Whether the exception was raised by a line of the user's own code, and not by what the line
    has called."""
    lines = [*_lines_of(error)]
    return bool(lines) and lines[-1][0] is _Whose.USER


def _lines_of(error: BaseException) -> Iterator[tuple[_Whose, str, int]]:
    """(whose, file, line) from the outermost to the innermost."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        yield _whose(path), path, line
    # No line of a file that cannot be parsed was running.
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        yield _whose(error.filename), error.filename, error.lineno


def running_at() -> str:
    """The innermost line of the user's own code that is running now, as `location_of` names it."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_stack(sys._getframe(1))
        if _whose(frame.f_code.co_filename) is _Whose.USER
    ]
    return _location(*lines[0]) if lines else ""


def defined_at(thing: object) -> str:
    """ "file.py:12: def f():", where the user's code defines a function, a class, or an object's
    class; "" for what others define."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    # A message leaves out what this cannot find out, for any reason.
    with suppress(Exception):
        function = inspect.unwrap(getattr(thing, "__func__", thing))  # type: ignore[arg-type]
        code = getattr(function, "__code__", None)
        if code is not None:
            path, line = code.co_filename, code.co_firstlineno
        else:
            kind = thing if isinstance(thing, type) else type(thing)
            path, line = inspect.getsourcefile(kind) or "<unknown>", inspect.getsourcelines(kind)[1]
        if _whose(path) is _Whose.USER:
            return _location(path, line)
    return ""


def at(thing: object) -> str:
    """ " (at file.py:12: def f():)", where the user defines the thing, to be added to a message; ""
    for what others define."""
    location = defined_at(thing)
    return f" (at {location})" if location else ""


def _location(path: str, line: int) -> str:
    return f"{Path(path).name}:{line}: {linecache.getline(path, line).strip()}"


# What ends the process at once


class ExitCalled(BaseException):
    """Raised in place of `os._exit`, so that it is told like any other failure."""

    def __init__(self, status: object) -> None:
        super().__init__(status)
        self.status = status


def refuse_exit(status: object) -> NoReturn:
    """Raise `ExitCalled`; see `exits_noticed`."""
    raise ExitCalled(status)


@contextmanager
def exits_noticed(notice: Callable[[object], None]) -> Iterator[None]:
    """Calls `notice` with the status before the user's code, in a block of `UserCode`, ends this
    process by `os._exit`, while the block runs. Processes that the user's code forks are left
    alone."""
    leave, process = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if _inside.blocks and os.getpid() == process:
            notice(status)
        leave(status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = leave
