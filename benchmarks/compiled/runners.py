"""The C++ runner beside the Python one: the same plans, op by op, in the same rounds.

    python benchmarks/compiled/runners.py [--rounds 25] [--readme FILE]

Each network has one plan for one core (`here/1`) and one for two (`here/2`, by `auto`). Two sets of
processes run it in turns, one whose calls are made in C++ and one whose calls are made from Python
(`DOVETAIL_RUNNER=python`). The ratio is the C++ runner's seconds over the Python one's, round by
round, and its spread the interquartile range over the median.
"""

import os
import statistics
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured
from dovetail.pipeline import planned, resolve_model
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import search_plan
from dovetail.pipeline.sources import silent
from dovetail.runtime.native import SWITCH, build_native
from dovetail.runtime.timers import Repeats, in_turns

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import fill, parser_of, ratio_and_spread, table

NETWORKS = {
    "RNNLM 2 x 128, 20 steps": ("zoo:rnnlm?hidden=128&steps=20&batch=16&vocabulary=1000", ""),
    "RNNLM 2 x 128, 20 steps, Adam": (
        "zoo:rnnlm?hidden=128&steps=20&batch=16&vocabulary=1000",
        "adam",
    ),
    "mixture of experts": (
        "zoo:moe?layers=2&hidden=128&heads=4&key_heads=2&inner=256&experts=4&context=64"
        "&vocabulary=1000",
        "",
    ),
    "RandWire": ("zoo:randwire?batch=1&size=128&channels=32", ""),
    "Inception-V3": ("zoo:inception_v3?batch=2&size=149", ""),
    "GPT-2, 4 layers": ("zoo:gpt2?layers=4&batch=1&context=128&vocabulary=5000", ""),
}
HEAD = ("network", "plan for", "calls from Python", "in C++", "ratio", "spread")


def main() -> None:
    arguments = parser_of(__doc__, rounds=25, readme=None).parse_args()
    if reason := build_native():
        sys.exit(reason)
    rows = []
    for name, (model, train) in NETWORKS.items():
        step = resolve_model(model, train)
        assert isinstance(step, Captured)
        for machine in ("here/1", "here/2"):
            rows.append((name, machine, *compared(step, machine, arguments.rounds)))
            print(" | ".join(rows[-1]), flush=True)
    if arguments.readme:
        fill(arguments.readme, "runners", table(HEAD, rows))


def compared(step: Captured, machine: str, rounds: int) -> tuple[str, ...]:
    """(seconds from Python, seconds in C++, ratio, spread) of one plan of the step."""
    placer = "single" if machine == "here/1" else "auto"
    plan = search_plan(PlanRequest(step, machine, placer=placer, budget="500e"), silent)
    with ExitStack() as stack:
        timers = {}
        for kind in ("python", ""):
            before = os.environ.get(SWITCH)
            if kind:
                os.environ[SWITCH] = kind
            try:
                workers = stack.enter_context(Workers(plan.machine))
                placed = stack.enter_context(execute(plan, planned(plan, step), workers=workers))
            finally:
                if before is None:
                    os.environ.pop(SWITCH, None)
                else:
                    os.environ[SWITCH] = before
            placed.feed()
            timers[kind or "C++"] = partial(_seconds, placed)
        seconds = in_turns(timers, Repeats(rounds))
    medians = [f"{statistics.median(seconds[kind]) * 1e3:.2f} ms" for kind in ("python", "C++")]
    return (*medians, *ratio_and_spread(seconds["C++"], seconds["python"]))


def _seconds(placed: Any) -> float:
    return float(placed.step_seconds(2)[0])


if __name__ == "__main__":
    main()
