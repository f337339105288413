"""Makes the graph of a step over M micro-batches from the graph of one micro-batch's training step.

    micro.0/  input ─► forward ─► loss ─► backward ──────────────────┐
    micro.1/  input ─► forward ─► loss ─► backward ─► accumulate ◄───┤
    micro.2/  input ─► forward ─► loss ─► backward ─► accumulate ◄───┘  ─► the one update

The parameters are updated once, by the mean of the M gradients, as after `loss / M` was
backpropagated M times. Buffers that a step writes, such as the running statistics of batch norm,
are written once for each micro-batch, in order, so micro-batch k reads what k - 1 wrote.

With stages (see `plans.Pipelining`) two things change, and neither changes what is computed:

* *Recomputation* (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
  https://arxiv.org/abs/1604.06174): the backward ops of a recomputing stage read copies of its
  forward ops, "micro.k/NAME/again", which run right before them. So what the forward ops make is
  freed, but for what other stages read, and what the stage gets from others stays. Random draws are
  repeated. Ops that read a buffer that the step writes are not repeated.
* *A sum of gradients of several stages*, that of a parameter which they share (tied weights), is
  taken once, over the accumulated parts, instead of once for each micro-batch.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ReplicationError, UsageError
from dovetail.graph.records import (
    Bool,
    Graph,
    Int64,
    Phase,
    csr_offsets,
    gather,
    select_columns,
)
from dovetail.graph.replicate import AVERAGE, FLOATING, MOST_OPS, Replica, dense_strides

ACCUMULATE = "dovetail.accumulate"
"""The kind of an op that adds a micro-batch's gradient to those of the micro-batches before it."""
ADD = "aten.add"
"""The kind of an op that may sum gradients of several stages."""
_OWN = re.compile(r"^micro\.[0-9]+/")
"""Begins the name of what a micro-batch has for itself: "micro.2/lstm.0/addmm"."""

# What a row of the new graph stands for: `MicroBatchRows.kinds`.
SHARED, COPY, AGAIN, SUM, MEAN = range(5)


class MicroBatchRows(NamedTuple):
    """Columns [ops] of the new graph: what each op stands for.

    kinds     SHARED: an op that runs once; COPY: a micro-batch's own op; AGAIN: the same op,
              recomputed; SUM: an accumulation; MEAN: the mean of an output of all micro-batches
    origins   the op of one micro-batch that it is or copies; -1: a SUM or MEAN
    micro     the micro-batch; -1 for SHARED and MEAN
    summed    the tensor of one micro-batch that a SUM or MEAN is of; -1: none
    """

    kinds: Int64
    origins: Int64
    micro: Int64
    summed: Int64


def is_of_first_micro_batch(graph: Graph) -> Bool:
    """Return [ops] False for what another micro-batch than the first has for itself, and for ops
    that are computed again. In a graph without micro-batches it is True."""
    is_first = np.ones(len(graph), dtype=bool)
    for op, (name, module) in enumerate(zip(graph.names, graph.modules, strict=True)):
        own = _OWN.match(name)
        # A module may be named micro, too, where there are none.
        if own is not None and not name.startswith(f"{module}/"):
            is_first[op] = own[0] == "micro.0/" and not name.endswith("/again")
    return is_first


@dataclass(frozen=True, eq=False)
class MicroBatched:
    """The graph of all micro-batches, and what each of its ops stands for in one's graph."""

    graph: Graph
    micro_batches: int
    rows: MicroBatchRows


