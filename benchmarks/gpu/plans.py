"""Plans on a GPU, and on the CPU and a GPU, beside what their users run there.

    python benchmarks/gpu/plans.py --out plans.json [--only gpt2] [--rounds 15]

`eager`, `torch.compile` in its default mode and with "reduce-overhead" run the plain module on the
GPU. All ways take turns, round by round, and a figure is the median of its rounds. The ratio is
that of the fastest of the user's ways to the plan, round by round. The file is written after each
case.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import error_line, in_turns, keep_json, parser_of, ratios_of

from dovetail.executors import MODES, run
from dovetail.frontends.interpret import example_values, held_values
from dovetail.frontends.plain import PlainModule
from dovetail.pipeline import plan as make_plan
from dovetail.pipeline import planned, resolve_model

NETWORKS = {
    "rnnlm": "zoo:rnnlm?layers=2&hidden=512&steps=40&batch=64&vocabulary=10000",
    "inception_v3": "zoo:inception_v3?batch=32",
    "gpt2": "zoo:gpt2?layers=12&batch=4&context=512",
    "nmt": "zoo:nmt?hidden=512&steps=30&batch=64&vocabulary=10000",
    "randwire": "zoo:randwire?batch=1",
    "moe": "zoo:moe?layers=4&hidden=512&heads=8&key_heads=4&inner=1024&experts=8&context=256",
}
MACHINES = ("here/gpu", "here")


def plain_ways(step: Any) -> dict[str, Callable[[], float]]:
    """Name -> a function that runs one step of the module on the GPU and returns its seconds."""
    ways: dict[str, Callable[[], float]] = {}
    inputs, targets = example_values(step)
    given = (*inputs, *targets)
    for name, mode in MODES.items():
        module = step.make() if step.make is not None else step.module
        module.load_state_dict(held_values(step), strict=False)
        plain = PlainModule(
            module.cuda(),
            step.signature,
            step.plain,
            mode=mode,
        )

        def seconds(plain: Any = plain) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            # A plan copies its inputs to the GPU in each step, too.
            plain.step(tuple(tensor.cuda() for tensor in given))
            torch.cuda.synchronize()
            return time.perf_counter() - began

        ways[name] = seconds
    return ways


def measure(name: str, train: str, rounds: int) -> dict[str, Any]:
    step = resolve_model(NETWORKS[name], train)
    row: dict[str, Any] = {"network": NETWORKS[name], "train": train}
    timers: dict[str, Callable[[], float]] = {}
    for way, timer in plain_ways(step).items():
        try:
            for _ in range(3):
                timer()
            timers[way] = timer
        except Exception as error:
            row[f"{way} raised"] = error_line(error)
    placed = {}
    for machine in MACHINES:
        try:
            plan = make_plan(step, machine, budget="5s")
            placed[machine] = run(plan, planned(plan, step))
            placed[machine].feed()
            placed[machine].step_seconds(6)
            timers[machine] = lambda p=placed[machine]: float(p.step_seconds(2)[0])  # type: ignore[misc]
            row[f"{machine} predicted"] = plan.value
        except Exception as error:
            row[f"{machine} raised"] = error_line(error)

    def second(timer: Callable[[], float]) -> float:
        timer()  # the one before has left other things in the caches
        return timer()

    seconds = in_turns({way: partial(second, timer) for way, timer in timers.items()}, rounds)
    for network in placed.values():
        network.close()
    row["seconds"] = {way: statistics.median(of) for way, of in seconds.items()}
    own = [way for way in MODES if way in seconds]
    best = min(own, key=lambda way: statistics.median(seconds[way]), default=None)
    for machine in placed:
        if best is not None:
            row[f"{machine} ratio"] = statistics.median(ratios_of(seconds[best], seconds[machine]))
    return row


def main() -> None:
    arguments = parser_of(__doc__, out=..., only="", rounds=15).parse_args()
    rows: list[dict[str, Any]] = []
    for name in NETWORKS:
        for train in ("", "adam"):
            if arguments.only in name:
                try:
                    rows.append(measure(name, train, arguments.rounds))
                except Exception as error:  # the next case is worth its own try
                    raised = error_line(error)
                    rows.append({"network": NETWORKS[name], "train": train, "raised": raised})
                print(rows[-1], flush=True)
                keep_json(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
