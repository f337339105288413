"""Runs lists of calls on one table of tensors, in one thread or in several.

    runner   values [ t0 | t1 | t2 ... ]        one table, which all of its streams share
    stream   call ─ call ─ send ─ wait ─ call ─ fork ┬ call ─ call
                                                     └ call

`NativeRunner` runs them in C++ and holds Python's lock only within calls of Python functions.
`PythonRunner` does the same without a C++ compiler, call by call from Python. Both give the same
bits. A C++ runner takes .53 to .93 of the time of the Python one, since a call from Python costs as
much as a small kernel (benchmarks/compiled).

Two streams that run at the same time never touch one entry of the table at once: whoever reads what
another stream wrote waits for its flag first. A flag is the address of an int64 as
`runtime.waiting` has them.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.frontends.instructions import (
    LAID,
    NEXT,
    SKEW,
    AwaitFlag,
    BlockSlot,
    BoundInstruction,
    CheckLayout,
    RunFunction,
    RunKernel,
    RunLanes,
    RunOp,
    SendTensor,
    int64s_at,
    strides_offset,
)
from dovetail.frontends.interpret import Bound, Cells, bind, call_results
from dovetail.frontends.program import Call, distinct_refs, fill_refs
from dovetail.runtime.native import native_runner
from dovetail.runtime.setup import set_up_thread
from dovetail.runtime.torch_versions import OpOverload
from dovetail.runtime.waiting import ABORTED, publish, publish_copy, wait

MOST_POINTERS = 64
"""A C function that a stream calls takes at most so many pointers."""
PLAIN_BYTES = 2**17
"""Up to this size a plain copy of adjacent bytes is quicker than torch's. Above it, torch's copy
wins, because it uses several threads."""


# ---- In C++ ----


class NativeRunner:
    """A table of tensors, and streams of instructions that work on it, in C++
    (`runtime/runner.cpp`) without Python's lock.

    seeds   the seeds of the calls that draw numbers, by place
    set     (slot, value): set an entry of the table; None empties it
    get     slot -> the value of an entry, or None
    clear   (slots): empty these entries
    """

    def __init__(self, module: Any, slots: int) -> None:
        self.module, self.seeds = module, list[int]()
        self._runner = module.Runner(slots)
        # Stands for the value of an entry while a call is added.
        self.stands_for = [torch.empty(0) for _ in range(slots)]
        self.set: Callable[[int, Tensor | None], None] = self._runner.set
        self.get: Callable[[int], Tensor | None] = self._runner.get
        self.clear: Callable[[Sequence[int]], None] = self._runner.clear

    @property
    def failed(self) -> int:
        """The tag of the instruction that raised in the last run; -1: none did."""
        return int(self._runner.failed)

    def stream(self, instructions: Iterable[BoundInstruction] = ()) -> "NativeStream":
        """A stream of these instructions, which run one after another."""
        return NativeStream(self, instructions)

    def run(
        self,
        stream: Any,
        *,
        now: int = 0,
        abort: int = 0,
        spin_ns: int = 0,
        progress: int = 0,
        stamps: int = 0,
    ) -> bool:
        """Run a stream here, and return False if it gave up because the abort flag was set.

        abort      address of the flag that ends all waits
        spin_ns    a wait spins this long before it sleeps
        progress   address of an int64 that holds the index of the running instruction; 0: nowhere
        stamps     address of [instructions, 2] int64: when each began and ended, in ns; 0: nowhere

        Raises what an instruction raises; of a native runner that is what torch makes of an error.
        """
        seeds, inner = self.seeds, stream.inner
        return bool(self._runner.run(inner, now, abort, spin_ns, seeds, progress, stamps))

    def run_streams(self, streams: Sequence[Any], *, first: int = 1, passes: int = 1) -> None:
        """Run streams at the same time, each op on one thread, `passes` times; `now` is `first` in
        the first pass, and one more in each later one. Raises what the first failing one raised."""
        inner = [stream.inner for stream in streams]
        self._runner.run_streams(inner, first, self.seeds, passes)


class NativeStream:
    """Instructions of a native runner that run one after another."""

    def __init__(self, runner: NativeRunner, instructions: Iterable[BoundInstruction] = ()) -> None:
        self._runner = runner
        self.inner = runner.module.Stream()
        for instruction in instructions:
            self.add(instruction)

    def add(self, instruction: BoundInstruction) -> None:
        """Add an instruction behind the others. It is told to C++ field by field."""
        inner, op = self.inner, instruction.op
        match instruction:
            case RunOp(frees=frees, call=call, seed=seed):
                assert call is not None, "it is bound"
                # A call that cannot be told to C++ is made from Python, where it works or fails as
                # always.
                with suppress(RuntimeError, TypeError):
                    if isinstance(call.target, OpOverload):
                        schema, refs = call.target._schema, distinct_refs((call.args, call.kwargs))
                        values = {tensor: self._runner.stands_for[tensor] for tensor in refs}
                        inner.add_call(
                            op, schema.name, schema.overload_name,
                            tuple(fill_refs(list(call.args), values)),
                            fill_refs(call.kwargs, values),
                            [(value, tensor) for tensor, value in values.items()],
                            list(call.results), list(frees), seed, call.in_grad_mode,
                        )  # fmt: skip
                        return
                run, takes = _as_function(call)
                inner.add_python(op, run, takes, list(call.results), list(frees), seed)
            case RunFunction(run=run, takes=takes, results=results, frees=frees):
                inner.add_python(op, run, list(takes), list(results), list(frees), -1)
            case RunKernel(address=address, takes=takes, frees=frees):
                inner.add_kernel(op, address, list(takes), list(frees))
            case CheckLayout(tensor=tensor, shape=shape, strides=strides):
                inner.add_check(op, tensor, list(shape), list(strides))
            case RunLanes(lanes=lanes, frees=frees):
                streams = [NativeStream(self._runner, lane).inner for lane in lanes]
                inner.add_lanes(op, streams, list(frees))
            case SendTensor(tensor=tensor, flag=flag, slot=slot, frees=frees):
                plain = slot is not None and slot.bytes <= PLAIN_BYTES and slot.is_contiguous
                inner.add_send(op, flag, tensor, self._view(slot), plain, list(frees))
            case AwaitFlag(tensor=tensor, flag=flag, slot=slot):
                inner.add_wait(op, flag, tensor, self._view(slot))

    def _view(self, slot: BlockSlot | None) -> Any:
        """What C++ calls the memory of a slot; None where nothing but a flag is handed over."""
        if slot is None:
            return None
        dtype, laid = getattr(torch, slot.dtype), slot.offset + strides_offset(slot.bytes)
        shape, strides = list(slot.shape), list(slot.strides)
        return self._runner.module.View(slot.offset, laid, slot.bytes, shape, strides, dtype)


def _as_function(call: Call) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """(the call as a function of the tensors that it reads, these), as `RunFunction` has them."""
    refs = distinct_refs((call.args, call.kwargs))

    def run(*tensors: Tensor) -> Any:
        return call_results(call, dict(zip(refs, tensors, strict=True)))

    return run, tuple(refs)


# ---- In Python ----


class _Aborted(Exception):
    """Raised where a wait gave up."""


@dataclass
class _Run:
    """The values that instructions read of the run that is on."""

    now: int = 0
    abort: int = 0
    spin_ns: int = 0


class PythonRunner:
    """Does what `NativeRunner` does, one instruction after another from Python."""

    def __init__(self, slots: int) -> None:
        self.failed = -1
        self.seeds: list[int] = []
        # The first entries are the table's, the others constants of bound calls.
        self.cells: Cells = [None] * slots
        self.current = _Run()
        self.threads = _Threads()

    def stream(self, instructions: Iterable[BoundInstruction] = ()) -> "PythonStream":
        return PythonStream(self, instructions)

    def set(self, slot: int, value: Tensor | None) -> None:
        self.cells[slot] = value

    def get(self, slot: int) -> Tensor | None:
        value: Tensor | None = self.cells[slot]
        return value

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.cells[slot] = None

    def run(
        self,
        stream: Any,
        *,
        now: int = 0,
        abort: int = 0,
        spin_ns: int = 0,
        progress: int = 0,
        stamps: int = 0,
    ) -> bool:
        self.failed = -1
        self.current.now, self.current.abort, self.current.spin_ns = now, abort, spin_ns
        begun = int64s_at(progress, 1) if progress else None
        times = int64s_at(stamps, 2 * len(stream.instructions)) if stamps else None
        tag = -1
        try:
            with torch.inference_mode():
                for index, (own, instruction) in enumerate(stream.instructions):
                    tag = own
                    if begun is not None:
                        begun[0] = index
                    if times is not None:
                        times[2 * index] = time.perf_counter_ns()
                    instruction()
                    if times is not None:
                        times[2 * index + 1] = time.perf_counter_ns()
        except _Aborted:
            return False
        except Exception:
            if self.failed < 0:
                self.failed = tag
            raise
        if begun is not None:
            begun[0] = -1
        return True

    def run_streams(self, streams: Sequence[Any], *, first: int = 1, passes: int = 1) -> None:
        self.failed = -1
        self.current.spin_ns = 0
        for done in range(passes):
            self.current.now = first + done
            self.run_together(streams)

    def run_together(self, streams: Sequence["PythonStream"]) -> None:
        """Run streams at the same time, and raise the first error that one of them raised."""
        # Streams that fail end those that wait for them, and no other device.
        stop = np.zeros(2, dtype=np.int64)
        outer, abort = self.current.abort, int(stop.ctypes.data)
        self.current.abort = abort
        before = torch.get_num_threads()
        flushes = not (torch.tensor(1e-40) * 1.0).item()  # whether denormals count as zero here

        def begin(stream: "PythonStream") -> Callable[[], None]:
            def run() -> None:
                tag = -1
                torch.set_flush_denormal(flushes)
                try:
                    with torch.inference_mode():
                        for own, instruction in stream.instructions:
                            tag = own
                            instruction()
                except _Aborted:
                    raise
                except BaseException:
                    if self.failed < 0:
                        self.failed = tag
                    # The others may wait for this stream.
                    publish(abort, 1)
                    raise

            return run

        torch.set_num_threads(1)
        try:
            self.threads.run([begin(stream) for stream in streams])
        finally:
            torch.set_num_threads(before)
            self.current.abort = outer


class PythonStream:
    """Stands for a `NativeStream`: (op, function without arguments) of each instruction."""

    def __init__(self, runner: PythonRunner, instructions: Iterable[BoundInstruction] = ()) -> None:
        self._runner = runner
        self.instructions: list[tuple[int, Bound]] = []
        for instruction in instructions:
            self.add(instruction)

    def add(self, instruction: BoundInstruction) -> None:
        """Add an instruction behind the others, as a function without arguments."""
        runner, cells = self._runner, self._runner.cells
        bound: Bound
        match instruction:
            case RunOp(call=call, frees=frees, seed=seed):
                assert call is not None, "it is bound"
                bound = bind(call, cells, frees, lambda: runner.seeds[seed])
            case RunFunction(run=run, takes=takes, results=results, frees=frees):

                def call_function() -> None:
                    made = run(*[cells[slot] for slot in takes])
                    for slot, value in zip(results, made or (), strict=True):
                        if slot >= 0:
                            cells[slot] = value
                    runner.clear(frees)

                bound = call_function
            case RunKernel(address=address, takes=takes, frees=frees):
                # ctypes calls it without Python's lock.
                function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(takes))(address)

                def call_kernel() -> None:
                    function(*[cells[slot].data_ptr() for slot in takes])
                    runner.clear(frees)

                bound = call_kernel
            case CheckLayout(tensor=tensor, shape=shape, strides=strides):
                bound = partial(_check_layout, cells, tensor, shape, strides)
            case RunLanes(lanes=lanes, frees=frees):
                bound = _lanes(runner, [PythonStream(runner, lane) for lane in lanes], frees)
            case SendTensor(tensor=tensor, flag=flag, slot=BlockSlot() as slot, frees=frees):
                bound = _send(runner, flag, tensor, slot, frees)
            case SendTensor(flag=flag, frees=frees):
                bound = partial(_publish, runner, flag, frees)
            case AwaitFlag(flag=flag, tensor=tensor, slot=slot):
                bound = _wait(runner, flag, tensor, slot)
        self.instructions.append((instruction.op, bound))


def _check_layout(
    cells: Cells, slot: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    value = cells[slot]
    sides = list(zip(value.shape, value.stride(), strides, strict=False))
    fits = tuple(value.shape) == shape and (
        not value.numel() or all(size == 1 or own == wanted for size, own, wanted in sides)
    )
    if not fits:
        raise RuntimeError(
            f"compiled code was made for sizes {list(shape)} and strides {list(strides)} "
            "of an input, which has others"
        )


def _publish(runner: "PythonRunner", flag: int, frees: tuple[int, ...]) -> None:
    publish(flag, runner.current.now)
    runner.clear(frees)


def _wait(runner: PythonRunner, flag: int, tensor: int, slot: BlockSlot | None) -> Bound:
    run, cells, mark = runner.current, runner.cells, 0
    value = None if slot is None else slot.tensor()

    def call() -> None:
        nonlocal mark, value
        reached = wait(flag, run.now, run.abort, run.spin_ns)
        if reached == ABORTED:
            raise _Aborted
        if slot is None:
            return
        # Only where something has changed is the view made anew.
        if reached % NEXT != mark or mark & LAID:
            mark = reached % NEXT
            value = slot.tensor(mark)
        cells[tensor] = value

    return call


def _send(
    runner: PythonRunner, flag: int, tensor: int, slot: BlockSlot, frees: tuple[int, ...]
) -> Bound:
    run, cells = runner.current, runner.cells
    may_be_plain = slot.bytes <= PLAIN_BYTES and slot.is_contiguous
    last, copy, dtype = -1, slot.tensor(), getattr(torch, slot.dtype)

    def call() -> None:
        nonlocal last, copy
        value = cells[tensor]
        source = value.data_ptr()
        mark = source & SKEW
        is_alike = (
            value.dtype == dtype
            and value.shape == slot.shape
            and not (value.is_neg() or value.is_conj())
        )
        if is_alike and value.stride() != slot.strides and slot.takes(value):
            mark |= LAID
            slot.laid[:] = value.stride()
        if is_alike and may_be_plain and value.is_contiguous():
            target = slot.offset + (source & SKEW)
            publish_copy(flag, run.now + mark, target, source, slot.bytes)
        else:
            # Addresses mostly stay the same from run to run, so the view is kept.
            if mark != last or mark & LAID:
                last = mark
                copy = distinct(slot.tensor(mark), slot.strides)
            copy.copy_(distinct(value, slot.strides))
            publish(flag, run.now + mark)
        runner.clear(frees)

    return call


def _lanes(runner: PythonRunner, streams: list[PythonStream], frees: tuple[int, ...]) -> Bound:
    def call() -> None:
        if len(streams) > 1:
            runner.run_together(streams)
        else:
            for op, instruction in streams[0].instructions:
                try:
                    instruction()
                except Exception:
                    runner.failed = op
                    raise
        runner.clear(frees)

    return call


Runner = NativeRunner | PythonRunner
"""A table of tensors, and streams of instructions that work on it."""
Stream = NativeStream | PythonStream
"""Instructions that run one after another."""


def make_runner(slots: int) -> Runner:
    """A runner with an empty table: the native one where it was built, else the Python one."""
    module = native_runner()
    return PythonRunner(slots) if module is None else NativeRunner(module, slots)


def runner_kind() -> str:
    """Return "C++" or "Python", the kind of runner that `make_runner` returns. Calls cost less by
    the first."""
    return "Python" if native_runner() is None else "C++"


def seeded_call(
    call: Call, seed: Callable[[], int], device: torch.device, op: int, frees: tuple[int, ...] = ()
) -> RunFunction:
    """A call that draws numbers on a device, in front of which its generator is seeded. A runner's
    seeds are those of the CPU's generator alone."""
    run, takes = _as_function(call)
    generator = torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generator = torch.cuda.default_generators[device.index]

    def seeded(*tensors: Tensor) -> Any:
        generator.manual_seed(seed())
        return run(*tensors)

    return RunFunction(op, seeded, takes, call.results, frees)


