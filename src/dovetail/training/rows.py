"""A history's rows as flat numbers, for snapshots."""

import struct
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.training.records import Commit, Row

_FIELDS = [field.name for field in fields(Row)]
_WHOLE = {name for name, kind in Row.__annotations__.items() if kind is int}
_STRUCT = struct.Struct(f"={len(_FIELDS)}d")


def make_row(clock: int, staleness: int, commit: Commit, norm: float, seconds: float) -> Row:
    """A commit's row, without momentum."""
    return Row(
        clock=clock,
        worker=commit.worker,
        sequence=commit.sequence,
        staleness=staleness,
        steps=commit.steps,
        samples=commit.samples,
        loss=commit.loss,
        norm=norm,
        seconds=seconds,
        begin_seconds=commit.begin_seconds,
        end_seconds=commit.end_seconds,
    )


def pack(row: Row) -> bytes:
    """A row as float64; its integers stay exact up to 2^53."""
    return _STRUCT.pack(*vars(row).values())


def unpack(packed: NDArray[np.float64]) -> list[Row]:
    """The rows that were packed, one after the other."""
    table = packed.reshape(-1, len(_FIELDS)).tolist()
    return [_row(values) for values in table]


def _row(values: list[float]) -> Row:
    named = zip(_FIELDS, values, strict=True)
    fields: dict[str, Any] = {n: int(value) if n in _WHOLE else value for n, value in named}
    return Row(**fields)
