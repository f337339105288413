"""GDP: a graph network and a Transformer place a whole graph at once, whatever graph and machine.

Y. Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, section 3.

    View ──► embed ──► GraphSAGE ──► x0 ──► Transformer-XL, superposed ──► states [groups, hidden]
                                                                            │ mean: chances [modes]
                                                                            ▼
    devices, links ──► attention among devices ──► [devices, hidden] ──► logits
                                                                         [modes, groups, devices]

Differences: devices enter by their own features, not as rows of an output layer, so that one policy
serves any number and any kind of them; a logit looks at a group's state, a device's embedding, and
what is known of the two together (the work there, and where the group lies to the part of the graph
that would be the device's by an equal cut: `features.cuts`). Costs and sizes are features of a
group beside the paper's type, shape and adjacency; so are positions, and two of these are advice:
the devices that list scheduling and human experts would choose. A new policy already prefers
devices that are quick at a group's work, and cuts the graph by position; the paper's begins at
random. By which position is a decision, the first of a trial: a policy that decides for all groups
independently cannot say "either by layers or by time steps", only something between. Such a *mode*
has start logits of its own, and shares all else.
`individual` (ours, for one graph alone) adds logits of each group's own, which learn what the
network's features do not tell apart. How trials are drawn: above `draw_clusters`.

`SETTINGS` differ from the paper's in what is ours: advantages by the batch's own mean and spread,
where its bias is the mean of all trials before, and the best placement so far in every batch
(`losses.with_elite`). Rate, trials, passes and entropy are not in the paper. `gdp-paper` has none
of these additions: `GdpPaper`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from dovetail.errors import PolicyMismatchError
from dovetail.placers.learned.features import (
    ADVICE,
    ADVICE_CUTS,
    ADVICE_NUMBERS,
    CUTS,
    DEVICE_NUMBERS,
    LINK_NUMBERS,
    NUMBERS,
    POSITIONS,
    SHAPES,
)
from dovetail.placers.learned.policy import Draw, Judged, Policy, kind_vectors, tensors_of
from dovetail.placers.learned.records import Int64, LearningSettings, ProblemView

# GraphSAGE with max pooling: what each group knows of its surroundings.
#
# W. L. Hamilton, R. Ying, J. Leskovec, "Inductive Representation Learning on Large Graphs", NIPS
# 2017, https://arxiv.org/abs/1706.02216, section 3.3, as used by Y. Zhou et al., "GDP: Generalized
# Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, section 3.1:
#
#     h_N(v) = max over u in N(v) of sigmoid(W h_u + b)        elementwise
#     h'(v)  = f(concat(h(v), h_N(v)))
#
# Differences: producers and consumers are two neighbourhoods with weights of their own, so that f
# sees concat(h, h_N(producers), h_N(consumers)): one neighbourhood cannot tell what comes before
# from what comes after. No neighbour is left out, where GraphSAGE samples some. f is a dense layer
# and a ReLU, added to h and normalised. Of equal maxima each gets an equal share of the gradient.


class _MaxPool(torch.autograd.Function):
    """[groups, width]: the maximum over each group's neighbours; 0 where it has none.

    torch's own backward of `scatter_reduce` is several times slower on a CPU.
    """

    @staticmethod
    def forward(ctx, x: Tensor, sources: Tensor, owners: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        sent = x.index_select(0, sources)
        pooled = torch.zeros_like(x)
        pooled.scatter_reduce_(0, owners[:, None].expand_as(sent), sent, "amax")
        if x.requires_grad:
            ctx.save_for_backward(sent == pooled.index_select(0, owners), sources, owners)
        return pooled

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        highest, sources, owners = ctx.saved_tensors
        # Like ops are alike before the first layer, so that equal maxima are the rule there.
        ties = torch.zeros_like(gradient).index_add_(0, owners, highest.to(gradient.dtype))
        sent = (gradient / ties.clamp_(min=1)).index_select(0, owners) * highest
        return torch.zeros_like(gradient).index_add_(0, sources, sent), None, None


def max_pool(x: Tensor, sources: Tensor, owners: Tensor) -> Tensor:
    """[groups, width] the elementwise maximum of x >= 0 over `sources` for each of `owners`; 0
    where there is none. O(edges x width)."""
    return _MaxPool.apply(x, sources, owners)  # type: ignore[no-any-return, no-untyped-call]


class SageLayer(nn.Module):
    """h -> h', both [groups, hidden]; `destinations` [edges] read from `sources`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pool = nn.Linear(hidden, 2 * hidden)
        self.mix = nn.Linear(3 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, h: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        out, back = torch.sigmoid(self.pool(h)).chunk(2, dim=1)
        before = max_pool(out, sources, destinations)
        after = max_pool(back, destinations, sources)
        mixed = torch.relu(self.mix(torch.cat([h, before, after], dim=1)))
        return self.norm(h + mixed)  # type: ignore[no-any-return]


class SagePaperLayer(nn.Module):
    """Likewise, of `gdp-paper`: producers and consumers are one neighbourhood."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pool = nn.Linear(hidden, hidden)
        self.mix = nn.Linear(2 * hidden, hidden)

    def forward(self, h: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        read = torch.cat([sources, destinations]), torch.cat([destinations, sources])
        pooled = max_pool(torch.sigmoid(self.pool(h)), *read)
        return torch.relu(self.mix(torch.cat([h, pooled], dim=1)))


# Transformer-XL over groups in graph order: attention to one's own segment and the one before.
#
# Z. Dai et al., "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", ACL
# 2019, https://arxiv.org/abs/1901.02860, section 3.2, as the placer of Y. Zhou et al., "GDP:
# Generalized Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578,
# sections 3.2 and 3.3:
#
#     z(s, l) = [stop_gradient(h(s - 1, l - 1)), h(s, l - 1)]       s: segment, l: layer
#     h(s, l) = layer(queries from h(s, l - 1), keys and values from z(s, l))
#
# No positional embedding: a graph has no positions, and what order says stands in the features. No
# causal mask: all groups of a segment see each other. Superposition: every dense layer of the
# placer sees c(x0) * x instead of x, with x0 the graph embedding and c one more such layer.
#
# The states of layer l - 1 of all segments are known before layer l, so that all segments are
# worked on at once; the result is that of one after the other.
#
# Differences: layers normalise their input, not their output; c is 1 at the start and departs from
# there, so that an untrained placer is one without superposition; where a dense layer's input is
# wider than c(x0), c(x0) is repeated.


EXPANSION = 2
"""Width of the feed-forward part over the hidden width."""


@dataclass(frozen=True, eq=False)
class Segments:
    """How groups are cut: `count` segments of `length`, the last one padded.

    keys   [count, 1, 1, 2 x length] which of (previous, own) are there; None: all, and no previous
    """

    groups: int
    count: int
    length: int
    keys: Tensor | None

    def cut(self, x: Tensor) -> Tensor:
        """[groups, width] -> [count, length, width], zeros behind the last."""
        missing = self.count * self.length - self.groups
        return F.pad(x, (0, 0, 0, missing)).view(self.count, self.length, x.shape[1])

    def join(self, x: Tensor) -> Tensor:
        """[count, length, width] -> [groups, width]."""
        return x.reshape(-1, x.shape[2])[: self.groups]


def segments_of(groups: int, length: int, device: torch.device) -> Segments:
    """Segments of at most `length`; a graph that fits into one has no padding."""
    if groups <= length:
        return Segments(groups, 1, groups, None)
    count = -(-groups // length)
    own = torch.arange(count * length, device=device).view(count, length) < groups
    previous = torch.cat([torch.zeros_like(own[:1]), own[:-1]])
    return Segments(groups, count, length, torch.cat([previous, own], dim=1)[:, None, None, :])


class GdpLayer(nn.Module):
    """h -> h' [count, length, hidden]. `attention=False` leaves the feed-forward part only."""

    def __init__(self, hidden: int, heads: int, *, attention: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.attends = attention
        if attention:
            self.norm = nn.LayerNorm(hidden)
            self.query = nn.Linear(hidden, hidden)
            self.key_value = nn.Linear(hidden, 2 * hidden)
            self.out = nn.Linear(hidden, hidden)
        self.norm_inner = nn.LayerNorm(hidden)
        self.inner = nn.Linear(hidden, EXPANSION * hidden)
        self.outer = nn.Linear(EXPANSION * hidden, hidden)

    def forward(self, h: Tensor, segments: Segments, condition: Tensor | None = None) -> Tensor:
        """`condition` [count, length, hidden]: c(x0); None: no superposition."""
        if self.attends:
            x = _times(self.norm(h), condition)
            keyed = x
            if segments.count > 1:
                cached = x.detach()
                previous = torch.cat([torch.zeros_like(cached[:1]), cached[:-1]])
                keyed = torch.cat([previous, x], dim=1)
            # [count, length, hidden] -> [count, heads, length, hidden / heads]
            query, key, value = (
                y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)
                for y in (self.query(x), *self.key_value(keyed).chunk(2, dim=2))
            )
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=segments.keys)
            seen = seen.transpose(1, 2).reshape(x.shape)
            h = h + self.out(_times(seen, condition))
        inner = torch.relu(self.inner(_times(self.norm_inner(h), condition)))
        return h + self.outer(_times(inner, condition))  # type: ignore[no-any-return]


