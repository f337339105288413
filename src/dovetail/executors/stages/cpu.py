"""Runs a scheduled inference step on the CPU, in this process.

    with all threads    a ─► b ─┐                     ┌─► g
    stream 0                    └─► c ──► e ──────┐   │
    stream 1                        d ──────► f ──┴───┘

The schedule is checked for races before anything runs.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.executors.stages.functions import Functions
from dovetail.executors.stages.phases import SchedulePhase, joined
from dovetail.executors.stages.preparing import PreparedKernels
from dovetail.executors.stages.segments import Segment, segments_of
from dovetail.frontends.program import Ref
from dovetail.frontends.runners import Runner, Stream, make_runner
from dovetail.runtime.torch_versions import pytree, without_autocast
from dovetail.schedulers.blocks import part_of
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.races import check_races
from dovetail.schedulers.records import KernelBlock

_ONE_AT_A_TIME = threading.RLock()
"""The lock that is held while a step runs: all steps share this process's cores and threads."""
_FLAG_INT64S = 8
"""Flags have a cache line each."""


class CpuStep:
    """A step that can be called: step(*inputs) returns the outputs as the captured module does.

    Raises `RaceError` for phases that name a kernel twice or not at all, or that can collide.
    """

    def __init__(
        self,
        prepared: PreparedKernels,
        block: KernelBlock,
        phases: Sequence[SchedulePhase],
        functions: Functions,
        threads: int,
    ) -> None:
        check_phases(block, phases)
        phases = [phase for phase in phases if phase.kernels]
        self._prepared, self._threads = prepared, threads
        self._wanted = [
            (tuple(functions.example[t].shape), functions.example[t].dtype) for t in prepared.inputs
        ]
        # [phases] segments of each stream; None: the kernels run one after another.
        segments: list[list[list[Segment]] | None] = []
        frees = []
        for phase, (inside, after) in zip(phases, _frees(prepared, phases), strict=True):
            own = None if phase.streams is None else segments_within(block, phase.streams, inside)
            # A tensor that no segment may drop, since none has all its readers behind it, is
            # dropped at the end of the phase.
            given_up = {t for stream in own or () for segment in stream for t in segment.frees}
            segments.append(own)
            frees.append([*after, *(t for t in inside if own is not None and t not in given_up)])
        runs = [
            functions.of(kernels)
            for phase, own in zip(phases, segments, strict=True)
            for kernels in (
                [phase.kernels]
                if own is None
                else [segment.kernels for stream in own for segment in stream]
            )
        ]
        self._runner = make_runner(functions.entries)
        functions.fill_constants(self._runner, runs)
        self._held = frozenset(functions.constants)
        self._entries = functions.entries
        # Tensors that are still in the table after the last phase. They are dropped from it, so
        # that only the caller holds what a step returns.
        self._left = [t for t in (*prepared.inputs, *prepared.returned) if t not in self._held]
        self._flags = SegmentFlags(
            segment for own in segments for stream in own or () for segment in stream
        )
        self._epoch = 0
        self._stream = self._runner.stream()
        for phase, own, dropped in zip(phases, segments, frees, strict=True):
            if own is None:
                whole = functions.of(phase.kernels)
                whole.add_to(self._stream, self._runner, frees=dropped)
            else:
                streams = streams_of(own, functions, self._runner, self._flags)
                # A single stream runs in this thread, which otherwise uses all of the device's.
                if len(streams) == 1:
                    self._set_threads_in_stream(1)
                self._stream.fork(streams, tag=0, frees=dropped)
                if len(streams) == 1:
                    self._set_threads_in_stream(threads)

    def __call__(self, *inputs: Tensor) -> Any:
        """Run a step. Raises `UsageError` for inputs unlike those of the capture."""
        prepared, runner = self._prepared, self._runner
        # The calls do not check this: they would compute something from any input.
        if len(inputs) != len(self._wanted):
            raise UsageError("inputs", f"{len(self._wanted)} are needed, not {len(inputs)}")
        for place, (value, wanted) in enumerate(zip(inputs, self._wanted, strict=True)):
            if not isinstance(value, Tensor):
                raise UsageError("inputs", f"input {place} must be a tensor, not {value!r}")
            given = (tuple(value.shape), value.dtype)
            if given != wanted or value.device.type != "cpu":
                raise UsageError(
                    "inputs",
                    f"input {place} must be {wanted[1]} {list(wanted[0])} on the CPU, as when it "
                    f"was captured, not {given[1]} {list(given[0])} on {value.device}",
                )
        # The capture has settled the dtypes, and threads of streams would not see an autocast.
        with _ONE_AT_A_TIME, torch.inference_mode(), without_autocast():
            before, has_run = torch.get_num_threads(), False
            self._epoch += 1
            try:
                torch.set_num_threads(self._threads)
                for tensor, value in zip(prepared.inputs, inputs, strict=True):
                    runner.set(tensor, prepared.laid_out(value))
                runner.run(self._stream, now=self._epoch)
                has_run = True
                return pytree.tree_map_only(Ref, self._result, prepared.outputs)
            finally:
                # After an error any tensor may be left in the table, so all are dropped then.
                every = () if has_run else range(self._entries)
                runner.clear(self._left if has_run else [t for t in every if t not in self._held])
                torch.set_num_threads(before)

    def _set_threads_in_stream(self, threads: int) -> None:
        # The function must not refer to this object, which holds the stream: a C++ stream takes no
        # part in garbage collection.
        self._stream.function(partial(torch.set_num_threads, threads), [], [], tag=0)

    def _result(self, ref: Ref) -> Tensor:
        constant = self._prepared.constants.get(ref.tensor)
        value = self._runner.get(ref.tensor) if constant is None else constant
        assert value is not None, "the step has made it"
        return value


