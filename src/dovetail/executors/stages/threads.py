"""Runs streams of kernels on a CPU, each in a thread of its own and without Python's lock.

Each stream becomes one TorchScript function: its segments, and between them loops that wait for
the flags of events. Each stream's thread runs its ops alone (one intra-op thread). A flag is an
element of a list of integers that all streams share. It holds the number of the last pass in which
its kernel ended. When a stream fails, one more flag is set to the number of the run that
gives up. It is a number and not a boolean, so that a thread that is late in leaving an earlier run
is not stopped by it.

    stream 0   values[3] = a(values[1])          stream 1   while flags[0] < epoch: ...
               flags[0] = epoch                             values[4] = b(values[3])

Values are handed over by reference. A pass ends with a barrier, so that the next pass may write
over the values. A loop that waits gives its core away now and then: if other programs keep the
cores busy, the thread that all others wait for must get one.
"""

import os
import threading
import typing
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from dovetail.executors.stages.functions import (
    ONE_AT_A_TIME,
    Function,
    Functions,
    Values,
    quiet,
    running,
)
from dovetail.executors.stages.segments import Segment
from dovetail.runtime.torch_versions import inline_calls, jit_optimizes, script_list

Task = Callable[[], None]

_ABORTED = "another stream failed"
_LOOKS = 64
"""A loop that waits looks at its flag this often, some microseconds, between two `sched_yield`."""


def _give_way() -> None:
    os.sched_yield()


# TorchScript copies and drops graphs, and with them references to `_give_way`, without Python's
# lock. Threads that do so at the same time miscount the references. With few references the
# function was freed while it was in use; this many more keep the count above zero.
_REFERENCES = [_give_way] * 2**16
# `torch.jit.ignore` has TorchScript call a function in Python instead of compiling it.
_ignore: Any = torch.jit.ignore
_NAMES = {
    "List": typing.List,  # noqa: UP006  TorchScript's name
    "Tensor": Tensor,
    "RuntimeError": RuntimeError,
    "torch": torch,
    "give_way": _ignore(_give_way),
}


class StreamThreads:
    """Threads that run streams beside the caller's thread, each with one intra-op thread.

    They treat denormals as the thread does that creates them.
    """

    def __init__(self, threads: int) -> None:
        self.size = threads
        self._seats: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(threads)]
        self._one_run = threading.Lock()
        # While a run is on: the task that stops it. It is still set after an interrupted run.
        self._unfinished: Task | None = None
        for seat in self._seats:
            threading.Thread(target=_serve, args=(seat,), daemon=True).start()
        self._settle()
        # A new thread takes over the number of threads that any thread set last. The threads above
        # have set it to one, so the caller's number is set again for threads that start later.
        torch.set_num_threads(torch.get_num_threads())

    def run(self, tasks: Sequence[Task], stop: Task) -> None:
        """Run the first task in the caller's thread and each of the others in a thread of its own.

        The first task must end only after all others have done their work. Calling `stop` makes
        every task of this run end. Raises what a task raised, once all have ended.
        """
        assert len(tasks) <= self.size + 1
        errors: list[BaseException] = []
        with self._one_run:
            self._recover()
            self._unfinished = stop
            try:
                for seat, task in zip(self._seats, tasks[1:], strict=False):
                    seat.put(partial(_attempt, task, stop, errors))
                tasks[0]()
                self._unfinished = None
            except BaseException as error:
                errors.insert(0, error)
                self._recover()
        # Streams that gave up because another one failed raise as well. The cause goes first.
        if errors:
            raise next((e for e in errors if _ABORTED not in str(e)), errors[0])

    def close(self) -> None:
        """End the threads."""
        for seat in self._seats:
            seat.put(None)

    def _recover(self) -> None:
        """Stop the run before this one, if it was interrupted, and wait for its tasks to end."""
        if self._unfinished is not None:
            self._unfinished()
            self._settle()
            self._unfinished = None

    def _settle(self) -> None:
        """Wait until every thread has done all that is in its queue."""
        done: SimpleQueue[None] = SimpleQueue()
        for seat in self._seats:
            seat.put(partial(done.put, None))
        for _ in self._seats:
            done.get()


def _serve(seat: "SimpleQueue[Task | None]") -> None:
    # At its first use of torch a thread takes over the number that another thread set last. That
    # use comes first here, so that it does not undo the next line.
    torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        while True:
            task = seat.get()
            if task is None:
                return
            task()
            # The task holds the values of a step, which must not live on while this thread waits.
            del task