def micro_batched(
    graph: Graph,
    micro_batches: int,
    stages: NDArray[np.integer] | None = None,
    recompute: NDArray[np.bool_] | None = None,
) -> MicroBatched:
    """Return the graph of `micro_batches` micro-batches of `graph`, a training step of one.

    stages      [ops of `graph`] the stage of each; None: no stages
    recompute   [stages] True for stages that recompute their forward ops; None: none does

    Sources come first, then micro-batch after micro-batch, then the means of outputs such as the
    loss, and the updates. Takes O(micro_batches x (ops + tensors + reads)).

    Raises `UsageError` for fewer than two micro-batches, and `ReplicationError` for a graph that
    trains nothing, returns no loss, or updates anything by what is no floating-point gradient.
    """
    if micro_batches < 2:
        raise UsageError("micro_batches", f"is {micro_batches}; use 2 or more")
    if micro_batches * len(graph) > MOST_OPS:
        raise UsageError(
            "micro_batches",
            f"{micro_batches} micro-batches of {len(graph)} ops are more than {MOST_OPS} ops, "
            f"which is the limit; use at most {max(MOST_OPS // max(len(graph), 1), 1)}",
        )
    replica = Replica(graph)
    # Micro-batches of towers would average every micro-batch's gradients; towers of micro-batches
    # do so once a step.
    replica.check("micro-batches", own=("tower", "micro"))
    copies = _Copies(replica, micro_batches, stages, recompute)
    return MicroBatched(_graph(copies), micro_batches, copies.rows)


