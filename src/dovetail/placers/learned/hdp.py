"""hdp: a network sorts the ops into groups, a second one gives each group a device.

A. Mirhoseini, A. Goldie, H. Pham, B. Steiner, Q. V. Le and J. Dean, "A Hierarchical Model for
Device Placement", ICLR 2018, https://openreview.net/forum?id=Hkc-TeZ0W, sections 3 and 4; settings
of its authors' open version, TensorFlow's python/grappler/hierarchical_controller.py.

    ops ──► grouper ──► a group each ──► embeddings of the groups ──► placer ──► a device each
            softmax(W2 relu(W1 x))       kinds, sizes, adjacency      `HdpPlacer`

Both are drawn from, both are trained at once by REINFORCE: log π is the sum over ops and groups.

    settings     open version                          the paper
    groups       min(256, 20 x devices)                256
    C, T         1, 1, placer only                     5, 10
    noise        .5 of the logits' size, 750 updates   .1 at most, 500 updates
    trials       1 an update                           4 placements of 1 grouping
    rate         .1, after 400 updates x .95 every 50  .1
    failing      sqrt(100), where the baseline starts; after 1,000 updates only what ran teaches

`hdp-paper` is the paper's column (`PAPER`): every op by itself, type, output shapes and neighbours
as features, 256 groups, 4 placements of each grouping, Adam at .1 throughout, the gradient's norm
cut to 1, and none of our means against early certainty. What the paper leaves open is the open
version's: widths, the baseline's decay, the failing signal. `hdp` is what learns more (`SETTINGS`).

Differences: the "ops" are the problem's groups, what must stay together for `hdp-paper`, and a
learned group is one of them or many. The open version's training step draws a second grouping and
placement, of an empty input, and teaches those by the first ones' reward; we teach what was tried.
Its grouper multiplies raw sizes and indices by two matrices in a row, which decides most ops before
any training: here features are of one size, and a hidden layer has a ReLU. Costs and places of ops
are features of `hdp` beside type, sizes and neighbours; kinds have vectors of their own, as in the
paper. There are no more learned groups than ops. Ops without a choice join no group; groups see
their devices as neighbours. A group may go wherever one of its ops may, and an op that may not goes
to its fastest device; a group without ops decides nothing. Of `hdp` each trial has a grouping of
its own. The open version draws no new placements after 500 updates, but keeps the last one;
`greedy_from` does that by taking the likeliest.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.errors import PolicyMismatchError
from dovetail.placers.learned.features import NUMBERS, SHAPES
from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView

# HDP's placer: from embeddings of groups to a device for each, by LSTMs with attention.
#
# The network of TensorFlow's python/grappler/hierarchical_controller.py, by HDP's authors;
# attention
# after D. Bahdanau, K. Cho and Y. Bengio, "Neural Machine Translation by Jointly Learning to Align
# and Translate", ICLR 2015, https://arxiv.org/abs/1409.0473.
#
#     m_1 … m_G   W1 · the states of a bidirectional LSTM over the embeddings   [groups, hidden]
#     s_t         the decoder's state, from s_{t-1} and the embedding of d_{t-1}, nothing else
#     c_t         Σ softmax(v tanh(W2 s_t + m))_j m_j
#     d_t         ~ softmax(C tanh(W [s_t, c_t] / T) + noise)                   where it is allowed
#
# noise: normal, of `noise` times the root mean square of a step's logits; while it lasts it is part
# of the policy, and the trial's own numbers come with its actions.
#
# Differences: LSTMs with a bias per unit, that of the forget gate starting at 1, instead of one
# shared bias there; devices that are forbidden are left out.


FORBIDDEN = -1e9
"""A logit whose probability is 0, and which times 0 is 0."""
PIECE = 2**20
"""Numbers of attention that are worked on at once: they should stay in the cache."""


class HdpPlacer(nn.Module):
    """Embeddings [batch or 1, steps, size], `allowed` [batch or 1, steps, devices] -> a device a
    step. Where all trials share their embeddings, they are encoded once.

    bound, temperature   C and T; bound 0: no tanh
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
        """(log-probabilities, entropies) [batch, steps] of `actions`, with gradient.

        noise   [batch, steps, devices] standard normal times its share; None: none
        """
        before = torch.full_like(actions, self.devices)
        before[:, 1:] = actions[:, :-1]
        memory, state = self._encode(embeddings, len(actions))
        states, _ = self.decoder(self.device_embeddings(before), state)
        context = _attend(self.query(states), memory, self.score)
        logits = self._logits(torch.cat([states, context], dim=2), noise)
        logs = logits.masked_fill(~allowed, FORBIDDEN).log_softmax(dim=2)
        entropies = -(logs.exp() * logs).sum(dim=2)
        return logs.gather(2, actions[..., None])[..., 0], entropies

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
        memory, (hidden, cell) = self._encode(embeddings, batch)
        into, from_hidden, *biases = self.decoder.parameters()
        of_device = nn.functional.linear(self.device_embeddings.weight, into, biases[0] + biases[1])
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

    def _encode(self, embeddings: Tensor, batch: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(memory [batch, steps, hidden], the decoder's first state [1, batch, hidden] twice)."""
        states, last = self.encoder(embeddings)
        hidden, cell = (
            torch.cat([s[0], s[1]], dim=1).expand(batch, -1).contiguous()[None] for s in last
        )
        return self.memory(states).expand(batch, -1, -1), (hidden, cell)

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


MOST_GROUPS, GROUPS_PER_DEVICE = 256, 20
PAPER_SETTINGS = LearningSettings(
    "reinforce", trials=4, rate=0.1, failing=10.0, valid_only_from=1000
)
PAPER: dict[str, Any] = {
    "hidden": 512,
    "grouper_hidden": 64,
    "bound": 5.0,
    "temperature": 10.0,
    "noise": 0.1,
    "noise_until": 500,
    "samples": 4,
    "costs": False,
}
"""Settings and options of the paper, section 4: `hdp-paper`. The rate is fixed, and the gradient's
norm is cut to 1. Widths, the failing signal and the baseline's decay are those of the open version,
for the paper does not give them."""
SETTINGS = LearningSettings(
    "reinforce",
    trials=8,
    rate=0.0005,
    decay=0.95,
    decay_from=400,
    decay_every=50,
    baseline_decay=0.5,
    failing=10.0,
    valid_only_from=1000,
    entropy_each=0.05,
    normalised=True,
    elite=1.0,
)
"""Those that learn: the rate, what a batch is compared with, and our three means against early
certainty, which `seq2seq` and `gdp` have as well."""
NEIGHBOURS = 6
"""Of each direction, that the grouper sees of an op."""
KIND_SIZE = 20


@dataclass(frozen=True, eq=False)
class _ViewTensors:
    """A view as tensors, of the n groups that are free: the ops.

    places     [n] their indices in the view
    features   [n, features] what the grouper sees of an op, but for its kinds
    kinds      [n, kinds] shares
    ends       [2, edges] an op, or n + the device of a group without a choice
    allowed    [n, devices]
    fastest    [n] the allowed device
    """

    places: Tensor
    features: Tensor
    kinds: Tensor
    ends: Tensor
    allowed: Tensor
    fastest: Tensor


class Hdp(Policy):
    """For one graph on one machine, on the CPU.

    kinds          buckets of the kinds that have a vector; others have none
    groups         learned groups
    hidden         of the placer's LSTMs; `grouper_hidden`: of the grouper's layer
    bound, temperature   of the placer's logits: `HdpPlacer`
    noise          share of the logits' size that is added to both networks' logits, until
                   update `noise_until`
    greedy_from    update from which on the placer takes the likeliest device; None: never
    samples        trials in a row that share one grouping: the paper's k placements of each
    costs          False: types, shapes and neighbours alone, as in the paper; the policy is then
                   named hdp-paper

    Takes O(trials x groups^2 x hidden) a draw.
    """

    def __init__(
        self,
        *,
        kinds: list[int],
        devices: int,
        groups: int,
        hidden: int = 512,
        grouper_hidden: int = 64,
        bound: float = 1.0,
        temperature: float = 1.0,
        noise: float = 0.0,
        noise_until: int = 750,
        greedy_from: int | None = None,
        samples: int = 1,
        costs: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.name = "hdp" if costs else "hdp-paper"
        self.config = {
            "kinds": list(kinds), "devices": devices, "groups": groups, "hidden": hidden,
            "grouper_hidden": grouper_hidden, "bound": bound, "temperature": temperature,
            "noise": noise, "noise_until": noise_until, "greedy_from": greedy_from,
            "samples": samples, "costs": costs, "seed": seed,
        }  # fmt: skip
        self.samples, self.costs = samples, costs
        numbers = SHAPES + NUMBERS if costs else SHAPES
        self.groups, self.noise, self.noise_until = groups, noise, noise_until
        self.greedy_from, self.update = greedy_from, 0
        self.buckets = np.array(kinds, dtype=np.int64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.kinds = nn.Parameter(torch.randn(len(kinds), KIND_SIZE))
            first = nn.Linear(KIND_SIZE + numbers + 2 * NEIGHBOURS, grouper_hidden)
            last = nn.Linear(grouper_hidden, groups, bias=False)
            nn.init.xavier_uniform_(first.weight)
            nn.init.xavier_uniform_(last.weight)
            self.grouper = nn.Sequential(first, nn.ReLU(), last)
            size = 2 * (groups + devices) + costs + len(kinds) + numbers
            self.placer = HdpPlacer(
                size, devices, hidden=hidden, bound=bound, temperature=temperature
            )
        self._last: tuple[ProblemView, _ViewTensors] | None = None

    @classmethod
    def for_view(cls, view: ProblemView, *, seed: int = 0, **options: Any) -> Self:
        """A policy of the view's kinds, devices and groups: by the open version's rule, and as
        published always `MOST_GROUPS`, but no more than there are ops."""
        kinds = np.unique(view.kind_buckets).tolist()
        most = min(MOST_GROUPS, int(view.free.sum()))
        if options.get("costs", True):
            most = min(most, GROUPS_PER_DEVICE * view.device_count)
        options = {"groups": max(1, most), **options}
        return cls(kinds=kinds, devices=view.device_count, seed=seed, **options)

    def begin(self, update: int) -> None:
        self.update = update

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        noisy = self.noise > 0 and self.update <= self.noise_until
        seeds = torch.full((batch,), -1)
        if noisy:
            seeds = torch.randint(2**62, (batch,), generator=generator)
        greedy = self.greedy_from is not None and self.update >= self.greedy_from
        with torch.no_grad():
            return self._draw(view, seeds, generator, greedy=greedy)

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        seen, groups = self._see(view), actions["groups"]
        noise = self._noise(seen, actions["noise"])
        logs = self._grouping(seen, noise).log_softmax(dim=2)
        entropies = -(logs.exp() * logs).sum(dim=2).expand(len(groups), -1)
        log_probs = logs.expand(len(groups), -1, -1).gather(2, groups[..., None])[..., 0]
        embeddings, allowed = self._embed(seen, groups)
        placed = self.placer.judge(
            embeddings, allowed, actions["devices"], None if noise is None else noise[1]
        )
        return Judged(
            torch.cat([log_probs, placed[0]], dim=1), torch.cat([entropies, placed[1]], dim=1)
        )

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        with torch.no_grad():
            draw = self._draw(view, torch.tensor([-1]), None, greedy=True)
        placement: NDArray[np.int32] = draw.placements[0]
        return placement

    @torch.no_grad()
    def actions_of(
        self, view: ProblemView, placement: NDArray[np.int32]
    ) -> dict[str, Tensor] | None:
        """A way to decide for `placement`, a batch of one; None: there are too few groups.

        Of the many ways: a group goes where most of the ops are whose likeliest group it is, a
        device that has no group yet gets the emptiest that can be spared, and each op joins the
        likeliest group that is on its device.
        """
        seen = self._see(view)
        logs = self._grouping(seen, None)[0].log_softmax(dim=1)
        there = torch.from_numpy(placement)[seen.places].long()
        wanted = nn.functional.one_hot(there, self.placer.devices).to(logs.dtype)
        votes = nn.functional.one_hot(logs.argmax(dim=1), self.groups).to(logs.dtype).T @ wanted
        devices = votes.argmax(dim=1)
        for device in set(there.tolist()):
            if not bool((devices == device).any()):
                alone = torch.bincount(devices, minlength=self.placer.devices)[devices] < 2
                spare = int(votes.sum(dim=1).masked_fill(alone, torch.inf).argmin())
                if bool(alone[spare]):
                    return None
                devices[spare] = device
        groups = logs.masked_fill(devices[None] != there[:, None], -torch.inf).argmax(dim=1)
        used = torch.bincount(groups, minlength=self.groups) > 0
        devices = torch.where(used, devices, torch.zeros_like(devices))
        return {"groups": groups[None], "devices": devices[None], "noise": torch.tensor([-1])}

    def _draw(
        self, view: ProblemView, seeds: Tensor, generator: torch.Generator | None, *, greedy: bool
    ) -> Draw:
        """One trial a seed of noise. Without a generator groups are the likeliest."""
        seen, batch = self._see(view), len(seeds)
        noise = self._noise(seen, seeds)
        logs = self._grouping(seen, noise).log_softmax(dim=2).expand(batch, -1, -1)
        firsts = torch.arange(batch) // self.samples * self.samples
        groups = (logs + gumbel(logs, generator)).argmax(dim=2)[firsts]
        embeddings, allowed = self._embed(seen, groups)
        chance = gumbel(allowed.to(logs.dtype), None if greedy else generator)
        devices, placed = self.placer.decode(
            embeddings, allowed, chance, None if noise is None else noise[1]
        )
        log_probs = torch.cat([logs.gather(2, groups[..., None])[..., 0], placed], dim=1)
        there = devices.gather(1, groups)
        may = seen.allowed.expand(batch, -1, -1).gather(2, there[..., None])[..., 0]
        placements = np.tile(view.settled, (batch, 1)).astype(np.int32)
        placements[:, seen.places.numpy()] = torch.where(may, there, seen.fastest).numpy()
        return Draw({"groups": groups, "devices": devices, "noise": seeds}, placements, log_probs)

    def _grouping(self, seen: _ViewTensors, noise: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch or 1, ops, groups] logits."""
        kinds = seen.kinds @ self.kinds
        logits: Tensor = self.grouper(torch.cat([kinds, seen.features], dim=1))[None]
        if noise is None:
            return logits
        return logits + noise[0] * logits.square().mean().sqrt()

    def _noise(self, seen: _ViewTensors, seeds: Tensor) -> tuple[Tensor, Tensor] | None:
        """([batch, ops, groups], [batch, groups, devices]) of both networks; None where the
        trials were drawn without."""
        if bool((seeds < 0).all()):
            return None
        ops, devices = seen.allowed.shape
        both = []
        for seed in seeds.tolist():
            generator = torch.Generator().manual_seed(max(seed, 0))
            share = self.noise if seed >= 0 else 0.0
            numbers = torch.randn(self.groups * (ops + devices), generator=generator) * share
            cut = numbers.to(self.kinds.dtype).tensor_split([self.groups * ops])
            both.append(cut)
        first, second = (torch.stack(parts) for parts in zip(*both, strict=True))
        return first.view(-1, ops, self.groups), second.view(-1, self.groups, devices)

    def _embed(self, seen: _ViewTensors, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """(embeddings [batch, groups, size], where each may go [batch, groups, devices]) for
        `grouped` [batch, ops]."""
        batch, ops = grouped.shape
        devices, dtype = seen.allowed.shape[1], seen.features.dtype
        ones = torch.ones(ops, 1, dtype=dtype)
        features = seen.features[:, : -2 * NEIGHBOURS]
        columns = torch.cat([ones, seen.kinds, features, seen.allowed.to(dtype)], dim=1)
        rows = grouped + self.groups * torch.arange(batch)[:, None]
        sums = torch.zeros(batch * self.groups, columns.shape[1], dtype=dtype)
        sums.index_add_(0, rows.flatten(), columns.repeat(batch, 1))
        ends = np.cumsum([1, seen.kinds.shape[1], features.shape[1]]).tolist()
        sums = sums.view(batch, self.groups, -1)
        count, kinds, features, allowed = sums.tensor_split(ends, dim=2)
        parts = [
            self._adjacency(seen, grouped),
            *([count / max(1, ops)] if self.costs else []),
            kinds / (1 + kinds.amax(dim=2, keepdim=True)),
            features / count.clamp(min=1),
        ]
        # A group without ops decides nothing: it has one device.
        first = torch.arange(devices) == 0
        return torch.cat(parts, dim=2), torch.where(count > 0, allowed > 0, first)

    def _adjacency(self, seen: _ViewTensors, grouped: Tensor) -> Tensor:
        """[batch, groups, 2 (groups + devices)] edges to and from groups, and what is settled."""
        batch, devices = len(grouped), seen.allowed.shape[1]
        nodes = self.groups + devices
        fixed = torch.arange(self.groups, nodes).expand(batch, -1)
        sources, destinations = torch.cat([grouped, fixed], dim=1)[:, seen.ends].unbind(dim=1)
        pairs = (nodes * torch.arange(batch)[:, None] + sources) * nodes + destinations
        counts = torch.bincount(pairs.flatten(), minlength=batch * nodes**2)
        matrix = counts.view(batch, nodes, nodes).to(seen.features.dtype)
        both = torch.cat([matrix, matrix.transpose(1, 2)], dim=2)[:, : self.groups]
        return both / (1 + both.amax(dim=2, keepdim=True))

    def _see(self, view: ProblemView) -> _ViewTensors:
        if self._last is None or self._last[0] is not view:
            if view.device_count != self.placer.devices:
                reason = f"made for {self.placer.devices} devices, not {view.device_count}"
                raise PolicyMismatchError(self.name, reason)
            self._last = (view, _see(view, self.buckets, self.kinds.dtype, costs=self.costs))
        return self._last[1]


def _see(
    view: ProblemView, buckets: NDArray[np.int64], dtype: torch.dtype, *, costs: bool
) -> _ViewTensors:
    free = np.flatnonzero(view.free)
    code = np.asarray(view.settled, dtype=np.int64) + len(free)
    code[free] = np.arange(len(free))
    kinds = np.zeros((view.groups, len(buckets)), dtype=np.float32)
    rows = np.repeat(np.arange(view.groups), np.diff(view.kind_offsets))
    known = np.isin(view.kind_buckets, buckets)
    at = np.searchsorted(buckets, view.kind_buckets[known])
    np.add.at(kinds, (rows[known], at), view.kind_shares[known])
    numbers = [view.shapes, view.numbers] if costs else [view.shapes]
    given = np.concatenate(numbers, axis=1)[free]
    spread = given.std(axis=0) if len(free) else 1.0
    given = (given - given.mean(axis=0)) / np.maximum(spread, 1e-3) if len(free) else given
    features = np.concatenate([given, _neighbours(view)[free]], axis=1)
    seconds = np.where(view.allowed, view.seconds, np.inf)[free]
    return _ViewTensors(
        places=torch.from_numpy(free),
        features=torch.from_numpy(features).to(dtype),
        kinds=torch.from_numpy(kinds[free]).to(dtype),
        ends=torch.from_numpy(np.stack([code[view.sources], code[view.destinations]])),
        allowed=torch.from_numpy(view.allowed[free]),
        fastest=torch.from_numpy(seconds.argmin(axis=1)),
    )


def _neighbours(view: ProblemView) -> NDArray[np.float32]:
    """[groups, 2 NEIGHBOURS] the first readers and writers of each group as shares of the order;
    -1: none."""
    found = np.full((view.groups, 2 * NEIGHBOURS), -1, dtype=np.float32)
    ends = (view.sources, view.destinations), (view.destinations, view.sources)
    for way, (own, other) in enumerate(ends):
        order = np.lexsort((other, own))
        own, other = own[order], other[order]
        nth = np.arange(len(own)) - np.searchsorted(own, own)
        kept = nth < NEIGHBOURS
        found[own[kept], way * NEIGHBOURS + nth[kept]] = other[kept] / view.groups
    return found


def gumbel(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Numbers whose addition to log-probabilities makes the largest a draw; without a generator
    zeros."""
    if generator is None:
        return torch.zeros_like(like)
    waits = torch.empty(like.shape).exponential_(generator=generator)
    return -waits.log().to(like.dtype)
