"""Defines `PlacementProblem`: what a placer is given, and the figures that all placers derive.

A placer chooses a device for each *group* of ops that stay together: a group placement [groups].
`spread` turns that into a placement [ops].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import NoDeviceError, PinError
from dovetail.graph import HOST, Graph, Groups, Phase
from dovetail.graph.convexity import find_return
from dovetail.graph.copies import names_in_one
from dovetail.graph.grouping import numbered
from dovetail.machine import Link, Machine
from dovetail.methods import PLACERS
from dovetail.plans import capacities_of
from dovetail.simulator.loads import LoadModel, load_model
from dovetail.timeline import Timeline

# For the type only: placers do not build a simulator, they are handed an evaluator.
if TYPE_CHECKING:
    from dovetail.simulator import BatchEvaluation

GroupPlacement = NDArray[np.int32]  # [groups]
Evaluate = Callable[[NDArray[np.int32]], "BatchEvaluation"]  # [batch, ops] -> BatchEvaluation
Trace = Callable[[NDArray[np.int32]], Timeline]  # [ops] -> Timeline


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """A graph to place on a machine.

    allowed      [groups, devices] where each group may go, by device kinds, costs and pins
    capacities   [devices] bytes that each device may use, with the user's caps applied
    evaluate     placements [batch, ops] -> BatchEvaluation of the objective
    trace        placement [ops] -> Timeline of the step; None: the step cannot be simulated
    contiguous   only placements whose devices can be ordered are feasible: `graph.convexity`
    ranked       `evaluate` also simulates devices that choose ops by upward rank: see `Simulator`
    chain        [groups] position of each group along one order; -1: the group has no position.
                 A placement is feasible only if each device takes one run of this order, or none.
                 None: there is no such order
    coarser      partitions of the groups from coarse to fine, as in `graph.GroupLevels`: `auto`
                 searches the units of each before it splits them
    """

    graph: Graph
    machine: Machine
    costs: Costs
    groups: Groups
    allowed: NDArray[np.bool_]
    capacities: NDArray[np.int64]
    objective: str
    evaluate: Evaluate
    seed: int
    contiguous: bool = False
    trace: Trace | None = None
    ranked: bool = False
    chain: NDArray[np.int32] | None = None
    coarser: tuple[NDArray[np.int32], ...] = ()

    @property
    def devices(self) -> int:
        return int(self.allowed.shape[1])

    @cached_property
    def sent_bytes(self) -> NDArray[np.float64]:
        """[tensors] bytes that a send of each tensor moves."""
        return self.costs.sends_of(self.graph)

    @cached_property
    def load(self) -> LoadModel:
        """The `load` objective as arrays (work, nets and memory of the groups), for searches that
        compute it without `evaluate`."""
        return load_model(
            self.graph,
            self.machine,
            self.costs,
            group_of=self.groups.of_op,
            allowed=self.allowed,
            capacities=self.capacities,
        )

    @cached_property
    def work_seconds(self) -> NDArray[np.float64]:
        """[groups, devices] summed compute seconds; inf where an op of the group cannot run."""
        columns = self.costs.compute_seconds.T
        of_op, count = self.groups.of_op, self.groups.count
        return np.stack([np.bincount(of_op, weights=c, minlength=count) for c in columns], axis=1)

    @cached_property
    def group_bytes(self) -> NDArray[np.int64]:
        """[groups] estimated bytes that stay for long where the group is.

        These are its parameters and state, its forward outputs that backward or update ops read,
        and those that are graph outputs. Searches are guided by this estimate; only `evaluate`
        tells whether a placement fits.
        """
        graph = self.graph
        producers, readers = graph.producers, graph.readers
        source = graph.is_source[producers]
        lives = self._lives
        late = np.isin(graph.phases[readers], (Phase.BACKWARD, Phase.UPDATE))
        is_kept = np.zeros(graph.tensors, dtype=bool)
        is_kept[graph.input_tensors[late]] = True
        is_kept[graph.outputs] = True
        # Views are left out, because they share the bytes of their base.
        is_kept &= ~source & (graph.phases[producers] == Phase.FORWARD) & (graph.bases < 0)
        weights = np.where(lives | is_kept, graph.tensor_bytes, 0)
        owners = self.groups.of_op[producers]
        return np.bincount(owners, weights=weights, minlength=self.groups.count).astype(np.int64)

    @cached_property
    def made_bytes(self) -> NDArray[np.int64]:
        """[groups] bytes of a group's parameters, state and outputs, as if no output were freed."""
        graph = self.graph
        is_counted = self._lives | (~graph.is_source[graph.producers] & (graph.bases < 0))
        weights = np.where(is_counted, graph.tensor_bytes, 0)
        owners = self.groups.of_op[graph.producers]
        return np.bincount(owners, weights=weights, minlength=self.groups.count).astype(np.int64)

    @property
    def _lives(self) -> NDArray[np.bool_]:
        """[tensors] True for tensors that exist before the step on a device that the plan chooses.

        These are the outputs of source ops, except inputs, which start on the host, and except
        tensors that are resident wherever they are read but are read nowhere.
        """
        graph = self.graph
        home = graph.residences[graph.producers]
        used = (home >= 0) | ((home != HOST) & (np.diff(graph.consumer_offsets) > 0))
        return np.asarray(graph.is_source[graph.producers] & used)

    @cached_property
    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
        """(from group, to group, bytes) arrays, one entry for each pair of groups with a tensor
        between them.

        A tensor counts once for each group that reads it. Parameters that live with their update
        op count. Inputs, frozen parameters and constants do not.
        """
        graph, of_op = self.graph, self.groups.of_op
        owners = graph.producers[graph.input_tensors]
        moves = ~graph.is_source[owners] | (graph.residences[owners] >= 0)
        ends = np.stack([of_op[owners], of_op[graph.readers], graph.input_tensors], axis=1)
        ends = np.unique(ends[moves & (ends[:, 0] != ends[:, 1])], axis=0)
        pairs, inverse = np.unique(ends[:, :2], axis=0, return_inverse=True)
        sizes = self.sent_bytes[ends[:, 2]]
        sums = np.bincount(inverse.ravel(), weights=sizes, minlength=len(pairs))
        return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32), sums.astype(np.float64)

    @cached_property
    def fastest(self) -> GroupPlacement:
        """[groups] the allowed device with the least work seconds; ties: the first."""
        seconds = np.where(self.allowed, self.work_seconds, np.inf)
        return np.asarray(seconds.argmin(axis=1), dtype=np.int32)

    @cached_property
    def device_sets(self) -> list[list[int]]:
        """The sets of devices that placers try: all devices and, if their models differ, those of
        the fastest model. Hosts that run nothing are left out.

        The fastest model is that of the device that can run most groups; ties: the least seconds
        for all of them, then the first device.
        """
        devices = [d for d, device in enumerate(self.machine.devices) if device.kind != "host"]
        models = [self.machine.devices[d].model for d in devices]
        if len(set(models)) == 1:
            return [devices]
        runs = np.isfinite(self.work_seconds)
        seconds = np.where(runs, self.work_seconds, 0.0).sum(axis=0)
        best = min(devices, key=lambda d: (-runs[:, d].sum(), seconds[d], d))
        model = self.machine.devices[best].model
        return [devices, [d for d in devices if self.machine.devices[d].model == model]]

    @cached_property
    def running(self) -> NDArray[np.bool_]:
        """[groups] True for groups that have an op other than source ops."""
        runs = np.zeros(self.groups.count, dtype=bool)
        runs[self.groups.of_op[~self.graph.is_source]] = True
        return runs

    @cached_property
    def free(self) -> NDArray[np.int32]:
        """Groups that have a choice: more than one allowed device, and an op that is no source."""
        return np.flatnonzero(self.running & (self.allowed.sum(axis=1) > 1)).astype(np.int32)

    @cached_property
    def placements(self) -> float:
        """Number of distinct group placements, as a float: it may be astronomical."""
        with np.errstate(over="ignore"):
            return float(np.prod(self.allowed[self.free].sum(axis=1), dtype=np.float64))

    def settle(self, placement: NDArray[np.integer]) -> GroupPlacement:
        """Return the placement made valid: a group goes to its fastest device if it is where it may
        not be, or if it has no choice."""
        settled = self.fastest.copy()
        ok = self.allowed[self.free, placement[self.free]]
        settled[self.free[ok]] = placement[self.free[ok]]
        return settled

    def spread(self, placement: NDArray[np.int32]) -> NDArray[np.int32]:
        """[..., groups] -> [..., ops], contiguous."""
        return np.ascontiguousarray(placement[..., self.groups.of_op])


