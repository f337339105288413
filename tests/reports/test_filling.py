from dataclasses import replace

import numpy as np
import pytest

from dovetail.graph.records import Phase
from dovetail.reports.gantt import fill, filling_chart, throughput
from dovetail.transforms import Towers
from tests.support.report_samples import EVIL, make_graph, make_machine, make_plan

F = Phase.FORWARD


def chain(placement, devices=3):
    graph = make_graph([(f"op{i}", F, [i - 1] if i else []) for i in range(len(placement))])
    return graph, make_plan(graph, make_machine(devices), placement, objective="load")


def test_a_sample_waits_for_its_input_and_for_the_one_before_it():
    #  cpu0  1 2 3
    #  cpu2   111222333          the slowest: one leaves every 3
    #  cpu1      11 22 33
    graph, plan = chain([0, 2, 1])
    found = fill(plan, graph, {"cpu0": 1.0, "cpu1": 2.0, "cpu2": 3.0}, samples=3)
    assert found.devices == (0, 2, 1)
    assert found.starts.tolist() == [[0, 1, 2], [1, 4, 7], [4, 7, 10]]
    assert found.ends.tolist() == [[1, 2, 3], [4, 7, 10], [6, 9, 12]]
    assert found.period_seconds == 3


def test_devices_that_read_in_a_circle_have_no_order():
    graph, plan = chain([0, 1, 0])
    assert fill(plan, graph, {"cpu0": 1.0, "cpu1": 2.0}) is None


def test_a_device_that_runs_nothing_is_no_stage():
    graph, plan = chain([0, 1])
    found = fill(plan, graph, {"cpu0": 1.0, "cpu1": 2.0, "cpu2": 0.5})
    assert found.devices == (0, 1)


def test_branches_run_side_by_side_and_join():
    graph = make_graph([("a", F, []), ("b", F, []), ("c", F, [0, 1])])
    plan = make_plan(graph, make_machine(3), [0, 1, 2], objective="load")
    found = fill(plan, graph, {"cpu0": 1.0, "cpu1": 4.0, "cpu2": 1.0}, samples=2)
    assert found.starts.tolist() == [[0, 1], [0, 4], [4, 8]]


@pytest.mark.parametrize(
    ("shapes", "replicas", "said"),
    [
        (((32, 8),), 1, ("128 samples/s", "4 steps a second of 32")),
        (((32, 8),), 2, ("256 samples/s", "4 steps a second of 64")),
        (((1, 8),), 1, ("4 samples/s", "once the pipeline is full")),
        ((), 1, ("4 samples/s", "once the pipeline is full")),
    ],
)
def test_throughput_counts_the_samples_of_a_step(shapes, replicas, said):
    _, plan = chain([0, 1])
    plan = replace(plan, source=replace(plan.source, shapes=shapes), value=0.25)
    if replicas > 1:
        plan = replace(plan, transforms=(Towers(replicas),))
    assert throughput(plan) == said
    assert throughput(replace(plan, value=0.0)) == ("", "")


def test_the_chart_has_every_stage_of_every_sample_in_its_devices_colour():
    graph, plan = chain([0, 2, 1])
    found = fill(plan, graph, {"cpu0": 1.0, "cpu1": 2.0, "cpu2": 3.0}, samples=4)
    chart = filling_chart(found, ("cpu0", "cpu1", EVIL))
    assert EVIL not in chart
    for device in range(3):
        assert chart.count(f'class="d{device}') == 4
    assert np.isfinite(found.ends).all()
