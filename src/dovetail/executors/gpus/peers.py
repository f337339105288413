"""Sends tensors straight from a GPU of one rank to a GPU of another, over NCCL.

    GPU of rank 0                                    GPU of rank 1
    compute stream ── x ──┐                          ┌─► take x ── compute stream
    peer stream           └─ send x ══ NCCL ══ receive x ── peer stream

Each directed pair of GPUs has a group of two ranks. All that a GPU sends and receives runs on one
stream, in the order in which it was issued, which is the same on all ranks (`gpus.steps`). NCCL
asks for that: kernels of several communicators that wait for each other may hold up a GPU for ever,
and CUDA does not promise that two streams of a GPU both go on
(https://github.com/NVIDIA/nccl/issues/783, https://github.com/pytorch/pytorch/pull/48872). So
receives are not posted ahead, as they are between CPUs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dovetail.frontends.instructions import BlockSlot
from dovetail.frontends.runners import distinct
from dovetail.runtime.ranks import JOIN_SECONDS, RankPlace, connect_store
from dovetail.runtime.torch_versions import named_store

_NEVER = timedelta(days=30)
"""`runtime.ranks` ends a process that waits for a lost rank."""


class PeerError(Exception):
    """Raised where the connection with another rank's GPU failed.

    rank   the other rank
    """

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(said)
        self.rank = rank


@dataclass(frozen=True)
class PeerPair:
    """One end of the messages from a GPU of one rank to a GPU of another.

    name    of the pair's group, the same on both ranks
    sends   this rank has the source
    other   the rank of the other end
    """

    name: str
    source: int
    destination: int
    sends: bool
    other: int


class Peer:
    """A connected end of a pair. What is issued runs on the current stream, which goes on once it
    has ended; the host does not wait. Raises `PeerError`.

    is_aborted   True once a device of this rank has failed
    """

    def __init__(
        self,
        pair: PeerPair,
        store: Any,
        place: RankPlace,
        cuda: Any,
        is_aborted: Callable[[], bool] = bool,
    ) -> None:
        self._pair = pair
        self._errors = cuda.peer_errors()
        store, end = named_store(pair.name, store), 0 if pair.sends else 1
        try:
            self._group = cuda.peer_group(store, end, place, _NEVER, is_aborted)
        except self._errors as error:
            raise PeerError(pair.other, str(error)) from error

    def greet(self, device: torch.device) -> None:
        """Send or receive a byte: NCCL connects with the first message."""
        try:
            self._exchange(torch.zeros(1, dtype=torch.uint8, device=device))
        except PeerError as error:
            said = f"{error}; DOVETAIL_NCCL=0 has tensors of GPUs go through memory"
            raise PeerError(error.rank, said) from error

    def send(self, value: Tensor, slot: BlockSlot) -> None:
        """Send a tensor with the shape and strides of the slot."""
        if slot.bytes:
            self._exchange(_laid_out(value.resolve_conj().resolve_neg(), slot).contiguous())

    def receive(self, into: Tensor, slot: BlockSlot) -> None:
        """Receive a tensor with the shape and strides of the slot."""
        if not slot.bytes:
            return
        place = _laid_out(into, slot)
        if place.is_contiguous():
            self._exchange(place)
        else:
            arrived = torch.empty_like(place, memory_format=torch.contiguous_format)
            self._exchange(arrived)
            place.copy_(arrived)

    def _exchange(self, tensor: Tensor) -> None:
        # NCCL does not know all dtypes. The stride of a single element may be 0.
        raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        try:
            if self._pair.sends:
                self._group.send([raw], 1, 0).wait()
            else:
                self._group.recv([raw], 0, 0).wait()
        except self._errors as error:
            raise PeerError(self._pair.other, str(error)) from error

    def close(self) -> None:
        """End the connection, with what waits for the other end."""
        self._group.abort()


def connect_peers(
    place: RankPlace, pairs: Sequence[PeerPair], cuda: Any, is_aborted: Callable[[], bool]
) -> dict[tuple[int, int], Peer]:
    """(source, destination) -> this rank's end of each pair, in the order in which all ranks
    connect them. Raises `PeerError`, and `UsageError` if torch's store cannot be reached."""
    store = connect_store(place, keeps=False, timeout_seconds=JOIN_SECONDS)
    return {
        (pair.source, pair.destination): Peer(pair, store, place, cuda, is_aborted)
        for pair in pairs
    }


def _laid_out(tensor: Tensor, slot: BlockSlot) -> Tensor:
    """A view of the tensor whose dimensions are in the order in which they lie in memory, without
    those along which it repeats itself."""
    once = distinct(tensor, slot.strides)
    return once.permute(sorted(range(once.ndim), key=lambda d: -slot.strides[d]))
