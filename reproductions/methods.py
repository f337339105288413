"""Runs each method of a row alone: with its own budget, its own record and its own value.

`placers.placing.place` always tries the four baselines, and returns the best of them if the method
finds nothing. A table that compares methods must not do that. Here a method that finds nothing that
fits is shown as OOM, whatever the others found.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import analytic_costs
from dovetail.errors import InfeasibleError, InvalidError
from dovetail.graph import Graph, group, group_levels
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
from dovetail.placers.expert import expert_apart
from dovetail.placers.multilevel import under_units
from dovetail.plans import Placement, normalise
from dovetail.simulator import LowerBound, Simulator, lower_bound
from dovetail.units import format_bytes
from reproductions.cases import with_gpu_memory
from reproductions.hypothesis import Settle, as_chosen, under_hypothesis
from reproductions.records import MethodResult

PLAIN, HYPOTHESIS = "plain", "hypothesis"
APART = "expert of section 4.4"
"""RL17's expert for the training of NMT, which is no row of a table: `expert_apart`."""
CONSTRUCTIVE_SECONDS = 30.0
"""A method that builds one placement and ends gets this many seconds, or the search's budget if
that is more. Few of these methods look at a clock."""
_IMPROVING = tuple(name for name, method in PLACERS.items() if method.role == "improving")
SPLITTING = "auto-split"
"""The column of `auto` as the tool runs it: free to split the groups of its row. The column `auto`
places these groups, like all other methods of the row."""
SEARCHES = ("families", *_IMPROVING, "auto", SPLITTING)
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
        SPLITTING,
    ),
    HYPOTHESIS: (*_IN_TABLES, "etf", "heft", "families", "auto", SPLITTING),
}
"""Maps each column to its methods, in the order of the table: those of the papers, then every
method that `auto` tries, as `PLACERS` has them. `single` is split into 1 CPU and 1 GPU."""


@dataclass(frozen=True, eq=False)
class Ground:
    """The problem and the bound that all methods of a column share.

    splitting   the same problem for a search that may split the groups of `problem`
    settle      what the column does to a placement before it is evaluated
    """

    problem: PlacementProblem
    splitting: PlacementProblem
    bound: LowerBound
    settle: Settle


def lay_ground(graph: Graph, machine: Machine, column: str, seed: int) -> Ground:
    """The problem of a column: on the plain machine, or under the hypothesis."""
    settle: Settle = as_chosen
    if column == HYPOTHESIS:
        machine, settle = under_hypothesis(graph, machine)
    splitting = splitting_problem(graph, machine, seed, settle)
    # All methods place the groups of RL17's rule, of which the finest are parts.
    unit_of = np.empty(splitting.groups.count, dtype=np.int32)
    unit_of[splitting.groups.of_op] = group(graph).of_op
    problem = under_units(splitting, unit_of)
    places = permitted(graph, machine, ())
    bound = lower_bound(
        graph, machine, splitting.costs, "step", places, capacities=problem.capacities
    )
    return Ground(problem, splitting, bound, settle)


def splitting_problem(
    graph: Graph, machine: Machine, seed: int, settle: Settle = as_chosen
) -> PlacementProblem:
    """The problem of a search that may split the groups of RL17's rule: its groups are the finest
    parts of them."""
    levels = group_levels(graph)
    costs = analytic_costs(graph, machine)
    simulator = Simulator(graph, machine, costs, ranked=True)
    return make_problem(
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


def first_of(machine: Machine, kind: str) -> int:
    """The index of the first device of a kind, which all of the papers' machines have."""
    kinds = [device.kind for device in machine.devices]
    assert kind in kinds, f"{machine.name} has no {kind}"
    return kinds.index(kind)


def _on_one(kind: str) -> Placer:
    """A placer that puts everything on the first device of a kind, as in RL17's first two columns.
    A group that may not be there goes to its fastest device."""

    def place(problem: PlacementProblem, _budget: Budget) -> GroupPlacement:
        return problem.settle(np.full(problem.groups.count, first_of(problem.machine, kind)))

    return place


_OURS: dict[str, Placer] = {
    "1 CPU": _on_one("cpu"),
    "1 GPU": _on_one("gpu"),
    APART: expert_apart,
}
"""The methods that are no placers of the package."""


def run_method(ground: Ground, name: str, budget: str) -> tuple[MethodResult, Placement | None]:
    """Run a method: its result, and its placement [ops], with sources filled in; None if it refuses
    the problem.

    budget   text of the budget for a search; one in evaluations holds for every method
    """
    problem = ground.problem
    if name == SPLITTING:
        name, problem = "auto", ground.splitting
    limit = parse_budget(budget)
    if limit.timed and name not in SEARCHES:
        limit = Budget(seconds=max(CONSTRUCTIVE_SECONDS, limit.seconds))
    limit.ledger.prove(ground.bound.seconds, ground.bound.proof)
    began = time.perf_counter()
    try:
        if name == "exact" and len(problem.free) > MOST_EXACT_GROUPS:
            # It would spend its budget for nothing. `auto` leaves it out in the same case.
            raise InfeasibleError(
                f"not tried: of {len(problem.free)} groups exact search proves and finds nothing "
                f"for a step in time; {MOST_EXACT_GROUPS} are the limit"
            )
        attempt(name, _OURS.get(name) or PLACERS[name], problem, limit)
    except (InvalidError, InfeasibleError) as error:
        return MethodResult(None, str(error), search_seconds=time.perf_counter() - began), None
    score, placement = limit.ledger.results[name]
    peaks = limit.ledger.peaks(placement)
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
