"""One self-contained page about training runs: several rules side by side, or one run alone.

    head        runs, the best figure, the fastest to what all reached
    learning    figures against time and samples                        training_sections.py
    asynchrony  staleness, implicit momentum, temporal efficiency       training_sections.py
    workers     what each did when, and what happened to it             training_timeline.py

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import os
from collections.abc import Sequence
from html import escape
from importlib import resources

from dovetail.errors import UsageError
from dovetail.reports import training_sections as sections
from dovetail.reports.markup import policy
from dovetail.reports.training_sections import Run
from dovetail.runtime.files import write_atomically
from dovetail.training.history import History

MOST_RUNS = 40


def write_training_page(
    histories: Sequence[History], path: str | os.PathLike[str], *, made: str = ""
) -> None:
    """Write the page of these runs to `path`, whole or not at all. Their order is kept.

    made   the command that made it

    Raises `UnwritableError`, and `UsageError` for no run or more than `MOST_RUNS`.
    """
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, render_training(histories, made=made).encode("utf-8", "replace"))


def render_training(histories: Sequence[History], *, made: str = "") -> str:
    """The page as text. O(commits); what is drawn of a run is bounded whatever its length."""
    if not 0 < len(histories) <= MOST_RUNS:
        raise UsageError("histories", f"there are {len(histories)}; a page shows 1 to {MOST_RUNS}")
    runs = [
        Run(i, label, history)
        for i, (label, history) in enumerate(zip(_labels(histories), histories, strict=True))
    ]
    style = "\n".join(_asset(name) for name in ("page.css", "training.css"))
    title = "Training by " + ", ".join(dict.fromkeys(run.history.name for run in runs))
    parts = {
        "policy": policy(style),
        "title": escape(title),
        "style": style,
        "cards": sections.head(runs),
        "runs": sections.runs_table(runs),
        "learning": sections.learning(runs),
        "efficiency": sections.efficiency(runs),
        "staleness": sections.staleness(runs),
        "momentum": sections.momentum(runs),
        "workers": sections.workers(runs),
        "events": sections.events(runs),
        "made": sections.made(runs, made),
    }
    # One pass over the template: what is filled in is not searched again.
    pieces = _asset("training.html").split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _labels(histories: Sequence[History]) -> list[str]:
    """The runs' names; where two are the same with workers and window, then with a number."""
    names = [history.name for history in histories]
    if len(set(names)) < len(names):
        names = [
            f"{history.name}, {history.workers} workers, window {history.of_job('window')}"
            for history in histories
        ]
    return [
        f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]
