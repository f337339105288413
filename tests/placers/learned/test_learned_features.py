"""What policies see: finite, named, and free of what names a graph or a machine."""

import dataclasses

import numpy as np
import pytest

from dovetail.costs import analytic_costs
from dovetail.graph import Groups, colocate, group
from dovetail.graph.synthetic import layered
from dovetail.machine.presets import combine
from dovetail.placers.etf import etf_schedule
from dovetail.placers.learned import features
from dovetail.placers.learned.features import DEVICE_NAMES, NUMBER_NAMES, POSITIONS, column, look
from dovetail.placers.learned.records import PlacementTask
from dovetail.placers.list_scheduling import limits_of, tasks_of
from tests.support.learned_problems import random_graph, random_problem, random_task

FIELDS = ("kind_shares", "shapes", "numbers", "seconds", "devices", "links")


def device_column(view, name):
    return view.devices[:, DEVICE_NAMES.index(name)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("training", [True, False])
def test_a_view_is_finite_and_has_the_shapes_it_promises(seed, training):
    problem = random_problem(seed, devices=2 + seed % 2, training=training)
    view = look(problem)
    groups, devices = problem.groups.count, problem.devices
    assert view.numbers.shape == (groups, features.NUMBERS) == (groups, len(NUMBER_NAMES))
    assert view.shapes.shape == (groups, features.SHAPES)
    assert view.devices.shape == (devices, features.DEVICE_NUMBERS)
    assert view.links.shape == (devices, devices, features.LINK_NUMBERS)
    assert view.seconds.shape == view.allowed.shape == (groups, devices)
    for name in FIELDS:
        values = getattr(view, name)
        assert values.dtype == np.float32 and np.isfinite(values).all(), name
    assert np.array_equal(view.free, np.isin(np.arange(groups), problem.free))
    sums = np.add.reduceat(view.kind_shares, view.kind_offsets[:-1])
    np.testing.assert_allclose(sums, 1.0, rtol=1e-6)
    order = np.lexsort((view.sources, view.destinations))
    assert np.array_equal(order, np.arange(len(order)))


def test_a_device_that_may_run_nothing_and_a_group_that_may_be_on_one_alone_are_still_finite():
    graph, of_groups = random_graph(3)
    graph = dataclasses.replace(
        graph, device_kinds=(*(((),) * (len(graph) - 1)), ("cpu",)), kinds=graph.kinds
    )
    machine = combine("2 x k80 + haswell")
    hosted = combine("2 x k80")  # its host runs nothing
    for where in (machine, hosted):
        fitting = graph if where is machine else dataclasses.replace(
            graph, device_kinds=((),) * len(graph)
        )  # fmt: skip
        costs = analytic_costs(fitting, where)
        view = look(PlacementTask("one", fitting, where, costs, of_groups).problem())
        assert all(np.isfinite(getattr(view, name)).all() for name in FIELDS)
    assert not view.allowed[:, -1].any()
    assert device_column(view, "width")[-1] == 0


def test_equal_cuts_of_a_position_are_parts_of_equal_work():
    graph = layered(4000, seed=1, training=True)
    machine = combine("4 x k80 + haswell")
    task = PlacementTask("one", graph, machine, analytic_costs(graph, machine), colocate(graph))
    problem = task.problem()
    view = look(problem)
    work = problem.work_seconds.min(axis=1)
    for name in ("order", "level", "module", "parameter"):
        part = np.minimum((4 * view.numbers[:, column(name)]).astype(int), 3)
        shares = np.bincount(part, weights=work, minlength=4) / work.sum()
        assert shares.max() - shares.min() < 0.2, name


def test_the_place_of_gradients_and_updates_is_that_of_their_forward_op():
    graph, _ = random_graph(1)
    alone = Groups(np.arange(len(graph), dtype=np.int32), len(graph))
    task = random_task(1)
    view = look(PlacementTask("one", graph, task.machine, task.costs, alone).problem())
    order = view.numbers[:, column("order")]
    for name, op in graph.index.items():
        if name[0] in "gu":
            assert order[op] == order[graph.index["f" + name[1:]]]


def test_like_devices_are_told_apart_and_share_the_scale_by_their_speed():
    graph, of_groups = random_graph(2)
    machine = combine("3 x k80 + haswell")
    costs = analytic_costs(graph, machine)
    view = look(PlacementTask("one", graph, machine, costs, of_groups).problem())
    gpus = view.devices[:3]
    assert len(np.unique(gpus, axis=0)) == 3
    names = [name for name in DEVICE_NAMES if not name.startswith(("sin", "cos", "like", "cent"))]
    same = [DEVICE_NAMES.index(name) for name in names]
    assert (gpus[:, same] == gpus[0, same]).all()
    widths = device_column(view, "width")
    assert widths.sum() == pytest.approx(1.0) and widths[0] == widths[1] == widths[2]


def test_cuts_name_the_device_that_a_list_schedule_gives_each_group():
    problem = random_problem(7, devices=3)
    view = look(problem)
    listed = etf_schedule(tasks_of(problem), limits_of(problem, 0)).placed
    inside = features.cuts(view)[:, :, POSITIONS.index("schedule")]
    assert np.array_equal(inside.argmax(axis=1), listed)
    assert (inside.sum(axis=1) == 1).all()


def test_what_is_as_large_relative_to_the_graph_looks_the_same():
    """Twice as slow devices and links: every relative number stays."""
    task = random_task(5)
    machine = dataclasses.replace(
        task.machine,
        links=tuple(
            dataclasses.replace(
                link,
                bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / 2,
                latency_seconds=2 * link.latency_seconds,
            )
            for link in task.machine.links
        ),
    )
    costs = dataclasses.replace(task.costs, compute_seconds=2 * task.costs.compute_seconds)
    slower = PlacementTask("slower", task.graph, machine, costs, task.groups)
    one, other = look(task.problem()), look(slower.problem())
    for name in FIELDS:
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name), atol=2e-3, err_msg=name
        )


def test_a_large_graph_is_looked_at_per_op():
    graph = layered(12_000, seed=3, training=True)
    machine = combine("8 x p100 + broadwell")
    costs = analytic_costs(graph, machine)
    fine, coarse = colocate(graph), group(graph)
    for groups in (fine, coarse):
        view = look(PlacementTask("large", graph, machine, costs, groups).problem())
        assert view.groups == groups.count and np.isfinite(view.numbers).all()
