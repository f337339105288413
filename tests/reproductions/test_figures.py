"""Pictures and loads of plans: cells in their places, colours of devices, seconds that add up."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from dovetail.costs import analytic_costs
from dovetail.graph import Groups, Phase, colocate
from dovetail.simulator import Simulator
from reproductions.figures import graph_svg, work_of
from reproductions.page import load_chart, loss_chart
from reproductions.records import LossCurve
from tests.support.bench_samples import CURVES, EVIL, GPUS, work
from tests.support.builders import Op, graph_of, machine_of, source


def training_step(names=("first", "second")):
    """A chain of modules: forward, backward, an update each."""
    ops = [source("x", "input")]
    reads = "x"
    for name in names:
        ops += [source(f"{name}.w", module=name)]
        ops += [Op(f"{name}/f", (reads, f"{name}.w"), module=name, flops=10**6, output_bytes=400)]
        reads = f"{name}/f"
    for name in reversed(names):
        ops.append(
            Op(f"{name}/b", (reads, f"{name}.w"), module=name, phase=Phase.BACKWARD,
               flops=2 * 10**6, gradient_of=f"{name}/f", output_bytes=400)
        )  # fmt: skip
        ops.append(
            Op(f"{name}/u", (f"{name}/b", f"{name}.w"), module=name, phase=Phase.UPDATE,
               flops=10**5, overwrites=f"{name}.w")
        )  # fmt: skip
        reads = f"{name}/b"
    return graph_of(*ops)


def by_module(graph, machine):
    names = list(dict.fromkeys(m for m in graph.modules if m))
    devices = len(machine.devices)
    return np.array([names.index(m) % devices if m else 0 for m in graph.modules], dtype=np.int32)


def drawn(graph, machine, placement, groups=None):
    costs = analytic_costs(graph, machine)
    groups = groups or colocate(graph)
    return graph_svg(graph, machine, costs, groups, placement)


def parsed(markup):
    return ElementTree.fromstring(f"<all>{markup}</all>")


def texts(markup):
    return [element.text for element in parsed(markup).iter("text")]


def cells(path):
    return len(re.findall("M", path.get("d")))


def test_seconds_are_those_of_the_simulation_split_by_phase():
    graph, machine = training_step(), machine_of(2)
    placement, costs = by_module(graph, machine), analytic_costs(graph, machine)
    found = work_of(graph, machine, costs, colocate(graph), placement)
    timeline = Simulator(graph, machine, costs).timeline(placement)
    assert found.forward_seconds == pytest.approx({"d0": 1e-3, "d1": 1e-3})
    assert found.backward_seconds == pytest.approx({"d0": 2e-3, "d1": 2e-3})
    assert found.update_seconds == pytest.approx({"d0": 1e-4, "d1": 1e-4})
    sums = {
        name: found.forward_seconds[name]
        + found.backward_seconds[name]
        + found.update_seconds[name]
        for name in machine.device_names
    }
    assert list(sums.values()) == pytest.approx(timeline.busy_seconds.tolist())
    assert found.transfer_seconds == pytest.approx({"d0->d1": 1.4e-6, "d1->d0": 1.4e-6})


def test_a_picture_has_a_row_a_module_and_forward_stands_above_backward():
    graph, machine = training_step(), machine_of(2)
    found = texts(drawn(graph, machine, by_module(graph, machine)))
    assert found == ["forward", "first", "second", "backward and update", "first", "second"]


def test_inference_has_no_backward_band():
    graph = graph_of(source("x", "input"), Op("a/f", ("x",), module="a"))
    assert texts(drawn(graph, machine_of(1), np.zeros(2, np.int32))) == ["forward", "a"]


def test_each_device_has_its_colour_and_its_name_below():
    graph, machine = training_step(("a", "b", "c")), machine_of(3)
    picture = parsed(drawn(graph, machine, by_module(graph, machine)))
    svg = picture.find("svg")
    colours = [path.get("class") for path in svg.iter("path") if path.get("class") != "between"]
    assert colours == ["c0", "c1", "c2"] * 2
    assert [item.find("i").tail for item in picture.iter("li")] == ["d0", "d1", "d2"]
    assert svg.get("role") == "img"
    assert "2 cells" not in svg.get("aria-label")  # forward, backward, update: 3 of each
    assert "3 cells on d0, 3 cells on d1, 3 cells on d2" in svg.get("aria-label")


def test_lines_join_devices_and_nothing_else():
    graph, machine = training_step(), machine_of(2)
    apart = parsed(drawn(graph, machine, by_module(graph, machine))).iter("path")
    lines = [path for path in apart if path.get("class") == "between"]
    assert [cells(path) for path in lines] == [1, 1]  # an activation forward, a gradient back
    assert lines[0].find("title").text.startswith("400 B between devices over 1 edges")
    together = parsed(drawn(graph, machine, np.zeros(len(graph), np.int32)))
    assert not [p for p in together.iter("path") if p.get("class") == "between"]


def test_an_unrolled_network_reads_layers_by_steps():
    ops = [source("x", "input")]
    for step in range(5):
        below = "x"
        for layer in ("0", "1"):
            before = [f"{layer}/{step - 1}"] if step else []
            ops.append(Op(f"{layer}/{step}", (below, *before), module=f"lstm.{layer}"))
            below = f"{layer}/{step}"
    graph, machine = graph_of(*ops), machine_of(2)
    picture = parsed(drawn(graph, machine, by_module(graph, machine)))
    rows = {}
    for path in picture.iter("path"):
        if path.get("class") in ("c0", "c1"):
            places = re.findall(r"M([\d.]+) ([\d.]+)h", path.get("d"))
            rows[path.get("class")] = [float(x) for x, _ in places]
            assert len({y for _, y in places}) == 1
    assert len(rows["c0"]) == len(rows["c1"]) == 5
    assert rows["c0"] == sorted(rows["c0"])
    assert rows["c1"][:4] == rows["c0"][1:]  # a layer runs one step behind the one below it


def test_names_of_modules_and_devices_are_escaped():
    graph, machine = training_step(("a", EVIL)), machine_of(2)
    picture = drawn(graph, machine, by_module(graph, machine))
    assert "<script" not in picture
    assert "<img" not in picture
    assert any(text.startswith("…") or "alert" in text for text in texts(picture))


def test_a_large_graph_stays_below_60_kb_whatever_its_placement():
    rng = np.random.default_rng(0)
    ops = [source("x", "input")]
    for i in range(6000):
        reads = {"x"} if i < 20 else {ops[int(r)].name for r in rng.integers(i - 18, i + 1, 2)}
        ops.append(Op(f"op{i}", tuple(reads), module=f"layer{i % 30}.part{i % 300}"))
    graph, machine = graph_of(*ops), machine_of(9)
    placement = rng.integers(0, 9, len(graph)).astype(np.int32)
    alone = Groups(np.arange(len(graph), dtype=np.int32), len(graph))
    picture = drawn(graph, machine, placement, alone)
    assert len(picture.encode()) <= 60_000
    assert picture.count("<path") == 9 + 1
    titles = [title.text for title in parsed(picture).iter("title")]
    assert sum(int(t.split()[0]) for t in titles if "groups" in t) == 6000


def test_bars_are_as_long_as_their_seconds():
    chart = parsed(load_chart(work(busy=(0.4, 0.2, 0.0), carried=0.1), "a & b"))
    widths = {}
    for rect in chart.iter("rect"):
        kind = rect.get("class")
        widths.setdefault(kind, []).append(float(rect.get("width")))
    assert widths["backward"][0] == pytest.approx(2 * widths["forward"][0], abs=0.2)
    assert widths["forward"][0] == pytest.approx(2 * widths["forward"][1], abs=0.2)
    assert widths["transfer"] == pytest.approx([widths["forward"][0]], abs=0.2)  # .1 s both
    found = texts(load_chart(work(), ""))
    assert found[:2] == [GPUS[0], "400 ms"]
    assert "k80:1->k80:0" not in found  # it carries nothing


def test_curves_end_with_the_first_of_them_and_share_their_axes():
    chart = parsed(loss_chart(CURVES, "loss"))
    lines = [path for path in chart.iter("path") if "line" in (path.get("class") or "")]
    points = [re.findall(r"([\d.]+) ([\d.]+)", path.get("d")) for path in lines]
    assert [len(of) for of in points] == [3, 4]  # planned takes 4 s; expert began 3 steps by then
    assert points[0][0] == points[1][0]  # both begin with the loss of 3
    assert points[0][1][0] == points[1][2][0]  # expert's second step begins at 2 s
    assert [line.find("title").text for line in lines] == ["expert", "planned"]


def test_a_chart_without_curves_says_so_and_names_are_escaped():
    assert "Not yet run" in loss_chart([], "")
    assert "Not yet run" in loss_chart([LossCurve("a", "b", 1.0, [])], "")
    assert "<script" not in loss_chart([LossCurve("a", EVIL, 1.0, [1.0, 0.5])], EVIL)
    assert "<script" not in load_chart(work(), EVIL)
