"""Waits on flags in shared memory, with acquire and release ordering.

A flag is an int64 that only grows, written by one process. A process that sees its new value
(acquire) also sees everything written before it was published (release):

    producer   data ... ── publish(flag, 7)
                                    └──────► wait(flag, 7, abort, spin_ns) ── ... data     consumer

A wait spins for `spin_ns`, and gives its core away now and then meanwhile. Then it sleeps in the
kernel (futex) until the flag is published. A sleeping thread gets its core at once when it is
woken, even if another program computes there. A spinning thread has used up its share of time by
then, and waits for milliseconds. The eight bytes after a flag say whether somebody sleeps on it. A
flag has a cache line of its own.

A wait that finds the abort flag set gives up, so that one failing process frees all others. Flags
are passed by address, because unboxing an array costs more than the wait itself.
"""

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

ABORTED = -1
"""`wait` and `barrier` return this if the abort flag was set."""
SPINS = 64
"""A wait looks at its flag this often between two looks at the clock.

That takes some microseconds, about as long as one hop between cores."""
SPIN_NS = 20_000
"""A wait spins this long if nobody knows whether other programs want the core."""
_YIELD_NS = 20_000
"""A wait that has spun for this long gives its core away now and then."""
_AWAY_NS = 50_000
"""If a thread was off its core for longer than this, others want the core, and the wait sleeps."""
_NAP_NS = 20_000_000
"""A sleep ends after this long at the latest, so that the thread looks at the abort flag."""
# Number of the system call `futex`, by processor.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(
    platform.machine(), 98
)
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1
_CLOCK_MONOTONIC = 1

_INT64 = ir.IntType(64)
# numba itself passes the first argument of an intrinsic. Its type stubs do not know that.
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic
_declare: Any = cgutils.get_or_insert_function
_copy_bytes: Any = cgutils.raw_memcpy
_allocate: Any = cgutils.alloca_once
_PAUSE = {"x86_64": "llvm.x86.sse2.pause"}.get(platform.machine())


