"""The record of a report: a plan, its predicted timeline, and its measured one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.plans import PLACED, Plan
from dovetail.timeline import Timeline

SINGLES = ("single", "here")
"""The names of the baselines on one device: the machine's best device, and all cores of this
machine together."""


@dataclass(frozen=True, eq=False)
class PlanReport:
    """Everything that a page or a table of a plan shows.

    predicted          the timeline of the simulated plan
    measured           the timeline of one run; None if no run recorded its spans
    measured_seconds   [steps] seconds of the measured steps without the warm-up; None if it did
                       not run
    model              the MODEL text; by default the plan's
    """

    plan: Plan
    graph: Graph
    predicted: Timeline
    measured: Timeline | None = None
    measured_seconds: NDArray[np.float64] | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if self.measured_seconds is not None:
            seconds = np.array(self.measured_seconds, dtype=np.float64).reshape(-1)
            seconds.flags.writeable = False
            object.__setattr__(self, "measured_seconds", seconds if len(seconds) else None)
        if not self.model:
            object.__setattr__(self, "model", self.plan.source.model)

    @property
    def timelines(self) -> tuple[tuple[str, Timeline], ...]:
        """The predicted timeline and, where there is one, the measured."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return tuple((name, timeline) for name, timeline in both if timeline is not None)

    @property
    def speedup(self) -> tuple[float, str] | None:
        """(speed-up, over what): what the fastest of the user's own ways takes over what the plan
        does, both measured. Where nothing was measured it is predicted, over the best single
        device, and None if no single device fits."""
        plan = self.plan
        own = [name for name in plan.measured if name != PLACED]
        if own:
            best = min(own, key=lambda name: plan.measured[name])
            return plan.measured[best] / plan.measured[plan.way], f"over {best}, measured"
        values = [plan.baselines.get(name) for name in SINGLES]
        singles = [value for value in values if value is not None]
        if not singles or plan.value <= 0:
            return None
        return min(singles) / plan.value, "over the best single device"

    @property
    def measured_step_seconds(self) -> float | None:
        """The median of the measured steps; if there are none, the length of the measured
        timeline; None if nothing was measured."""
        if self.measured_seconds is not None:
            return float(np.median(self.measured_seconds))
        return None if self.measured is None else self.measured.step_seconds

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured step seconds; None if nothing was measured. It is
        positive if the step ran faster than predicted."""
        measured = self.measured_step_seconds
        placed = self.plan.way == PLACED
        predicted = self.predicted.step_seconds if placed else self.plan.value
        return predicted / measured - 1 if measured else None


def utilisation(timeline: Timeline) -> NDArray[np.float64]:
    """[devices] the share of the step in which each device computes."""
    if timeline.step_seconds <= 0:
        return np.zeros(len(timeline.devices))
    return timeline.busy_seconds / timeline.step_seconds
