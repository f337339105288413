"""Copies shared computations, so that each device that reads them has one.

    d0   arange ─► cos ─┬─► layer 0          d0   arange ─► cos ─► layer 0
    d1                  └─► layer 1          d1   arange/copy.1 ─► cos/copy.1 ─► layer 1

A copy is named after its origin, with "/copy.N" appended, and has its kind, module and phase. So
copies can be told apart in a graph from a file too. Only ops that `shareable` names may be copied.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from dovetail.graph.records import Bool, Graph, Int32, Int64, Phase, select_columns
from dovetail.runtime.compiling import kernel

_COPY = re.compile(r"(.*)/copy\.\d+$", re.DOTALL)


@dataclass(frozen=True)
class Copies:
    """One more copy of some ops, and the ops that read it. Indices are of the graph without copies.

    ops       ascending; with an op come all ops that it needs, so that no copy reads an original
    readers   ascending; the ops that read the copies in place of the originals
    """

    ops: tuple[Annotated[int, Field(ge=0)], ...]
    readers: tuple[Annotated[int, Field(ge=0)], ...]


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
    return Duplicated(
        graph=_graph(graph, (origins, copy_of, views), (producers, origin_tensors), tensors, place),
        origins=origins,
        copy_of=copy_of,
        origin_tensors=origin_tensors,
        tensors=tensors,
    )


def _graph(
    graph: Graph,
    rows: tuple[Int64, Int64, Int64],
    of_tensors: tuple[Int64, Int64],
    tensors: Int64,
    place: Int64,
) -> Graph:
    (origins, copy_of, views), (producers, origin_tensors) = rows, of_tensors
    columns = select_columns(graph, origins, origin_tensors)
    reads = [
        tensors[view, graph.inputs_of(op)]
        for op, view in zip(origins.tolist(), views.tolist(), strict=True)
    ]
    gradients = graph.gradient_of[origins]
    columns |= dict(
        names=tuple(
            graph.names[op] if copy < 0 else f"{graph.names[op]}/copy.{copy + 1}"
            for op, copy in zip(origins.tolist(), copy_of.tolist(), strict=True)
        ),
        colocation=np.where(copy_of < 0, graph.colocation[origins], -1),
        gradient_of=np.where(gradients < 0, -1, place[gradients]).astype(np.int32),
        producers=producers.astype(np.int32),
        storages=_storages(graph, views, copy_of, of_tensors, tensors),
        input_offsets=np.cumsum([0, *map(len, reads)]).astype(np.int32),
        input_tensors=np.concatenate([np.zeros(0, np.int64), *reads]).astype(np.int32),
        outputs=tensors[0, graph.outputs].astype(np.int32),
        control=place[graph.control].astype(np.int32).reshape(-1, 2),
    )
    return Graph(**columns)


def _storages(
    graph: Graph, views: Int64, copy_of: Int64, of_tensors: tuple[Int64, Int64], tensors: Int64
) -> Int32:
    """Return [tensors] storages. A copy that makes fresh memory gets a storage of its own, and a
    view has the storage of the base that its op reads."""
    producers, origin_tensors = of_tensors
    storages = graph.storages[origin_tensors].astype(np.int64)
    bases = graph.bases[origin_tensors]
    fresh = (bases < 0) & (copy_of[producers] >= 0)
    storages[fresh] = int(graph.storages.max(initial=0)) + 1 + np.arange(int(fresh.sum()))
    bases = np.where(bases < 0, -1, tensors[views[producers], bases])
    # In order of tensors, so that the base of a view of a view is settled before it.
    for tensor in np.flatnonzero((bases >= 0) & ~graph.overwrites[origin_tensors]).tolist():
        storages[tensor] = storages[bases[tensor]]
    return np.unique(storages, return_inverse=True)[1].reshape(-1).astype(np.int32)


def origins_in(graph: Graph) -> Int32:
    """Return [ops] the op that each op is a copy of, by its name; its own index if it is none."""
    origins = np.arange(len(graph), dtype=np.int32)
    for op in np.flatnonzero(graph.phases == Phase.FORWARD).tolist():
        match = _COPY.match(graph.names[op])
        origin = graph.index.get(match[1], -1) if match else -1
        if origin >= 0 and graph.signatures[origin] == graph.signatures[op]:
            origins[op] = origin
    return origins


# Which ops may be copied: computations that many parts of a network share and that any device can
# repeat, such as positions, rotary cosines and attention masks.
#
#     arange ─► cos ─┬─► layer 0          arange ─► cos ─► layer 0
#                    └─► layer 1          arange ─► cos ─► layer 1
#
# These ops read inputs, constants and buffers, but no parameter and no buffer that the step writes.
# They draw no random numbers, and no gradient goes through them. So a copy beside each reader gives
# the same bits, and the readers need not be on one device.


_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|uniform|exponential|poisson")
_OWNED = ("parameter", "state")


def shareable(graph: Graph) -> Bool:
    """Return [ops] True for forward ops that may be repeated beside each reader.

    Takes O(ops + reads).
    """
    kinds, of_op = np.unique(np.array(graph.kinds), return_inverse=True)
    random = np.array([_RANDOM.search(kind) is not None for kind in kinds])[of_op.reshape(-1)]
    owned = np.isin(kinds, _OWNED)[of_op.reshape(-1)]
    written = np.zeros(int(graph.storages.max(initial=-1)) + 1, dtype=bool)
    written[graph.storages[graph.overwrites]] = True
    writes = np.zeros(len(graph), dtype=bool)
    writes[graph.producers[written[graph.storages]]] = True
    has_gradient = np.zeros(len(graph), dtype=bool)
    has_gradient[graph.gradient_of[graph.gradient_of >= 0]] = True
    forward = (graph.phases == Phase.FORWARD) & ~has_gradient & ~random
    may_be_copied = np.where(graph.is_source, ~owned & ~writes, forward)
    _leave_out_readers(may_be_copied, graph.input_offsets, graph.producers[graph.input_tensors])
    return may_be_copied & ~graph.is_source


@kernel
def _leave_out_readers(chosen: Bool, input_offsets: Int32, makers: Int32) -> None:
    """Leave out what reads something that is left out; ops come after those that they read."""
    for op in range(len(chosen)):
        for read in range(input_offsets[op], input_offsets[op + 1]):
            if not chosen[makers[read]]:
                chosen[op] = False


def spread_out(graph: Graph) -> Bool:
    """Return [ops] True for shareable ops that modules other than their own read."""
    is_shareable = shareable(graph)
    modules = np.unique(np.array(graph.modules), return_inverse=True)[1].reshape(-1)
    producers = graph.producers[graph.input_tensors]
    elsewhere = modules[producers] != modules[graph.readers]
    read_elsewhere = np.zeros(len(graph), dtype=bool)
    read_elsewhere[producers[elsewhere & ~graph.is_source[graph.readers]]] = True
    return is_shareable & read_elsewhere
