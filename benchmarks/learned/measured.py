"""Measured reward: `learn one --measured` on here/2 beside `auto`, both run side by side.

    python benchmarks/learned/measured.py [--trials 256] [--simulated-first 6000] [--method gdp]
        [--budget 30s] [--runs 15] [--only rnnlm] [--csv FILE] [--curves FOLDER]

Of each network: `auto` plans for here/2 with the budget; a policy learns, first on simulated trials
where asked to, then on measured ones by RL17's protocol. Then the learned plan, `auto`'s, the best
of the cheap methods and `here` (all cores as one device) run in turns: 10 steps, the first dropped,
the mean counts; the median over the runs and its quartiles are printed. A run that other programs
disturbed is made again, for a while (`calm.py`).
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

import dovetail as dt
from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.pipeline import resolve_machine, resolve_model
from dovetail.placers.learned.log import save_points
from dovetail.plans import Plan

sys.path.insert(0, str(Path(__file__).parents[1]))
from calm import Calm
from harness import in_turns, keep_csv, parser_of, show, table

CASES = (
    ("zoo:rnnlm?layers=2&steps=20&batch=16&vocabulary=1000&hidden=256", "adam"),
    ("zoo:inception_v3?batch=2&size=149", "rmsprop"),
)
STEPS = 10
CHEAP = ("single", "expert", "balanced", "etf")


def side_by_side(
    step: dt.Captured, plans: dict[str, Plan], runs: int, calm: Calm
) -> dict[str, list[float]]:
    """Plan -> mean step seconds of each run; the plans take turns, each first in its turn."""
    with ExitStack() as stack:
        workers: dict[str, Workers] = {}
        for plan in plans.values():
            if plan.machine.name not in workers:
                workers[plan.machine.name] = stack.enter_context(Workers(plan.machine))
        placed = {
            name: stack.enter_context(execute(plan, step, workers=workers[plan.machine.name]))
            for name, plan in plans.items()
        }

        def mean(name: str) -> float:
            return calm.measure(lambda: float(placed[name].step_seconds(STEPS).mean()), float)

        return in_turns({name: partial(mean, name) for name in plans}, runs)


def case(model: str, train: str, arguments: argparse.Namespace, calm: Calm) -> list[dict]:
    """The rows of one network."""
    step = resolve_model(model, train)
    machine = resolve_machine("here/2")
    auto = dt.plan(step, machine, budget=arguments.budget)
    began = time.perf_counter()
    lesson = dt.learn(
        step, machine, method=arguments.method, policy=arguments.policy, measured=True,
        trials=arguments.trials, simulated_first=arguments.simulated_first, seed=arguments.seed,
        settings={key: json.loads(value) for key, value in arguments.setting},
    )  # fmt: skip
    learning_seconds = time.perf_counter() - began
    if arguments.curves is not None:
        arguments.curves.mkdir(parents=True, exist_ok=True)
        name = model.partition("?")[0].removeprefix("zoo:")
        save_points(lesson.learned.points, arguments.curves / f"measured-{name}.csv")
    known = {name: value for name, value in auto.baselines.items() if name in CHEAP and value}
    cheap = min(known, key=known.get)
    plans = {
        "learned": lesson.plan,
        "auto": auto,
        cheap: dt.plan(step, machine, placer=cheap),
        "here": dt.plan(step, "here", placer="single"),
    }
    seconds = side_by_side(step, plans, arguments.runs, calm)
    base = statistics.median(seconds["auto"])
    rows = []
    for name, plan in plans.items():
        median = statistics.median(seconds[name])
        low, high = np.percentile(seconds[name], (25, 75))
        rows.append({
            "model": model, "train": train, "plan": name, "predicted_seconds": plan.value,
            "median_seconds": median, "low_seconds": low, "high_seconds": high,
            "against_auto": median / base, "runs": len(seconds[name]),
            "trials": lesson.learned.trials if name == "learned" else "",
            "simulated_trials": arguments.simulated_first if name == "learned" else "",
            "failed_trials": len(lesson.failures) if name == "learned" else "",
            "learning_seconds": learning_seconds if name == "learned" else "",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = parser_of(
        __doc__, trials=256, budget="30s", runs=15, seed=0, only="", csv=None, readme=None
    )
    parser.add_argument("--simulated-first", type=int, default=6000)
    parser.add_argument("--method", default="gdp")
    parser.add_argument("--policy", type=Path, help="a file to start from")
    parser.add_argument("--setting", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    parser.add_argument("--curves", type=Path, help="folder of the learning curves")
    arguments = parser.parse_args()
    calm, rows = Calm(), []
    for model, train in CASES:
        if arguments.only in model:
            rows += case(model, train, arguments, calm)
            print(lines_of(rows), flush=True)
    keep_csv(arguments.csv, rows)
    said = f"{calm.disturbed} of {calm.taken} runs never had calm cores."
    show(f"{lines_of(rows)}\n\n{said}", arguments.readme, "measured")


def lines_of(rows: list[dict]) -> str:
    head = ("network", "plan", "predicted", "median step", "quartiles", "against auto", "trials")
    return table(head, [
        (
            row["model"].partition("?")[0], row["plan"], f"{1e3 * row['predicted_seconds']:.2f} ms",
            f"{1e3 * row['median_seconds']:.2f} ms",
            f"{1e3 * row['low_seconds']:.2f} to {1e3 * row['high_seconds']:.2f}",
            f"{row['against_auto']:.3f}", str(row["trials"]),
        )
        for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    main()
