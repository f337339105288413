"""Data-parallel towers on a machine: the usual placement of them, and when each has done its step.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4: parameters and data reading on the CPU, a tower a
GPU. Differences: where there are fewer GPUs than towers they take turns, and where there is none
the towers are on the CPUs.
"""

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NoDeviceError, UsageError
from dovetail.graph import Graph
from dovetail.graph.replicate import tower_count, towers_of, update_towers_of
from dovetail.machine import Machine
from dovetail.plans.records import Placement
from dovetail.plans.rules import normalise
from dovetail.timeline import Timeline


def tower_placement(graph: Graph, machine: Machine) -> Placement:
    """[ops] Tower i on GPU i; on the host every parameter with its state and updates, the averages
    of gradients and of the loss, and the inputs.

    `graph` is what `replicate` made. Raises `UsageError` for another one, and `NoDeviceError` for
    an op that its device cannot run, such as an update where the host is no CPU.
    """
    _check(graph)
    towers = towers_of(graph)
    kinds = [device.kind for device in machine.devices]
    wanted = "gpu" if "gpu" in kinds else "cpu"
    devices = np.array([d for d, kind in enumerate(kinds) if kind == wanted], dtype=np.int32)
    placement = np.where(towers < 0, machine.host_index, devices[towers % len(devices)])
    for d, kind in enumerate(kinds):
        wrong = np.flatnonzero((placement == d) & ~graph.runs_on(kind) & ~graph.is_source)
        if len(wrong):
            raise NoDeviceError(graph.names[wrong[0]])
    return normalise(placement.astype(np.int32), graph, machine)


def tower_seconds(timeline: Timeline, graph: Graph, replicas: int) -> NDArray[np.float64]:
    """[replicas] when each tower has done its step, simulated or measured.

    Asynchronous: the end of the last update by its gradients; it would go on with its next batch
    then, while others still update. Since updates of one parameter are in replica order and all
    towers begin at once, tower 0 has the least and the last one about `step_seconds`; what a tower
    takes for a step is their mean. Synchronous: the step itself, for every tower.
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
    if tower_count(graph) < 2:
        raise UsageError("graph", "has no towers; make them with replicate(graph, replicas)")
