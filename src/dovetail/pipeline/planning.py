"""From a step to its plan, on one screen: machine -> costs -> problem -> placement -> plan."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import (
    CostError,
    FileFormatError,
    GraphMismatchError,
    InfeasibleError,
    UsageError,
)
from dovetail.exports import DeviceMap
from dovetail.exports.rules import check_format, rules_for
from dovetail.frontends import Captured
from dovetail.graph import EVERYWHERE, Graph
from dovetail.graph.units import Units, matched_modules, units_of
from dovetail.instances import Instance
from dovetail.machine import Machine, check_local, names_here, parse_machine
from dovetail.pipeline.opening import bound_of, check_seed, with_copies
from dovetail.pipeline.sources import (
    HERE,
    Notes,
    Step,
    TellProgress,
    costs_of,
    default_objective,
    graph_of,
    groups_of,
    machine_of,
    silent,
    source_of,
    unsplit_modules,
)
from dovetail.placers import (
    PLACERS,
    Budget,
    PlacementProblem,
    Placer,
    PlacerOutcome,
    keeping_interrupts,
    make_problem,
    parse_budget,
    permitted,
)
from dovetail.placers import place as run_placer
from dovetail.plans import (
    OBJECTIVES,
    Placement,
    Plan,
    Source,
    capacities_of,
    check_placement,
    load_plan,
    normalise,
)
from dovetail.runtime.files import read_json
from dovetail.simulator import LowerBound, Simulator

# What somebody else's placement costs: a device map, or another plan, priced as one of ours.
#
#     {"model.embed": 0, "model.layers.0": 0, "model.layers.1": "cpu", "lm_head": 1}
#
# accelerate computes modules that a map has on "cpu" on an accelerator and copies their weights
# there
# at every forward, before the module runs. So such a map has two prices: where the map says, and as
# accelerate runs it.


GivenMap = Mapping[str, int | str]
"""Module or parameter path -> device; a `DeviceMap` says the main device as well."""


@dataclass(frozen=True, eq=False)
class Pricing:
    """What placements are priced with; `caps` as in `plan`."""

    graph: Graph
    machine: Machine
    costs: Costs
    objective: str
    caps: tuple[tuple[str, int], ...] = ()

    def price(self, placement: Placement) -> float | None:
        """Seconds of the objective; None where it does not fit into memory."""
        capacities = capacities_of(self.machine, dict(self.caps))
        simulator = Simulator(
            self.graph,
            self.machine,
            self.costs,
            capacities=capacities,
            ranked=self.objective == "step",
        )
        found = simulator.evaluate(placement[None], self.objective)
        fits = bool(found.feasible[0]) and not (found.peak_memory_bytes[0] > capacities).any()
        return float(found.values[0]) if fits else None


def read_place(path: str | Path) -> Plan | dict[str, int | str]:
    """A plan of ours, or a device map: {module or parameter path: device}, with its main device
    where the file says it. Raises `FileFormatError`."""
    raw = read_json(path)
    if isinstance(raw, dict) and raw.get("format") == "dovetail.plan":
        return load_plan(path)
    main = None
    if isinstance(raw, dict) and isinstance(raw.get("device_map"), dict):
        main, raw = raw.get("main_device"), raw["device_map"]
    if not isinstance(raw, dict) or not all(
        isinstance(key, str) and isinstance(value, (int, str)) and not isinstance(value, bool)
        for key, value in raw.items()
    ):
        raise FileFormatError(str(path), "neither a plan nor a device map {module: device}")
    return raw if main is None else DeviceMap(raw, main)


def priced(
    name: str, place: Plan | GivenMap, step: Step, pricing: Pricing
) -> dict[str, float | None]:
    """Row -> value of somebody's placement. Raises `UsageError` for a device or module that is not
    there, and what `check_placement` raises."""
    graph, machine = pricing.graph, pricing.machine
    if isinstance(place, Plan):
        placement = _of_plan(place, graph, machine)
        check_placement(placement, graph, machine, pricing.costs.compute_seconds)
        return {name: pricing.price(placement)}
    placement = placement_of(place, step, machine)
    check_placement(placement, graph, machine, pricing.costs.compute_seconds)
    rows = {name: pricing.price(placement)}
    streamed = as_accelerate_runs(place, placement, pricing)
    if streamed is not None:
        moved, placement = streamed
        rows[f"{name} by accelerate"] = moved.price(placement)
    return rows


def placement_of(place: GivenMap, step: Step, machine: Machine) -> Placement:
    """[ops] The longest entry around an op's module counts. An op between modules that no entry is
    around runs where what it reads was made."""
    graph = graph_of(step)
    devices = {path: _device_of(path, name, machine) for path, name in place.items()}
    _check_paths(place, step)
    found = np.full(len(graph), -1, dtype=np.int32)
    around: dict[str, int] = {}
    for module in dict.fromkeys(graph.modules):
        around[module] = _longest(module, devices)
    for op in range(len(graph)):
        forward = int(graph.gradient_of[op])
        if forward >= 0:
            found[op] = found[forward]
            continue
        found[op] = around[graph.modules[op]]
        if found[op] < 0 and not graph.is_source[op]:
            makers = graph.producers[graph.inputs_of(op)]
            made = found[makers][~graph.is_source[makers]]
            found[op] = made[0] if len(made) else -1
    main = _main_device(place, devices, machine)
    found[found < 0] = main
    _with_their_colocated(graph, found)
    return normalise(found, graph, machine)


def _longest(module: str, devices: Mapping[str, int]) -> int:
    """The device of the entry for the module or the nearest one around it; -1: none."""
    path = module
    while path:
        if path in devices:
            return devices[path]
        path = path.rpartition(".")[0]
    return devices.get("", -1)


def _with_their_colocated(graph: Graph, placement: Placement) -> None:
    """Move what belongs with an update to its device."""
    first: dict[int, int] = {}
    for op in np.flatnonzero((graph.colocation >= 0) & ~graph.is_source).tolist():
        placement[op] = first.setdefault(int(graph.colocation[op]), int(placement[op]))


def _device_of(path: str, name: int | str, machine: Machine) -> int:
    """The device that an entry names: an accelerator's number, "cuda:1", "cpu", or our own name."""
    kinds = [device.kind for device in machine.devices]
    text = str(name)
    if text == "disk":
        raise UsageError("place", f"{path!r} is on disk, where nothing runs; give it a device")
    if text in machine.device_names:
        return machine.device_index(text)
    if text == "cpu":
        if "cpu" not in kinds:
            raise UsageError("place", f"{path!r} is on cpu, but {machine.name} has none that runs")
        return kinds.index("cpu")
    number = text.removeprefix("cuda:") if text != "cuda" else "0"
    gpus = [d for d, kind in enumerate(kinds) if kind == "gpu"]
    if not number.isdecimal() or int(number) >= len(gpus):
        numbers = f", and accelerators 0 to {len(gpus) - 1}" if gpus else ""
        known = ", ".join(machine.device_names)
        raise UsageError("place", f"{path!r} is on {name!r}; {machine.name} has {known}{numbers}")
    return gpus[int(number)]


