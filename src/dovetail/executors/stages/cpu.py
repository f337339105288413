"""Runs a scheduled inference step on the CPU, in this process, as instructions of one runner.

    with all threads    a ─► b ─┐                     ┌─► g
    stream 0                    └─► c ──► e ──────┐   │
    stream 1                        d ──────► f ──┴───┘

The schedule is checked for races before anything runs.

Kernels become lists of ATen calls, which runners run without Python's lock. Most calls of a kernel
are ATen calls already. Those that are Python functions (a convolution that chooses its library,
merged kernels) are run once on the tensors of an example step, and the ATen calls that they make
are recorded. So they must make the same calls for every input of these shapes. Calls name tensors
by entries of a runner's table: the graph's tensors by their numbers, and behind them constants and
what only a recorded call reads.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.executors.stages.issuing import Segments, StreamInstruction, segments_of
from dovetail.executors.stages.merging import merged_function
from dovetail.executors.stages.phases import SchedulePhase, joined
from dovetail.executors.stages.preparing import Layered, PreparedKernels, Seeded, run_prepared
from dovetail.frontends.instructions import (
    BoundInstruction,
    RunFunction,
    RunKernels,
    RunLanes,
    RunOp,
    SendTensor,
    last_touched,
    touched_by,
)
from dovetail.frontends.program import Call, Ref, distinct_refs
from dovetail.frontends.recorded_calls import CallRecorder
from dovetail.frontends.runners import Runner, make_runner
from dovetail.runtime.torch_versions import pytree, without_autocast
from dovetail.schedulers.races import check_races
from dovetail.schedulers.records import KernelBlock

_ONE_AT_A_TIME = threading.RLock()
"""The lock that is held while a step runs: all steps share this process's cores and threads."""
_FLAG_INT64S = 8
"""Flags have a cache line each."""


@dataclass(frozen=True, eq=False)
class Function:
    """Calls that run one after another: they read `takes` and make `returns`, which others read.

    constants   the entries that hold constants. They stay, also where a call writes over one
    """

    calls: tuple[Call, ...]
    takes: tuple[int, ...]
    returns: tuple[int, ...]
    constants: frozenset[int] = frozenset()

    def instructions(self, runner: Runner, frees: Sequence[int] = ()) -> list[BoundInstruction]:
        """The calls as instructions of the runner, which gets their seeds.

        frees   entries that are emptied after the last call. Those that only these calls read are
                emptied after their last use
        """
        if not self.calls:
            return [RunFunction(0, tuple, frees=tuple(frees))] if frees else []
        kept = {*self.takes, *self.returns, *self.constants}
        after = last_touched([touched_by(call) for call in self.calls], kept)
        after[-1] += tuple(frees)
        instructions: list[BoundInstruction] = []
        for call, drops in zip(self.calls, after, strict=True):
            seed = -1
            if isinstance(call.target, Seeded):
                runner.seeds.append(call.target.seed)
                seed = len(runner.seeds) - 1
                call = replace(call, target=call.target.target, random=True)
            instructions.append(RunOp(0, drops, call, seed))
        return instructions


