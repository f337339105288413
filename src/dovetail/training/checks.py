"""What the server checks of a vector before anything changes: is it whole, finite, of what norm.

The checksum is XXH3's of 64 bits over the vector's bytes (https://xxhash.com, by the library
`xxhash`); the worker sends it with a commit, and the journal keeps it. The norm is the root of the
sum of squares in float64, which a NaN or an infinity anywhere makes a NaN or an infinity.

A large vector is taken in pieces that stay in a core's cache, so that copy, checksum and squares
together read it from memory once. numba is imported at the first call that sums squares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dovetail.training.records import Vector

PIECE_BYTES = 2**17
"""Bytes of a piece. 64 KB to 512 KB take the same time within a tenth, on vectors of 10 and of
100 MB; smaller pieces spend more in Python's calls, larger ones fall out of the second cache."""


@dataclass(frozen=True)
class Check:
    """Checksum and sum of squares of a vector. `squares` is nan or inf if a component is, or if
    they are too large to be squared."""

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
    assert vector.flags.c_contiguous
    sum_squares = _compiled(_sum_squares)
    digest, squares = xxhash.xxh3_64(), 0.0
    for piece in _pieces(vector):
        digest.update(piece)
        squares += sum_squares(piece)
    return Check(digest.intdigest(), squares)


def copy_and_check(target: Vector, source: Vector) -> Check:
    """`check(source)` while copying it to `target` [size], of the same type."""
    assert target.shape == source.shape
    assert target.dtype == source.dtype
    assert target.flags.c_contiguous and source.flags.c_contiguous
    copy_and_sum_squares = _compiled(_copy_and_sum_squares)
    digest, squares = xxhash.xxh3_64(), 0.0
    for to, piece in zip(_pieces(target), _pieces(source), strict=True):
        digest.update(piece)
        squares += copy_and_sum_squares(to, piece)
    return Check(digest.intdigest(), squares)


def checksum(data: NDArray[Any]) -> int:
    """Checksum of any contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(np.uint8))


def _pieces(vector: Vector) -> list[Vector]:
    length = PIECE_BYTES // vector.itemsize
    return [vector[start : start + length] for start in range(0, vector.size, length)]


@cache
def _compiled(function: Callable[..., float]) -> Callable[..., float]:
    import numba

    # Without leave to reorder the additions the loop is one chain of them, four times slower.
    loop: Callable[..., float] = numba.njit(
        nogil=True, cache=True, fastmath={"reassoc", "contract"}
    )(function)
    return loop


def _sum_squares(source: Vector) -> float:
    total = 0.0
    for i in range(source.size):
        value = np.float64(source[i])
        total += value * value
    return total


def _copy_and_sum_squares(target: Vector, source: Vector) -> float:
    total = 0.0
    for i in range(source.size):
        target[i] = source[i]
        value = np.float64(source[i])
        total += value * value
    return total
