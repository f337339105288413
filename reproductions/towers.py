"""Simulates data-parallel towers of Inception-V3, and draws up loss against simulated time.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4 and figures 6 and 7: Inception-V3 on batches of 128,
as 4 towers of 32 or as one step of 128 placed on the same 4 GPUs; NMT under the expert's placement
and the learned one. Differences: the best planner stands beside the learned placements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.costs import analytic_costs
from dovetail.errors import MissingLibraryError, NoDeviceError, UsageError
from dovetail.graph import Graph, Phase
from dovetail.graph.copies import tower_count, towers_of
from dovetail.machine import Machine
from dovetail.machine.files import machine_to_dict
from dovetail.networks import NETWORKS
from dovetail.networks.records import Options
from dovetail.plans import Placement, normalise
from dovetail.simulator import Simulator
from dovetail.training import (
    Assignment,
    Gradient,
    Job,
    Outcome,
    Rule,
    StepTimes,
    Vector,
    Watcher,
    kernels,
    load_backend,
)
from dovetail.training.backends.simulated import World
from dovetail.training.optimizers import COUNT, FlatAdam, FlatOptimizer, FlatRMSprop
from dovetail.training.rules.contract import Arrival, Slice
from dovetail.training.rules.pushing import TOTAL, add_gradient, total
from dovetail.transforms import replicate
from reproductions import graphs
from reproductions.cases import CASES, LEARNED, RL17_CASES, machine_of
from reproductions.learned import column_with_trainings, forget_trainings
from reproductions.methods import (
    APART,
    HYPOTHESIS,
    PLAIN,
    SPLITTING,
    lay_ground,
    out_of_memory,
    run_method,
)
from reproductions.records import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Case,
    CaseResult,
    Column,
    LossCurve,
    TowerResult,
)
from reproductions.running import (
    EXPERT,
    BenchSettings,
    Tell,
    forget,
    missing,
    read_column,
    run_column,
)
from reproductions.store import PLANNED, TOWERS, Kept, Store, fingerprint

REPLICAS, BATCH = 4, 32
TOWER = next(case for case in RL17_CASES if case.key == "inception-v3-4gpu")
"""The case of one tower, whose batch is `BATCH`."""
WHOLE = replace(
    TOWER,
    key="inception-v3-128-4gpu",
    title=f"Inception-V3, batch {REPLICAS * BATCH}, 4 GPUs",
    model=f"zoo:inception_v3?batch={REPLICAS * BATCH}",
    published=None,
)
"""The case with which towers are compared: one step of the examples of all towers."""
TRANSLATION = "nmt-4gpu"
KINDS = {True: "synchronous", False: "asynchronous"}
_METHODS = {PLAIN: (EXPERT, "local_search", SPLITTING), HYPOTHESIS: ()}


def tower_placement(graph: Graph, machine: Machine) -> Placement:
    """Return the placement [ops] with tower i on GPU i.

    Parameters with their state and updates, the averages of gradients and of the loss, and the
    inputs are on the host. `graph` must come from `replicate`. Raises `UsageError` if it does not,
    and `NoDeviceError` for an op that its device cannot run, such as an update if the host is no
    CPU. If there are fewer GPUs than towers, they are dealt out in turn, and if there is none, to
    the CPUs.
    """
    if tower_count(graph) < 2:
        raise UsageError("graph", "has no towers; make them with replicate(graph, replicas)")
    towers = towers_of(graph)
    kinds = [device.kind for device in machine.devices]
    tower_kind = "gpu" if "gpu" in kinds else "cpu"
    devices = np.array([d for d, kind in enumerate(kinds) if kind == tower_kind], dtype=np.int32)
    placement = np.where(towers < 0, machine.host_index, devices[towers % len(devices)])
    for d, kind in enumerate(kinds):
        wrong = np.flatnonzero((placement == d) & ~graph.runs_on(kind) & ~graph.is_source)
        if len(wrong):
            raise NoDeviceError(graph.names[wrong[0]])
    return normalise(placement.astype(np.int32), graph, machine)


def run_towers(settings: BenchSettings, tell: Tell, complain: Tell) -> list[str]:
    """Simulate and keep the towers of both kinds."""
    store = settings.store(complain, TOWERS)
    graph, machine = graphs.graph_for(store, TOWER), machine_of(TOWER)
    for synchronous, kind in KINDS.items():
        kept = _kept_towers(store, kind)
        if kept.get() is None:
            tell(f"{kind} towers")
            kept.put(simulate_towers(graph, machine, synchronous=synchronous))
    return []


def simulate_towers(graph: Graph, machine: Machine, *, synchronous: bool) -> dict[str, Any]:
    """`seconds` of a step of `REPLICAS` towers of the graph; None with a `reason` if they do not
    fit. Asynchronous towers go on by themselves: their step is what a tower takes from one update
    to its next, once the towers have got out of step (`run_asynchronously`)."""
    towers = replicate(graph, REPLICAS, synchronous=synchronous).graph
    simulator = Simulator(towers, machine, analytic_costs(towers, machine), ranked=True)
    timeline = simulator.timeline(tower_placement(towers, machine))
    if synchronous:
        seconds = timeline.step_seconds
    else:
        seconds = asynchronous_seconds(tower_world(graph, machine), REPLICAS)
    reason = out_of_memory(machine, timeline.peak_memory_bytes, simulator.capacities)
    return {"seconds": None if reason else seconds, "reason": reason}


def run_whole(settings: BenchSettings, tell: Tell, complain: Tell) -> list[str]:
    """Place the step of the examples of all towers, and keep the result."""
    return run_column(_of_whole(settings), WHOLE, PLAIN, tell, complain)


def run_apart(settings: BenchSettings, tell: Tell, complain: Tell) -> list[str]:
    """Place NMT as the expert of section 4.4 does, and keep the result."""
    store, case = settings.store(complain), translation()
    graph = graphs.graph_for(store, case)
    tell(f"{case.title}: {APART}")
    found, _ = run_method(lay_ground(graph, machine_of(case), PLAIN, settings.seed), APART, "1e")
    _kept_apart(store).put(asdict(found))
    return []


def run_learning(settings: BenchSettings, tell: Tell, complain: Tell) -> list[str]:
    """Train the small networks and keep their losses. Without scikit-learn there are no losses,
    which is no failure."""

    store = settings.store(complain, TOWERS)
    graph = graphs.graph_for(store, TOWER)
    tell("training for the curves")
    try:
        losses = train(seed=settings.seed, world=tower_world(graph, machine_of(TOWER)))
    except MissingLibraryError as error:
        complain(f"no curves of loss against time: {error}")
        return []
    _kept_losses(settings, store).put(losses)
    return []


def lacking(settings: BenchSettings, store: Store) -> dict[str, tuple[Case, str]]:
    """The tasks of this module that are not kept yet: name -> (case whose graph it needs,
    function)."""
    whole_is_kept = PLAIN not in missing(_of_whole(settings), store, WHOLE)
    kept = {
        "towers": (TOWER, "run_towers", bool(read_towers(store))),
        "whole batch": (WHOLE, "run_whole", whole_is_kept),
        "NMT's other expert": (translation(), "run_apart", bool(_kept_apart(store).get())),
        "curves": (TOWER, "run_learning", _kept_losses(settings, store).get() is not None),
    }
    return {
        name: (case, f"{__name__}:{function}")
        for name, (case, function, is_kept) in kept.items()
        if not is_kept
    }


def read_towers(store: Store) -> list[TowerResult]:
    """The kept towers of both kinds; none if one kind is missing."""
    stored = {kind: _kept_towers(store, kind).get() for kind in KINDS.values()}
    if None in stored.values():
        return []
    return [
        TowerResult(
            key=f"{TOWER.key}.{kind}",
            title="Inception-V3",
            kind=kind,
            replicas=REPLICAS,
            batch=BATCH,
            **value,
        )
        for kind, value in stored.items()
    ]


def read_curves(
    settings: BenchSettings, store: Store, rows: Sequence[CaseResult]
) -> list[LossCurve]:
    """The curves of loss against time of each way of training whose step seconds are kept; none if
    no losses are kept."""
    losses = _kept_losses(settings, store).get()
    if losses is None:
        return []
    of_translation = next((row.columns[PLAIN] for row in rows if row.key == TRANSLATION), None)
    whole = read_column(_of_whole(settings), store, WHOLE, PLAIN)
    of_towers = {f"{tower.kind} towers": tower.seconds for tower in read_towers(store)}
    if whole is not None:
        whole = column_with_trainings(settings, store, WHOLE, PLAIN, whole)
    apart = (_kept_apart(store).get() or {}).get("seconds")
    seconds = {
        INCEPTION: _planned_seconds(whole) | of_towers,
        NMT: {APART: apart} | _planned_seconds(of_translation),
    }
    available = {
        title: {name: value for name, value in of.items() if value is not None}
        for title, of in seconds.items()
    }
    return curves(available, losses)


def _planned_seconds(column: Column | None) -> dict[str, float | None]:
    """The seconds of the expert's step, of the best method's that does not learn, and of each that
    learned, by its run of the median; empty if nothing fits."""
    if column is None or not column.best:
        return {}
    expert = column.methods.get(EXPERT)
    return {
        "expert": None if expert is None else expert.seconds,
        "planned": column.methods[column.best].seconds,
        **{
            name: column.methods[name].seconds for name in LEARNED["rl17"] if name in column.learned
        },
    }


def forget_towers(settings: BenchSettings, store: Store) -> None:
    """Drop everything that this module keeps."""
    forget(_of_whole(settings), store, WHOLE)
    forget_trainings(settings, store, WHOLE)
    kept = [_kept_towers(store, kind) for kind in KINDS.values()]
    for each in (*kept, _kept_apart(store), _kept_losses(settings, store)):
        each.drop()


def translation() -> Case:
    """The case whose training figure 6 shows."""
    return next(case for case in CASES["rl17"] if case.key == TRANSLATION)


def _of_whole(settings: BenchSettings) -> BenchSettings:
    return replace(settings, methods=_METHODS)


def _kept_towers(store: Store, kind: str) -> Kept:
    name = f"{TOWER.key}.{kind}-towers"
    return _kept(store, TOWER, name, TOWERS, kind=kind, replicas=REPLICAS)


def _kept_losses(settings: BenchSettings, store: Store) -> Kept:
    # Asynchronous losses depend on how long a tower of the graph takes on the machine.
    return _kept(store, TOWER, "learning", TOWERS, learning=settings.seed)


def _kept_apart(store: Store) -> Kept:
    """The place of the result of the expert of section 4.4."""
    case = translation()
    return _kept(store, case, f"{case.key}.expert-4-4", PLANNED)


def _kept(store: Store, case: Case, name: str, code: str, /, **facts: Any) -> Kept:
    """The place of a result that rests on a case's graph and machine. Nothing is kept there if the
    graph must be captured."""
    captured = graphs.known(store, case)
    graph = "" if captured is None else captured.graph
    machine = machine_to_dict(machine_of(case))
    return Kept(store, name, fingerprint(code, graph=graph, machine=machine, **facts))


# ---- Asynchronous towers in virtual time ----
#
#     tower 0     pull ─ compute ───────────┐ update ┐ pull ─ compute ───────────┐ update ...
#     tower 1     pull ─ compute ───────────┘ wait   └ update ┐ pull ─ compute ────────── ...
#
# The variables are on the CPU, which updates them by one tower's gradients at a time. Towers begin
# together once; then each waits for the CPU and for nothing else.

ROUNDS = 100
"""So many updates of each tower are simulated to see how far apart they are."""


def tower_world(graph: Graph, machine: Machine) -> World:
    """How long an asynchronous tower of the graph takes: a simulated step of one tower alone, with
    its variables on the CPU, is what the CPU computes and all else, which other towers do not slow.

    Difference: what the CPU computes may overlap with the rest of the step here, but another
    tower's update must then wait until the rest has ended.
    """
    gpu = [device.kind for device in machine.devices].index("gpu")
    placement = np.where(graph.phases == Phase.UPDATE, machine.host_index, gpu).astype(np.int32)
    simulator = Simulator(graph, machine, analytic_costs(graph, machine), ranked=True)
    timeline = simulator.timeline(normalise(placement, graph, machine))
    on_cpu = float(timeline.busy_seconds[machine.host_index])
    rest = timeline.step_seconds - on_cpu
    return World(times=StepTimes(mean_seconds=rest), apply_seconds=on_cpu)


def asynchronous_seconds(world: World, towers: int) -> float:
    """Seconds from one update by a tower's gradients to its next, as the mean over the towers."""
    rows = run_asynchronously(world, _Idle(), FlatRMSprop(), towers, ROUNDS).rows
    first, last = rows[towers - 1], rows[-1]
    return (last.seconds - first.seconds) / (ROUNDS - 1)


