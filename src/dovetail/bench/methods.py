"""Runs each method of a row alone: with its own budget, its own record and its own value.

`placers.placing.place` always tries the four baselines, and returns the best of them if the method
finds nothing. A table that compares methods must not do that. Here a method that finds nothing that
fits is shown as OOM, whatever the others found.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.bench.cases import with_gpu_memory
from dovetail.bench.records import MethodResult
from dovetail.costs import analytic_costs
from dovetail.errors import InfeasibleError, InvalidError
from dovetail.graph import Graph, Phase, group_levels
from dovetail.machine import Machine
from dovetail.placers import (
    PLACERS,
    Budget,
    GroupPlacement,
    PlacementProblem,
    Placer,
    make_problem,
    parse_budget,
    permitted,
)
from dovetail.placers.auto import MOST_EXACT_GROUPS
from dovetail.placers.baselines import attempt
from dovetail.placers.multilevel import under_units
from dovetail.plans import Placement, normalise
from dovetail.simulator import LowerBound, Simulator, lower_bound
from dovetail.units import format_bytes

# ---- The hypothesis: shared variables and their gradient sums on the CPU, links at 3.5 GB/s ----
#
# RL17's expert and its partitioners come out several times slower than any cost model of K80s
# explains (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML
# 2017, https://arxiv.org/abs/1706.04972, table 2). One reading brings the expert near the printed
# seconds: a variable that several devices read, its update and the sums of its gradient were kept
# on the CPU, so that every such weight crosses a slow link to each device that reads it, and every
# gradient crosses back. A variable that one device reads is on that device, so one GPU takes what
# it takes without the hypothesis. This is a guess, not verified by the paper. Nothing is fitted to
# it: the rates of the devices are those of the plain machine.


LINK_BYTES_PER_SECOND = 3.5e9
_SUMS = ("aten.add", "aten.sum", "aten.stack")


def slow_links(machine: Machine) -> Machine:
    """The machine with every link at `LINK_BYTES_PER_SECOND`; latencies stay."""
    links = tuple(
        replace(link, bandwidth_bytes_per_second=LINK_BYTES_PER_SECOND) for link in machine.links
    )
    return replace(machine, name=f"{machine.name}, links at 3.5 GB/s", links=links)


class SharedVariables:
    """The variables of a graph, and what is on the CPU if several devices read one.

    That is its update, with which the variable lives, and additions that sum its gradients. Such an
    addition belongs to no forward op (autograd put it there), and its outputs are read by updates
    and by such additions alone. O(ops + reads).
    """

    def __init__(self, graph: Graph, cpu: int) -> None:
        self._cpu = cpu
        variable_of = _variables(graph)
        producers = graph.producers[graph.input_tensors]
        updates = graph.residences[producers]
        reads = graph.is_source[producers] & (updates >= 0) & (variable_of[graph.readers] < 0)
        reads &= variable_of[np.maximum(updates, 0)] >= 0
        pairs = np.unique(np.stack([updates[reads], graph.readers[reads]], axis=1), axis=0)
        read, self._offsets = np.unique(pairs[:, 0], return_index=True)
        self._readers = pairs[:, 1]
        self._moved = np.flatnonzero(np.isin(variable_of, read)).astype(np.int32)
        self._variables = np.searchsorted(read, variable_of[self._moved])

    def settle(self, placements: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the placements [batch, ops], in which each variable's update and sums are where
        all that read the variable are, or on the CPU if these are on several devices."""
        settled = placements.copy()
        if len(self._moved):
            devices = placements[:, self._readers]
            lowest = np.minimum.reduceat(devices, self._offsets, axis=1)
            highest = np.maximum.reduceat(devices, self._offsets, axis=1)
            homes = np.where(lowest == highest, lowest, self._cpu)
            settled[:, self._moved] = homes[:, self._variables]
        return settled


