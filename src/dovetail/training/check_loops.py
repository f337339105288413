"""The loops of `checks`, in LLVM's vectors: 64 bytes a turn, lanes apart until the end."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

PREFETCH_BYTES = 4096
"""How far ahead of the loop: a page, as the core's own prefetcher stops at its end. A fifth faster
on 10 MB, a third on 100 MB."""

_LANES = 16
_INT64 = ir.IntType(64)
_WORDS = ir.VectorType(ir.IntType(32), _LANES)
_SUMS = ir.VectorType(_INT64, _LANES)
_FLOATS = {
    "float32": ir.VectorType(ir.FloatType(), _LANES),
    "float64": ir.VectorType(ir.DoubleType(), _LANES // 2),
}
# numba passes the first argument of an intrinsic itself, which its types do not know.
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic
_for_range: Any = cgutils.for_range
_alloca: Any = cgutils.alloca_once_value
_declare: Any = cgutils.get_or_insert_function


def _body(copies: bool, floats: Any) -> Callable[..., Any]:
    """Writes the loop: `floats` is the vector type whose squares are summed, or None."""
    wide = floats and ir.VectorType(ir.DoubleType(), floats.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, rows, sums, squares = arguments
        first = _alloca(builder, ir.Constant(_SUMS, [0] * _LANES))
        second = _alloca(builder, ir.Constant(_SUMS, [0] * _LANES))
        total = floats and _alloca(builder, ir.Constant(wide, [0.0] * wide.count))
        with _for_range(builder, rows, intp=_INT64) as loop:
            offset = builder.mul(loop.index, _INT64(4 * _LANES))
            address = builder.add(source, offset)
            _prefetch(builder, builder.add(address, _INT64(PREFETCH_BYTES)))
            words = _load(builder, address, _WORDS)
            if copies:
                _store(builder, builder.add(target, offset), words)
            a = builder.add(builder.load(first), builder.zext(words, _SUMS))
            builder.store(a, first)
            builder.store(builder.add(builder.load(second), a), second)
            if floats:
                values = builder.bitcast(words, floats)
                values = values if floats == wide else builder.fpext(values, wide)
                square = builder.fmul(values, values, flags=("contract",))
                added = builder.fadd(builder.load(total), square, flags=("contract",))
                builder.store(added, total)
        _store(builder, sums, builder.load(first))
        _store(builder, builder.add(sums, _INT64(8 * _LANES)), builder.load(second))
        if floats:
            _store(builder, squares, builder.load(total))
        return context.get_dummy_value()

    return generate


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for a cache line that will be read; where there is none, nothing happens."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = _declare(builder.module, kind, "llvm.prefetch.p0i8")
    options = [number(0), number(3), number(1)]  # to read, from all caches, data
    builder.call(function, [builder.inttoptr(address, pointer), *options])


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


_SIGNATURE = types.void(*[types.int64] * 5)


@_intrinsic
def _sum(typing: Any, source: Any, target: Any, rows: Any, sums: Any, squares: Any) -> Any:
    return _SIGNATURE, _body(False, None)


@_intrinsic
def _check32(typing: Any, source: Any, target: Any, rows: Any, sums: Any, squares: Any) -> Any:
    return _SIGNATURE, _body(False, _FLOATS["float32"])


@_intrinsic
def _check64(typing: Any, source: Any, target: Any, rows: Any, sums: Any, squares: Any) -> Any:
    return _SIGNATURE, _body(False, _FLOATS["float64"])


@_intrinsic
def _copy32(typing: Any, source: Any, target: Any, rows: Any, sums: Any, squares: Any) -> Any:
    return _SIGNATURE, _body(True, _FLOATS["float32"])


@_intrinsic
def _copy64(typing: Any, source: Any, target: Any, rows: Any, sums: Any, squares: Any) -> Any:
    return _SIGNATURE, _body(True, _FLOATS["float64"])


@njit(_SIGNATURE, nogil=True, cache=True)
def _run_sum(source: int, target: int, rows: int, sums: int, squares: int) -> None:
    _sum(source, target, rows, sums, squares)


@njit(_SIGNATURE, nogil=True, cache=True)
def _run_check32(source: int, target: int, rows: int, sums: int, squares: int) -> None:
    _check32(source, target, rows, sums, squares)


@njit(_SIGNATURE, nogil=True, cache=True)
def _run_check64(source: int, target: int, rows: int, sums: int, squares: int) -> None:
    _check64(source, target, rows, sums, squares)


@njit(_SIGNATURE, nogil=True, cache=True)
def _run_copy32(source: int, target: int, rows: int, sums: int, squares: int) -> None:
    _copy32(source, target, rows, sums, squares)


@njit(_SIGNATURE, nogil=True, cache=True)
def _run_copy64(source: int, target: int, rows: int, sums: int, squares: int) -> None:
    _copy64(source, target, rows, sums, squares)


LOOPS = {
    ("sum", "f"): _run_sum,
    ("check", "f"): _run_check32,
    ("check", "d"): _run_check64,
    ("copy", "f"): _run_copy32,
    ("copy", "d"): _run_copy64,
}
"""By task, and numpy's character of the vector's type."""
