"""Exact placement by CP-SAT: a plan, a bound, and a proof if the budget suffices for one.

The evaluator says what a placement costs. CP-SAT solves a relaxation, whose optimum no placement
beats. Logic-based Benders decomposition brings the two together:

    repeat: placement, bound = CP-SAT, with objective < best value so far
            infeasible: the best so far is optimal; if there is none, no placement fits
            evaluate the placement, and rule it out

For `load` the model is `load_master`, whose relaxation is the objective itself but for memory. If a
first round leaves a gap, `share_bound` adds a bound. For `step` it is `step_master`, where ops and
transfers are intervals, and for `latency` it is `latency_master`. If there are few placements
(`can_enumerate`), evaluating every one is the faster proof, and is used if the budget allows it.

Papers: Hooker & Ottosson, "Logic-based Benders decomposition", Mathematical Programming 96 (2003),
https://doi.org/10.1007/s10107-003-0375-9, section 3; Perron & Didier, CP-SAT,
https://developers.google.com/optimization/cp/cp_solver. Differences: cuts are plain no-goods, one
placement (and its copies over alike devices) at a time, since the evaluator's order is no optimum.

A budget in evaluations buys `DETERMINISTIC_SECONDS` of CP-SAT for each evaluation, on one thread,
so that the same budget gives the same plan. A budget of seconds uses `budget.threads` threads.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from dovetail.errors import NoPlanFitsError, TooManyIntervalsError
from dovetail.graph import HOST, Phase
from dovetail.placers.budget import Budget
from dovetail.placers.exhaustive import can_enumerate, every_placement
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.simulator.latency import latency_model
from dovetail.simulator.loads import LoadModel

# ── The master problem: parts that the CP-SAT models of all objectives share ────────────────────
#
# The parts are literals that say where each group is, the symmetry of alike devices, memory, and
# placements that are ruled out.
#
# Symmetry. Devices are alike if swapping them changes neither costs, links, memory nor what is
# allowed. Of placements that differ only by swaps of alike devices the model keeps one: going
# through the groups, the heaviest first, device k of a class is used only after device k - 1.
#
# Memory. A placement is judged by its simulated peak, which no linear rule gives. The model holds
# what every placement needs, whatever the order of its ops: on each device
#
#     sum of resident and output bytes of its groups <= capacity
#     sum of resident bytes of its groups + what one op of them reads and makes <= capacity
#
# A placement that fits by these rules but lacks memory when it is simulated is ruled out singly.

SCALE_UNITS = 2**26
"""A step or load of the expected length has this many units of time. Durations are rounded down to
whole units, so a sum of n of them is short of the truth by less than n units. Larger coefficients
are not safe: with 2**34, CP-SAT 9.15 was seen to cut off the optimum while it simplified."""
MOST_UNITS = 2 * SCALE_UNITS
"""A longer duration counts as this many units: no plan of interest has one."""
HORIZON_UNITS = 2**46
"""Upper limit of every time in a model. It is above the sum of the durations of every model that
there is memory for, so it cuts off no plan, however much slower than expected."""
ROOM_UNITS = 2**26
"""A device's capacity is counted in about this many units of memory: few, because large
coefficients are not safe (see `SCALE_UNITS`)."""


@dataclass(eq=False)
class Master:
    """A CP-SAT model over group placements whose optimum is at most the value of the best plan.

    at          [group][device] literal "this group is there", for devices where it may be
    objective   in units of `unit_seconds`, to be minimised
    classes     devices that are alike, each class ascending
    order       groups with a choice, heaviest first: the order that breaks symmetry
    hops        further literals, whose values a placement implies and a hint includes
    terms       upper limit of the number of durations that add up to the objective
    """

    problem: PlacementProblem
    model: cp_model.CpModel
    at: list[dict[int, cp_model.IntVar]]
    objective: cp_model.IntVar
    unit_seconds: float
    classes: list[list[int]]
    order: list[int]
    hops: list["Hop"] = field(default_factory=list)
    terms: int = 0

    def units(self, seconds: float) -> int:
        """Return the whole units in a duration, rounded down; `MOST_UNITS` at most."""
        return int(min(np.floor(seconds / self.unit_seconds), MOST_UNITS))

    @property
    def resolution_seconds(self) -> float:
        """Seconds by which rounded durations may make the objective short of the truth."""
        return self.terms * self.unit_seconds

    def forbid(self, placement: GroupPlacement) -> None:
        """Rule out one placement, and with it those that differ from it only by swaps of alike
        devices."""
        canonical = self.canonical(placement)
        free = self.problem.free.tolist()
        self.model.add_bool_or([~self.at[g][int(canonical[g])] for g in free])

    def canonical(self, placement: GroupPlacement) -> GroupPlacement:
        """Return the placement that the symmetry rule keeps of those that differ from this one only
        by swaps of alike devices."""
        renamed = np.arange(self.problem.devices)
        # Place in the order at which each device is first used: reversed, so that the first one
        # stays. The devices of a class are then renamed in the order of first use.
        first = {d: i for i, d in reversed(list(enumerate(placement[self.order].tolist())))}
        for of_class in self.classes:
            by_use = sorted(of_class, key=lambda d: (first.get(d, len(self.order)), d))
            renamed[by_use] = of_class
        canonical = self.problem.fastest.copy()
        free = self.problem.free
        canonical[free] = renamed[placement[free]]
        return canonical

    def hint(self, placement: GroupPlacement) -> None:
        """Tell CP-SAT to start its search from this placement."""
        canonical = self.canonical(placement)
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for group in self.problem.free.tolist():
            for device, literal in self.at[group].items():
                self.model.add_hint(literal, int(canonical[group]) == device)
        for hop in self.hops:
            self.model.add_hint(hop.literal, hop.happens(canonical))


@dataclass(frozen=True, eq=False)
class Hop:
    """A literal that must be true if the source group is on one of `sources` and a target group is
    on one of `destinations`. A source of -1 is on the host, which always counts."""

    literal: cp_model.IntVar
    source: int
    targets: tuple[int, ...]
    sources: frozenset[int]
    destinations: frozenset[int]

    def happens(self, placement: GroupPlacement) -> bool:
        """Return True if the placement makes this hop."""
        home = int(placement[self.source]) if self.source >= 0 else -1
        from_source = self.source < 0 or home in self.sources
        return from_source and any(int(placement[t]) in self.destinations for t in self.targets)


def new_master(  # noqa: C901  the rules of all models, one after the other
    problem: PlacementProblem, scale_seconds: float
) -> Master:
    """Return a model with placements, memory and symmetry, whose objective nothing limits yet.

    scale_seconds   about what a good plan takes; it becomes `SCALE_UNITS` units
    """
    model = cp_model.CpModel()
    at: list[dict[int, cp_model.IntVar]] = []
    free = set(problem.free.tolist())
    # One constant serves all groups without a choice.
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
    # A group uses a device only if an earlier group uses the device before it in its class.
    for of_class in master.classes:
        for before, after in pairwise(of_class):
            used: list[cp_model.IntVar] = []
            for group in order:
                if after in at[group]:
                    model.add_bool_or([~at[group][after], *used])
                if before in at[group]:
                    used.append(at[group][before])

    # The two necessary rules on memory, for every device that could be overfilled.
    stay, end, passing = necessary_bytes(problem)
    for device in range(problem.devices):
        capacity = int(problem.capacities[device])
        literals = [(g, of_group[device]) for g, of_group in enumerate(at) if device in of_group]
        if sum(int(end[g] + passing[g]) for g, _ in literals) <= capacity:
            continue
        # Room is rounded up and sizes are rounded down, so that the rules exclude no placement that
        # fits. Groups too large for the device are excluded exactly.
        unit = max(1, capacity // ROOM_UNITS)
        room = -(-capacity // unit)
        for g, literal in literals:
            if stay[g] + passing[g] > capacity or end[g] > capacity:
                model.add(literal == 0)
        model.add(sum(int(end[g]) // unit * literal for g, literal in literals) <= room)
        most = model.new_int_var(0, room, "")
        for g, literal in literals:
            units = min(int(passing[g]) // unit, room)
            model.add(most >= units).only_enforce_if(literal)
        model.add(sum(int(stay[g]) // unit * literal for g, literal in literals) + most <= room)

    if problem.contiguous:
        # Devices have places in an order, a group has the place of its device, and no forward edge
        # goes from a higher place to a lower one.
        last = problem.devices - 1
        places = [model.new_int_var(0, last, "") for _ in range(problem.devices)]
        model.add_all_different(places)
        place_of: dict[int, cp_model.IntVar] = {}
        for group in np.unique(problem.load.edges).tolist():
            place_of[group] = model.new_int_var(0, last, "")
            for device, literal in at[group].items():
                model.add(place_of[group] == places[device]).only_enforce_if(literal)
        for first, second in problem.load.edges.tolist():
            model.add(place_of[first] <= place_of[second])
        # No path of forward ops leaves a device and comes back: an op between two ops of a device
        # is on that device. This follows from the order, but propagates better.
        graph, of_op = problem.graph, problem.groups.of_op
        edges = graph.forward_edges.tolist()
        ops = np.flatnonzero(graph.phases == Phase.FORWARD).tolist()
        for device in range(problem.devices):
            there = {op: at[of_op[op]].get(device) for op in ops}
            if all(literal is None for literal in there.values()):
                continue
            # `below`: a path leads from the device to the op. `above`: a path leads from the op to
            # the device. An op for which both hold must be on the device.
            below = {op: model.new_bool_var("") for op in ops}
            above = {op: model.new_bool_var("") for op in ops}
            for op, on_device in there.items():
                if on_device is not None:
                    model.add_implication(on_device, below[op])
                    model.add_implication(on_device, above[op])
                allowing = [] if on_device is None else [on_device]
                model.add_bool_or([~below[op], ~above[op], *allowing])
            for first, second in edges:
                model.add_implication(below[first], below[second])
                model.add_implication(above[second], above[first])
    model.minimize(master.objective)
    return master


def alike_devices(problem: PlacementProblem) -> list[list[int]]:
    """Return the classes of two or more devices that may be swapped for each other."""
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


def _swappable(problem: PlacementProblem, a: int, b: int) -> bool:
    """Return True if swapping two devices changes neither the cost nor the fit of any placement."""
    load, host = problem.load, problem.load.host
    if host in (a, b) or problem.capacities[a] != problem.capacities[b]:
        return False
    # A thread that issues to several GPUs serves their channels by index, so that swapping GPUs
    # changes when messages leave. The other objectives do not count the time of messages.
    messages = any(link.send_seconds or link.receive_seconds for link in problem.machine.links)
    if messages and problem.objective == "step":
        return False
    first_device, second_device = problem.machine.devices[a], problem.machine.devices[b]
    # The objective `latency` tells accelerators from CPUs by their kind.
    same = first_device.kind == second_device.kind
    same &= (problem.allowed[:, a] == problem.allowed[:, b]).all()
    seconds = problem.costs.compute_seconds
    same &= (seconds[:, a] == seconds[:, b]).all()
    order = np.arange(problem.devices)
    order[[a, b]] = b, a
    for table in (load.latency_seconds, load.seconds_per_byte, load.linked):
        same &= (table == table[np.ix_(order, order)]).all()
    if not (same and load.counted[a] == load.counted[b]):
        return False

    # The swap must permute the channels.
    machine = problem.machine
    names = machine.device_names
    swap = {names[a]: names[b], names[b]: names[a]}
    channel = {(link.source, link.destination): link.channel for link in machine.links}
    # The channel that each one becomes; links that shared a channel must share one after the swap.
    renamed: dict[str, str] = {}
    for (source, destination), name in channel.items():
        image = channel.get((swap.get(source, source), swap.get(destination, destination)))
        if image is None or renamed.setdefault(name, image) != image:
            return False
    ends: dict[str, set[str]] = {}
    for (_, destination), name in channel.items():
        ends.setdefault(name, set()).add(destination)
    # A channel that bears a device's name is that device itself and must be swapped along with it.
    swapped = [swap.get(name, name) for name in names]
    carried = all(renamed.get(n, image) == image for n, image in zip(names, swapped, strict=True))
    # A channel that serves both serves the device of lower index first, which makes them unlike.
    return carried and not any({names[a], names[b]} <= of_channel for of_channel in ends.values())


Int64 = NDArray[np.int64]


def necessary_bytes(problem: PlacementProblem) -> tuple[Int64, Int64, Int64]:
    """Return three arrays [groups] of bytes that a group needs on its device, wherever that is:

    1. from the beginning to the end of the step;
    2. at its end: the first, and outputs of the graph that the group makes;
    3. besides the first, while that op of the group runs that needs most.
    """
    graph, of_op, count = problem.graph, problem.groups.of_op, problem.groups.count
    stay = problem.load.resident_bytes.astype(np.int64)
    is_base = graph.bases < 0
    end = stay.copy()
    for tensor in np.unique(graph.outputs).tolist():
        if is_base[tensor] and not graph.is_source[graph.producers[tensor]]:
            end[of_op[graph.producers[tensor]]] += graph.tensor_bytes[tensor]
    # [ops] the bytes that each op reads and makes, less views, parameters and state.
    is_made = is_base & ~graph.is_source[graph.producers]
    needed = np.zeros(len(graph), np.int64)
    np.add.at(needed, graph.producers, np.where(is_made, graph.tensor_bytes, 0))
    # Graph inputs lie on the host and are resident with no group, so a read of one counts here.
    passes = is_made | (is_base & (graph.residences[graph.producers] == HOST))
    # An op that reads a tensor twice holds it once.
    reads = np.stack([graph.readers, graph.input_tensors], axis=1)
    reads = np.unique(reads[passes[graph.input_tensors]], axis=0)
    np.add.at(needed, reads[:, 0], graph.tensor_bytes[reads[:, 1]])
    passing = np.zeros(count, np.int64)
    np.maximum.at(passing, of_op, needed)
    return stay, end, passing


Spot = tuple[int, int]  # (from device, to device), or (unit, device)


def possible_hops(
    load: LoadModel, homes: set[int], ends: set[int]
) -> Iterator[tuple[Spot, set[int], set[int]]]:
    """Yield each hop that a net may make: its link, and (devices of the source, devices of targets)
    for which it happens. Hops through the host come last, and the host is no source of theirs.

    homes, ends   devices where the source may be, and targets
    """
    host = load.host
    for a in sorted(homes):
        direct = {d for d in ends - {a, host} if load.linked[a, d]}
        for d in sorted(direct):
            yield (a, d), {a}, {d}
        # The net makes this hop once, however many devices behind the host read it, and whether it
        # stays on the host or goes on.
        behind = ends - direct - {a}
        if a != host and behind:
            yield (a, host), {a}, behind
    for d in sorted(ends - {host}):
        relayed = {a for a in homes - {d} if not load.linked[a, d]}
        if relayed:
            yield (host, d), relayed, {d}


def add_hop(
    master: Master, source: int, targets: Sequence[int], sources: set[int], destinations: set[int]
) -> cp_model.IntVar | None:
    """Return a new literal that must be true if `source` is on one of `sources` and a target is on
    one of `destinations`; None if that cannot be. A source of -1 is always on one of `sources`.

    No clause forces the literal to be false: a hop without need only adds seconds.
    """

    def none_of(at: dict[int, cp_model.IntVar], devices: set[int]) -> list[cp_model.LiteralT]:
        """Literals of which one is true if and only if the group is on none of the devices."""
        # Exactly one literal of a group is true. So a single device needs only its negation.
        inside = devices & at.keys()
        if len(inside) == 1:
            return [~at[next(iter(inside))]]
        return [literal for d, literal in at.items() if d not in devices]

    literal: cp_model.IntVar | None = None
    if source >= 0 and not sources & master.at[source].keys():
        return None
    not_there = none_of(master.at[source], sources) if source >= 0 else []
    for target in targets:
        if not destinations & master.at[target].keys():
            continue
        if literal is None:
            literal = master.model.new_bool_var("")
        elsewhere = none_of(master.at[target], destinations)
        master.model.add_bool_or([literal, *not_there, *elsewhere])
    if literal is not None:
        hop = Hop(literal, source, tuple(targets), frozenset(sources), frozenset(destinations))
        master.hops.append(hop)
    return literal


# ── `latency`: the time of one sample as a CP-SAT model ─────────────────────────────────────────
#
#     min T   with, for every accelerator d and each of its calls (forward ops, backward ops) S,
#     start(S) >= end(u)                         for every u elsewhere that an op of S reads
#     end(S)   >= start(S) + sum of w(v, d)      over its ops
#                          + sum of c(u)         over the outside u that it reads, once a device
#                          + sum of c(v)         over its v that are read elsewhere, once
#     end(v)   >= end(S) on an accelerator,      end(u) + w(v) for all u that v reads on a CPU
#     T        >= end(v)
#
# Placements, memory and the order of alike accelerators are those of the master problem. The times
# rule out calls that wait for each other, unless their durations are 0.
#
# Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
# NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 4. Differences: a second call for backward
# ops, as in `simulator.latency`; integers, rounded down, so that the bound holds.

Call = tuple[int, int]  # (device, 0: forward or 1: backward)


def latency_master(  # noqa: C901  the model above, line by line
    problem: PlacementProblem, scale_seconds: float
) -> Master:
    """Return the model of the objective `latency`; it has O(reads x devices) literals."""
    master = new_master(problem, scale_seconds)
    model, sums = master.model, latency_model(problem.graph, problem.machine, problem.costs)
    of_op, everywhere = problem.groups.of_op, set(range(problem.devices))
    ops = [op for op in range(sums.ops) if not sums.is_source[op]]
    at = {op: master.at[int(of_op[op])] for op in ops}
    times: list[cp_model.IntVar] = []
    # All durations one after the other: no latency is longer.
    sum_units = 0

    def new_time() -> cp_model.IntVar:
        times.append(model.new_int_var(0, HORIZON_UNITS, ""))
        return times[-1]

    ends: dict[int, cp_model.IntVar] = {}
    for op in ops:
        ends[op] = new_time()
        model.add(master.objective >= ends[op])
    # The start and the end of each call, and the terms whose sum is its duration.
    starts: dict[Call, cp_model.IntVar] = {}
    call_ends: dict[Call, cp_model.IntVar] = {}
    carries: dict[Call, list[cp_model.LinearExprT]] = {}

    def carry(call: Call, units: int, literal: cp_model.IntVar) -> None:
        """Add `units` to the duration of a call if the literal is true."""
        nonlocal sum_units
        carries[call].append(units * literal)
        sum_units += units

    for device in np.flatnonzero(sums.accelerator).tolist():
        for late in (0, 1):
            starts[device, late], call_ends[device, late] = new_time(), new_time()
            carries[device, late] = []
        model.add(starts[device, 1] >= call_ends[device, 0])
    for op in ops:
        # What the op costs on each device, and when it ends there.
        for device, literal in at[op].items():
            units = master.units(sums.work_seconds[op, device])
            if sums.accelerator[device]:
                call = device, int(sums.late[op])
                carry(call, units, literal)
                model.add(ends[op] >= call_ends[call]).only_enforce_if(literal)
            else:
                model.add(ends[op] >= units).only_enforce_if(literal)
                sum_units += units
                master.terms += 1
        # The ops that read its output wait for it.
        users = sums.users[sums.user_offsets[op] : sums.user_offsets[op + 1]].tolist()
        for user in users:
            model.add(ends[user] >= ends[op])
            for device, literal in at[user].items():
                if not sums.accelerator[device]:
                    units = master.units(sums.work_seconds[user, device])
                    model.add(ends[user] >= ends[op] + units).only_enforce_if(literal)
                    continue
                # A call waits for what its ops read from elsewhere, so it starts after all of that.
                waits = model.add(starts[device, int(sums.late[user])] >= ends[op])
                here = at[op].get(device)
                waits.only_enforce_if([literal] if here is None else [literal, ~here])
        # The output is moved to accelerators and from one: to users that run forward (0), and
        # backward (1).
        targets = [
            sorted({int(of_op[user]) for user in users if sums.late[user] == late})
            for late in (0, 1)
        ]
        group = int(of_op[op])
        for device in everywhere:
            if not sums.accelerator[device]:
                continue
            elsewhere = everywhere - {device}
            into = [add_hop(master, group, targets[late], elsewhere, {device}) for late in (0, 1)]
            units = master.units(sums.in_seconds[op, device])
            if into[0] is not None:
                carry((device, 0), units, into[0])
            # The backward call does not move in what the forward call has moved in already.
            if into[1] is not None:
                fetched = model.new_bool_var("")
                forward = [] if into[0] is None else [into[0]]
                model.add_bool_or([fetched, ~into[1], *forward])
                carry((device, 1), units, fetched)
            if device in at[op]:
                out = add_hop(master, group, targets[0] + targets[1], {device}, elsewhere)
                if out is not None:
                    units = master.units(sums.out_seconds[op, device])
                    carry((device, int(sums.late[op])), units, out)
    for call, terms in carries.items():
        model.add(call_ends[call] >= starts[call] + cp_model.LinearExpr.sum(terms))
        master.terms += len(terms)
    # Without this limit, propagation over calls that wait for each other would creep towards the
    # horizon, one duration at a time.
    for moment in [master.objective, *times]:
        model.add(moment <= sum_units)
    return master


# ── `load`: the largest load of a device as a CP-SAT model ──────────────────────────────────────
#
#     min L   with, for every device d that counts,
#     L >= sum_g work(g, d) x(g, d) + sum of its hops
#     hop(net, from a to d) >= x(source, a) + x(target, d) - 1                 linked devices
#     hop(net, from a to host) >= x(source, a) + x(target, d) - 1          for every d without a
#     hop(net, from host to d) >= x(source, a) + x(target, d) - 1          link from a
#
# where x(g, d) says that group g is on device d. All devices from which a net reaches d through the
# host share one literal for the last hop. So a machine whose accelerators meet only at the host
# needs two literals per net and device: the model of section 3 of the paper below.
#
# Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
# NeurIPS 2020, https://arxiv.org/abs/2006.16423. Differences: any links; alike devices ordered;
# integers, rounded down, so that the bound holds.


def load_master(problem: PlacementProblem, scale_seconds: float) -> Master:
    """Return the model of the objective `load`; it has O(nets x devices^2) literals at most."""
    master = new_master(problem, scale_seconds)
    load = problem.load
    terms: defaultdict[int, list[cp_model.LinearExprT]] = defaultdict(list)
    for group, at in enumerate(master.at):
        for device, literal in at.items():
            terms[device].append(master.units(load.work_seconds[group, device]) * literal)
    # Every hop that a net may make counts on those of its ends whose load counts, if it takes at
    # least one unit.
    for net in range(len(load.net_sources)):
        source = int(load.net_sources[net])
        targets = load.net_targets[load.net_offsets[net] : load.net_offsets[net + 1]].tolist()
        homes = {load.host} if source < 0 else set(master.at[source])
        readers = {d for target in targets for d in master.at[target]}
        for link, sources, destinations in possible_hops(load, homes, readers):
            units = master.units(
                load.net_sends[net] * load.latency_seconds[link]
                + load.net_bytes[net] * load.seconds_per_byte[link]
            )
            counted = [device for device in link if load.counted[device]]
            if not units or not counted:
                continue
            hop = add_hop(master, source, targets, sources, destinations)
            if hop is not None:
                for device in counted:
                    terms[device].append(units * hop)
    for device in range(load.devices):
        if load.counted[device] and terms[device]:
            master.model.add(sum(terms[device]) <= master.objective)
            master.terms = max(master.terms, len(terms[device]))
    return master


# ── A lower bound on `load` from one device of each kind ────────────────────────────────────────
#
# Let every group have a weight p(g) >= 0, and let the weights sum to 1. In a plan of largest load L
# the k(c) devices of kind c, which are alike, hold disjoint sets of groups. Take of each kind the
# set that weighs most. All sets of the plan together weigh 1. So no plan has largest load L if
#
#     share(p, L) = max sum_c k(c) p(S(c))    with disjoint sets S(c), load(S(c)) <= L,
#                                             bytes(S(c)) <= capacity(c)
#
# is less than 1. This programme has one device where the whole problem has k(c). So nothing in it
# is symmetric, and a mixed-integer solver proves much in it. `load` counts a net that enters or
# leaves the set at its cheapest hop. At first p is in proportion to seconds, and the bound is the
# least L that makes share(p, L) >= 1. Then p is improved for an L half way to the best plan: the
# sets found so far give the linear programme
#
#     min sum_c k(c) s(c)    with p(S) <= s(c) for each set S of kind c found so far, sum p = 1
#
# whose p is mixed half and half with the best p so far. If its optimum is 1 or more, no p can
# refute L.
#
# This is the dual of the formulation by sets of groups, solved by cutting planes: Vanderbeck, "On
# Dantzig-Wolfe decomposition in integer programming and ways to perform branching", Operations
# Research 48 (2000), https://doi.org/10.1287/opre.48.1.111.12453, section 2, with p as multipliers.
# Differences: no branching; stabilised by mixing, within a box about the best p.
# HiGHS solves in floating point to a feasibility of 1e-6; bounds are lowered by `MARGIN`.

MARGIN = 2e-6
"""Bounds are lowered by this share, which is twice HiGHS's feasibility tolerance of 1e-6."""
NODE_EVALUATIONS = 10.0
"""Evaluations that a budget in evaluations is charged for one node of a search tree."""
CLOSE_ENOUGH = 1e-3
"""Relative gap between bound and value at which weights are no longer improved."""
BOX = 0.8
"""How far a weight may move at once: by this share of itself and, upwards, of an equal weight. The
second part lets a weight of 0 grow."""
RELATIVE_GAP = 1e-3
"""Relative gap at which the solver stops. The bound stays valid and is weaker by up to this gap."""

