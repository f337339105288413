"""Cuts a training step into stages for a pipeline of micro-batches, and chooses the schedule.

    graph ──► elements ──► orders of elements ──► cuts ──► tasks of each device ──► simulated step
              (what must    (several)             (dynamic       (a schedule)
               stay together)                      programme,
                                                   then moved)

A *stage*, here always a pipeline stage, holds forward ops, their backward ops and their parameters.
Activations go from a stage to later ones only, gradients to earlier ones only; they may leap over
stages (skips). A parameter that several stages read (tied weights) lives in one of them and is sent
to the others once a step.

The cuts come from dynamic programmes over an order of the elements. With T the seconds of a
stage's tasks for one micro-batch and C those of sending its activations, 1F1B takes about

    sum of (T_i + 2 C_i) + (M - 1) max T_i                                       (M micro-batches)

(Narayanan et al., SC 2021, https://arxiv.org/abs/2104.04473, section 2.2, for equal stages). For
each of several limits of max T_i the programme finds the least sum over cuts and devices, such that
each stage fits its device's memory. A second programme takes into account that a stage waits only
for those before it, so that earlier stages may have more work. Both are `_solve`. The step of each
solution is simulated task by task, and cuts are moved while that helps. The best are simulated op
by op, which gives the plan's value.

If a graph has at most `MOST_TRIED` cuts, all are simulated op by op, and the result is exact.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.costs import Costs
from dovetail.costs.kernels import kernel_seconds, pointwise_kernels
from dovetail.errors import InfeasibleError, OutOfMemoryError
from dovetail.graph import EVERYWHERE, Graph, Groups, Phase
from dovetail.graph.copies import ACCUMULATE
from dovetail.graph.topological import topological_order
from dovetail.machine import Machine
from dovetail.methods import PIPELINE_SCHEDULES
from dovetail.placers.budget import Budget
from dovetail.placers.contiguity import longest_paths
from dovetail.placers.pipeline_schedules import (
    Orders,
    PipelineTimes,
    in_flight,
    orders_of,
    other_held,
    step_seconds,
)
from dovetail.placers.problem import route
from dovetail.runtime.compiling import inlined, kernel

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

MOST_CELLS = 192
"""The dynamic programme cuts between so many runs of elements at most; cuts move by elements."""
MOST_SEQUENCES = 24
"""Orders of unlike devices that are tried."""
FILLS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""The second programme runs with M, and with so many times the stages more, micro-batches."""
LIMITS = 24
"""Limits of the longest stage for which cuts are found."""
MOST_MERGED_SHARE = 0.6
"""Readers of one parameter become one element if it then has at most this share of the work."""
MOST_MERGES = 200
"""Parameters with several readers that are looked at one by one."""
MOST_TRIED = 2_000
"""If a graph has no more ways to be cut, all are simulated op by op."""
MOST_TRIED_ELEMENTS = 12
"""Cuts are counted for graphs of at most so many elements."""
SHARES = (1.0, 0.8, 0.6, 0.4, 0.25)
"""Shares of the memory with which cuts are sought, in turn, while those found do not fit: what a
stage needs is estimated."""
FINALISTS = 12
"""So many of the best cuts are simulated op by op, as the budget allows."""
LEAST_GAIN, MOST_HELD, NEAR = 1e-3, 6, 0.03
"""Zero-bubble holds other numbers of micro-batches where its step is shorter by such a share. So
many of them are simulated op by op, and only while they are nearer than this to the best plan."""
CHUNKS = (2, 3, 4)
"""Numbers of stages on each device that are tried for the interleaved schedule."""


@dataclass(frozen=True, eq=False)
class PipelineProblem:
    """A step of one micro-batch to cut into stages.

    costs            of the ops of one micro-batch
    allowed          [groups, devices] where each group may go
    capacities       [devices] bytes
    micro_batches    of a step, 2 or more
    schedules        the schedules that may be chosen
    recompute        True: stages may compute forward ops again, to need less memory
    chain            [ops] place in an order that stages follow, -1: none; None: there is no order
    refuses          (schedule, [stages] devices, micro-batches) -> why there may be no such
                     pipeline, "" if there may; None: there may be any
    tied_by_work     a parameter that several elements read goes with the one that works most;
                     False: with the first
    """

    graph: Graph
    machine: Machine
    costs: Costs
    groups: Groups
    allowed: Bool
    capacities: Int64
    micro_batches: int
    schedules: tuple[str, ...] = PIPELINE_SCHEDULES
    recompute: bool = True
    chain: Int32 | None = None
    refuses: Callable[[str, tuple[int, ...], int], str] | None = None
    tied_by_work: bool = False

    def permits(self, schedule: str, devices: tuple[int, ...]) -> bool:
        """True if there may be a pipeline of these stages."""
        return self.refuses is None or not self.refuses(schedule, devices, self.micro_batches)

    @property
    def variants(self) -> "tuple[PipelineProblem, ...]":
        """The problem, and the one with tied parameters elsewhere, if that is another."""
        other = replace(self, tied_by_work=not self.tied_by_work)
        same = np.array_equal(self.elements.of_op, other.elements.of_op)
        return (self,) if same else (self, other)

    @cached_property
    def elements(self) -> "PipelineElements":
        return elements_of(self)

    @cached_property
    def routes(self) -> tuple[Int64, Float64, Float64]:
        """[from, to] the channel, latency seconds and bytes per second of a transfer; through the
        host if there is no link, over the channel of the first hop. A device is on channel -1 with
        itself."""
        machine, count = self.machine, len(self.machine.devices)
        channel_of = {name: index for index, name in enumerate(machine.channels)}
        channels = np.full((count, count), -1, dtype=np.int64)
        latency, rate = np.zeros((count, count)), np.full((count, count), np.inf)
        for source, target in itertools.permutations(range(count), 2):
            links = route(machine, source, target)
            channels[source, target] = channel_of[links[0].channel]
            latency[source, target] = sum(link.latency_seconds for link in links)
            rate[source, target] = 1 / sum(1 / link.bandwidth_bytes_per_second for link in links)
        return channels, latency, rate


