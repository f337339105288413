"""Opens a saved plan: captures or loads its graph again, and checks every rule and promise.

file ──► plan ──► step, of the MODEL that the plan or the user names ──► check ──► verify
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import (
    MachineError,
    MachineMismatchError,
    ModelError,
    PromiseError,
    UnplacedOpError,
    UsageError,
)
from dovetail.exports.rules import FORMATS
from dovetail.frontends import Captured
from dovetail.frontends.transformers_configs import PREFIX
from dovetail.graph import Graph
from dovetail.graph.copies import origins_in, shareable
from dovetail.instances import Instance
from dovetail.machine import Machine, check_local
from dovetail.pipeline.sources import Step, graph_of, names_file, names_onnx, resolve_model
from dovetail.placers import permitted
from dovetail.plans import (
    PLACED,
    SEARCH_PROOFS,
    Plan,
    Schedule,
    capacities_of,
    check,
    load_plan,
    normalise,
    planned_graph,
    stages_of,
)
from dovetail.simulator import LowerBound, Simulator, lower_bound
from dovetail.timeline import Timeline
from dovetail.transforms import Copies, SharedCopies, applied, duplicate

BOUND_TOLERANCE = 1e-6
"""A promised bound may exceed the bound that is proven again by this share, because another version
of the LP solver may return a slightly smaller one."""


def open_plan(path: str | Path, model: str = "") -> tuple[Plan, Step]:
    """The saved plan, and its step captured or loaded again. Every rule and promise is checked.

    model   the MODEL text. By default the one that the plan keeps. A plan may come from somebody
            else, so a `package.module:function` is imported only if `model` names it

    Raises what `check` and `verify` raise, `ModelError` if neither `model` nor the plan says what
    to open, `ExportError` if the format that the plan is made for cannot say it, and
    `MachineMismatchError` if the plan's devices are cores of another machine.
    """
    saved = load_plan(path)
    text = model or saved.source.model
    # A configuration of transformers is read as data; no code comes with it.
    if not model and not text.startswith(("zoo:", PREFIX)) and not names_file(text):
        raise ModelError(
            text or "the plan",
            "a plan does not say what to import or open by itself; name MODEL after the plan",
        )
    check_machine(saved.machine)
    shapes = saved.source.shapes if names_onnx(text) else None
    step = resolve_model(text, saved.source.training, shapes)
    # The plan's ops are those of the graph as it runs it, so that is made first.
    step = planned(saved, step)
    graph = graph_of(step)
    check(saved, graph, step.machine if isinstance(step, Instance) else None)
    if saved.made_for:
        FORMATS[saved.made_for].export(saved, graph)  # raises what the format cannot say
    # An instance has costs of its own, from which the plan must have been computed.
    if isinstance(step, Instance):
        given, carried = step.costs, costs_in(saved)
        carried.check(graph)
        if carried.source != given.source:
            raise PromiseError("costs that are", carried.source, given.source)
        unlike = np.argwhere(carried.compute_seconds != given.compute_seconds)
        if len(unlike):
            op, device = unlike[0].tolist()
            raise PromiseError(
                f"seconds of op {graph.names[op]!r} on {saved.machine.device_names[device]}",
                float(carried.compute_seconds[op, device]),
                float(given.compute_seconds[op, device]),
            )
        mine, theirs = (costs.sends_of(graph) for costs in (carried, given))
        if (mine != theirs).any():
            tensor = int(np.flatnonzero(mine != theirs)[0])
            name = graph.names[graph.producers[tensor]]
            where = f"bytes sent of op {name!r}"
            raise PromiseError(where, float(mine[tensor]), float(theirs[tensor]))
    verify(saved, graph)
    return replace(saved, graph=graph), step


def open_to_show(path: str | Path, model: str = "") -> tuple[Plan, Step]:
    """The saved plan, and what is shown of it: the graph that its file keeps, if `model` is "" and
    it keeps one. Otherwise it is opened by `open_plan`.

    Nothing is captured, imported or run for a graph that was kept, so the plan may also be one of
    another machine's cores. The plan is checked against its own graph, machine and costs: a file
    that it was made from is not read again.
    """
    saved = load_plan(path)
    if model or saved.graph is None:
        return open_plan(path, model)
    check(saved, saved.graph)
    if saved.made_for:
        FORMATS[saved.made_for].export(saved, saved.graph)  # raises what the format cannot say
    verify(saved, saved.graph)
    return saved, saved.graph


def verify(plan: Plan, graph: Graph) -> None:
    """Raise `PromiseError` unless the plan keeps its promises.

    Simulating the plan must give its value and its peak memory, and its lower bound must be proven
    again. A bound that only a search proves (`SEARCH_PROOFS`) would need that search again. Of such
    a bound only this is checked: it is not above the plan's value.

    Raise `UnplacedOpError` for an op on a device that its pins or its kinds of device forbid.
    """
    graph = planned_graph(plan, graph)
    allowed = permitted(graph, plan.machine, plan.pins)
    placed = allowed[np.arange(len(graph)), plan.placement]
    for op in np.flatnonzero(~placed & ~graph.is_source)[:1].tolist():
        where = plan.machine.device_names[plan.placement[op]]
        raise UnplacedOpError(graph.names[op], where, "its pins or its kinds of device forbid")
    timeline = timeline_of(plan, graph)
    peaks = timeline.peak_memory_bytes.tolist()
    value = _value_of(plan, graph, timeline)
    if plan.way != PLACED:
        # Its value is what was measured, which nothing here can prove; where nothing was compared,
        # what its ops take one by one.
        value = plan.measured.get(plan.way, value)
    if not np.isclose(value, plan.value, rtol=1e-9, atol=0.0):
        raise PromiseError(plan.objective, plan.value, value)
    for device, promised, found in zip(
        plan.machine.device_names, plan.peak_memory_bytes, peaks, strict=True
    ):
        if promised != found:
            raise PromiseError(f"peak memory of {device}", promised, found)
    # No bound can exceed the plan's own value. That is all that is checked of a search's bound.
    provable = value
    if plan.bound_proof not in SEARCH_PROOFS and plan.objective != "pipeline":
        costs = costs_in(plan)
        bound = bound_of(graph, plan.machine, costs, plan.objective, plan.pins, plan.caps)
        provable = bound.seconds
    if plan.lower_bound > provable * (1 + BOUND_TOLERANCE):
        raise PromiseError("lower bound", plan.lower_bound, provable)


def timeline_of(plan: Plan, graph: Graph) -> Timeline:
    """The plan's predicted timeline, from the costs that it carries."""
    graph = planned_graph(plan, graph)
    return simulator_of(plan, graph).timeline(
        plan.placement, orders=plan.orders, schedules=plan.schedules
    )


