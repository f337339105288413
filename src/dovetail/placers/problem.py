"""PlacementProblem: what a placer is given, with the figures that all placers derive from it.

Placers decide for each *group* [groups]; `spread` turns that into a placement [ops].
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
from dovetail.machine import Machine
from dovetail.plans import capacities_of
from dovetail.simulator.loads import LoadModel, load_model
from dovetail.timeline import Timeline

if TYPE_CHECKING:  # placers are handed an evaluator
    from dovetail.simulator import BatchEvaluation

GroupPlacement = NDArray[np.int32]  # [groups]
Evaluate = Callable[[NDArray[np.int32]], "BatchEvaluation"]  # [batch, ops] -> BatchEvaluation
Trace = Callable[[NDArray[np.int32]], Timeline]  # [ops] -> Timeline


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """A graph to place on a machine.

    allowed      [groups, devices] where each group may go: kinds, costs and pins together
    capacities   [devices] bytes each device may use, caps applied
    evaluate     placements [batch, ops] -> BatchEvaluation of the objective
    trace        placement [ops] -> Timeline of the step; None: nobody simulates it
    contiguous   only placements whose devices can be ordered are feasible: `graph.convexity`
    ranked       `evaluate` also tries devices that choose by upward rank: see `Simulator`
    chain        [groups] place in an order of which each device has one run or none, -1: no place;
                 None: there is no such order
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

    @property
    def devices(self) -> int:
        return int(self.allowed.shape[1])

    @cached_property
    def sent_bytes(self) -> NDArray[np.float64]:
        """[tensors] bytes that a send of each tensor moves."""
        return self.costs.sends_of(self.graph)

    @cached_property
    def load(self) -> LoadModel:
        """Work, nets and memory of the groups: the `load` objective, for searches of its own."""
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
        """[groups] bytes that stay for long: parameters and state, and what backward reads later.

        Searches are guided by this estimate; only `evaluate` says whether a placement fits.
        """
        graph = self.graph
        producers, readers = graph.producers, graph.readers
        source = graph.is_source[producers]
        lives = self._lives
        late = np.isin(graph.phases[readers], (Phase.BACKWARD, Phase.UPDATE))
        is_kept = np.zeros(graph.tensors, dtype=bool)
        is_kept[graph.input_tensors[late]] = True
        is_kept[graph.outputs] = True
        is_kept &= ~source & (graph.phases[producers] == Phase.FORWARD) & (graph.bases < 0)
        weights = np.where(lives | is_kept, graph.tensor_bytes, 0)
        owners = self.groups.of_op[producers]
        return np.bincount(owners, weights=weights, minlength=self.groups.count).astype(np.int64)

    @cached_property
    def made_bytes(self) -> NDArray[np.int64]:
        """[groups] bytes of all that a group makes, as if it all stayed: parameters, state,
        outputs."""
        graph = self.graph
        made = self._lives | (~graph.is_source[graph.producers] & (graph.bases < 0))
        weights = np.where(made, graph.tensor_bytes, 0)
        owners = self.groups.of_op[graph.producers]
        return np.bincount(owners, weights=weights, minlength=self.groups.count).astype(np.int64)

    @property
    def _lives(self) -> NDArray[np.bool_]:
        """[tensors] True for tensors that are there before the step, on a device that a plan
        chooses."""
        graph = self.graph
        home = graph.residences[graph.producers]
        used = (home >= 0) | ((home != HOST) & (np.diff(graph.consumer_offsets) > 0))
        return np.asarray(graph.is_source[graph.producers] & used)

    @cached_property
    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
        """(from group, to group, bytes) of the tensors that go between groups, each tensor once
        per destination. Parameters that live with their update count; inputs do not."""
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
        """All devices; and, if they are unlike, a second set: those of the model that is
        fastest."""
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
        """[groups] True for groups with an op that runs."""
        runs = np.zeros(self.groups.count, dtype=bool)
        runs[self.groups.of_op[~self.graph.is_source]] = True
        return runs

    @cached_property
    def free(self) -> NDArray[np.int32]:
        """Groups that have a choice: more than one allowed device, and an op that runs."""
        return np.flatnonzero(self.running & (self.allowed.sum(axis=1) > 1)).astype(np.int32)

    @cached_property
    def placements(self) -> float:
        """Number of distinct group placements, as a float: it may be astronomical."""
        with np.errstate(over="ignore"):
            return float(np.prod(self.allowed[self.free].sum(axis=1), dtype=np.float64))

    def settle(self, placement: NDArray[np.integer]) -> GroupPlacement:
        """A group placement with every group that may not be where it is moved to its fastest
        device, and groups without a choice to theirs."""
        settled = self.fastest.copy()
        ok = self.allowed[self.free, placement[self.free]]
        settled[self.free[ok]] = placement[self.free[ok]]
        return settled

    def spread(self, placement: NDArray[np.int32]) -> NDArray[np.int32]:
        """[..., groups] -> [..., ops], contiguous."""
        return np.ascontiguousarray(placement[..., self.groups.of_op])


