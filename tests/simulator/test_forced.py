"""What must be computed in one place, because sending it takes longer."""

import itertools

import numpy as np
import pytest

from dovetail.costs import Costs
from dovetail.graph import Phase
from dovetail.simulator import Simulator
from dovetail.simulator.bounds import forced_ends, forced_tails, lower_bounds
from dovetail.simulator.critical_path import earliest_ends
from dovetail.simulator.flat import flatten
from tests.support.builders import Op, graph_of, source
from tests.support.simulator_cases import all_links, machine_of

FORCED = "critical path with forced sends"


def proven(graph, machine, costs):
    return {bound.proof: bound.seconds for bound in lower_bounds(graph, machine, costs)}


def every_placement(graph, devices):
    runs = np.flatnonzero(~graph.is_source)
    every = np.zeros((devices ** len(runs), len(graph)), np.int32)
    every[:, runs] = list(itertools.product(range(devices), repeat=len(runs)))
    return every


def random_case(seed):
    """4 to 6 ops with joins and forks on 2 or 3 devices, alike or not."""
    rng = np.random.default_rng(seed)
    ops = [source("x", kind="input", output_bytes=1), source("w", output_bytes=2)]
    for i in range(int(rng.integers(4, 7))):
        made = [op.name for op in ops[2:]] or ["x"]
        reads = set(rng.choice(made, min(len(made), int(rng.integers(1, 4))), replace=False))
        reads |= {name for name in ("x", "w") if rng.random() < 0.2}
        ops.append(Op(f"op{i}", tuple(sorted(reads)), output_bytes=int(rng.integers(0, 4))))
    if rng.random() < 0.4:
        ops.append(Op("update", ("w", ops[-1].name), phase=Phase.UPDATE, overwrites="w"))
    graph, names = graph_of(*ops), "abc"[: int(rng.integers(2, 4))]
    latency, bandwidth = float(rng.choice([0.0, 0.1, 0.4])), float(rng.choice([1.0, 3.0]))
    machine = machine_of(names, all_links(names, latency, bandwidth), str(rng.choice(list(names))))
    seconds = rng.choice([0.5, 1.0, 1.0, 2.0], (len(ops), len(names)))
    if rng.random() < 0.5:
        seconds[:] = seconds[:, :1]
    seconds[graph.is_source] = 0.0
    seconds[2:, 1:][rng.random((len(ops) - 2, len(names) - 1)) < 0.1] = np.inf
    return graph, machine, Costs(seconds, "given")


def least_seconds(graph, machine, costs, rng):
    """Of every placement in order of ops, and of the best ones in other orders."""
    simulator = Simulator(graph, machine, costs)
    every = every_placement(graph, len(machine.devices))
    values = simulator.evaluate(every, threads=1).values
    tried = [
        simulator.timeline(every[i], priorities=rng.random(len(graph))).step_seconds
        for i in np.argsort(values)[:10]
        if np.isfinite(values[i])
        for _ in range(3)
    ]
    return min([values.min(), *tried])


def test_no_placement_in_any_order_beats_the_bound_and_it_is_often_the_best():
    best = 0
    for seed in range(150):
        case = random_case(seed)
        value = least_seconds(*case, np.random.default_rng(seed))
        bounds = proven(*case)
        assert max(bounds.values()) <= value, seed
        assert bounds[FORCED] >= bounds["critical path"] * (1 - 1e-6), seed
        best += bounds[FORCED] > max(v for k, v in bounds.items() if k != FORCED) * (1 + 1e-6)
    assert best > 30


def diamond(count=2, *, latency):
    """a, then `count` ops side by side, then v; 1 s each, on two devices."""
    middle = [Op(f"b{i}", ("a",), output_bytes=0) for i in range(count)]
    join = Op("v", tuple(op.name for op in middle), output_bytes=0)
    graph = graph_of(Op("a", output_bytes=0), *middle, join)
    machine = machine_of("ab", all_links("ab", latency, 1.0))
    return graph, machine, Costs(np.ones((len(graph), 2)), "given")


def test_a_join_waits_for_a_send_or_for_its_own_device():
    """a │a 0-1│b0 1-2│                        sends take .25 s
    b        │b1 1.25-2.25│v 2.25-3.25│
    """
    case = diamond(latency=0.25)
    every = every_placement(case[0], 2)
    assert Simulator(*case).evaluate(every).values.min() == 3.25
    assert proven(*case)["critical path"] == 3
    assert proven(*case)[FORCED] == pytest.approx(3.25)


def test_sends_that_take_longer_than_all_work_leave_one_device():
    case = diamond(4, latency=100.0)
    bounds = proven(*case)
    assert bounds[FORCED] == pytest.approx(6)
    every = every_placement(case[0], 2)
    assert Simulator(*case).evaluate(every).values.min() == 6


def test_without_latency_and_bytes_it_is_the_critical_path():
    graph, machine, costs = diamond(4, latency=0.0)
    flat = flatten(graph, machine, costs)
    ends = forced_ends(flat, costs.compute_seconds)
    np.testing.assert_allclose(ends, earliest_ends(flat, costs.compute_seconds))


def test_tails_are_ends_of_the_graph_turned_around():
    graph, machine, costs = diamond(3, latency=0.5)
    flat = flatten(graph, machine, costs)
    ends = forced_ends(flat, costs.compute_seconds)
    tails = forced_tails(flat, costs.compute_seconds)
    np.testing.assert_allclose(tails[::-1] + 1, ends)  # it is its own mirror image


def test_an_op_that_may_not_be_there_is_never_away_for_nothing():
    graph, machine, _ = diamond(latency=0.5)
    seconds = np.array([[1.0, np.inf], [np.inf, 1.0], [1.0, 1.0], [1.0, np.inf]])
    bounds = proven(graph, machine, Costs(seconds, "given"))
    every = every_placement(graph, 2)
    values = Simulator(graph, machine, Costs(seconds, "given")).evaluate(every).values
    assert bounds[FORCED] == pytest.approx(values.min()) == 4