class Functions:
    """The calls of a prepared step's kernels, each run of kernels made once.

    example   tensor -> its value in an example step
    merges    groups of kernels that run as one kernel. The kernels of a group follow one another
              in every list of kernels that `of` is asked for
    """

    def __init__(
        self,
        prepared: PreparedKernels,
        example: Mapping[int, Tensor],
        merges: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.prepared = prepared
        self.example = example
        self.constants = dict(prepared.constants)
        named = {
            tensor
            for kernel in prepared.kernels
            for call in kernel.calls
            for tensor in touched_by(call)
        }
        self.entries = 1 + max((*named, *example, *self.constants), default=0)
        """The size of the table that the calls made so far need."""
        self._merges = {merged[0]: merged for merged in merges}
        self._known: dict[tuple[int, ...], Function] = {}

    def merging(self, merges: Sequence[tuple[int, ...]]) -> "Functions":
        """Functions of the same step, with these merges."""
        return Functions(self.prepared, self.example, merges)

    def of(self, kernels: Sequence[int]) -> Function:
        """The calls that run these kernels one after another."""
        kernels = tuple(kernels)
        if kernels in self._known:
            return self._known[kernels]
        calls: list[Call] = []
        takes: dict[int, None] = {}
        returns: dict[int, None] = {}
        place = 0
        with torch.inference_mode():
            while place < len(kernels):
                merged = self._merges.get(kernels[place])
                own = kernels[place : place + 1] if merged is None else merged
                assert tuple(kernels[place : place + len(own)]) == tuple(own)
                if merged is None:
                    _, taken, returned = self.prepared.function(own)
                    calls += self._calls_of(own[0])
                else:
                    run, taken, returned = merged_function(self.prepared, list(own))
                    calls += self._recorded(run, {t: self.example[t] for t in taken}, returned)[0]
                takes |= dict.fromkeys(t for t in taken if t not in returns)
                returns |= dict.fromkeys(returned)
                place += len(own)
        # Of several kernels, what only they read is theirs.
        here = set(kernels)
        read_elsewhere = tuple(
            t
            for t in returns
            if t in self.prepared.returned or not self.prepared.readers[t] <= here
        )
        made = Function(tuple(calls), tuple(takes), read_elsewhere, frozenset(self.constants))
        self._known[kernels] = made
        return made

    def fill_constants(self, runner: Runner, functions: Iterable[Function]) -> None:
        """Set the constants that these functions read in the runner's table."""
        for function in functions:
            for call in function.calls:
                for entry in distinct_refs((call.args, call.kwargs)):
                    if entry in self.constants:
                        runner.set(entry, self.constants[entry])

    def _calls_of(self, kernel: int) -> list[Call]:
        """The ATen calls of one kernel."""
        values = Layered(dict(self.example), self.constants)
        calls: list[Call] = []
        for call in self.prepared.kernels[kernel].calls:
            if isinstance(call.target, Seeded):
                calls.append(call)
                run_prepared(call, values)
                continue
            refs = distinct_refs((call.args, call.kwargs))
            made = tuple(t for t in call.results if t >= 0)

            def run(*given: Tensor, call: Call = call, refs: Any = refs, made: Any = made) -> Any:
                inner = dict(zip(refs, given, strict=True))
                run_prepared(call, inner)
                return tuple(inner[t] for t in made)

            recorded, found = self._recorded(run, {t: values[t] for t in refs}, made)
            calls += recorded
            values |= found
        return calls

    def _recorded(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        given: dict[int, Tensor],
        returns: Sequence[int],
    ) -> tuple[list[Call], dict[int, Tensor]]:
        """(the ATen calls that `run` makes of the values `given`, the values of `returns`)."""
        # A call names its tensors by their objects. A step may be captured with one tensor as two
        # of its inputs, which are two tensors in later steps.
        objects = {id(value) for value in self.constants.values()}
        for entry, value in given.items():
            if id(value) in objects:
                given[entry] = value.view_as(value)
            objects.add(id(given[entry]))
        recorder = CallRecorder(given, self.constants, self.entries)
        with recorder:
            made = run(*given.values())
        calls = recorder.returning(returns, made)
        self.entries = recorder.entries
        return calls, dict(zip(returns, made, strict=True))


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
        # Every kernel must run once, after all that it reads.
        check_races(block, joined(phases))
        phases = [phase for phase in phases if phase.kernels]
        self._prepared, self._threads = prepared, threads
        self._wanted = [
            (tuple(functions.example[t].shape), functions.example[t].dtype) for t in prepared.inputs
        ]
        home = {k: number for number, phase in enumerate(phases) for k in phase.kernels}
        users: dict[int, list[int]] = {}
        for kernel in sorted(home):
            for tensor in (*prepared.kernels[kernel].writes, *prepared.kernels[kernel].reads):
                users.setdefault(tensor, []).append(kernel)
        # [phases] (tensors that streams of the phase may drop, each with the kernels that use it:
        # those are made and read within this phase of streams alone; tensors to drop at its end,
        # since they are used here for the last time)
        drops: list[tuple[dict[int, list[int]], list[int]]] = [({}, []) for _ in phases]
        for tensor, using in users.items():
            if tensor in prepared.returned:
                continue
            last = max(home[kernel] for kernel in using)
            streamed = phases[last].streams is not None
            if streamed and tensor not in prepared.inputs and home[using[0]] == last:
                drops[last][0][tensor] = using
            else:
                drops[last][1].append(tensor)
        # [phases] segments of each stream; None: the kernels run one after another.
        streams: list[Segments | None] = []
        frees: list[tuple[int, ...]] = []
        for phase, (inside, after) in zip(phases, drops, strict=True):
            own = None if phase.streams is None else segments_of(block, phase.streams, inside)
            # A tensor that no segment may drop, since none has all its readers behind it, is
            # dropped at the end of the phase.
            given_up = {t for each in _runs(own or ()) for t in each.frees}
            streams.append(own)
            left = [t for t in inside if own is not None and t not in given_up]
            frees.append((*after, *left))
        runs = [
            functions.of(kernels)
            for phase, own in zip(phases, streams, strict=True)
            for kernels in ([phase.kernels] if own is None else [r.kernels for r in _runs(own)])
        ]
        self._runner = make_runner(functions.entries)
        functions.fill_constants(self._runner, runs)
        self._held = frozenset(functions.constants)
        self._entries = functions.entries
        # Tensors that are still in the table after the last phase. They are dropped from it, so
        # that only the caller holds what a step returns.
        self._left = [t for t in (*prepared.inputs, *prepared.returned) if t not in self._held]
        self._flags = _KernelFlags(stream for own in streams for stream in own or ())
        self._epoch = 0
        instructions: list[BoundInstruction] = []
        for phase, own, dropped in zip(phases, streams, frees, strict=True):
            if own is None:
                instructions += functions.of(phase.kernels).instructions(self._runner, dropped)
                continue
            lanes = RunLanes(_bound(own, functions, self._runner, self._flags), dropped)
            if len(own) > 1:
                instructions.append(lanes)
                continue
            # A single stream runs in this thread, which otherwise uses all of the device's. The
            # functions must not refer to this object, which holds the stream: a C++ stream takes no
            # part in garbage collection.
            instructions += [
                RunFunction(0, partial(torch.set_num_threads, 1)),
                lanes,
                RunFunction(0, partial(torch.set_num_threads, threads)),
            ]
        self._stream = self._runner.stream(instructions)

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

        def result(ref: Ref) -> Tensor:
            constant = prepared.constants.get(ref.tensor)
            value = runner.get(ref.tensor) if constant is None else constant
            assert value is not None, "the step has made it"
            return value

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
                return pytree.tree_map_only(Ref, result, prepared.outputs)
            finally:
                # After an error any tensor may be left in the table, so all are dropped then.
                every = () if has_run else range(self._entries)
                runner.clear(self._left if has_run else [t for t in every if t not in self._held])
                torch.set_num_threads(before)


class _KernelFlags:
    """The address of a flag for each kernel that another stream waits for."""

    def __init__(self, streams: Iterable[list[StreamInstruction]]) -> None:
        awaited = [i.flag for stream in streams for i in stream if isinstance(i, SendTensor)]
        # A cache line more, so that the first flag can begin where a line does.
        self._memory = np.zeros(_FLAG_INT64S * (len(awaited) + 1), dtype=np.int64)
        begin = -(-int(self._memory.ctypes.data) // 64) * 64
        self.address_of = {kernel: begin + 64 * place for place, kernel in enumerate(awaited)}


def _runs(streams: Iterable[list[StreamInstruction]]) -> list[RunKernels]:
    return [each for stream in streams for each in stream if isinstance(each, RunKernels)]


def _bound(
    streams: Segments, functions: Functions, runner: Runner, flags: _KernelFlags
) -> tuple[tuple[BoundInstruction, ...], ...]:
    """[streams] the instructions of each, as the runner takes them."""
    lanes = []
    for stream in streams:
        lane: list[BoundInstruction] = []
        for each in stream:
            if isinstance(each, RunKernels):
                lane += functions.of(each.kernels).instructions(runner, each.frees)
            else:
                lane.append(replace(each, flag=flags.address_of[each.flag]))
        lanes.append(tuple(lane))
    return tuple(lanes)


class SegmentStreams:
    """Streams of segments of an example step, ready to run repeatedly by themselves."""

    def __init__(self, streams: Segments, functions: Functions) -> None:
        runs = [functions.of(each.kernels) for each in _runs(streams)]
        self._runner = make_runner(functions.entries)
        functions.fill_constants(self._runner, runs)
        made = {tensor for function in runs for tensor in function.returns}
        for function in runs:
            for tensor in function.takes:
                if tensor not in made and tensor not in functions.constants:
                    self._runner.set(tensor, functions.example[tensor])
        self._flags = _KernelFlags(streams)
        lanes = _bound(streams, functions, self._runner, self._flags)
        self._streams = [self._runner.stream(lane) for lane in lanes]
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
