"""`dovetail learn`: trains policies that place networks, by the methods of RL17, HDP or GDP."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import arguments
from dovetail.cli.arguments import MACHINE_HELP, MODEL_HELP, Json, Model, Shape, option
from dovetail.cli.output import command
from dovetail.errors import UsageError
from dovetail.pipeline.requests import (
    LEARNERS,
    TRIALS,
    LearnRequest,
    TaskRequest,
    parse_seconds,
)
from dovetail.runtime.files import refuse_links
from dovetail.units import HERE

if TYPE_CHECKING:
    from dovetail.cli.learning_run import LearningOutputs
    from dovetail.pipeline.sources import Step

learn = typer.Typer(
    help="Train a policy that places networks: seq2seq (RL17), hdp or gdp; each also as "
    "published, seq2seq-paper, hdp-paper, gdp-paper.",
    no_args_is_help=True,
    add_completion=False,
)

SHOWN = 6
"""`learn show` prints this many entries of a list, and the number of them all."""
Method = Annotated[str, option(LearnRequest, "method", show_default=LEARNERS[0])]
Machine = Annotated[str, typer.Option(help=MACHINE_HELP, show_default=HERE)]
Optimizer = Annotated[
    str,
    typer.Option(
        "--train",
        help="Place a training step with this optimizer: sgd, momentum, rmsprop, adam, adamw. "
        "Without it, an inference step",
    ),
]
Trials = Annotated[int | None, option(LearnRequest, "trials", show_default=str(TRIALS))]
Time = Annotated[str, option(LearnRequest, "seconds", "--budget", before="60s, 5m. ")]
Controllers = Annotated[int, option(LearnRequest, "controllers")]
Evaluators = Annotated[int, option(LearnRequest, "evaluators")]
Backend = Annotated[
    str,
    option(LearnRequest, "backend", show_default="threads for one controller, else processes"),
]
Device = Annotated[str, option(LearnRequest, "device")]
Setting = Annotated[
    list[str] | None,
    option(
        LearnRequest, "settings", before="KEY=VALUE, e.g. rate=0.001, trials=16, entropy=0.01. "
    ),
]
PerOp = Annotated[bool, option(TaskRequest, "per_op", "--per-op/--groups")]
Seed = Annotated[int, option(LearnRequest, "seed")]
Folder = Annotated[Path | None, option(LearnRequest, "folder")]
Resume = Annotated[bool, option(LearnRequest, "resume", "--resume")]
PolicyOut = Annotated[Path | None, typer.Option(help="Write the policy (.safetensors)")]
Curves = Annotated[Path | None, typer.Option(help="Write the learning curves (CSV)")]
Report = Annotated[Path | None, typer.Option(help="Write the run's page (HTML)")]
TensorBoard = Annotated[
    Path | None,
    typer.Option(help="Write event files for TensorBoard into this folder, during the run"),
]
Start = Annotated[Path, typer.Argument(help="A policy file to start from")]


@learn.command("one")
@command
def learn_one(  # noqa: PLR0917  one argument an option
    model: Model,
    method: Method = LearnRequest.method,
    machine: Machine = "",
    train: Optimizer = "",
    shape: Shape = None,
    trials: Trials = None,
    budget: Time = "",
    controllers: Controllers = LearnRequest.controllers,
    evaluators: Evaluators = LearnRequest.evaluators,
    backend: Backend = LearnRequest.backend,
    device: Device = LearnRequest.device,
    measured: Annotated[
        bool, option(LearnRequest, "measured", "--measured")
    ] = LearnRequest.measured,
    simulated_first: Annotated[
        int, option(LearnRequest, "simulated_first")
    ] = LearnRequest.simulated_first,
    setting: Setting = None,
    per_op: PerOp = TaskRequest.per_op,
    pin: Annotated[list[str] | None, typer.Option(help="PATTERN=DEVICE, as in plan")] = None,
    cap: Annotated[list[str] | None, typer.Option(help="DEVICE=BYTES, as in plan")] = None,
    seed: Seed = LearnRequest.seed,
    folder: Folder = None,
    resume: Resume = LearnRequest.resume,
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    policy_out: PolicyOut = None,
    curves: Curves = None,
    report: Report = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Train a policy that places one network. Ctrl-C keeps the best so far."""
    from dovetail.cli.learning_run import LearningOutputs

    outputs = LearningOutputs(out, policy_out, curves, report, tensorboard)
    request = _request(
        trials, budget, setting, method=method, controllers=controllers, evaluators=evaluators,
        backend=backend, device=device, measured=measured, simulated_first=simulated_first,
        seed=seed, folder=folder, resume=resume,
    )  # fmt: skip
    pins = [arguments.split_pair("--pin", text) for text in pin or []]
    pairs = [arguments.split_pair("--cap", text) for text in cap or []]
    caps = [(device, arguments.size_of("--cap", size)) for device, size in pairs]
    given = [_Given(model, machine, train, shape, pins, caps, per_op)]
    _learn(given, request, outputs, as_json=as_json)