class _Threads:
    """Threads that run functions at the same time, started when they are first needed. They end
    with the process."""

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Callable[[], None]]] = []  # of each thread
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._one_run = Lock()

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run each task in a thread of its own. Once all have ended, raise what one raised: not
        that it gave up, if another raised something else."""

        def serve(queue: SimpleQueue[Callable[[], None]]) -> None:
            set_up_thread(1)
            while True:
                try:
                    # The task has no name here, so the thread does not keep it while it waits.
                    queue.get()()
                # The thread that waits below raises it again, whatever it is.
                except BaseException as error:
                    self._results.put(error)
                else:
                    self._results.put(None)

        with self._one_run:
            while len(self._queues) < len(tasks):
                queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
                self._queues.append(queue)
                Thread(target=serve, args=(queue,), daemon=True).start()
            for queue, task in zip(self._queues, tasks, strict=False):
                queue.put(task)
            raised = [error for _ in tasks if (error := self._results.get()) is not None]
        if raised:
            raise next((error for error in raised if not isinstance(error, _Aborted)), raised[0])


def distinct(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The part of a tensor laid out by `strides` that has each element in memory once.

    Dimensions of stride 0 (expanded ones) are cut to length one, because torch refuses to write to
    a tensor that has one element in several places.
    """
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
