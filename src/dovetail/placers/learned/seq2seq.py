"""seq2seq: an LSTM reads the groups in order, an attentional LSTM names one device after another.

A. Mirhoseini, H. Pham, Q. V. Le, B. Steiner, R. Larsen, Y. Zhou, N. Kumar, M. Norouzi, S. Bengio
and J. Dean, "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.2; sizes that it leaves open, and the decoder that reads
nothing but the last device, after its authors' later code, TensorFlow's
python/grappler/hierarchical_controller.py.

    e_1 … e_G   embeddings: kinds, padded output shapes, adjacency     [groups, size]
    m_1 … m_G   the encoder's states, a bidirectional LSTM's            [groups, hidden]
    s_t         the decoder's, from s_{t-1}, the device d_{t-1} and m_t
    c_t         Σ softmax(s_t Q m)_j m_j                                attention
    d_t         ~ softmax(W [s_t, c_t] + F[d_{t-1}])                    where it is allowed

Differences: attention by a product (M.-T. Luong, H. Pham and C. D. Manning, "Effective Approaches
to Attention-based Neural Machine Translation", EMNLP 2015, https://arxiv.org/abs/1508.04025,
"general") instead of Bahdanau's layer of tanh, which needs trials x groups x groups x hidden numbers
where this needs trials x groups x groups. The decoder reads the state of the very group that it
decides, and the device before reaches the output directly, F, which begins as `stay` on its diagonal:
the first samples are runs of groups on one device, not a scatter.
"""

from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dovetail.placers.learned.features import BUCKETS, NUMBERS, SHAPES
from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import Settings, View

FORBIDDEN = -1e9
"""A logit whose probability is 0, and which times 0 is 0."""
HIDDEN = 64
ATTENTION = 16
KINDS = 16
STAY = 2.0
SETTINGS = Settings("reinforce", trials=16, rate=0.005, valid_only_from=5000)


