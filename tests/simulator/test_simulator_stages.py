"""Stages on several devices: the simulator completes what the rules of a plan accept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import OrderError
from dovetail.graph.source import Source
from dovetail.plans import Plan, Schedule, Stage, check_completes
from dovetail.simulator import Simulator
from tests.simulator.test_simulator_reference import assert_same, random_case
from tests.support.simulator_reference import reference


def random_stages(rng, graph, placement, device):
    """The ops of a device, by index, as stages of up to 4."""
    ops = np.flatnonzero((placement == device) & ~graph.is_source).tolist()
    cuts = np.cumsum(rng.integers(1, 5, len(ops)))
    parts = [part.tolist() for part in np.split(ops, cuts[cuts < len(ops)]) if len(part)]
    return Schedule(
        tuple(Stage(tuple(map(int, p)), float(rng.choice([0.0, 0.5, 1.0, 3.0]))) for p in parts)
    )


def plan_of(graph, machine, costs, placement, schedules):
    return Plan(
        Source("", "", (), ""), graph.fingerprint, machine, placement, None, costs.compute_seconds,
        "given", "hand", 0, "step", 0.0, 0.0, "", (0,) * len(machine.devices), 0, 0.0,
        schedules=schedules,
    )  # fmt: skip


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stages_on_every_device_equal_the_reference_where_the_rules_let_them_complete(seed):
    rng, graph, machine, costs, placement = random_case(seed)
    devices = range(len(machine.devices))
    schedules = tuple(random_stages(rng, graph, placement, device) for device in devices)
    expected = reference(graph, machine, costs, placement, schedules=schedules)
    simulator = Simulator(graph, machine, costs)
    plan = plan_of(graph, machine, costs, placement, schedules)
    if expected.stuck:
        with pytest.raises(OrderError, match="cannot complete"):
            check_completes(plan, graph)
        with pytest.raises(OrderError, match="cannot complete"):
            simulator.timeline(placement, schedules=schedules)
        return
    check_completes(plan, graph)
    timeline = simulator.timeline(placement, schedules=schedules)
    assert_same(timeline, expected)
    starts = dict(zip(timeline.ops.tolist(), timeline.op_starts.tolist(), strict=True))
    for device, schedule in enumerate(schedules):
        now = 0.0
        for stage in schedule.stages:
            (start,) = {starts[op] for op in stage.ops}
            assert start >= now
            now = start + stage.seconds
        seconds = sum(stage.seconds for stage in schedule.stages)
        assert timeline.busy_seconds[device] == pytest.approx(seconds, abs=1e-12)


def test_both_outcomes_are_among_the_cases():
    stuck = set()
    for seed in range(60):
        rng, graph, machine, costs, placement = random_case(seed)
        devices = range(len(machine.devices))
        schedules = tuple(random_stages(rng, graph, placement, device) for device in devices)
        stuck.add(reference(graph, machine, costs, placement, schedules=schedules).stuck)
    assert stuck == {False, True}
