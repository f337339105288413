"""Prints what commands say: results on standard output, progress and messages on standard error.

On a terminal, progress is a bar, with or without a table below it. Elsewhere it is lines. rich is
imported where something is drawn: its import takes as long as all else that a help needs.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dovetail.units import format_seconds, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dovetail.graph import Graph
    from dovetail.pipeline import TellProgress
    from dovetail.plans import Plan
    from dovetail.timeline import Timeline


LINE_SECONDS = 5.0
"""A run that is not drawn on a terminal writes a line this often."""
QUIET_SECONDS = 1.0
"""A command works this long before it says what it is doing."""
MOST_LISTED = 24
"""A table of a run has at most this many rows, so that it fits on a terminal."""


@contextmanager
def progress_bar(*, is_shown: bool = True, began: float | None = None) -> "Iterator[TellProgress]":
    """Yields a `pipeline.TellProgress` that draws a bar on standard error, or that does nothing
    unless it `is_shown`.

    began   when the work began of which lines tell the seconds; None: now

    If that is not a terminal, it writes a line for each thing that is done, once: what differs in
    numbers alone, or is done again for another candidate, is the same thing. It begins after
    `QUIET_SECONDS`, so a quick command says nothing. A sentence stays on show (`sources.SENTENCE`).
    """
    if not is_shown:
        yield lambda doing, fraction, best: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def draw(doing: str, fraction: float, best: float | None) -> None:
                if fraction < 0:
                    bar.console.print(foreign(doing))
                    return
                text = doing if best is None else f"{doing}: {format_seconds(best)}"
                bar.update(task, description=foreign(text), completed=fraction)

            yield draw
        return
    now, lock = time.perf_counter(), threading.Lock()
    began = now if began is None else began
    current, share, said = "", 0.0, set[str]()

    def tell() -> None:
        with lock:
            # The name of a candidate stands before what is done for it.
            what = re.sub(r"[\d,.]+", "", current.rpartition(": ")[2] if share >= 0 else current)
            if current and what not in said:
                said.add(what)
                done = f"{100 * share:3.0f} %" if share > 0 else " " * 5
                say(f"{time.perf_counter() - began:5.0f} s {done}  {current}")

    def note(doing: str, fraction: float, _best: float | None) -> None:
        nonlocal current, share
        current, share = doing, fraction
        if time.perf_counter() - now >= QUIET_SECONDS or fraction < 0:
            tell()

    # One thing may take long, so that nobody calls `note` again. The timer says it then.
    timer = threading.Timer(QUIET_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield note
    finally:
        timer.cancel()


class RunView:
    """Shows a run that goes on, on standard error: on a terminal as a table that changes, and
    elsewhere as a line every `LINE_SECONDS`.

    table   () -> the run as it is now, below whose title there may be rows
    line    () -> the same in one line
    tell    writes a line
    clock   returns seconds, by which lines are paced
    """

    def __init__(
        self,
        title: str,
        table: "Callable[[], RenderableType]",
        line: Callable[[], str],
        tell: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._table, self._line, self.tell, self._clock = table, line, tell, clock
        self._is_drawn, self._told_seconds = False, clock()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, get_time=clock, auto_refresh=False)
        self._task = self._bar.add_task(foreign(title), total=None, figures="")

    def bar(self, share: float | None, *figures: str) -> "RenderableType":
        """The first line of the table: title, bar, figures, and the time since the run began. A
        share of None means that the end is not known."""
        total = None if share is None else 1.0
        self._bar.update(self._task, total=total, completed=share, figures="  ".join(figures))
        return self._bar.get_renderable()

    def moved(self) -> None:
        """Tell the line if it is due. To be called whenever the run went on."""
        now = self._clock()
        if not self._is_drawn and now - self._told_seconds >= LINE_SECONDS:
            self._told_seconds = now
            self.tell(self._line())

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draws the table while the block runs, if standard error is a terminal."""
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self._is_drawn = console.is_terminal
        if not self._is_drawn:
            yield
            return
        with Live(
            get_renderable=self._table, console=console, refresh_per_second=4, transient=True
        ):
            yield


def listed(table: "Table", rows: Sequence[Sequence[str]]) -> "Table":
    """The table with the first `MOST_LISTED` rows, and a line that counts those left out."""
    for row in rows[:MOST_LISTED]:
        table.add_row(*row)
    if len(rows) > MOST_LISTED:
        table.add_row(f"and {len(rows) - MOST_LISTED} more")
    return table


def foreign(text: str) -> str:
    """A text from elsewhere, escaped so that rich shows its characters and does not obey them."""
    from rich.markup import escape

    return escape(printable(text))


_results: TextIO | None = None
"""Where results go while a command runs; None: to standard output."""


@contextmanager
def results_apart() -> Iterator[None]:
    """Keeps standard output for results while the block runs. What else Python prints there, as the
    user's code may do, goes to standard error.

    The descriptor itself stays, so that `--out /dev/stdout` reaches it. So do processes that the
    user's code starts.
    """
    global _results
    before, _results = _results, sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results = before


def results() -> TextIO:
    """The file that results go to."""
    return _results or sys.stdout


def show(what: "RenderableType") -> None:
    """Print a table."""
    from rich.console import Console

    Console(file=results()).print(what)


def show_limits(plan: "Plan", graph: "Graph", timeline: "Timeline") -> None:
    """Print what bounds a plan; nothing for one that runs the step as one whole, of whose ops no
    times are known."""
    from dovetail.plans import PLACED
    from dovetail.reports import find_limits, limits_table

    if plan.way != PLACED:
        return
    show("")
    show(limits_table(find_limits(timeline, graph), timeline, plan))


def show_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    results().write(json.dumps(value, allow_nan=False) + "\n")


def write(path: Path | None, save: Callable[[Path], object]) -> None:
    """Have `save` write the file or folder, if one was asked for, and tell the user."""
    if path is not None:
        save(path)
        say(f"wrote {path}")


def say(text: str) -> None:
    """Tell the user something on standard error, which is not part of the result."""
    sys.stderr.write(printable(text) + "\n")
