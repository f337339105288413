"""Times calls: repeatedly, robustly, and on the clock that all processes share."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

clock = time.perf_counter
"""Returns seconds of CLOCK_MONOTONIC, so that stamps of different processes can be compared."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `samples` samples; each sample is the mean of `calls` calls."""

    median_seconds: float
    minimum_seconds: float
    spread: float  # interquartile range / median
    samples: int
    calls: int


def time_call(
    call: Callable[[], object],
    *,
    samples: int = 7,
    sample_seconds: float = 5e-4,
    budget_seconds: float = 0.2,
    clock: Callable[[], float] = clock,
) -> Timing:
    """Time `call`, after one call to warm up.

    A sample repeats the call for about `sample_seconds`, because reading the clock would hide a
    short call. It stops at `samples` samples, or after `budget_seconds` once it has three.
    """
    call()
    begin = clock()
    call()
    calls = max(1, round(sample_seconds / max(clock() - begin, 1e-9)))
    seconds: list[float] = []
    while len(seconds) < samples and (len(seconds) < 3 or clock() - begin < budget_seconds):
        seconds.append(seconds_of(call, calls, clock))
    return summarise(seconds, calls)


def seconds_of(
    call: Callable[[], object], times: int = 1, clock: Callable[[], float] = clock
) -> float:
    """Seconds of a call: the mean of so many in a row."""
    began = clock()
    for _ in range(times):
        call()
    return (clock() - began) / times


def summarise(seconds: list[float], calls: int = 1) -> Timing:
    """The median, minimum and spread of at least one sample."""
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else [0.0] * 3
    spread = (quartiles[2] - quartiles[0]) / median if median > 0 else 0.0
    return Timing(median, min(seconds), spread, len(seconds), calls)
