"""The operator graph: the one description of a network that every planner reads.

Struct of arrays. Ops stand in topological order; each op's outputs stand together, in the order
of their producers, so that `outputs_of(op)` is a range:

    ops       0          1          2
              │          │          │
    tensors   0  1       2          3        producers = [0, 0, 1, 2]
              └──┼──────►1          │        input_offsets = [0, 0, 1, 3]
                 └──────────────────2        input_tensors = [0, 1, 2]

A *storage* is memory that tensors share: a view, or the new value that an update writes over the
old one, has the storage of its base. A *source* op stands for something that exists before the
step: a parameter, optimizer state, a buffer, a constant or an input.
"""

import hashlib
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.graph.validation import SOURCE_KINDS as SOURCE_KINDS
from dovetail.graph.validation import validate

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Int8 = NDArray[np.int8]
Bool = NDArray[np.bool_]

HOST = -1
"""`residences` of a source that starts on the host: an input."""
EVERYWHERE = -2
"""`residences` of a source that is resident wherever it is read."""
LOSS_MODULE = "(loss)"
"""Module path of the ops of a captured loss; the brackets tell it from a submodule named loss."""


class Phase(IntEnum):
    SOURCE = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3


@dataclass(frozen=True, eq=False)
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

    Raises a `GraphError` that names the offending op. Takes O(ops + tensors + reads).
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    signatures: tuple[str, ...]
    modules: tuple[str, ...]
    phases: Int8
    flops: Int64
    accessed_bytes: Int64
    colocation: Int32
    gradient_of: Int32
    device_kinds: tuple[tuple[str, ...], ...]
    producers: Int32
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    tensor_bytes: Int64
    storages: Int32
    overwrites: Bool
    input_offsets: Int32
    input_tensors: Int32
    outputs: Int32
    control: Int32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                frozen: NDArray[Any] = np.array(value, dtype=_DTYPES[field.name])
                if field.name == "control":
                    frozen = frozen.reshape(-1, 2)
                frozen.flags.writeable = False
                object.__setattr__(self, field.name, frozen)
        validate(self)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.producers)

    @property
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
        """Distinct entries of `device_kinds`, and [ops] index of each op's."""
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
        """[reads] the op of each entry of `input_tensors`."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.input_offsets))

    @cached_property
    def consumer_offsets(self) -> Int32:
        """CSR [tensors + 1] into `consumers`."""
        return csr_offsets(self.input_tensors, self.tensors)

    @cached_property
    def consumers(self) -> Int32:
        """[reads] ops that read each tensor, grouped by tensor, ascending."""
        return self.readers[np.argsort(self.input_tensors, kind="stable")]

    @cached_property
    def forward_edges(self) -> Int32:
        """[edges, 2] distinct (forward op, forward op that waits for it), by the latter, then the
        former: data and control."""
        befores = np.concatenate([self.producers[self.input_tensors], self.control[:, 0]])
        afters = np.concatenate([self.readers, self.control[:, 1]])
        forward = self.phases == Phase.FORWARD
        kept = forward[befores] & forward[afters]
        ends = np.unique(np.stack([afters[kept], befores[kept]], axis=1), axis=0)
        return np.ascontiguousarray(ends[:, ::-1], np.int32)

    @cached_property
    def bases(self) -> Int32:
        """[tensors] the tensor whose storage this one shares on the device where it is made: its
        producer's first input of the same storage; -1 for fresh memory."""
        bases = np.full(self.tensors, -1, dtype=np.int32)
        _, first = np.unique(self.storages, return_index=True)
        aliases = np.ones(self.tensors, dtype=bool)
        aliases[first] = False
        tensors = np.flatnonzero(aliases)
        of_alias, entries = gather(self.input_offsets, self.producers[tensors])
        reads = self.input_tensors[entries]
        same = self.storages[reads] == self.storages[tensors[of_alias]]
        found, first = np.unique(of_alias[same], return_index=True)
        bases[tensors[found]] = reads[same][first]
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
        """[ops] where a source lives: `HOST` (inputs), `EVERYWHERE` (whatever is never written),
        else the op that writes it, on whose device it lives. Of other ops: themselves."""
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
        """16 hex digits that name this graph: equal for equal graphs only."""
        digest = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            data = value.tobytes() if isinstance(value, np.ndarray) else _repr(value).encode()
            digest.update(f"{field.name} {len(data)} ".encode())
            digest.update(data)
        return digest.hexdigest()[:16]


_DTYPES = {
    "phases": np.int8,
    "flops": np.int64,
    "accessed_bytes": np.int64,
    "colocation": np.int32,
    "gradient_of": np.int32,
    "producers": np.int32,
    "tensor_bytes": np.int64,
    "storages": np.int32,
    "overwrites": np.bool_,
    "input_offsets": np.int32,
    "input_tensors": np.int32,
    "outputs": np.int32,
    "control": np.int32,
}


def csr_offsets(owners: NDArray[np.integer], count: int) -> Int32:
    """CSR offsets [count + 1] of entries that belong to `owners`, once sorted by owner."""
    return np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=count)[:count])]).astype(
        np.int32
    )


def gather(offsets: NDArray[np.integer], rows: NDArray[np.integer]) -> tuple[Int64, Int64]:
    """(place in `rows`, entry) of every entry of some rows of a CSR, row after row."""
    counts = np.asarray(offsets[rows + 1] - offsets[rows], dtype=np.int64)
    places = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places, offsets[rows][places] + within


def _repr(values: tuple[Any, ...]) -> str:
    """`repr(values)`, with the text of equal values made once."""
    texts = {value: repr(value) for value in set(values)}
    if len(values) < 2 or len(texts) > len(values) / 2:
        return repr(values)
    return f"({', '.join([texts[value] for value in values])})"
