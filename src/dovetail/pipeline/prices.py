"""Prices placements that others have made: a device map, accelerate's own, or another plan.

A device map is priced as one of our own placements:

    {"model.embed": 0, "model.layers.0": 0, "model.layers.1": "cpu", "lm_head": 1}

If a map has a module on "cpu", accelerate copies its weights to an accelerator at every forward
pass and computes there. So such a map has two prices: computed where the map says, and computed
as accelerate runs it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.costs import Costs
from dovetail.errors import DovetailError, FileFormatError, GraphMismatchError, UsageError
from dovetail.exports import DeviceMap
from dovetail.exports.device_map import home_of
from dovetail.frontends import Captured
from dovetail.graph import EVERYWHERE, Graph
from dovetail.machine import Machine
from dovetail.pipeline.sources import Step, graph_of, unsplit_modules
from dovetail.plans import Placement, Plan, capacities_of, check_placement, load_plan, normalise
from dovetail.runtime.files import read_json
from dovetail.runtime.user_code import said
from dovetail.simulator import Simulator
from dovetail.transforms import duplicate

GivenMap = Mapping[str, int | str]
"""A device map: module or parameter path -> device. A `DeviceMap` names the main device as well."""
ACCELERATE = "accelerate auto"
"""The name of the baseline that is accelerate's own device map."""


@dataclass(frozen=True, eq=False)
class Pricing:
    """The graph, machine, costs and objective by which placements are priced; `caps` is as in
    `plan`."""

    graph: Graph
    machine: Machine
    costs: Costs
    objective: str
    caps: tuple[tuple[str, int], ...] = ()

    def price(self, placement: Placement) -> float | None:
        """The placement's value in seconds of the objective; None if it does not fit into
        memory."""
        capacities = capacities_of(self.machine, dict(self.caps))
        simulator = Simulator(
            self.graph,
            self.machine,
            self.costs,
            capacities=capacities,
            ranked=self.objective == "step",
        )
        evaluation = simulator.evaluate(placement[None], self.objective)
        over = (evaluation.peak_memory_bytes[0] > capacities).any()
        fits = bool(evaluation.feasible[0]) and not over
        return float(evaluation.values[0]) if fits else None


def read_place(path: str | Path) -> Plan | dict[str, int | str]:
    """The plan or device map that a file holds. A device map is {module or parameter path: device},
    with its main device if the file names one. Raises `FileFormatError`."""
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
    """The value of a given placement, under the name of its row. A map that accelerate would run
    otherwise has a second row.

    accelerate runs an op on "cpu" on the main device, and the first op that reads a weight waits
    until it is copied there. Each weight is copied once a step. The copied weights take no memory
    on the main device here: accelerate holds those of one module at a time.

    Raises `UsageError` for a device or module that does not exist, `GraphMismatchError` for a plan
    of another graph, and what `check_placement` raises.
    """
    graph, machine = pricing.graph, pricing.machine
    if isinstance(place, Plan):
        # Without the plan's copies, on the devices of the same names.
        placement = place.placement
        if place.copies:
            placement = placement[duplicate(graph, place.copies).copy_of < 0]
        if len(placement) != len(graph):
            raise GraphMismatchError(place.graph_fingerprint, graph.fingerprint)
        index = np.array([machine.device_index(name) for name in place.machine.device_names])
        placement = normalise(index[placement].astype(np.int32), graph, machine)
        check_placement(placement, graph, machine, pricing.costs.compute_seconds)
        return {name: pricing.price(placement)}
    placement = placement_of(place, step, machine)
    check_placement(placement, graph, machine, pricing.costs.compute_seconds)
    rows = {name: pricing.price(placement)}
    devices = {path: _device_of(path, name, machine) for path, name in place.items()}
    main = _main_device(place, devices, machine)
    kinds = [device.kind for device in machine.devices]
    on_cpu = np.array([kinds[d] == "cpu" for d in placement.tolist()]) & ~graph.is_source
    # Where the main device is the CPU, it computes. A training step is not run in this way.
    if graph.training or kinds[main] != "gpu" or not on_cpu.any():
        return rows
    link = machine.links[int(machine.link_index[kinds.index("cpu"), main])]
    seconds = np.array(pricing.costs.compute_seconds)
    sizes = np.array(graph.tensor_bytes)
    sent = pricing.costs.sends_of(graph).copy()
    everywhere = graph.is_source & (graph.residences == EVERYWHERE)
    for op in np.flatnonzero(everywhere).tolist():
        for tensor in graph.outputs_of(op):
            readers = [r for r in graph.consumers_of(tensor).tolist() if on_cpu[r]]
            if readers:
                seconds[readers[0], main] += (
                    link.latency_seconds + sizes[tensor] / link.bandwidth_bytes_per_second
                )
    # What only ops on "cpu" read now costs seconds of its first reader. Without bytes it occupies
    # nothing on the main device, and the simulator does not send it a second time.
    read_by_others = np.zeros(graph.tensors, dtype=bool)
    read_by_others[graph.input_tensors[~on_cpu[graph.readers]]] = True
    weights = np.flatnonzero(everywhere[graph.producers] & ~read_by_others)
    sizes[weights] = 0
    sent[weights] = 0
    costs = Costs(seconds, pricing.costs.source, sent)
    lighter = replace(graph, tensor_bytes=sizes)
    moved = normalise(np.where(on_cpu, main, placement).astype(np.int32), lighter, machine)
    rows[f"{name} by accelerate"] = replace(pricing, graph=lighter, costs=costs).price(moved)
    return rows