@dataclass(frozen=True, eq=False)
class PipelineCut:
    """Stages, their devices and the schedule.

    stages       [ops] -1 for sources
    devices      [stages]
    recompute    [stages]
    seconds      of a step, simulated task by task
    held         [stages] of zero-bubble: how many micro-batches each may hold; (): as many as there
                 are stages
    """

    schedule: str
    stages: Int32
    devices: tuple[int, ...]
    recompute: tuple[bool, ...]
    seconds: float = math.inf
    name: str = ""
    held: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal cuts."""
        return self.schedule, self.stages.tobytes(), self.devices, self.recompute, self.held


@dataclass(frozen=True, eq=False)
class SimulatedCut:
    """What simulating a cut op by op gives."""

    value: float
    peak_memory_bytes: Int64
    feasible: bool


Simulate = Callable[[PipelineCut], SimulatedCut]


# --- PipelineElements: what is in one stage whatever the cuts are ---


@dataclass(frozen=True, eq=False)
class PipelineElements:
    """Sets of groups that are in one stage, and what they take. Seconds are [elements, devices].

    of_op            [ops] the element of each op
    edges            [edges, 2] the second may not be in an earlier stage than the first
    forward, inputs, weights   seconds of F, I and W for one micro-batch, without `sums`
    sums             seconds of adding a micro-batch's gradients to those of the ones before it
    updates          seconds of the updates, once a step
    kept_bytes       [elements] parameters, their state and the sums of their gradients
    saved_bytes      [elements] what the forward ops of one micro-batch leave for the backward ops
    runs             [elements, devices] True where it may be
    sent, returned   [pairs, 3] (tensor, its element, an element that reads it), of forward and of
                     backward tensors
    loose            [elements] True for updates that no order of stages concerns
    """

    of_op: Int32
    count: int
    edges: Int64
    forward: Float64
    inputs: Float64
    weights: Float64
    sums: Float64
    updates: Float64
    kept_bytes: Float64
    saved_bytes: Float64
    runs: Bool
    sent: Int64
    returned: Int64
    loose: Bool
    firsts: Int64 = field(repr=False)

    @property
    def backward(self) -> Float64:
        return self.inputs + self.weights


def elements_of(problem: PipelineProblem) -> PipelineElements:
    """Return the elements of a problem. Near-linear in ops and reads, for each merged parameter."""
    graph, groups = problem.graph, problem.groups
    phases, group_of = graph.phases, groups.of_op

    # Pairs of groups, of which the second may not be in an earlier stage.
    makers, readers = graph.producers[graph.input_tensors], graph.readers
    befores = np.concatenate([makers, graph.control[:, 0]])
    afters = np.concatenate([readers, graph.control[:, 1]])
    ahead = (phases[befores] == Phase.FORWARD) & (phases[afters] == Phase.FORWARD)
    back = (phases[befores] == Phase.BACKWARD) & (phases[afters] == Phase.BACKWARD)
    in_order = group_of[:0]
    if problem.chain is not None:
        places, first_ops = np.unique(problem.chain, return_index=True)
        in_order = group_of[first_ops[places >= 0]]
    edges = np.concatenate(
        [
            np.stack([group_of[befores[ahead]], group_of[afters[ahead]]], axis=1),
            np.stack([group_of[afters[back]], group_of[befores[back]]], axis=1),
            np.stack([in_order[:-1], in_order[1:]], axis=1),
        ]
    ).astype(np.int64)
    edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0).reshape(-1, 2)

    merged = _merge_readers(problem, edges)
    of_group = _components(groups.count, edges, merged)
    of_op = of_group[groups.of_op].astype(np.int32)
    count = int(of_op.max(initial=-1)) + 1
    ends = np.unique(of_group[edges], axis=0)
    ends = ends[ends[:, 0] != ends[:, 1]]
    seconds = problem.costs.compute_seconds
    is_weight = weight_ops(graph, of_op)

    def summed(ops: Bool) -> Float64:
        sums = np.zeros((count, seconds.shape[1]))
        np.add.at(sums, of_op[ops], seconds[ops])
        return sums

    backward = phases == Phase.BACKWARD
    runs = np.ones((count, seconds.shape[1]), dtype=bool)
    np.logical_and.at(runs, of_group, problem.allowed)
    works = np.zeros(count, dtype=bool)
    works[of_op[(phases == Phase.FORWARD) | backward]] = True
    firsts = np.full(count, len(graph), dtype=np.int64)
    ops = np.flatnonzero((phases == Phase.FORWARD) | backward)
    np.minimum.at(firsts, of_op[ops], ops)

    # Bytes that stay for the step: parameters and their state, and the sums of their gradients.
    producers, sizes = graph.producers, graph.tensor_bytes
    home = graph.residences[producers]
    lives = graph.is_source[producers] & (home >= 0)
    kept = np.bincount(of_op[home[lives]], weights=sizes[lives], minlength=count)
    # What is not written lives with all that read it. The first reader counts.
    is_read = np.diff(graph.consumer_offsets) > 0
    frozen = graph.is_source[producers] & (home == EVERYWHERE) & is_read
    first_readers = graph.consumers[graph.consumer_offsets[:-1][frozen]]
    kept = kept + np.bincount(of_op[first_readers], weights=sizes[frozen], minlength=count)
    once = phases[readers] == Phase.UPDATE
    gradients = np.unique(graph.input_tensors[once & (phases[makers] == Phase.BACKWARD)])
    kept += np.bincount(of_op[producers[gradients]], weights=sizes[gradients], minlength=count)
    # Bytes that forward ops save for backward ops, for each micro-batch.
    late = phases[readers] == Phase.BACKWARD
    read_late = np.zeros(graph.tensors, dtype=bool)
    read_late[graph.storages[graph.input_tensors[late]]] = True
    saved = read_late[graph.storages] & (phases[producers] == Phase.FORWARD) & (graph.bases < 0)
    saved_bytes = np.bincount(of_op[producers[saved]], weights=sizes[saved], minlength=count)

    added = np.zeros((count, seconds.shape[1]))
    np.add.at(added, of_op, sum_seconds(problem))
    return PipelineElements(
        of_op=of_op,
        count=count,
        edges=ends,
        forward=summed(phases == Phase.FORWARD),
        inputs=summed(backward & ~is_weight),
        weights=summed(backward & is_weight),
        sums=added,
        updates=summed(phases == Phase.UPDATE),
        kept_bytes=kept.astype(np.float64),
        saved_bytes=saved_bytes.astype(np.float64),
        runs=runs,
        sent=_pairs(graph, of_op, Phase.FORWARD),
        returned=_pairs(graph, of_op, Phase.BACKWARD),
        loose=~works,
        firsts=firsts,
    )


def _components(count: int, edges: Int64, unions: Sequence[Int64]) -> Int64:
    """Return [groups] the set of each group: groups on a circle of edges, and those of a union, are
    in one set."""
    ties = [np.stack([union[:-1], union[1:]], axis=1) for union in unions if len(union) > 1]
    both = np.concatenate([np.concatenate([tie, tie[:, ::-1]]) for tie in ties] or [edges[:0]])
    ends = np.concatenate([edges, both])
    matrix = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(count, count))
    _, labels = connected_components(matrix, directed=True, connection="strong")
    return np.asarray(labels, dtype=np.int64)


def _merge_readers(problem: PipelineProblem, edges: Int64) -> list[Int64]:
    """Return sets of groups that are in one stage, because a parameter or buffer ties them.

    A parameter goes with all that reads it if what then is one element is not too large: with its
    layer, over all time steps. Otherwise it goes with its first reader: later stages wait for their
    first micro-batch while they are sent it, and have made its gradient before the first stage has.
    Or it goes with the reader that works most, which may need less memory.
    """
    graph, groups = problem.graph, problem.groups
    of_op, count = groups.of_op, groups.count
    work = np.zeros(count)
    # A view of a parameter is no work of its own: it goes where the parameter goes.
    of_source = np.zeros(graph.tensors, dtype=bool)
    of_source[graph.storages[graph.is_source[graph.producers]]] = True
    others = np.bincount(graph.producers[~of_source[graph.storages]], minlength=len(graph))
    passes = np.isin(graph.phases, (Phase.FORWARD, Phase.BACKWARD)) & (others > 0)
    np.add.at(work, of_op[passes], problem.costs.compute_seconds[passes].min(axis=1))
    has_passes = np.zeros(count, dtype=bool)
    has_passes[of_op[passes]] = True
    firsts = np.full(count, len(graph), dtype=np.int64)
    np.minimum.at(firsts, of_op[passes], np.flatnonzero(passes))
    # Who reads what is written, in the forward pass.
    home_of = np.full(graph.tensors, -1, dtype=np.int64)
    written = np.flatnonzero(graph.is_source & (graph.residences >= 0))
    for op in written.tolist():
        for tensor in graph.outputs_of(op):
            home_of[graph.storages[tensor]] = of_op[graph.residences[op]]
    homes = home_of[graph.storages[graph.input_tensors]]
    reads = (homes >= 0) & (graph.phases[graph.readers] == Phase.FORWARD) & passes[graph.readers]
    readers_of: dict[int, set[int]] = {}
    for home, reader in zip(
        homes[reads].tolist(), of_op[graph.readers[reads]].tolist(), strict=True
    ):
        readers_of.setdefault(home, set()).add(reader)
    unions: list[Int64] = []
    views = (homes >= 0) & ~passes[graph.readers] & (graph.phases[graph.readers] == Phase.FORWARD)
    ties = np.stack([homes[views], of_op[graph.readers[views]]], axis=1).astype(np.int64)
    unions += list(np.unique(ties[ties[:, 0] != ties[:, 1]], axis=0))
    several: dict[tuple[int, ...], list[int]] = {}
    for home, reading in readers_of.items():
        away = tuple(sorted(reading - {home}))
        if len(away) == 1 and not has_passes[home]:
            unions.append(np.array([home, away[0]]))
        elif away:
            several.setdefault(away, []).append(home)
    limit = MOST_MERGED_SHARE * float(work.sum())
    by_work = sorted(several, key=lambda others: (-work[list(others)].sum(), others))
    everything = [*unions, *(np.array([*several[o], *o]) for o in by_work)]
    if _largest(_components(count, edges, everything), work) <= limit:
        return everything
    for index, away in enumerate(by_work):
        tied = several[away]
        together = [*unions, np.array([*tied, *away])]
        fits = index < MOST_MERGES
        fits = fits and _largest(_components(count, edges, together), work) <= limit
        if fits:
            unions = together
            continue
        rank = -work if problem.tied_by_work else firsts
        chosen = min(away, key=lambda group: (rank[group], group))
        unions += [np.array([home, chosen]) for home in tied if not has_passes[home]]
    return unions


def _largest(labels: Int64, work: Float64) -> float:
    return float(np.bincount(labels, weights=work).max(initial=0.0))


def weight_ops(graph: Graph, part_of: NDArray[np.integer]) -> Bool:
    """Return [ops] True for backward ops from which no gradient goes to another part.

    part_of   [ops] the element or stage of each op
    """
    backward = graph.phases == Phase.BACKWARD
    reaches = np.zeros(len(graph), dtype=bool)
    _reach(
        graph.output_offsets, graph.consumer_offsets, graph.consumers, backward,
        np.asarray(part_of, dtype=np.int64), reaches,
    )  # fmt: skip
    return np.asarray(backward & ~reaches)


@kernel
def _reach(
    outputs: Int32, offsets: Int32, consumers: Int32, backward: Bool, part_of: Int64, reaches: Bool
) -> None:
    for turn in range(len(backward)):
        op = len(backward) - 1 - turn
        if not backward[op]:
            continue
        for tensor in range(outputs[op], outputs[op + 1]):
            for entry in range(offsets[tensor], offsets[tensor + 1]):
                reader = consumers[entry]
                if backward[reader] and (part_of[reader] != part_of[op] or reaches[reader]):
                    reaches[op] = True


def sum_seconds(problem: PipelineProblem) -> Float64:
    """Return [ops, devices] seconds of adding the gradients that an op makes for updates to those
    of the micro-batches before, by analytic costs."""
    graph = problem.graph
    once = (graph.phases == Phase.UPDATE)[graph.readers]
    makers = graph.producers[graph.input_tensors]
    tensors = np.unique(graph.input_tensors[once & (graph.phases[makers] == Phase.BACKWARD)])
    seconds = np.zeros(problem.costs.compute_seconds.shape)
    if problem.costs.source == "given":
        return seconds
    sizes = np.array([math.prod(graph.shapes[t]) for t in tensors.tolist()], dtype=np.float64)
    dtypes = [graph.dtypes[t] for t in tensors.tolist()]
    accessed = 3.0 * graph.tensor_bytes[tensors]
    sums = pointwise_kernels(ACCUMULATE, sizes, accessed, dtypes)
    for index, device in enumerate(problem.machine.devices):
        if device.kind == "host":
            continue
        np.add.at(seconds[:, index], graph.producers[tensors], kernel_seconds(sums, device))
    return seconds


def _pairs(graph: Graph, of_op: Int32, phase: Phase) -> Int64:
    """Return [pairs, 3] (tensor, its element, another element that reads it in the same phase)."""
    tensors = graph.input_tensors
    makers, readers = graph.producers[tensors], graph.readers
    taken = (graph.phases[makers] == phase) & (graph.phases[readers] == phase)
    taken &= of_op[makers] != of_op[readers]
    rows = np.stack([tensors[taken], of_op[makers[taken]], of_op[readers[taken]]], axis=1)
    return np.unique(rows.astype(np.int64), axis=0).reshape(-1, 3)


# --- Orders of elements ---


def element_orders(problem: PipelineProblem) -> list[Int64]:
    """Return distinct topological orders of the elements that are in stages."""
    elements = problem.elements
    members = np.flatnonzero(~elements.loose)
    place = np.full(elements.count, -1, dtype=np.int64)
    place[members] = np.arange(len(members))
    edges = place[elements.edges]
    edges = edges[(edges >= 0).all(axis=1)]
    firsts = elements.firsts[members]
    levels = longest_paths(len(members), edges)
    late = -longest_paths(len(members), edges[:, ::-1])
    layer = np.array(_layers_of(problem))[members]
    orders: list[Int64] = []
    for keys in (firsts, layer * len(problem.graph) + firsts, levels, late):
        order = members[_ordered(len(members), edges, keys, firsts)]
        if not any(np.array_equal(order, other) for other in orders):
            orders.append(order)
    return orders


def _ordered(count: int, edges: Int64, keys: NDArray[np.integer], firsts: Int64) -> Int64:
    """Return the topological order that takes, of what is free, the least key, then the first."""
    rank = np.empty(count)
    rank[np.lexsort((firsts, keys))] = np.arange(count)
    return np.array(topological_order(count, edges, rank.tolist()), dtype=np.int64)


_LAYER = re.compile(r".*?\.?\d+(?=\.|$)")
"""Finds a module's path up to its first index: "transformer.h.3", "cells_1"."""


