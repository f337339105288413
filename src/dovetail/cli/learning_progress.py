"""A policy that learns, on standard error: a table that changes, or lines.

    zoo:rnnlm by gdp  ━━━━━━━━━━━╺━━━━━━━  1,104 of 2,000 trials   72 trials/s   15.3 s

    task        controller   updates   best      mean      invalid   entropy   mean of updates
    zoo:rnnlm   0            68        2.55 ms   2.8 ms    0 %       0.63      ▇▆▅▃▂▂▁

Where standard error is no terminal a line is written every few seconds.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from dovetail.cli.output import say
from dovetail.placers.learned.records import Point
from dovetail.units import format_seconds, printable

LINE_SECONDS = 5.0
RECENT = 240
"""Updates of a task and controller that its curve is drawn from."""
WIDTH = 30
MOST_ROWS = 24
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class _Row:
    """What is known of one task and controller."""

    updates: int = 0
    last: Point | None = None
    means: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, point: Point) -> None:
        self.updates += 1
        self.last = point
        self.means.append(point.mean)


class LearningProgress:
    """What is shown of a run; `add` is to be called with each point, in any thread.

    trials, seconds   that it is to take; None: not said
    tell, clock       take lines, and pace them
    """

    def __init__(
        self,
        title: str,
        trials: int | None,
        seconds: float | None = None,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total, self.seconds = title, trials, seconds
        self.live = False
        self.points: list[Point] = []
        self._rows: dict[tuple[str, int], _Row] = {}
        self._trials: dict[int, int] = {}
        self._tell, self._clock = tell, clock
        self._begin = self._told_seconds = clock()
        self._lock = threading.Lock()

    def add(self, point: Point) -> None:
        """A controller has learned from an update."""
        with self._lock:
            self.points.append(point)
            self._rows.setdefault((point.task, point.controller), _Row()).add(point)
            self._trials[point.controller] = point.trials
            now = self._clock()
            due = not self.live and now - self._told_seconds >= LINE_SECONDS
            if due:
                self._told_seconds = now
                line = self._line()
        if due:
            self._tell(line)

    @property
    def trials(self) -> int:
        """Judged so far, over all controllers."""
        return sum(self._trials.values())

    def line(self) -> str:
        """The run in one line."""
        with self._lock:
            return self._line()

    def table(self) -> RenderableType:
        """The run, and a row a task and controller."""
        with self._lock:
            top = Table.grid(padding=(0, 2))
            share = self._share()
            bar = ProgressBar(total=1.0, completed=share or 0.0, width=20, pulse=share is None)
            elapsed = format_seconds(self._clock() - self._begin)
            top.add_row(_text(self.title), bar, self._counted(), *self._pace(), elapsed)
            below = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for name in ("task", "controller", "updates", "best", "mean", "invalid", "entropy"):
                below.add_column(name, overflow="ellipsis", no_wrap=True)
            below.add_column("mean of updates", no_wrap=True)
            rows = sorted(self._rows.items())
            for (task, controller), row in rows[:MOST_ROWS]:
                below.add_row(_text(task), str(controller), *_cells(row))
            if len(rows) > MOST_ROWS:
                below.add_row(f"and {len(rows) - MOST_ROWS} more")
            return Group(top, below)

    def _line(self) -> str:
        parts = [self.title, self._counted(), *self._pace()]
        tasks = {task for task, _ in self._rows}
        for task in sorted(tasks)[:MOST_ROWS]:
            rows = [row for (name, _), row in self._rows.items() if name == task and row.last]
            points = [row.last for row in rows if row.last is not None]
            named = f"{task}: " if len(tasks) > 1 else ""
            parts.append(named + _told(points))
        return ", ".join(parts)

    def _counted(self) -> str:
        seen = f"{self.trials:,}"
        return f"{seen} of {self.total:,} trials" if self.total else f"{seen} trials"

    def _pace(self) -> list[str]:
        passed = self._clock() - self._begin
        return [f"{self.trials / passed:.3g} trials/s"] if self.trials and passed > 0 else []

    def _share(self) -> float | None:
        if self.seconds:
            return min(1.0, (self._clock() - self._begin) / self.seconds)
        return min(1.0, self.trials / self.total) if self.total else None


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The values as blocks, their means where there are more than `width`; what is not finite is
    left out."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    count = min(width, len(known))
    bounds = [len(known) * i // count for i in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _told(points: Sequence[Point]) -> str:
    """Of the last update of each controller of a task."""
    best = min(point.best for point in points)
    means = [point.mean for point in points if math.isfinite(point.mean)]
    invalid = sum(point.invalid for point in points) / len(points)
    entropy = sum(point.entropy for point in points) / len(points)
    mean = sum(means) / len(means) if means else math.nan
    return (
        f"best {_seconds(best)}, mean {_seconds(mean)}, invalid {100 * invalid:.0f} %, "
        f"entropy {entropy:.3g}"
    )


def _cells(row: _Row) -> list[str]:
    last = row.last
    assert last is not None, "a row begins with a point"
    return [
        f"{row.updates:,}",
        _seconds(last.best),
        _seconds(last.mean),
        f"{100 * last.invalid:.0f} %",
        f"{last.entropy:.3g}",
        sparkline(row.means),
    ]


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "-"


def _text(text: str) -> str:
    return escape(printable(text))
