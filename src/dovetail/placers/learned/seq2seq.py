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
scatter. Groups come module by module, not in the graph's order. To type, shapes and adjacency the
embedding adds the other numbers of the `ProblemView`, and g_t says what a device is worth by where
the group's positions lie to it (`features.cuts`), from the start by module and parameter; without
those of either that are another method's advice. The best placement so far is one more trial of
every batch (`LearningSettings.elite`). `seq2seq-paper` has none of that: `Seq2SeqPaper`.
"""

from abc import abstractmethod
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
    CUTS,
    NUMBERS,
    POSITIONS,
    SHAPES,
    column,
    cuts,
)
from dovetail.placers.learned.policy import Draw, Judged, Policy, chosen, kind_vectors, tensors_of
from dovetail.placers.learned.records import LearningSettings, ProblemView

CPU = torch.device("cpu")
HIDDEN, ATTENTION, KINDS = 64, 16, 16
"""Sizes: of the LSTMs' states (of the encoder's both ways together), of queries, of kinds."""
STAY = 2.0
FORBIDDEN = -1e9
"""A logit whose probability is 0, and which times 0 is 0."""
PIECE = 2**20
"""Numbers of attention that are worked on at once: they should stay in the cache."""
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

PAPER_SETTINGS = LearningSettings(
    "reinforce", trials=8, rate=0.001, baseline_decay=0.9, failing=10.0, valid_only_from=5000
)
_OWN_NUMBERS = [i for i in range(NUMBERS) if i not in ADVICE_NUMBERS]
_OWN_CUTS = [i for i in range(CUTS) if i not in ADVICE_CUTS]
START: dict[str, float] = {"module": -0.75, "parameter": -0.75}
"""Logits, before any training, of a distance of one width from a device's part by a position."""


