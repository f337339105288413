"""Exports a plan as a `device_map` of Hugging Face accelerate.

    {"embedding": 0, "layers.0": 0, "layers.1": 1, "head": "cpu"}

A module whose forward ops are all on one device stands for everything within it. If a module is
split, its children stand in the map instead. Accelerators are numbered as in the machine, and the
CPU is "cpu".
Backward and update follow the forward ops, and the loss is computed by whoever calls the model.

`accelerate.dispatch_model` moves tensors where a listed module is called, and nowhere else: an op
that a split module runs itself, between the calls of its children, runs where its inputs are. A key
that names a split module's own tensor is for whoever loads weights (`from_pretrained`,
`load_checkpoint_and_dispatch`, `dovetail.dispatch`). `dispatch_model` itself leaves that tensor
where it is, as it does with accelerate's own maps, so a search keeps small modules of this kind
whole.

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

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ExportError
from dovetail.exports.modules import (
    HELD,
    Module,
    check_one_replica,
    forward_ops,
    forward_readers,
    graph_behind,
    module_tree,
    placed_ops,
)
from dovetail.graph import HOST, Graph, colocate
from dovetail.graph.copies import origins_in
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
    several devices read or hold (accelerate ties it on one of them), for a second CPU, and for
    towers.
    """
    graph = graph_behind(plan, graph, FORMAT)
    check_one_replica(graph, FORMAT)
    # Device -> its name in the map, for devices that run forward ops.
    device_names, kinds = plan.machine.device_names, [d.kind for d in plan.machine.devices]
    used = sorted(set(plan.placement[placed_ops(graph)].tolist()))
    named: dict[int, Name] = {}
    for device in used:
        if names is not None and device_names[device] not in names:
            raise ExportError(FORMAT, device_names[device], "has no name given")
        if names is not None:
            named[device] = names[device_names[device]]
        elif kinds[device] != "cpu":
            named[device] = kinds[:device].count("gpu")
        elif "cpu" in named.values():
            where = device_names[device]
            raise ExportError(FORMAT, where, "is a second CPU, and all CPUs are one 'cpu' there")
        else:
            named[device] = "cpu"
    on_cpu = [device for device, name in named.items() if name == "cpu"]
    main = on_cpu[0] if on_cpu else first_device(plan, graph)
    devices = module_devices(plan, graph)
    if set(devices) == {""}:
        return DeviceMap({"": named[devices[""]]}, named[devices[""]])
    top = module_tree(graph, dict(plan.source.aliases))
    devices |= dict.fromkeys(top.held, main)
    # A parameter or buffer that several modules read or hold is on one device.
    places: dict[int, dict[int, str]] = {}  # source op -> {device: what reads or holds it there}
    for op in np.flatnonzero(graph.is_source).tolist():
        of_op = places[op] = {}
        for reader in forward_readers(graph, op) if graph.kinds[op] in HELD else ():
            home = home_of(graph.modules[reader], devices)
            if home is not None:
                of_op.setdefault(home, f"read by {graph.modules[reader]!r}")
    holders = [(name, op) for module in top.walk() for name, op in module.held.items()]
    names_of = Counter(op for _, op in holders)
    for name, op in holders:
        # The outermost module may hand its own tensor to one that reads it elsewhere.
        if names_of[op] > 1 and (home := home_of(name, devices)) is not None:
            places[op].setdefault(home, f"held as {name!r}")
    for op, of_op in places.items():
        if len(of_op) > 1:
            (first, a), (second, b) = sorted(of_op.items())[:2]
            raise ExportError(
                FORMAT,
                f"{graph.kinds[op]} {graph.names[op]!r}",
                f"is {a} on {device_names[first]} and {b} on {device_names[second]}, and "
                "accelerate keeps a tied tensor on one device; pin both modules to one device",
            )
    check_glue(plan, graph, devices, main)
    return DeviceMap({path: named[device] for path, device in devices.items()}, named[main])


