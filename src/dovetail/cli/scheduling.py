"""`dovetail schedule`: what runs at the same time inside one device."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.arguments import MODEL_HELP, Json, check_outputs
from dovetail.cli.output import progress_bar, say, show, show_json
from dovetail.errors import UsageError

SCHEDULERS_HELP = "sequential, greedy, merge, dos, ios, dataflow"
"""A test holds it against `SCHEDULERS`, whose import takes seconds."""


def schedule(  # noqa: PLR0913  one option each
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    device: Annotated[
        str,
        typer.Option(
            help="cpu: the cores of this machine; cuda:0; or a preset such as v100 (predicted by "
            "analytic costs). Several with commas are compared"
        ),
    ] = "cpu",
    scheduler: Annotated[
        str, typer.Option(help=f"{SCHEDULERS_HELP}, with commas; all by default")
    ] = "",
    batch: Annotated[
        str, typer.Option(help="Batch sizes with commas, e.g. 1,8,16, of a network of the zoo")
    ] = "",
    rounds: Annotated[
        int, typer.Option(min=1, help="In which all schedules are measured, one after another")
    ] = 15,
    sampled: Annotated[
        int, typer.Option(min=0, help="Random schedules to hold predictions against, e.g. 100")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, inputs, random schedules")] = 0,
    report: Annotated[Path, typer.Option(help="The page; of several devices, one each")] = Path(
        "schedule.html"
    ),
    as_json: Json = False,
) -> None:
    """Find what to run at the same time on one device, and measure it against one by one."""
    from dovetail.runtime.setup import spin_briefly

    spin_briefly()  # before torch is imported
    from dovetail.cli.training_run import typed
    from dovetail.pipeline import Wanted, schedules
    from dovetail.reports import schedules_table
    from dovetail.reports.stages_page import write_stages_page

    wanted = Wanted(_names(scheduler), _batches(batch), rounds, sampled, seed)
    devices = _names(device) or ("cpu",)
    pages = _pages(report, devices)
    check_outputs(*pages, inputs=[model])
    with progress_bar() as progress:
        found = schedules(model, devices, wanted, progress=progress)
    for one, path in zip(found, pages, strict=True):
        write_stages_page(one, path, made=typed())
        say(f"wrote {path}")
        if not as_json:
            show(schedules_table(one))
    if as_json:
        objects = [_object(one) for one in found]
        show_json(objects[0] if len(objects) == 1 else {"model": model, "devices": objects})


def _object(one: Any) -> dict[str, Any]:
    """One device's schedules, for programs."""
    return {
        "model": one.model,
        "device": one.device,
        "costs": one.costs_source,
        "results": [
            {
                "batch": result.batch,
                "chosen": result.chosen,
                "seconds": {
                    c.scheduler: c.median_seconds if c.seconds else None for c in result.candidates
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


def _pages(report: Path, devices: Sequence[str]) -> list[Path]:
    """The page of each device: devices' texts may hold what a file name cannot."""
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
