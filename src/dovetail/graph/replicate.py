"""Data-parallel towers: from the graph of one replica's training step, that of N replicas.

    synchronous    tower.0/  input ─► forward ─► loss ─► backward ─┐
                   tower.1/  input ─► forward ─► loss ─► backward ─┼─► average ─► the one update
                   tower.2/  input ─► forward ─► loss ─► backward ─┘

    asynchronous   ... backward of each tower ─► update/tower.0 ─► update/tower.1 ─► update/tower.2

All towers read the same parameters, at their value before the step, and a share of the batch each:
the graph given is that of batch / N. Asynchronous, update r reads what update r - 1 wrote, and the
gradient of tower r.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4, which compares with synchronous and asynchronous
towers. Differences: it does not say what becomes of the buffers that a step writes (running
statistics of batch norm); here, as in TensorFlow's towers, they get tower 0's values, by updates
that are tower 0's own, and what other towers would run for them alone is left out. All
asynchronous towers begin at once, and the first update of a parameter waits until each has read
the old value, where separate processes would drift apart.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ReplicationError, UsageError
from dovetail.graph.records import (
    Bool,
    Graph,
    Int32,
    Int64,
    Phase,
    csr_offsets,
    gather,
    select_columns,
)

# Names and kinds tell the ops of a replicated graph apart, and nothing else does: so a graph that
# was saved and read can be told apart too.
#
#     tower.2/lstm.0/addmm      module tower.2.lstm.0      what tower 2 runs for itself
#     average/lstm.0.bias       kind "dovetail.average"    the mean of N tensors, one a tower
#     lstm.0.bias/adam          synchronous                the one update
#     lstm.0.bias/adam/tower.2  asynchronous               the update by tower 2's gradient


AVERAGE = "dovetail.average"
"""Kind of the op that reads one tensor of each tower and makes their mean. Every replicated graph
has one: that of the losses."""
_OWN = re.compile(r"tower\.(\d+)/")
_UPDATE = re.compile(r".*/tower\.(\d+)$", re.DOTALL)


def own_name(tower: int, name: str) -> str:
    """The name of a tower's copy of an op."""
    return f"tower.{tower}/{name}"


def own_module(tower: int, module: str) -> str:
    """The module of a tower's copy of an op."""
    return f"tower.{tower}.{module}" if module else f"tower.{tower}"


def update_name(tower: int, name: str) -> str:
    """The name of an asynchronous tower's copy of an update."""
    return f"{name}/tower.{tower}"


def tower_count(graph: Graph) -> int:
    """Number of towers; 1 of a graph that was not replicated."""
    if AVERAGE not in graph.kinds:
        return 1
    return len(graph.inputs_of(graph.kinds.index(AVERAGE)))


def towers_of(graph: Graph) -> Int32:
    """[ops] the tower whose own op or input it is; -1: shared by all, as every update is."""
    return _numbers(graph, _OWN)


def update_towers_of(graph: Graph) -> Int32:
    """[ops] the tower by whose gradient an asynchronous update updates; -1 elsewhere."""
    towers = _numbers(graph, _UPDATE)
    towers[graph.phases != Phase.UPDATE] = -1
    return towers


def _numbers(graph: Graph, pattern: re.Pattern[str]) -> Int32:
    if AVERAGE not in graph.kinds:
        return np.full(len(graph), -1, dtype=np.int32)
    matches = map(pattern.match, graph.names)
    return np.array([int(match[1]) if match else -1 for match in matches], dtype=np.int32)


# One replica's training step: each tower runs some ops for itself; the towers share the others.


