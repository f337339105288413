"""Places data-parallel towers on a machine, and says when each tower has done its step.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4: parameters and data reading are on the CPU, and each
GPU has one tower. Differences: if there are fewer GPUs than towers, towers are dealt out to them in
turn, and if there is none, to the CPUs.
"""

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NoDeviceError, UsageError
from dovetail.graph import Graph
from dovetail.graph.copies import tower_count, towers_of, update_towers_of
from dovetail.machine import Machine
from dovetail.plans.records import Placement
from dovetail.plans.rules import normalise
from dovetail.timeline import Timeline


def tower_placement(graph: Graph, machine: Machine) -> Placement:
    """Return the placement [ops] with tower i on GPU i.

    Parameters with their state and updates, the averages of gradients and of the loss, and the
    inputs are on the host. `graph` must come from `replicate`. Raises `UsageError` if it does not,
    and `NoDeviceError` for an op that its device cannot run, such as an update if the host is no
    CPU.
    """
    _check(graph)
    towers = towers_of(graph)
    kinds = [device.kind for device in machine.devices]
    tower_kind = "gpu" if "gpu" in kinds else "cpu"
    devices = np.array([d for d, kind in enumerate(kinds) if kind == tower_kind], dtype=np.int32)
    placement = np.where(towers < 0, machine.host_index, devices[towers % len(devices)])
    for d, kind in enumerate(kinds):
        wrong = np.flatnonzero((placement == d) & ~graph.runs_on(kind) & ~graph.is_source)
        if len(wrong):
            raise NoDeviceError(graph.names[wrong[0]])
    return normalise(placement.astype(np.int32), graph, machine)


def tower_seconds(timeline: Timeline, graph: Graph, replicas: int) -> NDArray[np.float64]:
    """Return [replicas] the seconds after which each tower has done its step.

    In a synchronous step that is the step's end for every tower. In an asynchronous one it is the
    end of the last update by the tower's gradients. The tower would then go on with its next batch
    while others still update. Updates of one parameter are in the order of towers and all towers
    begin at once, so tower 0 has the least seconds and the last one about `step_seconds`. Their
    mean is what a tower takes for a step.
    """
    _check(graph)
    if replicas != tower_count(graph):
        raise UsageError(
            "replicas", f"is {replicas}, but the graph has {tower_count(graph)} towers"
        )
    towers = update_towers_of(graph)[timeline.ops]
    if (towers < 0).all():
        return np.full(replicas, timeline.step_seconds)
    seconds = np.zeros(replicas)
    np.maximum.at(seconds, towers[towers >= 0], timeline.op_ends[towers >= 0])
    return seconds


def _check(graph: Graph) -> None:
    """Raise `UsageError` for a graph without towers."""
    if tower_count(graph) < 2:
        raise UsageError("graph", "has no towers; make them with replicate(graph, replicas)")
