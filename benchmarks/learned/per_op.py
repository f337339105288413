"""Zero-shot planning of a network op by op, and fine-tuning of a few thousand groups: how long, and
in how much memory.

    python benchmarks/learned/per_op.py [--steps 66] [--groups 5000] [--updates 50]

GNMT with 8 layers, one step of training, on 8 GPUs. Capture and costs are not counted, which every
method needs; what is: features, policy, proposals, and their simulation.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from markdown import fill, table

from dovetail.costs import analytic_costs
from dovetail.frontends import parse_optimizer, resolve
from dovetail.graph import Groups, colocate
from dovetail.graph.grouping import merge_single_consumers
from dovetail.machine import parse_machine
from dovetail.placers import Budget, PlacementProblem
from dovetail.placers.learned.placing import make_gdp
from dovetail.placers.learned.records import PlacementTask

HEAD = ("what", "ops", "groups", "wall", "CPU", "peak memory of the process so far", "step")


def timed(name: str, problem: PlacementProblem, place: Callable[[], float]) -> tuple[str, ...]:
    """One line of the table."""
    wall, cpu = time.perf_counter(), time.process_time()
    seconds = place()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = f"{len(problem.graph):,}", f"{problem.groups.count:,}"
    line = (name, *sizes, f"{wall:.1f} s", f"{cpu:.1f} s", f"{peak:.2f} GiB", f"{seconds:.3f} s")
    print(*line, sep=" | ", flush=True)
    return line


def best(problem: PlacementProblem, updates: int) -> float:
    """Seconds of the best that the shipped policy finds."""
    budget = Budget()
    make_gdp(None, updates)(problem, budget)
    assert budget.best is not None
    return budget.best[0].value


def of_about(task: PlacementTask, groups: int) -> Groups:
    """The coarsest of ever smaller groups that are so many."""
    colocated, share = colocate(task.graph), 1 / 32
    found = merge_single_consumers(task.graph, colocated, largest_share=share)
    while found.count < groups and share > 2.0**-16:
        share /= 2
        found = merge_single_consumers(task.graph, colocated, largest_share=share)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=66, help="that the network is unrolled for")
    parser.add_argument("--groups", type=int, default=5000, help="at least, of fine-tuning")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--readme", type=Path, help="fill the table into this file's marks")
    arguments = parser.parse_args()
    model = f"zoo:gnmt?layers=8&steps={arguments.steps}"
    graph, machine = resolve(model, train=parse_optimizer("adam")).graph, parse_machine("gdp/8")
    task = PlacementTask(model, graph, machine, analytic_costs(graph, machine), colocate(graph))
    problem = task.problem(threads=torch.get_num_threads())
    lines = [timed("zero-shot, every op by itself", problem, lambda: best(problem, 0))]
    fewer = replace(task, groups=of_about(task, arguments.groups)).problem(threads=2)
    updates = arguments.updates
    lines.append(timed(f"{updates} updates of fine-tuning", fewer, lambda: best(fewer, updates)))
    text = table(HEAD, lines)
    print(text)
    if arguments.readme:
        fill(arguments.readme, "per_op", f"`{model}`, Adam:\n\n{text}")


if __name__ == "__main__":
    main()
