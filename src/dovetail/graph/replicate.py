"""Makes the graph of N data-parallel towers from the graph of one replica's training step.

    synchronous    tower.0/  input ─► forward ─► loss ─► backward ─┐
                   tower.1/  input ─► forward ─► loss ─► backward ─┼─► average ─► the one update
                   tower.2/  input ─► forward ─► loss ─► backward ─┘

    asynchronous   ... backward of each tower ─► update/tower.0 ─► update/tower.1 ─► update/tower.2

All towers read the parameters' values from before the step. Each takes a share of the batch, so the
given graph is captured with batch / N. In an asynchronous step update r reads the gradient of tower
r and the value that update r - 1 wrote.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4, which compares with synchronous and asynchronous
towers.

Differences: The paper does not say what happens to buffers that a step writes (running statistics
of batch norm). Here, as in TensorFlow's towers, they get tower 0's values: their updates belong to
tower 0, and other towers leave out the ops that only these updates need. All asynchronous towers
begin at once, and the first update of a parameter waits until every tower has read the old value;
separate processes would drift apart.
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

# Names and kinds alone tell which tower an op of a replicated graph belongs to. So this works for a
# graph that was saved and loaded too.
#
#     tower.2/lstm.0/addmm      module tower.2.lstm.0      what tower 2 runs for itself
#     average/lstm.0.bias       kind "dovetail.average"    the mean of N tensors, one a tower
#     lstm.0.bias/adam          synchronous                the one update
#     lstm.0.bias/adam/tower.2  asynchronous               the update by tower 2's gradient


AVERAGE = "dovetail.average"
"""The kind of an op that averages one tensor of each tower. Every replicated graph has one, which
averages the losses."""
WRITTEN = "dovetail.written_"
"""The kind of an update begins so if it first writes what the model has written over the
parameter."""
MOST_OPS = 2**20
"""A replicated graph has at most so many ops, which take a gigabyte."""
# More digits than these are no tower's number, and Python refuses to convert very many.
_OWN = re.compile(r"tower\.([0-9]{1,9})/")
_UPDATE = re.compile(r".*/tower\.([0-9]{1,9})$", re.DOTALL)


def own_name(tower: int, name: str) -> str:
    """Return the name of a tower's copy of an op."""
    return f"tower.{tower}/{name}"


def own_module(tower: int, module: str) -> str:
    """Return the module of a tower's copy of an op."""
    return f"tower.{tower}.{module}" if module else f"tower.{tower}"


def update_name(tower: int, name: str) -> str:
    """Return the name of an asynchronous tower's copy of an update."""
    return f"{name}/tower.{tower}"


def tower_count(graph: Graph) -> int:
    """Return the number of towers; 1 for a graph that was not replicated."""
    return max(1, 1 + int(towers_of(graph).max(initial=0)))


def towers_of(graph: Graph) -> Int32:
    """Return [ops] the tower that has the op or input for itself; -1: all towers share it, as they
    share updates."""
    return _numbers(graph, _OWN)


def update_towers_of(graph: Graph) -> Int32:
    """Return [ops] the tower whose gradient an asynchronous update uses; -1 for other ops."""
    towers = _numbers(graph, _UPDATE)
    towers[graph.phases != Phase.UPDATE] = -1
    return towers


def _numbers(graph: Graph, pattern: re.Pattern[str]) -> Int32:
    if AVERAGE not in graph.kinds:
        return np.full(len(graph), -1, dtype=np.int32)
    matches = map(pattern.match, graph.names)
    return np.array([int(match[1]) if match else -1 for match in matches], dtype=np.int32)


# One replica's training step, sorted into ops that each tower runs and ops that all share.