@cache
def _import_searches() -> None:
    """Import what `auto` runs: before a search's own budget begins, and not for a plan that is only
    opened. The learned methods, and torch with them, are imported by who uses them."""
    for method in PLACERS.values():
        if method.role:
            method.load()


def make_problem(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    evaluate: Evaluate,
    *,
    groups: Groups,
    objective: str = "step",
    pins: Iterable[tuple[str, str]] = (),
    caps: Iterable[tuple[str, int]] = (),
    seed: int = 0,
    contiguous: bool = False,
    trace: Trace | None = None,
    ranked: bool = False,
    may_run: NDArray[np.bool_] | None = None,
    chain: NDArray[np.int32] | None = None,
    coarser: tuple[NDArray[np.int32], ...] = (),
) -> PlacementProblem:
    """Build the problem that placers solve.

    pins      (pattern, device name): glob on op names and module paths; a module's path, or a glob
              that matches it, pins everything inside
    caps      (device name, bytes): the most that the device may use
    may_run   [ops, devices] a further limit on where each op may go; None: no further limit
    chain     [ops] position of each op's group along an order, as in `PlacementProblem`; -1: none
    coarser   as in `PlacementProblem`; a unit whose groups have no device in common is split

    Raises `PinError` (a pin matches nothing, or contradicts another pin), `UnknownDeviceError`,
    `NoDeviceError` (an op that no device may run) and `CostError`.
    """
    _import_searches()
    costs.check(graph)
    # Group -> the device that a pin puts it on, and that pin.
    pinned: dict[int, tuple[int, str]] = {}
    for pattern, name in pins:
        device = machine.device_index(name)
        for group in np.unique(groups.of_op[_choosable(graph, pattern)]).tolist():
            earlier_device, earlier_pattern = pinned.setdefault(group, (device, pattern))
            if earlier_device != device:
                raise PinError(
                    pattern,
                    f"puts a group of ops on {name}, but pin {earlier_pattern!r} puts it on "
                    f"{machine.device_names[earlier_device]}; ops of one group stay together",
                )

    # Where device kinds, costs, pins and `may_run` let each group go.
    kinds = [device.kind for device in machine.devices]
    per_op = np.stack([graph.runs_on(kind) for kind in kinds], axis=1)
    per_op &= np.isfinite(costs.compute_seconds)
    # Source ops do not run, so neither kinds nor costs limit them. Only the host is left out.
    per_op[graph.is_source] = [kind != "host" for kind in kinds]
    forbidden = np.zeros((groups.count, len(kinds)), dtype=bool)
    np.logical_or.at(forbidden, groups.of_op, ~per_op)
    allowed = ~forbidden
    if may_run is not None:
        barred = np.zeros_like(allowed)
        runs = ~graph.is_source
        np.logical_or.at(barred, groups.of_op[runs], ~may_run[runs])
        allowed &= ~barred
    for group, (device, _) in pinned.items():
        allowed[group] &= np.arange(allowed.shape[1]) == device
    stuck = np.flatnonzero(~allowed.any(axis=1))
    if len(stuck):
        # The error names the group's first op that runs, or else its first op.
        ops = np.flatnonzero(groups.of_op == stuck[0])
        real = ops[~graph.is_source[ops]]
        raise NoDeviceError(graph.names[real[0] if len(real) else ops[0]])
    capacities = capacities_of(machine, dict(caps))
    places, along = None, np.zeros(0, dtype=np.int64)
    if chain is not None:
        places = np.full(groups.count, -1, dtype=np.int32)
        np.maximum.at(places, groups.of_op, chain)
        # All ops of a group are on one device, so the first op of each group tells where it is.
        _, first = np.unique(groups.of_op, return_index=True)
        placed = np.flatnonzero(places >= 0)
        along = first[placed[np.argsort(places[placed], kind="stable")]]

    def evaluate_kept(placements: NDArray[np.int32]) -> BatchEvaluation:
        """Evaluate, where a placement is infeasible also if its devices cannot be ordered, or if a
        device has two runs of the chain."""
        evaluation = evaluate(placements)
        feasible = evaluation.feasible
        if contiguous:
            ordered = [find_return(graph, row) is None for row in placements]
            feasible = feasible & np.array(ordered, dtype=bool)
        if chain is not None:
            # There are at least as many runs as devices, and as many only if no device has two.
            in_runs = [
                int((row[1:] != row[:-1]).sum()) + 1 <= len(set(row.tolist()))
                for row in placements[:, along]
            ]
            feasible = feasible & np.array(in_runs, dtype=bool)
        return replace(evaluation, feasible=feasible)

    # Units whose groups have no device in common are split, each into units of groups that may go
    # to the same devices.
    placeable: list[NDArray[np.int32]] = []
    _, choice = np.unique(allowed, axis=0, return_inverse=True)
    for unit_of in coarser:
        common = np.ones((int(unit_of.max()) + 1, allowed.shape[1]), dtype=bool)
        np.logical_and.at(common, unit_of, allowed)
        has_device = np.asarray(common.any(axis=1))[unit_of]
        apart = np.where(has_device, 0, choice.reshape(-1) + 1)
        # A finer partition must also split what a coarser one had to split.
        around = placeable[-1].astype(np.int64) if placeable else np.zeros(len(unit_of), np.int64)
        keys = np.stack([around, unit_of, apart], axis=1)
        _, split = np.unique(keys, axis=0, return_inverse=True)
        placeable.append(numbered(split.reshape(-1)).of_op)
    return PlacementProblem(
        graph, machine, costs, groups, allowed, capacities, objective,
        evaluate_kept if contiguous or chain is not None else evaluate,
        seed, contiguous, trace, ranked, places, tuple(placeable),
    )  # fmt: skip


