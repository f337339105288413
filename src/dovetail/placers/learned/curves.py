"""Learning curves: the points of a run as columns, per task and controller, and as CSV.

Imports no torch.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.learned.records import Point
from dovetail.runtime.files import write_atomically

Floats = NDArray[np.float64]
_FIELDS = tuple(one.name for one in fields(Point))


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """What one controller learned of one task; [updates] each.

    best   seconds, by this controller, nan before anything fitted
    """

    task: str
    controller: int
    trials: Floats
    seconds: Floats
    best: Floats
    mean: Floats
    invalid: Floats
    entropy: Floats
    loss: Floats

    @property
    def name(self) -> str:
        return f"{self.task}, controller {self.controller}"


def curves_of(points: Iterable[Point]) -> list[LearningCurve]:
    """Of each task and controller, in the order in which they first appear."""
    rows: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        rows.setdefault((point.task, point.controller), []).append(point)
    found = []
    for (task, controller), mine in rows.items():
        columns = {
            name: np.array([getattr(point, name) for point in mine], dtype=np.float64)
            for name in ("trials", "seconds", "best", "mean", "invalid", "entropy", "loss")
        }
        best = np.where(np.isfinite(columns["best"]), columns["best"], np.nan)
        found.append(LearningCurve(task, controller, **columns | {"best": best}))
    return found


def save_points(points: Sequence[Point], path: Path) -> None:
    """Write the points as CSV, whole or not at all; nan and inf are left empty. Raises
    `UnwritableError`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for point in points:
        values = (getattr(point, name) for name in _FIELDS)
        writer.writerow(
            "" if isinstance(value, float) and not math.isfinite(value) else value
            for value in values
        )
    write_atomically(path, text.getvalue())
