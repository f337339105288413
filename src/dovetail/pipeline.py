"""The flow on one screen: model -> graph -> costs -> placement -> plan -> timeline -> report."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dovetail.costs import CostCache, Costs, analytic_costs, measured_costs, probed_machine
from dovetail.errors import (
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
from dovetail.machine import Machine, parse_machine
from dovetail.networks import NETWORKS
from dovetail.placers import PLACERS, Outcome, Problem, make_problem, parse_budget, place
from dovetail.plans import OBJECTIVES, Plan, Source, capacities_of, check, load_plan, normalise
from dovetail.reports import Report, write_html
from dovetail.simulator import Simulator, lower_bound
from dovetail.timeline import Timeline

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
    progress: Progress = silent,
) -> Plan:
    """Find how to run `step` fastest on `machine`.

    machine   a `Machine`, or its text: "here", "here/2", "box.toml", "4 x k80 + haswell"
    budget    seconds (10 or "10s") or evaluations ("5000e"), for the search alone
    pins      (pattern of op or module names, device name)
    caps      (device name, bytes it may use)

    On `here/n`, `auto` also weighs all cores as one device, and returns that plan, whose machine
    is `here`, where it is faster. Raises `InvalidError`, or `InfeasibleError` when nothing fits.
    """
    began = time.perf_counter()
    if placer not in PLACERS:
        raise UsageError("placer", f"{placer!r} is not one of {', '.join(PLACERS)}")
    if objective not in OBJECTIVES:
        raise UsageError("objective", f"{objective!r} is not one of {', '.join(OBJECTIVES)}")
    where = resolve_machine(machine, progress)
    graph = step if isinstance(step, Graph) else step.graph
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
    outcome = place(
        problem,
        placer,
        parse_budget(str(budget)),
        progress=lambda fraction, best: progress("planning", fraction, best),
    )
    found = _to_plan(step, problem, outcome, simulator, costs)
    found = replace(
        found,
        pins=tuple(pins),
        caps=tuple(caps),
        planning_seconds=time.perf_counter() - began,
    )
    free = not (pins or caps or outcome.interrupted) and where.local and len(where.devices) > 1
    return _or_all_cores(step, found, placer, progress) if free else found


def run(plan: Plan, step: Captured, *, seed: int = 0) -> Placed:
    """The plan at work: a context manager with `step`, `measure` and `state_dict`."""
    check(plan, step.graph)
    return execute(plan, step, seed=seed)


def report(
    plan: Plan,
    step: Captured | Graph,
    path: str | Path,
    *,
    measurement: Measurement | None = None,
) -> None:
    """Write the page of a plan: predicted, and measured where a measurement is given."""
    graph = step if isinstance(step, Graph) else step.graph
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


def resolve_model(text: str, train: str = "") -> Captured | Graph:
    """What MODEL names: a saved graph, or a network to capture."""
    if text.endswith((".json", ".json.gz")) and ":" not in text:
        if train:
            raise ModelError(text, "a saved graph cannot be trained anew; capture with --train")
        return load_graph(text)
    return resolve_network(text, train=parse_optimizer(train) if train else None)


def network_rows() -> list[dict[str, object]]:
    """One row a built-in network: its options' defaults, parameters and paper."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows: list[dict[str, object]] = []
    for name, network in NETWORKS.items():
        with FakeTensorMode():
            module = network.modules(**network.defaults)
        parameters = list(module.parameters())
        rows.append(
            {
                "network": f"zoo:{name}",
                "parameters": sum(p.numel() for p in parameters),
                "parameter_bytes": sum(p.nbytes for p in parameters),
                "options": " ".join(f"{k}={v}" for k, v in network.defaults.items()),
                "paper": network.paper,
            }
        )
    return rows


def resolve_machine(machine: str | Machine, progress: Progress = silent) -> Machine:
    """The machine that a text names; `here` with the rates the probe measured."""
    where = parse_machine(machine) if isinstance(machine, str) else machine
    if isinstance(machine, str) and where.local:
        progress("measuring the machine", 0.0, None)
        return probed_machine(where, CostCache())
    return where


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
    """A saved plan with its graph captured again, every rule and promise checked.

    A `package.module:function` is imported only if `model` names it. Raises what `check` and
    `verify` raise, `MachineMismatchError` where `here` is another machine now.
    """
    saved = load_plan(path)
    text = model or saved.source.model
    if not model and not text.startswith("zoo:"):
        raise ModelError(
            text or "the plan",
            "a plan does not say what to import or open by itself; name MODEL after the plan",
        )
    step = resolve_model(text, saved.source.training)
    graph = step if isinstance(step, Graph) else step.graph
    if saved.machine.local and saved.machine.name.startswith("here"):
        here = parse_machine(saved.machine.name)
        if here.fingerprint != saved.machine.fingerprint:
            raise MachineMismatchError(
                f"{saved.machine.name} ({saved.machine.fingerprint})",
                f"{here.name} ({here.fingerprint})",
            )
    check(saved, graph)
    verify(saved, graph)
    return saved, step


def verify(plan: Plan, graph: Graph) -> None:
    """Raise `PromiseError` unless simulating the plan gives its promised value and memory."""
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


def _to_plan(
    step: Captured | Graph,
    problem: Problem,
    outcome: Outcome,
    simulator: Simulator,
    costs: Costs,
) -> Plan:
    graph, machine = problem.graph, problem.machine
    timeline = simulator.timeline(outcome.placement)
    allowed = problem.allowed[problem.groups.of_op]
    bound = lower_bound(graph, machine, costs, problem.objective, allowed)
    return Plan(
        source=_source(step),
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
        interrupted=outcome.interrupted,
        baselines=outcome.baselines,
    )


def _source(step: Captured | Graph) -> Source:
    if isinstance(step, Captured):
        return step.source
    torch = sys.modules.get("torch")
    shapes = [
        step.shapes[tensor]
        for op in np.flatnonzero(step.is_source).tolist()
        if step.kinds[op] == "input"
        for tensor in step.outputs_of(op)
    ]
    return Source("", "", tuple(shapes), str(torch.__version__) if torch else "")


def _or_all_cores(step: Captured | Graph, found: Plan, placer: str, progress: Progress) -> Plan:
    """`found` with `here`, all cores as one device, among its baselines; or, where `auto` chose
    and that is faster, the plan for it."""
    whole = plan(step, "here", placer="single", objective=found.objective, progress=progress)
    baselines = {**found.baselines, "here": whole.value}
    if placer == "auto" and whole.value < found.value:
        return replace(
            whole,
            placer="here",
            baselines=baselines,
            planning_seconds=found.planning_seconds,
            interrupted=found.interrupted,
        )
    return replace(found, baselines=baselines)