FLOATING = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Replica:
    """A replica's graph, and which of its ops and storages the towers share.

    Arrays over storages have `graph.tensors` entries, since ids of storages are below that.
    """

    graph: Graph

    @cached_property
    def updates(self) -> Bool:
        """[ops] True for ops of phase UPDATE."""
        return np.asarray(self.graph.phases == Phase.UPDATE)

    @cached_property
    def own(self) -> Bool:
        """[ops] True for what every tower has for itself: inputs, forward and backward ops."""
        graph = self.graph
        return np.where(graph.is_source, self._of_kinds("input"), ~self.updates)

    @cached_property
    def buffer_updates(self) -> Bool:
        """[ops] True for updates that write buffers and nothing else."""
        graph = self.graph
        buffers = np.zeros(graph.tensors, dtype=bool)
        buffers[graph.storages[self._of_kinds("buffer")[graph.producers]]] = True
        written = np.flatnonzero(graph.overwrites)
        writers, elsewhere = graph.producers[written], ~buffers[graph.storages[written]]
        writes = np.bincount(writers, minlength=len(graph))
        other_writes = np.bincount(writers, weights=elsewhere, minlength=len(graph))
        return np.asarray(self.updates & (writes > 0) & (other_writes == 0))

    @cached_property
    def only_for_buffers(self) -> Bool:
        """[ops] True for a tower's own ops whose results only updates of buffers need."""
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
        # Backwards through the topological order, so that all readers of an op are settled first.
        for op in reversed(range(len(graph))):
            only[op] = read[op] and not needed[op]
            keeps = not (only[op] or buffer_updates[op])
            for before in befores[offsets[op] : offsets[op + 1]]:
                read[before] = True
                needed[before] = needed[before] or keeps
        return np.array(only) & self.own & ~graph.is_source

    @cached_property
    def shared_storages(self) -> Bool:
        """[storages] True for those of a parameter, state, a buffer or a constant."""
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
        """[storages] the last tensor that an update writes there; -1: none. Updates of buffers do
        not count."""
        graph = self.graph
        latest = np.full(graph.tensors, -1, dtype=np.int64)
        writes = (self.updates & ~self.buffer_updates)[graph.producers] & graph.overwrites
        written = np.flatnonzero(writes)
        np.maximum.at(latest, graph.storages[written], written)
        return latest

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """The outputs whose means the replicated step returns, such as the loss."""
        graph = self.graph
        return tuple(
            tensor
            for tensor in dict.fromkeys(graph.outputs.tolist())
            if self.own[graph.producers[tensor]] and graph.dtypes[tensor] in FLOATING
        )

    @cached_property
    def labels(self) -> dict[int, tuple[str, str]]:
        """Gradient -> (name of the parameter that it updates, module of the update)."""
        graph = self.graph
        parameters = {
            int(graph.storages[t]): graph.names[op]
            for op in np.flatnonzero(graph.is_source).tolist()
            if graph.kinds[op] == "parameter"
            for t in graph.outputs_of(op)
        }
        labels: dict[int, tuple[str, str]] = {}
        for op in np.flatnonzero(self.updates & ~self.buffer_updates).tolist():
            written = (parameters.get(int(graph.storages[t])) for t in graph.outputs_of(op))
            name = next(filter(None, written), graph.names[op])
            for tensor in graph.inputs_of(op).tolist():
                labels.setdefault(tensor, (name, graph.modules[op]))
        return labels

    def check(self, copies: str = "towers", own: Sequence[str] = ("tower",)) -> None:
        """Raise `ReplicationError` if the graph cannot be replicated, with the op that is why.

        copies   what the copies are called in the errors
        own      first parts of names that the copies will have, so that nothing else may have them
        """
        graph = self.graph
        if not self.updates.any():
            raise ReplicationError(
                f"it is of inference, and {copies} share the updates of a training step; capture "
                "it with an optimizer (--train)"
            )
        for op, kind in enumerate(graph.kinds):
            if kind.startswith(WRITTEN):
                raise ReplicationError(
                    f"the model writes over the parameter of {graph.names[op]!r} while it runs, "
                    f"and {copies} would each write what is theirs",
                    graph.names[op],
                )
        names = (*graph.modules, *graph.names)
        if any(name.split(".", 1)[0] in own for name in names):
            raise ReplicationError(
                f"it is replicated already, or has a module named {' or '.join(map(repr, own))}"
            )
        if not self.returned:
            raise ReplicationError("it returns no loss that could be averaged")
        writes = graph.overwrites & self.shared_storages[graph.storages]
        follows = graph.readers[self.updates[graph.producers[graph.input_tensors]]]
        waits = graph.control[self.updates[graph.control[:, 0]], 1]
        for ops, what in (
            (graph.producers[writes], f"writes over what {copies} share, but is no update"),
            (follows, "reads what an update made, but is no update"),
            (waits, "waits for an update, but is none"),
        ):
            wrong = ops[self.own[ops]].tolist()
            if wrong:
                name = graph.names[wrong[0]]
                raise ReplicationError(f"op {name!r} {what}", name)

    def _of_kinds(self, kind: str) -> Bool:
        return np.array([op_kind == kind for op_kind in self.graph.kinds], dtype=bool)


