"""A plan's shares: for each device's process, the flat list of instructions of one step.

    device 0                          device 1
    Run a                             Await x      flag of (x, device 1) ≥ this step
    Send x -> 1   ── slot of x ──►    Run b        reads the slot itself, nothing is copied again
    Run c         ◄── flag only ──    Send -> 0    a control edge

Sources that live on one device and are read on others are sent as the step begins. Every (tensor,
destination) has its own flag and slot, so nothing waits for a slot to become free; the barrier at
the end of a step lets the next one write. The price is memory: received copies, which the
simulator frees after their last use, all stand in the block at once.

A stage waits for all it needs from other devices, runs, and then sends. Where a device has cores
for it, the groups of a stage run at the same time:

    Await x, Await y ── RunLanes ┬ a, b ┬── Send a, Send c
                                 └ c    ┘

Takes O(ops + tensors + reads).
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
# Torch's number of threads is a setting of each thread: `LaneThreads` give each op one thread and
# never change that, so the thread that runs everything else keeps all threads of the device.


Lane = Callable[[], None]


def lanes_of(
    stage: tuple[int, ...], group_of: NDArray[np.int32], seconds: NDArray[np.float64], most: int
) -> tuple[tuple[int, ...], ...]:
    """The groups of a stage spread over at most `most` lanes: the longest first, by `seconds`
    [ops], each to the lane that has least. Equals go by the stage's order, to the first lane."""
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
    """[ops] which group each is in: a connected component of its stage, by what its ops need of
    one another."""
    stage_of, needs = needs_of(stages, graph)
    needs = needs[stage_of[needs[:, 0]] == stage_of[needs[:, 1]]]
    ones = np.ones(len(needs))
    matrix = coo_array((ones, (needs[:, 0], needs[:, 1])), shape=(len(graph), len(graph)))
    labels: NDArray[np.int32] = connected_components(matrix, directed=False)[1]
    return labels


class LaneThreads:
    """Threads that run lanes at the same time, one a lane. They start with the first lanes that
    need them, and end with the process."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[Lane]] = []
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, lanes: Sequence[Lane]) -> None:
        """Run the lanes; once all have ended, raise what one of them has raised."""
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
                    queue.get()()  # and keep nothing of it
                except BaseException as error:  # the thread that waits raises it
                    self._ended.put(error)
                else:
                    self._ended.put(None)


LINE_BYTES = ALIGNMENT_BYTES


@dataclass(frozen=True)
class BlockSlot:
    """Where a tensor lies in the block: `bytes` from `offset` on, gaps of its strides included."""

    offset: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RunOp:
    """Call the op; then forget tensors `frees`."""

    op: int
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunLanes:
    """Call the ops of each lane one after another, all lanes at the same time; then forget `frees`.

    lanes   none empty, and none needs what another makes
    """

    lanes: tuple[tuple[int, ...], ...]
    frees: tuple[int, ...] = ()

    @property
    def op(self) -> int:
        """The first, in whose name its process dies."""
        return self.lanes[0][0]


@dataclass(frozen=True)
class SendTensor:
    """Copy `tensor` to its slot for `destination` and raise the flag; then forget `frees`.

    tensor -1: a control edge, the flag alone. `op` made the tensor, or has ended.
    """

    op: int
    tensor: int
    destination: int
    flag: int
    slot: BlockSlot | None
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class AwaitFlag:
    """Before `op`, wait for the flag; then `tensor` is in `slot` (-1, None: a control edge)."""

    op: int
    tensor: int
    flag: int
    slot: BlockSlot | None


Instruction = RunOp | RunLanes | SendTensor | AwaitFlag


@dataclass(frozen=True)
class Share:
    """One device's part.

    device, seat    index in the machine; position among the devices that take part
    sources         (tensor, slot) that it reads in place: what lives here, or everywhere
    outputs         (tensor, slot) that it copies out after the step
    progress        offset of int64 [3]: instruction begun, start and end of the step in ns
    stamps          offset of int64 [instructions, 2]: start and end in ns, of timed steps
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
        """The ops it runs, in order."""
        return [op for i in self.instructions for op in ops_of(i)]


@dataclass(frozen=True)
class Shares:
    """What every device does, and the shared block that they need.

    sources, outputs   tensor -> slot
    """

    shares: tuple[Share, ...]
    size_bytes: int
    abort: int
    sources: dict[int, BlockSlot]
    outputs: dict[int, BlockSlot]