@learn.command("batch")
@command
def learn_batch(  # noqa: PLR0917  one argument an option
    models: Annotated[list[str], typer.Argument(metavar="MODELS...", help=MODEL_HELP)],
    machine: Annotated[
        list[str] | None,
        typer.Option(help=f"Give one for all models, or one for each in turn: {MACHINE_HELP}"),
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Optimizer of the training step to place. Give one for all models, or one for "
            "each in turn, where - stands for an inference step"
        ),
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="File of a gdp policy to start from")] = None,
    trials: Trials = None,
    budget: Time = "",
    controllers: Controllers = LearnRequest.controllers,
    evaluators: Evaluators = LearnRequest.evaluators,
    backend: Backend = LearnRequest.backend,
    device: Device = LearnRequest.device,
    setting: Setting = None,
    per_op: PerOp = TaskRequest.per_op,
    seed: Seed = LearnRequest.seed,
    folder: Folder = None,
    resume: Resume = LearnRequest.resume,
    out: Annotated[
        Path | None, typer.Option(help="Write a plan for each model into this folder")
    ] = None,
    policy_out: PolicyOut = None,
    curves: Curves = None,
    report: Report = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Train one gdp policy for several networks, each on its machine. Ctrl-C keeps the best."""
    from dovetail.cli.learning_run import LearningOutputs

    outputs = LearningOutputs(out, policy_out, curves, report, tensorboard)
    request = _request(
        trials, budget, setting, method="gdp", policy=policy, controllers=controllers,
        evaluators=evaluators, backend=backend, device=device, seed=seed, folder=folder,
        resume=resume,
    )  # fmt: skip
    machines = _each("--machine", machine, models)
    optimizers = [text if text != "-" else "" for text in _each("--train", train, models)]
    given = [
        _Given(*texts, None, (), (), per_op)
        for texts in zip(models, machines, optimizers, strict=True)
    ]
    _learn(given, request, outputs, as_json=as_json)


@learn.command("finetune")
@command
def finetune(  # noqa: PLR0917  one argument an option
    policy: Start,
    model: Model,
    machine: Machine = "",
    train: Optimizer = "",
    shape: Shape = None,
    updates: Annotated[
        int, typer.Option(min=1, help="Updates of the policy, each after a batch of trials")
    ] = 50,
    device: Device = LearnRequest.device,
    setting: Setting = None,
    per_op: PerOp = TaskRequest.per_op,
    seed: Seed = LearnRequest.seed,
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    policy_out: PolicyOut = None,
    curves: Curves = None,
    report: Report = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Train a policy further, on one network. Ctrl-C keeps the best so far."""
    from dovetail.cli.learning_run import LearningOutputs

    outputs = LearningOutputs(out, policy_out, curves, report, tensorboard)
    request = _request(None, "", setting, policy=policy, device=device, seed=seed)
    request = replace(request, trials=updates * request.learning_settings.trials)
    given = [_Given(model, machine, train, shape, (), (), per_op)]
    _learn(given, request, outputs, as_json=as_json)


