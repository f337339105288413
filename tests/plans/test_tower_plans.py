"""Towers on machines: the papers' placement of them, the planners' own, and when each is done."""

import numpy as np
import pytest

from dovetail.costs import Costs, analytic_costs
from dovetail.errors import NoDeviceError, UsageError
from dovetail.graph import Phase, layered
from dovetail.graph.copies import AVERAGE, towers_of
from dovetail.machine import parse_machine
from dovetail.pipeline import plan, verify
from dovetail.simulator import Simulator
from dovetail.transforms import replicate
from reproductions.towers import tower_placement
from tests.support.builders import Op, graph_of, machine_of, source
from tests.support.towers import tower_seconds


def one_replica():
    return graph_of(
        source("w"), source("x", kind="input"),
        Op("y", ("w", "x")),
        Op("loss", ("y",), output_bytes=4),
        Op("g", ("loss",), phase=Phase.BACKWARD),
        Op("w/sgd", ("w", "g"), phase=Phase.UPDATE, overwrites="w"),
        outputs=("loss",),
    )  # fmt: skip


def simulated(graph, machine, placement):
    costs = analytic_costs(graph, machine)
    return Simulator(graph, machine, costs).timeline(placement)


@pytest.mark.parametrize("synchronous", [True, False])
def test_parameters_are_on_the_cpu_and_a_tower_on_each_gpu(synchronous):
    graph = replicate(layered(600, training=True), 4, synchronous=synchronous).graph
    machine = parse_machine("4 x k80 + haswell")
    placement, towers = tower_placement(graph, machine), towers_of(graph)
    names = np.array(machine.device_names)[placement]
    for tower in range(4):
        own = (towers == tower) & ~graph.is_source
        assert set(names[own].tolist()) == {f"k80:{tower}"}
    shared = (towers < 0) | graph.is_source
    assert set(names[shared].tolist()) == {"haswell"}
    assert {AVERAGE, "sgd", "parameter", "input"} == {
        graph.kinds[op] for op in np.flatnonzero(shared)
    }
    timeline = simulated(graph, machine, placement)
    assert sorted(timeline.ops.tolist()) == np.flatnonzero(~graph.is_source).tolist()
    assert (timeline.peak_memory_bytes > 0).all()


def test_towers_take_turns_on_fewer_gpus_and_on_cpus_where_there_is_none():
    graph = replicate(one_replica(), 5).graph
    towers = towers_of(graph)
    for machine, devices in ((parse_machine("2 x k80 + haswell"), 2), (machine_of(3), 3)):
        placement = tower_placement(graph, machine)
        own = (towers >= 0) & ~graph.is_source
        first = machine.device_names.index("k80:0") if devices == 2 else 0
        assert (placement[own] == first + towers[own] % devices).all()


def test_a_host_that_runs_nothing_cannot_hold_the_updates():
    graph = replicate(one_replica(), 2).graph
    with pytest.raises(NoDeviceError) as caught:
        tower_placement(graph, parse_machine("2 x k80"))
    assert "average/loss" in str(caught.value)


def test_an_asynchronous_tower_is_done_with_its_own_last_update():
    #  0      1      2      3      4      5      6       7       8       9
    #  │  y   │ loss │  g   │  y   │ loss │  g   │average│ sgd/0 │ sgd/1 │      each op 1 s
    #  └────── tower 0 ─────┴────── tower 1 ─────┘       tower 0 ┘       └ tower 1
    graph = replicate(one_replica(), 2, synchronous=False).graph
    machine = machine_of(1)
    costs = Costs(np.where(graph.is_source, 0.0, 1.0)[:, None], "given")
    timeline = Simulator(graph, machine, costs).timeline(np.zeros(len(graph), np.int32))
    assert timeline.step_seconds == 9.0
    assert tower_seconds(timeline, graph).tolist() == [8.0, 9.0]


def test_every_synchronous_tower_is_done_with_the_step():
    graph = replicate(one_replica(), 3).graph
    machine = parse_machine("2 x k80 + haswell")
    timeline = simulated(graph, machine, tower_placement(graph, machine))
    assert tower_seconds(timeline, graph).tolist() == [timeline.step_seconds] * 3


def test_the_towers_of_a_large_step_are_done_in_their_order():
    graph = replicate(layered(2000, training=True), 4, synchronous=False).graph
    machine = parse_machine("4 x k80 + haswell")
    timeline = simulated(graph, machine, tower_placement(graph, machine))
    seconds = tower_seconds(timeline, graph)
    assert (np.diff(seconds) > 0).all()
    assert seconds[-1] == timeline.step_seconds


def test_a_graph_without_towers_is_an_error():
    with pytest.raises(UsageError) as caught:
        tower_placement(one_replica(), machine_of())
    assert caught.value.option == "graph"


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("placer", ["expert", "etf", "heft", "multilevel", "auto"])
def test_replicas_can_be_placed_like_any_op(placer, synchronous):
    graph = replicate(
        layered(150, width=2, depth=4, training=True), 3, synchronous=synchronous
    ).graph
    found = plan(graph, "3 x k80 + haswell", placer=placer, budget="150e", min_gain=0)
    verify(found, graph)
    assert found.lower_bound <= found.value
    if placer == "auto":
        assert found.value <= min(value for value in found.baselines.values() if value is not None)
    else:
        assert found.value == found.baselines[placer]


def test_the_expert_gives_each_tower_a_device_and_spreads_what_they_share():
    graph = replicate(layered(600, training=True), 3).graph
    found = plan(graph, "3 x k80 + haswell", placer="expert", budget="1e")
    towers = towers_of(graph)
    for tower in range(3):
        own = (towers == tower) & ~graph.is_source
        names = np.array(found.machine.device_names)[found.placement[own]]
        assert set(names.tolist()) == {f"k80:{tower}"}
    updates = np.array([kind == "sgd" for kind in graph.kinds])
    assert len(set(found.placement[updates].tolist())) == 3


def test_a_pin_holds_a_whole_tower():
    graph = replicate(layered(300, training=True), 2).graph
    pins = [("tower.0", "k80:1"), ("tower.1", "k80:0"), ("average/*", "haswell")]
    found = plan(graph, "2 x k80 + haswell", placer="etf", budget="5e", pins=pins)
    towers = towers_of(graph)
    for tower, name in ((0, "k80:1"), (1, "k80:0")):
        own = (towers == tower) & ~graph.is_source
        assert (found.placement[own] == found.machine.device_index(name)).all()
