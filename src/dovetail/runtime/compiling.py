"""Compiles kernels with numba: without the GIL, cached on disk, and without a memory manager.

numba counts references to every array on every call, atomically. With dozens of arrays that costs
twenty times the work itself. The kernels allocate nothing, so the memory manager is off (`_nrt`,
which numba's type stubs do not know). Helpers are inlined, so that no arrays are passed to them.

The first run on a machine compiles for the better part of a minute; later runs load the cache.
`working_clock` leaves this time out, so that a budget of seconds always buys the same search.
"""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

_options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}


def kernel(function: Function) -> Function:
    """Compile a function that Python calls."""
    compiled: Function = numba.njit(**_options)(function)
    return compiled


def inlined(function: Function) -> Function:
    """Compile a function that only kernels call; it is inlined there."""
    compiled: Function = numba.njit(forceinline=True, **_options)(function)
    return compiled


def working_clock() -> float:
    """Seconds, less those in which any thread compiled a kernel or loaded it from the cache."""
    return _compiler().working_seconds()


class _Compiler(event.Listener):
    """Adds up how long numba's compiler works: from each outermost start to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._began = 0.0
        self._spent = 0.0

    def on_start(self, _event: event.Event) -> None:
        with self._lock:
            if self._depth == 0:
                self._began = time.monotonic()
            self._depth += 1

    def on_end(self, _event: event.Event) -> None:
        with self._lock:
            # This compilation began before the listener was registered.
            if not self._depth:
                return
            self._depth -= 1
            if self._depth == 0:
                self._spent += time.monotonic() - self._began

    def working_seconds(self) -> float:
        with self._lock:
            # While a compilation is on, the clock stands at its begin.
            now = self._began if self._depth else time.monotonic()
            return now - self._spent


@cache
def _compiler() -> _Compiler:
    listener = _Compiler()
    event.register("numba:compiler_lock", listener)  # type: ignore[no-untyped-call]
    return listener