def _variables(graph: Graph) -> NDArray[np.int32]:
    """[ops] the update op of the variable whose update or sum of gradients each op is; -1: none."""
    variable_of = np.full(len(graph), -1, dtype=np.int32)
    updates = np.flatnonzero(graph.phases == Phase.UPDATE)
    variable_of[updates] = updates
    sums = (graph.phases == Phase.BACKWARD) & (graph.gradient_of < 0)
    sums &= np.array([kind.startswith(_SUMS) for kind in graph.kinds], dtype=bool)
    # Readers come after producers, so going backwards all readers of an op are decided.
    for op in np.flatnonzero(sums)[::-1].tolist():
        readers = np.concatenate([graph.consumers_of(tensor) for tensor in graph.outputs_of(op)])
        if len(readers) and (variable_of[readers] >= 0).all():
            variable_of[op] = variable_of[readers[0]]
    return variable_of


PLAIN, HYPOTHESIS = "plain", "hypothesis"
CONSTRUCTIVE_SECONDS = 30.0
"""A method that builds one placement and ends gets this many seconds, or the search's budget if
that is more. Few of these methods look at a clock."""
_IMPROVING = tuple(name for name, method in PLACERS.items() if method.role == "improving")
SEARCHES = ("families", *_IMPROVING, "auto")
"""These methods use whatever budget they have."""
_IN_TABLES = ("1 CPU", "1 GPU", "scotch", "mincut", "metis", "expert")
"""The columns that the papers' tables have."""
_NOT_TABLED = ("single", *_IN_TABLES)
METHODS: dict[str, tuple[str, ...]] = {
    PLAIN: (
        *_IN_TABLES,
        *(
            name
            for name, method in PLACERS.items()
            if method.role and method.objectives != ("latency",) and name not in _NOT_TABLED
        ),
        "auto",
    ),
    HYPOTHESIS: (*_IN_TABLES, "etf", "heft", "families", "auto"),
}
"""Maps each column to its methods, in the order of the table: those of the papers, then every
method that `auto` tries, as `PLACERS` has them. `single` is split into 1 CPU and 1 GPU."""


@dataclass(frozen=True, eq=False)
class Ground:
    """The problem and the bound that all methods of a column share.

    splitting   the same problem for `auto`, which may split the groups of `problem`
    settle      placements [batch, ops] as a method chose them -> as they are evaluated
    """

    problem: PlacementProblem
    splitting: PlacementProblem
    bound: LowerBound
    settle: Callable[[NDArray[np.int32]], NDArray[np.int32]]


def lay_ground(graph: Graph, machine: Machine, column: str, seed: int) -> Ground:
    """The problem of a column: on the plain machine, or under the hypothesis."""
    levels = group_levels(graph)
    settle = _unchanged
    if column == HYPOTHESIS:
        machine = slow_links(machine)
        settle = SharedVariables(graph, first_of(machine, "cpu")).settle
    costs = analytic_costs(graph, machine)
    simulator = Simulator(graph, machine, costs, ranked=True)
    splitting = make_problem(
        graph,
        machine,
        costs,
        lambda placements: simulator.evaluate(settle(placements), "step"),
        groups=levels.finest,
        coarser=levels.coarser,
        seed=seed,
        trace=lambda placement: simulator.timeline(settle(placement[None])[0]),
        ranked=simulator.ranked,
    )
    problem = under_units(splitting, splitting.coarser[0]) if splitting.coarser else splitting
    places = permitted(graph, machine, ())
    bound = lower_bound(graph, machine, costs, "step", places, capacities=problem.capacities)
    return Ground(problem, splitting, bound, settle)


def _unchanged(placements: NDArray[np.int32]) -> NDArray[np.int32]:
    return placements


def first_of(machine: Machine, kind: str) -> int:
    """The index of the first device of a kind, which all of the papers' machines have."""
    kinds = [device.kind for device in machine.devices]
    assert kind in kinds, f"{machine.name} has no {kind}"
    return kinds.index(kind)


