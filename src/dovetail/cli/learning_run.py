"""Runs `dovetail learn`: shows the progress of learning, writes the results, and sums them up."""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.cli.arguments import LearningOutputs
from dovetail.cli.output import RunView, foreign, listed, say, show, show_json, write
from dovetail.cli.training_run import News, typed
from dovetail.placers.learned.records import Point
from dovetail.training import launched_rank
from dovetail.units import format_seconds, printable

if TYPE_CHECKING:
    from dovetail.pipeline.learning import LearningResult
    from dovetail.pipeline.requests import LearnRequest, TaskRequest
    from dovetail.training import Event

CURVES = ("best", "mean", "invalid", "entropy", "loss")
"""The fields of `Point` that TensorBoard shows."""


def learn_and_write(request: "LearnRequest", outputs: LearningOutputs, *, as_json: bool) -> None:
    """Learn, write what was asked for, and print the summary or one JSON object.

    Raises `InfeasibleError` if nothing that was tried fits, after the policy is written.
    """
    from dovetail.pipeline.learning import learn_all

    if launched_rank():
        # Rank 0 alone writes and reports.
        learn_all(request)
        return
    # A run of so many seconds has no number of trials that it could be a share of.
    total = None if request.seconds else request.most_trials
    more = f" and {len(request.tasks) - 1} more" if len(request.tasks) > 1 else ""
    title = f"{request.tasks[0].name}{more} by {request.method}"
    progress = LearningProgress(title, total, request.seconds)
    news, told = News("controller"), set[str]()
    say(f"learning {title}, {'measured' if request.measured else 'simulated'} trials")
    with ExitStack() as stack:
        stack.enter_context(progress.view.drawn())
        scalars: dict[int, Any] = {}  # controller -> its file for TensorBoard

        def add(point: Point) -> None:
            progress.add(point)
            if outputs.tensorboard is None:
                return
            if point.controller not in scalars:
                from dovetail.training import Scalars

                folder = outputs.tensorboard / f"controller-{point.controller}"
                scalars[point.controller] = stack.enter_context(Scalars(folder))
            for curve in CURVES:
                value = getattr(point, curve)
                if math.isfinite(value):
                    tag = f"{curve}/{point.task}"
                    scalars[point.controller].add(tag, point.trials, value, time.time())

        def tell(doing: str, _fraction: float, _best: float | None) -> None:
            # Each thing that is done is said when it begins. Its progress is drawn from points.
            if doing not in told:
                told.add(doing)
                say(doing)

        def happened(event: "Event") -> None:
            # The summary says by itself that the run was interrupted.
            if event.kind != "stopped" and (line := news.line(event)):
                say(line)

        result = learn_all(request, add, tell, happened)
    _write(result, request.tasks, outputs)
    if as_json:
        show_json(summary(result, request.tasks, outputs))
    else:
        _show(result, request.tasks)
    if result.learned.interrupted:
        say("interrupted: this is the best so far")
    if result.failures:
        say(f"{len(result.failures)} trials failed, the last one: {result.failures[-1]}")
    if not any(result.plans):
        result.plan  # noqa: B018  without a plan it raises the error that says so