def _layers_of(problem: PipelineProblem) -> list[int]:
    """Return [elements] the number of each element's layer, in the order of forward passes.

    An op's layer is its module's path up to the first index. An op in no such module belongs to the
    layer before it, if there is one before it and one behind it. Otherwise its layer is the first
    name of its path, such as an embedding. Of an element the layer of most forward seconds counts;
    an element without forward ops is in the last layer of those that come before it.
    """
    graph, elements = problem.graph, problem.elements
    indexed: dict[str, str] = {}
    for module in set(graph.modules):
        found = _LAYER.match(module)
        indexed[module] = found[0] if found else ""
    forward = np.flatnonzero(graph.phases == Phase.FORWARD).tolist()
    last = max((op for op in forward if indexed[graph.modules[op]]), default=-1)
    seconds = problem.costs.compute_seconds.min(axis=1)
    number: dict[str, int] = {}
    votes: list[dict[int, float]] = [{} for _ in range(elements.count)]
    current = ""
    for op in forward:
        module = graph.modules[op]
        name = indexed[module]
        current = name or current
        if not name:
            name = current if current and op < last else module.split(".", 1)[0]
        layer = number.setdefault(name, len(number))
        vote = votes[elements.of_op[op]]
        vote[layer] = vote.get(layer, 0.0) + float(seconds[op]) + 1e-12
    layers = [max(vote, key=lambda k: (vote[k], -k)) if vote else -1 for vote in votes]
    before: list[list[int]] = [[] for _ in range(elements.count)]
    for first, second in elements.edges.tolist():
        before[second].append(first)
    for element in _ordered(
        elements.count, elements.edges, elements.firsts, elements.firsts
    ).tolist():
        if layers[element] < 0:
            layers[element] = max((layers[other] for other in before[element]), default=0)
    return layers


