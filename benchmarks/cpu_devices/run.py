"""Measured `auto` on two CPU devices against one process with one or two threads, interleaved.

python benchmarks/cpu_devices/run.py [--budget 20s] [--rounds 5] [--only rnnlm]
"""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

import dovetail as dt
from dovetail.pipeline import resolve_machine, resolve_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from calm import Calm

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


def measure(model: str, train: str, arguments: argparse.Namespace, calm: Calm) -> Result:
    step = resolve_model(model, train)
    plans = [
        dt.plan(step, "here/2", placer="single"),
        dt.plan(step, resolve_machine("here"), placer="single"),  # a thread a core
        dt.plan(step, "here/2", budget=arguments.budget),
    ]
    found = [[], [], []]
    with ExitStack() as stack:
        placed = [stack.enter_context(dt.run(plan, step)) for plan in plans]
        for _ in range(arguments.rounds):
            for of_plan, one in zip(found, placed, strict=True):
                measurement = calm.measure(lambda one=one: one.measure(steps=STEPS + 1))
                of_plan.append(measurement.step_seconds)
    one, two, auto = (1e3 * np.concatenate(of_plan) for of_plan in found)
    return Result(one, two, auto, plans[2].placer, 1e3 * plans[2].value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    console = Console(width=160)
    calm = Calm()
    console.print("| network | 1 thread ms | 2 threads ms | auto ms (predicted) | by | ", end="")
    console.print("better over auto: median | minimum |")
    console.print("|---|---|---|---|---|---|---|")
    for model, train in CASES:
        if arguments.only not in model:
            continue
        result = measure(model, train, arguments, calm)
        cells = [f"{np.median(ms):.2f}" for ms in (result.one, result.two)]
        console.print(
            f"| {model.removeprefix('zoo:')} {train or 'inference'} | {' | '.join(cells)} "
            f"| {np.median(result.auto):.2f} ({result.predicted:.2f}) | {result.placer} "
            f"| {result.ratio(np.median):.2f} | {result.ratio(np.min):.2f} |",
            markup=False,
        )
    console.print(f"{calm.taken} measurements, {calm.disturbed} of them on disturbed cores")


if __name__ == "__main__":
    main()
