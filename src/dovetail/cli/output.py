"""What commands print: results on standard output, progress and messages on standard error."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from dovetail.units import format_seconds, printable

if TYPE_CHECKING:
    from dovetail.graph import Graph
    from dovetail.pipeline import TellProgress
    from dovetail.plans import Plan
    from dovetail.timeline import Timeline


@contextmanager
def progress_bar() -> "Iterator[TellProgress]":
    """A `pipeline.TellProgress` drawn on standard error. Where that is not a terminal, a line for
    each thing that is done, from the first second on: a quick command says nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _progress_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(doing: str, fraction: float, best: float | None) -> None:
            text = doing if best is None else f"{doing}: {format_seconds(best)}"
            shown = printable(text).replace("[", r"\[")
            bar.update(task, description=shown, completed=fraction)

        yield show


def _progress_lines() -> "Iterator[TellProgress]":
    began, lock = time.perf_counter(), threading.Lock()
    current, said = "", ""

    def tell() -> None:
        nonlocal said
        with lock:
            if current and current != said:
                said = current
                say(f"{time.perf_counter() - began:5.0f} s  {current}")

    timer = threading.Timer(QUIET_SECONDS, tell)
    timer.daemon = True

    def show(doing: str, _fraction: float, _best: float | None) -> None:
        nonlocal current
        current = doing
        if time.perf_counter() - began >= QUIET_SECONDS:
            tell()

    timer.start()
    try:
        yield show
    finally:
        timer.cancel()


QUIET_SECONDS = 1.0
"""How long a command works before it says what it is doing."""


class Drawable(Protocol):
    """Something whose state changes; `live` says whether it is drawn."""

    live: bool

    def table(self) -> RenderableType:
        """As it is now."""
        ...


@contextmanager
def drawn(progress: Drawable) -> Iterator[None]:
    """It is drawn on standard error while the block runs where that is a terminal."""
    console = Console(stderr=True)
    progress.live = console.is_terminal
    if not progress.live:
        yield
        return
    with Live(get_renderable=progress.table, console=console, refresh_per_second=4, transient=True):
        yield


def show(what: RenderableType) -> None:
    """Print a table."""
    Console().print(what)


def show_limits(plan: "Plan", graph: "Graph", timeline: "Timeline") -> None:
    """Print what bounds a plan."""
    from dovetail.reports import find_limits, limits_table

    show("")
    show(limits_table(find_limits(timeline, graph), timeline, plan))


def show_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def say(text: str) -> None:
    """Tell the user; not part of the result."""
    sys.stderr.write(printable(text) + "\n")
