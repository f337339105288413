"""`dovetail schedule`: finds what to run at the same time inside one device."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.arguments import Json, Model, check_outputs
from dovetail.cli.options import Options, OptionsOf
from dovetail.cli.output import progress_bar, say, show, show_json, write
from dovetail.errors import UsageError
from dovetail.methods import SCHEDULERS, listing
from dovetail.pipeline.requests import CPU, PlanRequest, ScheduleRequest
from dovetail.units import HERE_CPU

EPILOGS = {"schedule": listing("Schedulers:", SCHEDULERS)}


def schedule(
    *,
    model: Model,
    options: Annotated[Options, OptionsOf(ScheduleRequest)],
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
    from dovetail.pipeline.scheduling import find_schedules, step_of
    from dovetail.reports import schedules_table
    from dovetail.reports.kit import save_page
    from dovetail.reports.stages_page import render_stages

    request = ScheduleRequest(model, **options)
    pages: list[Path | None] = [report]
    if len(request.devices) > 1:
        # Characters of a device that a file name cannot have become "-".
        names = [re.sub(r"[^\w.-]+", "-", device) for device in request.devices]
        pages = [report and report.with_stem(f"{report.stem}-{name}") for name in names]
    check_outputs(*pages, out, inputs=[model])
    if out is not None:
        # A plan is made of the step, so the step is captured here and not by `find_schedules`.
        if request.devices != (CPU,) or len(request.batches) > 1:
            raise UsageError("--out", "a plan is of one device and batch size; use --device cpu")
        step = step_of(model, request.batches[0] if request.batches else 0)
        request = replace(request, model=step, batches=())
    with progress_bar() as progress:
        found = find_schedules(request, progress=progress)
        if out is not None:
            from dovetail.pipeline.searching import search_plan
            from dovetail.pipeline.staging import plan_of_stages

            ((scheduled,),) = (of_device.results for of_device in found)
            plan = search_plan(PlanRequest(step, HERE_CPU, placer="single"), progress)
            write(out, plan_of_stages(scheduled, step, plan).save)
    for of_device, path in zip(found, pages, strict=True):
        if path is not None:
            write(path, partial(save_page, render_stages(of_device, made=typed())))
        if not as_json:
            show(schedules_table(of_device))
    if as_json:
        # These keys are stable.
        devices = [
            {
                "model": of_device.model,
                "device": of_device.device,
                "costs": of_device.costs_source,
                "results": [
                    {
                        "batch": result.batch,
                        "chosen": result.chosen,
                        "seconds": {
                            c.scheduler: c.step_seconds if c.seconds else None
                            for c in result.candidates
                        },
                        "predicted_seconds": {
                            c.scheduler: c.predicted_seconds for c in result.candidates
                        },
                        "kernels": [kernel.name for kernel in result.kernels],
                        "stages": [[list(group) for group in s.groups] for s in result.best.stages],
                        "measured_stages": sum(c.effort.timed for c in result.candidates),
                        "search_seconds": sum(c.effort.search_seconds for c in result.candidates),
                        "peak_bytes": result.peak_bytes,
                    }
                    for result in of_device.results
                ],
            }
            for of_device in found
        ]
        show_json(devices[0] if len(devices) == 1 else {"model": model, "devices": devices})
    if report is None:
        say("for a page that draws the stages, add --report schedule.html")
