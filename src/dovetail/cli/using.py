"""`dovetail run`, `report` and `export`: run a plan, show it, or write it for another tool."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.arguments import (
    Json,
    PlanFile,
    PlanModel,
    check_folder,
    check_outputs,
    executable,
)
from dovetail.cli.output import progress_bar, say, show, show_json, show_limits, write
from dovetail.errors import UsageError

if TYPE_CHECKING:
    from dovetail.runtime.ranks import Ranks

EVERY = 10
"""Steps between two checkpoints."""


def run(  # noqa: PLR0917  one argument an option
    plan: PlanFile,
    model: PlanModel = "",
    steps: Annotated[
        int, typer.Option(min=2, help="Steps to measure, of which the first is dropped")
    ] = 10,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the initial weights and of random ops")
    ] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write the plan's page, with what was measured (HTML)")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the predicted and the measured step as one trace, for Perfetto"),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Under torchrun: keep the state of a training step in this folder"),
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help=f"Steps between two checkpoints; else {EVERY}")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --checkpoint")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a plan on this machine, and show the measured step beside the predicted one.

    Under torchrun each rank runs its devices of the plan, and rank 0 tells of it."""
    from dovetail import pipeline
    from dovetail.plans import PLACED
    from dovetail.reports import run_table

    if checkpoint is not None:
        from dovetail.executors.rank_checkpoints import check_own, latest_in, read_index

        check_folder(checkpoint)
        check_own(checkpoint, read_index(latest_in(checkpoint)).run if resume else None)
    elif resume:
        raise UsageError("--resume", "goes on from --checkpoint DIR; name it as well")
    elif every is not None:
        says = "says how often --checkpoint DIR is written; name it as well"
        raise UsageError("--every", says)
    with launched_ranks() as ranks:
        tells = ranks is None or ranks.rank == 0
        if tells:
            check_outputs(report, trace, inputs=[plan, model])
        opened, step = pipeline.open_plan(plan, model)
        captured = executable(opened, step)
        with progress_bar(is_shown=tells) as progress:
            progress("running", 0.0, None)
            with pipeline.run(opened, captured, seed=seed, ranks=ranks) as placed:
                if checkpoint is not None:
                    if ranks is None:
                        from dovetail.executors.loaded import NEEDS_RANKS

                        raise UsageError("--checkpoint", NEEDS_RANKS)
                    if not placed.captured.graph.training:
                        says = "keeps the state of training steps; plan with --train"
                        raise UsageError("--checkpoint", says)
                    if resume:
                        last = placed.resume(checkpoint)
                        if tells:
                            say(f"goes on from step {last}")
                    placed.keep_checkpoints(checkpoint, every or EVERY)
                measurement = placed.measure(steps=steps)
        if not tells:
            return
    write(report, partial(pipeline.report, opened, step, measurement=measurement, file=plan))
    write(trace, partial(pipeline.write_trace, opened, step, measurement=measurement))
    predicted = pipeline.timeline_of(opened, captured.graph)
    is_placed = opened.way == PLACED
    seconds = predicted.step_seconds if is_placed else opened.value
    if as_json:
        show_json(
            {
                "predicted_seconds": seconds,
                "median_seconds": measurement.median_seconds,
                "mean_seconds": measurement.mean_seconds,
                "devices_seconds": measurement.timeline.step_seconds,
                "steps": steps,
                "error": seconds / measurement.median_seconds - 1,
                "others_cores": measurement.others_cores,
            }
        )
    elif is_placed:
        show(run_table(predicted, measurement.step_seconds, measurement.timeline))
        show_limits(opened, captured.graph, measurement.timeline)
    else:
        show(run_table(seconds, measurement.step_seconds))
    if disturbance := pipeline.disturbance_of(opened, seconds, measurement):
        say(disturbance)
    if missing := pipeline.uncompiled(opened, captured):
        say(missing)


@contextmanager
def launched_ranks() -> "Iterator[Ranks | None]":
    """The ranks of this run, if a launcher such as torchrun started several; else None."""
    from dovetail.runtime.ranks import Ranks, host_name, place_of_ranks

    place = place_of_ranks(host_name())
    if place is None:
        yield None
        return
    with Ranks(place) as ranks:
        yield ranks


def report(
    plan: PlanFile,
    model: PlanModel = "",
    out: Annotated[Path | None, typer.Option(help="Write the plan's page (HTML)")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted step as a Chrome trace, for Perfetto")
    ] = None,
) -> None:
    """Write a plan's page: timeline, graph, methods, memory, and what bounds it.

    Without --out and --trace, print a summary.
    """
    from dovetail import pipeline
    from dovetail.reports import plan_table

    check_outputs(out, trace, inputs=[plan, model])
    opened, step = pipeline.open_to_show(plan, model)
    write(out, partial(pipeline.report, opened, step, file=plan))
    write(trace, partial(pipeline.write_trace, opened, step))
    if out is None and trace is None:
        graph = pipeline.graph_of(pipeline.planned(opened, step))
        show(plan_table(opened, graph))
        show_limits(opened, graph, pipeline.timeline_of(opened, graph))
        say(f"for the page, add --out {plan.with_suffix('.html')}")


def export(
    plan: PlanFile,
    model: PlanModel = "",
    to: Annotated[
        str,
        typer.Option(
            help="device-map: for Hugging Face accelerate; split-points: for "
            "torch.distributed.pipelining; torchtitan, megatron, vllm: stages of their layers, and "
            "of a pipeline torchtitan's other options; "
            "torch-schedule: a pipeline's tasks as torch's CSV; "
            "model-explorer: a folder for Google's Model Explorer; "
            "trace: for Perfetto; instance: a file like the published placement instances"
        ),
    ] = "device-map",
    out: Annotated[
        Path | None, typer.Option(help="Write to this path", show_default="standard output")
    ] = None,
) -> None:
    """Write a plan in the format of another tool (JSON)."""
    from dovetail import pipeline

    pipeline.check_export(to)
    if out is not None and to in pipeline.FOLDERS:
        check_outputs(pipeline.make_folder(out) / pipeline.FOLDERS[to], inputs=[plan, model])
    else:
        check_outputs(out, inputs=[plan, model])
    opened, step = pipeline.open_to_show(plan, model)
    written = pipeline.export(opened, step, to, out)
    if out is not None:
        say(f"wrote {out}")
    elif isinstance(written, str):
        print(written, end="")
    else:
        show_json(written)
