"""A training run as it goes on, on standard error: a table that changes, or lines.

    agn, 4 workers   ━━━━━━━━━━━╺━━━━━━━  61 %  3,400 of 5,600 samples   120 commits/s   0:00:12
                     loss 0.412  staleness 2.98  accuracy 0.91
    worker 0   working       850 samples   30 commits/s   staleness 2.97   loss 0.41
    worker 1   lost ...

Where standard error is no terminal a line is written every few seconds, and one for each event.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from dovetail.cli.output import say
from dovetail.training.backends.contract import Watcher
from dovetail.training.records import Event, Row
from dovetail.units import format_count, format_seconds, printable

RECENT = 50
"""Commits that staleness, loss and rate are means of: of each worker, and n times it of all."""
LINE_SECONDS = 5.0
MOST_WORKERS = 24
MOST_REFUSALS = 5
"""Refused commits that are told of, a line each; the history has all."""
STATES = {
    "joined": "working",
    "restarted": "restarted",
    "lost": "lost",
    "left": "done",
}


@dataclass
class _Recent:
    """The last commits of a worker, or of all."""

    samples: int = 0
    commits: int = 0
    state: str = "waiting"
    rows: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, row: Row) -> None:
        self.samples += row.samples
        self.commits += 1
        self.rows.append((row.seconds, row.staleness, row.loss))

    @property
    def staleness(self) -> float:
        return sum(tau for _, tau, _ in self.rows) / len(self.rows) if self.rows else math.nan

    @property
    def loss(self) -> float:
        return sum(loss for _, _, loss in self.rows) / len(self.rows) if self.rows else math.nan

    @property
    def commits_per_second(self) -> float:
        if len(self.rows) < 2 or self.rows[-1][0] <= self.rows[0][0]:
            return math.nan
        return (len(self.rows) - 1) / (self.rows[-1][0] - self.rows[0][0])


class TrainingProgress:
    """What is shown of a run; `watcher` is to be given to it.

    total    samples over all epochs; None for a stream whose end is not known
    tell     takes lines
    clock    of the lines' pace
    """

    def __init__(
        self,
        title: str,
        workers: int,
        total: int | None,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total = title, total
        self.all = _Recent()
        self.all.rows = deque(maxlen=RECENT * max(1, workers))
        self.workers = {worker: _Recent() for worker in range(workers)}
        self.figures: dict[str, float] = {}
        self.live = False
        self._tell, self._clock = tell, clock
        self._begin = clock()
        self._told_seconds = self._begin
        self._refusals = 0
        self._lock = threading.Lock()

    @property
    def watcher(self) -> Watcher:
        """Rows and events go to this."""
        return Watcher(rows=self.add, event=self.happened)

    def add(self, rows: list[Row]) -> None:
        """Commits were applied."""
        with self._lock:
            for row in rows:
                self.all.add(row)
                mine = self.workers.setdefault(row.worker, _Recent())
                mine.add(row)
                if mine.state == "waiting":
                    mine.state = "working"
        now = self._clock()
        if not self.live and now - self._told_seconds >= LINE_SECONDS:
            self._told_seconds = now
            self._tell(self.line())

    def happened(self, event: Event) -> None:
        """Something happened to a worker or to the server; told as a line if it is no good news."""
        with self._lock:
            if event.worker >= 0 and event.kind in STATES:
                self.workers.setdefault(event.worker, _Recent()).state = STATES[event.kind]
            self._refusals += event.kind == "refused"
            is_told = event.kind != "refused" or self._refusals <= MOST_REFUSALS
            is_last = event.kind == "refused" and self._refusals == MOST_REFUSALS
        if event.kind not in ("joined", "left") and is_told:
            self._tell(said(event) + ("; of more like it nothing is said" if is_last else ""))

    def evaluated(self, figures: dict[str, float]) -> None:
        """The center was evaluated."""
        self.figures = figures

    def line(self) -> str:
        """The run in one line."""
        parts = [self.title, self._counted()]
        parts += [f"{name} {value:.4g}" for name, value in self._numbers().items()]
        states = [worker.state for worker in self.workers.values()]
        lost = states.count("lost")
        return ", ".join([*parts, *([f"{lost} lost"] if lost else [])])

    def table(self) -> RenderableType:
        """The run and its workers."""
        with self._lock:
            top = Table.grid(padding=(0, 2))
            share = min(self.all.samples / self.total, 1.0) if self.total else 0.0
            bar = ProgressBar(total=1.0, completed=share, width=20, pulse=self.total is None)
            elapsed = format_seconds(self._clock() - self._begin)
            top.add_row(_text(self.title), bar, self._counted(), elapsed)
            numbers = "  ".join(f"{_text(k)} {v:.4g}" for k, v in self._numbers().items())
            below = Table.grid(padding=(0, 2))
            for worker, mine in sorted(self.workers.items())[:MOST_WORKERS]:
                below.add_row(f"worker {worker}", *_cells(mine))
            if len(self.workers) > MOST_WORKERS:
                below.add_row(f"and {len(self.workers) - MOST_WORKERS} more")
            return Group(top, numbers, below)

    def _counted(self) -> str:
        seen = f"{self.all.samples:,}"
        if not self.total:
            return f"{seen} samples"
        share = 100 * self.all.samples / self.total
        return f"{seen} of {self.total:,} samples ({share:.0f} %)"

    def _numbers(self) -> dict[str, float]:
        found = {
            "commits/s": self.all.commits_per_second,
            "loss": self.all.loss,
            "staleness": self.all.staleness,
        }
        found |= {f"validation {name}": value for name, value in self.figures.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}


def said(event: Event) -> str:
    """An event in a line; of a traceback its last line."""
    who = "the server" if event.worker < 0 else f"worker {event.worker}"
    detail = event.detail.strip().splitlines()[-1] if event.detail.strip() else ""
    what = {"server_restarted": "was restarted", "restarted": "was restarted", "lost": "was lost",
            "refused": "had a commit refused"}.get(event.kind, event.kind)  # fmt: skip
    return f"{format_seconds(event.seconds)}: {who} {what}" + (f": {detail}" if detail else "")


def _cells(mine: _Recent) -> list[str]:
    style = {"lost": "red", "working": "green", "restarted": "yellow"}.get(mine.state, "dim")
    rate = mine.commits_per_second
    return [
        f"[{style}]{mine.state}[/]",
        f"{mine.samples:,} samples",
        "" if math.isnan(rate) else f"{format_count(rate)} commits/s",
        "" if math.isnan(mine.staleness) else f"staleness {mine.staleness:.2f}",
        "" if math.isnan(mine.loss) else f"loss {mine.loss:.4g}",
    ]


def _text(text: str) -> str:
    return escape(printable(text))
