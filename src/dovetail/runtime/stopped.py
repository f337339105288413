"""Ends worker processes that somebody has stopped, so that nobody waits for them for ever.

    running ── SIGSTOP ──► stopped ── SIGCONT ──► running
                              └── STOPPED_SECONDS ──► killed, and whoever waits for it is told

A stopped process (SIGSTOP, or SIGTTOU where background processes may not write to the terminal)
keeps its channel open, so a wait for its reply would not end. A thread looks once a second at the
state that the kernel gives (`runtime.watch`). A suspension of the whole job, this process included,
does not count. The thread ends when nothing is left to watch. A process that a debugger holds is in
another state.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakMethod

from dovetail.runtime.watch import Watch

STOPPED_SECONDS = 10.0
"""A process may be stopped for so long."""
LOOK_SECONDS = 1.0
"""The thread looks this often."""


@dataclass
class _Watched:
    kill: WeakMethod[Callable[[], None]]
    patience_seconds: float


# A collection of garbage within a block may end workers, which calls `unwatch`.
_lock = threading.RLock()
_watched: dict[int, _Watched] = {}
_watch: Watch | None = None


def _forget() -> None:
    """Watch nothing, in a process that was forked from one that did."""
    global _lock, _watch
    _lock, _watch = threading.RLock(), None
    _watched.clear()


os.register_at_fork(after_in_child=_forget)


def watch(pid: int, kill: Callable[[], None], patience_seconds: float) -> None:
    """Call `kill`, a method, once the child process has been stopped for so long. Call `unwatch`
    before it is waited for, as its number may then be another process's.

    The method's object is not kept: nothing is watched for it once nobody else holds it, and a
    process that is stopped then lives on until this one ends.
    """
    global _watch
    with _lock:
        _watched[pid] = _Watched(WeakMethod(kill), patience_seconds)
        if _watch is None or _watch.thread is None or not _watch.thread.is_alive():
            _watch = Watch(LOOK_SECONDS)
            _watch.run("stopped", _look)
        _watch.forget(pid)


def unwatch(pid: int) -> None:
    with _lock:
        _watched.pop(pid, None)
        if _watch is not None:
            _watch.forget(pid)


@contextmanager
def watched(pid: int, kill: Callable[[], None]) -> Iterator[None]:
    """Watches a process while the block waits for it."""
    watch(pid, kill, STOPPED_SECONDS)
    try:
        yield
    finally:
        unwatch(pid)


def describe_stop(seconds: float) -> str:
    """The words for the end of a process that was killed because somebody had stopped it."""
    return f"killed, as it was stopped for {seconds:.3g} s"


def _look() -> bool:
    """Look at all; False if there is nothing to look at any more."""
    global _watch
    with _lock:
        for pid, each in list(_watched.items()):
            state, kill = state_of(pid), each.kill()
            assert _watch is not None, "its thread runs this"
            is_over = (
                _watch.still_seconds(pid, state == "T") >= each.patience_seconds and state == "T"
            )
            if is_over and kill is not None:
                kill()
            if is_over or kill is None or state in ("", "Z"):
                _watched.pop(pid, None)
            # Else the object would live until the next look.
            del kill
        if not _watched:
            _watch = None
        return bool(_watched)


def state_of(pid: int) -> str:
    """The letter of the process's state; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
