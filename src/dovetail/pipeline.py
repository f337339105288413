"""The flow on one screen: model -> graph -> costs -> placement -> plan -> timeline -> report."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dovetail.costs import CostCache, Costs, analytic_costs, measured_costs, probed_machine
from dovetail.errors import (
    CostError,
    GraphError,
    InfeasibleError,
    MachineError,
    MachineMismatchError,
    ModelError,
    PromiseError,
    UsageError,
)
from dovetail.executors import Measurement, Placed
from dovetail.executors import run as execute
from dovetail.frontends import Captured, parse_optimizer
from dovetail.frontends import resolve as resolve_network
from dovetail.graph import Graph, group, load_graph
from dovetail.machine import Machine, check_local, names_here, parse_machine
from dovetail.placers import (
    PLACERS,
    Outcome,
    Problem,
    keeping_interrupts,
    make_problem,
    parse_budget,
    permitted,
    place,
)
from dovetail.plans import OBJECTIVES, Plan, Source, capacities_of, check, load_plan, normalise
from dovetail.reports import Report, chrome_trace, write_html
from dovetail.runtime.atomic import write_atomically
from dovetail.simulator import LowerBound, Simulator, lower_bound
from dovetail.timeline import Timeline

BOUND_TOLERANCE = 1e-6
"""Relative: what another version of the LP solver may find less than a promised bound."""

Progress = Callable[[str, float, float | None], None]
"""progress(what is being done, fraction of it, best value so far or None)."""


def silent(_doing: str, _fraction: float, _best: float | None) -> None:
    """A `Progress` that shows nothing."""


def plan(  # noqa: PLR0913  all but two are keyword-only
    step: Captured | Graph,
    machine: str | Machine = "here",
    *,
    placer: str = "auto",
    objective: str = "step",
    budget: str | float = "10s",
    seed: int = 0,
    pins: Sequence[tuple[str, str]] = (),
    caps: Sequence[tuple[str, int]] = (),
    model: str = "",
    progress: Progress = silent,
) -> Plan:
    """Find how to run `step` fastest on `machine`.

    machine   a `Machine`, or its text: "here", "here/2", "box.toml", "4 x k80 + haswell"
    budget    seconds (10 or "10s") or evaluations ("5000e"), for the search alone
    pins      (pattern of op or module names, device name)
    caps      (device name, bytes) it may use
    model     of a graph from a file: that file's name, which the plan keeps

    Without pins and caps a plan on the text here/n has `here`, all cores as one device, among its
    baselines; where that is faster than what `auto` found, it is the plan that is returned, whose
    machine is `here`. A machine with cores that was described otherwise keeps its rates.

    From the start of the search on, a first Ctrl-C ends it with the best plan so far,
    `interrupted`. Raises `InvalidError`, or `InfeasibleError` when nothing fits.
    """
    began = time.perf_counter()
    check_request(
        machine,
        placer=placer,
        objective=objective,
        budget=budget,
        seed=seed,
        devices=[name for _, name in pins] + [name for name, _ in caps],
    )
    graph = graph_of(step)
    where = resolve_machine(machine, progress)
    permitted(graph, where, pins)  # a wrong pin is reported before the costs are measured
    costs = costs_of(step, where, progress)
    simulator = Simulator(graph, where, costs, capacities=capacities_of(where, dict(caps)))
    problem = make_problem(
        graph,
        where,
        costs,
        lambda placements: simulator.evaluate(placements, objective),
        groups=group(graph),
        objective=objective,
        pins=pins,
        caps=caps,
        seed=seed,
    )
    limit = parse_budget(str(budget))
    found: Plan | None = None
    try:
        with keeping_interrupts(limit):
            outcome = place(
                problem,
                placer,
                limit,
                lambda done, best: progress("planning", done, best if best < np.inf else None),
            )
            found = replace(
                _to_plan(problem, outcome, simulator, _bound(graph, where, costs, objective, pins)),
                source=_source(step, model),
                pins=tuple(pins),
                caps=tuple(caps),
                planning_seconds=time.perf_counter() - began,
            )
        found = replace(found, interrupted=limit.interrupted)
        free = not (pins or caps or found.interrupted) and len(where.devices) > 1
        if free and isinstance(machine, str) and names_here(machine):
            found = _or_all_cores(step, found, placer, progress)
    except KeyboardInterrupt:
        if found is None:
            raise
        found = replace(found, interrupted=True)
    return found


def check_request(
    machine: str | Machine,
    *,
    placer: str,
    objective: str,
    budget: str | float,
    seed: int,
    devices: Sequence[str] = (),
) -> None:
    """Raise the `InvalidError` of `plan` that can be known before the long work. `devices`: those
    that pins and caps name."""
    for option, text, known in (("placer", placer, PLACERS), ("objective", objective, OBJECTIVES)):
        if text not in known:
            raise UsageError(option, f"{text!r} is not one of {', '.join(known)}")
    parse_budget(str(budget))
    _check_seed(seed)
    where = parse_machine(machine) if isinstance(machine, str) else machine
    if where.local:
        check_local(where)
    for name in devices:
        where.device_index(name)


def run(plan: Plan, step: Captured, *, seed: int = 0) -> Placed:
    """The plan at work: a context manager with `step`, `measure` and `state_dict`."""
    _check_seed(seed)
    check(plan, step.graph)
    _check_machine(plan.machine)
    return execute(plan, step, seed=seed)


def report(
    plan: Plan,
    step: Captured | Graph,
    path: str | Path,
    *,
    measurement: Measurement | None = None,
) -> None:
    """Write the page of a plan: predicted, and measured where a measurement is given."""
    graph = graph_of(step)
    write_html(
        Report(
            plan,
            graph,
            predicted=timeline_of(plan, graph),
            measured=None if measurement is None else measurement.timeline,
            measured_seconds=None if measurement is None else measurement.step_seconds,
        ),
        path,
    )


def write_trace(plan: Plan, step: Captured | Graph, path: str | Path) -> None:
    """Write the predicted step as a Chrome trace, for Perfetto. Raises `UnwritableError`."""
    graph = graph_of(step)
    write_atomically(path, json.dumps(chrome_trace(timeline_of(plan, graph), graph)))


def resolve_model(text: str, train: str = "") -> Captured | Graph:
    """What MODEL names: a saved graph, or a network to capture."""
    if names_graph(text):
        if train:
            raise ModelError(text, "a saved graph cannot be trained anew; capture with --train")
        return load_graph(text)
    return resolve_network(text, train=parse_optimizer(train) if train else None)


def names_graph(text: str) -> bool:
    """Is this MODEL text the name of a saved graph?"""
    return text.endswith((".json", ".json.gz")) and ":" not in text


def graph_of(step: Captured | Graph) -> Graph:
    """The graph to plan for. Raises `GraphError` for one without ops."""
    graph = step if isinstance(step, Graph) else step.graph
    if not len(graph):
        raise GraphError("the graph has no ops: there is nothing to place")
    return graph


def resolve_machine(
    machine: str | Machine, progress: Progress = silent, *, fresh: bool = False
) -> Machine:
    """The machine that a text names; `here` and `here/n` with the rates the probe measured, where
    `fresh` without a look at the cache."""
    if not isinstance(machine, str):
        return machine
    where = parse_machine(machine)
    if not names_here(machine):
        return where
    progress("measuring the machine", 0.0, None)
    return probed_machine(where, CostCache(), fresh=fresh)


def costs_of(step: Captured | Graph, machine: Machine, progress: Progress = silent) -> Costs:
    """Measured costs where the machine is this one, else analytic ones."""
    graph, program = (step, None) if isinstance(step, Graph) else (step.graph, step.program)
    if not machine.local:
        return analytic_costs(graph, machine)
    return measured_costs(
        graph,
        program,
        machine,
        CostCache(),
        progress=lambda fraction: progress("measuring ops", fraction, None),
    )


def open_plan(path: str | Path, model: str = "") -> tuple[Plan, Captured | Graph]:
    """A saved plan with its graph captured or loaded again, every rule and promise checked.

    A `package.module:function` is imported only if `model` names it. Raises what `check` and
    `verify` raise, and `MachineMismatchError` for a plan of the devices of another machine.
    """
    saved = load_plan(path)
    text = model or saved.source.model
    if not model and not text.startswith("zoo:") and not names_graph(text):
        raise ModelError(
            text or "the plan",
            "a plan does not say what to import or open by itself; name MODEL after the plan",
        )
    _check_machine(saved.machine)
    step = resolve_model(text, saved.source.training)
    graph = graph_of(step)
    check(saved, graph)
    verify(saved, graph)
    return saved, step


def verify(plan: Plan, graph: Graph) -> None:
    """Raise `PromiseError` unless simulating the plan gives its promised value and memory, and its
    lower bound can be proven again."""
    timeline = timeline_of(plan, graph)
    peaks = timeline.peak_memory_bytes.tolist()
    value = timeline.step_seconds
    if plan.objective != "step":
        value = float(
            _simulator(plan, graph).evaluate(plan.placement[None], plan.objective).values[0]
        )
    if not np.isclose(value, plan.value, rtol=1e-9, atol=0.0):
        raise PromiseError(plan.objective, plan.value, value)
    for device, promised, found in zip(
        plan.machine.device_names, plan.peak_memory_bytes, peaks, strict=True
    ):
        if promised != found:
            raise PromiseError(f"peak memory of {device}", promised, found)
    costs = Costs(plan.compute_seconds, plan.costs_source)
    bound = _bound(graph, plan.machine, costs, plan.objective, plan.pins)
    if plan.lower_bound > bound.seconds * (1 + BOUND_TOLERANCE):
        raise PromiseError("lower bound", plan.lower_bound, bound.seconds)


def timeline_of(plan: Plan, graph: Graph) -> Timeline:
    """The plan's predicted timeline, from the costs it carries."""
    return _simulator(plan, graph).timeline(
        plan.placement, orders=plan.orders, schedules=plan.schedules
    )


