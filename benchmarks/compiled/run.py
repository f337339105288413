"""Plans as their users call them, beside what these would run without them, in the same rounds.

    python benchmarks/compiled/run.py [--machine here] [--only "gpt;lstm"] [--step inference]
                                      [--rounds 32] [--budget 5s] [--compile-budget 120s]
                                      [--readme FILE]

Each case is a process of its own. It plans as `dt.plan` does, and then calls, in turns: `step` of
the plan's network, and the module itself, eager and by `torch.compile`, each on one thread and on
all, with loss and torch's optimizer, all in that one process and with work of its own between two
calls. What comes last in a row: seconds of the plan's step over those that the plan promised (and
of the user's own ways over those of the plan's comparison), and seconds of the fastest of the
user's own ways over those of the plan's step, round by round. What was measured is kept in `rows/`,
and a case that is there is not measured again; `--again` does so. `--readme` puts the rows of this
run into the page's table, in which those of other cases stay.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from cases import NAMES, step_of
from torch import Tensor

import dovetail as dt
from dovetail.executors.loaded import seconds_of_call
from dovetail.frontends import Captured
from dovetail.frontends.interpret import example_values
from dovetail.frontends.plain import PlainModule

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import fill, in_child, keep_json, parser_of, ratio_and_spread, rows_of, table

ROWS = Path(__file__).with_name("rows")
ROUND_SECONDS, LEAST_CALLS, MOST_CALLS = 0.03, 4, 12
"""In a round a way is called for about `ROUND_SECONDS`, from `LEAST_CALLS` to `MOST_CALLS` times.
The later half of these calls counts: the first ones find in the caches what other ways have
left."""
KINDS = {"inference": "inference", "training": "Adam"}
OWN_WAYS = ("eager", "torch.compile")
HEAD = (
    "network", "step", "plan", "promised", "measured", "over promised", "others over theirs",
    "fastest other", "ratio", "spread", "seconds to plan",
)  # fmt: skip


def measured(step: Captured, arguments: argparse.Namespace) -> dict[str, object]:
    """The row of a case, and way -> [rounds] seconds of a step."""
    began = time.perf_counter()
    plan = dt.plan(
        step,
        arguments.machine,
        budget=arguments.budget,
        compile_budget=arguments.compile_budget,
    )
    planning_seconds = time.perf_counter() - began
    inputs, targets = example_values(step, 0)
    args, kwargs = step.signature.call(inputs)
    if step.graph.training:
        args = (*args, *step.signature.loss_arguments(targets))
    with dt.run(plan, step) as placed:
        ways: dict[str, Callable[[], object]] = {"plan": lambda: placed.step(*args, **kwargs)}
        for way, mode in zip(OWN_WAYS, ("", "default"), strict=True):
            for threads in dict.fromkeys((torch.get_num_threads(), 1)):
                ways[f"{way}, {threads} threads"] = own_way(
                    step, (*inputs, *targets), mode, threads
                )
        # The first steps compile.
        for call in ways.values():
            for _ in range(3):
                call()
        counts = {
            name: min(MOST_CALLS, max(LEAST_CALLS, round(ROUND_SECONDS / seconds_of_call(call))))
            for name, call in ways.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        order = np.random.default_rng(0)
        for _ in range(arguments.rounds):
            for name in order.permutation(list(ways)).tolist():
                calls = [seconds_of_call(ways[name]) for _ in range(counts[name])]
                seconds[name].append(statistics.median(calls[len(calls) // 2 :]))
    return {
        "way": plan.way,
        "machine": plan.machine.name,
        "promised": plan.measured.get(plan.way, plan.value),
        "measured": dict(plan.measured),
        "planning_seconds": planning_seconds,
        "notes": list(plan.notes),
        "seconds": seconds,
    }


def own_way(
    step: Captured, tensors: Sequence[Tensor], mode: str, threads: int
) -> Callable[[], object]:
    """The step as its user writes it: the module, its loss and torch's optimizer."""
    module = step.make() if step.make is not None else copy.deepcopy(step.module)
    plain = PlainModule(module, step.signature, step.plain, mode=mode)
    usual = torch.get_num_threads()

    def call() -> object:
        torch.set_num_threads(threads)
        with torch.inference_mode(not step.graph.training):
            result = plain.step(tensors, ordinary=False)
        torch.set_num_threads(usual)
        return result

    return call


def row_of(name: str, kind: str, found: dict) -> list[str]:
    seconds = found["seconds"]
    medians = {way: statistics.median(of) for way, of in seconds.items()}
    own = medians.pop("plan")
    other = min(medians, key=lambda way: medians[way])
    return [
        name,
        KINDS[kind],
        f"{found['way']} on {found['machine']}",
        f"{found['promised'] * 1e3:.2f} ms",
        f"{own * 1e3:.2f} ms",
        f"{own / found['promised']:.2f}",
        drift(medians, found.get("measured", {})),
        f"{other}, {medians[other] * 1e3:.2f} ms",
        *ratio_and_spread(seconds[other], seconds["plan"]),
        f"{found['planning_seconds']:.0f}",
    ]


def drift(medians: dict[str, float], before: dict[str, float]) -> str:
    """How much longer the user's own ways take by now than in the plan's comparison: what a shared
    machine does to all of them in the minute between."""
    now = {way: min(s for name, s in medians.items() if name.startswith(way)) for way in OWN_WAYS}
    ratios = [now[way] / before[way] for way in OWN_WAYS if way in before]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def main() -> None:
    parser = parser_of(
        __doc__, machine="here", only="", rounds=32, budget="5s", again=False, readme=None
    )
    parser.add_argument("--step", choices=list(KINDS))
    parser.add_argument("--compile-budget", default="120s")
    parser.add_argument("--case", help="measure this one here, and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.case:
        step = step_of(arguments.case, arguments.step == "training")
        print(json.dumps(measured(step, arguments)))
        return
    ROWS.mkdir(exist_ok=True)
    rows = []
    only = arguments.only.lower().split(";")
    for name in (name for name in NAMES if any(text in name.lower() for text in only)):
        for kind in (arguments.step,) if arguments.step else KINDS:
            words = f"{name} {kind} {arguments.machine}".replace("/", " of ").split()
            path = ROWS / ("_".join(words) + ".json")
            if arguments.again or not path.exists():
                given = ("--machine", arguments.machine, "--rounds", str(arguments.rounds))
                given += ("--budget", arguments.budget)
                given += ("--compile-budget", arguments.compile_budget)
                try:
                    row = in_child(__file__, "--case", name, "--step", kind, *given)
                except subprocess.CalledProcessError:
                    print(f"{name}, {kind}: failed", flush=True)
                    continue
                keep_json(path, row)
            rows.append(row_of(name, kind, json.loads(path.read_text())))
            print(" | ".join(rows[-1]), flush=True)
    if arguments.readme:
        place = f"compiled on {arguments.machine}"
        kept = {tuple(row[:2]): row for row in (*rows_of(arguments.readme, place), *rows)}
        of_all = [kept[case] for case in product(NAMES, KINDS.values()) if case in kept]
        fill(arguments.readme, place, table(HEAD, of_all))


if __name__ == "__main__":
    main()
