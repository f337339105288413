"""Random problems small enough to evaluate every placement, judged by the simulator."""

from dataclasses import replace

import numpy as np

from dovetail.graph import Groups, Phase
from dovetail.machine import Device, Link, Machine
from dovetail.placers.exhaustive import every_placement
from dovetail.simulator import Simulator
from tests.support.placer_instances import (
    BANDWIDTH,
    LATENCY_SECONDS,
    build_graph,
    build_machine,
    build_problem,
)

SHARES = (None, 0.8, 0.6, 0.5, 0.42)
"""Of all bytes, what each device holds: none binding to so tight that often nothing fits."""


def small_problem(seed, objective, *, send_seconds=0.0, **options):
    """At most 8 groups and 3 devices. By turns: GPUs with links between them; over a host that
    runs nothing; CPUs that make their copies themselves. Devices alike in every other problem."""
    rng = np.random.default_rng(seed)
    groups, devices = int(rng.integers(2, 9)), int(rng.integers(2, 4))
    graph = _random_graph(rng, 2 * groups)
    own = np.arange(2 * groups) % groups
    of_op = np.sort(np.where(rng.random(2 * groups) < 0.7, own, rng.permutation(own)))
    of_op = np.unique(of_op, return_inverse=True)[1].astype(np.int32)
    share = SHARES[seed % len(SHARES)]
    memory = 10**9 if share is None else int(share * graph.tensor_bytes.sum())
    machine = (_over_links, _over_host, _over_own_channels)[seed % 3](devices, memory)
    links = tuple(replace(link, send_seconds=send_seconds) for link in machine.links)
    machine = replace(machine, links=links)
    speeds = np.ones(len(machine.devices))
    if seed % 2:
        speeds = rng.uniform(0.7, 1.5, size=len(machine.devices))
    seconds = rng.uniform(0.2, 2.0, size=(len(graph), 1)) * speeds
    grouped = Groups(of_op, int(of_op.max()) + 1)
    problem = build_problem(graph, machine, groups=grouped, seconds=seconds, **options)
    simulator = Simulator(graph, machine, problem.costs, capacities=problem.capacities)
    return replace(
        problem,
        objective=objective,
        evaluate=lambda placements: simulator.evaluate(placements, objective),
    )


def best_by_far(problem):
    """The value of the best placement that fits, or None: of every one of them."""
    found = problem.evaluate(problem.spread(every_placement(problem)))
    return found.values[found.feasible].min() if found.feasible.any() else None


def _random_graph(rng, ops):
    """An input, a parameter that is read twice, and ops that read up to three others each."""
    reads = [[], []]
    for i in range(2, ops):
        reads.append(sorted({int(j) for j in rng.integers(0, i, size=rng.integers(1, 4))}))
    sizes = rng.integers(1, 200, size=ops)
    waits = np.array([[2, ops - 1]]) if ops > 4 else np.empty((0, 2))
    phases = [Phase.FORWARD] * ops
    sources = {0: "input", 1: "parameter"}
    return build_graph(reads, sizes=sizes, phases=phases, sources=sources, control=waits)


def _over_links(devices, memory_bytes):
    return build_machine(devices, memory_bytes=memory_bytes)


def _over_host(devices, memory_bytes):
    links = [end for i in range(devices) for end in ((f"gpu{i}", "host"), ("host", f"gpu{i}"))]
    return _machine("gpu", devices, memory_bytes, [(a, b, f"{a}->{b}") for a, b in links], True)


def _over_own_channels(devices, memory_bytes):
    names = [f"cpu{i}" for i in range(devices)]
    links = [(a, b, a) for a in names for b in names if a != b]
    return _machine("cpu", devices, memory_bytes, links, False)


def _machine(kind, devices, memory_bytes, ends, host):
    rates = ({"float32": 1.0}, 1.0, 0.0)
    built = [Device(f"{kind}{i}", kind, kind, memory_bytes, *rates) for i in range(devices)]
    if host:
        built.append(Device("host", "host", "host", 10**12, {}, 1.0, 0.0))
    links = tuple(Link(a, b, BANDWIDTH, LATENCY_SECONDS, channel) for a, b, channel in ends)
    return Machine("toy", tuple(built), built[-1].name if host else built[0].name, links)