@dataclass(frozen=True, eq=False)
class _Copies:
    """The places that the ops and tensors of one micro-batch have in the new graph."""

    replica: Replica
    count: int
    stages: NDArray[np.integer] | None
    recompute: NDArray[np.bool_] | None

    @property
    def graph(self) -> Graph:
        return self.replica.graph

    @cached_property
    def runs(self) -> Bool:
        """[ops] True for ops that every micro-batch runs: forward, backward, updates of buffers."""
        own = (self.replica.own & ~self.graph.is_source) | self.replica.buffer_updates
        return np.asarray(own & ~self.summed_once)

    @cached_property
    def parameter_updates(self) -> Bool:
        return np.asarray(self.replica.updates & ~self.replica.buffer_updates)

    @cached_property
    def summed_once(self) -> Bool:
        """[ops] True for sums of gradients that are taken once, over the accumulated parts: of
        gradients of different stages, if only updates and other such sums read the result."""
        graph, once = self.graph, np.zeros(len(self.graph), dtype=bool)
        if self.stages is None:
            return once
        for op in reversed(np.flatnonzero(sums_of_gradients(graph)).tolist()):
            (result,) = graph.outputs_of(op)
            readers = graph.consumers_of(result)
            is_last = bool((self.parameter_updates | once)[readers].all())
            once[op] = is_last and self._differ(graph.producers[graph.inputs_of(op)])
        return once

    def _differ(self, makers: NDArray[np.integer]) -> bool:
        """True if these ops, or the parts of sums that they are, belong to several stages."""
        assert self.stages is not None
        seen: set[int] = set()
        todo = makers.tolist()
        while todo and len(seen) < 2:
            op = todo.pop()
            if self.graph.kinds[op] == ADD:
                parts = self.graph.producers[self.graph.inputs_of(op)]
                todo += parts[self.graph.phases[parts] == Phase.BACKWARD].tolist()
            seen.add(int(self.stages[op]))
        return len(seen) > 1

    @cached_property
    def gradients(self) -> Int64:
        """The tensors of one micro-batch that are accumulated, ascending."""
        graph = self.graph
        once = self.parameter_updates | self.summed_once
        producers = graph.producers[graph.input_tensors]
        taken = once[graph.readers] & self.runs[producers] & ~self.replica.buffer_updates[producers]
        gradients = np.unique(graph.input_tensors[taken]).astype(np.int64)
        for tensor in gradients.tolist():
            if graph.dtypes[tensor] not in FLOATING:
                name = graph.names[graph.producers[tensor]]
                raise ReplicationError(
                    f"op {name!r} makes {graph.dtypes[tensor]} numbers for an update, and only "
                    "floating-point gradients can be accumulated",
                    name,
                )
        return gradients

    @cached_property
    def again(self) -> Bool:
        """[ops] True for the forward ops that recomputing stages repeat."""
        graph, again = self.graph, np.zeros(len(self.graph), dtype=bool)
        if self.stages is None or self.recompute is None or not self.recompute.any():
            return again
        chosen = self.recompute[np.maximum(self.stages, 0)] & (self.stages >= 0)
        may = chosen & (graph.phases == Phase.FORWARD)
        # What reads a written buffer would read a later value than it did first.
        first_writers = self.replica.first_writers
        reads_buffer = first_writers[graph.storages[graph.input_tensors]] >= 0
        of_buffers = np.zeros(graph.tensors, dtype=bool)
        of_buffers[graph.storages[self._written_buffers]] = True
        bad = reads_buffer & of_buffers[graph.storages[graph.input_tensors]]
        may[graph.readers[bad]] = False
        # Repeated ops stand before the first backward op of their stage.
        begins = np.full(int(self.stages.max(initial=0)) + 1, len(graph), dtype=np.int64)
        backward_ops = np.flatnonzero(graph.phases == Phase.BACKWARD)
        np.minimum.at(begins, self.stages[backward_ops], backward_ops)
        may &= np.arange(len(graph)) < begins[np.maximum(self.stages, 0)]
        may[self.replica.only_for_buffers] = False
        offsets, producers = graph.input_offsets.tolist(), graph.producers[graph.input_tensors]
        needed = np.zeros(len(graph), dtype=bool)
        backward = (graph.phases == Phase.BACKWARD)[graph.readers]
        makers = graph.producers[graph.input_tensors]
        same = self.stages[graph.readers] == self.stages[makers]
        needed[makers[backward & same]] = True
        needed &= may
        for op in reversed(np.flatnonzero(may).tolist()):
            if not needed[op]:
                continue
            befores = producers[offsets[op] : offsets[op + 1]]
            befores = befores[may[befores] & (self.stages[befores] == self.stages[op])]
            needed[befores] = True
        return needed

    @cached_property
    def _written_buffers(self) -> Int64:
        """The tensors of buffers that updates of buffers write over."""
        graph = self.graph
        written = graph.overwrites & self.replica.buffer_updates[graph.producers]
        sources = graph.is_source[graph.producers]
        storages = np.zeros(graph.tensors, dtype=bool)
        storages[graph.storages[written]] = True
        return np.flatnonzero(sources & storages[graph.storages])

    @cached_property
    def rows(self) -> MicroBatchRows:
        """The rows of the new graph, in topological order."""
        graph, replica = self.graph, self.replica
        shared = np.flatnonzero(graph.is_source & ~replica.own)
        inputs = np.flatnonzero(graph.is_source & replica.own)
        kinds, origins, summed = self._section
        first = kinds != SUM
        once = np.flatnonzero(self.parameter_updates | self.summed_once)
        parts = [_rows(SHARED, shared)]
        parts += [_rows(COPY, inputs, k) for k in range(self.count)]
        for k in range(self.count):
            kept = first if k == 0 else np.ones(len(kinds), dtype=bool)
            size = int(kept.sum())
            parts.append(MicroBatchRows(kinds[kept], origins[kept], np.full(size, k), summed[kept]))
        means = np.array(replica.returned, dtype=np.int64)
        none = np.full(len(means), -1)
        parts.append(MicroBatchRows(np.full(len(means), MEAN), none, none, means))
        parts.append(_rows(SHARED, once))
        return MicroBatchRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @cached_property
    def _section(self) -> tuple[Int64, Int64, Int64]:
        """(kinds, origins, summed) of what one micro-batch runs, in order."""
        graph = self.graph
        entries: list[tuple[int, int, int, int, int]] = []
        waits: dict[int, int] = {}
        for before, after in graph.control.tolist():
            waits[after] = max(waits.get(after, -1), before)
        for op in np.flatnonzero(self.runs).tolist():
            at = op
            if self.replica.buffer_updates[op]:
                # Right behind what it waits for, and not behind the whole backward pass.
                needs = [waits.get(op, -1), *graph.producers[graph.inputs_of(op)].tolist()]
                places = [e for e in needs if self.runs[e] and not self.replica.buffer_updates[e]]
                at = max(places, default=op)
            entries.append((at, 0 if at == op else 1, op, COPY, -1))
        for tensor in self.gradients.tolist():
            entries.append((int(graph.producers[tensor]), 2, tensor, SUM, tensor))
        again = np.flatnonzero(self.again)
        if len(again):
            assert self.stages is not None
            backward = np.flatnonzero((graph.phases == Phase.BACKWARD) & self.runs)
            begins: dict[int, int] = {}
            for op in backward.tolist():
                begins.setdefault(int(self.stages[op]), op)
            entries += [(begins[int(self.stages[op])], -1, op, AGAIN, -1) for op in again.tolist()]
        entries.sort()
        columns = np.array(entries, dtype=np.int64).reshape(-1, 5).T
        _, _, which, kinds, summed = columns
        return kinds, np.where(kinds == SUM, -1, which), summed

    # Where ops and tensors are

    @cached_property
    def producers(self) -> Int64:
        """[tensors] the new op that makes each tensor."""
        counts = np.diff(self.graph.output_offsets).astype(np.int64)[self.rows.origins]
        counts[self.rows.origins < 0] = 1
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def stands_for(self) -> Int64:
        """[tensors] the tensor of one micro-batch that each tensor copies, sums or averages."""
        tensors = self.rows.summed[self.producers]
        copied = self.rows.origins[self.rows.origins >= 0]
        tensors[tensors < 0] = gather(self.graph.output_offsets, copied)[1]
        return tensors

    @cached_property
    def first(self) -> Int64:
        """[ops + 1] the first tensor of each op."""
        return csr_offsets(self.producers, len(self.rows.origins)).astype(np.int64)

    def _places(self, kind: int) -> Int64:
        """[micro-batches, ops of one] the new index of each op's row of that kind; -1: none."""
        kinds, origins, micro, _ = self.rows
        places = np.full((self.count, len(self.graph)), -1, dtype=np.int64)
        found = np.flatnonzero(kinds == kind)
        places[micro[found], origins[found]] = found
        return places

    @cached_property
    def places(self) -> Int64:
        """[micro-batches, ops of one] the new index of each op; shared ops have one index."""
        kinds, origins, _, _ = self.rows
        places = self._places(COPY)
        shared = np.flatnonzero(kinds == SHARED)
        places[:, origins[shared]] = shared
        return places

    def _tensors(self, places: Int64) -> Int64:
        graph = self.graph
        of_tensor = places[:, graph.producers]
        within = np.arange(graph.tensors) - graph.output_offsets[graph.producers]
        return np.where(of_tensor >= 0, self.first[of_tensor] + within, -1)

    @cached_property
    def tensors(self) -> Int64:
        """[micro-batches, tensors of one] the new tensor of each micro-batch."""
        return self._tensors(self.places)

    @cached_property
    def repeated(self) -> Int64:
        """[micro-batches, tensors of one] its recomputed copy; -1: none."""
        return self._tensors(self._places(AGAIN))

    @cached_property
    def sums(self) -> Int64:
        """[micro-batches, tensors of one] the sum of the gradients up to each micro-batch; for the
        first the gradient itself, and -1 for what is no gradient."""
        kinds, _, micro, summed = self.rows
        sums = np.full((self.count, self.graph.tensors), -1, dtype=np.int64)
        found = np.flatnonzero(kinds == SUM)
        sums[micro[found], summed[found]] = self.first[found]
        sums[0, self.gradients] = self.tensors[0, self.gradients]
        return sums

    @cached_property
    def latest_buffers(self) -> Int64:
        """[tensors of one] for a buffer's tensor the value that a micro-batch writes; else -1."""
        graph = self.graph
        latest = np.full(graph.tensors, -1, dtype=np.int64)
        written = np.flatnonzero(graph.overwrites & self.replica.buffer_updates[graph.producers])
        by_storage = np.full(graph.tensors, -1, dtype=np.int64)
        np.maximum.at(by_storage, graph.storages[written], written)
        buffers = self._written_buffers
        latest[buffers] = by_storage[graph.storages[buffers]]
        return latest

    @cached_property
    def reads(self) -> tuple[Int64, Int64]:
        """CSR (offsets [ops + 1], tensors) of what each new op reads, in its origin's order."""
        kinds, origins, micro, summed = self.rows
        graph = self.graph
        counts = np.diff(graph.input_offsets).astype(np.int64)[origins]
        counts[kinds == SUM] = 2
        counts[kinds == MEAN] = self.count
        offsets = np.concatenate([[0], np.cumsum(counts)])
        reads = np.empty(int(offsets[-1]), dtype=np.int64)
        copied = np.flatnonzero(origins >= 0)
        at, entries = gather(graph.input_offsets, origins[copied])
        tensors = graph.input_tensors[entries]
        row = copied[at]
        view = np.maximum(micro[row], 0)
        taken = self.tensors[view, tensors]
        # The old value of a buffer is what the micro-batch before wrote.
        written = self.latest_buffers[tensors]
        later = (written >= 0) & (view > 0)
        taken[later] = self.tensors[view[later] - 1, written[later]]
        if self.again.any():
            repeated = self.repeated[view, tensors]
            assert self.stages is not None
            # Only the stage's own backward ops, and its repeated ops, read what is repeated.
            phase = graph.phases[origins[row]]
            reader = (kinds[row] == AGAIN) | (phase == Phase.BACKWARD)
            same = self.stages[origins[row]] == self.stages[graph.producers[tensors]]
            swaps = (repeated >= 0) & reader & same
            taken[swaps] = repeated[swaps]
        if len(self.gradients):
            accumulated = np.zeros(graph.tensors, dtype=bool)
            accumulated[self.gradients] = True
            once = (kinds[row] == SHARED) & accumulated[tensors]
            taken[once] = self.sums[-1, tensors[once]]
        begins = offsets[:-1][copied][at] + (
            np.arange(len(at))
            - np.repeat(np.cumsum(counts[copied]) - counts[copied], counts[copied])
        )
        reads[begins] = taken
        added = np.flatnonzero(kinds == SUM)
        reads[offsets[added]] = self.sums[micro[added] - 1, summed[added]]
        reads[offsets[added] + 1] = self.tensors[micro[added], summed[added]]
        for op in np.flatnonzero(kinds == MEAN).tolist():
            reads[offsets[op] : offsets[op + 1]] = self.tensors[:, summed[op]]
        return offsets, reads

    @cached_property
    def control(self) -> Int64:
        """[edges, 2] control edges: those of each micro-batch, and one from each recomputed op that
        reads a parameter to the parameter's update."""
        before, after = self.graph.control.astype(np.int64).T
        pairs = [np.stack([places[before], places[after]], axis=1) for places in self.places]
        if self.again.any():
            graph = self.graph
            writers = self.replica.first_writers[graph.storages[graph.input_tensors]]
            waits = self.again[graph.readers] & (writers >= 0)
            readers, updates = graph.readers[waits], writers[waits]
            again = self._places(AGAIN)
            pairs += [
                np.stack([again[k, readers], self.places[k, updates]], axis=1)
                for k in range(self.count)
            ]
        edges = np.concatenate(pairs)
        return np.unique(edges[(edges >= 0).all(axis=1)], axis=0)


