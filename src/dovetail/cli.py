"""The command line: arguments -> pipeline. Results on standard output, all else on standard error.

Exit status: 0 done, 2 invalid input or usage, 3 no feasible plan, 1 a run that failed or a bug.
Nothing here imports torch before a command needs it.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dovetail.errors import DovetailError, InfeasibleError, InvalidError, UsageError
from dovetail.units import format_seconds, parse_bytes, printable

if TYPE_CHECKING:
    from dovetail.frontends import Captured
    from dovetail.graph import Graph
    from dovetail.pipeline import Progress as Report
    from dovetail.plans import Plan
    from dovetail.timeline import Timeline

app = typer.Typer(
    help="Finds how to run a neural network fastest on the devices you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
MODEL_HELP = (
    "zoo:NAME?option=value, package.module:function (returns module, inputs[, loss[, targets]]; "
    "looked for in the current folder first), or a saved graph (.json, .json.gz)"
)
MACHINE_HELP = 'here, here/2, FILE.toml, or presets such as "4 x k80 + haswell"'
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Train = Annotated[
    str, typer.Option(help="Capture a whole training step: sgd, momentum, rmsprop, adam, adamw")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(130)
    except InvalidError as error:
        _say(f"error: {error}")
        sys.exit(2)
    except InfeasibleError as error:
        _say(f"no feasible plan: {error}")
        sys.exit(3)
    except DovetailError as error:
        _say(f"error: {error}")
        sys.exit(1)
    except Exception as error:  # click's own usage errors know how to show themselves
        if not hasattr(error, "show"):
            raise
        error.show()
        sys.exit(getattr(error, "exit_code", 2))


@app.command()
def machine(
    name: Annotated[str, typer.Argument(metavar="MACHINE", help=MACHINE_HELP)] = "here",
    out: Annotated[Path | None, typer.Option(help="Write it as TOML")] = None,
    fresh: Annotated[bool, typer.Option(help="Measure anew, whatever the cache holds")] = False,
) -> None:
    """What a machine is; of this one, measured."""
    from dovetail.machine import save_machine
    from dovetail.pipeline import resolve_machine
    from dovetail.reports import machine_table

    _check_writable(out)
    with _progress() as progress:
        where = resolve_machine(name, progress, fresh=fresh)
    _print(machine_table(where))
    if out is not None:
        save_machine(where, out)
        _say(f"wrote {out}")


@app.command()
def networks() -> None:
    """The built-in networks, with their sizes."""
    from dovetail.frontends.models import network_rows
    from dovetail.reports import networks_table

    _print(networks_table(network_rows()))


@app.command()
def capture(
    model: Model,
    out: Annotated[Path, typer.Option(help="Where the graph goes: .json or .json.gz")],
    train: Train = "",
) -> None:
    """Capture a network as a graph and save it."""
    from dovetail.graph import save_graph
    from dovetail.reports import graph_summary

    _check_writable(out)
    graph = _graph(_resolve(model, train))
    save_graph(graph, out)
    _print(graph_summary(graph))
    _say(f"wrote {out}")


@app.command(name="plan")
def plan_command(  # noqa: PLR0913  one argument an option
    model: Model,
    train: Train = "",
    machine: Annotated[str, typer.Option(help=MACHINE_HELP)] = "here",
    placer: Annotated[
        str, typer.Option(help="single, expert, balanced, etf, local_search, auto")
    ] = "auto",
    objective: Annotated[
        str, typer.Option(help="step: seconds of one step; load: the busiest device's")
    ] = "step",
    budget: Annotated[str, typer.Option(help="Seconds (10, 10s) or evaluations (5000e)")] = "10s",
    seed: Annotated[int, typer.Option(help="Same seed, same plan")] = 0,
    pin: Annotated[
        list[str] | None, typer.Option(help="PATTERN=DEVICE: ops or modules that stay there")
    ] = None,
    cap: Annotated[
        list[str] | None, typer.Option(help="DEVICE=BYTES: memory it may use, e.g. cpu0=2GiB")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan")] = None,
    report: Annotated[Path | None, typer.Option(help="Write its page (HTML)")] = None,
    as_json: Json = False,
) -> None:
    """Find where each operation should run. Ctrl-C keeps the best plan so far."""
    from dovetail import pipeline

    _check_writable(out, report)
    pins = [_split("--pin", text) for text in pin or []]
    caps = [(device, _bytes(size)) for device, size in (_split("--cap", t) for t in cap or [])]
    search: dict[str, Any] = {
        "placer": placer, "objective": objective, "budget": budget, "seed": seed
    }  # fmt: skip
    named = [device for _, device in pins] + [device for device, _ in caps]
    pipeline.check_request(machine, **search, devices=named)
    step = _resolve(model, train)
    graph_file = model if pipeline.names_graph(model) else ""
    try:
        with _progress() as progress:
            found = pipeline.plan(
                step, machine, **search, pins=pins, caps=caps, model=graph_file, progress=progress
            )
    except InfeasibleError as error:
        if as_json:
            _print_json(_infeasible(model, step, machine, search, error))
        raise
    if out is not None:
        found.save(out)
        _say(f"wrote {out}")
    if report is not None:
        pipeline.report(found, step, report)
        _say(f"wrote {report}")
    if as_json:
        _print_json(_plan_object(model, found, step, out))
    else:
        from dovetail.reports import plan_table

        _print(plan_table(found, _graph(step)))
        _print_limits(found, _graph(step), pipeline.timeline_of(found, _graph(step)))
    if found.interrupted:
        _say("interrupted: this is the best plan so far")


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="A plan that `dovetail plan --out` wrote")],
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "",
    steps: Annotated[int, typer.Option(min=2, help="Steps to measure; the first is dropped")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of initial weights and random ops")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write the page, with what was measured")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a plan on this machine and measure it: predicted beside measured."""
    from dovetail import pipeline
    from dovetail.reports import run_table

    _check_writable(report)
    opened, step = pipeline.open_plan(plan, model)
    captured = _executable(opened, step)
    with _progress() as progress:
        progress("running", 0.0, None)
        with pipeline.run(opened, captured, seed=seed) as placed:
            measurement = placed.measure(steps=steps)
    if report is not None:
        pipeline.report(opened, step, report, measurement=measurement)
        _say(f"wrote {report}")
    if as_json:
        predicted = pipeline.timeline_of(opened, captured.graph).step_seconds
        _print_json(
            {
                "predicted_seconds": predicted,
                "median_seconds": measurement.median_seconds,
                "mean_seconds": measurement.mean_seconds,
                "steps": steps,
                "error": predicted / measurement.median_seconds - 1,
            }
        )
    else:
        predicted_timeline = pipeline.timeline_of(opened, captured.graph)
        _print(run_table(predicted_timeline, measurement.step_seconds, measurement.timeline))
        _print_limits(opened, captured.graph, measurement.timeline)