FLOATING = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Replica:
    """A graph and what its ops and storages are. Arrays over storages are as long as `tensors`."""

    graph: Graph

    @cached_property
    def updates(self) -> Bool:
        """[ops] of phase UPDATE."""
        return np.asarray(self.graph.phases == Phase.UPDATE)

    @cached_property
    def own(self) -> Bool:
        """[ops] what every tower has for itself: inputs, forward and backward ops."""
        graph = self.graph
        return np.where(graph.is_source, self._of_kinds("input"), ~self.updates)

    @cached_property
    def buffer_updates(self) -> Bool:
        """[ops] updates that write buffers and nothing else."""
        graph = self.graph
        buffers = np.zeros(graph.tensors, dtype=bool)
        buffers[graph.storages[self._of_kinds("buffer")[graph.producers]]] = True
        written = np.flatnonzero(graph.overwrites)
        writers, elsewhere = graph.producers[written], ~buffers[graph.storages[written]]
        writes = np.bincount(writers, minlength=len(graph))
        others = np.bincount(writers, weights=elsewhere, minlength=len(graph))
        return np.asarray(self.updates & (writes > 0) & (others == 0))

    @cached_property
    def only_for_buffers(self) -> Bool:
        """[ops] a tower's own whose outputs all end in updates of buffers."""
        graph = self.graph
        only = [False] * len(graph)
        if not self.buffer_updates.any():
            return np.array(only)
        read, needed = [False] * len(graph), [False] * len(graph)
        for producer in graph.producers[graph.outputs].tolist():
            needed[producer] = True
        offsets = graph.input_offsets.tolist()
        befores = graph.producers[graph.input_tensors].tolist()
        buffer_updates = self.buffer_updates.tolist()
        for op in reversed(range(len(graph))):
            only[op] = read[op] and not needed[op]
            keeps = not (only[op] or buffer_updates[op])
            for before in befores[offsets[op] : offsets[op + 1]]:
                read[before] = True
                needed[before] = needed[before] or keeps
        return np.array(only) & self.own & ~graph.is_source

    @cached_property
    def shared_storages(self) -> Bool:
        """[storages] of a parameter, state, a buffer or a constant."""
        graph = self.graph
        shared = np.zeros(graph.tensors, dtype=bool)
        shared[graph.storages[(graph.is_source & ~self.own)[graph.producers]]] = True
        return shared

    @cached_property
    def first_writers(self) -> Int64:
        """[storages] the first update that writes it, or -1."""
        graph = self.graph
        first = np.full(graph.tensors, len(graph), dtype=np.int64)
        written = np.flatnonzero(graph.overwrites & self.updates[graph.producers])
        np.minimum.at(first, graph.storages[written], graph.producers[written])
        return np.where(first < len(graph), first, -1)

    @cached_property
    def latest(self) -> Int64:
        """[storages] the last tensor that an update, but one of buffers, writes there, or -1."""
        graph = self.graph
        latest = np.full(graph.tensors, -1, dtype=np.int64)
        writes = (self.updates & ~self.buffer_updates)[graph.producers] & graph.overwrites
        written = np.flatnonzero(writes)
        np.maximum.at(latest, graph.storages[written], written)
        return latest

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """Outputs whose means the replicated step returns: the loss."""
        graph = self.graph
        return tuple(
            tensor
            for tensor in dict.fromkeys(graph.outputs.tolist())
            if self.own[graph.producers[tensor]] and graph.dtypes[tensor] in FLOATING
        )

    def check(self) -> None:
        """Raise `ReplicationError` for a graph that has no towers, with the op that forbids it."""
        graph = self.graph
        if not self.updates.any():
            raise ReplicationError(
                "it is of inference, and towers share the updates of a training step; capture "
                "it with an optimizer (--train)"
            )
        names = (*graph.modules, *graph.names)
        if AVERAGE in graph.kinds or any(name.split(".", 1)[0] == "tower" for name in names):
            raise ReplicationError("it is replicated already, or has a module named 'tower'")
        if not self.returned:
            raise ReplicationError("it returns no loss that could be averaged")
        writes = graph.overwrites & self.shared_storages[graph.storages]
        follows = graph.readers[self.updates[graph.producers[graph.input_tensors]]]
        waits = graph.control[self.updates[graph.control[:, 0]], 1]
        for ops, what in (
            (graph.producers[writes], "writes over what towers share, but is no update"),
            (follows, "reads what an update made, but is no update"),
            (waits, "waits for an update, but is none"),
        ):
            wrong = ops[self.own[ops]].tolist()
            if wrong:
                name = graph.names[wrong[0]]
                raise ReplicationError(f"op {name!r} {what}", name)

    def _of_kinds(self, kind: str) -> Bool:
        return np.array([op_kind == kind for op_kind in self.graph.kinds], dtype=bool)


# The ops of the replicated graph: the op and tower that each stands for, its reads, its waits.


class Rows(NamedTuple):
    """[ops] of the new graph, or of a part of it: what each stands for, as in `Replicated`;
    `returned` is True for the average of an output."""

    origins: Int64
    towers: Int64
    averaged: Int64
    returned: NDArray[np.bool_]


def _part(ops: NDArray[np.integer], tower: int = -1) -> Rows:
    """Copies of `ops`."""
    none = np.full(len(ops), -1)
    return Rows(ops.astype(np.int64), np.full(len(ops), tower), none, none > 0)


