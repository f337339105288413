"""Saves and loads graphs as JSON, which is gzipped if the file's name ends in `.gz`.

    {"format": "dovetail.graph", "version": 1,
     "ops":     {"names": [...], "kinds": TABLE, "signatures": TABLE, "modules": TABLE,
                 "phases": [...], "flops": [...], "accessed_bytes": [...], "colocation": [...],
                 "gradient_of": [...], "device_kinds": TABLE,
                 "inputs": {"offsets": [...], "tensors": [...]}},
     "tensors": {"producers": [...], "shapes": TABLE, "strides": TABLE, "dtypes": TABLE,
                 "bytes": [...], "storages": [...], "overwrites": [...]},
     "outputs": [...], "control": [[before, after], ...]}

A TABLE is {"values": [distinct values], "index": [one entry per op or tensor]}. Signatures and
shapes repeat, so tables keep 50,000 ops to a few megabytes. The columns are the fields of `Graph`,
each at the path that its `GraphColumn` names.
"""

import gzip
import json
import math
from collections.abc import Hashable, Sequence
from functools import reduce
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError, create_model

from dovetail.errors import FileFormatError, InvalidSizeError
from dovetail.graph.records import COLUMNS, Graph
from dovetail.runtime.files import read_json, write_atomically
from dovetail.runtime.formats import (
    STRICT,
    Version1,
    WholeNumbers,
    array_type,
    file_type,
    first_complaint,
)

T = TypeVar("T", bound=Hashable)


class _Table(BaseModel, Generic[T]):
    model_config = STRICT
    values: list[T]
    index: WholeNumbers

    def column(self) -> tuple[T, ...]:
        values = self.values
        if self.index and not 0 <= min(self.index) <= max(self.index) < len(values):
            raise ValueError("a table's index points outside its values")
        return tuple(values[i] for i in self.index)


def _file_model() -> type[BaseModel]:
    """Return the pydantic model of a graph's file. Each dot in a column's path is a nested
    object."""
    # The entries of these arrays are not just any number of the dtype.
    entries = {"phases": Literal[0, 1, 2, 3], "control": file_type(tuple[int, int])}
    tree: dict[str, Any] = {"format": Literal["dovetail.graph"], "version": Version1}
    table: Any = _Table
    held: Any
    for name, (column, dtype, entry) in COLUMNS.items():
        if column.table:
            held = Annotated[table[file_type(entry)], AfterValidator(_Table.column)]
        elif dtype is not None:
            held = array_type(dtype, entries.get(name))
        else:
            held = GenericAlias(tuple, (entry, ...))
        _put(tree, column.path, held)
    return _object_model("File", tree)


def _object_model(name: str, tree: dict[str, Any]) -> type[BaseModel]:
    parts: dict[str, Any] = {
        key: (_object_model(key, held) if isinstance(held, dict) else held, ...)
        for key, held in tree.items()
    }
    model: type[BaseModel] = create_model(name, __config__=STRICT, **parts)
    return model


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *branches, leaf = path.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
    tree[leaf] = value


_File = _file_model()


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """The graph as its file has it."""
    file: dict[str, Any] = {"format": "dovetail.graph", "version": 1}
    for name, (column, dtype, _) in COLUMNS.items():
        values = getattr(graph, name)
        if column.table:
            values = _table(values)
        elif dtype is not None:
            values = values.tolist()
        _put(file, column.path, values)
    return file


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write the graph to `path`, whole or not at all. Raises `UnwritableError`."""
    data = json.dumps(graph_to_dict(graph), separators=(",", ":")).encode()
    # gzip writes the time into the file; with mtime=0 the same graph gives the same bytes.
    packed = gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data
    write_atomically(path, packed)


def load_graph(path: str | Path) -> Graph:
    """Read a graph. Raises `FileFormatError` if the file has another form, and `GraphError` if its
    content is no valid graph."""
    return graph_from(read_json(path), str(path))


def graph_from(raw: Any, path: str) -> Graph:
    """Return the graph of a file's parsed JSON; `path` names the file in errors."""
    _check_sizes(raw)
    try:
        file: Any = _File.model_validate(raw)
    except ValidationError as error:
        raise FileFormatError(path, first_complaint(error)) from None
    except OverflowError as error:
        raise FileFormatError(path, str(error)) from None
    columns = {
        name: reduce(getattr, column.path.split("."), file)
        for name, (column, _, _) in COLUMNS.items()
    }
    return Graph(**columns)


def _table(values: Sequence[Hashable]) -> dict[str, Any]:
    distinct = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return {"values": list(distinct), "index": [distinct[value] for value in values]}


def _check_sizes(raw: Any) -> None:
    """Raise `InvalidSizeError` for a size that is negative, NaN or infinite, with its op's name.

    Python's JSON reader accepts NaN and Infinity, and pydantic would not name the op.
    """
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