def _check_paths(place: GivenMap, step: Step) -> None:
    """Raise `UsageError` for an entry that names no module, parameter or buffer of the network."""
    graph = graph_of(step)
    known = {"", *graph.names}
    for module in dict.fromkeys(graph.modules):
        parts = module.split(".")
        known.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    if isinstance(step, Captured):
        known.update(name for name, _ in step.module.named_modules(remove_duplicate=False))
        known.update(step.module.state_dict(keep_vars=True))
    for path in place:
        if path not in known:
            raise UsageError("place", f"{path!r} is no module or parameter of this network")


def _main_device(place: GivenMap, devices: Mapping[str, int], machine: Machine) -> int:
    """Where accelerate runs what is on "cpu": the map's main device, or else the first other device
    in it."""
    if isinstance(place, DeviceMap):
        return _device_of("main_device", place.main_device, machine)
    others = [devices[path] for path, name in place.items() if str(name) != "cpu"]
    return others[0] if others else next(iter(devices.values()), 0)


def as_accelerate_runs(
    place: GivenMap, placement: Placement, pricing: Pricing
) -> tuple[Pricing, Placement] | None:
    """(what to price it with, [ops]) of the map as accelerate runs a forward pass: what is on "cpu"
    runs on the main device, and before a module does, it waits for its weights to be copied there.
    None: nothing is on "cpu" beside an accelerator, or it is a training step, which accelerate does
    not run so, or the main device is the CPU, which then computes.

    A module's weights are counted once a step. They take no memory on the main device here, where
    accelerate holds those of one module at a time.
    """
    graph, machine = pricing.graph, pricing.machine
    devices = {path: _device_of(path, name, machine) for path, name in place.items()}
    main = _main_device(place, devices, machine)
    kinds = [device.kind for device in machine.devices]
    on_cpu = np.array([kinds[d] == "cpu" for d in placement.tolist()]) & ~graph.is_source
    if graph.training or kinds[main] != "gpu" or not on_cpu.any():
        return None
    host = kinds.index("cpu")
    link = machine.links[int(machine.link_index[host, main])]
    seconds = np.array(pricing.costs.compute_seconds)
    sizes = np.array(graph.tensor_bytes)
    sent = pricing.costs.sends_of(graph).copy()
    for op in np.flatnonzero(graph.is_source & (graph.residences == EVERYWHERE)).tolist():
        for tensor in graph.outputs_of(op):
            readers = [r for r in graph.consumers_of(tensor).tolist() if on_cpu[r]]
            if readers:
                seconds[readers[0], main] += (
                    link.latency_seconds + sizes[tensor] / link.bandwidth_bytes_per_second
                )
    moved = np.where(on_cpu, main, placement).astype(np.int32)
    weights = _read_only_by(graph, on_cpu)
    sizes[weights] = 0
    sent[weights] = 0
    costs = Costs(seconds, pricing.costs.source, sent)
    lighter = replace(graph, tensor_bytes=sizes)
    return replace(pricing, graph=lighter, costs=costs), normalise(moved, lighter, machine)


