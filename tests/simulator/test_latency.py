"""The latency of one sample, on drawn cases, against a plain reference and the published values."""

import json

import numpy as np
import pytest

from dovetail.costs import Costs
from dovetail.errors import UsageError
from dovetail.graph import Phase
from dovetail.instances import instance_from, load_instance
from dovetail.simulator import Simulator
from tests.support.builders import Op, graph_of, machine_of
from tests.support.instance_files import INSTANCES, edge, instance_of, node, spread


def latency_ms(instance, device_of):
    simulator = Simulator(instance.graph, instance.machine, instance.costs)
    rows = np.array([spread(instance, device_of)])
    return simulator.evaluate(rows, "latency").values[0] * 1e3


def test_an_accelerator_fetches_computes_and_hands_over_in_one_call():
    #  cpu0  |1 10|                      |4 10|
    #  acc0       |in 2|2: 1|3: 1|out 3|
    instance = instance_of(
        [node(1), node(2), node(3), node(4)],
        [edge(1, 2, 2.0), edge(1, 3, 2.0), edge(2, 3, 7.0), edge(3, 4, 3.0)],
    )
    placement = {1: "cpu0", 2: "acc0", 3: "acc0", 4: "cpu0"}
    assert latency_ms(instance, placement) == pytest.approx(10 + 2 + 1 + 1 + 3 + 10)


def test_a_call_waits_for_all_its_inputs_and_all_its_outputs_come_at_its_end():
    #  acc0  |1: 1|out 5|
    #  acc1             |in 5|3: 1|2: 1|out 4|
    #  cpu0                                  |4 10|   2 needs nothing, and yet it waits
    instance = instance_of([node(1), node(2), node(3), node(4)], [edge(1, 3, 5.0), edge(2, 4, 4.0)])
    placement = {1: "acc0", 2: "acc1", 3: "acc1", 4: "cpu0"}
    assert latency_ms(instance, placement) == pytest.approx(6 + 5 + 2 + 4 + 10)


def test_ops_on_cpus_run_at_once_and_send_nothing():
    instance = instance_of(
        [node(1), node(2), node(3)], [edge(1, 3, 50.0), edge(2, 3, 50.0)], accelerators=0
    )
    assert latency_ms(instance, {1: "cpu0", 2: "cpu0", 3: "cpu0"}) == pytest.approx(20)


def test_a_tensor_goes_to_each_device_once_and_leaves_once():
    instance = instance_of(
        [node(1), node(2), node(3), node(4)],
        [edge(1, 2, 3.0), edge(1, 3, 3.0), edge(1, 4, 3.0)],
    )
    # Out of acc0 once for both; into acc1 once for 2 and 3.
    placement = {1: "acc0", 2: "acc1", 3: "acc1", 4: "cpu0"}
    assert latency_ms(instance, placement) == pytest.approx(max(1 + 3 + 3 + 2, 1 + 3 + 10))


def test_a_call_that_waits_for_itself_never_ends():
    instance = instance_of([node(1), node(2), node(3)], [edge(1, 2), edge(2, 3)])
    assert latency_ms(instance, {1: "acc0", 2: "cpu0", 3: "acc0"}) == np.inf
    two = instance_of([node(i) for i in (1, 2, 3, 4)], [edge(1, 2), edge(3, 4)])
    assert latency_ms(two, {1: "acc0", 2: "acc1", 3: "acc1", 4: "acc0"}) == np.inf


def test_an_op_where_it_cannot_run_takes_for_ever():
    instance = instance_of([node(1, supportedOnFpga=0)], [])
    assert latency_ms(instance, {1: "acc0"}) == np.inf


def test_in_training_the_backward_ops_are_a_second_call_and_fetch_nothing_twice():
    #  cpu0  |1 10|              |3 10|
    #  acc0       |in 2|2: 1|out 4|    |in 5|4: 1|   4 reads 1 and 2, which are there
    instance = instance_of(
        [node(1), node(2), node(3), node(4, isBackwardNode=True)],
        [edge(1, 2, 2.0), edge(2, 3, 4.0), edge(3, 4, 5.0), edge(2, 4, 4.0), edge(1, 4, 2.0)],
    )
    placement = {1: "cpu0", 2: "acc0", 3: "cpu0", 4: "acc0"}
    assert latency_ms(instance, placement) == pytest.approx(10 + 2 + 1 + 4 + 10 + 5 + 1)