def summary(
    result: "LearningResult", tasks: "Sequence[TaskRequest]", outputs: LearningOutputs
) -> dict[str, Any]:
    """The object that `learn --json` prints. Its keys are stable; what is not known is null."""
    learned, card = result.learned, result.card
    measured = result.measured[0] if result.measured else None
    of_tasks: list[dict[str, Any]] = []
    for i, (task, plan) in enumerate(zip(tasks, result.plans, strict=True)):
        path = plan_path(outputs, tasks, i)
        of_tasks.append(
            {
                "task": task.name,
                "machine": None if plan is None else plan.machine.name,
                "feasible": plan is not None,
                "value": None if plan is None else plan.value,
                "lower_bound": None if plan is None else plan.lower_bound,
                "baselines": None if plan is None else plan.baselines,
                "groups": None if plan is None else plan.groups,
                "found": learned.found.get(task.name),
                "measured_seconds": None if measured is None else measured.median_seconds,
                "measured_spread": None if measured is None else measured.spread,
                "plan": None if plan is None or path is None else str(path),
            }
        )
    files = {
        "policy": outputs.policy_out, "curves": outputs.curves, "report": outputs.report,
        "tensorboard": outputs.tensorboard,
    }  # fmt: skip
    return {
        "method": card["method"],
        "reward": card["reward"],
        "seed": card["seed"],
        "controllers": card["controllers"],
        "trials": learned.trials,
        "updates": learned.updates,
        "seconds": learned.seconds,
        "interrupted": learned.interrupted,
        "failures": len(result.failures),
        "tasks": of_tasks,
        **{name: None if path is None else str(path) for name, path in files.items()},
    }


def _write(
    result: "LearningResult", tasks: "Sequence[TaskRequest]", outputs: LearningOutputs
) -> None:
    """Write the files that were asked for, and say so. TensorBoard's are written by now."""
    from dovetail.placers.learned.log import save_points

    learned = result.learned
    write(outputs.policy_out, result.save_policy)
    for i, plan in enumerate(result.plans):
        if plan is not None:
            write(plan_path(outputs, tasks, i), plan.save)
    write(outputs.curves, lambda path: save_points(learned.points, path))
    if outputs.report is not None:
        from dovetail.reports.kit import save_page
        from dovetail.reports.learning_page import render_learning

        plans = dict(zip([task.name for task in tasks], result.plans, strict=True))
        page = render_learning(learned, result.card, plans=plans, made=typed())
        write(outputs.report, partial(save_page, page))
    if outputs.tensorboard is not None:
        say(f"wrote {outputs.tensorboard}")


def plan_path(outputs: LearningOutputs, tasks: "Sequence[TaskRequest]", index: int) -> Path | None:
    """The file of a task's plan; None if plans are not asked for. Of several tasks each has a file
    in the folder."""
    if outputs.plans is None or len(tasks) == 1:
        return outputs.plans
    # The number makes the name unique; the rest is for people, and short enough for any system.
    name = re.sub(r"[^A-Za-z0-9.]+", "-", tasks[index].name).strip("-.")[:80]
    return outputs.plans / f"{index}-{name}.json"


def _show(result: "LearningResult", tasks: "Sequence[TaskRequest]") -> None:
    """Print what was learned, for people."""
    from dovetail.reports.tables import methods_table

    learned = result.learned
    for task, plan in zip(tasks, result.plans, strict=True):
        trials = learned.found.get(task.name)
        outcome = "nothing fits" if trials is None else f"the best after {trials:,} trials"
        show(Text(printable(f"{task.name}: {outcome}")))
        if plan is not None:
            show(methods_table(plan))
    if result.measured:
        table = Table("measured again, in turns", "median step", "spread", "runs")
        for i, timed in enumerate(result.measured):
            spread = f"{100 * timed.spread:.2g} %"
            row = ("the plan" if i == 0 else f"next best {i}", format_seconds(timed.median_seconds))
            table.add_row(*row, spread, str(len(timed.run_seconds)))
        show(table)
    pace = f"{learned.trials / learned.seconds:.3g} a second" if learned.seconds > 0 else ""
    show(
        Text(
            f"{learned.trials:,} trials in {format_seconds(learned.seconds)}, {pace}; "
            f"{learned.updates:,} updates"
        )
    )


# --- Progress on standard error: a table that changes, or lines ---
#
#     zoo:rnnlm by gdp ━━━━━━━━━━━╺━━━━━━━ 1,104 of 2,000 trials  72 trials/s 0:00:15
#
#     task        controller   updates   best      mean      invalid   entropy   mean of updates
#     zoo:rnnlm   0            68        2.55 ms   2.8 ms    0 %       0.63      ▇▆▅▃▂▂▁
#
# If standard error is no terminal, a line is written every `LINE_SECONDS`.