# --- The step of a cut, task by task ---


@dataclass(frozen=True, eq=False)
class _Cutting:
    """An order of elements, which is cut at places: element i is in the stage of its place."""

    problem: PipelineProblem
    order: Int64

    @cached_property
    def ends(self) -> Int64:
        """[cells + 1] places between which the dynamic programmes cut: all, or those between runs
        (cells) of about equal work."""
        places = len(self.order)
        if places <= MOST_CELLS:
            return np.arange(places + 1, dtype=np.int64)
        forward, inputs, weights, _ = self.sums
        seconds = forward + inputs + weights
        total = np.where(np.isfinite(seconds), seconds, 0).max(axis=1)
        marks = np.searchsorted(total, np.linspace(0, total[-1], MOST_CELLS + 1))
        return np.unique(np.concatenate([[0], marks, [places]])).astype(np.int64)

    @cached_property
    def sums(self) -> tuple[Float64, ...]:
        """Prefix sums [places + 1, devices] of F, I, W and updates."""
        elements = self.problem.elements
        # There is one sum less than micro-batches.
        count = self.problem.micro_batches
        weights = elements.weights + elements.sums * (count - 1) / count
        columns = (elements.forward, elements.inputs, weights, elements.updates)
        # What cannot run somewhere is barred there, and counts as nothing.
        return tuple(
            _prefix(np.where(np.isfinite(column), column, 0.0)[self.order]) for column in columns
        )

    @cached_property
    def barred(self) -> Int64:
        """Prefix sums [places + 1, devices] of elements that may not be on a device."""
        runs = self.problem.elements.runs[self.order]
        return _prefix((~runs).astype(np.int64))

    def stages_of(self, cuts: Sequence[int]) -> Int64:
        """Return [elements] the stage of each; loose ones follow what they read."""
        count = self.problem.elements.count
        stages = np.full(count, -1, dtype=np.int64)
        stages[self.order] = np.searchsorted(np.array(cuts), np.arange(len(self.order)), "right")
        return stages

    def times(
        self, cuts: Sequence[int], devices: Sequence[int], recompute: Sequence[bool]
    ) -> PipelineTimes:
        """Return what the stages between cuts take on their devices."""
        stages = self.stages_of(cuts)
        bounds = np.array([0, *cuts, len(self.order)])
        of = np.array(devices, dtype=np.int64)
        forward, inputs, weights, updates = (
            column[bounds[1:], of] - column[bounds[:-1], of] for column in self.sums
        )
        again = np.array(recompute, dtype=bool)
        inputs = inputs + np.where(again, forward, 0.0)
        by_device = np.zeros(len(self.problem.machine.devices))
        np.add.at(by_device, of, updates)
        return stage_times(self.problem, stages, devices, (forward, inputs, weights), by_device)

    @cached_property
    def cells(self) -> tuple[Float64, Float64, Int64, Float64, Float64, Float64, Float64]:
        """The fields of `_CutTables` that depend on the order alone."""
        problem, elements, order = self.problem, self.problem.elements, self.order
        # [places + 1] bytes of tensors that cross a cut at each place: sent, and returned.
        place = np.full(elements.count, -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        crossing: list[Float64] = []
        for pairs in (elements.sent, elements.returned):
            one, other = place[pairs[:, 1]], place[pairs[:, 2]]
            there = (one >= 0) & (other >= 0)
            low, high = np.minimum(one, other)[there], np.maximum(one, other)[there]
            # Of a tensor that several elements read, the furthest counts at every cut before it.
            tensors, inverse = np.unique(pairs[there, 0], return_inverse=True)
            first, last = np.full(len(tensors), len(order)), np.zeros(len(tensors), dtype=np.int64)
            np.minimum.at(first, inverse, low)
            np.maximum.at(last, inverse, high)
            sizes = problem.costs.sends_of(problem.graph)[tensors]
            change = np.zeros(len(order) + 2)
            np.add.at(change, first + 1, sizes)
            np.add.at(change, last + 1, -sizes)
            crossing.append(np.cumsum(change)[: len(order) + 1][self.ends])
        # They take the fastest link, for a cut may be between any two devices.
        channels, latencies, rates = problem.routes
        between, latency, rate = channels >= 0, 0.0, math.inf
        if between.any():
            latency, rate = float(latencies[between].min()), float(rates[between].max())
        send = latency + (crossing[0] + crossing[1]) / 2 / rate
        kept, saved = _prefix(elements.kept_bytes[order]), _prefix(elements.saved_bytes[order])
        forward, inputs, weights, _ = self.sums
        totals, ends = forward + inputs + weights, self.ends
        return (
            totals[ends], forward[ends], self.barred[ends], kept[ends], saved[ends], crossing[0],
            send,
        )  # fmt: skip


def _prefix(values: NDArray[Any]) -> NDArray[Any]:
    """Return [n + 1, ...] sums of the first 0 to n rows."""
    return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])


def stage_times(
    problem: PipelineProblem,
    stages: Int64,
    devices: Sequence[int],
    seconds: tuple[Float64, Float64, Float64],
    updates: Float64,
) -> PipelineTimes:
    """Return the times of stages [elements], with what they send to each other."""
    of, count = np.array(devices, dtype=np.int64), len(devices)
    between = np.ix_(of, of)
    channels, latency, rate = problem.routes
    channels, latency, rate = channels[between], latency[between], rate[between]
    # [stages, stages] seconds of what one stage sends to another for a micro-batch: activations,
    # and gradients; nan: nothing.
    transfers: list[Float64] = []
    for pairs in (problem.elements.sent, problem.elements.returned):
        seconds_sent = np.full((count, count), np.nan)
        source, target = stages[pairs[:, 1]], stages[pairs[:, 2]]
        away = (source != target) & (source >= 0) & (target >= 0)
        keys = np.unique(pairs[away, 0] * count + target[away])
        tensors, targets = keys // count, keys % count
        sources = stages[problem.elements.of_op[problem.graph.producers[tensors]]]
        total, number = np.zeros((count, count)), np.zeros((count, count))
        np.add.at(total, (sources, targets), problem.costs.sends_of(problem.graph)[tensors])
        np.add.at(number, (sources, targets), 1)
        sent = number > 0
        seconds_sent[sent] = number[sent] * latency[sent] + total[sent] / rate[sent]
        transfers.append(seconds_sent)
    sends, returns = transfers
    return PipelineTimes(*seconds, updates, sends, returns, channels, of)


