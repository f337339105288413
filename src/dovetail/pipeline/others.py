"""What somebody else's placement costs: a device map, or another plan, priced as one of ours.

    {"model.embed": 0, "model.layers.0": 0, "model.layers.1": "cpu", "lm_head": 1}

accelerate computes modules that a map has on "cpu" on an accelerator and copies their weights there
at every forward, before the module runs. So such a map has two prices: where the map says, and as
accelerate runs it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import FileFormatError, GraphMismatchError, UsageError
from dovetail.exports import DeviceMap
from dovetail.frontends import Captured
from dovetail.graph import EVERYWHERE, Graph
from dovetail.machine import Machine
from dovetail.pipeline.sources import Step, graph_of
from dovetail.plans import Placement, Plan, capacities_of, check_placement, load_plan, normalise
from dovetail.runtime.files import read_json
from dovetail.simulator import Simulator

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
