"""Predicted against measured step seconds of 20 plans a network on here/2, interleaved.

    python benchmarks/fidelity/run.py [--repeats 3] [--steps 10] [--patience 8]
                                      [--machine here/2] [--only rnnlm] [--csv FILE]

8 random placements, 6 blended (each op from a planned placement with probability .5, else random)
and 6 planned ones. Ops that must share a device are placed together; nothing else is. Each is
predicted from the costs that plans use, of ops within a step, and from those of ops by themselves.
Measured is the step as the devices run it. Beside it stand how far repeats of one plan are apart,
and the error to whole calls, which user code with threads of its own makes.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from calm import Calm
from harness import keep_csv, line, parser_of, table
from rich.progress import track
from scipy.stats import kendalltau

from dovetail.costs import CostCache, measured_costs
from dovetail.executors import PlacedNetwork, Workers
from dovetail.executors import run as execute
from dovetail.pipeline import costs_of, resolve_machine, resolve_model
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import search_plan
from dovetail.pipeline.sources import silent
from dovetail.simulator import Simulator
from dovetail.transforms import duplicate

CASES = (
    ("zoo:rnnlm?layers=2&steps=40&batch=16&vocabulary=1000&hidden=128", ""),
    ("zoo:rnnlm?layers=2&steps=20&batch=16&vocabulary=1000&hidden=256", "adam"),
    ("zoo:inception_v3?batch=1&size=149", ""),
    ("zoo:inception_v3?batch=2&size=149", "rmsprop"),
)
KINDS = ("random", "blended", "planned")
IN_STEP, ALONE = "within a step", "by themselves"


def placements(
    graph, devices: list[int], planned: list[np.ndarray], rng
) -> list[tuple[str, np.ndarray]]:
    """(kind, [ops]) for 8 random, 6 blended and 6 planned placements."""
    pinned = must_share(graph)

    def random() -> np.ndarray:
        return rng.choice(devices, pinned.max() + 1).astype(np.int32)[pinned]

    def blend(one: np.ndarray) -> np.ndarray:
        keep = rng.random(pinned.max() + 1)[pinned] < 0.5
        return np.where(keep, one, random()).astype(np.int32)

    return (
        [("random", random()) for _ in range(8)]
        + [("blended", blend(one)) for one in planned]
        + [("planned", one) for one in planned]
    )


def must_share(graph) -> np.ndarray:
    """[ops] the set of ops, by colocation id, that an op must share a device with."""
    own = np.arange(len(graph)) + graph.colocation.max() + 1
    ids = np.where(graph.colocation >= 0, graph.colocation, own)
    return np.unique(ids, return_inverse=True)[1]


def measure_case(model: str, train: str, arguments: argparse.Namespace, calm: Calm) -> list[dict]:
    step = resolve_model(model, train)
    graph = step.graph
    machine = resolve_machine(arguments.machine)
    devices = [d for d, device in enumerate(machine.devices) if device.kind != "host"]
    base = search_plan(PlanRequest(step, machine, placer="single"), silent)
    methods = (("expert", 0), ("balanced", 0), ("etf", 0), *(("local_search", s) for s in range(3)))
    planned = []
    for placer, s in methods:
        request = PlanRequest(step, machine, placer=placer, seed=s, budget="1500e")
        plan = search_plan(request, silent)
        # Ops that a plan runs on both devices count where the search has put them.
        originals = duplicate(graph, plan.copies).copy_of < 0
        planned.append(plan.placement[originals])
    chosen = placements(graph, devices, planned, np.random.default_rng(arguments.seed))
    simulator = Simulator(graph, machine, costs_of(step, machine))
    by_itself = Simulator(graph, machine, measured_costs(graph, step.program, machine, CostCache()))
    rows = []
    with Workers(machine) as workers:
        running = []
        for kind, placement in chosen:
            timeline = simulator.timeline(placement)
            plan = replace(
                base,
                placement=placement,
                orders=tuple(timeline.order_of(d) for d in range(len(machine.devices))),
                value=timeline.step_seconds,
                peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
            )
            running.append(execute(plan, step, workers=workers))
            alone = by_itself.timeline(placement, orders=plan.orders).step_seconds
            rows.append({
                "model": model, "train": train, "kind": kind, IN_STEP: plan.value, ALONE: alone
            })  # fmt: skip
        for repeat in range(arguments.repeats):
            for row, placed in zip(track(rows, f"repeat {repeat}"), running, strict=True):
                devices, call = calm.measure(
                    lambda one=placed: seconds_of(one, arguments.steps), lambda found: found[0]
                )
                row[f"measured {repeat}"], row[f"call {repeat}"] = devices, call
        for placed in running:
            placed.close()
    return rows


def seconds_of(placed: PlacedNetwork, steps: int) -> tuple[float, float]:
    """Median seconds of the step as its devices run it, and of the call as a user makes it."""
    call = placed.measure(steps=steps).median_seconds
    return float(np.median([placed.timeline().step_seconds for _ in range(steps)])), call


def summarise(rows: list[dict], costs: str, repeats: int) -> dict[str, float]:
    predicted = np.array([row[costs] for row in rows])
    measured = np.array([[row[f"measured {r}"] for r in range(repeats)] for row in rows])
    middle = np.median(measured, axis=1)
    calls = np.median([[row[f"call {r}"] for r in range(repeats)] for row in rows], axis=1)
    between = [
        kendalltau(measured[:, a], measured[:, b]).statistic
        for a in range(repeats)
        for b in range(a)
    ]
    return {
        "median absolute error": float(np.median(np.abs(predicted / middle - 1))),
        "signed": float(np.median(predicted / middle - 1)),
        "between repeats": float(np.median(np.ptp(measured, axis=1) / middle)),
        "of calls": float(np.median(predicted / calls - 1)),
        "tau": float(kendalltau(predicted, middle).statistic),
        "tau between repeats": float(np.median(between)) if between else float("nan"),
    }


def main() -> None:
    parser = parser_of(__doc__, repeats=3, steps=10, seed=0, machine="here/2", only="", csv=None)
    parser.add_argument("--patience", type=float, default=8.0, help="seconds to wait for calm")
    arguments = parser.parse_args()
    everything = []
    calm = Calm(arguments.patience)
    head = (
        "network", "costs of ops", "placements", "median error", "signed", "between repeats",
        "signed of calls", "tau", "tau between repeats",
    )  # fmt: skip
    print(table(head, []))
    for model, train in CASES:
        if arguments.only not in f"{model} {train or 'inference'}":
            continue
        rows = measure_case(model, train, arguments, calm)
        everything += rows
        shown = [(IN_STEP, KINDS), (ALONE, KINDS), *((IN_STEP, (kind,)) for kind in KINDS)]
        for costs, kinds in shown:
            of_kinds = [row for row in rows if row["kind"] in kinds]
            found = summarise(of_kinds, costs, arguments.repeats)
            cells = (
                f"{model.removeprefix('zoo:')} {train or 'inference'}",
                costs,
                "all 20" if len(kinds) > 1 else kinds[0],
                f"{found['median absolute error']:.1%}",
                f"{found['signed']:+.1%}",
                f"{found['between repeats']:.1%}",
                f"{found['of calls']:+.1%}",
                f"{found['tau']:.2f}",
                f"{found['tau between repeats']:.2f}",
            )
            print(line(*cells), flush=True)
    print(calm.said)
    keep_csv(arguments.csv, everything)


if __name__ == "__main__":
    main()
