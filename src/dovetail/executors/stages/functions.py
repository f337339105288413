"""Turns kernels into lists of ATen calls, which runners run without Python's lock.

Most calls of a kernel are ATen calls already. Those that are Python functions (a convolution that
chooses its library, merged kernels) are run once on the tensors of an example step, and the ATen
calls that they make are recorded. So they must make the same calls for every input of these shapes.

Calls name tensors by entries of a runner's table: the graph's tensors by their numbers, and behind
them constants and what only a recorded call reads.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.executors.stages.merging import merged_function
from dovetail.executors.stages.preparing import Layered, PreparedKernels, Seeded, run_prepared
from dovetail.frontends.program import Call, distinct_refs
from dovetail.frontends.recorded_calls import CallRecorder
from dovetail.frontends.runners import Runner, Stream


@dataclass(frozen=True, eq=False)
class Function:
    """Calls that run one after another: they read `takes` and make `returns`, which others read.

    constants   the entries that hold constants. They stay, also where a call writes over one
    """

    calls: tuple[Call, ...]
    takes: tuple[int, ...]
    returns: tuple[int, ...]
    constants: frozenset[int] = frozenset()

    def add_to(
        self, stream: Stream, runner: Runner, *, tag: int = 0, frees: Sequence[int] = ()
    ) -> int:
        """Add the calls to a stream of the runner, and return how many instructions these are.

        frees   entries that are emptied after the last call. Those that only these calls read are
                emptied after their last use
        """
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            last |= dict.fromkeys((*distinct_refs((call.args, call.kwargs)), *call.results), index)
        kept = {*self.takes, *self.returns, *self.constants}
        made = {entry for call in self.calls for entry in call.results} - kept - {-1}
        after: dict[int, list[int]] = {}
        for entry in made:
            after.setdefault(last[entry], []).append(entry)
        after.setdefault(len(self.calls) - 1, []).extend(frees)
        for index, call in enumerate(self.calls):
            seed = -1
            if isinstance(call.target, Seeded):
                runner.seeds.append(call.target.seed)
                seed = len(runner.seeds) - 1
                call = replace(call, target=call.target.target, random=True)
            stream.call(call, tag=tag, frees=after.get(index, ()), seed=seed)
        if not self.calls and frees:
            stream.function(tuple, [], [], tag=tag, frees=frees)
        return len(self.calls) or bool(frees)


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
            for tensor in (*distinct_refs((call.args, call.kwargs)), *call.results)
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
