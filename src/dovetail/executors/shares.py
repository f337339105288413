"""Cuts a plan into shares: the flat list of instructions that each device's process runs per step
(`frontends.instructions`).

    device 0                              device 1
    RunOp a                               AwaitFlag x       flag of (x, device 1) ≥ this step
    SendTensor x -> 1  ── slot of x ──►   RunOp b           reads the slot itself, with no copy
    RunOp c            ◄── flag only ──   SendTensor -> 0   a control edge

Sources that live on one device and are read on others are sent as the step begins. Every (tensor,
destination) has its own flag and slot, so nothing waits for a slot to become free. The barrier at
the end of a step allows the next step to write the slots again. The price is memory: received
copies all lie in the block at once, where the simulator frees each after its last use.

A stage waits for all that it needs from other devices, runs, and then sends. A device of several
cores runs the groups of a stage at the same time:

    AwaitFlag x, y ── RunLanes ┬ a, b ┬── SendTensor a, c
                               └ c    ┘

All GPUs have one process (`executors.gpus`). Between two of them nothing goes through the block. A
source that lives on a CPU is read from the block by the GPU itself, so no CPU sends it.

Cutting a plan takes O(ops + tensors + reads).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from dovetail.frontends.fused import FusedCall
from dovetail.frontends.instructions import (
    INT64_BYTES,
    LAID,
    SKEW,
    AwaitFlag,
    BlockSlot,
    Instruction,
    ReadSource,
    RunCompiled,
    RunLanes,
    RunOp,
    RunUpdates,
    SendTensor,
    ops_of,
    strides_offset,
)
from dovetail.frontends.program import Program
from dovetail.graph import EVERYWHERE, Graph, Phase
from dovetail.plans import Plan, Stages, needs_of, normalise, stages_of
from dovetail.runtime.shared import ALIGNMENT_BYTES, Block, Layout

LINE_BYTES = ALIGNMENT_BYTES
"""Bytes of a cache line. Each device's flag of the barrier has a line of its own."""


GPU_LANES = 8
"""The groups of a stage run on at most so many streams of a GPU, as schedules are measured there
(`executors.stages.cuda`)."""
NOT_IN_BLOCK = -1
"""The offset of the slot of a tensor that goes from one GPU to another."""


@dataclass(frozen=True)
class Share:
    """The work of one device in a step.

    device     index in the machine
    seat       position among the processes that take part; `seats` is the number of these. All GPUs
               have one process
    barrier    offset in the block of the barrier's flags
    abort      offset in the block of the abort flag
    sources    (tensor, slot) of the sources that the device reads in place, because they live on
               it or everywhere
    outputs    (tensor, slot) of the graph outputs that the device copies out after the step
    progress   offset of int64 [3]: index of the instruction that was begun last, start and end of
               the step in ns
    stamps     offset of int64 [instructions, 2]: start and end in ns, written in timed steps
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

    abort, barrier     offsets of the abort flag and of the barrier's flags
    sources, outputs   tensor -> slot
    """

    shares: tuple[Share, ...]
    size_bytes: int
    abort: int
    barrier: int
    sources: dict[int, BlockSlot]
    outputs: dict[int, BlockSlot]


def share_out(
    plan: Plan, graph: Graph, program: Program | None = None, ranks: Sequence[int] | None = None
) -> Shares:
    """The shares of a plan, which must be one that `plans.check` accepts. Nothing runs compiled
    without the step's program.

    ranks   [devices] the rank that runs each device, of a run on several hosts. Each rank has a
            block of its own with this layout, of which it uses its part, and one seat more, which
            is its bridge's to the other ranks (`executors.hosts`)
    """
    stages = stages_of(plan, graph)
    devices = range(len(stages))
    layout = Layout()
    abort, barrier = layout.reserve(INT64_BYTES), layout.reserve(LINE_BYTES * (len(devices) + 1))
    outputs = tuple(dict.fromkeys(graph.outputs.tolist()))
    builder = _InstructionBuilder(plan, graph, stages, layout, outputs, program, ranks)
    source_slots = builder.source_slots
    instructions = [tuple(builder.instructions(device, stages[device])) for device in devices]
    output_slots = {
        # A host that runs nothing has no process, which could copy a source.
        tensor: source_slots[tensor] if builder.is_on_host(tensor) else builder.slot(tensor)
        for tensor in outputs
    }
    copied_out = [
        tuple(
            tensor
            for tensor in outputs
            if builder.producing_device(tensor) == device and not builder.is_on_host(tensor)
        )
        for device in devices
    ]
    # A source may be a graph output, too. The device that copies it out reads it in place.
    in_place = [
        builder.sources_in_place(device, stages[device])
        | (set(copied_out[device]) & set(source_slots))
        for device in devices
    ]
    # A device that runs nothing and copies no output gets no process.
    seated = [device for device in devices if instructions[device] or copied_out[device]]
    processes: dict[int, list[int]] = defaultdict(list)  # of each rank, which have its seats
    for device in seated:
        of_rank = processes[builder.ranks[device]]
        if builder.process_of(device) not in of_rank:
            of_rank.append(builder.process_of(device))
    bridges = 0 if ranks is None else 1
    shares = tuple(
        Share(
            device=device,
            seat=processes[builder.ranks[device]].index(builder.process_of(device)),
            seats=len(processes[builder.ranks[device]]) + bridges,
            barrier=barrier,
            abort=abort,
            instructions=instructions[device],
            sources=tuple((tensor, source_slots[tensor]) for tensor in sorted(in_place[device])),
            outputs=tuple((tensor, output_slots[tensor]) for tensor in copied_out[device]),
            progress=layout.reserve(3 * INT64_BYTES),
            stamps=layout.reserve(2 * INT64_BYTES * len(instructions[device])),
        )
        for device in seated
    )
    return Shares(shares, layout.size_bytes, abort, barrier, source_slots, output_slots)


