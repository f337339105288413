import numpy as np
import pytest

from dovetail.graph.records import Phase
from dovetail.reports.limits import OP, TRANSFER, explain, find_limits, shares
from tests.support.report_samples import (
    make_graph,
    make_machine,
    make_plan,
    make_timeline,
    run_in_order,
)
from tests.support.report_samples import training_chain as chain_of

FORWARD = Phase.FORWARD


def seconds_of(limits):
    """(computing per device, carrying in all, waiting)."""
    compute = [round(s, 9) for s in limits.compute_seconds.tolist()]
    return compute, round(float(limits.transfer_seconds.sum()), 9), round(limits.waiting_seconds, 9)


def test_one_device_that_is_never_idle_is_all_there_is():
    # cpu0 ├─ a ─┤├─── b ───┤      a: 0-2, b: 2-5
    machine = make_machine(2)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, [])])
    timeline = make_timeline(machine, [(0, 0, 0, 2), (1, 0, 2, 5)])
    limits = find_limits(timeline, graph)
    assert limits.chain == ((OP, 0), (OP, 1))
    assert seconds_of(limits) == ([5.0, 0.0], 0.0, 0.0)
    text = explain(limits, timeline, make_plan(graph, machine, [0, 0]))
    assert "100 % computing on cpu0" in text
    assert "bound by cpu0, which computes 100 % of the time" in text
    assert "'load balance (LP)' proves that no plan takes less than 80 %" in text


def test_the_chain_goes_through_the_transfer_that_the_last_op_waited_for():
    # cpu0  ├ a ┤                     ├── c ──┤      a: 0-1, c: 7-9; c reads a and b
    # wire            ├──── t ────────┤               t: 3-7
    # cpu1  ├──── b ──┤                               b: 0-3
    machine = make_machine(2)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, []), ("c", FORWARD, [0, 1])])
    timeline = make_timeline(
        machine, [(0, 0, 0, 1), (1, 1, 0, 3), (2, 0, 7, 9)], [(1, 1, 1, 0, 3, 7)]
    )
    limits = find_limits(timeline, graph)
    assert limits.chain == ((OP, 1), (TRANSFER, 0), (OP, 2))
    assert seconds_of(limits) == ([2.0, 3.0], 4.0, 0.0)
    assert shares(limits, timeline) == [
        ("transfers on cpu1->cpu0", pytest.approx(4 / 9)),
        ("computing on cpu1", pytest.approx(3 / 9)),
        ("computing on cpu0", pytest.approx(2 / 9)),
    ]


def test_a_transfer_that_queues_waits_for_the_one_before_it_on_its_channel():
    # cpu1  ├ a ┤├ b ┤                    a: 0-1, b: 1-2
    # wire       ├─── a ───┤├─── b ───┤   a: 1-5, b: 5-9
    # cpu0                             ├c┤ 9-10
    machine = make_machine(2)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, []), ("c", FORWARD, [0, 1])])
    timeline = make_timeline(
        machine,
        [(0, 1, 0, 1), (1, 1, 1, 2), (2, 0, 9, 10)],
        [(0, 0, 1, 0, 1, 5), (1, 1, 1, 0, 5, 9)],
    )
    limits = find_limits(timeline, graph)
    assert limits.chain == ((OP, 0), (TRANSFER, 0), (TRANSFER, 1), (OP, 2))
    assert seconds_of(limits) == ([1.0, 1.0], 8.0, 0.0)
    text = explain(limits, timeline, make_plan(graph, machine, [1, 1, 0], lower_bound=0.0))
    assert "80 % transfers on cpu1->cpu0" in text
    assert "bound by transfers" in text
    assert "proves" not in text


def test_a_tensor_through_the_host_is_followed_over_both_hops():
    # cpu1 ├ a ┤        cpu1->cpu0 1-2, cpu0->cpu2 2-4, cpu2 reads it 4-5
    machine = make_machine(3)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, [0])])
    timeline = make_timeline(
        machine, [(0, 1, 0, 1), (1, 2, 4, 5)], [(0, 0, 1, 0, 1, 2), (0, 0, 0, 2, 2, 4)]
    )
    limits = find_limits(timeline, graph)
    assert limits.chain == ((OP, 0), (TRANSFER, 0), (TRANSFER, 1), (OP, 1))
    assert seconds_of(limits) == ([0.0, 1.0, 1.0], 3.0, 0.0)