def _read_only_by(graph: Graph, ops: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tensors of parameters, buffers and constants that only these ops read."""
    resident = (graph.is_source & (graph.residences == EVERYWHERE))[graph.producers]
    others = np.zeros(graph.tensors, dtype=bool)
    others[graph.input_tensors[~ops[graph.readers]]] = True
    return np.flatnonzero(resident & ~others)


def _of_plan(plan: Plan, graph: Graph, machine: Machine) -> Placement:
    """[ops] of a plan for this graph, its copies left out, on the devices of the same names."""
    placement = plan.placement
    if plan.copies:
        from dovetail.graph.duplicates import duplicate

        placement = placement[duplicate(graph, plan.copies).copy_of < 0]
    if len(placement) != len(graph):
        raise GraphMismatchError(plan.graph_fingerprint, graph.fingerprint)
    index = np.array([machine.device_index(name) for name in plan.machine.device_names])
    return normalise(index[placement].astype(np.int32), graph, machine)


def accelerates_own(
    step: Step, machine: Machine, caps: Mapping[str, int], unsplit: Sequence[str]
) -> dict[str, Any] | None:
    """The device map that accelerate makes of this network for this machine by itself, balanced as
    `from_pretrained(device_map="auto")` has it; None where accelerate is not installed, or there is
    no module or no accelerator.

    unsplit   classes of modules that it must not split
    """
    gpus = [device for device in machine.devices if device.kind == "gpu"]
    if not gpus or not isinstance(step, Captured):
        return None
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils.modeling import get_balanced_memory
    except ImportError:
        return None
    memory: dict[int | str, int] = {
        i: int(min(device.memory_bytes, caps.get(device.name, device.memory_bytes)))
        for i, device in enumerate(gpus)
    }
    memory["cpu"] = int(
        next((d.memory_bytes for d in machine.devices if d.kind in ("cpu", "host")), 0)
    )
    classes = list(unsplit)
    log = logging.getLogger("accelerate.utils.modeling")
    level = log.level
    log.setLevel(logging.ERROR)  # it would warn that the machine's accelerators are not here
    try:
        balanced = get_balanced_memory(
            step.module, max_memory=dict(memory), no_split_module_classes=classes
        )
        found: dict[str, Any] = infer_auto_device_map(
            step.module, max_memory=balanced, no_split_module_classes=classes
        )
    finally:
        log.setLevel(level)
    return found


MIN_GAIN = 0.02
"""Share by which a plan on more devices must be better, where nobody says."""
ACCELERATE = "accelerate auto"
"""Row of the device map that accelerate makes by itself."""
WITH_POLICY = ("gdp", "gdp+search")


def plan(  # noqa: PLR0913  all but two are keyword-only
    step: Step,
    machine: str | Machine = "",
    *,
    placer: str = "auto",
    objective: str = "",
    contiguous: bool = False,
    budget: str | float = "10s",
    gap: float = 0.0,
    seed: int = 0,
    pins: Sequence[tuple[str, str]] = (),
    caps: Sequence[tuple[str, int]] = (),
    policy: str | Path | None = None,
    finetune: int = 0,
    per_op: bool = False,
    whole: Sequence[str] = (),
    format: str = "",
    min_gain: float | None = None,
    place: Mapping[str, int | str] | str | Path | None = None,
    method: Placer | None = None,
    model: str = "",
    progress: TellProgress = silent,
) -> Plan:
    """Find how to run `step` fastest on `machine`.

    machine     a `Machine`, or its text: "here", "here/1", "here/2", "box.toml", "4 x k80 +
                haswell"; by default an instance's own, and else "here", of whose cores an op uses
                as many as are measured to be best for this step
    objective   "step", "load" or "latency" (of instances); by default an instance's is "load",
                and else it is "step"
    contiguous  only plans whose devices can be ordered so that no forward edge goes back; for
                "load"
    budget      seconds (10 or "10s") or evaluations ("5000e"), for the search alone
    gap         a plan proven to be within this of the best is good enough: .02 is 2 %
    pins        (pattern of op or module names, device name)
    caps        (device name, bytes) it may use
    policy      file of a policy for `gdp` and `gdp+search`; by default the one that is shipped
    finetune    updates of that policy on this graph before it counts; 0: zero-shot
    per_op      for those two: every op is placed by itself, but for what must stay together
    whole       patterns of modules, each of which is placed as one, with what is within
    format      "device-map" or "split-points": only plans that can be exported as that. What the
                model says not to split (`_no_split_modules` of transformers) is then whole as well
    min_gain    of `auto`: a plan on more devices must be better by this share than one on fewer; by
                default 2 %, and 0 for a published instance
    place       somebody else's placement, priced among the baselines: a device map, or a file that
                holds one or a plan. So is the map that accelerate makes by itself, with `place` or
                for a device map, where accelerate is installed
    method      what runs under the name `placer`, in place of our own
    model       of a graph or an instance from a file: that file's name, which the plan keeps

    Without pins and caps a plan on the text here/n has `here`, all cores as one device, among its
    baselines; where that is faster than what `auto` found, it is the plan that is returned, whose
    machine is `here`. A machine with cores that was described otherwise keeps its rates.

    From the start of the search on, a first Ctrl-C ends it with the best plan so far,
    `interrupted`. Raises `InvalidError`, or `InfeasibleError` when nothing fits.
    """
    began = time.perf_counter()
    objective = objective or default_objective(step)
    check_request(
        machine,
        placer=placer,
        objective=objective,
        budget=budget,
        gap=gap,
        seed=seed,
        contiguous=contiguous,
        devices=[name for _, name in pins] + [name for name, _ in caps],
        step=step,
        whole=whole,
        format=format,
    )
    gain = smallest_gain(step, min_gain)
    theirs = read_place(place) if isinstance(place, (str, Path)) else place
    if method is None:
        check_policy(placer, policy, finetune, per_op)
    notes = Notes()
    for note in step.notes if isinstance(step, Captured) else ():
        notes.say(note)
    graph, where = graph_of(step), machine_of(step, machine, progress, notes)
    permitted(graph, where, pins)  # a wrong pin is reported before the costs are measured
    kept = _kept(step, where, whole, format, pins)
    costs = costs_of(step, where, progress, notes)
    progress("grouping ops", 0.0, None)
    simulator = simulator_of(graph, where, costs, objective, caps)
    problem = make_problem(
        graph,
        where,
        costs,
        lambda placements: simulator.evaluate(placements, objective),
        groups=groups_of(step, kept.units, per_op=per_op or bool(format)),
        objective=objective,
        pins=pins,
        caps=caps,
        seed=seed,
        contiguous=contiguous,
        trace=simulator.timeline,
        ranked=simulator.ranked,
        may_run=kept.may_run,
        chain=kept.chain,
    )
    limit = _limit(budget, gap)
    found: Plan | None = None
    try:
        with keeping_interrupts(limit):
            progress("proving a bound", 0.0, None)
            bound = bound_of(graph, where, costs, objective, pins, caps)
            progress("preparing the search (compiled once a machine)", 0.0, None)
            limit.prove(bound.seconds, bound.proof)
            method = method or _with_policy(placer, policy, finetune)
            outcome = run_placer(problem, placer, limit, _of_search(progress), method, gain)
            if isinstance(step, Instance) and outcome.bound is not None:  # its groups must not part
                bound = max(bound, outcome.bound, key=lambda one: one.seconds)
            found = replace(
                to_plan(problem, outcome, simulator, bound),
                source=source_of(step, model),
                pins=tuple(pins),
                caps=tuple(caps),
                whole=kept.patterns,
                made_for=format,
                min_gain=gain,
                planning_seconds=time.perf_counter() - began,
                notes=notes.texts + kept.notes + outcome.notes,
            )
        if not (format or isinstance(step, Instance)):
            found = with_copies(found, step, fixed_ops(graph, where, pins, kept.units))
        if theirs is not None or format == "device-map":
            pricing = Pricing(graph, where, costs, objective, tuple(caps))
            name = Path(place).name if isinstance(place, (str, Path)) else "given map"
            rows = _others(step, pricing, {} if theirs is None else {name: theirs})
            found = replace(found, baselines={**found.baselines, **rows})
        found = replace(found, interrupted=limit.interrupted)
        free = not (pins or caps or found.interrupted) and len(where.devices) > 1
        if free and isinstance(machine, str) and names_here(machine):
            found = _or_all_cores(step, found, placer, whole, progress)
    except KeyboardInterrupt:
        if found is None:
            raise
        found = replace(found, interrupted=True)
    return found


def check_request(  # noqa: PLR0913  keyword-only but one
    machine: str | Machine = "",
    *,
    placer: str,
    objective: str,
    budget: str | float,
    seed: int,
    gap: float = 0.0,
    contiguous: bool = False,
    devices: Sequence[str] = (),
    step: Step | None = None,
    whole: Sequence[str] = (),
    format: str = "",
) -> None:
    """Raise the `InvalidError` of `plan` that can be known before the long work.

    objective   "" where the step's default is meant
    devices     those that pins and caps name
    step        where it is known already, as what a file holds
    """
    for option, text, known in (("placer", placer, PLACERS), ("objective", objective, OBJECTIVES)):
        if text not in known and (text or option == "placer"):
            raise UsageError(option, f"{text!r} is not one of {', '.join(known)}")
    parse_budget(str(budget))
    check_seed(seed)
    if not gap >= 0:
        raise UsageError("gap", f"is {gap}; use a share from 0 on: .02 is 2 %")
    _check_objective(step, objective, contiguous)
    check_format(format)
    if isinstance(step, Instance) and (whole or format):
        raise UsageError("whole" if whole else "for", "an instance has no modules; leave it out")
    if isinstance(step, Instance):
        where = machine_of(step, machine)
    else:
        where = parse_machine(machine or HERE) if isinstance(machine, str) else machine
    if where.local:
        check_local(where)
    for name in devices:
        where.device_index(name)


@dataclass(frozen=True, eq=False)
class _Kept:
    """What must stay together, and where.

    patterns   of the modules kept whole, the user's and the model's own
    units, may_run, chain   as `make_problem` takes them; None: nothing is asked for
    notes      what to tell the user of it
    """

    patterns: tuple[str, ...]
    units: Units | None = None
    may_run: NDArray[np.bool_] | None = None
    chain: NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()


def _kept(
    step: Step,
    machine: Machine,
    whole: Sequence[str],
    format: str,
    pins: Sequence[tuple[str, str]],
) -> _Kept:
    """What `whole` and `format` ask for. Raises `UsageError` and `ExportError`."""
    if not (whole or format):
        return _Kept(())
    graph = graph_of(step)
    unsplit = unsplit_modules(step) if format else {}
    patterns = tuple(dict.fromkeys([*whole, *unsplit]))
    modules = matched_modules(graph, patterns)
    if not format:
        return _Kept(patterns, units_of(graph, modules))
    rules = rules_for(format, graph, machine, modules)
    for pattern, device in pins:
        if not rules.devices[machine.device_index(device)]:
            raise UsageError("pin", f"{pattern}={device}: a {format} has no name for {device}")
    may_run = np.broadcast_to(rules.devices, (len(graph), len(rules.devices))).copy()
    kinds = [device.kind for device in machine.devices]
    first = next(d for kind in ("gpu", "cpu") for d, k in enumerate(kinds) if k == kind)
    may_run[rules.main] = np.arange(len(kinds)) == first
    notes = tuple(
        f"kept whole: {pattern}, as the model says not to split {name}"
        for pattern, name in unsplit.items()
    )
    return _Kept(patterns, rules.units, may_run, rules.chain, notes)


def check_policy(placer: str, policy: str | Path | None, finetune: int, per_op: bool) -> None:
    """Raise `UsageError` for what only placers with a policy take, and `PolicyFileError` for a
    file that is none."""
    if finetune < 0:
        raise UsageError("finetune", f"is {finetune}; use a number of updates, or 0 for none")
    given = {"policy": policy is not None, "finetune": finetune > 0, "per_op": per_op}
    for option in (name for name, there in given.items() if there):
        if placer not in WITH_POLICY:
            raise UsageError(option, f"is for {' and '.join(WITH_POLICY)}, not for {placer}")
    if placer in WITH_POLICY:
        from dovetail.placers.learned.files import load_policy, shipped

        load_policy(shipped() if policy is None else policy, "gdp")


def _with_policy(placer: str, policy: str | Path | None, finetune: int) -> Placer | None:
    """The method where it is given a policy or updates; None: the one of that name."""
    path = None if policy is None else Path(policy)
    if path is None and not finetune:
        return None
    if placer == "gdp":
        from dovetail.placers.learned.placing import make_gdp

        return make_gdp(path, finetune)
    from dovetail.placers.learned.placing import make_gdp_search

    return make_gdp_search(path, finetune)


def _check_objective(step: Step | None, objective: str, contiguous: bool) -> None:
    is_instance = isinstance(step, Instance)
    if objective == "latency" and not is_instance:
        raise UsageError(
            "objective",
            "latency is defined for published instances alone, whose accelerators run their part "
            "in one call; for a network use step, the seconds of one step",
        )
    if contiguous and (objective or ("load" if is_instance else "step")) != "load":
        raise UsageError(
            "contiguous",
            "is for objective load; a step has no stages, and for the latency an "
            "accelerator runs its part in one call in any case",
        )


def _others(
    step: Step, pricing: Pricing, places: Mapping[str, Plan | Mapping[str, int | str]]
) -> dict[str, float | None]:
    """Row -> value of these placements and of accelerate's own."""
    rows: dict[str, float | None] = {}
    for name, theirs in places.items():
        rows |= priced(name, theirs, step, pricing)
    classes = sorted(set(unsplit_modules(step).values()))
    own = accelerates_own(step, pricing.machine, dict(pricing.caps), classes)
    if own is None:
        return rows
    # Weights that it leaves on the CPU need a CPU among the devices to be priced.
    streamed = "cpu" in own.values() and all(d.kind != "cpu" for d in pricing.machine.devices)
    if streamed or "disk" in own.values():
        return rows | {ACCELERATE: None}
    return rows | priced(ACCELERATE, own, step, pricing)


def fixed_ops(
    graph: Graph, machine: Machine, pins: Sequence[tuple[str, str]], units: Units | None
) -> NDArray[np.bool_]:
    """[ops] True for what pins or units hold to a place of its own."""
    free = permitted(graph, machine, ()).sum(axis=1)
    held = permitted(graph, machine, pins).sum(axis=1) < free
    return np.asarray(held if units is None else held | (units.of_op >= 0))


def simulator_of(
    graph: Graph, machine: Machine, costs: Costs, objective: str, caps: Sequence[tuple[str, int]]
) -> Simulator:
    capacities = capacities_of(machine, dict(caps))
    return Simulator(graph, machine, costs, capacities=capacities, ranked=objective == "step")


def _of_search(progress: TellProgress) -> Callable[[float, float], None]:
    return lambda done, best: progress("planning", done, best if best < np.inf else None)


def smallest_gain(step: Step, given: float | None) -> float:
    """The share that is meant. Raises `UsageError` for one that is none."""
    if given is None:
        return 0.0 if isinstance(step, Instance) else MIN_GAIN
    if not 0 <= given < 1:
        raise UsageError("min_gain", f"is {given}; use a share from 0 to below 1: .02 is 2 %")
    return given


def _limit(budget: str | float, gap: float) -> Budget:
    limit = parse_budget(str(budget))
    limit.gap = max(limit.gap, gap)
    return limit


def to_plan(
    problem: PlacementProblem, outcome: PlacerOutcome, simulator: Simulator, bound: LowerBound
) -> Plan:
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
        found_seconds=outcome.found_seconds,
        contiguous=problem.contiguous,
        sent_bytes=costs.sent_bytes,
        graph=graph,
    )


