"""`dovetail train` trains a model by a parameter server, and `train-report` compares such runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from dovetail.cli.arguments import Json, check_folder, check_outputs, split_pair
from dovetail.cli.output import say, show, show_json
from dovetail.cli.weights import OUT_HELP, check_holds, check_new_folder, is_folder
from dovetail.errors import ModelError, UsageError
from dovetail.pipeline.requests import parse_seconds
from dovetail.training.backends import BACKENDS
from dovetail.training.request import PARTITIONS, TrainRequest, launched_rank, launched_ranks

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
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TrainRequest)}
"""The help shows these defaults. An option that is not given is None or "" in `train`, so that a
Trainer that the function returns keeps its own setting."""
FUNCTION_HELP = (
    "package.module:function, looked for in the current folder first; it returns (model, loss, "
    "optimizer, dataset[, validation]) or (Trainer, dataset[, validation])"
)


def _default(name: str) -> str:
    return str(DEFAULTS[name])


def train(  # noqa: PLR0917  one argument an option
    context: typer.Context,
    function: Annotated[str, typer.Argument(metavar="[FUNCTION]", help=FUNCTION_HELP)] = "",
    rule: Annotated[
        str,
        typer.Option(
            help="Update rule of workers and server; --rules lists all of them",
            show_default=_default("rule"),
        ),
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, an option of the rule, e.g. gamma=1e-4")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Workers that train side by side; under torchrun by default at least one a rank",
            show_default=_default("workers"),
        ),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            help="Local steps between two commits to the server. all: one commit, at the end",
            show_default=f"{DEFAULTS['window']}: the rule's own, mostly 1",
        ),
    ] = "",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples in a local step", show_default=_default("batch")),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over all samples", show_default=_default("epochs")),
    ] = None,
    partition: Annotated[
        str,
        typer.Option(
            help="; ".join(f"{name}: {help}" for name, help in PARTITIONS.items()),
            show_default=_default("partition"),
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            help="Where workers and evaluations compute: cpu, cuda (the GPUs in turn; with ray, "
            "those that Ray assigns) or cuda:NUMBER",
            show_default=_default("device"),
        ),
    ] = "",
    autocast: Annotated[
        str,
        typer.Option(
            help="bfloat16: workers compute in it by torch.autocast, on a GPU evaluations too"
        ),
    ] = "",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate, in place of the optimizer's own")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="; ".join(f"{entry.name}: {entry.help}" for entry in BACKENDS.values())
            + "; auto: ranks under torchrun, else processes",
            show_default=_default("backend"),
        ),
    ] = "",
    backend_option: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE, a setting of the backend, e.g. latency_seconds=0.01 of simulated"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the run", show_default=_default("seed")),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Figure of the validation set to report beside the loss: accuracy, or "
            "package.module:function, (output, target) -> its mean over a batch"
        ),
    ] = None,
    validate: Annotated[
        str,
        typer.Option(
            help="When to validate: epoch (after each), a number of samples, or seconds (30s)",
            show_default=_default("validate"),
        ),
    ] = "",
    monitor: Annotated[
        str,
        typer.Option(
            help="Figure that decides which validation is the best",
            show_default=_default("monitor"),
        ),
    ] = "",
    patience: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after this many validations without a better one"),
    ] = None,
    wire: Annotated[
        str,
        typer.Option(
            help="How commits are compressed: none, float16, bfloat16 or topk:FRACTION",
            show_default=_default("wire"),
        ),
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the run's state in this folder, so that the run can be resumed"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --folder")] = False,
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
    history: Annotated[
        Path | None,
        typer.Option(help="Write the run's history: .csv, or .json or .json.gz for train-report"),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write an event file for TensorBoard into this folder")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the run's page (HTML)")] = None,
    out: Annotated[str, typer.Option(help=OUT_HELP, metavar="PATH")] = "",
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
    settings = _given(
        workers=workers, batch=batch, epochs=epochs, lr=lr, seed=seed, patience=patience,
        folder=folder, backend=backend or None, wire=wire or None, monitor=monitor or None,
        partition=partition or None, device=device or None, autocast=autocast or None,
        metrics=parse_metrics(metric or ()) or None, resume=resume or None,
        validate=int(validate) if validate.isdecimal() else validate or None,
    )  # fmt: skip
    if backend_option:
        settings["backend_options"] = parse_options("--backend-option", backend_option)
    if window:
        settings["window"] = parse_window(window)
    if rule or option:
        settings["rule"] = parse_rule(rule or DEFAULTS["rule"], option or ())
    policy = _given(
        worker_restarts=restarts,
        worker_losses=losses,
        lease_seconds=parse_seconds("--lease", lease) if lease else None,
    )
    budget_seconds = parse_seconds("--budget", budget)
    if launched_rank():
        # Rank 0 alone writes anything.
        history = tensorboard = report = folder = None
        out = ""
        settings.pop("folder", None)
        settings.pop("resume", None)
    if is_folder(out):
        others = {"--folder": folder, "--tensorboard": tensorboard, "--history": history}
        check_new_folder(out, others | {"--report": report})
    check_outputs(history, report, Path(out) if out and not is_folder(out) else None)
    _check_others(history, tensorboard, folder)
    opened = open_setup(function, settings, policy)
    if suggest:
        if launched_ranks() > 1:
            raise UsageError("--suggest", "measures on one machine; start it without torchrun")
        from dovetail.cli.training_run import suggest_and_show

        suggest_and_show(function, opened, budget_seconds, as_json, context)
        return
    from dovetail.cli.training_run import TrainingOutputs, train_and_write

    check_holds(opened.request.model, out)
    train_and_write(
        function, opened, TrainingOutputs(history, tensorboard, report, out or None), as_json
    )


def train_report(
    histories: Annotated[
        list[Path],
        typer.Argument(help="Histories that `train --history` wrote: .json, .json.gz or .csv"),
    ],
    out: Annotated[Path, typer.Option(help="Write the page (HTML)")] = Path("training.html"),
) -> None:
    """Write one page that compares several training runs."""
    from dovetail.cli.training_run import load, typed
    from dovetail.reports.training_page import write_training_page

    check_outputs(out, inputs=[str(path) for path in histories])
    write_training_page([load(path) for path in histories], out, made=typed())
    say(f"wrote {out}")


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that were given, without those that are None."""
    return {name: value for name, value in settings.items() if value is not None}


