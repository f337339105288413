"""Arguments that several commands take, and checks of what they name."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import progress_bar, say
from dovetail.errors import UnwritableError, UsageError
from dovetail.request_fields import documented, option
from dovetail.runtime.files import UNUSABLE_NAME, check_writable

if TYPE_CHECKING:
    from dovetail.frontends import Captured
    from dovetail.pipeline.sources import Step
    from dovetail.plans import Plan

MODEL_HELP = (
    "zoo:NAME?option=value; transformers:NAME?tokens=512 (NAME is a local config.json, a published "
    "model or a type; nothing is downloaded); package.module:function (it returns module, inputs[, "
    "loss[, targets]] or what `train` takes, and is looked for in the current folder first); "
    "FILE.onnx; FILE.pt2 of torch.export; or a file (.json, .json.gz) that holds a saved graph or "
    "a published placement instance"
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
PlanModel = Annotated[str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)]
PlanFile = Annotated[Path, typer.Argument(help="A plan that `dovetail plan --out` wrote")]
Train = Annotated[
    str,
    typer.Option(
        help="Capture a training step with this optimizer: sgd, momentum, rmsprop, adam, adamw. "
        "Without it, an inference step"
    ),
]
Replicas = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of data-parallel towers, the modules tower.0, tower.1, ... Each has MODEL's "
        "batch",
    ),
]
Asynchronous = Annotated[
    bool,
    typer.Option(
        "--asynchronous",
        help="Each tower updates the parameters by itself, instead of all by their mean gradient",
    ),
]
Shape = Annotated[
    list[str] | None,
    typer.Option(help="NAME=1x3x224x224: sizes of an ONNX file's input that the file leaves open"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


@documented
@dataclass(frozen=True)
class LearningOutputs:
    """Files and folders that `learn` writes; None if not asked for. `plans` is a file, or a folder
    if there are several tasks."""

    plans: Path | None = option(None, "Write the plan", "--out", kind=Path)
    policy_out: Path | None = option(None, "Write the policy (.safetensors)", kind=Path)
    curves: Path | None = option(None, "Write the learning curves (CSV)", kind=Path)
    report: Path | None = option(None, "Write the run's page (HTML)", kind=Path)
    tensorboard: Path | None = option(
        None, "Write event files for TensorBoard into this folder, during the run", kind=Path
    )


def resolve(model: str, train: str = "", shape: Sequence[str] | None = None) -> "Step":
    """The step that MODEL names, captured or loaded.

    Tells the user which ops of an ONNX file have no rule for their FLOPs.
    """
    from dovetail.frontends.onnx import parse_shapes, unknown_flops
    from dovetail.graph import Graph
    from dovetail.pipeline.sources import resolve_model
    from dovetail.training import prints

    shapes = parse_shapes(shape or ())
    # Of several ranks the first one tells.
    with progress_bar(is_shown=prints()) as progress:
        progress(f"capturing {model}", 0.0, None)
        step = resolve_model(model, train, shapes)
    unknown = unknown_flops(step) if isinstance(step, Graph) else {}
    if unknown:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in unknown.items())
        say(f"no rule for the FLOPs of {kinds}: each counts 1 per element of its largest tensor")
    return step


def executable(plan: "Plan", step: "Step") -> "Captured":
    """The step, if it can run and the plan is for this machine. Raises `UsageError` otherwise."""
    from dovetail.frontends import Captured
    from dovetail.frontends.onnx import is_from_onnx
    from dovetail.instances import Instance

    if not isinstance(step, Captured):
        what = "a placement instance has nothing to run"
        if not isinstance(step, Instance):
            what = "a saved graph cannot run; name the network that it came from"
            if is_from_onnx(step):
                what = (
                    "an ONNX graph is planned for, not run; `export` writes the plan for another "
                    "tool"
                )
        raise UsageError("MODEL", what)
    if not plan.machine.local:
        raise UsageError(
            "plan", f"it is for {plan.machine.name}, which is not this machine; plan for here/2"
        )
    return step


def check_outputs(*paths: Path | None, inputs: Sequence[str | Path] = ()) -> None:
    """Raise `UnwritableError` for a path that cannot be written to, that is given twice, or that is
    read as well. Commands call this before the long work, so that its result is not lost.

    inputs   the texts that may name files which are read
    """
    read: set[Path] = set()
    for name in inputs:
        # A text that cannot be the name of a file names none.
        with suppress(*UNUSABLE_NAME):
            if Path(name).is_file():
                read.add(Path(name).resolve())
    written: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        where = resolved(path)
        check_writable(path)
        if where in read:
            raise UnwritableError(str(path), "it is read as well; name another file")
        if where in written:
            raise UnwritableError(str(path), "two outputs have this name")
        # A pipe or /dev/stdout may be given twice, because it takes one output after the other.
        if not path.exists() or path.is_file():
            written.add(where)


def check_folder(folder: Path | None) -> None:
    """Raise `UnwritableError` if a folder cannot be made, or cannot be written to."""
    if folder is None:
        return
    # The nearest folder that exists tells whether the others can be made in it.
    there = resolved(folder)
    while not there.exists():
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=there, prefix=".dovetail."))
    except OSError as error:
        raise UnwritableError(str(folder), error.strerror or str(error)) from error


def resolved(path: Path) -> Path:
    """The path without links. Raises `UnwritableError` for a link that leads back to itself."""
    try:
        return path.resolve()
    # Python 3.13 and later resolve such a link without an error, and it is then written over.
    except RuntimeError as error:
        raise UnwritableError(str(path), "a link of it leads back to itself") from error
    except (OSError, ValueError) as error:
        raise UnwritableError(str(path), str(error)) from error
