"""Cuts a plan into shares: the flat list of instructions that each device's process runs per step.

    device 0                          device 1
    Run a                             Await x      flag of (x, device 1) ≥ this step
    Send x -> 1   ── slot of x ──►    Run b        reads the slot itself, nothing is copied again
    Run c         ◄── flag only ──    Send -> 0    a control edge

Sources that live on one device and are read on others are sent as the step begins. Every (tensor,
destination) has its own flag and slot, so nothing waits for a slot to become free. The barrier at
the end of a step allows the next step to write the slots again. The price is memory: received
copies all lie in the block at once, where the simulator frees each after its last use.

A stage waits for all that it needs from other devices, runs, and then sends. A device of several
cores runs the groups of a stage at the same time:

    Await x, Await y ── RunLanes ┬ a, b ┬── Send a, Send c
                                 └ c    ┘

Cutting a plan takes O(ops + tensors + reads).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from dovetail.graph import EVERYWHERE, Graph
from dovetail.plans import Plan, Stages, needs_of, normalise, stages_of
from dovetail.runtime.setup import set_up_thread
from dovetail.runtime.shared import ALIGNMENT_BYTES, Block, Layout
from dovetail.units import DTYPE_BYTES

# ── Lanes: the groups of a stage run at the same time, one lane of groups for each core ──────────
#
#     stage  a ─► b   c   d ─► e          groups: ab, c, de
#     lanes  ├─ a ─┤├─ b ─┤├─ c ─┤        on two cores, the longest group first
#            ├─── d ───┤├── e ──┤
#
# Torch keeps its number of threads per thread. `LaneThreads` set theirs to one and never change
# it, so the thread that runs everything else keeps all threads of the device.


Lane = Callable[[], None]


def lanes_of(
    stage: tuple[int, ...], group_of: NDArray[np.int32], seconds: NDArray[np.float64], most: int
) -> tuple[tuple[int, ...], ...]:
    """The ops of each lane when a stage's groups are spread over at most `most` lanes.

    The longest group, by `seconds` [ops], is placed first, and each group goes to the lane with the
    least seconds so far. Groups of equal length are placed in the stage's order. Among lanes of
    equal seconds the one with fewer ops is taken, and then the first one.
    """
    groups: dict[int, list[int]] = {}
    for op in stage:
        groups.setdefault(int(group_of[op]), []).append(op)
    lanes: list[list[int]] = [[] for _ in range(min(most, len(groups)))]
    loads = [(0.0, 0, lane) for lane in range(len(lanes))]  # seconds, ops, index
    for length, group in sorted(
        ((float(seconds[group].sum()), group) for group in groups.values()), key=lambda one: -one[0]
    ):
        loaded, ops, lane = min(loads)
        lanes[lane] += group
        loads[lane] = (loaded + length, ops + len(group), lane)
    return tuple(map(tuple, lanes))


def groups_of(stages: Sequence[Stages], graph: Graph) -> NDArray[np.int32]:
    """[ops] number of the group that each op is in.

    A group is a connected component of a stage: ops that need one another, directly or through
    other ops of the stage.
    """
    stage_of, needs = needs_of(stages, graph)
    # Needs between stages do not connect groups.
    needs = needs[stage_of[needs[:, 0]] == stage_of[needs[:, 1]]]
    ones = np.ones(len(needs))
    matrix = coo_array((ones, (needs[:, 0], needs[:, 1])), shape=(len(graph), len(graph)))
    labels: NDArray[np.int32] = connected_components(matrix, directed=False)[1]
    return labels


class LaneThreads:
    """Runs lanes at the same time, with one thread per lane.

    The threads are started when lanes first need them, and end with the process.
    """

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[Lane]] = []
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, lanes: Sequence[Lane]) -> None:
        """Run the lanes. Once all have ended, raise the first error that one of them raised."""
        while len(self._waiting) < len(lanes):
            queue: SimpleQueue[Lane] = SimpleQueue()
            self._waiting.append(queue)
            Thread(target=self._serve, args=(queue,), daemon=True).start()
        for queue, lane in zip(self._waiting, lanes, strict=False):
            queue.put(lane)
        raised = [error for _ in lanes if (error := self._ended.get()) is not None]
        if raised:
            raise raised[0]

    def _serve(self, queue: SimpleQueue[Lane]) -> None:
        set_up_thread(1)
        with torch.inference_mode():
            while True:
                try:
                    # The lane has no name here, so the thread does not keep it while it waits.
                    queue.get()()
                # Whatever was raised is raised again by `run`, in the thread that waits there.
                except BaseException as error:
                    self._ended.put(error)
                else:
                    self._ended.put(None)


LINE_BYTES = ALIGNMENT_BYTES
"""Bytes of a cache line. Each device's flag of the barrier has a line of its own."""