def _simulator(plan: Plan, graph: Graph) -> Simulator:
    costs = Costs(plan.compute_seconds, plan.costs_source)
    costs.check(graph)
    return Simulator(
        graph, plan.machine, costs, capacities=capacities_of(plan.machine, dict(plan.caps))
    )


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise UsageError("seed", f"is {seed}; use a whole number from 0 to {2**63 - 1}")


def _check_machine(machine: Machine) -> None:
    """Raise `MachineMismatchError` for devices with cores that are not of this machine."""
    if not machine.local:
        return
    try:
        check_local(machine)
    except MachineError as error:
        expected = f"{machine.name} ({machine.fingerprint})"
        raise MachineMismatchError(expected, f"another: {error}") from None


def _to_plan(problem: Problem, outcome: Outcome, simulator: Simulator, bound: LowerBound) -> Plan:
    """The plan but for what the problem does not know: where its graph came from, pins and caps."""
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    timeline = simulator.timeline(outcome.placement)
    return Plan(
        source=Source("", "", (), ""),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=normalise(outcome.placement, graph, machine),
        orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
        compute_seconds=costs.compute_seconds,
        costs_source=costs.source,
        placer=outcome.placer,
        seed=problem.seed,
        objective=problem.objective,
        value=outcome.value,
        lower_bound=bound.seconds,
        bound_proof=bound.proof,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        groups=problem.groups.count,
        planning_seconds=outcome.seconds,
        baselines=outcome.baselines,
    )


