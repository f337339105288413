"""A policy that learns from the command line: shown while it does, then written and summed up."""

import math
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.table import Table
from rich.text import Text

from dovetail.cli.learning_progress import LearningProgress
from dovetail.cli.output import drawn, say, show, show_json
from dovetail.cli.training_run import typed
from dovetail.units import format_seconds, printable

if TYPE_CHECKING:
    from dovetail.pipeline.courses import Course, Subject
    from dovetail.pipeline.learning import Lesson
    from dovetail.pipeline.sources import Progress
    from dovetail.placers.learned.records import Point

FIGURES = ("best", "mean", "invalid", "entropy", "loss")


@dataclass(frozen=True)
class Outputs:
    """Files and folders to write; None: not asked for. `plans`: a file, or of a batch a folder."""

    plans: Path | None = None
    policy: Path | None = None
    curves: Path | None = None
    report: Path | None = None
    tensorboard: Path | None = None


class Events:
    """Points as TensorBoard's scalars, while they come: a run of its own for each controller."""

    def __init__(self, folder: Path) -> None:
        from dovetail.training.tensorboard import check_installed

        check_installed()
        self.folder = folder
        self._stack = ExitStack()
        self._writers: dict[int, Any] = {}

    def add(self, point: "Point") -> None:
        """Its figures, at the trials of its controller."""
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


def learn_and_write(
    subjects: "list[Subject]",
    course: "Course",
    outputs: Outputs,
    *,
    method: str,
    policy: Path | None,
    as_json: bool,
) -> None:
    """Learn; write what was asked for; print the summary, or one JSON object.

    Raises `InfeasibleError` where nothing that was tried fits, after the policy is written.
    """
    from dovetail.pipeline.courses import TRIALS
    from dovetail.pipeline.learning import learn_all

    total = course.trials if course.trials or course.seconds else TRIALS
    title = f"{_named(subjects)} by {method}"
    progress = LearningProgress(title, total, course.seconds)
    say(f"learning {title}, {'measured' if course.measured else 'simulated'} trials")
    with ExitStack() as stack:
        events = None
        if outputs.tensorboard is not None:
            events = stack.enter_context(Events(outputs.tensorboard))
        stack.enter_context(drawn(progress))

        def heard(point: "Point") -> None:
            progress.add(point)
            if events is not None:
                events.add(point)

        lesson = learn_all(
            subjects, course, method=method, policy=policy, progress=heard, doing=_doing()
        )
    _write(lesson, subjects, outputs)
    if as_json:
        show_json(summary(lesson, subjects, outputs))
    else:
        _show(lesson, subjects)
    if lesson.learned.interrupted:
        say("interrupted: this is the best so far")
    if not any(lesson.plans):
        lesson.plan  # noqa: B018  raises what says that nothing fits
    if lesson.failures:
        say(f"{len(lesson.failures)} trials failed, the last one: {lesson.failures[-1]}")


def summary(lesson: "Lesson", subjects: "list[Subject]", outputs: Outputs) -> dict[str, Any]:
    """What `learn --json` prints. Its keys are stable; what is not known is null."""
    learned, card = lesson.learned, lesson.card
    return {
        "method": card["method"],
        "reward": card["reward"],
        "seed": card["seed"],
        "controllers": card["controllers"],
        "trials": learned.trials,
        "updates": learned.updates,
        "seconds": learned.seconds,
        "interrupted": learned.interrupted,
        "failures": len(lesson.failures),
        "tasks": [
            _task_summary(lesson, i, subject.name, plan_path(outputs, subjects, i))
            for i, subject in enumerate(subjects)
        ],
        "policy": _text(outputs.policy),
        "curves": _text(outputs.curves),
        "report": _text(outputs.report),
        "tensorboard": _text(outputs.tensorboard),
    }


def _task_summary(lesson: "Lesson", index: int, name: str, path: Path | None) -> dict[str, Any]:
    plan, learned = lesson.plans[index], lesson.learned
    measured = lesson.measured[0] if lesson.measured else None
    known = plan is not None
    return {
        "task": name,
        "machine": plan.machine.name if plan is not None else None,
        "feasible": known,
        "value": plan.value if plan is not None else None,
        "lower_bound": plan.lower_bound if plan is not None else None,
        "baselines": plan.baselines if plan is not None else None,
        "groups": plan.groups if plan is not None else None,
        "found": learned.found.get(name),
        "measured_seconds": None if measured is None else measured.median_seconds,
        "measured_spread": None if measured is None else measured.spread,
        "plan": _text(path) if known else None,
    }


def _write(lesson: "Lesson", subjects: "list[Subject]", outputs: Outputs) -> None:
    written = []
    if outputs.policy is not None:
        lesson.save_policy(outputs.policy)
        written.append(outputs.policy)
    for i, plan in enumerate(lesson.plans):
        path = plan_path(outputs, subjects, i)
        if path is not None and plan is not None:
            plan.save(path)
            written.append(path)
    if outputs.curves is not None:
        from dovetail.placers.learned.curves import save_points

        save_points(lesson.learned.points, outputs.curves)
        written.append(outputs.curves)
    if outputs.report is not None:
        from dovetail.reports.learning_page import write_learning_page

        names = [subject.name for subject in subjects]
        plans = dict(zip(names, lesson.plans, strict=True))
        write_learning_page(lesson.learned, lesson.card, outputs.report, plans=plans, made=typed())
        written.append(outputs.report)
    for path in (*written, outputs.tensorboard):
        if path is not None:
            say(f"wrote {path}")


def plan_path(outputs: Outputs, subjects: "list[Subject]", index: int) -> Path | None:
    """Where the plan of a subject goes: the file, or of several one each in the folder."""
    if outputs.plans is None or len(subjects) == 1:
        return outputs.plans
    name = re.sub(r"[^A-Za-z0-9.]+", "-", subjects[index].name).strip("-.")[:80]
    return outputs.plans / f"{index}-{name}.json"


def _show(lesson: "Lesson", subjects: "list[Subject]") -> None:
    from dovetail.reports.tables import methods_table

    learned = lesson.learned
    for subject, plan in zip(subjects, lesson.plans, strict=True):
        found = learned.found.get(subject.name)
        after = "nothing fits" if found is None else f"the best after {found:,} trials"
        show(Text(printable(f"{subject.name}: {after}")))
        if plan is not None:
            show(methods_table(plan))
    if lesson.measured:
        table = Table("measured again, in turns", "median step", "spread", "runs")
        for i, timed in enumerate(lesson.measured):
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


def _named(subjects: "list[Subject]") -> str:
    if len(subjects) == 1:
        return subjects[0].name
    return f"{subjects[0].name} and {len(subjects) - 1} more"


def _doing() -> "Progress":
    """Says what is done before there is anything to draw, each once."""
    told = set[str]()

    def doing(what: str, _fraction: float, _best: float | None) -> None:
        if what not in told:
            told.add(what)
            say(what)

    return doing


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
