"""What `dovetail train` is given: the user's function, and the options that change what it says."""

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.arguments import split_pair
from dovetail.errors import ModelError, UnwritableError, UsageError

if TYPE_CHECKING:
    from dovetail.training.request import TrainRequest
    from dovetail.training.rules.contract import Rule

RETURNS = (
    "must return (model, loss, optimizer, dataset), (Trainer, dataset), or either with a "
    "validation set after that"
)


@dataclass(frozen=True)
class Setup:
    """What is to be trained, and on what."""

    request: "TrainRequest"
    dataset: Any
    validation: Any = None


def open_setup(function: str, settings: Mapping[str, Any], policy: Mapping[str, Any]) -> Setup:
    """What the function returns, with `settings`, fields of `TrainRequest`, in place of its own,
    and `policy`, fields of `Policy`.

    Raises `ModelError`, or `UsageError` for a setting that no run can have.
    """
    from dovetail.runtime.functions import call_function, names_function
    from dovetail.training.backends.contract import Policy
    from dovetail.training.request import TrainRequest
    from dovetail.training.trainer import Trainer

    if not names_function(function):
        raise ModelError(function or "''", "is no package.module:function")
    returned = call_function(function)
    if not isinstance(returned, tuple):
        raise ModelError(function, RETURNS)
    if returned and isinstance(returned[0], Trainer):
        if not 2 <= len(returned) <= 3:
            raise ModelError(function, RETURNS)
        request = returned[0].request
        changed = replace(request, **settings, policy=replace(request.policy, **policy))
        return Setup(changed, *returned[1:])
    if not 4 <= len(returned) <= 5:
        raise ModelError(function, RETURNS)
    model, loss, optimizer, *data = returned
    request = TrainRequest(model, loss, optimizer, **settings, policy=Policy(**policy))
    return Setup(request, *data)


def parse_rule(name: str, options: Sequence[str]) -> "Rule | str":
    """The rule of that name; with KEY=VALUE options bound. Raises `UnknownRuleError`, `UsageError`.

    Without options it stays a name: the trainer then binds what a rule takes from the optimizer.
    """
    from dovetail.training.rules import make_rule

    values = parse_options("--option", options)
    rule = make_rule(name, **values)
    return rule if values else name


def parse_options(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE texts: numbers, true, false, none, or text. Raises `UsageError`."""
    pairs = [split_pair(option, text) for text in texts]
    return {key: _value_of(text) for key, text in pairs}


def _value_of(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def parse_window(text: str) -> int | str | None:
    """ "10", "auto", or "all" for one commit at the end (None). Raises `UsageError`."""
    if text == "auto":
        return text
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError("--window", f"is a number of steps, auto or all, not {text!r}")
    return int(text)


def parse_seconds(option: str, text: str) -> float:
    """ "60", "60s" or "2m" in seconds. Raises `UsageError`."""
    scale = {"s": 1.0, "m": 60.0}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(option, f"is a time such as 60s or 2m, not {text!r}")
    return seconds


def check_folder(folder: Path | None) -> None:
    """Raise `UnwritableError` where a folder cannot be made, or cannot be written to."""
    if folder is None:
        return
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=there, prefix=".dovetail."))
    except OSError as error:
        raise UnwritableError(str(folder), error.strerror or str(error)) from error


def save_weights(model: Any, path: Path) -> None:
    """Write the model's `state_dict`, for `torch.load(path, weights_only=True)`, whole or not at
    all. Raises `UnwritableError`."""
    import torch

    from dovetail.runtime.atomic import write_atomically

    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    write_atomically(path, content.getvalue())
