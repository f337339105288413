"""`dovetail learn`: policies that learn to place, by RL17, HDP or GDP."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import arguments
from dovetail.cli.arguments import MACHINE_HELP, MODEL_HELP, Json, Model, Shape
from dovetail.cli.pretraining import pretrain
from dovetail.errors import UsageError

if TYPE_CHECKING:
    from dovetail.cli.learning_run import Outputs
    from dovetail.pipeline import Step
    from dovetail.pipeline.courses import Course, Subject

learn = typer.Typer(
    help="Learn to place: seq2seq (RL17), hdp, or gdp, trained on simulated or measured trials.",
    no_args_is_help=True,
    add_completion=False,
)

SHOWN = 6
"""Entries of a list in a card; the rest is counted."""
Method = Annotated[str, typer.Option(help="seq2seq, hdp or gdp", show_default="seq2seq")]
Machine = Annotated[str, typer.Option(help=MACHINE_HELP, show_default="here")]
Optimizer = Annotated[
    str, typer.Option("--train", help="A whole training step: sgd, momentum, rmsprop, adam, adamw")
]
Trials = Annotated[
    int | None, typer.Option(min=1, help="Placements to try, in all", show_default="2000")
]
Time = Annotated[str, typer.Option("--budget", help="Instead of trials: 60s, 5m")]
Controllers = Annotated[int, typer.Option(min=1, help="That learn side by side, asynchronously")]
Evaluators = Annotated[int, typer.Option(min=1, help="Of each controller")]
Backend = Annotated[
    str,
    typer.Option(
        help="processes, ray, threads or simulated",
        show_default="threads for one controller, else processes",
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        help="KEY=VALUE in place of the method's own: rate=0.001, trials=16, entropy=0.01"
    ),
]
PerOp = Annotated[bool, typer.Option("--per-op/--groups", help="gdp: place every op by itself")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed and trials, one controller: same result")]
Folder = Annotated[
    Path | None, typer.Option(help="Keep the run's state there: nothing is lost with a process")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --folder")]
PolicyOut = Annotated[Path | None, typer.Option(help="Write the policy (.safetensors)")]
Curves = Annotated[Path | None, typer.Option(help="Write the learning curves (CSV)")]
Report = Annotated[Path | None, typer.Option(help="Write the run's page (HTML)")]
TensorBoard = Annotated[
    Path | None, typer.Option(help="Folder of event files for TensorBoard, written while it learns")
]
Start = Annotated[Path, typer.Argument(help="A policy file to start from")]


@learn.command("one")
def learn_one(  # noqa: PLR0913  one argument an option
    model: Model,
    method: Method = "",
    machine: Machine = "",
    train: Optimizer = "",
    shape: Shape = None,
    trials: Trials = None,
    budget: Time = "",
    controllers: Controllers = 1,
    evaluators: Evaluators = 1,
    backend: Backend = "",
    measured: Annotated[
        bool, typer.Option("--measured", help="Trials run on this machine's devices: here/2")
    ] = False,
    simulated_first: Annotated[
        int, typer.Option(min=0, help="Simulated trials before the measured ones")
    ] = 0,
    setting: Setting = None,
    per_op: PerOp = False,
    pin: Annotated[list[str] | None, typer.Option(help="PATTERN=DEVICE, as in plan")] = None,
    cap: Annotated[list[str] | None, typer.Option(help="DEVICE=BYTES, as in plan")] = None,
    seed: Seed = 0,
    folder: Folder = None,
    resume: Resume = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    policy_out: PolicyOut = None,
    curves: Curves = None,
    report: Report = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Learn to place one network. Ctrl-C keeps the best so far."""
    from dovetail.cli.learning_run import Outputs

    outputs = Outputs(out, policy_out, curves, report, tensorboard)
    course = _course(
        trials, budget, setting, controllers=controllers, evaluators=evaluators, backend=backend,
        measured=measured, simulated_first=simulated_first, seed=seed, folder=folder, resume=resume,
    )  # fmt: skip
    pins = [arguments.split_pair("--pin", text) for text in pin or []]
    pairs = [arguments.split_pair("--cap", text) for text in cap or []]
    caps = [(device, arguments.size_of("--cap", size)) for device, size in pairs]
    given = [_Given(model, machine, train, shape, pins, caps, per_op)]
    _learn(given, course, outputs, method=method, policy=None, as_json=as_json)