RECENT_UPDATES = 240
"""The curve of a task and controller is drawn from this many updates, the last ones."""
CURVE_WIDTH = 30
"""A curve has at most this many blocks."""
MOST_TASKS = 24
"""A line has the figures of at most this many tasks."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""The blocks of a curve, from its least value to its greatest."""


@dataclass
class _TaskRow:
    """The updates of one task and controller: their number, the last one, recent means."""

    last: Point
    updates: int = 0
    means: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_UPDATES))

    def add(self, point: Point) -> None:
        self.updates += 1
        self.last = point
        self.means.append(point.mean)


class LearningProgress:
    """Shows a run that goes on; `add` is to be called with each point, in any thread.

    trials   how many trials the run takes; None if it ends by time
    seconds  how long the run takes; None if it ends by trials
    tell     says a line; `clock` paces the lines
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
        self.view = RunView(title, self.table, self.line, tell, clock)
        self._rows: dict[tuple[str, int], _TaskRow] = {}
        self._trials: dict[int, int] = {}  # controller -> its trials
        self._clock, self._begin = clock, clock()
        self._lock = threading.Lock()

    def add(self, point: Point) -> None:
        """Take the point of a controller's latest update."""
        with self._lock:
            key = (point.task, point.controller)
            self._rows.setdefault(key, _TaskRow(point)).add(point)
            self._trials[point.controller] = point.trials
        self.view.moved()

    def line(self) -> str:
        """The run in one line, with the figures of each task over its controllers."""
        with self._lock:
            parts = [self.title, *self._pace()]
            tasks = sorted({task for task, _ in self._rows})
            for task in tasks[:MOST_TASKS]:
                points = [row.last for (name, _), row in self._rows.items() if name == task]
                means = [point.mean for point in points if math.isfinite(point.mean)]
                mean = sum(means) / len(means) if means else math.nan
                invalid = sum(point.invalid for point in points) / len(points)
                entropy = sum(point.entropy for point in points) / len(points)
                prefix = f"{task}: " if len(tasks) > 1 else ""
                parts.append(
                    f"{prefix}best {_seconds(min(point.best for point in points))}, mean "
                    f"{_seconds(mean)}, invalid {100 * invalid:.0f} %, entropy {entropy:.3g}"
                )
        return ", ".join(parts)

    def table(self) -> RenderableType:
        """The line of the run, and below it a row for each task and controller."""
        with self._lock:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for name in ("task", "controller", "updates", "best", "mean", "invalid", "entropy"):
                table.add_column(name, overflow="ellipsis", no_wrap=True)
            table.add_column("mean of updates", no_wrap=True)
            rows = [
                (
                    foreign(task),
                    str(controller),
                    f"{row.updates:,}",
                    _seconds(row.last.best),
                    _seconds(row.last.mean),
                    f"{100 * row.last.invalid:.0f} %",
                    f"{row.last.entropy:.3g}",
                    sparkline(row.means),
                )
                for (task, controller), row in sorted(self._rows.items())
            ]
            share = sum(self._trials.values()) / self.total if self.total else None
            if self.seconds:
                share = (self._clock() - self._begin) / self.seconds
            bar = self.view.bar(None if share is None else min(1.0, share), *self._pace())
            return Group(bar, listed(table, rows))

    def _pace(self) -> list[str]:
        """How many trials were judged, and of how many; and those per second, if there are any."""
        judged, passed = sum(self._trials.values()), self._clock() - self._begin
        count = f"{judged:,} of {self.total:,} trials" if self.total else f"{judged:,} trials"
        return [count, f"{judged / passed:.3g} trials/s"] if judged and passed > 0 else [count]


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """The values as blocks. If there are more than `width`, each block is the mean of several. What
    is not finite is left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    bounds = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "-"
