"""What a step and a transfer take here: a few real steps of one worker on a backend."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dovetail.errors import UsageError
from dovetail.training.backends.contract import Assignment, Backend, Watcher
from dovetail.training.records import Row
from dovetail.training.rules import make_rule
from dovetail.training.step_times import StepTimes

MEASURED_STEPS, WARM_UP_STEPS = 60, 5
LOOK_SECONDS = 1.0
"""How often the measuring run is asked whether it has taken long enough."""


@dataclass(frozen=True)
class Measured:
    """What things take here.

    step_seconds       of local steps, one after the other
    transfer_seconds   between two windows: commit, its application, pull
    cores              that workers share; None: each has its own machine
    """

    step_seconds: tuple[float, ...]
    transfer_seconds: float
    cores: int | None = None

    def __post_init__(self) -> None:
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise UsageError("step_seconds", "no step was measured; give more data or time")

    @property
    def mean_seconds(self) -> float:
        """Of a step."""
        return math.fsum(self.step_seconds) / len(self.step_seconds)

    def times(self, workers: int) -> StepTimes:
        """Of the steps of so many workers, who share the cores."""
        slower = 1.0 if self.cores is None else max(1.0, workers / self.cores)
        return StepTimes("trace", trace=tuple(slower * seconds for seconds in self.step_seconds))


def measure(
    assignment: Assignment,
    backend: Backend,
    budget_seconds: float = 15.0,
    cores: int | None = None,
) -> Measured:
    """Run a few steps of one worker on the backend, a commit after each; `cores`: see `Measured`.

    The budget counts from the first step on: what the backend takes to start is not in it. Raises
    what the backend raises.
    """
    job = assignment.job
    samples = MEASURED_STEPS * job.batch
    if job.samples is not None:
        samples = min(samples, job.samples)
    short = replace(job, run=uuid.uuid4().hex, samples=samples, epochs=1, workers=1, window=1)
    trial = replace(assignment, job=short, rule=make_rule("agn"), storage=None, order=None)
    seen: list[Row] = []

    def enough(_figures: list[dict[str, float]]) -> bool:
        return bool(seen) and seen[-1].seconds - seen[0].begin_seconds >= budget_seconds

    watcher = Watcher(
        every_seconds=min(LOOK_SECONDS, budget_seconds),
        evaluate=lambda *_: {},
        should_stop=enough,
        rows=seen.extend,
    )
    return measured_of(backend(trial, watcher).rows, cores)


def measured_of(rows: Sequence[Row], cores: int | None = None) -> Measured:
    """The times in the rows of one worker; its first steps, which load and compile, are dropped
    where there are others. Raises `UsageError` without any row."""
    kept = rows[WARM_UP_STEPS:] if len(rows) > 2 * WARM_UP_STEPS else rows
    steps = tuple(
        max((row.end_seconds - row.begin_seconds) / max(row.steps, 1), 1e-9) for row in kept
    )
    gaps = [b.begin_seconds - a.end_seconds for a, b in pairwise(kept)]
    if not gaps:
        gaps = [row.seconds - row.end_seconds for row in kept]
    return Measured(steps, max(float(np.median(gaps)) if gaps else 0.0, 0.0), cores)