def share_out(plan: Plan, graph: Graph) -> Shares:
    """Cut the program along the plan, which must be one that `plans.check` accepts."""
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
    """Builds the instructions of every device, and hands out flags and slots for them."""

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
        self.after: dict[int, set[int]] = defaultdict(set)  # op -> devices that wait for its end
        self.before: dict[int, list[int]] = defaultdict(list)
        for before, op in graph.control.tolist():
            if not graph.is_source[before] and self.placement[before] != self.placement[op]:
                self.after[before].add(self.placement[op])
                self.before[op].append(before)

    def home(self, tensor: int) -> int:
        """The device where the tensor is made; of what lives everywhere, a reader of it."""
        return int(self.placement[self.graph.producers[tensor]])

    def slot(self, tensor: int, slack_bytes: int = 0) -> BlockSlot:
        """A fresh slot for the tensor, which may start up to `slack_bytes` later."""
        graph = self.graph
        shape, strides, dtype = graph.shapes[tensor], graph.strides[tensor], graph.dtypes[tensor]
        extent = extent_of(shape, strides) * DTYPE_BYTES[dtype]
        return BlockSlot(self.layout.reserve(extent + slack_bytes), extent, shape, strides, dtype)

    def flag(self, op: int, tensor: int, destination: int) -> tuple[int, BlockSlot | None]:
        """Flag and slot of the tensor, or of the op's end (tensor -1), for the destination."""
        key = (op, tensor, destination)
        if key not in self.flags:
            # The copy keeps the original's address modulo a cache line: some kernels of BLAS
            # libraries round differently by alignment.
            slot = None if tensor < 0 else self.slot(tensor, slack_bytes=ALIGNMENT_BYTES)
            self.flags[key] = (self.layout.reserve(8), slot)
        return self.flags[key]

    def instructions(self, device: int, stages: Stages) -> list[Instruction]:
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
        """The waits before an op: for what it needs from other devices and has not `arrived`."""
        instructions: list[Instruction] = []
        for tensor in self.graph.inputs_of(op).tolist():
            home = self.homes[tensor]
            if home not in (device, EVERYWHERE) and tensor not in arrived:
                arrived.add(tensor)
                flag = self.flag(int(self.graph.producers[tensor]), tensor, device)
                instructions.append(AwaitFlag(op, tensor, *flag))
        for before in self.before[op]:
            if ~before not in arrived:
                arrived.add(~before)
                instructions.append(AwaitFlag(op, -1, *self.flag(before, -1, device)))
        return instructions

    def runs(self, device: int, stage: tuple[int, ...]) -> list[Instruction]:
        """The ops of a stage: its groups together, if there are several and cores for them."""
        cores = len(self.plan.machine.devices[device].cores)
        if cores > 1 and len(stage) > 1:
            seconds = self.plan.compute_seconds[:, device]
            lanes = lanes_of(stage, self.groups, seconds, cores)
            if len(lanes) > 1:
                return [RunLanes(lanes)]
        return [RunOp(op) for op in stage]

    def sends(self, op: int) -> list[Instruction]:
        """The sends after an op: its outputs to each device that reads them, then flags of its end
        for the devices that wait for it."""
        instructions: list[Instruction] = []
        for tensor in self.graph.outputs_of(op):
            readers = {self.placement[c] for c in self.graph.consumers_of(tensor).tolist()}
            for to in sorted(readers - {self.placement[op]}):
                instructions.append(SendTensor(op, tensor, to, *self.flag(op, tensor, to)))
        for to in sorted(self.after[op]):
            instructions.append(SendTensor(op, -1, to, *self.flag(op, -1, to)))
        return instructions

    def with_frees(self, device: int, instructions: list[Instruction]) -> list[Instruction]:
        """The same, each tensor made here forgotten after the last instruction that needs it."""
        graph = self.graph
        last: dict[int, int] = {}
        for index, instruction in enumerate(instructions):
            used = [instruction.tensor] if isinstance(instruction, SendTensor) else []
            for op in ops_of(instruction):
                used += [*graph.inputs_of(op).tolist(), *graph.outputs_of(op)]
            last |= dict.fromkeys(used, index)
        frees: dict[int, list[int]] = defaultdict(list)
        for tensor, index in last.items():
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
    """The ops that it calls."""
    match instruction:
        case RunOp(op=op):
            return (op,)
        case RunLanes(lanes=lanes):
            return tuple(chain.from_iterable(lanes))
    return ()


def _sources_read(graph: Graph, cut: _InstructionBuilder, device: int, stages: Stages) -> set[int]:
    """Tensors of sources that the device needs in place: those that live here, or are read here
    and live everywhere."""
    ops = chain.from_iterable(stages)
    read = {int(tensor) for op in ops for tensor in graph.inputs_of(op)}
    return {
        tensor
        for op in np.flatnonzero(graph.is_source).tolist()
        for tensor in graph.outputs_of(op)
        if cut.homes[tensor] == device or (cut.homes[tensor] == EVERYWHERE and tensor in read)
    }


def extent_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from a tensor's first to its last, gaps included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def tensor_at(block: Block, slot: BlockSlot, skew_bytes: int = 0) -> Tensor:
    """The slot as a tensor of its shape and strides, `skew_bytes` into the slot.

    Each has a torch storage of its own, as ops that address storage expect.
    """
    memory = block.view(slot.offset + skew_bytes, (slot.bytes,), np.uint8)
    flat = torch.from_numpy(memory).view(getattr(torch, slot.dtype))
    return flat.as_strided(slot.shape, slot.strides)


def distinct(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The part of the tensor that holds all its elements, if it is laid out by `strides`.

    Dimensions of stride 0 (expanded ones) are cut to one: torch refuses to write the whole.
    """
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
