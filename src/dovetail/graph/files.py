"""Graphs as JSON, gzip when the name ends in `.gz`.

    {"format": "dovetail.graph", "version": 1,
     "ops":     {"names": [...], "kinds": TABLE, "signatures": TABLE, "modules": TABLE,
                 "phases": [...], "flops": [...], "accessed_bytes": [...], "colocation": [...],
                 "gradient_of": [...], "device_kinds": TABLE,
                 "inputs": {"offsets": [...], "tensors": [...]}},
     "tensors": {"producers": [...], "shapes": TABLE, "strides": TABLE, "dtypes": TABLE,
                 "bytes": [...], "storages": [...], "overwrites": [...]},
     "outputs": [...], "control": [[before, after], ...]}

A TABLE is {"values": [distinct values], "index": [one entry per op or tensor]}: signatures and
shapes repeat, so this keeps 50,000 ops to a few megabytes. All fields are those of `Graph`.
"""

import gzip
import json
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.errors import FileFormatError, InvalidSizeError
from dovetail.graph.records import Graph
from dovetail.runtime.files import read_json, write_atomically

T = TypeVar("T", bound=Hashable)
_STRICT = ConfigDict(extra="forbid")


class _Table(BaseModel, Generic[T]):
    model_config = _STRICT
    values: list[T]
    index: list[int]

    def column(self) -> tuple[T, ...]:
        values = self.values
        if self.index and not 0 <= min(self.index) <= max(self.index) < len(values):
            raise ValueError("a table's index points outside its values")
        return tuple(values[i] for i in self.index)


class _Inputs(BaseModel):
    model_config = _STRICT
    offsets: list[int]
    tensors: list[int]


class _Ops(BaseModel):
    model_config = _STRICT
    names: list[str]
    kinds: _Table[str]
    signatures: _Table[str]
    modules: _Table[str]
    phases: list[Literal[0, 1, 2, 3]]
    flops: list[int]
    accessed_bytes: list[int]
    colocation: list[int]
    gradient_of: list[int]
    device_kinds: _Table[tuple[str, ...]]
    inputs: _Inputs


class _Tensors(BaseModel):
    model_config = _STRICT
    producers: list[int]
    shapes: _Table[tuple[int, ...]]
    strides: _Table[tuple[int, ...]]
    dtypes: _Table[str]
    bytes: list[int]
    storages: list[int]
    overwrites: list[bool]


class _File(BaseModel):
    model_config = _STRICT
    format: Literal["dovetail.graph"]
    version: Literal[1]
    ops: _Ops
    tensors: _Tensors
    outputs: list[int]
    control: list[tuple[int, int]]


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write the graph to `path`, whole or not at all. Raises `UnwritableError`."""
    file = {
        "format": "dovetail.graph",
        "version": 1,
        "ops": {
            "names": graph.names,
            "kinds": _table(graph.kinds),
            "signatures": _table(graph.signatures),
            "modules": _table(graph.modules),
            "phases": graph.phases.tolist(),
            "flops": graph.flops.tolist(),
            "accessed_bytes": graph.accessed_bytes.tolist(),
            "colocation": graph.colocation.tolist(),
            "gradient_of": graph.gradient_of.tolist(),
            "device_kinds": _table(graph.device_kinds),
            "inputs": {
                "offsets": graph.input_offsets.tolist(),
                "tensors": graph.input_tensors.tolist(),
            },
        },
        "tensors": {
            "producers": graph.producers.tolist(),
            "shapes": _table(graph.shapes),
            "strides": _table(graph.strides),
            "dtypes": _table(graph.dtypes),
            "bytes": graph.tensor_bytes.tolist(),
            "storages": graph.storages.tolist(),
            "overwrites": graph.overwrites.tolist(),
        },
        "outputs": graph.outputs.tolist(),
        "control": graph.control.tolist(),
    }
    data = json.dumps(file, separators=(",", ":")).encode()
    # mtime=0: the same graph gives the same file.
    packed = gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data
    write_atomically(path, packed)


def load_graph(path: str | Path) -> Graph:
    """Read a graph. Raises `FileFormatError` (not such a file) or `GraphError` (no such graph)."""
    return graph_from(read_json(path), str(path))


def graph_from(raw: Any, path: str) -> Graph:
    """The graph of a file's JSON; `path` names it in errors."""
    _check_sizes(raw)
    try:
        file = _File.model_validate(raw)
        ops, tensors = file.ops, file.tensors
        columns: dict[str, Any] = {
            "kinds": ops.kinds.column(),
            "signatures": ops.signatures.column(),
            "modules": ops.modules.column(),
            "device_kinds": ops.device_kinds.column(),
            "shapes": tensors.shapes.column(),
            "strides": tensors.strides.column(),
            "dtypes": tensors.dtypes.column(),
            "phases": np.array(ops.phases, dtype=np.int8),
            "flops": np.array(ops.flops, dtype=np.int64),
            "accessed_bytes": np.array(ops.accessed_bytes, dtype=np.int64),
            "colocation": np.array(ops.colocation, dtype=np.int32),
            "gradient_of": np.array(ops.gradient_of, dtype=np.int32),
            "producers": np.array(tensors.producers, dtype=np.int32),
            "tensor_bytes": np.array(tensors.bytes, dtype=np.int64),
            "storages": np.array(tensors.storages, dtype=np.int32),
            "overwrites": np.array(tensors.overwrites, dtype=np.bool_),
            "input_offsets": np.array(ops.inputs.offsets, dtype=np.int32),
            "input_tensors": np.array(ops.inputs.tensors, dtype=np.int32),
            "outputs": np.array(file.outputs, dtype=np.int32),
            "control": np.array(file.control, dtype=np.int32).reshape(-1, 2),
        }
    except ValidationError as error:
        raise FileFormatError(path, first_complaint(error)) from None
    except (ValueError, OverflowError) as error:
        raise FileFormatError(path, str(error)) from None
    return Graph(names=tuple(ops.names), **columns)


def first_complaint(error: ValidationError) -> str:
    """What pydantic found first, as "ops.flops.3: Input should be a valid integer"."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return "it is no JSON object"
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _table(values: Sequence[Hashable]) -> dict[str, Any]:
    distinct = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return {"values": list(distinct), "index": [distinct[value] for value in values]}


def _check_sizes(raw: Any) -> None:
    """JSON as Python reads it may hold NaN and Infinity: name the op before its type is judged."""
    try:
        names = raw["ops"]["names"]
        producers = raw["tensors"]["producers"]
        owners = [names[p] for p in producers]
        columns = [
            ("flops", raw["ops"]["flops"], names),
            ("accessed_bytes", raw["ops"]["accessed_bytes"], names),
            ("tensor_bytes", raw["tensors"]["bytes"], owners),
        ]
    except (TypeError, KeyError, IndexError):
        return  # the shape of the file is wrong; pydantic will say where
    for field, values, of in columns:
        if not isinstance(values, list):
            return
        for value, op in zip(values, of, strict=False):
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise InvalidSizeError(str(op), field, value)
