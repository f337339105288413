"""Copies shared computations, so that each device that reads them has one.

    d0   arange ─► cos ─┬─► layer 0          d0   arange ─► cos ─► layer 0
    d1                  └─► layer 1          d1   arange/copy.1 ─► cos/copy.1 ─► layer 1

A copy is named after its origin, with "/copy.N" appended, and has its kind, module and phase. So
copies can be told apart in a graph from a file too. Only ops that `shareable` names may be copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field

from dovetail.errors import UsageError
from dovetail.graph.copies import shareable
from dovetail.graph.records import Graph, Int64, select_columns

if TYPE_CHECKING:
    from dovetail.frontends.program import Captured

Step = TypeVar("Step", "Captured", Graph)


@dataclass(frozen=True)
class Copies:
    """One more copy of some ops, and the ops that read it. Indices are of the graph without copies.

    ops       ascending; with an op come all ops that it needs, so that no copy reads an original
    readers   ascending; the ops that read the copies in place of the originals
    """

    ops: tuple[Annotated[int, Field(ge=0)], ...]
    readers: tuple[Annotated[int, Field(ge=0)], ...]


@dataclass(frozen=True)
class SharedCopies:
    """Copies of shared computations on devices that read them."""

    copies: tuple[Copies, ...]
    kind: Literal["copies"] = "copies"

    def fits(self, graph: Graph) -> bool:
        """Return True if the graph has these ops, and they may be copied."""
        may_be_copied = shareable(graph)
        return all(
            max((*copy.ops, *copy.readers), default=0) < len(graph)
            and may_be_copied[list(copy.ops)].all()
            for copy in self.copies
        )

    def apply(self, step: Step) -> Step:
        """Return the step with these copies. Raises `UsageError` for copies that do not fit."""
        if not self.fits(step if isinstance(step, Graph) else step.graph):
            raise UsageError("copies", "are of ops that are not there or cannot be copied")
        if isinstance(step, Graph):
            return duplicate(step, self.copies).graph
        from dovetail.frontends.program import Call, Ref, fill_refs
        from dovetail.frontends.structures import substitute

        # Each copy makes its origin's call on its own tensors, so the step gives the same bits.
        program, copied = step.program, duplicate(step.graph, self.copies)
        # refs[i]: the tensors that a call reads: row 0 where it reads the originals, row i + 1
        # where it belongs to, or reads, the i-th copies.
        refs = [[Ref(int(tensor)) for tensor in row] for row in copied.tensors]
        reader_of = {op: i + 1 for i, copy in enumerate(self.copies) for op in copy.readers}
        calls: list[Call | None] = []
        for origin, number in zip(copied.origins.tolist(), copied.copy_of.tolist(), strict=True):
            call = program.calls[origin]
            if call is not None:
                reads = refs[number + 1 if number >= 0 else reader_of.get(origin, 0)]
                results = refs[number + 1]
                call = replace(
                    call,
                    args=fill_refs(call.args, reads),
                    kwargs=fill_refs(call.kwargs, reads),
                    results=tuple(results[t].tensor if t >= 0 else -1 for t in call.results),
                    # Copies shift the indices of later ops. Random numbers must stay the same, so a
                    # random call keeps its old index.
                    draws_of=call.seed_index(origin) if call.random else call.draws_of,
                )
            calls.append(call)
        return replace(
            step,
            graph=copied.graph,
            program=replace(
                program,
                calls=tuple(calls),
                sources=tuple(program.sources[origin] for origin in copied.origins.tolist()),
                loss=refs[0][program.loss].tensor if program.loss >= 0 else -1,
                outputs=substitute(program.outputs, Ref, lambda ref: refs[0][ref.tensor]),
            ),
            transforms=(*step.transforms, self),
        )


@dataclass(frozen=True, eq=False)
class Duplicated:
    """The graph with copies, and how its ops and tensors relate to the graph without copies.

    origins         [ops] the op without copies that each op is or copies
    copy_of         [ops] index of the `Copies` that the op belongs to; -1: the op is no copy
    origin_tensors  [tensors] the tensor without copies that each tensor is or copies
    tensors         [1 + copies, tensors of the graph without copies] row 0: the tensor's new
                    index; row i + 1: the index of its copy in the i-th copies. Entries of tensors
                    that were not copied are not set
    """

    graph: Graph
    origins: Int64
    copy_of: Int64
    origin_tensors: Int64
    tensors: Int64


def duplicate(graph: Graph, copies: Sequence[Copies]) -> Duplicated:
    """Return the graph with these copies. Each copy stands right behind its origin.

    Takes O((1 + copies) x tensors).
    """
    rows = [(op, -1) for op in range(len(graph))]
    rows += [(op, i) for i, copy in enumerate(copies) for op in copy.ops]
    # Sorted, every copy follows its origin (-1 comes first), which keeps the topological order.
    rows.sort()
    origins, copy_of = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    counts = np.diff(graph.output_offsets)[origins]
    producers = np.repeat(np.arange(len(rows)), counts)
    starts = np.cumsum(counts) - counts
    within = np.arange(len(producers)) - starts[producers]
    origin_tensors = graph.output_offsets[origins][producers] + within
    tensors = np.tile(np.empty(graph.tensors, dtype=np.int64), (1 + len(copies), 1))
    plain = copy_of[producers] < 0
    tensors[:, origin_tensors[plain]] = np.flatnonzero(plain)
    for i in range(len(copies)):
        mine = copy_of[producers] == i
        tensors[i + 1, origin_tensors[mine]] = np.flatnonzero(mine)
    # view[op] is the row of `tensors` that an op of the graph without copies reads from.
    view = np.zeros(len(graph), dtype=np.int64)
    for i, copy in enumerate(copies):
        view[list(copy.readers)] = i + 1
    views = np.where(copy_of < 0, view[origins], copy_of + 1)
    # place[op] is the new index of an op of the graph without copies.
    place = np.flatnonzero(copy_of < 0)
    reads = [
        tensors[view_of_op, graph.inputs_of(op)]
        for op, view_of_op in zip(origins.tolist(), views.tolist(), strict=True)
    ]
    gradients = graph.gradient_of[origins]
    # A copy that makes fresh memory gets a storage of its own, and a view has the storage of the
    # base that its op reads.
    storages = graph.storages[origin_tensors].astype(np.int64)
    bases = graph.bases[origin_tensors]
    fresh = (bases < 0) & (copy_of[producers] >= 0)
    storages[fresh] = int(graph.storages.max(initial=0)) + 1 + np.arange(int(fresh.sum()))
    bases = np.where(bases < 0, -1, tensors[views[producers], bases])
    # In order of tensors, so that the base of a view of a view is settled before it.
    for tensor in np.flatnonzero((bases >= 0) & ~graph.overwrites[origin_tensors]).tolist():
        storages[tensor] = storages[bases[tensor]]
    columns = select_columns(graph, origins, origin_tensors)
    columns |= dict(
        names=tuple(
            graph.names[op] if number < 0 else f"{graph.names[op]}/copy.{number + 1}"
            for op, number in zip(origins.tolist(), copy_of.tolist(), strict=True)
        ),
        colocation=np.where(copy_of < 0, graph.colocation[origins], -1),
        gradient_of=np.where(gradients < 0, -1, place[gradients]).astype(np.int32),
        producers=producers.astype(np.int32),
        storages=np.unique(storages, return_inverse=True)[1].reshape(-1).astype(np.int32),
        input_offsets=np.cumsum([0, *map(len, reads)]).astype(np.int32),
        input_tensors=np.concatenate([np.zeros(0, np.int64), *reads]).astype(np.int32),
        outputs=tensors[0, graph.outputs].astype(np.int32),
        control=place[graph.control].astype(np.int32).reshape(-1, 2),
    )
    return Duplicated(
        graph=Graph(**columns),
        origins=origins,
        copy_of=copy_of,
        origin_tensors=origin_tensors,
        tensors=tensors,
    )