Float64 = NDArray[np.float64]


def share_bound(problem: PlacementProblem, budget: Budget) -> None:
    """Search for lower bounds on the largest load, and note each in `budget` when it is proven.

    A budget in evaluations pays `NODE_EVALUATIONS` a node of the search trees.
    """
    shares = _ShareModel(problem)
    if not shares.kinds or shares.sum_seconds <= 0:
        return
    weights = shares.seconds / shares.sum_seconds
    _prove(budget, shares.least_load(weights, budget))
    bound, high = budget.ledger.bound, budget.ledger.value
    low = 0.0 if bound is None else bound.seconds
    pool: list[tuple[float, list[Float64]]] = []
    # Bisection between the best bound and the best value. `target` is the load to refute; `best` is
    # the least share of it so far, by `best_weights`; `pool` has the sets found, with the largest
    # load that each was allowed.
    target, best = (low + high) / 2, np.inf
    best_weights = weights
    while np.isfinite(high) and high - low > CLOSE_ENOUGH * high and not budget.exhausted:
        share, sets = shares.most_share(weights, target, budget)
        if share < best:
            best, best_weights = share, weights
        pool += [] if sets is None else [(target, sets)]
        # These weights refute the target: it is a bound, and the next target is higher.
        if share < 1 - MARGIN:
            _prove(budget, target)
            low, target, best = target, (target + high) / 2, np.inf
        # Only sets that keep to the target count against it.
        within = [of_pool for reached, of_pool in pool if reached <= target]
        if sets is None or not within:
            return
        least, weights = shares.better_weights(within, best_weights)
        # No weights can refute the target: the next one is lower.
        if least >= 1:
            high, target, best = target, (low + target) / 2, np.inf


