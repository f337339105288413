"""An ONNX file and its tensors, without their bytes.

Weights are judged by what the file says of them: a model of any size is read within little memory.
Their bytes must be there all the same. Data outside the file stays inside the file's folder: a
location that is absolute, climbs with "..", or leads away through a symbolic link is refused.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import (
    EscapingDataError,
    ExternalDataError,
    FileFormatError,
    MissingLibraryError,
    ModelError,
)
from dovetail.frontends.onnx.records import ELEMENT_TYPES, MOST_KNOWN_ELEMENTS, Value

_FEW = 16
"""Elements of a tensor that may be numbers of the graph and no weight: scales of a resize."""
_ELSEWHERE = "which is not a file in the model's own folder: it is not opened"
_FIELDS = {
    1: "float_data", 14: "float_data", 11: "double_data", 15: "double_data", 7: "int64_data",
    12: "uint64_data", 13: "uint64_data",
}  # fmt: skip
"""Where a tensor without raw bytes keeps its elements; of other types it is `int32_data`."""


def onnx_library() -> Any:
    """The package `onnx`. Raises `MissingLibraryError`."""
    try:
        import onnx
        import onnx.reference
        import onnx.shape_inference
    except ImportError:
        raise MissingLibraryError("onnx", "pip install 'dovetail[onnx]'") from None
    return onnx


def read_model(path: Path) -> Any:
    """The file as a `ModelProto`. Raises `FileFormatError`."""
    onnx = onnx_library()
    # onnx itself is built on protobuf, which has no types.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    model = onnx.ModelProto()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                # Mapped: the bytes of weights inside the file are not copied twice.
                with (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                    memoryview(data) as view,
                ):
                    model.ParseFromString(view)
    except FileNotFoundError:
        raise FileFormatError(str(path), "no such file") from None
    except DecodeError:
        raise FileFormatError(
            str(path), "not an ONNX model, or cut short: copy or export it again"
        ) from None
    except (OSError, ValueError) as error:
        raise FileFormatError(str(path), str(error)) from None
    if not model.opset_import or not model.HasField("graph"):
        raise FileFormatError(str(path), "not an ONNX model: it has no graph or no opset")
    if not all(isinstance(text, str) for text in _texts(model)):
        raise FileFormatError(str(path), "not an ONNX model: it has a name that is not text")
    if any(not 0 < opset.version < 2**31 for opset in model.opset_import):
        raise FileFormatError(str(path), "not an ONNX model: it has an opset of no version")
    return model


def _texts(model: Any) -> Iterator[Any]:
    """The names in a model: bytes where they are not UTF-8."""
    waiting = [model.graph]
    for function in model.functions:
        yield from (function.name, function.domain, function.overload)
        yield from (*function.input, *function.output, *function.attribute)
        yield from (opset.domain for opset in function.opset_import)
        waiting.append(function)
    yield from (opset.domain for opset in model.opset_import)
    while waiting:
        graph = waiting.pop()
        for node in graph.node:
            yield from (node.name, node.op_type, node.domain, node.overload)
            yield from (*node.input, *node.output)
            for attribute in node.attribute:
                yield from (attribute.name, attribute.ref_attr_name)
                waiting += [attribute.g] if attribute.HasField("g") else []
        if graph.DESCRIPTOR.name == "GraphProto":
            yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
            for value in graph.input:
                yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)


class Weights:
    """Reads what the tensors of one file are, and frees their bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.parent

    def value(self, tensor: Any, name: str) -> Value:
        """The tensor as a source; with its content where that may decide a shape.

        role   "parameter": floating point, or quantized in at most 8 bits, with an axis at least;
               else "constant"
        """
        code, shape = int(tensor.data_type), tuple(tensor.dims)
        if code not in ELEMENT_TYPES:
            raise ModelError(str(self.path), f"tensor {name!r} is text or of an unknown type")
        value = Value(name, code, shape)
        if not value.possible:
            raise FileFormatError(
                str(self.path), f"tensor {name!r} has the impossible shape {shape}"
            )
        bits = ELEMENT_TYPES[code][1]
        weight = bool(shape) and (value.floating or (bits <= 8 and value.dtype != "bool"))
        value.role = "parameter" if weight else "constant"
        external = tensor.data_location == 1
        where = self._external(tensor, value) if external else None
        if not external:
            self._check_inline(tensor, value)
        if value.elements <= (_FEW if weight else MOST_KNOWN_ELEMENTS):
            value.data = self._content(tensor, value, where)
        tensor.ClearField("raw_data")
        return value

    def _check_inline(self, tensor: Any, value: Value) -> None:
        """Raise `FileFormatError` unless the file holds as many elements as the shape says."""
        if tensor.HasField("raw_data"):
            held, needed, unit = len(tensor.raw_data), value.size_bytes, "bytes"
        else:
            bits, per_element = ELEMENT_TYPES[value.code][1], 2 * value.dtype.startswith("complex")
            held = len(getattr(tensor, _FIELDS.get(value.code, "int32_data")))
            packed = value.size_bytes if bits < 8 else value.elements
            needed, unit = packed * max(per_element, 1), "numbers"
        if held != needed:
            raise FileFormatError(
                str(self.path), f"tensor {value.name!r} holds {held} {unit}, not {needed}"
            )

    def _external(self, tensor: Any, value: Value) -> tuple[Path, int]:
        """(file, offset) of a tensor's bytes. Raises `ExternalDataError`."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        file = self._inside(location, value.name)
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries.get("length") or value.size_bytes)
        except ValueError:
            offset = length = -1
        if offset < 0 or length != value.size_bytes:
            detail = f"an entry that does not fit its {value.size_bytes} bytes"
            raise ExternalDataError(str(self.path), value.name, location, detail)
        if not file.is_file():
            detail = "a file that is not there: put it beside the model"
            raise ExternalDataError(str(self.path), value.name, location, detail)
        if offset + length > file.stat().st_size:
            detail = f"which is cut short: bytes {offset} to {offset + length} are not all there"
            raise ExternalDataError(str(self.path), value.name, location, detail)
        return file, offset

    def _inside(self, location: Any, tensor: str) -> Path:
        """The file that a location names. Raises `EscapingDataError` for one elsewhere."""
        if not isinstance(location, str):  # it is not UTF-8
            raise EscapingDataError(str(self.path), tensor, repr(location), _ELSEWHERE)
        kinds = (PurePosixPath(location), PureWindowsPath(location))
        climbs = any(p.is_absolute() or p.drive or p.root or ".." in p.parts for p in kinds)
        folder = self.folder.resolve()
        if not location or "\0" in location or climbs:
            raise EscapingDataError(str(self.path), tensor, location, _ELSEWHERE)
        file = (folder / location).resolve()
        if not file.is_relative_to(folder):
            raise EscapingDataError(str(self.path), tensor, location, _ELSEWHERE)
        return file

    def _content(self, tensor: Any, value: Value, where: tuple[Path, int] | None) -> NDArray[Any]:
        onnx = onnx_library()
        if where is not None:
            file, offset = where
            with open(file, "rb") as data:
                data.seek(offset)
                raw = data.read(value.size_bytes)
            tensor = onnx.TensorProto(data_type=value.code, dims=value.shape, raw_data=raw)
        return np.asarray(onnx.numpy_helper.to_array(tensor))
