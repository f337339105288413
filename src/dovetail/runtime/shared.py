"""Provides shared memory without a name, which leaves nothing behind however its processes end.

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
"""Slots start on a cache line of this many bytes, as allocations by numpy and torch do."""


class Layout:
    """Hands out aligned offsets of a block that will be created later."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> int:
        """Reserve a slot of `size_bytes`, and return its offset."""
        offset = self.size_bytes
        self.size_bytes = offset + -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offset


class Block:
    """A block of bytes that several processes share. The bytes are zero at first.

    It is freed when the last process has closed it and dropped its views.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the block behind `descriptor`, and own the descriptor from now on."""
        # The descriptor is closed with the object if nobody calls `close`.
        self._close = weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """A new block. Compare `size_bytes` with the available memory first.

        The system promises more memory than it has, and kills a process that writes to memory that
        is not there.
        """
        descriptor = os.memfd_create("dovetail", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(size_bytes, 1))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """[size_bytes] all bytes of the block."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """The array of `shape` that starts `offset` bytes in."""
        return np.ndarray(shape, dtype=dtype, buffer=self._memory, offset=offset)

    def close(self) -> None:
        """Give up the memory. It is freed with the last view of it, here and in other processes."""
        if self.descriptor >= 0:
            self._close()
            self.descriptor = -1
            del self._memory
