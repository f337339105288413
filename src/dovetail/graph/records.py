"""The operator graph: the one description of a network that every planner reads.

It is a struct of arrays. Ops stand in topological order. Tensors stand in the order of their
producers, so the outputs of an op stand together and `outputs_of(op)` is a range:

    ops       0          1          2
              │          │          │
    tensors   0  1       2          3        producers = [0, 0, 1, 2]
              └──┼──────►1          │        input_offsets = [0, 0, 1, 3]
                 └──────────────────2        input_tensors = [0, 1, 2]

A *storage* is memory that tensors share: a view, or the new value that an update writes over the
old one, has the storage of its base. A *source* op stands for something that exists before the
step: a parameter, optimizer state, a buffer, a constant or an input.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from graphlib import CycleError as _CycleFound
from graphlib import TopologicalSorter
from typing import Annotated, Any, final, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import (
    CycleError,
    DuplicateOpError,
    GraphError,
    InvalidSizeError,
    UnknownProducerError,
)
from dovetail.runtime.formats import dtype_of

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Int8 = NDArray[np.int8]
Bool = NDArray[np.bool_]

SOURCE_KINDS = ("input", "parameter", "state", "buffer", "constant")
HOST = -1
"""The entry in `residences` of a source that starts on the host, which is an input."""
EVERYWHERE = -2
"""The entry in `residences` of a source that is resident on every device that reads it."""
LOSS_MODULE = "(loss)"
"""The module path of the ops of a captured loss. The brackets tell it from a submodule that is
named loss."""


class Phase(IntEnum):
    """The part of a step that an op belongs to; a source op exists before the step."""

    SOURCE = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3


@dataclass(frozen=True)
class GraphColumn:
    """Describes a column of `Graph`: its length, and its form in files.

    per     "ops" or "tensors": one entry each; "": a length of its own
    path    its place in a graph's file, such as "ops.inputs.offsets"; "": `per`, then the field's
            name
    table   True: entries repeat, and files hold each distinct entry once
    neutral the entry of every op or tensor if a graph is made without this column
    """

    per: str = ""
    path: str = ""
    table: bool = False
    neutral: Any = None


_PER_OP, _OP_TABLE = GraphColumn("ops"), GraphColumn("ops", table=True)
_PER_TENSOR, _TENSOR_TABLE = GraphColumn("tensors"), GraphColumn("tensors", table=True)
_ANY_KIND = GraphColumn("ops", table=True, neutral=())
_LEFT_OUT: Any = object()
"""The default of a column that a caller may leave out. Its length is known only when the graph is
made, so the neutral entries are filled in then."""


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """A directed acyclic graph of ops and the tensors between them. Immutable.

    Per op:
        names          unique, e.g. "lstm.0/addmm_3"
        kinds          "aten.mm"; of a source op one of `SOURCE_KINDS`
        signatures     kind, attributes, input shapes, strides and dtypes: equal signatures
                       cost the same
        modules        path in the model, "" at the top
        phases         `Phase`
        flops          2 x multiply-adds, and one per element of pointwise work
        accessed_bytes read and written
        colocation     ops with the same id >= 0 must share a device; -1: free
        gradient_of    the forward op whose gradient this op computes; -1: none
        device_kinds   kinds of device that can run it; () means all
    Per tensor:
        producers, shapes, strides (in elements), dtypes, tensor_bytes
        storages       id of its storage; aliases share one
        overwrites     True: a new value written over its storage's old one (an update)
    input_offsets, input_tensors   CSR [ops + 1], [reads]: distinct tensors read by each op
    outputs            tensors that the step returns
    control            [edges, 2] (before, after): order without data

    A column that is left out holds its neutral entries: the ops have no FLOPs and are free to be
    anywhere, and the tensors overwrite nothing. Raises a `GraphError` that names the offending op.
    Takes O(ops + tensors + reads).
    """

    names: Annotated[tuple[str, ...], _PER_OP]
    kinds: Annotated[tuple[str, ...], _OP_TABLE]
    signatures: Annotated[tuple[str, ...], _OP_TABLE]
    modules: Annotated[tuple[str, ...], GraphColumn("ops", table=True, neutral="")] = _LEFT_OUT
    phases: Annotated[Int8, _PER_OP]
    flops: Annotated[Int64, GraphColumn("ops", neutral=0)] = _LEFT_OUT
    accessed_bytes: Annotated[Int64, GraphColumn("ops", neutral=0)] = _LEFT_OUT
    colocation: Annotated[Int32, GraphColumn("ops", neutral=-1)] = _LEFT_OUT
    gradient_of: Annotated[Int32, GraphColumn("ops", neutral=-1)] = _LEFT_OUT
    device_kinds: Annotated[tuple[tuple[str, ...], ...], _ANY_KIND] = _LEFT_OUT
    producers: Annotated[Int32, _PER_TENSOR]
    shapes: Annotated[tuple[tuple[int, ...], ...], _TENSOR_TABLE]
    strides: Annotated[tuple[tuple[int, ...], ...], _TENSOR_TABLE]
    dtypes: Annotated[tuple[str, ...], _TENSOR_TABLE]
    tensor_bytes: Annotated[Int64, GraphColumn("tensors", path="tensors.bytes")]
    storages: Annotated[Int32, _PER_TENSOR]
    overwrites: Annotated[Bool, GraphColumn("tensors", neutral=False)] = _LEFT_OUT
    input_offsets: Annotated[Int32, GraphColumn(path="ops.inputs.offsets")]
    input_tensors: Annotated[Int32, GraphColumn(path="ops.inputs.tensors")]
    outputs: Annotated[Int32, GraphColumn(path="outputs")] = _LEFT_OUT
    control: Annotated[Int32, GraphColumn(path="control")] = _LEFT_OUT

    def __post_init__(self) -> None:
        lengths = {"ops": len(self.names), "tensors": len(self.producers), "": 0}
        # The record is frozen, so columns are set by `object.__setattr__`; arrays are copied and
        # made read-only, because caches such as `fingerprint` rely on them.
        for name, (column, dtype, _) in COLUMNS.items():
            value = getattr(self, name)
            if value is _LEFT_OUT:
                value = (column.neutral,) * lengths[column.per]
            if dtype is not None:
                value = np.array(value, dtype=dtype)
                if name == "control":
                    value = value.reshape(-1, 2)
                value.flags.writeable = False
            object.__setattr__(self, name, value)
        validate(self)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.producers)

    @cached_property
    def training(self) -> bool:
        """True if any op updates a parameter."""
        return bool((self.phases == Phase.UPDATE).any())

    def inputs_of(self, op: int) -> Int32:
        """Distinct tensors read by `op`, in argument order."""
        return self.input_tensors[self.input_offsets[op] : self.input_offsets[op + 1]]

    def outputs_of(self, op: int) -> range:
        """Tensors that `op` produces."""
        return range(int(self.output_offsets[op]), int(self.output_offsets[op + 1]))

    def consumers_of(self, tensor: int) -> Int32:
        """Ops that read `tensor`, ascending."""
        return self.consumers[self.consumer_offsets[tensor] : self.consumer_offsets[tensor + 1]]

    def runs_on(self, kind: str) -> Bool:
        """[ops] True for ops that a device of this kind may run; a "host" runs none."""
        distinct, of_op = self._kind_sets
        runs = [kind != "host" and (not kinds or kind in kinds) for kinds in distinct]
        return np.array(runs, dtype=bool)[of_op]

    @cached_property
    def _kind_sets(self) -> tuple[tuple[tuple[str, ...], ...], Int32]:
        """The distinct entries of `device_kinds`, and [ops] the index of each op's entry."""
        index = {kinds: i for i, kinds in enumerate(dict.fromkeys(self.device_kinds))}
        return tuple(index), np.array([index[kinds] for kinds in self.device_kinds], dtype=np.int32)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each op, by name."""
        return {name: op for op, name in enumerate(self.names)}

    @cached_property
    def is_source(self) -> Bool:
        """[ops] True for ops of phase SOURCE."""
        return np.asarray(self.phases == Phase.SOURCE)

    @cached_property
    def output_offsets(self) -> Int32:
        """CSR [ops + 1]: tensors of op i are `output_offsets[i]` to `output_offsets[i + 1]`."""
        return csr_offsets(self.producers, len(self))

    @cached_property
    def readers(self) -> Int32:
        """[reads] the op that reads each entry of `input_tensors`."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.input_offsets))

    @cached_property
    def consumer_offsets(self) -> Int32:
        """CSR [tensors + 1] into `consumers`."""
        return csr_offsets(self.input_tensors, self.tensors)

    @cached_property
    def consumers(self) -> Int32:
        """[reads] ops that read each tensor, grouped by tensor, ascending."""
        # A stable sort keeps the readers of one tensor in ascending order.
        return self.readers[np.argsort(self.input_tensors, kind="stable")]

    @cached_property
    def forward_edges(self) -> Int32:
        """[edges, 2] distinct (forward op, forward op that waits for it), by data or control.

        They are sorted by the second op, then by the first.
        """
        befores = np.concatenate([self.producers[self.input_tensors], self.control[:, 0]])
        afters = np.concatenate([self.readers, self.control[:, 1]])
        forward = self.phases == Phase.FORWARD
        kept = forward[befores] & forward[afters]
        ends = np.unique(np.stack([afters[kept], befores[kept]], axis=1), axis=0)
        return np.ascontiguousarray(ends[:, ::-1], np.int32)

    @cached_property
    def bases(self) -> Int32:
        """[tensors] the tensor whose memory each tensor shares on the device where it is made.

        That is its producer's first input of the same storage; -1 for fresh memory.
        """
        bases = np.full(self.tensors, -1, dtype=np.int32)
        # The first tensor of a storage is fresh memory; only the others can be aliases.
        _, first = np.unique(self.storages, return_index=True)
        aliases = np.ones(self.tensors, dtype=bool)
        aliases[first] = False
        tensors = np.flatnonzero(aliases)
        of_alias, entries = gather(self.input_offsets, self.producers[tensors])
        reads = self.input_tensors[entries]
        same = self.storages[reads] == self.storages[tensors[of_alias]]
        aliasing, first = np.unique(of_alias[same], return_index=True)
        bases[tensors[aliasing]] = reads[same][first]
        return bases

    @cached_property
    def writers(self) -> dict[int, tuple[int, ...]]:
        """storage -> the ops that write over it, ascending."""
        writers: dict[int, list[int]] = {}
        for tensor in np.flatnonzero(self.overwrites).tolist():
            of_storage = writers.setdefault(int(self.storages[tensor]), [])
            producer = int(self.producers[tensor])
            if producer not in of_storage:
                of_storage.append(producer)
        return {storage: tuple(ops) for storage, ops in writers.items()}

    @cached_property
    def residences(self) -> Int32:
        """[ops] where each source lives; the entry of another op is the op itself.

        A source that the step writes lives on the device of its first writer, and the entry is that
        op. Of the others inputs live on the `HOST`, and the rest `EVERYWHERE`.
        """
        # An index above all ops stands for "never written", so that a minimum finds the first
        # writer.
        never = len(self)
        first = np.full(int(self.storages.max(initial=-1)) + 1, never, dtype=np.int32)
        written = np.flatnonzero(self.overwrites)
        np.minimum.at(first, self.storages[written], self.producers[written])
        writer = np.full(len(self), never, dtype=np.int32)
        np.minimum.at(writer, self.producers, first[self.storages])
        residences = np.arange(len(self), dtype=np.int32)
        for op in np.flatnonzero(self.is_source & (writer == never)).tolist():
            residences[op] = HOST if self.kinds[op] == "input" else EVERYWHERE
        moved = self.is_source & (writer < never)
        residences[moved] = writer[moved]
        return residences

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that name this graph; two graphs have the same only if they are equal."""
        digest = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                data = value.tobytes()
            else:
                # The text of equal values is made once, which is faster for columns that repeat.
                texts = {entry: repr(entry) for entry in set(value)}
                repeats = len(value) >= 2 and len(texts) <= len(value) / 2
                joined = f"({', '.join([texts[v] for v in value])})" if repeats else repr(value)
                data = joined.encode()
            # Name and length are hashed too, so that bytes cannot pass from one field to the next.
            digest.update(f"{field.name} {len(data)} ".encode())
            digest.update(data)
        return digest.hexdigest()[:16]


def _columns() -> dict[str, tuple[GraphColumn, Any, Any]]:
    """Return `COLUMNS`, read from the annotations of `Graph`."""
    columns = {}
    for name, hint in get_type_hints(Graph, include_extras=True).items():
        held, column = get_args(hint)
        path = column.path or f"{column.per}.{name}"
        dtype = dtype_of(held)
        entry = get_args(held)[0] if dtype is None else None
        columns[name] = (replace(column, path=path), dtype, entry)
    return columns


COLUMNS = _columns()
"""Field of `Graph` -> (its `GraphColumn`, dtype of its array or None, type of its tuple's
entries)."""


def select_columns(
    graph: Graph, ops: NDArray[np.integer], tensors: NDArray[np.integer]
) -> dict[str, Any]:
    """Return field -> the entries of these ops or tensors, of every column per op or per tensor.

    A graph that is derived from this one starts with these columns and replaces those that differ.
    """
    rows = {"ops": ops, "tensors": tensors}
    selected: dict[str, Any] = {}
    for name, (column, dtype, _) in COLUMNS.items():
        if column.per:
            values, taken = getattr(graph, name), rows[column.per]
            selected[name] = (
                values[taken] if dtype is not None else tuple(values[row] for row in taken.tolist())
            )
    return selected


def csr_offsets(owners: NDArray[np.integer], count: int) -> Int32:
    """Return CSR offsets [count + 1] of the entries of each owner, for entries sorted by owner.

    owners   [entries] in any order, each below `count`
    """
    return np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=count)[:count])]).astype(
        np.int32
    )


def gather(offsets: NDArray[np.integer], rows: NDArray[np.integer]) -> tuple[Int64, Int64]:
    """Return (places in `rows`, indices of entries) of all entries of some rows of a CSR, row after
    row."""
    counts = np.asarray(offsets[rows + 1] - offsets[rows], dtype=np.int64)
    places = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places, offsets[rows][places] + within


def validate(graph: Graph) -> None:
    """Raise the `GraphError` of the first fault of the graph."""
    # The order matters: each check may index with what the checks before it have passed.
    ops = len(graph.names)
    lengths = {"ops": ops, "tensors": len(graph.producers)}
    for name, (column, _, _) in COLUMNS.items():
        length = len(getattr(graph, name))
        if column.per and length != lengths[column.per]:
            raise GraphError(f"{name} has {length} entries, not {lengths[column.per]}")
    offsets = graph.input_offsets
    if len(offsets) != ops + 1 or offsets[0] != 0 or offsets[-1] != len(graph.input_tensors):
        raise GraphError("input_offsets does not span input_tensors with one range per op")
    if (np.diff(offsets) < 0).any():
        op = int(np.flatnonzero(np.diff(offsets) < 0)[0])
        raise InvalidSizeError(graph.names[op], "number of inputs", int(np.diff(offsets)[op]))
    if len(set(graph.names)) < len(graph.names):
        earlier: set[str] = set()
        for name in graph.names:
            if name in earlier:
                raise DuplicateOpError(name)
            earlier.add(name)
    for field in ("flops", "accessed_bytes"):
        values = getattr(graph, field)
        if (values < 0).any():
            op = int(np.flatnonzero(values < 0)[0])
            raise InvalidSizeError(graph.names[op], field, int(values[op]))
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
    _check_edges(graph)


def _check_edges(graph: Graph) -> None:
    """Raise the `GraphError` of the first fault of what ops read and wait for."""
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
    # Ops stand in topological order.
    readers = np.repeat(np.arange(len(graph.names)), np.diff(graph.input_offsets))
    writers = graph.producers[graph.input_tensors]
    edges = np.concatenate([np.stack([writers, readers], axis=1), graph.control])
    backwards = edges[:, 0] >= edges[:, 1]
    if backwards.any():
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for before, after in edges.tolist():
            sorter.add(after, before)
        try:
            sorter.prepare()
        except _CycleFound as error:
            # graphlib lists a cycle from each op to one that must come after it.
            raise CycleError(tuple(graph.names[op] for op in error.args[1])) from None
        before, after = edges[int(np.flatnonzero(backwards)[0])].tolist()
        raise GraphError(
            f"ops must stand in topological order: {graph.names[after]!r} needs "
            f"{graph.names[before]!r}, which stands after it"
        )
    sources = np.flatnonzero(graph.phases == 0)
    reading = sources[graph.input_offsets[sources] != graph.input_offsets[sources + 1]]
    odd = [op for op in sources.tolist() if graph.kinds[op] not in SOURCE_KINDS]
    if len(reading) and (not odd or reading[0] <= odd[0]):
        name = graph.names[reading[0]]
        raise GraphError(f"source op {name!r} reads a tensor; sources have no inputs")
    if odd:
        name, kind = graph.names[odd[0]], graph.kinds[odd[0]]
        raise GraphError(f"source op {name!r} has the unknown kind {kind!r}")
    if len(graph.control) and (graph.phases[graph.control] == 0).any():
        raise GraphError("a control edge touches a source op, which occupies no device")
    # An op's result may share memory only with a tensor that the op reads. Any other tensor need
    # not be on the op's device, so there would be no memory to share.
    aliases = np.ones(len(graph.storages), dtype=bool)
    aliases[np.unique(graph.storages, return_index=True)[1]] = False
    unread = np.flatnonzero(aliases & (graph.bases < 0))
    if len(unread):
        name = graph.names[graph.producers[unread[0]]]
        raise GraphError(f"op {name!r} returns an alias of a storage that it does not read")
