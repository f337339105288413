"""Learning that pays, or not: the shipped policy proposes and local search finishes, against local
search alone, on graphs of families that the policy was never trained on.

    python benchmarks/learned/payoff.py --budget 60s --seeds 3

Both begin with the same baselines (`try_baselines`) and spend the same budget, one after the other
in one process. What counts is when, in seconds and in evaluated placements, the best so far comes
within 5, 2 and 1 % of the best that any of the runs knows of that graph. The policy's own time
counts in full.
"""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import among, keep_csv, parser_of, say, show, table
from runs import CASES, TABLE

from dovetail.machine import parse_machine
from dovetail.placers import PLACERS, Placer, parse_budget
from dovetail.placers.learned.placing import make_gdp_search
from dovetail.placers.learned.records import PlacementTask
from reproductions import graphs
from reproductions.learned import by_rule
from reproductions.records import Case
from reproductions.running import BenchSettings
from reproductions.tables import geometric_mean

HERE = Path(__file__).parent
ROWS = {key: CASES[key] for key in ("gnmt-2-2gpu", "gnmt-4-4gpu", "gnmt-8-8gpu", "amoebanet-4gpu")}
ROWS |= {
    f"llama-{gpus}gpu": Case(
        f"llama-{gpus}gpu", f"Llama, {gpus} GPUs", "zoo:llama", "adam", f"gdp/{gpus}", gpus, None
    )
    for gpus in (2, 4)
}
"""The families that the shipped policy was not trained on."""
WITHIN = (0.05, 0.02, 0.01)
SEARCH, LEARNED = "local_search", "gdp+search"


@dataclass
class Run:
    """One search, and every new best of it as (evaluations, seconds, value)."""

    row: str
    method: str
    seed: int
    bests: list[tuple[float, float, float]] = field(default_factory=list)
    evaluations: float = 0.0

    @property
    def best(self) -> float:
        return self.bests[-1][2] if self.bests else float("inf")

    def reaching(self, value: float) -> tuple[float, float] | None:
        """(evaluations, seconds) at the first placement as good; None: never."""
        hit = next((best for best in self.bests if best[2] <= value), None)
        return None if hit is None else hit[:2]


def run(task: PlacementTask, method: str, placer: Placer, budget: str, seed: int) -> Run:
    """One method on a problem of its own, so that nothing is known from before."""
    limit, found = parse_budget(budget), Run(task.name, method, seed)

    def note(_fraction: float, value: float) -> None:
        if value < found.best:
            found.bests.append((limit.spent, limit.spent_seconds, value))

    limit.progress = note
    problem = task.problem(seed=seed)
    limit.score(problem, placer(problem, limit)[None], always=True)
    limit.report()
    found.evaluations = limit.spent
    return found


def lines(title: str, runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """For each quality: median evaluations and seconds of both, over the seeds that reach it."""
    known = min(run.best for run in runs)
    found = []
    for share in WITHIN:
        cells = [f"{title}, within {100 * share:.0f} %"]
        for method in (SEARCH, LEARNED):
            own = [run for run in runs if run.method == method]
            hits = [hit for run in own if (hit := run.reaching(known * (1 + share)))]
            cells.append(f"{len(hits)} of {len(own)}")
            for axis, form in ((0, "{:,.0f}"), (1, "{:.1f} s")):
                value = statistics.median(hit[axis] for hit in hits) if hits else None
                cells.append("never" if value is None else form.format(value))
        found.append(tuple(cells))
    return found


def ratios(runs: Sequence[Run], share: float, axis: int) -> list[float]:
    """Of search alone over `gdp+search`, for each row and seed where both get there."""
    found = []
    for row in dict.fromkeys(run.row for run in runs):
        known = min(run.best for run in runs if run.row == row) * (1 + share)
        for seed in dict.fromkeys(run.seed for run in runs):
            hits = [
                run.reaching(known)
                for method in (SEARCH, LEARNED)
                for run in runs
                if (run.row, run.method, run.seed) == (row, method, seed)
            ]
            if None not in hits and len(hits) == 2:
                alone, learned = (max(hit[axis], 1e-3) for hit in hits)
                found.append(alone / learned)
    return found


def verdict(runs: Sequence[Run]) -> str:
    """What it comes to, for each quality."""
    known = {
        row: min(run.best for run in runs if run.row == row) for row in {run.row for run in runs}
    }
    said = []
    for share in WITHIN:
        there = [run.method for run in runs if run.reaching(known[run.row] * (1 + share))]
        text = (
            f"within {100 * share:.0f} %: search alone {there.count(SEARCH)}, gdp+search "
            f"{there.count(LEARNED)} of {len(runs) // 2} runs"
        )
        means = [geometric_mean(ratios(runs, share, axis)) for axis in (0, 1)]
        if means[0] is not None:
            text += f"; where both do, alone takes {means[0]:.2f} x the evaluations and "
            text += f"{means[1]:.2f} x the seconds"
        said.append(text)
    return "\n".join(f"* {text}" for text in said)


def write(runs: Sequence[Run], path: Path) -> None:
    rows = [
        {
            "row": one.row, "method": one.method, "seed": one.seed, "best_seconds": one.best,
            "evaluations": f"{one.evaluations:.0f}",
            "curve": ";".join(f"{spent:.0f}:{at:.3f}:{value!r}" for spent, at, value in one.bests),
        }
        for one in runs
    ]  # fmt: skip
    keep_csv(path, rows)


def main() -> None:
    kept, known = HERE / "payoff.csv", CASES | ROWS
    parser = parser_of(__doc__, budget="60s", seeds=3, table=TABLE, out=kept, readme=None)
    said = f"of {', '.join(known)}"
    parser.add_argument("--rows", type=among(known), default=list(ROWS), help=said)
    parser.add_argument("--policy", type=Path, help="default: the shipped one")
    parser.add_argument("--finetune", type=int, default=0, help="updates before the search")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    placers = {
        SEARCH: PLACERS[SEARCH],
        LEARNED: make_gdp_search(arguments.policy, arguments.finetune),
    }
    store, runs, shown = BenchSettings("gdp", arguments.table).store(say), [], []
    for key in arguments.rows:
        case = known[key]
        graph = graphs.graph_for(store, case)
        task = by_rule(key, graph, parse_machine(case.machine))
        of_row = []
        for seed in range(arguments.seeds):
            for method, placer in placers.items():
                of_row.append(run(task, method, placer, arguments.budget, seed))
                say(f"{key}, {method}, seed {seed}: {of_row[-1].best:.4f} s a step")
        runs += of_row
        shown += lines(case.title, of_row)
        write(runs, arguments.out)
    head = ("", "alone: reached", "evaluations", "seconds", "gdp+search: reached", "evaluations",
            "seconds")  # fmt: skip
    text = f"{table(head, shown)}\n\n{verdict(runs)}\n\nBudget of each search: {arguments.budget}; "
    text += f"{arguments.seeds} seeds; policy: {arguments.policy or 'the shipped one'}."
    show(text, arguments.readme, "payoff")


if __name__ == "__main__":
    main()
