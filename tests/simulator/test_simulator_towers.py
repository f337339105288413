"""Towers in the simulator: chained updates write over one storage, on one device."""

import numpy as np
import pytest

from dovetail.graph import colocate, layered
from dovetail.simulator import Simulator
from dovetail.transforms import replicate
from tests.simulator.test_simulator_reference import assert_same
from tests.support.builders import machine_of
from tests.support.simulator_cases import random_costs
from tests.support.simulator_reference import reference


@pytest.mark.parametrize("seed", range(6))
def test_towers_are_simulated_as_the_rules_say(seed):
    rng = np.random.default_rng(seed)
    one = layered(80, width=2, depth=3, seed=seed, training=True)
    graph = replicate(one, 3, synchronous=bool(seed % 2)).graph
    machine, groups = machine_of(3, memory_bytes=10**12), colocate(graph)
    costs = random_costs(rng, graph, machine)
    placement = rng.integers(0, 3, groups.count).astype(np.int32)[groups.of_op]
    timeline = Simulator(graph, machine, costs).timeline(placement)
    assert_same(timeline, reference(graph, machine, costs, placement))
    # Updates take no new memory: in the end there is one copy of each parameter, however many
    # towers have written to it.
    kept = np.isin(graph.storages, graph.storages[graph.overwrites]) & ~graph.overwrites
    kept[graph.outputs] = True
    last = sum(int(memory[-1]) for memory in timeline.memory_bytes)
    assert last == graph.tensor_bytes[kept].sum()