def with_schedules(plan: Plan, graph: Graph, schedules: Sequence[Schedule | None]) -> Plan:
    """The plan with these schedules [devices], its promises computed again.

    A device without a schedule (None) gets a new order: whenever it is free, it takes the op that
    comes first in its old order among those that are ready. If it kept the old order, it could wait
    for a stage that waits for it. None of our bounds covers stages, so a plan for the objective
    `step` then has no bound.

    Raises `UsageError` for another number of schedules than devices, `OrderError` for schedules
    that `check` refuses, and `OutOfMemoryError` if the peaks do not fit.
    """
    graph = planned_graph(plan, graph)
    if len(schedules) != len(plan.machine.devices):
        devices = len(plan.machine.devices)
        raise UsageError(
            "schedules", f"are {len(schedules)}; give one, or None, for each of {devices} devices"
        )
    # [ops] The place of each op in its device's order. The simulator takes the op with the highest
    # priority first, so it gets the places negated.
    turns = np.zeros(len(graph))
    for stages in stages_of(plan, graph):
        ops = [op for stage in stages for op in stage]
        turns[ops] = np.arange(len(ops))
    free = simulator_of(plan, graph).timeline(
        plan.placement, priorities=-turns, schedules=schedules
    )
    orders = tuple(
        () if schedule is not None else free.order_of(device)
        for device, schedule in enumerate(schedules)
    )
    found = replace(plan, orders=orders, schedules=tuple(schedules))
    timeline = timeline_of(found, graph)
    found = replace(
        found,
        value=_value_of(found, graph, timeline),
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
    )
    if plan.objective in ("step", "pipeline"):
        found = replace(found, lower_bound=0.0, bound_proof="")
    check(found, graph)
    return found


