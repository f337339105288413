"""`dovetail plan`: finds a plan, or with `--phases` a plan for each phase, and prints it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import arguments
from dovetail.cli.arguments import (
    MACHINE_HELP,
    Asynchronous,
    Json,
    Model,
    Shape,
    Train,
    option,
)
from dovetail.cli.output import progress_bar, say, show, show_json, show_limits
from dovetail.errors import InfeasibleError, UsageError
from dovetail.methods import PLACERS, listing
from dovetail.pipeline.requests import AUTO, OF_PHASES, PlanRequest, field_help

if TYPE_CHECKING:
    from dovetail.pipeline.phases import PhasesPlan
    from dovetail.pipeline.sources import Step
    from dovetail.plans import Plan

EPILOGS = {"plan": listing("Placers:", PLACERS)}


def plan(  # noqa: PLR0917  one argument an option
    model: Model,
    train: Train = "",
    replicas: Annotated[
        str,
        typer.Option(
            help="Number of data-parallel towers, the modules tower.0, tower.1, ... Each has "
            "MODEL's batch. " + field_help(PlanRequest, "replicas")
        ),
    ] = "1",
    asynchronous: Asynchronous = False,
    shape: Shape = None,
    machine: Annotated[
        str,
        typer.Option(
            help=f"Machine to plan for: {MACHINE_HELP}. An instance has its own",
            show_default="here",
        ),
    ] = "",
    placer: Annotated[
        str, typer.Option(help=f"Method to use: {', '.join(PLACERS)}. They are described below")
    ] = PlanRequest.placer,
    objective: Annotated[
        str, option(PlanRequest, "objective", show_default="step; load for an instance")
    ] = PlanRequest.objective,
    micro_batches: Annotated[
        int, option(PlanRequest, "micro_batches", show_default="none")
    ] = PlanRequest.micro_batches,
    schedule: Annotated[str, option(PlanRequest, "schedule")] = PlanRequest.schedule,
    recompute: Annotated[str, option(PlanRequest, "recompute")] = PlanRequest.recompute,
    contiguous: Annotated[
        bool, option(PlanRequest, "contiguous", "--contiguous")
    ] = PlanRequest.contiguous,
    budget: Annotated[str, option(PlanRequest, "budget")] = str(PlanRequest.budget),
    gap: Annotated[float, option(PlanRequest, "gap")] = PlanRequest.gap,
    seed: Annotated[int, option(PlanRequest, "seed")] = PlanRequest.seed,
    pin: Annotated[
        list[str] | None,
        option(PlanRequest, "pins", before="PATTERN=DEVICE, e.g. lstm.0=cpu0. "),
    ] = None,
    cap: Annotated[
        list[str] | None,
        option(PlanRequest, "caps", before="DEVICE=BYTES, e.g. cpu0=2GiB. "),
    ] = None,
    policy: Annotated[
        Path | None, option(PlanRequest, "policy", show_default="the shipped one")
    ] = None,
    finetune: Annotated[int, option(PlanRequest, "finetune")] = PlanRequest.finetune,
    per_op: Annotated[bool, option(PlanRequest, "per_op", "--per-op")] = PlanRequest.per_op,
    whole: Annotated[list[str] | None, option(PlanRequest, "whole")] = None,
    made_for: Annotated[str, option(PlanRequest, "format", "--for")] = PlanRequest.format,
    place: Annotated[Path | None, option(PlanRequest, "place")] = None,
    min_gain: Annotated[
        str, option(PlanRequest, "min_gain", show_default="2%; 0 for an instance")
    ] = "",
    stages: Annotated[bool, option(PlanRequest, "stages", "--stages")] = PlanRequest.stages,
    compiles: Annotated[
        bool, option(PlanRequest, "compile", "--compile/--no-compile")
    ] = PlanRequest.compile,
    compile_budget: Annotated[
        str, option(PlanRequest, "compile_budget", envvar="DOVETAIL_COMPILE_BUDGET")
    ] = str(PlanRequest.compile_budget),
    phases: Annotated[
        str,
        typer.Option(
            help="PHASE=TIMES, e.g. prefill=1,decode=128. Plan these phases of MODEL under one "
            "placement, where each phase runs so many times"
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the plan's page (HTML)")] = None,
    as_json: Json = False,
) -> None:
    """Find where each operation should run. Ctrl-C keeps the best plan so far."""
    with progress_bar() as progress:
        progress("importing torch", 0.0, None)
        # The import takes seconds. It stands here so that the user is told what takes them.
        from dovetail import frontends  # noqa: F401

    arguments.check_outputs(out, report, inputs=[model, machine, policy or "", place or ""])
    pins = [arguments.split_pair("--pin", text) for text in pin or []]
    options: dict[str, Any] = {
        "machine": machine, "placer": placer, "objective": objective, "contiguous": contiguous,
        "micro_batches": micro_batches, "schedule": schedule, "recompute": recompute,
        "budget": budget, "gap": gap, "seed": seed, "pins": pins, "caps": _caps(cap),
        "policy": policy, "finetune": finetune, "per_op": per_op, "whole": tuple(whole or ()),
        "format": made_for, "min_gain": arguments.share_of("--min-gain", min_gain), "place": place,
        "stages": stages, "compile": compiles, "compile_budget": compile_budget,
        "replicas": AUTO if replicas == AUTO else "",
    }  # fmt: skip
    count = 1 if replicas == AUTO else _count(replicas)
    if phases:
        of_step = {
            "--train": train, "--replicas": count > 1, "--asynchronous": asynchronous,
            "--shape": shape,
        }  # fmt: skip
        refused = [name for name, is_given in of_step.items() if is_given]
        _plan_phases(model, phases, options, refused, (out, report, as_json))
        return
    request = _request(model, train, shape, options, (count, asynchronous))
    try:
        with progress_bar() as progress:
            progress(f"capturing {model}", 0.0, None)
            request = _captured(request, model, train, shape, (count, asynchronous))
            from dovetail.pipeline.planning import find_plan

            found = find_plan(request, progress)
    except InfeasibleError as error:
        if as_json and request.step is not None:
            show_json(_infeasible(model, request, error))
        raise
    if count > 1:
        # The plan keeps the towers, so that the step can be made again from MODEL. A graph from a
        # file does not say whether we replicated it.
        source = replace(found.source, replicas=count, asynchronous=asynchronous)
        found = replace(found, source=source)
    _write(model, found, request.planned_step, (out, report, as_json))


def _count(replicas: str) -> int:
    """The number that --replicas gives. Raises `UsageError`."""
    if not re.fullmatch("[1-9][0-9]{0,6}", replicas):
        raise UsageError("--replicas", f"is {replicas!r}; use a number of towers, or auto")
    return int(replicas)


def _caps(texts: Sequence[str] | None) -> list[tuple[str, int]]:
    pairs = [arguments.split_pair("--cap", text) for text in texts or []]
    return [(device, arguments.size_of("--cap", size)) for device, size in pairs]


def _request(
    model: str,
    train: str,
    shape: Sequence[str] | None,
    options: dict[str, Any],
    towers: tuple[int, bool],
) -> PlanRequest:
    """The request, which is checked before the long work.

    If MODEL is a file, the request has its step already, because an instance is checked by its own
    machine and objectives.

    towers   (replicas, asynchronous)
    """
    from dovetail.pipeline.sources import check_replicas, names_file

    file = model if names_file(model) else ""
    check_replicas(*towers)
    step = arguments.resolve(model, train, shape) if file else None
    return PlanRequest(step, **options, model=file)


def _captured(
    request: PlanRequest,
    model: str,
    train: str,
    shape: Sequence[str] | None,
    towers: tuple[int, bool],
) -> PlanRequest:
    """The request with its step, captured and replicated."""
    from dovetail.pipeline.sources import replicated

    step = request.step or arguments.resolve(model, train, shape)
    return replace(request, step=replicated(step, *towers))


def _write(
    model: str, found: "Plan", step: "Step", outputs: tuple[Path | None, Path | None, bool]
) -> None:
    """Write the plan and its page where that was asked for, and print the summary.

    outputs   the plan's name, the page's name, and whether to print one JSON object
    """
    from dovetail import pipeline

    out, report, as_json = outputs
    step = pipeline.planned(found, step)
    if out is not None:
        found.save(out)
        say(f"wrote {out}")
    if report is not None:
        pipeline.report(found, step, report, file=out or "")
        say(f"wrote {report}")
    if as_json:
        show_json(_found(model, found, step, out))
    else:
        from dovetail.reports import plan_table

        graph = pipeline.graph_of(step)
        show(plan_table(found, graph))
        show_limits(found, graph, pipeline.timeline_of(found, graph))
    if found.interrupted:
        say("interrupted: this is the best plan so far")


def _found(model: str, plan: "Plan", step: "Step", out: Path | None) -> dict[str, Any]:
    """The object that `plan --json` prints. Its keys are stable. `_infeasible` has them as well."""
    from dovetail.executors.shares import compiled_stages
    from dovetail.pipeline import graph_of
    from dovetail.pipeline.staging import stages_together

    names = plan.machine.device_names
    unit, scale = _unit(step)
    return {
        "model": model,
        "ops": len(graph_of(step)),
        "groups": plan.groups,
        "machine": plan.machine.name,
        "devices": list(names),
        "objective": plan.objective,
        "contiguous": plan.contiguous,
        "whole": list(plan.whole),
        "for": plan.made_for,
        "notes": list(plan.notes),
        "min_gain": plan.min_gain,
        "unit": unit,
        "value": plan.value * scale,
        "lower_bound": plan.lower_bound * scale,
        "bound_proof": plan.bound_proof,
        "gap": plan.gap if plan.lower_bound > 0 else None,
        "placer": plan.placer,
        "feasible": True,
        "interrupted": plan.interrupted,
        "planning_seconds": plan.planning_seconds,
        "peak_memory_bytes": dict(zip(names, plan.peak_memory_bytes, strict=True)),
        "baselines": {
            name: None if value is None else value * scale for name, value in plan.baselines.items()
        },
        "found_seconds": plan.found_seconds,
        "stages": stages_together(plan) if plan.schedules and not compiled_stages(plan) else None,
        "way": plan.way,
        "measured": plan.measured,
        "plan": None if out is None else str(out),
    }


def _infeasible(model: str, request: PlanRequest, error: InfeasibleError) -> dict[str, Any]:
    """The object that `plan --json` prints if no plan is feasible: the keys of `_found`, null if
    unknown, and the error's fields."""
    from dovetail.pipeline.sources import graph_of, machine_of

    unknown = (
        "groups", "devices", "value", "lower_bound", "bound_proof", "gap", "interrupted",
        "planning_seconds", "peak_memory_bytes", "baselines", "found_seconds", "plan", "min_gain",
        "stages", "way", "measured",
    )  # fmt: skip
    step = request.planned_step
    return {
        **dict.fromkeys(unknown),
        "model": model,
        "ops": len(graph_of(step)),
        "machine": request.machine or machine_of(step, request.machine).name,
        "objective": request.resolved_objective,
        "contiguous": request.contiguous,
        "whole": list(request.whole),
        "for": request.format,
        "notes": [],
        "unit": _unit(step)[0],
        "placer": request.placer,
        "feasible": False,
        "error": str(error),
        **vars(error),
    }


