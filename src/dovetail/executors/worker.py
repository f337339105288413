"""Serves one device from a process of its own: loads the device's shares and runs their steps.

Between steps the process sleeps on its channel. Within a step it waits for flags in shared memory.

    load ──► bind every instruction to the values ──► "ready"
    step ──► barrier ─ instructions ─ barrier ─ copy outputs ──► "done", "aborted" or `Failed`
"""

import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch

from dovetail.executors.compiling import Code, load_code
from dovetail.executors.shares import (
    AwaitFlag,
    BlockSlot,
    Instruction,
    RunCompiled,
    RunLanes,
    RunOp,
    SendTensor,
    Share,
    distinct,
    tensor_at,
)
from dovetail.frontends.interpret import Bound, Cells, bind, seed_for
from dovetail.frontends.program import Call
from dovetail.runtime.neighbours import Spinning
from dovetail.runtime.processes import Channel
from dovetail.runtime.setup import set_up, set_up_thread
from dovetail.runtime.shared import Block
from dovetail.runtime.waiting import ABORTED, barrier, publish, publish_copy, wait

SKEW = 63
"""The low six bits of a flag, which hold the sent tensor's address modulo 64.

A flag's value is step number x 64 + that address, so it still grows from step to step."""
_PLAIN_BYTES = 2**17
"""Up to this size a plain copy of adjacent bytes is quicker than torch's. Above it, torch's copy
wins, because it uses several threads."""
Lane = Callable[[], None]
"""Runs the ops of a lane in order."""


@dataclass(frozen=True)
class Load:
    """Asks a process to bind a share under a key; the block's descriptor follows on the channel.

    program   number of the program that `calls` belong to. The calls add to those that earlier
              loads of the same program brought.
    """

    key: int
    share: Share
    program: int
    calls: dict[int, Call]
    tensors: int
    seed: int


@dataclass(frozen=True)
class Step:
    """Asks a process to run one step of a loaded share.

    `number` counts steps from 1. With `timed`, the process stamps every instruction.
    """

    key: int
    number: int
    timed: bool


@dataclass(frozen=True)
class Unload:
    """Asks a process to forget a loaded share; there is no reply."""

    key: int


@dataclass(frozen=True)
class UseThreads:
    """Asks a process to run each op on `count` threads from now on; the reply is "ready"."""

    count: int


@dataclass(frozen=True)
class Failed:
    """The reply to a step in which an op raised."""

    op: int
    traceback: str


class Aborted(Exception):
    """Raised by a device that stops waiting because another device failed."""


