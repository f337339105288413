"""What the processes that measure are given and return, and what they share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.frontends.program import Call
from dovetail.runtime.timers import Repeats, Timing, time_steps

WARM_UP_SECONDS, STEPS_SECONDS = 0.3, 3.0
"""The first steps, for so long, do not count. Then steps are timed for so long, but at least
`LEAST_STEPS` and at most `MOST_STEPS` of them."""
LEAST_STEPS, MOST_STEPS = 3, 60
_INEXACT = ("float", "bfloat", "complex")
Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides in elements, dtype


@dataclass(frozen=True)
class TimedEntry:
    """A call to time.

    layouts   tensor that the call reads -> its layout
    cold      tensors that a network holds from step to step
    """

    call: Call
    layouts: dict[int, Layout]
    cold: frozenset[int]


@dataclass(frozen=True)
class TimedCalls:
    """A timing per entry.

    pace_seconds     the best pace of the core, seen now or known before
    waited_seconds   time of the disturbed rounds
    seconds          time of all rounds
    others_cores     how many of this process's cores other programs used meanwhile
    """

    timings: list[Timing]
    pace_seconds: float
    waited_seconds: float
    seconds: float
    others_cores: float


@dataclass(frozen=True)
class FailedCall:
    """What is returned where entry `index` raised."""

    index: int
    traceback: str


@dataclass(frozen=True)
class TimedStep:
    """A step to time, op by op.

    calls     op -> call, in running order
    frees     op -> tensors that nobody reads after it
    values    tensor -> value of the step's sources
    tensors   how many tensors the step has
    seconds   limit of the steps that count, if it is less than `STEPS_SECONDS`
    """

    calls: dict[int, Call]
    frees: dict[int, tuple[int, ...]]
    values: dict[int, torch.Tensor]
    tensors: int
    seconds: float = math.inf


@dataclass(frozen=True)
class OpTimes:
    """The seconds [passes, ops] of each op, in the order of `TimedStep.calls`."""

    seconds: NDArray[np.float64]
    others_cores: float


Passed = TypeVar("Passed")


def timed_passes(
    warm_up: Callable[[], object], timed: Callable[[], Passed], limit_seconds: float
) -> list[Passed]:
    """[passes] what `timed` returns of each pass over a step, after some that do not count."""
    repeats = Repeats(MOST_STEPS, LEAST_STEPS, min(STEPS_SECONDS, limit_seconds))
    return time_steps(timed, repeats, warm_up=warm_up, warm_up_seconds=WARM_UP_SECONDS)


def random_tensor(layout: Layout, layouts: dict[int, Layout]) -> torch.Tensor:
    """Return a random tensor of this layout for a call with these `layouts`.

    Floats are in [0.1, 1), so that no root or logarithm fails. Integers may be indices, so they are
    below every axis of the call's floating-point and complex tensors, or of all its tensors if it
    has none.
    """
    shape, strides, dtype_name = layout
    dtype: torch.dtype = getattr(torch, dtype_name)
    # The elements of a strided tensor lie within this many elements of memory.
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    extent = 0 if 0 in shape else 1 + reach
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.empty(extent).uniform_(0.1, 1.0).to(dtype)
    else:
        indexed = [s for s, _, name in layouts.values() if name.startswith(_INEXACT)]
        shapes = indexed or [s for s, _, _ in layouts.values()]
        lengths = [n for sizes in shapes for n in sizes if n > 0]
        high = 2 if dtype == torch.bool else min(lengths, default=2)
        flat = torch.randint(0, high, (extent,)).to(dtype)
    return flat.as_strided(shape, strides)
