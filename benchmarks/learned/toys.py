"""Do the three learned methods reach the optimum of problems that can be searched exhaustively?

    python benchmarks/learned/toys.py [--methods seq2seq hdp gdp] [--graphs 20] [--devices 2 3]

Random networks, a step of training each, cut into at most 8 groups of like work, on 2 and on 3
unlike devices whose memory, in every third problem, holds no more than two thirds of what one
device would need. Each method starts from a fresh policy, as `dovetail plan` does, with its own
settings but for `EXPLORING`: the very best of thousands of unlike placements takes more exploration
than a good one of a real network. What counts is the best of the placements that the policy itself
drew, repeats counted, not what other methods found. Drawing uniformly as often is the control.
"""

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_graphs import FAMILIES, random_graph

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import parser_of, show, table

from dovetail.costs import analytic_costs
from dovetail.graph import Graph, Groups, group
from dovetail.machine import Device, Link, Machine
from dovetail.placers import Budget, PlacementProblem
from dovetail.placers.learned.catalog import make_policy, settings_of
from dovetail.placers.learned.features import look
from dovetail.placers.learned.judges import BudgetJudge
from dovetail.placers.learned.placing import train
from dovetail.placers.learned.records import PlacementTask
from dovetail.simulator import Simulator

HEAD = (
    "method", "devices", "placements", "samples", "optimum found", "within 1 %", "worst",
    "median samples to it", "distinct drawn", "CPU s a problem",
)  # fmt: skip
GROUPS = 8
SAMPLES = {2: 1000, 3: 5000}
"""Placements that a policy may draw, by devices; repeats count."""
EXACT = 1e-9
EXPLORING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seq2seq": (
        {"stay": 0.0},
        {"trials": 8, "rate": 0.002, "entropy_each": 0.6, "baseline": "batch", "elite": 0.5},
    ),
    "hdp": (
        {"hidden": 64},
        {"rate": 0.002, "entropy_each": 0.12, "baseline": "batch", "elite": 0.5},
    ),
    "gdp": ({}, {"entropy": 0.5, "elite": 0.5}),
}
"""method -> (options, settings) that differ from its own."""


def make_task(seed: int, devices: int) -> PlacementTask:
    """Network `seed`, of the families in turn."""
    families = list(FAMILIES)
    graph = random_graph(seed, family=families[seed % len(families)], size=0.3)
    machine = make_machine(devices, 64 * 2**30)
    groups = coarsened(graph)
    costs = analytic_costs(graph, machine)
    if seed % 3 == 2:
        one = np.zeros((1, len(graph)), dtype=np.int32)
        peak = Simulator(graph, machine, costs).evaluate(one).peak_memory_bytes.max()
        machine = make_machine(devices, int(peak * 2 / 3))
    return PlacementTask(f"{families[seed % len(families)]} {seed}", graph, machine, costs, groups)


def make_machine(count: int, memory_bytes: int) -> Machine:
    """Devices of 1, .85 and .7 times the speed, links of 50 GB/s."""
    devices = tuple(
        Device(
            f"gpu:{i}", "gpu", f"model {i}", memory_bytes,
            {"float32": 5e12 * (1 - 0.15 * i)}, 5e11 * (1 - 0.15 * i), 1e-5,
        )
        for i in range(count)
    )  # fmt: skip
    pairs = itertools.permutations([device.name for device in devices], 2)
    links = tuple(Link(a, b, 5e10, 5e-6, f"{a}->{b}") for a, b in pairs)
    return Machine(f"{count} unlike", devices, "gpu:0", links)


def coarsened(graph: Graph) -> Groups:
    """The groups of placers, in order, joined to at most `GROUPS` of like work."""
    groups = group(graph, largest_share=1 / GROUPS)
    weights = np.bincount(groups.of_op, weights=graph.accessed_bytes, minlength=groups.count)
    middles = np.cumsum(weights) - weights / 2
    parts = np.minimum(GROUPS * middles / weights.sum(), GROUPS - 1).astype(np.int32)
    _, of_group = np.unique(parts, return_inverse=True)
    return Groups(of_group.astype(np.int32)[groups.of_op], int(of_group.max()) + 1)


def exhaustive(problem: PlacementProblem) -> tuple[np.ndarray, np.ndarray]:
    """(every placement [ways, groups], its seconds, inf where it does not fit)."""
    ways = itertools.product(*(np.flatnonzero(row) for row in problem.allowed))
    rows = np.array(list(ways), dtype=np.int32)
    found = problem.evaluate(problem.spread(rows))
    over = (found.peak_memory_bytes > problem.capacities).any(axis=1)
    return rows, np.where(found.feasible & ~over, found.values, np.inf)


def trained(name: str, problem: PlacementProblem, samples: int) -> tuple[float, int, int]:
    """(best seconds, samples until then, distinct placements) of a fresh policy's draws."""
    options, changes = EXPLORING[name]
    view, settings = look(problem), replace(settings_of(name), **changes)
    budget = Budget(threads=1)
    judge = BudgetJudge(problem, budget)
    policy = make_policy(name, view, problem.seed, **options).alone(view)
    updates = samples // settings.trials
    learner = train(policy, view, judge, settings, problem.seed, updates=updates)
    best = learner.best.get("")
    return (
        (best.seconds, best.found, len(budget.ledger)) if best else (np.inf, 0, len(budget.ledger))
    )


def uniform(seconds: np.ndarray, samples: int, seed: int) -> tuple[float, int, int]:
    """The same of uniform draws."""
    drawn = np.random.default_rng(seed).integers(len(seconds), size=samples)
    return seconds[drawn].min(), int(seconds[drawn].argmin()) + 1, len(np.unique(drawn))


def main() -> None:
    parser = parser_of(__doc__, readme=None)
    parser.add_argument("--methods", nargs="+", default=["uniform", "seq2seq", "hdp", "gdp"])
    parser.add_argument("--graphs", type=int, default=20)
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for devices in arguments.devices:
        problems = [
            replace(make_task(seed, devices).problem(threads=1), seed=seed)
            for seed in range(arguments.graphs)
        ]
        every = [exhaustive(problem)[1] for problem in problems]
        for name in arguments.methods:
            rows.append(row(name, devices, problems, every, verbose=arguments.verbose))
            print(*rows[-1], sep=" | ", flush=True)
    show(table(HEAD, rows), arguments.readme, "toys")


def row(
    name: str,
    devices: int,
    problems: list[PlacementProblem],
    every: list[np.ndarray],
    *,
    verbose: bool,
) -> tuple[str, ...]:
    """One method on all problems with that many devices."""
    began, samples = time.process_time(), SAMPLES[devices]
    ratios, found, distinct = [], [], []
    for problem, seconds in zip(problems, every, strict=True):
        if name == "uniform":
            best, at, different = uniform(seconds, samples, problem.seed)
        else:
            best, at, different = trained(name, problem, samples)
        ratios.append(best / seconds.min())
        distinct.append(different)
        found += [at] if ratios[-1] <= 1 + EXACT else []
        if verbose:
            ways = len(seconds), f"{np.isfinite(seconds).mean():.2f} fit"
            print(name, devices, problem.seed, *ways, f"{ratios[-1]:.4f}", at, different)
    used = (time.process_time() - began) / len(problems)
    near = sum(ratio <= 1.01 for ratio in ratios)
    middle = f"{np.median(found):.0f}" if found else "-"
    return (
        name, str(devices), f"{max(map(len, every)):,}", f"{samples:,}",
        f"{len(found)} of {len(problems)}", str(near), f"{max(ratios) - 1:+.1%}", middle,
        f"{np.median(distinct):.0f}", f"{used:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
