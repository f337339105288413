"""Makes the graph of several copies of a training step, which share its parameters.

    copy 0   input ─► forward ─► loss ─► backward ─┐
    copy 1   input ─► forward ─► loss ─► backward ─┼─► mean or sum of the gradients ─► one update
    copy 2   input ─► forward ─► loss ─► backward ─┘

Data-parallel towers and micro-batches are such copies (`towers`, `micro_batches`). Each says which
ops the new graph has, in order, and what each stands for: its `Rows`. Where every op and tensor of
the single step is in the new graph, and what a copy reads, follows from the rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ReplicationError, UsageError
from dovetail.graph.copies import ACCUMULATE, AVERAGE, WRITTEN
from dovetail.graph.records import Bool, Graph, Int64, Phase, csr_offsets, gather, select_columns

MOST_OPS = 2**20
"""A graph of copies has at most so many ops, which take a gigabyte."""
FLOATING = ("float16", "bfloat16", "float32", "float64")

# What a row of the new graph stands for: `Rows.kinds`.
SHARED, COPY, AGAIN, SUM, MEAN, RESULT = range(6)
_PHASES = {SUM: Phase.BACKWARD, MEAN: Phase.UPDATE, RESULT: Phase.FORWARD}


class Rows(NamedTuple):
    """Columns [ops] of the new graph: what each op stands for.

    kinds     SHARED: an op that runs once; COPY: a copy's own op; AGAIN: the same op, recomputed;
              SUM: a copy's gradient, added to those of the copies before it; MEAN: the mean of the
              gradients of all copies; RESULT: the mean of an output, such as the loss
    origins   the op of the single step that it is or copies; -1: a SUM, MEAN or RESULT
    copies    the copy that it belongs to; -1 for SHARED, MEAN and RESULT
    reduced   the tensor of the single step that a SUM, MEAN or RESULT is of; -1: none
    """

    kinds: Int64
    origins: Int64
    copies: Int64
    reduced: Int64


def rows_of_ops(kind: int, ops: NDArray[np.integer], copy: int = -1) -> Rows:
    """Return the rows of `ops` for one copy or, with -1, for all."""
    size = len(ops)
    return Rows(np.full(size, kind), ops.astype(np.int64), np.full(size, copy), np.full(size, -1))


def rows_of_tensors(kind: int, tensors: Sequence[int]) -> Rows:
    """Return the rows of a MEAN or RESULT of each tensor."""
    none = np.full(len(tensors), -1)
    return Rows(np.full(len(tensors), kind), none, none, np.array(tensors, np.int64))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, one after another."""
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def check_count(option: str, what: str, count: int, graph: Graph) -> None:
    """Raise `UsageError` for fewer than two copies, and for more than a graph can hold."""
    if count < 2:
        raise UsageError(option, f"is {count}; use 2 or more")
    if count * len(graph) > MOST_OPS:
        raise UsageError(
            option,
            f"{count} {what} of {len(graph)} ops are more than {MOST_OPS} ops, which is the "
            f"limit; use at most {max(MOST_OPS // max(len(graph), 1), 1)}",
        )


@dataclass(frozen=True, eq=False)
class Replica:
    """The graph of one training step, and which of its ops and storages its copies share.

    Arrays over storages have `graph.tensors` entries, since ids of storages are below that.
    """

    graph: Graph

    @cached_property
    def updates(self) -> Bool:
        """[ops] True for ops of phase UPDATE."""
        return np.asarray(self.graph.phases == Phase.UPDATE)

    @cached_property
    def own(self) -> Bool:
        """[ops] True for what every copy has for itself: inputs, forward and backward ops."""
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
        """[ops] True for a copy's own ops whose results only updates of buffers need."""
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
        """The outputs whose means the step of all copies returns, such as the loss."""
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


@dataclass(frozen=True, eq=False)
class Replicated:
    """The graph of several copies, and what each of its ops stands for in the single step's graph.
    A copy has its inputs and outputs in its origin's order, tensor for tensor."""

    graph: Graph
    count: int
    rows: Rows


