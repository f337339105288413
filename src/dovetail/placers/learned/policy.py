"""Policy: a network that draws placements, and says how likely it was to draw them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.placers.learned.records import ProblemView


@dataclass(frozen=True, eq=False)
class Draw:
    """Placements that a policy drew.

    actions      what was decided, as the policy itself wants it back; the first axis is the batch
    placements   [batch, groups] int32, groups without a choice at their device
    log_probs    [batch, decisions] of each decision, without gradient
    """

    actions: dict[str, Tensor]
    placements: NDArray[np.int32]
    log_probs: Tensor


@dataclass(frozen=True, eq=False)
class Judged:
    """Decisions as the policy sees them now, with gradient.

    log_probs   [batch, decisions]
    entropies   [batch or 1, decisions] in nats, of what was open
    """

    log_probs: Tensor
    entropies: Tensor


class Policy(nn.Module, ABC):
    """Float32 on one device. `config` rebuilds it: `type(policy)(**policy.config)`.

    A policy of `seq2seq` or `hdp` is made for one view (its sizes stand in `config`), and so are
    their paper modes; one of `gdp` serves every view, and one of `gdp-paper` every view with as
    many devices.
    """

    name: str
    config: dict[str, Any]

    def alone(self, view: ProblemView) -> "Policy":
        """The policy, drawing as before, with what it can only learn of one view: this one."""
        del view
        return self

    def begin(self, update: int) -> None:
        """Told before a controller's update of that number, from 0: what a policy schedules by
        updates follows it."""

    @abstractmethod
    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        """Sample placements, without gradient. The same generator state, the same draw."""

    @abstractmethod
    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        """The probabilities of actions that were drawn."""

    def actions_of(
        self, view: ProblemView, placement: NDArray[np.int32]
    ) -> dict[str, Tensor] | None:
        """Actions, a batch of one, that lead to a placement [groups]; None: it cannot say."""
        return None

    def candidates(self, view: ProblemView) -> NDArray[np.int32]:
        """[candidates, groups] what it thinks likeliest, first its one choice."""
        return self.likeliest(view)[None]

    @abstractmethod
    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        """[groups] the placement that takes the most probable device at each decision."""
