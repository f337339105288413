"""From steps to a learned policy and plans: tasks -> policy -> trials -> policy file, plans.

(step, machine) ─► Task ─► learn ─┬─► policy, with its card
                    judge ◄───────┤
simulated, or measured on the     └─► best placement of each task ─► `plan`
devices of this machine
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import InfeasibleError, PolicyMismatchError
from dovetail.frontends import Captured
from dovetail.instances import Instance
from dovetail.machine import Machine
from dovetail.pipeline.courses import (
    MOST_TRIALS,
    TRIALS,
    Course,
    Subject,
    check_course,
    check_subject,
    settings_for,
)
from dovetail.pipeline.measured import FINALISTS, MeasuredTrials, Timed
from dovetail.pipeline.planning import plan
from dovetail.pipeline.sources import (
    Progress,
    Step,
    costs_of,
    default_objective,
    graph_of,
    groups_of,
    machine_of,
    silent,
)
from dovetail.placers import GroupPlacement, permitted
from dovetail.placers.learned.records import Learned, Point, Settings, Task
from dovetail.plans import Plan

if TYPE_CHECKING:
    from dovetail.placers.learned.policy import Policy


@dataclass(frozen=True, eq=False)
class Lesson:
    """What learning leaves.

    plans      of each subject in turn; None where nothing that was tried fits
    policy     after the last update, with the card of its file
    measured   of a measured reward: the best few, which ran again side by side; best first
    failures   of a measured reward: why trials failed, the last one last
    """

    plans: tuple[Plan | None, ...]
    policy: "Policy"
    card: dict[str, object]
    learned: Learned
    measured: tuple[Timed, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """That of the only subject, or of the first. Raises `InfeasibleError` without one."""
        if self.plans[0] is None:
            raise InfeasibleError(
                "no placement that was tried fits; give it more trials, or larger devices"
            )
        return self.plans[0]

    def save_policy(self, path: str | Path) -> None:
        """Write the policy with its card as safetensors. Raises `UnwritableError`."""
        from dovetail.placers.learned.files import save_policy

        save_policy(path, self.policy, self.card)


def learn(  # noqa: PLR0913  all but two are keyword-only
    step: Step,
    machine: str | Machine = "",
    *,
    method: str = "",
    policy: str | Path | None = None,
    per_op: bool = False,
    objective: str = "",
    pins: Sequence[tuple[str, str]] = (),
    caps: Sequence[tuple[str, int]] = (),
    model: str = "",
    progress: Callable[[Point], None] | None = None,
    **course: Any,
) -> Lesson:
    """Learn to place `step` on `machine`: its plan, and the policy.

    method    seq2seq, hdp or gdp; by default the one of `policy`, and else seq2seq
    policy    a file to start from
    per_op    every op is placed by itself, but for what must stay together: for gdp
    course    fields of `Course`: trials, seconds, controllers, measured, seed, ...
    the rest  as in `plan`

    A first Ctrl-C ends it with the best so far. Raises `InvalidError`, `TrainingError`.
    """
    name = model or (step.source.model if isinstance(step, Captured) else "") or "graph"
    subject = Subject(name, step, machine, objective, pins, caps, per_op, model)
    return learn_all([subject], Course(**course), method=method, policy=policy, progress=progress)


def learn_all(
    subjects: Sequence[Subject],
    course: Course,
    *,
    method: str = "",
    policy: str | Path | None = None,
    progress: Callable[[Point], None] | None = None,
    doing: Progress = silent,
) -> Lesson:
    """Learn one policy for all subjects, as GDP's batch training does. Raises as `learn` does."""
    method = check_course(course, method, policy, subjects=len(subjects))
    for one in subjects:
        check_subject(one, course, method)
    tasks = [task_of(one, doing) for one in subjects]
    start, card = _starting_policy(method, tasks, course.seed, policy)
    settings = settings_for(method, course, finetuned=policy is not None)
    if not course.measured:
        learned = _learn(tasks, start, settings, course, progress)
        chosen = [learned.placements.get(task.name) for task in tasks]
        whole = card | _card(tasks, start, course, learned)
        return _finish(subjects, tasks, chosen, start, whole, learned)
    return _learn_measured(subjects[0], tasks[0], (start, card), settings, course, progress, doing)


def task_of(subject: Subject, progress: Progress = silent) -> Task:
    """The task, its machine probed and its costs measured where that is this one."""
    step = subject.known
    graph, machine = graph_of(step), machine_of(step, subject.machine, progress)
    permitted(graph, machine, subject.pins)
    objective = subject.objective or default_objective(step)
    return Task(
        subject.name,
        graph,
        machine,
        costs_of(step, machine, progress),
        groups_of(step, per_op=subject.per_op),
        objective=objective,
        pins=tuple(subject.pins),
        caps=tuple(subject.caps),
        ranked=objective == "step",
    )


def _starting_policy(
    method: str, tasks: Sequence[Task], seed: int, path: str | Path | None
) -> tuple["Policy", dict[str, object]]:
    """A new policy, or the file's, and the card it brings. Raises `PolicyMismatchError` for one
    that was made for another graph."""
    from dovetail.placers.learned.catalog import make_policy
    from dovetail.placers.learned.features import look

    view = look(tasks[0].problem(seed=seed))
    policy, card = make_policy(method, view, seed), dict[str, object]()
    if path is not None:
        policy, card = _loaded(method, tasks[0], path)
    return (policy.alone(view) if len(tasks) == 1 else policy), card


