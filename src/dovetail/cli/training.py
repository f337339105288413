"""`dovetail train`, and `dovetail train-report`: a page about runs that were kept."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from dovetail.cli.arguments import Json, check_outputs
from dovetail.cli.output import say, show, show_json
from dovetail.errors import UsageError
from dovetail.training.request import TrainRequest

EPILOG = """\
Examples:

  dovetail train mymodels:digits --workers 4 --epochs 20 --report run.html

  dovetail train mymodels:digits --rule aeasgd --option rho=2.5 --window 10 --history run.json.gz

  dovetail train mymodels:digits --suggest --workers 8

  dovetail train-report agn.json.gz downpour.json.gz --out rules.html

where mymodels.py, in the current folder, has

  def digits():
      return model, loss, optimizer, dataset, validation

model: a torch.nn.Module; loss: (output, target) -> tensor; optimizer: parameters -> optimizer, as
torch.optim.Adam, or a name such as adam; dataset: arrays, a map-style or an iterable data set;
validation may be left out. Or it returns (dovetail Trainer, dataset[, validation]); options given
here then take the place of the trainer's own.
"""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TrainRequest)}
"""Defaults of training, shown in the help. An option that is not given stays None here, so that a
Trainer that the function returns keeps its own setting."""
FUNCTION_HELP = (
    "package.module:function, looked for in the current folder first; it returns (model, loss, "
    "optimizer, dataset[, validation]) or (Trainer, dataset[, validation])"
)


def _default(name: str) -> str:
    return str(DEFAULTS[name])


def train(  # noqa: PLR0913  one argument an option
    context: typer.Context,
    function: Annotated[str, typer.Argument(metavar="[FUNCTION]", help=FUNCTION_HELP)] = "",
    rule: Annotated[
        str,
        typer.Option(
            help="How workers and server update; --rules lists them", show_default=_default("rule")
        ),
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the rule, e.g. gamma=1e-4")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, show_default=_default("workers"))] = None,
    window: Annotated[
        str,
        typer.Option(
            help="Local steps between commits; all: one commit, at the end",
            show_default=f"{DEFAULTS['window']}: 1, more for rules that ask for it",
        ),
    ] = "",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a local step", show_default=_default("batch")),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over all samples", show_default=_default("epochs")),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate, in place of the optimizer's own")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="processes: of this machine; ray: many machines; threads; simulated: virtual time",
            show_default=_default("backend"),
        ),
    ] = "",
    backend_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of the backend, e.g. latency_seconds=0.01 of simulated"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, show_default=_default("seed"))] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="On the validation set beside the loss: accuracy")
    ] = None,
    validate: Annotated[
        str,
        typer.Option(
            help="When: epoch, so many samples, or 30s", show_default=_default("validate")
        ),
    ] = "",
    monitor: Annotated[
        str,
        typer.Option(help="The figure that --patience goes by", show_default=_default("monitor")),
    ] = "",
    patience: Annotated[
        int | None, typer.Option(min=1, help="Validations without a better one before it stops")
    ] = None,
    wire: Annotated[
        str,
        typer.Option(
            help="How vectors travel: float16, bfloat16, topk:FRACTION",
            show_default=_default("wire"),
        ),
    ] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Keep the run's state there: nothing is lost with a process")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --folder")] = False,
    restarts: Annotated[
        int | None, typer.Option(min=0, help="Killed workers to start again", show_default="3")
    ] = None,
    losses: Annotated[
        int | None,
        typer.Option(min=0, help="Workers that may stay away after that", show_default="0"),
    ] = None,
    lease: Annotated[
        str, typer.Option(help="Silent for longer, a worker is hung", show_default="60s")
    ] = "",
    history: Annotated[
        Path | None,
        typer.Option(help="Keep the commits: .csv, or .json or .json.gz for train-report"),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder of an event file for TensorBoard")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the run's page (HTML)")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the trained weights (state_dict)")] = None,
    suggest: Annotated[
        bool,
        typer.Option("--suggest", help="Measure, simulate and recommend instead of training"),
    ] = False,
    budget: Annotated[str, typer.Option(help="Of --suggest: 60s, 2m")] = "60s",
    rules: Annotated[bool, typer.Option("--rules", help="List the rules and their papers")] = False,
    as_json: Json = False,
) -> None:
    """Train a model of your own by a parameter server and many workers.

    Ctrl-C keeps the best so far. Exit status 1 where the run failed, with the first traceback.
    """
    from dovetail.cli import training_setup as setup

    if rules:
        _list_rules(as_json)
        return
    if not function:
        raise UsageError("FUNCTION", "name one, package.module:function; --help shows an example")
    settings = _given(
        workers=workers, batch=batch, epochs=epochs, lr=lr, seed=seed, patience=patience,
        folder=folder, backend=backend or None, wire=wire or None, monitor=monitor or None,
        metrics=tuple(metric) if metric else None, resume=resume or None,
        validate=int(validate) if validate.isdecimal() else validate or None,
    )  # fmt: skip
    if backend_option:
        settings["backend_options"] = setup.parse_options("--backend-option", backend_option)
    if window:
        settings["window"] = setup.parse_window(window)
    if rule or option:
        settings["rule"] = setup.parse_rule(rule or DEFAULTS["rule"], option or ())
    policy = _given(
        worker_restarts=restarts,
        worker_losses=losses,
        lease_seconds=setup.parse_seconds("--lease", lease) if lease else None,
    )
    budget_seconds = setup.parse_seconds("--budget", budget)
    check_outputs(history, report, out)
    _check_others(history, tensorboard, folder)
    opened = setup.open_setup(function, settings, policy)
    if suggest:
        from dovetail.cli.training_advice import suggest_and_show

        suggest_and_show(function, opened, budget_seconds, as_json, context)
        return
    from dovetail.cli.training_run import Outputs, train_and_write

    train_and_write(function, opened, Outputs(history, tensorboard, report, out), as_json)


def train_report(
    histories: Annotated[
        list[Path], typer.Argument(help="What `train --history` wrote: .json, .json.gz or .csv")
    ],
    out: Annotated[Path, typer.Option(help="The page (HTML)")] = Path("training.html"),
) -> None:
    """Write one page about several training runs: their rules side by side."""
    from dovetail.cli.training_run import load, typed
    from dovetail.reports.training_page import write_training_page

    check_outputs(out, inputs=[str(path) for path in histories])
    write_training_page([load(path) for path in histories], out, made=typed())
    say(f"wrote {out}")


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _check_others(history: Path | None, tensorboard: Path | None, folder: Path | None) -> None:
    """What must be known before the long work: names, folders, and the extra."""
    from dovetail.cli.training_setup import check_folder

    if history is not None and not history.name.endswith((".csv", ".json", ".json.gz")):
        raise UsageError("--history", f"{history} must end in .csv, .json or .json.gz")
    check_folder(tensorboard)
    check_folder(folder)
    if tensorboard is not None:
        from dovetail.training.tensorboard import check_installed

        check_installed()


def _list_rules(as_json: bool) -> None:
    from rich.table import Column, Table

    from dovetail.training.rules import RULES

    rows = []
    for name, entry in RULES.items():
        options = ", ".join(f"{option}={default}" for option, default in entry.options.items())
        rows.append((name, entry.help, options, entry.paper))
    if as_json:
        keys = ("name", "about", "options", "paper")
        show_json({"rules": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    paper = Column("paper", overflow="fold")  # whole addresses, to copy
    table = Table("rule", "what it does", "options", paper, show_lines=True)
    for row in rows:
        table.add_row(*map(escape, row))
    show(table)
