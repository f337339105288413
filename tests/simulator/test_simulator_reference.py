"""The simulator against the same rules written slowly, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import OrderError
from dovetail.machine import parse_machine
from dovetail.plans import Schedule, Stage
from dovetail.runtime.compiling import interpreted
from dovetail.simulator import Simulator, device_loads, lower_bound, simulate
from dovetail.simulator.critical_path import upward_ranks
from dovetail.simulator.flat import flatten
from dovetail.simulator.kernel import simulate_batch
from tests.support.simulator_cases import (
    random_costs,
    random_graph,
    random_machine,
    with_messages,
)
from tests.support.simulator_reference import reference


def random_case(seed):
    rng = np.random.default_rng(seed)
    graph, machine = random_graph(rng), random_machine(rng)
    costs = random_costs(rng, graph, machine)
    placement = rng.integers(0, len(machine.devices), len(graph)).astype(np.int32)
    if seed % 2:
        machine = with_messages(rng, machine)
    return rng, graph, machine, costs, placement


def random_sequences(rng, graph, placement, device, topological):
    """The ops of one device in an order that may or may not complete."""
    ops = np.flatnonzero((placement == device) & ~graph.is_source)
    return tuple((ops if topological else rng.permutation(ops)).tolist())


def random_stages(rng, ops):
    """Runs of `ops` as stages, now and then an empty one."""
    stages, i = [], 0
    while i < len(ops):
        size = int(rng.integers(0, 4))
        stages.append(Stage(tuple(ops[i : i + size]), float(rng.choice([0.0, 0.5, 1.0, 3.0]))))
        i += size
    return Schedule(tuple(stages))


def assert_same(timeline, expected):
    spans = {
        op: (device, start, end)
        for op, device, start, end in zip(
            timeline.ops.tolist(),
            timeline.op_devices.tolist(),
            timeline.op_starts.tolist(),
            timeline.op_ends.tolist(),
            strict=True,
        )
    }
    assert spans == expected.spans
    transfers = list(
        zip(
            timeline.transfer_tensors.tolist(),
            timeline.transfer_ops.tolist(),
            timeline.transfer_sources.tolist(),
            timeline.transfer_destinations.tolist(),
            timeline.transfer_channels.tolist(),
            timeline.transfer_starts.tolist(),
            timeline.transfer_ends.tolist(),
            strict=True,
        )
    )
    assert sorted(transfers) == sorted(expected.transfers)
    assert timeline.step_seconds == expected.step_seconds
    for device, memory in enumerate(expected.memory):
        times = timeline.memory_times[device].tolist()
        assert list(zip(times, timeline.memory_bytes[device].tolist(), strict=True)) == memory
    assert timeline.peak_memory_bytes.tolist() == expected.peaks


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_simulator_in_python_equals_its_machine_code(seed):
    _, graph, machine, costs, placement = random_case(seed)
    code, python = (Simulator(graph, machine, costs, ranked=True) for _ in range(2))
    code._simulate_batch, python._simulate_batch = simulate_batch, interpreted(simulate_batch)
    for name, values in vars(code.timeline(placement)).items():
        np.testing.assert_equal(getattr(python.timeline(placement), name), values, name)
    batch = np.stack([placement, np.zeros_like(placement)])
    for name, values in vars(code.evaluate(batch)).items():
        np.testing.assert_equal(getattr(python.evaluate(batch), name), values, name)


def test_only_small_graphs_on_one_device_are_simulated_in_python_and_while_there_is_no_code(
    monkeypatch,
):
    rng = np.random.default_rng(0)
    graph, several = random_graph(rng), random_machine(rng)
    one = parse_machine("here/1")
    for machine, is_there, in_python in (
        (one, False, True), (one, True, False), (several, False, False)
    ):  # fmt: skip
        monkeypatch.setattr(simulate, "is_compiled", lambda _, is_there=is_there: is_there)
        simulator = Simulator(graph, machine, random_costs(rng, graph, machine))
        assert (simulator._simulate_batch is interpreted(simulate_batch)) == in_python
    monkeypatch.setattr(simulate, "_MOST_INTERPRETED", 0)
    monkeypatch.setattr(simulate, "is_compiled", lambda _: False)
    simulator = Simulator(graph, one, random_costs(rng, graph, one))
    assert simulator._simulate_batch is simulate_batch


@given(st.integers(0, 2**32))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_equals_the_reference_with_default_priorities(seed):
    _, graph, machine, costs, placement = random_case(seed)
    expected = reference(graph, machine, costs, placement)
    simulator = Simulator(graph, machine, costs)
    assert_same(simulator.timeline(placement), expected)
    batch = simulator.evaluate(placement[None])
    assert batch.values.tolist() == [expected.step_seconds]
    assert batch.peak_memory_bytes.tolist() == [expected.peaks]
    assert batch.feasible.tolist() == [max(expected.peaks) <= 8]


@given(st.integers(0, 2**32))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_equals_the_reference_with_priorities_orders_and_stages(seed):
    rng, graph, machine, costs, placement = random_case(seed)
    priorities = rng.integers(0, 3, len(graph)).astype(float)
    topological = rng.random() < 0.8
    orders, schedules = [], []
    for device in range(len(machine.devices)):
        ops = random_sequences(rng, graph, placement, device, topological)
        kind = rng.integers(0, 3)
        orders.append(ops if kind == 0 else None)
        schedules.append(random_stages(rng, ops) if kind == 1 else None)
    plan = {"priorities": priorities, "orders": orders, "schedules": schedules}
    expected = reference(graph, machine, costs, placement, **plan)
    simulator = Simulator(graph, machine, costs)
    if expected.stuck:
        with pytest.raises(OrderError):
            simulator.timeline(placement, **plan)
    else:
        assert_same(simulator.timeline(placement, **plan), expected)


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_ranked_counts_the_better_of_two_and_its_orders_give_it_again(seed):
    _, graph, machine, costs, placement = random_case(seed)
    ranks = upward_ranks(flatten(graph, machine, costs))
    plain = reference(graph, machine, costs, placement)
    first = reference(graph, machine, costs, placement, priorities=ranks)
    capacities = np.full(len(machine.devices), 8)
    both = [
        (int(np.maximum(np.array(found.peaks) - capacities, 0).sum()), found.step_seconds, i)
        for i, found in enumerate((plain, first))
    ]
    if len(machine.devices) == 1:
        # Both are as quick, but for rounding.
        both = [(lacks, 0.0, i) for lacks, _, i in both]
    expected = (plain, first)[min(both)[2]]
    simulator = Simulator(graph, machine, costs, ranked=True)
    found = simulator.evaluate(placement[None])
    assert found.values.tolist() == [expected.step_seconds]
    assert found.peak_memory_bytes.tolist() == [expected.peaks]
    timeline = simulator.timeline(placement)
    assert_same(timeline, expected)
    orders = [timeline.order_of(device) for device in range(len(machine.devices))]
    assert_same(Simulator(graph, machine, costs).timeline(placement, orders=orders), expected)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_loads_are_the_timelines_busy_seconds_and_transfers(seed):
    _, graph, machine, costs, placement = random_case(seed)
    timeline = Simulator(graph, machine, costs).timeline(placement)
    loads = timeline.busy_seconds
    seconds = timeline.transfer_ends - timeline.transfer_starts
    np.add.at(loads, timeline.transfer_sources, seconds)
    np.add.at(loads, timeline.transfer_destinations, seconds)
    assert device_loads(graph, machine, costs, placement) == pytest.approx(loads, abs=1e-12)
    value = Simulator(graph, machine, costs).evaluate(placement[None], "load").values[0]
    assert value == pytest.approx(loads.max(), abs=1e-12)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_placement_beats_a_bound(seed):
    rng, graph, machine, costs, _ = random_case(seed)
    simulator = Simulator(graph, machine, costs)
    shape = (200, len(graph))
    placements = rng.integers(0, len(machine.devices), shape).astype(np.int32)
    for objective in ("step", "load"):
        bound = lower_bound(graph, machine, costs, objective)
        assert simulator.evaluate(placements, objective).values.min() >= bound.seconds


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None, derandomize=True)
@pytest.mark.parametrize("ranked", [False, True])
def test_a_batch_equals_its_rows_whatever_the_threads(ranked, seed):
    rng, graph, machine, costs, _ = random_case(seed)
    placements = rng.integers(0, len(machine.devices), (33, len(graph))).astype(np.int32)
    simulator = Simulator(graph, machine, costs, ranked=ranked)
    one, two = simulator.evaluate(placements, threads=1), simulator.evaluate(placements, threads=2)
    assert one.values.tobytes() == two.values.tobytes()
    assert one.peak_memory_bytes.tobytes() == two.peak_memory_bytes.tobytes()
    for row, placement in enumerate(placements):
        assert simulator.timeline(placement).step_seconds == one.values[row]