def _loaded(method: str, task: Task, path: str | Path) -> tuple["Policy", dict[str, object]]:
    from dovetail.placers.learned.files import load_policy

    policy, card = load_policy(path, method)
    sizes = card.get("sizes")
    if method != "gdp" and not (isinstance(sizes, list) and _sizes(task) in sizes):
        names = card.get("trained_on")
        made = ", ".join(map(str, names)) if isinstance(names, list) else "another graph"
        raise PolicyMismatchError(
            str(path), f"it was made for {made}, and {method} serves one graph and machine"
        )
    return policy, card


def _sizes(task: Task) -> list[object]:
    """What a policy of one graph must agree with."""
    return [task.graph.fingerprint, task.groups.count, len(task.machine.devices)]


def _learn(
    tasks: Sequence[Task],
    policy: "Policy",
    settings: Settings,
    course: Course,
    progress: Callable[[Point], None] | None,
) -> Learned:
    """Train `policy` itself, on simulated trials."""
    from dovetail.placers.learned.learning import learn as train

    return train(
        list(tasks),
        policy,
        settings,
        trials=_trials(course),
        seconds=course.seconds,
        controllers=course.controllers,
        evaluators=course.evaluators,
        backend=course.backend or ("threads" if course.controllers == 1 else "processes"),
        rule=course.rule,
        folder=None if course.folder is None else Path(course.folder),
        resume=course.resume,
        seed=course.seed,
        progress=progress,
    )


def _trials(course: Course) -> int:
    if course.trials is not None:
        return course.trials
    return TRIALS if course.seconds is None else MOST_TRIALS


def _learn_measured(
    subject: Subject,
    task: Task,
    start: tuple["Policy", dict[str, object]],
    settings: Settings,
    course: Course,
    progress: Callable[[Point], None] | None,
    doing: Progress,
) -> Lesson:
    """One controller in this process, which waits while the devices work."""
    from dovetail.pipeline.measuring import train_here

    assert isinstance(subject.step, Captured), "checked"
    policy, card = start
    with MeasuredTrials(subject.step, task, seed=course.seed) as here:
        first: list[GroupPlacement] = []
        if course.simulated_first:
            simulated = replace(course, trials=course.simulated_first, seconds=None)
            found = train_here(policy, task, here.simulated, settings, simulated, progress)
            first = list(found.placements.values())
            if found.interrupted:
                card |= _card([task], policy, simulated, found) | {"reward": "simulated"}
                return _finish([subject], [task], first[:1] or [None], policy, card, found)
        timed_course = replace(course, trials=_trials(course))
        learned = train_here(policy, task, here.judge, settings, timed_course, progress)
        if learned.interrupted and not here.runs and not first:
            raise KeyboardInterrupt
        finalists = (here.finalists(FINALISTS) if here.runs or not first else []) + first
        distinct = list({one.tobytes(): one for one in finalists}.values())
        timed = here.compare(distinct, lambda done: doing("measuring the best", done, None))
    chosen = timed[0].placement if timed else None
    whole = card | _card([task], policy, course, learned)
    lesson = _finish([subject], [task], [chosen], policy, whole, learned)
    return replace(lesson, measured=tuple(timed), failures=tuple(here.failures))


def _finish(
    subjects: Sequence[Subject],
    tasks: Sequence[Task],
    chosen: Sequence[GroupPlacement | None],
    policy: "Policy",
    card: dict[str, object],
    learned: Learned,
) -> Lesson:
    plans = [
        None if placement is None else _plan_of(subject, task, placement, policy.name, learned)
        for subject, task, placement in zip(subjects, tasks, chosen, strict=True)
    ]
    return Lesson(tuple(plans), policy, card, learned)


def _plan_of(
    subject: Subject, task: Task, placement: GroupPlacement, method: str, learned: Learned
) -> Plan:
    """The plan of what was learned, among the cheap methods' baselines and above a bound."""
    found = plan(
        subject.known,
        "" if isinstance(subject.step, Instance) else task.machine,
        placer=method,
        method=lambda _problem, _budget: placement,
        per_op=subject.per_op,
        objective=task.objective,
        budget="1e",
        pins=task.pins,
        caps=task.caps,
        model=subject.model,
    )
    best = learned.values.get(task.name)
    at = [p.seconds for p in learned.points if p.task == task.name and p.best == best]
    return replace(
        found,
        planning_seconds=learned.seconds,
        interrupted=learned.interrupted,
        found_seconds={**found.found_seconds, method: min(at, default=learned.seconds)},
    )


def _card(
    tasks: Sequence[Task], policy: "Policy", course: Course, learned: Learned
) -> dict[str, object]:
    """What the policy file says of its making; an earlier card's counts are not added up."""
    return {
        "method": policy.name,
        "trained_on": [task.name for task in tasks],
        "machines": [task.machine.name for task in tasks],
        "sizes": [_sizes(task) for task in tasks],
        "reward": "measured" if course.measured else "simulated",
        "controllers": course.controllers,
        "settings": dict(course.settings),
        "seed": course.seed,
        "updates": learned.updates,
        "trials": learned.trials,
        "seconds": learned.seconds,
        "interrupted": learned.interrupted,
        "versions": {name: version(name) for name in ("dovetail", "torch", "numpy")},
    }
