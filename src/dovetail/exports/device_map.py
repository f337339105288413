"""Exports a plan as a `device_map` of Hugging Face accelerate.

    {"embedding": 0, "layers.0": 0, "layers.1": 1, "head": "cpu"}

A module whose forward ops are all on one device stands for everything within it. If a module is
split, its children stand in the map instead. Accelerators are numbered as in the machine, and the
CPU is "cpu".
Backward and update follow the forward ops, and the loss is computed by whoever calls the model.

`accelerate.dispatch_model` moves tensors where a listed module is called, and nowhere else: an op
that a split module runs itself, between the calls of its children, runs where its inputs are.

What "cpu" means there depends on `main_device`. The whole model gets its inputs there, the
outermost module's own tensors are put there, and modules on "cpu" are *computed* there: if it is an
accelerator, their weights are copied to it at every forward. accelerate takes some accelerator if
nobody says, and `from_pretrained` never says. So a map comes with the main device under which
accelerate does what the plan was priced for: "cpu" if a module is on the CPU, else the accelerator
of the first forward op. A map with "cpu" in it is for `dispatch_model(model, map,
main_device=map.main_device)` or for `dovetail.dispatch`, not for `from_pretrained`.
https://huggingface.co/docs/accelerate/concept_guides/big_model_inference; read in accelerate 1.15:
`big_modeling.dispatch_model`, `hooks.attach_align_device_hook_on_blocks`
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ExportError
from dovetail.exports.modules import (
    HELD,
    Module,
    check_one_replica,
    forward_ops,
    graph_behind,
    module_tree,
    placed_ops,
)
from dovetail.graph import HOST, Graph, Phase
from dovetail.graph.duplicates import origins_in
from dovetail.graph.units import Units, units_of
from dovetail.plans import Plan

FORMAT = "a device_map"
LARGEST_WHOLE = 1 / 4
"""A module whose own ops join outputs of several children is kept whole if it has at most this
share of the forward FLOPs and bytes. In a larger one those children are put on one device."""
Name = int | str
Home = TypeVar("Home")


class DeviceMap(dict[str, Name]):
    """Module path, or name of a split module's own tensor -> device, in the model's order.

    main_device   what `accelerate.dispatch_model` must be given as `main_device`
    """

    def __init__(self, devices: Mapping[str, Name], main_device: Name) -> None:
        super().__init__(devices)
        self.main_device = main_device

    def to_json(self) -> dict[str, object]:
        """The keyword arguments of `accelerate.dispatch_model`."""
        return {"device_map": dict(self), "main_device": self.main_device}


def device_map(
    plan: Plan, graph: Graph | None = None, names: Mapping[str, Name] | None = None
) -> DeviceMap:
    """Where accelerate is to put every module so that it does what the plan says.

    graph   what the plan was made for; may be left out where `plan` or `open_plan` made the plan
    names   device name -> what accelerate is to call it; by default as above

    Raises `ExportError` for a module without children whose ops are on several devices, for an op
    between modules that would get its inputs on several devices, for a tensor that modules on
    several devices read (accelerate ties it on one of them), for a second CPU, and for towers.
    """
    graph = graph_behind(plan, graph, FORMAT)
    check_one_replica(graph, FORMAT)
    named = _name_devices(plan, graph, names)
    on_cpu = [device for device, name in named.items() if name == "cpu"]
    main = on_cpu[0] if on_cpu else first_device(plan, graph)
    devices = module_devices(plan, graph)
    if set(devices) == {""}:
        return DeviceMap({"": named[devices[""]]}, named[devices[""]])
    outer_tensors = {graph.names[op] for op in module_tree(graph).held}
    for path in devices:
        if "." not in path and path in outer_tensors:
            devices[path] = main
    _check_tied(plan, graph, devices)
    check_glue(plan, graph, devices, main)
    return DeviceMap({path: named[device] for path, device in devices.items()}, named[main])


def module_devices(plan: Plan, graph: Graph) -> dict[str, int]:
    """Path of the largest modules that are on one device -> its index, in the model's order; of a
    split module's own tensors likewise, by their names."""
    devices: dict[str, int] = {}
    _descend(module_tree(graph), plan, graph, devices)
    return devices


def _name_devices(plan: Plan, graph: Graph, names: Mapping[str, Name] | None) -> dict[int, Name]:
    """Device -> its name in the map, for devices that run forward ops."""
    used = sorted(set(plan.placement[placed_ops(graph)].tolist()))
    if names is not None:
        for device in used:
            if plan.machine.device_names[device] not in names:
                raise ExportError(FORMAT, plan.machine.device_names[device], "has no name given")
        return {device: names[plan.machine.device_names[device]] for device in used}
    kinds = [device.kind for device in plan.machine.devices]
    cpus = [device for device in used if kinds[device] == "cpu"]
    if len(cpus) > 1:
        where = plan.machine.device_names[cpus[1]]
        raise ExportError(FORMAT, where, "is a second CPU, and all CPUs are one 'cpu' there")
    return {d: "cpu" if kinds[d] == "cpu" else kinds[:d].count("gpu") for d in used}


