"""What commands print: results on standard output, progress and messages on standard error."""

import json
import sys
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
    from dovetail.pipeline import Progress
    from dovetail.plans import Plan
    from dovetail.timeline import Timeline


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A `pipeline.Progress` drawn on standard error; silent where that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def show(doing: str, fraction: float, best: float | None) -> None:
            text = doing if best is None else f"{doing}: {format_seconds(best)}"
            shown = printable(text).replace("[", r"\[")
            bar.update(task, description=shown, completed=fraction)

        yield show


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