def run_asynchronously(
    world: World, tower: "_Tower | _Idle", optimizer: FlatOptimizer, towers: int, rounds: int
) -> Outcome:
    """Train with as many towers, in virtual time, until there are `rounds` updates for each on
    average. The server steps by the gradient of each tower as it comes."""
    count = towers * rounds
    job = Job("towers", tower.theta.size, count, 1, 1, workers=towers)

    def apply(part: Slice, arrival: Arrival) -> None:
        change = optimizer.update(part.theta, arrival.vector, part.slots, part.counts)
        kernels.add(part.theta, change)

    rule = Rule(
        name="towers",
        options={},
        step=add_gradient,
        message=total,
        apply=apply,
        worker_slots=(TOTAL,),
        server_slots=optimizer.slots,
        server_counts=(COUNT,),
    )
    assignment = Assignment(job, rule, tower.theta, lambda _worker: tower)
    return load_backend("simulated", **vars(world))(assignment, Watcher())


class _Idle:
    """A learner that learns nothing, where only times are asked for."""

    theta: Vector = np.zeros(1, dtype=np.float32)

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        return Gradient(np.zeros_like(theta), 0.0, len(indices))

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        raise AssertionError("the server steps")

    def rate(self, epoch: float) -> float:
        return 0.0


# ---- Loss against simulated time: real training of small networks ----
#
#     one batch               batch of 4 x b ─► gradient ─► update           expert, planned
#     synchronous towers      4 batches of b ─► 4 gradients ─► mean ─► update
#     asynchronous towers     a batch of b ─► gradient ─► update, of each tower when it is ready
#
# Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
# https://arxiv.org/abs/1706.04972, figures 6 (NMT) and 7 (Inception-V3), section 4.4.
#
# `train` returns losses, step by step. They are real. They are the same for every placement, since
# a placement does not change what is computed. `curves` joins them with the seconds of a step,
# which come from a simulation of the full-size graphs. Every step of a curve reads 4 x b examples.
#
# Differences: the paper trains full size on its machines. Here Inception-V3 is a tenth as wide at
# 75 x 75 and learns the 1,797 handwritten digits of scikit-learn; NMT is 64 wide and learns to
# write 8 words backwards. Batch norm of a tower sees the tower's batch, as in the paper.
# Asynchronous towers are workers of our own parameter server in virtual time (`training`, its
# simulated backend): the times are those of the full-size towers, the gradients real. A step of
# their curve is as many updates as there are towers.


