"""What several devices read and each can compute for itself: copied where that is cheaper to run.

A plan sends a shared value, rotary cosines or an attention mask, to every device that reads it.
Where computing it there takes no longer than sending it, by the machine's links and the costs, the
device gets a copy of what computes it, if the simulated plan is then no worse.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.frontends import Captured, duplicated
from dovetail.graph import Graph
from dovetail.graph.duplicates import Copies, duplicate, shareable
from dovetail.machine import Machine
from dovetail.pipeline.opening import bound_of, costs_in
from dovetail.pipeline.sources import Step
from dovetail.plans import Plan, capacities_of, normalise, planned_graph
from dovetail.simulator import Simulator


def planned(plan: Plan, step: Step) -> Step:
    """The step as the plan runs it: with its copies, where the plan has some."""
    graph = step if isinstance(step, Graph) else step.graph
    if planned_graph(plan, graph) is graph:
        return step
    if isinstance(step, Captured):
        return duplicated(step, plan.copies)
    return planned_graph(plan, graph)


def with_copies(plan: Plan, step: Step, fixed: NDArray[np.bool_]) -> Plan:
    """The plan with copies of shared computations on the devices that read them, or the plan itself
    where that is no better. `fixed` [ops]: True for ops that are where the user wants them."""
    graph = step if isinstance(step, Graph) else step.graph
    if len(set(plan.placement[~graph.is_source].tolist())) < 2:
        return plan
    copies = _worth_it(plan, graph, shareable(graph) & ~fixed)
    for some in [copies, *([one] for one in copies if len(copies) > 1)]:
        found = _copied(plan, graph, some) if some else plan
        if found is not plan:
            return found
    return plan


def _worth_it(plan: Plan, graph: Graph, may: NDArray[np.bool_]) -> list[Copies]:
    """For each device what it may compute for itself in no more time than it takes to send it."""
    producers, devices = graph.producers[graph.input_tensors], plan.placement
    away = may[producers] & (devices[producers] != devices[graph.readers])
    found = []
    for device in np.unique(devices[graph.readers[away]]).tolist():
        read = away & (devices[graph.readers] == device)
        wanted = np.unique(graph.input_tensors[read])
        ops = _behind(graph, np.unique(producers[read]), may & (devices != device))
        seconds = float(plan.compute_seconds[ops, device].sum())
        if ops and seconds <= _sending_seconds(plan, graph, wanted, device):
            of_copies = np.isin(producers, ops) & (devices[graph.readers] == device)
            found.append(Copies(tuple(ops), tuple(np.unique(graph.readers[of_copies]).tolist())))
    return found


def _behind(graph: Graph, ops: NDArray[np.integer], may: NDArray[np.bool_]) -> list[int]:
    """These ops and all before them that may be copied, ascending."""
    seen: set[int] = set()
    todo = ops.tolist()
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        todo += [m for m in graph.producers[graph.inputs_of(op)].tolist() if may[m]]
    return sorted(seen)


def _sending_seconds(plan: Plan, graph: Graph, tensors: NDArray[np.integer], device: int) -> float:
    sizes = costs_in(plan).sends_of(graph)
    total = 0.0
    for tensor in tensors.tolist():
        source = int(plan.placement[graph.producers[tensor]])
        total += _link_seconds(plan.machine, source, device, float(sizes[tensor]))
    return total


def _link_seconds(machine: Machine, source: int, destination: int, size_bytes: float) -> float:
    """Over the link, or in two hops over the host."""
    link = int(machine.link_index[source, destination])
    if link < 0:
        host = machine.host_index
        hops = [machine.link_index[source, host], machine.link_index[host, destination]]
    else:
        hops = [link]
    return sum(
        machine.links[int(hop)].latency_seconds
        + size_bytes / machine.links[int(hop)].bandwidth_bytes_per_second
        for hop in hops
    )


def _copied(plan: Plan, graph: Graph, copies: Sequence[Copies]) -> Plan:
    """The plan with these copies, its promises computed again; `plan` where they do not help."""
    made = duplicate(graph, copies)
    placement = plan.placement[made.origins]
    for i, one in enumerate(copies):
        placement[made.copy_of == i] = plan.placement[one.readers[0]]
    placement = normalise(placement, made.graph, plan.machine)
    sent = None if plan.sent_bytes is None else plan.sent_bytes[made.origin_tensors]
    costs = Costs(plan.compute_seconds[made.origins], plan.costs_source, sent)
    capacities = capacities_of(plan.machine, dict(plan.caps))
    ranked = plan.objective == "step"
    simulator = Simulator(made.graph, plan.machine, costs, capacities=capacities, ranked=ranked)
    found = simulator.evaluate(placement[None], plan.objective)
    peaks = found.peak_memory_bytes[0]
    value = float(found.values[0])
    if not found.feasible[0] or (peaks > capacities).any() or value > plan.value:
        return plan
    timeline = simulator.timeline(placement)
    bound = bound_of(made.graph, plan.machine, costs, plan.objective, plan.pins, plan.caps)
    return replace(
        plan,
        graph_fingerprint=made.graph.fingerprint,
        placement=placement,
        orders=tuple(timeline.order_of(device) for device in range(len(plan.machine.devices))),
        compute_seconds=costs.compute_seconds,
        sent_bytes=sent,
        value=value,
        lower_bound=min(bound.seconds, value),
        bound_proof=bound.proof,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        copies=tuple(copies),
    )