def gumbel(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Numbers whose addition to log-probabilities makes the largest a draw; without a generator
    zeros."""
    if generator is None:
        return torch.zeros_like(like)
    waits = torch.empty(like.shape).exponential_(generator=generator)
    return -waits.log().to(like.dtype)


def read_both_ways(
    encoder: nn.LSTM, embeddings: Tensor, batch: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The encoder's states [1 or batch, steps, hidden], and the decoder's first state
    [1, batch, hidden] twice: the encoder's last ones."""
    states, last = encoder(embeddings)
    hidden, cell = (
        torch.cat([s[0], s[1]], dim=1).expand(batch, -1).contiguous()[None] for s in last
    )
    return states, (hidden, cell)


class AttentionalLstm(nn.Module):
    """RL17's network as its authors' later code has it, and HDP's placer: from embeddings to a
    device a step, by LSTMs with attention.

    The network of TensorFlow's python/grappler/hierarchical_controller.py; attention after
    D. Bahdanau, K. Cho and Y. Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", ICLR 2015, https://arxiv.org/abs/1409.0473.

        m_1 … m_G   W1 · the states of a bidirectional LSTM over the embeddings   [groups, hidden]
        s_t         the decoder's state, from s_{t-1} and the embedding of d_{t-1}, nothing else
        c_t         Σ softmax(v tanh(W2 s_t + m))_j m_j
        d_t         ~ softmax(C tanh(W [s_t, c_t] / T) + noise)                where it is allowed

    noise: normal, of `noise` times the root mean square of a step's logits; while it lasts it is
    part of the policy, and the trial's own numbers come with its actions.

    Differences: LSTMs with a bias per unit, that of the forget gate starting at 1, instead of one
    shared bias there; devices that are forbidden are left out.

    bound, temperature   C and T; bound 0: no tanh

    Its methods take embeddings [batch or 1, steps, size] (where all trials share theirs, they are
    encoded once), `allowed` [batch or 1, steps, devices], and `noise` [batch, steps, devices],
    standard normal times its share; None: none.
    """

    def __init__(
        self, size: int, devices: int, *, hidden: int, bound: float, temperature: float
    ) -> None:
        super().__init__()
        self.bound, self.temperature = bound, temperature
        self.encoder = nn.LSTM(size, hidden // 2, batch_first=True, bidirectional=True)
        self.memory = nn.Linear(hidden, hidden, bias=False)
        self.device_embeddings = nn.Embedding(devices + 1, hidden)  # the last: before the first
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Parameter(torch.empty(hidden, 1))
        self.out = nn.Linear(2 * hidden, devices, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    nn.init.ones_(parameter[len(parameter) // 4 : len(parameter) // 2])

    @property
    def devices(self) -> int:
        return self.out.out_features

    def judge(
        self, embeddings: Tensor, allowed: Tensor, actions: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) [batch, steps] of `actions`, with gradient."""
        before = torch.full_like(actions, self.devices)
        before[:, 1:] = actions[:, :-1]
        states, first = read_both_ways(self.encoder, embeddings, len(actions))
        memory = self.memory(states).expand(len(actions), -1, -1)
        states, _ = self.decoder(self.device_embeddings(before), first)
        context = _attend(self.query(states), memory, self.score)
        logits = self._logits(torch.cat([states, context], dim=2), noise)
        return chosen(logits.masked_fill(~allowed, FORBIDDEN), actions)

    @torch.no_grad()
    def decode(
        self, embeddings: Tensor, allowed: Tensor, chance: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(actions, their log-probabilities) [batch, steps]: of each step the device of the
        largest logit + chance.

        chance   [batch, steps, devices] Gumbel numbers draw from the policy, zeros take the
                 likeliest
        """
        batch, steps, _ = chance.shape
        states, (hidden, cell) = read_both_ways(self.encoder, embeddings, batch)
        memory = self.memory(states).expand(batch, -1, -1)
        into, from_hidden, *biases = self.decoder.parameters()
        of_device = functional.linear(self.device_embeddings.weight, into, biases[0] + biases[1])
        again = from_hidden.T.contiguous()
        forbidden = torch.zeros_like(chance).masked_fill_(~allowed, FORBIDDEN)
        hidden, cell = hidden[0], cell[0]
        last = torch.full((batch,), self.devices)
        actions = torch.empty((batch, steps), dtype=torch.long)
        log_probs = torch.empty((batch, steps), dtype=memory.dtype)
        for step in range(steps):
            gates = torch.addmm(of_device[last], hidden, again)
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            context = _attend(self.query(hidden)[:, None], memory, self.score)[:, 0]
            logits = self._logits(
                torch.cat([hidden, context], dim=1), None if noise is None else noise[:, step]
            )
            logs = (logits + forbidden[:, step]).log_softmax(dim=1)
            last = (logs + chance[:, step]).argmax(dim=1)
            actions[:, step] = last
            log_probs[:, step] = logs.gather(1, last[:, None])[:, 0]
        return actions, log_probs

    def _logits(self, states: Tensor, noise: Tensor | None) -> Tensor:
        logits: Tensor = self.out(states) / self.temperature
        if self.bound > 0:
            logits = self.bound * logits.tanh()
        if noise is None:
            return logits
        return logits + noise * logits.square().mean(dim=-1, keepdim=True).sqrt()


def _attend(queries: Tensor, memory: Tensor, score: Tensor) -> Tensor:
    """[batch, steps, hidden] what queries [batch, steps, hidden] find in memory
    [batch, groups, hidden]."""
    scores: Tensor = _Scores.apply(queries, memory, score)  # type: ignore[no-untyped-call]
    return torch.bmm(scores.softmax(dim=2), memory)


class _Scores(torch.autograd.Function):
    """v tanh(query + memory): [batch, steps, groups].

    What is between has batch x steps x groups x hidden numbers: it is made piece by piece and made
    again for the gradient, which is faster than to keep it.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, memory: Tensor, score: Tensor) -> Tensor:
        ctx.save_for_backward(queries, memory, score)
        pieces = [(_tanh(piece, memory) @ score)[..., 0] for piece in _pieces(queries, memory)]
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With t the tanh and g what arrives: v Σ g (1 - t^2) over groups, over steps; Σ g t."""
        queries, memory, score = ctx.saved_tensors
        of_query = []
        of_memory, of_score = torch.zeros_like(memory), torch.zeros_like(score)
        start = 0
        for piece in _pieces(queries, memory):
            given = gradients[0][:, start : start + piece.shape[1]]
            start += piece.shape[1]
            through = _tanh(piece, memory)
            of_score += (given.reshape(1, -1) @ through.view(-1, len(score))).T
            through.square_().neg_().add_(1)
            of_query.append((given[:, :, None] @ through)[:, :, 0])
            of_memory += through.mul_(given[..., None]).sum(dim=1)
        return torch.cat(of_query, dim=1) * score[:, 0], of_memory * score[:, 0], of_score


def _pieces(queries: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
    size = max(1, PIECE // memory.numel())
    return queries.tensor_split(list(range(size, queries.shape[1], size)), dim=1)


def _tanh(queries: Tensor, memory: Tensor) -> Tensor:
    """[batch, steps, groups, hidden]"""
    return (queries[:, :, None] + memory[:, None]).tanh_()


class AlignedLstm(nn.Module):
    """The network of `seq2seq`: the module's m, s, c and d.

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
        self, embeddings: Tensor, allowed: Tensor, actions: Tensor, worths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) [batch, steps] of `actions` [batch, steps]. One pass."""
        before = torch.full_like(actions, self.devices)
        before[:, 1:] = actions[:, :-1]
        memory, first = read_both_ways(self.encoder, embeddings, len(actions))
        inputs = self.aligned(memory) + self.device_embeddings(before)
        states, _ = self.decoder(inputs, first)
        # All trials attend to the same memory: one row of queries, without a copy of the keys.
        queries = self.query(states).view(1, 1, -1, ATTENTION)
        keys, values = self.key(memory)[None], self.value(memory)[None]
        context = functional.scaled_dot_product_attention(queries, keys, values)
        votes = self.from_context(context).view(*actions.shape, self.devices)
        logits = self.from_state(states) + votes + self.follow[before] + worths
        return chosen(logits.masked_fill(~allowed, FORBIDDEN), actions)

    @torch.no_grad()
    def decode(
        self, embeddings: Tensor, allowed: Tensor, chance: Tensor, worths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionalLstm.decode`.

        What does not depend on earlier devices is computed for all steps at once, and attention
        sums what each memory says of the devices, not the memories.
        """
        chance = chance.transpose(0, 1)  # [steps, batch, devices]
        steps, batch, _ = chance.shape
        memory, first = read_both_ways(self.encoder, embeddings, batch)
        hidden, cell = first[0][0], first[1][0]
        size = hidden.shape[1]
        # An LSTM's rows, input, forget, cell, output, as input, forget, output, cell: what goes
        # through a sigmoid stands together.
        into, again, *biases = (
            torch.cat([p[: 2 * size], p[3 * size :], p[2 * size : 3 * size]])
            for p in self.decoder.parameters()
        )
        of_memory = functional.linear(self.aligned(memory)[0], into, biases[0] + biases[1])
        of_device = functional.linear(self.device_embeddings.weight, into)
        known = (worths + self.from_state.bias).masked_fill(~allowed, FORBIDDEN)
        keys = self.query.weight.T @ self.key(memory)[0].T / ATTENTION**0.5
        said = self.from_context(self.value(memory))[0]
        again, of_state = again.T.contiguous(), self.from_state.weight.T.contiguous()
        last = torch.full((batch,), self.devices)
        logits, actions = torch.empty_like(chance), torch.empty((steps, batch), dtype=torch.long)
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
        log_probs, _ = chosen(logits, actions)
        return actions.T.contiguous(), log_probs.T.contiguous()


class SequencePolicy(Policy):
    """A policy that names one device after another, for one graph on one machine, on the CPU: its
    sizes stand in `config`. Actions "devices" [batch, groups] stand in the order in which they are
    decided."""

    net: AttentionalLstm | AlignedLstm

    @classmethod
    def for_view(cls, view: ProblemView, *, seed: int = 0, **options: Any) -> Self:
        return cls(groups=view.groups, devices=view.device_count, seed=seed, **options)

    @abstractmethod
    def order(self, view: ProblemView) -> NDArray[np.int64]:
        """[groups] the groups as they are decided."""

    @abstractmethod
    def embed(self, view: ProblemView) -> tuple[Tensor, Tensor | None]:
        """([groups, size] embeddings, [groups, devices] logits that are known before), as the
        view's groups stand."""

    @abstractmethod
    def chance(self, view: ProblemView, batch: int, generator: torch.Generator) -> Tensor:
        """[batch, groups, devices] Gumbel numbers."""

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        return self._decode(view, self.chance(view, batch, generator))

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        none = torch.zeros(1, view.groups, view.device_count)
        best: NDArray[np.int32] = self._decode(view, none).placements[0]
        return best

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        embeddings, allowed, worths = self._sequence(view)
        return Judged(*self.net.judge(embeddings, allowed, actions["devices"], worths))

    def actions_of(self, view: ProblemView, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        return {"devices": torch.from_numpy(placement[self.order(view)].astype(np.int64))[None]}

    @torch.no_grad()
    def _decode(self, view: ProblemView, chance: Tensor) -> Draw:
        embeddings, allowed, worths = self._sequence(view)
        devices, log_probs = self.net.decode(embeddings, allowed, chance, worths)
        placements = np.empty(devices.shape, dtype=np.int32)
        placements[:, self.order(view)] = devices.numpy()
        return Draw({"devices": devices}, placements, log_probs)

    def _sequence(self, view: ProblemView) -> tuple[Tensor, Tensor, Any]:
        """What the network takes, in the order in which groups are decided: embeddings
        [1, groups, size], where each group may be [groups, devices] (of those without a choice,
        where they are), and logits that are known. Raises `PolicyMismatchError` for a view of other
        sizes than the policy was made for."""
        groups, devices = self.config["groups"], self.config["devices"]
        if (groups, devices) != (view.groups, view.device_count):
            raise PolicyMismatchError(
                self.name,
                f"it was made for {groups} groups on {devices} devices, here are {view.groups} "
                f"on {view.device_count}",
            )
        order = torch.from_numpy(self.order(view))
        settled = np.arange(view.device_count) == view.settled[:, None]
        allowed = torch.from_numpy(np.where(view.free[:, None], view.allowed, settled))
        embeddings, known = self.embed(view)
        return embeddings[None, order], allowed[order], None if known is None else known[order]


class Seq2Seq(SequencePolicy):
    """RL17's policy with our additions.

    An embedding is, of a group: the mean of its ops' kinds, each with a vector of its own; the
    padded output shapes and the other numbers of the `ProblemView`; and one-hot adjacency, readers,
    writers and itself, through a linear layer.
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
            self.kinds = kind_vectors(KINDS)
            self.neighbours = nn.Embedding(3 * groups, hidden)
            self.net = AlignedLstm(size, devices, hidden=hidden, stay=stay)
        worth = torch.zeros(CUTS)
        for position, logit in START.items():
            worth[POSITIONS.index(position) - len(POSITIONS)] = logit
        self.worth = nn.Parameter(worth[_OWN_CUTS])

    def order(self, view: ProblemView) -> NDArray[np.int64]:
        """By the place of their modules, then as they are."""
        return np.argsort(view.numbers[:, column("module")], kind="stable")

    def embed(self, view: ProblemView) -> tuple[Tensor, Tensor]:
        seen, groups = tensors_of(view, CPU), view.groups
        # The linear layer on [readers | writers | itself], rows of length 1: the sum of the weights
        # of those that are there.
        itself = torch.arange(groups)
        rows = torch.cat([seen.sources, seen.destinations, itself])
        columns = torch.cat([seen.destinations, groups + seen.sources, 2 * groups + itself])
        scale = torch.bincount(rows, minlength=groups).to(self.worth).rsqrt()
        weights = self.neighbours.weight
        sums = weights.new_zeros(groups, weights.shape[1]).index_add(0, rows, weights[columns])
        numbers = torch.cat([seen.shapes, seen.numbers[:, _OWN_NUMBERS]], dim=1)
        worths = torch.from_numpy(cuts(view)[:, :, _OWN_CUTS]).to(self.worth) @ self.worth
        return torch.cat([seen.kinds(self.kinds), numbers, sums * scale[:, None]], dim=1), worths

    def chance(self, view: ProblemView, batch: int, generator: torch.Generator) -> Tensor:
        shape = (view.groups, batch, view.device_count)
        return -(-torch.rand(shape, generator=generator).log()).log().transpose(0, 1)


class Seq2SeqPaper(SequencePolicy):
    """seq2seq-paper: RL17's policy and training as its paper has them, without our additions.

    Sections 3.1 and 3.2:

        e_1 … e_G   [type | output shapes | one-hot writers and readers] of a group, in graph order
        m_1 … m_G   states of the encoder's LSTM
        d_t         of the decoder's LSTM, which is fed the embedding of d_{t-1}, with Bahdanau's
                    attention over m: `AttentionalLstm` with neither bound, temperature nor noise

    Groups are those of the paper's experiments, a cell or branch each (`graph.cells`). Trained by
    REINFORCE on sqrt(seconds), against a moving average that begins at the failing signal
    (`PAPER_SETTINGS`). Against `seq2seq` there is no start by positions, no other feature, no
    alignment of the decoder, no `stay`, no entropy, no normalised advantages and no imitation of
    the best placement. Takes O(trials x groups^2 x hidden) a draw.

    What the paper leaves open, and what stands here instead:

    * Sizes of the network: `HIDDEN` is ours.
    * How ops make up a group's embedding. Here the type is the mean of the ops' types, and the
      shapes are those of the two largest outputs.
    * Whether the encoder reads both ways, and whether the decoder reads the state of the group that
      it decides. It does the first and not the second in its authors' later code (TensorFlow,
      python/grappler/hierarchical_controller.py), and here.
    * Adam's rate and the decay of the baseline. The decay is that code's; the rate was chosen among
      .0003, .001 and .003 on one row, RL17's Inception-V3 on 2 GPUs, by one seed of 4,000
      placements (benchmarks/learned/README.md).
    * The failing signal's size: that of the same code, sqrt(100).

    Differences: kinds are hashed into `BUCKETS`; shapes are logarithms; one controller with 8
    evaluators stands for up to 20 of them.
    """

    name = "seq2seq-paper"

    def __init__(self, *, groups: int, devices: int, hidden: int = HIDDEN, seed: int = 0) -> None:
        super().__init__()
        self.config = {"groups": groups, "devices": devices, "hidden": hidden, "seed": seed}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.kinds = kind_vectors(KINDS)
            size = KINDS + SHAPES + 2 * groups
            self.net = AttentionalLstm(size, devices, hidden=hidden, bound=0.0, temperature=1.0)

    def order(self, view: ProblemView) -> NDArray[np.int64]:
        return np.arange(view.groups)

    def embed(self, view: ProblemView) -> tuple[Tensor, None]:
        seen, groups = tensors_of(view, CPU), view.groups
        kinds = seen.kinds(self.kinds)
        neighbours = kinds.new_zeros(groups, 2 * groups)
        neighbours[seen.sources, seen.destinations] = 1.0
        neighbours[seen.destinations, groups + seen.sources] = 1.0
        return torch.cat([kinds, seen.shapes, neighbours], dim=1), None

    def chance(self, view: ProblemView, batch: int, generator: torch.Generator) -> Tensor:
        return gumbel(torch.empty(batch, view.groups, view.device_count), generator)
