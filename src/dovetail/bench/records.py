"""What the papers print of a row, and what we find for it.

    Case ──► run ──► Row ──► index.html, rows.csv
      │               └── Found per method, Work per shown plan
      └── Published: the paper's own figures

All of them are plain values, so that a row is kept as JSON and a killed run goes on where it was.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Published:
    """The paper's figures of one row.

    seconds   column -> seconds of one step; None: printed as out of memory. A column that the
              paper does not have is absent
    ops, groups   as its tables give them; None: not given
    hours     column -> what the search took, as text, where the paper says
    """

    seconds: dict[str, float | None]
    ops: int | None = None
    groups: int | None = None
    hours: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of a paper's table.

    key       "rnnlm-2gpu"; names files and fragments
    title     "RNNLM, 2 GPUs"
    model     MODEL text
    train     optimizer text
    machine   MACHINE text
    gpus      how many GPUs the paper's row has
    ours      sizes that the paper does not give, and where we took them from; "" for none
    """

    key: str
    title: str
    model: str
    train: str
    machine: str
    gpus: int
    published: Published | None
    ours: str = ""


@dataclass(frozen=True)
class MethodResult:
    """The result of one method.

    seconds   of one step; None: nothing that fits, or the method cannot do this graph
    reason    why there are no seconds: "OOM: k80:0 needs 13.1 GB of 12.0 GB", or the refusal
    peak_memory_bytes   device -> bytes
    search_seconds      what the method took
    """

    seconds: float | None
    reason: str = ""
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    search_seconds: float = 0.0


@dataclass(frozen=True)
class PlanWork:
    """One plan's load, as RL17's figures 8 and 9 show it, and its graph coloured by device.

    forward_seconds, backward_seconds, update_seconds   device -> seconds it computes
    transfer_seconds   channel -> seconds it carries
    picture            SVG of the graph, nodes coloured by device (figures 4 and 5)
    """

    forward_seconds: dict[str, float]
    backward_seconds: dict[str, float]
    update_seconds: dict[str, float]
    transfer_seconds: dict[str, float]
    picture: str


@dataclass(frozen=True)
class BestSoFar:
    """A placement better than all before it in its run.

    trial      how many placements had been evaluated by then, this one included
    distinct   how many different ones
    seconds    of one step
    """

    trial: int
    distinct: int
    seconds: float


@dataclass(frozen=True)
class LearnedRun:
    """One training of a learned method on one row, from one seed.

    found           its best placement, and what the whole run took
    groups          how many it placed; `grouping` says how they came about
    trials          placements that it drew and that were evaluated, repeats included
    distinct        different ones of them
    invalid_share   of the trials: those that did not fit
    bests           the whole curve, from the first placement that fits to the best
    """

    method: str
    seed: int
    found: MethodResult
    groups: int
    grouping: str
    trials: int
    distinct: int
    updates: int
    invalid_share: float
    bests: tuple[BestSoFar, ...]


@dataclass(frozen=True)
class Column:
    """One way to cost a row: the plain machine, or the hypothesis.

    methods   method -> what it found; of one that learns the run of the median
    best      name of the best method that does not learn; "" if nothing fits
    bound     seconds that no placement beats, and what proves it
    shown     method -> its plan's work, for the expert and the best
    learned   method that learns -> its runs, by seed
    """

    methods: dict[str, MethodResult]
    best: str
    bound: float
    proof: str
    shown: dict[str, PlanWork]
    learned: dict[str, tuple[LearnedRun, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class CaseResult:
    """A case's results.

    ops, groups   of our graph; sources are not counted
    flops         of one step
    columns       "plain", and where there is one "hypothesis"
    seconds       wall-clock of the whole row, capture included
    """

    key: str
    ops: int
    groups: int
    flops: int
    parameter_bytes: int
    columns: dict[str, Column]
    seconds: float


@dataclass(frozen=True)
class TowerResult:
    """Data-parallel towers of one network on one machine.

    kind       "synchronous" or "asynchronous"
    seconds    of one step over all replicas
    replicas, batch   batch is of one replica
    """

    key: str
    title: str
    kind: str
    replicas: int
    batch: int
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class LossCurve:
    """Loss against simulated time of a real training run.

    name          "expert", "planned", "synchronous towers", "asynchronous towers"
    step_seconds  simulated
    losses        [steps] of the training batch, before each step's update
    """

    title: str
    name: str
    step_seconds: float
    losses: list[float]
