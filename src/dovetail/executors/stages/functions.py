"""Compiles kernels to functions that run without Python's lock.

Python's lock is held between the calls of a captured step, so threads that run them one by one wait
for each other. A round trip between two such threads took 96 us here. A traced TorchScript function
holds the lock only as it begins and ends. It is traced with the tensors of an example step, so it
runs the same ATen calls in the same order and gives the same numbers. `running` keeps TorchScript
from rewriting the calls, because its rewriting fails on sums of products of different sizes.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.executors.stages.merging import merged_function
from dovetail.executors.stages.preparing import PreparedKernels
from dovetail.runtime.torch_versions import compile_trace, script_list

Values = Any
"""A `torch.ScriptList` [tensors] of a step's values, shared by Python and TorchScript."""
Untraced = tuple[Callable[..., tuple[Tensor, ...]], tuple[int, ...], tuple[int, ...]]
"""(a function, the tensors it takes, the tensors it returns)."""
_NOTHING = torch.empty(0)
ONE_AT_A_TIME = threading.RLock()
"""The lock that is held while streams are prepared, and while functions or streams run."""


@contextmanager
def running() -> Iterator[None]:
    """A context in which traced functions run as they were traced, one thread of ours at a time."""
    jit: Any = torch.jit
    with ONE_AT_A_TIME, torch.inference_mode(), jit.optimized_execution(False):
        yield


@dataclass(frozen=True, eq=False)
class Function:
    """A compiled function: run(*values of `takes`) returns the values of `returns`.

    `takes` and `returns` are tensors of the graph.
    """

    run: Callable[..., tuple[Tensor, ...]]
    takes: tuple[int, ...]
    returns: tuple[int, ...]


class Functions:
    """Traces functions of a prepared step's kernels, each once.

    example   tensor -> its value in an example step; functions are traced with these values
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
        self.size = 1 + max(example, default=0)
        self._merges = {merged[0]: merged for merged in merges}
        self._known: dict[tuple[int, ...], Function] = {}

    def merging(self, merges: Sequence[tuple[int, ...]]) -> "Functions":
        """Functions of the same step, with these merges."""
        return Functions(self.prepared, self.example, merges)

    def of(self, kernels: Sequence[int]) -> Function:
        """The traced function that runs these kernels one after another."""
        kernels = tuple(kernels)
        if kernels not in self._known:
            self._known[kernels] = self.traced(*self._untraced(kernels))
        return self._known[kernels]

    def _untraced(self, kernels: Sequence[int]) -> Untraced:
        # (True, a merged group) or (False, a run of kernels that are not merged), in order.
        parts: list[tuple[bool, list[int]]] = []
        place = 0
        while place < len(kernels):
            merged = self._merges.get(kernels[place])
            if merged is not None:
                assert tuple(kernels[place : place + len(merged)]) == merged
                parts.append((True, list(merged)))
            elif parts and not parts[-1][0]:
                parts[-1][1].append(kernels[place])
            else:
                parts.append((False, [kernels[place]]))
            place += 1 if merged is None else len(merged)
        if len(parts) == 1 and not parts[0][0]:
            return self.prepared.function(kernels)
        return _composed(
            [
                merged_function(self.prepared, own) if merged else self.prepared.function(own)
                for merged, own in parts
            ]
        )

    def traced(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        takes: tuple[int, ...],
        returns: tuple[int, ...],
    ) -> Function:
        """Trace `run` with the example. Raises `UsageError` for an op that TorchScript lacks."""
        # TorchScript cannot trace a function without arguments. Such a function is given the extra
        # entry that `values` adds.
        if not takes:
            takes = (self.size,)
            inner = run
            run = lambda *_: inner()  # noqa: E731
        given = tuple(self.example.get(tensor, _NOTHING) for tensor in takes)
        with quiet(), torch.inference_mode():
            try:
                compiled = compile_trace(run, given)
            except RuntimeError as error:
                said = str(error).partition("\n")[0]
                raise UsageError("MODEL", f"TorchScript cannot trace all of it: {said}") from error
            return Function(compiled, takes, returns)

    def values(self) -> Values:
        """A list of empty values, one per tensor, and one more for functions without arguments."""
        return script_list([_NOTHING] * (self.size + 1))


def _composed(parts: Sequence[Untraced]) -> Untraced:
    """The parts run one after another; it returns what each of them returns."""
    takes: dict[int, None] = {}
    returns: dict[int, None] = {}
    for _, taken, returned in parts:
        takes |= dict.fromkeys(t for t in taken if t not in returns)
        returns |= dict.fromkeys(returned)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(takes, given, strict=True))
        for part, taken, returned in parts:
            values |= zip(returned, part(*(values[t] for t in taken)), strict=True)
        return tuple(values[t] for t in returns)

    return run, tuple(takes), tuple(returns)


class quiet(warnings.catch_warnings):
    """A context without torch's deprecation warnings and those of its tracer."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        # Public, but torch's type hints do not say so.
        tracer = torch.jit.TracerWarning  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", category=tracer)
