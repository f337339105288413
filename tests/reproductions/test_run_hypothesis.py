"""The hypothesis: shared variables and their gradient sums on the CPU, slow links.

w ──► f0 ──► g0 ─┐            f0, f1, f2   forward, all read w
├───► f1 ──► g1 ─┴► s1 ─┐     g0, g1, g2   a gradient of w each
└───► f2 ──► g2 ────────┴► s2 ──► update   s1, s2 sum them
      f2 ──► a2 ┐
      f1 ──► a1 ┴► s0 ──► g0               s0 sums gradients of what f0 made, not of w
"""

import numpy as np
import pytest

from dovetail.graph import Phase
from dovetail.machine import parse_machine
from dovetail.pipeline import graph_of as captured_graph
from dovetail.pipeline import resolve_model
from dovetail.placers import PLACERS
from dovetail.simulator import Simulator
from reproductions.hypothesis import SharedVariables, slow_links
from reproductions.methods import HYPOTHESIS, METHODS, PLAIN, lay_ground, run_method
from tests.support.builders import Op, graph_of, source
from tests.support.placer_instances import usable_placers
from tests.support.tiny_tables import MACHINE, RNN

# Placers whose library is not installed here.
ABSENT = set(PLACERS) - set(usable_placers())
BACK = {"phase": Phase.BACKWARD}


def drawn():
    return graph_of(
        source("w", output_bytes=1000),
        Op("f0", ("w",)),
        Op("f1", ("w", "f0")),
        Op("f2", ("w", "f0")),
        Op("g2", ("f2",), gradient_of="f2", **BACK),
        Op("a2", ("f2",), gradient_of="f2", **BACK),
        Op("g1", ("f1",), gradient_of="f1", **BACK),
        Op("a1", ("f1",), gradient_of="f1", **BACK),
        Op("s0", ("a1", "a2"), kind="aten.add", **BACK),
        Op("s1", ("g1", "g2"), kind="aten.add", **BACK),
        Op("g0", ("s0",), gradient_of="f0", **BACK),
        Op("s2", ("s1", "g0"), kind="aten.add", **BACK),
        Op("update", ("w", "s2"), phase=Phase.UPDATE, overwrites="w"),
    )


@pytest.fixture(scope="module")
def rnn():
    return captured_graph(resolve_model(RNN, "adam"))


@pytest.fixture(scope="module")
def ground(rnn):
    return lay_ground(rnn, parse_machine(MACHINE), HYPOTHESIS, seed=0)


def moved(graph, placement, cpu=9):
    """The names of ops that are not where the placement has them."""
    row = np.array([placement], dtype=np.int32)
    settled = SharedVariables(graph, cpu).settle(row)
    return {graph.names[op]: int(settled[0, op]) for op in np.flatnonzero(settled[0] != row[0])}


def test_a_variable_of_one_device_stays_there_with_its_update_and_sums():
    graph = drawn()
    assert moved(graph, [0] * len(graph)) == {}
    placement = [0] * len(graph)
    placement[graph.names.index("update")] = 1
    placement[graph.names.index("s2")] = 1
    assert moved(graph, placement) == {"update": 0, "s2": 0}


def test_update_and_sums_of_a_shared_variable_are_on_the_cpu_and_nothing_else():
    graph = drawn()
    placement = [0] * len(graph)
    placement[graph.names.index("f1")] = 1
    assert moved(graph, placement) == {"s1": 9, "s2": 9, "update": 9}


def test_what_else_reads_a_sum_keeps_it_where_it_is():
    graph = graph_of(
        source("w"),
        Op("f", ("w",)),
        Op("e", ("w",)),
        Op("g", ("f",), gradient_of="f", **BACK),
        Op("h", ("e",), gradient_of="e", **BACK),
        Op("sum", ("g", "h"), kind="aten.add", **BACK),
        Op("norm", ("sum",), **BACK),
        Op("update", ("w", "sum"), phase=Phase.UPDATE, overwrites="w"),
    )
    placement = [0] * len(graph)
    placement[graph.names.index("f")] = 1
    assert moved(graph, placement) == {"update": 9}


def test_all_shared_variables_of_a_network_move_with_one_sum_fewer_than_its_steps(rnn):
    placement = np.random.default_rng(0).integers(2, size=(1, len(rnn))).astype(np.int32)
    settled = SharedVariables(rnn, 9).settle(placement)[0]
    kinds = np.array(rnn.kinds)[settled == 9]
    assert (kinds == "aten.add").sum() == (2 * 3 + 2) * (4 - 1)


def test_all_links_are_slow_and_devices_as_they_were():
    machine = parse_machine(MACHINE)
    slow = slow_links(machine)
    assert {link.bandwidth_bytes_per_second for link in slow.links} == {3.5e9}
    assert slow.devices == machine.devices
    assert [link.latency_seconds for link in slow.links] == [
        link.latency_seconds for link in machine.links
    ]


@pytest.mark.parametrize(
    "method", [method for method in METHODS[HYPOTHESIS] if method not in ABSENT]
)
def test_every_method_is_judged_by_where_variables_are_then(rnn, ground, method):
    found, placement = run_method(ground, method, "30e")
    machine, costs = ground.problem.machine, ground.problem.costs
    cpu = machine.device_index("haswell")
    settled = SharedVariables(rnn, cpu).settle(placement[None])
    evaluated = Simulator(rnn, machine, costs, ranked=True).evaluate(settled)
    assert found.seconds == evaluated.values[0]
    real = ~rnn.is_source
    assert np.array_equal(settled[0, real], placement[real])


def test_one_gpu_takes_what_it_takes_on_the_plain_machine(rnn, ground):
    plain = lay_ground(rnn, parse_machine(MACHINE), PLAIN, seed=0)
    plain_found, _ = run_method(plain, "1 GPU", "30e")
    found, _ = run_method(ground, "1 GPU", "30e")
    assert found.seconds == pytest.approx(plain_found.seconds, rel=0.05)
