"""What each op and tensor of a replicated graph stands for, and what it reads and waits for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.graph.records import Int64, csr_offsets, gather
from dovetail.graph.replica import Replica


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


def rows_of(one: Replica, replicas: int, synchronous: bool) -> Rows:
    source, runs = one.graph.is_source, one.own & ~one.graph.is_source
    parts = [_part(np.flatnonzero(source & ~one.own))]
    parts += [_part(np.flatnonzero(source & one.own), tower) for tower in range(replicas)]
    parts.append(_part(np.flatnonzero(runs), 0))
    fewer = np.flatnonzero(runs & ~one.only_for_buffers)
    parts += [_part(fewer, tower) for tower in range(1, replicas)]
    parts.append(_averages(one.returned, returned=True))
    if synchronous:
        parts += _synchronous_updates(one)
    else:
        updates = np.flatnonzero(one.updates)
        parts.append(_part(updates, 0))
        of_parameters = updates[~one.buffer_updates[updates]]
        parts += [_part(of_parameters, tower) for tower in range(1, replicas)]
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _synchronous_updates(one: Replica) -> list[Rows]:
    """Each update, after the averages that it is the first to read."""
    graph, done = one.graph, set()
    parts = []
    for op in np.flatnonzero(one.updates).tolist():
        reads = [] if one.buffer_updates[op] else graph.inputs_of(op).tolist()
        gradients = [t for t in reads if one.own[graph.producers[t]] and t not in done]
        done.update(gradients)
        parts += [_averages(gradients), _part(np.array([op]), 0 if one.buffer_updates[op] else -1)]
    return parts


@dataclass(frozen=True, eq=False)
class Copies:
    """Where the ops and tensors of one replica are in the new graph."""

    one: Replica
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
        places = np.full((self.replicas, len(self.one.graph)), -1, dtype=np.int64)
        shared = np.flatnonzero((towers < 0) & (origins >= 0))
        copies = np.flatnonzero(towers >= 0)
        places[:, origins[shared]] = shared
        places[towers[copies], origins[copies]] = copies
        return places

    @cached_property
    def producers(self) -> Int64:
        """[tensors]"""
        counts = np.diff(self.one.graph.output_offsets)[self.rows.origins]
        counts[self.rows.averaged >= 0] = 1
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def stands_for(self) -> Int64:
        """[tensors] the tensor of one replica that it copies or is the mean of."""
        copies = self.rows.origins[self.rows.averaged < 0]
        tensors = self.rows.averaged[self.producers]
        tensors[tensors < 0] = gather(self.one.graph.output_offsets, copies)[1]
        return tensors

    @cached_property
    def first(self) -> Int64:
        """[ops + 1] the first tensor of each op."""
        return csr_offsets(self.producers, len(self.rows.origins)).astype(np.int64)

    @cached_property
    def tensors(self) -> Int64:
        """[replicas, tensors of one] the tensor that each tower sees in its place; -1: none."""
        graph = self.one.graph
        places = self.places[:, graph.producers]
        within = np.arange(graph.tensors) - graph.output_offsets[graph.producers]
        return np.where(places >= 0, self.first[places] + within, -1)

    def means(self, *, returned: bool) -> Int64:
        """[tensors of one] its mean as the step returns it, or as an update reads it; -1: none."""
        averaged = self.rows.averaged
        ops = np.flatnonzero((averaged >= 0) & (self.rows.returned == returned))
        means = np.full(self.one.graph.tensors, -1, dtype=np.int64)
        means[averaged[ops]] = self.first[ops]
        return means

    @cached_property
    def reads(self) -> tuple[Int64, Int64]:
        """(offsets [ops + 1], tensors) that each op reads."""
        graph, rows = self.one.graph, self.rows
        averages = rows.averaged >= 0
        counts = np.where(averages, self.replicas, np.diff(graph.input_offsets)[rows.origins])
        offsets = np.append(0, np.cumsum(counts))
        found = np.empty(offsets[-1], dtype=np.int64)
        of_average = np.repeat(averages, counts)
        found[of_average] = self.tensors[:, rows.averaged[averages]].T.ravel()
        found[~of_average] = self._reads_of_copies(np.flatnonzero(~averages))
        return offsets, found

    def _reads_of_copies(self, copies: Int64) -> Int64:
        """What each copy's origin reads, as its tower sees it; but an update by gradients reads
        their means, or, where updates are chained, what the tower before has written."""
        one, graph = self.one, self.one.graph
        origins, views = self.rows.origins[copies], self.views[copies]
        places, entries = gather(graph.input_offsets, origins)
        tensors, view = graph.input_tensors[entries], views[places]
        found = self.tensors[view, tensors]
        updates = (one.updates & ~one.buffer_updates)[origins][places]
        producers = graph.producers[tensors]
        if self.synchronous:
            gradients = updates & one.own[producers]
            found[gradients] = self.means(returned=False)[tensors[gradients]]
            return found
        written = one.latest[graph.storages[tensors]]
        chained = updates & (view > 0) & graph.is_source[producers] & (written >= 0)
        found[chained] = self.tensors[view[chained] - 1, written[chained]]
        return found

    @cached_property
    def control(self) -> Int64:
        """[edges, 2] the edges of every tower, and what only data orders in one replica.

        Where updates are chained, the first one waits for all towers to have read the old value;
        so does, in any case, tower 0's update of a buffer.
        """
        one = self.one
        before, after = one.graph.control.astype(np.int64).T
        joins = one.own[before] & one.updates[after]
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
        one, graph = self.one, self.one.graph
        chained = one.buffer_updates if self.synchronous else one.updates
        writers = one.first_writers[graph.storages[graph.input_tensors]]
        waits = (writers >= 0) & chained[writers] & one.own[graph.readers]
        found = np.stack([graph.readers[waits].astype(np.int64), writers[waits]], axis=1)
        readers = _without(np.unique(found, axis=0), graph.control)
        counts = np.bincount(readers[:, 1], minlength=len(graph))
        updates = np.flatnonzero((counts > 1) & ~one.buffer_updates)
        places, entries = gather(graph.input_offsets, updates)
        makers = graph.producers[graph.input_tensors[entries]].astype(np.int64)
        indirect = updates[places[one.updates[makers]]]  # another update reads the gradient for it
        gradients = one.own[makers] & ~graph.is_source[makers]
        ends = np.stack([makers, updates[places]], axis=1)[gradients]
        ends = ends[~np.isin(ends[:, 1], indirect)]
        return np.concatenate([readers[~np.isin(readers[:, 1], ends[:, 1])], ends])


def _without(pairs: Int64, left_out: NDArray[np.integer]) -> Int64:
    """The rows of `pairs` that are no row of `left_out`."""
    size = 1 + max(int(pairs.max(initial=0)), int(left_out.max(initial=0)))
    return pairs[~np.isin(pairs @ (size, 1), left_out.astype(np.int64) @ (size, 1))]
