"""Runs `dovetail learn`: shows a policy while it learns, then writes the results and a summary."""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.cli.output import (
    LinePace,
    RunBar,
    drawn,
    foreign,
    listed,
    say,
    show,
    show_json,
)
from dovetail.cli.training_run import typed
from dovetail.placers.learned.records import Point
from dovetail.units import format_seconds, printable

# --- Progress on standard error ---

RECENT = 240
"""The curve of a task and controller shows its last updates, as many as this."""
WIDTH = 30
"""A curve has at most this many blocks."""
MOST_TOLD = 24
"""A line of progress tells of at most this many tasks."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""A curve is drawn with these, from the lowest value to the highest."""


@dataclass
class _TaskRow:
    """The updates of one task and controller."""

    updates: int = 0
    last: Point | None = None
    means: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, point: Point) -> None:
        self.updates += 1
        self.last = point
        self.means.append(point.mean)


class LearningProgress:
    """Shows a run on standard error, as a table that changes:

        zoo:rnnlm by gdp ━━━━━━━━━━━╺━━━━━━━ 1,104 of 2,000 trials  72 trials/s 0:00:15

        task        controller   updates   best      mean      invalid   entropy   mean of updates
        zoo:rnnlm   0            68        2.55 ms   2.8 ms    0 %       0.63      ▇▆▅▃▂▂▁

    If standard error is no terminal, it writes a line every `LINE_SECONDS` instead. `add` must be
    called with each point, from any thread.

    trials, seconds   how much the run is to take; None: it has no such limit
    tell              a function that writes a line
    clock             a function that returns seconds, by which lines are paced
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
        self._rows: dict[tuple[str, int], _TaskRow] = {}
        self._trials: dict[int, int] = {}
        self._tell, self._clock = tell, clock
        self._begin = clock()
        self._bar, self._line_pace = RunBar(title, clock), LinePace(clock)
        self._lock = threading.Lock()

    def add(self, point: Point) -> None:
        """Count an update that a controller has made."""
        with self._lock:
            self.points.append(point)
            self._rows.setdefault((point.task, point.controller), _TaskRow()).add(point)
            self._trials[point.controller] = point.trials
            line = self._line() if not self.live and self._line_pace.is_due() else ""
        if line:
            self._tell(line)

    @property
    def trials(self) -> int:
        """The number of trials so far, over all controllers."""
        return sum(self._trials.values())

    def line(self) -> str:
        """The run in one line."""
        with self._lock:
            return self._line()

    def table(self) -> RenderableType:
        """The run, with a row for each task and controller."""
        with self._lock:
            below = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for name in ("task", "controller", "updates", "best", "mean", "invalid", "entropy"):
                below.add_column(name, overflow="ellipsis", no_wrap=True)
            below.add_column("mean of updates", no_wrap=True)
            rows = [
                (foreign(task), str(controller), *_cells(row))
                for (task, controller), row in sorted(self._rows.items())
            ]
            top = self._bar.at(self._share(), self._counted(), *self._pace())
            return Group(top, listed(below, rows))

    def _line(self) -> str:
        parts = [self.title, self._counted(), *self._pace()]
        tasks = {task for task, _ in self._rows}
        for task in sorted(tasks)[:MOST_TOLD]:
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
    """Draws the values as blocks. If there are more than `width`, each block is the mean of some.
    Values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    bounds = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _told(points: Sequence[Point]) -> str:
    """Sums up the last updates of a task's controllers in one phrase."""
    best = min(point.best for point in points)
    means = [point.mean for point in points if math.isfinite(point.mean)]
    invalid = sum(point.invalid for point in points) / len(points)
    entropy = sum(point.entropy for point in points) / len(points)
    mean = sum(means) / len(means) if means else math.nan
    return (
        f"best {_seconds(best)}, mean {_seconds(mean)}, invalid {100 * invalid:.0f} %, "
        f"entropy {entropy:.3g}"
    )


def _cells(row: _TaskRow) -> list[str]:
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


# --- A run: its files, its summary ---

if TYPE_CHECKING:
    from dovetail.pipeline.learning import LearningResult
    from dovetail.pipeline.requests import LearnRequest, TaskRequest
    from dovetail.pipeline.sources import TellProgress

FIGURES = ("best", "mean", "invalid", "entropy", "loss")
"""TensorBoard shows these fields of `Point`."""


@dataclass(frozen=True)
class LearningOutputs:
    """Files and folders to write; None: not asked for.

    plans   the plan's file, or a folder of plans if several networks are learned
    """

    plans: Path | None = None
    policy: Path | None = None
    curves: Path | None = None
    report: Path | None = None
    tensorboard: Path | None = None