@dataclass(frozen=True)
class BlockSlot:
    """The place of a tensor in the block: `bytes` bytes from `offset` on.

    `bytes` includes the gaps that the tensor's strides leave.
    """

    offset: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RunOp:
    """Call the op, and then forget the tensors `frees`."""

    op: int
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunLanes:
    """Run all lanes at the same time, the ops of each in order, and then forget `frees`.

    lanes   no lane is empty, and no lane needs what another one makes
    """

    lanes: tuple[tuple[int, ...], ...]
    frees: tuple[int, ...] = ()

    @property
    def op(self) -> int:
        """The first op. If the process dies here, the error names this op."""
        return self.lanes[0][0]


@dataclass(frozen=True)
class SendTensor:
    """Copy `tensor` to its slot for `destination`, publish the flag, and then forget `frees`.

    op       the op that made the tensor
    tensor   -1 stands for a control edge: only the flag is published, because `op` has ended
    """

    op: int
    tensor: int
    destination: int
    flag: int
    slot: BlockSlot | None
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class AwaitFlag:
    """Wait for the flag before `op` runs. Once it is published, `tensor` is in `slot`.

    For a control edge `tensor` is -1 and `slot` is None.
    """

    op: int
    tensor: int
    flag: int
    slot: BlockSlot | None


Instruction = RunOp | RunLanes | SendTensor | AwaitFlag


@dataclass(frozen=True)
class Share:
    """What one device does in a step.

    device, seat    index in the machine; position among the devices that take part
    seats           number of devices that take part
    barrier, abort  offsets in the block of the barrier's flags and of the abort flag
    sources         (tensor, slot) of the sources that the device reads in place, because they live
                    on it or everywhere
    outputs         (tensor, slot) of the graph outputs that the device copies out after the step
    progress        offset of int64 [3]: index of the instruction that was begun last, start and
                    end of the step in ns
    stamps          offset of int64 [instructions, 2]: start and end in ns, written in timed steps
    """

    device: int
    seat: int
    seats: int
    barrier: int
    abort: int
    instructions: tuple[Instruction, ...]
    sources: tuple[tuple[int, BlockSlot], ...]
    outputs: tuple[tuple[int, BlockSlot], ...]
    progress: int
    stamps: int

    @property
    def ops(self) -> list[int]:
        """The ops that the device runs, in order."""
        return [op for i in self.instructions for op in ops_of(i)]


@dataclass(frozen=True)
class Shares:
    """The shares of all devices, and the layout of the block that they have in common.

    abort              offset of the abort flag
    sources, outputs   tensor -> slot
    """

    shares: tuple[Share, ...]
    size_bytes: int
    abort: int
    sources: dict[int, BlockSlot]
    outputs: dict[int, BlockSlot]


def share_out(plan: Plan, graph: Graph) -> Shares:
    """The shares of a plan, which must be one that `plans.check` accepts."""
    stages = stages_of(plan, graph)
    devices = range(len(stages))
    layout = Layout()
    abort, barrier = layout.reserve(8), layout.reserve(LINE_BYTES * len(devices))
    outputs = tuple(dict.fromkeys(graph.outputs.tolist()))
    cut = _InstructionBuilder(plan, graph, stages, layout, outputs)
    lists = [tuple(cut.instructions(device, stages[device])) for device in devices]
    sources = {
        tensor: cut.slot(tensor)
        for op in np.flatnonzero(graph.is_source).tolist()
        for tensor in graph.outputs_of(op)
    }
    copied = {tensor: cut.slot(tensor) for tensor in outputs}
    here = [_sources_read(graph, cut, device, stages[device]) for device in devices]
    owned = [tuple(t for t in copied if cut.home(t) == device) for device in devices]
    # A device that runs nothing and owns no output gets no process.
    seats = [d for d in devices if lists[d] or owned[d]]
    shares = tuple(
        Share(
            device,
            seat,
            len(seats),
            barrier,
            abort,
            lists[device],
            tuple(
                (t, sources[t]) for t in sorted(here[device] | (set(owned[device]) & set(sources)))
            ),
            tuple((t, copied[t]) for t in owned[device]),
            layout.reserve(24),
            layout.reserve(16 * len(lists[device])),
        )
        for seat, device in enumerate(seats)
    )
    return Shares(shares, layout.size_bytes, abort, sources, copied)


