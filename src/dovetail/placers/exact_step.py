"""The seconds of a step as a CP-SAT model: a job shop with a choice of machines.

    min T   with, where x(g, d) says that group g is on device d,
    one interval (o, d) for each op, present if x(group of o, d)
    one interval (t, a, d) for each send of tensor t over the link from a to d, present if its
        producer is on a and it goes that way: there is a reader on d, or one behind the host d
    intervals of a device do not overlap, nor those of a channel; a channel that is its source
        device's own shares the device's
    an op starts when its inputs have ended, or, where they are elsewhere, their last send has
    T >= every end

The simulator's devices take the ready op of lowest index and channels serve by time ready, where
this model orders as it likes: its optimum is at most what any placement takes.

Source: optional intervals and `NoOverlap` of the OR-tools manual, "Scheduling",
https://developers.google.com/optimization/scheduling/job_shop; the rules are those of section 3 of
docs/design.md. Differences: memory is what `exact_master` says, not a peak over time.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from dovetail.graph import HOST
from dovetail.placers.exact_master import HORIZON_UNITS, Master, add_hop, new_master
from dovetail.placers.problem import Problem

Spot = tuple[int, int]  # (unit, device): a tensor, or tensors + op for a control edge, arriving


@dataclass(eq=False)
class _Shop:
    """What a model under construction consists of.

    ends      [ops] 0 for sources
    starts    [ops] of ops that run
    lanes     intervals by what may do one at a time: a device's index, or a channel's name
    arrivals  when a unit is on a device that it was sent to
    loose     starts and ends of sends, which nothing bounds where there is none
    sum_units   of everything one after the other: no better schedule is longer
    """

    master: Master
    ends: list[cp_model.LinearExprT] = field(default_factory=list)
    starts: dict[int, cp_model.IntVar] = field(default_factory=dict)
    lanes: defaultdict[int | str, list[cp_model.IntervalVar]] = field(
        default_factory=lambda: defaultdict(list)
    )
    arrivals: dict[Spot, cp_model.IntVar] = field(default_factory=dict)
    hops: dict[tuple[object, ...], cp_model.IntVar | None] = field(default_factory=dict)
    loose: list[cp_model.IntVar] = field(default_factory=list)
    sum_units: int = 0


@dataclass(frozen=True)
class _Unit:
    """What is sent: a tensor, or the end of an op that others wait for."""

    index: int
    producer: int
    group: int
    size_bytes: float
    readers: tuple[int, ...]
    targets: tuple[int, ...]


def intervals_needed(problem: Problem) -> int:
    """How many intervals the model has at most."""
    graph, devices = problem.graph, problem.devices
    return int((~graph.is_source).sum()) * devices + _sends(problem) * devices * devices


def _sends(problem: Problem) -> int:
    """Tensors and ends of ops that go between groups."""
    return sum(bool(unit.targets) for unit in _units(problem))


def step_master(problem: Problem, scale_seconds: float) -> Master:
    """The model; see `intervals_needed` for its size."""
    master = new_master(problem, scale_seconds)
    shop = _Shop(master)
    for op in range(len(problem.graph)):
        _add_op(shop, op)
    for unit in _units(problem):
        _add_unit(shop, unit)
    for intervals in shop.lanes.values():
        master.model.add_no_overlap(intervals)
    _add_work(master)
    # A horizon that is far off lets propagation creep towards it, one duration at a time.
    for moment in [master.objective, *shop.loose]:
        master.model.add(moment <= shop.sum_units)
    master.terms = len(shop.starts) + len(shop.arrivals)
    return master


def _add_op(shop: _Shop, op: int) -> None:
    master, problem = shop.master, shop.master.problem
    if problem.graph.is_source[op]:
        shop.ends.append(0)
        return
    model, seconds = master.model, problem.costs.compute_seconds[op]
    at = master.at[problem.groups.of_op[op]]
    start = model.new_int_var(0, HORIZON_UNITS, "")
    duration = sum(master.units(seconds[d]) * literal for d, literal in at.items())
    shop.starts[op] = start
    shop.sum_units += max(master.units(seconds[d]) for d in at)
    shop.ends.append(start + duration)
    for device, literal in at.items():
        units = master.units(seconds[device])
        interval = model.new_optional_fixed_size_interval_var(start, units, literal, "")
        shop.lanes[device].append(interval)
    model.add(start + duration <= master.objective)


def _units(problem: Problem) -> list[_Unit]:
    """Everything that ops wait for."""
    graph, of_op = problem.graph, problem.groups.of_op
    units = []
    for tensor in range(graph.tensors):
        readers = graph.consumers[
            graph.consumer_offsets[tensor] : graph.consumer_offsets[tensor + 1]
        ]
        producer = int(graph.producers[tensor])
        group = int(of_op[producer])
        if graph.is_source[producer]:
            home = int(graph.residences[producer])
            if home < 0 and home != HOST:
                continue  # wherever it is read
            group = -1 if home == HOST else int(of_op[home])
        size_bytes = float(problem.sent_bytes[tensor])
        units.append(_unit(problem, (tensor, producer, group), size_bytes, readers.tolist()))
    after: defaultdict[int, list[int]] = defaultdict(list)
    for before, op in graph.control.tolist():
        after[before].append(op)
    for before, ops in sorted(after.items()):
        key = (graph.tensors + before, before, int(of_op[before]))
        units.append(_unit(problem, key, 0.0, ops))
    return units


def _unit(
    problem: Problem, key: tuple[int, int, int], size_bytes: float, readers: list[int]
) -> _Unit:
    index, producer, group = key
    targets = {int(problem.groups.of_op[op]) for op in readers} - {group}
    return _Unit(index, producer, group, size_bytes, tuple(readers), tuple(sorted(targets)))


def _add_unit(shop: _Shop, unit: _Unit) -> None:
    """Sends of a unit, and the waiting of its readers for it."""
    master, load = shop.master, shop.master.problem.load
    host = load.host
    homes = set(master.at[unit.group]) if unit.group >= 0 else {host}
    ends = {d for target in unit.targets for d in master.at[target]}
    for a in sorted(homes):
        direct = {d for d in ends - {a, host} if load.linked[a, d]}
        for d in sorted(direct):
            _add_send(shop, unit, (a, d), ({a}, {d}), shop.ends[unit.producer])
        behind = ends - direct - {a}
        if a != host and behind:
            _add_send(shop, unit, (a, host), ({a}, behind), shop.ends[unit.producer])
    for d in sorted(ends - {host}):
        relayed = {a for a in homes - {d} if not load.linked[a, d]}
        if relayed and (unit.index, host) in shop.arrivals:
            _add_send(shop, unit, (host, d), (relayed, {d}), shop.arrivals[unit.index, host])
    for op in sorted(set(unit.readers)):
        _wait_for(shop, unit, op)


def _wait_for(shop: _Shop, unit: _Unit, op: int) -> None:
    """An op starts when what it reads has been made and, if that was elsewhere, has arrived."""
    master, start = shop.master, shop.starts[op]
    group = int(master.problem.groups.of_op[op])
    if not master.problem.graph.is_source[unit.producer]:
        master.model.add(start >= shop.ends[unit.producer])
    if group == unit.group:
        return
    for device, literal in master.at[group].items():
        arrival = shop.arrivals.get((unit.index, device))
        if arrival is None or (unit.group < 0 and device == master.problem.load.host):
            continue
        made_here = master.at[unit.group].get(device) if unit.group >= 0 else None
        elsewhere = [] if made_here is None else [~made_here]
        master.model.add(start >= arrival).only_enforce_if([literal, *elsewhere])


def _add_send(
    shop: _Shop,
    unit: _Unit,
    link: Spot,
    when: tuple[set[int], set[int]],
    ready: cp_model.LinearExprT,
) -> None:
    """One send over a link; sends of a unit to one device end at one variable."""
    master, problem = shop.master, shop.master.problem
    key = (unit.group, unit.targets, link, frozenset(when[0]), frozenset(when[1]))
    if key not in shop.hops:
        shop.hops[key] = add_hop(master, unit.group, unit.targets, *when)
    literal = shop.hops[key]
    if literal is None:
        return
    machine = problem.machine
    wire = machine.links[machine.link_index[link]]
    seconds = wire.latency_seconds + unit.size_bytes / wire.bandwidth_bytes_per_second
    units = master.units(seconds)
    shop.sum_units += units
    spot = (unit.index, link[1])
    if spot not in shop.arrivals:
        shop.arrivals[spot] = master.model.new_int_var(0, HORIZON_UNITS, "")
    end = shop.arrivals[spot]
    start = master.model.new_int_var(0, HORIZON_UNITS, "")
    interval = master.model.new_optional_interval_var(start, units, end, literal, "")
    master.model.add(start >= ready).only_enforce_if(literal)
    shop.loose += [start, end]
    names = machine.device_names
    lane = names.index(wire.channel) if wire.channel in names else wire.channel
    shop.lanes[lane].append(interval)


def _add_work(master: Master) -> None:
    """Redundant: no device works longer than the step takes."""
    for device in range(master.problem.devices):
        seconds = master.problem.costs.compute_seconds[:, device]
        ops = np.flatnonzero(~master.problem.graph.is_source)
        units: defaultdict[int, int] = defaultdict(int)
        for op in ops.tolist():
            group = int(master.problem.groups.of_op[op])
            if device in master.at[group]:
                units[group] += master.units(seconds[op])
        terms = [count * master.at[group][device] for group, count in units.items()]
        if terms:
            master.model.add(sum(terms) <= master.objective)