def test_memory_binds():
    instance = instance_of([node(1, size=60.0), node(2, size=60.0)], [edge(1, 2)])
    simulator = Simulator(instance.graph, instance.machine, instance.costs)
    rows = [spread(instance, p) for p in ({1: "acc0", 2: "acc0"}, {1: "acc0", 2: "acc1"})]
    rows = np.array([[row[2 * (i // 2) + 1] for i in range(4)] for row in rows])
    assert simulator.evaluate(rows, "latency").feasible.tolist() == [False, True]


def reference_latency(file, device_of):
    """The rules by recursion over nodes and calls. device_of: node id -> accelerator, -1: CPU."""
    nodes = {n["id"]: n for n in file["nodes"]}
    cost = {e["sourceId"]: e["cost"] for e in file["edges"]}
    reads = {i: {e["sourceId"] for e in file["edges"] if e["destId"] == i} for i in nodes}
    ends, open_calls = {}, set()

    def end_of(ident):
        device = device_of[ident]
        if device < 0:
            first = max((end_of(u) for u in reads[ident]), default=0.0)
            return first + nodes[ident]["cpuLatency"]
        if device in open_calls:
            raise RecursionError
        if device not in ends:
            open_calls.add(device)
            inside = {i for i in nodes if device_of[i] == device}
            outside = {u for i in inside for u in reads[i]} - inside
            leaving = {u for u in inside for i in set(nodes) - inside if u in reads[i]}
            seconds = sum(nodes[i]["fpgaLatency"] for i in inside)
            seconds += sum(cost[u] for u in outside | leaving)
            ends[device] = max(map(end_of, outside), default=0.0) + seconds
            open_calls.remove(device)
        return ends[device]

    try:
        return max(map(end_of, nodes))
    except RecursionError:
        return np.inf


@pytest.mark.parametrize("name", ["bert24_inference", "gnmt_inference"])
def test_the_walk_equals_the_rules_by_recursion(name):
    path = INSTANCES / "latency" / f"{name}.json"
    file, instance = json.loads(path.read_text()), load_instance(path)
    simulator = Simulator(instance.graph, instance.machine, instance.costs)
    rng = np.random.default_rng(0)
    order = {op: i for i, op in enumerate(instance.graph.names)}
    finite = 0
    for _ in range(60):
        cuts = np.sort(rng.integers(0, len(order), 3))
        device_of, row = {}, np.zeros(len(instance.graph), np.int32)
        for n in file["nodes"]:
            device = int(np.searchsorted(cuts, order[n["name"]]))
            device = -1 if rng.random() < rng.choice([0.0, 0.05]) else device
            device_of[n["id"]] = device
            row[order[n["name"]]] = device if device >= 0 else file["maxFPGAs"]
        expected = reference_latency(file, device_of)
        finite += np.isfinite(expected)
        found = simulator.evaluate(row[None], "latency").values[0] * 1e3
        assert found == pytest.approx(expected)
    assert 5 < finite < 60


def test_the_published_latency_of_the_experts_bert24_is_reproduced():
    # The published split has six parts, where the file allows five accelerators.
    file = json.loads((INSTANCES / "latency" / "bert24_inference.json").read_text())
    instance = instance_from({**file, "maxFPGAs": 6}, "bert24.json")
    parts = [range(1, 9), range(9, 13), range(13, 17), range(17, 21), range(21, 25), range(25, 33)]
    device_of = {f"node{i}": f"acc{k}" for k, part in enumerate(parts) for i in part}
    assert latency_ms(instance, device_of) == pytest.approx(111.937, abs=5e-4)


@pytest.mark.parametrize(
    ("graph", "machine"),
    [
        (graph_of(Op("a")), machine_of(2)),
        (
            graph_of(Op("a"), Op("b", ("a",), phase=Phase.UPDATE)),
            instance_of([node(1)], []).machine,
        ),
        (graph_of(Op("a"), Op("b"), control=[("a", "b")]), instance_of([node(1)], []).machine),
    ],
)
def test_what_has_no_latency_is_refused(graph, machine):
    costs = Costs(np.ones((len(graph), len(machine.devices))), "given")
    with pytest.raises(UsageError, match="published instances alone"):
        Simulator(graph, machine, costs).evaluate(np.zeros((1, len(graph)), np.int32), "latency")
