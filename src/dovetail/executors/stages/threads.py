"""Streams of kernels on a CPU: a thread a stream, of one intra-op thread, without Python's lock.

Each stream becomes one TorchScript function: its segments, and between them loops that wait for the
flags of events. A flag is an element of a list of integers that all streams share; it holds the
number of the last pass in which its kernel ended. Where a stream fails, another flag says which
run gives up: a thread that is late in leaving the run before must not mind.

    stream 0   values[3] = a(values[1])          stream 1   while flags[0] < epoch: ...
               flags[0] = epoch                             values[4] = b(values[3])

Values are handed over by reference. A pass ends with a barrier, so that the next one may write. A
loop that waits gives its core away now and then: where other programs want it, the thread that all
wait for must have it.
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
"""Between two `sched_yield`: some microseconds."""


def _give_way() -> None:
    os.sched_yield()


# TorchScript copies and drops graphs, and with them references to this function, without Python's
# lock. Threads that do so at the same time lose count: with few references it was freed in use.
_REFERENCES = [_give_way] * 2**16
_ignore: Any = torch.jit.ignore  # TorchScript calls it as the Python function that it is
_NAMES = {
    "List": typing.List,  # noqa: UP006  TorchScript's name
    "Tensor": Tensor,
    "RuntimeError": RuntimeError,
    "torch": torch,
    "give_way": _ignore(_give_way),
}


class StreamThreads:
    """Threads beside the caller's, of one intra-op thread. They treat denormals as the thread does
    that makes them."""

    def __init__(self, threads: int) -> None:
        self.size = threads
        self._seats: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(threads)]
        self._one_run = threading.Lock()
        self._unfinished: Task | None = None  # stops the tasks of a run that was interrupted
        for seat in self._seats:
            threading.Thread(target=_serve, args=(seat,), daemon=True).start()
        self._settle()
        torch.set_num_threads(torch.get_num_threads())  # new threads get what was set last anywhere

    def run(self, tasks: Sequence[Task], stop: Task) -> None:
        """The first task in the caller's thread, the others in threads of their own. The caller's
        task ends after all others have done their work. stop: makes every task of this run end.

        Raises what a task raised, once all have ended.
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
        if errors:
            raise next((e for e in errors if _ABORTED not in str(e)), errors[0])

    def close(self) -> None:
        """End the threads."""
        for seat in self._seats:
            seat.put(None)

    def _recover(self) -> None:
        """End a run that was interrupted, however far it came."""
        if self._unfinished is not None:
            self._unfinished()
            self._settle()
            self._unfinished = None

    def _settle(self) -> None:
        """Wait until no thread has anything to do."""
        done: SimpleQueue[None] = SimpleQueue()
        for seat in self._seats:
            seat.put(partial(done.put, None))
        for _ in self._seats:
            done.get()


def _serve(seat: "SimpleQueue[Task | None]") -> None:
    torch.get_num_threads()  # at its first use a thread takes over what another one has set
    torch.set_num_threads(1)
    with torch.inference_mode():
        while True:
            task = seat.get()
            if task is None:
                return
            task()
            del task  # and with it the values of a step


def _attempt(task: Task, stop: Task, errors: list[BaseException]) -> None:
    try:
        task()
    except BaseException as error:
        errors.append(error)
        stop()


class CompiledStreams:
    """Streams of segments, ready to run over and over. At most `crew.size` + 1 streams."""

    def __init__(
        self, segments: Sequence[Sequence[Segment]], functions: Functions, crew: StreamThreads
    ) -> None:
        self._crew = crew
        self._functions = functions  # compiled streams refer to them, and do not keep them
        awaited = [s.kernels[-1] for stream in segments for s in stream if s.event]
        self._flag_of = {kernel: flag for flag, kernel in enumerate(awaited)}
        self._ends = len(awaited)  # flags: of kernels, of streams' ends, of an abort
        self._abort = self._ends + len(segments)
        self._flags = script_list([0] * (self._abort + 1))
        self._epoch = 0
        with running():
            self._streams = [
                self._compile(stream, number, len(segments), functions)
                for number, stream in enumerate(segments)
            ]

    def run(self, values: Values, passes: int = 1) -> None:
        """Run all, `passes` times over, on and into the values of a step; within `running`."""
        # Else each thread would optimise its stream, and copy the graph: see `_compile`.
        assert not jit_optimizes(), "streams run within `running`"
        first = self._epoch + 1
        self._epoch += passes
        tasks = [partial(stream, values, self._flags, first, passes) for stream in self._streams]
        with ONE_AT_A_TIME:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                self._crew.run(tasks, partial(self._flags.__setitem__, self._abort, first))
            finally:
                torch.set_num_threads(threads)

    def _compile(
        self, segments: Sequence[Segment], number: int, streams: int, functions: Functions
    ) -> Any:
        """The stream as a TorchScript function (values, flags, first epoch, passes)."""
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
        # Its first call, here of no pass, prepares it.
        unit.stream(functions.values(), self._flags, 1, 0)
        return unit.stream

    def _wait(self, flag: int) -> list[str]:
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
    taken = ", ".join(f"values[{tensor}]" for tensor in function.takes)
    return [
        f"        made{place} = segment{place}({taken})",
        *(
            f"        values[{tensor}] = made{place}[{i}]"
            for i, tensor in enumerate(function.returns)
        ),
    ]
