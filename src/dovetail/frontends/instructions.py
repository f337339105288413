"""The instructions of a device: what it does in a step, one after another.

    share of a plan        SendTensor a   AwaitFlag b   RunOp c   RunLanes d | e
    list of all GPUs       Issue on gpu0 [RunOp c, RunLanes d | e]   Issue on gpu1 [AwaitFlag c]
    stream of a schedule   AwaitFlag 2   RunKernels 3 4   SendTensor 4
    stream of a runner     RunOp, with its call   RunKernel   AwaitFlag   SendTensor   RunLanes

Plans (`executors.shares`), GPUs (`executors.gpus.steps`) and schedules of one device
(`executors.stages`) write them; runners (`frontends.runners`) and GPUs (`executors.gpus.worker`,
`executors.stages.cuda`) carry them out. Whoever writes them names ops by their numbers, and flags
and slots by where they are in a block that processes share. Before a runner takes them they are
*bound*: calls stand in place of numbers, and addresses in place of offsets.
"""

import ctypes
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.frontends.program import Call, distinct_refs

SKEW, LAID, NEXT = 63, 64, 128
"""A flag's value is `now`, a multiple of `NEXT`, plus the mark of the tensor that was sent, so that
it still grows from run to run. A kernel may round otherwise by where its inputs are and how they
lie, so that a copy keeps both.

SKEW    the bits of a mark that hold the tensor's address modulo a cache line
LAID    set in the mark of a tensor whose strides are not its slot's; they stand behind it
"""
INT64_BYTES = 8
"""Bytes of a flag, a stride or a time stamp."""
NO_FLAG = -1
"""The flag of a wait for a tensor that the device itself has copied from the block."""


