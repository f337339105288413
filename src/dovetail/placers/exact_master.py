"""What both CP-SAT models share: who is where, devices that are alike, memory, what is ruled out.

Symmetry. Devices are alike if swapping them changes neither costs, links, memory nor what is
allowed. Of the placements that only swap alike devices one is kept: going through the groups, the
heaviest first, device k of a class is used only after device k - 1 of the class.

Memory. A placement is judged by its simulated peak, which no linear rule gives. The model holds
what every placement needs, whatever the order of its ops: on each device

    sum of resident and output bytes of its groups <= capacity
    sum of resident bytes of its groups + what one op of them reads and makes <= capacity

and what fits by these rules and lacks memory in truth is ruled out one placement at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from dovetail.graph import HOST, Graph, Phase
from dovetail.placers.problem import GroupPlacement, Problem

SCALE_UNITS = 2**26
"""Units of time that a step or load of the size expected has: durations are rounded down to whole
units, so that a sum of n of them is short of the truth by less than n units. Larger coefficients
are not safe: with 2**34, CP-SAT 9.15 was seen to cut off the optimum while it simplified."""
MOST_UNITS = 2 * SCALE_UNITS
"""A longer duration counts as this: no plan of interest has one."""
HORIZON_UNITS = 2**46
"""Above the sum of the durations of every model that there is memory for: no plan is cut off,
however much slower than expected."""
ROOM_UNITS = 2**26
"""Units of memory that a device's capacity has, for the same reason."""


@dataclass(eq=False)
class Master:
    """A CP-SAT model over group placements whose optimum is at most the value of the best plan.

    at          [group][device] literal "this group is there"; only where it may be
    objective   units of `unit_seconds`, to be minimised
    classes     devices that are alike, each class ascending
    order       groups, heaviest first: the order that breaks symmetry
    hops        what else to hint, given a placement
    terms       most durations that add up to the objective
    """

    problem: Problem
    model: cp_model.CpModel
    at: list[dict[int, cp_model.IntVar]]
    objective: cp_model.IntVar
    unit_seconds: float
    classes: list[list[int]]
    order: list[int]
    hops: list["Hop"] = field(default_factory=list)
    terms: int = 0

    def units(self, seconds: float) -> int:
        """Whole units in a duration, rounded down; `MOST_UNITS` at most."""
        return int(min(np.floor(seconds / self.unit_seconds), MOST_UNITS))

    @property
    def resolution_seconds(self) -> float:
        """What the objective may be short of the truth by rounding."""
        return self.terms * self.unit_seconds

    def forbid(self, placement: GroupPlacement) -> None:
        """Rule out one placement, and with it those that only swap alike devices."""
        canonical = self.canonical(placement)
        free = self.problem.free.tolist()
        self.model.add_bool_or([~self.at[g][int(canonical[g])] for g in free])

    def canonical(self, placement: GroupPlacement) -> GroupPlacement:
        """The one of all that only swap alike devices which the symmetry rule keeps."""
        renamed = np.arange(self.problem.devices)
        first = {d: i for i, d in reversed(list(enumerate(placement[self.order].tolist())))}
        for of_class in self.classes:
            by_use = sorted(of_class, key=lambda d: (first.get(d, len(self.order)), d))
            renamed[by_use] = of_class
        canonical = self.problem.fastest.copy()
        free = self.problem.free
        canonical[free] = renamed[placement[free]]
        return canonical

    def hint(self, placement: GroupPlacement) -> None:
        """Where a search should look first."""
        canonical = self.canonical(placement)
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for group in self.problem.free.tolist():
            for device, literal in self.at[group].items():
                self.model.add_hint(literal, int(canonical[group]) == device)
        for hop in self.hops:
            self.model.add_hint(hop.literal, hop.happens(canonical))


@dataclass(frozen=True, eq=False)
class Hop:
    """A literal that is true if the source is on one of `sources` and a target on one of
    `destinations`."""

    literal: cp_model.IntVar
    source: int
    targets: tuple[int, ...]
    sources: frozenset[int]
    destinations: frozenset[int]

    def happens(self, placement: GroupPlacement) -> bool:
        home = int(placement[self.source]) if self.source >= 0 else -1
        here = self.source < 0 or home in self.sources
        return here and any(int(placement[t]) in self.destinations for t in self.targets)


