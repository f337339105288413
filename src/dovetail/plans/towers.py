"""Places data-parallel towers on a machine.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4: parameters and data reading are on the CPU, and each
GPU has one tower. Differences: if there are fewer GPUs than towers, towers are dealt out to them in
turn, and if there is none, to the CPUs.
"""

import numpy as np

from dovetail.errors import NoDeviceError, UsageError
from dovetail.graph import Graph
from dovetail.graph.copies import tower_count, towers_of
from dovetail.machine import Machine
from dovetail.plans.records import Placement
from dovetail.plans.rules import normalise


def tower_placement(graph: Graph, machine: Machine) -> Placement:
    """Return the placement [ops] with tower i on GPU i.

    Parameters with their state and updates, the averages of gradients and of the loss, and the
    inputs are on the host. `graph` must come from `replicate`. Raises `UsageError` if it does not,
    and `NoDeviceError` for an op that its device cannot run, such as an update if the host is no
    CPU.
    """
    if tower_count(graph) < 2:
        raise UsageError("graph", "has no towers; make them with replicate(graph, replicas)")
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