def module_devices(plan: Plan, graph: Graph, *, lends: bool = False) -> dict[str, int]:
    """Path of the largest modules that are on one device -> its index, in the model's order; of a
    split module's own tensors likewise, by their names. Raises `ExportError` for a module without
    children that is split.

    lends   a tensor may be elsewhere than the module that holds it, which then gets a copy
    """
    aliases = {} if lends else dict(plan.source.aliases)
    top, names = module_tree(graph, aliases), plan.machine.device_names
    for module in top.walk():
        first_on = {int(plan.placement[op]): op for op in reversed(module.all_ops)}
        if len(first_on) > 1 and not module.children:
            (first, a), (second, b) = sorted(first_on.items())[:2]
            raise ExportError(
                FORMAT,
                f"module {module.path!r}" if module.path else "a graph without modules",
                f"is split: {graph.names[a]!r} runs on {names[first]}, {graph.names[b]!r} on "
                f"{names[second]}" + ("; pin the module to one device" if module.path else ""),
            )
    return _homes(top, graph, plan.placement, lends=lends)


def first_device(plan: Plan, graph: Graph) -> int:
    """The device of the model's first forward op."""
    return int(plan.placement[placed_ops(graph)[0]])


# What accelerate makes of a map. A *place* is a device where a plan is exported, and a set of ops
# where the rules of a search are made. Both follow the same functions, so that a search under these
# rules finds what exports.


def _homes(
    top: Module, graph: Graph, places: NDArray[np.int32], *, lends: bool = False
) -> dict[str, int]:
    """Path of the largest modules that are in one place -> the place, in the model's order; of a
    split module's own tensors likewise, by their names.

    places   [ops]. A tensor is where it is read first. What nobody reads is in the place of the
             innermost module around one of its names in which something runs or is read
    lends    only ops count for the place of a module that has some
    """
    read_at = {
        op: int(places[readers[0]])
        for module in top.walk()
        for op in module.held.values()
        if (readers := forward_readers(graph, op))
    }
    first = int(places[placed_ops(graph)[0]])
    used: dict[str, str] = {}  # modules in which something runs or is read, but the outermost
    used_at = {"": first}
    for module in list(top.walk())[1:]:
        held = [op for inner in module.walk() for op in inner.held.values()]
        within = [int(places[op]) for op in module.all_ops[:1]]
        within += [read_at[op] for op in held if op in read_at]
        if within:
            used[module.path], used_at[module.path] = module.path, within[0]
    innermost: dict[int, str] = {}  # tensor that nobody reads -> module
    for module in top.walk():
        for name, op in module.held.items():
            if op not in read_at:
                paths = (innermost.get(op, ""), home_of(name, used) or "")
                innermost[op] = max(paths, key=lambda path: len(path.split(".")) if path else 0)
    read_at |= {op: used_at[path] for op, path in innermost.items()}
    homes: dict[str, int] = {}

    def descend(module: Module) -> None:
        within = set(places[module.all_ops].tolist())
        held = [op for inner in module.walk() for op in inner.held.values()]
        if not (lends and within):
            within |= {read_at[op] for op in held if op in read_at}
        if module.ops and not module.children:  # what it holds may also be read elsewhere
            within = {int(places[module.ops[0]])}
        if len(within) <= 1:
            if within or held:
                homes[module.path] = within.pop() if within else first
            return
        homes.update({name: read_at.get(op, first) for name, op in module.held.items()})
        for child in module.children.values():
            descend(child)

    descend(top)
    return homes


def check_glue(
    plan: Plan, graph: Graph, homes: Mapping[str, int], main: int, format: str = FORMAT
) -> None:
    """Raise where an op between modules, which nothing moves tensors for, reads from two devices.
    `main` is where the model gets its inputs."""

    def run(op: int, reads: Mapping[int, int]) -> int:
        devices = sorted({plan.machine.device_names[device] for device in reads.values()})
        if len(devices) > 1:
            raise ExportError(
                format,
                f"op {graph.names[op]!r}",
                f"in the split module {graph.modules[op]!r} would read tensors that are on "
                f"{' and '.join(devices)}; pin its inputs' modules to one device",
            )
        return next(iter(reads.values()), main)

    _follow(graph, homes, main, run)


