"""Measuring on cores that nobody disturbs.

A core of a shared machine runs at two thirds for many seconds at a time when a neighbour works.
What was measured then is measured again, for a while; how often no calm time came is reported.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dovetail.costs.measured import pace_seconds
from dovetail.executors import Measurement

T = TypeVar("T")
TRIES, PATIENCE_SECONDS = 25, 8.0
DISTURBED = 1.15


def _median(measurement: Measurement) -> float:
    return measurement.median_seconds


@dataclass
class Calm:
    """best: least `pace_seconds` so far; patience: seconds that a measurement is repeated for at
    most; taken: measurements; disturbed: those given up on."""

    patience: float = PATIENCE_SECONDS
    best: float = field(default_factory=lambda: min(pace_seconds() for _ in range(5000)))
    taken: int = 0
    disturbed: int = 0

    def measure(self, call: Callable[[], T], seconds: Callable[[T], float] = _median) -> T:
        """`call()` from a time when every core was undisturbed before and after it, else the
        quickest of those made, by `seconds`; inf: it knows itself that it was disturbed."""
        self.taken += 1
        made: list[T] = []
        began = time.perf_counter()
        calm = self._is_calm()
        while len(made) < TRIES and time.perf_counter() - began < self.patience:
            made.append(call())
            before, calm = calm, self._is_calm()
            if before and calm and seconds(made[-1]) < math.inf:
                return made[-1]
        self.disturbed += 1
        return min(made, key=seconds)

    @property
    def said(self) -> str:
        return f"{self.taken} measurements, {self.disturbed} of them on disturbed cores"

    def _is_calm(self) -> bool:
        everywhere = os.sched_getaffinity(0)
        try:
            for core in everywhere:
                os.sched_setaffinity(0, {core})
                now = statistics.median(pace_seconds() for _ in range(31))
                self.best = min(self.best, now)
                if now > DISTURBED * self.best:
                    return False
        finally:
            os.sched_setaffinity(0, everywhere)
        return True
