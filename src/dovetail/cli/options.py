"""Options of commands, made from the fields of the record that they fill.

    @command
    def plan(*, model: Model, options: Annotated[Options, OptionsOf(PlanRequest)], out: Out = None):
        request = PlanRequest(**options)

The parameter `options` stands for all options of `PlanRequest`: typer sees one parameter for each
of them in its place, and the function gets those that the user gave, read, as the record's keyword
arguments. An option that is left out, or given as an empty text, is not among them. So the record
alone knows the defaults.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from typing import Any

import typer

from dovetail.cli.output import results_apart
from dovetail.request_fields import Option, options_of

Options = dict[str, Any]
"""Fields of a record, as the user gave them."""


@dataclass(frozen=True)
class OptionsOf:
    """Marks a parameter of a command that stands for options of a record.

    only      the fields, in the order of the help. By default all that are options
    without   fields that are left out of these
    helps     pairs (field, its help here), where the record's own does not fit the command
    """

    record: type
    only: Collection[str] = ()
    without: Collection[str] = ()
    helps: tuple[tuple[str, str], ...] = ()


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a command as typer calls it: with the options of records one by one, and with
    its results apart from what else is printed."""
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    shown: dict[str, inspect.Parameter] = {}
    groups: dict[str, dict[str, Option]] = {}  # parameter of `function` -> its options by field
    for parameter in inspect.signature(function).parameters.values():
        marks = getattr(parameter.annotation, "__metadata__", ())
        mark = next((mark for mark in marks if isinstance(mark, OptionsOf)), None)
        if mark is None:
            shown[parameter.name] = parameter.replace(kind=by_keyword)
            continue
        offered = options_of(mark.record)
        names = mark.only or [name for name in offered if name not in mark.without]
        groups[parameter.name] = {name: offered[name] for name in names}
        for name, option in groups[parameter.name].items():
            assert name not in shown, f"{function.__name__} has two options {name}"
            syntax = f"{option.syntax}. " if option.syntax else ""
            typed = typer.Option(
                option.default,
                *option.flags,
                help=dict(mark.helps).get(name, syntax + option.help),
                show_default=option.shown or True,
                envvar=option.variable,
                min=option.least,
                metavar=option.metavar,
            )
            shown[name] = inspect.Parameter(name, by_keyword, default=typed, annotation=option.kind)
    takes_context = "context" in shown
    if not takes_context:
        shown["context"] = inspect.Parameter("context", by_keyword, annotation=typer.Context)

    @wraps(function)
    def run(**values: Any) -> Any:
        context: typer.Context = values["context"] if takes_context else values.pop("context")
        filled: dict[str, Options] = {group: {} for group in groups}
        with results_apart():
            for group, options in groups.items():
                for name, option in options.items():
                    value, source = values.pop(name), context.get_parameter_source(name)
                    if source is not None and source.name != "DEFAULT" and value not in (None, ""):
                        read = option.read
                        filled[group][name] = read(option.flag, value) if read else value
            return function(**values, **filled)

    # typer reads both.
    run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in shown.items()}
    return run
