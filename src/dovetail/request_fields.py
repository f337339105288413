"""Fields of request records: what a field means, and how the command line spells and reads it.

    @documented
    @dataclass(frozen=True)
    class PlanRequest:
        gap: float = option(0.0, "Stop at a plan that is proven to be within this share ...")
        pins: Sequence[tuple[str, str]] = option(
            (), "Keep the ops and modules that match a pattern on a device",
            "--pin", kind=list[str], syntax="PATTERN=DEVICE, e.g. lstm.0=cpu0", read=read_pairs,
        )

So a field is written down once: its default, its note in the record's docstring, and the option of
each command that takes it (`cli.options`). Nothing here imports torch or numpy, so that the command
line shows its help at once.
"""

import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from dovetail.errors import UsageError
from dovetail.units import parse_bytes

Value = TypeVar("Value")
Record = TypeVar("Record", bound=type)
OPTION = "option"
"""The key of an `Option` in a field's metadata."""
NOTE_COLUMNS = 100
"""Notes in a docstring are wrapped at this many columns."""


@dataclass(frozen=True)
class Option:
    """What a field means, and its option on the command line.

    help      what the field means, in one line
    flags     the spelling, as "--pin" or "--compile/--no-compile". By default as the field is named
    kind      the type of the option's value. By default that of the field's default
    read      (flag, value) -> what the field holds. By default it holds the value itself
    syntax    the form of the texts that `read` takes, which the help shows first
    shown     the default, if the help tells it in words
    variable  the environment variable that sets the option as well
    least     the least number
    metavar   how the help names the value
    more      what the record's docstring says beyond the help
    default   the option's default: the field's, or None where `kind` is another type
    """

    help: str
    flags: tuple[str, ...] = ()
    kind: Any = None
    read: Callable[[str, Any], Any] | None = None
    syntax: str = ""
    shown: str = ""
    variable: str | None = None
    least: int | None = None
    metavar: str | None = None
    more: str = ""
    default: Any = None

    @property
    def flag(self) -> str:
        """How the command line spells the option, without its negative."""
        return self.flags[0].partition("/")[0]


def option(default: Value, help: str, *flags: str, **settings: Any) -> Value:
    """A field that is an option of commands. `settings` are further fields of `Option`."""
    return field(default=default, metadata={OPTION: Option(help, flags, **settings)})


def option_made(make: Callable[[], Value], help: str, *flags: str, **settings: Any) -> Value:
    """The same for a field whose default is made anew for each record, as a dict is."""
    return field(default_factory=make, metadata={OPTION: Option(help, flags, **settings)})


def options_of(record: type) -> dict[str, Option]:
    """The options of a record by the name of their field, in the record's order. What a field does
    not say of its option is filled in."""
    options = {}
    for each in fields(record):
        if (declared := each.metadata.get(OPTION)) is None:
            continue
        options[each.name] = replace(
            declared,
            flags=declared.flags or (f"--{each.name.replace('_', '-')}",),
            kind=declared.kind | None if declared.kind else type(each.default),
            default=None if declared.kind else each.default,
        )
    return options


def documented(record: Record) -> Record:
    """A decorator that adds the notes of a record's options to its docstring."""
    notes = []
    for name, of_field in options_of(record).items():
        note = ". ".join(part for part in (of_field.help, of_field.more) if part)
        wrapped = textwrap.wrap(
            f"{name:<15} {note}", NOTE_COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 20
        )
        notes += wrapped
    record.__doc__ = (record.__doc__ or "").rstrip() + "\n\n" + "\n".join(notes) + "\n    "
    return record


# --- How texts are read. Each function takes the flag, which its error names, and the value. ---


def read_pairs(flag: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The pairs that texts "NAME=VALUE" name, each split at its last "=". Raises `UsageError` for a
    text without both parts."""
    pairs = []
    for text in texts:
        left, equals, right = text.rpartition("=")
        if not (left and equals and right):
            raise UsageError(flag, f"{text!r} is not of the form NAME=VALUE")
        pairs.append((left, right))
    return tuple(pairs)


def read_sizes(flag: str, texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The pairs (name, bytes) that texts such as "cpu0=2GiB" name. Raises `UsageError`."""
    try:
        return tuple((name, parse_bytes(size)) for name, size in read_pairs(flag, texts))
    except ValueError as error:
        raise UsageError(flag, str(error)) from None


def read_values(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """The dict that texts KEY=VALUE name, whose values are numbers, true, false, none, or text.
    Raises `UsageError`."""
    values: dict[str, Any] = {}
    for key, text in read_pairs(flag, texts):
        values[key] = {"true": True, "false": False, "none": None}.get(text.lower(), text)
        # A whole number is an int, and any other number a float.
        for kind in (float, int):
            with suppress(ValueError):
                values[key] = kind(text)
    return values


def read_share(flag: str, text: str) -> float:
    """The share that "2%" or ".02" names. Raises `UsageError`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(flag, f"{text!r} is not a share; write 2% or .02")
    return share


def read_seconds(flag: str, text: str, *, may_be_none: bool = False) -> float:
    """The seconds that "60", "60s" or "2m" names, above 0, or 0 as well. Raises `UsageError`."""
    scale = {"s": 1.0, "m": 60.0}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        seconds = -1.0
    if not (0 < seconds < 1e9 or (may_be_none and seconds == 0)):
        raise UsageError(flag, f"is a time such as 60s or 2m, not {text!r}")
    return seconds


def read_names(flag: str, text: str) -> tuple[str, ...]:
    """The names that a text lists with commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
