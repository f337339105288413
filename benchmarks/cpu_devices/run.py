"""Measured `auto` on two CPU devices against one process with one or two threads, interleaved.

python benchmarks/cpu_devices/run.py [--budget 20s] [--rounds 5] [--only rnnlm]
"""

import argparse
from dataclasses import dataclass

import numpy as np
from rich.console import Console

import dovetail as dt
from dovetail.executors import measure_interleaved
from dovetail.pipeline import resolve_model

RNNLM = "zoo:rnnlm?layers=2&steps=40&batch=16&vocabulary=1000&hidden="
CASES = (
    (f"{RNNLM}128", ""),
    (f"{RNNLM}256", ""),
    (f"{RNNLM}128", "adam"),
    (f"{RNNLM}256", "adam"),
    ("zoo:inception_v3?batch=1&size=149", ""),
    ("zoo:inception_v3?batch=2&size=149", "rmsprop"),
)
STEPS = 40


@dataclass(frozen=True)
class Result:
    """Milliseconds [rounds x steps] of one thread, two threads and `auto`; what auto chose."""

    one: np.ndarray
    two: np.ndarray
    auto: np.ndarray
    placer: str
    predicted: float

    def ratio(self, statistic) -> float:
        """The better of one and two threads over auto."""
        return min(statistic(self.one), statistic(self.two)) / statistic(self.auto)


def measure(model: str, train: str, budget: str, rounds: int) -> Result:
    step = resolve_model(model, train)
    plans = [
        dt.plan(step, "here/2", placer="single"),
        dt.plan(step, "here", placer="single"),
        dt.plan(step, "here/2", budget=budget),
    ]
    placed = []
    try:
        placed = [dt.run(plan, step) for plan in plans]
        found = measure_interleaved(placed, steps=STEPS + 1, repeats=rounds)
    finally:
        for one in placed:
            one.close()
    one, two, auto = (1e3 * np.concatenate([m.step_seconds for m in ms]) for ms in found)
    return Result(one, two, auto, plans[2].placer, 1e3 * plans[2].value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    console = Console(width=160)
    console.print("| network | 1 thread ms | 2 threads ms | auto ms (predicted) | by | ", end="")
    console.print("better over auto: median | minimum |")
    console.print("|---|---|---|---|---|---|---|")
    for model, train in CASES:
        if arguments.only not in model:
            continue
        result = measure(model, train, arguments.budget, arguments.rounds)
        cells = [f"{np.median(ms):.2f}" for ms in (result.one, result.two)]
        console.print(
            f"| {model.removeprefix('zoo:')} {train or 'inference'} | {' | '.join(cells)} "
            f"| {np.median(result.auto):.2f} ({result.predicted:.2f}) | {result.placer} "
            f"| {result.ratio(np.median):.2f} | {result.ratio(np.min):.2f} |",
            markup=False,
        )


if __name__ == "__main__":
    main()