class SegmentFlags:
    """A flag for each segment that another stream waits for, by the segment's last kernel."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        awaited = [segment.kernels[-1] for segment in segments if segment.event]
        # A cache line more, so that the first flag can begin where a line does.
        self._memory = np.zeros(_FLAG_INT64S * (len(awaited) + 1), dtype=np.int64)
        begin = -(-int(self._memory.ctypes.data) // 64) * 64
        self.address_of = {kernel: begin + 64 * place for place, kernel in enumerate(awaited)}


def streams_of(
    segments: Sequence[Sequence[Segment]],
    functions: Functions,
    runner: Runner,
    flags: SegmentFlags,
) -> list[Stream]:
    """[streams] what runs the segments of each stream."""
    streams = []
    for of_stream in segments:
        stream = runner.stream()
        for segment in of_stream:
            for kernel in segment.waits:
                stream.wait(flags.address_of[kernel], tag=0)
            functions.of(segment.kernels).add_to(stream, runner, frees=segment.frees)
            if segment.event:
                stream.publish(flags.address_of[segment.kernels[-1]], tag=0)
        streams.append(stream)
    return streams


class SegmentStreams:
    """Streams of segments of an example step, ready to run repeatedly by themselves."""

    def __init__(self, segments: Sequence[Sequence[Segment]], functions: Functions) -> None:
        runs = [functions.of(segment.kernels) for stream in segments for segment in stream]
        self._runner = make_runner(functions.entries)
        functions.fill_constants(self._runner, runs)
        made = {tensor for function in runs for tensor in function.returns}
        for function in runs:
            for tensor in function.takes:
                if tensor not in made and tensor not in functions.constants:
                    self._runner.set(tensor, functions.example[tensor])
        self._flags = SegmentFlags(segment for stream in segments for segment in stream)
        self._streams = streams_of(segments, functions, self._runner, self._flags)
        self._epoch = 0

    def run(self, passes: int = 1) -> None:
        """Run all streams `passes` times."""
        first = self._epoch + 1
        self._epoch += passes
        with _ONE_AT_A_TIME:
            self._runner.run_streams(self._streams, first=first, passes=passes)

    def value(self, tensor: int) -> Tensor | None:
        """The tensor that the last pass has made; None if it was freed."""
        return self._runner.get(tensor)


def check_phases(block: KernelBlock, phases: Sequence[SchedulePhase]) -> None:
    """Raise `RaceError` unless every kernel runs once, after all that it reads."""
    check_races(block, joined(phases))


def segments_within(
    block: KernelBlock, streams: Streams, readers: Mapping[int, Sequence[int]]
) -> list[list[Segment]]:
    """[streams] segments of streams that run only some kernels of a block.

    `segments_of` wants a whole block, so kernels are renumbered for it and numbered back after.
    """
    part = part_of(block, sum(1 << k for order in streams.orders for k in order))
    place = {kernel: i for i, kernel in enumerate(part.ops)}
    local = Streams(
        tuple(tuple(place[k] for k in order) for order in streams.orders),
        tuple((place[event], place[k]) for event, k in streams.waits),
    )
    found = segments_of(
        part.block, local, {t: [place[k] for k in kernels] for t, kernels in readers.items()}
    )
    return [
        [
            Segment(
                tuple(part.ops[k] for k in segment.kernels),
                tuple(part.ops[k] for k in segment.waits),
                segment.event,
                segment.frees,
            )
            for segment in stream
        ]
        for stream in found
    ]


def _frees(
    prepared: PreparedKernels, phases: Sequence[SchedulePhase]
) -> list[tuple[dict[int, list[int]], list[int]]]:
    """[phases] (tensors that streams of the phase may drop, tensors to drop at the phase's end).

    The first, each with the kernels that use it, are made and read within this phase of streams
    alone. The second are used here for the last time.
    """
    home = {k: number for number, phase in enumerate(phases) for k in phase.kernels}
    users: dict[int, list[int]] = {}
    for kernel in sorted(home):
        for tensor in (*prepared.kernels[kernel].writes, *prepared.kernels[kernel].reads):
            users.setdefault(tensor, []).append(kernel)
    found: list[tuple[dict[int, list[int]], list[int]]] = [({}, []) for _ in phases]
    for tensor, kernels in users.items():
        if tensor in prepared.returned:
            continue
        last = max(home[kernel] for kernel in kernels)
        streamed = phases[last].streams is not None
        if streamed and tensor not in prepared.inputs and home[kernels[0]] == last:
            found[last][0][tensor] = kernels
        else:
            found[last][1].append(tensor)
    return found