def _prove(budget: Budget, seconds: float) -> None:
    """Note a lower bound, less `MARGIN`, if it says something."""
    # No true bound is above the value of a plan.
    seconds = min(seconds * (1 - MARGIN), budget.ledger.value)
    if seconds > 0:
        budget.ledger.prove(seconds, "share of one device (MILP)")


class _ShareModel:
    """The mixed-integer programme but for the weights, which enter when it is solved.

    kinds      kinds of devices whose load counts; empty where the bound does not apply, because
               groups may also be on a device whose load does not count, which could take any share
               of them
    seconds    [groups] on the device that runs each fastest; their sum is the unit of load
    first      first column of each kind; column 0 is L. Of one device of a kind there is a column
               for each group in its set, each net that enters it and each net that leaves it
    """

    def __init__(self, problem: PlacementProblem) -> None:
        counted, load = problem.load.counted.astype(bool), problem.load
        alike: dict[tuple[bytes, ...], _DeviceKind] = {}
        if not problem.allowed[:, ~counted].any():
            for device in np.flatnonzero(counted & problem.allowed.any(axis=0)).tolist():
                enters, leaves = _crossings(problem, device)
                parts = (load.work_seconds[:, device], enters, leaves, load.capacities[device])
                key = tuple(np.asarray(part).tobytes() for part in parts)
                alike.setdefault(key, _DeviceKind(device, enters, leaves)).count += 1
        self.kinds = list(alike.values())
        seconds = np.where(problem.allowed, problem.load.work_seconds, np.inf).min(axis=1)
        self.seconds, self.sum_seconds = seconds, float(seconds.sum())
        self.groups = problem.groups.count
        self.first: list[int] = []
        # The rows lower <= A v <= upper, with A as (row, column, value).
        entries: list[tuple[int, int, float]] = []
        limits: list[tuple[float, float]] = []

        def add(terms: list[tuple[int, float]], lower: float, upper: float) -> None:
            entries.extend((len(limits), column, value) for column, value in terms)
            limits.append((lower, upper))

        columns = 1
        width = self.groups + 2 * len(load.net_sources)
        # [columns] 1 if the variable is an integer, and its upper bound.
        self._whole = np.zeros(1 + len(self.kinds) * width, np.int8)
        self._most = np.ones(len(self._whole))
        # Each kind's set has rows for its nets, its load and its memory. Loads are in units of
        # `sum_seconds`.
        for kind in self.kinds if self.sum_seconds > 0 else []:
            first, device = columns, kind.device
            into = first + self.groups
            out = into + len(kind.enters)
            self.first.append(first)
            columns += self.groups + 2 * len(kind.enters)
            # Nets need no integers: with whole groups the least value of such a variable is 0 or 1.
            self._whole[first:into] = 1
            self._most[first:into] = problem.allowed[:, device]
            work = np.where(problem.allowed[:, device], load.work_seconds[:, device], 0.0)
            terms = [(0, -1.0)]
            terms += [
                (first + g, float(work[g] / self.sum_seconds))
                for g in np.flatnonzero(work).tolist()
            ]
            for net in range(len(kind.enters)):
                source = int(load.net_sources[net])
                # enters >= x(target) - x(source)   and   leaves >= x(source) - x(target)
                # where x of a net from the host is 0: it never leaves.
                from_source = [(first + source, 1.0)] if source >= 0 else []
                targets = load.net_targets[load.net_offsets[net] : load.net_offsets[net + 1]]
                for target in targets.tolist():
                    row = [(first + target, -1.0), *from_source]
                    if kind.enters[net] > 0:
                        add([(into + net, 1.0), *row], 0.0, np.inf)
                    if kind.leaves[net] > 0:
                        negated = [(column, -value) for column, value in row]
                        add([(out + net, 1.0), *negated], 0.0, np.inf)
                if kind.enters[net] > 0:
                    terms.append((into + net, float(kind.enters[net] / self.sum_seconds)))
                if kind.leaves[net] > 0:
                    terms.append((out + net, float(kind.leaves[net] / self.sum_seconds)))
            add(terms, -np.inf, 0.0)
            stay = necessary_bytes(problem)[0] / max(1.0, float(load.capacities[device]))
            add([(first + g, float(stay[g])) for g in np.flatnonzero(stay).tolist()], 0.0, 1.0)
        # A group is in the set of one kind at most.
        for group in range(self.groups):
            add([(column + group, 1.0) for column in self.first], 0.0, 1.0)
        self._columns = columns
        if entries:
            rows, places, values = zip(*entries, strict=True)
            matrix = coo_array((values, (rows, places)), shape=(len(limits), columns))
            self._rows = LinearConstraint(matrix, *zip(*limits, strict=True))

    def least_load(self, weights: Float64, budget: Budget) -> float:
        """Return a lower bound in seconds: the least L at which these weights give a share of 1."""
        objective = np.zeros(self._columns)
        objective[0] = 1.0
        bound, _ = self._solve(objective, (-self._share(weights), np.inf), budget)
        return bound * self.sum_seconds

    def most_share(
        self, weights: Float64, load_seconds: float, budget: Budget
    ) -> tuple[float, list[Float64] | None]:
        """Return an upper bound on share(p, L), and for each kind the set [groups] of the best
        solution that was found, as 0 and 1; None if none was found."""
        limit = load_seconds / self.sum_seconds
        bound, columns = self._solve(self._share(weights), (None, limit), budget)
        if columns is None:
            return -bound, None
        return -bound, [np.rint(columns[i : i + self.groups]) for i in self.first]

    def better_weights(self, pool: list[list[Float64]], centre: Float64) -> tuple[float, Float64]:
        """Return the least share that any weights give the sets of a pool, and the next weights:
        half way between `centre` and the best weights in a box about it.

        pool   of each solution, the set of each kind
        """
        count = len(self.kinds)
        objective = np.concatenate([np.zeros(self.groups), [kind.count for kind in self.kinds]])
        rows = np.array([
            np.concatenate([of_kind, -np.eye(count)[c]])
            for sets in pool
            for c, of_kind in enumerate(sets)
        ])  # fmt: skip
        sum_row = np.concatenate([np.ones(self.groups), np.zeros(count)])[None]
        free = [(0.0, None)] * (self.groups + count)
        width = BOX * centre
        box = [*zip(centre - width, centre + width + BOX / self.groups, strict=True)]
        # Without the box the optimum tells whether any weights can refute the load. The box keeps
        # the next weights near those that have been best, which makes the cutting planes stable.
        solutions = [
            linprog(
                objective, A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=sum_row, b_eq=[1], bounds=b
            )
            for b in (free, box + free[:count])
        ]
        least, moved = solutions[0].fun, solutions[1].x
        assert least is not None and moved is not None, "bounded, and the centre is feasible"
        return float(least), (centre + moved[: self.groups]) / 2

    def _share(self, weights: Float64) -> Float64:
        """Return [columns] minus the share as an objective to be minimised: k(c) p(g) per group."""
        columns = np.zeros(self._columns)
        for first, kind in zip(self.first, self.kinds, strict=True):
            columns[first : first + self.groups] = -kind.count * weights
        return columns

    def _solve(
        self, objective: Float64, limits: tuple[Float64 | None, float], budget: Budget
    ) -> tuple[float, Float64 | None]:
        """Return a lower bound on the objective, -inf if there is none, and the best columns.

        limits   (share row or None, largest load). With a row the share must be at least 1
        """
        share, constraints = limits[0], [self._rows]
        if share is not None:
            constraints.append(LinearConstraint(share[None], 1.0, np.inf))
        self._most[0] = limits[1]
        nodes = int(min(budget.left / NODE_EVALUATIONS, 10**9)) if not budget.timed else 10**9
        solution = milp(
            objective,
            integrality=self._whole,
            bounds=Bounds(np.zeros(self._columns), self._most),
            constraints=constraints,
            options={
                # `most_share` (no row) takes half of what is left, so that more calls can follow.
                "time_limit": float(budget.left_seconds) * (0.5 if share is None else 1.0),
                "node_limit": max(nodes, 1),
                "mip_rel_gap": RELATIVE_GAP,
            },
        )
        if not budget.timed:
            budget.charge(NODE_EVALUATIONS * (1 + int(solution.mip_node_count or 0)))
        # Without a dual bound, the value of a proven optimum (status 0) is the bound.
        bound = solution.mip_dual_bound
        if bound is None and solution.status == 0:
            bound = solution.fun
        return float(bound) if bound is not None and np.isfinite(bound) else -np.inf, solution.x