def first_device(plan: Plan, graph: Graph) -> int:
    """The device of the model's first forward op."""
    return int(plan.placement[placed_ops(graph)[0]])


def _check_tied(plan: Plan, graph: Graph, homes: dict[str, int]) -> None:
    """Raise for a parameter or buffer that two modules on different devices read."""
    for op in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[op] not in ("parameter", "buffer"):
            continue
        readers: dict[int, str] = {}
        for tensor in graph.outputs_of(op):
            for reader in graph.consumers_of(tensor).tolist():
                home = home_of(graph.modules[reader], homes)
                if home is not None and graph.phases[reader] == Phase.FORWARD:
                    readers.setdefault(home, graph.modules[reader])
        if len(readers) > 1:
            (first, a), (second, b) = sorted(readers.items())[:2]
            names = plan.machine.device_names
            raise ExportError(
                FORMAT,
                f"{graph.kinds[op]} {graph.names[op]!r}",
                f"is read by {a!r} on {names[first]} and by {b!r} on {names[second]}, and "
                "accelerate keeps a tied tensor on one device; pin both modules to one device",
            )


def _descend(module: Module, plan: Plan, graph: Graph, homes: dict[str, int]) -> None:
    """Add the module to `homes` if it is whole, else its children and its own tensors."""
    ops = module.all_ops
    devices = sorted(set(plan.placement[ops].tolist()))
    if len(devices) <= 1:
        if devices or any(inner.held for inner in module.walk()):
            homes[module.path] = devices[0] if devices else first_device(plan, graph)
        return
    if not module.children:
        at = [next(op for op in ops if plan.placement[op] == device) for device in devices[:2]]
        (a, a_device), (b, b_device) = (
            (graph.names[op], plan.machine.device_names[plan.placement[op]]) for op in at
        )
        raise ExportError(
            FORMAT,
            f"module {module.path!r}" if module.path else "a graph without modules",
            f"is split: {a!r} runs on {a_device}, {b!r} on {b_device}"
            + ("; pin the module to one device" if module.path else ""),
        )
    for op in module.held:
        readers = [int(r) for t in graph.outputs_of(op) for r in graph.consumers_of(t)]
        at_home = [r for r in readers if not graph.is_source[r]][:1]
        homes[graph.names[op]] = (
            int(plan.placement[at_home[0]]) if at_home else first_device(plan, graph)
        )
    for child in module.children.values():
        _descend(child, plan, graph, homes)


def check_glue(
    plan: Plan, graph: Graph, homes: dict[str, int], main: int, format: str = FORMAT
) -> None:
    """Follow every tensor as hooks at the listed modules would move it; raise where an op between
    modules, which nothing moves tensors for, reads from two devices. `main` is where the model
    gets its inputs."""
    device_of: dict[int, int] = {}  # tensor -> device; constants and the like are missing
    origins = origins_in(graph)
    copies = np.flatnonzero(origins != np.arange(len(graph))).tolist()
    copies_of: dict[int, list[int]] = {}
    for op in copies:
        copies_of.setdefault(int(origins[op]), []).append(op)
    for op in np.flatnonzero(graph.is_source).tolist():
        for tensor in graph.outputs_of(op):
            if graph.residences[op] == HOST:
                device_of[tensor] = main
            elif graph.names[op] in homes:
                device_of[tensor] = homes[graph.names[op]]
    for op in placed_ops(graph):
        home = home_of(graph.modules[op], homes)
        if home is None:
            reads = {device_of[t]: t for t in graph.inputs_of(op).tolist() if t in device_of}
            if len(reads) > 1:
                devices = sorted(plan.machine.device_names[device] for device in reads)
                raise ExportError(
                    format,
                    f"op {graph.names[op]!r}",
                    f"in the split module {graph.modules[op]!r} would read tensors that are on "
                    f"{' and '.join(devices)}; pin its inputs' modules to one device",
                )
            home = next(iter(reads), main)
        # There it is the origin that the copy's readers read.
        for same in (op, *copies_of.get(op, ())):
            device_of.update(dict.fromkeys(graph.outputs_of(same), home))


def home_of(path: str, homes: Mapping[str, Home]) -> Home | None:
    """The device of the innermost listed module around a path; None if there is none."""
    while path:
        if path in homes:
            return homes[path]
        path = path.rpartition(".")[0]
    return None


_INPUTS, _OUTSIDE, _OWN = "inputs", "outside", "own tensors"
"""Where a tensor comes from that an op between modules reads, other than a module's child."""


