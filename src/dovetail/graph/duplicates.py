"""Copies of shared computations, one on each device that reads them.

    d0   arange ─► cos ─┬─► layer 0          d0   arange ─► cos ─► layer 0
    d1                  └─► layer 1          d1   arange/copy.1 ─► cos/copy.1 ─► layer 1

A copy has its origin's name with "/copy.N" behind it, and its kind, module and phase: so a graph
from a file shows it too. Only what `shareable` names may be copied.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from dovetail.graph.records import Bool, Graph, Int32, Int64, Phase, select_columns

_COPY = re.compile(r"(.*)/copy\.\d+$", re.DOTALL)


@dataclass(frozen=True)
class Copies:
    """One more copy of some ops, and who reads it. Indices are of the graph without copies.

    ops       ascending: all that they need of each other, so that none reads from elsewhere
    readers   ascending: ops that read the copies in the place of the origins
    """

    ops: tuple[Annotated[int, Field(ge=0)], ...]
    readers: tuple[Annotated[int, Field(ge=0)], ...]


@dataclass(frozen=True, eq=False)
class Duplicated:
    """The graph with copies.

    origins         [ops] the op that each is, or copies
    copy_of         [ops] which of the `Copies` it is of; -1: none
    origin_tensors  [tensors] the tensor that each is, or copies
    tensors         [1 + copies, tensors of the graph without copies] row 0: the tensor's new
                    index; row i + 1: the index that readers of the i-th copies use instead
    """

    graph: Graph
    origins: Int64
    copy_of: Int64
    origin_tensors: Int64
    tensors: Int64


def duplicate(graph: Graph, copies: Sequence[Copies]) -> Duplicated:
    """The graph with these copies, each right behind its origin. O((1 + copies) x tensors)."""
    rows = [(op, -1) for op in range(len(graph))]
    rows += [(op, i) for i, copy in enumerate(copies) for op in copy.ops]
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
    # Which row of `tensors` each op of the graph without copies sees.
    view = np.zeros(len(graph), dtype=np.int64)
    for i, copy in enumerate(copies):
        view[list(copy.readers)] = i + 1
    views = np.where(copy_of < 0, view[origins], copy_of + 1)
    place = np.flatnonzero(copy_of < 0)  # of each op without copies
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
    """[tensors] A copy's fresh memory is its own, and a view shares the memory of what it sees."""
    producers, origin_tensors = of_tensors
    storages = graph.storages[origin_tensors].astype(np.int64)
    bases = graph.bases[origin_tensors]
    fresh = (bases < 0) & (copy_of[producers] >= 0)
    storages[fresh] = int(graph.storages.max(initial=0)) + 1 + np.arange(int(fresh.sum()))
    bases = np.where(bases < 0, -1, tensors[views[producers], bases])
    for tensor in np.flatnonzero((bases >= 0) & ~graph.overwrites[origin_tensors]).tolist():
        storages[tensor] = storages[bases[tensor]]
    return np.unique(storages, return_inverse=True)[1].reshape(-1).astype(np.int32)


def origins_in(graph: Graph) -> Int32:
    """[ops] the op that each is a copy of, by its name; its own index where it is none."""
    origins = np.arange(len(graph), dtype=np.int32)
    for op in np.flatnonzero(graph.phases == Phase.FORWARD).tolist():
        match = _COPY.match(graph.names[op])
        origin = graph.index.get(match[1], -1) if match else -1
        if origin >= 0 and graph.signatures[origin] == graph.signatures[op]:
            origins[op] = origin
    return origins


# What may be copied: computations that many parts of a network share and that any device can
# repeat, such as positions, rotary cosines and attention masks.
#
#     arange ─► cos ─┬─► layer 0          arange ─► cos ─► layer 0
#                    └─► layer 1          arange ─► cos ─► layer 1
#
# They read inputs, constants and buffers, but no parameter, draw no random number, and no gradient
# goes through them. So they tie nothing together: a copy beside each reader gives the same bits.


_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|uniform|exponential|poisson")
_OWNED = ("parameter", "state")


def shareable(graph: Graph) -> Bool:
    """[ops] True for forward ops that may be repeated beside each reader. O(ops + reads)."""
    has_gradient = np.zeros(len(graph), dtype=bool)
    has_gradient[graph.gradient_of[graph.gradient_of >= 0]] = True
    random = {kind for kind in set(graph.kinds) if _RANDOM.search(kind)}
    written = np.zeros(int(graph.storages.max(initial=-1)) + 1, dtype=bool)
    written[graph.storages[graph.overwrites]] = True
    may_be_copied = np.zeros(len(graph), dtype=bool)
    for op in range(len(graph)):
        if graph.is_source[op]:
            may_be_copied[op] = graph.kinds[op] not in _OWNED and not any(
                written[graph.storages[t]] for t in graph.outputs_of(op)
            )
        elif graph.phases[op] == Phase.FORWARD:
            makers = graph.producers[graph.inputs_of(op)]
            free = not has_gradient[op] and graph.kinds[op] not in random
            may_be_copied[op] = free and bool(may_be_copied[makers].all())
    return may_be_copied & ~graph.is_source


def spread_out(graph: Graph) -> Bool:
    """[ops] True for shareable ops that modules other than their own read."""
    found = shareable(graph)
    modules = np.unique(np.array(graph.modules), return_inverse=True)[1].reshape(-1)
    producers = graph.producers[graph.input_tensors]
    elsewhere = modules[producers] != modules[graph.readers]
    read_elsewhere = np.zeros(len(graph), dtype=bool)
    read_elsewhere[producers[elsewhere & ~graph.is_source[graph.readers]]] = True
    return found & read_elsewhere