@app.command(name="report")
def report_command(
    plan: Annotated[Path, typer.Argument(help="A plan that `dovetail plan --out` wrote")],
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "",
    out: Annotated[Path | None, typer.Option(help="Default: the plan's name with .html")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted step as a Chrome trace, for Perfetto")
    ] = None,
) -> None:
    """Write a plan's page: timeline, graph, methods, memory, and what bounds it."""
    from dovetail import pipeline

    path = out or plan.with_suffix(".html")
    _check_writable(path, trace)
    opened, step = pipeline.open_plan(plan, model)
    pipeline.report(opened, step, path)
    _say(f"wrote {path}")
    if trace is not None:
        pipeline.write_trace(opened, step, trace)
        _say(f"wrote {trace}")


def _resolve(model: str, train: str) -> "Captured | Graph":
    from dovetail.pipeline import resolve_model

    with _progress() as progress:
        progress(f"capturing {model}", 0.0, None)
        return resolve_model(model, train)


def _graph(step: "Captured | Graph") -> "Graph":
    from dovetail.graph import Graph

    return step if isinstance(step, Graph) else step.graph


def _executable(plan: "Plan", step: "Captured | Graph") -> "Captured":
    from dovetail.frontends import Captured

    if not isinstance(step, Captured):
        raise UsageError("MODEL", "a saved graph cannot run; name the network it came from")
    if not plan.machine.local:
        raise UsageError(
            "plan", f"it is for {plan.machine.name}, which is not this machine; plan for here/2"
        )
    return step


def _split(option: str, text: str) -> tuple[str, str]:
    left, equals, right = text.rpartition("=")
    if not (left and equals and right):
        raise UsageError(option, f"{text!r} has no NAME=VALUE")
    return left, right


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError("--cap", str(error)) from None


def _check_writable(*paths: Path | None) -> None:
    """Fail before the long work, not after it."""
    from dovetail.runtime.atomic import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)


def _plan_object(
    model: str, plan: "Plan", step: "Captured | Graph", out: Path | None
) -> dict[str, Any]:
    """What `plan --json` prints. Its keys are stable: `_infeasible` has them too."""
    names = plan.machine.device_names
    return {
        "model": model,
        "ops": len(_graph(step)),
        "groups": plan.groups,
        "machine": plan.machine.name,
        "devices": list(names),
        "objective": plan.objective,
        "value": plan.value,
        "lower_bound": plan.lower_bound,
        "bound_proof": plan.bound_proof,
        "gap": plan.gap if plan.lower_bound > 0 else None,
        "placer": plan.placer,
        "feasible": True,
        "interrupted": plan.interrupted,
        "planning_seconds": plan.planning_seconds,
        "peak_memory_bytes": dict(zip(names, plan.peak_memory_bytes, strict=True)),
        "baselines": plan.baselines,
        "plan": None if out is None else str(out),
    }


def _infeasible(
    model: str,
    step: "Captured | Graph",
    machine: str,
    search: dict[str, Any],
    error: InfeasibleError,
) -> dict[str, Any]:
    """The keys of `_plan_object`, null where unknown, and the error's fields."""
    unknown = (
        "groups", "devices", "value", "lower_bound", "bound_proof", "gap", "interrupted",
        "planning_seconds", "peak_memory_bytes", "baselines", "plan",
    )  # fmt: skip
    return {
        **dict.fromkeys(unknown),
        "model": model,
        "ops": len(_graph(step)),
        "machine": machine,
        "objective": search["objective"],
        "placer": search["placer"],
        "feasible": False,
        "error": str(error),
        **vars(error),
    }


@contextmanager
def _progress() -> "Iterator[Report]":
    """A `pipeline.Progress` drawn on standard error; silent where that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)

        def show(doing: str, fraction: float, best: float | None) -> None:
            text = doing if best is None else f"{doing}: {format_seconds(best)}"
            shown = printable(text).replace("[", r"\[")
            bar.update(task, description=shown, completed=fraction)

        yield show


def _print(what: RenderableType) -> None:
    Console().print(what)


def _print_limits(plan: "Plan", graph: "Graph", timeline: "Timeline") -> None:
    from dovetail.reports import find_limits, limits_table

    _print("")
    _print(limits_table(find_limits(timeline, graph), timeline, plan))


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def _say(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")


if __name__ == "__main__":
    main()
