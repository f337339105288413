"""Moves a second of the `load` search on one core: changes whose exact loads were computed.

    python benchmarks/planners/moves.py [--runs 9] [FILE.json ...]

A run anneals for about a second, from the linearised optimum, at the temperature that a search
begins with. Seconds are the thread's own processor time, so that neighbours count less.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from harness import ROOT, line, parser_of, table

from dovetail.graph import colocate
from dovetail.instances import load_instance
from dovetail.placers import Budget, PlacementProblem, make_problem
from dovetail.placers.linear_dp import linear_dp
from dovetail.placers.load_search import (
    HOT,
    Temperature,
    anneal,
    chunk_moves,
    load_tables,
    new_walk,
    start,
)
from dovetail.simulator import Simulator

INSTANCES = ROOT / "tests" / "data" / "instances" / "throughput"
RUN_SECONDS = 1.0


def problem_of(path: Path) -> PlacementProblem:
    instance = load_instance(path)
    simulator = Simulator(instance.graph, instance.machine, instance.costs)
    return make_problem(
        instance.graph,
        instance.machine,
        instance.costs,
        lambda placements: simulator.evaluate(placements, "load"),
        groups=colocate(instance.graph),
        objective="load",
    )


def moves_per_second(problem: PlacementProblem, seed: int) -> float:
    field = load_tables(problem)
    walk = new_walk(field)
    budget = Budget()
    placement = linear_dp(problem, budget)
    value = budget.score(problem, placement[None])[0].value
    walk.placement[:] = placement
    walk.best[:] = placement
    walk.random[0] = np.uint64(seed + 1)
    doublings = 3
    heat = Temperature(HOT[0] * 2.0**doublings, value, doublings)
    made, spent = 0, 0.0
    while spent < RUN_SECONDS:
        start(field, walk, heat)
        began = time.thread_time()
        made += anneal(field, walk, heat, chunk_moves(field))
        spent += time.thread_time() - began
    return made / spent


def main() -> None:
    parser = parser_of(__doc__, runs=9)
    default = INSTANCES / "op_bert_l-12_inference.json"
    parser.add_argument("files", nargs="*", type=Path, default=[default])
    arguments = parser.parse_args()
    print(table(("instance", "groups", "devices", "moves/s, median", "least", "most"), []))
    for path in arguments.files:
        problem = problem_of(path)
        moves_per_second(problem, 0)  # compiles
        found = [moves_per_second(problem, seed) / 1e6 for seed in range(arguments.runs)]
        figures = (statistics.median(found), min(found), max(found))
        sizes = (problem.groups.count, problem.load.counted.sum())
        print(line(path.stem, *sizes, *(f"{figure:.2f} M" for figure in figures)))


if __name__ == "__main__":
    main()
