"""`dovetail learn`: trains policies that place networks, by the methods of RL17, HDP or GDP."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli import arguments
from dovetail.cli.arguments import Json, LearningOutputs, Model, Shape
from dovetail.cli.options import Options, OptionsOf, command
from dovetail.errors import UsageError
from dovetail.pipeline.requests import MACHINE_HELP, LearnRequest, TaskRequest
from dovetail.runtime.files import refuse_links

learn = typer.Typer(
    help="Train a policy that places networks: seq2seq (RL17), hdp or gdp; each also as "
    "published, seq2seq-paper, hdp-paper, gdp-paper.",
    no_args_is_help=True,
    add_completion=False,
)

SHOWN = 6
"""`learn show` prints this many entries of a list, and the number of them all."""
OF_SINGLE = ("method", "measured", "simulated_first")
"""Options of a learning that has one task."""
OF_GDP = (("policy", "File of a gdp policy to start from"),)
Optimizer = Annotated[
    str,
    typer.Option(
        "--train",
        help="Place a training step with this optimizer: sgd, momentum, rmsprop, adam, adamw. "
        "Without it, an inference step",
    ),
]
Outputs = Annotated[Options, OptionsOf(LearningOutputs)]


@learn.command("one")
@command
def learn_one(
    *,
    model: Model,
    train: Optimizer = "",
    shape: Shape = None,
    task: Annotated[Options, OptionsOf(TaskRequest)],
    options: Annotated[Options, OptionsOf(LearnRequest, without=("policy",))],
    outputs: Outputs,
    as_json: Json = False,
) -> None:
    """Train a policy that places one network. Ctrl-C keeps the best so far."""
    given = [_Given(model, task, train, shape)]
    _learn(given, LearnRequest(**options), LearningOutputs(**outputs), as_json=as_json)


@learn.command("batch")
@command
def learn_batch(
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODELS...", help=arguments.MODEL_HELP)],
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
    task: Annotated[Options, OptionsOf(TaskRequest, only=("per_op",))],
    options: Annotated[Options, OptionsOf(LearnRequest, without=OF_SINGLE, helps=OF_GDP)],
    outputs: Annotated[
        Options,
        OptionsOf(
            LearningOutputs, helps=(("plans", "Write a plan for each model into this folder"),)
        ),
    ],
    as_json: Json = False,
) -> None:
    """Train one gdp policy for several networks, each on its machine. Ctrl-C keeps the best."""
    request = LearnRequest(method="gdp", **options)
    texts = {"--machine": list(machine or [""]), "--train": list(train or [""])}
    for flag, each in texts.items():
        if len(each) == 1:
            each *= len(models)
        if len(each) != len(models):
            raise UsageError(flag, f"is given {len(each)} times for {len(models)} models")
    given = [
        _Given(model, {**task, "machine": on}, "" if optimizer == "-" else optimizer)
        for model, on, optimizer in zip(models, *texts.values(), strict=True)
    ]
    _learn(given, request, LearningOutputs(**outputs), as_json=as_json)


@learn.command("finetune")
@command
def finetune(
    *,
    policy: Annotated[Path, typer.Argument(help="A policy file to start from")],
    model: Model,
    train: Optimizer = "",
    shape: Shape = None,
    task: Annotated[Options, OptionsOf(TaskRequest, only=("machine", "per_op"))],
    updates: Annotated[
        int, typer.Option(min=1, help="Updates of the policy, each after a batch of trials")
    ] = 50,
    options: Annotated[Options, OptionsOf(LearnRequest, only=("device", "settings", "seed"))],
    outputs: Outputs,
    as_json: Json = False,
) -> None:
    """Train a policy further, on one network. Ctrl-C keeps the best so far."""
    request = LearnRequest(policy=policy, **options)
    request = replace(request, trials=updates * request.learning_settings.trials)
    given = [_Given(model, task, train, shape)]
    _learn(given, request, LearningOutputs(**outputs), as_json=as_json)


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
    """What the command line says of one task. `options` are fields of `TaskRequest`."""

    model: str
    options: Options
    train: str = ""
    shape: list[str] | None = None


def _learn(
    given: Sequence[_Given], request: LearnRequest, outputs: LearningOutputs, *, as_json: bool
) -> None:
    """Check the request as far as possible, resolve the models, learn, and write the results."""
    from dovetail.cli.learning_run import learn_and_write, plan_path
    from dovetail.pipeline import names_file
    from dovetail.training import launched_rank

    folder = request.folder
    if launched_rank():
        # Rank 0 alone writes anything.
        outputs, folder = LearningOutputs(), None
    batch = len(given) > 1
    machines = [one.options.get("machine", "") for one in given]
    models = [one.model for one in given]
    arguments.check_outputs(
        outputs.policy_out, outputs.curves, outputs.report, None if batch else outputs.plans,
        inputs=[request.policy or "", *models, *machines],
    )  # fmt: skip
    for path in (outputs.tensorboard, folder, outputs.plans if batch else None):
        arguments.check_folder(None if path is None else Path(path))
    if outputs.tensorboard is not None:
        from dovetail.training import check_tensorboard

        check_tensorboard()
    # A task is named by its MODEL text. If some are alike, the machine or a number is added.
    names = models
    if len(set(names)) < len(names):
        names = [f"{one} on {on or 'here'}" for one, on in zip(models, machines, strict=True)]
    tasks = [
        TaskRequest(
            f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name,
            None,
            **one.options,
            model=one.model if names_file(one.model) else "",
        )
        for i, (name, one) in enumerate(zip(names, given, strict=True))
    ]
    # A request checks itself when it is built. So this one, without steps, refuses wrong input
    # before any model is captured, and each further one before the next model is.
    replace(request, tasks=tasks)
    for i, one in enumerate(given):
        tasks[i] = replace(tasks[i], step=arguments.resolve(one.model, one.train, one.shape))
        request = replace(request, tasks=tasks[: i + 1])
    if batch and outputs.plans is not None:
        outputs.plans.mkdir(parents=True, exist_ok=True)
        for i in range(len(tasks)):
            if (path := plan_path(outputs, tasks, i)) is not None:
                refuse_links(path)  # in a folder that may be somebody else's
    learn_and_write(request, outputs, as_json=as_json)
