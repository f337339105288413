"""Fits the papers' machines to the papers' figures, and prints what is left over.

    python benchmarks/machines/fit.py [--paper rl17] [--write] [--work FOLDER]

RL17: seconds per op of CPU and GPU, the share of its peak that each reaches, and how much less of
it convolutions reach, on the columns "1 CPU" and "1 GPU" and no other. Beside it the same fit
without the last one. GDP: one factor on all compute seconds, such that the mean logarithm of our
expert's seconds over the column "human" is zero. `--write` keeps the constants where
`dovetail.machine.presets` reads them. Graphs are captured once and kept in the work folder.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from harness import parser_of, table
from scipy.optimize import brentq, least_squares

from dovetail.costs import analytic_costs
from dovetail.graph import Graph, group, load_graph, save_graph
from dovetail.machine import Machine
from dovetail.machine.presets import FITTED, fitted_machine
from dovetail.pipeline.sources import graph_of, resolve_model
from dovetail.placers import PLACERS, make_problem, parse_budget
from dovetail.simulator import Simulator
from reproductions.cases import GDP_CASES, RL17_CASES
from reproductions.records import Case

COLUMNS = {"1 CPU": "haswell", "1 GPU": "k80:0"}
"""The only columns of RL17 that enter, and the device that each is a run on."""
CONVOLUTIONS = ("aten.convolution", "onnx.Conv", "onnx.QLinearConv")
"""Kinds of op, by prefix; RL17's networks have the first alone."""
OVERHEADS, SHARES = (1e-7, 1e-1), (1e-3, 1.0)
"""Ranges of seconds per op, and of shares of the peak and of one share in another."""


@dataclass(frozen=True)
class Figure:
    """A figure that a paper prints, and how we simulate it. `seconds` of a machine."""

    case: Case
    column: str
    graph: Graph
    seconds: Callable[[Machine], float]

    @property
    def published(self) -> float:
        printed = self.case.published
        assert printed is not None
        value = printed.seconds[self.column]
        assert value is not None
        return value


def main() -> None:
    parser = parser_of(__doc__, write=f"to {FITTED.name}")
    parser.add_argument("--paper", choices=("rl17", "gdp"), help="default: both")
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work")
    chosen = parser.parse_args()
    found = json.loads(FITTED.read_text(encoding="utf-8")) if FITTED.exists() else {}
    for paper, fit in (("rl17", fit_rl17), ("gdp", fit_gdp)):
        if chosen.paper in (None, paper):
            found[paper] = fit(chosen.work)
            found[paper]["command"] = f"python benchmarks/machines/fit.py --paper {paper} --write"
            found[paper]["torch"] = torch.__version__
    if chosen.write:
        FITTED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def fit_rl17(work: Path) -> dict[str, Any]:
    """Five figures, five parameters; and what four leave over."""
    figures = rl17_figures(work)
    with_ratio = fit_devices(figures, ratio=True)
    plain = fit_devices(figures, ratio=False)
    show("RL17", figures, with_ratio, 5)
    show("RL17, convolutions like the rest", figures, plain, 4)
    return {
        "parameters": 5,
        "devices": with_ratio,
        "figures": rows(figures, with_ratio),
        "without_convolutions_apart": {
            "parameters": 4,
            "devices": plain,
            "figures": rows(figures, plain),
        },
    }


def rl17_figures(work: Path) -> list[Figure]:
    """Single-device figures of the networks of table 2; OOM is none."""
    found: dict[tuple[str, str], Figure] = {}
    for case in RL17_CASES:
        printed = case.published.seconds if case.published else {}
        for column, device in COLUMNS.items():
            if "1 CPU" in printed and printed.get(column) is not None:
                graph = graph_of_case(case, work)
                figure = Figure(case, column, graph, on_one_device(graph, device))
                found.setdefault((case.model, column), figure)
    return list(found.values())


def on_one_device(graph: Graph, name: str) -> Callable[[Machine], float]:
    """Seconds of a step with every op on the device of that name; inputs come from the host."""

    def seconds(machine: Machine) -> float:
        placement = np.full((1, len(graph)), machine.device_index(name))
        return simulated(graph, machine, placement)

    return seconds


