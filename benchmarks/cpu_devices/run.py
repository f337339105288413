"""Measured `auto` on two CPU devices against one process with one or two threads, interleaved.

python benchmarks/cpu_devices/run.py [--budget 20s] [--rounds 5] [--only rnnlm]
"""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from calm import Calm
from harness import in_turns, line, parser_of, table

import dovetail as dt
from dovetail.pipeline import resolve_machine, resolve_model

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

    def seconds_of(placed) -> np.ndarray:
        return calm.measure(lambda: placed.measure(steps=STEPS + 1)).step_seconds

    with ExitStack() as stack:
        timers = {
            number: partial(seconds_of, stack.enter_context(dt.run(plan, step)))
            for number, plan in enumerate(plans)
        }
        found = in_turns(timers, arguments.rounds)
    one, two, auto = (1e3 * np.concatenate(of_plan) for of_plan in found.values())
    return Result(one, two, auto, plans[2].placer, 1e3 * plans[2].value)


def main() -> None:
    arguments = parser_of(__doc__, budget="20s", rounds=5, only="").parse_args()
    calm = Calm()
    head = (
        "network", "1 thread ms", "2 threads ms", "auto ms (predicted)", "by",
        "better over auto: median", "minimum",
    )  # fmt: skip
    print(table(head, []))
    for model, train in CASES:
        if arguments.only not in model:
            continue
        result = measure(model, train, arguments, calm)
        cells = (
            f"{model.removeprefix('zoo:')} {train or 'inference'}",
            *(f"{np.median(ms):.2f}" for ms in (result.one, result.two)),
            f"{np.median(result.auto):.2f} ({result.predicted:.2f})",
            result.placer,
            *(f"{result.ratio(of):.2f}" for of in (np.median, np.min)),
        )
        print(line(*cells), flush=True)
    print(calm.said)


if __name__ == "__main__":
    main()
