"""Compiles kernels with numba: without the GIL, cached on disk, and without a memory manager.

numba counts references to every array on every call, atomically. With dozens of arrays that costs
twenty times the work itself. The kernels allocate nothing, so the memory manager is off (`_nrt`,
which numba's type stubs do not know). Helpers are inlined, so that no arrays are passed to them.

The first run on a machine compiles for half a minute; later runs load the cache. `working_clock`
leaves this time out, so that a budget of seconds always buys the same search. Until a kernel is
compiled, `interpreted` has its function in Python.
"""

import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
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
    # What Python or C would call took two thirds of the time of compiling the simulator.
    options = _options | {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Function = numba.njit(forceinline=True, **options)(function)
    return compiled


@cache
def interpreted(function: Function) -> Function:
    """The Python function of a kernel, which computes the same some hundred times more slowly."""
    own: Any = function.py_func  # type: ignore[attr-defined]
    names = dict(own.__globals__)
    for name in own.__code__.co_names:
        if hasattr(names.get(name), "py_func"):
            names[name] = interpreted(names[name])
    python: Any = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    return python  # type: ignore[no-any-return]


@cache
def is_compiled(function: Callable[..., Any]) -> bool:
    """True if machine code of a kernel, newer than its file, was there when this was asked first,
    or if numba is told to compile nothing."""
    kernel: Any = function
    own = getattr(kernel, "py_func", None)
    if own is None:
        return True
    written = Path(own.__code__.co_filename).stat().st_mtime
    pattern = f"{own.__module__.rpartition('.')[2]}.{own.__qualname__}-*.nbc"
    return any(f.stat().st_mtime > written for f in Path(kernel.stats.cache_path).glob(pattern))


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