def _follow(
    graph: Graph, homes: Mapping[str, int], main: int, run: Callable[[int, Mapping[int, int]], int]
) -> None:
    """Follow every tensor as hooks at the listed modules would move it.

    main   the place where the model gets its inputs
    run    (op between modules, tensor that it reads -> its place) -> the place where it runs
    """
    place_of: dict[int, int] = {}  # tensor -> place; constants and the like are missing
    origins = origins_in(graph)
    copies = np.flatnonzero(origins != np.arange(len(graph))).tolist()
    copies_of: dict[int, list[int]] = {}
    for op in copies:
        copies_of.setdefault(int(origins[op]), []).append(op)
    for op in np.flatnonzero(graph.is_source).tolist():
        home = main if graph.residences[op] == HOST else home_of(graph.names[op], homes)
        if home is not None:
            place_of.update(dict.fromkeys(graph.outputs_of(op), home))
    for op in placed_ops(graph):
        home = home_of(graph.modules[op], homes)
        if home is None:
            home = run(op, {t: place_of[t] for t in graph.inputs_of(op).tolist() if t in place_of})
        # There it is the origin that the copy's readers read.
        for same in (op, *copies_of.get(op, ())):
            place_of.update(dict.fromkeys(graph.outputs_of(same), home))


def home_of(path: str, homes: Mapping[str, Home]) -> Home | None:
    """The device of the innermost listed module around a path; None if there is none."""
    while path and path not in homes:
        path = path.rpartition(".")[0]
    return homes.get(path)


_MAIN = -1
"""The place of the model's own inputs while the rules of a search are made."""


def module_units(
    graph: Graph, whole: Sequence[str], aliases: Mapping[str, str]
) -> tuple[Units, NDArray[np.bool_]]:
    """(units, [ops] True for ops that the first device must run) under which every placement is a
    device map.

    A unit is a module without children, one that is kept whole, or a small one whose own ops join
    what several places make: a residual block, say, whose add reads the block's input. Calling a
    listed module moves all it reads to its device, so that it stands anywhere. Ops of the modules
    that are left run where what they read is, so they are tied to that. What reads one parameter
    stays together, as accelerate keeps a tied one on one device.

    At first each unit is a place of its own. Tensors are followed as in the export of a plan, and
    what the export would need in one place is put there, until it needs nothing more. Devices hold
    whole places, so modules that are split between devices are split between places too, and an op
    of a split module is in the place that it reads from: no placement needs more.

    aliases   other name of a parameter or buffer -> its name

    Raises `ExportError` for towers.
    """
    check_one_replica(graph, FORMAT)
    needs = _Needs(graph, frozenset(whole), module_tree(graph, aliases))
    while needs.grow():
        pass
    return needs.units, needs.main