def fit_devices(figures: Sequence[Figure], *, ratio: bool) -> dict[str, dict[str, Any]]:
    """model -> overhead and shares with the least squares of logarithms of simulated seconds over
    published ones. `ratio`: convolutions reach a share of their own, in one ratio to the others' on
    both devices."""
    bounds = [OVERHEADS, SHARES] * 2 + ([SHARES] if ratio else [])
    low, high = np.log(np.array(bounds)).T

    def residuals(logarithms: np.ndarray) -> list[float]:
        devices = devices_of(np.exp(logarithms))
        return [row["log_ratio"] for row in rows(figures, devices)]

    start = np.log([1e-3, 0.4, 3e-4, 0.4] + ([0.2] if ratio else []))
    found = least_squares(
        residuals, start, bounds=(low, high), xtol=1e-12, ftol=1e-14, gtol=1e-12, diff_step=1e-4
    )
    return devices_of(np.exp(found.x))


def devices_of(values: np.ndarray) -> dict[str, dict[str, Any]]:
    """model -> fields of its device, of [4] or [5] overhead and share of CPU, of GPU, ratio."""
    ratio = float(values[4]) if len(values) > 4 else None
    found = {}
    for model, overhead, share in (("haswell", *values[:2]), ("k80", *values[2:4])):
        shares = {"": float(share)}
        if ratio is not None:
            shares |= dict.fromkeys(CONVOLUTIONS, float(share) * ratio)
        found[model] = {"op_overhead_seconds": float(overhead), "efficiencies": shares}
    return found


def fit_gdp(work: Path) -> dict[str, Any]:
    """Twelve figures, one parameter."""
    figures = [gdp_figure(case, work) for case in GDP_CASES]

    def mean(logarithm: float) -> float:
        found = rows(figures, scaled(math.exp(logarithm)))
        return float(np.mean([row["log_ratio"] for row in found]))

    factor = math.exp(brentq(mean, math.log(1e-2), math.log(1e3), xtol=1e-9))
    show("GDP", figures, scaled(factor), 1)
    return {"parameters": 1, "devices": scaled(factor), "figures": rows(figures, scaled(factor))}


def scaled(factor: float) -> dict[str, dict[str, Any]]:
    return {model: {"compute_factor": factor} for model in ("broadwell", "p100")}


def gdp_figure(case: Case, work: Path) -> Figure:
    """The column "human", by our expert's placement; it does not depend on the factor."""
    graph = graph_of_case(case, work)
    machine = fitted_machine(case.machine, scaled(1.0))
    costs = analytic_costs(graph, machine)
    evaluate = Simulator(graph, machine, costs, ranked=True).evaluate
    problem = make_problem(graph, machine, costs, evaluate, groups=group(graph))
    placed = problem.spread(PLACERS["expert"](problem, parse_budget("1s")))[None]
    return Figure(case, "human", graph, lambda machine: simulated(graph, machine, placed))


def simulated(graph: Graph, machine: Machine, placement: np.ndarray) -> float:
    costs = analytic_costs(graph, machine)
    return float(Simulator(graph, machine, costs, ranked=True).evaluate(placement).values[0])


def graph_of_case(case: Case, work: Path) -> Graph:
    """The case's training step, captured or as it was captured before."""
    name = "".join(c if c.isalnum() else "-" for c in f"{case.model} {case.train}")
    path = work / f"{name}.json.gz"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        save_graph(graph_of(resolve_model(case.model, case.train)), path)
    return load_graph(path)


def rows(figures: Sequence[Figure], devices: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was used, and what comes out."""
    found = []
    for figure in figures:
        seconds = figure.seconds(fitted_machine(figure.case.machine, devices))
        found.append(
            {
                "model": figure.case.model,
                "train": figure.case.train,
                "machine": figure.case.machine,
                "column": figure.column,
                "ops": int((~figure.graph.is_source).sum()),
                "graph": figure.graph.fingerprint,
                "published_seconds": figure.published,
                "simulated_seconds": seconds,
                "log_ratio": math.log(seconds / figure.published),
            }
        )
    return found


def show(
    title: str, figures: Sequence[Figure], devices: dict[str, dict[str, Any]], parameters: int
) -> None:
    print(f"\n## {title}: {len(figures)} figures met {parameters} parameters\n")
    print(json.dumps(devices))
    found = rows(figures, devices)
    lines = [
        (
            row["model"],
            row["column"],
            f"{row['ops']:,}",
            row["published_seconds"],
            f"{row['simulated_seconds']:.3f}",
            f"{math.exp(row['log_ratio']):.3f}",
        )
        for row in found
    ]
    head = ("network", "column", "ops", "paper, s", "simulated, s", "simulated / paper")
    print(f"\n{table(head, lines)}")
    residuals = np.array([row["log_ratio"] for row in found])
    print(f"\nmean factor off: {math.exp(np.sqrt((residuals**2).mean())):.3f} (root mean square)")


if __name__ == "__main__":
    main()
