"""What a file is walked into: values, and the ops that make them."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.units import MOST_BYTES

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
"""Of a value that is computed while a file is read."""


@dataclass(eq=False)
class Value:
    """A tensor of the file.

    code    `TensorProto.DataType`
    data    its content, where that is known while the file is read: a shape, an index, a number
    role    kind of its source op; "" of what an op makes
    base    the value whose storage it shares; None: fresh memory
    op      the op that makes it; None of sources and of what is known
    literal   it stands in a node, not among the initializers
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
        """Can there be such a tensor? An axis of 0 beside it makes no other axis smaller."""
        elements = math.prod(max(size, 1) for size in self.shape)
        fits = elements * ELEMENT_TYPES[self.code][1] <= 8 * MOST_BYTES
        return fits and min(self.shape, default=0) >= 0

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def root(self) -> "Value":
        """What it is a view of, through all views; itself, if it is none."""
        found = self
        while found.base is not None:
            found = found.base
        return found

    @property
    def number(self) -> int | None:
        """The one number that it holds, where that is known."""
        if self.data is None or self.data.size != 1:
            return None
        return int(self.data.reshape(-1)[0])

    @property
    def is_weight(self) -> bool:
        """Is it a source that runs keep, of unknown content?"""
        return self.role in ("parameter", "buffer") or (
            self.role == "constant" and self.data is None
        )

    @property
    def attribute_like(self) -> bool:
        """A known number, or a few known integers: part of an op, not a tensor that it reads."""
        few = len(self.shape) <= 1 and self.elements <= 16 and not self.floating
        return self.data is not None and (not self.shape or few)


Found = Value | list[Value] | None
"""What a name stands for: a tensor, a sequence of them, or nothing."""


@dataclass(eq=False)
class Op:
    """A node that has a place on a device.

    kind       "onnx.Conv"
    leaf       last part of its name, behind the module
    inputs     by position; None where left out
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
        parts += [f"{key}={_plain(value)}" for key, value in sorted(self.attributes.items())]
        return f"{self.kind}({', '.join(parts)})"


def _text(value: Value | None) -> str:
    if value is None:
        return "-"
    if value.attribute_like and value.data is not None:
        return str(value.data.tolist())
    return f"{value.dtype}[{'x'.join(map(str, value.shape))}]"


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return str(np.asarray(value).shape) if isinstance(value, np.ndarray) else type(value).__name__
