"""`dovetail train` trains a model by a parameter server, and `train-report` compares such runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.arguments import Json, check_folder, check_outputs
from dovetail.cli.options import Options, OptionsOf
from dovetail.cli.output import say, show, show_json
from dovetail.cli.weights import OUT_HELP, check_holds, check_new_folder, is_folder
from dovetail.errors import ModelError, UsageError
from dovetail.request_fields import documented, read_seconds, read_values
from dovetail.request_fields import option as option_field
from dovetail.training import TrainRequest, launched_rank, launched_ranks

EPILOGS = {
    "train": """\
Examples:

  dovetail train mymodels:digits --workers 4 --epochs 20 --report run.html

  dovetail train mymodels:digits --rule aeasgd --option rho=2.5 --window 10 --history run.json.gz

  dovetail train mymodels:digits --suggest --workers 8

  dovetail train-report agn.json.gz downpour.json.gz --out rules.html

where mymodels.py, in the current folder, has

  \b
  def digits():
      return model, loss, optimizer, dataset, validation

model: a torch.nn.Module; loss: (output, target) -> tensor; optimizer: parameters -> optimizer, as
torch.optim.Adam, or a name such as adam; dataset: arrays, a map-style or an iterable data set;
validation may be left out. Or it returns (dovetail Trainer, dataset[, validation]); options given
here then take the place of the trainer's own.
"""
}
FUNCTION_HELP = (
    "package.module:function, looked for in the current folder first; it returns (model, loss, "
    "optimizer, dataset[, validation]) or (Trainer, dataset[, validation])"
)


@documented
@dataclass(frozen=True)
class TrainingOutputs:
    """Files and folders that `train` writes; None: not asked for."""

    history: Path | None = option_field(
        None, "Write the run's history: .csv, or .json or .json.gz for train-report", kind=Path
    )
    tensorboard: Path | None = option_field(
        None, "Write an event file for TensorBoard into this folder", kind=Path
    )
    report: Path | None = option_field(None, "Write the run's page (HTML)", kind=Path)
    weights: str = option_field("", OUT_HELP, "--out", metavar="PATH")


def train(
    *,
    context: typer.Context,
    function: Annotated[str, typer.Argument(metavar="[FUNCTION]", help=FUNCTION_HELP)] = "",
    of_rule: Annotated[Options, OptionsOf(TrainRequest, only=("rule",))],
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, an option of the rule, e.g. gamma=1e-4")
    ] = None,
    settings: Annotated[Options, OptionsOf(TrainRequest, without=("rule",))],
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Restart this many workers that died", show_default="3"),
    ] = None,
    losses: Annotated[
        int | None,
        typer.Option(
            min=0, help="After the restarts, go on without this many workers", show_default="0"
        ),
    ] = None,
    lease: Annotated[
        str,
        typer.Option(help="A worker that is silent for longer counts as hung", show_default="60s"),
    ] = "",
    written: Annotated[Options, OptionsOf(TrainingOutputs)],
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="Recommend a rule, workers and a window instead of training, by measuring and "
            "simulating",
        ),
    ] = False,
    budget: Annotated[str, typer.Option(help="Limit of --suggest: 60s, 2m")] = "60s",
    rules: Annotated[bool, typer.Option("--rules", help="List the rules and their papers")] = False,
    as_json: Json = False,
) -> None:
    """Train a model of your own with a parameter server and many workers.

    Ctrl-C keeps the best so far. If the run fails, the exit status is 1; --debug shows the first
    traceback. Under torchrun all ranks train together, and rank 0 reports.
    """
    if rules:
        _list_rules(as_json)
        return
    if not function:
        raise UsageError("FUNCTION", "name one, package.module:function; --help shows an example")
    if of_rule or option:
        from dovetail.training import make_rule

        name = str(of_rule.get("rule", TrainRequest.rule))
        values = read_values("--option", option or ())
        # The rule is made in any case, so that a wrong name is refused before the long work. A name
        # without options stays a name: the trainer then binds what the rule takes from the
        # optimizer.
        rule = make_rule(name, **values)
        settings["rule"] = rule if values else name
    policy = {
        "worker_restarts": restarts,
        "worker_losses": losses,
        "lease_seconds": read_seconds("--lease", lease) if lease else None,
    }
    budget_seconds = read_seconds("--budget", budget)
    outputs = TrainingOutputs(**written)
    if launched_rank():
        # Rank 0 alone writes anything.
        outputs = TrainingOutputs()
        settings.pop("folder", None)
        settings.pop("resume", None)
    folder = settings.get("folder")
    weights = Path(outputs.weights) if outputs.weights else None
    if is_folder(outputs.weights):
        weights = None
        others = {"--folder": folder, "--tensorboard": outputs.tensorboard}
        others |= {"--history": outputs.history, "--report": outputs.report}
        check_new_folder(outputs.weights, others)
    check_outputs(outputs.history, outputs.report, weights)
    if outputs.history and not outputs.history.name.endswith((".csv", ".json", ".json.gz")):
        raise UsageError("--history", f"{outputs.history} must end in .csv, .json or .json.gz")
    check_folder(outputs.tensorboard)
    check_folder(folder)
    if outputs.tensorboard is not None:
        from dovetail.training import check_tensorboard

        check_tensorboard()
    given = {name: value for name, value in policy.items() if value is not None}
    opened = open_setup(function, settings, given)
    if suggest:
        if launched_ranks() > 1:
            raise UsageError("--suggest", "measures on one machine; start it without torchrun")
        from dovetail.cli.training_run import suggest_and_show

        suggest_and_show(function, opened, budget_seconds, as_json, context)
        return
    from dovetail.cli.training_run import train_and_write

    check_holds(opened.request.model, outputs.weights)
    train_and_write(function, opened, outputs, as_json)


def train_report(
    histories: Annotated[
        list[Path],
        typer.Argument(help="Histories that `train --history` wrote: .json, .json.gz or .csv"),
    ],
    out: Annotated[Path, typer.Option(help="Write the page (HTML)")] = Path("training.html"),
) -> None:
    """Write one page that compares several training runs."""
    from dovetail.cli.training_run import load, typed
    from dovetail.reports.kit import save_page
    from dovetail.reports.training_page import render_training

    check_outputs(out, inputs=[str(path) for path in histories])
    save_page(render_training([load(path) for path in histories], made=typed()), out)
    say(f"wrote {out}")


def _list_rules(as_json: bool) -> None:
    """Print the table of rules, or one JSON object."""
    from rich.markup import escape
    from rich.table import Column, Table

    from dovetail.training import RULES

    rows = []
    for name, entry in RULES.items():
        options = ", ".join(f"{option}={default}" for option, default in entry.options.items())
        rows.append((name, entry.help, options, entry.paper))
    if as_json:
        keys = ("name", "about", "options", "paper")
        show_json({"rules": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    # Folding keeps the whole URL, so that it can be copied.
    paper = Column("paper", overflow="fold")
    table = Table("rule", "what it does", "options", paper, show_lines=True)
    for row in rows:
        table.add_row(*map(escape, row))
    show(table)


# --- The user's function ---

RETURNS = (
    "must return (model, loss, optimizer, dataset), (Trainer, dataset), or either with a "
    "validation set after that (`dovetail plan` takes these too)"
)
"""The error for a function that returns anything else."""


@dataclass(frozen=True)
class Setup:
    """What is to be trained, with which settings, and on which data."""

    request: TrainRequest
    dataset: Any
    validation: Any = None


def open_setup(function: str, settings: Mapping[str, Any], policy: Mapping[str, Any]) -> Setup:
    """Calls the user's function, and returns its setup, changed by the options.

    settings   fields of `TrainRequest`, in place of those of a trainer that the function returns
    policy     fields of `FailurePolicy`, in the same way

    Raises `ModelError` for a function that cannot be called or returns something else, and
    `UsageError` for a setting that no run can have.
    """
    from dovetail.runtime.functions import call_function, names_function, refused
    from dovetail.training import FailurePolicy, Trainer

    if not names_function(function):
        raise ModelError(function or "''", "is no package.module:function")
    returned = call_function(function)
    if not isinstance(returned, tuple):
        raise refused(function, returned, RETURNS)
    if returned and isinstance(returned[0], Trainer):
        if not 2 <= len(returned) <= 3:
            raise refused(function, returned, RETURNS)
        request = returned[0].request
        changed = replace(request, **settings, policy=replace(request.policy, **policy))
        return Setup(changed, *returned[1:])
    # Inputs in place of the loss are what `dovetail plan` takes.
    if not 4 <= len(returned) <= 5 or not callable(returned[1]):
        raise refused(function, returned, RETURNS)
    model, loss, optimizer, *data = returned
    settings = {"workers": max(launched_ranks(), TrainRequest.workers), **settings}
    request = TrainRequest(model, loss, optimizer, **settings, policy=FailurePolicy(**policy))
    return Setup(request, *data)
