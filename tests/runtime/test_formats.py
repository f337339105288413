"""A record lists its fields once; its file follows from them."""

from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from dovetail.runtime import formats
from dovetail.runtime.formats import FILE_NAME, FINITE, file_type, first_complaint, to_file


@dataclass(frozen=True)
class Names:
    values: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Record:
    count: Annotated[int, Field(ge=0)]
    weights: NDArray[np.float64]
    names: Names | None = None
    rates: dict[str, float] = field(default_factory=dict)
    flag: bool = False
    size_bytes: int = field(default=0, metadata={FILE_NAME: "bytes"})
    kept: object = field(default=None, metadata={FILE_NAME: None})


ADAPTER = TypeAdapter(file_type(Record, FINITE))
RAW = {
    "count": 2, "weights": [0.5, 1.0], "names": ["a", "b"], "rates": {"x": 1.5}, "flag": True,
    "bytes": 8,
}  # fmt: skip


def test_a_record_is_read_from_its_own_form_and_written_back_to_it():
    record = ADAPTER.validate_python(RAW)
    assert isinstance(record, Record)
    assert (record.count, record.names, record.size_bytes) == (2, Names(("a", "b")), 8)
    assert record.weights.dtype == np.float64
    assert to_file(record) == RAW


def test_a_field_with_a_default_may_be_missing():
    record = ADAPTER.validate_python({"count": 0, "weights": []})
    assert (record.names, record.rates, record.flag, record.kept) == (None, {}, False, None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"count": True}, "count: Input should be a number, not true or false"),
        ({"count": -1}, "count: Input should be greater than or equal to 0"),
        ({"rates": {"x": False}}, "rates.x: Input should be a number, not true or false"),
        ({"rates": {"x": float("inf")}}, "rates.x: Input should be a finite number"),
        ({"weights": [1.0, True]}, "weights: Input should hold numbers, not true or false"),
        ({"bytes": "many"}, "bytes: Input should be a valid integer"),
        ({"size_bytes": 1}, "size_bytes: Extra inputs are not permitted"),
        ({"kept": 1}, "kept: Extra inputs are not permitted"),
        ({"names": [1]}, "names.0: Input should be a valid string"),
    ],
)
def test_what_does_not_fit_a_field_is_refused_by_its_name(change, complaint):
    with pytest.raises(ValidationError) as raised:
        ADAPTER.validate_python(RAW | change)
    assert first_complaint(raised.value).startswith(complaint)


def test_what_is_no_object_is_refused():
    with pytest.raises(ValidationError) as raised:
        ADAPTER.validate_python(3)
    assert first_complaint(raised.value) == "it is no JSON object"


def test_arrays_are_seen_where_numpy_names_their_type_by_an_alias(monkeypatch):
    """NumPy 2.5 does so on Python 3.12 and later."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("NDArray", NDArray[scalar], type_params=(scalar,))
    monkeypatch.setattr(formats, "NDArray", alias)
    for array in (NDArray, alias):
        assert formats.dtype_of(array[np.int32]) is np.int32
    assert formats.dtype_of(tuple[int, ...]) is formats.dtype_of(int) is None
