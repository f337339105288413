"""GDP: a graph network and a Transformer place a whole graph at once, whatever graph and machine.

Y. Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, section 3.

    View ──► embed ──► GraphSAGE ──► x0 ──► Transformer-XL, superposed ──► states [groups, hidden]
                                                                               │
    devices, links ──► attention among devices ──► [devices, hidden] ──────► logits [groups, devices]

Differences: devices enter by their own features, not as rows of an output layer, so that one policy
serves any number and any kind of them; a logit looks at a group's state, a device's embedding, and
the group's work on that device. Costs and sizes are features of a group beside the paper's type,
shape and adjacency.
"""

from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.placers.learned.exploring import chances, draw_clusters
from dovetail.placers.learned.features import (
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

SLOWER, FAR, SMALL = 4.0, 1.5, 0.2
START = ("module", "parameter")
SETTINGS = Settings(
    objective="ppo",
    trials=16,
    rate=1e-3,
    baseline="mean",
    failing=10.0,
    entropy=0.01,
    normalised=True,
    passes=4,
    clip=0.2,
)


class Gdp(Policy):
    """Serves every view.

    hidden         width of everything
    layers         of the placer; `sage_layers` of the graph network
    segment        groups that attend to each other, and to the segment before
    attention, superposition   False: without, for the ablation
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
        share: float = 0.5,
        floor: float = 1.0,
        individual: tuple[int, int] | None = None,
        gain: float = 30.0,
    ) -> None:
        super().__init__()
        self.share, self.floor = share, floor
        self.config: dict[str, Any] = {
            "hidden": hidden,
            "sage_layers": sage_layers,
            "layers": layers,
            "heads": heads,
            "segment": segment,
            "attention": attention,
            "superposition": superposition,
            "share": share,
            "floor": floor,
            "individual": individual,
            "gain": gain,
        }
        self.gain = gain
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

    @classmethod
    def for_view(cls, view: View, *, seed: int = 0, **options: Any) -> Self:
        """A fresh policy. Nothing in it is of the view's sizes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(**options)

    def logits(self, view: View) -> Tensor:
        """[groups, devices]; -inf where a group may not be."""
        device = self.norm.weight.device
        edges = Edges(_put(view.sources, device), _put(view.destinations, device))
        x = self.embed(view, device)
        for layer in self.sage:
            x = layer(x, edges)
        states, condition = self.placer(x)
        devices = self.devices(_put(view.devices, device), _put(view.links, device))
        if condition is not None:
            states = states * condition
        slower = view.seconds - view.seconds.min(axis=1, keepdims=True)
        pairs = np.concatenate([slower[:, :, None], cuts(view)], axis=2)
        logits = self.head(states, devices, _put(pairs, device))
        if self.own is not None:
            logits = logits + self.gain * self.own
        return logits.masked_fill(~_put(view.allowed, device), -torch.inf)  # type: ignore[no-any-return]

    def embed(self, view: View, device: torch.device) -> Tensor:
        """[groups, hidden] of each group by itself."""
        kinds = self.kinds(
            _put(view.kind_buckets, device),
            _put(view.kind_offsets[:-1], device),
            per_sample_weights=_put(view.kind_shares, device),
        )
        numbers = np.concatenate([view.numbers, view.shapes], axis=1)
        return self.norm(kinds + self.numbers(_put(numbers, device)))  # type: ignore[no-any-return]

    def draw(self, view: View, batch: int, generator: torch.Generator) -> Draw:
        with torch.no_grad():
            logits = self.logits(view)
            seed = int(torch.randint(2**31, (), generator=generator))
            mode = logits.argmax(dim=1).numpy()
            clusters = torch.from_numpy(draw_clusters(view, mode, batch, self.share, seed))
            made = _open(view, clusters)
            each = chances(logits, clusters, made, self.floor)
            thrown = torch.rand(clusters.shape, generator=generator)[:, :, None]
            devices = (each.cumsum(dim=2) <= thrown).sum(dim=2).clamp(max=view.device_count - 1)
            actions = {"devices": devices, "clusters": clusters}
            log_probs = _of(each, devices, made)
        drawn = devices.gather(1, clusters)
        placements = np.where(view.free, drawn.numpy(), view.settled).astype(np.int32)
        return Draw(actions, placements, log_probs)

    def judge(self, view: View, actions: dict[str, Tensor]) -> Judged:
        logits = self.logits(view)
        made = _open(view, actions["clusters"])
        each = chances(logits, actions["clusters"], made, self.floor)
        logs = torch.log_softmax(logits, dim=1)
        entropies = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(dim=1)
        free = _put(view.free, logs.device)
        return Judged(_of(each, actions["devices"], made), (entropies * free)[None])

    def actions_of(self, view: View, placement: NDArray[np.int32]) -> dict[str, Tensor]:
        devices = torch.from_numpy(placement.astype(np.int64))[None]
        return {"devices": devices, "clusters": torch.arange(view.groups)[None]}

    def likeliest(self, view: View) -> NDArray[np.int32]:
        with torch.no_grad():
            best = self.logits(view).argmax(dim=1).cpu().numpy()
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
    logits [groups, devices]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(hidden, hidden)
        self.of_device = nn.Linear(hidden, hidden, bias=False)
        self.of_pair = nn.Linear(1 + CUTS, hidden, bias=False)
        self.out = nn.Linear(hidden, 1, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.start = nn.Linear(1 + CUTS, 1, bias=False)
        with torch.no_grad():
            self.out.weight.mul_(SMALL)
            self.key.weight.mul_(SMALL)
            self.start.weight.zero_()
            self.start.weight[0, 0] = -SLOWER
            for position in START:
                self.start.weight[0, CUTS - len(POSITIONS) + POSITIONS.index(position) + 1] = -FAR

    def forward(self, states: Tensor, devices: Tensor, pairs: Tensor) -> Tensor:
        """One device after the other: [groups, devices, hidden] would not fit per op."""
        of_state, of_device = self.of_state(states), self.of_device(devices)
        columns = [
            self.out(torch.relu(of_state + of_device[d] + self.of_pair(pairs[:, d])))
            + self.start(pairs[:, d])
            for d in range(len(devices))
        ]
        matched = states @ self.key(devices).T * states.shape[1] ** -0.5
        return torch.cat(columns, dim=1) + matched


def _open(view: View, clusters: Tensor) -> Tensor:
    """[batch, groups] True at the first group of each cluster that has a choice."""
    own = torch.arange(view.groups, device=clusters.device)
    return (clusters == own) & _put(view.free, clusters.device)


def _of(each: Tensor, devices: Tensor, made: Tensor) -> Tensor:
    """[batch, groups] the log-probabilities of what was drawn; 0 where nothing was decided."""
    chosen = each.gather(2, devices[:, :, None]).squeeze(2)
    return chosen.masked_fill(~made, 1.0).log()


def _put(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
