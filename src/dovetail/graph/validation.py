"""What makes arrays a graph. Every failure is its own error and names the op."""

from __future__ import annotations

from graphlib import CycleError as _FoundCycle
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import (
    CycleError,
    DuplicateOpError,
    GraphError,
    InvalidSizeError,
    UnknownProducerError,
)

if TYPE_CHECKING:  # records validates itself when it is built
    from dovetail.graph.records import Graph

_PER_OP = (
    "kinds", "signatures", "modules", "phases", "flops", "accessed_bytes", "colocation",
    "gradient_of", "device_kinds",
)  # fmt: skip
SOURCE_KINDS = ("input", "parameter", "state", "buffer", "constant")
_PER_TENSOR = ("shapes", "strides", "dtypes", "tensor_bytes", "storages", "overwrites")


def validate(graph: Graph) -> None:
    """Raise the `GraphError` of the first thing that is wrong; return nothing if all is well."""
    _check_lengths(graph)
    _check_names(graph)
    _check_sizes(graph)
    _check_reads(graph)
    _check_order(graph)
    _check_sources(graph)


def _check_lengths(graph: Graph) -> None:
    ops, tensors = len(graph.names), len(graph.producers)
    for count, names in ((ops, _PER_OP), (tensors, _PER_TENSOR)):
        for name in names:
            if len(getattr(graph, name)) != count:
                raise GraphError(f"{name} has {len(getattr(graph, name))} entries, not {count}")
    offsets = graph.input_offsets
    if len(offsets) != ops + 1 or offsets[0] != 0 or offsets[-1] != len(graph.input_tensors):
        raise GraphError("input_offsets does not span input_tensors with one range per op")
    if (np.diff(offsets) < 0).any():
        op = int(np.flatnonzero(np.diff(offsets) < 0)[0])
        raise InvalidSizeError(graph.names[op], "number of inputs", int(np.diff(offsets)[op]))


def _check_names(graph: Graph) -> None:
    if len(set(graph.names)) < len(graph.names):
        seen: set[str] = set()
        for name in graph.names:
            if name in seen:
                raise DuplicateOpError(name)
            seen.add(name)


def _check_sizes(graph: Graph) -> None:
    for field in ("flops", "accessed_bytes"):
        values = getattr(graph, field)
        if (values < 0).any():
            op = int(np.flatnonzero(values < 0)[0])
            raise InvalidSizeError(graph.names[op], field, int(values[op]))
    ops = len(graph.names)
    unknown = (graph.producers < 0) | (graph.producers >= ops)
    if unknown.any():
        raise GraphError(f"tensor {int(np.flatnonzero(unknown)[0])} names an unknown producer")
    if (np.diff(graph.producers) < 0).any():
        tensor = int(np.flatnonzero(np.diff(graph.producers) < 0)[0]) + 1
        raise GraphError(
            f"tensors must stand in order of their producers; tensor {tensor} does not"
        )
    sizes = graph.tensor_bytes
    if (sizes < 0).any():
        tensor = int(np.flatnonzero(sizes < 0)[0])
        name = graph.names[graph.producers[tensor]]
        raise InvalidSizeError(name, "tensor_bytes", int(sizes[tensor]))
    pairs = list(zip(graph.shapes, graph.strides, strict=True))
    wrong = {
        (shape, strides)
        for shape, strides in set(pairs)
        if min(shape, default=0) < 0 or len(shape) != len(strides)
    }
    if wrong:
        tensor = next(tensor for tensor, pair in enumerate(pairs) if pair in wrong)
        name = graph.names[graph.producers[tensor]]
        raise InvalidSizeError(name, "shape", graph.shapes[tensor])


def _check_reads(graph: Graph) -> None:
    tensors = len(graph.producers)
    unknown = (graph.input_tensors < 0) | (graph.input_tensors >= tensors)
    if unknown.any():
        read = int(np.flatnonzero(unknown)[0])
        op = int(np.searchsorted(graph.input_offsets, read, side="right")) - 1
        raise UnknownProducerError(graph.names[op], int(graph.input_tensors[read]))
    if ((graph.outputs < 0) | (graph.outputs >= tensors)).any():
        raise GraphError("a graph output is not a tensor of the graph")
    ops = len(graph.names)
    if ((graph.control < 0) | (graph.control >= ops)).any():
        raise GraphError("a control edge names an unknown op")
    if ((graph.gradient_of < -1) | (graph.gradient_of >= ops)).any():
        raise GraphError("gradient_of names an unknown op")
    storages = graph.storages
    unknown = (storages < 0) | (storages >= tensors)
    if unknown.any():
        tensor = int(np.flatnonzero(unknown)[0])
        raise GraphError(
            f"tensor {tensor} has storage {int(storages[tensor])}, which is not below the number "
            f"of tensors, {tensors}"
        )


def _check_order(graph: Graph) -> None:
    readers = np.repeat(np.arange(len(graph.names)), np.diff(graph.input_offsets))
    writers = graph.producers[graph.input_tensors]
    edges = np.concatenate([np.stack([writers, readers], axis=1), graph.control])
    backwards = edges[:, 0] >= edges[:, 1]
    if not backwards.any():
        return
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for before, after in edges.tolist():
        sorter.add(after, before)
    try:
        sorter.prepare()
    except _FoundCycle as found:
        # graphlib lists a cycle from each op to one that must come after it.
        raise CycleError(tuple(graph.names[op] for op in found.args[1])) from None
    before, after = edges[int(np.flatnonzero(backwards)[0])].tolist()
    raise GraphError(
        f"ops must stand in topological order: {graph.names[after]!r} needs "
        f"{graph.names[before]!r}, which stands after it"
    )


def _check_sources(graph: Graph) -> None:
    sources = np.flatnonzero(graph.phases == 0)
    reading = sources[graph.input_offsets[sources] != graph.input_offsets[sources + 1]]
    unknown = [op for op in sources.tolist() if graph.kinds[op] not in SOURCE_KINDS]
    if len(reading) and (not unknown or reading[0] <= unknown[0]):
        name = graph.names[reading[0]]
        raise GraphError(f"source op {name!r} reads a tensor; sources have no inputs")
    if unknown:
        name, kind = graph.names[unknown[0]], graph.kinds[unknown[0]]
        raise GraphError(f"source op {name!r} has the unknown kind {kind!r}")
    if len(graph.control) and (graph.phases[graph.control] == 0).any():
        raise GraphError("a control edge touches a source op, which occupies no device")
    # A storage is shared along reads only: a tensor that aliases what its op does not read
    # would have no copy to alias on its own device.
    aliases = np.ones(len(graph.storages), dtype=bool)
    aliases[np.unique(graph.storages, return_index=True)[1]] = False
    unread = np.flatnonzero(aliases & (graph.bases < 0))
    if len(unread):
        name = graph.names[graph.producers[unread[0]]]
        raise GraphError(f"op {name!r} returns an alias of a storage that it does not read")