@dataclass
class _DeviceKind:
    """Devices that the bound does not tell apart.

    device           the first of them
    enters, leaves   [nets] least seconds of a net that is made elsewhere and read here, and of one
                     that is made here and read elsewhere
    """

    device: int
    enters: Float64
    leaves: Float64
    count: int = 0


def _crossings(problem: PlacementProblem, device: int) -> tuple[Float64, Float64]:
    """Return two arrays [nets]: the least seconds that `device` pays for a net that enters it, and
    for one that leaves it."""
    load = problem.load
    hops = (
        load.net_sends[:, None, None] * load.latency_seconds
        + load.net_bytes[:, None, None] * load.seconds_per_byte
    )
    # Instances give links that cost nothing a huge bandwidth, not an infinite one.
    hops[hops < 1e-18] = 0.0
    elsewhere = [d for d in range(load.devices) if d != device]
    enters, leaves = np.zeros(len(hops)), np.zeros(len(hops))
    for net in range(len(hops)):
        source = int(load.net_sources[net])
        homes = [load.host] if source < 0 else elsewhere
        into = [a if load.linked[a, device] else load.host for a in homes]
        enters[net] = min((float(hops[net, a, device]) for a in into), default=0.0)
        away = [d if load.linked[device, d] else load.host for d in elsewhere]
        if source >= 0:
            leaves[net] = min((float(hops[net, device, d]) for d in away), default=0.0)
    return enters, leaves