class Seq2SeqNet(nn.Module):
    """Embeddings of a sequence to one device a step.

    size      of an embedding
    devices   to choose from at each step
    stay      logit that a step's device has over the others at the next, before any training

    Embeddings are [batch, steps, size], or [1, steps, size] where all trials share them; `allowed`
    [steps, devices] must leave each step a device.
    """

    def __init__(
        self, size: int, devices: int, *, hidden: int = HIDDEN, stay: float = STAY
    ) -> None:
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
        follow = torch.cat([stay * torch.eye(devices), torch.zeros(1, devices)])
        self.follow = nn.Parameter(follow)

    def judge(self, embeddings: Tensor, allowed: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) [batch, steps] of `actions` [batch, steps]. One pass."""
        batch = len(actions)
        start = torch.full_like(actions[:, :1], self.devices)
        before = torch.cat([start, actions[:, :-1]], dim=1)
        memory, state = self._encode(embeddings)
        inputs = self.aligned(memory) + self.device_embeddings(before)
        states, _ = self.decoder(inputs, tuple(s.expand(-1, batch, -1).contiguous() for s in state))
        query = self.query(states).reshape(1, -1, ATTENTION)
        context = functional.scaled_dot_product_attention(query, self.key(memory), self.value(memory))
        votes = self.from_context(context).view(batch, -1, self.devices)
        logits = self.from_state(states) + votes + self.follow[before]
        return _chosen(logits.masked_fill(~allowed, FORBIDDEN), actions)

    @torch.no_grad()
    def sample(
        self, embeddings: Tensor, allowed: Tensor, batch: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """(actions, their log-probabilities) [batch, steps]."""
        noise = torch.rand((allowed.shape[0], batch, self.devices), generator=generator)
        return self._decode(embeddings, allowed, -(-noise.log()).log())

    @torch.no_grad()
    def likeliest(self, embeddings: Tensor, allowed: Tensor) -> Tensor:
        """[1, steps] the most probable device of each step, given those before it."""
        noise = torch.zeros(allowed.shape[0], 1, self.devices)
        return self._decode(embeddings, allowed, noise)[0]

    @property
    def devices(self) -> int:
        return self.follow.shape[1]

    def _encode(self, embeddings: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(memory [1, steps, hidden], the decoder's first state)."""
        memory, last = self.encoder(embeddings)
        hidden, cell = (torch.cat([s[0], s[1]], dim=-1)[None] for s in last)
        return memory, (hidden, cell)

    def _decode(self, embeddings: Tensor, allowed: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The same arithmetic step by step; the device is that of the largest logit + noise.

        noise   [steps, batch, devices]

        What does not depend on earlier devices is computed for all steps at once, and attention
        sums what each memory says of the devices, not the memories.
        """
        steps, batch, _ = noise.shape
        memory, (hidden, cell) = self._encode(embeddings)
        into, again, *biases = (_gates_last(p) for p in self.decoder.parameters())
        of_memory = functional.linear(self.aligned(memory)[0], into, biases[0] + biases[1])
        of_device = functional.linear(self.device_embeddings.weight, into)
        known = torch.zeros(allowed.shape).masked_fill(~allowed, FORBIDDEN)
        known += self.from_state.bias
        keys = self.query.weight.T @ self.key(memory)[0].T / ATTENTION**0.5
        said = self.from_context(self.value(memory))[0]
        again, of_state = again.T.contiguous(), self.from_state.weight.T.contiguous()
        hidden, cell = (s[0].repeat(batch, 1) for s in (hidden, cell))
        last = torch.full((batch,), self.devices)
        logits, actions = torch.empty_like(noise), torch.empty((steps, batch), dtype=torch.long)
        size = hidden.shape[1]
        for step in range(steps):
            gates = of_device[last].add_(of_memory[step]).addmm_(hidden, again)
            enter, forget, leave = gates[:, : 3 * size].sigmoid_().chunk(3, dim=1)
            cell.mul_(forget).addcmul_(enter, gates[:, 3 * size :].tanh_())
            torch.mul(leave, cell.tanh(), out=hidden)
            here = self.follow[last].add_(known[step]).addmm_(hidden, of_state)
            here.addmm_((hidden @ keys).softmax(dim=1), said)
            logits[step] = here
            last = here.add_(noise[step]).argmax(dim=1)
            actions[step] = last
        log_probs, _ = _chosen(logits, actions)
        return actions.T.contiguous(), log_probs.T.contiguous()


def _gates_last(weights: Tensor) -> Tensor:
    """An LSTM's rows, input, forget, cell, output, as input, forget, output, cell."""
    enter, forget, cell, leave = weights.chunk(4)
    return torch.cat([enter, forget, leave, cell])


def _chosen(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) [...] of `actions` [...] under `logits` [..., devices]."""
    log_probs = logits.log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, actions[..., None])[..., 0], entropies


class Seq2Seq(Policy):
    """RL17's policy, for one graph on one machine: its sizes stand in `config`.

    An embedding is, of a group: the mean of its ops' kinds, each with a vector of its own; the
    padded output shapes and the other numbers of the `View`; and one-hot adjacency, readers,
    writers and itself, through a linear layer.
    """

    name: ClassVar[str] = "seq2seq"

    def __init__(  # noqa: PLR0913  (keyword-only)
        self,
        *,
        groups: int,
        devices: int,
        shapes: int = SHAPES,
        numbers: int = NUMBERS,
        hidden: int = HIDDEN,
        stay: float = STAY,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = {
            "groups": groups, "devices": devices, "shapes": shapes, "numbers": numbers,
            "hidden": hidden, "stay": stay, "seed": seed,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.kinds = nn.EmbeddingBag(BUCKETS, KINDS, mode="sum", include_last_offset=True)
            self.neighbours = nn.Embedding(3 * groups, hidden)
            size = KINDS + shapes + numbers + hidden
            self.net = Seq2SeqNet(size, devices, hidden=hidden, stay=stay)

    @classmethod
    def for_view(cls, view: View, *, seed: int = 0, **options: Any) -> Self:
        """A policy of the view's sizes."""
        return cls(
            groups=view.groups,
            devices=view.device_count,
            shapes=view.shapes.shape[1],
            numbers=view.numbers.shape[1],
            seed=seed,
            **options,
        )

    def draw(self, view: View, batch: int, generator: torch.Generator) -> Draw:
        with torch.no_grad():
            embeddings = self._embed(view)
        devices, log_probs = self.net.sample(embeddings, choices_of(view), batch, generator)
        return Draw({"devices": devices}, devices.numpy().astype(np.int32), log_probs)

    def judge(self, view: View, actions: dict[str, Tensor]) -> Judged:
        found = self.net.judge(self._embed(view), choices_of(view), actions["devices"])
        return Judged(*found)

    def likeliest(self, view: View) -> NDArray[np.int32]:
        with torch.no_grad():
            devices = self.net.likeliest(self._embed(view), choices_of(view))
        placement: NDArray[np.int32] = devices[0].numpy().astype(np.int32)
        return placement

    def _embed(self, view: View) -> Tensor:
        """[1, groups, size]"""
        kinds = self.kinds(
            torch.from_numpy(view.kind_buckets),
            torch.from_numpy(view.kind_offsets),
            per_sample_weights=torch.from_numpy(view.kind_shares),
        )
        given = torch.from_numpy(np.concatenate([view.shapes, view.numbers], axis=1))
        return torch.cat([kinds, given, self._adjacency(view)], dim=1)[None]

    def _adjacency(self, view: View) -> Tensor:
        """[groups, hidden] the linear layer on [readers | writers | itself], rows of length 1: the
        sum of the weights of those that are there."""
        groups = view.groups
        itself = torch.arange(groups)
        sources, destinations = torch.from_numpy(view.sources), torch.from_numpy(view.destinations)
        rows = torch.cat([sources, destinations, itself])
        columns = torch.cat([destinations, groups + sources, 2 * groups + itself])
        scale = torch.bincount(rows, minlength=groups).float().rsqrt()
        weights = self.neighbours.weight
        sums = torch.zeros(groups, weights.shape[1]).index_add(0, rows, weights[columns])
        return sums * scale[:, None]


def choices_of(view: View) -> Tensor:
    """[groups, devices] where each group may be; of those without a choice, where they are."""
    settled = np.arange(view.device_count) == view.settled[:, None]
    return torch.from_numpy(np.where(view.free[:, None], view.allowed, settled))