def names_in_one(graph: Graph) -> tuple[str, ...]:
    """Return [ops] the name that each op has in one micro-batch's graph; its own in a graph without
    micro-batches, and for accumulations."""
    if ACCUMULATE not in graph.kinds:
        return graph.names
    return tuple(_OWN.sub("", name).removesuffix("/again") for name in graph.names)


def sums_of_gradients(graph: Graph) -> Bool:
    """Return [ops] True for ops that add two gradients for an update, or for another such op.

    With some stages they run once a step, and with others once for each micro-batch.
    """
    sums = np.zeros(len(graph), dtype=bool)
    updates = graph.phases == Phase.UPDATE
    outputs = set(graph.outputs.tolist())
    for op in reversed(np.flatnonzero(graph.phases == Phase.BACKWARD).tolist()):
        parts = graph.inputs_of(op)
        if graph.kinds[op] != ADD or len(parts) != 2:
            continue
        (result,) = graph.outputs_of(op)
        readers = graph.consumers_of(result)
        sums[op] = (
            all(graph.shapes[part] == graph.shapes[result] for part in parts.tolist())
            and result not in outputs
            and len(readers) > 0
            and bool((updates | sums)[readers].all())
            and bool((graph.phases[graph.producers[parts]] == Phase.BACKWARD).all())
        )
    return sums


