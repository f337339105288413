"""Plan and run real training steps of two networks on this machine, and write a page for each."""

import os
from pathlib import Path

from rich.console import Console

import dovetail as dt
from dovetail.pipeline import resolve_model, timeline_of
from dovetail.reports import plan_table, run_table

NETWORKS = {
    "rnnlm": ("zoo:rnnlm?layers=2&hidden=128&steps=3&batch=16&vocabulary=1000", "adam", "60s"),
    "inception_v3": ("zoo:inception_v3?batch=2&size=107&width=0.5", "rmsprop", "30s"),
}
"""Name -> (MODEL, optimizer, budget). What is not compiled by then is said."""
OUT = Path("demo")


def main() -> None:
    console = Console(width=110)
    devices = min(2, len(os.sched_getaffinity(0)))
    OUT.mkdir(exist_ok=True)
    for name, (model, train, budget) in NETWORKS.items():
        console.rule(f"{model}, one training step with {train}")
        step = resolve_model(model, train)
        plan = dt.plan(step, f"here/{devices}", budget=budget)
        plan.save(OUT / f"{name}.json")
        console.print(plan_table(plan, step.graph))
        with dt.run(plan, step) as placed:
            measurement = placed.measure(steps=10)
        console.print(
            run_table(timeline_of(plan, step.graph), measurement.step_seconds, measurement.timeline)
        )
        dt.report(plan, step, OUT / f"{name}.html", measurement=measurement)
        console.print(f"wrote {OUT / name}.json and {OUT / name}.html")


if __name__ == "__main__":
    main()
