"""Each rule of the simulator, drawn."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dovetail.costs import Costs
from dovetail.errors import NoDeviceError, OrderError, UnplacedOpError, UsageError
from dovetail.plans import Schedule, Stage
from dovetail.simulator import Simulator, lower_bound
from tests.support.simulator_cases import Builder, all_links, machine_of


def simulator(graph, machine, seconds):
    """`seconds` [ops], the same on every device, or [ops, devices]."""
    seconds = np.array(seconds, float)
    if seconds.ndim == 1:
        seconds = np.repeat(seconds[:, None], len(machine.devices), axis=1)
    return Simulator(graph, machine, Costs(seconds, "given"))


def spans(timeline):
    starts, ends = timeline.op_starts.tolist(), timeline.op_ends.tolist()
    return dict(zip(timeline.ops.tolist(), zip(starts, ends, strict=True), strict=True))


def transfers(timeline):
    columns = (
        timeline.transfer_tensors,
        timeline.transfer_destinations,
        timeline.transfer_starts,
        timeline.transfer_ends,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def memory(timeline, device):
    times, sizes = timeline.memory_times[device], timeline.memory_bytes[device]
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


def two(latency=1.0, bandwidth=np.inf):
    return machine_of("ab", all_links("ab", latency, bandwidth))


def test_rule_1_a_device_runs_the_ready_op_of_highest_priority_then_lowest_index():
    #   no priorities   a ├0┤├1┤├2┤        priorities 0, 1, 1   a ├1┤├2┤├0┤
    b = Builder()
    for _ in range(3):
        b.op()
    run = simulator(b.build(), two(), [1, 1, 1])
    placement = np.zeros(3, np.int32)
    assert run.timeline(placement).order_of(0) == (0, 1, 2)
    assert run.timeline(placement, priorities=np.array([0.0, 1, 1])).order_of(0) == (1, 2, 0)


def test_what_takes_no_time_stands_in_the_order_before_what_its_device_starts_then():
    #   ranked   a 1├──0──┤         op 1 takes 0 s and goes first: 5 s follow it
    #            b  ├────2────┤
    b = Builder()
    b.op(sizes=())
    b.op(sizes=(0,))
    b.op([0])
    costs = Costs([[1.0] * 2, [0.0] * 2, [5.0] * 2], "given")
    graph, machine, placement = b.build(), two(latency=0.0), np.array([0, 0, 1])
    timeline = Simulator(graph, machine, costs, ranked=True).timeline(placement)
    orders = timeline.order_of(0), timeline.order_of(1)
    assert orders == ((1, 0), (2,))
    again = Simulator(graph, machine, costs).timeline(placement, orders=orders)
    assert again.step_seconds == timeline.step_seconds == 5
    plain = Simulator(graph, machine, costs).timeline(placement)
    assert (plain.order_of(0), plain.step_seconds) == ((0, 1), 6)


def test_rule_1_an_explicit_order_waits_for_its_next_op():
    #   a ├──0──┤
    #           └─►t0─►┐
    #   b              ├─1─┤├─2─┤     op 2 was ready at 0
    b = Builder()
    b.op()
    b.op([0])
    b.op()
    run = simulator(b.build(), two(), [2, 1, 1])
    timeline = run.timeline(np.array([0, 1, 1]), orders=((0,), (1, 2)))
    assert spans(timeline) == {0: (0, 2), 1: (3, 4), 2: (4, 5)}


def test_rule_2_a_parameter_lives_with_its_update_and_is_sent_to_other_readers():
    #   a   p ├═══ t0 ══►┐             op 2 updates p on a: waits for its reader on b
    #   b                ├─1─┤─ctl─►
    #   a                          ├─2─┤
    b = Builder()
    weight = b.source("parameter", 8)
    b.op([weight], sizes=(1,))
    b.op([weight], sizes=(8,), aliases=weight, overwrites=True, phase=3)
    b.control.append((1, 2))
    timeline = simulator(b.build(), two(), [0, 1, 1]).timeline(np.array([9, 1, 0]))
    assert spans(timeline) == {1: (1, 2), 2: (3, 4)}
    assert transfers(timeline) == [(0, 1, 0, 1), (-1, 0, 2, 3)]
    assert memory(timeline, 0) == [(0, 8)]
    assert memory(timeline, 1) == [(0, 0), (0, 8), (1, 9), (2, 0)]


def test_rule_2_what_is_never_written_is_resident_wherever_it_is_read():
    b = Builder()
    weight = b.source("parameter", 8)
    b.op([weight])
    b.op([weight])
    timeline = simulator(b.build(), two(), [0, 1, 1]).timeline(np.array([0, 0, 1]))
    assert spans(timeline) == {1: (0, 1), 2: (0, 1)}
    assert transfers(timeline) == []
    assert timeline.peak_memory_bytes.tolist() == [9, 9]


def test_rule_3_a_tensor_is_sent_once_per_destination_and_channels_serve_in_order():
    #   a ├0┤   (outputs t0, t1)
    #    a->b   ├─ t0 ─┤├─ t1 ─┤        two readers of t0 on b, one send; 1 + 4 / 4 seconds
    #   b              ├1┤├2┤  ├3┤
    b = Builder()
    b.op(sizes=(4, 4))
    b.op([0])
    b.op([0])
    b.op([1])
    timeline = simulator(b.build(), two(1, 4), [1, 1, 1, 1]).timeline(np.array([0, 1, 1, 1]))
    assert transfers(timeline) == [(0, 1, 1, 3), (1, 1, 3, 5)]
    assert spans(timeline) == {0: (0, 1), 1: (3, 4), 2: (4, 5), 3: (5, 6)}


def test_rule_3_a_device_that_is_its_links_channel_sends_before_it_runs_another_op():
    #   a ├0┤├─ t0 ─┤├2┤     the copy is a's own work; with a channel of its own op 2 starts at 1
    #   b            ├1┤
    b = Builder()
    b.op()
    b.op([0])
    b.op()
    machine = machine_of("ab", [("a", "b", 2.0, np.inf, "a"), ("b", "a", 2.0, np.inf, "b")])
    timeline = simulator(b.build(), machine, [1, 1, 1]).timeline(np.array([0, 1, 0]))
    assert transfers(timeline) == [(0, 1, 1, 3)]
    assert spans(timeline) == {0: (0, 1), 1: (3, 4), 2: (3, 4)}


def between(kinds, send, receive):
    """Devices "a" and "b" of these kinds, whose messages take this time of both ends."""
    machine = two()
    devices = tuple(replace(d, kind=k) for d, k in zip(machine.devices, kinds, strict=True))
    links = tuple(
        replace(link, send_seconds=send, receive_seconds=receive) for link in machine.links
    )
    return replace(machine, devices=devices, links=links)


def test_rule_3_messages_keep_both_ends_from_their_next_op():
    #   a ├0┤ s ├1┤      s: it sends what 0 has made      3 waits for it
    #   b ├─2─┤ r ├3┤    r: it receives while it runs 2, and goes on with 3 after that
    b = Builder()
    sent = b.op()
    b.op()
    b.op()
    b.op(sent)
    machine = between(["cpu", "cpu"], 0.5, 0.25)
    run = simulator(b.build(), machine, [1, 1, 4, 1])
    timeline = run.timeline(np.array([0, 0, 1, 1], np.int32))
    assert spans(timeline) == {0: (0, 1), 1: (1.5, 2.5), 2: (0, 4), 3: (4.25, 5.25)}
    assert transfers(timeline) == [(0, 1, 1, 2)]
    # Who waits has received by the time that a message is there.
    waits = simulator(b.build(), machine, [1, 1, 1.5, 1]).timeline(np.array([0, 0, 1, 1]))
    assert spans(waits)[3] == (2, 3)


@pytest.mark.parametrize("kinds", [["gpu", "gpu"], ["cpu", "gpu"], ["gpu", "cpu"]])
def test_rule_3_the_thread_that_issues_to_gpus_runs_ahead_of_them(kinds):
    #   a ├──0──┤├1┤├2┤      the three messages are issued at 2, 4 and 6
    b = Builder()
    made = [b.op()[0] for _ in range(3)]
    for tensor in made:
        b.op([tensor])
    run = simulator(b.build(), between(kinds, 2.0, 0.0), [3, 1, 1, 1, 1, 1])
    timeline = run.timeline(np.array([0, 0, 0, 1, 1, 1], np.int32))
    assert [span[0] for span in spans(timeline).values()][:3] == [0, 3, 4]
    assert transfers(timeline) == [(0, 1, 3, 4), (1, 1, 4, 5), (2, 1, 6, 7)]


def test_rule_3_a_cpu_sends_by_itself_to_a_gpu_of_another_host():
    #   a ├0┤ s ├1┤      b's thread receives, which takes no time of b and none of a
    b = Builder()
    sent = b.op()
    b.op()
    b.op(sent)
    machine = between(["cpu", "gpu"], 0.5, 0.25)
    hosts = tuple(replace(d, host=d.name) for d in machine.devices)
    timeline = simulator(b.build(), replace(machine, devices=hosts), [1, 1, 1]).timeline(
        np.array([0, 0, 1], np.int32)
    )
    assert spans(timeline) == {0: (0, 1), 1: (1.5, 2.5), 2: (2, 3)}
    # On one host the thread of its GPUs sends.
    timeline = simulator(b.build(), machine, [1, 1, 1]).timeline(np.array([0, 0, 1], np.int32))
    assert spans(timeline) == {0: (0, 1), 1: (1, 2), 2: (2, 3)}


def test_rule_3_what_a_thread_receives_delays_what_it_sends_next():
    #   a ├────0────┤       its thread receives t1 at 3, for 4 s. So t0 leaves at 5 instead of 4
    #   b ├1┤ t1            (the thread's sum: 4 for t1, and 1 for t0)
    b = Builder()
    first, second = b.op(), b.op()
    b.op(first)
    b.op(second)
    machine = between(["gpu", "cpu"], 1.0, 4.0)
    hosts = tuple(replace(d, host=d.name) for d in machine.devices)
    run = simulator(b.build(), replace(machine, devices=hosts), [4, 2, 1, 1])
    assert transfers(run.timeline(np.array([0, 1, 1, 0], np.int32))) == [(1, 0, 2, 3), (0, 1, 5, 6)]


def test_rule_3_without_a_link_a_tensor_takes_two_hops_through_the_host():
    #   a ├0┤─t0─►host─t0─►b ├1┤       and host needs it too: the first hop is shared
    b = Builder()
    b.op(sizes=(6,))
    b.op([0])
    b.op([0])
    pairs = (("a", "h"), ("h", "a"), ("h", "b"), ("b", "h"))
    links = [(x, y, 1.0, np.inf, x + y) for x, y in pairs]
    machine = machine_of("hab", links)
    timeline = simulator(b.build(), machine, [1, 1, 0.5]).timeline(np.array([1, 2, 0]))
    assert transfers(timeline) == [(0, 0, 1, 2), (0, 2, 2, 3)]
    assert spans(timeline) == {0: (0, 1), 1: (3, 4), 2: (2, 2.5)}
    # On the host until the second hop has ended, though its own reader ended at 2.5.
    assert memory(timeline, 0) == [(0, 0), (1, 6), (2, 7), (2.5, 6), (3, 0)]


def test_rule_3_control_edges_queue_after_tensors_and_empty_tensors_cost_latency():
    #   a->b   ├─ t0, empty ─┤├─ end of op 0 ─┤
    b = Builder()
    b.op(sizes=(0,))
    b.op([0])
    b.op()
    b.control.append((0, 2))
    timeline = simulator(b.build(), two(1, 1), [1, 1, 1]).timeline(np.array([0, 1, 1]))
    assert transfers(timeline) == [(0, 1, 1, 2), (-1, 1, 2, 3)]
    assert spans(timeline)[2] == (3, 4)


def test_rule_4_at_one_instant_ends_come_before_frees_before_starts():
    #   a ├─0─┤├─1─┤      op 0's unused 5 bytes are freed before op 1 takes 5: never 10
    b = Builder()
    b.op(sizes=(5,))
    b.op(sizes=(5,))
    timeline = simulator(b.build(), two(), [1, 1]).timeline(np.array([0, 0]))
    assert memory(timeline, 0) == [(0, 0), (0, 5), (2, 0)]


def test_rule_5_a_view_keeps_the_local_copy_of_its_base():
    #   a ├0┤                          t0: 8 bytes
    #       └─ t0 ─►┐
    #   b           ├1┤├2┤├─3─┤        1 views t0's copy, 3 reads the view
    b = Builder()
    b.op(sizes=(8,))
    b.op([0], sizes=(2,), aliases=0)
    b.op(sizes=(1,))
    b.op([1], sizes=(1,))
    run = simulator(b.build(), two(), [1, 1, 4, 1])
    timeline = run.timeline(np.array([0, 1, 1, 1]))
    assert spans(timeline) == {0: (0, 1), 2: (0, 4), 1: (4, 5), 3: (5, 6)}
    assert memory(timeline, 0) == [(0, 0), (0, 8), (2, 0)]
    assert memory(timeline, 1) == [(0, 0), (0, 1), (1, 9), (4, 8), (5, 9), (6, 0)]


def test_rule_5_sending_a_view_sends_the_views_bytes_and_outputs_live_to_the_end():
    b = Builder()
    b.op(sizes=(8,))
    b.op([0], sizes=(2,), aliases=0)
    b.op([1], sizes=(1,))
    timeline = simulator(b.build(outputs=[1]), two(1, 1), [1, 1, 1]).timeline(np.array([0, 0, 1]))
    assert transfers(timeline) == [(1, 1, 2, 5)]
    assert memory(timeline, 0) == [(0, 0), (0, 8)]
    assert memory(timeline, 1) == [(0, 0), (2, 2), (5, 3), (6, 0)]


def test_rule_5_a_peak_above_capacity_is_infeasible_and_still_valued():
    b = Builder()
    b.op(sizes=(8,))
    run = Simulator(b.build(), two(), Costs(np.ones((1, 2)), "given"), capacities=np.array([7, 8]))
    found = run.evaluate(np.array([[0], [1]]))
    assert found.feasible.tolist() == [False, True]
    assert found.values.tolist() == [1, 1]
    assert found.peak_memory_bytes.tolist() == [[8, 0], [0, 8]]


def test_rule_6_a_stage_waits_for_all_its_inputs_and_runs_as_one():
    #   a ├──0──┤─t0─►┐
    #   b             ├─ 1 2 3: 2.5 ─┤     3 reads 2; outputs allocated at the start
    b = Builder()
    b.op()
    b.op([0])
    b.op(sizes=(2,))
    b.op([2], sizes=(4,))
    run = simulator(b.build(), two(), [2, 9, 9, 9])
    schedule = Schedule((Stage((1, 2, 3), 2.5),))
    timeline = run.timeline(np.array([0, 1, 1, 1]), schedules=(None, schedule))
    assert spans(timeline) == {0: (0, 2), 1: (3, 5.5), 2: (3, 5.5), 3: (3, 5.5)}
    assert memory(timeline, 1) == [(0, 0), (2, 1), (3, 8), (5.5, 0)]


def test_rule_7_the_step_ends_with_the_last_event_bit_for_bit_the_same():
    b = Builder()
    b.op()
    b.op([0])
    run = simulator(b.build(), two(0.3), [0.1, 0.2])
    runs = [run.timeline(np.array([0, 1])) for _ in range(3)]
    assert {r.step_seconds for r in runs} == {0.1 + 0.3 + 0.2}
    assert len({r.op_starts.tobytes() + r.transfer_ends.tobytes() for r in runs}) == 1


def test_an_order_that_cannot_complete_names_the_device():
    b = Builder()
    b.op()
    b.op([0])
    run = simulator(b.build(), two(), [1, 1])
    with pytest.raises(OrderError, match=r"cannot complete.*op1") as raised:
        run.timeline(np.array([0, 0]), orders=((1, 0), None))
    assert raised.value.device == "a"


def test_an_order_must_name_each_op_of_its_device_once():
    b = Builder()
    b.op()
    b.op()
    run = simulator(b.build(), two(), [1, 1])
    for order in ((0,), (0, 0, 1), (0, 1, 1), (7, 0)):
        with pytest.raises(OrderError, match="exactly once"):
            run.timeline(np.array([0, 0]), orders=(order, None))


def test_a_stage_of_negative_seconds_is_an_error():
    b = Builder()
    b.op()
    with pytest.raises(OrderError, match="negative"):
        simulator(b.build(), two(), [1]).timeline(
            np.array([0]), schedules=(Schedule((Stage((0,), -1.0),)), None)
        )


def test_a_device_that_cannot_run_an_op_makes_the_value_infinite_and_a_timeline_an_error():
    b = Builder()
    b.op()
    run = simulator(b.build(), two(), [[1, np.inf]])
    found = run.evaluate(np.array([[0], [1]]))
    assert found.values.tolist() == [1, np.inf]
    assert found.feasible.tolist() == [True, False]
    with pytest.raises(UnplacedOpError) as raised:
        run.timeline(np.array([1]))
    assert (raised.value.op, raised.value.device) == ("op0", "b")


def test_unknown_devices_short_placements_and_objectives_are_errors():
    b = Builder()
    b.op()
    run = simulator(b.build(), two(), [1])
    for placement in ([[2]], [[-1]], [[0, 0]], [[]]):
        with pytest.raises(UnplacedOpError):
            run.evaluate(np.array(placement, np.int32))
    with pytest.raises(UsageError):
        run.evaluate(np.array([[0]]), "latency")


def test_the_critical_path_includes_the_sends_it_cannot_avoid():
    #   op 0 only on a, op 1 only on b: 1 + (1 + 4/2) + 1
    b = Builder()
    b.op(sizes=(4,))
    b.op([0])
    costs = Costs([[1, np.inf], [np.inf, 1]], "given")
    bound = lower_bound(b.build(), two(1, 2), costs)
    assert (bound.seconds, bound.proof) == (5, "critical path")


def test_load_balance_splits_independent_ops():
    b = Builder()
    for _ in range(10):
        b.op()
    bound = lower_bound(b.build(), two(), Costs(np.ones((10, 2)), "given"), "load")
    assert bound.proof == "load balance (LP)"
    assert bound.seconds == pytest.approx(5, rel=1e-6)


def test_what_is_not_allowed_does_not_help_and_an_op_without_device_is_an_error():
    b = Builder()
    for _ in range(4):
        b.op()
    graph, costs = b.build(), Costs(np.ones((4, 2)), "given")
    allowed = np.array([[True, False]] * 4)
    assert lower_bound(graph, two(), costs, allowed=allowed).seconds == pytest.approx(4)
    allowed[2] = False
    with pytest.raises(NoDeviceError) as raised:
        lower_bound(graph, two(), costs, allowed=allowed)
    assert raised.value.op == "op2"


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_of_a_tiny_graph_beats_its_bound(seed):
    rng = np.random.default_rng(seed)
    b = Builder()
    for op in range(6):
        b.op(sorted(rng.choice(op, min(op, 2), replace=False).tolist()), sizes=(3,))
    graph, machine = b.build(), machine_of("abc", all_links("abc", 0.1, 10.0))
    costs = Costs(rng.random((6, 3)), "given")
    every = np.array(list(itertools.product(range(3), repeat=6)), np.int32)
    for objective in ("step", "load"):
        best = Simulator(graph, machine, costs).evaluate(every, objective).values.min()
        assert 0 < lower_bound(graph, machine, costs, objective).seconds <= best