def _rows(kind: int, ops: NDArray[np.integer], micro: int = -1) -> MicroBatchRows:
    size = len(ops)
    return MicroBatchRows(
        np.full(size, kind), ops.astype(np.int64), np.full(size, micro), np.full(size, -1)
    )


def _graph(copies: _Copies) -> Graph:
    graph, rows = copies.graph, copies.rows
    kinds, origins, micro, summed = rows
    added = origins < 0
    stands_for, producers = copies.stands_for, copies.producers
    elements = np.array([math.prod(shape) for shape in graph.shapes], dtype=np.int64)
    terms = np.where(kinds == MEAN, copies.count, 2)
    offsets, reads = copies.reads
    gradients = graph.gradient_of[origins]
    is_sum = added[producers]
    strides = {
        tensor: dense_strides(graph.shapes[tensor], graph.strides[tensor])
        for tensor in set(summed[added].tolist())
    }
    columns = select_columns(graph, origins, stands_for)
    columns |= dict(
        names=_names(copies),
        kinds=tuple(
            graph.kinds[o] if o >= 0 else AVERAGE if kind == MEAN else ACCUMULATE
            for o, kind in zip(origins.tolist(), kinds.tolist(), strict=True)
        ),
        signatures=_signatures(copies, strides),
        modules=tuple(
            graph.modules[o if o >= 0 else int(graph.producers[t])]
            for o, t in zip(origins.tolist(), summed.tolist(), strict=True)
        ),
        phases=np.where(
            added, np.where(kinds == MEAN, Phase.FORWARD, Phase.BACKWARD), graph.phases[origins]
        ),
        flops=np.where(added, (terms - 1) * elements[summed], graph.flops[origins]),
        accessed_bytes=np.where(
            added, (terms + 1) * graph.tensor_bytes[summed], graph.accessed_bytes[origins]
        ),
        colocation=np.where(added, -1, graph.colocation[origins]),
        gradient_of=np.where(
            added | (gradients < 0) | (kinds == AGAIN),
            -1,
            copies.places[np.maximum(micro, 0), gradients],
        ),
        device_kinds=tuple(() if o < 0 else graph.device_kinds[o] for o in origins.tolist()),
        producers=producers.astype(np.int32),
        strides=tuple(
            strides[t] if of_sum else graph.strides[t]
            for t, of_sum in zip(stands_for.tolist(), is_sum.tolist(), strict=True)
        ),
        storages=_storages(copies).astype(np.int32),
        overwrites=graph.overwrites[stands_for] & ~is_sum,
        input_offsets=offsets.astype(np.int32),
        input_tensors=reads.astype(np.int32),
        outputs=_outputs(copies).astype(np.int32),
        control=copies.control.astype(np.int32),
    )
    return Graph(**columns)


