"""Histories as files, without the parameters.

JSON, gzip when the name ends in `.gz`:

    {"format": "dovetail.history", "version": 1, "meta": {...},
     "clock": 10, "samples": 1280, "seconds": 3.5, "stopped": false,
     "commits":     {"clock": [...], "worker": [...], ...},              the fields of `Row`
     "evaluations": [{"clock": .., "samples": .., "seconds": .., "figures": {NAME: VALUE}}, ...],
     "events":      [{"kind": .., "worker": .., "seconds": .., "detail": ..}, ...]}

A float that is not finite is the text "nan", "inf" or "-inf", since JSON has no such numbers.

CSV: one line a record, commits first. Column `record` is `commit`, `evaluation` or `event`; then
the fields of `Row`, `detail` (of an event, which has its kind in `kind`), and a column
`figure:NAME` for each figure. What does not belong to a record is empty. Floats are written so
that they are read as they were.
"""

import csv
import gzip
import io
import json
import math
import os
from itertools import chain
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.errors import FileFormatError
from dovetail.runtime.files import read_json, write_atomically
from dovetail.training.history import COLUMNS
from dovetail.training.records import Evaluation, Event, Outcome, Row

FORMAT, VERSION = "dovetail.history", 1
KEYS = ("record", "kind", *COLUMNS, "detail")
FIGURE = "figure:"
MOST_FIGURES = 1000
_STRICT = ConfigDict(extra="forbid")


class _Commits(BaseModel):
    model_config = _STRICT
    clock: list[int]
    worker: list[int]
    sequence: list[int]
    staleness: list[int]
    steps: list[int]
    samples: list[int]
    loss: list[float]
    norm: list[float]
    seconds: list[float]
    begin_seconds: list[float]
    end_seconds: list[float]
    momentum: list[float]


class _Evaluation(BaseModel):
    model_config = _STRICT
    clock: int
    samples: int
    seconds: float
    figures: dict[str, float]


class _Event(BaseModel):
    model_config = _STRICT
    kind: str
    worker: int
    seconds: float
    detail: str


class _History(BaseModel):
    model_config = _STRICT
    format: Literal["dovetail.history"]
    version: Literal[1]
    meta: dict[str, Any]
    clock: int
    samples: int
    seconds: float
    stopped: bool
    commits: _Commits
    evaluations: list[_Evaluation]
    events: list[_Event]


