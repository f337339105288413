"""gdp-paper: GDP's policy and training as its paper has them, without our additions.

Y. Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, section 3.

    ops ──► [type | output shapes] ──► GraphSAGE ──► x0 ──► Transformer-XL, superposed
                                                                      │ linear, softmax
                                                                      ▼
                                                         a device for each op, at once

    h_N(v) = max over neighbours u of sigmoid(W h(u) + b)        h'(v) = relu(V [h(v), h_N(v)])

Every op is placed by itself: groups are only what must stay together (`graph.colocate`). Devices
are the rows of the last layer, so that a policy serves graphs on as many devices. It is trained by
PPO on -sqrt(seconds), -10 for what does not fit, against the mean of all earlier trials, with one
ratio for a placement. Against `gdp` there are no costs, positions, advice, cuts, modes, clusters,
table of one graph's own, chance of a uniform draw, normalised advantages, and imitation of the best
placement.

What the paper leaves open, and what stands here instead:

* Widths, layers, heads and the length of a segment: those of `gdp`.
* Whether neighbours are those that an op reads, those that read it, or both. Here: both, as one
  set.
* Whether one graph alone needs the superposition, which section 3.3 introduces for batches. It is
  there; `superposition=False` leaves it out, and `attention=False` the attention.
* Trials a batch, passes, the clipping range, the entropy's weight and the rate. Rates from .0001 to
  .003 and weights of the entropy from 0 to .03 were tried on one row, Inception on 2 GPUs, by one
  seed and 4,000 placements (benchmarks/learned/README.md), and make less than 2 % of difference.
  Weights of .1 and 1 are worse in 1,600 placements. So there is no entropy, of which the paper
  says nothing. The clipping range is that of PPO's own paper.

Differences: kinds are hashed into `BUCKETS`; shapes are logarithms; the ids of adjacent ops, which
say nothing of another graph, enter as edges alone; layers of the Transformer normalise their input
(`gdp.GdpTransformerXL`); all neighbours count, where GraphSAGE samples some.
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.errors import PolicyMismatchError
from dovetail.placers.learned.features import BUCKETS, SHAPES
from dovetail.placers.learned.gdp import GdpTransformerXL, GroupEdges, Inputs, inputs_of, max_pool
from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView

SETTINGS = LearningSettings(
    "ppo", trials=16, rate=3e-4, baseline="mean", failing=10.0, passes=2, ratio="placement"
)


class SagePaperLayer(nn.Module):
    """h -> h', both [groups, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pool = nn.Linear(hidden, hidden)
        self.mix = nn.Linear(2 * hidden, hidden)

    def forward(self, h: Tensor, edges: GroupEdges) -> Tensor:
        """`edges` lead from a neighbour to whom it is one."""
        pooled = max_pool(torch.sigmoid(self.pool(h)), edges.sources, edges.destinations)
        return torch.relu(self.mix(torch.cat([h, pooled], dim=1)))


class GdpPaper(Policy):
    """Serves every view of so many devices.

    devices        rows of the last layer
    hidden         width of everything
    layers         of the placer; `sage_layers` of the graph network
    segment        groups that attend to each other, and to the segment before
    attention, superposition   False: without, for the ablation

    Actions "devices" [batch, groups].
    """

    name = "gdp-paper"

    def __init__(
        self,
        *,
        devices: int,
        hidden: int = 64,
        sage_layers: int = 2,
        layers: int = 2,
        heads: int = 4,
        segment: int = 128,
        attention: bool = True,
        superposition: bool = True,
    ) -> None:
        super().__init__()
        self.config = {
            "devices": devices, "hidden": hidden, "sage_layers": sage_layers, "layers": layers,
            "heads": heads, "segment": segment, "attention": attention,
            "superposition": superposition,
        }  # fmt: skip
        self.kinds = nn.EmbeddingBag(BUCKETS, hidden, mode="sum")
        self.shapes = nn.Linear(SHAPES, hidden)
        self.sage = nn.ModuleList(SagePaperLayer(hidden) for _ in range(sage_layers))
        self.placer = GdpTransformerXL(
            hidden, layers=layers, heads=heads, segment=segment, attention=attention,
            superposition=superposition,
        )  # fmt: skip
        self.out = nn.Linear(hidden, devices)

    @classmethod
    def for_view(cls, view: ProblemView, *, seed: int = 0, **options: Any) -> Self:
        """A fresh policy for views with as many devices as this one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(devices=view.device_count, **options)

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        with torch.no_grad():
            logs = self._logs(view)
            # Of exponential waiting times the shortest is an event's with its share of the rates.
            waits = torch.empty(batch, *logs.shape, device=logs.device)
            devices = (logs.exp() / waits.exponential_(generator=generator)).argmax(dim=2)
            log_probs = self._taken(view, logs, devices)
        placements = np.where(view.free, devices.cpu().numpy(), view.settled).astype(np.int32)
        return Draw({"devices": devices}, placements, log_probs)

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        logs = self._logs(view)
        entropies = -(logs.exp() * logs.clamp(min=-1e9)).sum(dim=1) * self._inputs(view).free
        return Judged(self._taken(view, logs, actions["devices"]), entropies[None])

    def actions_of(self, view: ProblemView, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        devices = torch.from_numpy(placement.astype(np.int64)).to(self.out.weight.device)
        return {"devices": devices[None]}

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        with torch.no_grad():
            best = self._logs(view).argmax(dim=1).cpu().numpy()
        return np.where(view.free, best, view.settled).astype(np.int32)

    def _logs(self, view: ProblemView) -> Tensor:
        """[groups, devices] log-probabilities; -inf where a group may not be."""
        if view.device_count != self.out.out_features:
            reason = f"made for {self.out.out_features} devices, not {view.device_count}"
            raise PolicyMismatchError(self.name, reason)
        seen = self._inputs(view)
        kinds = self.kinds(seen.buckets, seen.offsets, per_sample_weights=seen.shares)
        x = torch.relu(kinds + self.shapes(seen.numbers[:, -SHAPES:]))
        both = GroupEdges(
            torch.cat([seen.edges.sources, seen.edges.destinations]),
            torch.cat([seen.edges.destinations, seen.edges.sources]),
        )
        for layer in self.sage:
            x = layer(x, both)
        states, condition = self.placer(x)
        if condition is not None:
            states = states * condition
        logits: Tensor = self.out(states)
        return logits.masked_fill(~seen.allowed, -torch.inf).log_softmax(dim=1)

    def _inputs(self, view: ProblemView) -> Inputs:
        return inputs_of(view, self.out.weight.device)

    def _taken(self, view: ProblemView, logs: Tensor, devices: Tensor) -> Tensor:
        """[batch, groups] log-probabilities of `devices`; 0 where there was no choice."""
        taken = logs.expand(len(devices), -1, -1).gather(2, devices[:, :, None])[:, :, 0]
        return taken.masked_fill(~self._inputs(view).free, 0.0)
