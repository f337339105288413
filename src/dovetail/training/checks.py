"""Computes the checksum and the norm of a vector, which the server checks before anything changes.

The checksum is the 64-bit XXH3 hash of the vector's bytes (https://xxhash.com, by the library
`xxhash`). The worker sends it with a commit, and the journal keeps it. The norm is the root of the
sum of squares in float64. A NaN or an infinity in any element makes that sum a NaN or an infinity,
so the sum also shows whether all elements are finite.

A large vector is taken in pieces that stay in a core's cache. So each piece is read from memory
once, though it is both hashed and summed or copied. numba is imported at the first call that sums
squares.
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
"""Bytes of a piece. Pieces of 64 KB to 512 KB take the same time within a tenth, on vectors of 10
and of 100 MB. Smaller pieces cost more calls from Python, and larger ones fall out of the cache."""


@dataclass(frozen=True)
class Check:
    """Checksum and sum of squares of a vector. `squares` is nan or inf if an element is, or if the
    squares exceed the range of float64."""

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
    """Computes both checks of a flat, contiguous vector [size] of float32 or float64."""
    assert vector.flags.c_contiguous
    sum_of_squares = _sum_of_squares()
    digest, squares = xxhash.xxh3_64(), 0.0
    for piece in _pieces(vector):
        digest.update(piece.data)
        squares += sum_of_squares(piece)
    return Check(digest.intdigest(), squares)


def copy_and_checksum(target: NDArray[Any], source: NDArray[Any]) -> int:
    """Copies `source` [size] to `target` [size] of the same type, and returns the checksum of
    `source`."""
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

    # If the additions must keep their order, each waits for the one before, and the loop is four
    # times slower. NaN and infinity keep their meaning, since no other fast-math flag is set.
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
