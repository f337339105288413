"""`dovetail plan`, and the one object that it prints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import arguments
from dovetail.cli.arguments import (
    MACHINE_HELP,
    PLACERS_HELP,
    Asynchronous,
    Json,
    Model,
    Replicas,
    Shape,
    Train,
)
from dovetail.cli.output import progress_bar, say, show, show_json, show_limits
from dovetail.errors import InfeasibleError, UsageError

# `dovetail plan --phases`: one placement for several phases of a model.


if TYPE_CHECKING:
    from dovetail.pipeline import PhasesPlan


def plan_phases(
    model: str,
    text: str,
    machine: str,
    refused: Sequence[str],
    options: dict[str, Any],
    outputs: tuple[Path | None, Path | None, bool],
) -> None:
    """text     of --phases: "prefill=1,decode=128"; without a number, the default counts
    refused  options that were given and do not go with phases
    options  of `pipeline.plan_phases`
    outputs  the plans' name, the pages' name, and whether to print one JSON object
    """
    from dovetail import pipeline
    from dovetail.frontends import resolve_phases

    out, report, as_json = outputs
    if refused:
        raise UsageError("--phases", f"does not go with {', '.join(refused)}; leave it out")
    given = _parse(text)
    plan_files = pipeline.phase_paths(out, given) if out else {}
    pages = pipeline.phase_paths(report, given) if report else {}
    arguments.check_outputs(*plan_files.values(), *pages.values(), inputs=[model, machine])
    with progress_bar() as progress:
        progress(f"capturing {model}", 0.0, None)
        known = resolve_phases(model)
        for name in given:
            if name not in known:
                raise UsageError("--phases", f"{name!r} is not one of {', '.join(known)}")
        steps = {name: known[name] for name in given}
        weights = {name: times for name, times in given.items() if times is not None}
        found = pipeline.plan_phases(steps, machine, weights=weights, **options, progress=progress)
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


def _parse(text: str) -> dict[str, float | None]:
    """Phase -> how many times it runs, None where that is not said. Raises `UsageError`."""
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
    """What `plan --phases --json` prints; its keys are stable."""
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


if TYPE_CHECKING:
    from dovetail.pipeline import Step
    from dovetail.plans import Plan


def plan(  # noqa: PLR0913  one argument an option
    model: Model,
    train: Train = "",
    replicas: Replicas = 1,
    asynchronous: Asynchronous = False,
    shape: Shape = None,
    machine: Annotated[
        str, typer.Option(help=f"{MACHINE_HELP}; an instance brings its own", show_default="here")
    ] = "",
    placer: Annotated[str, typer.Option(help=PLACERS_HELP)] = "auto",
    objective: Annotated[
        str,
        typer.Option(
            help="step: seconds of one step; load: the busiest device's, for pipelines; latency: "
            "of one sample, for instances",
            show_default="step; load for an instance",
        ),
    ] = "",
    contiguous: Annotated[
        bool,
        typer.Option("--contiguous", help="Whole stages only: no path leaves a device and returns"),
    ] = False,
    budget: Annotated[str, typer.Option(help="Seconds (10, 10s) or evaluations (5000e)")] = "10s",
    gap: Annotated[
        float, typer.Option(min=0, help="Stop at a plan proven within this of the best: .02 is 2 %")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same plan")] = 0,
    pin: Annotated[
        list[str] | None, typer.Option(help="PATTERN=DEVICE: ops or modules that stay there")
    ] = None,
    cap: Annotated[
        list[str] | None, typer.Option(help="DEVICE=BYTES: memory it may use, e.g. cpu0=2GiB")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="Of gdp and gdp+search: a policy file", show_default="the shipped one"),
    ] = None,
    finetune: Annotated[
        int, typer.Option(min=0, help="Updates of the policy on this graph; 0: zero-shot")
    ] = 0,
    per_op: Annotated[
        bool, typer.Option("--per-op", help="Of gdp and gdp+search: place every op by itself")
    ] = False,
    whole: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN of modules that are each placed as one, e.g. 'layers.*'"),
    ] = None,
    made_for: Annotated[
        str, typer.Option("--for", help="Only plans that export as device-map or split-points")
    ] = "",
    place: Annotated[
        Path | None,
        typer.Option(help="Price this placement beside ours: a device map or a plan (JSON)"),
    ] = None,
    min_gain: Annotated[
        str,
        typer.Option(
            help="More devices only where they gain as much: 2%, .02",
            show_default="2%; 0 for an instance",
        ),
    ] = "",
    phases: Annotated[
        str,
        typer.Option(
            help="prefill=1,decode=128: plan these phases of MODEL under one placement; a number "
            "is how many times one runs"
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    report: Annotated[Path | None, typer.Option(help="Write its page (HTML)")] = None,
    as_json: Json = False,
) -> None:
    """Find where each operation should run. Ctrl-C keeps the best plan so far."""
    with progress_bar() as progress:
        progress("importing torch", 0.0, None)
        from dovetail import pipeline

    arguments.check_outputs(out, report, inputs=[model, machine, policy or "", place or ""])
    pins = [arguments.split_pair("--pin", text) for text in pin or []]
    pairs = [arguments.split_pair("--cap", text) for text in cap or []]
    caps = [(device, arguments.size_of("--cap", size)) for device, size in pairs]
    least = arguments.share_of("--min-gain", min_gain)
    if phases:
        given = {
            "--train": train, "--replicas": replicas > 1, "--asynchronous": asynchronous,
            "--shape": shape, "--objective": objective not in ("", "step"), "--gap": gap,
            "--contiguous": contiguous, "--policy": policy, "--finetune": finetune,
            "--per-op": per_op, "--for": made_for, "--place": place,
        }  # fmt: skip
        plan_phases(
            model, phases, machine, [name for name, is_given in given.items() if is_given],
            {"placer": placer, "budget": budget, "seed": seed, "pins": pins, "caps": caps,
             "whole": tuple(whole or ()), "min_gain": least},
            (out, report, as_json),
        )  # fmt: skip
        return
    search: dict[str, Any] = {
        "placer": placer, "objective": objective, "budget": budget, "seed": seed,
        "contiguous": contiguous, "whole": tuple(whole or ()), "format": made_for,
    }  # fmt: skip
    named = [device for _, device in pins] + [device for device, _ in caps]
    file = model if pipeline.names_file(model) else ""
    pipeline.check_replicas(replicas, asynchronous)
    step = arguments.resolve(model, train, shape) if file else None
    pipeline.check_request(machine, **search, devices=named, step=step)
    learned: dict[str, Any] = {"policy": policy, "finetune": finetune, "per_op": per_op}
    pipeline.check_policy(placer, **learned)
    try:
        with progress_bar() as progress:
            progress(f"capturing {model}", 0.0, None)
            step = pipeline.replicated(
                step or arguments.resolve(model, train, shape), replicas, asynchronous
            )
            found = pipeline.plan(
                step,
                machine,
                **search,
                **learned,
                gap=gap,
                min_gain=least,
                place=place,
                pins=pins,
                caps=caps,
                model=file,
                progress=progress,
            )
    except InfeasibleError as error:
        if as_json and step is not None:
            show_json(_infeasible(model, step, machine, search, error))
        raise
    # A graph from a file does not say whether we replicated it.
    source = replace(found.source, replicas=replicas, asynchronous=asynchronous)
    found = replace(found, source=source)
    step = pipeline.planned(found, step)
    if out is not None:
        found.save(out)
        say(f"wrote {out}")
    if report is not None:
        pipeline.report(found, step, report)
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
    """What `plan --json` prints. Its keys are stable: `_infeasible` has them too."""
    from dovetail.pipeline import graph_of

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
        "plan": None if out is None else str(out),
    }


def _infeasible(
    model: str,
    step: "Step",
    machine: str,
    search: dict[str, Any],
    error: InfeasibleError,
) -> dict[str, Any]:
    """The keys of `_found`, null where unknown, and the error's fields."""
    from dovetail.pipeline import default_objective, graph_of, machine_of

    unknown = (
        "groups", "devices", "value", "lower_bound", "bound_proof", "gap", "interrupted",
        "planning_seconds", "peak_memory_bytes", "baselines", "found_seconds", "plan", "min_gain",
    )  # fmt: skip
    return {
        **dict.fromkeys(unknown),
        "model": model,
        "ops": len(graph_of(step)),
        "machine": machine or machine_of(step, machine).name,
        "objective": search["objective"] or default_objective(step),
        "contiguous": search["contiguous"],
        "whole": list(search["whole"]),
        "for": search["format"],
        "notes": [],
        "unit": _unit(step)[0],
        "placer": search["placer"],
        "feasible": False,
        "error": str(error),
        **vars(error),
    }


def _unit(step: "Step") -> tuple[str, float]:
    """The unit in which values are printed, and how many of it make a second: an instance's
    values are published in milliseconds."""
    from dovetail.instances import Instance

    return ("ms", 1e3) if isinstance(step, Instance) else ("s", 1.0)
