"""Waiting on flags in shared memory: spinning, with acquire and release ordering.

A flag is an int64 that only grows, written by one process. Whoever sees its new value (acquire)
also sees everything written before it was published (release):

    producer   data ... ── publish(flag, 7)
                                    └──────► wait(flag, 7, abort) ── ... data      consumer

A wait that finds the abort flag set gives up, so that one failing process frees all others.
Flags are passed by address: unboxing an array costs more than the wait itself.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

ABORTED = -1
"""What `wait` and `barrier` return when the abort flag was set."""
SPINS = 64
"""Looks between two `sched_yield`: some microseconds, about one hop."""

_INT64 = ir.IntType(64)
# numba passes the first argument of an intrinsic itself, which its types do not know.
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic
_declare: Any = cgutils.get_or_insert_function
_copy_bytes: Any = cgutils.raw_memcpy
_PAUSE = {"x86_64": "llvm.x86.sse2.pause"}.get(platform.machine())


@_intrinsic
def _load(typing: Any, address: Any) -> Any:
    """int64 at `address`, with acquire ordering."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@_intrinsic
def _store(typing: Any, address: Any, value: Any) -> Any:
    """Write int64 `value` to `address`, with release ordering."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def _copy(typing: Any, target: Any, source: Any, size_bytes: Any) -> Any:
    """Copy bytes from one address to another; they do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in arguments[:2])
        _copy_bytes(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def _pause(typing: Any) -> Any:
    """Tell the core that this is a spin loop, where it has an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(_declare(builder.module, function, _PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def _sched_yield(typing: Any) -> Any:
    """Let another thread have this core, if one is waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Declared by name: an address taken through ctypes could not be cached on disk.
        function = ir.FunctionType(ir.IntType(32), [])
        external = _declare(builder.module, function, "sched_yield")
        builder.call(external, [])
        return context.get_dummy_value()

    return types.void(), generate


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def wait(flag: int, value: int, abort: int) -> int:
    """Block until the flag is at least `value`; what it is then, or `ABORTED`."""
    while True:
        for _ in range(SPINS):
            found = _load(flag)
            if found >= value:
                return int(found)
            _pause()
        if _load(abort) != 0:
            return ABORTED
        _sched_yield()


@njit("void(int64, int64)", nogil=True, cache=True)
def publish(flag: int, value: int) -> None:
    """Set the flag, after all that was written before."""
    _store(flag, value)


@njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def publish_copy(flag: int, value: int, target: int, source: int, size_bytes: int) -> None:
    """Copy bytes from address `source` to `target`, then set the flag: at half the price of two
    calls where the bytes are few."""
    _copy(target, source, size_bytes)
    _store(flag, value)


@njit("int64(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def barrier(flags: int, count: int, own: int, value: int, abort: int) -> int:
    """Arrive at flag `own` of the `count` flags (one a cache line) from address `flags` on, and
    block until every one is at least `value`. Returns `value`, or `ABORTED`."""
    _store(flags + 64 * own, value)
    for other in range(count):
        if wait(flags + 64 * other, value, abort) == ABORTED:
            return ABORTED
    return value


def address_of(array: NDArray[Any], index: int = 0) -> int:
    """Address of element `index` of a flat int64 array. Keep the array alive."""
    assert array.dtype == np.int64
    return int(array.ctypes.data) + 8 * index
