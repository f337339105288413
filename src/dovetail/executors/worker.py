"""Serves one device from a process of its own: loads the device's shares and runs their steps.

Between steps the process sleeps on its channel. Within a step it waits for flags in shared memory.

    load ──► bind every instruction to the values
    step ──► barrier ─ instructions ─ barrier ─ copy outputs ──► "done", "aborted" or `Failed`

A device that is all that a machine has, on all cores of the caller's process, is served within
that process (`executors.workers`): its steps cost no hand-over, and there is one pool of threads.
"""

import gc
import os
import time
import traceback
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.executors.compiling import CompileTarget, load_code
from dovetail.executors.generated import GeneratedCode
from dovetail.executors.shares import Share, tensor_at
from dovetail.frontends.fused_updates import fused_updates
from dovetail.frontends.instructions import (
    NEXT,
    AwaitFlag,
    BoundInstruction,
    CheckLayout,
    Instruction,
    ReadSource,
    RunCompiled,
    RunFunction,
    RunKernel,
    RunLanes,
    RunOp,
    RunUpdates,
    SendTensor,
    in_block_at,
)
from dovetail.frontends.interpret import seed_for
from dovetail.frontends.program import Call
from dovetail.frontends.runners import distinct, make_runner
from dovetail.runtime.neighbours import Spinning
from dovetail.runtime.setup import float32_by_default, set_up, set_up_thread
from dovetail.runtime.shared import Block
from dovetail.runtime.user_code import line_of
from dovetail.runtime.waiting import ABORTED, barrier, publish


@dataclass(frozen=True)
class Load:
    """A share that a process binds under a key.

    program   number of the program that `calls` belong to. The calls add to those that earlier
              loads of the same program brought.
    beside    ids of the plan's other processes whose work on these cores is the plan's own: a GPU's
              uses any core
    in_place  the device is served within the caller's process, and works on the caller's tensors:
              sources are those that `place` was given, inputs come with each step, and its reply
              is what it returns
    """

    key: int
    share: Share
    program: int
    calls: dict[int, Call]
    tensors: int
    seed: int
    beside: tuple[int, ...] = ()
    in_place: bool = False


@dataclass(frozen=True)
class Failed:
    """The reply to a step in which an op raised.

    said      the exception in one line
    lacking   (bytes that a GPU was asked for, bytes that it had free), if that is why
    peer      the rank with which the connection failed, if that is why
    """

    op: int
    traceback: str
    said: str = ""
    lacking: tuple[int, int] | None = None
    peer: int | None = None


class Aborted(Exception):
    """Raised by a device that stops waiting because another device failed."""


class ServedDevice:
    """A device: loaded shares by their keys, and calls of one program.

    spinning   watches other programs on the device's cores
    """

    infers = False

    @property
    def draws(self) -> bool:
        """True if a loaded share's steps draw random numbers."""
        return any(loaded.drawing for loaded in self._loaded.values())

    def __init__(self, spinning: Spinning) -> None:
        self._loaded: dict[int, _Loaded] = {}
        self._program, self._calls = 0, dict[int, Call]()
        self._spinning = spinning

    def load(self, load: Load, descriptor: int) -> None:
        """Bind a share to the values in the block of this descriptor, which is taken over."""
        self._spinning.beside(load.beside)
        # Only the latest program's calls are kept; `Workers.unsent` counts alike.
        if load.program != self._program:
            self._program, self._calls = load.program, {}
        self._calls.update(load.calls)
        with torch.inference_mode(), float32_by_default():
            self._loaded[load.key] = _Loaded(load, self._calls, Block(descriptor))

    def place(self, key: int, values: dict[int, torch.Tensor]) -> None:
        """Let sources of a loaded share be these tensors from now on."""
        for tensor, value in values.items():
            self._loaded[key].runner.set(tensor, value)

    def step(
        self, key: int, number: int, timed: bool, inputs: dict[int, torch.Tensor] | None = None
    ) -> str | Failed | dict[int, torch.Tensor]:
        """Run one step of a loaded share; steps are numbered from 1. With `timed`, every
        instruction is stamped. `inputs` are those of a share that works in place."""
        self._spinning.look()
        spin_seconds = self._spinning.spin_seconds
        with torch.inference_mode(), float32_by_default():
            return self._loaded[key].run(number, timed, spin_seconds, inputs or {})

    def unload(self, key: int) -> None:
        """Forget a share and its values."""
        self._loaded.pop(key).block.close()
        # The share's values and instructions refer to each other, so only a collection frees them.
        gc.collect()

    def pause(self) -> None:
        """Note that the process now waits for what comes next."""
        self._spinning.pause()

    def close(self) -> None:
        """Forget all shares. In the caller's process OpenMP's threads spin as they did at first."""
        for key in list(self._loaded):
            self.unload(key)
        self._spinning.close()


class DeviceProcess(ServedDevice):
    """What lives in a device's own process, where each op runs on so many threads."""

    def __init__(self, threads: int) -> None:
        set_up(threads)
        super().__init__(Spinning(os.sched_getaffinity(0), threads))

    def use_threads(self, threads: int) -> None:
        """Run each op on so many threads from now on."""
        set_up_thread(threads)


