"""What a trial teaches: how much better its placement did than was expected.

A. Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.1; Y. Zhou et al.: GDP: Generalized Device Placement
for Dataflow Graphs, 2019, https://arxiv.org/abs/1910.01578, section 3.

    cost c      sqrt(seconds); the failing signal where the placement failed
    baseline B  "moving"  starts at the failing signal;  B <- decay B + (1 - decay) mean c   (RL17)
                "mean"    of the costs of all earlier trials                                  (GDP)
                "batch"   of the costs of the batch itself                                   (ours)
    advantage   B - c, B as it was before the batch: higher is better; 0 for what teaches nothing

RL17: only placements that ran teach from its 5,000th step on, and only they move the baseline then.
Differences: a batch moves the moving average once, by its mean. The first batch has no earlier
trials, and its own mean stands for theirs. `normalised` (ours) divides a batch's advantages by
their root mean square, but by no less than a thousandth of its mean cost: what a converged policy
draws differs in nothing that matters. A trial whose evaluator was lost counts nowhere.
Imports no torch.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.learned.records import BASELINES, Bool, Settings, Trials

SMALLEST_SPREAD = 1e-3
"""Of the mean cost: differences below that are not made larger."""


def cost(trials: Trials, settings: Settings) -> NDArray[np.float64]:
    """[batch] sqrt(seconds), `settings.failing` where a placement failed or was not judged."""
    ran = trials.valid & trials.judged & np.isfinite(trials.seconds)
    return np.where(ran, np.sqrt(np.where(ran, trials.seconds, 0.0)), settings.failing)


def teaching(trials: Trials, settings: Settings, update: int) -> Bool:
    """[batch] trials that teach in the controller's update of that number, from 0."""
    late = settings.valid_only_from is not None and update >= settings.valid_only_from
    return np.asarray(trials.judged & trials.valid if late else trials.judged, dtype=np.bool_)


@dataclass
class Baseline:
    """What a trial of one task costs a controller by its experience.

    value    the moving average, or the mean
    count    trials behind it
    """

    kind: str
    decay: float
    value: float
    count: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """A controller's first one."""
        assert settings.baseline in BASELINES, settings.baseline
        return cls(settings.baseline, settings.baseline_decay, float(settings.failing))

    def advantages(self, trials: Trials, settings: Settings, update: int) -> NDArray[np.float64]:
        """[batch] and take these trials into account for the next ones."""
        costs, teaches = cost(trials, settings), teaching(trials, settings, update)
        if not teaches.any():
            return np.zeros(len(costs))
        mean = float(costs[teaches].mean())
        own = self.kind == "batch" or (self.kind == "mean" and self.count == 0)
        expected = mean if own else self.value
        found = np.where(teaches, expected - costs, 0.0)
        if settings.normalised:
            spread = float(np.sqrt(np.mean(found[teaches] ** 2)))
            found /= max(spread, SMALLEST_SPREAD * mean, np.finfo(np.float64).tiny)
        self._observe(costs[teaches])
        return found

    def _observe(self, costs: NDArray[np.float64]) -> None:
        mean, earlier = float(costs.mean()), self.count
        self.count += len(costs)
        if self.kind == "moving":
            self.value = self.decay * self.value + (1 - self.decay) * mean
        else:
            old = self.value if earlier else mean
            self.value = old + (mean - old) * len(costs) / self.count

    def state(self) -> dict[str, Any]:
        """All of it, as JSON knows it."""
        return asdict(self)

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """The baseline whose `state` that was."""
        return cls(**state)