def _or_all_cores(
    step: Step, found: Plan, placer: str, whole: Sequence[str], progress: TellProgress
) -> Plan:
    """`found` with `here`, all cores as one device, among its baselines, None where that cannot
    be; or, where `auto` chose and it is faster, the plan for it."""
    try:
        all_cores = plan(
            step,
            HERE,
            placer="single",
            objective=found.objective,
            contiguous=found.contiguous,
            seed=found.seed,
            whole=whole,
            format=found.made_for,
            model=found.source.model,
            progress=progress,
        )
    except (InfeasibleError, CostError):  # it does not fit, or a saved graph was never measured so
        return replace(found, baselines={**found.baselines, HERE: None})
    chosen = replace(
        found,
        baselines={**found.baselines, HERE: all_cores.value},
        interrupted=all_cores.interrupted,
    )
    several = sum(map(bool, found.orders or ())) > 1
    worth = all_cores.value * (1 - found.min_gain) if several else all_cores.value
    if placer != "auto" or found.value <= worth:
        return chosen
    weaker = min((found, all_cores), key=lambda one: one.lower_bound)  # it holds on both machines
    return replace(
        all_cores,
        placer=HERE,
        baselines=chosen.baselines,
        found_seconds=found.found_seconds,
        planning_seconds=found.planning_seconds,
        lower_bound=weaker.lower_bound,
        bound_proof=weaker.bound_proof,
    )
