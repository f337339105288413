"""Timeline: what happened when. Simulating a plan and running it both return one.

cpu0   ├─ op 0 ─┤├──── op 2 ────┤            op_devices, op_starts, op_ends
                └─► tensor 0 ─►┐             transfer_* on channel "cpu0->cpu1"
cpu1                           ├─ op 1 ─┤
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of one step, in seconds from its start.

    ops, op_devices, op_starts, op_ends   [spans] ordered by (start, op), but on one device an
                       op of no duration stands before what starts after it; source ops have none
    transfer_tensors   [transfers] tensor carried, -1: a control edge. Ordered by (start, channel)
    transfer_ops       [transfers] the op whose output, or whose end, is carried
    transfer_sources, transfer_destinations   [transfers] devices. Where two devices have no link, a
                       simulated tensor has two rows, the second from the host, and a measured one
                       has one
    transfer_channels  [transfers] channels
    memory_times, memory_bytes   one pair of arrays a device: bytes in use from each time on,
                       times ascending; both empty where memory was not recorded
    step_seconds       the end of the last event
    """

    devices: tuple[str, ...]
    channels: tuple[str, ...]
    ops: Int32
    op_devices: Int32
    op_starts: Float64
    op_ends: Float64
    transfer_tensors: Int32
    transfer_ops: Int32
    transfer_sources: Int32
    transfer_destinations: Int32
    transfer_channels: Int32
    transfer_starts: Float64
    transfer_ends: Float64
    memory_times: tuple[Float64, ...]
    memory_bytes: tuple[Int64, ...]
    step_seconds: float

    @property
    def busy_seconds(self) -> Float64:
        """[devices] seconds each device computes; those of ops that run together count once."""
        seconds = np.zeros(len(self.ops))
        for device in range(len(self.devices)):
            spans = np.flatnonzero(self.op_devices == device)
            spans = spans[np.argsort(self.op_starts[spans], kind="stable")]
            starts, ends = self.op_starts[spans], self.op_ends[spans]
            before = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
            seconds[spans] = np.maximum(ends - np.maximum(starts, before), 0.0)
        return _sums(self.op_devices, seconds, len(self.devices))

    @property
    def channel_seconds(self) -> Float64:
        """[channels] seconds each channel carries something."""
        seconds = self.transfer_ends - self.transfer_starts
        return _sums(self.transfer_channels, seconds, len(self.channels))

    @property
    def peak_memory_bytes(self) -> Int64:
        """[devices] largest memory in use; 0 where memory was not recorded."""
        return np.array([int(m.max(initial=0)) for m in self.memory_bytes], dtype=np.int64)

    def order_of(self, device: int) -> tuple[int, ...]:
        """Ops of one device in the order they started."""
        return tuple(self.ops[self.op_devices == device].tolist())

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """[devices] the ops of each in the order they started."""
        return tuple(self.order_of(device) for device in range(len(self.devices)))


def _sums(owners: Int32, seconds: Float64, count: int) -> Float64:
    sums: Float64 = np.zeros(count)
    np.add.at(sums, owners, seconds)
    return sums