# ── `step`: the seconds of a step as a CP-SAT model, a job shop with a choice of machines ───────
#
#     min T   with, where x(g, d) says that group g is on device d,
#     one interval (o, d) for each op, present if x(group of o, d)
#     one interval (t, a, d) for each send of tensor t over the link from a to d, present if its
#         producer is on a and a reader is on d, or, if d is the host, is reached through it
#     intervals of a device do not overlap, nor those of a channel; a channel that is its source
#         device's own shares the device's
#     an op starts after its inputs were made and, if that was elsewhere, have arrived
#     T >= every end
#
# The simulator's devices take ready ops by a fixed priority, and its channels serve by time ready.
# This model chooses every order freely, so its optimum is at most what any placement takes.
#
# Source: optional intervals and `NoOverlap` of the OR-tools manual, "Scheduling",
# https://developers.google.com/optimization/scheduling/job_shop; the rules are those of section 3
# of docs/design.md. Differences: memory is that of the master problem, not a peak over time.


@dataclass(frozen=True)
class _SentUnit:
    """What is sent: a tensor, or the end of an op for which others wait by control edges.

    index     the tensor, or number of tensors + op
    producer  the op that makes it
    group     where it is made or lives; -1: on the host
    readers   ops that read it or wait for it
    targets   other groups with such ops, ascending
    """

    index: int
    producer: int
    group: int
    size_bytes: float
    readers: tuple[int, ...]
    targets: tuple[int, ...]