def make_problem(  # noqa: PLR0913  (keyword-only beyond the four that every problem needs)
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
) -> PlacementProblem:
    """Build the problem that placers solve.

    pins   (pattern, device name): glob on op names and module paths; a module's path, or a glob
           that matches it, pins everything inside
    caps   (device name, bytes) the device may use at most
    may_run   [ops, devices] where each op may go besides; None: anywhere
    chain  [ops] place of each op's group in an order, as in `PlacementProblem`; -1: none

    Raises `PinError` (a pin that matches nothing, or against another pin), `UnknownDeviceError`,
    `NoDeviceError` (an op that no device may run) and `CostError`.
    """
    costs.check(graph)
    pinned = _pinned(graph, machine, groups, tuple(pins))
    allowed = _allowed(graph, machine, costs, groups)
    if may_run is not None:
        barred = np.zeros_like(allowed)
        runs = ~graph.is_source
        np.logical_or.at(barred, groups.of_op[runs], ~may_run[runs])
        allowed &= ~barred
    for group, device in pinned.items():
        allowed[group] &= np.arange(allowed.shape[1]) == device
    stuck = np.flatnonzero(~allowed.any(axis=1))
    if len(stuck):
        raise NoDeviceError(graph.names[_culprit(graph, groups, allowed, int(stuck[0]))])
    capacities = capacities_of(machine, dict(caps))
    if contiguous:
        evaluate = _only_contiguous(evaluate, graph)
    places = None
    if chain is not None:
        places = np.full(groups.count, -1, dtype=np.int32)
        np.maximum.at(places, groups.of_op, chain)
        evaluate = _only_runs(evaluate, groups, places)
    return PlacementProblem(
        graph, machine, costs, groups, allowed, capacities, objective, evaluate, seed,
        contiguous, trace, ranked, places,
    )  # fmt: skip


def _only_runs(evaluate: Evaluate, groups: Groups, chain: NDArray[np.int32]) -> Evaluate:
    """`evaluate`, but a placement where a device comes back along the chain is infeasible."""
    _, first = np.unique(groups.of_op, return_index=True)  # an op of each group
    placed = np.flatnonzero(chain >= 0)
    along = first[placed[np.argsort(chain[placed], kind="stable")]]

    def evaluate_runs(placements: NDArray[np.int32]) -> BatchEvaluation:
        evaluation = evaluate(placements)
        runs = [
            int((row[1:] != row[:-1]).sum()) + 1 <= len(set(row.tolist()))
            for row in placements[:, along]
        ]
        return replace(evaluation, feasible=evaluation.feasible & np.array(runs, dtype=bool))

    return evaluate_runs


def _only_contiguous(evaluate: Evaluate, graph: Graph) -> Evaluate:
    """`evaluate`, but a placement whose devices cannot be ordered is infeasible."""

    def evaluate_contiguous(placements: NDArray[np.int32]) -> BatchEvaluation:
        evaluation = evaluate(placements)
        contiguous = [find_return(graph, placement) is None for placement in placements]
        return replace(evaluation, feasible=evaluation.feasible & np.array(contiguous, dtype=bool))

    return evaluate_contiguous


def _allowed(graph: Graph, machine: Machine, costs: Costs, groups: Groups) -> NDArray[np.bool_]:
    """[groups, devices] by kinds of device and by costs."""
    kinds = [device.kind for device in machine.devices]
    per_op = np.stack([graph.runs_on(kind) for kind in kinds], axis=1)
    per_op &= np.isfinite(costs.compute_seconds)
    per_op[graph.is_source] = [kind != "host" for kind in kinds]
    forbidden = np.zeros((groups.count, len(kinds)), dtype=bool)
    np.logical_or.at(forbidden, groups.of_op, ~per_op)
    return ~forbidden


def _culprit(graph: Graph, groups: Groups, allowed: NDArray[np.bool_], group: int) -> int:
    """The first op of the group that runs, or else its first op."""
    ops = np.flatnonzero(groups.of_op == group)
    real = ops[~graph.is_source[ops]]
    return int(real[0] if len(real) else ops[0])


def _pinned(
    graph: Graph, machine: Machine, groups: Groups, pins: tuple[tuple[str, str], ...]
) -> dict[int, int]:
    """group -> device."""
    by: dict[int, tuple[int, str]] = {}
    for pattern, name in pins:
        device = machine.device_index(name)
        for group in np.unique(groups.of_op[_choosable(graph, pattern)]).tolist():
            there, earlier = by.setdefault(group, (device, pattern))
            if there != device:
                raise PinError(
                    pattern,
                    f"puts a group of ops on {name}, but pin {earlier!r} puts it on "
                    f"{machine.device_names[there]}; ops of one group stay together",
                )
    return {group: device for group, (device, _) in by.items()}


def permitted(graph: Graph, machine: Machine, pins: Iterable[tuple[str, str]]) -> NDArray[np.bool_]:
    """[ops, devices] where kinds of device and pins let each op run, whatever its group. This holds
    for every plan that the user permits; lower bounds need that.

    Raises `PinError` and `UnknownDeviceError`.
    """
    allowed = np.stack([graph.runs_on(device.kind) for device in machine.devices], axis=1)
    for pattern, name in pins:
        pinned = np.arange(allowed.shape[1]) == machine.device_index(name)
        # A parameter is where its update runs, so a pin on the one is a pin on the other.
        allowed[graph.residences[_choosable(graph, pattern)]] &= pinned
    return allowed


def _choosable(graph: Graph, pattern: str) -> NDArray[np.bool_]:
    """[ops] that match and carry a choice; `PinError` where there is none."""
    matched = _matched(graph, pattern)
    if not matched.any():
        raise PinError(pattern)
    matched &= graph.residences >= 0
    if not matched.any():
        raise PinError(pattern, "matches only inputs and constants, which carry no choice")
    return matched


def _matched(graph: Graph, pattern: str) -> NDArray[np.bool_]:
    """[ops] whose name, module or a module around it matches."""

    @cache
    def inside(module: str) -> bool:
        same = module == pattern or module.startswith(pattern + ".")
        return same or fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")

    return np.array(
        [
            name == pattern or fnmatchcase(name, pattern) or inside(module)
            for name, module in zip(graph.names, graph.modules, strict=True)
        ],
        dtype=bool,
    )