class _InstructionBuilder:
    """Builds the instructions of every device and reserves their flags and slots.

    groups           [ops] number of the group of its stage that each op is in
    placement        [ops] device of each, also of sources
    homes            [tensors] the device where each lives, or EVERYWHERE
    flags            (op, tensor or -1, destination) -> (offset of the flag, slot)
    control_targets  op -> the other devices where ops wait for its end by control edges
    control_before   op -> the ops on other devices that it waits for by control edges
    ranks            [devices] rank that runs each; all are of rank 0 in a run on one host
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        stages: list[Stages],
        layout: Layout,
        outputs: tuple[int, ...],
        program: Program | None,
        ranks: Sequence[int] | None,
    ) -> None:
        self.plan = plan
        self.ranks = ranks or [0] * len(plan.machine.devices)
        self.program = program
        self.compiled = compiled_stages(plan) if program is not None else set()
        self.graph = graph
        self.layout = layout
        self.outputs = set(outputs)
        self.groups = groups_of(stages, graph)
        self.placement = normalise(plan.placement, graph, plan.machine).tolist()
        self.homes = [
            EVERYWHERE if graph.residences[op] == EVERYWHERE else self.placement[op]
            for op in graph.producers.tolist()
        ]
        self.on_gpu = [device.kind == "gpu" for device in plan.machine.devices]
        self.flags: dict[tuple[int, int, int], tuple[int, BlockSlot | None]] = {}
        self.source_slots = {
            tensor: self.slot(tensor)
            for op in np.flatnonzero(graph.is_source).tolist()
            for tensor in graph.outputs_of(op)
        }
        self.control_targets: dict[int, set[int]] = defaultdict(set)
        self.control_before: dict[int, list[int]] = defaultdict(list)
        for before, op in graph.control.tolist():
            if not graph.is_source[before] and self.placement[before] != self.placement[op]:
                self.control_targets[before].add(self.placement[op])
                self.control_before[op].append(before)

    def producing_device(self, tensor: int) -> int:
        """The device that makes the tensor; of one that lives everywhere, a device that reads
        it."""
        return int(self.placement[self.graph.producers[tensor]])

    def is_on_host(self, tensor: int) -> bool:
        """True for a source that lives on a host that runs nothing."""
        return self.plan.machine.devices[self.producing_device(tensor)].kind == "host"

    def process_of(self, device: int) -> int:
        """The device whose process runs this one's share: that of the rank's first GPU for all of
        its GPUs."""
        if not self.on_gpu[device]:
            return device
        return next(
            other
            for other, on_gpu in enumerate(self.on_gpu)
            if on_gpu and self.ranks[other] == self.ranks[device]
        )

    def is_read_from_block(self, op: int, destination: int) -> bool:
        """True if a GPU reads the op's tensors from the block by itself: those of a source of its
        host that does not live on a GPU."""
        home = self.placement[op]
        return bool(
            self.graph.is_source[op]
            and self.on_gpu[destination]
            and not self.on_gpu[home]
            and self.ranks[destination] == self.ranks[home]
        )

    def sources_in_place(self, device: int, stages: Stages) -> set[int]:
        """Tensors of the sources that the device needs in place.

        These are sources that live on it, and sources that live everywhere and are read on it.
        """
        graph = self.graph
        ops = chain.from_iterable(stages)
        read = {int(tensor) for op in ops for tensor in graph.inputs_of(op)}
        return {
            tensor
            for op in np.flatnonzero(graph.is_source).tolist()
            for tensor in graph.outputs_of(op)
            if self.homes[tensor] == device or (self.homes[tensor] == EVERYWHERE and tensor in read)
        }

    def slot(self, tensor: int, *, is_sent: bool = False, in_block: bool = True) -> BlockSlot:
        """A new slot for the tensor."""
        graph = self.graph
        shape, strides, dtype = graph.shapes[tensor], graph.strides[tensor], graph.dtypes[tensor]
        extent_bytes = extent_of(shape, strides) * getattr(torch, dtype).itemsize
        slot = BlockSlot(NOT_IN_BLOCK, extent_bytes, shape, strides, dtype)
        if not in_block:
            return slot
        return replace(slot, offset=self.layout.reserve(slot.sent_bytes if is_sent else slot.bytes))

    def flag_and_slot(self, op: int, tensor: int, destination: int) -> tuple[int, BlockSlot | None]:
        """(offset of the flag, slot) of a tensor of the op for a destination. The same pair is
        returned to the sender and to the receiver. Tensor -1 stands for the op's end, which has no
        slot."""
        key = (op, tensor, destination)
        if key not in self.flags:
            # Between GPUs of one host nothing goes through the block.
            home = self.placement[op]
            in_block = (
                not (self.on_gpu[home] and self.on_gpu[destination])
                or self.ranks[home] != self.ranks[destination]
            )
            slot = None
            if tensor >= 0:
                slot = self.slot(tensor, is_sent=True, in_block=in_block)
            self.flags[key] = (self.layout.reserve(INT64_BYTES), slot)
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
                producer = int(self.graph.producers[tensor])
                if self.is_read_from_block(producer, device):
                    place, home = self.source_slots[tensor], self.placement[producer]
                    instructions.append(ReadSource(op, tensor, place, home, producer))
                    continue
                flag, slot = self.flag_and_slot(producer, tensor, device)
                instructions.append(AwaitFlag(op, tensor, flag, slot, self.placement[producer]))
        for before in self.control_before[op]:
            # `arrived` holds tensors as they are and ops as ~op, so that the two never collide.
            if ~before not in arrived:
                arrived.add(~before)
                flag, slot = self.flag_and_slot(before, -1, device)
                instructions.append(AwaitFlag(op, -1, flag, slot, self.placement[before]))
        return instructions

    def runs(self, device: int, stage: tuple[int, ...]) -> list[Instruction]:
        """The calls of a stage: lanes if it has several groups and the device several cores, or is
        a GPU."""
        lanes_at_most = len(self.plan.machine.devices[device].cores)
        if self.on_gpu[device]:
            lanes_at_most = GPU_LANES
        if (device, stage) in self.compiled:
            if self.graph.phases[stage[0]] == Phase.UPDATE:
                return [RunUpdates(stage)]
            assert self.program is not None, "without it nothing is compiled"
            fused, places = FusedCall.of(self.graph, self.program, stage)
            threads = self.plan.machine.devices[device].op_threads
            return [RunCompiled(stage, fused.key, threads, places.inputs, places.outputs)]
        if lanes_at_most > 1 and len(stage) > 1:
            seconds = self.plan.compute_seconds[:, device]
            lanes = lanes_of(stage, self.groups, seconds, lanes_at_most)
            if len(lanes) > 1:
                return [RunLanes(tuple(tuple(map(RunOp, lane)) for lane in lanes))]
        return [RunOp(op) for op in stage]

    def sends(self, op: int) -> list[Instruction]:
        """The sends after an op.

        First its outputs go to each device that reads them. Then each device that waits for the
        op's end gets a flag.
        """
        instructions: list[Instruction] = []
        for tensor in self.graph.outputs_of(op):
            consumers = self.graph.consumers_of(tensor).tolist()
            readers = {self.placement[consumer] for consumer in consumers}
            for device in sorted(readers - {self.placement[op]}):
                if self.is_read_from_block(op, device):
                    continue
                flag, slot = self.flag_and_slot(op, tensor, device)
                instructions.append(SendTensor(op, tensor, device, flag, slot))
        for device in sorted(self.control_targets[op]):
            flag, slot = self.flag_and_slot(op, -1, device)
            instructions.append(SendTensor(op, -1, device, flag, slot))
        return instructions

    def with_frees(self, device: int, instructions: list[Instruction]) -> list[Instruction]:
        """The same instructions, which forget each tensor made here after its last use."""
        graph = self.graph
        last_use: dict[int, int] = {}  # tensor -> index of an instruction
        for index, instruction in enumerate(instructions):
            used = [instruction.tensor] if isinstance(instruction, SendTensor) else []
            for op in ops_of(instruction):
                used += [*graph.inputs_of(op).tolist(), *graph.outputs_of(op)]
            last_use |= dict.fromkeys(used, index)
        frees: dict[int, list[int]] = defaultdict(list)
        for tensor, index in last_use.items():
            # A control edge (-1) is no tensor. Sources stay in the block, graph outputs are copied
            # out after the step, and what other devices have made stays in its slot.
            if tensor < 0 or graph.is_source[graph.producers[tensor]] or tensor in self.outputs:
                continue
            if self.homes[tensor] == device:
                frees[index].append(tensor)
        with_frees = list(instructions)
        for index, tensors in frees.items():
            instruction = instructions[index]
            assert not isinstance(instruction, (AwaitFlag, ReadSource)), "waits use no tensor"
            with_frees[index] = replace(instruction, frees=tuple(tensors))
        return with_frees


def compiled_stages(plan: Plan) -> set[tuple[int, tuple[int, ...]]]:
    """(device, ops) of each stage that runs as compiled code."""
    return {
        (device, stage.ops)
        for device, schedule in enumerate(plan.schedules or ())
        for stage in (schedule.stages if schedule is not None else ())
        if stage.compiled
    }


def most_bytes(share: Share, graph: Graph, program: Program) -> int:
    """The most bytes that a GPU holds for tensors in a step: its sources and a place for each
    tensor that arrives, all step long, and what its ops make until it is freed. As graphs hold them
    for good, so are tensors that are sent, and those that random ops read or make."""
    lasting = {tensor: slot.bytes for tensor, slot in share.sources}
    for instruction in share.instructions:
        if isinstance(instruction, AwaitFlag | ReadSource) and instruction.slot is not None:
            lasting[instruction.tensor] = instruction.slot.bytes
    there = {int(graph.storages[tensor]) for tensor in lasting}
    # Storages that graphs hold for good.
    held: set[int] = set()
    for instruction in share.instructions:
        if isinstance(instruction, SendTensor) and instruction.tensor >= 0:
            held.add(int(graph.storages[instruction.tensor]))
        for op in program.random_ops.intersection(ops_of(instruction)):
            touched = (*graph.inputs_of(op).tolist(), *graph.outputs_of(op))
            held.update(int(graph.storages[tensor]) for tensor in touched)
    alive: dict[int, set[int]] = {}  # storage -> its tensors that are not freed yet
    sizes: dict[int, int] = {}
    now = most = 0
    for instruction in share.instructions:
        made = [tensor for op in ops_of(instruction) for tensor in graph.outputs_of(op)]
        for tensor, storage in zip(made, graph.storages[made].tolist(), strict=True):
            if storage not in alive and storage not in there:
                # Memory is made by the first tensor of a storage; the others are views of it.
                sizes[storage] = int(graph.tensor_bytes[tensor])
                now += sizes[storage]
            if storage not in there:
                alive.setdefault(storage, set()).add(tensor)
        most = max(most, now)
        frees = getattr(instruction, "frees", ())
        for tensor, storage in zip(frees, graph.storages[list(frees)].tolist(), strict=True):
            if storage in alive and storage not in held:
                alive[storage].discard(tensor)
                if not alive[storage]:
                    del alive[storage]
                    now -= sizes[storage]
    return sum(lasting.values()) + most


# ── Lanes: the groups of a stage run at the same time, one lane of groups for each core ──────────
#
#     stage  a ─► b   c   d ─► e          groups: ab, c, de
#     lanes  ├─ a ─┤├─ b ─┤├─ c ─┤        on two cores, the longest group first
#            ├─── d ───┤├── e ──┤


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
    # The tuples (seconds, ops, index) of lanes compare as the docstring says, and sorting keeps the
    # stage's order among groups of equal length.
    loads = [(0.0, 0, lane) for lane in range(len(lanes))]
    timed = [(float(seconds[group].sum()), group) for group in groups.values()]
    for group_seconds, group in sorted(timed, key=lambda pair: -pair[0]):
        lane_seconds, lane_ops, lane = min(loads)
        lanes[lane] += group
        loads[lane] = (lane_seconds + group_seconds, lane_ops + len(group), lane)
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


# ── Tensors in the block ─────────────────────────────────────────────────────────────────────────


def extent_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements from a tensor's first to its last one, gaps included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def tensor_at(block: Block, slot: BlockSlot, mark: int = 0) -> Tensor:
    """A tensor over the slot's memory; a sent one has this mark.

    Each tensor has a torch storage of its own, because some ops address the storage from its start.
    """
    memory = block.view(slot.offset + (mark & SKEW), (slot.bytes,), np.uint8)
    flat = torch.from_numpy(memory).view(getattr(torch, slot.dtype))
    return flat.as_strided(slot.shape, strides_at(block, slot, mark))


def strides_at(block: Block, slot: BlockSlot, mark: int) -> tuple[int, ...]:
    """The strides of the tensor of this mark in the slot."""
    if not mark & LAID:
        return slot.strides
    place = slot.offset + strides_offset(slot.bytes)
    return tuple(block.view(place, (len(slot.shape),), np.int64).tolist())