@dataclass(frozen=True, eq=False)
class Copying(ABC):
    """The places that the ops and tensors of the single step have in the graph of `count` copies.

    `made` returns that graph. The abstract members are what towers and micro-batches do otherwise.
    """

    replica: Replica
    count: int

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """The rows of the new graph in topological order."""

    @abstractmethod
    def reads_of_copies(self, rows: Int64, tensors: Int64) -> Int64:
        """Return [reads] the tensors that ops of the new graph read in place of `tensors`.

        rows      [reads] the op of the new graph, which stands for an op of the single step
        tensors   [reads] what the op of the single step reads
        """

    @property
    @abstractmethod
    def control(self) -> Int64:
        """[edges, 2] control edges."""

    @abstractmethod
    def name_of(self, kind: int, origin: int, copy: int, reduced: int) -> tuple[str, str]:
        """Return (name, module) of a row."""

    @property
    @abstractmethod
    def colocation(self) -> Int64:
        """[ops] ids of ops that share a device; -1: free."""

    @property
    @abstractmethod
    def blocks(self) -> Int64:
        """[tensors] 0 for a tensor whose storage all copies share; else the same number for those
        whose storages are those of one copy."""

    mean_flops = 0
    """FLOPs per element of a mean, beside one for each copy."""

    @property
    def single(self) -> Graph:
        """The graph of the single step."""
        return self.replica.graph

    @cached_property
    def views(self) -> Int64:
        """[ops] the copy whose tensors the op reads; copy 0 for a shared op."""
        return np.maximum(self.rows.copies, 0)

    @cached_property
    def producers(self) -> Int64:
        """[tensors] the new op that makes each tensor."""
        counts = np.diff(self.single.output_offsets).astype(np.int64)[self.rows.origins]
        counts[self.rows.origins < 0] = 1
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def stands_for(self) -> Int64:
        """[tensors] the tensor of the single step that each tensor copies, sums or averages."""
        tensors = self.rows.reduced[self.producers]
        copied = self.rows.origins[self.rows.origins >= 0]
        tensors[tensors < 0] = gather(self.single.output_offsets, copied)[1]
        return tensors

    @cached_property
    def first(self) -> Int64:
        """[ops + 1] the first tensor of each op."""
        return csr_offsets(self.producers, len(self.rows.origins)).astype(np.int64)

    def places_of(self, kind: int) -> Int64:
        """Return [copies, ops of the single step] the new index of each op's row of that kind; -1:
        it has none."""
        places = np.full((self.count, len(self.single)), -1, dtype=np.int64)
        ops = np.flatnonzero(self.rows.kinds == kind)
        places[self.rows.copies[ops], self.rows.origins[ops]] = ops
        return places

    @cached_property
    def places(self) -> Int64:
        """[copies, ops of the single step] the new index of each op; shared ops have one index."""
        places = self.places_of(COPY)
        shared = np.flatnonzero(self.rows.kinds == SHARED)
        places[:, self.rows.origins[shared]] = shared
        return places

    def tensors_at(self, places: Int64) -> Int64:
        """Return [copies, tensors of the single step] the tensors of ops at these places; -1 where
        there is none."""
        graph = self.single
        of_tensor = places[:, graph.producers]
        within = np.arange(graph.tensors) - graph.output_offsets[graph.producers]
        return np.where(of_tensor >= 0, self.first[of_tensor] + within, -1)

    @cached_property
    def tensors(self) -> Int64:
        """[copies, tensors of the single step] the new tensor of each copy; -1: none."""
        return self.tensors_at(self.places)

    def reduced_by(self, kind: int) -> Int64:
        """Return [tensors of the single step] the new tensor that is its MEAN or RESULT; -1: it has
        none."""
        ops = np.flatnonzero(self.rows.kinds == kind)
        means = np.full(self.single.tensors, -1, dtype=np.int64)
        means[self.rows.reduced[ops]] = self.first[ops]
        return means

    @cached_property
    def sums(self) -> Int64:
        """[copies, tensors of the single step] the sum of the gradients up to each copy; for the
        first the gradient itself, and -1 for what is not summed."""
        kinds, _, copies, reduced = self.rows
        sums = np.full((self.count, self.single.tensors), -1, dtype=np.int64)
        ops = np.flatnonzero(kinds == SUM)
        sums[copies[ops], reduced[ops]] = self.first[ops]
        summed = np.unique(reduced[ops])
        sums[0, summed] = self.tensors[0, summed]
        return sums

    @cached_property
    def reads(self) -> tuple[Int64, Int64]:
        """CSR (offsets [ops + 1], tensors) of what each new op reads, in its origin's order."""
        kinds, origins, copies, reduced = self.rows
        graph = self.single
        is_mean, is_sum = (kinds == MEAN) | (kinds == RESULT), kinds == SUM
        counts = np.diff(graph.input_offsets).astype(np.int64)[origins]
        counts[is_mean], counts[is_sum] = self.count, 2
        offsets = np.concatenate([[0], np.cumsum(counts)])
        reads = np.empty(int(offsets[-1]), dtype=np.int64)
        reads[np.repeat(is_mean, counts)] = self.tensors[:, reduced[is_mean]].T.ravel()
        ops = np.flatnonzero(is_sum)
        reads[offsets[ops]] = self.sums[copies[ops] - 1, reduced[ops]]
        reads[offsets[ops] + 1] = self.tensors[copies[ops], reduced[ops]]
        copied = np.flatnonzero(origins >= 0)
        places, entries = gather(graph.input_offsets, origins[copied])
        reads[np.repeat(origins >= 0, counts)] = self.reads_of_copies(
            copied[places], graph.input_tensors[entries].astype(np.int64)
        )
        return offsets, reads

    def made(self) -> Replicated:
        """Return the graph of all copies."""
        graph, (kinds, origins, _, reduced) = self.single, self.rows
        added, stands_for, producers = origins < 0, self.stands_for, self.producers
        elements = np.array([math.prod(shape) for shape in graph.shapes], dtype=np.int64)
        # A sum has two terms, and a mean one of each copy.
        terms = np.where(kinds == SUM, 2, self.count)
        flops = np.where(kinds == SUM, 1, self.count + self.mean_flops)
        offsets, reads = self.reads
        strides = {
            tensor: dense_strides(graph.shapes[tensor], graph.strides[tensor])
            for tensor in set(reduced[added].tolist())
        }
        # Equal signatures must cost the same. So where summing or averaging changes the layout of a
        # gradient, the signatures of the updates that read it change too.
        changed = {tensor for tensor, dense in strides.items() if dense != graph.strides[tensor]}
        names, modules, signatures, taken = [], [], [], set(graph.names)
        for kind, origin, copy, tensor in zip(
            *(column.tolist() for column in self.rows), strict=True
        ):
            name, module = self.name_of(kind, origin, copy, tensor)
            if origin >= 0:
                relaid = (
                    bool(changed)
                    and kind == SHARED
                    and not changed.isdisjoint(graph.inputs_of(origin).tolist())
                )
                signature = graph.signatures[origin] + " of a dense mean" * relaid
            else:
                while name in taken:
                    name += "_"
                taken.add(name)
                shape, layout, dense = (
                    "x".join(map(str, sizes))
                    for sizes in (graph.shapes[tensor], graph.strides[tensor], strides[tensor])
                )
                gradient = f"{graph.dtypes[tensor]}[{shape}]({layout})"
                scale = f", /{self.count}" if copy == self.count - 1 else ""
                into = "new" if copy == 1 else "into"
                signature = f"{AVERAGE}({self.count} x {gradient})"
                if kind == SUM:
                    signature = f"{ACCUMULATE}({into} ({dense}), {gradient}{scale})"
            names.append(name)
            modules.append(module)
            signatures.append(signature)
        # The outputs are the mean of a floating-point output, every copy's own for another dtype,
        # and the last value of what an update writes.
        means, outputs = self.reduced_by(RESULT), list[int]()
        for tensor in graph.outputs.tolist():
            if means[tensor] >= 0:
                outputs.append(int(means[tensor]))
            elif self.replica.own[graph.producers[tensor]]:
                outputs += self.tensors[:, tensor].tolist()
            else:
                outputs.append(int(self.tensors[:, tensor].max()))
        gradients = graph.gradient_of[origins]
        columns = select_columns(graph, origins, stands_for)
        columns |= dict(
            names=tuple(names),
            kinds=tuple(
                graph.kinds[o] if o >= 0 else ACCUMULATE if kind == SUM else AVERAGE
                for o, kind in zip(origins.tolist(), kinds.tolist(), strict=True)
            ),
            signatures=tuple(signatures),
            modules=tuple(modules),
            phases=np.array(
                [
                    graph.phases[o] if o >= 0 else _PHASES[kind]
                    for o, kind in zip(origins.tolist(), kinds.tolist(), strict=True)
                ]
            ),
            flops=np.where(added, flops * elements[reduced], graph.flops[origins]),
            accessed_bytes=np.where(
                added, (terms + 1) * graph.tensor_bytes[reduced], graph.accessed_bytes[origins]
            ),
            colocation=self.colocation.astype(np.int32),
            gradient_of=np.where(
                added | (gradients < 0) | (kinds == AGAIN), -1, self.places[self.views, gradients]
            ),
            device_kinds=tuple(() if o < 0 else graph.device_kinds[o] for o in origins.tolist()),
            producers=producers.astype(np.int32),
            strides=tuple(
                strides[tensor] if is_reduced else graph.strides[tensor]
                for tensor, is_reduced in zip(
                    stands_for.tolist(), added[producers].tolist(), strict=True
                )
            ),
            storages=self._storages().astype(np.int32),
            overwrites=graph.overwrites[stands_for] & ~added[producers],
            input_offsets=offsets.astype(np.int32),
            input_tensors=reads.astype(np.int32),
            outputs=np.array(outputs, dtype=np.int32),
            control=self.control.astype(np.int32),
        )
        return Replicated(Graph(**columns), self.count, self.rows)

    def _storages(self) -> Int64:
        """[tensors] storages: one for what copies share, else one a copy; one for all sums of a
        gradient, and one for each mean."""
        tensors, kinds = self.single.tensors, self.rows.kinds[self.producers]
        storages = self.single.storages[self.stands_for].astype(np.int64) + tensors * self.blocks
        is_sum, is_mean = kinds == SUM, (kinds == MEAN) | (kinds == RESULT)
        storages[is_sum] = tensors * (2 * self.count + 1) + self.stands_for[is_sum]
        storages[is_mean] = tensors * (2 * self.count + 2) + np.arange(np.count_nonzero(is_mean))
        # A view has the storage of the base that it reads now, which may be a sum or a repeated op.
        graph, (offsets, reads) = self.single, self.reads
        place = np.full(graph.tensors, -1, dtype=np.int64)
        for tensor in np.flatnonzero((graph.bases >= 0) & ~graph.overwrites).tolist():
            inputs = graph.inputs_of(int(graph.producers[tensor])).tolist()
            place[tensor] = inputs.index(int(graph.bases[tensor]))
        is_copy = self.rows.origins[self.producers] >= 0
        views = np.flatnonzero(is_copy & (place[self.stands_for] >= 0))
        bases = reads[offsets[self.producers[views]] + place[self.stands_for[views]]]
        # A view of a view is settled a round after it.
        while (storages[views] != storages[bases]).any():
            storages[views] = storages[bases]
        return np.asarray(np.unique(storages, return_inverse=True)[1].reshape(-1))


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
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
