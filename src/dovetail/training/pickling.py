"""Finds out whether an object can be sent to another process, and which part of it cannot."""

import io
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import cloudpickle

from dovetail.errors import UsageError

_DEEPEST = 12
"""The search for the part that cannot be sent goes no deeper than this."""


class _Nowhere(io.RawIOBase):
    """A file that discards what is written to it."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return len(memoryview(content).cast("B"))


def check_travels(parts: Mapping[str, object]) -> None:
    """Raises a `UsageError` that names the attribute, if cloudpickle cannot pickle a part."""
    for name, part in parts.items():
        error = _refusal(part)
        if error is not None:
            path, culprit = _culprit(name, part, _DEEPEST)
            raise UsageError(
                name,
                f"cannot be sent to workers: {path} is a {type(culprit).__name__}, which cannot "
                f"be pickled ({_refusal(culprit) or error}); make it where it is used, or leave "
                "it out by __getstate__",
            )


def _refusal(part: object) -> str | None:
    """Why the part cannot be pickled; None if it can be. Arrays are not copied to find that out."""
    try:
        # A callback that returns None takes a buffer out of the pickled stream.
        pickler = cloudpickle.Pickler(_Nowhere(), protocol=5, buffer_callback=lambda _buffer: None)
        pickler.dump(part)
    except Exception as error:  # whatever its own __reduce__ may raise
        return str(error) or type(error).__name__
    return None


def _culprit(path: str, part: object, depth: int) -> tuple[str, object]:
    """The path to the innermost part that cannot be pickled, and that part."""
    if depth:
        for step, inner in _inside(part):
            if _refusal(inner) is not None:
                return _culprit(f"{path}{step}", inner, depth - 1)
    return path, part


def _inside(part: Any) -> Iterator[tuple[str, object]]:
    """(step of the path, object) pairs of what an object holds."""
    if isinstance(part, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in part.items())
    elif isinstance(part, list | tuple | set | frozenset):
        yield from ((f"[{number}]", value) for number, value in enumerate(part))
    elif isinstance(part, MethodType):
        yield ".__self__", part.__self__
    elif isinstance(part, FunctionType):
        cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=False)
        yield from ((f" (its {name})", cell.cell_contents) for name, cell in cells)
        names = part.__code__.co_names
        yield from (
            (f" (its {name})", part.__globals__[name]) for name in names if name in part.__globals__
        )
    else:
        for slot, value in list(getattr(part, "__dict__", {}).items()):
            if slot in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
                yield from ((f".{name}", inner) for name, inner in value.items())
            else:
                yield f".{slot}", value
        for slot in ("func", "args", "keywords"):  # functools.partial
            if hasattr(part, slot) and slot not in getattr(part, "__dict__", {}):
                yield f".{slot}", getattr(part, slot)
