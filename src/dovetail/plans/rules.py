"""Checks the numbered rules that every plan keeps; `check` lists them."""

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import (
    GraphMismatchError,
    MachineMismatchError,
    NotContiguousError,
    OrderError,
    OutOfMemoryError,
    PlanError,
    SplitModuleError,
    UnplacedOpError,
)
from dovetail.graph import EVERYWHERE, HOST, Graph
from dovetail.graph.convexity import find_return
from dovetail.graph.units import matched_modules, units_of
from dovetail.machine import Machine
from dovetail.plans.records import PLACED, Placement, Plan

# Rule 4: each device runs its stages one after another, and all devices finish.
#
# An order is a list of stages of one op each. A stage waits as a whole for all that its ops need
# from outside it, and its outputs are there only when all of it has ended. So with A ──► B ──► C
# the devices below wait for each other for ever. With A and C as two stages they would finish:
#
#     cpu0   [ A  C ]
#     cpu1   [ B ]


Stages = tuple[tuple[int, ...], ...]
"""The ops of each stage of one device, in running order."""


def stages_of(plan: Plan, graph: Graph) -> list[Stages]:
    """Return each device's stages. Without a schedule or order every op is a stage, by index."""
    stages: list[Stages] = []
    for device in range(len(plan.machine.devices)):
        schedule = plan.schedules[device] if plan.schedules else None
        if schedule is not None:
            stages.append(tuple(stage.ops for stage in schedule.stages))
        elif plan.orders is not None:
            stages.append(tuple((op,) for op in plan.orders[device]))
        else:
            on_device = (plan.placement == device) & ~graph.is_source
            stages.append(tuple((op,) for op in np.flatnonzero(on_device).tolist()))
    return stages


def check_orders(plan: Plan, graph: Graph) -> None:
    """Raise `OrderError` if an order or schedule does not name each op of its device once, has an
    op before one that it needs, or if devices would wait for each other."""
    if plan.orders is None and plan.schedules is None:
        return
    stages = stages_of(plan, graph)
    for device, name in enumerate(plan.machine.device_names):
        listed = [op for stage in stages[device] for op in stage]
        device_ops = np.flatnonzero((plan.placement == device) & ~graph.is_source).tolist()
        if sorted(listed) != device_ops:
            # The first op that is listed twice, is on another device, or is missing.
            detail, named = "", set[int]()
            for op in listed:
                if not 0 <= op < len(graph) or graph.is_source[op]:
                    detail = f"{op} is no op that runs"
                elif op in named:
                    detail = f"op {graph.names[op]!r} is there twice"
                elif plan.placement[op] != device:
                    where = plan.machine.device_names[plan.placement[op]]
                    detail = f"op {graph.names[op]!r} is on {where}"
                if detail:
                    break
                named.add(op)
            else:
                detail = f"op {graph.names[min(set(device_ops) - named)]!r} is missing"
            raise OrderError(name, f"does not name each of its ops exactly once: {detail}")
        schedule = plan.schedules[device] if plan.schedules else None
        if schedule and any(not 0 <= stage.seconds < np.inf for stage in schedule.stages):
            raise OrderError(name, "has a stage whose seconds are negative or not finite")
    check_completes(plan, graph)


def check_completes(plan: Plan, graph: Graph) -> None:
    """Raise `OrderError` if an op of a stage stands before one that it needs, or if devices would
    wait for each other for ever. O(ops + reads)."""
    stages = stages_of(plan, graph)
    stage_of, needs = needs_of(stages, graph)
    listed = [op for of_device in stages for stage in of_device for op in stage]
    place_of = np.zeros(len(graph), np.int64)
    place_of[listed] = np.arange(len(listed))
    within = stage_of[needs[:, 0]] == stage_of[needs[:, 1]]
    wrong = needs[within & (place_of[needs[:, 0]] > place_of[needs[:, 1]])]
    for before, op in wrong[:1].tolist():
        name = plan.machine.device_names[plan.placement[op]]
        needed = f"op {graph.names[op]!r} before op {graph.names[before]!r}, which it needs"
        raise OrderError(name, f"cannot complete: a stage has {needed}")
    needs = needs[~within]
    # Kahn's algorithm over the stages of all devices. Those of one device also need the one before
    # them (`chains`). The stages that never start stay with something missing.
    count = sum(map(len, stages))
    after: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    ends = np.cumsum([0, *map(len, stages)]).tolist()
    chains = [pair for first, end in pairwise(ends) for pair in pairwise(range(first, end))]
    for before, stage in [*stage_of[needs].tolist(), *chains]:
        after[before].append(stage)
        missing[stage] += 1
    able = [stage for stage in range(count) if missing[stage] == 0]
    while able:
        for stage in after[able.pop()]:
            missing[stage] -= 1
            if missing[stage] == 0:
                able.append(stage)
    stuck = np.array(missing, dtype=np.int64) > 0
    if stuck.any():
        # The first stage that never starts is not only waiting for its turn: the stage before it on
        # its device, if any, does start. So one of its own ops waits for a stuck stage.
        first = int(np.argmax(stuck))
        waits = (stage_of[needs[:, 1]] == first) & stuck[stage_of[needs[:, 0]]]
        op = int(needs[waits][0, 1])
        name = plan.machine.device_names[plan.placement[op]]
        raise OrderError(name, f"cannot complete: op {graph.names[op]!r} would wait for ever")