def save_history(outcome: Outcome, path: str | os.PathLike[str]) -> None:
    """Write an outcome but for `theta`, whole or not at all. Raises `UnwritableError`."""
    raw = {
        "format": FORMAT,
        "version": VERSION,
        "meta": _plain(outcome.meta),
        "clock": outcome.clock,
        "samples": outcome.samples,
        "seconds": outcome.seconds,
        "stopped": outcome.stopped,
        "commits": {name: [_plain(getattr(row, name)) for row in outcome.rows] for name in COLUMNS},
        "evaluations": [_plain(vars(evaluation)) for evaluation in outcome.evaluations],
        "events": [_plain(vars(event)) for event in outcome.events],
    }
    text = json.dumps(raw, allow_nan=False).encode()
    write_atomically(path, gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


def load_history(path: str | os.PathLike[str]) -> Outcome:
    """What `save_history` wrote, `theta` empty. Raises `FileFormatError`."""
    name = os.fspath(path)
    raw = read_json(name)
    try:
        read = _History.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(name, f"no saved history: {where}: {first['msg']}") from None
    columns = [getattr(read.commits, column) for column in COLUMNS]
    if len({len(column) for column in columns}) > 1:
        raise FileFormatError(name, "its columns are not of one length")
    return _checked(
        name,
        Outcome(
            theta=np.zeros(0, dtype=np.float32),
            clock=read.clock,
            samples=read.samples,
            seconds=read.seconds,
            rows=tuple(Row(*values) for values in zip(*columns, strict=True)),
            events=tuple(Event(**vars(event)) for event in read.events),
            evaluations=tuple(Evaluation(**vars(found)) for found in read.evaluations),
            stopped=read.stopped,
            meta=read.meta,
        ),
    )


def _plain(value: Any) -> Any:
    """As JSON has it: non-finite floats as text, tuples as lists, numpy's numbers as Python's,
    and anything else as its text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _checked(path: str, outcome: Outcome) -> Outcome:
    """The outcome, if its times and counts can be drawn."""
    moments = [outcome.seconds]
    moments += [row.seconds for row in outcome.rows]
    moments += [event.seconds for event in outcome.events]
    moments += [evaluation.seconds for evaluation in outcome.evaluations]
    spans = (s for row in outcome.rows for s in (row.begin_seconds, row.end_seconds))
    if not all(map(math.isfinite, chain(moments, spans))):
        raise FileFormatError(path, "a time is not finite")
    counts = (
        n for row in outcome.rows for n in (row.samples, row.staleness, row.worker, row.clock)
    )
    if not all(0 <= n < 2**53 for n in counts):
        raise FileFormatError(path, "a commit's samples, staleness, worker or clock is no count")
    return outcome


def write_csv(outcome: Outcome, path: str | os.PathLike[str]) -> None:
    """Write commits, evaluations and events, whole or not at all. Raises `UnwritableError`."""
    names = dict.fromkeys(name for e in outcome.evaluations for name in e.figures)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*KEYS, *(FIGURE + name for name in names)], lineterminator="\n")
    writer.writeheader()
    for row in outcome.rows:
        writer.writerow({"record": "commit", **vars(row)})
    for evaluation in outcome.evaluations:
        named = {FIGURE + name: value for name, value in evaluation.figures.items()}
        seen = {name: getattr(evaluation, name) for name in ("clock", "samples", "seconds")}
        writer.writerow({"record": "evaluation", **seen, **named})
    for event in outcome.events:
        writer.writerow({"record": "event", **vars(event)})
    write_atomically(path, text.getvalue().encode("utf-8", "backslashreplace"))


def read_csv(path: str | os.PathLike[str]) -> Outcome:
    """What `write_csv` wrote. Clock, samples and seconds are those of the last commits. Raises
    `FileFormatError`."""
    name = os.fspath(path)
    rows, evaluations, events = [], [], []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            heads = reader.fieldnames or ()
            if tuple(heads[: len(KEYS)]) != KEYS or len(heads) > len(KEYS) + MOST_FIGURES:
                raise FileFormatError(name, f"its columns are not {', '.join(KEYS)}")
            for line in reader:
                if line["record"] == "commit":
                    rows.append(_row(line))
                elif line["record"] == "evaluation":
                    evaluations.append(_evaluation(line))
                elif line["record"] == "event":
                    events.append(_event(line))
                else:
                    raise ValueError(f"{line['record']!r} is no record")
    except OSError as error:
        raise FileFormatError(name, error.strerror or str(error)) from None
    except (ValueError, TypeError, csv.Error) as error:  # TypeError: a line that is too short
        raise FileFormatError(name, f"line {reader.line_num}: {error}") from None
    return _checked(
        name,
        Outcome(
            theta=np.zeros(0, dtype=np.float32),
            clock=max((row.clock for row in rows), default=0),
            samples=sum(row.samples for row in rows),
            seconds=max([0.0, *(row.seconds for row in rows), *(e.seconds for e in evaluations)]),
            rows=tuple(rows),
            events=tuple(events),
            evaluations=tuple(evaluations),
        ),
    )


def _row(line: dict[str, str]) -> Row:
    return Row(**{name: kind(line[name]) for name, kind in COLUMNS.items()})  # type: ignore[operator]


def _evaluation(line: dict[str, str]) -> Evaluation:
    figures = {
        key.removeprefix(FIGURE): float(value)
        for key, value in line.items()
        if key.startswith(FIGURE) and value
    }
    return Evaluation(int(line["clock"]), int(line["samples"]), float(line["seconds"]), figures)


def _event(line: dict[str, str]) -> Event:
    return Event(line["kind"], int(line["worker"]), float(line["seconds"]), line["detail"])