# The ops of the replicated graph: which op and tower each stands for, what it reads and what it
# waits for.


class Rows(NamedTuple):
    """Columns [ops] of the new graph or of a part of it: what each op stands for.

    `origins`, `towers` and `averaged` are as in `Replicated`. `returned` is True for the average of
    an output.
    """

    origins: Int64
    towers: Int64
    averaged: Int64
    returned: NDArray[np.bool_]


def _part(ops: NDArray[np.integer], tower: int = -1) -> Rows:
    """Return the rows of copies of `ops`, for one tower or, with -1, for all."""
    none = np.full(len(ops), -1)
    return Rows(ops.astype(np.int64), np.full(len(ops), tower), none, none > 0)


def _averages(tensors: Sequence[int], *, returned: bool = False) -> Rows:
    """Return the rows of one average per tensor, over the towers."""
    none = np.full(len(tensors), -1)
    return Rows(none, none, np.array(tensors, np.int64), np.full(len(tensors), returned))


def rows_of(replica: Replica, replicas: int, synchronous: bool) -> Rows:
    """Return the rows of the replicated graph in topological order: sources, towers one after
    another, averages and updates."""
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
    """Return the rows of updates, each behind the averages that it is the first to read."""
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
        """[ops] the tower whose tensors the op reads; tower 0 for a shared op."""
        return np.maximum(self.rows.towers, 0)

    @cached_property
    def places(self) -> Int64:
        """[replicas, ops of one replica] the new index of the op in each tower; -1: left out."""
        origins, towers = self.rows.origins, self.rows.towers
        places = np.full((self.replicas, len(self.replica.graph)), -1, dtype=np.int64)
        shared = np.flatnonzero((towers < 0) & (origins >= 0))
        copies = np.flatnonzero(towers >= 0)
        places[:, origins[shared]] = shared
        places[towers[copies], origins[copies]] = copies
        return places

    @cached_property
    def producers(self) -> Int64:
        """[tensors] the new op that makes each tensor."""
        counts = np.diff(self.replica.graph.output_offsets)[self.rows.origins]
        counts[self.rows.averaged >= 0] = 1
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def stands_for(self) -> Int64:
        """[tensors] the tensor of one replica that each tensor copies or averages."""
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
        """[replicas, tensors of one replica] the new tensor of each tower; -1: none."""
        graph = self.replica.graph
        places = self.places[:, graph.producers]
        within = np.arange(graph.tensors) - graph.output_offsets[graph.producers]
        return np.where(places >= 0, self.first[places] + within, -1)

    def means(self, *, returned: bool) -> Int64:
        """Return [tensors of one replica] the new tensor that is its mean; -1: none.

        returned   True: the means that the step returns; False: those that updates read
        """
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
        """Return the tensors that the copies read, copy after copy.

        A copy reads its tower's tensors in place of its origin's. A synchronous update reads the
        means of gradients instead, and an asynchronous one the values that the update of the tower
        before wrote.
        """
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
        """[edges, 2] control edges: those of every tower, and edges for pairs that data orders in
        one replica only.

        The first of several asynchronous updates of a parameter waits until all towers have read
        the old value. Tower 0's update of a buffer always does.
        """
        replica = self.replica
        before, after = replica.graph.control.astype(np.int64).T
        joins = replica.own[before] & replica.updates[after]
        pairs = [
            (self.places[tower, before], self.places[np.where(joins, 0, tower), after])
            for tower in range(self.replicas)
        ]
        before, after = self._unordered_waits.T
        for tower in range(1, self.replicas):
            pairs.append((self.places[tower, before], self.places[0, after]))
        edges = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
        return np.unique(edges[(edges >= 0).all(axis=1)], axis=0)

    @property
    def _unordered_waits(self) -> Int64:
        """[waits, 2] (op, update) of one replica that data orders in tower 0 alone.

        If a reader of the old value has no control edge to the update, data flows from it to the
        update. So where there are several such readers, the update waits for the makers of its
        gradients instead of the readers: one edge, not forty.
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
        # An update that reads another update's result gets the gradient through it. Such an update
        # waits for the readers themselves.
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
    """The graph of all towers, and what each of its ops stands for in one replica's graph.

    origins    [ops] the op of one replica that the op is or copies; -1: an average. A copy has its
               inputs and outputs in its origin's order, tensor for tensor
    towers     [ops] the tower that has the op for itself, or whose gradient the update uses;
               -1: shared
    averaged   [ops] the tensor of one replica that an average is the mean of; -1: no average
    """

    graph: Graph
    replicas: int
    synchronous: bool
    origins: Int32
    towers: Int32
    averaged: Int32


def replicate(graph: Graph, replicas: int, *, synchronous: bool = True) -> Replicated:
    """Return the graph of `replicas` towers of one replica's training step.

    Tower r's own ops are named "tower.r/..." and are in module "tower.r....". Asynchronous updates
    are named ".../tower.r" and are in the parameter's module. All other ops keep their names. An op
    "average/PARAMETER" sums the N gradients that a synchronous update reads and scales by 1 / N;
    "average/loss" does so with the losses. Sources come first, then tower after tower, then
    averages and updates. Updates of one parameter are colocated. Takes
    O(replicas x (ops + tensors + reads)).

    Raises `UsageError` for fewer than two replicas, and `ReplicationError` for a graph that trains
    nothing, returns no loss, has towers already, or whose updates do not come last.
    """
    if replicas < 2:
        raise UsageError("replicas", f"is {replicas}; use 2 or more")
    if replicas * len(graph) > MOST_OPS:
        raise UsageError(
            "replicas",
            f"{replicas} towers of {len(graph)} ops are more than {MOST_OPS} ops, which is the "
            f"limit; use at most {max(MOST_OPS // max(len(graph), 1), 1)}",
        )
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
    strides = {
        t: dense_strides(graph.shapes[t], graph.strides[t]) for t in set(rows.averaged[averages])
    }
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
    labels = replica.labels
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


def dense_strides(shape: Shape, strides: Shape) -> Shape:
    """Return the strides of a mean: the gradient's own if its elements fill memory without gaps,
    else those of a contiguous tensor."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        expected *= size
    return strides


def _signatures(copies: TowerCopies, strides: dict[int, Shape]) -> tuple[str, ...]:
    """Return [ops] signatures.

    If averaging changes the layout of a gradient, the signatures of the updates that read it change
    too, because equal signatures must cost the same.
    """
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
    """Return [ops] colocation ids.

    If a shared op has an id, the id is the same in all towers; else each tower gets its own. All
    asynchronous updates of one parameter have one id.
    """
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
    """Return [tensors] storages: one for what towers share, else one per tower; one per mean."""
    replica, graph = copies.replica, copies.replica.graph
    count = graph.tensors
    storages = graph.storages[copies.stands_for].astype(np.int64)
    views = copies.views[copies.producers]
    means = np.flatnonzero(copies.rows.averaged[copies.producers] >= 0)
    storages += np.where(replica.shared_storages[storages], 0, count * (1 + views))
    storages[means] = count * (1 + copies.replicas) + np.arange(len(means))
    return np.unique(storages, return_inverse=True)[1].reshape(-1)


def _outputs(copies: TowerCopies) -> Int64:
    """Return the outputs: the mean of a floating-point output, every tower's own for another
    dtype, and the last value of what an update writes."""
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
