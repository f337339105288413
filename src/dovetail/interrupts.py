"""Handles Ctrl-C in a command, also where Python itself would lose it.

Python raises `KeyboardInterrupt` wherever the program is. In three kinds of places that is wrong:

    a library's import modules are left half made, and what uses them fails with other errors
    `__del__`, a weak reference's callback, or one that C calls, such as llvmlite's
                       Python prints a traceback, and goes on as if there had been no Ctrl-C
    the end of Python  it prints a traceback, though the command is done

There the interrupt is put off until the place is left. Before torch is imported there is nothing to
keep, so an import is not waited for: the command ends at once. So it does at a second Ctrl-C.
"""

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType, ModuleType

INTERRUPTED = 130
"""The exit status after a Ctrl-C outside a search. A shell reports SIGINT by this number."""
RETRY_SECONDS = 0.02
"""An interrupt that was put off comes again after so long."""
AGAIN_SECONDS = 1.0
"""A Ctrl-C that comes so long after one that waits for an import is a second one. Programs that
pass signals on may send one twice."""
_WEAK = ("weakref.py", "_weakrefset.py")
_IMPORT = "<frozen importlib._bootstrap>"
_NOT_THE_USERS = ("<", os.path.dirname(os.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
"""How names of files begin that hold Python's own modules, or ours."""


class _PutOff:
    """The interrupt that waits. `since`: when it came; `comes`: it is about to come again."""

    since: float | None = None
    comes = False


def take_interrupts() -> None:
    """Handle Ctrl-C here from now on, unless the program has a handler of its own or this is not
    the main thread."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def leave_interrupts() -> None:
    """Undo `take_interrupts`."""
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_of_interrupts() -> None:
    """Have Python end in peace once the command is done: a Ctrl-C changes nothing any more."""
    leave_interrupts()
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # After a `KeyboardInterrupt` that once left code made from a text, as numpy and numba have it,
    # `python -m` would end by SIGINT in place of our status. Further such code has it forget.
    exec("")


def raises_interrupts() -> bool:
    """Whether Ctrl-C raises `KeyboardInterrupt` in this process, and no other handler is set."""
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    again, _PutOff.comes = _PutOff.comes, False
    importing, lost = _place(frame)
    if not (importing or lost):
        _PutOff.since = None
        signal.default_int_handler(number, frame)
    since, now = _PutOff.since, time.monotonic()
    if importing:
        module: ModuleType | None = sys.modules.get("torch")
        has_torch = module is not None and not getattr(module.__spec__, "_initializing", False)
        is_second = not again and since is not None and now - since > AGAIN_SECONDS
        if not has_torch or is_second:
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)

    # The interrupt is put off.
    _PutOff.since = now if since is None else since
    main = threading.main_thread().ident

    def come_again() -> None:
        time.sleep(RETRY_SECONDS)
        _PutOff.comes = True
        if main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    # A `threading.Thread` takes locks, which the interrupted code may hold.
    _thread.start_new_thread(come_again, ())


def _place(frame: FrameType | None) -> tuple[bool, bool]:
    """(within an import, within what drops exceptions). The import of a module of the user's own is
    none: its code may run for long."""
    importing = lost = users = False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        users = users or not (file.startswith(_NOT_THE_USERS) or "-packages" + os.sep in file)
        importing = importing or (not users and file == _IMPORT and name == "_find_and_load")
        callback = name == "__del__" or name.startswith("_raw_object_cache")
        lost = lost or callback or file.endswith(_WEAK)
        frame = frame.f_back
    return importing, lost
