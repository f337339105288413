"""Measuring plans at work.

The protocol is RL17's (Mirhoseini et al., "Device Placement Optimization with Reinforcement
Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4): warm up, run some steps, drop
the first, report the rest. Differences: the median, as identical runs differ on a shared machine.
The steps that count are not stamped; a few more are, for the timeline.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.runtime.timers import summarise
from dovetail.timeline import Timeline

TIMED_STEPS = 3


@dataclass(frozen=True, eq=False)
class Measurement:
    """step_seconds [steps]: each step that counts. timeline: the median one of the stamped.
    others_cores: of the plan's devices, that other programs used meanwhile; 0: not known."""

    step_seconds: NDArray[np.float64]
    timeline: Timeline
    others_cores: float = 0.0

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.step_seconds))

    @property
    def mean_seconds(self) -> float:
        return float(np.mean(self.step_seconds))

    @property
    def minimum_seconds(self) -> float:
        return float(np.min(self.step_seconds))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return summarise(self.step_seconds.tolist()).spread


def measure_steps(
    advance: Callable[[bool], float],
    timeline: Callable[[], Timeline],
    *,
    steps: int,
    warmup: int,
    others_cores: Callable[[], float | None] = lambda: None,
) -> Measurement:
    """Warm up, run `steps` (at least 2) steps, drop the first; then stamped ones.

    `advance(timed)` runs a step and returns its seconds; `timeline()` is the last timed step's;
    `others_cores()` says what other programs used since this was called.
    """
    _check_steps(steps)
    for _ in range(warmup):
        advance(False)
    seconds = time_steps(advance, steps)
    timelines = []
    for _ in range(TIMED_STEPS):
        advance(True)
        timelines.append(timeline())
    timelines.sort(key=lambda timeline: timeline.step_seconds)
    return Measurement(seconds, timelines[TIMED_STEPS // 2], others_cores() or 0.0)


def time_steps(advance: Callable[[bool], float], steps: int) -> NDArray[np.float64]:
    """[steps - 1] seconds of each of `steps` (at least 2) steps but the first."""
    _check_steps(steps)
    return np.array([advance(False) for _ in range(steps)][1:])


def _check_steps(steps: int) -> None:
    """Raise `UsageError` for so few that none would count."""
    if steps < 2:
        raise UsageError("steps", f"is {steps}, but must be at least 2: the first is dropped")
