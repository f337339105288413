"""Policy: a network that draws placements, and says how likely it was to draw them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.placers.learned.features import BUCKETS, cuts
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

    @classmethod
    def for_view(cls, view: ProblemView, *, seed: int = 0, **options: Any) -> Self:
        """A fresh policy that serves that view, by the seed's numbers; `options` are the
        constructor's."""
        del view
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(**options)

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


# What policies are made of alike: a view as tensors, a vector for each kind of op, and the
# probability of what was chosen.


@dataclass(frozen=True, eq=False)
class ViewTensors:
    """A `ProblemView` as tensors on one device; its fields have the view's shapes.

    pairs   [groups, devices, 1 + CUTS]: how much slower than its best device, and `cuts`
    """

    kind_offsets: Tensor
    kind_buckets: Tensor
    kind_shares: Tensor
    shapes: Tensor
    numbers: Tensor
    sources: Tensor
    destinations: Tensor
    allowed: Tensor
    free: Tensor
    devices: Tensor
    links: Tensor
    pairs: Tensor

    def kinds(self, bag: nn.EmbeddingBag) -> Tensor:
        """[groups, width] the mean over each group's ops of the vectors of their kinds."""
        mean: Tensor = bag(
            self.kind_buckets, self.kind_offsets, per_sample_weights=self.kind_shares
        )
        return mean


_TENSORS: WeakKeyDictionary[ProblemView, dict[torch.device, ViewTensors]] = WeakKeyDictionary()


def tensors_of(view: ProblemView, device: torch.device) -> ViewTensors:
    """The view on that device; made once while the view lives."""
    of_devices = _TENSORS.setdefault(view, {})
    if device not in of_devices:
        slower = view.seconds - view.seconds.min(axis=1, keepdims=True)
        arrays = {
            field.name: getattr(view, field.name)
            for field in fields(ViewTensors)
            if field.name != "pairs"
        }
        arrays["pairs"] = np.concatenate([slower[:, :, None], cuts(view)], axis=2)
        of_devices[device] = ViewTensors(
            **{
                name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
                for name, array in arrays.items()
            }
        )
    return of_devices[device]


def kind_vectors(width: int) -> nn.EmbeddingBag:
    """A vector for each kind of op, or rather for its bucket; see `ViewTensors.kinds`."""
    return nn.EmbeddingBag(BUCKETS, width, mode="sum", include_last_offset=True)


def chosen(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) [...] of `actions` [...] under `logits` [..., choices], whose
    first axis may be 1: the same for all."""
    logs = logits.log_softmax(dim=-1)
    entropies = -(logs.exp() * logs).sum(dim=-1)
    of_actions = logs.expand(*actions.shape, -1).gather(-1, actions[..., None])[..., 0]
    return of_actions, entropies.expand(actions.shape)
