"""Shared memory without a name: nothing is left behind, however its processes end.

A `Block` is an anonymous file in memory (`memfd_create`) that lives as long as a process holds it
open or mapped. Its descriptor travels over a worker's channel.
"""

import mmap
import os
import weakref
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT_BYTES = 64
"""Slots start on a cache line, as the allocations of numpy's and torch's libraries do."""


class Layout:
    """Hands out aligned offsets of a block that is yet to be made."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> int:
        """Offset of a fresh slot of `size_bytes`."""
        offset = self.size_bytes
        self.size_bytes = offset + -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offset


class Block:
    """Bytes that several processes see. Zero at first.

    Freed when the last process has closed it and dropped its views.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the block behind `descriptor`, which it owns from here on."""
        self._close = weakref.finalize(self, os.close, descriptor)  # also if nobody closes it
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """A new block. The system promises more memory than it has, and kills a process that writes
        to memory that is not there, so compare `size_bytes` with what is available first."""
        descriptor = os.memfd_create("dovetail", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(size_bytes, 1))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """[size_bytes] all of it."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """The array of `shape` that starts `offset` bytes in."""
        return np.ndarray(shape, dtype=dtype, buffer=self._memory, offset=offset)

    def close(self) -> None:
        """Give up the memory; it goes with the last view of it, here and elsewhere."""
        if self.descriptor >= 0:
            self._close()
            self.descriptor = -1
            del self._memory
