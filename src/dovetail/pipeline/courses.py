"""What a policy is to learn, how long and by whom; and all that can be wrong with it beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dovetail.errors import UsageError
from dovetail.frontends import Captured
from dovetail.machine import Machine, parse_machine
from dovetail.pipeline.opening import check_seed
from dovetail.pipeline.planning import check_request
from dovetail.pipeline.sources import HERE, Step, graph_of
from dovetail.placers.learned.records import BASELINES, OBJECTIVES, Settings
from dovetail.training.checkpoint import check_held

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


def settings_for(method: str, course: Course, *, finetuned: bool = False) -> Settings:
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


def _check_settings(settings: Settings) -> None:
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


def _check_length(course: Course, settings: Settings) -> None:
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