@_intrinsic
def _load(typing: Any, address: Any) -> Any:
    """Read the int64 at `address`, with acquire ordering."""

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
    """Tell the core that this is a spin loop, if it has an instruction for that."""

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
        # The function is declared by name, because code with an address from ctypes cannot be
        # cached on disk.
        function = ir.FunctionType(ir.IntType(32), [])
        external = _declare(builder.module, function, "sched_yield")
        builder.call(external, [])
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def _fence(typing: Any) -> Any:
    """Keep loads after the fence from being done before stores in front of it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def _now_ns(typing: Any) -> Any:
    """The clock of `runtime.timers`, in nanoseconds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        time = _allocate(builder, ir.ArrayType(_INT64, 2))
        pointer = builder.bitcast(time, _INT64.as_pointer())
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _INT64.as_pointer()])
        external = _declare(builder.module, function, "clock_gettime")
        builder.call(external, [ir.Constant(ir.IntType(32), _CLOCK_MONOTONIC), pointer])
        seconds = builder.load(pointer)
        nanoseconds = builder.load(builder.gep(pointer, [ir.Constant(ir.IntType(32), 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(_INT64, 10**9)), nanoseconds)

    return types.int64(), generate


@_intrinsic
def _futex(typing: Any, address: Any, operation: Any, value: Any, timeout_ns: Any) -> Any:
    """Sleep while the 32 bits at `address` are `value`, `timeout_ns` (below a second) at most, or
    wake up to `value` sleepers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, operation, value, timeout_ns = arguments
        time = _allocate(builder, ir.ArrayType(_INT64, 2))
        pointer = builder.bitcast(time, _INT64.as_pointer())
        builder.store(ir.Constant(_INT64, 0), pointer)
        builder.store(timeout_ns, builder.gep(pointer, [ir.Constant(ir.IntType(32), 1)]))
        function = ir.FunctionType(_INT64, [_INT64], var_arg=True)
        external = _declare(builder.module, function, "syscall")
        zero = ir.Constant(_INT64, 0)
        number = ir.Constant(_INT64, _FUTEX)
        given = [number, address, operation, value, pointer, zero, zero]
        builder.call(external, given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def _sleep(flag: int, value: int, abort: int) -> int:
    """Sleep until the flag is at least `value`; return what it is then, or `ABORTED`."""
    while True:
        now = _load(flag)
        if now >= value:
            return int(now)
        if _load(abort) != 0:
            return ABORTED
        # The publisher sets the flag and then looks whether somebody sleeps. This thread says that
        # it sleeps and then looks at the flag. With a fence between the two steps on both sides, at
        # least one of the two sees the other. And the kernel puts nobody to sleep if the flag has
        # changed since, because it compares it with `now` first.
        _store(flag + 8, 1)
        _fence()
        now = _load(flag)
        if now < value:
            # A futex is 32 bits wide, so it sees the lower half of the flag.
            _futex(flag, _FUTEX_WAIT, now & 0xFFFFFFFF, _NAP_NS)


@njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)
def wait(flag: int, value: int, abort: int, spin_ns: int) -> int:
    """Block until the flag is at least `value`; return what it is then, or `ABORTED`."""
    # A flag that comes within a hop needs no look at the clock or at the abort flag.
    for _ in range(SPINS):
        reached = _load(flag)
        if reached >= value:
            return int(reached)
        _pause()
    begin = _now_ns()
    now = begin
    while now - begin < spin_ns:
        for _ in range(SPINS):
            reached = _load(flag)
            if reached >= value:
                return int(reached)
            _pause()
        if _load(abort) != 0:
            return ABORTED
        before = now
        if before - begin > _YIELD_NS:
            _sched_yield()
        now = _now_ns()
        if now - before > _AWAY_NS:
            break
    return int(_sleep(flag, value, abort))


@njit("int64(int64)", nogil=True, cache=True)
def look(flag: int) -> int:
    """Return the flag. A process that sees a value also sees all that was written before it."""
    return int(_load(flag))


@njit("void(int64)", nogil=True, cache=True)
def _wake(flag: int) -> None:
    """Wake all that sleep until the flag changes. Call it right after the flag was set."""
    # The fence pairs with the one in `_sleep`. Without sleepers there is no system call.
    _fence()
    if _load(flag + 8) != 0:
        _store(flag + 8, 0)
        _futex(flag, _FUTEX_WAKE, _ALL, 0)


@njit("void(int64, int64)", nogil=True, cache=True)
def publish(flag: int, value: int) -> None:
    """Set the flag, so that whoever sees it also sees all that was written before."""
    _store(flag, value)
    _wake(flag)


@njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def publish_copy(flag: int, value: int, target: int, source: int, size_bytes: int) -> None:
    """Copy bytes from address `source` to `target`, and then set the flag.

    For few bytes this takes half as long as two separate calls.
    """
    _copy(target, source, size_bytes)
    _store(flag, value)
    _wake(flag)


@njit("int64(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def barrier(flags: int, count: int, seat: int, value: int, abort: int, spin_ns: int) -> int:
    """Set the flag of `seat`, and block until all `count` flags are at least `value`.

    The flags start at address `flags`, one per cache line of 64 bytes. Returns `value` or
    `ABORTED`.
    """
    publish(flags + 64 * seat, value)
    for other in range(count):
        if wait(flags + 64 * other, value, abort, spin_ns) == ABORTED:
            return ABORTED
    return value


@cache
def c_functions() -> tuple[int, int, int]:
    """The addresses of `wait`, `publish` and `publish_copy` as functions of C."""
    made: list[Any] = [
        cfunc("int64(int64, int64, int64, int64)", cache=True)(wait.py_func),
        cfunc("void(int64, int64)", cache=True)(publish.py_func),
        cfunc("void(int64, int64, int64, int64, int64)", cache=True)(publish_copy.py_func),
    ]
    _KEPT.extend(made)
    first, second, third = (int(function.address) for function in made)
    return first, second, third


_KEPT: list[Any] = []
"""The functions of `c_functions`, whose code lives as long as they do."""


def address_of(array: NDArray[Any], index: int = 0) -> int:
    """The address of element `index` of a flat int64 array, which the caller keeps alive."""
    assert array.dtype == np.int64
    return int(array.ctypes.data) + 8 * index
