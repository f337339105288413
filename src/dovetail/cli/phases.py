"""`dovetail plan --phases`: one placement for several phases of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli import arguments
from dovetail.cli.output import progress_bar, say, show, show_json
from dovetail.errors import UsageError

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
