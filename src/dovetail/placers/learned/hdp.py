"""hdp: a network sorts the ops into groups, a second one gives each group a device.

A. Mirhoseini, A. Goldie, H. Pham, B. Steiner, Q. V. Le and J. Dean, "A Hierarchical Model for
Device Placement", ICLR 2018, https://openreview.net/forum?id=Hkc-TeZ0W, sections 3 and 4; settings
of its authors' open version, TensorFlow's python/grappler/hierarchical_controller.py.

    ops ──► grouper ──► a group each ──► embeddings of the groups ──► placer ──► a device each
            softmax(W2 relu(W1 x))       kinds, sizes, adjacency      `AttentionalLstm`

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
from dovetail.placers.learned.policy import Draw, Judged, Policy, chosen
from dovetail.placers.learned.records import LearningSettings, ProblemView
from dovetail.placers.learned.seq2seq import AttentionalLstm, gumbel

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
class _Ops:
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
    bound, temperature   of the placer's logits: `AttentionalLstm`
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
            self.placer = AttentionalLstm(
                size, devices, hidden=hidden, bound=bound, temperature=temperature
            )
        self._last: tuple[ProblemView, _Ops] | None = None

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
        grouped = chosen(self._grouping(seen, noise), groups)
        embeddings, allowed = self._embed(seen, groups)
        placed = self.placer.judge(
            embeddings, allowed, actions["devices"], None if noise is None else noise[1]
        )
        return Judged(*(torch.cat(both, dim=1) for both in zip(grouped, placed, strict=True)))

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

    def _grouping(self, seen: _Ops, noise: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch or 1, ops, groups] logits."""
        kinds = seen.kinds @ self.kinds
        logits: Tensor = self.grouper(torch.cat([kinds, seen.features], dim=1))[None]
        if noise is None:
            return logits
        return logits + noise[0] * logits.square().mean().sqrt()

    def _noise(self, seen: _Ops, seeds: Tensor) -> tuple[Tensor, Tensor] | None:
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

    def _embed(self, seen: _Ops, grouped: Tensor) -> tuple[Tensor, Tensor]:
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
        # Edges to and from groups, and what is settled: [batch, groups, 2 (groups + devices)].
        nodes = self.groups + devices
        fixed = torch.arange(self.groups, nodes).expand(batch, -1)
        sources, destinations = torch.cat([grouped, fixed], dim=1)[:, seen.ends].unbind(dim=1)
        pairs = (nodes * torch.arange(batch)[:, None] + sources) * nodes + destinations
        edges = torch.bincount(pairs.flatten(), minlength=batch * nodes**2)
        matrix = edges.view(batch, nodes, nodes).to(dtype)
        both = torch.cat([matrix, matrix.transpose(1, 2)], dim=2)[:, : self.groups]
        parts = [
            both / (1 + both.amax(dim=2, keepdim=True)),
            *([count / max(1, ops)] if self.costs else []),
            kinds / (1 + kinds.amax(dim=2, keepdim=True)),
            features / count.clamp(min=1),
        ]
        # A group without ops decides nothing: it has one device.
        first = torch.arange(devices) == 0
        return torch.cat(parts, dim=2), torch.where(count > 0, allowed > 0, first)

    def _see(self, view: ProblemView) -> _Ops:
        """What the networks see of a view; made once for the last one."""
        if self._last is not None and self._last[0] is view:
            return self._last[1]
        if view.device_count != self.placer.devices:
            reason = f"made for {self.placer.devices} devices, not {view.device_count}"
            raise PolicyMismatchError(self.name, reason)
        free = np.flatnonzero(view.free)
        code = np.asarray(view.settled, dtype=np.int64) + len(free)
        code[free] = np.arange(len(free))
        kinds = np.zeros((view.groups, len(self.buckets)), dtype=np.float32)
        rows = np.repeat(np.arange(view.groups), np.diff(view.kind_offsets))
        known = np.isin(view.kind_buckets, self.buckets)
        at = np.searchsorted(self.buckets, view.kind_buckets[known])
        np.add.at(kinds, (rows[known], at), view.kind_shares[known])
        numbers = [view.shapes, view.numbers] if self.costs else [view.shapes]
        given = np.concatenate(numbers, axis=1)[free]
        if len(free):
            given = (given - given.mean(axis=0)) / np.maximum(given.std(axis=0), 1e-3)
        # The first readers and writers of each group as shares of the order; -1: none.
        neighbours = np.full((view.groups, 2 * NEIGHBOURS), -1, dtype=np.float32)
        ends = (view.sources, view.destinations), (view.destinations, view.sources)
        for way, (own, other) in enumerate(ends):
            order = np.lexsort((other, own))
            own, other = own[order], other[order]
            nth = np.arange(len(own)) - np.searchsorted(own, own)
            kept = nth < NEIGHBOURS
            neighbours[own[kept], way * NEIGHBOURS + nth[kept]] = other[kept] / view.groups
        seconds = np.where(view.allowed, view.seconds, np.inf)[free]
        dtype = self.kinds.dtype
        seen = _Ops(
            places=torch.from_numpy(free),
            features=torch.from_numpy(np.concatenate([given, neighbours[free]], axis=1)).to(dtype),
            kinds=torch.from_numpy(kinds[free]).to(dtype),
            ends=torch.from_numpy(np.stack([code[view.sources], code[view.destinations]])),
            allowed=torch.from_numpy(view.allowed[free]),
            fastest=torch.from_numpy(seconds.argmin(axis=1)),
        )
        self._last = (view, seen)
        return seen
