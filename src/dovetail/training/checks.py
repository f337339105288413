"""What the server checks of a vector before anything changes: is it whole, finite, of what norm.

The checksum is XXH3's of 64 bits over the vector's bytes (https://xxhash.com, by the library
`xxhash`); the worker sends it with a commit, and the journal keeps it. The norm is the root of the
sum of squares in float64, which a NaN or an infinity anywhere makes a NaN or an infinity.

A large vector is taken in pieces that stay in a core's cache, so that all that is done with a piece
reads it from memory once. numba is imported at the first call that sums squares.
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

PIECE_BYTES = 2**18
"""Bytes of a piece. Sizes of 64 KB to 512 KB take the same time within a tenth, on vectors of 10
and of 100 MB. Smaller pieces spend more in Python's calls, larger ones fall out of the cache."""


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
    sum_of_squares = _sum_of_squares()
    digest, squares = xxhash.xxh3_64(), 0.0
    for piece in _pieces(vector):
        digest.update(piece.data)
        squares += sum_of_squares(piece)
    return Check(digest.intdigest(), squares)


def copy_and_checksum(target: NDArray[Any], source: NDArray[Any]) -> int:
    """`checksum(source)` while copying it to `target` [size], of the same type."""
    assert target.shape == source.shape
    assert target.dtype == source.dtype
    digest = xxhash.xxh3_64()
    for to, piece in zip(_pieces(target), _pieces(source), strict=True):
        digest.update(piece.data)
        np.copyto(to, piece)
    return digest.intdigest()


def checksum(data: NDArray[Any]) -> int:
    """Checksum of any contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(np.uint8).data)


def _pieces(vector: NDArray[Any]) -> list[NDArray[Any]]:
    length = PIECE_BYTES // vector.itemsize
    return [vector[start : start + length] for start in range(0, vector.size, length)]


@cache
def _sum_of_squares() -> Callable[[Vector], float]:
    import numba

    # Without leave to reorder the additions the loop is one chain of them, four times slower.
    loop: Callable[[Vector], float] = numba.njit(
        nogil=True, cache=True, fastmath={"reassoc", "contract"}
    )(_loop)
    return loop


def _loop(vector: Vector) -> float:
    total = 0.0
    for i in range(vector.size):
        value = np.float64(vector[i])
        total += value * value
    return total