class Events:
    """Writes points as scalars for TensorBoard while they come, with a run for each controller."""

    def __init__(self, folder: Path) -> None:
        from dovetail.training.tensorboard import check_installed

        check_installed()
        self.folder = folder
        self._stack = ExitStack()
        self._writers: dict[int, Any] = {}

    def add(self, point: "Point") -> None:
        """Write a point's figures. Their step is the number of trials of the controller."""
        from dovetail.training.tensorboard import Scalars

        if point.controller not in self._writers:
            scalars = Scalars(self.folder / f"controller-{point.controller}")
            self._writers[point.controller] = self._stack.enter_context(scalars)
        for figure in FIGURES:
            value = getattr(point, figure)
            if math.isfinite(value):
                tag = f"{figure}/{point.task}"
                self._writers[point.controller].add(tag, point.trials, value, time.time())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def learn_and_write(request: "LearnRequest", outputs: LearningOutputs, *, as_json: bool) -> None:
    """Learn, write what was asked for, and print the summary or one JSON object.

    Raises `InfeasibleError` if no placement that was tried fits, after the policy is written.
    """
    from dovetail.pipeline.learning import learn_all

    total = request.trials if request.seconds else request.most_trials
    title = f"{_named(request.tasks)} by {request.method}"
    progress = LearningProgress(title, total, request.seconds)
    say(f"learning {title}, {'measured' if request.measured else 'simulated'} trials")
    with ExitStack() as stack:
        events = None
        if outputs.tensorboard is not None:
            events = stack.enter_context(Events(outputs.tensorboard))
        stack.enter_context(drawn(progress))

        def heard(point: "Point") -> None:
            progress.add(point)
            if events is not None:
                events.add(point)

        result = learn_all(request, heard, _doing())
    _write(result, request.tasks, outputs)
    if as_json:
        show_json(summary(result, request.tasks, outputs))
    else:
        _show(result, request.tasks)
    if result.learned.interrupted:
        say("interrupted: this is the best so far")
    if not any(result.plans):
        result.plan  # noqa: B018  raises the error that says why nothing fits
    if result.failures:
        say(f"{len(result.failures)} trials failed, the last one: {result.failures[-1]}")


def summary(
    result: "LearningResult", tasks: "Sequence[TaskRequest]", outputs: LearningOutputs
) -> dict[str, Any]:
    """The object that `learn --json` prints. Its keys are stable; what is not known is null."""
    learned, card = result.learned, result.card
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
        "tasks": [
            _task_summary(result, i, task.name, plan_path(outputs, tasks, i))
            for i, task in enumerate(tasks)
        ],
        "policy": _text(outputs.policy),
        "curves": _text(outputs.curves),
        "report": _text(outputs.report),
        "tensorboard": _text(outputs.tensorboard),
    }


def _task_summary(
    result: "LearningResult", index: int, name: str, path: Path | None
) -> dict[str, Any]:
    plan, learned = result.plans[index], result.learned
    measured = result.measured[0] if result.measured else None
    is_feasible = plan is not None
    return {
        "task": name,
        "machine": plan.machine.name if plan is not None else None,
        "feasible": is_feasible,
        "value": plan.value if plan is not None else None,
        "lower_bound": plan.lower_bound if plan is not None else None,
        "baselines": plan.baselines if plan is not None else None,
        "groups": plan.groups if plan is not None else None,
        "found": learned.found.get(name),
        "measured_seconds": None if measured is None else measured.median_seconds,
        "measured_spread": None if measured is None else measured.spread,
        "plan": _text(path) if is_feasible else None,
    }


def _write(
    result: "LearningResult", tasks: "Sequence[TaskRequest]", outputs: LearningOutputs
) -> None:
    written = []
    if outputs.policy is not None:
        result.save_policy(outputs.policy)
        written.append(outputs.policy)
    for i, plan in enumerate(result.plans):
        path = plan_path(outputs, tasks, i)
        if path is not None and plan is not None:
            plan.save(path)
            written.append(path)
    if outputs.curves is not None:
        from dovetail.placers.learned.curves import save_points

        save_points(result.learned.points, outputs.curves)
        written.append(outputs.curves)
    if outputs.report is not None:
        from dovetail.reports.learning_page import write_learning_page

        names = [task.name for task in tasks]
        plans = dict(zip(names, result.plans, strict=True))
        write_learning_page(result.learned, result.card, outputs.report, plans=plans, made=typed())
        written.append(outputs.report)
    for path in (*written, outputs.tensorboard):
        if path is not None:
            say(f"wrote {path}")


def plan_path(outputs: LearningOutputs, tasks: "Sequence[TaskRequest]", index: int) -> Path | None:
    """The file for the plan of a task: the one that was named, or one in the folder if there are
    several tasks. None if no plan was asked for."""
    if outputs.plans is None or len(tasks) == 1:
        return outputs.plans
    name = re.sub(r"[^A-Za-z0-9.]+", "-", tasks[index].name).strip("-.")[:80]
    return outputs.plans / f"{index}-{name}.json"


def _show(result: "LearningResult", tasks: "Sequence[TaskRequest]") -> None:
    """Print each task's best plan, what was measured again, and the pace of the run."""
    from dovetail.reports.tables import methods_table

    learned = result.learned
    for task, plan in zip(tasks, result.plans, strict=True):
        trials = learned.found.get(task.name)
        after = "nothing fits" if trials is None else f"the best after {trials:,} trials"
        show(Text(printable(f"{task.name}: {after}")))
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


def _named(tasks: "Sequence[TaskRequest]") -> str:
    if len(tasks) == 1:
        return tasks[0].name
    return f"{tasks[0].name} and {len(tasks) - 1} more"


def _doing() -> "TellProgress":
    """A `TellProgress` that says each thing that is done once, before there is anything to draw."""
    told = set[str]()

    def doing(what: str, _fraction: float, _best: float | None) -> None:
        if what not in told:
            told.add(what)
            say(what)

    return doing


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
