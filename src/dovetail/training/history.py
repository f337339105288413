"""Shows a run's outcome as columns, by epoch and as text, and writes and reads it as files.

    history = trainer.fit(dataset)
    history.columns["staleness"]                        # one entry a commit
    print(history.summary())
    history.save("run.json.gz"); history.to_csv("run.csv"); history.to_tensorboard("logs")

No file holds the parameters. The fields of the files are those of the records `Outcome`, `Row`,
`Evaluation` and `Event`.

JSON, gzip when the name ends in `.gz`:

    {"format": "dovetail.history", "version": 1,
     "clock": 10, "samples": 1280, "seconds": 3.5, "stopped": false, "meta": {...},
     "commits":     {"clock": [...], "worker": [...], ...},              a list per field of `Row`
     "evaluations": [{"clock": .., "samples": .., "seconds": .., "figures": {NAME: VALUE}}, ...],
     "events":      [{"kind": .., "worker": .., "seconds": .., "detail": ..}, ...]}

A float that is not finite is the text "nan", "inf" or "-inf", since JSON has no such numbers.

CSV: one line per record, commits first. The column `record` is `commit`, `evaluation` or `event`;
then come the fields of `Row` and `Event`, and a column `figure:NAME` for each figure. A cell that
does not belong to the line's record is empty. Floats are written so that reading gives the same
float.

TensorBoard: scalars, whose step is the number of samples that the center has seen:

    train/loss, train/norm, train/staleness, train/implicit_momentum     of commits
    evaluation/NAME                                                      of evaluations

This module imports no torch.
"""

import csv
import gzip
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from dovetail.errors import FileFormatError
from dovetail.runtime.files import files_only, read_json, write_atomically
from dovetail.training.analysis import Staleness, staleness
from dovetail.training.divergence import Divergence, diverging, remedy
from dovetail.training.records import (
    COLUMNS,
    COUNTS,
    LEASED,
    TIMES,
    Evaluation,
    Event,
    Outcome,
    Row,
)
from dovetail.training.tensorboard import Scalars
from dovetail.units import format_count, format_seconds, printable

Column = NDArray[Any]
LOWER_IS_BETTER = ("loss", "error", "perplexity")
"""A figure whose name contains one of these words is better if it is smaller."""
SUMMARY_EPOCHS = 12
"""A summary shows at most so many epochs. Of a longer run it shows evenly spread ones, with the
first and the last."""
POINTS = 5000
"""TensorBoard gets at most so many points of one scalar. With more commits, each point is the mean
of several."""
FORMAT, VERSION = "dovetail.history", 1
MOST_DEPTH = 100
"""The deepest nesting of a history's meta, since it is written by recursion."""
MOST_FIGURES = 1000
"""A CSV file may have at most so many columns of figures."""
COUNTED = ("lost", "restarted", "server_restarted", "refused")
"""Kinds of events that are counted wherever a run is summed up."""


@dataclass(frozen=True)
class Epoch:
    """One pass over the data set as the server saw it: as many commits, in the order in which they
    were applied, as have the samples of one pass.

    loss      mean over its samples, each at the parameters that its gradient was computed at
    seconds   time of its last commit
    figures   figures of the last evaluation in it; {} without one
    """

    epoch: int
    commits: int
    samples: int
    loss: float
    seconds: float
    staleness: float
    figures: dict[str, float]


