"""`dovetail plan`: finds a plan, or with `--phases` a plan for each phase, and prints it."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli import arguments
from dovetail.cli.arguments import Asynchronous, Json, Model, Shape, Train
from dovetail.cli.options import Options, OptionsOf
from dovetail.cli.output import progress_bar, say, show, show_json, show_limits, write
from dovetail.errors import InfeasibleError, UsageError
from dovetail.methods import PLACERS, listing
from dovetail.pipeline.requests import (
    AUTO,
    OF_PHASES,
    PhasesRequest,
    PlanRequest,
    check_name,
    is_given,
)
from dovetail.request_fields import options_of

if TYPE_CHECKING:
    from dovetail.pipeline.sources import Step

EPILOGS = {"plan": listing("Placers:", PLACERS)}


def plan(
    *,
    model: Model,
    train: Train = "",
    replicas: Annotated[
        str,
        typer.Option(
            help="Number of data-parallel towers, the modules tower.0, tower.1, ... Each has "
            "MODEL's batch. " + options_of(PlanRequest)["replicas"].help
        ),
    ] = "1",
    asynchronous: Asynchronous = False,
    shape: Shape = None,
    options: Annotated[Options, OptionsOf(PlanRequest, without=("replicas",))],
    phases: Annotated[Options, OptionsOf(PhasesRequest)],
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the plan's page (HTML)")] = None,
    as_json: Json = False,
) -> None:
    """Find where each operation should run. Ctrl-C keeps the best plan so far."""
    with progress_bar() as progress:
        progress("importing torch", 0.0, None)
        # The import takes seconds. It stands here so that the user is told what takes them.
        from dovetail import frontends  # noqa: F401

    from dovetail import pipeline
    from dovetail.runtime.timers import clock

    began = clock()
    read = [options.get(name, "") for name in ("machine", "policy", "place")]
    arguments.check_outputs(out, report, inputs=[model, *read])
    if replicas != AUTO and not re.fullmatch("[1-9][0-9]{0,6}", replicas):
        raise UsageError("--replicas", f"is {replicas!r}; use a number of towers, or auto")
    count = 1 if replicas == AUTO else int(replicas)
    if replicas == AUTO:
        options["replicas"] = AUTO
    if phases:
        of_step = {
            "--train": train, "--replicas": count > 1, "--asynchronous": asynchronous,
            "--shape": shape,
        }  # fmt: skip
        refused = [flag for flag, value in of_step.items() if value]
        _plan_phases(model, phases["weights"], options, refused, out, report, as_json)
        return
    pipeline.check_replicas(count, asynchronous)
    # An instance is checked by its own machine and objectives, so a file is read before the checks.
    # A network is captured after them, as that may take long.
    file = model if pipeline.names_file(model) else ""
    step = arguments.resolve(model, train, shape) if file else None
    request = PlanRequest(step, **options, model=file)
    try:
        step = step or arguments.resolve(model, train, shape)
        request = replace(request, step=pipeline.replicated(step, count, asynchronous))
        with progress_bar(began=began) as progress:
            found = pipeline.find_plan(request, progress, began=began)
    except InfeasibleError as error:
        if as_json and request.step is not None:
            # The keys of a plan's object, null if unknown, and the error's fields.
            from dovetail.pipeline.sources import machine_of

            asked = request.planned_step
            unknown = (
                "groups", "devices", "value", "interval", "lower_bound", "bound_proof", "gap",
                "interrupted", "planning_seconds", "peak_memory_bytes", "baselines",
                "found_seconds", "plan", "min_gain", "stages", "way", "measured",
            )  # fmt: skip
            show_json({
                **dict.fromkeys(unknown),
                "model": model,
                "ops": len(pipeline.graph_of(asked)),
                "machine": request.machine or machine_of(asked, request.machine).name,
                "objective": request.resolved_objective,
                "contiguous": request.contiguous,
                "whole": list(request.whole),
                "for": request.format,
                "notes": [],
                "unit": _unit(asked)[0],
                "placer": request.placer,
                "feasible": False,
                "error": str(error),
                **vars(error),
            })  # fmt: skip
        raise
    if count > 1:
        # The plan keeps the towers, so that the step can be made again from MODEL. A graph from a
        # file does not say whether we replicated it.
        from dovetail.transforms import Towers, without

        others = without(Towers, found.transforms)
        found = replace(found, transforms=(Towers(count, asynchronous), *others))
    step = pipeline.planned(found, request.planned_step)
    write(out, found.save)
    write(report, partial(pipeline.report, found, step, file=out or ""))
    graph = pipeline.graph_of(step)
    if as_json:
        # These keys are stable. The object of a plan that is not feasible has them as well.
        from dovetail.executors.shares import compiled_stages
        from dovetail.pipeline.staging import stages_together
        from dovetail.reports.tables import interval_of

        names = found.machine.device_names
        unit, scale = _unit(step)
        in_stages = found.schedules and not compiled_stages(found)
        interval = interval_of(found, graph)
        show_json({
            "model": model,
            "ops": len(graph),
            "groups": found.groups,
            "machine": found.machine.name,
            "devices": list(names),
            "objective": found.objective,
            "contiguous": found.contiguous,
            "whole": list(found.whole),
            "for": found.made_for,
            "notes": list(found.notes),
            "min_gain": found.min_gain,
            "unit": unit,
            "value": found.value * scale,
            "interval": interval and [seconds * scale for seconds in interval],
            "lower_bound": found.lower_bound * scale,
            "bound_proof": found.bound_proof,
            "gap": found.gap if found.lower_bound > 0 else None,
            "placer": found.placer,
            "feasible": True,
            "interrupted": found.interrupted,
            "planning_seconds": found.planning_seconds,
            "peak_memory_bytes": dict(zip(names, found.peak_memory_bytes, strict=True)),
            "baselines": {
                name: None if value is None else value * scale
                for name, value in found.baselines.items()
            },
            "found_seconds": found.found_seconds,
            "stages": stages_together(found) if in_stages else None,
            "way": found.way,
            "measured": found.measured,
            "plan": None if out is None else str(out),
        })  # fmt: skip
    else:
        from dovetail.reports import plan_table

        show(plan_table(found, graph))
        show_limits(found, graph, pipeline.timeline_of(found, graph))
    if found.interrupted:
        say("interrupted: this is the best plan so far")


def _unit(step: "Step") -> tuple[str, float]:
    """(unit, how many of it make a second) for values that are printed. The values of instances are
    published in milliseconds."""
    from dovetail.instances import Instance

    return ("ms", 1e3) if isinstance(step, Instance) else ("s", 1.0)


# --- `dovetail plan --phases`: one placement for several phases of a model ---


def _plan_phases(
    model: str,
    weights: dict[str, float],
    options: Options,
    refused: list[str],
    out: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Plan the phases, and write and print what was asked for.

    weights   phase -> how many times it runs
    options   fields of `PlanRequest`. Limits of compiling, which a variable may set for all
              commands, are ignored
    refused   other options that were given and do not go with phases
    out       the plans' name; `report` is the pages' name
    """
    from dovetail import pipeline
    from dovetail.frontends import resolve_phases

    for name, value in options.items():
        if name not in (*OF_PHASES, "compile", "compile_budget") and is_given(name, value):
            refused.append(options_of(PlanRequest)[name].flag)
    if refused:
        raise UsageError("--phases", f"does not go with {', '.join(refused)}; leave it out")
    plan_files = pipeline.phase_paths(out, weights) if out else {}
    pages = pipeline.phase_paths(report, weights) if report else {}
    inputs = [model, options.get("machine", "")]
    arguments.check_outputs(*plan_files.values(), *pages.values(), inputs=inputs)
    with progress_bar() as progress:
        progress(f"capturing {model}", 0.0, None)
        known = resolve_phases(model)
        for name in weights:
            check_name("--phases", name, known)
        steps = {name: known[name] for name in weights}
        shared = {name: value for name, value in options.items() if name in OF_PHASES}
        found = pipeline.plan_phases(steps, **shared, weights=weights, progress=progress)
    if out is not None:
        found.save(out)
        for path in plan_files.values():
            say(f"wrote {path}")
    for name, path in pages.items():
        pipeline.report(found.plans[name], steps[name], path)
        say(f"wrote {path}")
    if as_json:
        # These keys are stable.
        of_phases = {
            name: {
                "value": plan.value,
                "times": found.weights[name],
                "share": found.weights[name] * plan.value / found.value if found.value else 0.0,
                "lower_bound": plan.lower_bound,
                "peak_memory_bytes": dict(
                    zip(plan.machine.device_names, plan.peak_memory_bytes, strict=True)
                ),
                "plan": str(plan_files[name]) if plan_files else None,
            }
            for name, plan in found.plans.items()
        }
        show_json(
            {
                "model": model,
                "machine": next(iter(found.plans.values())).machine.name,
                "value": found.value,
                "phases": of_phases,
                "devices": found.devices,
                "candidates": found.candidates,
                "interrupted": found.interrupted,
            }
        )
    else:
        from dovetail.reports import phases_table

        show(phases_table(found.plans, found.weights, found.devices, found.candidates))
    if found.interrupted:
        say("interrupted: these are the best plans so far")
