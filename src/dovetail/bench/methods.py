"""Runs each method of a row alone: with its own budget, its own record and its own value.

`placers.placing.place` always tries the four baselines, and returns the best of them if the method
finds nothing. A table that compares methods must not do that. Here a method that finds nothing that
fits is shown as OOM, whatever the others found.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.bench.records import MethodResult
from dovetail.costs import analytic_costs
from dovetail.errors import InfeasibleError, InvalidError
from dovetail.graph import Graph, GroupLevels, Groups, Phase, group_levels
from dovetail.graph.grouping import numbered
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

# ---- The hypothesis: variables and gradient sums on the CPU, links at 3.5 GB/s ----
#
# RL17's expert and its partitioners come out several times slower than any cost model of K80s
# explains (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML
# 2017, https://arxiv.org/abs/1706.04972, table 2). One reading brings the expert near the printed
# seconds: TensorFlow kept the variables, their updates and the sums of their gradients on the CPU,
# so that every weight crosses a slow link to each device that reads it, and every gradient crosses
# back. This is a guess, not verified by the paper. Nothing is fitted to it: the rates of the
# devices are those of the plain machine.


LINK_BYTES_PER_SECOND = 3.5e9
_SUMS = ("aten.add", "aten.sum", "aten.stack")


def slow_links(machine: Machine) -> Machine:
    """The machine with every link at `LINK_BYTES_PER_SECOND`; latencies stay."""
    links = tuple(
        replace(link, bandwidth_bytes_per_second=LINK_BYTES_PER_SECOND) for link in machine.links
    )
    return replace(machine, name=f"{machine.name}, links at 3.5 GB/s", links=links)


def on_the_cpu(graph: Graph) -> NDArray[np.bool_]:
    """[ops] True for ops that the hypothesis keeps on the CPU: updates, with which their variables
    live, and additions that sum the gradients of one variable.

    Such an addition belongs to no forward op (autograd put it there), and its outputs are read by
    updates and by such additions alone. O(ops + reads).
    """
    pinned = np.asarray(graph.phases == Phase.UPDATE)
    sums = (graph.phases == Phase.BACKWARD) & (graph.gradient_of < 0)
    sums &= np.array([kind.startswith(_SUMS) for kind in graph.kinds], dtype=bool)
    # Readers come after producers, so going backwards all readers of an op are decided.
    for op in np.flatnonzero(sums)[::-1].tolist():
        readers = np.concatenate([graph.consumers_of(tensor) for tensor in graph.outputs_of(op)])
        pinned[op] = len(readers) > 0 and pinned[readers].all()
    return _with_colocated(graph, pinned)


def _with_colocated(graph: Graph, pinned: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[ops] the pinned ops and all ops that share a colocation id with one of them, without
    sources."""
    given = graph.colocation >= 0
    ids = np.unique(graph.colocation[given & pinned])
    return np.asarray((pinned | (given & np.isin(graph.colocation, ids))) & ~graph.is_source)


def split(graph: Graph, groups: Groups, pinned: NDArray[np.bool_]) -> Groups:
    """The groups, in which the pinned ops of each group are a group of their own, so that no other
    op goes where they go. As in `graph.grouping` a source is with the op that writes it; any other
    source stays in its group."""
    apart = groups.of_op * 2 + pinned
    written = graph.is_source & (graph.residences >= 0)
    apart[written] = apart[graph.residences[written]]
    return numbered(apart)


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
    permitted   [ops, devices] True if the op may be on the device, whatever group it is in
    """

    problem: PlacementProblem
    splitting: PlacementProblem
    permitted: NDArray[np.bool_]
    bound: LowerBound


def lay_ground(graph: Graph, machine: Machine, column: str, seed: int) -> Ground:
    """The problem of a column: the plain one, or the hypothesis's machine, groups and pins."""
    levels, pinned = group_levels(graph), np.zeros(len(graph), dtype=bool)
    if column == HYPOTHESIS:
        pinned = on_the_cpu(graph)
        levels, machine = _split_levels(graph, levels, pinned), slow_links(machine)
    costs = analytic_costs(graph, machine)
    simulator = Simulator(graph, machine, costs, ranked=True)
    splitting = make_problem(
        graph,
        machine,
        costs,
        lambda placements: simulator.evaluate(placements, "step"),
        groups=levels.finest,
        coarser=levels.coarser,
        seed=seed,
        trace=simulator.timeline,
        ranked=simulator.ranked,
    )
    places = permitted(graph, machine, ())
    if pinned.any():
        home = first_of(machine, "cpu")
        elsewhere = np.arange(len(machine.devices)) != home
        lives = pinned[np.maximum(graph.residences, 0)] & (graph.residences >= 0)
        places[np.ix_(lives, elsewhere)] = False
        allowed = splitting.allowed.copy()
        allowed[np.ix_(np.unique(levels.finest.of_op[pinned]), elsewhere)] = False
        splitting = replace(splitting, allowed=allowed)
    problem = under_units(splitting, splitting.coarser[0]) if splitting.coarser else splitting
    bound = lower_bound(graph, machine, costs, "step", places, capacities=problem.capacities)
    return Ground(problem, splitting, places, bound)


def _split_levels(graph: Graph, levels: GroupLevels, pinned: NDArray[np.bool_]) -> GroupLevels:
    """The levels, in which the pinned ops of each group are a group of their own: see `split`."""
    finest = split(graph, levels.finest, pinned)
    coarser = []
    for unit_of in levels.coarser:
        units = Groups(unit_of[levels.finest.of_op], int(unit_of.max()) + 1)
        of_group = np.empty(finest.count, np.int32)
        of_group[finest.of_op] = split(graph, units, pinned).of_op
        coarser.append(of_group)
    return GroupLevels(finest, tuple(coarser))


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
    spread = problem.spread(placement)
    return result, normalise(spread, problem.graph, problem.machine)


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