def _averages(tensors: Sequence[int], *, returned: bool = False) -> Rows:
    """An op for each tensor that is its mean over the towers."""
    none = np.full(len(tensors), -1)
    return Rows(none, none, np.array(tensors, np.int64), np.full(len(tensors), returned))


def rows_of(replica: Replica, replicas: int, synchronous: bool) -> Rows:
    source, runs = replica.graph.is_source, replica.own & ~replica.graph.is_source
    parts = [_part(np.flatnonzero(source & ~replica.own))]
    parts += [_part(np.flatnonzero(source & replica.own), tower) for tower in range(replicas)]
    parts.append(_part(np.flatnonzero(runs), 0))
    fewer = np.flatnonzero(runs & ~replica.only_for_buffers)
    parts += [_part(fewer, tower) for tower in range(1, replicas)]
    parts.append(_averages(replica.returned, returned=True))
    if synchronous:
        parts += _synchronous_updates(replica)
    else:
        updates = np.flatnonzero(replica.updates)
        parts.append(_part(updates, 0))
        of_parameters = updates[~replica.buffer_updates[updates]]
        parts += [_part(of_parameters, tower) for tower in range(1, replicas)]
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _synchronous_updates(replica: Replica) -> list[Rows]:
    """Each update, after the averages that it is the first to read."""
    graph, done = replica.graph, set()
    parts = []
    for op in np.flatnonzero(replica.updates).tolist():
        reads = [] if replica.buffer_updates[op] else graph.inputs_of(op).tolist()
        gradients = [t for t in reads if replica.own[graph.producers[t]] and t not in done]
        done.update(gradients)
        parts += [
            _averages(gradients),
            _part(np.array([op]), 0 if replica.buffer_updates[op] else -1),
        ]
    return parts


