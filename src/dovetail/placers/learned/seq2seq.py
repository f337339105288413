"""seq2seq: an LSTM reads the groups in order, an attentional LSTM names one device after another.

A. Mirhoseini, H. Pham, Q. V. Le, B. Steiner, R. Larsen, Y. Zhou, N. Kumar, M. Norouzi, S. Bengio
and J. Dean, "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.2.

    e_1 … e_G   embeddings of groups                                   [groups, size]
    m_1 … m_G   the encoder's states                                   [groups, hidden]
    s_t         the decoder's, from s_{t-1}, the device d_{t-1} and m_t
    c_t         Σ softmax(Q s_t · K m)_j V m_j, attention
    d_t         ~ softmax(W s_t + U c_t + F[d_{t-1}] + g_t), where it is allowed

Differences. The paper leaves sizes open: `HIDDEN` and below are ours. The encoder reads both ways,
and attention comes after the decoder's cell, both as in its authors' later code (TensorFlow,
python/grappler/hierarchical_controller.py): so placements that are known are judged in one pass.
Attention is a product (M.-T. Luong, H. Pham and C. D. Manning, "Effective Approaches to Attention-
based Neural Machine Translation", EMNLP 2015, https://arxiv.org/abs/1508.04025, "general"), not
Bahdanau's layer of tanh, which takes `ATTENTION` times as many numbers. The decoder reads the state
of the very group that it decides. The device before reaches the output directly, F, which begins as
`stay` on its diagonal, so that the first samples are runs of groups on one device and not a
scatter. Groups come module by module (`order_of`), not in the graph's order. To type, shapes and
adjacency the embedding adds the other numbers of the `ProblemView`, and g_t says what a device is
worth by where the group's positions lie to it (`features.cuts`), from the start by module and
parameter;
without those of either that are another method's advice. The best placement so far is one more
trial of every batch (`LearningSettings.elite`).
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dovetail.errors import PolicyMismatchError
from dovetail.placers.learned.features import (
    ADVICE_CUTS,
    ADVICE_NUMBERS,
    BUCKETS,
    CUTS,
    NUMBERS,
    POSITIONS,
    SHAPES,
    column,
    cuts,
)
from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView

HIDDEN, ATTENTION, KINDS = 64, 16, 16
"""Sizes: of the LSTMs' states (of the encoder's both ways together), of queries, of kinds."""
STAY = 2.0
FORBIDDEN = -1e9
"""A logit whose probability is 0, and which times 0 is 0."""
SETTINGS = LearningSettings(
    "reinforce",
    trials=16,
    rate=0.005,
    baseline_decay=0.5,
    failing=10.0,
    valid_only_from=5000,
    entropy=2.0,
    entropy_each=0.07,
    normalised=True,
    elite=3.0,
)
"""The paper gives the failing signal's and the baseline's kind, and the update from which on only
placements that ran teach; the rest is ours. The elite pulls every decision towards one placement;
the two entropies leave each trial a few that differ, whether there are six groups or hundreds."""

_OWN_NUMBERS = [i for i in range(NUMBERS) if i not in ADVICE_NUMBERS]
_OWN_CUTS = [i for i in range(CUTS) if i not in ADVICE_CUTS]
START: dict[str, float] = {"module": -0.75, "parameter": -0.75}
"""Logits, before any training, of a distance of one width from a device's part by a position."""