class LaneFailed(Exception):
    """Raised when an op of a lane raised; the op's error is the cause."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


def serve(channel: Channel) -> None:
    """Answer requests until the channel closes. The first message is the threads per op."""
    threads: int = channel.receive()
    set_up(threads)
    cores = os.sched_getaffinity(0)
    spinning = Spinning(cores, threads)
    team = LaneThreads()
    loaded: dict[int, _Loaded] = {}
    program, calls = 0, dict[int, Call]()
    with torch.inference_mode():
        channel.send("ready")
        while True:
            request = channel.receive()
            match request:
                case Load(key=key):
                    block = Block(channel.receive_descriptor())
                    # Only the latest program's calls are kept; `Workers.unsent` counts alike.
                    if request.program != program:
                        program, calls = request.program, {}
                    calls.update(request.calls)
                    loaded[key] = _Loaded(request, calls, block, team, spinning)
                    channel.send("ready")
                case Step(key=key, number=number, timed=timed):
                    channel.send(loaded[key].run(number, timed))
                case Unload(key=key):
                    loaded.pop(key).block.close()
                    # The share's values and instructions refer to each other, and the automatic
                    # collector is off, so only an explicit collection frees them.
                    gc.collect()
                case UseThreads(count=count):
                    set_up_thread(count)
                    channel.send("ready")


class _Loaded:
    """A share whose instructions are bound to its values, ready to run."""

    def __init__(
        self,
        load: Load,
        calls: dict[int, Call],
        block: Block,
        team: "LaneThreads",
        spinning: Spinning,
    ) -> None:
        self.block = block
        self.team = team
        self.spinning = spinning
        # How long every wait spins, and step number x 64. Both are lists of one entry, so that the
        # instructions, which are bound once, read the value of the current step.
        self.spin_ns = [0]
        self.share = load.share
        self.seed = load.seed
        self.codes: dict[str, Code | None] = {}
        self.values: Cells = [None] * load.tensors
        self.now = [0]
        self.base = int(block.bytes.ctypes.data)
        self.abort = self.base + load.share.abort
        self.progress = block.view(load.share.progress, (3,), np.int64)
        self.progress[0] = -1
        count = len(load.share.instructions)
        self.stamps = block.view(load.share.stamps, (count, 2), np.int64)
        for tensor, slot in load.share.sources:
            self.values[tensor] = tensor_at(block, slot)
        self.bound = tuple(self._bind(i, calls) for i in load.share.instructions)
        self.outputs = tuple((t, s, tensor_at(block, s)) for t, s in load.share.outputs)
        lasting = {tensor for tensor, _ in load.share.sources}
        self.kept = tuple(t for t, _ in load.share.outputs if t not in lasting)

    def run(self, number: int, timed: bool) -> str | Failed:
        """Run one step. Returns "done", "aborted" if another device failed, or `Failed`."""
        self.now[0] = number * (SKEW + 1)
        self.spinning.look()
        self.spin_ns[0] = round(self.spinning.spin_seconds * 1e9)
        try:
            # The devices meet twice in each step, under numbers that only grow. The first meeting
            # lets all begin together. After the second one every op of the step has ended, so
            # that the next step may write the slots again.
            self._meet(2 * number - 1)
            self.progress[1] = time.perf_counter_ns()
            if timed:
                self._run_timed()
            else:
                self._run_plain()
            self.progress[2] = time.perf_counter_ns()
            self._meet(2 * number)
            for tensor, slot, copy in self.outputs:
                value = self.values[tensor]
                distinct(copy, slot.strides).copy_(distinct(value, slot.strides))
            for tensor in self.kept:
                self.values[tensor] = None
        except Aborted:
            return "aborted"
        except LaneFailed as failure:
            publish(self.abort, 1)
            return Failed(failure.op, "".join(traceback.format_exception(failure.__cause__)))
        except Exception:
            publish(self.abort, 1)
            return Failed(self._current_op(), traceback.format_exc())
        return "done"

    def _run_plain(self) -> None:
        # A memoryview stores one number faster than an array does.
        progress = self.progress.data
        for index, instruction in enumerate(self.bound):
            progress[0] = index
            instruction()
        progress[0] = -1

    def _run_timed(self) -> None:
        now = time.perf_counter_ns
        progress, stamps = self.progress.data, self.stamps.reshape(-1).data
        for index, instruction in enumerate(self.bound):
            progress[0] = index
            stamps[2 * index] = now()
            instruction()
            stamps[2 * index + 1] = now()
        progress[0] = -1

    def _meet(self, value: int) -> None:
        share = self.share
        flags, spin_ns = self.base + share.barrier, self.spin_ns[0]
        reached = barrier(flags, share.seats, share.seat, value, self.abort, spin_ns)
        if reached == ABORTED:
            raise Aborted

    def _current_op(self) -> int:
        begun = int(self.progress[0])
        return self.share.instructions[begun].op if begun >= 0 else -1

    def _bind(self, instruction: Instruction, calls: dict[int, Call]) -> Bound:
        """The instruction as a function without arguments."""
        match instruction:
            case RunOp(op=op, frees=frees):
                return bind(calls[op], self.values, frees, self._seed_of(calls[op].seed_index(op)))
            case RunLanes(lanes=lanes, frees=frees):
                return self._bind_together([self._bind_lane(ops, calls) for ops in lanes], frees)
            case RunCompiled() as segment:
                return self._bind_compiled(segment, calls)
            case SendTensor(slot=None) as send:
                return self._bind_signal(send)
            case SendTensor(slot=BlockSlot() as slot) as send:
                return self._bind_send(send, slot)
            case AwaitFlag() as waiting:
                return self._bind_wait(waiting)
        raise AssertionError(instruction)

    def _seed_of(self, op: int) -> Callable[[], int]:
        # Steps are numbered from 1 here and from 0 in seeds.
        return lambda: seed_for(self.seed, self.now[0] // (SKEW + 1) - 1, op)

    def _bind_lane(self, ops: tuple[int, ...], calls: dict[int, Call]) -> Lane:
        bound = [
            (op, bind(calls[op], self.values, (), self._seed_of(calls[op].seed_index(op))))
            for op in ops
        ]

        def run() -> None:
            for op, call in bound:
                try:
                    call()
                except Exception as error:
                    raise LaneFailed(op) from error

        return run

    def _bind_compiled(self, segment: RunCompiled, calls: dict[int, Call]) -> Bound:
        """The compiled code, or if it cannot be loaded the calls one by one."""
        code = self._code(segment.key, segment.threads)
        if code is None:
            return self._bind_together_here(self._bind_lane(segment.ops, calls), segment.frees)
        values, inputs, outputs, frees = self.values, segment.inputs, segment.outputs, segment.frees

        def run() -> None:
            made = code(*[values[tensor] for tensor in inputs])
            for tensor, value in zip(outputs, made, strict=True):
                values[tensor] = value
            for free in frees:
                values[free] = None

        return run

    def _code(self, key: str, threads: int) -> Code | None:
        """Compiled code, which stages with one key share."""
        if key not in self.codes:
            self.codes[key] = load_code(key, threads)
        return self.codes[key]

    def _bind_together_here(self, lane: Lane, frees: tuple[int, ...]) -> Bound:
        values = self.values

        def run() -> None:
            lane()
            for free in frees:
                values[free] = None

        return run

    def _bind_together(self, lanes: list[Lane], frees: tuple[int, ...]) -> Bound:
        team, values = self.team, self.values

        def run() -> None:
            team.run(lanes)
            for free in frees:
                values[free] = None

        return run

    def _bind_signal(self, send: SendTensor) -> Bound:
        flag, now = self.base + send.flag, self.now
        return lambda: publish(flag, now[0])

    def _bind_send(self, send: SendTensor, slot: BlockSlot) -> Bound:
        """A send that copies bytes without torch where the tensor allows that, else by torch."""
        copying = self._bind_copying_send(send, slot)
        if slot.bytes > _PLAIN_BYTES or not tensor_at(self.block, slot).is_contiguous():
            return copying
        flag, now, frees = self.base + send.flag, self.now, send.frees
        values, tensor, shape = self.values, send.tensor, slot.shape
        target, size_bytes = self.base + slot.offset, slot.bytes
        plain = False

        def run() -> None:
            nonlocal plain
            value = values[tensor]
            # Shape, negation and conjugation of a tensor are the same in every step, so a True
            # is kept. Contiguity is looked at each time.
            if not plain:
                plain = value.shape == shape and not (value.is_neg() or value.is_conj())
            if not (plain and value.is_contiguous()):
                return copying()
            # The copy starts at the original's address modulo a cache line, because some kernels
            # of BLAS libraries round differently by alignment. The flag tells the reader.
            source = value.data_ptr()
            skew = source & SKEW
            publish_copy(flag, now[0] + skew, target + skew, source, size_bytes)
            for free in frees:
                values[free] = None
            return None

        return run

    def _bind_copying_send(self, send: SendTensor, slot: BlockSlot) -> Bound:
        """A send by torch, which copies any layout."""
        flag, now, frees = self.base + send.flag, self.now, send.frees
        values, tensor, block, strides = self.values, send.tensor, self.block, slot.strides
        expanded = 0 in strides
        copy, skew = tensor_at(block, slot), -1

        def run() -> None:
            nonlocal skew, copy
            value = values[tensor]
            # Addresses mostly stay the same from step to step, so the view of the slot is kept.
            if value.data_ptr() & SKEW != skew:
                skew = value.data_ptr() & SKEW
                copy = distinct(tensor_at(block, slot, skew), strides)
            copy.copy_(distinct(value, strides) if expanded else value)
            publish(flag, now[0] + skew)
            for free in frees:
                values[free] = None

        return run

    def _bind_wait(self, waiting: AwaitFlag) -> Bound:
        flag, now, abort = self.base + waiting.flag, self.now, self.abort
        spin_ns = self.spin_ns
        values, tensor, slot, block = self.values, waiting.tensor, waiting.slot, self.block
        skew = 0
        if slot is not None:
            values[tensor] = tensor_at(block, slot)

        def run() -> None:
            nonlocal skew
            reached = wait(flag, now[0], abort, spin_ns[0])
            # The flag carries the skew. Only where that has changed is the view made anew.
            if reached != now[0] + skew:
                if reached == ABORTED:
                    raise Aborted
                assert slot is not None
                skew = reached & SKEW
                values[tensor] = tensor_at(block, slot, skew)

        return run


class LaneThreads:
    """Runs lanes at the same time, with one thread per lane.

    The threads are started when lanes first need them, and end with the process. Torch keeps its
    number of threads per thread. These threads set theirs to one and never change it, so the thread
    that runs everything else keeps all threads of the device.
    """

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Lane]] = []  # of each thread
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, lanes: Sequence[Lane]) -> None:
        """Run the lanes. Once all have ended, raise the first error that one of them raised."""
        while len(self._queues) < len(lanes):
            queue: SimpleQueue[Lane] = SimpleQueue()
            self._queues.append(queue)
            Thread(target=self._serve, args=(queue,), daemon=True).start()
        for queue, lane in zip(self._queues, lanes, strict=False):
            queue.put(lane)
        raised = [error for _ in lanes if (error := self._results.get()) is not None]
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
                    self._results.put(error)
                else:
                    self._results.put(None)
