"""The hypothesis: variables and gradient sums on the CPU, slow links, and all else as free as ever.

w ──► f0 ──► g0 ─┐            f0, f1, f2   forward, all read w
├───► f1 ──► g1 ─┴► s1 ─┐     g0, g1, g2   a gradient of w each
└───► f2 ──► g2 ────────┴► s2 ──► update   s1, s2 sum them
      f2 ──► a2 ┐
      f1 ──► a1 ┴► s0 ──► g0               s0 sums gradients of what f0 made, not of w
"""

import numpy as np
import pytest

from dovetail.bench.methods import (
    HYPOTHESIS,
    METHODS,
    lay_ground,
    on_the_cpu,
    run_method,
    slow_links,
    split,
)
from dovetail.graph import Phase, colocate, group
from dovetail.machine import parse_machine
from dovetail.pipeline import graph_of as captured_graph
from dovetail.pipeline import resolve_model
from dovetail.placers import PLACERS
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


def test_updates_and_sums_of_a_variables_gradients_are_pinned_and_nothing_else():
    graph = drawn()
    pinned = {graph.names[op] for op in np.flatnonzero(on_the_cpu(graph))}
    assert pinned == {"s1", "s2", "update"}


def test_what_else_reads_a_sum_keeps_it_free():
    graph = graph_of(
        source("w"),
        Op("f", ("w",)),
        Op("g", ("f",), gradient_of="f", **BACK),
        Op("h", ("f",), gradient_of="f", **BACK),
        Op("sum", ("g", "h"), kind="aten.add", **BACK),
        Op("norm", ("sum",), **BACK),
        Op("update", ("w", "sum"), phase=Phase.UPDATE, overwrites="w"),
    )
    assert [graph.names[op] for op in np.flatnonzero(on_the_cpu(graph))] == ["update"]


def test_pinned_ops_have_groups_of_their_own_and_variables_follow_their_update():
    graph = drawn()
    groups = split(graph, colocate(graph), on_the_cpu(graph))
    of = dict(zip(graph.names, groups.of_op.tolist(), strict=True))
    assert of["w"] == of["update"]
    assert of["f0"] == of["g0"]
    theirs = {of[name] for name in ("s1", "s2", "update")}
    assert not theirs & {
        of[name] for name in graph.names if name not in {"w", "s1", "s2", "update"}
    }


def test_a_networks_sums_are_one_fewer_than_its_steps_for_each_shared_variable(rnn):
    pinned = on_the_cpu(rnn)
    kinds = np.array(rnn.kinds)[pinned]
    shared = 2 * 3 + 2  # weights and bias of two cells, those of the softmax: read at all 4 steps
    assert (kinds == "aten.add").sum() == shared * (4 - 1)
    assert (kinds == "dovetail.adam").sum() == shared + 1


def test_groups_of_a_network_hold_only_pinned_ops_or_none(rnn):
    pinned = on_the_cpu(rnn)
    groups = split(rnn, group(rnn), pinned)
    real = ~rnn.is_source
    for index in range(groups.count):
        of = pinned[real & (groups.of_op == index)]
        assert of.all() or not of.any()


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
def test_every_method_keeps_updates_and_sums_on_the_cpu(ground, method):
    found, placed = run_method(ground, method, "30e")
    assert found.seconds is not None
    graph, machine = ground.problem.graph, ground.problem.machine
    cpu = machine.device_index("haswell")
    pinned = on_the_cpu(graph)
    assert (placed[pinned] == cpu).all()
    if method == "1 GPU":
        assert (placed[~pinned & ~graph.is_source] == machine.device_index("k80:0")).all()


def test_all_else_may_go_anywhere_and_the_bound_knows_what_may_not(rnn, ground):
    pinned = on_the_cpu(rnn)
    assert ground.permitted[~pinned & ~rnn.is_source].all()
    assert ground.permitted[pinned].sum() == pinned.sum()
    free = np.zeros(ground.problem.groups.count, dtype=bool)
    free[ground.problem.groups.of_op[~pinned & ~rnn.is_source]] = True
    assert ground.problem.allowed[free].all()