class _Needs:
    """What must be in one place: `roots`, the modules that are units, `ties`, pairs of ops, and
    `main` [ops], those that run where inputs are."""

    def __init__(self, graph: Graph, whole: frozenset[str], top: Module) -> None:
        self.graph, self.whole, self.top = graph, whole, top
        self.modules = {module.path: module for module in top.walk()}
        self.forward = forward_ops(graph)
        work = np.stack([graph.flops, graph.accessed_bytes], axis=1).astype(np.float64)
        self.work = work / np.maximum(work[self.forward].sum(axis=0), 1)
        self.small: dict[str, bool] = {}
        self.roots: list[str] = []
        for path, module in self.modules.items():  # the outer ones first
            # `dispatch_model` does not move what a split module holds itself.
            stays = path in whole or not module.children
            if not _is_within(path, self.roots) and (
                stays or (module.held and self._is_small(path))
            ):
                self.roots.append(path)
        self.ties: list[tuple[int, int]] = []
        self.main = np.zeros(len(graph), dtype=bool)
        names_of: dict[int, list[str]] = {}
        for module in self.modules.values():
            for name, op in module.held.items():
                names_of.setdefault(op, []).append(name)
        self.unread: list[list[str]] = []  # the names of each tensor that only these keep together
        for op, names in names_of.items():
            readers = forward_readers(graph, op)
            self.ties += [(readers[0], reader) for reader in readers[1:]]
            # Parameters that the outermost module holds itself are where its inputs are.
            self.main[readers[:1]] |= len(names) > 1 and op in top.held.values()
            if len(names) > 1 and not readers:
                self.unread.append(names)

    @property
    def units(self) -> Units:
        first = placed_ops(self.graph)[0]
        with_inputs = [(first, op) for op in np.flatnonzero(self.main).tolist()]
        return units_of(self.graph, self.roots, [*self.ties, *with_inputs])

    def grow(self) -> bool:
        """Follow a map of the places that there are; True if it needed more than is known."""
        before = len(self.ties), tuple(self.roots), int(self.main.sum())
        places = colocate(self.graph, self.units).of_op.astype(np.int32)
        if self.main.any():
            places[places == places[placed_ops(self.graph)[0]]] = _MAIN
        homes = _homes(self.top, self.graph, places)
        if set(homes) != {""}:
            homes |= dict.fromkeys(self.top.held, _MAIN)
            heads = {int(places[op]): op for op in reversed(self.forward)}
            _follow(self.graph, homes, _MAIN, partial(self._run, places, heads))
            # What nobody reads is tied, too, where several modules hold it.
            for names in self.unread:
                met = {home for name in names if (home := home_of(name, homes)) is not None}
                first, *others = sorted(met - {_MAIN}) or [_MAIN]
                self.ties += [(heads[first], heads[other]) for other in others]
                if _MAIN in met and first != _MAIN:
                    self.main[heads[first]] = True
        return before != (len(self.ties), tuple(self.roots), int(self.main.sum()))

    def _run(
        self, places: NDArray[np.int32], heads: Mapping[int, int], op: int, reads: Mapping[int, int]
    ) -> int:
        """The place of an op of a split module, which is tied to what it reads.

        heads   place -> its first op
        """
        graph, path, place = self.graph, self.graph.modules[op], int(places[op])
        makers = {tensor: int(graph.producers[tensor]) for tensor in reads}
        for tensor, maker in makers.items():
            # What is made where inputs are, in a module that may be whole, and then elsewhere.
            is_made = reads[tensor] == _MAIN and not graph.is_source[maker]
            if is_made and not _is_within(f"{path}.", [graph.modules[maker]]):
                self.main[maker] = True
        if set(reads.values()) <= {_MAIN}:
            return _MAIN
        # Its module's own tensors come to the op, wherever it runs.
        met = {at for t, at in reads.items() if at != place or not graph.is_source[makers[t]]}
        # A unit may be split all the same: by a tensor that is with another module that holds it.
        if len(met) > 1 and not _is_within(f"{path}.", self.roots) and self._is_small(path):
            self.roots = [*(root for root in self.roots if not _is_within(root, [path])), path]
        elif met - {place}:
            self.main[op] |= _MAIN in met | {place}
            self.ties += [(heads[at], op) for at in met - {_MAIN, place}]
        return _MAIN if _MAIN in met else min(met, default=place)

    def _is_small(self, path: str) -> bool:
        """True if the module is a small share of the work and has no module to keep whole in it."""
        if path not in self.small:
            module = self.modules[path]
            share = self.work[module.all_ops].sum(axis=0)
            free = all(inner.path not in self.whole for inner in module.walk())
            self.small[path] = bool(path) and free and bool((share <= LARGEST_WHOLE).all())
        return self.small[path]


def _is_within(path: str, modules: Collection[str]) -> bool:
    """True if one of the modules is around the path, other than itself."""
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return True
    return False
