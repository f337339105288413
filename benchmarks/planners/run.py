"""Every planner on every case: value, seconds, gap to the best bound proven in the same run.

    python benchmarks/planners/run.py [--budget 10s] [--only PATTERN] [--methods a,b] [--out FILE]

Cases: the published instances under tests/data/instances, captured training steps and a synthetic
layered graph on two machines. Each method gets the whole budget, alone. Prints Markdown, and adds
it to FILE.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from harness import ROOT, parser_of, say, table
from peers import accelerate_placement
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.costs import analytic_costs
from dovetail.errors import DovetailError
from dovetail.frontends import parse_optimizer, resolve
from dovetail.frontends.models import parse_zoo
from dovetail.graph import Graph, colocate, group
from dovetail.graph.synthetic import layered
from dovetail.instances import load_instance
from dovetail.machine import parse_machine
from dovetail.placers import PLACERS, Budget, PlacementProblem, make_problem, parse_budget
from dovetail.simulator import LowerBound, Simulator, lower_bound

INSTANCES = ROOT / "tests" / "data" / "instances"
STEPS = (("zoo:rnnlm", "adam"), ("zoo:inception_v3", "rmsprop"))
MACHINES = ("4 x k80 + haswell", "8 x p100")
SYNTHETIC_OPS = 100_000


@dataclass(frozen=True)
class Case:
    """A problem to solve. `model`: the MODEL text of a network; "" for what has no module."""

    name: str
    problem: PlacementProblem
    bound: LowerBound
    bound_seconds: float
    model: str = ""


@dataclass(frozen=True)
class Row:
    method: str
    value: float
    seconds: float
    note: str = ""


def cases(only: str) -> Iterator[Case]:
    for path in sorted(INSTANCES.glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        if fnmatch(name, only):
            instance = load_instance(path)
            objective = "load" if path.parent.name == "throughput" else "latency"
            yield case(name, instance.graph, instance.machine, instance.costs, objective, colocate)
    for model, train in STEPS:
        names = [f"{model.removeprefix('zoo:')} on {machine}" for machine in MACHINES]
        if any(fnmatch(name, only) for name in names):
            graph = resolve(model, train=parse_optimizer(train)).graph
            yield from on_machines(names, graph, only, model)
    names = [f"layered {SYNTHETIC_OPS} on {machine}" for machine in MACHINES]
    if any(fnmatch(name, only) for name in names):
        yield from on_machines(names, layered(SYNTHETIC_OPS), only, "")


def on_machines(names: list[str], graph: Graph, only: str, model: str) -> Iterator[Case]:
    for name, text in zip(names, MACHINES, strict=True):
        if fnmatch(name, only):
            machine = parse_machine(text)
            costs = analytic_costs(graph, machine)
            yield case(name, graph, machine, costs, "step", group, model)


def case(name, graph, machine, costs, objective, grouped, model="") -> Case:
    simulator = Simulator(graph, machine, costs, ranked=True)
    problem = make_problem(
        graph,
        machine,
        costs,
        lambda placements: simulator.evaluate(placements, objective),
        groups=grouped(graph),
        objective=objective,
        trace=simulator.timeline,
        ranked=simulator.ranked,
    )
    problem.evaluate(problem.spread(problem.fastest[None]))  # compiled before the clock runs
    began = time.perf_counter()
    bound = lower_bound(graph, machine, costs, objective)
    return Case(name, problem, bound, time.perf_counter() - began, model)


def solve(case: Case, name: str, text: str) -> tuple[Row, LowerBound | None]:
    budget = parse_budget(text)
    budget.ledger.prove(case.bound.seconds, case.bound.proof)
    method: Callable = PLACERS.get(name) or accelerate_method(case)
    try:
        placement = method(case.problem, budget)
    except DovetailError as error:
        return Row(name, np.inf, budget.spent_seconds, type(error).__name__), None
    seconds = budget.spent_seconds
    score = Budget().score(case.problem, placement[None])[0]
    if score.lacking_bytes:
        return Row(name, np.inf, seconds, "does not fit"), None
    proven = budget.ledger.bound if case.problem.objective == "load" else None  # groups are colours
    return Row(name, score.value, seconds), proven


def accelerate_method(case: Case) -> Callable:
    network, options = parse_zoo(case.model)
    with FakeTensorMode():
        module = network.modules(**(network.defaults | options))
    return lambda problem, budget: accelerate_placement(problem, module, budget)


def methods_of(case: Case, wanted: list[str]) -> list[str]:
    names = [*PLACERS, *(["accelerate"] if case.model else [])]
    if case.problem.objective != "latency":
        names.remove("latency_search")
    return [name for name in names if not wanted or name in wanted]


def page_of(case: Case, rows: list[Row], bound: LowerBound) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row.value):
        value = f"{row.value * 1e3:.6g}" if np.isfinite(row.value) else row.note
        gap = f"{100 * (row.value / bound.seconds - 1):.2f}" if np.isfinite(row.value) else ""
        lines.append((row.method, value, gap, f"{row.seconds:.2f}"))
    return (
        f"### {case.name}\n\n"
        f"{len(case.problem.graph)} ops, {case.problem.groups.count} groups; bound "
        f"{bound.seconds * 1e3:.6g} ms by {bound.proof} ({case.bound.seconds * 1e3:.6g} ms by "
        f"{case.bound.proof} in {case.bound_seconds:.2g} s)\n\n"
        f"{table(('method', 'value, ms', 'gap, %', 'seconds'), lines)}\n"
    )


def main() -> None:
    parser = parser_of(__doc__, budget="10s", only="*", out=None)
    parser.add_argument("--methods", default="", help="comma-separated; default: all")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.methods.split(",") if name]
    for one in cases(arguments.only):
        rows, bound = [], one.bound
        for name in methods_of(one, wanted):
            row, proven = solve(one, name, arguments.budget)
            rows.append(row)
            bound = max(bound, proven or bound, key=lambda b: b.seconds)
            say(f"{one.name}: {row}")
        page = page_of(one, rows, bound)
        print(page, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(page + "\n")


if __name__ == "__main__":
    main()