def _check_others(history: Path | None, tensorboard: Path | None, folder: Path | None) -> None:
    """Raise before the long work if the history has another ending, a folder cannot be written to,
    or TensorBoard is wanted but not installed."""

    if history is not None and not history.name.endswith((".csv", ".json", ".json.gz")):
        raise UsageError("--history", f"{history} must end in .csv, .json or .json.gz")
    check_folder(tensorboard)
    check_folder(folder)
    if tensorboard is not None:
        from dovetail.training.tensorboard import check_installed

        check_installed()


def _list_rules(as_json: bool) -> None:
    """Print the table of rules, or one JSON object."""
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
    # Folding keeps the whole URL, so that it can be copied.
    paper = Column("paper", overflow="fold")
    table = Table("rule", "what it does", "options", paper, show_lines=True)
    for row in rows:
        table.add_row(*map(escape, row))
    show(table)


# --- The user's function, and the texts of the options ---

if TYPE_CHECKING:
    from dovetail.training.rules.contract import Rule
    from dovetail.training.validation import Metric

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
    from dovetail.training.backends.contract import FailurePolicy
    from dovetail.training.trainer import Trainer

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
    settings = {"workers": max(launched_ranks(), DEFAULTS["workers"]), **settings}
    request = TrainRequest(model, loss, optimizer, **settings, policy=FailurePolicy(**policy))
    return Setup(request, *data)


def parse_rule(name: str, options: Sequence[str]) -> "Rule | str":
    """The rule of that name with its KEY=VALUE options bound, or the name if there are no options.

    A name stays a name because the trainer then binds what the rule takes from the optimizer.
    Raises `UnknownRuleError`, `UsageError`.
    """
    from dovetail.training.rules import make_rule

    values = parse_options("--option", options)
    # The rule is made in any case, so that a wrong name is refused before the long work.
    rule = make_rule(name, **values)
    return rule if values else name


def parse_options(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Reads KEY=VALUE texts, whose values are numbers, true, false, none, or text. Raises
    `UsageError`."""
    pairs = [split_pair(option, text) for text in texts]
    return {key: _value_of(text) for key, text in pairs}


def _value_of(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def parse_metrics(texts: Sequence[str]) -> "tuple[str | Metric, ...]":
    """The metrics of these names, of which package.module:function is a function of the user's
    own. Raises `ModelError` for one that cannot be imported."""
    from dovetail.runtime.functions import find_function, names_function

    return tuple(find_function(text) if names_function(text) else text for text in texts)


def parse_window(text: str) -> int | str | None:
    """The window that "10" or "auto" names; None for "all", one commit at the end. Raises
    `UsageError`."""
    if text == "auto":
        return text
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError("--window", f"is a number of steps, auto or all, not {text!r}")
    return int(text)
