"""A plan's shares: what each device's process does in one step, as flat lists of instructions.

    device 0                          device 1
    Run a                             Wait x       flag of (x, device 1) ≥ this step
    Send x -> 1   ── slot of x ──►    Run b        reads the slot itself, nothing is copied again
    Run c         ◄── flag only ──    Send -> 0    a control edge

Sources that live on one device and are read on others are sent as the step begins. Every (tensor,
destination) has its own flag and slot, so nothing waits for a slot to become free; the barrier at
the end of a step lets the next one write. The price is memory: received copies, which the
simulator frees after their last use, all stand in the block at once.

Takes O(ops + tensors + reads).
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from dovetail.errors import OrderError
from dovetail.graph import EVERYWHERE, Graph
from dovetail.plans import Plan, normalise
from dovetail.runtime.shared import ALIGNMENT_BYTES, Layout
from dovetail.units import DTYPE_BYTES

LINE_BYTES = ALIGNMENT_BYTES


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the block: `bytes` from `offset` on, gaps of its strides included."""

    offset: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Run:
    """Call the op; then forget tensors `frees`."""

    op: int
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class Send:
    """Copy `tensor` to its slot for `destination` and raise the flag; then forget `frees`.

    tensor -1: a control edge, the flag alone. `op` made the tensor, or has ended.
    """

    op: int
    tensor: int
    destination: int
    flag: int
    slot: Slot | None
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Before `op`, wait for the flag; then `tensor` is in `slot` (-1, None: a control edge)."""

    op: int
    tensor: int
    flag: int
    slot: Slot | None


Instruction = Run | Send | Wait


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
    sources: tuple[tuple[int, Slot], ...]
    outputs: tuple[tuple[int, Slot], ...]
    progress: int
    stamps: int

    @property
    def ops(self) -> list[int]:
        """The ops it runs, in order."""
        return [i.op for i in self.instructions if isinstance(i, Run)]


@dataclass(frozen=True)
class Shares:
    """What every device does, and the shared block that they need.

    sources, outputs   tensor -> slot
    """

    shares: tuple[Share, ...]
    size_bytes: int
    abort: int
    sources: dict[int, Slot]
    outputs: dict[int, Slot]


def share_out(plan: Plan, graph: Graph) -> Shares:
    """Cut the program along the plan. Raises `OrderError` if the orders cannot complete."""
    orders = orders_of(plan, graph)
    check_completes(plan, graph, orders)
    layout = Layout()
    abort, barrier = layout.reserve(8), layout.reserve(LINE_BYTES * len(orders))
    outputs = tuple(dict.fromkeys(graph.outputs.tolist()))
    cut = _Cut(plan, graph, layout, outputs)
    lists = [tuple(cut.instructions(device, order)) for device, order in enumerate(orders)]
    sources = {
        tensor: cut.slot(tensor)
        for op in np.flatnonzero(graph.is_source).tolist()
        for tensor in graph.outputs_of(op)
    }
    copied = {tensor: cut.slot(tensor) for tensor in outputs}
    here = [_sources_read(graph, cut, device, order) for device, order in enumerate(orders)]
    owned = [tuple(t for t in copied if cut.home(t) == device) for device in range(len(orders))]
    seats = [d for d in range(len(orders)) if lists[d] or owned[d]]
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


def orders_of(plan: Plan, graph: Graph) -> list[tuple[int, ...]]:
    """Per device its ops in running order; by index where the plan says nothing."""
    orders = []
    for device in range(len(plan.machine.devices)):
        schedule = plan.schedules[device] if plan.schedules else None
        if schedule is not None:
            orders.append(tuple(op for stage in schedule.stages for op in stage.ops))
        elif plan.orders is not None:
            orders.append(plan.orders[device])
        else:
            here = (plan.placement == device) & ~graph.is_source
            orders.append(tuple(np.flatnonzero(here).tolist()))
    return orders


def check_completes(plan: Plan, graph: Graph, orders: list[tuple[int, ...]]) -> None:
    """Raise `OrderError` if devices that run their orders would wait for each other for ever."""
    after: list[list[int]] = [
        [op for tensor in graph.outputs_of(before) for op in graph.consumers_of(tensor).tolist()]
        for before in range(len(graph))
    ]
    chains = [pair for order in orders for pair in pairwise(order)]
    for before, op in [*graph.control.tolist(), *chains]:
        after[before].append(op)
    missing = [0] * len(graph)
    for op in chain.from_iterable(after):
        missing[op] += 1
    able = [op for op, count in enumerate(missing) if count == 0]
    while able:
        for op in after[able.pop()]:
            missing[op] -= 1
            if missing[op] == 0:
                able.append(op)
    for name, order in zip(plan.machine.device_names, orders, strict=True):
        stuck = next((op for op in order if missing[op]), None)
        if stuck is not None:
            waits = f"op {graph.names[stuck]!r} would wait for ever"
            raise OrderError(name, f"cannot complete: {waits}")


class _Cut:
    """Finds the instructions of every device; hands out flags and slots on the way."""

    def __init__(self, plan: Plan, graph: Graph, layout: Layout, outputs: tuple[int, ...]) -> None:
        self.graph = graph
        self.layout = layout
        self.kept = set(outputs)
        self.placement = normalise(plan.placement, graph, plan.machine).tolist()
        self.homes = [
            EVERYWHERE if graph.residences[op] == EVERYWHERE else self.placement[op]
            for op in graph.producers.tolist()
        ]
        self.flags: dict[tuple[int, int, int], tuple[int, Slot | None]] = {}
        self.after: dict[int, set[int]] = defaultdict(set)  # op -> devices that wait for its end
        self.before: dict[int, list[int]] = defaultdict(list)
        for before, op in graph.control.tolist():
            if not graph.is_source[before] and self.placement[before] != self.placement[op]:
                self.after[before].add(self.placement[op])
                self.before[op].append(before)

    def home(self, tensor: int) -> int:
        """The device where the tensor is made; of what lives everywhere, a reader of it."""
        return int(self.placement[self.graph.producers[tensor]])

    def slot(self, tensor: int, slack_bytes: int = 0) -> Slot:
        """A fresh slot for the tensor, which may start up to `slack_bytes` later."""
        graph = self.graph
        shape, strides, dtype = graph.shapes[tensor], graph.strides[tensor], graph.dtypes[tensor]
        extent = extent_of(shape, strides) * DTYPE_BYTES[dtype]
        return Slot(self.layout.reserve(extent + slack_bytes), extent, shape, strides, dtype)

    def flag(self, op: int, tensor: int, destination: int) -> tuple[int, Slot | None]:
        """Flag and slot of the tensor, or of the op's end (tensor -1), for the destination."""
        key = (op, tensor, destination)
        if key not in self.flags:
            # The copy keeps the original's address modulo a cache line: some kernels of BLAS
            # libraries round differently by alignment.
            slot = None if tensor < 0 else self.slot(tensor, slack_bytes=ALIGNMENT_BYTES)
            self.flags[key] = (self.layout.reserve(8), slot)
        return self.flags[key]

    def instructions(self, device: int, order: tuple[int, ...]) -> list[Instruction]:
        graph = self.graph
        found: list[Instruction] = []
        for op in np.flatnonzero(graph.is_source).tolist():
            if graph.residences[op] != EVERYWHERE and self.placement[op] == device:
                found += self.sends(op)
        arrived: set[int] = set()
        for op in order:
            for tensor in graph.inputs_of(op).tolist():
                home = self.homes[tensor]
                if home not in (device, EVERYWHERE) and tensor not in arrived:
                    arrived.add(tensor)
                    flag = self.flag(int(graph.producers[tensor]), tensor, device)
                    found.append(Wait(op, tensor, *flag))
            for before in self.before[op]:
                if ~before not in arrived:
                    arrived.add(~before)
                    found.append(Wait(op, -1, *self.flag(before, -1, device)))
            found.append(Run(op))
            found += self.sends(op)
        return self.with_frees(device, found)

    def sends(self, op: int) -> list[Instruction]:
        """What follows an op: its outputs to whom they are missing, then word of its end."""
        found: list[Instruction] = []
        for tensor in self.graph.outputs_of(op):
            readers = {self.placement[c] for c in self.graph.consumers_of(tensor).tolist()}
            for to in sorted(readers - {self.placement[op]}):
                found.append(Send(op, tensor, to, *self.flag(op, tensor, to)))
        for to in sorted(self.after[op]):
            found.append(Send(op, -1, to, *self.flag(op, -1, to)))
        return found

    def with_frees(self, device: int, instructions: list[Instruction]) -> list[Instruction]:
        """The same, each tensor made here forgotten after the last instruction that needs it."""
        graph = self.graph
        last: dict[int, int] = {}
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Run):
                used = [*graph.inputs_of(instruction.op), *graph.outputs_of(instruction.op)]
            else:
                used = [instruction.tensor] if isinstance(instruction, Send) else []
            last |= dict.fromkeys(map(int, used), index)
        frees: dict[int, list[int]] = defaultdict(list)
        for tensor, index in last.items():
            lasting = tensor < 0 or graph.is_source[graph.producers[tensor]] or tensor in self.kept
            if not lasting and self.homes[tensor] == device:
                frees[index].append(tensor)
        return [
            instruction
            if index not in frees or isinstance(instruction, Wait)
            else _freeing(instruction, tuple(frees[index]))
            for index, instruction in enumerate(instructions)
        ]


def _freeing(instruction: Run | Send, frees: tuple[int, ...]) -> Instruction:
    if isinstance(instruction, Run):
        return Run(instruction.op, frees)
    i = instruction
    return Send(i.op, i.tensor, i.destination, i.flag, i.slot, frees)


def _sources_read(graph: Graph, cut: _Cut, device: int, order: tuple[int, ...]) -> set[int]:
    """Tensors of sources that the device needs in place: those that live here, or are read here
    and live everywhere."""
    read = {int(tensor) for op in order for tensor in graph.inputs_of(op)}
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