def _bound(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    objective: str,
    pins: Sequence[tuple[str, str]],
) -> LowerBound:
    """Of every plan that the pins permit, not only of those whose groups stay together."""
    return lower_bound(graph, machine, costs, objective, permitted(graph, machine, pins))


def _source(step: Captured | Graph, model: str) -> Source:
    if isinstance(step, Captured):
        return step.source
    shapes = [
        step.shapes[tensor]
        for op in np.flatnonzero(step.is_source).tolist()
        if step.kinds[op] == "input"
        for tensor in step.outputs_of(op)
    ]
    return Source(model, "", tuple(shapes), version("torch"))


def _or_all_cores(step: Captured | Graph, found: Plan, placer: str, progress: Progress) -> Plan:
    """`found` with `here`, all cores as one device, among its baselines, None where that cannot
    be; or, where `auto` chose and it is faster, the plan for it."""
    try:
        whole = plan(
            step,
            "here",
            placer="single",
            objective=found.objective,
            seed=found.seed,
            model=found.source.model,
            progress=progress,
        )
    except (InfeasibleError, CostError):  # it does not fit, or a saved graph was never measured so
        return replace(found, baselines={**found.baselines, "here": None})
    chosen = replace(
        found,
        baselines={**found.baselines, "here": whole.value},
        interrupted=whole.interrupted,
    )
    if placer != "auto" or whole.value >= found.value:
        return chosen
    weaker = min((found, whole), key=lambda one: one.lower_bound)  # it holds on both machines
    return replace(
        whole,
        placer="here",
        baselines=chosen.baselines,
        planning_seconds=found.planning_seconds,
        lower_bound=weaker.lower_bound,
        bound_proof=weaker.bound_proof,
    )