def _unit(step: "Step") -> tuple[str, float]:
    """(unit, how many of it make a second) for values that are printed. The values of instances are
    published in milliseconds."""
    from dovetail.instances import Instance

    return ("ms", 1e3) if isinstance(step, Instance) else ("s", 1.0)


# --- `dovetail plan --phases`: one placement for several phases of a model ---


def _plan_phases(
    model: str,
    text: str,
    options: dict[str, Any],
    refused: Sequence[str],
    outputs: tuple[Path | None, Path | None, bool],
) -> None:
    """Plan the phases, and write and print what was asked for.

    text      the text of --phases, such as "prefill=1,decode=128". A phase without a number runs as
              often as `PHASE_WEIGHTS` says
    options   fields of `PlanRequest`
    refused   options that were given and do not go with phases
    outputs   the plans' name, the pages' name, and whether to print one JSON object
    """
    from dovetail import pipeline
    from dovetail.frontends import resolve_phases

    out, report, as_json = outputs
    refused = [*refused, *_not_of_phases(options)]
    if refused:
        raise UsageError("--phases", f"does not go with {', '.join(refused)}; leave it out")
    given = _parse(text)
    plan_files = pipeline.phase_paths(out, given) if out else {}
    pages = pipeline.phase_paths(report, given) if report else {}
    machine = options["machine"]
    arguments.check_outputs(*plan_files.values(), *pages.values(), inputs=[model, machine])
    with progress_bar() as progress:
        progress(f"capturing {model}", 0.0, None)
        known = resolve_phases(model)
        for name in given:
            if name not in known:
                raise UsageError("--phases", f"{name!r} is not one of {', '.join(known)}")
        steps = {name: known[name] for name in given}
        weights = {name: times for name, times in given.items() if times is not None}
        shared = {name: options[name] for name in OF_PHASES}
        found = pipeline.plan_phases(steps, **shared, weights=weights, progress=progress)
    if out is not None:
        found.save(out)
        for path in plan_files.values():
            say(f"wrote {path}")
    for name, path in pages.items():
        pipeline.report(found.plans[name], steps[name], path)
        say(f"wrote {path}")
    if as_json:
        show_json(_json(model, found, plan_files))
    else:
        from dovetail.reports import phases_table

        show(phases_table(found.plans, found.weights, found.devices, found.candidates))
    if found.interrupted:
        say("interrupted: these are the best plans so far")


