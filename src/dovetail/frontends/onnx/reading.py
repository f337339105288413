"""Reads an ONNX file and what it says of its tensors, without the bytes of weights.

So a model of any size is read in little memory. The bytes must exist all the same. Data outside the
file must be inside the file's folder: a location that is absolute, climbs with "..", or leads out
through a symbolic link is refused.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    OpenAxisError,
    UsageError,
)
from dovetail.runtime.files import files_only
from dovetail.units import MOST_BYTES

# Values, and the ops that make them.


ELEMENT_TYPES = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16),
    6: ("int32", 32), 7: ("int64", 64), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64),
    12: ("uint32", 32), 13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128),
    16: ("bfloat16", 16), 17: ("float8_e4m3fn", 8), 18: ("float8_e4m3fnuz", 8),
    19: ("float8_e5m2", 8), 20: ("float8_e5m2fnuz", 8), 21: ("uint4", 4), 22: ("int4", 4),
    23: ("float4_e2m1", 4), 24: ("float8_e8m0", 8), 25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
"""`TensorProto.DataType` -> (dtype, bits an element takes, packed). Text (8) has no size."""
MOST_KNOWN_ELEMENTS = 2**16
"""Values of at most this many elements are computed while a file is read."""


@dataclass(eq=False)
class Value:
    """A tensor of the file.

    code    `TensorProto.DataType`
    data    its content, if that is known while the file is read: a shape, an index, a number
    role    the kind of its source op; "": an op makes it
    base    the value whose storage it shares; None: fresh memory
    op      the op that makes it; None for sources and for known values
    literal   True if it stands in a node and not among the initializers
    """

    name: str
    code: int
    shape: tuple[int, ...]
    data: NDArray[Any] | None = None
    role: str = ""
    base: "Value | None" = None
    op: "Op | None" = None
    literal: bool = False

    @property
    def dtype(self) -> str:
        return ELEMENT_TYPES[self.code][0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return -(-self.elements * ELEMENT_TYPES[self.code][1] // 8)

    @property
    def possible(self) -> bool:
        """True if a tensor of this shape can exist. An axis of 0 does not excuse a huge other
        axis."""
        elements = math.prod(max(size, 1) for size in self.shape)
        fits = elements * ELEMENT_TYPES[self.code][1] <= 8 * MOST_BYTES
        return fits and min(self.shape, default=0) >= 0

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def root(self) -> "Value":
        """The value that this one is a view of, through all views; itself if it is no view."""
        value = self
        while value.base is not None:
            value = value.base
        return value

    @property
    def number(self) -> int | None:
        """The one number that it holds, where that is known."""
        if self.data is None or self.data.size != 1:
            return None
        return int(self.data.reshape(-1)[0])

    @property
    def is_weight(self) -> bool:
        """True for a source that is held between steps and whose content is unknown."""
        return self.role in ("parameter", "buffer") or (
            self.role == "constant" and self.data is None
        )

    @property
    def attribute_like(self) -> bool:
        """True for a known number or a few known integers. They are part of an op and not a tensor
        that it reads."""
        few = len(self.shape) <= 1 and self.elements <= 16 and not self.floating
        return self.data is not None and (not self.shape or few)


NodeValue = Value | list[Value] | None
"""The value that a name stands for: a tensor, a sequence of tensors, or nothing."""


@dataclass(eq=False)
class Op:
    """A node that runs on a device.

    kind       such as "onnx.Conv"
    leaf       the last part of its name, behind the module
    inputs     by position; None where one is left out
    """

    kind: str
    leaf: str
    module: str
    inputs: tuple[Value | None, ...]
    attributes: dict[str, Any]
    outputs: list[Value] = field(default_factory=list)
    view: bool = False

    @property
    def reads(self) -> list[Value]:
        """The distinct tensors that it reads, in argument order."""
        read = [v for v in self.inputs if v is not None and not v.attribute_like]
        return list(dict.fromkeys(read))

    @property
    def signature(self) -> str:
        """kind(inputs, attributes), each tensor as dtype[shape]."""
        parts = [_text(value) for value in self.inputs]
        parts += [f"{key}={_format_value(value)}" for key, value in sorted(self.attributes.items())]
        return f"{self.kind}({', '.join(parts)})"


def _text(value: Value | None) -> str:
    if value is None:
        return "-"
    if value.attribute_like and value.data is not None:
        return str(value.data.tolist())
    return f"{value.dtype}[{'x'.join(map(str, value.shape))}]"


def _format_value(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    return str(np.asarray(value).shape) if isinstance(value, np.ndarray) else type(value).__name__


_FEW = 16
"""A weight of at most this many elements is read, because it may decide a shape, like the scales of
a resize."""
_ELSEWHERE = "which is not a file in the model's own folder: it is not opened"
_FIELDS = {
    1: "float_data", 14: "float_data", 11: "double_data", 15: "double_data", 7: "int64_data",
    12: "uint64_data", 13: "uint64_data",
}  # fmt: skip
"""`TensorProto.DataType` -> the field that holds the elements of a tensor without raw bytes; for
other types it is `int32_data`."""


def onnx_library() -> Any:
    """The package `onnx`. Raises `MissingLibraryError`."""
    try:
        import onnx
        import onnx.reference  # noqa: F401  it is used as onnx.reference
        import onnx.shape_inference  # noqa: F401  and as onnx.shape_inference
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
        with open(path, "rb", opener=files_only) as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                # The file is mapped, so that the bytes of weights inside it are not copied twice.
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
    opsets = [*model.opset_import, *(opset for f in model.functions for opset in f.opset_import)]
    if any(not 0 < opset.version < 2**31 for opset in opsets):
        raise FileFormatError(str(path), "not an ONNX model: it has an opset of no version")
    return model


def _texts(model: Any) -> Iterator[Any]:
    """Yield the names in a model; a name that is not UTF-8 comes as bytes."""
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
    """Reads the type and shape of a file's tensors, and frees their bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.parent

    def value(self, tensor: Any, name: str) -> Value:
        """Return the tensor as a source, with its content if that may decide a shape.

        Its role is "parameter" if it has an axis and is floating point or quantized in at most 8
        bits, else "constant". Raises `ModelError`, `FileFormatError` or `ExternalDataError`.
        """
        onnx = onnx_library()
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
            held = tensor
            if where is not None:
                file, offset = where
                with open(file, "rb") as data:
                    data.seek(offset)
                    raw = data.read(value.size_bytes)
                held = onnx.TensorProto(data_type=code, dims=shape, raw_data=raw)
            value.data = np.asarray(onnx.numpy_helper.to_array(held))
        tensor.ClearField("raw_data")
        return value

    def _check_inline(self, tensor: Any, value: Value) -> None:
        """Raise `FileFormatError` unless the file holds as many elements as the shape says."""
        if tensor.HasField("segment"):
            raise FileFormatError(str(self.path), f"tensor {value.name!r} is only a part of one")
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
        """(file, offset) of a tensor's bytes. Raises `ExternalDataError`, for a file elsewhere
        `EscapingDataError`."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location: Any = entries.get("location", "")
        if not isinstance(location, str):  # it is not UTF-8
            raise EscapingDataError(str(self.path), value.name, repr(location), _ELSEWHERE)
        kinds = (PurePosixPath(location), PureWindowsPath(location))
        climbs = any(p.is_absolute() or p.drive or p.root or ".." in p.parts for p in kinds)
        folder = self.folder.resolve()
        if not location or "\0" in location or climbs:
            raise EscapingDataError(str(self.path), value.name, location, _ELSEWHERE)
        file = (folder / location).resolve()
        if not file.is_relative_to(folder):
            raise EscapingDataError(str(self.path), value.name, location, _ELSEWHERE)
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


# Inputs of a model and their shapes. The caller gives the sizes that the file leaves open.


Shapes = Mapping[str, Sequence[int]] | Sequence[Sequence[int]]
"""Input -> shape, or the shapes of all inputs in their order."""
Axis = int | str
"""A size, or the name of an open axis; "" for one without."""


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return {"image": (1, 3, 224, 224)} for ["image=1x3x224x224"]. Raises `UsageError`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = sizes.split("x")
        if not name or not all(part.isdecimal() and part.isascii() for part in parts):
            raise UsageError("--shape", f"{text!r} is not like image=1x3x224x224")
        if name in shapes:
            raise UsageError("--shape", f"input {name!r} has two shapes")
        shapes[name] = tuple(map(int, parts))
    return shapes


def input_values(model: str, inputs: Sequence[Any], shapes: Shapes) -> list[Value]:
    """Return the inputs as sources. An open axis takes its size from `shapes`, or from another
    input whose axis has the same name.

    Raises `OpenAxisError` for an axis that stays open, `ModelError` for shapes that do not fit.
    """
    declared = {value.name: _read_declaration(model, value) for value in inputs}
    if isinstance(shapes, Mapping):
        for name in shapes:
            if name not in declared:
                raise ModelError(model, f"has no input {name!r}; it has {', '.join(declared)}")
        given = {name: tuple(shape) for name, shape in shapes.items()}
    elif len(shapes) != len(declared):
        raise ModelError(model, f"has {len(declared)} inputs, but {len(shapes)} shapes are given")
    else:
        given = {name: tuple(shape) for name, shape in zip(declared, shapes, strict=True)}
    sizes: dict[str, int] = {}  # of the named axes
    for name, shape in given.items():
        axes = declared[name][1]
        if any(size < 0 for size in shape) or (0 in shape and 0 not in (axes or ())):
            raise ModelError(
                model, f"input {name!r} cannot have the shape {shape}; its sizes must be positive"
            )
        if axes is None:
            continue
        fits = len(axes) == len(shape)
        for axis, size in zip(axes, shape, strict=False):
            bound = sizes.setdefault(axis, size) if isinstance(axis, str) and axis else axis
            fits = fits and bound in (size, "")
        if not fits:
            stated = "x".join(str(axis or "?") for axis in axes)
            sought = "x".join(map(str, shape))
            raise ModelError(model, f"input {name!r} is {stated}, which {sought} does not fit")
    values = []
    for name, (code, axes) in declared.items():
        if name in given:
            shape = given[name]
        else:
            axis_sizes = [
                sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in axes or ()
            ]
            if axes is None or any(isinstance(size, str) for size in axis_sizes):
                raise OpenAxisError(model, name, None if axes is None else tuple(axis_sizes))
            shape = tuple(int(size) for size in axis_sizes)
        value = Value(name, code, shape, role="input")
        if not value.possible:
            raise ModelError(model, f"input {name!r} has the impossible shape {shape}")
        values.append(value)
    return values


def _read_declaration(model: str, value: Any) -> tuple[int, list[Axis] | None]:
    """Return (type, axes) that the file states; axes is None if not even their number is known."""
    if not value.type.HasField("tensor_type"):
        raise ModelError(model, f"input {value.name!r} is no tensor; only tensors can be planned")
    tensor = value.type.tensor_type
    if tensor.elem_type not in ELEMENT_TYPES:
        raise ModelError(model, f"input {value.name!r} is text or of an unknown type")
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
        for dim in tensor.shape.dim
    ]
