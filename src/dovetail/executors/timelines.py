"""Timelines of steps that ran, from the stamps that devices leave in the shared block."""

import numpy as np

from dovetail.executors.shares import Share
from dovetail.frontends.instructions import ReadSource, SendTensor, ops_of
from dovetail.machine import Machine
from dovetail.runtime.shared import Block
from dovetail.timeline import Timeline


def timeline_of(machine: Machine, shares: tuple[Share, ...], block: Block) -> Timeline:
    """The timeline of the last step, from its stamps in the block. It must have been a timed step.

    A transfer's span is the time that the sending device takes for the copy. Where the machine has
    no link between the two devices, the span is on the channel of the first hop, to the host. Ops
    that ran together all have the span of their stage, as in a simulation. Memory is not recorded.
    """
    spans: list[tuple[int, int, int, int]] = []
    transfers: list[tuple[int, int, int, int, int, int, int]] = []
    rows_of_progress = [progress_of(share, block) for share in shares]
    begin = min((row[1] for row in rows_of_progress), default=0)
    end = max((row[2] for row in rows_of_progress), default=0)
    for share in shares:
        shape = (len(share.instructions), 2)
        stamps = block.view(share.stamps, shape, np.int64).tolist()
        for instruction, (start, stop) in zip(share.instructions, stamps, strict=True):
            spans += [(start, op, share.device, stop) for op in ops_of(instruction)]
            if isinstance(instruction, SendTensor):
                to = instruction.destination
                channel = _channel(machine, share.device, to)
                row = (instruction.tensor, instruction.op, share.device, to)
                transfers.append((start, channel, *row, stop))
            if isinstance(instruction, ReadSource):
                channel = _channel(machine, instruction.source, share.device)
                ends = (instruction.source, share.device)
                row = (instruction.tensor, instruction.producer, *ends)
                transfers.append((start, channel, *row, stop))
    # Rows begin with the start, so that sorting them puts spans in order of time.
    op_rows = np.array(sorted(spans), dtype=np.int64).reshape(-1, 4)
    rows = np.array(sorted(transfers), dtype=np.int64).reshape(-1, 7)
    nothing = tuple(np.empty(0) for _ in machine.devices)
    return Timeline(
        devices=machine.device_names,
        channels=machine.channels,
        ops=op_rows[:, 1].astype(np.int32),
        op_devices=op_rows[:, 2].astype(np.int32),
        op_starts=(op_rows[:, 0] - begin) / 1e9,
        op_ends=(op_rows[:, 3] - begin) / 1e9,
        transfer_tensors=rows[:, 2].astype(np.int32),
        transfer_ops=rows[:, 3].astype(np.int32),
        transfer_sources=rows[:, 4].astype(np.int32),
        transfer_destinations=rows[:, 5].astype(np.int32),
        transfer_channels=rows[:, 1].astype(np.int32),
        transfer_starts=(rows[:, 0] - begin) / 1e9,
        transfer_ends=(rows[:, 6] - begin) / 1e9,
        memory_times=nothing,
        memory_bytes=tuple(np.empty(0, dtype=np.int64) for _ in machine.devices),
        step_seconds=(end - begin) / 1e9,
    )


def progress_of(share: Share, block: Block) -> list[int]:
    """[index of the running instruction, -1 between steps; start, end of the last step in ns]."""
    return [int(value) for value in block.view(share.progress, (3,), np.int64)]


def _channel(machine: Machine, source: int, destination: int) -> int:
    """Index of the channel that a send takes, or that its first hop takes."""
    link = int(machine.link_index[source, destination])
    if link < 0:
        link = int(machine.link_index[source, machine.host_index])
    return machine.channels.index(machine.links[link].channel)