@dataclass(frozen=True, eq=False)
class TowerCopies:
    """The places that the ops and tensors of one replica have in the new graph."""

    replica: Replica
    rows: Rows
    replicas: int
    synchronous: bool

    @property
    def views(self) -> Int64:
        """[ops] the tower whose tensors it sees: tower 0's, if it is shared."""
        return np.maximum(self.rows.towers, 0)

    @cached_property
    def places(self) -> Int64:
        """[replicas, ops of one] its place as each tower sees it; -1: left out there."""
        origins, towers = self.rows.origins, self.rows.towers
        places = np.full((self.replicas, len(self.replica.graph)), -1, dtype=np.int64)
        shared = np.flatnonzero((towers < 0) & (origins >= 0))
        copies = np.flatnonzero(towers >= 0)
        places[:, origins[shared]] = shared
        places[towers[copies], origins[copies]] = copies
        return places

    @cached_property
    def producers(self) -> Int64:
        """[tensors]"""
        counts = np.diff(self.replica.graph.output_offsets)[self.rows.origins]
        counts[self.rows.averaged >= 0] = 1
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def stands_for(self) -> Int64:
        """[tensors] the tensor of one replica that it copies or is the mean of."""
        copies = self.rows.origins[self.rows.averaged < 0]
        tensors = self.rows.averaged[self.producers]
        tensors[tensors < 0] = gather(self.replica.graph.output_offsets, copies)[1]
        return tensors

    @cached_property
    def first(self) -> Int64:
        """[ops + 1] the first tensor of each op."""
        return csr_offsets(self.producers, len(self.rows.origins)).astype(np.int64)

    @cached_property
    def tensors(self) -> Int64:
        """[replicas, tensors of one] the tensor that each tower sees in its place; -1: none."""
        graph = self.replica.graph
        places = self.places[:, graph.producers]
        within = np.arange(graph.tensors) - graph.output_offsets[graph.producers]
        return np.where(places >= 0, self.first[places] + within, -1)

    def means(self, *, returned: bool) -> Int64:
        """[tensors of one] its mean as the step returns it, or as an update reads it; -1: none."""
        averaged = self.rows.averaged
        ops = np.flatnonzero((averaged >= 0) & (self.rows.returned == returned))
        means = np.full(self.replica.graph.tensors, -1, dtype=np.int64)
        means[averaged[ops]] = self.first[ops]
        return means

    @cached_property
    def reads(self) -> tuple[Int64, Int64]:
        """(offsets [ops + 1], tensors) that each op reads."""
        graph, rows = self.replica.graph, self.rows
        averages = rows.averaged >= 0
        counts = np.where(averages, self.replicas, np.diff(graph.input_offsets)[rows.origins])
        offsets = np.append(0, np.cumsum(counts))
        reads = np.empty(offsets[-1], dtype=np.int64)
        of_average = np.repeat(averages, counts)
        reads[of_average] = self.tensors[:, rows.averaged[averages]].T.ravel()
        reads[~of_average] = self._reads_of_copies(np.flatnonzero(~averages))
        return offsets, reads

    def _reads_of_copies(self, copies: Int64) -> Int64:
        """What each copy's origin reads, as its tower sees it; but an update by gradients reads
        their means, or, where updates are chained, what the tower before has written."""
        replica, graph = self.replica, self.replica.graph
        origins, views = self.rows.origins[copies], self.views[copies]
        places, entries = gather(graph.input_offsets, origins)
        tensors, view = graph.input_tensors[entries], views[places]
        reads = self.tensors[view, tensors]
        updates = (replica.updates & ~replica.buffer_updates)[origins][places]
        producers = graph.producers[tensors]
        if self.synchronous:
            gradients = updates & replica.own[producers]
            reads[gradients] = self.means(returned=False)[tensors[gradients]]
            return reads
        written = replica.latest[graph.storages[tensors]]
        chained = updates & (view > 0) & graph.is_source[producers] & (written >= 0)
        reads[chained] = self.tensors[view[chained] - 1, written[chained]]
        return reads

    @cached_property
    def control(self) -> Int64:
        """[edges, 2] the edges of every tower, and what only data orders in one replica.

        Where updates are chained, the first one waits for all towers to have read the old value;
        so does, in any case, tower 0's update of a buffer.
        """
        replica = self.replica
        before, after = replica.graph.control.astype(np.int64).T
        joins = replica.own[before] & replica.updates[after]
        pairs = [
            (self.places[tower, before], self.places[np.where(joins, 0, tower), after])
            for tower in range(self.replicas)
        ]
        before, after = self._unordered.T
        for tower in range(1, self.replicas):
            pairs.append((self.places[tower, before], self.places[0, after]))
        edges = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
        return np.unique(edges[(edges >= 0).all(axis=1)], axis=0)

    @property
    def _unordered(self) -> Int64:
        """[waits, 2] (op, update) of one replica that data need not order in towers but the first.

        A reader without a control edge stands before what the update reads. Where several readers
        do, the update waits for the makers of that in their stead: one edge, not forty.
        """
        replica, graph = self.replica, self.replica.graph
        chained = replica.buffer_updates if self.synchronous else replica.updates
        writers = replica.first_writers[graph.storages[graph.input_tensors]]
        waits = (writers >= 0) & chained[writers] & replica.own[graph.readers]
        orders = np.stack([graph.readers[waits].astype(np.int64), writers[waits]], axis=1)
        readers = _without(np.unique(orders, axis=0), graph.control)
        counts = np.bincount(readers[:, 1], minlength=len(graph))
        updates = np.flatnonzero((counts > 1) & ~replica.buffer_updates)
        places, entries = gather(graph.input_offsets, updates)
        makers = graph.producers[graph.input_tensors[entries]].astype(np.int64)
        # Another update reads the gradient for it.
        indirect = updates[places[replica.updates[makers]]]
        gradients = replica.own[makers] & ~graph.is_source[makers]
        ends = np.stack([makers, updates[places]], axis=1)[gradients]
        ends = ends[~np.isin(ends[:, 1], indirect)]
        return np.concatenate([readers[~np.isin(readers[:, 1], ends[:, 1])], ends])


def _without(pairs: Int64, left_out: NDArray[np.integer]) -> Int64:
    """The rows of `pairs` that are no row of `left_out`."""
    size = 1 + max(int(pairs.max(initial=0)), int(left_out.max(initial=0)))
    return pairs[~np.isin(pairs @ (size, 1), left_out.astype(np.int64) @ (size, 1))]


@dataclass(frozen=True, eq=False)
class Replicated:
    """The graph of all towers, and what of one replica's graph each op stands for.

    origins    [ops] the op of one replica that it is or copies; -1: an average. A copy has inputs
               and outputs in its origin's order, tensor for tensor
    towers     [ops] the tower that has it for itself, or whose gradient it updates by; -1: shared
    averaged   [ops] of an average, the tensor of one replica that it is the mean of; else -1
    """

    graph: Graph
    replicas: int
    synchronous: bool
    origins: Int32
    towers: Int32
    averaged: Int32