class GdpTransformerXL(nn.Module):
    """Graph embedding x0 [groups, hidden] -> (states, condition), both [groups, hidden]; condition
    None without superposition."""

    def __init__(
        self,
        hidden: int,
        *,
        layers: int,
        heads: int,
        segment: int,
        attention: bool = True,
        superposition: bool = True,
    ) -> None:
        super().__init__()
        self.segment = segment
        self.layers = nn.ModuleList(
            GdpLayer(hidden, heads, attention=attention) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.conditioning = None
        if superposition:
            self.conditioning = GdpLayer(hidden, heads, attention=attention)
            self.scale = nn.Linear(hidden, hidden)
            nn.init.normal_(self.scale.weight, std=0.1 * hidden**-0.5)
            nn.init.ones_(self.scale.bias)

    def forward(self, x0: Tensor) -> tuple[Tensor, Tensor | None]:
        segments = segments_of(len(x0), self.segment, x0.device)
        h = segments.cut(x0)
        condition = None
        if self.conditioning is not None:
            condition = self.scale(self.conditioning(h, segments))
        for layer in self.layers:
            h = layer(h, segments, condition)
        states = segments.join(self.norm(h))
        return states, None if condition is None else segments.join(condition)


def _times(x: Tensor, condition: Tensor | None) -> Tensor:
    """c(x0) * x, c(x0) repeated to the width of x."""
    if condition is None:
        return x
    repeats = x.shape[-1] // condition.shape[-1]
    return x * (condition if repeats == 1 else condition.repeat(1, 1, repeats))


def states_of(
    x: Tensor, edges: tuple[Tensor, Tensor], layers: nn.ModuleList, placer: GdpTransformerXL
) -> Tensor:
    """[groups, hidden] what GraphSAGE and the placer make of embeddings x [groups, hidden], as the
    last dense layer sees it."""
    for layer in layers:
        x = layer(x, *edges)
    states: Tensor
    states, condition = placer(x)
    return states if condition is None else states * condition


# How a policy that decides every group by itself draws placements that differ in useful ways.
#
# Drawn independently, the groups of a domain never change their device together, and where a
# policy has become certain all trials are alike. So a share of the trials decides for *clusters*:
# neighbours of the same likeliest device are joined, each pair with a chance p that is drawn for
# the trial, and a cluster is one decision, by the mean of its members' logits; R. H. Swendsen and
# J.-S. Wang, "Nonuniversal critical dynamics in Monte Carlo simulations", Physical Review Letters
# 58, 1987, pages 86 to 88, move spins in this way. And every decision is uniform with a small
# chance, such that `floor` of a trial's are:
#
#     pi(d) = (1 - e) softmax(mean logits of the cluster)(d) + e / allowed,   e = floor / decisions
#
# Clusters are drawn before any device is, and recorded with the actions, so that the probability of
# what was decided, given the clusters, is exact.


def draw_clusters(
    view: ProblemView, likeliest: NDArray[np.integer], share: float, seed: int
) -> Int64:
    """[batch, groups] the first group of each group's cluster; a trial without clusters has each
    group at itself. `likeliest` [batch, groups]: devices, of the trial's mode."""
    rng = np.random.default_rng(seed)
    own = np.arange(view.groups)
    batch = len(likeliest)
    labels = np.tile(own, (batch, 1))
    joint = (view.allowed[view.sources] == view.allowed[view.destinations]).all(axis=1)
    joint &= view.free[view.sources] & view.free[view.destinations]
    sources, destinations = view.sources[joint], view.destinations[joint]
    for trial in range(round(batch * share)):
        like = likeliest[trial][sources] == likeliest[trial][destinations]
        a, b = sources[like], destinations[like]
        kept = rng.random(len(a)) < rng.random()
        ends = (a[kept], b[kept])
        joined = coo_array((np.ones(len(ends[0]), np.int8), ends), shape=(view.groups,) * 2)
        _, of_group = connected_components(joined, directed=False)
        _, first = np.unique(of_group, return_index=True)
        labels[trial] = first[of_group]
    return labels


def chances(logits: Tensor, clusters: Tensor, open_: Tensor, floor: float) -> Tensor:
    """[batch, groups, devices] of each cluster's decision, at its first group; elsewhere of no use.

    logits     [batch or 1, groups, devices] of each trial, -inf where a group may not be
    clusters   [batch, groups]
    open_      [batch, groups] True where a decision is made
    """
    batch, groups = clusters.shape
    allowed = torch.isfinite(logits[0])
    finite = logits.masked_fill(~allowed, 0.0)
    flat = (clusters + groups * torch.arange(batch, device=clusters.device)[:, None]).reshape(-1)
    sums = finite.new_zeros(batch * groups, logits.shape[2])
    sums = sums.index_add(0, flat, finite.expand(batch, -1, -1).reshape(batch * groups, -1))
    sizes = torch.bincount(flat, minlength=batch * groups).clamp(min=1)
    means = (sums / sizes[:, None]).view(batch, groups, -1).masked_fill(~allowed, -torch.inf)
    uniform = allowed / allowed.sum(dim=1, keepdim=True)
    e = floor / open_.sum(dim=1).clamp(min=1)
    e = e.clamp(max=0.5)[:, None, None]
    return (1 - e) * torch.softmax(means, dim=2) + e * uniform


def draw_devices(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """[batch, groups] drawn by `probabilities` [batch, groups, devices]: of exponential waiting
    times the shortest is an event's with its share of the rates."""
    waits = torch.empty(probabilities.shape, dtype=probabilities.dtype, device=probabilities.device)
    return (probabilities / waits.exponential_(generator=generator)).argmax(dim=2)


SETTINGS = LearningSettings(
    objective="ppo",
    trials=16,
    rate=1e-3,
    baseline="batch",
    failing=10.0,
    entropy=0.05,
    normalised=True,
    passes=2,
    elite=4.0,
)
FINETUNING = replace(SETTINGS, trials=64, passes=4)
"""Of a policy that was trained before: few updates, from many trials each."""
STARTS: tuple[dict[str, float], ...] = (
    {"module": -1.5, "parameter": -1.5},
    *({position: -3.0} for position in POSITIONS),
)
"""Of each mode: logits, before any training, of a distance of one width from a device's part by a
position."""
MODES = len(STARTS)
ADVISED = [i for i, start in enumerate(STARTS) if start.keys() & set(ADVICE)]
"""Modes that begin as a classical planner would."""
DECIDED = 10.0
"""Factor on the logits of modes: how much faster than the rest they are learned."""
SLOWER = -4.0
"""Likewise of a device that takes ten times as long as the best one."""
SMALL = 0.2
"""Factor on the untrained network's part in the logits."""


class Gdp(Policy):
    """Serves every view.

    hidden         width of everything
    layers         of the placer; `sage_layers` of the graph network
    segment        groups that attend to each other, and to the segment before
    attention, superposition   False: without, for the ablation
    advice         False: without classical planners' choices, for ours
    share, floor   of exploration: trials that decide for clusters, uniform decisions a trial
    individual     (groups, devices) of a table of logits, for views of these sizes; times `gain`:
                   how much faster than the network it learns
    """

    name = "gdp"

    def __init__(
        self,
        *,
        hidden: int = 64,
        sage_layers: int = 2,
        layers: int = 2,
        heads: int = 4,
        segment: int = 128,
        attention: bool = True,
        superposition: bool = True,
        advice: bool = True,
        share: float = 0.5,
        floor: float = 1.0,
        individual: Sequence[int] | None = None,
        gain: float = 50.0,
    ) -> None:
        super().__init__()
        if not (0 <= share <= 1 and floor >= 0 and gain >= 0):
            raise ValueError(f"share {share}, floor {floor} or gain {gain} cannot be")
        self.share, self.floor, self.gain, self.advice = share, floor, gain, advice
        self.config: dict[str, Any] = {
            "hidden": hidden, "sage_layers": sage_layers, "layers": layers, "heads": heads,
            "segment": segment, "attention": attention, "superposition": superposition,
            "advice": advice, "share": share, "floor": floor,
            "individual": None if individual is None else list(individual), "gain": gain,
        }  # fmt: skip
        self.own = None if individual is None else nn.Parameter(torch.zeros(*individual))
        self.kinds = kind_vectors(hidden)
        self.numbers = nn.Linear(NUMBERS + SHAPES, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.sage = nn.ModuleList(SageLayer(hidden) for _ in range(sage_layers))
        self.placer = GdpTransformerXL(
            hidden, layers=layers, heads=heads, segment=segment, attention=attention,
            superposition=superposition,
        )  # fmt: skip
        self.devices = Devices(hidden)
        self.head = Head(hidden)
        self.modes = nn.Linear(hidden, MODES)
        nn.init.zeros_(self.modes.weight)
        nn.init.zeros_(self.modes.bias)

    def alone(self, view: ProblemView) -> "Gdp":
        sizes = (view.groups, view.device_count)
        with torch.random.fork_rng(devices=[]):
            policy = type(self)(**(self.config | {"individual": sizes}))
        tensors = self.state_dict()
        if not self._knows(view):
            tensors["own"] = torch.zeros(sizes)
        policy.load_state_dict(tensors)
        return policy.to(self.norm.weight.device)

    def _knows(self, view: ProblemView) -> bool:
        """Whether it has a table for the view, told by its sizes."""
        return self.own is not None and self.own.shape == view.seconds.shape

    def logits(self, view: ProblemView) -> tuple[Tensor, Tensor]:
        """([modes], [modes, groups, devices]); -inf where a group may not be."""
        seen = tensors_of(view, self.norm.weight.device)
        numbers, pairs = seen.numbers, seen.pairs
        if not self.advice:
            of_pairs = 1 + torch.tensor(ADVICE_CUTS)  # after the pair's work
            numbers = numbers.index_fill(1, torch.tensor(ADVICE_NUMBERS).to(numbers.device), 0.0)
            pairs = pairs.index_fill(2, of_pairs.to(pairs.device), 0.0)
        numbers = self.numbers(torch.cat([numbers, seen.shapes], dim=1))
        x = self.norm(seen.kinds(self.kinds) + numbers)
        states = states_of(x, (seen.sources, seen.destinations), self.sage, self.placer)
        logits = self.head(states, self.devices(seen.devices, seen.links), pairs)
        if self.own is not None and self._knows(view):
            logits = logits + self.gain * self.own
        modes = DECIDED * self.modes(states.mean(dim=0))
        if not self.advice:
            modes = modes.index_fill(0, torch.tensor(ADVISED).to(modes.device), -torch.inf)
        return modes, logits.masked_fill(~seen.allowed, -torch.inf)

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        with torch.no_grad():
            modes, logits = self.logits(view)
            device = logits.device
            seed = int(torch.randint(2**31, (), generator=generator, device=device))
            chosen = torch.multinomial(
                torch.softmax(modes, 0), batch, replacement=True, generator=generator
            )
            likeliest = logits.argmax(dim=2)[chosen].cpu().numpy()
            clusters = draw_clusters(view, likeliest, self.share, seed)
            actions = {"modes": chosen, "clusters": torch.from_numpy(clusters).to(device)}
            made = _open(view, actions["clusters"])
            each = chances(logits[chosen], actions["clusters"], made, self.floor)
            actions["devices"] = draw_devices(each, generator)
            log_probs = _of(modes, each, actions, made)
        drawn = actions["devices"].gather(1, actions["clusters"]).cpu().numpy()
        placements = np.where(view.free, drawn, view.settled).astype(np.int32)
        return Draw(actions, placements, log_probs)

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        modes, logits = self.logits(view)
        made = _open(view, actions["clusters"])
        each = chances(logits[actions["modes"]], actions["clusters"], made, self.floor)
        logs = torch.log_softmax(logits, dim=2)
        entropies = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(dim=2)
        entropies = (entropies * tensors_of(view, logs.device).free)[actions["modes"]]
        of_modes = torch.log_softmax(modes, 0)
        of_modes = -(of_modes.exp() * of_modes.clamp(min=-1e9)).sum().expand(len(entropies), 1)
        return Judged(_of(modes, each, actions, made), torch.cat([of_modes, entropies], dim=1))

    def actions_of(self, view: ProblemView, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        device = self.norm.weight.device
        devices = torch.from_numpy(placement.astype(np.int64)).to(device)
        with torch.no_grad():
            modes, logits = self.logits(view)
            logs = torch.log_softmax(logits, dim=2).clamp(min=-20.0)
            taken = logs.gather(2, devices.expand(len(modes), -1)[:, :, None]).squeeze(2)
            sums = (taken * tensors_of(view, device).free).sum(dim=1)
            mode = (torch.log_softmax(modes, 0) + sums).argmax()
        own = torch.arange(len(devices)).to(devices)
        return {"modes": mode[None], "devices": devices[None], "clusters": own[None]}

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        best: NDArray[np.int32] = self.candidates(view)[0]
        return best

    def candidates(self, view: ProblemView) -> NDArray[np.int32]:
        """[modes, groups] the likeliest placement of each mode, likeliest modes first."""
        with torch.no_grad():
            modes, logits = self.logits(view)
            first = modes.argsort(descending=True, stable=True)[: int(modes.isfinite().sum())]
            best = logits.argmax(dim=2)[first].cpu().numpy()
        return np.where(view.free, best, view.settled).astype(np.int32)


class Devices(nn.Module):
    """(devices [devices, DEVICE_NUMBERS], links [devices, devices, LINK_NUMBERS]) -> [devices,
    hidden]: each device, having looked at all others and the links to and from them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(DEVICE_NUMBERS, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(hidden, 2 * hidden)
        self.link = nn.Linear(2 * LINK_NUMBERS, 1)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, devices: Tensor, links: Tensor) -> Tensor:
        x = self.embed(devices)
        keys, values = self.key_value(x).chunk(2, dim=1)
        both = torch.cat([links, links.transpose(0, 1)], dim=2)
        weights = self.query(x) @ keys.T * x.shape[1] ** -0.5 + self.link(both).squeeze(2)
        return self.norm(x + torch.softmax(weights, dim=1) @ values)  # type: ignore[no-any-return]


class Head(nn.Module):
    """(states [groups, hidden], devices [devices, hidden], pairs [groups, devices, 1 + CUTS]) ->
    logits [modes, groups, devices]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(hidden, hidden)
        self.of_device = nn.Linear(hidden, hidden, bias=False)
        self.of_pair = nn.Linear(1 + CUTS, hidden, bias=False)
        self.out = nn.Linear(hidden, 1, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.start = nn.Linear(1 + CUTS, MODES, bias=False)
        with torch.no_grad():
            self.out.weight.mul_(SMALL)
            self.key.weight.mul_(SMALL)
            self.start.weight.zero_()
            self.start.weight[:, 0] = SLOWER
            for mode, start in enumerate(STARTS):
                for position, logit in start.items():
                    self.start.weight[mode, POSITIONS.index(position) - len(POSITIONS)] = logit

    def forward(self, states: Tensor, devices: Tensor, pairs: Tensor) -> Tensor:
        """One device after the other: [groups, devices, hidden] would not fit per op."""
        of_state, of_device = self.of_state(states), self.of_device(devices)
        columns = [
            self.out(torch.relu(of_state + of_device[d] + self.of_pair(pairs[:, d])))
            for d in range(len(devices))
        ]
        matched = states @ self.key(devices).T * states.shape[1] ** -0.5
        starts = self.start(pairs).permute(2, 0, 1)
        return starts + torch.cat(columns, dim=1) + matched  # type: ignore[no-any-return]


def _open(view: ProblemView, clusters: Tensor) -> Tensor:
    """[batch, groups] True at the first group of each cluster that has a choice."""
    own = torch.arange(view.groups, device=clusters.device)
    return (clusters == own) & tensors_of(view, clusters.device).free


def _of(modes: Tensor, each: Tensor, actions: dict[str, Tensor], made: Tensor) -> Tensor:
    """[batch, 1 + groups] the log-probabilities of the mode and of what was drawn; 0 where nothing
    was decided."""
    chosen = each.gather(2, actions["devices"][:, :, None]).squeeze(2)
    mode = torch.log_softmax(modes, 0)[actions["modes"]]
    return torch.cat([mode[:, None], chosen.masked_fill(~made, 1.0).log()], dim=1)


PAPER_SETTINGS = LearningSettings(
    "ppo", trials=16, rate=3e-4, baseline="mean", failing=10.0, passes=2, ratio="placement"
)


class GdpPaper(Policy):
    """gdp-paper: GDP's policy and training as its paper has them, without our additions. It serves
    every view of so many devices.

        ops ──► [type | output shapes] ──► GraphSAGE ──► x0 ──► Transformer-XL, superposed
                                                                          │ linear, softmax
                                                                          ▼
                                                             a device for each op, at once

        h_N(v) = max over neighbours u of sigmoid(W h(u) + b)        h'(v) = relu(V [h(v), h_N(v)])

    Every op is placed by itself: groups are only what must stay together (`graph.colocate`).
    Devices are the rows of the last layer, so that a policy serves graphs on as many devices. It is
    trained by PPO on -sqrt(seconds), -10 for what does not fit, against the mean of all earlier
    trials, with one ratio for a placement (`PAPER_SETTINGS`). Against `gdp` there are no costs,
    positions, advice, cuts, modes, clusters, table of one graph's own, chance of a uniform draw,
    normalised advantages, and imitation of the best placement.

    What the paper leaves open, and what stands here instead:

    * Widths, layers, heads and the length of a segment: those of `gdp`.
    * Whether neighbours are those that an op reads, those that read it, or both. Here: both, as one
      set.
    * Whether one graph alone needs the superposition, which section 3.3 introduces for batches. It
      is there; `superposition=False` leaves it out, and `attention=False` the attention.
    * Trials a batch, passes, the clipping range, the entropy's weight and the rate. Rates from
      .0001 to .003 and weights of the entropy from 0 to .03 were tried on one row, Inception on 2
      GPUs, by one seed and 4,000 placements (benchmarks/learned/README.md), and make less than 2 %
      of difference. Weights of .1 and 1 are worse in 1,600 placements. So there is no entropy, of
      which the paper says nothing. The clipping range is that of PPO's own paper.

    Differences: kinds are hashed into `BUCKETS`; shapes are logarithms; the ids of adjacent ops,
    which say nothing of another graph, enter as edges alone; layers of the Transformer normalise
    their input (`GdpTransformerXL`); all neighbours count, where GraphSAGE samples some.

    devices        rows of the last layer
    the rest       as of `Gdp`

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
        self.kinds = kind_vectors(hidden)
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
        return super().for_view(view, seed=seed, devices=view.device_count, **options)

    def logs(self, view: ProblemView) -> Tensor:
        """[groups, devices] log-probabilities; -inf where a group may not be."""
        if view.device_count != self.out.out_features:
            reason = f"made for {self.out.out_features} devices, not {view.device_count}"
            raise PolicyMismatchError(self.name, reason)
        seen = tensors_of(view, self.out.weight.device)
        x = torch.relu(seen.kinds(self.kinds) + self.shapes(seen.shapes))
        states = states_of(x, (seen.sources, seen.destinations), self.sage, self.placer)
        logits: Tensor = self.out(states)
        return logits.masked_fill(~seen.allowed, -torch.inf).log_softmax(dim=1)

    def draw(self, view: ProblemView, batch: int, generator: torch.Generator) -> Draw:
        with torch.no_grad():
            logs = self.logs(view)
            devices = draw_devices(logs.exp().expand(batch, -1, -1), generator)
            log_probs = self._taken(view, logs, devices)
        placements = np.where(view.free, devices.cpu().numpy(), view.settled).astype(np.int32)
        return Draw({"devices": devices}, placements, log_probs)

    def judge(self, view: ProblemView, actions: dict[str, Tensor]) -> Judged:
        logs = self.logs(view)
        free = tensors_of(view, logs.device).free
        entropies = -(logs.exp() * logs.clamp(min=-1e9)).sum(dim=1) * free
        return Judged(self._taken(view, logs, actions["devices"]), entropies[None])

    def actions_of(self, view: ProblemView, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        devices = torch.from_numpy(placement.astype(np.int64)).to(self.out.weight.device)
        return {"devices": devices[None]}

    def likeliest(self, view: ProblemView) -> NDArray[np.int32]:
        with torch.no_grad():
            best = self.logs(view).argmax(dim=1).cpu().numpy()
        return np.where(view.free, best, view.settled).astype(np.int32)

    def _taken(self, view: ProblemView, logs: Tensor, devices: Tensor) -> Tensor:
        """[batch, groups] log-probabilities of `devices`; 0 where there was no choice."""
        taken = logs.expand(len(devices), -1, -1).gather(2, devices[:, :, None])[:, :, 0]
        return taken.masked_fill(~tensors_of(view, logs.device).free, 0.0)