def _attempt(task: Task, stop: Task, errors: list[BaseException]) -> None:
    """Run the task. If it raises, keep the error and stop the others, which may wait for it."""
    try:
        task()
    except BaseException as error:
        errors.append(error)
        stop()


class CompiledStreams:
    """Compiled streams of segments, ready to run repeatedly; at most `threads.size` + 1 streams."""

    def __init__(
        self, segments: Sequence[Sequence[Segment]], functions: Functions, threads: StreamThreads
    ) -> None:
        self._threads = threads
        # Compiled streams call these functions but do not keep them alive.
        self._functions = functions
        awaited = [s.kernels[-1] for stream in segments for s in stream if s.event]
        self._flag_of = {kernel: flag for flag, kernel in enumerate(awaited)}
        # The flags in order: one per awaited kernel, one per stream for its end, one for an abort.
        self._ends = len(awaited)
        self._abort = self._ends + len(segments)
        self._flags = script_list([0] * (self._abort + 1))
        self._epoch = 0
        with running():
            self._streams = [
                self._compile(stream, number, len(segments), functions)
                for number, stream in enumerate(segments)
            ]

    def run(self, values: Values, passes: int = 1) -> None:
        """Run all streams `passes` times on the values of a step. Call it within `running`."""
        # Otherwise each thread would optimise its stream and copy the graph, at the same time and
        # without Python's lock, which miscounts references (see `_REFERENCES`).
        assert not jit_optimizes(), "streams run within `running`"
        first = self._epoch + 1
        self._epoch += passes
        tasks = [partial(stream, values, self._flags, first, passes) for stream in self._streams]
        # The caller's thread runs the first stream, so it has one intra-op thread meanwhile.
        with ONE_AT_A_TIME:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                self._threads.run(tasks, partial(self._flags.__setitem__, self._abort, first))
            finally:
                torch.set_num_threads(threads)

    def _compile(
        self, segments: Sequence[Segment], number: int, streams: int, functions: Functions
    ) -> Any:
        """The stream as a TorchScript function of (values, flags, first epoch, passes)."""
        names: dict[str, Any] = dict(_NAMES)
        lines = [
            "def stream(values: List[Tensor], flags: List[int], first: int, passes: int) -> None:",
            "    nothing = torch.empty(0)",
            "    for epoch in range(first, first + passes):",
        ]
        for place, segment in enumerate(segments):
            function = functions.of(segment.kernels)
            names[f"segment{place}"] = function.run
            for kernel in segment.waits:
                lines += self._wait(self._flag_of[kernel])
            lines += _call(place, function)
            lines += [f"        values[{tensor}] = nothing" for tensor in segment.frees]
            if segment.event:
                lines.append(f"        flags[{self._flag_of[segment.kernels[-1]]}] = epoch")
        lines.append(f"        flags[{self._ends + number}] = epoch")
        for other in range(streams):
            if other != number:
                lines += self._wait(self._ends + other)
        with quiet():
            unit = torch.jit.CompilationUnit()
            unit.define("\n".join(lines) + "\n", rcb=names.get)
            inline_calls(unit.stream)
        # The first call makes TorchScript prepare the function. Here it is a call of no pass, made
        # while no other stream runs, so that graphs are copied by one thread at a time.
        unit.stream(functions.values(), self._flags, 1, 0)
        return unit.stream

    def _wait(self, flag: int) -> list[str]:
        """Lines that wait until the flag reaches this pass, and raise if this run was stopped."""
        return [
            "        looks = 0",
            f"        while flags[{flag}] < epoch:",
            "            looks += 1",
            f"            if looks == {_LOOKS}:",
            "                looks = 0",
            "                give_way()",
            f"                if flags[{self._abort}] == first:",
            f"                    raise RuntimeError('{_ABORTED}')",
        ]


def _call(place: int, function: Function) -> list[str]:
    """Lines that call a segment and store what it returns."""
    taken = ", ".join(f"values[{tensor}]" for tensor in function.takes)
    return [
        f"        made{place} = segment{place}({taken})",
        *(
            f"        values[{tensor}] = made{place}[{i}]"
            for i, tensor in enumerate(function.returns)
        ),
    ]
