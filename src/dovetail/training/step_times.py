"""Distributions of the time of a local step, from which virtual time is drawn.

    constant      mean
    jitter        mean x (1 + spread u), u uniform on [-1, 1)
    exponential   memoryless, with that mean
    lognormal     with that mean and the standard deviation spread x mean
    trace         drawn with replacement from measured steps

Every worker has a random stream of its own, which depends on the seed and the worker's index alone.
So a worker's times are the same however many other workers there are.
"""

import csv
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import FileFormatError, UsageError
from dovetail.runtime.files import files_only

KINDS = ("constant", "jitter", "exponential", "lognormal", "trace")
MOST_SECONDS = 1e15
"""A step of a trace takes at most so long, which is 30 million years, so that sums stay finite."""
_BLOCK = 256
"""The steps that one call draws, which is cheaper than a call for each."""
_STREAM = 0x57E9
"""An arbitrary third number of the seed. It keeps these streams apart from other ones that are
seeded by (seed, number)."""


@dataclass(frozen=True)
class StepTimes:
    """A distribution of the seconds of one local step.

    mean_seconds  mean of a step; for a trace it is replaced by the trace's own mean
    spread        jitter: half the width / mean, at most 1; lognormal: standard deviation / mean
    trace         [steps] seconds that were measured
    """

    kind: str = "constant"
    mean_seconds: float = 1.0
    spread: float = 0.2
    trace: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError("times", f"there is no {self.kind!r}; there are {', '.join(KINDS)}")
        if (self.kind == "trace") != bool(self.trace):
            raise UsageError("trace", "goes with the kind 'trace', and has one step or more")
        if not all(0 <= seconds <= MOST_SECONDS for seconds in self.trace):
            raise UsageError("mean_seconds", f"step times are from 0 to {MOST_SECONDS:g} s")
        if self.trace:
            object.__setattr__(self, "mean_seconds", math.fsum(self.trace) / len(self.trace))
        if not 0 < self.mean_seconds < math.inf:
            raise UsageError("mean_seconds", "step times are finite and not negative")
        if not 0 <= self.spread <= (1.0 if self.kind == "jitter" else 1e6):
            raise UsageError("spread", f"{self.spread} is out of range; a jitter's is from 0 to 1")

    def draw(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Draws the seconds of steps independently, as an array of `shape`."""
        if self.kind == "constant":
            return np.full(shape, self.mean_seconds)
        if self.kind == "jitter":
            return self.mean_seconds * (1 + self.spread * rng.uniform(-1.0, 1.0, shape))
        if self.kind == "exponential":
            return rng.exponential(self.mean_seconds, shape)
        if self.kind == "lognormal":
            # The variance and the mean of the logarithm that give this mean and spread.
            variance = math.log1p(self.spread**2)
            centre = math.log(self.mean_seconds) - variance / 2
            return rng.lognormal(centre, math.sqrt(variance), shape)
        return rng.choice(np.array(self.trace), shape)

    def stream(self, seed: int, worker: int, slow: float = 1.0) -> Callable[[], float]:
        """A function that returns the seconds of `worker`'s next step, multiplied by `slow`."""

        def values() -> Iterator[float]:
            rng = np.random.default_rng((seed, worker, _STREAM))
            while True:
                yield from (slow * self.draw(rng, _BLOCK)).tolist()

        return values().__next__


def read_trace(path: str | os.PathLike[str]) -> StepTimes:
    """Reads step times from a CSV file: from its column `seconds`, or from its only column, which
    need not have a header. Raises `FileFormatError`."""
    name = os.fspath(path)
    try:
        with open(path, newline="", encoding="utf-8", opener=files_only) as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(name, str(error)) from error
    header = rows[0] if rows else []
    column = header.index("seconds") if "seconds" in header else 0
    if "seconds" not in header and len(header) != 1:
        raise FileFormatError(name, "it has no column `seconds`")
    if header and not _is_number(header[column]):
        rows = rows[1:]
    try:
        return StepTimes("trace", trace=tuple(float(row[column]) for row in rows))
    except (ValueError, IndexError, UsageError) as error:
        raise FileFormatError(name, f"its steps are not seconds: {error}") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
