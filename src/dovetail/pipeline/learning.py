"""From steps to a learned policy and plans: tasks -> policy -> trials -> policy file, plans.

(step, machine) ─► Task ─► learn ─┬─► policy, with its card
                    judge ◄───────┤
simulated, or measured on the     └─► best placement of each task ─► `plan`
devices of this machine
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, PolicyMismatchError, RunError, UsageError
from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured
from dovetail.instances import Instance
from dovetail.machine import Machine, parse_machine
from dovetail.pipeline.opening import check_seed
from dovetail.pipeline.planning import check_request, plan
from dovetail.pipeline.sources import (
    HERE,
    Step,
    TellProgress,
    costs_of,
    default_objective,
    graph_of,
    groups_of,
    machine_of,
    silent,
)
from dovetail.placers import GroupPlacement, PlacementProblem, permitted
from dovetail.placers.learned.records import (
    BASELINES,
    OBJECTIVES,
    Judge,
    Learned,
    LearningSettings,
    PlacementTask,
    Point,
    Trials,
)
from dovetail.plans import Plan, Source, normalise
from dovetail.training.checkpoint import check_held

# What a policy is to learn, how long and by whom; and all that can be wrong with it beforehand.


METHODS = ("seq2seq", "hdp", "gdp")
TRIALS, MOST_TRIALS = 2000, 2**20
"""Where neither trials nor seconds are given, and where only seconds are."""
BACKENDS = ("processes", "ray", "threads", "simulated")


@dataclass(frozen=True)
class Course:
    """How long a policy learns, and by how many controllers.

    trials       placements that are judged, over all tasks and controllers; None: until `seconds`
                 have passed, or `TRIALS`
    controllers, evaluators   RL17's: each controller has its own evaluators
    backend      "": threads for one controller, else processes
    settings     fields of `Settings` that differ from the method's own
    measured     trials run on the devices of this machine; else they are simulated
    simulated_first   trials that are simulated before the measured ones
    folder, resume    of the run's state, so that nothing is lost with a process
    """

    trials: int | None = None
    seconds: float | None = None
    controllers: int = 1
    evaluators: int = 1
    backend: str = ""
    rule: str = "downpour"
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = False
    simulated_first: int = 0
    folder: str | Path | None = None
    resume: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Subject:
    """What is to be placed; as in `plan`. `name` is the task's. Without a step it can be checked,
    no more.

    per_op   every op is placed by itself, but for what must stay together: for gdp
    """

    name: str
    step: Step | None
    machine: str | Machine = ""
    objective: str = ""
    pins: Sequence[tuple[str, str]] = ()
    caps: Sequence[tuple[str, int]] = ()
    per_op: bool = False
    model: str = ""

    @property
    def known(self) -> Step:
        """The step, of a subject that has one."""
        assert self.step is not None, "a subject without a step can be checked, no more"
        return self.step


def check_course(
    course: Course,
    method: str = "",
    policy: str | Path | None = None,
    *,
    subjects: int = 1,
) -> str:
    """The method that will learn; every `InvalidError` that can be known before the long work."""
    if policy is not None:
        from dovetail.placers.learned.files import load_policy

        found = load_policy(policy, method or None)[0].name
        method = method or found
    method = method or METHODS[0]
    for option, text, known in (("method", method, METHODS), ("backend", course.backend, BACKENDS)):
        if text not in known and (text or option == "method"):
            raise UsageError(option, f"{text!r} is not one of {', '.join(known)}")
    check_seed(course.seed)
    if subjects > 1 and method != "gdp":
        raise UsageError("method", f"{method} learns one graph; gdp learns many at once")
    _check_length(course, settings_for(method, course, finetuned=policy is not None))
    if course.measured:
        _check_measured(course, subjects)
    elif course.simulated_first:
        raise UsageError("simulated_first", "is for measured; all trials are simulated here")
    if course.resume and course.folder is None:
        raise UsageError("resume", "needs the folder of the run")
    if course.folder is not None:
        check_held(course.folder, course.resume)
    return method


def settings_for(method: str, course: Course, *, finetuned: bool = False) -> LearningSettings:
    """The method's settings, with those of the course; `finetuned`: of a policy that goes on.

    Raises `UsageError` for an unknown one, or a value of another kind.
    """
    from dovetail.placers.learned.catalog import settings_of

    settings = settings_of(method, finetuned=finetuned)
    kinds = {one.name: type(getattr(settings, one.name)) for one in fields(settings)}
    for name, value in course.settings.items():
        if name not in kinds:
            raise UsageError("setting", f"{name!r} is not one of {', '.join(kinds)}")
        kind = kinds[name]
        number = kind in (int, float) and isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, kind) or number or name == "valid_only_from"):
            raise UsageError("setting", f"{name} is {value!r}, not {kind.__name__}")
    changed = replace(settings, **course.settings)
    _check_settings(changed)
    return changed


def _check_settings(settings: LearningSettings) -> None:
    for name, known in (("objective", OBJECTIVES), ("baseline", BASELINES)):
        if getattr(settings, name) not in known:
            found = getattr(settings, name)
            raise UsageError("setting", f"{name} is {found!r}, not one of {', '.join(known)}")
    if settings.trials < 1 or not settings.rate > 0:
        raise UsageError("setting", "trials must be 1 or more, and rate above 0")
    for name in ("decay_every", "passes"):
        if getattr(settings, name) < 1:
            raise UsageError("setting", f"{name} must be 1 or more")
    first = settings.valid_only_from
    if first is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
        raise UsageError("setting", f"valid_only_from is {first!r}, no number of updates")


def check_subject(subject: Subject, course: Course, method: str) -> None:
    """Raise the `InvalidError` of a subject that can be known before its costs are."""
    if subject.per_op and method != "gdp":
        raise UsageError("per_op", f"is for gdp; {method} decides for one group after the other")
    if course.measured and subject.objective not in ("", "step"):
        raise UsageError("measured", f"what runs is a step; objective {subject.objective} does not")
    check_request(
        subject.machine,
        placer="single",
        objective=subject.objective,
        budget="1e",
        seed=course.seed,
        devices=[name for _, name in subject.pins] + [name for name, _ in subject.caps],
        step=subject.step,
    )
    if course.measured:
        where = (
            parse_machine(subject.machine or HERE)
            if isinstance(subject.machine, str)
            else subject.machine
        )
        if not where.local or len(where.devices) < 2:
            raise UsageError("measured", f"{where.name} is not devices of this machine; use here/2")
        if subject.step is not None and not isinstance(subject.step, Captured):
            raise UsageError("measured", "only a network can run; name it instead of a file")
    if subject.step is not None:
        graph_of(subject.step)


def _check_length(course: Course, settings: LearningSettings) -> None:
    for option in ("controllers", "evaluators"):
        if getattr(course, option) < 1:
            raise UsageError(option, f"is {getattr(course, option)}; use 1 or more")
    if course.trials is not None and course.seconds is not None:
        raise UsageError("trials", "give trials or a budget of seconds, not both")
    if course.seconds is not None and not 0 < course.seconds < float("inf"):
        raise UsageError("budget", f"is {course.seconds} seconds; use more than 0")
    least = settings.trials * course.controllers
    for option, trials in (("trials", course.trials), ("simulated_first", course.simulated_first)):
        if trials is not None and trials < least and (trials or option == "trials"):
            raise UsageError(
                option,
                f"is {trials}, but one update of {course.controllers} controllers takes {least}",
            )


def _check_measured(course: Course, subjects: int) -> None:
    if subjects > 1:
        raise UsageError("measured", "is for one model; others would wait for its devices")
    if course.controllers > 1 or course.evaluators > 1 or course.backend not in ("", "threads"):
        raise UsageError(
            "measured",
            "takes one controller with one evaluator, on threads: the devices are here once, and "
            "two runs at a time would disturb each other",
        )
    if course.folder is not None:
        raise UsageError("folder", "is for simulated trials; measured ones cannot be repeated")


# Measured reward: every placement that a policy draws runs on the devices of this machine.
#
# The protocol is RL17's (Mirhoseini et al., "Device Placement Optimization with Reinforcement
# Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4): a placement runs 10 steps, the
# first is dropped, the mean of the others is its time; one that fails is invalid and no more; noise
# is left to the moving baseline, and what is reported at the end is measured again, 15 times where
# that takes less than 10 s.
#
#     placement ─► predicted to fit? ─► orders by the simulator ─► load ─ 10 steps ─► mean
#                   no: invalid                     a failure: invalid, new processes if they died
#
# Differences: what the simulator says does not fit is not run, since too large a block would end
# whoever else uses this machine; a placement that is drawn again is run again at most `MOST_RUNS`
# times, and counts with the median of its runs; at the end the best few run in turns, so that a
# disturbance strikes all of them, and the best median wins.


STEPS = 10
MOST_RUNS = 3
FINAL_RUNS, LONG_SECONDS, LONG_RUNS = 15, 10.0, 3
FINALISTS = 5


@dataclass(frozen=True, eq=False)
class Timed:
    """A placement [groups] that ran again and again: mean step seconds of each run [runs]."""

    placement: GroupPlacement
    run_seconds: NDArray[np.float64]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.run_seconds))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.run_seconds, (25, 75))
        return float((high - low) / self.median_seconds)


@dataclass(eq=False)
class _Tally:
    """Runs of one placement, none yet where Ctrl-C ended the first; `failed` where it could not."""

    placement: GroupPlacement
    run_seconds: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def seconds(self) -> float:
        return float("inf") if self.failed else float(np.median(self.run_seconds))


class MeasuredTrials:
    """Trials that run here. A context manager: the devices' processes are kept from one trial to
    the next. Not to be shared by threads.

    task   of `step`, on a machine whose devices are cores of this one, else `UsageError`
    """

    def __init__(
        self, step: Captured, task: PlacementTask, *, steps: int = STEPS, seed: int = 0
    ) -> None:
        self.step, self.task, self.steps, self.seed = step, task, steps, seed
        self.problem: PlacementProblem = task.problem(threads=1)
        self.failures: list[str] = []
        self._tallies: dict[bytes, _Tally] = {}
        self._workers = Workers(task.machine)

    def judge(self, placements: NDArray[np.int32]) -> Trials:
        """Run [batch, groups], one after the other: a `Judge`."""
        fits = self.problem.evaluate(self.problem.spread(placements)).feasible
        tallies = [self._try(row, bool(ok)) for row, ok in zip(placements, fits, strict=True)]
        seconds = np.array([tally.seconds for tally in tallies])
        return Trials(seconds, np.isfinite(seconds), np.ones(len(seconds), dtype=bool))

    def simulated(self, placements: NDArray[np.int32]) -> Trials:
        """The same trials by the simulator: a `Judge` that takes a millisecond each."""
        found = self.problem.evaluate(self.problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=bool))

    @property
    def runs(self) -> int:
        """Of placements, repeated ones counted again; failures are not."""
        return sum(len(tally.run_seconds) for tally in self._tallies.values())

    def finalists(self, count: int = FINALISTS) -> list[GroupPlacement]:
        """The best distinct placements that ran, best first. Raises what ended the last trial
        where none ran."""
        ran = sorted(
            (tally for tally in self._tallies.values() if tally.run_seconds),
            key=lambda tally: tally.seconds,
        )
        if not ran:
            last = self.failures[-1] if self.failures else "none was predicted to fit into memory"
            raise InfeasibleError(f"no placement that was tried ran: {last}")
        return [tally.placement for tally in ran[:count]]

    def compare(
        self,
        placements: Sequence[GroupPlacement],
        progress: Callable[[float], None] = lambda _fraction: None,
    ) -> list[Timed]:
        """Each placement again, in turns, best median first; those that fail are left out."""
        seconds: list[list[float]] = [[] for _ in placements]
        left = list(range(len(placements)))
        turns, turn = FINAL_RUNS, 0
        while turn < turns and left:
            # Who goes first changes, so that none always follows the same one.
            for i in left[turn % len(left) :] + left[: turn % len(left)]:
                found = self._run(placements[i])
                if found is None:
                    left.remove(i)
                    continue
                seconds[i].append(found)
                if found * self.steps >= LONG_SECONDS:
                    turns = LONG_RUNS
            turn += 1
            progress(turn / turns)
        timed = [Timed(placements[i], np.array(seconds[i])) for i in left]
        return sorted(timed, key=lambda one: one.median_seconds)

    def close(self, *, kill: bool = False) -> None:
        """End the devices' processes."""
        self._workers.close(kill=kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=error is not None)

    def _try(self, placement: GroupPlacement, fits: bool) -> _Tally:
        """Run it, unless its runs so far are enough."""
        key = placement.tobytes()
        tally = self._tallies.setdefault(key, _Tally(placement.copy(), failed=not fits))
        if not tally.failed and len(tally.run_seconds) < MOST_RUNS:
            found = self._run(placement)
            if found is None:
                tally.failed = not tally.run_seconds  # a disturbed repeat says nothing new
            else:
                tally.run_seconds.append(found)
        return tally

    def _run(self, placement: GroupPlacement) -> float | None:
        """Mean seconds of a step; None where it fails."""
        if self._workers.closed:
            self._workers.close(kill=True)
            self._workers = Workers(self.task.machine)
        try:
            plan = loadable(self.problem, self.problem.spread(placement))
            with execute(plan, self.step, seed=self.seed, workers=self._workers) as placed:
                return float(placed.step_seconds(self.steps).mean())
        except (RunError, InfeasibleError) as error:
            self.failures.append(str(error))
            return None