INCEPTION, NMT = "Inception-V3", "NMT"
ONE_BATCH = "one batch"
LEARNS_AS = {
    "expert": ONE_BATCH,
    APART: ONE_BATCH,
    "planned": ONE_BATCH,
    **dict.fromkeys(LEARNED["rl17"], ONE_BATCH),
    SYNCHRONOUS: SYNCHRONOUS,
    ASYNCHRONOUS: ASYNCHRONOUS,
}
"""Maps each curve's name to the way of training that its losses come from."""
Part = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # inputs, targets of one tower
Losses = dict[str, dict[str, list[float]]]
"""Losses: title of the network -> way of training -> [steps]."""


@dataclass(frozen=True)
class CurveTask:
    """A network that is trained for the curves, and its training.

    options      options of the network; "batch" is the batch of one tower
    server       the same optimizer on one vector, for a parameter server
    batch_axis   the axis of inputs and targets that is the batch
    data         (options, count, generator) -> `count` parts, one for each step and tower
    """

    title: str
    network: str
    options: Options
    batch_axis: int
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    server: FlatOptimizer
    data: Callable[[Options, int, torch.Generator], list[Part]]
    ways: tuple[str, ...]
    steps: int
    towers: int = 4


def train(
    tasks: Sequence[CurveTask] | None = None, seed: int = 0, world: World | None = None
) -> Losses:
    """The losses of each task in each of its ways, on one core; equal seeds give equal losses.

    world   how long asynchronous towers take; None: they take equally long, and the server no time

    About 95 s for the default tasks. Raises `MissingLibraryError` without scikit-learn.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            task.title: {way: losses_of(task, way, seed, world) for way in task.ways}
            for task in (TASKS if tasks is None else tasks)
        }
    finally:
        torch.set_num_threads(threads)


def curves(step_seconds: Mapping[str, Mapping[str, float]], losses: Losses) -> list[LossCurve]:
    """The curves: losses joined with step seconds.

    step_seconds   title -> name of the curve, a key of `LEARNS_AS` -> seconds of one step. There is
                   a curve for each of these names and no other
    """
    return [
        LossCurve(title, name, seconds, losses[title][LEARNS_AS[name]])
        for title, of_name in step_seconds.items()
        for name, seconds in of_name.items()
    ]


def losses_of(task: CurveTask, way: str, seed: int, world: World | None = None) -> list[float]:
    """[steps] the loss of each step's examples before its update: the mean over the towers, or over
    as many updates of asynchronous towers, in the order in which these are made.

    Initial parameters, batches and their order depend on the seed alone, so that all ways of
    training learn from the same.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = task.data(task.options, task.steps * task.towers, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, _, loss, _ = NETWORKS[task.network].build(**task.options)
        module.train()
        if way == ASYNCHRONOUS:
            tower = _Tower(module, loss, parts)
            run = run_asynchronously(world or World(), tower, task.server, task.towers, task.steps)
            by_step = np.array([row.loss for row in run.rows]).reshape(task.steps, task.towers)
            return [float(mean) for mean in by_step.mean(axis=1)]
        parameters = list(module.parameters())
        optimizer = task.optimizer(parameters)
        losses = []
        for step in range(task.steps):
            of_step = parts[step * task.towers : (step + 1) * task.towers]
            if way == ONE_BATCH:
                inputs, targets = (
                    tuple(torch.cat(tensors, task.batch_axis) for tensors in zip(*of, strict=True))
                    for of in zip(*of_step, strict=True)
                )
                of_step = [(inputs, targets)]
            # A step of synchronous towers, each with a part. One part alone is plain training.
            total, gradients = 0.0, []
            for inputs, targets in of_step:
                value = loss(module(*inputs), *targets)
                gradients.append(torch.autograd.grad(value, parameters))
                total += value.item()
            means = [torch.stack(of_one).mean(0) for of_one in zip(*gradients, strict=True)]
            for parameter, gradient in zip(parameters, means, strict=True):
                parameter.grad = gradient
            optimizer.step()
            losses.append(total / len(of_step))
        return losses


class _Tower:
    """A learner that all towers share, since its gradient depends on nothing but theta and the
    part. Batch norm uses the part's own statistics. Parts are taken in the order of pulls."""

    def __init__(
        self, module: nn.Module, loss: Callable[..., Tensor], parts: Sequence[Part]
    ) -> None:
        self._module, self._loss, self._parts = module, loss, iter(parts)
        self._parameters = list(module.parameters())
        flat = nn.utils.parameters_to_vector(self._parameters)
        self.theta: Vector = flat.detach().numpy().copy()

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        nn.utils.vector_to_parameters(torch.from_numpy(np.array(theta)), self._parameters)
        inputs, targets = next(self._parts)
        value = self._loss(self._module(*inputs), *targets)
        gradients = torch.autograd.grad(value, self._parameters)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return Gradient(flat.numpy(), value.item(), len(indices))

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        raise AssertionError("the server steps")

    def rate(self, epoch: float) -> float:
        return 0.0  # the server has its own


def _digits(options: Options, count: int, generator: torch.Generator) -> list[Part]:
    """Handwritten digits, drawn with repeats: 8 x 8 grey images as [batch, 3, size, size], each of
    mean 0 and deviation 1 over the data set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingLibraryError("scikit-learn", "pip install 'dovetail[bench]'") from None
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    size, batch = int(options["size"]), int(options["batch"])
    drawn = torch.randint(len(images), (count, batch), generator=generator)
    return [
        (
            (nn.functional.interpolate(images[of], (size, size), mode="bilinear")
             .expand(-1, 3, -1, -1),),
            (labels[of],),
        )
        for of in drawn
    ]  # fmt: skip


def _reversals(options: Options, count: int, generator: torch.Generator) -> list[Part]:
    """Parts ((source, given), target): the target is the random source backwards, and `given` is
    the target one word later, behind word 0."""
    steps, batch, vocabulary = (int(options[key]) for key in ("steps", "batch", "vocabulary"))
    parts: list[Part] = []
    for _ in range(count):
        source = torch.randint(1, vocabulary, (steps, batch), generator=generator)
        target = source.flip(0)
        given = torch.cat([torch.zeros_like(target[:1]), target[:-1]])
        parts.append(((source, given), (target,)))
    return parts


TASKS = (
    CurveTask(
        title=INCEPTION,
        network="inception_v3",
        options={"batch": 16, "size": 75, "classes": 10, "width": 0.1, "dropout": 0.0},
        batch_axis=0,
        optimizer=partial(torch.optim.RMSprop, lr=1e-3, alpha=0.9, eps=1e-3),
        server=FlatRMSprop(lr=1e-3, alpha=0.9, eps=1e-3),
        data=_digits,
        ways=(ONE_BATCH, SYNCHRONOUS, ASYNCHRONOUS),
        steps=100,
    ),
    CurveTask(
        title=NMT,
        network="nmt",
        options={"layers": 2, "hidden": 64, "steps": 8, "batch": 16, "vocabulary": 20},
        batch_axis=1,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        server=FlatAdam(lr=3e-3),
        data=_reversals,
        ways=(ONE_BATCH,),
        steps=200,
    ),
)
"""The default tasks, which take about 95 s on one core."""