def times_of(problem: PipelineProblem, cut: PipelineCut) -> PipelineTimes:
    """Return what the stages of a cut take, summed over their ops."""
    graph, seconds = problem.graph, problem.costs.compute_seconds
    stages, count = cut.stages, len(cut.devices)
    of_op = np.array(cut.devices)[np.maximum(stages, 0)]
    each = np.where(stages >= 0, seconds[np.arange(len(graph)), of_op], 0.0)
    is_weight = weight_ops(graph, stages)
    phases = graph.phases

    def summed(ops: Bool, of: NDArray[np.integer], size: int) -> Float64:
        return np.bincount(of[ops], weights=each[ops], minlength=size).astype(np.float64)

    backward = phases == Phase.BACKWARD
    forward = summed(phases == Phase.FORWARD, stages, count)
    inputs = summed(backward & ~is_weight, stages, count)
    inputs = inputs + np.where(np.array(cut.recompute), forward, 0.0)
    weights = summed(backward & is_weight, stages, count)
    updates = summed(phases == Phase.UPDATE, of_op, len(problem.machine.devices))
    of_element = np.full(problem.elements.count, -1, dtype=np.int64)
    members = np.flatnonzero(stages >= 0)
    of_element[problem.elements.of_op[members]] = stages[members]
    return stage_times(problem, of_element, cut.devices, (forward, inputs, weights), updates)


def tasks_of(problem: PipelineProblem, cut: PipelineCut) -> Orders:
    """Return [devices] the tasks of each device in running order."""
    return orders_of(cut.schedule, times_of(problem, cut), problem.micro_batches, cut.held)


# --- Cuts by dynamic programming ---


class _CutTables(NamedTuple):
    """What the dynamic programmes know of an order's cells and a sequence of devices.

    totals, again    [cells + 1, devices] prefix sums of T, and of the forward pass alone
    barred           [cells + 1, devices] prefix counts of what may not be there
    kept, saved      [cells + 1] prefix sums of bytes
    boundary, send   [cells + 1] bytes and seconds of what crosses a cut
    devices, flights [sequence] a device, and the micro-batches that a stage there holds
    room             [devices] bytes
    """

    totals: Float64
    again: Float64
    barred: Int64
    kept: Float64
    saved: Float64
    boundary: Float64
    send: Float64
    devices: Int64
    flights: Int64
    room: Float64


@inlined
def _stage_seconds(tables: _CutTables, turn: int, begin: int, end: int, may_again: bool) -> Any:
    """(seconds of a stage for one micro-batch, True if it recomputes); inf if it cannot be."""
    device, flight = tables.devices[turn], tables.flights[turn]
    if tables.barred[end, device] > tables.barred[begin, device]:
        return np.inf, False
    seconds = tables.totals[end, device] - tables.totals[begin, device]
    stays = tables.kept[end] - tables.kept[begin]
    activations = tables.saved[end] - tables.saved[begin]
    if stays + flight * (activations + tables.boundary[begin]) <= tables.room[device]:
        return seconds, False
    needed = stays + flight * tables.boundary[begin] + activations
    if not may_again or needed > tables.room[device]:
        return np.inf, False
    return seconds + tables.again[end, device] - tables.again[begin, device], True


@kernel
def _solve(
    tables: _CutTables,
    limit: float,
    micro_batches: float,
    may_again: bool,
    best: Float64,
    choice: Int64,
    repeats: Bool,
) -> float:
    """Least cost of cutting cells into one run for each device of the sequence, or none, such that
    each run fits. There are two programmes:

        micro_batches 0      the sum of T + 2 C over runs, none of which takes more than `limit`;
                             from the first device on
        micro_batches M      the max over runs of what fills the ones before, and their own work;
                             from the last device back:
                             V(begin) = min over end of max(M T, T + 2 C + V(end))

    best, choice, repeats   [sequence + 1, cells + 1] by a number of devices and a cell: the cost of
                            runs on these devices that end at the cell, or on the others that begin
                            there; the other end of the run at the cell; and whether it recomputes
    """
    cells, turns = len(tables.kept) - 1, len(tables.devices)
    backwards = micro_batches > 0
    best[:] = np.inf
    if backwards:
        best[turns, cells] = 0.0
    else:
        best[0, 0] = 0.0
    for step in range(turns):
        turn = turns - 1 - step if backwards else step
        # The row that is known, and the one to fill.
        old, new = (turn + 1, turn) if backwards else (turn, turn + 1)
        for cell in range(cells + 1):
            # The device may be left out.
            best[new, cell], choice[new, cell] = best[old, cell], cell
            repeats[new, cell] = False
        for begin in range(cells):
            beside = best[old, begin]
            if not backwards and beside == np.inf:
                continue
            for end in range(begin + 1, cells + 1):
                if backwards:
                    beside = best[old, end]
                    if beside == np.inf:
                        continue
                seconds, repeat = _stage_seconds(tables, turn, begin, end, may_again)
                if seconds > limit:
                    continue
                send = 0.0 if end == cells else 2 * tables.send[end]
                if backwards:
                    at, other = begin, end
                    value = max(micro_batches * seconds, seconds + send + beside)
                else:
                    at, other = end, begin
                    value = beside + seconds + send
                if value < best[new, at]:
                    best[new, at], choice[new, at] = value, other
                    repeats[new, at] = repeat
    return float(best[0, 0] if backwards else best[turns, cells])


def device_sequences(problem: PipelineProblem) -> list[tuple[int, ...]]:
    """Return orders of devices for stages: all devices, and those of the fastest model; of unlike
    devices several orders, of like ones one."""
    machine = problem.machine
    devices = stage_devices(problem)
    seconds = problem.costs.compute_seconds[~problem.graph.is_source]
    total = np.where(np.isfinite(seconds), seconds, 0.0).sum(axis=0)
    runs = np.isfinite(seconds).sum(axis=0)
    best = min(devices, key=lambda d: (-runs[d], total[d], d))
    model = machine.devices[best].model
    like = [d for d in devices if machine.devices[d].model == model]
    gpus = [d for d in devices if machine.devices[d].kind == "gpu"]
    sequences: list[tuple[int, ...]] = []
    for chosen in (like, gpus, devices):
        # Devices of one model differ where a pin or a cap names one of them.
        numbers: dict[tuple[bytes, int], int] = {}
        by_name: dict[str, list[int]] = {}
        names = []
        for d in chosen:
            own = problem.allowed[:, d].tobytes(), int(problem.capacities[d])
            names.append(f"{machine.devices[d].model} {numbers.setdefault(own, len(numbers))}")
            by_name.setdefault(names[-1], []).append(d)
        # Orders of names: as given, reversed, grouped, and then all others, up to a limit. Devices
        # of one name come in their order.
        tried: list[tuple[int, ...]] = []
        grouped = sorted(names)
        for pattern in (names, names[::-1], grouped, grouped[::-1]):
            left = {name: iter(members) for name, members in by_name.items()}
            tried.append(tuple(next(left[name]) for name in pattern))
        rest: Iterator[tuple[int, ...]] = iter(())
        if len(chosen) <= 8:
            kinds = [by_name[name] for name in sorted(by_name)]
            rest = itertools.islice(_orders_of(kinds, len(chosen)), MOST_SEQUENCES)
        distinct = list(dict.fromkeys([*tried, *rest]))[:MOST_SEQUENCES]
        sequences += [found for found in distinct if found and found not in sequences]
    return sequences