def run_method(ground: Ground, name: str, budget: str) -> tuple[MethodResult, Placement | None]:
    """Run a method: its result, and its placement [ops], with sources filled in; None if it refuses
    the problem.

    budget   text of the budget for a search; one in evaluations holds for every method
    """
    problem = ground.splitting if name == "auto" else ground.problem
    limit = _limit(name, budget)
    limit.prove(ground.bound.seconds, ground.bound.proof)
    began = time.perf_counter()
    try:
        _refuse_exact(problem, name)
        attempt(name, _placer(name), problem, limit)
    except (InvalidError, InfeasibleError) as error:
        return MethodResult(None, str(error), search_seconds=time.perf_counter() - began), None
    score, placement = limit.found[name]
    peaks = limit.peaks(placement)
    reason = out_of_memory(problem.machine, peaks, problem.capacities)
    fits = not score.lacking_bytes and np.isfinite(score.value)
    result = MethodResult(
        seconds=score.value if fits else None,
        reason="" if fits else reason or f"infeasible: {score.value} s",
        peak_memory_bytes=dict(zip(problem.machine.device_names, peaks.tolist(), strict=True)),
        search_seconds=limit.spent_seconds,
    )
    settled = ground.settle(problem.spread(placement)[None])[0]
    return result, normalise(settled, problem.graph, problem.machine)


TIGHT_SHARE = 0.9
"""The share in `tight_bytes`."""


def tight_bytes(graph: Graph, machine: Machine) -> int:
    """The memory of each GPU with which neither one GPU nor the expert's placement fits: nine
    tenths of what the one of them that needs less needs on its fullest GPU.

    It is what they need when memory is short, which is less than what they use if there is enough:
    on a machine whose GPUs have one byte each, the order of ops is the one that needs least.
    """
    ground = lay_ground(graph, with_gpu_memory(machine, 1), PLAIN, seed=0)
    gpus = [device.name for device in machine.devices if device.kind == "gpu"]
    needs = [
        max(run_method(ground, method, "1e")[0].peak_memory_bytes[gpu] for gpu in gpus)
        for method in ("1 GPU", "expert")
    ]
    return int(TIGHT_SHARE * min(needs))


def out_of_memory(machine: Machine, peaks: NDArray[np.int64], capacities: NDArray[np.int64]) -> str:
    """A text on the device that lacks most and what it needs; "" if everything fits."""
    device = int((peaks - capacities).argmax())
    needed, available = int(peaks[device]), int(capacities[device])
    if needed <= available:
        return ""
    name = machine.devices[device].name
    return f"OOM: {name} needs {format_bytes(needed)} of {format_bytes(available)}"


def _placer(name: str) -> Placer:
    return {"1 CPU": _on_one("cpu"), "1 GPU": _on_one("gpu")}.get(name) or PLACERS[name]


def _on_one(kind: str) -> Placer:
    """A placer that puts everything on the first device of a kind, as in RL17's first two columns.
    A group that may not be there goes to its fastest device."""

    def place(problem: PlacementProblem, _budget: Budget) -> GroupPlacement:
        return problem.settle(np.full(problem.groups.count, first_of(problem.machine, kind)))

    return place


def _limit(name: str, budget: str) -> Budget:
    """The budget of a method; see `CONSTRUCTIVE_SECONDS`."""
    limit = parse_budget(budget)
    if limit.timed and name not in SEARCHES:
        limit = Budget(seconds=max(CONSTRUCTIVE_SECONDS, limit.seconds))
    return limit


def _refuse_exact(problem: PlacementProblem, name: str) -> None:
    """Raise `InfeasibleError` if the method is `exact` and there are so many groups that it would
    spend its budget for nothing. `auto` leaves it out in the same case."""
    if name == "exact" and len(problem.free) > MOST_EXACT_GROUPS:
        raise InfeasibleError(
            f"not tried: of {len(problem.free)} groups exact search proves and finds nothing for a "
            f"step in time; {MOST_EXACT_GROUPS} are the limit"
        )