def test_a_control_edge_is_followed_by_the_op_whose_end_it_carries():
    machine = make_machine(2)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, [])], control=[(0, 1)])
    timeline = make_timeline(machine, [(0, 1, 0, 2), (1, 0, 3, 4)], [(-1, 0, 1, 0, 2, 3)])
    assert find_limits(timeline, graph).chain == ((OP, 0), (TRANSFER, 0), (OP, 1))


def test_ops_that_start_together_are_a_stage_that_waits_for_the_inputs_of_all():
    # cpu0           ├ b ┤      a stage of b and c, 4-6; only c needs what cpu1 sends (3-4)
    #                ├ c ┤
    machine = make_machine(2)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, []), ("c", FORWARD, [0])])
    timeline = make_timeline(
        machine, [(0, 1, 0, 3), (1, 0, 4, 6), (2, 0, 4, 6)], [(0, 0, 1, 0, 3, 4)]
    )
    limits = find_limits(timeline, graph)
    assert limits.chain == ((OP, 0), (TRANSFER, 0), (OP, 1))
    assert limits.total_seconds == 6.0


def test_time_that_nothing_explains_is_waiting():
    # measured: cpu0 ├ a ┤ ...... ├ b ┤ ...   step ends after b
    machine = make_machine(1)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, [0])])
    timeline = make_timeline(machine, [(0, 0, 1, 2), (1, 0, 6, 7)], step=8.0)
    limits = find_limits(timeline, graph)
    assert seconds_of(limits) == ([2.0], 0.0, 6.0)
    assert "bound by waiting" in explain(limits, timeline, make_plan(graph, machine, [0, 0]))


def test_a_producer_that_seems_to_end_late_still_explains_its_consumer():
    # Two clocks: the transfer is read as ending .1 after the op that waited for it began.
    machine = make_machine(2)
    graph = make_graph([("a", FORWARD, []), ("b", FORWARD, [0])])
    timeline = make_timeline(machine, [(0, 1, 0, 1), (1, 0, 2, 3)], [(0, 0, 1, 0, 1, 2.1)])
    limits = find_limits(timeline, graph)
    assert limits.chain == ((OP, 0), (TRANSFER, 0), (OP, 1))
    assert limits.total_seconds == pytest.approx(3.0)


def test_nothing_at_all_has_no_chain():
    machine = make_machine(1)
    graph = make_graph([("w", Phase.SOURCE, [])])
    timeline = make_timeline(machine, [])
    limits = find_limits(timeline, graph)
    assert limits.chain == ()
    assert limits.total_seconds == 0.0
    assert "empty" in explain(limits, timeline, make_plan(graph, machine, [0]))


@pytest.mark.parametrize(
    ("bound", "contiguous", "sentence"),
    [
        (3.9999e-3, False, "that no plan takes less than 99.9 % of"),  # rounded down, or it lies
        (3e-3, True, "that no contiguous plan takes less than 75 % of"),
        (4e-3, False, "that no plan is better, but for rounding."),
        (4e-3 - 1e-15, True, "that no contiguous plan is better, but for rounding."),
    ],
)
def test_what_the_bound_proves_is_never_overstated(bound, contiguous, sentence):
    machine = make_machine(1)
    graph = make_graph([("a", Phase.FORWARD, [])])
    timeline = make_timeline(machine, [(0, 0, 0, 1)])
    plan = make_plan(graph, machine, [0], lower_bound=bound, contiguous=contiguous)
    assert sentence in explain(find_limits(timeline, graph), timeline, plan)


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_add_up_to_the_step_and_the_chain_never_overlaps(seed):
    rng = np.random.default_rng(seed)
    graph = chain_of(8, repeats=3)
    machine = make_machine(3)
    placement = rng.integers(0, 3, len(graph))
    timeline = run_in_order(graph, machine, placement, rng.choice([0.0, 1e-6, 5e-6], len(graph)))
    limits = find_limits(timeline, graph)
    assert limits.total_seconds == pytest.approx(timeline.step_seconds, rel=1e-12)
    # A simulated step that starts at 0 is explained whole.
    assert limits.waiting_seconds == pytest.approx(0.0, abs=1e-15)
    ends = 0.0
    for kind, i in limits.chain:
        starts = timeline.op_starts if kind == OP else timeline.transfer_starts
        assert starts[i] >= ends - 1e-15
        ends = (timeline.op_ends if kind == OP else timeline.transfer_ends)[i]
