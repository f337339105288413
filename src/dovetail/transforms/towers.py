"""Makes the step of N data-parallel towers from one replica's training step.

    synchronous    tower.0/  input ─► forward ─► loss ─► backward ─┐
                   tower.1/  input ─► forward ─► loss ─► backward ─┼─► average ─► the one update
                   tower.2/  input ─► forward ─► loss ─► backward ─┘

    asynchronous   ... backward of each tower ─► update/tower.0 ─► update/tower.1 ─► update/tower.2

All towers read the parameters' values from before the step. Each takes a share of the batch, so the
given step is captured with batch / N. In an asynchronous step update r reads the gradient of tower
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

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field

from dovetail.graph.records import Graph, Int64, gather
from dovetail.transforms.copying import (
    COPY,
    MEAN,
    RESULT,
    SHARED,
    Copying,
    Replica,
    Replicated,
    Rows,
    check_count,
    joined,
    rows_of_ops,
    rows_of_tensors,
)

if TYPE_CHECKING:
    from dovetail.frontends.program import Captured

Step = TypeVar("Step", "Captured", Graph)


@dataclass(frozen=True)
class Towers:
    """Data-parallel towers of a training step.

    asynchronous   True if each tower updates by itself
    """

    count: Annotated[int, Field(ge=2, le=2**20)]
    asynchronous: bool = False
    kind: Literal["towers"] = "towers"

    def apply(self, step: Step) -> Step:
        """Return the step of all towers, each of which is `step` and takes its batch size.

        It takes the inputs of all towers, tower after tower, then all targets in the same order:
        with two inputs and one target for each, (x0, y0, x1, y1, ..., t0, t1, ...). It returns the
        mean of the losses. Parameters, buffers and state keep their names. Drawn examples are drawn
        for each tower.

        Raises what `replicate` raises, and `UsageError` for a step with a gradient scaler.
        """
        if isinstance(step, Graph):
            return replicate(step, self.count, synchronous=not self.asynchronous).graph
        from dovetail.transforms.programs import check_unscaled, step_of_copies

        check_unscaled(step, "replicas")
        made = replicate(step.graph, self.count, synchronous=not self.asynchronous)
        return step_of_copies(step, made, self)


def towers(captured: "Captured", replicas: int, *, synchronous: bool = True) -> "Captured":
    """Return the step of `replicas` towers of a captured step: see `Towers.apply`."""
    return Towers(replicas, not synchronous).apply(captured)


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
    check_count("replicas", "towers", replicas, graph)
    replica = Replica(graph)
    replica.check()
    return _Towers(replica, replicas, synchronous).made()


@dataclass(frozen=True, eq=False)
class _Towers(Copying):
    synchronous: bool

    @cached_property
    def rows(self) -> Rows:
        """Sources, towers one after another, averages and updates."""
        replica, graph = self.replica, self.single
        source, runs = graph.is_source, replica.own & ~graph.is_source
        others = range(1, self.count)
        parts = [rows_of_ops(SHARED, np.flatnonzero(source & ~replica.own))]
        parts += [
            rows_of_ops(COPY, np.flatnonzero(source & replica.own), tower)
            for tower in range(self.count)
        ]
        parts.append(rows_of_ops(COPY, np.flatnonzero(runs), 0))
        fewer = np.flatnonzero(runs & ~replica.only_for_buffers)
        parts += [rows_of_ops(COPY, fewer, tower) for tower in others]
        parts.append(rows_of_tensors(RESULT, replica.returned))
        updates = np.flatnonzero(replica.updates)
        if not self.synchronous:
            parts.append(rows_of_ops(COPY, updates, 0))
            of_parameters = updates[~replica.buffer_updates[updates]]
            parts += [rows_of_ops(COPY, of_parameters, tower) for tower in others]
            return joined(parts)
        # Each update stands behind the averages that it is the first to read.
        averaged: set[int] = set()
        for op in updates.tolist():
            if replica.buffer_updates[op]:
                parts.append(rows_of_ops(COPY, np.array([op]), 0))
                continue
            reads = graph.inputs_of(op).tolist()
            gradients = [t for t in reads if replica.own[graph.producers[t]] and t not in averaged]
            averaged.update(gradients)
            parts += [rows_of_tensors(MEAN, gradients), rows_of_ops(SHARED, np.array([op]))]
        return joined(parts)

    def reads_of_copies(self, rows: Int64, tensors: Int64) -> Int64:
        """A copy reads its tower's tensors in place of its origin's. A synchronous update reads the
        means of gradients instead, and an asynchronous one the values that the update of the tower
        before wrote."""
        replica, graph = self.replica, self.single
        view, producers = self.views[rows], graph.producers[tensors]
        reads = self.tensors[view, tensors]
        updates = (replica.updates & ~replica.buffer_updates)[self.rows.origins[rows]]
        if self.synchronous:
            gradients = updates & replica.own[producers]
            reads[gradients] = self.reduced_by(MEAN)[tensors[gradients]]
            return reads
        written = replica.latest[graph.storages[tensors]]
        chained = updates & (view > 0) & graph.is_source[producers] & (written >= 0)
        reads[chained] = self.tensors[view[chained] - 1, written[chained]]
        return reads

    @property
    def control(self) -> Int64:
        """The control edges of every tower, and edges for pairs that data orders in one replica
        only.

        The first of several asynchronous updates of a parameter waits until all towers have read
        the old value. Tower 0's update of a buffer always does.
        """
        replica = self.replica
        before, after = self.single.control.astype(np.int64).T
        joins = replica.own[before] & replica.updates[after]
        pairs = [
            (self.places[tower, before], self.places[np.where(joins, 0, tower), after])
            for tower in range(self.count)
        ]
        before, after = self._unordered_waits.T
        pairs += [(self.places[t, before], self.places[0, after]) for t in range(1, self.count)]
        edges = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
        return np.unique(edges[(edges >= 0).all(axis=1)], axis=0)

    @property
    def _unordered_waits(self) -> Int64:
        """[waits, 2] (op, update) of one replica that data orders in tower 0 alone.

        If a reader of the old value has no control edge to the update, data flows from it to the
        update. So where there are several such readers, the update waits for the makers of its
        gradients instead of the readers: one edge, not forty.
        """
        replica, graph = self.replica, self.single
        chained = replica.buffer_updates if self.synchronous else replica.updates
        writers = replica.first_writers[graph.storages[graph.input_tensors]]
        waits = (writers >= 0) & chained[writers] & replica.own[graph.readers]
        orders = np.stack([graph.readers[waits].astype(np.int64), writers[waits]], axis=1)
        readers = np.unique(orders, axis=0)
        size = 1 + max(int(readers.max(initial=0)), int(graph.control.max(initial=0)))
        is_edge = np.isin(readers @ (size, 1), graph.control.astype(np.int64) @ (size, 1))
        readers = readers[~is_edge]
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

    def name_of(self, kind: int, origin: int, copy: int, reduced: int) -> tuple[str, str]:
        """See the module `graph.copies`."""
        replica, graph = self.replica, self.single
        if kind == RESULT:
            return "average/loss", graph.modules[graph.producers[reduced]]
        if kind == MEAN:
            label, module = replica.labels[reduced]
            return f"average/{label}", module
        name, module = graph.names[origin], graph.modules[origin]
        if kind == COPY and (replica.own[origin] or replica.buffer_updates[origin]):
            return f"tower.{copy}/{name}", f"tower.{copy}.{module}" if module else f"tower.{copy}"
        return (f"{name}/tower.{copy}" if kind == COPY else name), module

    @property
    def colocation(self) -> Int64:
        """If a shared op has an id, the id is the same in all towers; else each tower gets its own.
        All asynchronous updates of one parameter have one id."""
        replica, graph, rows = self.replica, self.single, self.rows
        given = graph.colocation.astype(np.int64)
        count = int(given.max(initial=-1)) + 1
        together = np.zeros(count + 1, dtype=bool)
        together[given[(given >= 0) & ~replica.own]] = True
        if not self.synchronous:
            written = np.flatnonzero(graph.overwrites & replica.updates[graph.producers])
            loose = written[given[graph.producers[written]] < 0]
            given[graph.producers[loose]] = count + replica.first_writers[graph.storages[loose]]
        ids = np.where(rows.origins < 0, -1, given[rows.origins])
        apart = (ids >= 0) & replica.own[rows.origins] & ~together[np.minimum(ids, count)]
        ids[apart] += (count + len(graph)) * (1 + rows.copies[apart])
        _, compact = np.unique(ids, return_inverse=True)
        return np.where(ids < 0, -1, compact.reshape(-1))

    @property
    def blocks(self) -> Int64:
        """A tensor that towers share has one storage, and every other one has one per tower."""
        shared = self.replica.shared_storages[self.single.storages[self.stands_for]]
        return np.where(shared, 0, 1 + self.views[self.producers])
