"""seq2seq-paper: RL17's policy and training as its paper has them, without our additions.

A. Mirhoseini, H. Pham, Q. V. Le, B. Steiner, R. Larsen, Y. Zhou, N. Kumar, M. Norouzi, S. Bengio
and J. Dean, "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, sections 3.1 and 3.2.

    e_1 … e_G   [type | output shapes | one-hot writers and readers] of a group, in graph order
    m_1 … m_G   states of the encoder's LSTM
    d_t         of the decoder's LSTM, which is fed the embedding of d_{t-1}, with Bahdanau's
                attention over m: `hdp.HdpPlacer` with neither bound, temperature nor noise

Groups are those of the paper's experiments, a cell or branch each (`graph.cells`). Trained by
REINFORCE on sqrt(seconds), against a moving average that begins at the failing signal.
Against `seq2seq` there is no start by positions, no other feature, no alignment of the decoder, no
`stay`, no entropy, no normalised advantages and no imitation of the best placement.

What the paper leaves open, and what stands here instead:

* Sizes of the network: `HIDDEN` is ours.
* How ops make up a group's embedding. Here the type is the mean of the ops' types, and the shapes
  are those of the two largest outputs.
* Whether the encoder reads both ways, and whether the decoder reads the state of the group that it
  decides. It does the first and not the second in its authors' later code (TensorFlow,
  python/grappler/hierarchical_controller.py), and here.
* Adam's rate and the decay of the baseline. The decay is that code's; the rate was chosen among
  .0003, .001 and .003 on one row, RL17's Inception-V3 on 2 GPUs, by one seed of 4,000 placements
  (benchmarks/learned/README.md).
* The failing signal's size: that of the same code, sqrt(100).

Differences: kinds are hashed into `BUCKETS`; shapes are logarithms; one controller with 8
evaluators stands for up to 20 of them.
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.placers.learned.features import BUCKETS, SHAPES
from dovetail.placers.learned.hdp import HdpPlacer, gumbel
from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView
from dovetail.placers.learned.seq2seq import check_sizes, choices_of

HIDDEN, KINDS = 64, 16
"""Sizes: of the LSTMs' states (of the encoder's both ways together), of kinds."""
SETTINGS = LearningSettings(
    "reinforce", trials=8, rate=0.001, baseline_decay=0.9, failing=10.0, valid_only_from=5000
)


class Seq2SeqPaper(Policy):
    """For one graph on one machine: its sizes stand in `config`.

    Actions "devices" [batch, groups] stand in the order of the view's groups. Takes
    O(trials x groups^2 x hidden) a draw.
    """

    name = "seq2seq-paper"

    def __init__(self, *, groups: int, devices: int, hidden: int = HIDDEN, seed: int = 0) -> None:
        super().__init__()
        self.config = {"groups": groups, "devices": devices, "hidden": hidden, "seed": seed}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.kinds = nn.EmbeddingBag(BUCKETS, KINDS, mode="sum", include_last_offset=True)
            size = KINDS + SHAPES + 2 * groups
            self.net = HdpPlacer(size, devices, hidden=hidden, bound=0.0, temperature=1.0)

    @classmethod
    def for_view(cls, view: ProblemView, *, seed: int = 0, **options: Any) -> Self:
        """A policy of the view's sizes."""
        return cls(groups=view.groups, devices=view.device_count, seed=seed, **options)

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        chance = gumbel(torch.empty(batch, view.groups, view.device_count), generator)
        devices, log_probs = self._decode(view, chance)
        placements = devices.to(torch.int32).numpy()
        return Draw({"devices": devices}, placements, log_probs)

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        return Judged(*self.net.judge(*self._sequence(view), actions["devices"], None))

    def actions_of(self, view: ProblemView, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        return {"devices": torch.from_numpy(placement.astype(np.int64))[None]}

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        devices, _ = self._decode(view, torch.zeros(1, view.groups, view.device_count))
        placement: NDArray[np.int32] = devices[0].to(torch.int32).numpy()
        return placement

    def _decode(self, view: ProblemView, chance: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.net.decode(*self._sequence(view), chance, None)

    def _sequence(self, view: ProblemView) -> tuple[Tensor, Tensor]:
        """(embeddings [1, groups, size], where each group may go [groups, devices])."""
        check_sizes(self, view)
        kinds = self.kinds(
            torch.from_numpy(view.kind_buckets),
            torch.from_numpy(view.kind_offsets),
            per_sample_weights=torch.from_numpy(view.kind_shares),
        )
        neighbours = kinds.new_zeros(view.groups, 2 * view.groups)
        sources, destinations = torch.from_numpy(view.sources), torch.from_numpy(view.destinations)
        neighbours[sources, destinations] = 1.0
        neighbours[destinations, view.groups + sources] = 1.0
        embeddings = torch.cat([kinds, torch.from_numpy(view.shapes), neighbours], dim=1)
        return embeddings[None], choices_of(view)
