"""Draws the page about a policy that learned: its curves, and the best placement of each task.

    cards      method, trials, time, updates
    tasks      best value, trials up to it, the cheap methods beside it
    charts     best and mean of each task and controller, share of failures, entropy
    policy     the policy file's card

The page has no script.
"""

import json
from collections.abc import Mapping

import numpy as np

from dovetail.placers.learned.log import curves_of
from dovetail.placers.learned.records import Learned
from dovetail.plans import Plan
from dovetail.reports.charts import Axes, Line, averaged, line_chart
from dovetail.reports.kit import (
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    preformatted,
    render_page,
    strong,
)
from dovetail.units import format_seconds

MOST_CURVES = 32
"""A chart draws at most this many curves, the first ones."""
_SHOWN = (
    ("mean", "Mean of an update's placements, seconds"),
    ("best", "Best placement so far, seconds"),
    ("invalid", "Share of an update's placements that failed"),
    ("entropy", "Entropy of a decision, nats"),
)


def render_learning(
    learned: Learned,
    card: Mapping[str, object],
    *,
    plans: Mapping[str, Plan | None] | None = None,
    made: str = "",
) -> str:
    """The page of a run as text. O(updates), but the number of points drawn is bounded.

    plans   task -> its plan; None where nothing fits
    made    the command that made the page
    """
    curves = curves_of(learned.points)
    tasks = list(dict.fromkeys(curve.task for curve in curves))
    method = str(card.get("method", "policy"))

    def seconds_text(seconds: float | None) -> str:
        return "-" if seconds is None or not np.isfinite(seconds) else format_seconds(seconds)

    # A row for each task: its best placement, and the values of the methods that do not learn.
    fitting_plans = {task: plan for task, plan in (plans or {}).items() if plan is not None}
    cheap = dict.fromkeys(name for plan in fitting_plans.values() for name in plan.baselines)
    rows = []
    for task in tasks:
        plan = fitting_plans.get(task)
        values = {} if plan is None else plan.baselines
        rows.append([
            task,
            seconds_text(learned.values.get(task)),
            f"{learned.found[task]:,}" if task in learned.found else "-",
            *(seconds_text(values.get(name)) for name in cheap),
            "-" if plan is None else seconds_text(plan.lower_bound),
        ])  # fmt: skip
    figures = []
    for field, title in _SHOWN:
        lines = [
            Line(curve.name, *averaged(curve.columns["trials"], curve.columns[field]), colour=i)
            for i, curve in enumerate(curves[:MOST_CURVES])
        ]
        axes = Axes(f"{title}, against trials", zero=field != "mean")
        figures.append(Figure(title, line_chart(lines, axes)))
    charts: list[Part] = [Figures(figures)]
    if len(curves) > MOST_CURVES:
        charts.append(f"The first {MOST_CURVES} of {len(curves)} curves are drawn.")
    facts = [
        (name, value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in card.items()
    ]
    policy = Section("the policy file's card", [Table((), facts, "scroll left")], fold="closed")
    pace = learned.trials / learned.seconds if learned.seconds > 0 else 0.0
    controllers = len({point.controller for point in learned.points})
    cards = [
        ("method", method, "interrupted" if learned.interrupted else "done"),
        ("trials", f"{learned.trials:,}", f"{pace:.3g} a second"),
        ("updates", f"{learned.updates:,}", f"by {controllers} controllers"),
        ("took", format_seconds(learned.seconds), f"{len(learned.values)} tasks with a plan"),
    ]
    unfinished = "This run was interrupted: it shows what was learned up to then."
    return render_page(
        Page(
            f"{method} learning {', '.join(tasks)}",
            cards,
            [
                Section("What came of each task", [
                    Table(["task", "best tried", "after trials", *cheap, "bound"], rows)
                ]),
                Section("Learning", charts),
                Section("The policy", [policy]),
                Section("How this was made", [preformatted(made)]),
            ],
            brand="dovetail learn",
            lead=[strong(unfinished)] if learned.interrupted else [],
        )
    )  # fmt: skip
