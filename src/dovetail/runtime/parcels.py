"""Parcels: objects that are sent to several processes of this machine.

    block    pickle │ array │ array ...      mapped copy-on-write by whoever unpacks it

A parcel is pickled once, and all processes share its arrays until one writes to its own. Code that
the caller's script defines is sent by value, so that the script is not run again.
"""

import io
import mmap
import pickle
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.shared import Block, Layout

LARGE_BYTES = 1 << 16
"""Tensors of at least this size are sent beside the pickle, in memory that all workers share."""


@dataclass(frozen=True)
class Parcel:
    """The places of an object's pickle and of its arrays in a block: (offset, bytes) each."""

    pickle: tuple[int, int]
    buffers: tuple[tuple[int, int], ...] = field(default=())


def pack_parcel(thing: object) -> tuple[Parcel, Block]:
    """Packs the object into a block of its own. Code of the caller's script goes by value.

    Raises what pickling raises, for an object that cannot be sent (an open file, a lock).
    """
    import cloudpickle  # whoever unpacks does without

    torch: Any = sys.modules.get("torch")  # without it there are no tensors

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # no types
        """Takes the bytes of large tensors out of the stream, as numpy does; torch pickles them
        into it."""

        def reducer_override(self, thing: Any) -> Any:
            if (
                torch is not None
                and type(thing) is torch.Tensor
                and thing.layout is torch.strided
                and thing.device.type == "cpu"
                and not thing.requires_grad
                and thing.dtype is not torch.bfloat16  # numpy has none
                and not thing.is_conj()
                and not thing.is_neg()
                and thing.is_contiguous()
                and thing.nbytes >= LARGE_BYTES
            ):
                return _tensor, (thing.detach().numpy(),)
            return super().reducer_override(thing)

    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
    content = file.getvalue()
    raws = [buffer.raw() for buffer in buffers]
    layout = Layout()
    place = (layout.reserve(len(content)), len(content))
    places = tuple((layout.reserve(raw.nbytes), raw.nbytes) for raw in raws)
    block = Block.create(layout.size_bytes)
    target = block.bytes
    for (offset, size), raw in zip((place, *places), (memoryview(content), *raws), strict=True):
        target[offset : offset + size] = np.frombuffer(raw, dtype=np.uint8)
    return Parcel(place, places), block


def unpack_parcel(parcel: Parcel, descriptor: int) -> Any:
    """Returns the object that `pack_parcel` was given. Its arrays share the block's pages until
    they are written to."""
    memory = memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE))
    offset, size = parcel.pickle
    return pickle.loads(
        memory[offset : offset + size], buffers=[memory[o : o + n] for o, n in parcel.buffers]
    )


def _tensor(array: NDArray[Any]) -> object:
    import torch

    return torch.from_numpy(array)