class _Loaded:
    """A share whose instructions are those of a runner's stream, ready to run."""

    def __init__(self, load: Load, calls: dict[int, Call], block: Block) -> None:
        self.block = block
        self.share = load.share
        self.seed = load.seed
        self.codes: dict[str, GeneratedCode | None] = {}
        self.base = int(block.bytes.ctypes.data)
        self.abort = self.base + load.share.abort
        self.progress = block.view(load.share.progress, (3,), np.int64)
        self.progress[0] = -1
        # Behind the graph's tensors come those that compiled code makes for itself. Codes run one
        # after another, so they share them.
        needed = [
            code.temporary_count(len(i.inputs))
            for i in load.share.instructions
            if isinstance(i, RunCompiled) and (code := self._code(i.key, i.threads)) is not None
        ]
        self.tensors = load.tensors
        self.runner = make_runner(self.tensors + max(needed, default=0))
        # Op of each call that draws numbers, in the order of the runner's seeds.
        self.drawing: list[int] = []
        self.in_place = load.in_place
        for tensor, slot in load.share.sources if not load.in_place else ():
            self.runner.set(tensor, tensor_at(block, slot))
        self.stream = self.runner.stream(self._bound(i, calls) for i in load.share.instructions)
        self.outputs = tuple((t, s, tensor_at(block, s)) for t, s in load.share.outputs)
        lasting = {tensor for tensor, _ in load.share.sources}
        self.kept = [t for t, _ in load.share.outputs if t not in lasting]

    def run(
        self, number: int, timed: bool, spin_seconds: float, inputs: dict[int, torch.Tensor]
    ) -> str | Failed | dict[int, torch.Tensor]:
        """Run one step, in which waits spin for so long. Returns "done", or what the step returns
        if it works in place; "aborted" if another device failed; or `Failed`."""
        spin_ns = round(spin_seconds * 1e9)
        for tensor, given in inputs.items():
            self.runner.set(tensor, given)
        # Steps are numbered from 1 here and from 0 in seeds.
        self.runner.seeds = [seed_for(self.seed, number - 1, op) for op in self.drawing]
        try:
            # The devices meet twice in each step, under numbers that only grow. The first meeting
            # lets all begin together. After the second one every op of the step has ended, so
            # that the next step may write the slots again.
            self._meet(2 * number - 1, spin_ns)
            self.progress[1] = time.perf_counter_ns()
            done = self.runner.run(
                self.stream,
                now=number * NEXT,
                abort=self.abort,
                spin_ns=spin_ns,
                progress=self.base + self.share.progress,
                stamps=self.base + self.share.stamps if timed else 0,
            )
            if not done:
                return "aborted"
            self.progress[2] = time.perf_counter_ns()
            self._meet(2 * number, spin_ns)
            if self.in_place:
                made = {tensor: self.runner.get(tensor) for tensor, _, _ in self.outputs}
                self.runner.clear([*self.kept, *inputs])
                return {tensor: value for tensor, value in made.items() if value is not None}
            for tensor, slot, copy in self.outputs:
                value = self.runner.get(tensor)
                assert value is not None, "the step has made it"
                distinct(copy, slot.strides).copy_(distinct(value, slot.strides))
            self.runner.clear(self.kept)
        except Aborted:
            return "aborted"
        except Exception as error:
            publish(self.abort, 1)
            return Failed(self.runner.failed, traceback.format_exc(), line_of(error))
        return "done"

    def _meet(self, value: int, spin_ns: int) -> None:
        share = self.share
        if share.seats == 1:  # there is nobody to wait for
            return
        flags = self.base + share.barrier
        reached = barrier(flags, share.seats, share.seat, value, self.abort, spin_ns)
        if reached == ABORTED:
            raise Aborted

    def _bound(
        self, instruction: Instruction | BoundInstruction, calls: dict[int, Call]
    ) -> BoundInstruction:
        """The instruction with its calls, its code and its addresses, as the runner takes it."""
        match instruction:
            case RunOp(op=op, frees=frees):
                call, seed = calls[op], -1
                if call.random:
                    seed = len(self.drawing)
                    self.drawing.append(call.seed_index(op))
                return RunOp(op, frees, call, seed)
            case RunUpdates(ops=ops, frees=frees):
                return RunOp(ops[0], frees, fused_updates([calls[op] for op in ops]))
            case RunLanes(lanes=lanes, frees=frees):
                bound = tuple(tuple(self._bound(each, calls) for each in lane) for lane in lanes)
                return RunLanes(bound, frees)
            case RunCompiled(ops=ops, frees=frees):
                code = self._code(instruction.key, instruction.threads)
                if code is None:
                    one_by_one = tuple(self._bound(RunOp(op), calls) for op in ops)
                    return RunLanes((one_by_one,), frees)
                return code.instruction(
                    instruction.inputs, instruction.outputs,
                    first_temporary=self.tensors, op=ops[0], frees=frees,
                )  # fmt: skip
            case SendTensor() | AwaitFlag():
                return in_block_at(self.base, instruction)
            case ReadSource():
                raise AssertionError("a CPU reads sources in place")
            case RunFunction() | RunKernel() | CheckLayout():
                return instruction

    def _code(self, key: str, threads: int) -> GeneratedCode | None:
        """Compiled code, which stages with one key share."""
        if key not in self.codes:
            self.codes[key] = load_code(key, CompileTarget(threads))
        return self.codes[key]
