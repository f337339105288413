"""One self-contained page about a policy that learned: its curves, and what came of each task.

    head       method, trials, time, updates
    tasks      best value, trials up to it, the cheap methods beside it
    curves     best and mean of each task and controller, share of failures, entropy
    card       what the policy file says

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

import numpy as np

from dovetail.placers.learned.curves import Floats, LearningCurve, curves_of
from dovetail.placers.learned.records import Learned
from dovetail.plans import Plan
from dovetail.reports.markup import Markup, cards, details, policy, table
from dovetail.reports.plots import COLOURS, Axes, Line, averaged, line_chart
from dovetail.runtime.files import write_atomically
from dovetail.units import format_count, format_seconds

MOST_CURVES = 32
"""That are drawn; of more the first."""
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

    plans   task -> what came of it
    made    the command that made it

    Raises `UnwritableError`.
    """
    text = render_learning(learned, card, plans=plans, made=made)
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def render_learning(
    learned: Learned,
    card: Mapping[str, object],
    *,
    plans: Mapping[str, Plan | None] | None = None,
    made: str = "",
) -> str:
    """The page as text. O(updates); what is drawn is bounded whatever their number."""
    curves = curves_of(learned.points)
    style = "\n".join(_asset(name) for name in ("page.css", "training.css"))
    method = str(card.get("method", "policy"))
    title = f"{method} learning {', '.join(dict.fromkeys(curve.task for curve in curves))}"
    parts = {
        "policy": policy(style),
        "title": escape(title),
        "style": style,
        "cards": _head(learned, method),
        "tasks": _tasks(learned, curves, plans or {}),
        "curves": _charts(curves),
        "card": _card(card),
        "made": Markup(f"<pre>{escape(made)}</pre>") if made else "",
    }
    # One pass over the template: what is filled in is not searched again.
    pieces = _asset("learning.html").split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _head(learned: Learned, method: str) -> Markup:
    controllers = len({point.controller for point in learned.points})
    pace = learned.trials / learned.seconds if learned.seconds > 0 else 0.0
    ended = "interrupted" if learned.interrupted else "done"
    return cards([
        ("method", method, ended),
        ("trials", f"{learned.trials:,}", f"{pace:.3g} a second"),
        ("updates", f"{learned.updates:,}", f"by {controllers} controllers"),
        ("took", format_seconds(learned.seconds), f"{len(learned.values)} tasks with a plan"),
    ])  # fmt: skip


def _tasks(
    learned: Learned, curves: Sequence[LearningCurve], plans: Mapping[str, Plan | None]
) -> Markup:
    names = list(dict.fromkeys(curve.task for curve in curves))
    baselines = list(
        dict.fromkeys(name for plan in plans.values() if plan for name in plan.baselines)
    )
    rows = []
    for name in names:
        plan = plans.get(name)
        known = plan.baselines if plan is not None else {}
        rows.append([
            name,
            _seconds(learned.values.get(name)),
            f"{learned.found[name]:,}" if name in learned.found else "-",
            *(_seconds(known.get(baseline)) for baseline in baselines),
            _seconds(plan.lower_bound) if plan is not None else "-",
        ])  # fmt: skip
    return table(["task", "best tried", "after trials", *baselines, "bound"], rows)


def _charts(curves: Sequence[LearningCurve]) -> Markup:
    drawn = curves[:MOST_CURVES]
    pieces = []
    for field, title in _SHOWN:
        lines = [
            Line(curve.name, *_thin(curve.trials, getattr(curve, field)), colour=i % COLOURS)
            for i, curve in enumerate(drawn)
        ]
        axes = Axes(f"{title}, against trials", format_count, zero=field != "mean")
        pieces.append(f"<figure><h3>{escape(title)}</h3>{line_chart(lines, axes)}</figure>")
    if len(curves) > len(drawn):
        pieces.append(f"<p>The first {len(drawn)} of {len(curves)} curves are drawn.</p>")
    return Markup("".join(pieces))


def _thin(trials: Floats, values: Floats) -> tuple[Floats, Floats]:
    x, y = averaged(trials, values)
    return np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)


def _card(card: Mapping[str, object]) -> Markup:
    rows = [(name, _value(value)) for name, value in card.items()]
    return details("the policy file's card", table((), rows, style="scroll left"))


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _seconds(seconds: float | None) -> str:
    known = seconds is not None and np.isfinite(seconds)
    return format_seconds(float(seconds)) if known and seconds is not None else "-"