def replicate(graph: Graph, replicas: int, *, synchronous: bool = True) -> Replicated:
    """`replicas` towers of one replica's training step.

    Tower r's own ops are named "tower.r/..." in module "tower.r....", asynchronous updates
    ".../tower.r" in the parameter's module; all else keeps its name. One op, "average/PARAMETER",
    sums the N gradients that a synchronous update reads and scales by 1 / N; "average/loss" does so
    with the losses. Sources stand first, then tower after tower, then averages and updates.
    Updates of one parameter are colocated. Takes O(replicas x (ops + tensors + reads)).

    Raises `UsageError` for fewer than two replicas, and `ReplicationError` for a graph that trains
    nothing, returns no loss, has towers already, or whose updates do not come last.
    """
    if replicas < 2:
        raise UsageError("replicas", f"is {replicas}; use 2 or more")
    replica = Replica(graph)
    replica.check()
    copies = TowerCopies(replica, rows_of(replica, replicas, synchronous), replicas, synchronous)
    return Replicated(
        graph=_graph(copies),
        replicas=replicas,
        synchronous=synchronous,
        origins=copies.rows.origins.astype(np.int32),
        towers=copies.rows.towers.astype(np.int32),
        averaged=copies.rows.averaged.astype(np.int32),
    )


Shape = tuple[int, ...]


def _graph(copies: TowerCopies) -> Graph:
    graph, rows = copies.replica.graph, copies.rows
    origins, averages = rows.origins, rows.averaged >= 0
    stands_for = copies.stands_for
    offsets, reads = copies.reads
    elements = np.array([math.prod(shape) for shape in graph.shapes], dtype=np.int64)
    names, modules = _names(copies)
    strides = {t: _dense(graph.shapes[t], graph.strides[t]) for t in set(rows.averaged[averages])}
    owner = averages[copies.producers]
    gradients = graph.gradient_of[origins]
    columns = select_columns(graph, origins, stands_for)
    columns |= dict(
        names=names,
        kinds=tuple(AVERAGE if o < 0 else graph.kinds[o] for o in origins.tolist()),
        signatures=_signatures(copies, strides),
        modules=modules,
        phases=np.where(
            averages, np.where(rows.returned, Phase.FORWARD, Phase.UPDATE), graph.phases[origins]
        ),
        flops=np.where(averages, copies.replicas * elements[rows.averaged], graph.flops[origins]),
        accessed_bytes=np.where(
            averages,
            (copies.replicas + 1) * graph.tensor_bytes[rows.averaged],
            graph.accessed_bytes[origins],
        ),
        colocation=_colocation(copies).astype(np.int32),
        gradient_of=np.where(
            averages | (gradients < 0), -1, copies.places[copies.views, gradients]
        ),
        device_kinds=tuple(() if o < 0 else graph.device_kinds[o] for o in origins.tolist()),
        producers=copies.producers.astype(np.int32),
        strides=tuple(
            strides[t] if mean else graph.strides[t]
            for t, mean in zip(stands_for.tolist(), owner.tolist(), strict=True)
        ),
        storages=_storages(copies).astype(np.int32),
        overwrites=graph.overwrites[stands_for] & ~owner,
        input_offsets=offsets.astype(np.int32),
        input_tensors=reads.astype(np.int32),
        outputs=_outputs(copies).astype(np.int32),
        control=copies.control.astype(np.int32),
    )
    return Graph(**columns)


def _names(copies: TowerCopies) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """[ops] names and modules."""
    replica, graph = copies.replica, copies.replica.graph
    labels = _labels(replica)
    names, modules, taken = [], [], Counter(graph.names)
    columns = zip(*(column.tolist() for column in copies.rows), strict=True)
    for origin, tower, averaged, returned in columns:
        if origin >= 0:
            name, module = graph.names[origin], graph.modules[origin]
            if tower >= 0 and (replica.own[origin] or replica.buffer_updates[origin]):
                name, module = own_name(tower, name), own_module(tower, module)
            elif tower >= 0:
                name = update_name(tower, name)
        else:
            maker = int(graph.producers[averaged])
            label, module = ("loss", graph.modules[maker]) if returned else labels[averaged]
            name = f"average/{label}"
            while taken[name]:
                name += "_"
            taken[name] += 1
        names.append(name)
        modules.append(module)
    return tuple(names), tuple(modules)


