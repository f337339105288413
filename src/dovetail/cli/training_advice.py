"""`dovetail train --suggest`: what to train with, and the evidence."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from dovetail.cli.output import progress_bar, say, show, show_json
from dovetail.cli.training_setup import Setup
from dovetail.errors import UsageError
from dovetail.training import advice
from dovetail.training.advice import Advice, Evidence, measure
from dovetail.training.backends import load_backend
from dovetail.training.preparing import PreparedTraining, bind_rule, prepare
from dovetail.training.request import TrainRequest
from dovetail.training.rules.contract import Rule
from dovetail.training.torch_optimizers import resolve_optimizer
from dovetail.units import format_count, format_seconds, printable

CHOSEN = ("function", "rule", "option", "workers", "window", "suggest", "budget", "as_json")
"""Of `dovetail train`: what the advice says itself, and what is not for the run."""


def suggest_and_show(
    function: str, setup: Setup, budget_seconds: float, as_json: bool, context: typer.Context
) -> None:
    """Measure for part of the budget, simulate for the rest; print the table, or one object.

    The context is that of `dovetail train`, whose other options the run is to have, too.
    """
    request = replace(setup.request, folder=None, resume=False)
    prepared = prepare(request, setup.dataset, setup.validation)
    with progress_bar() as bar:
        result = _advice(prepared, budget_seconds, lambda what, share: bar(what, share, None))
    options = typed_options(context, with_rule=result.chosen.rule == request.rule_name)
    if as_json:
        show_json(summary(function, result, options))
        return
    measured = result.measured
    say(
        f"measured: a step takes {format_seconds(measured.mean_seconds)}, a transfer "
        f"{format_seconds(measured.transfer_seconds)}"
    )
    show(_table(result))
    for reason in _reasons(result):
        show(Text(reason, style="dim"))
    show(Text(f"{advice.describe(result.chosen)}: {result.why}"))
    show(Text(printable(command(function, result, options))))


def _advice(
    prepared: PreparedTraining,
    budget_seconds: float,
    progress: advice.ReportProgress,
) -> Advice:
    request = prepared.request
    name = request.backend if isinstance(request.backend, str) else "processes"
    if name == "simulated":  # has no times of its own
        name = "processes"
    options = request.backend_options if name == request.backend else {}
    cores = None if name == "ray" else len(os.sched_getaffinity(0))
    measuring_seconds = advice.MEASURING_SHARE * budget_seconds
    progress(f"measuring on {name}", 0.0)
    assignment = prepared.assignment
    measured = measure(assignment, load_backend(name, **options), measuring_seconds, cores)
    return advice.suggest(
        assignment,
        measured,
        rules=_rules(request, assignment.rule),
        budget_seconds=budget_seconds - measuring_seconds,
        progress=progress,
    )


def _rules(request: TrainRequest, given: Rule) -> list[Rule]:
    """The candidates with this optimizer, and the request's own rule with its options."""
    optimizer = resolve_optimizer(request.optimizer, request.lr)
    rules = []
    for name in advice.SUGGESTED:
        try:
            rules.append(given if name == given.name else bind_rule(name, optimizer))
        except UsageError as error:
            say(f"{name} is left out: {error}")
    return rules if given.name in advice.SUGGESTED else [*rules, given]


def typed_options(context: typer.Context, with_rule: bool) -> list[str]:
    """The options that were typed, but for what is `CHOSEN`; with the rule's own, or without."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        is_left_out = name in CHOSEN and not (name == "option" and with_rule)
        if is_left_out or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if value is True:
            words.append(parameter.opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(item)]
    return words


def command(function: str, result: Advice, options: Sequence[str]) -> str:
    """What to run."""
    chosen = result.chosen
    words = ["dovetail", "train", function, "--rule", chosen.rule]
    words += ["--workers", str(chosen.workers), "--window", str(chosen.window)]
    return shlex.join([*words, *options])


def summary(function: str, result: Advice, options: Sequence[str]) -> dict[str, Any]:
    """What `train --suggest --json` prints. Its keys are stable; what is not known is null."""
    measured, chosen = result.measured, result.chosen
    return {
        "function": function,
        "step_seconds": measured.mean_seconds,
        "transfer_seconds": measured.transfer_seconds,
        "measured_steps": len(measured.step_seconds),
        "cores": measured.cores,
        "simulated_steps": result.steps,
        "rule": chosen.rule,
        "workers": chosen.workers,
        "window": chosen.window,
        "why": result.why,
        "command": command(function, result, options),
        "level": _number(result.level),
        "evidence": [
            {
                **vars(evidence.candidate),
                "samples_per_second": _number(evidence.samples_per_second),
                "staleness": _number(evidence.staleness),
                "loss": _number(evidence.loss),
                "seconds": _number(evidence.seconds),
                "diverged": evidence.diverged or None,
                "limit": evidence.limit or None,
            }
            for evidence in result.evidence
        ],
    }


def _table(result: Advice) -> Table:
    """Candidates, the chosen first, then by time."""
    level = "time" if math.isnan(result.level) else f"to {result.level:.3g}"
    table = Table("rule", "workers", "window", "samples/s", "stale", "best loss", level, "")
    for evidence in sorted(result.evidence, key=lambda evidence: _place(evidence, result)):
        is_chosen = evidence.candidate == result.chosen
        table.add_row(
            evidence.candidate.rule,
            str(evidence.candidate.workers),
            str(evidence.candidate.window),
            _shown(evidence.samples_per_second, format_count),
            _shown(evidence.staleness, "{:.3g}".format),
            _shown(evidence.loss, "{:.4g}".format),
            _shown(evidence.seconds, format_seconds),
            "use" if is_chosen else "" if evidence.stable else "no",
            style="bold" if is_chosen else "" if evidence.stable else "dim",
        )
    return table


def _reasons(result: Advice) -> list[str]:
    """Why candidates are not to be used."""
    lines = []
    for evidence in result.evidence:
        what = advice.describe(evidence.candidate)
        if evidence.diverged:
            lines.append(f"{what}: diverges: {evidence.diverged}")
        elif evidence.limit:
            lines.append(f"{what}: {evidence.limit}, which is known to diverge in longer runs")
    return lines


def _place(evidence: Evidence, result: Advice) -> tuple[bool, bool, float, float]:
    seconds = evidence.seconds if math.isfinite(evidence.seconds) else math.inf
    rate = evidence.samples_per_second if math.isfinite(evidence.samples_per_second) else 0.0
    return evidence.candidate != result.chosen, not evidence.stable, seconds, -rate


def _shown(value: float, form: Any) -> str:
    return str(form(value)) if math.isfinite(value) else "-"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
