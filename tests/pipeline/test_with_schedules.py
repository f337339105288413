"""Schedules put on a plan: its promises follow, are kept in its file, and hold when it runs."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dovetail import pipeline
from dovetail.errors import OrderError, OutOfMemoryError, UsageError
from dovetail.executors import run
from dovetail.frontends import capture
from dovetail.machine import Device, Link, Machine
from dovetail.plans import Schedule, Stage, check, load_plan
from tests.support.builders import Op, graph_of, machine_of, plan_by_hand, source

X, A, B, C, D, E = range(6)


def forked():
    """x ─► a ─► b ─► d, and a ─► c ─► e; each op takes 1 s, a send 1 s."""
    return graph_of(
        source("x", "input"),
        Op("a", ("x",)),
        Op("b", ("a",)),
        Op("c", ("a",)),
        Op("d", ("b",)),
        Op("e", ("c",)),
    )


def plan_of(graph, machine, placement, orders, **changes):
    seconds = np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, 1)
    promised = {"lower_bound": 0.5, "bound_proof": "critical path", "compute_seconds": seconds}
    return plan_by_hand(graph, machine, placement, orders=orders, **promised | changes)


def stages(*pairs):
    return Schedule(tuple(Stage(ops, seconds) for ops, seconds in pairs))


def test_value_and_memory_are_the_simulators_and_stay_so_in_the_file(tmp_path):
    #  d0  ├ a ┤├── b c: 1.5 ──┤├── e ──┤         the sends of a and b take 1 s
    #  d1                       ├─ b ─►├── d ──┤
    graph, machine = forked(), machine_of(2, bandwidth=1e30, latency=1.0)
    plan = plan_of(graph, machine, [0, 0, 0, 0, 1, 0], ((A, B, C, E), (D,)))
    schedule = stages(((A,), 1.0), ((B, C), 1.5), ((E,), 1.0))
    found = pipeline.with_schedules(plan, graph, (schedule, None))
    assert found.value == 1 + 1.5 + 1 + 1
    assert found.peak_memory_bytes == (24, 16)  # a, b and c; x is gone
    assert (found.orders, found.lower_bound) == (((), (D,)), 0.0)
    found.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.schedules == (schedule, None)
    check(loaded, graph)
    pipeline.verify(loaded, graph)
    with pytest.raises(pipeline.opening.PromiseError):
        pipeline.verify(replace(loaded, schedules=None, orders=plan.orders), graph)


def test_a_device_without_stages_does_not_wait_for_what_waits_for_it():
    #  d1 ran e before d; now e comes with the stage of b and c, and d only after it
    graph, machine = forked(), machine_of(2, bandwidth=1e30, latency=0.0)
    plan = plan_of(graph, machine, [0, 0, 1, 0, 0, 1], ((A, C, D), (E, B)))
    check(plan, graph)
    schedule = stages(((A,), 1.0), ((C, D), 1.0))  # e needs c, d needs b: in (e, b) for ever
    with pytest.raises(OrderError, match="would wait for ever"):
        check(replace(plan, schedules=(schedule, None)), graph)
    found = pipeline.with_schedules(plan, graph, (schedule, None))
    assert found.orders == ((), (B, E))
    pipeline.verify(found, graph)
    freed = pipeline.with_schedules(found, graph, (None, None))
    assert freed.orders == ((A, C, D), (B, E))


def test_the_load_is_what_it_was_and_keeps_its_bound():
    graph, machine = forked(), machine_of(2)
    plan = plan_of(graph, machine, [0] * 6, ((A, B, C, D, E), ()), objective="load")
    found = pipeline.with_schedules(plan, graph, (stages(((A, B, C, D, E), 2.0)), None))
    assert (found.value, found.lower_bound) == (5.0, plan.lower_bound)
    assert pipeline.timeline_of(found, graph).step_seconds == 2.0


def test_what_check_refuses_is_refused():
    graph, machine = forked(), machine_of(2)
    plan = plan_of(graph, machine, [0] * 6, ((A, B, C, D, E), ()))
    for schedule in (stages(((A, B), 1.0)), stages(((B, A, C, D, E), 1.0))):
        with pytest.raises(OrderError):
            pipeline.with_schedules(plan, graph, (schedule, None))
    every = stages(((A, B, C, D, E), 1.0))
    with pytest.raises(UsageError, match="one, or None, for each of 2 devices"):
        pipeline.with_schedules(plan, graph, (every,))
    with pytest.raises(OutOfMemoryError) as raised:  # together they hold more than in turn
        pipeline.with_schedules(replace(plan, caps=(("d0", 47),)), graph, (every, None))
    assert raised.value.needed_bytes == 48


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        first = [layer(x).relu() for layer in self.layers]
        return torch.stack([layer(part) for layer, part in zip(self.layers, first, strict=True)])


def test_a_plan_with_stages_runs_from_its_file(tmp_path):
    torch.manual_seed(0)
    captured = capture(Branches().eval(), torch.randn(2, 8))
    graph, rates, core = captured.graph, {"float32": 1e10}, min(os.sched_getaffinity(0))
    devices = tuple(
        Device(f"cpu{i}", "cpu", "test", 1 << 33, rates, 1e10, 1e-6, (core,) * (2 - i))
        for i in range(2)
    )
    links = tuple(Link(f"cpu{i}", f"cpu{1 - i}", 1e10, 1e-6, f"cpu{i}") for i in range(2))
    machine = Machine("two", devices, "cpu0", links)
    ops = np.flatnonzero(~graph.is_source).tolist()
    last = [op for op in ops if graph.kinds[op] in ("aten.stack", "aten.cat")]
    placement = np.zeros(len(graph), np.int32)
    placement[last] = 1
    plan = plan_of(graph, machine, placement, None)
    mine = tuple(op for op in ops if op not in last)
    schedule = stages((mine[:6], 1.0), (mine[6:], 2.0))
    pipeline.with_schedules(plan, graph, (schedule, None)).save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    pipeline.verify(loaded, graph)
    with run(loaded, captured) as placed, torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 8)
            torch.testing.assert_close(placed.step(x), captured.module(x))
        starts = placed.timeline().order_of(0)
    assert set(starts[:6]) == set(mine[:6])