@dataclass(frozen=True, eq=False)
class History:
    """The history of one run. `outcome.meta` says what ran: its keys are `rule`, `options`,
    `backend` and `job`, a dictionary of `Job`'s fields. A key that is absent is not shown."""

    outcome: Outcome

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Each field of `Row` as an array [commits], and `seen`: the samples that the center had
        seen after each commit."""
        columns = columns_of(self.outcome.rows, COLUMNS)
        columns["seen"] = np.cumsum(columns["samples"], dtype=np.int64)
        return columns

    def __len__(self) -> int:
        return len(self.outcome.rows)

    @property
    def name(self) -> str:
        """A label: `meta["name"]`, else the rule's name."""
        return str(self.outcome.meta.get("name") or self.rule or "run")

    @property
    def rule(self) -> str:
        """The rule's name, "" where it is not known."""
        return str(self.outcome.meta.get("rule") or "")

    @property
    def backend(self) -> str:
        """The backend's name, "" where it is not known."""
        return str(self.outcome.meta.get("backend") or "")

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the run, and its best center was kept."""
        return bool(self.outcome.meta.get("interrupted"))

    def of_job(self, field: str) -> int | None:
        """A whole number of the job (`samples`, `epochs`, `batch`, `window`); None if the history
        does not have it."""
        job = self.outcome.meta.get("job")
        value = job.get(field) if isinstance(job, dict) else None
        # Numbers that no column could count with are as good as none.
        counts = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
        return value if counts else None

    @property
    def workers(self) -> int:
        """The number of workers that the run started with. If that is not known, the number of
        workers that committed."""
        started = self.of_job("workers")
        return (
            started if started and started > 0 else len({row.worker for row in self.outcome.rows})
        )

    @cached_property
    def staleness(self) -> Staleness:
        """Staleness of all commits but the first n."""
        return staleness(self.outcome.rows, self.workers)[0]

    @property
    def momentum(self) -> float:
        """Implicit momentum: the median of the commits' estimates; nan if there are none."""
        estimates = self.columns["momentum"]
        finite = estimates[np.isfinite(estimates)]
        return float(np.median(finite)) if len(finite) else math.nan

    @property
    def expected_momentum(self) -> float:
        """1 - 1/n: implicit momentum under memoryless step times (Mitliagkas et al., 2016)."""
        return 1 - 1 / max(self.workers, 1)

    @cached_property
    def divergence(self) -> Divergence | None:
        """The first sign in the losses that the run diverged; None if there is none."""
        return diverging(self.outcome.rows, self.workers)

    @property
    def counts(self) -> dict[str, int]:
        """How many events there were of each kind in `COUNTED`."""
        return {kind: len(events_of(self.outcome, kind)) for kind in COUNTED}

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of all figures that were evaluated, in order of first appearance."""
        return tuple(dict.fromkeys(name for e in self.outcome.evaluations for name in e.figures))

    def curve(self, figure: str) -> tuple[Column, Column, Column]:
        """(seconds, samples, values) of one figure, [evaluations that have it] each."""
        having = [e for e in self.outcome.evaluations if figure in e.figures]
        return (
            np.array([e.seconds for e in having], dtype=np.float64),
            np.array([e.samples for e in having], dtype=np.int64),
            np.array([e.figures[figure] for e in having], dtype=np.float64),
        )

    def best(self, figure: str) -> Evaluation | None:
        """The evaluation at which a figure was best, the first of equals; None if the figure was
        never evaluated to a finite value."""
        finite = [
            e for e in self.outcome.evaluations if math.isfinite(e.figures.get(figure, math.nan))
        ]
        sign = -1 if lower_is_better(figure) else 1
        return max(finite, key=lambda e: sign * e.figures[figure], default=None)

    def seconds_to(self, figure: str, target: float) -> float | None:
        """Seconds until a figure was first as good as `target`; None if it never was."""
        sign = -1 if lower_is_better(figure) else 1
        seconds, _, values = self.curve(figure)
        reached = np.flatnonzero(sign * values >= sign * target)
        return float(seconds[reached[0]]) if len(reached) else None

    @cached_property
    def epochs(self) -> tuple[Epoch, ...]:
        """One entry for each pass over the data set. If the data set's length is not known, the
        whole run is one epoch."""
        columns, per_epoch = self.columns, self.of_job("samples")
        if not len(self):
            return ()
        whole = per_epoch if per_epoch and per_epoch > 0 else int(columns["seen"][-1]) or 1
        # A commit belongs to the epoch of its last sample, hence the - 1.
        of_commit = np.maximum(columns["seen"] - 1, 0) // whole
        starts = np.flatnonzero(np.diff(of_commit, prepend=-1))
        epochs = []
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=True):
            part = {name: column[start:stop] for name, column in columns.items()}
            losses, samples = part["loss"], part["samples"]
            # The losses of a run that diverged may overflow here, which is no reason for a warning.
            with np.errstate(all="ignore"):
                summed = (losses * samples).sum()
                loss = summed / samples.sum() if samples.sum() else losses.mean()
            epoch = int(of_commit[start])
            last = [
                evaluation
                for evaluation in self.outcome.evaluations
                if max(evaluation.samples - 1, 0) // whole == epoch
            ]
            epochs.append(
                Epoch(
                    epoch=epoch,
                    commits=int(stop - start),
                    samples=int(samples.sum()),
                    loss=float(loss),
                    seconds=float(part["seconds"][-1]),
                    staleness=float(part["staleness"].mean()),
                    figures=dict(last[-1].figures) if last else {},
                )
            )
        return tuple(epochs)

    @property
    def start_up_seconds(self) -> float:
        """Seconds from the run's start to its first step, in which processes start."""
        return min((row.begin_seconds for row in self.outcome.rows), default=0.0)

    def from_first_step(self) -> "History":
        """The history with times from the run's first step on. What happened before, happened at
        0."""
        start, outcome = self.start_up_seconds, self.outcome
        if not start:
            return self

        def moved(records: Sequence[Any], *names: str) -> tuple[Any, ...]:
            return tuple(
                replace(each, **{name: max(getattr(each, name) - start, 0.0) for name in names})
                for each in records
            )

        return History(
            replace(
                outcome,
                seconds=max(outcome.seconds - start, 0.0),
                rows=moved(outcome.rows, *TIMES),
                events=moved(outcome.events, "seconds"),
                evaluations=moved(outcome.evaluations, "seconds"),
            )
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all but the parameters as JSON, compressed by gzip if the name ends in `.gz`. If
        writing fails, the old file stays as it was. Raises `UnwritableError`."""
        outcome = self.outcome
        content = {
            "format": FORMAT,
            "version": VERSION,
            **{name: _to_plain(getattr(outcome, name)) for name in _WHOLE},
            "commits": {
                name: [_to_plain(getattr(row, name)) for row in outcome.rows] for name in COLUMNS
            },
            "evaluations": [_to_plain(vars(evaluation)) for evaluation in outcome.evaluations],
            "events": [_to_plain(vars(event)) for event in outcome.events],
        }
        text = json.dumps(content, allow_nan=False).encode()
        # `mtime=0` keeps the time out of the file, so that equal histories give equal files.
        write_atomically(path, gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote. Its `theta` is empty. Raises `FileFormatError`."""
        file = os.fspath(path)
        try:
            read: Any = _FILE.model_validate(read_json(file))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise FileFormatError(file, f"no saved history: {where}: {first['msg']}") from None
        if _depth(read.meta) > MOST_DEPTH:
            raise FileFormatError(file, f"its meta is nested more than {MOST_DEPTH} times")
        columns = [getattr(read.commits, column) for column in COLUMNS]
        if len({len(column) for column in columns}) > 1:
            raise FileFormatError(file, "its columns are not of one length")
        outcome = Outcome(
            theta=np.zeros(0, dtype=np.float32),
            rows=tuple(Row(*values) for values in zip(*columns, strict=True)),
            events=tuple(Event(**vars(event)) for event in read.events),
            evaluations=tuple(Evaluation(**vars(evaluation)) for evaluation in read.evaluations),
            **{name: getattr(read, name) for name in _WHOLE},
        )
        _check_drawable(file, outcome)
        return cls(outcome)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes commits, evaluations and events, a line each. If writing fails, the old file stays
        as it was. Raises `UnwritableError`."""
        text = io.StringIO()
        columns = [*_CSV_KEYS, *(_FIGURE + name for name in self.figures)]
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        for row in self.outcome.rows:
            writer.writerow({"record": "commit", **vars(row)})
        for evaluation in self.outcome.evaluations:
            cells = dict(vars(evaluation))
            figures = {_FIGURE + name: value for name, value in cells.pop("figures").items()}
            writer.writerow({"record": "evaluation", **cells, **figures})
        for event in self.outcome.events:
            writer.writerow({"record": "event", **vars(event)})
        write_atomically(path, text.getvalue().encode("utf-8", "backslashreplace"))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `to_csv` wrote. It has neither the meta nor the parameters. The run's
        clock, samples and seconds are computed from its commits and evaluations. Raises
        `FileFormatError`."""
        name = os.fspath(path)
        records: dict[str, list[Any]] = {kind: [] for kind in _RECORDS}
        try:
            with open(name, encoding="utf-8", newline="", opener=files_only) as file:
                reader = csv.DictReader(file, strict=True)
                heads = reader.fieldnames or ()
                plain = len(_CSV_KEYS)
                if tuple(heads[:plain]) != _CSV_KEYS or len(heads) > plain + MOST_FIGURES:
                    raise FileFormatError(name, f"its columns are not {', '.join(_CSV_KEYS)}")
                if len(set(heads)) < len(heads):
                    raise FileFormatError(name, "two of its columns have one name")
                for line in reader:
                    if None in line:
                        raise ValueError("it has more cells than there are columns")
                    if line["record"] not in records:
                        raise ValueError(f"{line['record']!r} is no record")
                    kind = _RECORDS[line["record"]]
                    # Each field's type converts its cell's text.
                    values: dict[str, Any] = {
                        field.name: field.type(line[field.name])  # type: ignore[operator]
                        for field in fields(kind)
                        if field.name != "figures"
                    }
                    if kind is Evaluation:
                        values["figures"] = {
                            key.removeprefix(_FIGURE): float(value)
                            for key, value in line.items()
                            if key.startswith(_FIGURE) and value
                        }
                    records[line["record"]].append(kind(**values))
        except OSError as error:
            raise FileFormatError(name, error.strerror or str(error)) from None
        # A line with too few cells gives None for the missing ones, and converting None is a
        # TypeError.
        except (ValueError, TypeError, csv.Error) as error:
            raise FileFormatError(name, f"line {reader.line_num}: {error}") from None
        rows, evaluations, events = records.values()
        outcome = Outcome(
            theta=np.zeros(0, dtype=np.float32),
            clock=max((row.clock for row in rows), default=0),
            samples=sum(row.samples for row in rows),
            seconds=max([0.0, *(row.seconds for row in rows), *(e.seconds for e in evaluations)]),
            rows=tuple(rows),
            events=tuple(events),
            evaluations=tuple(evaluations),
        )
        _check_drawable(name, outcome)
        return cls(outcome)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Writes scalars for TensorBoard, whose step is the number of samples. Raises
        `MissingLibraryError`, `UnwritableError`."""
        # `start_seconds` is in seconds since 1970. Without it, as in a simulated run, times start
        # at 0.
        start = self.outcome.meta.get("start_seconds")
        origin = float(start) if isinstance(start, int | float) else 0.0
        curves = {}
        for tag, name in _SCALARS.items():
            finite = np.isfinite(self.columns[name])
            if finite.any():
                seconds, samples = self.columns["seconds"][finite], self.columns["seen"][finite]
                values = self.columns[name][finite].astype(np.float64)
                if len(values) > POINTS:
                    # Each point is the mean over a run of consecutive commits, and has the seconds
                    # and samples of the last of them.
                    starts = np.linspace(0, len(values), POINTS, endpoint=False).astype(np.int64)
                    last = np.append(starts[1:], len(values)) - 1
                    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
                    seconds, samples, values = seconds[last], samples[last], means
                curves[f"train/{tag}"] = seconds, samples, values
        curves |= {f"evaluation/{figure}": self.curve(figure) for figure in self.figures}
        with Scalars(folder) as scalars:
            for tag, curve in curves.items():
                for moment, step, value in zip(*curve, strict=True):
                    scalars.add(tag, int(step), float(value), origin + float(moment))

    def facts(self) -> list[tuple[str, str]]:
        """(label, text) pairs that sum the run up."""
        outcome = self.outcome
        options = outcome.meta.get("options")
        options_text = ""
        if isinstance(options, dict) and options:
            options_text = f" ({', '.join(f'{key} {value}' for key, value in options.items())})"
        facts = [("rule", self.rule + options_text), ("backend", self.backend)]
        sizes = [f"{self.workers} workers"]
        sizes += [
            f"{field} {value}"
            for field in ("window", "batch", "epochs")
            if (value := self.of_job(field)) is not None
        ]
        job = outcome.meta.get("job")
        partition = job.get("partition", LEASED) if isinstance(job, dict) else LEASED
        if partition != LEASED:
            sizes.append(f"partition {partition}")
        facts.append(("run", ", ".join(sizes)))
        working = outcome.seconds - self.start_up_seconds
        rate = len(self) / working if working > 0 else math.nan
        did = f"{len(self):,} commits of {outcome.samples:,} samples in "
        did += format_seconds(outcome.seconds)
        if math.isfinite(rate):
            did += f", {format_count(rate)} commits/s"
        facts.append(("did", did))
        for figure in self.figures:
            if (best := self.best(figure)) is not None:
                reached = f"{best.samples:,} samples, {format_seconds(best.seconds)}"
                facts.append((f"best {figure}", f"{best.figures[figure]:.4g} after {reached}"))
        tau = self.staleness
        if tau.commits:
            spread = f"p50 {tau.p50:.3g}, p95 {tau.p95:.3g}, max {tau.max:.0f}"
            facts.append(("staleness", f"mean {tau.mean:.2f}, {spread}"))
        if math.isfinite(self.momentum):
            expected = f"1 - 1/n is {self.expected_momentum:.3g}"
            facts.append(("implicit momentum", f"{self.momentum:.3g}, {expected}"))
        if any(self.counts.values()):
            event_texts = (f"{n} {kind.replace('_', ' ')}" for kind, n in self.counts.items() if n)
            facts.append(("events", ", ".join(event_texts)))
        if (divergence := self.divergence) is not None:
            advice = remedy(self.rule, self.of_job("window"), self.workers)
            facts.append(("diverged", f"{divergence.detail}; {advice}"))
        if self.interrupted or outcome.stopped:
            facts.append(("ended", "interrupted" if self.interrupted else "before its epochs"))
        return [(label, text) for label, text in facts if text]

    def summary(self) -> str:
        """The facts, and a line for each epoch, for at most `SUMMARY_EPOCHS` of them."""
        facts = self.facts()
        width = max(len(label) for label, _ in facts)
        lines = [f"{label:<{width}}  {text}" for label, text in facts]
        if not self.epochs:
            return printable("\n".join(lines))
        shown = np.linspace(0, len(self.epochs) - 1, SUMMARY_EPOCHS).round().astype(int)
        cells = [["epoch", "commits", "training loss", "staleness", "ended", *self.figures]]
        for epoch in (self.epochs[i] for i in np.unique(shown)):
            figures = [
                f"{epoch.figures[name]:.4g}" if name in epoch.figures else "-"
                for name in self.figures
            ]
            cells.append(
                [str(epoch.epoch + 1), str(epoch.commits), f"{epoch.loss:.4g}",
                 f"{epoch.staleness:.2f}", format_seconds(epoch.seconds), *figures]
            )  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines.append("")
        for line in cells:
            aligned = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            lines.append("  ".join(aligned))
        return printable("\n".join(lines))


def columns_of(records: Sequence[Any], kinds: Mapping[str, Any]) -> dict[str, Column]:
    """Those fields of the records as arrays [records]: of whole numbers where the kind is `int`,
    else of floats."""
    return {
        name: np.array(
            [getattr(record, name) for record in records],
            dtype=np.int64 if kind is int else np.float64,
        )
        for name, kind in kinds.items()
    }


def lower_is_better(figure: str) -> bool:
    """True if a smaller value of the figure of that name is better: a loss, error or perplexity."""
    return any(word in figure.lower() for word in LOWER_IS_BETTER)


def common_level(histories: Sequence[History], figure: str) -> float | None:
    """The best value of a figure that all of these runs reached; None if one run lacks it."""
    best = [row.figures[figure] for h in histories if (row := h.best(figure)) is not None]
    if not best or len(best) < len(histories):
        return None
    return max(best) if lower_is_better(figure) else min(best)


def events_of(outcome: Outcome, kind: str) -> list[Event]:
    """The events of one kind, in order."""
    return [event for event in outcome.events if event.kind == kind]


# Files: their fields are those of the records. A file that lacks a field, or has an unknown one, is
# refused.

_FIGURE = "figure:"
_CSV_KEYS = tuple(
    dict.fromkeys(("record", "kind", *COLUMNS, *(field.name for field in fields(Event))))
)
_RECORDS: dict[str, type[Row | Evaluation | Event]] = {
    "commit": Row,
    "evaluation": Evaluation,
    "event": Event,
}
"""Name of a record in a CSV file -> its class."""
_SCALARS = {
    "loss": "loss",
    "norm": "norm",
    "staleness": "staleness",
    "implicit_momentum": "momentum",
}
"""TensorBoard's tag below `train/` -> the column that it shows."""
_IN_LISTS = ("rows", "evaluations", "events")
_WHOLE = {
    field.name: field.type
    for field in fields(Outcome)
    if field.name != "theta" and field.name not in _IN_LISTS
}
"""Name -> type of the outcome's fields that a file holds as one value. `theta` is in no file."""


def _strict_model(name: str, kinds: dict[str, Any]) -> type[BaseModel]:
    """A pydantic model of these fields, all of them required and no others allowed."""
    required: dict[str, Any] = {key: (kind, ...) for key, kind in kinds.items()}
    return create_model(name, __config__=ConfigDict(extra="forbid"), **required)


def _list_of(kind: Any) -> Any:
    """The type of a list of values, or of records, of a kind."""
    if isinstance(kind, type) and is_dataclass(kind):
        kind = _strict_model(kind.__name__, {each.name: each.type for each in fields(kind)})
    return list[kind]


_FILE = _strict_model(
    "File",
    {
        "format": Literal["dovetail.history"],
        "version": Literal[1],
        **_WHOLE,
        "commits": _strict_model("Commits", {k: _list_of(v) for k, v in COLUMNS.items()}),
        "evaluations": _list_of(Evaluation),
        "events": _list_of(Event),
    },
)


def _depth(value: Any) -> int:
    """How many lists and objects are around the innermost value."""
    depth, level = 0, [value]
    while level := [
        inner
        for held in level
        if isinstance(held, dict | list)
        for inner in (held.values() if isinstance(held, dict) else held)
    ]:
        depth += 1
    return depth


def _to_plain(value: Any) -> Any:
    """The value as JSON can hold it: floats that are not finite as text, tuples as lists, numpy's
    numbers as Python's, and a value of any other type as its text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _check_drawable(path: str, outcome: Outcome) -> None:
    """Raises `FileFormatError` for times and counts that a page cannot draw: times that are not
    finite, negative counts, and counts that JavaScript's numbers cannot hold (2**53)."""
    moments = chain(
        [outcome.seconds],
        (getattr(row, name) for row in outcome.rows for name in TIMES),
        (event.seconds for event in outcome.events),
        (evaluation.seconds for evaluation in outcome.evaluations),
    )
    if not all(map(math.isfinite, moments)):
        raise FileFormatError(path, "a time is not finite")
    for row in outcome.rows:
        for name in COUNTS:
            if not 0 <= getattr(row, name) < 2**53:
                raise FileFormatError(path, f"a commit's {name} is no count")
    totals = [outcome.clock, outcome.samples, sum(row.samples for row in outcome.rows)]
    totals += [n for e in outcome.evaluations for n in (e.clock, e.samples)]
    if not all(0 <= n < 2**53 for n in totals):
        raise FileFormatError(path, "a clock or a number of samples is no count")
