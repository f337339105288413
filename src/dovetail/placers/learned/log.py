"""The log of learning: what a controller writes down, so that nothing is lost with its process, and
what of it is shown, as columns and as CSV.

    FOLDER/controllers/0/updates.jsonl     a line an update: the point, what was judged,
                                           and the placement where it was the best so far
                         even.safetensors  the learner's state after the last update of even number,
                         odd.safetensors   and after the last of odd number

A state is kept when its update has been computed, and before it is committed. So who comes back
finds two: where the commit has counted, the run goes on from the newer one; where it has not, the
same samples are handed out again, and the older one is what they met the first time. The first of
an update's sample indices tells which.
Imports no torch.
"""

import base64
import csv
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dovetail.errors import FileFormatError, UnwritableError
from dovetail.placers.learned.records import Point
from dovetail.runtime.files import write_atomically
from dovetail.training import Column, columns_of

CONTROLLERS = "controllers"
"""The folder of all logs within a run's."""
_SLOTS = ("even.safetensors", "odd.safetensors")
_LINES = "updates.jsonl"
MOST_PLACEMENT_BYTES = 2**24
"""A line's placement unpacks to no more bytes: four for each of four million groups."""


@dataclass(frozen=True, eq=False)
class LogEntry:
    """One update, as its line says it.

    first       the first of its sample indices: its name in the run
    judged      its trials that were judged
    at          which of the judged ones was the best so far of the controller's task, from 0; -1:
                none
    placement   [groups] that one
    """

    point: Point
    first: int
    judged: int
    at: int = -1
    placement: NDArray[np.int32] | None = None

    def line(self) -> str:
        """The entry as JSON."""
        entry = asdict(self.point) | {"first": self.first, "judged": self.judged, "at": self.at}
        if self.placement is not None:
            packed = zlib.compress(np.ascontiguousarray(self.placement, "<i4").tobytes())
            entry["placement"] = base64.b64encode(packed).decode()
        return json.dumps(entry)

    @classmethod
    def parse(cls, line: str) -> "LogEntry | None":
        """The entry; None for half a line, which a killed controller leaves."""
        try:
            entry = json.loads(line)
            own = {name: entry.pop(name) for name in ("first", "judged", "at")}
            packed, placement = entry.pop("placement", None), None
            if packed is not None:
                unpacker = zlib.decompressobj()
                octets = unpacker.decompress(base64.b64decode(packed), MOST_PLACEMENT_BYTES)
                placement = np.frombuffer(octets, "<i4").astype(np.int32)
            return cls(Point(**entry), placement=placement, **own)
        except (ValueError, KeyError, TypeError, RecursionError, zlib.error):
            return None


@dataclass(frozen=True, eq=False)
class LearnerState:
    """What a learner is between two updates.

    updates   so far; the rest is after that many
    first     the first sample index of the last of them
    fields    as JSON knows them
    arrays    by name
    """

    updates: int
    first: int
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


class ControllerLog:
    """One controller's part of the run's folder; made where it is not there.

    Raises `UnwritableError`, and `FileFormatError` for a state that was changed.
    """

    def __init__(self, folder: Path, controller: int) -> None:
        self.path = folder / CONTROLLERS / str(controller)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lines = (self.path / _LINES).open("a+b")
            if self._lines.tell():
                self._lines.seek(-1, 2)
                # Half a line, which a killed controller left, stays on a line of its own.
                if self._lines.read(1) != b"\n":
                    self._lines.write(b"\n")
        except OSError as error:
            raise UnwritableError(str(self.path), error.strerror or str(error)) from error

    def add(self, entry: LogEntry) -> None:
        """Write the line of an update."""
        self._lines.write(entry.line().encode() + b"\n")
        self._lines.flush()

    def keep(self, state: LearnerState) -> None:
        """In place of the state before the one before it."""
        head = json.dumps({"updates": state.updates, "first": state.first, **state.fields})
        content = save(state.arrays, {"state": head})
        write_atomically(self.path / _SLOTS[state.updates % 2], content)

    def recall(self, first: int) -> LearnerState | None:
        """The state that meets samples which begin with `first`; None: that of the beginning."""
        states = []
        for path in (self.path / slot for slot in _SLOTS):
            try:
                content = path.read_bytes()
                arrays = load(content)
                size = int.from_bytes(content[:8], "little")
                head = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["state"])
                states.append(LearnerState(head.pop("updates"), head.pop("first"), head, arrays))
            except FileNotFoundError:
                continue
            except (SafetensorError, ValueError, KeyError) as error:
                raise FileFormatError(str(path), str(error)) from error
        states.sort(key=lambda state: state.updates)
        if states and states[-1].first == first:
            states.pop()  # it was not committed
        return states[-1] if states else None

    def close(self) -> None:
        """End writing."""
        self._lines.close()


class LogReaders:
    """Reads what controllers add to their logs, whoever they are, from where it stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / CONTROLLERS
        self._read: dict[Path, int] = {}

    def news(self) -> Iterator[LogEntry]:
        """Entries that were added since; each controller's in their order."""
        for path in sorted(self._folder.glob(f"*/{_LINES}")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read()
            whole = content.rfind(b"\n") + 1
            self._read[path] = start + whole
            for line in content[:whole].decode(errors="replace").splitlines():
                entry = LogEntry.parse(line)
                if entry is not None:
                    yield entry


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """What one controller learned of one task.

    columns   [updates] each field of `Point` that is drawn; best: seconds, by this controller, nan
              before anything fitted
    """

    task: str
    controller: int
    columns: dict[str, Column]

    @property
    def name(self) -> str:
        return f"{self.task}, controller {self.controller}"


def curves_of(points: Iterable[Point]) -> list[LearningCurve]:
    """Of each task and controller, in the order in which they first appear."""
    rows: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        rows.setdefault((point.task, point.controller), []).append(point)
    drawn = ("trials", "seconds", "best", "mean", "invalid", "entropy", "loss")
    curves = []
    for (task, controller), own in rows.items():
        columns = columns_of(own, dict.fromkeys(drawn, float))
        columns["best"] = np.where(np.isfinite(columns["best"]), columns["best"], np.nan)
        curves.append(LearningCurve(task, controller, columns))
    return curves


def save_points(points: Sequence[Point], path: Path) -> None:
    """Write the points as CSV, whole or not at all; nan and inf are left empty. Raises
    `UnwritableError`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [each.name for each in fields(Point)]
    writer.writerow(names)
    for point in points:
        values = (getattr(point, name) for name in names)
        writer.writerow(
            "" if isinstance(value, float) and not math.isfinite(value) else value
            for value in values
        )
    write_atomically(path, text.getvalue())
