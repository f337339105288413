"""Stages of placed graphs: waves, what a stage may hold, and that all devices complete."""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from dovetail.costs import Costs
from dovetail.graph.kernels import fuse
from dovetail.plans import check_completes
from dovetail.schedulers.placed import (
    DeviceStages,
    PlacedStages,
    schedules_of,
    waves_of,
)
from dovetail.schedulers.records import StageTiming, groups_of, members
from dovetail.schedulers.timing import block_of, signatures_of
from dovetail.simulator import Simulator
from tests.support.builders import Op, graph_of, machine_of, plan_by_hand, source


def test_a_segment_has_the_ops_of_one_device_behind_equally_many_changes_of_device():
    #  d0   a ─► c ─► e        d (on d1) reads a; f (on d0) reads d
    #  d1    └─► d ─► f        so a and f are on one device, and d waits between them
    graph = graph_of(
        source("x", "input"),
        Op("a", ("x",)),
        Op("c", ("a",)),
        Op("d", ("a",)),
        Op("e", ("c",)),
        Op("f", ("d",)),
    )
    placement = np.array([0, 0, 0, 1, 0, 0], np.int32)
    assert waves_of(graph, placement) == [(0, [1, 2, 4]), (0, [5]), (1, [3])]


def drawn_graph(rng, ops=24):
    """A graph of ops that each read up to two earlier ones; kinds that never fuse."""
    names = ["x"]
    drawn = [source("x", "input")]
    for number in range(ops):
        reads = tuple(dict.fromkeys(rng.choice(names[-6:]) for _ in range(rng.randint(1, 2))))
        drawn.append(Op(f"op{number}", reads))
        names.append(f"op{number}")
    return graph_of(*drawn)


def halving(graph, kernels):
    """Costs by which a stage takes its longest group's seconds and a little more for each other."""
    block = block_of(graph, kernels)

    def time(stages):
        groups = [[len(list(members(g))) for g in groups_of(block, stage)] for stage in stages]
        return [StageTiming(max(own) + 0.1 * (len(own) - 1)) for own in groups]

    return DeviceStages(block, signatures_of(graph, kernels), time, [1.0] * kernels.count)


@pytest.mark.parametrize("scheduler", ["dos", "ios"])
@pytest.mark.parametrize("seed", range(12))
def test_stages_of_any_placement_complete_and_hold_what_can_run_together(scheduler, seed):
    rng = random.Random(seed)
    graph, devices = drawn_graph(rng), 1 + seed % 3
    machine = machine_of(3)
    placement = np.array([0, *(rng.randrange(devices) for _ in range(24))], np.int32)
    seconds = np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(3, 1)
    kernels = fuse(graph)
    assert kernels.count == 24
    placed = PlacedStages(graph, kernels, seconds, [halving(graph, kernels)] * 3)
    stages = placed.choose(placement, scheduler)
    assert stages or devices == 3, "narrow placements have something to run together"
    assert all(placement[op] == device for device, stage in stages for op in stage.ops)
    assert all(stage.seconds < len(stage.ops) for _, stage in stages)
    # Every subset of the stages completes, whichever order their ops have: what is dropped later
    # never makes the others wait for ever.
    simulator = Simulator(graph, machine, Costs(seconds, "given"))
    starts = np.arange(len(graph), dtype=float)
    some = stages[:4]
    for count in range(1, len(some) + 1):
        for chosen in combinations(some, count):
            for late in (False, True):
                schedules = schedules_of(graph, placement, seconds, chosen, starts, late=late)
                timeline = simulator.timeline(placement, priorities=-starts, schedules=schedules)
                assert np.isfinite(timeline.step_seconds)
    schedules = schedules_of(graph, placement, seconds, stages, starts)
    orders = tuple(
        tuple(np.flatnonzero((placement == device) & ~graph.is_source).tolist())
        for device in range(3)
    )
    plan = plan_by_hand(graph, machine, placement, orders=orders, schedules=schedules)
    check_completes(plan, graph)


def test_on_one_device_the_stages_take_what_dos_takes_for_it():
    """Four ops of one input in two stages of two, by costs that make wider stages slower."""
    graph = graph_of(source("x", "input"), *(Op(f"op{i}", ("x",)) for i in range(4)))
    kernels = fuse(graph)
    block = block_of(graph, kernels)

    def time(stages):
        return [StageTiming({1: 1.0, 2: 1.2, 3: 2.8, 4: 4.0}[s.bit_count()]) for s in stages]

    costs = DeviceStages(block, signatures_of(graph, kernels), time, [1.0] * 4)
    # The plan's own seconds are three times the costs' own, so the stages' are as well.
    seconds = np.where(graph.is_source, 0.0, 3.0)[:, None]
    stages = PlacedStages(graph, kernels, seconds, [costs]).choose(np.zeros(5, np.int32), "dos")
    assert sorted(len(stage.ops) for _, stage in stages) == [2, 2]
    assert [stage.seconds for _, stage in stages] == pytest.approx([3.6, 3.6])
    # Handing over takes more than is gained.
    slow = replace(costs, hand_over_seconds=2.5)
    assert not PlacedStages(graph, kernels, seconds, [slow]).choose(np.zeros(5, np.int32), "dos")


def test_a_kernel_that_the_placement_splits_runs_by_itself():
    #  d0   mm0 ─► relu0      one kernel each; when relu0 is on d1, mm0 shares no stage
    #       mm1 ─► relu1
    graph = graph_of(
        source("x", "input"),
        Op("mm0", ("x",), "aten.mm"),
        Op("mm1", ("x",), "aten.mm"),
        Op("relu0", ("mm0",), "aten.relu"),
        Op("relu1", ("mm1",), "aten.relu"),
    )
    kernels = fuse(graph)
    assert kernels.count == 2
    seconds = np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, 1)
    placed = PlacedStages(graph, kernels, seconds, [halving(graph, kernels)] * 2)
    ((device, stage),) = placed.choose(np.zeros(5, np.int32), "dos")
    assert (device, stage.ops) == (0, (1, 2, 3, 4))
    assert not placed.choose(np.array([0, 0, 0, 1, 0], np.int32), "dos")


def test_a_device_without_stages_and_a_hopeless_stage_run_one_after_another():
    graph = graph_of(source("x", "input"), *(Op(f"op{i}", ("x",)) for i in range(2)))
    kernels = fuse(graph)
    seconds = np.where(graph.is_source, 0.0, 1.0)[:, None]
    costs = halving(graph, kernels)
    placement = np.zeros(3, np.int32)
    assert PlacedStages(graph, kernels, seconds, [costs]).choose(placement, "dos")
    never = replace(costs, hopeless=lambda _groups: True)
    assert not PlacedStages(graph, kernels, seconds, [never]).choose(placement, "dos")
    assert not PlacedStages(graph, kernels, seconds, [None]).choose(placement, "dos")