@learn.command("show")
@command
def show_card(
    policy: Annotated[
        Path | None, typer.Argument(help="A policy file", show_default="the shipped one")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the card of a policy file: its method, what it was trained on, and for how long."""
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
    """What the command line says of one task, as texts."""

    model: str
    machine: str
    train: str
    shape: list[str] | None
    pins: Sequence[tuple[str, str]]
    caps: Sequence[tuple[str, int]]
    per_op: bool

    def task(self, name: str, step: "Step | None") -> TaskRequest:
        """The task with this step. Before the step is captured it is None."""
        return TaskRequest(
            name, step, self.machine, "", self.pins, self.caps, self.per_op, self.file
        )

    @property
    def file(self) -> str:
        """The MODEL text if it names a file, otherwise ""."""
        from dovetail.pipeline.sources import names_file

        return self.model if names_file(self.model) else ""


def _learn(
    given: "list[_Given]", request: LearnRequest, outputs: "LearningOutputs", *, as_json: bool
) -> None:
    """Check the request as far as possible, resolve the models, learn, and write the results."""
    from dovetail.cli.learning_run import LearningOutputs, learn_and_write, plan_path
    from dovetail.training.request import launched_rank

    if launched_rank():
        outputs = LearningOutputs()
    batch = len(given) > 1
    files = (outputs.policy, outputs.curves, outputs.report)
    read = [request.policy or "", *(word for one in given for word in (one.model, one.machine))]
    arguments.check_outputs(*files, None if batch else outputs.plans, inputs=read)
    folder = None if launched_rank() else request.folder
    for path in (outputs.tensorboard, folder, outputs.plans if batch else None):
        arguments.check_folder(None if path is None else Path(path))
    if outputs.tensorboard is not None:
        from dovetail.training.tensorboard import check_installed

        check_installed()
    names = _names(given)
    # A request checks itself when it is built. So this one, without steps, refuses wrong input
    # before any model is captured, and each further one before the next model is.
    replace(request, tasks=[one.task(name, None) for name, one in zip(names, given, strict=True)])
    tasks = []
    for name, one in zip(names, given, strict=True):
        tasks.append(one.task(name, arguments.resolve(one.model, one.train, one.shape)))
        request = replace(request, tasks=tasks)
    if batch and outputs.plans is not None:
        outputs.plans.mkdir(parents=True, exist_ok=True)
        for index in range(len(tasks)):
            if (path := plan_path(outputs, tasks, index)) is not None:
                refuse_links(path)  # in a folder that may be somebody else's
    learn_and_write(request, outputs, as_json=as_json)


def _names(given: "Sequence[_Given]") -> list[str]:
    """The tasks' names: their MODEL texts. If some are alike, the machine or a number is added."""
    names = [one.model for one in given]
    if len(set(names)) < len(names):
        names = [f"{one.model} on {one.machine or 'here'}" for one in given]
    return [
        f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _each(option: str, texts: Sequence[str] | None, models: Sequence[str]) -> list[str]:
    """A text for each model. An option may be given never, once for all models, or once for each.

    Raises `UsageError` for another number of texts.
    """
    found = list(texts or [""])
    if len(found) == 1:
        found *= len(models)
    if len(found) != len(models):
        raise UsageError(option, f"is given {len(found)} times for {len(models)} models")
    return found


def _request(
    trials: int | None, budget: str, setting: Sequence[str] | None, **options: Any
) -> LearnRequest:
    """The request without its tasks. `options` are fields of `LearnRequest`."""
    from dovetail.cli.training import parse_options

    seconds = parse_seconds("--budget", budget) if budget else None
    settings = parse_options("--setting", setting or ())
    return LearnRequest(trials=trials, seconds=seconds, settings=settings, **options)
