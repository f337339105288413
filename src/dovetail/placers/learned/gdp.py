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
network's features do not tell apart. How trials are drawn: `exploring`.

`SETTINGS` differ from the paper's in what is ours: advantages by the batch's own mean and spread,
where its bias is the mean of all trials before, and the best placement so far in every batch
(`ppo.with_elite`). Rate, trials, passes and entropy are not in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.placers.learned.exploring import chances, draw_clusters
from dovetail.placers.learned.features import (
    ADVICE,
    ADVICE_CUTS,
    ADVICE_NUMBERS,
    BUCKETS,
    CUTS,
    DEVICE_NUMBERS,
    LINK_NUMBERS,
    NUMBERS,
    POSITIONS,
    SHAPES,
    cuts,
)
from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import Settings, View
from dovetail.placers.learned.sage import Edges, SageLayer
from dovetail.placers.learned.transformer_xl import TransformerXL

SETTINGS = Settings(
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

    name: ClassVar[str] = "gdp"

    def __init__(  # noqa: PLR0913  (keyword-only options)
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
            "hidden": hidden,
            "sage_layers": sage_layers,
            "layers": layers,
            "heads": heads,
            "segment": segment,
            "attention": attention,
            "superposition": superposition,
            "advice": advice,
            "share": share,
            "floor": floor,
            "individual": None if individual is None else list(individual),
            "gain": gain,
        }
        self.own = None if individual is None else nn.Parameter(torch.zeros(*individual))
        self.kinds = nn.EmbeddingBag(BUCKETS, hidden, mode="sum")
        self.numbers = nn.Linear(NUMBERS + SHAPES, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.sage = nn.ModuleList(SageLayer(hidden) for _ in range(sage_layers))
        self.placer = TransformerXL(
            hidden,
            layers=layers,
            heads=heads,
            segment=segment,
            attention=attention,
            superposition=superposition,
        )
        self.devices = Devices(hidden)
        self.head = Head(hidden)
        self.modes = nn.Linear(hidden, MODES)
        nn.init.zeros_(self.modes.weight)
        nn.init.zeros_(self.modes.bias)

    @classmethod
    def for_view(cls, view: View, *, seed: int = 0, **options: Any) -> Self:
        """A fresh policy. Nothing in it is of the view's sizes."""
        del view
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(**options)

    def alone(self, view: View) -> "Gdp":
        sizes = (view.groups, view.device_count)
        with torch.random.fork_rng(devices=[]):
            policy = type(self)(**(self.config | {"individual": sizes}))
        tensors = self.state_dict()
        if not self._knows(view):
            tensors["own"] = torch.zeros(sizes)
        policy.load_state_dict(tensors)
        return policy.to(self.norm.weight.device)

    def _knows(self, view: View) -> bool:
        """Whether it has a table for the view, told by its sizes."""
        return self.own is not None and self.own.shape == view.seconds.shape

    def logits(self, view: View) -> tuple[Tensor, Tensor]:
        """([modes], [modes, groups, devices]); -inf where a group may not be."""
        seen = inputs_of(view, self.norm.weight.device)
        if not self.advice:
            seen = seen.without_advice()
        x = self.embed(seen)
        for layer in self.sage:
            x = layer(x, seen.edges)
        states, condition = self.placer(x)
        if condition is not None:
            states = states * condition
        logits = self.head(states, self.devices(seen.devices, seen.links), seen.pairs)
        if self.own is not None and self._knows(view):
            logits = logits + self.gain * self.own
        modes = DECIDED * self.modes(states.mean(dim=0))
        if not self.advice:
            modes = modes.index_fill(0, torch.tensor(ADVISED).to(modes.device), -torch.inf)
        return modes, logits.masked_fill(~seen.allowed, -torch.inf)

    def embed(self, seen: "Inputs") -> Tensor:
        """[groups, hidden] of each group by itself."""
        kinds = self.kinds(seen.buckets, seen.offsets, per_sample_weights=seen.shares)
        return self.norm(kinds + self.numbers(seen.numbers))  # type: ignore[no-any-return]

    def draw(self, view: View, batch: int, generator: torch.Generator) -> Draw:
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
            # Of exponential waiting times the shortest is an event's with its share of the rates.
            waits = torch.empty_like(each).exponential_(generator=generator)
            actions["devices"] = (each / waits).argmax(dim=2)
            log_probs = _of(modes, each, actions, made)
        drawn = actions["devices"].gather(1, actions["clusters"]).cpu().numpy()
        placements = np.where(view.free, drawn, view.settled).astype(np.int32)
        return Draw(actions, placements, log_probs)

    def judge(self, view: View, actions: dict[str, Tensor]) -> Judged:
        modes, logits = self.logits(view)
        made = _open(view, actions["clusters"])
        each = chances(logits[actions["modes"]], actions["clusters"], made, self.floor)
        logs = torch.log_softmax(logits, dim=2)
        entropies = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(dim=2)
        entropies = (entropies * inputs_of(view, logs.device).free)[actions["modes"]]
        of_modes = torch.log_softmax(modes, 0)
        of_modes = -(of_modes.exp() * of_modes.clamp(min=-1e9)).sum().expand(len(entropies), 1)
        return Judged(_of(modes, each, actions, made), torch.cat([of_modes, entropies], dim=1))

    def actions_of(self, view: View, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        device = self.norm.weight.device
        devices = torch.from_numpy(placement.astype(np.int64)).to(device)
        with torch.no_grad():
            modes, logits = self.logits(view)
            logs = torch.log_softmax(logits, dim=2).clamp(min=-20.0)
            taken = logs.gather(2, devices.expand(len(modes), -1)[:, :, None]).squeeze(2)
            sums = (taken * inputs_of(view, device).free).sum(dim=1)
            mode = (torch.log_softmax(modes, 0) + sums).argmax()
        own = torch.arange(len(devices)).to(devices)
        return {"modes": mode[None], "devices": devices[None], "clusters": own[None]}

    def likeliest(self, view: View) -> NDArray[np.int32]:
        best: NDArray[np.int32] = self.candidates(view)[0]
        return best

    def candidates(self, view: View) -> NDArray[np.int32]:
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


def _open(view: View, clusters: Tensor) -> Tensor:
    """[batch, groups] True at the first group of each cluster that has a choice."""
    own = torch.arange(view.groups, device=clusters.device)
    return (clusters == own) & inputs_of(view, clusters.device).free


def _of(modes: Tensor, each: Tensor, actions: dict[str, Tensor], made: Tensor) -> Tensor:
    """[batch, 1 + groups] the log-probabilities of the mode and of what was drawn; 0 where nothing
    was decided."""
    chosen = each.gather(2, actions["devices"][:, :, None]).squeeze(2)
    mode = torch.log_softmax(modes, 0)[actions["modes"]]
    return torch.cat([mode[:, None], chosen.masked_fill(~made, 1.0).log()], dim=1)


@dataclass(frozen=True, eq=False)
class Inputs:
    """A view as tensors on one device; `pairs` [groups, devices, 1 + CUTS]: how much slower than
    its best device, and `cuts`."""

    buckets: Tensor
    offsets: Tensor
    shares: Tensor
    numbers: Tensor
    edges: Edges
    pairs: Tensor
    allowed: Tensor
    free: Tensor
    devices: Tensor
    links: Tensor

    def without_advice(self) -> "Inputs":
        """The same, zeros for what classical planners would choose."""
        device = self.numbers.device
        numbers = self.numbers.index_fill(1, torch.tensor(ADVICE_NUMBERS).to(device), 0.0)
        columns = 1 + torch.tensor(ADVICE_CUTS).to(device)  # after the pair's work
        return replace(self, numbers=numbers, pairs=self.pairs.index_fill(2, columns, 0.0))


_INPUTS: WeakKeyDictionary[View, dict[torch.device, Inputs]] = WeakKeyDictionary()


def inputs_of(view: View, device: torch.device) -> Inputs:
    """The view on that device; made once while the view lives."""
    made = _INPUTS.setdefault(view, {})
    if device not in made:

        def put(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        slower = view.seconds - view.seconds.min(axis=1, keepdims=True)
        made[device] = Inputs(
            put(view.kind_buckets),
            put(view.kind_offsets[:-1]),
            put(view.kind_shares),
            put(np.concatenate([view.numbers, view.shapes], axis=1)),
            Edges(put(view.sources), put(view.destinations)),
            put(np.concatenate([slower[:, :, None], cuts(view)], axis=2)),
            put(view.allowed),
            put(view.free),
            put(view.devices),
            put(view.links),
        )
    return made[device]
