"""A smaller graph that stands for a large one: the ops of each unit merged into few.

A *unit* is a set of groups that go to one device together. Ops are merged where they agree in

    (window, unit, phase, step)

window   of the earliest time at which an op could start, with every op on its fastest device and
         no transfers: the critical path is cut into equal windows
step     step(o) = max over predecessors p of o in its window of
                   step(p) + (1 if p has another unit or phase, else 0)

Along every edge window and step never fall, and where both stay the unit and phase stay, so that
the ops of one merged op never wait for each other through another: the merged graph is acyclic
whatever the units are. What an op makes is there once its merged op has ended, and its merged op
starts once all inputs are there; windows bound how much later that is. Windows are as many as keep
the merged graph below a number of ops.

Seconds are summed. Tensors that go from one merged op to the same others are one, with their bytes
summed and, for each that is saved, what the latency of a transfer is worth in bytes. What stays
inside a merged op is not seen: peaks of memory are those of what is kept between merged ops.
Parameters, state and what several merged ops read keep their homes, as in the graph.

Own work. Of random placements of synthetic networks of 100,000 ops values were 0 to 3 % off with as
many windows as `MOST_OPS` of `placers.multilevel` leaves, up to 7 % with one window, by the lowest
index alone. Ranked, merged ops that wait as one are off by up to 20 % (4,000 ops in training).
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.graph import HOST, Graph, Groups, Phase
from dovetail.graph.records import csr_offsets
from dovetail.placers.problem import Problem
from dovetail.simulator import Simulator
from dovetail.simulator.compiling import kernel

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

MOST_WINDOWS, FEWER_WINDOWS = 512, 8
"""Windows that are tried first, and how many times fewer next."""


def merged_problem(problem: Problem, unit_of: Int32, most_ops: int) -> Problem:
    """The problem of placing units on a graph of about `most_ops` merged ops.

    `unit_of` [groups] numbers units from 0 in the order of their first groups. A placement of
    units `placement` is the placement `placement[unit_of]` of groups. Values and peaks are
    estimates of the true ones. O(ops + reads x log reads).
    """
    allowed = _allowed(problem, unit_of)
    merged = _merge(problem, unit_of[problem.groups.of_op], most_ops)
    simulator = Simulator(
        merged.graph,
        problem.machine,
        merged.costs,
        capacities=problem.capacities,
        ranked=problem.ranked,
    )
    return Problem(
        graph=merged.graph,
        machine=problem.machine,
        costs=merged.costs,
        groups=Groups(merged.units, len(allowed)),
        allowed=allowed,
        capacities=problem.capacities,
        objective=problem.objective,
        evaluate=lambda placements: simulator.evaluate(placements, problem.objective),
        seed=problem.seed,
        trace=simulator.timeline,
        ranked=problem.ranked,
    )


def under_units(problem: Problem, unit_of: Int32) -> Problem:
    """The problem of placing units on the same graph; `unit_of` [groups] as above."""
    allowed = _allowed(problem, unit_of)
    groups = Groups(unit_of[problem.groups.of_op], len(allowed))
    return replace(problem, groups=groups, allowed=allowed)


def _allowed(problem: Problem, unit_of: Int32) -> NDArray[np.bool_]:
    """[units, devices] where all groups of each may go."""
    allowed = np.ones((int(unit_of.max()) + 1, problem.devices), dtype=bool)
    np.logical_and.at(allowed, unit_of, problem.allowed)
    return allowed


@dataclass(frozen=True, eq=False)
class _Merged:
    """units [ops] of the merged graph; a source has that of an op that reads it."""

    graph: Graph
    costs: Costs
    units: Int32


@dataclass(frozen=True, eq=False)
class _Nodes:
    """The merged ops, in topological order; among those that are ready, by first op.

    of_op   [ops] node of each op; -1: a source
    first   [nodes] least op of each
    """

    of_op: Int64
    first: Int64

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False)
class _Tensors:
    """What goes between nodes, those of sources first, then by node.

    owners     [tensors] node that makes it; for sources see `_owners`
    occupied_bytes, sent_bytes, is_output   [tensors]
    readers    [reads, 2] distinct (node, tensor), ordered
    """

    owners: Int64
    occupied_bytes: Int64
    sent_bytes: Float64
    is_output: NDArray[np.bool_]
    readers: Int64


def _merge(problem: Problem, unit_of_op: Int32, most_ops: int) -> _Merged:
    graph = problem.graph
    nodes = _nodes(problem, unit_of_op, most_ops)
    tensors = _tensors(problem, nodes)
    count = len(nodes)
    sources = int((tensors.owners >= count).sum())
    written = np.flatnonzero(tensors.owners[:sources] >= count + 2)
    writers = tensors.owners[written] - count - 2
    # Tensors stand by producer: the new values of parameters after what their writer makes.
    producers = np.concatenate(
        [np.arange(sources), sources + tensors.owners[sources:], sources + writers]
    )
    order = np.argsort(producers, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    storages = np.arange(len(order))
    storages[place[len(tensors.owners) :]] = written
    overwrites = np.zeros(len(order), dtype=bool)
    overwrites[place[len(tensors.owners) :]] = True
    occupied = np.append(tensors.occupied_bytes, tensors.occupied_bytes[written])[order]
    sent = np.append(tensors.sent_bytes, tensors.sent_bytes[written])[order]
    real = np.flatnonzero(nodes.of_op >= 0)
    columns = problem.costs.compute_seconds[real].T
    sums = [np.bincount(nodes.of_op[real], weights=c, minlength=count) for c in columns]
    seconds = np.concatenate([np.zeros((sources, problem.devices)), np.stack(sums, axis=1)])
    merged = _graph(
        graph,
        nodes,
        tensors,
        {
            "producers": producers[order],
            "tensor_bytes": occupied,
            "storages": storages,
            "overwrites": overwrites,
            "outputs": place[np.flatnonzero(tensors.is_output)],
            "input_tensors": place[tensors.readers[:, 1]],
        },
    )
    units = np.zeros(sources + count, np.int32)
    units[sources:] = unit_of_op[nodes.first]
    units[tensors.readers[::-1, 1][tensors.readers[::-1, 1] < sources]] = units[
        sources + tensors.readers[::-1, 0][tensors.readers[::-1, 1] < sources]
    ]
    units[written] = units[sources + writers]
    return _Merged(merged, Costs(seconds, "given", sent), units)


def _graph(
    graph: Graph, nodes: _Nodes, tensors: _Tensors, columns: dict[str, NDArray[np.generic]]
) -> Graph:
    """The merged graph: sources, then nodes."""
    count = len(nodes)
    owners = tensors.owners[tensors.owners >= count]
    sources = len(owners)
    ops, made = sources + count, len(columns["producers"])
    phases = np.zeros(ops, np.int8)
    phases[sources:] = graph.phases[nodes.first]
    before, after = nodes.of_op[graph.control.T]
    control = np.unique(before[before != after] * count + after[before != after])
    return Graph(
        names=tuple(map(str, range(ops))),
        kinds=tuple(
            ["input" if owner == count else "parameter" for owner in owners.tolist()]
            + ["merged"] * count
        ),
        signatures=("",) * ops,
        modules=("",) * sources + tuple(graph.modules[op] for op in nodes.first.tolist()),
        phases=phases,
        flops=np.zeros(ops, np.int64),
        accessed_bytes=np.zeros(ops, np.int64),
        colocation=np.full(ops, -1),
        gradient_of=np.full(ops, -1),
        device_kinds=((),) * ops,
        shapes=((),) * made,
        strides=((),) * made,
        dtypes=("uint8",) * made,
        input_offsets=csr_offsets(sources + tensors.readers[:, 0], ops),
        control=sources + np.stack([control // count, control % count], axis=1),
        **columns,  # type: ignore[arg-type]  # arrays by their names
    )


def _nodes(problem: Problem, unit_of_op: Int32, most_ops: int) -> _Nodes:
    """As many windows as keep the nodes to `most_ops`; at least one."""
    graph = problem.graph
    real = np.flatnonzero(~graph.is_source)
    order = np.argsort(graph.control[:, 1], kind="stable")
    befores = graph.control[order, 0].astype(np.int32)
    offsets = csr_offsets(graph.control[:, 1], len(graph))
    least = problem.costs.compute_seconds.min(axis=1)
    starts = np.zeros(len(graph))
    keys = (unit_of_op * len(Phase) + graph.phases).astype(np.int64)
    flat = (graph.input_offsets, graph.input_tensors, graph.producers, graph.is_source)
    _earliest_starts(*flat, offsets, befores, least, starts)
    longest = float((starts + least).max())
    windows = MOST_WINDOWS
    while True:
        window = np.minimum(starts / longest * windows if longest > 0 else 0 * starts, windows - 1)
        window = window.astype(np.int64)
        steps = np.zeros(len(graph), np.int64)
        _steps(*flat, offsets, befores, window, keys, steps)
        codes = window * (int(keys.max()) + 1) + keys
        codes = codes * (int(steps.max()) + 1) + steps
        _, first, of_real = np.unique(codes[real], return_index=True, return_inverse=True)
        if len(first) <= most_ops or windows == 1:
            break
        windows //= FEWER_WINDOWS
    of_op = np.full(len(graph), -1, np.int64)
    of_op[real] = of_real.reshape(-1)
    rank = _topological(graph, of_op, real[first])
    of_op[real] = rank[of_op[real]]
    ordered = np.empty(len(first), np.int64)
    ordered[rank] = real[first]
    return _Nodes(of_op, ordered)


@kernel
def _earliest_starts(  # noqa: PLR0913 (kernel)
    input_offsets: Int32,
    input_tensors: Int32,
    producers: Int32,
    is_source: NDArray[np.bool_],
    offsets: Int32,
    befores: Int32,
    seconds: Float64,
    starts: Float64,
) -> None:
    """Fill `starts` [ops] as if every op were on its fastest device and transfers took no time."""
    for op in range(len(is_source)):
        start = 0.0
        for i in range(input_offsets[op], input_offsets[op + 1]):
            before = producers[input_tensors[i]]
            if not is_source[before]:
                start = max(start, starts[before] + seconds[before])
        for i in range(offsets[op], offsets[op + 1]):
            start = max(start, starts[befores[i]] + seconds[befores[i]])
        starts[op] = start


@kernel
def _steps(  # noqa: PLR0913 (kernel)
    input_offsets: Int32,
    input_tensors: Int32,
    producers: Int32,
    is_source: NDArray[np.bool_],
    offsets: Int32,
    befores: Int32,
    windows: Int64,
    keys: Int64,
    steps: Int64,
) -> None:
    """Fill `steps` [ops] by the recurrence above; `keys` tell units and phases apart."""
    for op in range(len(is_source)):
        step = 0
        reads = input_offsets[op + 1] - input_offsets[op]
        for i in range(reads + offsets[op + 1] - offsets[op]):
            if i < reads:
                before = producers[input_tensors[input_offsets[op] + i]]
            else:
                before = befores[offsets[op] + i - reads]
            if not is_source[before] and windows[before] == windows[op]:
                step = max(step, steps[before] + (keys[before] != keys[op]))
        steps[op] = step


def _topological(graph: Graph, of_op: Int64, first: Int64) -> Int64:
    """[nodes] place of each; of those that are ready the one with the least first op goes next, so
    that nodes stand as nearly in the order of their ops as may be."""
    count = len(first)
    befores = np.concatenate(
        [of_op[graph.producers[graph.input_tensors]], of_op[graph.control[:, 0]]]
    )
    afters = np.concatenate([of_op[graph.readers], of_op[graph.control[:, 1]]])
    kept = (befores >= 0) & (befores != afters)
    edges = np.unique(befores[kept] * count + afters[kept])
    befores, afters = edges // count, edges % count
    offsets, targets = csr_offsets(befores, count).tolist(), afters.tolist()
    waits = np.bincount(afters, minlength=count).tolist()
    priority = first.tolist()
    ready = [(priority[node], node) for node in range(count) if not waits[node]]
    heapq.heapify(ready)
    rank = np.empty(count, np.int64)
    for place in range(count):
        _, node = heapq.heappop(ready)
        rank[node] = place
        for after in targets[offsets[node] : offsets[node + 1]]:
            waits[after] -= 1
            if not waits[after]:
                heapq.heappush(ready, (priority[after], after))
    return rank


def _owners(graph: Graph, nodes: _Nodes) -> Int64:
    """[tensors of the graph] node that makes it; of a source: nodes + 0 for inputs, + 1 for what
    is resident everywhere, + 2 + writer for what is written."""
    homes = graph.residences[graph.producers].astype(np.int64)
    written = len(nodes) + 2 + nodes.of_op[np.maximum(homes, 0)]
    sources = np.where(homes >= 0, written, len(nodes) + (homes != HOST))
    return np.where(graph.is_source[graph.producers], sources, nodes.of_op[graph.producers])


def _tensors(problem: Problem, nodes: _Nodes) -> _Tensors:
    """Tensors of one owner with the same readers are one."""
    graph, count = problem.graph, len(nodes)
    owners = _owners(graph, nodes)
    written = np.flatnonzero(owners >= count + 2)
    tensors = np.append(graph.input_tensors, written).astype(np.int64)
    readers = np.append(nodes.of_op[graph.readers], owners[written] - count - 2)
    outside = owners[tensors] != readers
    pairs = np.unique(tensors[outside] * count + readers[outside])
    tensors, readers = pairs // count, pairs % count
    is_output = np.zeros(graph.tensors, dtype=bool)
    is_output[graph.outputs] = True
    is_output &= ~graph.is_source[graph.producers]
    words = np.random.default_rng(0).integers(2**63, size=2 * count + 2, dtype=np.uint64)
    key = words[owners % len(words)] * np.uint64(3) + is_output.astype(np.uint64)
    np.add.at(key, tensors, words[readers])
    seen = is_output.copy()
    seen[tensors] = True
    kept = np.flatnonzero(seen)
    _, first, of_kept = np.unique(key[kept], return_index=True, return_inverse=True)
    first = kept[first]
    rank = np.empty(len(first), np.int64)
    order = np.lexsort((first, owners[first], owners[first] < count))
    rank[order] = np.arange(len(order))
    first = first[order]
    of = np.full(graph.tensors, -1, np.int64)
    of[kept] = rank[of_kept.reshape(-1)]
    occupied = np.bincount(of[kept], weights=_occupied_bytes(graph, seen)[kept])
    links = problem.machine.links
    beyond = [link.latency_seconds * link.bandwidth_bytes_per_second for link in links]
    several = (np.bincount(of[kept]) - 1) * (float(np.mean(beyond)) if beyond else 0.0)
    sent = several + np.bincount(of[kept], weights=problem.sent_bytes[kept])
    reads = np.unique(readers * len(first) + of[tensors])
    return _Tensors(
        owners=owners[first],
        occupied_bytes=occupied.astype(np.int64),
        sent_bytes=sent.astype(np.float64),
        is_output=is_output[first],
        readers=np.stack([reads // len(first), reads % len(first)], axis=1),
    )


def _occupied_bytes(graph: Graph, seen: NDArray[np.bool_]) -> Int64:
    """[tensors] bytes of memory that lives as long as each: its own; of a view none where what it
    looks into is there anyway."""
    roots = np.where(graph.bases < 0, np.arange(graph.tensors), graph.bases)
    while (roots[roots] != roots).any():
        roots = roots[roots]
    there = seen[roots] | graph.is_source[graph.producers[roots]]
    return np.where((graph.bases >= 0) & there, 0, graph.tensor_bytes)
