"""Inputs of a model and their shapes: what the file leaves open, the caller says."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.errors import ModelError, OpenAxisError, UsageError
from dovetail.frontends.onnx.records import ELEMENT_TYPES, Value

Shapes = Mapping[str, Sequence[int]] | Sequence[Sequence[int]]
"""Input -> shape, or the shapes of all inputs in their order."""
Axis = int | str
"""A size, or the name of an open axis; "" for one without."""


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """{"image": (1, 3, 224, 224)} of ["image=1x3x224x224"]. Raises `UsageError`."""
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
    """The inputs as sources. An open axis takes its size from `shapes`, or from another input
    whose axis has the same name.

    Raises `OpenAxisError` for an axis that stays open, `ModelError` for shapes that do not fit.
    """
    declared = {value.name: _declared(model, value) for value in inputs}
    given = _by_name(model, list(declared), shapes)
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        _bind(model, name, declared[name][1], shape, sizes)
    values = []
    for name, (code, axes) in declared.items():
        if name in given:
            shape = given[name]
        else:
            known = [
                sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in axes or ()
            ]
            if axes is None or any(isinstance(size, str) for size in known):
                raise OpenAxisError(model, name, None if axes is None else tuple(known))
            shape = tuple(int(size) for size in known)
        value = Value(name, code, shape, role="input")
        if not value.possible:
            raise ModelError(model, f"input {name!r} has the impossible shape {shape}")
        values.append(value)
    return values


def _declared(model: str, value: Any) -> tuple[int, list[Axis] | None]:
    """(type, axes) that the file states; axes None: not even their number."""
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


def _by_name(model: str, names: list[str], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    if not isinstance(shapes, Mapping):
        if len(shapes) != len(names):
            raise ModelError(model, f"has {len(names)} inputs, but {len(shapes)} shapes are given")
        return {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
    for name in shapes:
        if name not in names:
            raise ModelError(model, f"has no input {name!r}; it has {', '.join(names)}")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _bind(
    model: str,
    name: str,
    axes: list[Axis] | None,
    shape: tuple[int, ...],
    sizes: dict[str, int],
) -> None:
    """Note the sizes of the named axes. Raises `ModelError` for a shape that does not fit."""
    if any(size < 0 for size in shape) or (0 in shape and 0 not in (axes or ())):
        raise ModelError(
            model, f"input {name!r} cannot have the shape {shape}; its sizes must be positive"
        )
    if axes is None:
        return
    fits = len(axes) == len(shape)
    for axis, size in zip(axes, shape, strict=False):
        known = sizes.setdefault(axis, size) if isinstance(axis, str) and axis else axis
        fits = fits and known in (size, "")
    if not fits:
        declared = "x".join(str(axis or "?") for axis in axes)
        wanted = "x".join(map(str, shape))
        raise ModelError(model, f"input {name!r} is {declared}, which {wanted} does not fit")