def module_units(graph: Graph, whole: Sequence[str]) -> tuple[Units, NDArray[np.bool_]]:
    """(units, [ops] True for ops that the first device must run) under which every placement is a
    device map.

    A unit is a module without children, one that is kept whole, or one whose own ops join what
    several modules made: a residual block, say, whose add reads the block's input. Calling a listed
    module moves all it reads to its device, so that it stands anywhere. Ops of the modules that are
    left run where what they read was made, so they are tied to that. What reads one parameter stays
    together, as accelerate keeps a tied one on one device. Raises `ExportError` for towers.
    """
    check_one_replica(graph, FORMAT)
    search = _ModuleUnits(graph, set(whole))
    search.descend(module_tree(graph))
    search.tie_readers()
    return units_of(graph, search.roots, search.ties), search.main


class _ModuleUnits:
    """Collects the modules that are units, and the pairs of ops that are tied together."""

    def __init__(self, graph: Graph, whole: set[str]) -> None:
        self.graph = graph
        self.whole = whole
        self.roots: list[str] = []
        self.ties: list[tuple[int, int]] = []
        self.main = np.zeros(len(graph), dtype=bool)
        forward = np.array(forward_ops(graph), dtype=np.int64)
        work = np.stack([graph.flops, graph.accessed_bytes], axis=1).astype(np.float64)
        self.work = work / np.maximum(work[forward].sum(axis=0), 1)

    def descend(self, module: Module) -> None:
        """Make the module a unit, or tie its own ops and descend to its children."""
        if module.path in self.whole or not module.children:
            self.roots.append(module.path)
            return
        origins = self._origins(module)
        if module.path and self._joins(origins) and self._small(module):
            self.roots.append(module.path)
            return
        for op, places in origins.items():
            makers = [self._maker(t) for t in self.graph.inputs_of(op).tolist()]
            made_by_modules = places - {_INPUTS}
            if made_by_modules:
                self.ties += [
                    (op, maker)
                    for maker in makers
                    if maker >= 0 and origins.get(maker) != {_INPUTS}
                ]
                self.main[op] = _INPUTS in places
        for child in module.children.values():
            self.descend(child)

    def tie_readers(self) -> None:
        """Tie the forward ops that read one parameter or buffer, and, where ops of the outermost
        module read inputs beside what was made elsewhere, these to the first forward op."""
        graph = self.graph
        forward = set(forward_ops(graph))
        for op in np.flatnonzero(graph.is_source).tolist():
            if graph.kinds[op] in HELD:
                readers = [r for t in graph.outputs_of(op) for r in graph.consumers_of(t).tolist()]
                readers = [r for r in readers if r in forward]
                self.ties += [(readers[0], reader) for reader in readers[1:]]
        if self.main.any():
            first = min(forward)
            self.ties += [(first, op) for op in np.flatnonzero(self.main).tolist()]

    def _origins(self, module: Module) -> dict[int, set[str]]:
        """Each op that the module runs itself -> the places where its inputs come from."""
        origins: dict[int, set[str]] = {}
        for op in module.ops:
            places = origins[op] = set()
            for tensor in self.graph.inputs_of(op).tolist():
                maker = int(self.graph.producers[tensor])
                if self.graph.is_source[maker]:
                    # The outermost module's own tensors are put where its inputs are.
                    with_inputs = not module.path and self.graph.kinds[maker] in HELD
                    places |= (
                        {_INPUTS} if with_inputs or self.graph.residences[maker] == HOST else set()
                    )
                elif maker in origins:
                    places |= origins[maker]
                else:
                    places.add(self._child_around(module, maker))
            if not places:  # what is made of nothing, such as a range, lives where inputs do
                makers = self.graph.producers[self.graph.inputs_of(op)].tolist()
                with_inputs = any(self.graph.kinds[maker] in HELD for maker in makers)
                places.add(_OWN if with_inputs and module.path else _INPUTS)
        return origins

    def _child_around(self, module: Module, op: int) -> str:
        """The path of the child of `module` that the op is in, or `_OUTSIDE`."""
        path, within = self.graph.modules[op], f"{module.path}." if module.path else ""
        if not path.startswith(within):
            return _OUTSIDE
        return within + path.removeprefix(within).partition(".")[0]

    def _maker(self, tensor: int) -> int:
        """The op that makes the tensor; -1 for a source."""
        maker = int(self.graph.producers[tensor])
        return -1 if self.graph.is_source[maker] else maker

    def _joins(self, origins: dict[int, set[str]]) -> bool:
        """True if an op joins what comes from several places."""
        return any(len(places) > 1 for places in origins.values())

    def _small(self, module: Module) -> bool:
        """True if the module is a small share of the work and has no module to keep whole in it."""
        if any(inner.path in self.whole for inner in module.walk()):
            return False
        return bool((self.work[module.all_ops].sum(axis=0) <= LARGEST_WHOLE).all())