class _InstructionBuilder:
    """Builds the instructions of every device and reserves their flags and slots."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        stages: list[Stages],
        layout: Layout,
        outputs: tuple[int, ...],
    ) -> None:
        self.plan = plan
        self.groups = groups_of(stages, graph)
        self.graph = graph
        self.layout = layout
        self.kept = set(outputs)
        self.placement = normalise(plan.placement, graph, plan.machine).tolist()
        self.homes = [
            EVERYWHERE if graph.residences[op] == EVERYWHERE else self.placement[op]
            for op in graph.producers.tolist()
        ]
        self.flags: dict[tuple[int, int, int], tuple[int, BlockSlot | None]] = {}
        # Control edges between devices. after: op -> devices that wait for its end; before: op ->
        # ops elsewhere that it waits for.
        self.after: dict[int, set[int]] = defaultdict(set)
        self.before: dict[int, list[int]] = defaultdict(list)
        for before, op in graph.control.tolist():
            if not graph.is_source[before] and self.placement[before] != self.placement[op]:
                self.after[before].add(self.placement[op])
                self.before[op].append(before)

    def home(self, tensor: int) -> int:
        """The device that makes the tensor; one that reads it, where it lives everywhere."""
        return int(self.placement[self.graph.producers[tensor]])

    def slot(self, tensor: int, slack_bytes: int = 0) -> BlockSlot:
        """A new slot for the tensor, with room for it to start up to `slack_bytes` later."""
        graph = self.graph
        shape, strides, dtype = graph.shapes[tensor], graph.strides[tensor], graph.dtypes[tensor]
        extent = extent_of(shape, strides) * DTYPE_BYTES[dtype]
        return BlockSlot(self.layout.reserve(extent + slack_bytes), extent, shape, strides, dtype)

    def flag(self, op: int, tensor: int, destination: int) -> tuple[int, BlockSlot | None]:
        """(offset of the flag, slot) of a tensor for a destination; -1 stands for the op's end."""
        key = (op, tensor, destination)
        if key not in self.flags:
            # The copy keeps the original's address modulo a cache line: some kernels of BLAS
            # libraries round differently by alignment.
            slot = None if tensor < 0 else self.slot(tensor, slack_bytes=ALIGNMENT_BYTES)
            self.flags[key] = (self.layout.reserve(8), slot)
        return self.flags[key]

    def instructions(self, device: int, stages: Stages) -> list[Instruction]:
        """All instructions of a device: it sends its sources first, then runs stage by stage."""
        graph = self.graph
        instructions: list[Instruction] = []
        for op in np.flatnonzero(graph.is_source).tolist():
            if graph.residences[op] != EVERYWHERE and self.placement[op] == device:
                instructions += self.sends(op)
        arrived: set[int] = set()
        for stage in stages:
            for op in stage:
                instructions += self.waits(device, op, arrived)
            instructions += self.runs(device, stage)
            for op in stage:
                instructions += self.sends(op)
        return self.with_frees(device, instructions)

    def waits(self, device: int, op: int, arrived: set[int]) -> list[Instruction]:
        """The waits before an op: for what it needs from elsewhere and is not in `arrived` yet."""
        instructions: list[Instruction] = []
        for tensor in self.graph.inputs_of(op).tolist():
            home = self.homes[tensor]
            if home not in (device, EVERYWHERE) and tensor not in arrived:
                arrived.add(tensor)
                flag = self.flag(int(self.graph.producers[tensor]), tensor, device)
                instructions.append(AwaitFlag(op, tensor, *flag))
        for before in self.before[op]:
            # `arrived` holds tensors as they are and ops as ~op, so that the two never collide.
            if ~before not in arrived:
                arrived.add(~before)
                instructions.append(AwaitFlag(op, -1, *self.flag(before, -1, device)))
        return instructions

    def runs(self, device: int, stage: tuple[int, ...]) -> list[Instruction]:
        """The calls of a stage: lanes if it has several groups and the device several cores."""
        cores = len(self.plan.machine.devices[device].cores)
        if cores > 1 and len(stage) > 1:
            seconds = self.plan.compute_seconds[:, device]
            lanes = lanes_of(stage, self.groups, seconds, cores)
            if len(lanes) > 1:
                return [RunLanes(lanes)]
        return [RunOp(op) for op in stage]

    def sends(self, op: int) -> list[Instruction]:
        """The sends after an op.

        First its outputs go to each device that reads them. Then each device that waits for the
        op's end gets a flag.
        """
        instructions: list[Instruction] = []
        for tensor in self.graph.outputs_of(op):
            readers = {self.placement[c] for c in self.graph.consumers_of(tensor).tolist()}
            for to in sorted(readers - {self.placement[op]}):
                instructions.append(SendTensor(op, tensor, to, *self.flag(op, tensor, to)))
        for to in sorted(self.after[op]):
            instructions.append(SendTensor(op, -1, to, *self.flag(op, -1, to)))
        return instructions

    def with_frees(self, device: int, instructions: list[Instruction]) -> list[Instruction]:
        """The same instructions, which forget each tensor made here after its last use."""
        graph = self.graph
        last: dict[int, int] = {}
        for index, instruction in enumerate(instructions):
            used = [instruction.tensor] if isinstance(instruction, SendTensor) else []
            for op in ops_of(instruction):
                used += [*graph.inputs_of(op).tolist(), *graph.outputs_of(op)]
            last |= dict.fromkeys(used, index)
        frees: dict[int, list[int]] = defaultdict(list)
        for tensor, index in last.items():
            # Sources stay in the block, and graph outputs are copied out after the step.
            lasting = tensor < 0 or graph.is_source[graph.producers[tensor]] or tensor in self.kept
            if not lasting and self.homes[tensor] == device:
                frees[index].append(tensor)
        return [
            instruction
            if index not in frees or isinstance(instruction, AwaitFlag)
            else replace(instruction, frees=tuple(frees[index]))
            for index, instruction in enumerate(instructions)
        ]


