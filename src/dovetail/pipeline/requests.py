"""The requests: one record each for `plan`, `plan_phases`, `learn` and `schedule`.

The defaults and the meaning of each option stand here and nowhere else. The command line makes its
options from the fields (`request_fields`), so a field's help is one phrase that a user understands.
A record checks itself when it is built, so that wrong input is refused before the long work.
Nothing here imports torch or numpy before a record is built, so that the command line shows its
help at once.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.errors import MachineError, UsageError
from dovetail.methods import (
    KEEP_ORDER,
    NO_ORDER,
    OBJECTIVES,
    PIPELINE_SCHEDULES,
    PLACERS,
    SCHEDULERS,
    Grouping,
    imported,
)
from dovetail.request_fields import (
    documented,
    option,
    option_made,
    read_names,
    read_pairs,
    read_seconds,
    read_share,
    read_sizes,
    read_values,
)
from dovetail.training import BACKENDS, launched_rank, launched_ranks, named_backend
from dovetail.units import HERE

if TYPE_CHECKING:
    from dovetail.frontends import Captured
    from dovetail.machine import Machine
    from dovetail.pipeline.sources import Step
    from dovetail.placers import Limits, Placer
    from dovetail.placers.learned.records import LearningSettings
    from dovetail.runtime.timers import Deadline

Function = TypeVar("Function", bound=Callable[..., Any])
AUTO = "auto"
MACHINE_HELP = (
    "here (all cores of this machine as one device, and its GPUs), here/cpu, here/gpu, here/1 (one "
    "core), here/2 (its cores as two devices), here/gpu*2 (each GPU as two devices), "
    'FILE.toml, presets such as "2 x rtx3090 + ryzen9" (dovetail machine --presets lists them), '
    "or a paper's machine: rl17/2, "
    "rl17/4, gdp/2 to gdp/8"
)
CPU = "cpu"
"""This DEVICE text of `schedule` names the cores of this machine."""
WHOLE_SECONDS, QUICK_SECONDS, SEARCH_SECONDS = 60.0, 10.0, 10.0
"""A plan takes so many seconds if no budget is given, or so many by `quick`, and its search at most
`SEARCH_SECONDS` of them: longer searches rarely find more."""
SHARES = {"measuring": 3.0, "searching": 3.0, "compiling": 4.0, "comparing": 1.0}
"""The phases of planning on this machine, and their shares of a budget of seconds."""
MIN_GAIN = 0.02
"""A plan on more devices must be better by this share if `min_gain` is not given."""
LEARNERS = tuple(name for name, method in PLACERS.items() if method.learns)
"""The placers whose policies `learn` trains. The first is the default."""
POLICY_PLACERS = tuple(name for name, method in PLACERS.items() if method.with_policy)
"""The placers that take a policy file."""
TRIALS, MOST_TRIALS = 2000, 2**20
"""`learn` judges `TRIALS` placements if neither trials nor seconds are given, and at most
`MOST_TRIALS` if only seconds are."""


# --- Plan ---


@documented
@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What to plan, and how. Raises an `InvalidError` for a request that cannot be planned, as far
    as that can be known beforehand.

    step            a captured network, a graph or an instance. Without it a request can be checked,
                    but not planned
    method          a placer that runs in place of our own, under the name `placer`
    model           the name of the file that held the step, which the plan keeps
    deadline        of planning as a whole, which began with the command; None: it begins with
                    `find_plan`, which also gives the search its share of `budget`
    """

    step: "Step | None" = None
    machine: "str | Machine" = option(
        "",
        f"Machine to plan for: {MACHINE_HELP}. An instance has its own",
        shown=HERE,
        more="Or a `Machine`",
    )
    placer: str = option(
        AUTO, f"Method to use: {', '.join(PLACERS)}. They are described below",
        more="The table is `methods.PLACERS`",
    )  # fmt: skip
    objective: str = option(
        "",
        "What to minimise. step: seconds of one step; pipeline: seconds of a training step over "
        "--micro-batches in stages; load: seconds of the busiest device, for streams of samples; "
        "latency: seconds of one sample, for instances. By default load for an instance, pipeline "
        "with --micro-batches, else step",
        shown="step; load for an instance",
    )
    micro_batches: int = option(
        0,
        "Micro-batches of a training step, for objective pipeline. MODEL's batch is one "
        "micro-batch",
        shown="none",
    )
    schedule: str = option(
        AUTO,
        f"Order of a pipeline's work: {', '.join(PIPELINE_SCHEDULES)}, or auto, the fastest of "
        "these. For objective pipeline",
    )
    recompute: str = option(
        AUTO,
        "auto: stages compute their forward pass again in the backward pass where memory is short; "
        "never: they keep what it made. For objective pipeline",
    )
    replicas: str = option(
        "",
        "auto: split MODEL's batch into equal parts, and choose together how many data-parallel "
        "towers share them, in how many micro-batches each, and where all of it runs. For training",
    )
    contiguous: bool = option(
        False,
        "Only contiguous plans: no path leaves a device and returns to it. For objective load",
    )
    budget: "str | float | Limits" = option(
        "",
        "Limit of planning as a whole, in seconds (10, 10s): measuring, searching, compiling and "
        "comparing share it. Or of the search alone, in evaluated placements (5000e)",
        shown="60s",
        more="By default the search takes at most 10 s of the 60",
    )
    quick: bool = option(
        False,
        "Plan within 10s, or the budget that is given: nothing is compiled, and costs are measured "
        "coarsely",
        "--quick",
    )
    again: bool = option(
        False,
        "Search on where a plan of this step, machine and request was found before, with what is "
        "kept of it. The plan is no worse. By default that plan is the result",
        "--again",
    )
    gap: float = option(
        0.0, "Stop at a plan that is proven to be within this share of the best: .02 is 2 %"
    )
    seed: int = option(
        0, "Seed of the search. With a budget of evaluations, the same seed gives the same plan"
    )
    pins: Sequence[tuple[str, str]] = option(
        (),
        "Keep the ops and modules that match a pattern on a device",
        "--pin",
        kind=list[str],
        read=read_pairs,
        syntax="PATTERN=DEVICE, e.g. lstm.0=cpu0",
        more="Pairs (pattern, device)",
    )
    caps: Sequence[tuple[str, int]] = option(
        (),
        "Limit the memory that a plan may use on a device",
        "--cap",
        kind=list[str],
        read=read_sizes,
        syntax="DEVICE=BYTES, e.g. cpu0=2GiB",
        more="Pairs (device, bytes)",
    )
    policy: str | Path | None = option(
        None,
        "Policy file for gdp and gdp+search. By default the shipped one",
        kind=Path,
        shown="the shipped one",
    )
    finetune: int = option(
        0,
        "Updates of the policy on this graph before it places it, for gdp and gdp+search. 0: it "
        "places the graph as it is (zero-shot)",
    )
    per_op: bool = option(
        False, "Place every op by itself instead of in groups, for gdp and gdp+search"
    )
    whole: Sequence[str] = option(
        (), "Place each module that matches this pattern as one, e.g. 'layers.*'", kind=list[str]
    )
    format: str = option(
        "",
        "Only plans that export as device-map, split-points or torchtitan. Modules that the model "
        "says not to split (_no_split_modules of transformers) then stay whole, too",
        "--for",
    )
    place: Mapping[str, int | str] | str | Path | None = option(
        None,
        "Price this placement beside the plan: a device map, or a JSON file that holds a map or a "
        "plan. The map that accelerate makes is priced as well, if accelerate is installed",
        kind=Path,
    )
    min_gain: float | None = option(
        None,
        "Use more devices only if the plan is better by this share: .02 is 2 %. For auto. By "
        "default 2 %, and 0 for an instance",
        kind=str,
        read=read_share,
        shown="2%; 0 for an instance",
    )
    stages: bool = option(
        False,
        "Choose stages together with the placement: ops that a device runs at the same time. The "
        "search takes up to twice the budget. For inference, objective step",
    )
    compile: bool = option(
        True,
        "Compile what a device runs between two waits, and measure torch.compile beside the plan, "
        "where a plan is compared with what runs without one",
        "--compile/--no-compile",
    )
    compile_budget: str | float = option(
        "60s",
        "Limit of compiling within the budget: 60s, 2m. torch.compile takes up to two thirds of "
        "it, with --again all that it needs, and segments the rest. 0s: nothing is compiled",
        variable="DOVETAIL_COMPILE_BUDGET",
    )
    method: "Placer | None" = None
    model: str = ""
    deadline: "Deadline | None" = None

    def __post_init__(self) -> None:
        from dovetail.exports.rules import check_format
        from dovetail.placers import Limits, parse_limits

        for name in ("pins", "caps", "whole"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_name("placer", self.placer, PLACERS)
        if self.objective:
            check_name("objective", self.objective, OBJECTIVES)
        check_name("schedule", self.schedule, (AUTO, *PIPELINE_SCHEDULES))
        check_name("recompute", self.recompute, (AUTO, "never"))
        check_format(self.format)
        if self.replicas and self.replicas != AUTO:
            raise UsageError(
                "replicas",
                f"is {self.replicas!r}; use auto, or plan the step of `towers(step, number)`",
            )
        if self.budget != "" and not isinstance(self.budget, Limits):
            object.__setattr__(self, "budget", parse_limits(str(self.budget)))
        read_seconds("compile_budget", str(self.compile_budget), may_be_none=True)
        check_seed(self.seed)
        if not 0 <= self.gap < math.inf:
            raise UsageError("gap", f"is {self.gap}; use a share from 0 on: .02 is 2 %")
        if self.min_gain is not None and not 0 <= self.min_gain < 1:
            raise UsageError(
                "min_gain", f"is {self.min_gain}; use a share from 0 to below 1: .02 is 2 %"
            )
        if self.finetune < 0:
            raise UsageError(
                "finetune", f"is {self.finetune}; use a number of updates, or 0 for none"
            )
        for kind in CANDIDATES.values():
            if kind.refusal and kind.asked(self):
                self._refuse(kind.untaken(self), kind.refusal)
        for exclusion in EXCLUSIONS:
            if exclusion.holds(self):
                given = (name for name in exclusion.options if is_given(name, getattr(self, name)))
                self._refuse(given, exclusion.detail)
        self._check_step()
        if self.step is not None and self._is_instance:
            from dovetail.pipeline.sources import machine_of

            machine = machine_of(self.step, self.machine)
        else:
            machine = self.asked_machine
        if machine.local:
            from dovetail.machine import check_local

            check_local(machine)
        for name in [device for _, device in self.pins] + [device for device, _ in self.caps]:
            machine.device_index(name)
        if self.stages:
            self._check_stages()
        if self.method is None and self.placer in POLICY_PLACERS:
            from dovetail.placers.learned.files import load_policy, shipped

            load_policy(shipped() if self.policy is None else self.policy, "gdp")

    @property
    def planned_step(self) -> "Step":
        """The step. Only a request that has one can be planned."""
        assert self.step is not None, "a request without a step can be checked, but not planned"
        return self.step

    @property
    def resolved_objective(self) -> str:
        """The objective, or the default of this step."""
        if not self.objective and self.micro_batches:
            return "pipeline"
        return self.objective or default_objective(self.step)

    @property
    def is_pipeline(self) -> bool:
        """True if the step is one micro-batch of a pipeline. Ways to share a batch may be pipelines
        too, which have requests of their own."""
        return not self.replicas and self.resolved_objective == "pipeline"

    @property
    def is_by_auto(self) -> bool:
        """True if `auto` itself places groups, which it may split where that is better: no method
        runs in its place, and plans need not be contiguous."""
        return self.placer == AUTO and self.method is None and not self.contiguous

    @property
    def has_staged_format(self) -> bool:
        """True if the plan is for a format that has stages."""
        from dovetail.exports.rules import FORMATS

        return bool(self.format) and FORMATS[self.format].staged

    @property
    def asked_machine(self) -> "Machine":
        """The machine that the request names, without the rates that are measured."""
        from dovetail.machine import parse_machine

        if isinstance(self.machine, str):
            return parse_machine(self.machine or HERE)
        return self.machine

    @property
    def grouping(self) -> Grouping:
        """The groups that are placed: single ops by `per_op` or for a format, else the placer's."""
        return "ops" if self.per_op or self.format else PLACERS[self.placer].grouping

    @property
    def resolved_gain(self) -> float:
        """`min_gain`, or its default for this step."""
        if self.min_gain is None:
            return 0.0 if self._is_instance else MIN_GAIN
        return self.min_gain

    @property
    def limits(self) -> "Limits":
        """The limits of the search: `budget` in numbers, once the record is built."""
        from dovetail.placers import Limits

        if self.budget == "":
            return Limits(SEARCH_SECONDS)
        assert not isinstance(self.budget, (str, int, float)), "parsed when the record was built"
        return self.budget

    @property
    def whole_seconds(self) -> float:
        """The limit of planning as a whole; inf: there is none, as with a budget of
        evaluations."""
        if self.budget == "":
            return QUICK_SECONDS if self.quick else WHOLE_SECONDS
        return self.limits.seconds

    @property
    def compile_seconds(self) -> float:
        """The limit of compiling in seconds; 0: nothing is compiled."""
        if self.quick or not self.compile:
            return 0.0
        return read_seconds("compile_budget", str(self.compile_budget), may_be_none=True)

    @property
    def _is_instance(self) -> bool:
        return is_instance(self.step)

    def _refuse(self, options: Iterable[str], detail: str) -> None:
        """Raise `UsageError` for the first of these options, if there is one."""
        for name in options:
            told = detail.format(
                placer=self.placer, format=self.format, objective=self.resolved_objective
            )
            raise UsageError("for" if name == "format" else name, told)

    def _check_step(self) -> None:
        """Raise `UsageError` where the objective does not suit the step."""
        if self.objective == "latency" and not self._is_instance:
            raise UsageError(
                "objective",
                "latency is defined for published instances alone, whose accelerators run their "
                "part in one call; for a network use step, the seconds of one step",
            )
        if self.replicas:
            if self.step is None:
                return
            from dovetail.frontends import Captured
            from dovetail.transforms import Parts, repeats, the

            if not isinstance(self.step, Captured):
                raise UsageError(
                    "replicas",
                    "auto captures parts of the batch, so MODEL must be a network; give a file's "
                    "number of replicas",
                )
            if not self.step.graph.training:
                raise UsageError(
                    "replicas",
                    "auto is for training steps, whose towers share an update; use --train",
                )
            if repeats(self.step.transforms) > 1 or the(Parts, self.step.transforms) is not None:
                raise UsageError(
                    "replicas",
                    "auto takes the step of the whole batch, and this one is shared already",
                )
        if not self.is_pipeline:
            return
        if self.micro_batches < 2:
            raise UsageError(
                "micro_batches",
                f"is {self.micro_batches}; objective pipeline takes 2 or more, each as large as "
                "MODEL's batch",
            )
        if self._is_instance:
            raise UsageError(
                "objective", "pipeline is for training steps; for an instance use load"
            )
        if self.step is not None:
            from dovetail.pipeline.sources import graph_of

            if not graph_of(self.step).training:
                raise UsageError(
                    "objective",
                    "pipeline is for training steps; capture with --train, or use load for a "
                    "stream of samples",
                )

    def _check_stages(self) -> None:
        """Raise `UsageError` for a request with stages that cannot have any."""
        from dovetail.costs import stage_rates
        from dovetail.frontends import Captured

        if self.step is not None and not isinstance(self.step, Captured):
            raise UsageError(
                "stages",
                "are of a network that is captured: zoo:NAME or package.module:function; leave "
                "--stages out for a file",
            )
        if self.step is not None and self.step.graph.training:
            raise UsageError("stages", "are of inference steps; leave --stages or --train out")
        machine = self.asked_machine
        if machine.local and not any(device.torch_device for device in machine.devices):
            # `here/n` is compared with all cores as one device, so its cores count together.
            cores = sum(len(device.cores) for device in machine.devices)
            if cores < 2:
                raise UsageError("stages", f"{machine.name} has one core; use a machine of several")
            return
        for device in machine.devices:
            with suppress(MachineError):
                if device.kind != "host":
                    stage_rates(device)
                    return
        raise UsageError(
            "stages",
            f"cannot be predicted for {machine.name}, as how much its devices run at once is not "
            "known; use GPU presets such as v100, or here",
        )


PLAN_FIELDS = frozenset(of_record.name for of_record in fields(PlanRequest))
OF_ALL = frozenset({
    "step", "model", "machine", "budget", "quick", "again", "deadline", "seed", "caps", "compile",
    "compile_budget", "contiguous", "finetune",
})  # fmt: skip
"""The fields that all candidates take. Where `contiguous` and `finetune` mean nothing, `EXCLUSIONS`
says so."""


@dataclass(frozen=True)
class CandidateKind:
    """A kind of what can be planned for a request: an entry of `CANDIDATES`.

    makes         (request, what was tried so far) -> yields `Candidate`s. "module:function" is
                  imported when it is called, so that a help text does not wait for what it imports.
                  The request that it is given has this kind's share of the budget
    takes         the fields of a request that it goes with
    asked         True for a request that asks for this kind
    refusal       what is said of an option that is given and not taken. "": where one is given,
                  there are no candidates of this kind
    budget_parts  (request) -> the parts of the budget that its candidates want together, for a
                  request that it applies to; 0: there are none, or they need no search.
                  `candidates.shares` divides the budget by the parts of all kinds
    last          its candidates follow from the best of all others, so they are made after these
    """

    makes: str | Callable[..., Any]
    takes: frozenset[str] = PLAN_FIELDS
    asked: Callable[[PlanRequest], bool] = lambda _request: True
    refusal: str = ""
    budget_parts: Callable[[PlanRequest], int] = lambda _request: 1
    last: bool = False

    def untaken(self, request: PlanRequest) -> list[str]:
        """The options that the request gives and this kind does not take."""
        return [
            of_record.name
            for of_record in fields(PlanRequest)
            if of_record.name not in self.takes
            and is_given(of_record.name, getattr(request, of_record.name))
        ]

    def applies(self, request: PlanRequest) -> bool:
        """True if there are candidates of this kind for the request."""
        return self.asked(request) and not self.untaken(request)


CANDIDATES = {
    "as it is": CandidateKind(
        "pipeline.candidates:as_it_is",
        OF_ALL | {"objective", "gap", "min_gain", "pins", "whole", "format", "placer", "method",
                  "policy", "per_op", "place", "stages"},
        lambda request: not request.replicas and not request.is_pipeline,
        "is for objective pipeline; leave it out",
        budget_parts=lambda _request: 2,
    ),
    "pipeline": CandidateKind(
        "pipeline.candidates:in_micro_batches",
        OF_ALL | {"objective", "pins", "whole", "format", "micro_batches", "schedule", "recompute"},
        lambda request: request.is_pipeline,
        "does not go with objective pipeline; leave it out",
    ),
    "shared batch": CandidateKind(
        "pipeline.candidates:shared",
        OF_ALL | {"replicas", "gap", "min_gain", "schedule", "recompute"},
        lambda request: bool(request.replicas),
        "does not go with replicas auto; leave it out",
        budget_parts=lambda _request: 2,
    ),
    # Plans of another placer, for a format, with stages or beside a given placement are of the step
    # as it was captured.
    "other forms": CandidateKind(
        "pipeline.candidates:in_other_forms",
        PLAN_FIELDS - {"placer", "method", "contiguous", "stages", "format", "place", "per_op"},
        lambda request: not request.is_pipeline,
        budget_parts=lambda request: int(bool(imported("pipeline.candidates:forms_of")(request))),
    ),
    # Pins and caps name the devices of the machine. There is nothing to search for: everything is
    # on one device.
    "all cores": CandidateKind(
        "pipeline.candidates:on_all_cores",
        PLAN_FIELDS - {"pins", "caps"},
        lambda request: not request.is_pipeline,
        budget_parts=lambda _request: 0,
        last=True,
    ),
}  # fmt: skip
"""What can be planned, in the order in which it is tried. Which options exclude each other follows:
a request asks for one of the first three kinds, which refuses what it does not take.

A kind that looks at what was tried stands behind it, as other forms do behind the first three. The
order has no other meaning, but that of equal plans the first is taken."""


@dataclass(frozen=True)
class Exclusion:
    """Options that mean nothing for some requests, whatever is planned for them, and why.

    holds    True for such a request
    options  names of fields
    detail   it may name {placer}, {format} and {objective}
    """

    holds: Callable[[PlanRequest], bool]
    options: tuple[str, ...]
    detail: str


EXCLUSIONS = (
    Exclusion(
        lambda request: request.resolved_objective != "load",
        ("contiguous",),
        "is for objective load; a step has no stages, and for the latency an accelerator runs its "
        "part in one call in any case",
    ),
    Exclusion(
        lambda request: is_instance(request.step),
        ("whole", "format"),
        "an instance has no modules; leave it out",
    ),
    Exclusion(
        lambda request: request.resolved_objective != "step",
        ("stages",),
        "shorten one step, which objective {objective} does not count; use --objective step, or "
        "leave --stages out",
    ),
    Exclusion(
        lambda request: bool(request.format),
        ("stages",),
        "a {format} cannot say them; leave one of the two out",
    ),
    Exclusion(
        lambda request: request.is_pipeline and not request.has_staged_format,
        ("format",),
        "a {format} has no stages; use split-points or torchtitan",
    ),
    Exclusion(
        lambda request: request.has_staged_format and request.placer not in KEEP_ORDER,
        ("placer",),
        NO_ORDER,
    ),
    Exclusion(
        lambda request: request.method is None and request.placer not in POLICY_PLACERS,
        ("policy", "finetune", "per_op"),
        f"is for {' and '.join(POLICY_PLACERS)}, not for {{placer}}",
    ),
)
"""The first row that holds and has an option that is given is the error."""


def is_given(name: str, value: Any) -> bool:
    """True if an option of a plan asks for something. Its default does not, nor does an empty value
    or objective step, for which a network is planned in any case."""
    return value not in (getattr(PlanRequest, name), "", {}) and (name, value) != (
        "objective",
        "step",
    )


# --- Plan several phases ---

PHASE_WEIGHTS = {"decode": 128.0}
"""A phase runs this many times if its weight is not given. A phase that is not listed runs once."""
OF_PHASES = ("machine", "placer", "budget", "seed", "pins", "caps", "whole", "min_gain")
"""`plan_phases` takes these fields of `PlanRequest`."""


def _read_phases(flag: str, text: str) -> dict[str, float]:
    """Phase -> how many times it runs, as "prefill=1,decode=128" says. Raises `UsageError`."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            times = float(number) if equals else PHASE_WEIGHTS.get(name, 1.0)
        except ValueError:
            times = -1.0
        if not name or name in weights or not 0 < times < math.inf:
            raise UsageError(flag, f"{part!r} is not PHASE=TIMES; write prefill=1,decode=128")
        weights[name] = times
    return weights


@documented
@dataclass(frozen=True, eq=False)
class PhasesRequest:
    """Which phases of a model to plan under one placement. Raises `UsageError`.

    steps           phase -> the step of that phase. All steps are captured from one module object
    options         a request without a step, whose options hold for every phase
    """

    steps: Mapping[str, "Captured"]
    weights: Mapping[str, float] = option_made(
        dict,
        "Plan these phases of MODEL under one placement, where each phase runs so many times",
        "--phases",
        kind=str,
        read=_read_phases,
        syntax="PHASE=TIMES, e.g. prefill=1,decode=128",
        more="By default decode runs 128 times, and any other phase once",
    )
    options: PlanRequest = field(default_factory=PlanRequest)

    def __post_init__(self) -> None:
        from dovetail.frontends import Captured

        if not self.steps:
            raise UsageError("phases", "there is none; give {name: captured step, ...}")
        first = next(iter(self.steps))
        for name, step in self.steps.items():
            if not isinstance(step, Captured):
                raise UsageError("phases", f"{name} is a {type(step).__name__}; capture it")
            if step.graph.training:
                raise UsageError("phases", f"{name} trains; phases are for inference")
            if step.module is not self.steps[first].module:
                raise UsageError(
                    "phases",
                    f"{name} and {first} are of different modules; capture one module object with "
                    "the inputs of each phase",
                )
        for name, weight in self.weights.items():
            check_name("phases", name, self.steps)
            if not 0 < weight < math.inf:
                raise UsageError("phases", f"{name} runs {weight:g} times; use a number above 0")
        every = {
            name: float(self.weights.get(name, PHASE_WEIGHTS.get(name, 1.0))) for name in self.steps
        }
        object.__setattr__(self, "weights", every)
        object.__setattr__(self, "options", replace(self.options, objective="step"))


# --- Learn ---


@documented
@dataclass(frozen=True, eq=False)
class TaskRequest:
    """One step that a policy learns to place. Its fields are those of `PlanRequest`, but for

    name            the name of the task in curves and tables
    """

    name: str
    step: "Step | None"
    machine: "str | Machine" = option("", MACHINE_HELP, shown=HERE)
    objective: str = ""
    pins: Sequence[tuple[str, str]] = option(
        (), "PATTERN=DEVICE, as in plan", "--pin", kind=list[str], read=read_pairs
    )
    caps: Sequence[tuple[str, int]] = option(
        (), "DEVICE=BYTES, as in plan", "--cap", kind=list[str], read=read_sizes
    )
    per_op: bool = option(
        False, "Place every op by itself instead of in groups, for gdp", "--per-op/--groups"
    )
    model: str = ""

    @property
    def planned_step(self) -> "Step":
        """The step. Only a task that has one can be learned."""
        assert self.step is not None, "a task without a step can be checked, but not learned"
        return self.step


@documented
@dataclass(frozen=True, eq=False)
class LearnRequest:
    """What a policy is to learn, for how long, and by how many controllers. Raises an
    `InvalidError` for a request that cannot be learned, as far as that can be known beforehand.

    tasks           the steps to place, on their machines
    rule            the update rule by which controllers share what they learn, a name in `RULES`
    """

    tasks: Sequence[TaskRequest] = ()
    method: str = option(
        "",
        "Policy to train: seq2seq, hdp or gdp, or one of them as published: seq2seq-paper, "
        "hdp-paper, gdp-paper. By default that of the policy file, else seq2seq",
        shown=LEARNERS[0],
    )
    policy: str | Path | None = option(None, "Policy file to start from", kind=Path)
    trials: int | None = option(
        None,
        "Placements to try in all, over all tasks and controllers",
        kind=int,
        shown=str(TRIALS),
    )
    seconds: float | None = option(
        None,
        "How long to learn, in place of a number of trials",
        "--budget",
        kind=str,
        read=read_seconds,
        syntax="60s, 5m",
    )
    controllers: int = option(
        1, "Controllers that train the policy side by side, without waiting for each other"
    )
    evaluators: int = option(
        1, "Evaluators of each controller, which judge its placements side by side"
    )
    backend: str = option(
        "",
        "Where controllers run: processes, ranks, ray, threads or simulated. By default ranks "
        "under torchrun, threads for one controller, else processes",
        shown="threads for one controller, else processes",
    )
    device: str = option(
        "cpu",
        "Where the policy computes: cpu, cuda (the GPUs in turn) or cuda:1. For gdp and gdp-paper; "
        "the others compute on the CPU",
    )
    rule: str = "downpour"
    measured: bool = option(
        False, "Judge placements by running them on this machine's devices, such as here/2"
    )
    simulated_first: int = option(0, "Simulated trials before the measured ones")
    settings: Mapping[str, Any] = option_made(
        dict,
        "Fields of LearningSettings, in place of the method's own values",
        "--setting",
        kind=list[str],
        read=read_values,
        syntax="KEY=VALUE, e.g. rate=0.001, trials=16, entropy=0.01",
    )
    seed: int = option(
        0, "Seed of the run. With one controller and the same trials it gives the same result"
    )
    folder: str | Path | None = option(
        None, "Keep the run's state in this folder, so that the run can be resumed", kind=Path
    )
    resume: bool = option(False, "Continue the run in the folder")

    def __post_init__(self) -> None:
        from dovetail.training import check_held

        object.__setattr__(self, "tasks", tuple(self.tasks))
        method = self.method
        if self.policy is not None:
            from dovetail.placers.learned.files import load_policy

            # The policy must be one of the method, if that is given.
            of_policy = load_policy(self.policy, method or None)[0].name
            method = method or of_policy
        method = method or LEARNERS[0]
        check_name("method", method, LEARNERS)
        object.__setattr__(self, "method", method)
        if self.backend:
            check_name("backend", self.backend, BACKENDS)
            named_backend(self.backend)
        check_seed(self.seed)
        if len(self.tasks) > 1 and not PLACERS[method].carries:
            raise UsageError("method", f"{method} learns one graph; gdp learns many at once")
        least = self.learning_settings.trials * self.controllers
        for name in ("controllers", "evaluators"):
            if getattr(self, name) < 1:
                raise UsageError(name, f"is {getattr(self, name)}; use 1 or more")
        if self.trials is not None and self.seconds is not None:
            raise UsageError("trials", "give trials or a budget of seconds, not both")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError("budget", f"is {self.seconds} seconds; use more than 0")
        for name, trials in (("trials", self.trials), ("simulated_first", self.simulated_first)):
            if trials is not None and trials < least and (trials or name == "trials"):
                raise UsageError(
                    name,
                    f"is {trials}, but one update of {self.controllers} controllers takes {least}",
                )
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", self.device):
            raise UsageError("device", f"must be cpu, cuda or cuda:NUMBER, not {self.device!r}")
        if self.device != "cpu":
            if not PLACERS[method].carries:
                says = f"{method} computes on the CPU; gdp and gdp-paper compute on GPUs too"
                raise UsageError("device", says)
            if self.backend == "ray":
                says = "controllers of backend ray compute on CPUs; leave it out"
                raise UsageError("device", says)
            from dovetail.training import check_gpu_name

            check_gpu_name(self.device)
        self._check_measured()
        if self.resume and self.folder is None:
            raise UsageError("resume", "needs the folder of the run")
        # Rank 0 alone opens the folder, perhaps before another rank comes here.
        if self.folder is not None and not launched_rank():
            check_held(self.folder, self.resume)
        for task in self.tasks:
            self._check_task(task)

    @property
    def most_trials(self) -> int:
        """The most trials that the run may take."""
        if self.trials is not None:
            return self.trials
        return TRIALS if self.seconds is None else MOST_TRIALS

    @property
    def learning_settings(self) -> "LearningSettings":
        """The method's settings, changed by those of the request. Raises `UsageError`."""
        from dovetail.placers.learned.catalog import settings_of
        from dovetail.placers.learned.records import BASELINES, OBJECTIVES, RATIOS

        settings = settings_of(self.method, finetuned=self.policy is not None)
        kinds = {field.name: type(getattr(settings, field.name)) for field in fields(settings)}
        for name, value in self.settings.items():
            check_name("setting", name, kinds)
            kind = kinds[name]
            number = kind in (int, float) and isinstance(value, int) and not isinstance(value, bool)
            if not (isinstance(value, kind) or number or name == "valid_only_from"):
                raise UsageError("setting", f"{name} is {value!r}, not {kind.__name__}")
        changed = replace(settings, **self.settings)
        texts = (("objective", OBJECTIVES), ("baseline", BASELINES), ("ratio", RATIOS))
        for name, known in texts:
            value = getattr(changed, name)
            if value not in known:
                raise UsageError("setting", f"{name} is {value!r}, not one of {', '.join(known)}")
        if changed.trials < 1 or not changed.rate > 0:
            raise UsageError("setting", "trials must be 1 or more, and rate above 0")
        for name in ("decay_every", "passes"):
            if getattr(changed, name) < 1:
                raise UsageError("setting", f"{name} must be 1 or more")
        first = changed.valid_only_from
        if first is not None and (
            isinstance(first, bool) or not isinstance(first, int) or first < 0
        ):
            raise UsageError("setting", f"valid_only_from is {first!r}, no number of updates")
        return changed

    def _check_measured(self) -> None:
        if not self.measured:
            if self.simulated_first:
                raise UsageError("simulated_first", "is for measured; all trials are simulated")
            return
        if len(self.tasks) > 1:
            raise UsageError("measured", "is for one model; others would wait for its devices")
        if launched_ranks() > 1:
            raise UsageError("measured", "runs on one machine; start it without torchrun")
        if self.controllers > 1 or self.evaluators > 1 or self.backend not in ("", "threads"):
            raise UsageError(
                "measured",
                "takes one controller with one evaluator, on threads: the devices are here once, "
                "and two runs at a time would disturb each other",
            )
        if self.folder is not None:
            raise UsageError("folder", "is for simulated trials; measured ones cannot be repeated")

    def _check_task(self, task: TaskRequest) -> None:
        from dovetail.frontends import Captured
        from dovetail.pipeline.sources import graph_of

        if task.per_op and self.method not in ("gdp", "gdp-paper"):
            raise UsageError(
                "per_op", f"is for gdp; {self.method} decides for one group after the other"
            )
        if self.measured and task.objective not in ("", "step"):
            raise UsageError(
                "measured", f"a trial measures a step, so objective {task.objective} is not for it"
            )
        # A plan request makes the same checks. `single` is a placer that needs no policy file.
        asked = PlanRequest(
            task.step,
            task.machine,
            placer="single",
            objective=task.objective,
            seed=self.seed,
            pins=task.pins,
            caps=task.caps,
        )
        if self.measured:
            machine = asked.asked_machine
            if not machine.local or len(machine.devices) < 2:
                raise UsageError(
                    "measured", f"{machine.name} has no two devices of this machine; use here/2"
                )
            if task.step is not None and not isinstance(task.step, Captured):
                raise UsageError("measured", "only a network can run; name it instead of a file")
        if task.step is not None:
            graph_of(task.step)


# --- Schedule ---


def _read_batches(_flag: str, text: str) -> tuple[int, ...]:
    """The numbers that a text lists with commas. Raises `UsageError`."""
    try:
        return tuple(dict.fromkeys(int(part) for part in read_names("batch", text)))
    except ValueError:
        raise UsageError("batch", f"{text!r} is not a list of numbers such as 1,8,16") from None


@documented
@dataclass(frozen=True, eq=False)
class ScheduleRequest:
    """Which schedules of an inference step to find. Raises `UsageError`.

    model           a captured step, or its MODEL text
    """

    model: "str | Captured"
    devices: Sequence[str] = option(
        (CPU,),
        "Devices to compare. cpu: the cores of this machine; cuda:0: its first GPU; a preset such "
        "as v100: predicted by analytic costs",
        "--device",
        kind=str,
        read=lambda flag, text: read_names(flag, text) or (CPU,),
        syntax="One, or several with commas",
        shown=CPU,
    )
    schedulers: Sequence[str] = option(
        (),
        f"Methods to compare, with commas: {', '.join(SCHEDULERS)}. They are described below",
        "--scheduler",
        kind=str,
        read=read_names,
        shown="all",
    )
    batches: Sequence[int] = option(
        (),
        "Batch sizes of a network of the zoo. By default the one that MODEL says",
        "--batch",
        kind=str,
        read=_read_batches,
        syntax="One, or several with commas: 1,8,16",
    )
    rounds: int = option(15, "Rounds of measuring. Each runs all schedules, one after another")
    seed: int = option(0, "Seed of weights and inputs")

    def __post_init__(self) -> None:
        for name in ("devices", "schedulers", "batches"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in self.schedulers:
            check_name("scheduler", name, SCHEDULERS)
        if any(batch < 1 for batch in self.batches):
            raise UsageError("batch", "batch sizes are 1 or more")
        if self.rounds < 1:
            raise UsageError("rounds", "there must be 1 or more")


def runs_here(device: str) -> bool:
    """True if schedules run on this device, so that they are measured and not predicted."""
    return device == CPU or is_cuda(device)


def is_cuda(device: str) -> bool:
    """True for the text of a CUDA device, "cuda" or "cuda:1"."""
    return device.split(":")[0] == "cuda"


# --- What all requests share ---


def check_name(option: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    """Raise `UsageError` for a name that is not among the known ones."""
    if name not in known:
        raise UsageError(option, f"{name!r} is not one of {', '.join(known)}")


def default_objective(step: "Step | None") -> str:
    """The objective that is used if none is given: load for an instance, step for anything else."""
    return "load" if is_instance(step) else "step"


def is_instance(step: "Step | None") -> bool:
    """True if the step is a published placement instance."""
    from dovetail.instances import Instance

    return isinstance(step, Instance)


def check_seed(seed: int) -> None:
    """Raise `UsageError` unless the seed is from 0 to 2^63 - 1, which a plan's file can hold."""
    if not 0 <= seed < 2**63:
        raise UsageError("seed", f"is {seed}; use a whole number from 0 to {2**63 - 1}")


def with_fields_of(request: type, skip: Collection[str] = ()) -> Callable[[Function], Function]:
    """A decorator for `function(..., **options)`, whose options are fields of the record.

    It gives the function a signature with these fields and their defaults, so that `help` and
    editors show them. `skip` names fields that the function does not take.
    """

    def decorate(function: Function) -> Function:
        shown = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        taken = {*skip, *(parameter.name for parameter in shown)}
        shown += [
            inspect.Parameter(
                of_record.name,
                inspect.Parameter.KEYWORD_ONLY,
                default={} if of_record.default is MISSING else of_record.default,
                annotation=of_record.type,
            )
            for of_record in fields(request)
            if of_record.name not in taken
        ]
        function.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return function

    return decorate
