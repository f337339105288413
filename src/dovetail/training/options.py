"""Checks the values of options. Each check raises a `UsageError` that names the option."""

import math
from typing import Any

from dovetail.errors import UsageError


def positive(option: str, value: Any) -> None:
    """Raises unless `value` is a finite number above 0."""
    if not _is_number(value) or value <= 0:
        raise UsageError(option, f"must be a number above 0, not {value!r}")


def not_negative(option: str, value: Any) -> None:
    """Raises unless `value` is a finite number of at least 0."""
    if not _is_number(value) or value < 0:
        raise UsageError(option, f"must be a number of at least 0, not {value!r}")


def fraction(option: str, value: Any) -> None:
    """Raises unless `value` is a finite number of at least 0 and below 1."""
    if not _is_number(value) or not 0 <= value < 1:
        raise UsageError(option, f"must be at least 0 and below 1, not {value!r}")


def count(option: str, value: Any, least: int = 1) -> None:
    """Raises unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(option, f"must be a whole number of at least {least}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
