"""Make a network's calls fast by one line; plan and run real training steps of another one on this
machine, and write a page of it."""

import copy
import os
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console

import dovetail as dt
from dovetail.networks.squeezenet import squeezenet_1_1
from dovetail.pipeline import resolve_model, timeline_of
from dovetail.reports import plan_table, run_table
from dovetail.units import format_seconds

NAME, MODEL, OPTIMIZER = "inception_v3", "zoo:inception_v3?batch=2&size=107&width=0.5", "rmsprop"
BUDGETS = "30s", "12s"
"""Of the network's calls, and of the other's steps. What is not compiled by then is said."""
OUT = Path("demo")


def seconds_of(model: torch.nn.Module, images: torch.Tensor) -> float:
    began = time.perf_counter()
    model(images)
    return time.perf_counter() - began


def show_one_line(console: Console) -> None:
    """One line in a script that exists: the same module before and after it, in turns."""
    console.rule("model = dt.optimize(model)")
    model = squeezenet_1_1(classes=1000, width=1.0, dropout=0.5).eval()
    plain, images = copy.deepcopy(model), torch.randn(1, 3, 96, 96)
    model = dt.optimize(model, budget=BUDGETS[0])
    with torch.no_grad():
        model(images)  # the first call decides what runs
        turns = [(seconds_of(plain, images), seconds_of(model, images)) for _ in range(60)]
    before, after = (statistics.median(turn[i] for turn in turns) for i in range(2))
    ratio = f"{before / after:.2f} x as fast"
    console.print(
        f"SqueezeNet 1.1, a call: {format_seconds(before)} plain, {format_seconds(after)}: {ratio}"
    )


def main() -> None:
    console = Console(width=110)
    devices = min(2, len(os.sched_getaffinity(0)))
    show_one_line(console)
    OUT.mkdir(exist_ok=True)
    console.rule(f"{MODEL}, one training step with {OPTIMIZER}")
    step = resolve_model(MODEL, OPTIMIZER)
    plan = dt.plan(step, f"here/{devices}", budget=BUDGETS[1])
    plan.save(OUT / f"{NAME}.json")
    console.print(plan_table(plan, step.graph))
    with dt.run(plan, step) as placed:
        measurement = placed.measure(steps=10)
    console.print(
        run_table(timeline_of(plan, step.graph), measurement.step_seconds, measurement.timeline)
    )
    dt.report(plan, step, OUT / f"{NAME}.html", measurement=measurement)
    console.print(f"wrote {OUT / NAME}.json and {OUT / NAME}.html")


if __name__ == "__main__":
    main()
