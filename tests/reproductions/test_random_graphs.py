"""The random networks and machines of benchmarks/learned are ones that all can work with."""

import numpy as np
import pytest

from dovetail.costs import analytic_costs
from dovetail.graph import Phase, group
from dovetail.placers.learned.records import PlacementTask
from tests.support.benchmark_scripts import benchmark_scripts

with benchmark_scripts("learned", "random_graphs") as scripts:
    graphs = scripts.random_graphs
FAMILIES, Tape = graphs.FAMILIES, graphs.Tape
random_graph, random_machine = graphs.random_graph, graphs.random_machine
SIZE = 0.3


def kinds_of(graph, phase):
    return [kind for kind, p in zip(graph.kinds, graph.phases, strict=True) if p == phase]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_of_each_family_trains_all_its_parameters_and_repeats(family):
    graph = random_graph(5, family=family, size=SIZE)
    assert graph.fingerprint == random_graph(5, family=family, size=SIZE).fingerprint
    assert graph.fingerprint != random_graph(6, family=family, size=SIZE).fingerprint
    parameters = graph.kinds.count("parameter")
    assert kinds_of(graph, Phase.UPDATE) == ["dovetail.adam"] * parameters
    assert graph.kinds.count("state") == graphs.STATES["adam"] * parameters
    updated = graph.residences[[kind == "parameter" for kind in graph.kinds]]
    assert (graph.phases[updated] == Phase.UPDATE).all() and len(set(updated)) == parameters
    flops = [graph.flops[graph.phases == phase].sum() for phase in (1, 2)]
    assert 1.2 * flops[0] < flops[1] < 2.6 * flops[0]
    inference = random_graph(5, family=family, size=SIZE, optimizer=None)
    assert set(inference.phases) == {Phase.SOURCE, Phase.FORWARD}
    assert inference.flops.sum() == flops[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_can_be_grouped_and_simulated_on_a_random_machine(family):
    graph = random_graph(9, family=family, size=SIZE)
    machine = random_machine(9, graph)
    groups = group(graph)
    problem = PlacementTask("one", graph, machine, analytic_costs(graph, machine), groups).problem(
        threads=1
    )
    drawn = np.random.default_rng(0).integers(problem.devices, size=(4, groups.count))
    found = problem.evaluate(problem.spread(np.stack([problem.settle(row) for row in drawn])))
    assert np.isfinite(found.values).all() and (found.values > 0).all()
    assert groups.count > 8


def test_machines_differ_in_number_speed_memory_and_links():
    machines = [random_machine(seed, random_graph(0, size=SIZE)) for seed in range(40)]
    gpus = [[d for d in m.devices if d.kind == "gpu"] for m in machines]
    counts = {len(of_machine) for of_machine in gpus}
    assert counts <= set(range(graphs.LEAST_DEVICES, graphs.MOST_DEVICES + 1)) and len(counts) > 4
    assert {len({d.model for d in of_machine}) for of_machine in gpus} == {1, 2}
    assert len({of_machine[0].memory_bytes for of_machine in gpus}) > 10
    assert len({m.links[0].bandwidth_bytes_per_second for m in machines}) == 40
    assert random_machine(3) == random_machine(3) != random_machine(4)


def test_a_tape_adds_the_gradients_of_what_is_used_twice():
    tape = Tape()
    x, weight = tape.input(4, 8), tape.parameter("layer", 8, 8)
    once = tape.linear("layer", x, weight)
    twice = tape.linear("layer", once, weight)
    graph = tape.graph([tape.loss("loss", twice)], "sgd")
    sums = [i for i, kind in enumerate(graph.kinds) if kind == "aten.add"]
    products = [i for i, kind in enumerate(graph.kinds) if kind == "aten.mm"]
    assert len(sums) == 1 and len(products) == 3  # the input has no gradient
    update = graph.kinds.index("dovetail.sgd")
    assert graph.output_offsets[sums[0]] in graph.inputs_of(update)
    readers = {int(op) for op in graph.consumers_of(weight)} - {update}
    waits = {(int(a), int(b)) for a, b in graph.control}
    assert {(op, update) for op in readers if graph.phases[op] != Phase.UPDATE} <= waits


def test_parts_of_a_split_have_one_gradient_and_move_nothing():
    tape = Tape()
    x = tape.dense("layer", tape.input(4, 8), 6)
    left, right = tape.split("layer", x, 2)
    graph = tape.graph([tape.loss("loss", tape.each("layer", "mul", left, right))], "sgd")
    split = graph.kinds.index("aten.split")
    assert graph.flops[split] == graph.accessed_bytes[split] == 0
    assert set(graph.storages[list(graph.outputs_of(split))]) == {graph.storages[x]}
    joined = [i for i, kind in enumerate(graph.kinds) if kind == "aten.cat"]
    assert len(joined) == 1 and graph.gradient_of[joined[0]] == split
    assert len(graph.inputs_of(joined[0])) == 2