def _names(copies: _Copies) -> tuple[str, ...]:
    graph = copies.graph
    labels = copies.replica.labels
    names, taken = [], set()
    for kind, origin, micro, summed in zip(*(c.tolist() for c in copies.rows), strict=True):
        if kind == SHARED:
            name = graph.names[origin]
        elif kind == COPY:
            name = f"micro.{micro}/{graph.names[origin]}"
        elif kind == AGAIN:
            name = f"micro.{micro}/{graph.names[origin]}/again"
        elif kind == MEAN:
            name = "average/loss"
        else:
            label = labels[summed][0] if summed in labels else graph.names[graph.producers[summed]]
            name = f"accumulate.{micro}/{label}"
        while name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _signatures(copies: _Copies, strides: dict[int, tuple[int, ...]]) -> tuple[str, ...]:
    """Return [ops] signatures. Of two accumulations that call the same on like tensors they are
    equal."""
    graph, last = copies.graph, copies.count - 1
    signatures = []
    for kind, origin, micro, summed in zip(*(c.tolist() for c in copies.rows), strict=True):
        if origin >= 0:
            relaid = kind == SHARED and any(
                graph.strides[t] != strides.get(t, graph.strides[t])
                for t in graph.inputs_of(origin).tolist()
            )
            signatures.append(graph.signatures[origin] + " of a dense mean" * relaid)
            continue
        shape, given, dense = (
            "x".join(map(str, sizes))
            for sizes in (graph.shapes[summed], graph.strides[summed], strides[summed])
        )
        tensor = f"{graph.dtypes[summed]}[{shape}]({given})"
        if kind == MEAN:
            signatures.append(f"{AVERAGE}({copies.count} x {tensor})")
            continue
        scale = f", /{copies.count}" if micro == last else ""
        into = "new" if micro == 1 else "into"
        signatures.append(f"{ACCUMULATE}({into} ({dense}), {tensor}{scale})")
    return tuple(signatures)


