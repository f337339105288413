"""Records of the papers' figures for a row, and of our results for it.

    Case ──► run ──► CaseResult ──► index.html, rows.csv
      │                  └── Column: MethodResult per method, PlanWork per shown plan
      └── Published: the paper's own figures

All records hold plain values, so that a row is kept as JSON and a killed run goes on where it was.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Published:
    """The paper's figures of one row.

    seconds   column -> seconds of one step; None: printed as out of memory. A column that the
              paper does not have is absent
    ops, groups   numbers in the paper's tables; None: not given
    hours     column -> a text on how long the search took, if the paper says it
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
    gpus      number of GPUs of the paper's row
    ours      the sizes that the paper does not give, and where we took them from; "" for none
    gpu_memory_bytes   the memory of each GPU; None: what `machine` says
    """

    key: str
    title: str
    model: str
    train: str
    machine: str
    gpus: int
    published: Published | None
    ours: str = ""
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True)
class MethodResult:
    """The result of one method.

    seconds   seconds of one step; None: nothing fits, or the method cannot place this graph
    reason    why there are no seconds: "OOM: k80:0 needs 13.1 GB of 12.0 GB", or the refusal
    peak_memory_bytes   device -> bytes
    search_seconds      seconds that the method took
    """

    seconds: float | None
    reason: str = ""
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    search_seconds: float = 0.0


@dataclass(frozen=True)
class PlanWork:
    """One plan's load, as RL17's figures 8 and 9 show it, and its graph coloured by device.

    forward_seconds, backward_seconds, update_seconds   device -> seconds in which it computes
    transfer_seconds   channel -> seconds in which it carries something
    picture            SVG of the graph, nodes coloured by device (figures 4 and 5)
    """

    forward_seconds: dict[str, float]
    backward_seconds: dict[str, float]
    update_seconds: dict[str, float]
    transfer_seconds: dict[str, float]
    picture: str


@dataclass(frozen=True)
class BestSoFar:
    """A placement that was better than all before it in its run.

    trial      number of placements that had been evaluated by then, this one included
    distinct   number of different placements among them
    seconds    seconds of one step
    """

    trial: int
    distinct: int
    seconds: float


@dataclass(frozen=True)
class LearnedRun:
    """One training of a learned method on one row, from one seed.

    found           the result of its best placement; `search_seconds` are those of the whole run
    groups          number of groups that it placed; `grouping` says how they came about
    trials          number of placements that it drew and that were evaluated, repeats included
    distinct        number of different placements among them
    invalid_share   share of the trials that did not fit
    bests           the curve of best placements, from the first that fits to the best
    controllers     number of asynchronous controllers; 1: one learner without a server
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
    controllers: int = 1


@dataclass(frozen=True)
class Column:
    """One way to cost a row: the plain machine, or the hypothesis.

    methods   method -> its result; for a method that learns, that of its run of the median
    best      name of the best method that does not learn; "" if nothing fits
    bound     seconds that no placement beats; `proof` names what proves it
    shown     method -> the work of its plan: of the expert, of the best, and of the best run of
              each that learns
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

    ops, groups   numbers of our graph, without sources
    flops         FLOPs of one step
    columns       "plain", and "hypothesis" if the table has it -> our results
    seconds       wall-clock seconds of the whole row, capture included
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
    seconds    seconds of one step over all replicas; None: the towers do not fit, see `reason`
    batch      batch size of one replica
    """

    key: str
    title: str
    kind: str
    replicas: int
    batch: int
    seconds: float | None
    reason: str = ""


SYNCHRONOUS, ASYNCHRONOUS = "synchronous towers", "asynchronous towers"
"""The names of the curves of towers, and of the ways of training that give their losses."""


@dataclass(frozen=True)
class LossCurve:
    """Loss against simulated time of a real training run.

    name          a key of `towers.LEARNS_AS`: "expert", "planned", a method that learns, ...
    step_seconds  simulated seconds of one step
    losses        [steps] loss of the training batch, before each step's update
    """

    title: str
    name: str
    step_seconds: float
    losses: list[float]
