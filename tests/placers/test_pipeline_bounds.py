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
PATH = "critical path of one micro-batch"
RECORDED = [
    ((4185, 8, (1.0, 1.0, 2.0), 8, ("gpipe",)), 7.318368937994131e-05, TRIP),
    ((8684, 3, (0.7, 1.3, 2.0), 8, ("1f1b",)), 1.8419999981579998e-05, FILL),
    ((4080, 8, (1.0, 2.0), 3, ("zero-bubble",)), 2.8639499971360504e-05, FILL),
    ((1854, 5, (0.7, 1.3, 2.0), 8, ("gpipe", "1f1b")), 3.623201043766911e-05, TRIP),
    ((4039, 6, (1.0, 1.0, 1.5, 1.5), 2, ("interleaved",)), 7.838666658828e-06, PATH),
    ((9403, 4, (1.0, 2.0), 7, ("gpipe", "1f1b", "zero-bubble")), 3.3523999966476e-05, FILL),
    ((6380, 4, (1.0, 2.0), 3, ("1f1b",)), 1.65504999834495e-05, FILL),
    ((7288, 4, (1.0, 1.0, 1.0), 2, ("zero-bubble",)), 1.5693999984306e-05, FILL),
    ((87, 4, (1.0, 1.0, 1.0), 3, ("gpipe", "1f1b")), 2.1775999978224e-05, TRIP),
    ((2727, 5, (1.0, 1.0, 2.0), 3, ("1f1b",)), 1.8431603497193398e-05, TRIP),
    ((8834, 8, (1.0, 1.0, 1.0), 3, ("gpipe", "1f1b", "zero-bubble")), 4.4397999955602007e-05, FILL),
    ((5917, 6, (1.0, 1.0, 1.0), 3, ("1f1b",)), 3.595498824529502e-05, TRIP),
    ((4322, 3, (1.0, 1.0, 2.0), 4, ("zero-bubble",)), 1.6238999983761e-05, FILL),
    ((9881, 7, (1.0, 2.0), 6, ("gpipe", "1f1b")), 5.07314999492685e-05, TRIP),
    ((5536, 3, (1.0, 1.0, 2.0), 4, ("interleaved",)), 1.0573249989426751e-05, LOAD),
    ((5014, 6, (1.0, 1.0, 2.0), 3, ("gpipe", "1f1b", "zero-bubble")), 2.240099997759901e-05, FILL),
    ((7884, 6, (1.0, 1.0, 1.0), 2, ("gpipe",)), 2.6648763645226236e-05, TRIP),
    ((6623, 3, (1.0, 1.0, 1.5, 1.5), 8, ("zero-bubble",)), 2.3741666642925004e-05, FILL),
    ((4031, 9, (0.7, 1.3, 2.0), 4, ("gpipe",)), 4.342720001237637e-05, TRIP),
    ((8396, 5, (1.0, 1.0, 1.5, 1.5), 4, ("1f1b",)), 2.419859698100974e-05, TRIP),
    ((6017, 9, (1.0, 1.0, 2.0), 2, ("gpipe", "1f1b")), 2.4115999975884e-05, FILL),
    ((7093, 3, (1.0, 1.0, 1.0), 4, ("interleaved",)), 1.3347999986651999e-05, LOAD),
    ((5569, 5, (1.0, 1.0, 1.5, 1.5), 2, ("gpipe",)), 1.4375636053332701e-05, TRIP),
    ((2439, 8, (1.0, 1.0, 2.0), 5, ("gpipe", "1f1b")), 5.0737999949262e-05, TRIP),
]
"""(seed, layers, speeds, micro-batches, schedules) -> seconds and proof of the bound."""


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