def _not_of_phases(options: dict[str, Any]) -> list[str]:
    """The options that were given, but that phases do not take.

    An option counts as given if its value is not the default. --objective step is allowed, since
    phases are planned for it, and so are limits of compiling, which a variable may set for all.
    """
    flags = {"format": "--for"}
    allowed = {"objective": ("", "step")}
    return [
        flags.get(name, f"--{name.replace('_', '-')}")
        for name, value in options.items()
        if name not in (*OF_PHASES, "compile", "compile_budget")
        and value not in allowed.get(name, (getattr(PlanRequest, name),))
    ]


def _parse(text: str) -> dict[str, float | None]:
    """Reads the text of --phases: phase -> how many times it runs, None if the text does not say.

    Raises `UsageError`.
    """
    found: dict[str, float | None] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            times = float(number) if equals else None
        except ValueError:
            times = -1.0
        if not name or name in found or not (times is None or 0 < times < float("inf")):
            raise UsageError("--phases", f"{part!r} is not PHASE=TIMES; write prefill=1,decode=128")
        found[name] = times
    return found


def _json(model: str, found: "PhasesPlan", files: dict[str, Path]) -> dict[str, Any]:
    """The object that `plan --phases --json` prints. Its keys are stable."""
    return {
        "model": model,
        "machine": next(iter(found.plans.values())).machine.name,
        "value": found.value,
        "phases": {
            name: {
                "value": plan.value,
                "times": found.weights[name],
                "share": found.weights[name] * plan.value / found.value if found.value else 0.0,
                "lower_bound": plan.lower_bound,
                "peak_memory_bytes": dict(
                    zip(plan.machine.device_names, plan.peak_memory_bytes, strict=True)
                ),
                "plan": str(files[name]) if files else None,
            }
            for name, plan in found.plans.items()
        },
        "devices": found.devices,
        "candidates": found.candidates,
        "interrupted": found.interrupted,
    }
