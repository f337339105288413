"""Encodes commits in fewer bytes: rounded to 16 bits, or only their largest components.

    none          the vector as it is
    float16       5 bits of exponent; a value beyond 65504 becomes infinite, and the server refuses
                  the commit
    bfloat16      8 bits of exponent, 8 of fraction, rounded to the nearest, ties to even
    topk:0.01     that share of the components, the largest in magnitude, each with its index

The components that `topk` leaves out stay with the worker and are added to its next vector, so that
they are not lost: S. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with Memory, 2018,
https://arxiv.org/abs/1809.07599, algorithm 1. Differences: windows have several steps; the
components that a dead worker kept are lost. A rule that sends parameters, as averaging does, cannot
leave any out: the trainer refuses `topk` with it.

Pulls are not encoded: rules that measure how far the center has moved need it as the worker saw it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.training.records import Vector

Octets = NDArray[np.uint8]


class Wire(Protocol):
    """An encoding on one worker's side, or on the server's. Every encoded vector has `size_bytes`
    bytes."""

    size_bytes: int

    def encode(self, vector: Vector, octets: Octets) -> None:
        """Writes `vector` [size] to `octets` [size_bytes]."""
        ...

    def decode(self, octets: Octets, vector: Vector) -> bool:
        """Fills `vector` [size] and returns True. Returns False if `octets` are no encoding; the
        vector must then not be used."""
        ...


def make_wire(wire: str, size: int, dtype: str) -> Wire:
    """The encoding of that name for vectors of `size` elements. Raises `UsageError`."""
    name, _, option = wire.partition(":")
    if name == "topk" and size < 2**32:
        return TopK(size, dtype, _fraction(option))
    if name in _CASTS and not option:
        cast: Wire = _CASTS[name](size, dtype)
        return cast
    choices = "none, float16, bfloat16, topk:FRACTION"
    raise UsageError("wire", f"there is no {wire!r} for {size} elements; there are {choices}")


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UsageError("wire", f"topk:{text} is no share; give one above 0 and up to 1")
    return fraction


class Plain:
    """The vector's bytes as they are."""

    def __init__(self, size: int, dtype: str) -> None:
        self._kind = np.dtype(dtype)
        self.size_bytes = size * self._kind.itemsize

    def encode(self, vector: Vector, octets: Octets) -> None:
        np.copyto(octets.view(self._kind), vector)

    def decode(self, octets: Octets, vector: Vector) -> bool:
        if octets.size != self.size_bytes:
            return False
        np.copyto(vector, octets.view(self._kind))
        return True


class Float16:
    """IEEE half precision: the relative error is 2^-11 from 6e-5 to 65504."""

    def __init__(self, size: int, _dtype: str) -> None:
        self.size_bytes = 2 * size

    def encode(self, vector: Vector, octets: Octets) -> None:
        with np.errstate(over="ignore"):
            np.copyto(octets.view(np.float16), vector, casting="same_kind")

    def decode(self, octets: Octets, vector: Vector) -> bool:
        if octets.size != self.size_bytes:
            return False
        np.copyto(vector, octets.view(np.float16))
        return True


class BFloat16:
    """The upper half of a float32: the relative error is 2^-8 in the whole range. float64 is
    rounded to float32 first."""

    def __init__(self, size: int, _dtype: str) -> None:
        self.size_bytes = 2 * size

    def encode(self, vector: Vector, octets: Octets) -> None:
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
        _compile("round")(bits, octets.view(np.uint16))

    def decode(self, octets: Octets, vector: Vector) -> bool:
        if octets.size != self.size_bytes:
            return False
        if vector.dtype == np.float32:
            _compile("widen")(octets.view(np.uint16), vector.view(np.uint32))
        else:
            vector[:] = (octets.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return True


class TopK:
    """The largest components and their ascending indices. The others stay for the next vector."""

    def __init__(self, size: int, dtype: str, fraction: float) -> None:
        self._size = size
        self._kind = np.dtype(dtype)
        self._count = max(1, round(fraction * size))
        self.size_bytes = self._count * (4 + self._kind.itemsize)
        self._rest: Vector = np.zeros(0, self._kind)

    def encode(self, vector: Vector, octets: Octets) -> None:
        if not self._rest.size:
            self._rest = np.zeros(self._size, self._kind)
        rest = self._rest
        rest += vector
        cut = self._size - self._count
        chosen = np.sort(np.argpartition(np.abs(rest), cut)[cut:])
        values, indices = self._parts(octets)
        indices[:] = chosen
        values[:] = rest[chosen]
        rest[chosen] = 0
        # The server will refuse this vector. Nothing of it may be added to the next one.
        if not np.isfinite(values).all():
            rest[:] = 0

    def decode(self, octets: Octets, vector: Vector) -> bool:
        if octets.size != self.size_bytes:
            return False
        values, indices = self._parts(octets)
        # Strictly ascending indices have no duplicates, and the last bounds them all.
        if indices[-1] >= self._size or (indices[1:] <= indices[:-1]).any():
            return False
        vector[:] = 0
        vector[indices] = values
        return True

    def _parts(self, octets: Octets) -> tuple[Vector, NDArray[np.uint32]]:
        split = self._count * self._kind.itemsize
        return octets[:split].view(self._kind), octets[split:].view(np.uint32)


_CASTS: dict[str, Any] = {"none": Plain, "float16": Float16, "bfloat16": BFloat16}


@cache
def _compile(name: str) -> Any:
    from dovetail.runtime.compiling import kernel

    loops: dict[str, Callable[..., None]] = {"round": _round, "widen": _widen}
    return kernel(loops[name])


def _round(bits: NDArray[np.uint32], halves: NDArray[np.uint16]) -> None:
    for i in range(bits.size):
        b = bits[i]
        # A nan must stay one: rounding could carry its bits over to an infinity or beyond, so it
        # is truncated, with a bit set that makes it a quiet nan.
        if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            halves[i] = (b >> np.uint32(16)) | np.uint32(0x40)
        else:
            # Adding just below half of the last kept bit, plus that bit, rounds ties to even.
            even = (b >> np.uint32(16)) & np.uint32(1)
            halves[i] = (b + np.uint32(0x7FFF) + even) >> np.uint32(16)


def _widen(halves: NDArray[np.uint16], bits: NDArray[np.uint32]) -> None:
    for i in range(bits.size):
        bits[i] = np.uint32(halves[i]) << np.uint32(16)