def stage_devices(problem: PipelineProblem) -> list[int]:
    """Return the devices that may have a stage."""
    return [
        index
        for index, device in enumerate(problem.machine.devices)
        if device.kind != "host" and problem.allowed[:, index].any()
    ]


# --- The search ---


class _OrderCut(NamedTuple):
    """A cut, the order of elements that it cuts, and the places between its stages."""

    cut: PipelineCut
    cutting: _Cutting
    places: tuple[int, ...]


@dataclass(eq=False)
class _Search:
    """Collects cuts, the best first, and moves their places while that helps."""

    problem: PipelineProblem
    budget: Budget
    found: dict[tuple[object, ...], _OrderCut] = field(default_factory=dict)
    seconds: dict[tuple[object, ...], float] = field(default_factory=dict)
    share: float = 1.0

    def consider(
        self, cutting: _Cutting, cuts: tuple[int, ...], devices: tuple[int, ...],
        schedule: str, recompute: tuple[bool, ...],
    ) -> float:  # fmt: skip
        """Return the seconds of a cut, and keep it."""
        asked = schedule, cutting.order.tobytes(), cuts, devices, recompute
        if asked in self.seconds:
            return self.seconds[asked]
        self.seconds[asked] = math.inf
        # Task by task a cut is simulated much faster than op by op.
        self.budget.charge(0.01)
        # A stage may have no element that may not be on its device.
        bounds, of = np.array([0, *cuts, len(cutting.order)]), np.array(devices)
        if (cutting.barred[bounds[1:], of] > cutting.barred[bounds[:-1], of]).any():
            return math.inf
        if not self.problem.permits(schedule, devices):
            return math.inf
        times = cutting.times(cuts, devices, recompute)
        if not np.isfinite(times.forward + times.inputs + times.weights).all():
            return math.inf
        micro_batches = self.problem.micro_batches
        stages = stages_of_ops(self.problem, cutting.stages_of(cuts))
        cut = PipelineCut(schedule, stages, devices, recompute)
        held: tuple[int, ...] = ()
        if schedule == "zero-bubble":
            # Whether its memory lasts is known when it is simulated op by op.
            room = _room_of(self.problem, cut).clip(1, micro_batches)
            held = tuple(room.astype(np.int64).tolist())
        orders = orders_of(schedule, times, micro_batches, held)
        seconds = step_seconds(orders, times, micro_batches)
        if math.isfinite(seconds):
            cut = replace(cut, seconds=seconds)
            self.found.setdefault(cut.key, _OrderCut(cut, cutting, cuts))
        self.seconds[asked] = seconds
        return seconds

    def by_programme(self, cutting: _Cutting, sequence: tuple[int, ...], schedule: str) -> None:
        """Consider the cuts of the dynamic programmes: of the first one for each of several limits
        of the longest stage, and of the second one for several numbers of micro-batches, as a
        schedule lets a device wait in between."""
        problem = self.problem
        stages, count = len(sequence), len(cutting.ends) - 1
        flights = [
            in_flight(schedule, s, stages, len(set(sequence)), problem.micro_batches)
            for s in range(stages)
        ]
        room = self.share * problem.capacities.astype(np.float64)
        tables = _CutTables(*cutting.cells, np.array(sequence), np.array(flights), room)
        shape = (stages + 1, count + 1)
        best, choice = np.empty(shape), np.zeros(shape, dtype=np.int64)
        repeats = np.zeros(shape, dtype=bool)

        def solve(limit: float, micro_batches: float = 0.0) -> bool:
            again = problem.recompute
            cost = _solve(tables, limit, micro_batches, again, best, choice, repeats)
            return math.isfinite(cost)

        def follow(*, forwards: bool) -> None:
            """Consider the cuts that a programme chose."""
            ends, devices, recompute = [], [], []
            at = 0 if forwards else count
            for turn in range(stages) if forwards else range(stages, 0, -1):
                other = int(choice[turn, at])
                if other != at:
                    ends.append(int(cutting.ends[other]))
                    devices.append(sequence[turn if forwards else turn - 1])
                    recompute.append(bool(repeats[turn, at]))
                at = other
            if not forwards:
                ends, devices, recompute = ends[::-1], devices[::-1], recompute[::-1]
            # The programmes name the ends of stages, or their beginnings.
            places = tuple(ends[:-1] if forwards else ends[1:])
            self.consider(cutting, places, tuple(devices), schedule, tuple(recompute))

        if not solve(math.inf):
            return
        whole = tables.totals[-1][list(sequence)]
        high = 2 * float(whole[np.isfinite(whole)].max(initial=0.0)) or math.inf
        low = high / 32 / stages
        # The least limit for which there are cuts, to .1 %.
        while math.isfinite(high) and high > low * 1.001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if solve(middle) else (middle, high)
        for limit in [*(high * np.geomspace(1, 1.6, LIMITS)).tolist(), math.inf]:
            if solve(limit):
                follow(forwards=False)
        for more in FILLS:
            if solve(math.inf, problem.micro_batches + more * stages):
                follow(forwards=True)

    def move(self, cut: PipelineCut, cutting: _Cutting, cuts: tuple[int, ...]) -> None:
        """Move single cuts while the step gets shorter."""
        best, places = cut.seconds, len(cutting.order)
        step = max(1, places // 32)
        while step >= 1 and not self.budget.exhausted:
            improved = False
            for index in range(len(cuts)):
                for change in (step, -step):
                    low = cuts[index - 1] + 1 if index else 1
                    high = cuts[index + 1] - 1 if index + 1 < len(cuts) else places - 1
                    place = min(max(cuts[index] + change, low), high)
                    if place == cuts[index]:
                        continue
                    moved = (*cuts[:index], place, *cuts[index + 1 :])
                    seconds = self.consider(
                        cutting, moved, cut.devices, cut.schedule, cut.recompute
                    )
                    if seconds < best * (1 - 1e-9):
                        best, cuts, improved = seconds, moved, True
            if not improved:
                step //= 2

    def ranked(self) -> list[_OrderCut]:
        return sorted(self.found.values(), key=lambda found: found.cut.seconds)


def stages_of_ops(problem: PipelineProblem, stages: Int64) -> Int32:
    """Return [ops] the stage of each op, -1 for sources.

    stages   [elements] -1 for loose ones, which go where most of what they read comes from
    """
    graph, elements = problem.graph, problem.elements
    of_op = stages[elements.of_op]
    loose = np.flatnonzero(elements.loose)
    if len(loose):
        count = int(stages.max(initial=0)) + 1
        votes = np.zeros((elements.count, count))
        makers = graph.producers[graph.input_tensors]
        known = (of_op[graph.readers] < 0) & (of_op[makers] >= 0) & ~graph.is_source[makers]
        sizes = graph.tensor_bytes[graph.input_tensors][known] + 1.0
        readers = elements.of_op[graph.readers[known]]
        np.add.at(votes, (readers, of_op[makers[known]]), sizes)
        stages = stages.copy()
        stages[loose] = votes[loose].argmax(axis=1)
        of_op = stages[elements.of_op]
    return np.where(graph.is_source, -1, of_op).astype(np.int32)


@dataclass(frozen=True, eq=False)
class PipelineOutcome:
    """What a search found.

    simulated   what simulating `cut` op by op gave
    baselines   method -> seconds of usual cuts; None: none fits
    is_exact    True: every cut was simulated, so none is better
    """

    cut: PipelineCut
    simulated: SimulatedCut
    baselines: dict[str, float | None]
    is_exact: bool


def search(problem: PipelineProblem, budget: Budget, simulate: Simulate) -> PipelineOutcome:
    """Return the best cut that is found within the budget, or a little after it.

    simulate   a cut -> its step, simulated op by op

    Raises `InfeasibleError` if no cut that was simulated fits.
    """
    tried = _TriedCuts(problem, budget, simulate)
    baselines: dict[str, float | None] = {}
    for name, cut in usual_cuts(problem):
        outcome = tried.add(replace(cut, name=name))
        known = baselines.setdefault(name, None)
        if outcome.feasible and (known is None or outcome.value < known):
            baselines[name] = outcome.value
    cuttings = [_Cutting(problem, order) for order in element_orders(problem)]
    sequences = device_sequences(problem)
    for share in SHARES:
        # Cuts of the programmes. The best of each schedule are moved, task by task.
        by_tasks = _Search(problem, budget, share=share)
        for devices, schedule, cutting in itertools.product(sequences, problem.schedules, cuttings):
            if budget.exhausted and by_tasks.found:
                break
            turns: Sequence[int] = (1,)
            if schedule == "interleaved":
                turns = CHUNKS if len(devices) > 1 else ()
            for chunks in turns:
                by_tasks.by_programme(cutting, devices * chunks, schedule)
        for schedule in problem.schedules:
            of_schedule = [found for found in by_tasks.ranked() if found.cut.schedule == schedule]
            for found in of_schedule[:3]:
                by_tasks.move(*found)
        # The best are simulated op by op, first those of each schedule in turn.
        ranked = [found.cut for found in by_tasks.ranked()]
        firsts = {cut.schedule: cut for cut in reversed(ranked)}
        finalists = sorted(ranked, key=lambda cut: cut is not firsts[cut.schedule])[:FINALISTS]
        over = not finalists
        for cut in finalists:
            over |= not tried.add(cut).feasible
            if budget.exhausted and tried.best is not None:
                break
        if not over or (tried.best is not None and budget.exhausted):
            break
    every, is_exact = _every_cut(problem, budget), False
    if every is not None:
        # Of zero-bubble not all numbers of micro-batches held are simulated.
        is_exact = not {"interleaved", "zero-bubble"} & set(problem.schedules)
        for cut in every:
            if budget.exhausted and tried.best is not None:
                is_exact = False
                break
            tried.add(cut)
    if tried.best is None:
        excess = tried.peaks - problem.capacities
        device = int(excess.argmax())
        if tried.is_any and excess[device] > 0:
            name = problem.machine.device_names[device]
            raise OutOfMemoryError(name, int(tried.peaks[device]), int(problem.capacities[device]))
        raise InfeasibleError(
            f"no stages for schedule {' or '.join(problem.schedules)} on {problem.machine.name}: "
            "the pins, the kinds of devices, their number or the format leave none; use fewer "
            "pins, another schedule, machine or number of micro-batches"
        )
    return PipelineOutcome(*tried.best, baselines, is_exact)


class _TriedCuts:
    """The best of the cuts that were simulated op by op."""

    def __init__(self, problem: PipelineProblem, budget: Budget, simulate: Simulate) -> None:
        self.problem, self.budget, self.simulate = problem, budget, simulate
        self.best: tuple[PipelineCut, SimulatedCut] | None = None
        self.peaks = np.full(len(problem.capacities), np.iinfo(np.int64).max)
        """[devices] of what came closest to fitting."""
        self.is_any = False
        """True once a cut was simulated to its end."""

    def add(self, cut: PipelineCut) -> SimulatedCut:
        """Return what simulating the cut gives; of zero-bubble, with the memory of 1f1b or with
        what there is, if that is faster or the first does not fit."""
        outcome = self._try(cut)
        is_best = self.best is None or self.best[0] is cut
        if cut.schedule != "zero-bubble" or (self.budget.exhausted and not is_best):
            return outcome

        # Other numbers of micro-batches held: those with which the cut is faster task by task, the
        # fastest first; ties: the fewest first. If it does not fit, those with fewer than S on some
        # stage, whether they are faster or not.
        problem = self.problem
        times, count = times_of(problem, cut), problem.micro_batches
        room = _room_of(problem, cut)
        options = other_held(room, count)
        if cut.name:
            # Usual cuts have one try, with what there is room for.
            options = [held for held in options if (np.array(held) <= room).all()]
        if not outcome.feasible:
            options = [held for held in options if min(held) < min(times.stages, count)]
        seconds: dict[tuple[int, ...], float] = {
            held: step_seconds(orders_of(cut.schedule, times, count, held), times, count)
            for held in ((), *options)
        }
        limit = seconds[()] * (1 - LEAST_GAIN) if outcome.feasible else math.inf
        chosen = sorted((taken, held) for held, taken in seconds.items() if held and taken < limit)
        for taken, held in chosen[: 1 if cut.name else MOST_HELD]:
            other = replace(cut, held=held, seconds=taken)
            # Task by task a step takes about as long as op by op.
            best = math.inf if self.best is None else self.best[1].value
            if outcome.feasible and not cut.name and other.seconds > best * (1 + NEAR):
                break
            simulated = self._try(other)
            if simulated.feasible and (not outcome.feasible or simulated.value < outcome.value):
                return simulated
            if outcome.feasible and simulated.value >= outcome.value:
                break
        return outcome

    def _try(self, cut: PipelineCut) -> SimulatedCut:
        if not self.problem.permits(cut.schedule, cut.devices):
            return SimulatedCut(math.inf, self.peaks, False)
        outcome = self.simulate(cut)
        self.budget.charge(1)
        if not np.isfinite(outcome.value):
            return outcome
        self.is_any = True
        if outcome.feasible and (self.best is None or outcome.value < self.best[1].value):
            self.best = cut, outcome
        if self._lacking(outcome.peak_memory_bytes) < self._lacking(self.peaks):
            self.peaks = outcome.peak_memory_bytes
        return outcome

    def _lacking(self, peaks: Int64) -> int:
        return int(np.maximum(peaks - self.problem.capacities, 0).max())


def _room_of(problem: PipelineProblem, cut: PipelineCut) -> Float64:
    """Return [stages] for so many micro-batches a device has memory: what forward ops leave for
    backward ops, if they are not computed again, and what comes from other stages."""
    elements, count = problem.elements, len(cut.devices)
    of = np.zeros(elements.count, dtype=np.int64)
    members = np.flatnonzero(cut.stages >= 0)
    of[elements.of_op[members]] = cut.stages[members]
    kept = np.bincount(of, weights=elements.kept_bytes, minlength=count)
    saved = np.bincount(of, weights=elements.saved_bytes, minlength=count)
    saved = np.where(np.array(cut.recompute), 0.0, saved)
    tensor, reader = elements.sent[:, 0], of[elements.sent[:, 2]]
    crossing = of[elements.sent[:, 1]] != reader
    arrived = np.unique(np.stack([tensor, reader], axis=1)[crossing], axis=0).reshape(-1, 2)
    sizes = problem.costs.sends_of(problem.graph)[arrived[:, 0]]
    each = saved + np.bincount(arrived[:, 1], weights=sizes, minlength=count)
    room = problem.capacities[np.array(cut.devices)] - kept
    return np.asarray(room / np.maximum(each, 1.0))


def _every_cut(problem: PipelineProblem, budget: Budget) -> list[PipelineCut] | None:
    """Every cut of a small graph: stages x devices x schedules x recomputation, without those of
    the interleaved schedule; None if there are more than `MOST_TRIED`, or the budget is spent."""
    elements = problem.elements
    members = np.flatnonzero(~elements.loose)
    if len(members) > MOST_TRIED_ELEMENTS:
        return None
    devices = stage_devices(problem)
    kinds: list[list[int]] = []
    for device in devices:
        like = next((kind for kind in kinds if _are_alike(problem, kind[0], device)), None)
        if like is None:
            kinds.append([device])
        else:
            like.append(device)
    cuts: list[PipelineCut] = []
    for stages in _monotone(problem, members, len(devices)):
        count = int(stages.max()) + 1
        of_op = stages_of_ops(problem, stages)
        for order in _orders_of(kinds, count):
            if budget.exhausted or len(cuts) > MOST_TRIED:
                return None
            if not _runs(problem, stages, order):
                continue
            options = (False, True) if problem.recompute else (False,)
            for schedule in problem.schedules:
                if schedule != "interleaved":
                    repeated = itertools.product(options, repeat=count)
                    cuts += [PipelineCut(schedule, of_op, order, again) for again in repeated]
    return None if len(cuts) > MOST_TRIED else cuts


def _orders_of(
    kinds: list[list[int]], count: int, done: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Orders of so many devices that begin with `done`. Of like devices the first ones stand for
    all."""
    if len(done) == count:
        yield done
        return
    for members in kinds:
        device = next((d for d in members if d not in done), None)
        if device is not None:
            yield from _orders_of(kinds, count, (*done, device))


def _are_alike(problem: PipelineProblem, one: int, other: int) -> bool:
    """True if exchanging two devices changes nothing: costs, memory, what may be there, and links
    with channels of their own. The host is like no other device."""
    machine = problem.machine
    if machine.host_index in (one, other):
        return False
    for table in (problem.costs.compute_seconds, problem.allowed, problem.capacities):
        if not np.array_equal(table[..., one], table[..., other]):
            return False
    # [from, to, 3] bandwidth, latency, and the channel if other links share it; -1: no link.
    channels = [link.channel for link in machine.links]
    rows = [
        (
            link.bandwidth_bytes_per_second,
            link.latency_seconds,
            channels.index(link.channel) if channels.count(link.channel) > 1 else -1,
        )
        for link in machine.links
    ]
    links = np.array([*rows, (-1, -1, -1)])[machine.link_index]
    swapped = np.arange(len(machine.devices))
    swapped[[one, other]] = other, one
    return np.array_equal(links, links[np.ix_(swapped, swapped)])


def _runs(problem: PipelineProblem, stages: Int64, order: Sequence[int]) -> bool:
    """True if every element may be where its stage is."""
    members = np.flatnonzero(stages >= 0)
    devices = np.array(order)[stages[members]]
    return bool(problem.elements.runs[members, devices].all())


def _monotone(problem: PipelineProblem, members: Int64, most: int) -> Iterator[Int64]:
    """Every assignment of elements to stages 0 to at most `most` - 1, none empty, along edges."""
    elements = problem.elements
    order = element_orders(problem)[0].tolist()
    before: dict[int, list[int]] = {element: [] for element in order}
    for first, second in elements.edges.tolist():
        if first in before and second in before:
            before[second].append(first)
    stages = np.full(elements.count, -1, dtype=np.int64)

    def assign(index: int) -> Iterator[Int64]:
        if index == len(order):
            used = set(stages[order].tolist())
            if used == set(range(len(used))):
                yield stages.copy()
            return
        element = order[index]
        low = max((int(stages[other]) for other in before[element]), default=0)
        for stage in range(low, most):
            stages[element] = stage
            yield from assign(index + 1)
        stages[element] = -1

    yield from assign(0)


def usual_cuts(problem: PipelineProblem) -> Iterator[tuple[str, PipelineCut]]:
    """The cuts that people make by hand, with every schedule: equal numbers of layers, and equal
    numbers of parameters (DeepSpeed's `uniform` and `parameters`,
    https://deepspeed.readthedocs.io/en/latest/pipeline.html)."""
    elements = problem.elements
    layers = np.array(_layers_of(problem))
    order = element_orders(problem)
    members = np.flatnonzero(~elements.loose)
    present = np.unique(layers[members])
    # Bytes of the parameters that each element reads in the forward pass. One that several read
    # counts for each, as DeepSpeed counts tied layers.
    graph = problem.graph
    makers = graph.producers[graph.input_tensors]
    parameters = np.array([kind == "parameter" for kind in graph.kinds], dtype=bool)
    reads = parameters[makers] & (graph.phases[graph.readers] == Phase.FORWARD)
    readers = elements.of_op[graph.readers[reads]].astype(np.int64)
    pairs = np.unique(np.stack([readers, graph.input_tensors[reads]], axis=1), axis=0)
    sizes = graph.tensor_bytes[pairs[:, 1]].astype(np.float64)
    read_bytes = np.bincount(pairs[:, 0], weights=sizes, minlength=elements.count)
    weights = [
        np.bincount(layers, weights=in_bytes, minlength=int(layers.max()) + 1)[present]
        for in_bytes in (elements.kept_bytes, read_bytes)
    ]
    sequence = device_sequences(problem)[0]
    by_layer = min(order, key=lambda o: int((np.diff(layers[o]) < 0).sum()))
    for schedule in problem.schedules:
        if schedule == "interleaved":
            continue
        for name, part in (
            ("equal layers", _equal(np.ones(len(present)), len(sequence))),
            *(("equal parameters", _equal(weight, len(sequence))) for weight in weights),
        ):
            wanted = np.zeros(int(layers.max()) + 1, dtype=np.int64)
            wanted[present] = part
            stages = np.full(elements.count, -1, dtype=np.int64)
            stages[by_layer] = np.maximum.accumulate(wanted[layers[by_layer]])
            used = np.unique(stages[by_layer])
            stages[by_layer] = np.searchsorted(used, stages[by_layer])
            devices = sequence[: len(used)]
            if not _runs(problem, stages, devices):
                continue
            cut = PipelineCut(
                schedule, stages_of_ops(problem, stages), devices, (False,) * len(used)
            )
            yield name, cut


def _equal(weights: Float64, parts: int) -> Int64:
    """Return [items] the part of each, such that the heaviest of contiguous parts is lightest."""
    count = len(weights)
    parts = min(parts, count)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    best = np.full((parts + 1, count + 1), np.inf)
    choice = np.zeros((parts + 1, count + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for part in range(parts):
        for end in range(1, count + 1):
            values = np.maximum(best[part, :end], sums[end] - sums[:end])
            choice[part + 1, end] = int(values.argmin())
            best[part + 1, end] = values[choice[part + 1, end]]
    of = np.zeros(count, dtype=np.int64)
    end = count
    for part in range(parts, 0, -1):
        begin = int(choice[part, end])
        of[begin:end] = part - 1
        end = begin
    return of