def strides_offset(size_bytes: int) -> int:
    """How far behind its beginning a slot of so many bytes has its tensor's strides."""
    return -(-size_bytes // INT64_BYTES) * INT64_BYTES + SKEW + 1


@dataclass(frozen=True)
class BlockSlot:
    """The place of a tensor in memory that another process reads or writes.

    offset    of its first byte in the block, at skew 0; once it is bound, the address
    bytes     from there on, gaps that its strides leave included
    strides   those that were captured. A tensor that is sent may have others, if it needs no more
              bytes; they stand behind it then
    """

    offset: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def sent_bytes(self) -> int:
        """The bytes of the slot of a tensor that is sent: it may start within a cache line, and its
        strides may stand behind it."""
        return strides_offset(self.bytes) + INT64_BYTES * len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if the tensor's elements lie one after another."""
        wanted = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != wanted:
                return False
            wanted *= size
        return True

    @property
    def laid(self) -> Any:
        """[dimensions] the strides of a tensor that is laid out otherwise, in the same memory. The
        slot must be bound."""
        return int64s_at(self.offset + strides_offset(self.bytes), len(self.shape))

    def tensor(self, mark: int = 0) -> Tensor:
        """The tensor of this mark. The slot must be bound.

        Each has a torch storage of its own, because some ops address the storage from its start.
        """
        strides = tuple(self.laid) if mark & LAID else self.strides
        if not self.bytes:
            return torch.empty_strided(self.shape, strides, dtype=getattr(torch, self.dtype))
        memory = (ctypes.c_uint8 * self.bytes).from_address(self.offset + (mark & SKEW))
        flat = torch.from_numpy(np.ctypeslib.as_array(memory)).view(getattr(torch, self.dtype))
        return flat.as_strided(self.shape, strides)

    def takes(self, value: Tensor) -> bool:
        """True if the value can be copied here as it lies: in as many bytes, and with the same
        elements at one place."""
        sides = list(zip(value.shape, value.stride(), self.strides, strict=True))
        elements = 1 + sum((size - 1) * own for size, own, _ in sides)
        return (
            value.numel() > 0
            and elements * value.element_size() <= self.bytes
            and all(size == 1 or (own == 0) == (given == 0) for size, own, given in sides)
        )


# ── What computes. `frees` are the tensors that are forgotten afterwards ─────────────────────────


@dataclass(frozen=True)
class RunOp:
    """Run one call.

    op     an error names it
    call   its `Ref`s and results are entries of a runner's table, as tensors of a graph are. None:
           the call of the op, which whoever binds the instruction knows
    seed   place among the runner's seeds of a call that draws numbers; -1: it draws none
    """

    op: int
    frees: tuple[int, ...] = ()
    call: Call | None = None
    seed: int = -1


@dataclass(frozen=True)
class RunUpdates:
    """Run updates by one call of their fused kernel."""

    ops: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @property
    def op(self) -> int:
        """The first op. If the process dies here, the error names this op."""
        return self.ops[0]


@dataclass(frozen=True)
class RunCompiled:
    """Run ops as one piece of compiled code, or one by one where there is none.

    key, threads      name the code: `executors.compiling`. On a GPU its own name does
    inputs, outputs   the tensors that it takes and returns
    """

    ops: tuple[int, ...]
    key: str
    threads: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @property
    def op(self) -> int:
        """The first op. If the process dies here, the error names this op."""
        return self.ops[0]


@dataclass(frozen=True)
class RunKernels:
    """Run kernels of a step one after another, or merged to one (`executors.stages`)."""

    kernels: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunFunction:
    """Run a Python function of the entries `takes`, and store the tensors that it returns.

    It must not refer to what holds the runner: garbage collection does not see through C++.
    """

    op: int
    run: Callable[..., Any]
    takes: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunKernel:
    """Call the C function at an address with pointers to the data of the entries `takes`, at most
    `runners.MOST_POINTERS`. It writes its results there as well."""

    op: int
    address: int
    takes: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckLayout:
    """Raise `RuntimeError` unless the value of an entry has this shape and these strides. Where a
    dimension has one element its stride does not count."""

    op: int
    tensor: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class RunLanes:
    """Run all lanes at the same time, the instructions of each in order and each op on one thread,
    and wait for all. A single lane runs as if its instructions stood here.

    lanes   no lane needs what another one makes, unless it waits for its flag
    """

    lanes: "tuple[tuple[BoundInstruction, ...], ...]"
    frees: tuple[int, ...] = ()

    @property
    def op(self) -> int:
        """The first op. If the process dies here, the error names this op."""
        return next((each.op for each in chain.from_iterable(self.lanes)), -1)


# ── What hands over ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SendTensor:
    """Copy `tensor` to its slot for `destination`, publish the flag, and then forget `frees`.

    op       the op that made the tensor
    tensor   -1 stands for a control edge: only the flag is published, because `op` has ended

    On a GPU an event is recorded, which happens when all that was issued before has ended. In a
    schedule of one device `op` and `destination` are not said.
    """

    op: int = -1
    tensor: int = -1
    destination: int = -1
    flag: int = NO_FLAG
    slot: BlockSlot | None = None
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class AwaitFlag:
    """Wait for the flag before `op` runs. Once it is published, `tensor` is in `slot`, where it is
    then read.

    For a control edge `tensor` is -1 and `slot` is None. `source` is the device that sends. A GPU
    has all that is issued from now on start after the flag's event, and the host does not wait.
    """

    op: int = -1
    tensor: int = -1
    flag: int = NO_FLAG
    slot: BlockSlot | None = None
    source: int = -1


@dataclass(frozen=True)
class ReadSource:
    """Copy a source that lives on a CPU, the device `source`, from its slot to a GPU, before `op`
    runs there. `producer` is its source op."""

    op: int
    tensor: int
    slot: BlockSlot
    source: int
    producer: int


@dataclass(frozen=True)
class ReceiveTensor:
    """Receive a tensor that a GPU of another rank, the device `source`, sends straight to a GPU.
    `flag` is that of the message, for which an `AwaitFlag` waits."""

    op: int
    tensor: int
    flag: int
    slot: BlockSlot
    source: int


@dataclass(frozen=True)
class FreeTensors:
    """Forget tensors before what is issued next; in a schedule, all that these kernels made."""

    tensors: tuple[int, ...]


Work = RunOp | RunUpdates | RunLanes | RunCompiled
"""What computes in a share of a plan."""
Instruction = Work | SendTensor | AwaitFlag | ReadSource
"""What a share of a plan has."""
Issued = Instruction | RunKernels | ReceiveTensor | FreeTensors
"""What a thread issues to devices or streams."""
BoundInstruction = RunOp | RunFunction | RunKernel | CheckLayout | RunLanes | SendTensor | AwaitFlag
"""What a runner takes."""


@dataclass(frozen=True)
class Issue:
    """Instructions that one thread issues, on behalf of a device or a stream, one after another.

    lane    the device of a plan, or the stream of a schedule
    index   of the first one in the device's share; -1: they have no place there
    draws   they draw random numbers, whose seeds change from step to step
    """

    lane: int
    instructions: tuple[Issued, ...]
    index: int = -1
    draws: bool = False


def ops_of(instruction: object) -> tuple[int, ...]:
    """The ops that the instruction calls."""
    match instruction:
        case RunOp(op=op):
            return (op,)
        case RunLanes(lanes=lanes):
            return tuple(op for lane in lanes for each in lane for op in ops_of(each))
        case RunCompiled(ops=ops) | RunUpdates(ops=ops):
            return ops
    return ()


def in_block_at(base: int, instruction: SendTensor | AwaitFlag) -> SendTensor | AwaitFlag:
    """The instruction, bound to a block that begins at the address `base`."""
    slot = instruction.slot
    if slot is not None:
        slot = replace(slot, offset=base + slot.offset)
    return replace(instruction, flag=base + instruction.flag, slot=slot)


def last_touched(touched: Sequence[Iterable[int]], kept: Container[int]) -> list[tuple[int, ...]]:
    """[instructions] the entries that each touches as the last one, but those of `kept`."""
    last = {entry: index for index, entries in enumerate(touched) for entry in entries}
    frees: list[list[int]] = [[] for _ in touched]
    for entry, index in last.items():
        if entry >= 0 and entry not in kept:
            frees[index].append(entry)
    return [tuple(own) for own in frees]


def touched_by(call: Call) -> list[int]:
    """The entries that a call reads or makes."""
    return [*distinct_refs((call.args, call.kwargs)), *call.results]


def int64s_at(address: int, count: int) -> Any:
    """`count` int64 in memory at `address`."""
    return (ctypes.c_int64 * count).from_address(address)
