"""One replica's training step: which of its ops are a tower's own, and which the towers share."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dovetail.errors import ReplicationError
from dovetail.graph.records import Bool, Graph, Int64, Phase
from dovetail.graph.towers import AVERAGE

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
        return np.array([found == kind for found in self.graph.kinds], dtype=bool)
