"""Runs a scheduled inference step on the CPU, in this process.

    with all threads    a ─► b ─┐                     ┌─► g
    stream 0                    └─► c ──► e ──────┐   │
    stream 1                        d ──────► f ──┴───┘

The schedule is checked for races before anything runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.executors.stages.functions import Functions, Values, running
from dovetail.executors.stages.phases import SchedulePhase, joined
from dovetail.executors.stages.preparing import PreparedKernels
from dovetail.executors.stages.segments import Segment, segments_of
from dovetail.executors.stages.threads import CompiledStreams, StreamThreads
from dovetail.frontends.program import Ref
from dovetail.runtime.torch_versions import pytree
from dovetail.schedulers.blocks import part_of
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.races import check_races
from dovetail.schedulers.records import KernelBlock


@cache
def stream_threads(threads: int) -> StreamThreads:
    """This process's threads beside the caller's. All steps share them, as steps run in turn."""
    return StreamThreads(threads)


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
        self._values = functions.values()
        self._nothing = self._values[-1]
        # Tensors that are still in the list after the last phase. They are dropped from it, so that
        # only the caller holds what a step returns.
        self._left = [t for t in (*prepared.inputs, *prepared.returned) if t < functions.size]
        frees = _frees(prepared, phases)
        self._phases = [
            _Whole(functions, phase.kernels, after)
            if phase.streams is None
            else _Streamed(functions, block, phase, inside, after)
            for phase, (inside, after) in zip(phases, frees, strict=True)
        ]

    def __call__(self, *inputs: Tensor) -> Any:
        self._check(inputs)
        prepared, values = self._prepared, self._values
        before = torch.get_num_threads()
        # After an error any tensor may be left in the list, so all are dropped then.
        left: Iterable[int] = range(len(values))
        with running():
            try:
                for tensor, value in zip(prepared.inputs, inputs, strict=True):
                    values[tensor] = prepared.laid_out(value)
                for phase in self._phases:
                    phase.run(values, self._threads)
                left = self._left
                return pytree.tree_map_only(Ref, self._result, prepared.outputs)
            finally:
                for tensor in left:
                    values[tensor] = self._nothing
                torch.set_num_threads(before)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        """Raise `UsageError` for inputs unlike those of the capture.

        TorchScript functions do not check this: they would compute something from any input.
        """
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

    def _result(self, ref: Ref) -> Tensor:
        found = self._prepared.constants.get(ref.tensor)
        return self._values[ref.tensor] if found is None else found


def check_phases(block: KernelBlock, phases: Sequence[SchedulePhase]) -> None:
    """Raise `RaceError` unless every kernel runs once, after all that it reads."""
    check_races(block, joined(phases))


class _Whole:
    """A phase that runs kernels one after another, each on all threads."""

    def __init__(self, functions: Functions, kernels: Sequence[int], frees: Sequence[int]) -> None:
        self._function = functions.of(kernels)
        self._frees = frees
        self._nothing = torch.empty(0)

    def run(self, values: Values, threads: int) -> None:
        torch.set_num_threads(threads)
        function = self._function
        made = function.run(*[values[tensor] for tensor in function.takes])
        for tensor, value in zip(function.returns, made, strict=True):
            values[tensor] = value
        for tensor in self._frees:
            values[tensor] = self._nothing


class _Streamed:
    """A phase that runs kernels on streams, each stream on one thread."""

    def __init__(
        self,
        functions: Functions,
        block: KernelBlock,
        phase: SchedulePhase,
        inside: Mapping[int, Sequence[int]],
        after: Sequence[int],
    ) -> None:
        assert phase.streams is not None
        segments = segments_within(block, phase.streams, inside)
        self._threads = CompiledStreams(segments, functions, stream_threads(len(segments) - 1))
        # A tensor that no segment may drop, since none has all its readers behind it, is dropped at
        # the end of the phase.
        given_up = {t for stream in segments for segment in stream for t in segment.frees}
        self._frees = (*after, *(t for t in inside if t not in given_up))
        self._nothing = torch.empty(0)

    def run(self, values: Values, _threads: int) -> None:
        self._threads.run(values)
        for tensor in self._frees:
            values[tensor] = self._nothing


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