def placement_of(place: GivenMap, step: Step, machine: Machine) -> Placement:
    """[ops] the device of each op by a device map. Raises `UsageError` as `priced` does.

    The longest entry that is the op's module or is around it decides. A backward op runs where its
    forward op does. An op that no entry covers runs where the first of its inputs was computed, and
    on the main device if it reads sources alone.
    """
    graph = graph_of(step)
    devices = {path: _device_of(path, name, machine) for path, name in place.items()}
    # An entry must name a module, parameter or buffer of the network.
    known_paths = {"", *graph.names}
    for module in dict.fromkeys(graph.modules):
        parts = module.split(".")
        known_paths.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    if isinstance(step, Captured):
        known_paths.update(name for name, _ in step.module.named_modules(remove_duplicate=False))
        known_paths.update(step.module.state_dict(keep_vars=True))
    for path in place:
        if path not in known_paths:
            raise UsageError("place", f"{path!r} is no module or parameter of this network")
    placement = np.full(len(graph), -1, dtype=np.int32)
    for op in range(len(graph)):
        forward = int(graph.gradient_of[op])
        if forward >= 0:
            placement[op] = placement[forward]
            continue
        home = home_of(graph.modules[op], devices)
        placement[op] = -1 if home is None else home
        if placement[op] < 0 and not graph.is_source[op]:
            makers = graph.producers[graph.inputs_of(op)]
            maker_devices = placement[makers][~graph.is_source[makers]]
            placement[op] = maker_devices[0] if len(maker_devices) else -1
    main = _main_device(place, devices, machine)
    placement[placement < 0] = main
    # All ops of one colocation are on the device of the first of them.
    first: dict[int, int] = {}
    for op in np.flatnonzero((graph.colocation >= 0) & ~graph.is_source).tolist():
        placement[op] = first.setdefault(int(graph.colocation[op]), int(placement[op]))
    return normalise(placement, graph, machine)


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
    # Python makes no number of more than 4,300 digits.
    if not number.isdecimal() or len(number) > 9 or int(number) >= len(gpus):
        numbers = f", and accelerators 0 to {len(gpus) - 1}" if gpus else ""
        names = ", ".join(machine.device_names)
        raise UsageError(
            "place", f"{path!r} is on {name!r:.40}; {machine.name} has {names}{numbers}"
        )
    return gpus[int(number)]


def _main_device(place: GivenMap, devices: Mapping[str, int], machine: Machine) -> int:
    """The device on which accelerate runs modules that the map has on "cpu": the map's main device
    if it names one, else the first device in the map that is not "cpu"."""
    if isinstance(place, DeviceMap):
        return _device_of("main_device", place.main_device, machine)
    off_cpu = [devices[path] for path, name in place.items() if str(name) != "cpu"]
    return off_cpu[0] if off_cpu else next(iter(devices.values()), 0)


def accelerates_own(
    step: Step, machine: Machine, caps: Mapping[str, int], unsplit: Sequence[str]
) -> dict[str, Any] | None:
    """The device map that accelerate makes of this network for this machine, balanced as
    `from_pretrained(device_map="auto")` does. None if accelerate is not installed, if the step was
    not captured from a module, or if the machine has no accelerator.

    unsplit   classes of modules that accelerate must not split
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
    # accelerate would warn that the machine's accelerators are not here.
    log.setLevel(logging.ERROR)
    try:
        balanced = get_balanced_memory(
            step.module, max_memory=dict(memory), no_split_module_classes=classes
        )
        device_map: dict[str, Any] = infer_auto_device_map(
            step.module, max_memory=balanced, no_split_module_classes=classes
        )
    finally:
        log.setLevel(level)
    return device_map


def price_others(
    step: Step, pricing: Pricing, places: Mapping[str, Plan | Mapping[str, int | str]]
) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """(the values of these placements and of accelerate's own, each under the name of its row,
    notes). Whatever fails in accelerate's map is a note: it must not cost the plan."""
    rows: dict[str, float | None] = {}
    for name, place in places.items():
        rows |= priced(name, place, step, pricing)
    classes = sorted(set(unsplit_modules(step).values()))
    try:
        device_map = accelerates_own(step, pricing.machine, dict(pricing.caps), classes)
    except Exception as error:
        return rows, (f"accelerate's map could not be priced: {said(error)}",)
    if device_map is None:
        return rows, ()
    # Modules that accelerate leaves on the CPU can be priced only if a CPU is among the devices.
    # Nothing runs on disk, so a map with weights there has no price.
    has_cpu = any(d.kind == "cpu" for d in pricing.machine.devices)
    streamed = "cpu" in device_map.values() and not has_cpu
    if streamed or "disk" in device_map.values():
        return rows | {ACCELERATE: None}, ()
    try:
        return rows | priced(ACCELERATE, device_map, step, pricing), ()
    except DovetailError as error:
        return rows, (f"accelerate's map could not be priced: {said(error)}",)
