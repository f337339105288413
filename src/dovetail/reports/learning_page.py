"""Draws the page about a policy that learned: its curves, and the best placement of each task.

    cards      method, trials, time, updates
    tasks      best value, trials up to it, the cheap methods beside it
    charts     best and mean of each task and controller, share of failures, entropy
    policy     the policy file's card

The page has no script.
"""

import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from dovetail.placers.learned.curves import Floats, LearningCurve, curves_of
from dovetail.placers.learned.records import Learned
from dovetail.plans import Plan
from dovetail.reports.markup import Card, PageTable, render_page, save_page
from dovetail.reports.plots import COLOURS, Axes, Line, averaged, line_chart
from dovetail.units import format_count, format_seconds

MOST_CURVES = 32
"""A chart draws at most this many curves, the first ones."""
_SHOWN = (
    ("mean", "Mean of an update's placements, seconds"),
    ("best", "Best placement so far, seconds"),
    ("invalid", "Share of an update's placements that failed"),
    ("entropy", "Entropy of a decision, nats"),
)


def write_learning_page(
    learned: Learned,
    card: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    plans: Mapping[str, Plan | None] | None = None,
    made: str = "",
) -> None:
    """Write the page of a run to `path`, whole or not at all.

    plans   task -> its plan; None where nothing fits
    made    the command that made the page

    Raises `UnwritableError`.
    """
    save_page(render_learning(learned, card, plans=plans, made=made), path)


def render_learning(
    learned: Learned,
    card: Mapping[str, object],
    *,
    plans: Mapping[str, Plan | None] | None = None,
    made: str = "",
) -> str:
    """The page as text. O(updates), but the number of points drawn is bounded."""
    curves = curves_of(learned.points)
    method = str(card.get("method", "policy"))
    return render_page(
        "learning.html",
        f"{method} learning {', '.join(dict.fromkeys(curve.task for curve in curves))}",
        _cards(learned, method),
        styles=("page.css", "training.css"),
        tasks=_tasks(learned, curves, plans or {}),
        charts=_charts(curves[:MOST_CURVES]),
        curves=len(curves),
        drawn=MOST_CURVES,
        policy_card=PageTable(
            (), [(name, _value(value)) for name, value in card.items()], "scroll left"
        ),
        made=made,
    )


def _cards(learned: Learned, method: str) -> list[Card]:
    controllers = len({point.controller for point in learned.points})
    pace = learned.trials / learned.seconds if learned.seconds > 0 else 0.0
    ended = "interrupted" if learned.interrupted else "done"
    return [
        ("method", method, ended),
        ("trials", f"{learned.trials:,}", f"{pace:.3g} a second"),
        ("updates", f"{learned.updates:,}", f"by {controllers} controllers"),
        ("took", format_seconds(learned.seconds), f"{len(learned.values)} tasks with a plan"),
    ]


def _tasks(
    learned: Learned, curves: Sequence[LearningCurve], plans: Mapping[str, Plan | None]
) -> PageTable:
    """A row for each task: its best placement, and the values of the methods that do not learn."""
    baselines = list(
        dict.fromkeys(name for plan in plans.values() if plan for name in plan.baselines)
    )
    rows = []
    for task in dict.fromkeys(curve.task for curve in curves):
        plan = plans.get(task)
        values = plan.baselines if plan is not None else {}
        rows.append([
            task,
            _seconds(learned.values.get(task)),
            f"{learned.found[task]:,}" if task in learned.found else "-",
            *(_seconds(values.get(baseline)) for baseline in baselines),
            _seconds(plan.lower_bound) if plan is not None else "-",
        ])  # fmt: skip
    return PageTable(["task", "best tried", "after trials", *baselines, "bound"], rows)


def _charts(curves: Sequence[LearningCurve]) -> list[tuple[str, Markup]]:
    """(title, chart) of each figure in `_SHOWN`; each curve is a line."""
    charts = []
    for field, title in _SHOWN:
        lines = [
            Line(curve.name, *_thin(curve.trials, getattr(curve, field)), colour=i % COLOURS)
            for i, curve in enumerate(curves)
        ]
        axes = Axes(f"{title}, against trials", format_count, zero=field != "mean")
        charts.append((title, line_chart(lines, axes)))
    return charts


def _thin(trials: Floats, values: Floats) -> tuple[Floats, Floats]:
    x, y = averaged(trials, values)
    return np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _seconds(seconds: float | None) -> str:
    if seconds is None or not np.isfinite(seconds):
        return "-"
    return format_seconds(float(seconds))
