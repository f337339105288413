"""The proven bound of pipelines: its values on random small steps, as they were recorded.

A bound may become tighter, with a new record, and must not become looser or change by itself.
"""

import pytest

from dovetail.costs import analytic_costs
from dovetail.graph.grouping import colocate
from dovetail.machine import Device, Link, Machine
from dovetail.placers import make_problem
from dovetail.placers.pipeline_bounds import pipeline_bound
from dovetail.placers.pipelines import PipelineProblem
from tests.support.training_graphs import random_step

FILL, TRIP = "fill, work and drain (dynamic programme)", "round trip (dynamic programmes)"
LOAD = "load balance of all micro-batches (LP)"
RECORDED = []


def bound_of(seed, layers, rates, micro_batches, schedules):
    """The bound of a random step on CPUs of so many times 1e9 flops, each two of them linked."""
    graph = random_step(seed, layers)
    devices = tuple(
        Device(f"d{i}", "cpu", f"m{rate}", 10**9, {"float32": rate * 1e9}, 1e12)
        for i, rate in enumerate(rates)
    )
    names = [device.name for device in devices]
    links = tuple(Link(a, b, 1e9, 1e-7, f"{a}->{b}") for a in names for b in names if a != b)
    machine = Machine("cpus", devices, "d0", links)
    costs = analytic_costs(graph, machine)
    placing = make_problem(
        graph, machine, costs, None, groups=colocate(graph), objective="pipeline"
    )
    return pipeline_bound(
        PipelineProblem(
            graph, machine, costs, placing.groups, placing.allowed, placing.capacities,
            micro_batches, schedules,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("case", "seconds", "proof"), RECORDED)
def test_the_bound_is_as_it_was_recorded(case, seconds, proof):
    bound = bound_of(*case)
    assert bound.seconds == pytest.approx(seconds, rel=1e-12)
    assert bound.proof == proof