def route(machine: Machine, source: int, target: int) -> list[Link]:
    """Return the links that a send between two devices takes: one, or where there is none the two
    over the host."""
    index, host = machine.link_index, machine.host_index
    if index[source, target] >= 0:
        return [machine.links[index[source, target]]]
    return [machine.links[index[source, host]], machine.links[index[host, target]]]


def permitted(graph: Graph, machine: Machine, pins: Iterable[tuple[str, str]]) -> NDArray[np.bool_]:
    """Return [ops, devices] where device kinds and pins let each op run, whatever its group.

    Every plan that the user permits keeps to this, also plans that split groups. Lower bounds need
    that.

    Raises `PinError` and `UnknownDeviceError`.
    """
    allowed = np.stack([graph.runs_on(device.kind) for device in machine.devices], axis=1)
    for pattern, name in pins:
        pinned = np.arange(allowed.shape[1]) == machine.device_index(name)
        # A parameter is where its update runs, so a pin on the one is a pin on the other.
        allowed[graph.residences[_choosable(graph, pattern)]] &= pinned
    return allowed


def _choosable(graph: Graph, pattern: str) -> NDArray[np.bool_]:
    """Return [ops] True for ops that match the pattern and whose device a plan chooses. An op
    matches if its name does, which is that in one micro-batch, or its module, or one around that.

    Raises `PinError` if there is none.
    """

    @cache
    def inside(module: str) -> bool:
        same = module == pattern or module.startswith(pattern + ".")
        return same or fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")

    matched = np.array(
        [
            name == pattern or fnmatchcase(name, pattern) or inside(module)
            for name, module in zip(names_in_one(graph), graph.modules, strict=True)
        ],
        dtype=bool,
    )
    if not matched.any():
        raise PinError(pattern)
    matched &= graph.residences >= 0
    if not matched.any():
        raise PinError(pattern, "matches only inputs and constants, which carry no choice")
    return matched