def intervals_needed(problem: PlacementProblem) -> int:
    """Return an upper limit of the number of intervals in the model."""
    graph, devices = problem.graph, problem.devices
    # Only units with targets go between groups.
    sends = sum(bool(unit.targets) for unit in _units(problem))
    return int((~graph.is_source).sum()) * devices + sends * devices * devices


def step_master(  # noqa: C901  the model above, line by line
    problem: PlacementProblem, scale_seconds: float
) -> Master:
    """Return the model of the objective `step`; see `intervals_needed` for its size."""
    master = new_master(problem, scale_seconds)
    model, graph, of_op = master.model, problem.graph, problem.groups.of_op
    load, machine = problem.load, problem.machine
    host, names = load.host, machine.device_names
    # [ops] The end of each op, 0 for sources; the start of each that runs. Intervals by what does
    # one of them at a time: a device's index, or a channel's name.
    ends: list[cp_model.LinearExprT] = []
    starts: dict[int, cp_model.IntVar] = {}
    lanes: defaultdict[int | str, list[cp_model.IntervalVar]] = defaultdict(list)
    # All durations one after the other: the best schedule is not longer.
    sum_units = 0
    for op in range(len(graph)):
        if graph.is_source[op]:
            ends.append(0)
            continue
        seconds, at = problem.costs.compute_seconds[op], master.at[of_op[op]]
        start = model.new_int_var(0, HORIZON_UNITS, "")
        duration = sum(master.units(seconds[d]) * literal for d, literal in at.items())
        starts[op] = start
        sum_units += max(master.units(seconds[d]) for d in at)
        ends.append(start + duration)
        # An optional interval on each device where the op may be.
        for device, literal in at.items():
            units = master.units(seconds[device])
            interval = model.new_optional_fixed_size_interval_var(start, units, literal, "")
            lanes[device].append(interval)
        model.add(start + duration <= master.objective)

    # (unit, device) -> when a unit is on a device that it was sent to. Literals of sends: units
    # with the same source, targets and link share one. Starts and ends of sends, which no
    # constraint limits if the send does not happen.
    arrivals: dict[Spot, cp_model.IntVar] = {}
    hops: dict[tuple[object, ...], cp_model.IntVar | None] = {}
    loose: list[cp_model.IntVar] = []
    for unit in _units(problem):
        # Every send that the unit may make is an optional interval. Sends to one device, of which a
        # placement makes one at most, share the variable of their end.
        homes = set(master.at[unit.group]) if unit.group >= 0 else {host}
        readers = {d for target in unit.targets for d in master.at[target]}
        for link, sources, destinations in possible_hops(load, homes, readers):
            ready = ends[unit.producer]
            if link[0] == host and host not in sources:
                # The second of two hops is ready when the first has arrived on the host.
                if (unit.index, host) not in arrivals:
                    continue
                ready = arrivals[unit.index, host]
            key = (unit.group, unit.targets, link, frozenset(sources), frozenset(destinations))
            if key not in hops:
                hops[key] = add_hop(master, unit.group, unit.targets, sources, destinations)
            sent = hops[key]
            if sent is None:
                continue
            wire = machine.links[machine.link_index[link]]
            units = master.units(
                wire.latency_seconds + unit.size_bytes / wire.bandwidth_bytes_per_second
            )
            sum_units += units
            spot = (unit.index, link[1])
            if spot not in arrivals:
                arrivals[spot] = model.new_int_var(0, HORIZON_UNITS, "")
            end = arrivals[spot]
            start = model.new_int_var(0, HORIZON_UNITS, "")
            interval = model.new_optional_interval_var(start, units, end, sent, "")
            model.add(start >= ready).only_enforce_if(sent)
            loose += [start, end]
            # A channel with a device's name is that device: it cannot run an op while it sends.
            lane = names.index(wire.channel) if wire.channel in names else wire.channel
            lanes[lane].append(interval)
        # A reader starts only when the unit has been made and, if that was elsewhere, has arrived.
        for op in sorted(set(unit.readers)):
            start, group = starts[op], int(of_op[op])
            if not graph.is_source[unit.producer]:
                model.add(start >= ends[unit.producer])
            if group == unit.group:
                continue
            for device, literal in master.at[group].items():
                arrival = arrivals.get((unit.index, device))
                # An input that is read on the host is there from the start.
                if arrival is None or (unit.group < 0 and device == host):
                    continue
                made_here = master.at[unit.group].get(device) if unit.group >= 0 else None
                elsewhere = [] if made_here is None else [~made_here]
                model.add(start >= arrival).only_enforce_if([literal, *elsewhere])
    for intervals in lanes.values():
        model.add_no_overlap(intervals)
    # No device works longer than the step takes. The intervals imply it already, but not as a
    # linear constraint.
    for device in range(problem.devices):
        group_units: defaultdict[int, int] = defaultdict(int)
        for op in np.flatnonzero(~graph.is_source).tolist():
            group = int(of_op[op])
            if device in master.at[group]:
                group_units[group] += master.units(problem.costs.compute_seconds[op, device])
        terms = [units * master.at[group][device] for group, units in group_units.items()]
        if terms:
            model.add(sum(terms) <= master.objective)
    # Towards a horizon that is far off propagation would creep, one duration at a time.
    for moment in [master.objective, *loose]:
        model.add(moment <= sum_units)
    master.terms = len(starts) + len(arrivals)
    return master


