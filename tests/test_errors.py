"""Errors travel between processes."""

import pickle

import pytest

from dovetail.errors import (
    CallbackError,
    DovetailError,
    OutOfMemoryError,
    ProcessError,
    UnwritableError,
)

ERRORS = [
    DovetailError("a message"),
    UnwritableError("/full/log", "no space left on device"),
    ProcessError("worker 0", "a traceback"),
    OutOfMemoryError("gpu0", 2**30, 2**20),
    CallbackError("on_epoch of Mine", "ValueError: no", "mine.py:3: raise"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
