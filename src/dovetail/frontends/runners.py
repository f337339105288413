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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.frontends.interpret import (
    Bound,
    Cells,
    bind,
    call_results,
)
from dovetail.frontends.program import Call, distinct_refs, fill_refs
from dovetail.runtime.native import native_runner
from dovetail.runtime.setup import set_up_thread
from dovetail.runtime.torch_versions import OpOverload
from dovetail.runtime.waiting import ABORTED, publish, publish_copy, wait

SKEW, LAID, NEXT = 63, 64, 128
"""A flag's value is `now`, a multiple of `NEXT`, plus the mark of the tensor that was sent, so that
it still grows from run to run. A kernel may round otherwise by where its inputs are and how they
lie, so that a copy keeps both.

SKEW    the bits of a mark that hold the tensor's address modulo a cache line
LAID    set in the mark of a tensor whose strides are not its place's; they stand behind it
"""
MOST_POINTERS = 64
"""A C function that a stream calls takes at most so many pointers."""
PLAIN_BYTES = 2**17
"""Up to this size a plain copy of adjacent bytes is quicker than torch's. Above it, torch's copy
wins, because it uses several threads."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in memory that another process reads or writes.

    address   of its first byte, at skew 0
    bytes     from there on, gaps that its strides leave included
    strides   those that were captured. A tensor that is sent may have others, if it needs no more
              bytes; they stand behind it then
    """

    address: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

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
        """[dimensions] the strides of a tensor that is laid out otherwise, in the same memory."""
        return _int64s(self.address + strides_offset(self.bytes), len(self.shape))

    def tensor(self, mark: int = 0) -> Tensor:
        """The tensor of this mark.

        Each has a torch storage of its own, because some ops address the storage from its start.
        """
        strides = tuple(self.laid) if mark & LAID else self.strides
        if not self.bytes:
            return torch.empty_strided(self.shape, strides, dtype=getattr(torch, self.dtype))
        memory = (ctypes.c_uint8 * self.bytes).from_address(self.address + (mark & SKEW))
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


