"""Files of published instances: what is read from them, what is refused, what is written."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from dovetail.costs import Costs, analytic_costs
from dovetail.errors import CycleError, ExportError, FileFormatError
from dovetail.graph import Phase, colocate
from dovetail.instances import (
    instance_from,
    instance_to_dict,
    is_instance,
    load_instance,
    save_instance,
)
from dovetail.machine import parse_machine
from dovetail.simulator import Simulator
from tests.support.builders import Op, graph_of, source
from tests.support.instance_files import INSTANCES, edge, file_of, instance_of, node, spread

FILES = sorted(INSTANCES.rglob("*.json"))
GROUPS = {
    "bert24_inference": 32,
    "bert24_training": 32,
    "gnmt_inference": 96,
    "resnet50_inference": 177,
    "resnet50_training": 177,
    "op_bert_l-3_inference": 128,
    "op_bert_l-6_inference": 227,
    "op_bert_l-6_training": 247,
    "op_bert_l-12_inference": 424,
    "op_resnet50_training": 193,
}


def values(instance, placements, objective):
    simulator = Simulator(instance.graph, instance.machine, instance.costs)
    return simulator.evaluate(placements, objective)


def random_placements(instance, count, rng):
    groups = colocate(instance.graph)
    devices = rng.integers(0, len(instance.machine.devices) - 1, (count, groups.count))
    return devices[:, groups.of_op].astype(np.int32)


def test_all_twelve_files_are_there():
    assert len(FILES) == 12
    assert "MIT" in (INSTANCES / "LICENSE.txt").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_file_becomes_the_published_number_of_groups_and_devices(path):
    raw = json.loads(path.read_text())
    instance = load_instance(path)
    assert is_instance(raw)
    assert colocate(instance.graph).count == GROUPS[path.stem]
    assert (~instance.graph.is_source).sum() == len(raw["nodes"])
    kinds = [device.kind for device in instance.machine.devices]
    assert kinds == ["gpu"] * raw["maxFPGAs"] + ["cpu"] * raw["maxCPUs"] + ["host"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_what_is_written_again_has_the_same_values_for_every_placement(path, tmp_path):
    instance = load_instance(path)
    save_instance(instance.graph, instance.machine, instance.costs, tmp_path / "again.json")
    again = load_instance(tmp_path / "again.json")
    placements = random_placements(instance, 5, np.random.default_rng(0))
    for objective in ("load", "latency", "step"):
        mine, theirs = (values(one, placements, objective) for one in (instance, again))
        np.testing.assert_allclose(mine.values, theirs.values, rtol=1e-12)
        np.testing.assert_array_equal(mine.peak_memory_bytes, theirs.peak_memory_bytes)
        np.testing.assert_array_equal(mine.feasible, theirs.feasible)


def reference_load_ms(file, device_of):
    """The formula of the paper, over nodes: accelerators from 0, then CPUs."""
    nodes = {n["id"]: n for n in file["nodes"]}
    cost = {e["sourceId"]: e["cost"] for e in file["edges"]}
    loads = []
    for device in range(file["maxFPGAs"] + file["maxCPUs"]):
        inside = {i for i in nodes if device_of[i] == device}
        if device >= file["maxFPGAs"]:
            loads.append(sum(nodes[i]["cpuLatency"] for i in inside))
            continue
        comes = {e["sourceId"] for e in file["edges"] if e["destId"] in inside} - inside
        goes = {e["sourceId"] for e in file["edges"] if e["destId"] not in inside} & inside
        loads.append(
            sum(nodes[i]["fpgaLatency"] for i in inside) + sum(cost[i] for i in comes | goes)
        )
    return max(loads)


@pytest.mark.parametrize("name", ["bert24_training", "gnmt_inference", "op_bert_l-3_inference"])
def test_loads_are_those_of_the_papers_formula(name):
    path = INSTANCES / "throughput" / f"{name}.json"
    file, instance = json.loads(path.read_text()), load_instance(path)
    placements = random_placements(instance, 5, np.random.default_rng(1))
    index = {n["id"]: instance.graph.index[n["name"]] for n in file["nodes"]}
    supported = {n["id"]: n["supportedOnFpga"] for n in file["nodes"]}
    for placement in placements:
        for ident, op in index.items():
            if not supported[ident]:
                placement[op] = file["maxFPGAs"]
        expected = reference_load_ms(file, {i: int(placement[op]) for i, op in index.items()})
        found = values(instance, placement[None], "load").values[0] * 1e3
        assert found == pytest.approx(expected)


def test_ids_may_stand_in_any_order_and_names_may_repeat_or_be_missing():
    instance = instance_of(
        [node(30, name="x"), node(7, name="x"), node(-2, name="y"), node(9)],
        [edge(9, 30), edge(30, 7), edge(7, -2)],
    )
    assert instance.graph.names == ("#9", "x#30", "x#7", "y")


def test_names_that_would_be_mistaken_for_sizes_give_way_to_ids():
    instance = instance_of([node(1, name="a", size=5.0), node(2, name="a.size", size=5.0)], [])
    assert len(set(instance.graph.names)) == 4
    perverse = [node(1, name="a#2"), node(2, name="a", size=1.0), node(3, name="a")]
    assert len(set(instance_of(perverse, []).graph.names)) == 4


def test_optional_fields_have_their_defaults_and_unknown_ones_are_ignored():
    plain = {"id": 1, "cpuLatency": 2, "fpgaLatency": 1, "layerId": 5, "subnodes": []}
    instance = instance_from({**file_of([plain], []), "comment": "x"}, "f.json")
    assert len(instance.graph) == 1
    assert instance.graph.device_kinds == ((),)
    assert instance.graph.colocation.tolist() == [-1]
    assert instance.graph.phases.tolist() == [Phase.FORWARD]


@pytest.mark.parametrize("no", [0, False, 0.0])
@pytest.mark.parametrize("yes", [1, True, 1.0])
def test_flags_may_be_numbers(no, yes):
    nodes = [node(1, isBackwardNode=yes), node(2, isBackwardNode=no)]
    nodes = [{**nodes[0], "supportedOnFpga": no}, {**nodes[1], "supportedOnFpga": yes}]
    graph = instance_of(nodes, []).graph
    assert graph.device_kinds == (("cpu",), ())
    assert graph.phases.tolist() == [Phase.BACKWARD, Phase.FORWARD]


def test_colours_may_be_numbers_texts_null_or_absent():
    nodes = [node(i, colorClass=c) for i, c in enumerate([4, "a", None, 4, "a", None])]
    groups = colocate(instance_of([*nodes, node(9)], []).graph)
    assert groups.of_op.tolist() == [0, 1, 2, 0, 1, 3, 4]


def test_an_edge_given_twice_costs_once_and_lone_nodes_stay():
    once = instance_of([node(1), node(2), node(3)], [edge(1, 2, 4.0)])
    twice = instance_of([node(1), node(2), node(3)], [edge(1, 2, 4.0), edge(1, 2, 4.0)])
    rows = np.array([[0, 1, 0]])
    assert values(once, rows, "load").values == values(twice, rows, "load").values
    assert len(once.graph) == 3


def test_a_latency_may_be_missing_where_no_device_could_use_it():
    cpu_only = {"id": 1, "cpuLatency": 2.0, "supportedOnFpga": 0}
    assert len(instance_of([cpu_only], []).graph) == 1
    assert len(instance_of([{"id": 1, "fpgaLatency": 2.0}], [], cpus=0).graph) == 1


def test_a_machine_may_have_accelerators_or_cpus_alone():
    for accelerators, cpus in ((2, 0), (0, 2)):
        instance = instance_of(
            [node(1), node(2)], [edge(1, 2, 3.0)], accelerators=accelerators, cpus=cpus
        )
        assert values(instance, np.array([[0, 1]]), "load").feasible.all()


def test_gzip_is_unpacked(tmp_path):
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(file_of([node(1)], [])).encode()))
    assert load_instance(path).name == "small"


NAN = float("nan")


@pytest.mark.parametrize(
    ("nodes", "edges", "changes", "complaint"),
    [
        ([], [], {}, "there are none"),
        ([node(1), node(1)], [], {}, "two have the id 1"),
        ([node(1)], [edge(1, 5)], {}, "1 -> 5: no node 5"),
        ([node(1, cpu=-1.0)], [], {}, "node 1: .*cpuLatency.*greater than or equal to 0"),
        ([node(1, cpu=NAN)], [], {}, "node 1: .*cpuLatency.*finite"),
        ([node(7, acc=float("inf"))], [], {}, "node 7: .*fpgaLatency"),
        ([node(7, acc=1e300)], [], {}, "node 7: .*fpgaLatency"),
        ([node(7, size=-3)], [], {}, "node 7: .*size"),
        ([node(7, size=1e300)], [], {}, "node 7: sizes up to here"),
        ([node(7, name="x", size=2.0**61), node(8, size=2.0**61)], [], {}, "node 8: sizes"),
        ([{"id": 3, "fpgaLatency": 1.0}], [], {}, "node 3 has no cpuLatency"),
        ([{"id": 3, "cpuLatency": 1.0}], [], {}, "node 3 has no fpgaLatency"),
        ([node("x")], [], {}, "node x: .*valid integer"),
        ([{"cpuLatency": 1.0}], [], {}, r"nodes\.0\.id"),
        ([node(1), node(2)], [edge(1, 2, -1.0)], {}, "edge 1 -> 2: .*cost"),
        ([node(1), node(2)], [edge(1, 2, NAN)], {}, "edge 1 -> 2: .*cost"),
        (
            [node(1, name="conv"), node(2), node(3)],
            [edge(1, 2, 1.0), edge(1, 3, 2.0)],
            {},
            r"node 1 \(conv\): its edges cost 1.0 and 2.0",
        ),
        ([node(1)], [], {"maxFPGAs": 0, "maxCPUs": 0}, "no device"),
        ([node(1)], [], {"maxFPGAs": 10**9}, "maxFPGAs"),
        ([node(1)], [], {"maxFPGAs": -1}, "maxFPGAs"),
        ([node(1)], [], {"maxSizePerFPGA": NAN}, "maxSizePerFPGA"),
        ([node(1)], [], {"maxCPUs": None}, "maxCPUs"),
    ],
)
def test_what_cannot_be_is_refused_and_the_node_is_named(nodes, edges, changes, complaint):
    with pytest.raises(FileFormatError, match=complaint) as raised:
        instance_from({**file_of(nodes, edges), **changes}, "f.json")
    assert raised.value.path == "f.json"


def test_a_cycle_is_named_node_by_node():
    nodes = [node(i, name=n) for i, n in enumerate("abcd")]
    with pytest.raises(CycleError) as raised:
        instance_of(nodes, [edge(0, 1), edge(1, 2), edge(2, 3), edge(3, 1)])
    cycle = raised.value.cycle
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"b", "c", "d"}


def test_a_self_loop_is_a_cycle_of_one():
    with pytest.raises(CycleError) as raised:
        instance_of([node(4)], [edge(4, 4)])
    assert raised.value.cycle == ("4", "4")


def test_accelerators_may_hold_any_number_of_bytes():
    big = instance_of([node(1, size=2.0**55)], [], size=1e300)
    assert values(big, np.array([[0, 0]]), "load").feasible.all()


def test_a_saved_graph_is_no_instance():
    assert not is_instance({"format": "dovetail.graph", "nodes": [], "edges": []})
    assert not is_instance([])


def trained():
    return graph_of(
        source("x", "input", 400),
        source("w", output_bytes=1000),
        source("c", "constant", 24),
        Op("a", ("x", "w"), flops=10**6, output_bytes=80),
        Op("b", ("a", "c"), flops=10**6, output_bytes=40),
        Op("ga", ("b", "a"), phase=Phase.BACKWARD, gradient_of="a", output_bytes=1000),
        Op("update", ("w", "ga"), phase=Phase.UPDATE, overwrites="w", output_bytes=1000),
        outputs=("b",),
    )


def test_a_captured_graph_on_like_accelerators_can_be_written_and_planned_for():
    graph, machine = trained(), parse_machine("2 x p100 + haswell")
    raw = instance_to_dict(graph, machine, analytic_costs(graph, machine))
    nodes = {n["name"]: n for n in raw["nodes"]}
    assert list(nodes) == ["x", "a", "b", "ga", "update"]
    assert (nodes["x"]["supportedOnFpga"], nodes["x"]["cpuLatency"]) == (False, 0.0)
    assert nodes["b"]["size"] == 40 + 24
    assert nodes["a"]["size"] == 80
    assert nodes["update"]["size"] == 1000
    assert nodes["a"]["colorClass"] == nodes["ga"]["colorClass"]
    assert "colorClass" not in nodes["b"]
    assert [nodes[n]["isBackwardNode"] for n in nodes] == [False, False, False, True, True]
    assert raw["maxSizePerFPGA"] == machine.devices[0].memory_bytes
    again = instance_from(raw, "again.json")
    assert values(again, np.array([spread(again, dict.fromkeys(nodes, "cpu0"))]), "load").feasible


def test_a_machine_of_unlike_accelerators_cannot_be_written():
    graph, machine = trained(), parse_machine("k80 + p100 + haswell")
    with pytest.raises(ExportError, match="other memory"):
        instance_to_dict(graph, machine, analytic_costs(graph, machine))
    same = tuple(replace(d, memory_bytes=10**9) for d in machine.devices)
    with pytest.raises(ExportError, match="takes other time") as raised:
        instance_to_dict(graph, replace(machine, devices=same), analytic_costs(graph, machine))
    assert raised.value.where == "op 'a'"


def test_an_op_that_no_cpu_can_run_cannot_be_written():
    graph, machine = trained(), parse_machine("2 x p100 + haswell")
    seconds = analytic_costs(graph, machine).compute_seconds.copy()
    seconds[graph.index["b"], 2] = np.inf
    with pytest.raises(ExportError, match="op 'b' cannot run on a CPU"):
        instance_to_dict(graph, machine, Costs(seconds, "given"))