def loadable(problem: PlacementProblem, placement: NDArray[np.int32]) -> Plan:
    """A plan of this placement [ops] that can be run: in the simulator's orders, with no promise
    but its predicted step and memory."""
    if problem.trace is None:
        raise UsageError("task", "nobody simulates it, and a run needs the simulator's orders")
    graph, machine = problem.graph, problem.machine
    timeline = problem.trace(placement)
    return Plan(
        source=Source("", "", (), ""),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=normalise(placement, graph, machine),
        orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
        compute_seconds=problem.costs.compute_seconds,
        costs_source=problem.costs.source,
        placer="trial",
        seed=problem.seed,
        objective=problem.objective,
        value=timeline.step_seconds,
        lower_bound=0.0,
        bound_proof="",
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        groups=problem.groups.count,
        planning_seconds=0.0,
    )


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
    doing: TellProgress = silent,
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


def task_of(subject: Subject, progress: TellProgress = silent) -> PlacementTask:
    """The task, its machine probed and its costs measured where that is this one."""
    step = subject.known
    graph, machine = graph_of(step), machine_of(step, subject.machine, progress)
    permitted(graph, machine, subject.pins)
    objective = subject.objective or default_objective(step)
    return PlacementTask(
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
    method: str, tasks: Sequence[PlacementTask], seed: int, path: str | Path | None
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


def _loaded(
    method: str, task: PlacementTask, path: str | Path
) -> tuple["Policy", dict[str, object]]:
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


def _sizes(task: PlacementTask) -> list[object]:
    """What a policy of one graph must agree with."""
    return [task.graph.fingerprint, task.groups.count, len(task.machine.devices)]


def _learn(
    tasks: Sequence[PlacementTask],
    policy: "Policy",
    settings: LearningSettings,
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
    task: PlacementTask,
    start: tuple["Policy", dict[str, object]],
    settings: LearningSettings,
    course: Course,
    progress: Callable[[Point], None] | None,
    doing: TellProgress,
) -> Lesson:
    """One controller in this process, which waits while the devices work."""

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
    tasks: Sequence[PlacementTask],
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
    subject: Subject, task: PlacementTask, placement: GroupPlacement, method: str, learned: Learned
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
    tasks: Sequence[PlacementTask], policy: "Policy", course: Course, learned: Learned
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


# Learning from measured trials: one controller, in the process that waits for the devices.
#
# theta ─► draw K ─► each runs on the devices, in turn ─► U(g) ─► theta


if TYPE_CHECKING:
    from dovetail.placers.learned.policy import Policy


def train_here(
    policy: "Policy",
    task: PlacementTask,
    judge: Judge,
    settings: LearningSettings,
    course: "Course",
    progress: Callable[[Point], None] | None,
) -> Learned:
    """Train `policy` itself until the course's trials are judged or its seconds are over, whichever
    it has. Ctrl-C ends it: what the update under way had judged is not among its points."""
    from dovetail.placers.learned.learner import PolicyLearner

    learner = PolicyLearner(policy, [task], [judge], settings, seed=course.seed, listen=progress)
    began, theta, interrupted = time.monotonic(), learner.theta, False
    assert course.trials is not None, "its caller has chosen a number"
    seconds = float("inf") if course.seconds is None else course.seconds
    updates = 0
    try:
        while (
            updates + 1
        ) * settings.trials <= course.trials and time.monotonic() - began < seconds:
            indices = np.arange(updates * settings.trials, (updates + 1) * settings.trials)
            gradient = learner.gradient(theta, indices, 0)
            theta += learner.update(theta, gradient.vector, 0.0)
            updates += 1
    except KeyboardInterrupt:
        interrupted = True
    learner.flat.write(theta)
    return Learned(
        theta=theta,
        placements={name: best.placement for name, best in learner.best.items()},
        values={name: best.seconds for name, best in learner.best.items()},
        found={name: best.found for name, best in learner.best.items()},
        trials=learner.trials,
        updates=learner.updates,
        seconds=time.monotonic() - began,
        points=tuple(learner.points),
        interrupted=interrupted,
    )