def needs_of(stages: Sequence[Stages], graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (stage of each op, needs).

    The first is [ops] indices into the stages of all devices, -1 for ops in no stage. The second is
    [needs, 2] pairs of ops in stages, the second of which needs the first.
    """
    every = list(chain.from_iterable(stages))
    stage_of = np.full(len(graph), -1)
    listed = list(chain.from_iterable(every))
    stage_of[listed] = np.repeat(np.arange(len(every)), list(map(len, every)))
    reads = np.stack([graph.producers[graph.input_tensors], graph.readers], axis=1)
    needs = np.concatenate([reads, graph.control]).astype(np.int64)
    return stage_of, needs[(stage_of[needs] >= 0).all(axis=1)]


def normalise(placement: Placement, graph: Graph, machine: Machine) -> Placement:
    """Return the placement with its entries for sources filled in.

    An input is on the host, a source that is written on its writer's device, and another source on
    the device of its first reader.
    """
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
    4. Orders and schedules name each op of their device once, and complete: `check_orders`.
                                                            `OrderError`
    (5. Its promises hold: `pipeline.verify`, which simulates it.)
    6. Where it was asked to be contiguous, its devices can be ordered: `graph.convexity`.
                                                            `NotContiguousError`
    7. Each module that is kept whole is on one device.     `SplitModuleError`
    (8. What is made for a format can be written in it: `pipeline.open_plan`.)
    9. What does not run placed, but eager or by `torch.compile`, has one device. `PlanError`
    Memory within capacity and caps is checked against the promised peaks: `OutOfMemoryError`.
    """
    if plan.graph_fingerprint != graph.fingerprint:
        raise GraphMismatchError(plan.graph_fingerprint, graph.fingerprint)
    if machine is not None and plan.machine.fingerprint != machine.fingerprint:
        raise MachineMismatchError(
            f"{plan.machine.name} ({plan.machine.fingerprint})",
            f"{machine.name} ({machine.fingerprint})",
        )
    if plan.way != PLACED and len(plan.machine.devices) != 1:
        raise PlanError(f"plan rule 9: it runs {plan.way}, on {len(plan.machine.devices)} devices")
    check_placement(plan.placement, graph, plan.machine, plan.compute_seconds)
    check_orders(plan, graph)
    names = plan.machine.device_names
    # A way of forward ops that leaves a device and comes back.
    if plan.contiguous and (path := find_return(graph, plan.placement)) is not None:
        leaves, elsewhere, returns = (graph.names[op] for op in path)
        raise NotContiguousError(names[plan.placement[path[0]]], (leaves, elsewhere, returns))
    if plan.whole:
        modules = matched_modules(graph, plan.whole)
        of_op = units_of(graph, modules).of_op
        first: dict[int, int] = {}
        for op in np.flatnonzero(of_op >= 0).tolist():
            unit, on = int(of_op[op]), int(plan.placement[op])
            if first.setdefault(unit, on) != on:
                raise SplitModuleError(modules[unit], (names[first[unit]], names[on]))
    capacities = capacities_of(plan.machine, dict(plan.caps))
    for device, needed, available in zip(
        names, plan.peak_memory_bytes, capacities.tolist(), strict=True
    ):
        if needed > available:
            raise OutOfMemoryError(device, needed, available)


def capacities_of(machine: Machine, caps: dict[str, int]) -> NDArray[np.int64]:
    """Return [devices] the bytes that each device may use: its memory, or a smaller cap.

    Raises `UnknownDeviceError` for a cap on a device that the machine does not have.
    """
    capacities = np.array([device.memory_bytes for device in machine.devices], dtype=np.int64)
    for name, cap_bytes in caps.items():
        device = machine.device_index(name)
        capacities[device] = min(int(capacities[device]), cap_bytes)
    return capacities


def check_placement(
    placement: Placement, graph: Graph, machine: Machine, compute_seconds: NDArray[np.float64]
) -> None:
    """Raise `UnplacedOpError` for an op on no device, on a device that cannot run it, or on another
    device than an op with the same colocation id."""
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