def _storages(copies: _Copies) -> Int64:
    """Return [tensors] storages: one for what micro-batches share, one for each micro-batch's own
    and for what it repeats, and one for all sums of a gradient."""
    replica, graph, count = copies.replica, copies.graph, copies.graph.tensors
    kinds, _, micro, _ = copies.rows
    producers = copies.producers
    storages = graph.storages[copies.stands_for].astype(np.int64)
    shared = replica.shared_storages[storages]
    kind, of_micro = kinds[producers], np.maximum(micro[producers], 0)
    own = 1 + 2 * of_micro + (kind == AGAIN)
    storages += np.where(shared | (kind == SHARED), 0, count * own)
    sums = np.flatnonzero(kind == SUM)
    storages[sums] = count * (2 * copies.count + 1) + copies.stands_for[sums]
    means = np.flatnonzero(kind == MEAN)
    storages[means] = count * (2 * copies.count + 2) + np.arange(len(means))
    _follow_bases(copies, storages)
    return np.unique(storages, return_inverse=True)[1].reshape(-1)


def _follow_bases(copies: _Copies, storages: Int64) -> None:
    """Give each view the storage of the base that it now reads: what was repeated or summed in
    place of what the op of one micro-batch read."""
    graph = copies.graph
    offsets, reads = copies.reads
    place = np.full(graph.tensors, -1, dtype=np.int64)
    for tensor in np.flatnonzero((graph.bases >= 0) & ~graph.overwrites).tolist():
        inputs = graph.inputs_of(int(graph.producers[tensor])).tolist()
        place[tensor] = inputs.index(int(graph.bases[tensor]))
    is_copy = copies.rows.origins[copies.producers] >= 0
    views = np.flatnonzero(is_copy & (place[copies.stands_for] >= 0))
    bases = reads[offsets[copies.producers[views]] + place[copies.stands_for[views]]]
    # A view of a view is settled a round after it.
    while (storages[views] != storages[bases]).any():
        storages[views] = storages[bases]


def _outputs(copies: _Copies) -> Int64:
    """Return the outputs: the mean of a floating-point output, every micro-batch's own for another
    dtype, and the last value of what an update writes."""
    graph, replica = copies.graph, copies.replica
    kinds, _, _, summed = copies.rows
    means = {
        int(summed[op]): int(copies.first[op]) for op in np.flatnonzero(kinds == MEAN).tolist()
    }
    outputs: list[int] = []
    for tensor in graph.outputs.tolist():
        if tensor in means:
            outputs.append(means[tensor])
        elif replica.own[graph.producers[tensor]]:
            outputs += copies.tensors[:, tensor].tolist()
        else:
            outputs.append(int(copies.tensors[-1, tensor]))
    return np.array(outputs, dtype=np.int64)


def changes_of(
    graph: Graph,
    micro_batches: int,
    stages: NDArray[np.integer],
    recompute: NDArray[np.bool_],
) -> bytes:
    """Return a key that is equal for stages with which `micro_batched` makes equal graphs."""
    copies = _Copies(Replica(graph), micro_batches, stages, recompute)
    # Where repeated ops stand depends on the stages, not only on which ops they are.
    where = stages.tobytes() if copies.again.any() else b""
    return copies.again.tobytes() + copies.summed_once.tobytes() + where
