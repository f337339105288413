"""Plans made by hand, for tests that must not depend on a placer."""

import os

import numpy as np

from dovetail.machine import Device, Link, Machine
from dovetail.plans import Schedule, Stage
from tests.support.builders import plan_by_hand


def two_devices(first_cores=1):
    """Two CPU devices of one core each, or of more for the first; the same core again and again
    where there are not enough."""
    cores = sorted(os.sched_getaffinity(0))
    rates = {"float32": 1e10, "float64": 1e10}
    taken = [tuple(cores[i % len(cores)] for i in range(first_cores))]
    taken.append((cores[first_cores % len(cores)],))
    devices = tuple(
        Device(f"cpu{i}", "cpu", "test", 1 << 33, rates, 1e10, 1e-6, taken[i]) for i in range(2)
    )
    links = (
        Link("cpu0", "cpu1", 1e10, 1e-6, "cpu0->cpu1"),
        Link("cpu1", "cpu0", 1e10, 1e-6, "cpu1->cpu0"),
    )
    return Machine("two", devices, "cpu0", links)


def plan_for(captured, placement, orders="by index", machine=None):
    """A plan for the placement [ops], or for one device index for all ops."""
    graph, machine = captured.graph, machine or two_devices()
    placement = np.broadcast_to(np.asarray(placement, dtype=np.int32), len(graph)).copy()
    if orders == "by index":
        orders = tuple(
            tuple(np.flatnonzero((placement == d) & ~graph.is_source).tolist())
            for d in range(len(machine.devices))
        )
    made = {"source": captured.source, "transforms": captured.transforms}
    return plan_by_hand(graph, machine, placement, orders=orders, **made)


def random_placement(graph, seed, devices=2):
    """[ops] random devices; colocated ops share one."""
    rng = np.random.default_rng(seed)
    placement = rng.integers(0, devices, len(graph)).astype(np.int32)
    for group in sorted(set(graph.colocation.tolist()) - {-1}):
        members = graph.colocation == group
        placement[members] = placement[np.argmax(members)]
    return placement


def random_order(graph, placement, seed):
    """Per device its ops in one random topological order of the whole graph."""
    rng = np.random.default_rng(seed)
    before = [set() for _ in range(len(graph))]
    for op in range(len(graph)):
        before[op] |= {int(graph.producers[t]) for t in graph.inputs_of(op)}
    for first, then in graph.control.tolist():
        before[then].add(first)
    after = [[] for _ in before]
    for op, firsts in enumerate(before):
        for first in firsts:
            after[first].append(op)
    missing = [len(firsts) for firsts in before]
    able = [op for op, count in enumerate(missing) if count == 0]
    order = []
    while able:
        op = able.pop(int(rng.integers(len(able))))
        order.append(op)
        for then in after[op]:
            missing[then] -= 1
            if missing[then] == 0:
                able.append(then)
    return tuple(
        tuple(op for op in order if placement[op] == d and not graph.is_source[op])
        for d in range(int(placement.max(initial=1)) + 1)
    )


def random_schedules(graph, placement, seed, most=6):
    """Per device stages of up to `most` ops. No path leaves a stage and comes back: all its ops
    have crossed from one device to another as many times."""
    rng = np.random.default_rng(seed)
    crossed = np.zeros(len(graph), dtype=int)
    edges = [(int(graph.producers[t]), op) for op in range(len(graph)) for t in graph.inputs_of(op)]
    for before, op in sorted([*edges, *graph.control.tolist()], key=lambda edge: edge[1]):
        there = not graph.is_source[before] and placement[before] != placement[op]
        crossed[op] = max(crossed[op], crossed[before] + there)
    schedules = []
    for order in random_order(graph, placement, seed):
        stages = [[]]
        for op in sorted(order, key=crossed.__getitem__):
            last = stages[-1]
            if last and (len(last) == most or crossed[last[0]] < crossed[op] or rng.random() < 0.2):
                stages.append([])
            stages[-1].append(op)
        schedules.append(Schedule(tuple(Stage(tuple(ops), float(len(ops))) for ops in stages)))
    return tuple(schedules)
