"""What learned placers hand to each other.

    Task ──► Problem ──► View ──► Policy.draw ──► Draw ──► judge ──► Trials ──► loss
    (plain data,         (numbers   (samples)              (simulated, or
     can be sent)         only)                             measured)

A policy decides per group of the problem, like every placer; per-op placement is a problem whose
groups are single ops. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.graph import Graph, Groups
from dovetail.machine import Machine
from dovetail.placers.problem import PlacementProblem, make_problem
from dovetail.plans import capacities_of
from dovetail.simulator import Simulator

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlacementTask:
    """One graph on one machine, to learn to place. Plain data: it can be sent to a controller.

    pins, caps   as in `make_problem`
    ranked       `Simulator(ranked=True)`
    """

    name: str
    graph: Graph
    machine: Machine
    costs: Costs
    groups: Groups
    objective: str = "step"
    pins: tuple[tuple[str, str], ...] = ()
    caps: tuple[tuple[str, int], ...] = ()
    ranked: bool = False

    def problem(self, *, seed: int = 0, threads: int | None = None) -> PlacementProblem:
        """The problem with a simulator of its own, which uses so many threads."""
        capacities = capacities_of(self.machine, dict(self.caps))
        simulator = Simulator(
            self.graph, self.machine, self.costs, capacities=capacities, ranked=self.ranked
        )
        return make_problem(
            self.graph,
            self.machine,
            self.costs,
            lambda placements: simulator.evaluate(placements, self.objective, threads=threads),
            groups=self.groups,
            objective=self.objective,
            pins=self.pins,
            caps=self.caps,
            seed=seed,
            trace=simulator.timeline,
            ranked=self.ranked,
        )


@dataclass(frozen=True, eq=False)
class ProblemView:
    """A problem as policies see it. Groups stand in their own order, which follows the graph's.

    kind_offsets   [groups + 1] CSR into the next two: the kinds of op in each group
    kind_buckets   [entries] 0 <= bucket < `features.BUCKETS`: a stable hash, so that a kind never
                   seen has one too
    kind_shares    [entries] of the group's ops; they sum to 1 in each group
    shapes         [groups, features.SHAPES] padded output shapes, in logarithms
    numbers        [groups, features.NUMBERS] costs, sizes, phase, depth: see `features`
    sources, destinations   [edges] what goes between groups: by destination, then source; each
                   pair once
    seconds        [groups, devices] work, in logarithms relative to the graph's; where a group may
                   not be, that of its slowest device
    allowed        [groups, devices] where a group may be
    free           [groups] True where that is more than one device and there is something to run
    settled        [groups] int32 the device of what is not free
    devices        [devices, features.DEVICE_NUMBERS]
    links          [devices, devices, features.LINK_NUMBERS] from, to
    """

    kind_offsets: Int64
    kind_buckets: Int64
    kind_shares: Float32
    shapes: Float32
    numbers: Float32
    sources: Int64
    destinations: Int64
    seconds: Float32
    allowed: Bool
    free: Bool
    settled: NDArray[np.int32]
    devices: Float32
    links: Float32

    @property
    def groups(self) -> int:
        return len(self.free)

    @property
    def device_count(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, eq=False)
class Trials:
    """What became of a batch of placements.

    seconds   [batch] of the objective; inf where it could not run
    valid     [batch] it ran, and fits
    judged    [batch] False: nobody could pay for it, so it counts for nothing
    """

    seconds: NDArray[np.float64]
    valid: Bool
    judged: Bool


OBJECTIVES = ("reinforce", "ppo")
BASELINES = ("moving", "mean", "batch")
RATIOS = ("decision", "placement")

Judge = Callable[[NDArray[np.int32]], Trials]
"""[batch, groups] -> Trials."""


@dataclass(frozen=True)
class LearningSettings:
    """How a policy is trained.

    objective       "reinforce" (RL17, HDP) or "ppo" (GDP)
    trials          K: placements an update
    rate            Adam's learning rate; after `decay_from` updates multiplied by `decay` every
                    `decay_every`
    baseline        "moving": average of decay `baseline_decay` that starts at the failing signal;
                    "mean": of all earlier trials; "batch": of the batch's own (ours)
    failing         cost (the negated reward) of a placement that fails, in sqrt(seconds)
    valid_only_from updates from which on only placements that ran teach; None: never
    entropy         weight of the entropy in the loss, as a mean over decisions
    entropy_each    of REINFORCE: weight of each decision's, summed as log-probabilities are (ours)
    normalised      advantages are divided by their spread (ours)
    gradient_norm   the gradient's L2 norm is cut to it
    passes, clip    of PPO: gradient steps a batch of trials, and the ratio's limit
    ratio           of PPO: "placement", one for all decisions of a trial; "decision", one each
                    (ours)
    elite           the best placement so far is one more trial of every batch, with so many times
                    the batch's highest advantage; 0: it is not (ours)
    """

    objective: str
    trials: int
    rate: float
    decay: float = 1.0
    decay_from: int = 0
    decay_every: int = 1
    baseline: str = "moving"
    baseline_decay: float = 0.9
    failing: float = 100.0
    valid_only_from: int | None = None
    entropy: float = 0.0
    entropy_each: float = 0.0
    normalised: bool = False
    gradient_norm: float = 1.0
    passes: int = 1
    clip: float = 0.2
    ratio: str = "decision"
    elite: float = 0.0


@dataclass(frozen=True)
class Point:
    """One update of a controller, as live curves show it.

    best, mean     seconds: the best valid placement so far of this task, and the mean of the
                   update's valid ones (nan: none)
    invalid        share of the update's placements that failed
    entropy        mean over decisions, in nats
    """

    controller: int
    update: int
    task: str
    trials: int
    seconds: float
    best: float
    mean: float
    invalid: float
    entropy: float
    loss: float


@dataclass(frozen=True, eq=False)
class Learned:
    """What a run of training leaves.

    theta        [size] the policy's parameters, flat
    placements   task -> the best valid placement [groups] that was tried; absent: none fitted
    values       task -> its seconds
    found        task -> trials of that task up to its best, over all controllers
    trials       placements that were judged
    """

    theta: NDArray[np.float32]
    placements: dict[str, NDArray[np.int32]]
    values: dict[str, float]
    found: dict[str, int]
    trials: int
    updates: int
    seconds: float
    points: tuple[Point, ...] = ()
    interrupted: bool = False
    meta: dict[str, object] = field(default_factory=dict)
