"""Derives file formats from records: a dataclass lists its fields once, and the pydantic model that
reads them from JSON or TOML is built from that list.

    @dataclass(frozen=True)
    class Device:
        kind: str
        memory_bytes: int = field(metadata={FILE_NAME: "memory"})
        state: object = field(default=None, metadata={FILE_NAME: None})    # not in files

    {"kind": "cpu", "memory": 8}   ──file_type(Device)──►   Device("cpu", 8)
                                   ◄──────to_file───────

A record within a record is an object within an object, but a record of one field is written as
that field alone. An array is a list of numbers. A type `Annotated` with a `pydantic.Field` is
checked by it, and unknown names are refused.
"""

from dataclasses import MISSING, fields, is_dataclass
from functools import partial, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticCustomError

FILE_NAME = "file_name"
"""Key of a dataclass field's metadata: the field's name in files; None keeps it out of files."""
STRICT = ConfigDict(extra="forbid")
"""Unknown names in a file are refused, not ignored."""
FINITE = ConfigDict(extra="forbid", allow_inf_nan=False)
"""As `STRICT`, and NaN and Infinity, which Python's JSON reads, are refused as well."""


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("bool", "Input should be a number, not true or false")
    return value


def _refuse_bools(values: Any) -> Any:
    if isinstance(values, list) and bool in set(map(type, values)):
        raise PydanticCustomError("bool", "Input should hold numbers, not true or false")
    return values


# For models that are written by hand: types of numbers that refuse booleans, as `file_type` does.
Number = Annotated[float, BeforeValidator(_refuse_bool)]
Numbers = Annotated[list[float], BeforeValidator(_refuse_bools)]
Whole = Annotated[int, BeforeValidator(_refuse_bool)]
Version1 = Annotated[Literal[1], BeforeValidator(_refuse_bool)]
WholeNumbers = Annotated[list[int], BeforeValidator(_refuse_bools)]


def file_type(hint: Any, config: ConfigDict = STRICT) -> Any:
    """The type against which pydantic validates a file's JSON, for a record or a field's type.

    Validation gives the record itself. Where Python counts True as 1, a file's `true` is refused.
    """
    if hint in (int, float):
        return Annotated[hint, BeforeValidator(_refuse_bool)]
    if is_dataclass(hint):
        record: Any = hint
        hints = get_type_hints(record, include_extras=True)
        if len(hints) == 1:
            only = next(iter(hints.values()))
            return Annotated[file_type(only, config), AfterValidator(record)]
        model = file_model(record, config)

        def build(read: BaseModel) -> Any:
            return record(**{f.name: getattr(read, f.name) for f, _ in file_fields(record)})

        return Annotated[model, AfterValidator(build)]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(file_type(arguments[0], config), *arguments[1:])]
    if (dtype := dtype_of(hint)) is not None:
        return array_type(dtype)
    if origin in (Union, UnionType):
        return reduce(or_, (file_type(argument, config) for argument in arguments))
    if origin in (tuple, list, dict):
        return origin[tuple(a if a is ... else file_type(a, config) for a in arguments)]
    return hint


def dtype_of(hint: Any) -> Any:
    """The dtype of an array's type, as of `NDArray[np.int32]`; None for what is no array."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return get_args(arguments[1])[0]
    # On Python 3.12 and later, NumPy 2.5 makes it a `type` alias, whose origin is itself.
    return arguments[0] if origin is NDArray else None


def array_type(dtype: Any, entry: Any = None) -> Any:
    """The type of a list in a file that becomes an array of this dtype.

    entry   the type of each entry; None stands for the Python type of the dtype

    Booleans are looked for in a whole list at once, because columns can be large.
    """
    kind = np.dtype(dtype).kind
    entry = entry or {"b": bool, "i": int, "f": float}[kind]
    refuse = [] if kind == "b" else [BeforeValidator(_refuse_bools)]
    return Annotated[(list[entry], *refuse, AfterValidator(partial(np.array, dtype=dtype)))]


def file_model(record: type[Any], config: ConfigDict = STRICT, **more: Any) -> type[BaseModel]:
    """The pydantic model of a record's fields as they stand in files, and of `more` beside them."""
    hints = get_type_hints(record, include_extras=True)
    listed: dict[str, Any] = {}
    for field, name in file_fields(record):
        options: dict[str, Any] = {"alias": name} if name != field.name else {}
        if field.default is not MISSING:
            options["default"] = field.default
        elif field.default_factory is not MISSING:
            options["default_factory"] = field.default_factory
        listed[field.name] = (file_type(hints[field.name], config), Field(**options))
    model: type[BaseModel] = create_model(record.__name__, __config__=config, **listed, **more)
    return model


def file_fields(record: Any) -> list[tuple[Any, str]]:
    """(field, its name in files) of the fields of a record, or of its class, that files hold."""
    named = [(field, field.metadata.get(FILE_NAME, field.name)) for field in fields(record)]
    return [(field, name) for field, name in named if name is not None]


def to_file(value: Any) -> Any:
    """The value as JSON and TOML hold it; `file_type` of the value's type reads it back."""
    if is_dataclass(value):
        written = {name: to_file(getattr(value, field.name)) for field, name in file_fields(value)}
        return written if len(fields(value)) > 1 else next(iter(written.values()))
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [to_file(entry) for entry in value]
    if isinstance(value, dict):
        return {key: to_file(entry) for key, entry in value.items()}
    return value


def first_complaint(error: ValidationError) -> str:
    """The first error that pydantic found, as "ops.flops.3: Input should be a valid integer"."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return "it is no JSON object"
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