def new_master(problem: Problem, scale_seconds: float) -> Master:
    """A model with placements, memory and symmetry, and an objective that nothing binds yet.

    scale_seconds   about what a good plan takes: `SCALE_UNITS` units
    """
    model = cp_model.CpModel()
    at: list[dict[int, cp_model.IntVar]] = []
    free = set(problem.free.tolist())
    true = model.new_constant(1)
    for group in range(problem.groups.count):
        if group not in free:
            at.append({int(problem.fastest[group]): true})
            continue
        devices = np.flatnonzero(problem.allowed[group]).tolist()
        at.append({d: model.new_bool_var("") for d in devices})
        model.add_exactly_one(at[-1].values())
    seconds = np.where(problem.allowed, problem.work_seconds, np.inf).min(axis=1)
    order = [g for g in np.argsort(-seconds, kind="stable").tolist() if g in free]
    master = Master(
        problem=problem,
        model=model,
        at=at,
        objective=model.new_int_var(0, HORIZON_UNITS, ""),
        unit_seconds=scale_seconds / SCALE_UNITS if scale_seconds > 0 else 1.0,
        classes=alike_devices(problem),
        order=order,
    )
    _break_symmetry(master)
    _limit_memory(master)
    if problem.contiguous:
        _keep_contiguous(master)
    model.minimize(master.objective)
    return master


def _break_symmetry(master: Master) -> None:
    for of_class in master.classes:
        for before, after in pairwise(of_class):
            used: list[cp_model.IntVar] = []
            for group in master.order:
                literals = master.at[group]
                if after in literals:
                    master.model.add_bool_or([~literals[after], *used])
                if before in literals:
                    used.append(literals[before])


def alike_devices(problem: Problem) -> list[list[int]]:
    """Classes of two or more devices that may be swapped."""
    devices = list(range(problem.devices))
    classes: list[list[int]] = []
    for device in devices:
        for of_class in classes:
            if _swappable(problem, of_class[0], device):
                of_class.append(device)
                break
        else:
            classes.append([device])
    return [of_class for of_class in classes if len(of_class) > 1]


def _swappable(problem: Problem, a: int, b: int) -> bool:
    load, host = problem.load, problem.load.host
    if host in (a, b) or problem.capacities[a] != problem.capacities[b]:
        return False
    one, other = problem.machine.devices[a], problem.machine.devices[b]
    same = one.kind == other.kind  # `latency` tells accelerators from CPUs
    same &= (problem.allowed[:, a] == problem.allowed[:, b]).all()
    seconds = problem.costs.compute_seconds
    same &= (seconds[:, a] == seconds[:, b]).all()
    order = np.arange(problem.devices)
    order[[a, b]] = b, a
    for table in (load.latency_seconds, load.seconds_per_byte, load.linked):
        same &= (table == table[np.ix_(order, order)]).all()
    return bool(same and load.counted[a] == load.counted[b] and _channels_swap(problem, a, b))


def _channels_swap(problem: Problem, a: int, b: int) -> bool:
    """Swapping two devices permutes the channels, and no channel serves both of them: where one
    does, it serves the device of lower index first, which makes them unlike."""
    machine = problem.machine
    names = machine.device_names
    swap = {names[a]: names[b], names[b]: names[a]}
    channel = {(link.source, link.destination): link.channel for link in machine.links}
    renamed: dict[str, str] = {}
    for (source, destination), name in channel.items():
        there = channel.get((swap.get(source, source), swap.get(destination, destination)))
        if there is None or renamed.setdefault(name, there) != there:
            return False
    ends: dict[str, set[str]] = {}
    for (_, destination), name in channel.items():
        ends.setdefault(name, set()).add(destination)
    swapped = [swap.get(name, name) for name in names]
    carried = all(renamed.get(n, there) == there for n, there in zip(names, swapped, strict=True))
    return carried and not any({names[a], names[b]} <= of_channel for of_channel in ends.values())