def _value_of(plan: Plan, graph: Graph, timeline: Timeline) -> float:
    """The value of the plan's objective; `timeline` is the plan's own."""
    if plan.objective in ("step", "pipeline"):
        return timeline.step_seconds
    found = simulator_of(plan, graph).evaluate(plan.placement[None], plan.objective)
    return float(found.values[0])


def costs_in(plan: Plan) -> Costs:
    """The costs that a plan carries."""
    return Costs(plan.compute_seconds, plan.costs_source, plan.sent_bytes)


def bound_of(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    objective: str,
    pins: Sequence[tuple[str, str]],
    caps: Sequence[tuple[str, int]],
) -> LowerBound:
    """A lower bound that holds for every plan that the pins and caps permit.

    It also holds for plans that split groups, and whichever shared computations a plan copies: ops
    with copies cost nothing for it, and no other op waits for them.
    """
    origins = origins_in(graph)
    copies = np.flatnonzero(origins != np.arange(len(graph)))
    if len(copies):
        shared = np.zeros(len(graph), dtype=bool)
        shared[copies] = shared[origins[copies]] = True
        # A view is free as well if its base is: it lives wherever its base does.
        for tensor in np.flatnonzero(graph.bases >= 0).tolist():
            if shared[graph.producers[graph.bases[tensor]]]:
                shared[graph.producers[tensor]] = True
        seconds = np.where(
            shared[:, None] & np.isfinite(costs.compute_seconds), 0.0, costs.compute_seconds
        )
        costs = replace(costs, compute_seconds=seconds)
        # Edges from shared ops to others are cut. Edges among shared ops stay; they cost nothing.
        kept = ~shared[graph.producers[graph.input_tensors]] | shared[graph.readers]
        counts = np.bincount(graph.readers[kept], minlength=len(graph))
        graph = replace(
            graph,
            input_offsets=np.concatenate([[0], np.cumsum(counts)]),
            input_tensors=graph.input_tensors[kept],
        )
    allowed, capacities = permitted(graph, machine, pins), capacities_of(machine, dict(caps))
    return lower_bound(graph, machine, costs, objective, allowed, capacities=capacities)


def check_machine(machine: Machine) -> None:
    """Raise `MachineMismatchError` if the devices are cores, but not those of this machine."""
    if not machine.local:
        return
    try:
        check_local(machine)
    except MachineError as error:
        expected = f"{machine.name} ({machine.fingerprint})"
        raise MachineMismatchError(expected, f"another: {error}") from None


def simulator_of(plan: Plan, graph: Graph, *, ranked: bool = False) -> Simulator:
    """The simulator of the plan's graph, by the plan's costs and caps. `ranked` as in
    `Simulator`."""
    costs, capacities = costs_in(plan), capacities_of(plan.machine, dict(plan.caps))
    costs.check(graph)
    return Simulator(graph, plan.machine, costs, capacities=capacities, ranked=ranked)


@overload
def planned(plan: Plan, step: Captured) -> Captured: ...
@overload
def planned(plan: Plan, step: Step) -> Step: ...
def planned(plan: Plan, step: Step) -> Step:
    """The step as the plan runs it: with all of the plan's transforms.

    Raises what the transforms raise.
    """
    if isinstance(step, Captured):
        return applied(step, plan.transforms)
    graph = graph_of(step)
    transformed = planned_graph(plan, graph)
    return step if transformed is graph else transformed


# --- Copies of shared computations ---