def strides_offset(size_bytes: int) -> int:
    """How far behind its beginning a place of so many bytes has its tensor's strides."""
    return -(-size_bytes // 8) * 8 + SKEW + 1


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

    def stream(self) -> "NativeStream":
        """A new stream without instructions."""
        return NativeStream(self)

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
    """Instructions of a native runner that run one after another.

    tag     what the caller calls an instruction: `failed` of the runner after an error
    frees   entries of the table that are emptied after the instruction
    """

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self.inner = runner.module.Stream()

    def call(self, call: Call, *, tag: int, frees: Sequence[int] = (), seed: int = -1) -> None:
        """Run a call; its `Ref`s and results are entries of the table. `seed` is the place among
        the runner's seeds of one that draws numbers."""
        # A call that cannot be told to C++ is made from Python, where it works or fails as always.
        with suppress(RuntimeError, TypeError):
            if isinstance(call.target, OpOverload):
                schema, refs = call.target._schema, distinct_refs((call.args, call.kwargs))
                values = {tensor: self._runner.stands_for[tensor] for tensor in refs}
                self.inner.add_call(
                    tag, schema.name, schema.overload_name,
                    tuple(fill_refs(list(call.args), values)), fill_refs(call.kwargs, values),
                    [(value, tensor) for tensor, value in values.items()],
                    list(call.results), list(frees), seed, call.in_grad_mode,
                )  # fmt: skip
                return
        run, takes = _as_function(call)
        self.inner.add_python(tag, run, takes, list(call.results), list(frees), seed)

    def function(
        self,
        run: Callable[..., Any],
        takes: Sequence[int],
        results: Sequence[int],
        *,
        tag: int,
        frees: Sequence[int] = (),
    ) -> None:
        """Run a Python function of the entries `takes`, and store the tensors that it returns.

        It must not refer to what holds the runner: garbage collection does not see through C++.
        """
        self.inner.add_python(tag, run, list(takes), list(results), list(frees), -1)

    def kernel(
        self, address: int, takes: Sequence[int], *, tag: int, frees: Sequence[int] = ()
    ) -> None:
        """Call the C function at an address with pointers to the data of the entries `takes`, at
        most `MOST_POINTERS`. It writes its results there as well."""
        self.inner.add_kernel(tag, address, list(takes), list(frees))

    def expect(self, slot: int, shape: Sequence[int], strides: Sequence[int], *, tag: int) -> None:
        """Raise `RuntimeError` unless the value of an entry has this shape and these strides.
        Where a dimension has one element its stride does not count."""
        self.inner.add_expect(tag, slot, list(shape), list(strides))

    def wait(self, flag: int, *, tag: int) -> None:
        """Wait until the flag is at least `now`."""
        self.inner.add_wait(tag, flag)

    def receive(self, flag: int, slot: int, place: TensorPlace, *, tag: int) -> None:
        """Wait for the flag, and make the tensor at `place` the value of an entry."""
        dtype = getattr(torch, place.dtype)
        self.inner.add_receive(
            tag, flag, slot, place.address, place.address + strides_offset(place.bytes),
            list(place.shape), list(place.strides), dtype,
        )  # fmt: skip

    def publish(self, flag: int, *, tag: int) -> None:
        """Set the flag to `now`."""
        self.inner.add_publish(tag, flag)

    def send(
        self, flag: int, slot: int, place: TensorPlace, *, tag: int, frees: Sequence[int] = ()
    ) -> None:
        """Copy the value of an entry to `place`, and set the flag to `now` plus its mark."""
        plain = place.bytes <= PLAIN_BYTES and place.is_contiguous
        self.inner.add_send(
            tag, flag, slot, place.address, place.address + strides_offset(place.bytes),
            list(place.shape), list(place.strides), getattr(torch, place.dtype), place.bytes, plain,
            list(frees),
        )  # fmt: skip

    def fork(self, streams: Sequence[Any], *, tag: int, frees: Sequence[int] = ()) -> None:
        """Run streams of the same runner at the same time, each op on one thread, and wait for all.
        A single one runs as if its instructions stood here."""
        self.inner.add_fork(tag, [stream.inner for stream in streams], list(frees))


def _as_function(call: Call) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """(the call as a function of the tensors that it reads, these), as `Stream.function` takes
    them."""
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

    def stream(self) -> "PythonStream":
        return PythonStream(self)

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
        begun = _int64s(progress, 1) if progress else None
        times = _int64s(stamps, 2 * len(stream.instructions)) if stamps else None
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
    """Stands for a `NativeStream`: (tag, function without arguments) of each instruction."""

    def __init__(self, runner: PythonRunner) -> None:
        self._runner = runner
        self.instructions: list[tuple[int, Bound]] = []

    def call(self, call: Call, *, tag: int, frees: Sequence[int] = (), seed: int = -1) -> None:
        runner = self._runner
        bound = bind(call, runner.cells, tuple(frees), lambda: runner.seeds[seed])
        self.instructions.append((tag, bound))

    def function(
        self,
        run: Callable[..., Any],
        takes: Sequence[int],
        results: Sequence[int],
        *,
        tag: int,
        frees: Sequence[int] = (),
    ) -> None:
        cells = self._runner.cells

        def call() -> None:
            made = run(*[cells[slot] for slot in takes])
            for slot, value in zip(results, made or (), strict=True):
                if slot >= 0:
                    cells[slot] = value
            for slot in frees:
                cells[slot] = None

        self.instructions.append((tag, call))

    def kernel(
        self, address: int, takes: Sequence[int], *, tag: int, frees: Sequence[int] = ()
    ) -> None:
        runner = self._runner
        # ctypes calls it without Python's lock.
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(takes))(address)

        def call() -> None:
            function(*[runner.cells[slot].data_ptr() for slot in takes])
            runner.clear(frees)

        self.instructions.append((tag, call))

    def expect(self, slot: int, shape: Sequence[int], strides: Sequence[int], *, tag: int) -> None:
        cells, wanted = self._runner.cells, list(zip(shape, strides, strict=True))

        def call() -> None:
            value = cells[slot]
            own = list(zip(value.shape, value.stride(), strict=True))
            fits = tuple(value.shape) == tuple(shape) and (
                not value.numel()
                or all(a == b for a, b in zip(own, wanted, strict=True) if a[0] != 1)
            )
            if not fits:
                raise RuntimeError(
                    f"compiled code was made for sizes {list(shape)} and strides {list(strides)} "
                    "of an input, which has others"
                )

        self.instructions.append((tag, call))

    def wait(self, flag: int, *, tag: int) -> None:
        run = self._runner.current

        def call() -> None:
            if wait(flag, run.now, run.abort, run.spin_ns) == ABORTED:
                raise _Aborted

        self.instructions.append((tag, call))

    def receive(self, flag: int, slot: int, place: TensorPlace, *, tag: int) -> None:
        run, cells, mark, value = self._runner.current, self._runner.cells, 0, place.tensor()

        def call() -> None:
            nonlocal mark, value
            reached = wait(flag, run.now, run.abort, run.spin_ns)
            if reached == ABORTED:
                raise _Aborted
            # Only where something has changed is the view made anew.
            if reached % NEXT != mark or mark & LAID:
                mark = reached % NEXT
                value = place.tensor(mark)
            cells[slot] = value

        self.instructions.append((tag, call))

    def publish(self, flag: int, *, tag: int) -> None:
        run = self._runner.current
        self.instructions.append((tag, lambda: publish(flag, run.now)))

    def send(
        self, flag: int, slot: int, place: TensorPlace, *, tag: int, frees: Sequence[int] = ()
    ) -> None:
        run, cells = self._runner.current, self._runner.cells
        may_be_plain = place.bytes <= PLAIN_BYTES and place.is_contiguous
        last, copy, dtype = -1, place.tensor(), getattr(torch, place.dtype)

        def call() -> None:
            nonlocal last, copy
            value = cells[slot]
            source = value.data_ptr()
            mark = source & SKEW
            is_alike = (
                value.dtype == dtype
                and value.shape == place.shape
                and not (value.is_neg() or value.is_conj())
            )
            if is_alike and value.stride() != place.strides and place.takes(value):
                mark |= LAID
                place.laid[:] = value.stride()
            if is_alike and may_be_plain and value.is_contiguous():
                target = place.address + (source & SKEW)
                publish_copy(flag, run.now + mark, target, source, place.bytes)
            else:
                # Addresses mostly stay the same from run to run, so the view is kept.
                if mark != last or mark & LAID:
                    last = mark
                    copy = distinct(place.tensor(mark), place.strides)
                copy.copy_(distinct(value, place.strides))
                publish(flag, run.now + mark)
            for free in frees:
                cells[free] = None

        self.instructions.append((tag, call))

    def fork(self, streams: Sequence[Any], *, tag: int, frees: Sequence[int] = ()) -> None:
        runner = self._runner

        def call() -> None:
            if len(streams) > 1:
                runner.run_together(streams)
            else:
                for own, instruction in streams[0].instructions:
                    try:
                        instruction()
                    except Exception:
                        runner.failed = own
                        raise
            runner.clear(frees)

        self.instructions.append((tag, call))


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


def add_seeded(
    stream: Stream,
    call: Call,
    seed: Callable[[], int],
    device: torch.device,
    *,
    tag: int,
    frees: Sequence[int] = (),
) -> None:
    """Add a call that draws numbers on a device, in front of which its generator is seeded. The
    seeds of a runner are those of the CPU's generator alone."""
    run, takes = _as_function(call)
    generator = torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generator = torch.cuda.default_generators[device.index]

    def seeded(*tensors: Tensor) -> Any:
        generator.manual_seed(seed())
        return run(*tensors)

    stream.function(seeded, takes, call.results, tag=tag, frees=frees)


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


def _int64s(address: int, count: int) -> Any:
    """`count` int64 in memory at `address`."""
    return (ctypes.c_int64 * count).from_address(address)