def _units(problem: PlacementProblem) -> list[_SentUnit]:
    """Return all that ops wait for: tensors, then the ends of ops with control edges."""
    graph, of_op = problem.graph, problem.groups.of_op
    units: list[_SentUnit] = []

    def add(index: int, producer: int, group: int, size_bytes: float, readers: list[int]) -> None:
        targets = tuple(sorted({int(of_op[op]) for op in readers} - {group}))
        units.append(_SentUnit(index, producer, group, size_bytes, tuple(readers), targets))

    for tensor in range(graph.tensors):
        readers = graph.consumers[
            graph.consumer_offsets[tensor] : graph.consumer_offsets[tensor + 1]
        ]
        producer = int(graph.producers[tensor])
        group = int(of_op[producer])
        if graph.is_source[producer]:
            home = int(graph.residences[producer])
            # What is resident on every device that reads it is never sent.
            if home < 0 and home != HOST:
                continue
            group = -1 if home == HOST else int(of_op[home])
        add(tensor, producer, group, float(problem.sent_bytes[tensor]), readers.tolist())
    after: defaultdict[int, list[int]] = defaultdict(list)
    for before, op in graph.control.tolist():
        after[before].append(op)
    for before, ops in sorted(after.items()):
        add(graph.tensors + before, before, int(of_op[before]), 0.0, ops)
    return units


# ── The search: rounds of CP-SAT and evaluations ────────────────────────────────────────────────

MOST_INTERVALS = 40_000
"""Most intervals of a `step` model. With more, CP-SAT spends minutes before its first bound."""
MOST_HOPS = 60_000
"""Most nets x devices of a `load` model. Building such a model takes up to about 20 s, and no
budget cuts that short."""
DETERMINISTIC_SECONDS = 1e-3
"""One evaluation of a budget buys this many of CP-SAT's deterministic seconds, which count its work
and do not depend on the clock."""
FIRST_EVALUATIONS = 2000.0
"""Evaluations of CP-SAT on `load` before `share_bound` runs. Easy problems need no more."""
SHARE_OF_SHARE = 0.6
"""Share of what is left of the budget that `share_bound` may spend."""
NEVER = 2**31
"""A number of rounds that no search reaches: as `enumerate_after` it switches enumeration off."""
ROUNDING = 1e-9
"""Relative difference between sums that are taken in another order; limits leave room for it."""
POLL_SECONDS = 0.05
"""Seconds between two looks of the main thread at whether a Ctrl-C has arrived."""
PATIENCE_POLLS = 40
"""After a Ctrl-C the main thread waits this many polls for the solver to stop."""


def exact(problem: PlacementProblem, budget: Budget, *, enumerate_after: int = 0) -> GroupPlacement:
    """Return the best placement, proven if the budget allows it; otherwise the best so far.

    enumerate_after   rounds of CP-SAT before every placement may be evaluated instead

    Every bound goes to the ledger. Raises `NoPlanFitsError` if it is proven that no placement
    fits into memory, and `TooManyIntervalsError` for a model that is larger than `MOST_INTERVALS`
    or `MOST_HOPS`.
    """
    search = _ExactSearch(problem, budget)
    budget.score(problem, problem.fastest[None], always=True)
    if not enumerate_after and search.enumerate():
        return search.answer()
    # The model of the objective, unless it is too large.
    if problem.objective == "load":
        build, size, most = load_master, len(problem.load.net_sources) * problem.devices, MOST_HOPS
    elif problem.objective == "latency":
        build, size, most = latency_master, 0, 0
    else:
        build, size, most = step_master, intervals_needed(problem), MOST_INTERVALS
    if size > most:
        raise TooManyIntervalsError(size, most)
    search.prepare(build)
    if problem.objective == "load":
        search.round(FIRST_EVALUATIONS)
        if not search.settled:
            part = budget.slice(
                seconds=SHARE_OF_SHARE * budget.left_seconds,
                evaluations=SHARE_OF_SHARE * budget.left,
            )
            in_background(budget, lambda: share_bound(problem, part), lambda: None)
    rounds, most_evaluations = 0, np.inf
    if enumerate_after < NEVER and can_enumerate(problem, budget):
        # A round may cost as much as evaluating every placement, and no more.
        most_evaluations = problem.placements
    while not (search.settled or budget.exhausted):
        search.prepare(build)
        went_on = search.round(most_evaluations)
        rounds += 1
        # After enough rounds, or when CP-SAT comes to nothing, evaluating every placement is tried.
        if enumerate_after < NEVER and (rounds >= enumerate_after or not went_on):
            went_on = not (search.settled or search.enumerate()) and went_on
        if not went_on:
            break
    return search.answer()