def with_copies(plan: Plan, step: Step, fixed: NDArray[np.bool_]) -> Plan:
    """The plan with copies of shared computations on the devices that read them.

    A plan sends a shared value, such as rotary cosines or an attention mask, to every device that
    reads it. If a device can compute the value itself in no more time than sending takes, by the
    costs and the machine's links, the device gets a copy of the ops that compute it. The copies are
    kept if the simulated plan is no worse with them. Otherwise the plan itself is returned.

    fixed   [ops] True for ops that the user has placed, which are never copied
    """
    graph = step if isinstance(step, Graph) else step.graph
    if len(set(plan.placement[~graph.is_source].tolist())) < 2:
        return plan
    # The copies that are computed on a device in no more time than they are sent there, one entry
    # for each such device.
    copies = []
    may, devices = shareable(graph) & ~fixed, plan.placement
    producers, readers = graph.producers[graph.input_tensors], graph.readers
    away = may[producers] & (devices[producers] != devices[readers])
    for device in np.unique(devices[readers[away]]).tolist():
        read = away & (devices[readers] == device)
        # What is read there, and its ancestors that may be copied.
        seen: set[int] = set()
        todo = np.unique(producers[read]).tolist()
        while todo:
            op = todo.pop()
            if op not in seen:
                seen.add(op)
                before = graph.producers[graph.inputs_of(op)].tolist()
                todo += [m for m in before if may[m] and devices[m] != device]
        ops = sorted(seen)
        seconds = float(plan.compute_seconds[ops, device].sum())
        wanted = np.unique(graph.input_tensors[read])
        if ops and seconds <= _sending_seconds(plan, graph, wanted, device):
            of_copies = np.isin(producers, ops) & (devices[readers] == device)
            copies.append(Copies(tuple(ops), tuple(np.unique(readers[of_copies]).tolist())))
    # The copies of all devices together are tried first. If they make the plan worse, those of each
    # device are tried by themselves, and the first that do not make it worse are taken.
    for some in [copies, *([one] for one in copies if len(copies) > 1)]:
        found = _copied(plan, graph, some) if some else plan
        if found is not plan:
            return found
    return plan


def _sending_seconds(plan: Plan, graph: Graph, tensors: NDArray[np.integer], device: int) -> float:
    """The seconds of sending these tensors to the device, one after the other: each over the link,
    or in two hops by way of the host if there is no link."""
    machine, sizes, total = plan.machine, costs_in(plan).sends_of(graph), 0.0
    for tensor in tensors.tolist():
        source = int(plan.placement[graph.producers[tensor]])
        hops = [machine.link_index[source, device]]
        if hops[0] < 0:
            host = machine.host_index
            hops = [machine.link_index[source, host], machine.link_index[host, device]]
        links = [machine.links[int(hop)] for hop in hops]
        total += sum(
            link.latency_seconds
            + float(sizes[tensor]) / link.bandwidth_bytes_per_second
            + link.send_seconds
            + link.receive_seconds
            for link in links
        )
    return total


def _copied(plan: Plan, graph: Graph, copies: Sequence[Copies]) -> Plan:
    """The plan with these copies, its promises computed again. If it then does not fit or its value
    is worse, `plan` itself is returned."""
    made = duplicate(graph, copies)
    placement = plan.placement[made.origins]
    for i, one in enumerate(copies):
        # All readers of one entry are on the device that gets the copies.
        placement[made.copy_of == i] = plan.placement[one.readers[0]]
    placement = normalise(placement, made.graph, plan.machine)
    copied = replace(
        plan,
        graph=made.graph,
        graph_fingerprint=made.graph.fingerprint,
        placement=placement,
        compute_seconds=plan.compute_seconds[made.origins],
        sent_bytes=None if plan.sent_bytes is None else plan.sent_bytes[made.origin_tensors],
        transforms=(*plan.transforms, SharedCopies(tuple(copies))),
    )
    simulator = simulator_of(copied, made.graph, ranked=plan.objective == "step")
    found = simulator.evaluate(placement[None], plan.objective)
    value, over = float(found.values[0]), found.peak_memory_bytes[0] > simulator.capacities
    if not found.feasible[0] or over.any() or value > plan.value:
        return plan
    timeline = simulator.timeline(placement)
    copied = replace(copied, orders=timeline.orders)
    return with_promises(copied, made.graph, timeline, value)


def with_promises(plan: Plan, graph: Graph, timeline: Timeline, value: float) -> Plan:
    """The plan with this value, the memory of its timeline, and its bound proven again. `graph` is
    the planned one."""
    costs = costs_in(plan)
    bound = bound_of(graph, plan.machine, costs, plan.objective, plan.pins, plan.caps)
    return replace(
        plan,
        value=value,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        lower_bound=min(bound.seconds, value),
        bound_proof=bound.proof,
    )