def _labels(replica: Replica) -> dict[int, tuple[str, str]]:
    """gradient -> (name of the parameter that is updated by it, module)"""
    graph = replica.graph
    parameters = {
        int(graph.storages[t]): graph.names[op]
        for op in np.flatnonzero(graph.is_source).tolist()
        if graph.kinds[op] == "parameter"
        for t in graph.outputs_of(op)
    }
    labels: dict[int, tuple[str, str]] = {}
    for op in np.flatnonzero(replica.updates & ~replica.buffer_updates).tolist():
        written = (parameters.get(int(graph.storages[t])) for t in graph.outputs_of(op))
        name = next(filter(None, written), graph.names[op])
        for tensor in graph.inputs_of(op).tolist():
            labels.setdefault(tensor, (name, graph.modules[op]))
    return labels


def _dense(shape: Shape, strides: Shape) -> Shape:
    """Strides of a mean: the gradient's own where its elements fill memory, else the default's."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        expected *= size
    return strides


def _signatures(copies: TowerCopies, strides: dict[int, Shape]) -> tuple[str, ...]:
    """[ops] An update whose gradient gets another layout by averaging is no longer the same."""
    replica, graph = copies.replica, copies.replica.graph
    changed = [t for t, dense in strides.items() if dense != graph.strides[t]]
    readers = graph.readers[np.isin(graph.input_tensors, changed)]
    relaid = set(readers[(replica.updates & ~replica.buffer_updates)[readers]].tolist())
    texts = {}
    for tensor in strides:
        shape, layout = (
            "x".join(map(str, sizes[tensor])) for sizes in (graph.shapes, graph.strides)
        )
        texts[tensor] = f"{AVERAGE}({copies.replicas} x {graph.dtypes[tensor]}[{shape}]({layout}))"
    return tuple(
        texts[t] if o < 0 else graph.signatures[o] + " of a dense mean" * (o in relaid)
        for o, t in zip(copies.rows.origins.tolist(), copies.rows.averaged.tolist(), strict=True)
    )


def _colocation(copies: TowerCopies) -> Int64:
    """[ops] An id that something shared has is one for all towers, else each has its own. Updates
    of one parameter by several towers share one."""
    replica, graph, rows = copies.replica, copies.replica.graph, copies.rows
    given = graph.colocation.astype(np.int64)
    count = int(given.max(initial=-1)) + 1
    together = np.zeros(count + 1, dtype=bool)
    together[given[(given >= 0) & ~replica.own]] = True
    if not copies.synchronous:
        written = np.flatnonzero(graph.overwrites & replica.updates[graph.producers])
        loose = written[given[graph.producers[written]] < 0]
        given[graph.producers[loose]] = count + replica.first_writers[graph.storages[loose]]
    ids = np.where(rows.origins < 0, -1, given[rows.origins])
    apart = (ids >= 0) & replica.own[rows.origins] & ~together[np.minimum(ids, count)]
    ids[apart] += (count + len(graph)) * (1 + rows.towers[apart])
    _, compact = np.unique(ids, return_inverse=True)
    return np.where(ids < 0, -1, compact.reshape(-1))


def _storages(copies: TowerCopies) -> Int64:
    """[tensors] What is shared has one storage, all else one for each tower."""
    replica, graph = copies.replica, copies.replica.graph
    count = graph.tensors
    storages = graph.storages[copies.stands_for].astype(np.int64)
    views = copies.views[copies.producers]
    means = np.flatnonzero(copies.rows.averaged[copies.producers] >= 0)
    storages += np.where(replica.shared_storages[storages], 0, count * (1 + views))
    storages[means] = count * (1 + copies.replicas) + np.arange(len(means))
    return np.unique(storages, return_inverse=True)[1].reshape(-1)


def _outputs(copies: TowerCopies) -> Int64:
    """The mean of a floating-point output, each tower's own of another, and of what an update
    made its last value."""
    replica, graph = copies.replica, copies.replica.graph
    means = copies.means(returned=True)
    outputs: list[int] = []
    for tensor in graph.outputs.tolist():
        if means[tensor] >= 0:
            outputs.append(int(means[tensor]))
        elif replica.own[graph.producers[tensor]]:
            outputs += copies.tensors[:, tensor].tolist()
        else:
            outputs.append(int(copies.tensors[:, tensor].max()))
    return np.array(outputs, dtype=np.int64)
