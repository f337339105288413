"""`dovetail schedule`: finds what to run at the same time inside one device."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.arguments import MODEL_HELP, Json, check_outputs, option
from dovetail.cli.output import progress_bar, say, show, show_json
from dovetail.errors import UsageError
from dovetail.methods import SCHEDULERS, listing
from dovetail.pipeline.requests import CPU, PlanRequest, ScheduleRequest
from dovetail.units import HERE_CPU

EPILOGS = {"schedule": listing("Schedulers:", SCHEDULERS)}


def schedule(  # noqa: PLR0917  one option each
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    device: Annotated[
        str, option(ScheduleRequest, "devices", before="One, or several with commas. ")
    ] = ",".join(ScheduleRequest.devices),
    scheduler: Annotated[
        str,
        typer.Option(
            help=f"Methods to compare, with commas: {', '.join(SCHEDULERS)}. They are described "
            "below",
            show_default="all",
        ),
    ] = "",
    batch: Annotated[
        str, option(ScheduleRequest, "batches", before="One, or several with commas: 1,8,16. ")
    ] = "",
    rounds: Annotated[int, option(ScheduleRequest, "rounds")] = ScheduleRequest.rounds,
    sampled: Annotated[int, option(ScheduleRequest, "sampled")] = ScheduleRequest.sampled,
    specialised: Annotated[
        str, option(ScheduleRequest, "specialised")
    ] = ScheduleRequest.specialised,
    seed: Annotated[int, option(ScheduleRequest, "seed")] = ScheduleRequest.seed,
    report: Annotated[
        Path | None,
        typer.Option(help="Write the page (HTML). With several devices, a page for each"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write a plan with the stages, which `dovetail run` runs. For cpu alone and one "
            "batch size"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find which operations to run at the same time on one device, and measure what that gains."""
    from dovetail.runtime.setup import spin_briefly

    # OpenMP reads its settings when torch is imported, so this comes before.
    spin_briefly()
    from dovetail.cli.training_run import typed
    from dovetail.pipeline.scheduling import find_schedules
    from dovetail.reports import schedules_table
    from dovetail.reports.stages_page import write_stages_page

    devices = _names(device) or ScheduleRequest.devices
    request = ScheduleRequest(
        model, devices, _names(scheduler), _batches(batch), rounds, sampled, specialised, seed
    )
    pages = [None] * len(devices) if report is None else _pages(report, devices)
    check_outputs(*pages, out, inputs=[model])
    if out is not None:
        request = _with_step(request)
    with progress_bar() as progress:
        found = find_schedules(request, progress=progress)
        if out is not None:
            _save_plan(request, found, out, progress)
    if out is not None:
        say(f"wrote {out}")
    for of_device, path in zip(found, pages, strict=True):
        if path is not None:
            write_stages_page(of_device, path, made=typed())
            say(f"wrote {path}")
        if not as_json:
            show(schedules_table(of_device))
    if as_json:
        objects = [_object(of_device) for of_device in found]
        show_json(objects[0] if len(objects) == 1 else {"model": model, "devices": objects})
    if report is None:
        say("for a page that draws the stages, add --report schedule.html")


def _with_step(request: ScheduleRequest) -> ScheduleRequest:
    """The request with its step captured, so that a plan can be made of it. Raises `UsageError` for
    several devices or batch sizes."""
    from dovetail.pipeline.scheduling import step_of

    if request.devices != (CPU,) or len(request.batches) > 1:
        raise UsageError("--out", "a plan is of one device and batch size; use --device cpu")
    batch = request.batches[0] if request.batches else 0
    return replace(request, model=step_of(request.model, batch), batches=())


def _save_plan(request: ScheduleRequest, found: Any, out: Path, progress: Any) -> None:
    from dovetail.pipeline.searching import search_plan
    from dovetail.pipeline.staging import plan_of_stages

    ((scheduled,),) = (of_device.results for of_device in found)
    assert not isinstance(request.model, str), "its step was captured"
    step = request.model
    plan = search_plan(PlanRequest(step, HERE_CPU, placer="single"), progress)
    plan_of_stages(scheduled, step, plan).save(out)


def _object(one: Any) -> dict[str, Any]:
    """The object that `schedule --json` prints for one device."""
    return {
        "model": one.model,
        "device": one.device,
        "costs": one.costs_source,
        "results": [
            {
                "batch": result.batch,
                "chosen": result.chosen,
                "seconds": {
                    c.scheduler: c.step_seconds if c.seconds else None for c in result.candidates
                },
                "predicted_seconds": {c.scheduler: c.predicted_seconds for c in result.candidates},
                "kernels": [kernel.name for kernel in result.kernels],
                "stages": [[list(group) for group in s.groups] for s in result.best.stages],
                "measured_stages": sum(c.effort.timed for c in result.candidates),
                "search_seconds": sum(c.effort.search_seconds for c in result.candidates),
                "peak_bytes": result.peak_bytes,
            }
            for result in one.results
        ],
    }


def _pages(report: Path, devices: Sequence[str]) -> list[Path | None]:
    """The file of each device's page. Characters of a device that a file name cannot have become
    "-"."""
    if len(devices) == 1:
        return [report]
    names = [re.sub(r"[^\w.-]+", "-", device) for device in devices]
    return [report.with_stem(f"{report.stem}-{name}") for name in names]


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in _names(text)))
    except ValueError:
        raise UsageError("batch", f"{text!r} is not a list of numbers such as 1,8,16") from None