@dataclass(eq=False)
class _ExactSearch:
    """The state of one call of `exact`.

    master          the model, once it is built
    scale_seconds   the value that it was built for
    ruled_out       placements that were evaluated and are forbidden in every model
    closed          it is proven that nothing is better than the best, up to a tolerance
    proof           what proved that no placement fits; "" while that is not proven
    """

    problem: PlacementProblem
    budget: Budget
    master: Master | None = None
    scale_seconds: float = np.inf
    ruled_out: list[GroupPlacement] = field(default_factory=list)
    closed: bool = False
    proof: str = ""

    @property
    def settled(self) -> bool:
        """True if the best placement is proven to be optimal, up to the model's resolution."""
        if self.closed or self.budget.closed:
            return True
        bound, value = self.budget.ledger.bound, self.budget.ledger.value
        if self.master is None or bound is None or not np.isfinite(value):
            return False
        return value - bound.seconds <= self.master.resolution_seconds + ROUNDING * value

    def prepare(self, build: Callable[[PlacementProblem, float], Master]) -> None:
        """Build the model, or build it again if the best value is more than twice or less than half
        of what it was built for. The units of the old one are then too coarse or too fine."""
        scale_seconds = self.budget.ledger.value
        if not np.isfinite(scale_seconds):
            scale_seconds = self.budget.score(self.problem, self.problem.fastest[None])[0].value
        far = max(scale_seconds, self.scale_seconds) > 2 * min(scale_seconds, self.scale_seconds)
        if self.master is None or far:
            self.scale_seconds = scale_seconds
            self.master = build(self.problem, scale_seconds)
            for placement in self.ruled_out:
                self.master.forbid(placement)

    def answer(self) -> GroupPlacement:
        """Return the best placement. Raises `NoPlanFitsError` if it is proven that none fits."""
        if self.proof:
            raise NoPlanFitsError(self.proof)
        best = self.budget.ledger.best
        return self.problem.fastest if best is None else best[1]

    def enumerate(self) -> bool:
        """Evaluate every placement. Returns False if the limits or the budget do not allow it."""
        if not can_enumerate(self.problem, self.budget):
            return False
        scores = self.budget.score(self.problem, every_placement(self.problem))
        if not all(np.isfinite(score.lacking_bytes) for score in scores):
            return False
        self._conclude("every placement", 0.0)
        return True

    def _conclude(self, proof: str, tolerance_seconds: float) -> None:
        """Note that nothing is better than the best so far by more than a tolerance, or, if nothing
        fits so far, that no placement fits."""
        self.closed = True
        ledger = self.budget.ledger
        if np.isfinite(ledger.value):
            ledger.prove(ledger.value - tolerance_seconds, proof)
        else:
            self.proof = proof

    def round(self, most_evaluations: float) -> bool:
        """Run CP-SAT, evaluate the placements that it finds, and rule them out.

        most_evaluations   what CP-SAT may spend

        Returns False if no placement was evaluated, or if the model is infeasible.
        """
        assert self.master is not None, "built before the first round"
        master, budget = self.master, self.budget
        model, bound, best = master.model, budget.ledger.bound, budget.ledger.best
        value = budget.ledger.value
        # The model searches only for what beats the best so far, and starts from that. Objectives
        # are short of the truth by up to the resolution. So this also leaves out plans that are
        # better by less than the resolution, for which the conclusion below allows.
        if np.isfinite(value):
            less_seconds = value * (1 - ROUNDING) - master.resolution_seconds
            model.add(master.objective <= int(less_seconds / master.unit_seconds))
        if bound is not None:
            model.add(master.objective >= master.units(bound.seconds * (1 - ROUNDING)))
        if best is not None:
            master.hint(best[1])

        collector, solver = _SolutionCollector(master), cp_model.CpSolver()
        parameters = solver.parameters
        parameters.random_seed = self.problem.seed % 2**31
        # `in_background` sees the Ctrl-C instead.
        parameters.catch_sigint_signal = False
        # A budget in evaluations buys fixed work on one thread.
        parameters.num_workers = budget.threads if budget.timed else 1
        if budget.timed:
            parameters.max_time_in_seconds = budget.left_seconds
        most_evaluations = min(most_evaluations, budget.left)
        if np.isfinite(most_evaluations):
            parameters.max_deterministic_time = most_evaluations * DETERMINISTIC_SECONDS
        status: list[cp_model.CpSolverStatus] = []
        in_background(
            budget, lambda: status.append(solver.solve(model, collector)), solver.stop_search
        )
        # No status: after a Ctrl-C the solver did not stop in time and was left behind.
        if not status:
            return False
        if not budget.timed:
            budget.charge(solver.deterministic_time / DETERMINISTIC_SECONDS)
        if status[0] == cp_model.INFEASIBLE:
            self._conclude("CP-SAT", master.resolution_seconds + ROUNDING * value)
            return False
        assert status[0] != cp_model.MODEL_INVALID, model.validate()
        bound_seconds = solver.best_objective_bound * master.unit_seconds * (1 - ROUNDING)
        if bound_seconds > 0:
            budget.ledger.prove(min(bound_seconds, value), "CP-SAT")
        # Placements that the budget pays for are evaluated and ruled out.
        placements = collector.placements
        scores = budget.score(self.problem, np.array(placements)) if placements else []
        is_any = False
        for placement, score in zip(placements, scores, strict=True):
            if np.isfinite(score.lacking_bytes):
                master.forbid(placement)
                self.ruled_out.append(placement)
                is_any = True
        return is_any


class _SolutionCollector(cp_model.CpSolverSolutionCallback):
    """Keeps the placement of every solution, in the order found."""

    def __init__(self, master: Master) -> None:
        super().__init__()
        self._master = master
        self.placements: list[GroupPlacement] = []

    def on_solution_callback(self) -> None:
        placement = self._master.problem.fastest.copy()
        for group in self._master.problem.free.tolist():
            for device, literal in self._master.at[group].items():
                if self.boolean_value(literal):
                    placement[group] = device
        self.placements.append(placement)


def in_background(budget: Budget, work: Callable[[], object], stop: Callable[[], object]) -> None:
    """Run `work` in another thread, so that this one can see a Ctrl-C and call `stop`.

    Work that does not stop in time is left behind in its thread and ends at its own limit. An
    exception of `work` is raised here.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    patience = PATIENCE_POLLS
    while thread.is_alive() and patience > 0:
        try:
            thread.join(POLL_SECONDS)
        except KeyboardInterrupt:
            budget.interrupted = True
        # The handler of `keeping_interrupts` sets the flag too, without an exception.
        if budget.interrupted:
            stop()
            patience -= 1
    if failures:
        raise failures[0]