@learn.command("batch")
def learn_batch(  # noqa: PLR0913  one argument an option
    models: Annotated[list[str], typer.Argument(metavar="MODELS...", help=MODEL_HELP)],
    machine: Annotated[
        list[str] | None,
        typer.Option(help=f"One for all, or one for each model in turn: {MACHINE_HELP}"),
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(help="Optimizer of a training step: one for all, or one for each; none: -"),
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="A gdp policy to start from")] = None,
    trials: Trials = None,
    budget: Time = "",
    controllers: Controllers = 1,
    evaluators: Evaluators = 1,
    backend: Backend = "",
    setting: Setting = None,
    per_op: PerOp = False,
    seed: Seed = 0,
    folder: Folder = None,
    resume: Resume = False,
    out: Annotated[Path | None, typer.Option(help="Folder: write a plan for each model")] = None,
    policy_out: PolicyOut = None,
    curves: Curves = None,
    report: Report = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Learn one gdp policy for several networks, each on its machine. Ctrl-C keeps the best."""
    from dovetail.cli.learning_run import Outputs

    outputs = Outputs(out, policy_out, curves, report, tensorboard)
    course = _course(
        trials, budget, setting, controllers=controllers, evaluators=evaluators, backend=backend,
        seed=seed, folder=folder, resume=resume,
    )  # fmt: skip
    machines = _each("--machine", machine, models)
    optimizers = [text if text != "-" else "" for text in _each("--train", train, models)]
    given = [
        _Given(*one, None, (), (), per_op) for one in zip(models, machines, optimizers, strict=True)
    ]
    _learn(given, course, outputs, method="gdp", policy=policy, as_json=as_json)


@learn.command("finetune")
def finetune(  # noqa: PLR0913  one argument an option
    policy: Start,
    model: Model,
    machine: Machine = "",
    train: Optimizer = "",
    shape: Shape = None,
    updates: Annotated[int, typer.Option(min=1, help="Of the policy, a batch of trials each")] = 50,
    setting: Setting = None,
    per_op: PerOp = False,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    policy_out: PolicyOut = None,
    curves: Curves = None,
    report: Report = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Go on from a policy, on one network. Ctrl-C keeps the best so far."""
    from dovetail.cli.learning_run import Outputs
    from dovetail.pipeline import settings_for
    from dovetail.placers.learned.files import load_policy

    method = load_policy(policy)[0].name
    outputs = Outputs(out, policy_out, curves, report, tensorboard)
    course = _course(None, "", setting, seed=seed)
    trials = settings_for(method, course, finetuned=True).trials
    course = replace(course, trials=updates * trials)
    given = [_Given(model, machine, train, shape, (), (), per_op)]
    _learn(given, course, outputs, method=method, policy=policy, as_json=as_json)


learn.command("pretrain")(pretrain)


@learn.command("show")
def show_card(
    policy: Annotated[
        Path | None, typer.Argument(help="A policy file", show_default="the shipped one")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a policy file says of itself: its method, what it was trained on, for how long."""
    from rich.markup import escape
    from rich.table import Table

    from dovetail.cli.output import show, show_json
    from dovetail.placers.learned.files import read_card, shipped
    from dovetail.units import printable

    card = read_card(policy or shipped())
    if as_json:
        show_json(card)
        return
    table = Table("entry", "value")
    for name, value in card.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if isinstance(value, list) and len(value) > SHOWN:
            text = f"{len(value):,}: {json.dumps(value[:SHOWN])[:-1]}, ...]"
        table.add_row(escape(printable(name)), escape(printable(text)))
    show(table)


@dataclass(frozen=True)
class _Given:
    """What the command line says of one subject."""

    model: str
    machine: str
    train: str
    shape: list[str] | None
    pins: Sequence[tuple[str, str]]
    caps: Sequence[tuple[str, int]]
    per_op: bool

    def subject(self, name: str, step: "Step | None") -> "Subject":
        """As the pipeline wants it; without its step before it is captured."""
        from dovetail.pipeline import Subject

        return Subject(name, step, self.machine, "", self.pins, self.caps, self.per_op, self.file)

    @property
    def file(self) -> str:
        """MODEL where it is a file's name."""
        from dovetail.pipeline import names_file

        return self.model if names_file(self.model) else ""


def _learn(
    given: "list[_Given]",
    course: "Course",
    outputs: "Outputs",
    *,
    method: str,
    policy: Path | None,
    as_json: bool,
) -> None:
    """Check all that can be known, resolve the models, learn, write."""
    from dovetail import pipeline
    from dovetail.cli.learning_run import learn_and_write
    from dovetail.cli.training_setup import check_folder

    batch = len(given) > 1
    files = (outputs.policy, outputs.curves, outputs.report)
    read = [policy or "", *(word for one in given for word in (one.model, one.machine))]
    arguments.check_outputs(*files, None if batch else outputs.plans, inputs=read)
    for path in (outputs.tensorboard, course.folder, outputs.plans if batch else None):
        check_folder(None if path is None else Path(path))
    if outputs.tensorboard is not None:
        from dovetail.training.tensorboard import check_installed

        check_installed()
    method = pipeline.check_course(course, method, policy, subjects=len(given))
    for one in given:
        pipeline.check_subject(one.subject("", None), course, method)
    names = _names(given)
    subjects = []
    for name, one in zip(names, given, strict=True):
        step = arguments.resolve(one.model, one.train, one.shape)
        subjects.append(one.subject(name, step))
        pipeline.check_subject(subjects[-1], course, method)
    if batch and outputs.plans is not None:
        outputs.plans.mkdir(parents=True, exist_ok=True)
    learn_and_write(subjects, course, outputs, method=method, policy=policy, as_json=as_json)


def _names(given: "Sequence[_Given]") -> list[str]:
    """Of the tasks: MODEL, with its machine or a number where that is not enough."""
    names = [one.model for one in given]
    if len(set(names)) < len(names):
        names = [f"{one.model} on {one.machine or 'here'}" for one in given]
    return [
        f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _each(option: str, texts: Sequence[str] | None, models: Sequence[str]) -> list[str]:
    """One for each model: none, one for all, or as many."""
    found = list(texts or [""])
    if len(found) == 1:
        found *= len(models)
    if len(found) != len(models):
        raise UsageError(option, f"is given {len(found)} times for {len(models)} models")
    return found


def _course(
    trials: int | None, budget: str, setting: Sequence[str] | None, **fields: Any
) -> "Course":
    from dovetail.cli.training_setup import parse_options, parse_seconds
    from dovetail.pipeline import Course

    seconds = parse_seconds("--budget", budget) if budget else None
    settings = parse_options("--setting", setting or ())
    return Course(trials=trials, seconds=seconds, settings=settings, **fields)
