"""What the server asks of a vector before anything changes: is it whole, finite, and of what norm.

All in one pass at the speed of memory, which also gives the checksum that the journal keeps and
the worker sends. With w_i the vector's bytes as little-endian 32-bit words, the last one filled up
with zeros:

    checksum = sum of (i + 1) w_i   mod 2^64                norm^2 = sum of x_i^2   in float64

Any change within one word, and any two words that change places, change the checksum, for sure and
up to 2^31 words (8 GB): it changes by k d with 0 < |k| <= 2^31 and 0 < |d| < 2^32. A NaN or an
infinity anywhere makes the sum of squares so.

The sum is taken in 16 lanes at once without multiplying: with rows r = 0, 1, ... of 16 words,
a += w_r; b += a leaves b = sum of (rows - r) w_r. Written in LLVM's vectors, as the loop
vectorizer takes three times as long. numba is imported at the first call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.training.records import Vector

LANES = 16
_MASK = 2**64 - 1
_ROW_BYTES = 4 * LANES


@dataclass(frozen=True)
class Check:
    """What one pass found. `squares` is nan or inf if a component is, or if they are too large to
    be squared."""

    checksum: int
    squares: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.squares)

    @property
    def norm(self) -> float:
        """L2 norm of the vector."""
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan


def check(vector: Vector) -> Check:
    """Checksum and sum of squares of a flat, contiguous vector of float32 or float64."""
    return _run("check", vector, None)


def copy_and_check(target: Vector, source: Vector) -> Check:
    """`check(source)` while copying it to `target` [size], of the same type."""
    assert target.shape == source.shape
    assert target.dtype == source.dtype
    assert target.flags.c_contiguous
    return _run("copy", source, target)


def checksum(data: NDArray[Any]) -> int:
    """Checksum of any contiguous array's bytes."""
    return _run("sum", data.reshape(-1).view(np.uint8), None).checksum


def _run(task: str, source: NDArray[Any], target: NDArray[Any] | None) -> Check:
    assert source.flags.c_contiguous
    octets = source.reshape(-1).view(np.uint8)
    rows = octets.size // _ROW_BYTES
    sums, squares = np.zeros((2, LANES), np.uint64), np.zeros(LANES)
    to = 0 if target is None else target.ctypes.data
    loop = _loop(task, "f" if task == "sum" else source.dtype.char)
    loop(source.ctypes.data, to, rows, sums.ctypes.data, squares.ctypes.data)
    weights = np.arange(LANES * rows + 1, LANES * rows + LANES + 1, dtype=np.uint64)
    total = int(np.dot(sums[0], weights)) - LANES * int(sums[1].sum())  # mod 2^64, as all is
    found = float(squares.sum())
    done = rows * _ROW_BYTES
    if done < octets.size:
        rest = np.zeros(_ROW_BYTES, np.uint8)
        rest[: octets.size - done] = octets[done:]
        total += int(np.dot(rest.view("<u4").astype(np.uint64), weights))
        tail = source[done // source.itemsize :]
        if target is not None:
            target[done // source.itemsize :] = tail
        if task != "sum":
            found += sum(value * value for value in tail.tolist())
    return Check(total & _MASK, found)


Loop = Callable[[int, int, int, int, int], None]
"""(source, target, rows, sums, squares), addresses all but the rows."""


@cache
def _loop(task: str, kind: str) -> Loop:
    from dovetail.training import check_loops

    return check_loops.LOOPS[task, kind]