def _limit_memory(master: Master) -> None:
    problem, model = master.problem, master.model
    stay, end, passing = necessary_bytes(problem)
    for device in range(problem.devices):
        capacity = int(problem.capacities[device])
        here = [(g, at[device]) for g, at in enumerate(master.at) if device in at]
        if sum(int(end[g] + passing[g]) for g, _ in here) <= capacity:
            continue
        unit = max(1, capacity // ROOM_UNITS)
        room = -(-capacity // unit)
        for g, literal in here:
            if stay[g] + passing[g] > capacity or end[g] > capacity:
                model.add(literal == 0)
        model.add(sum(int(end[g]) // unit * literal for g, literal in here) <= room)
        most = model.new_int_var(0, room, "")
        for g, literal in here:
            units = min(int(passing[g]) // unit, room)
            model.add(most >= units).only_enforce_if(literal)
        model.add(sum(int(stay[g]) // unit * literal for g, literal in here) + most <= room)


Int64 = NDArray[np.int64]


def necessary_bytes(problem: Problem) -> tuple[Int64, Int64, Int64]:
    """[groups] bytes that are on a group's device from begin to end; at the end, with the outputs
    of the graph; and besides the first while the neediest op of the group runs."""
    graph, of_op, count = problem.graph, problem.groups.of_op, problem.groups.count
    stay = problem.load.resident_bytes.astype(np.int64)
    own = graph.bases < 0
    end = stay.copy()
    for tensor in np.unique(graph.outputs).tolist():
        if own[tensor] and not graph.is_source[graph.producers[tensor]]:
            end[of_op[graph.producers[tensor]]] += graph.tensor_bytes[tensor]
    passing = np.zeros(count, np.int64)
    np.maximum.at(passing, of_op, _bytes_while_running(graph, own))
    return stay, end, passing


def _bytes_while_running(graph: Graph, own: NDArray[np.bool_]) -> Int64:
    """[ops] what an op reads and makes, without views and what is resident."""
    made = own & ~graph.is_source[graph.producers]
    needed = np.zeros(len(graph), np.int64)
    np.add.at(needed, graph.producers, np.where(made, graph.tensor_bytes, 0))
    passes = made | (own & (graph.residences[graph.producers] == HOST))
    reads = np.stack([graph.readers, graph.input_tensors], axis=1)
    reads = np.unique(reads[passes[graph.input_tensors]], axis=0)
    np.add.at(needed, reads[:, 0], graph.tensor_bytes[reads[:, 1]])
    return needed


def _keep_contiguous(master: Master) -> None:
    """No path of forward ops leaves a device and comes back: an op between two there is there. And
    devices have places in an order that no edge goes against, which says the same and more, but
    propagates less."""
    problem, model = master.problem, master.model
    graph, of_op = problem.graph, problem.groups.of_op
    _order_devices(master)
    edges = graph.forward_edges.tolist()
    ops = np.flatnonzero(graph.phases == Phase.FORWARD).tolist()
    for device in range(problem.devices):
        here = {op: master.at[of_op[op]].get(device) for op in ops}
        if not any(literal is not None for literal in here.values()):
            continue
        below = {op: model.new_bool_var("") for op in ops}  # reached from the device
        above = {op: model.new_bool_var("") for op in ops}  # leads to the device
        for op, literal in here.items():
            if literal is not None:
                model.add_implication(literal, below[op])
                model.add_implication(literal, above[op])
            there = [] if literal is None else [literal]
            model.add_bool_or([~below[op], ~above[op], *there])
        for before, after in edges:
            model.add_implication(below[before], below[after])
            model.add_implication(above[after], above[before])


def _order_devices(master: Master) -> None:
    """Each device a place of its own; a group has that of its device, and edges do not fall."""
    model, last = master.model, master.problem.devices - 1
    places = [model.new_int_var(0, last, "") for _ in range(last + 1)]
    model.add_all_different(places)
    place_of: dict[int, cp_model.IntVar] = {}
    for group in np.unique(master.problem.load.edges).tolist():
        place_of[group] = model.new_int_var(0, last, "")
        for device, literal in master.at[group].items():
            model.add(place_of[group] == places[device]).only_enforce_if(literal)
    for before, after in master.problem.load.edges.tolist():
        model.add(place_of[before] <= place_of[after])


def add_hop(
    master: Master,
    source: int,
    targets: Iterable[int],
    sources: set[int],
    destinations: set[int],
) -> cp_model.IntVar | None:
    """A new literal that must be true if `source` is on one of `sources` (where it is -1, always)
    and a target on one of `destinations`; None where that cannot be."""
    literal: cp_model.IntVar | None = None
    targets = tuple(targets)
    source_at = master.at[source] if source >= 0 else {}
    if source >= 0 and not sources & source_at.keys():
        return None
    not_there = _none_of(source_at, sources) if source >= 0 else []
    for target in targets:
        if not destinations & master.at[target].keys():
            continue
        if literal is None:
            literal = master.model.new_bool_var("")
        elsewhere = _none_of(master.at[target], destinations)
        master.model.add_bool_or([literal, *not_there, *elsewhere])
    if literal is not None:
        known = Hop(literal, source, targets, frozenset(sources), frozenset(destinations))
        master.hops.append(known)
    return literal


def _none_of(at: dict[int, cp_model.IntVar], devices: set[int]) -> list[cp_model.LiteralT]:
    """Literals one of which is true if and only if the group is on none of `devices`."""
    inside = devices & at.keys()
    if len(inside) == 1:
        return [~at[next(iter(inside))]]
    return [literal for d, literal in at.items() if d not in devices]
