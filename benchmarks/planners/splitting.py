"""What it brings that `auto` splits groups, on the rows of GDP's table. Prints Markdown.

    python benchmarks/planners/splitting.py [--rows inception-2gpu,...] [--budget 5000e]

    rule     auto on the groups of RL17's rule, at most 1/32 of the work each
    finest   auto on the smallest groups, what must stay together
    split    auto as the tool runs it: units of the rule first, then ever smaller ones

All three get the same budget. With a number of evaluations they run on one thread, and one seed
gives one result. With seconds (`--budget 10s`) they run as the tool does, on all cores.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import among, line, parser_of, table, with_range

from dovetail.graph import Graph
from dovetail.machine import parse_machine
from dovetail.placers import PLACERS, parse_budget
from dovetail.placers.problem import PlacementProblem
from reproductions import graphs
from reproductions.cases import GDP_CASES
from reproductions.methods import PLAIN, lay_ground
from reproductions.records import Case
from reproductions.store import Store

COLUMNS = (
    "row", "ops", "groups of the rule, finest", "rule", "finest", "split", "split / rule",
    "wall seconds",
)  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, budget="5000e", seeds=3)
    keys = [case.key for case in GDP_CASES]
    parser.add_argument("--rows", type=among(keys), default=keys, help="keys of rows, with commas")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        store = Store(options.graphs or Path(temporary), print)
        print(table(COLUMNS, []))
        for case in GDP_CASES:
            if case.key in options.rows:
                graph = graphs.graph_for(store, case)
                cells = row_of(case, graph, options.budget, options.seeds)
                print(line(*cells), flush=True)


def row_of(case: Case, graph: Graph, budget: str, seeds: int) -> list[str]:
    """The cells of a row: seconds of a step as median (least to most) of all seeds."""
    machine, began = parse_machine(case.machine), time.perf_counter()
    found: dict[str, list[float]] = {"rule": [], "finest": [], "split": []}
    for seed in range(seeds):
        ground = lay_ground(graph, machine, PLAIN, seed)
        unsplit = replace(ground.splitting, coarser=())
        for name, problem in zip(found, (ground.problem, unsplit, ground.splitting), strict=True):
            found[name].append(value_of(problem, budget))
    split, rule = (statistics.median(found[name]) for name in ("split", "rule"))
    return [
        case.title,
        f"{len(graph):,}",
        f"{ground.problem.groups.count:,}, {ground.splitting.groups.count:,}",
        *(with_range(values, ".4f") for values in found.values()),
        f"{split / rule:.3f}",
        f"{time.perf_counter() - began:.0f}",
    ]


def value_of(problem: PlacementProblem, text: str) -> float:
    """Seconds of a step by auto's best placement."""
    budget = parse_budget(text)
    if text.endswith("e"):
        budget = replace(budget, threads=1)
    PLACERS["auto"](problem, budget)
    return min(score.value for score, _ in budget.ledger.results.values())


if __name__ == "__main__":
    main()