class Seq2SeqNet(nn.Module):
    """Embeddings of a sequence to one device a step.

    size      of an embedding
    devices   to choose from at each step
    stay      logit that a step's device has over the others at the next, before any training

    Its methods take embeddings [1, steps, size]; `allowed` [steps, devices], which must leave each
    step a device; and `worths` [steps, devices], which are added to the logits.
    """

    def __init__(self, size: int, devices: int, *, hidden: int, stay: float) -> None:
        super().__init__()
        self.encoder = nn.LSTM(size, hidden // 2, batch_first=True, bidirectional=True)
        self.aligned = nn.Linear(hidden, hidden)
        self.device_embeddings = nn.Embedding(devices + 1, hidden)  # the last: before the first
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, ATTENTION, bias=False)
        self.key = nn.Linear(hidden, ATTENTION, bias=False)
        self.value = nn.Linear(hidden, ATTENTION, bias=False)
        self.from_state = nn.Linear(hidden, devices)
        self.from_context = nn.Linear(ATTENTION, devices, bias=False)
        self.follow = nn.Parameter(stay * torch.eye(devices + 1, devices))

    @property
    def devices(self) -> int:
        return self.follow.shape[1]

    def judge(
        self, embeddings: Tensor, allowed: Tensor, worths: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) [batch, steps] of `actions` [batch, steps]. One pass."""
        before = torch.full_like(actions, self.devices)
        before[:, 1:] = actions[:, :-1]
        memory, state = self._encode(embeddings)
        inputs = self.aligned(memory) + self.device_embeddings(before)
        begin = tuple(s.expand(-1, len(actions), -1).contiguous() for s in state)
        states, _ = self.decoder(inputs, begin)
        # All trials attend to the same memory: one row of queries, without a copy of the keys.
        queries = self.query(states).view(1, 1, -1, ATTENTION)
        keys, values = self.key(memory)[None], self.value(memory)[None]
        context = functional.scaled_dot_product_attention(queries, keys, values)
        votes = self.from_context(context).view(*actions.shape, self.devices)
        logits = self.from_state(states) + votes + self.follow[before] + worths
        return _chosen(logits.masked_fill(~allowed, FORBIDDEN), actions)

    @torch.no_grad()
    def sample(
        self,
        embeddings: Tensor,
        allowed: Tensor,
        worths: Tensor,
        batch: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """(actions, their log-probabilities) [batch, steps]."""
        uniform = torch.rand((len(allowed), batch, self.devices), generator=generator)
        return self._decode(embeddings, allowed, worths, -(-uniform.log()).log())

    @torch.no_grad()
    def likeliest(self, embeddings: Tensor, allowed: Tensor, worths: Tensor) -> Tensor:
        """[1, steps] the most probable device of each step, given those before it."""
        chance = torch.zeros(len(allowed), 1, self.devices)
        return self._decode(embeddings, allowed, worths, chance)[0]

    def _encode(self, embeddings: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(memory [1, steps, hidden], the decoder's first state)."""
        memory, last = self.encoder(embeddings)
        hidden, cell = (torch.cat([s[0], s[1]], dim=-1)[None] for s in last)
        return memory, (hidden, cell)

    def _decode(
        self, embeddings: Tensor, allowed: Tensor, worths: Tensor, chance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What `sample` returns; the device of a step is that of the largest logit + chance.

        chance   [steps, batch, devices] Gumbel numbers draw from the policy

        What does not depend on earlier devices is computed for all steps at once, and attention
        sums what each memory says of the devices, not the memories.
        """
        steps, batch, _ = chance.shape
        memory, (hidden, cell) = self._encode(embeddings)
        into, again, *biases = (_gate_last(p) for p in self.decoder.parameters())
        of_memory = functional.linear(self.aligned(memory)[0], into, biases[0] + biases[1])
        of_device = functional.linear(self.device_embeddings.weight, into)
        known = (worths + self.from_state.bias).masked_fill(~allowed, FORBIDDEN)
        keys = self.query.weight.T @ self.key(memory)[0].T / ATTENTION**0.5
        said = self.from_context(self.value(memory))[0]
        again, of_state = again.T.contiguous(), self.from_state.weight.T.contiguous()
        hidden, cell = (s[0].repeat(batch, 1) for s in (hidden, cell))
        last = torch.full((batch,), self.devices)
        logits, actions = torch.empty_like(chance), torch.empty((steps, batch), dtype=torch.long)
        size = hidden.shape[1]
        for step in range(steps):
            gates = of_device[last].add_(of_memory[step]).addmm_(hidden, again)
            enter, forget, leave = gates[:, : 3 * size].sigmoid_().chunk(3, dim=1)
            cell.mul_(forget).addcmul_(enter, gates[:, 3 * size :].tanh_())
            torch.mul(leave, cell.tanh(), out=hidden)
            here = self.follow[last].add_(known[step]).addmm_(hidden, of_state)
            here.addmm_((hidden @ keys).softmax(dim=1), said)
            logits[step] = here
            last = here.add_(chance[step]).argmax(dim=1)
            actions[step] = last
        log_probs, _ = _chosen(logits, actions)
        return actions.T.contiguous(), log_probs.T.contiguous()


def _gate_last(weights: Tensor) -> Tensor:
    """An LSTM's rows, input, forget, cell, output, as input, forget, output, cell."""
    enter, forget, new, leave = weights.chunk(4)
    return torch.cat([enter, forget, leave, new])


def _chosen(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) [...] of `actions` [...] under `logits` [..., devices]."""
    log_probs = logits.log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, actions[..., None])[..., 0], entropies


class Seq2Seq(Policy):
    """RL17's policy, for one graph on one machine: its sizes stand in `config`.

    An embedding is, of a group: the mean of its ops' kinds, each with a vector of its own; the
    padded output shapes and the other numbers of the `ProblemView`; and one-hot adjacency, readers,
    writers and itself, through a linear layer. Actions "devices" [batch, groups] stand in the
    order in which they are decided.
    """

    name = "seq2seq"

    def __init__(
        self, *, groups: int, devices: int, hidden: int = HIDDEN, stay: float = STAY, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = {
            "groups": groups, "devices": devices, "hidden": hidden, "stay": stay, "seed": seed,
        }  # fmt: skip
        size = KINDS + SHAPES + len(_OWN_NUMBERS) + hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.kinds = nn.EmbeddingBag(BUCKETS, KINDS, mode="sum", include_last_offset=True)
            self.neighbours = nn.Embedding(3 * groups, hidden)
            self.net = Seq2SeqNet(size, devices, hidden=hidden, stay=stay)
        worth = torch.zeros(CUTS)
        for position, logit in START.items():
            worth[POSITIONS.index(position) - len(POSITIONS)] = logit
        self.worth = nn.Parameter(worth[_OWN_CUTS])

    @classmethod
    def for_view(cls, view: ProblemView, *, seed: int = 0, **options: Any) -> Self:
        """A policy of the view's sizes."""
        return cls(groups=view.groups, devices=view.device_count, seed=seed, **options)

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        with torch.no_grad():
            sequence = self._sequence(view)
        devices, log_probs = self.net.sample(*sequence, batch, generator)
        return Draw({"devices": devices}, _placements(view, devices), log_probs)

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        return Judged(*self.net.judge(*self._sequence(view), actions["devices"]))

    def actions_of(self, view: ProblemView, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        return {"devices": torch.from_numpy(placement[order_of(view)].astype(np.int64))[None]}

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        with torch.no_grad():
            sequence = self._sequence(view)
        placement: NDArray[np.int32] = _placements(view, self.net.likeliest(*sequence))[0]
        return placement

    def _sequence(self, view: ProblemView) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, choices and worths, in the order in which groups are decided."""
        check_sizes(self, view)
        order = torch.from_numpy(order_of(view))
        worths = torch.from_numpy(cuts(view)[:, :, _OWN_CUTS]).to(self.worth) @ self.worth
        return self._embed(view)[None, order], choices_of(view)[order], worths[order]

    def _embed(self, view: ProblemView) -> Tensor:
        """[groups, size]"""
        kinds = self.kinds(
            torch.from_numpy(view.kind_buckets),
            torch.from_numpy(view.kind_offsets),
            per_sample_weights=torch.from_numpy(view.kind_shares),
        )
        numbers = np.concatenate([view.shapes, view.numbers[:, _OWN_NUMBERS]], axis=1)
        return torch.cat([kinds, torch.from_numpy(numbers), self._adjacency(view)], dim=1)

    def _adjacency(self, view: ProblemView) -> Tensor:
        """[groups, hidden] the linear layer on [readers | writers | itself], rows of length 1: the
        sum of the weights of those that are there."""
        groups = view.groups
        itself = torch.arange(groups)
        sources, destinations = torch.from_numpy(view.sources), torch.from_numpy(view.destinations)
        rows = torch.cat([sources, destinations, itself])
        columns = torch.cat([destinations, groups + sources, 2 * groups + itself])
        scale = torch.bincount(rows, minlength=groups).to(self.worth).rsqrt()
        weights = self.neighbours.weight
        sums = weights.new_zeros(groups, weights.shape[1]).index_add(0, rows, weights[columns])
        return sums * scale[:, None]


def order_of(view: ProblemView) -> NDArray[np.int64]:
    """[groups] the groups as they are decided: by the place of their modules, then as they are."""
    return np.argsort(view.numbers[:, column("module")], kind="stable")


def check_sizes(policy: Policy, view: ProblemView) -> None:
    """Raise `PolicyMismatchError` for a view of other sizes than the policy was made for."""
    made = policy.config["groups"], policy.config["devices"]
    if made != (view.groups, view.device_count):
        raise PolicyMismatchError(
            policy.name,
            f"it was made for {made[0]} groups on {made[1]} devices, here are {view.groups} "
            f"on {view.device_count}",
        )


def choices_of(view: ProblemView) -> Tensor:
    """[groups, devices] where each group may be; of those without a choice, where they are."""
    settled = np.arange(view.device_count) == view.settled[:, None]
    return torch.from_numpy(np.where(view.free[:, None], view.allowed, settled))


def _placements(view: ProblemView, devices: Tensor) -> NDArray[np.int32]:
    """[batch, groups] of devices in the order of decisions."""
    placements = np.empty(devices.shape, dtype=np.int32)
    placements[:, order_of(view)] = devices.numpy()
    return placements