def ops_of(instruction: Instruction) -> tuple[int, ...]:
    """The ops that the instruction calls."""
    match instruction:
        case RunOp(op=op):
            return (op,)
        case RunLanes(lanes=lanes):
            return tuple(chain.from_iterable(lanes))
    return ()


def _sources_read(graph: Graph, cut: _InstructionBuilder, device: int, stages: Stages) -> set[int]:
    """Tensors of the sources that the device needs in place.

    These are sources that live on it, and sources that live everywhere and are read on it.
    """
    ops = chain.from_iterable(stages)
    read = {int(tensor) for op in ops for tensor in graph.inputs_of(op)}
    return {
        tensor
        for op in np.flatnonzero(graph.is_source).tolist()
        for tensor in graph.outputs_of(op)
        if cut.homes[tensor] == device or (cut.homes[tensor] == EVERYWHERE and tensor in read)
    }


def extent_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements from a tensor's first to its last one, gaps included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def tensor_at(block: Block, slot: BlockSlot, skew_bytes: int = 0) -> Tensor:
    """A tensor over the slot's memory, which starts `skew_bytes` into the slot.

    Each tensor has a torch storage of its own, because some ops address the storage from its start.
    """
    memory = block.view(slot.offset + skew_bytes, (slot.bytes,), np.uint8)
    flat = torch.from_numpy(memory).view(getattr(torch, slot.dtype))
    return flat.as_strided(slot.shape, slot.strides)


def distinct(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The part of a tensor laid out by `strides` that has each element in memory once.

    Dimensions of stride 0 (expanded ones) are cut to length one, because torch refuses to write to
    a tensor that has one element in several places.
    """
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
