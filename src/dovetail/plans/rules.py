"""The rules that every plan keeps, numbered."""

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import (
    GraphMismatchError,
    MachineMismatchError,
    NotContiguousError,
    OutOfMemoryError,
    SplitModuleError,
    UnplacedOpError,
)
from dovetail.graph import EVERYWHERE, HOST, Graph
from dovetail.graph.convexity import find_return
from dovetail.graph.units import matched_modules, units_of
from dovetail.machine import Machine
from dovetail.plans.orders import check_orders
from dovetail.plans.records import Placement, Plan


def normalise(placement: Placement, graph: Graph, machine: Machine) -> Placement:
    """The placement with its source entries filled in: host, their writer's device, or the
    device of their first reader."""
    filled = np.array(placement, dtype=np.int32)
    for op in np.flatnonzero(graph.is_source).tolist():
        home = int(graph.residences[op])
        if home == HOST:
            filled[op] = machine.host_index
        elif home == EVERYWHERE:
            readers = [int(r) for t in graph.outputs_of(op) for r in graph.consumers_of(t)[:1]]
            filled[op] = filled[min(readers)] if readers else machine.host_index
        else:
            filled[op] = filled[home]
    return filled


def check(plan: Plan, graph: Graph, machine: Machine | None = None) -> None:
    """Check every rule of a plan that needs no simulation; raise the error of the first broken.

    1. It was made for this graph.                          `GraphMismatchError`
    2. It was made for this machine, if one is given.       `MachineMismatchError`
    3. Every op is on a device that can run it, and colocated ops share one. `UnplacedOpError`
    4. Orders and schedules name each op of their device once, and complete: `plans.orders`.
                                                            `OrderError`
    (5. Its promises hold: `pipeline.verify`, which simulates it.)
    6. Where it was asked to be contiguous, its devices can be ordered: `graph.convexity`.
                                                            `NotContiguousError`
    7. Each module that is kept whole is on one device.     `SplitModuleError`
    (8. What is made for a format can be written in it: `pipeline.open_plan`.)
    Memory within capacity and caps is checked against the promised peaks: `OutOfMemoryError`.
    """
    if plan.graph_fingerprint != graph.fingerprint:
        raise GraphMismatchError(plan.graph_fingerprint, graph.fingerprint)
    if machine is not None and plan.machine.fingerprint != machine.fingerprint:
        raise MachineMismatchError(
            f"{plan.machine.name} ({plan.machine.fingerprint})",
            f"{machine.name} ({machine.fingerprint})",
        )
    check_placement(plan.placement, graph, plan.machine, plan.compute_seconds)
    check_orders(plan, graph)
    if plan.contiguous:
        check_contiguous(plan.placement, graph, plan.machine)
    if plan.whole:
        check_whole(plan, graph)
    capacities = capacities_of(plan.machine, dict(plan.caps))
    for device, needed, available in zip(
        plan.machine.device_names, plan.peak_memory_bytes, capacities.tolist(), strict=True
    ):
        if needed > available:
            raise OutOfMemoryError(device, needed, available)


def capacities_of(machine: Machine, caps: dict[str, int]) -> NDArray[np.int64]:
    """[devices] bytes each device may use: its memory, or the user's cap where smaller.

    Raises `UnknownDeviceError` for a cap on a device that is not there.
    """
    capacities = np.array([device.memory_bytes for device in machine.devices], dtype=np.int64)
    for name, cap_bytes in caps.items():
        device = machine.device_index(name)
        capacities[device] = min(int(capacities[device]), cap_bytes)
    return capacities


def check_placement(
    placement: Placement, graph: Graph, machine: Machine, compute_seconds: NDArray[np.float64]
) -> None:
    """Raise `UnplacedOpError` for an op on no device, or on one that must not run it."""
    names = machine.device_names
    if len(placement) != len(graph):
        raise UnplacedOpError(graph.names[min(len(placement), len(graph) - 1)], "nothing")
    first: dict[int, int] = {}
    for op, device in enumerate(placement.tolist()):
        if graph.is_source[op]:
            continue
        if not 0 <= device < len(names):
            raise UnplacedOpError(graph.names[op], device)
        if not np.isfinite(compute_seconds[op, device]):
            raise UnplacedOpError(graph.names[op], names[device], "cannot run it")
        colocation = int(graph.colocation[op])
        if colocation >= 0 and first.setdefault(colocation, device) != device:
            raise UnplacedOpError(
                graph.names[op], names[device], "is not the device of the ops it belongs with"
            )


def check_contiguous(placement: Placement, graph: Graph, machine: Machine) -> None:
    """Raise `NotContiguousError` for a path of forward ops that leaves a device and comes back."""
    found = find_return(graph, placement)
    if found is not None:
        leaves, elsewhere, returns = (graph.names[op] for op in found)
        device = machine.device_names[placement[found[0]]]
        raise NotContiguousError(device, (leaves, elsewhere, returns))


def check_whole(plan: Plan, graph: Graph) -> None:
    """Raise `SplitModuleError` for a module that should be whole and is on two devices."""
    modules = matched_modules(graph, plan.whole)
    of_op = units_of(graph, modules).of_op
    first: dict[int, int] = {}
    for op in np.flatnonzero(of_op >= 0).tolist():
        unit, device = int(of_op[op]), int(plan.placement[op])
        if first.setdefault(unit, device) != device:
            names = plan.machine.device_names
            raise SplitModuleError(modules[unit], (names[first[unit]], names[device]))
