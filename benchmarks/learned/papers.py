"""The three learned methods as published, trained on rows of the papers' tables, and what the
shipped policy proposes there.

    python benchmarks/learned/papers.py --methods gdp-paper --rows inception-2gpu --trials 4000
    python benchmarks/learned/papers.py --methods gdp-paper --rows inception-2gpu --trials 1600
        --seeds 1 --setting rate=0.0003
    python benchmarks/learned/papers.py --readme benchmarks/learned/README.md --rows ""

Each training is one line of papers.csv beside this file: an old line of the same row, method, seed,
number of placements and settings is replaced. `--setting` changes fields of `LearningSettings`, to
search for what a paper leaves open. `--readme` writes the tables from the file; `--rows ""` trains
nothing. One thread, simulated placements; a training begins with nothing but the graph.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import among, fill, keep_csv, parser_of, read_csv, say, table

from dovetail.placers import BASELINES, Budget
from dovetail.placers.learned.catalog import make_policy, settings_of
from dovetail.placers.learned.files import load_policy, shipped
from dovetail.placers.learned.records import LearningSettings, PlacementTask
from reproductions import graphs
from reproductions.cases import CASES, machine_of
from reproductions.learned import SHIPPED, Tally, by_rule, drive, propose, task_of, views_of
from reproductions.methods import first_of
from reproductions.store import Store

HERE = Path(__file__).parent
ROWS = {case.key: (paper, case) for paper, cases in CASES.items() for case in cases}
FIELDS = (
    "row", "method", "seed", "trials", "settings", "seconds", "likeliest_seconds",
    "trials_to_best", "distinct", "invalid_share", "updates", "groups", "expert_seconds",
    "one_gpu_seconds", "wall_seconds",
)  # fmt: skip
Line = dict[str, str]


def trained(row: str, method: str, seed: int, trials: int, changes: dict[str, Any]) -> Line:
    """One training: its line of the file."""
    case = ROWS[row][1]
    graph = graphs.graph_for(Store(HERE / "rows", say), case)
    machine = machine_of(case)
    task, _grouping = task_of(row, graph, machine, method)
    (seen,), tally = views_of([task]), Tally(task.problem(threads=1), lambda _trials, _best: None)
    began, updates = time.perf_counter(), 0
    if method in SHIPPED:
        propose(method, task, tally, seed)
        policy = load_policy(shipped(), "gdp")[0]
    else:
        settings: LearningSettings = replace(settings_of(method), **changes)
        policy = make_policy(method, seen.view, seed)
        updates = drive(policy, settings, [seen], [tally], trials=trials, seed=seed).updates
    wall = time.perf_counter() - began
    last = Tally(task.problem(threads=1), lambda _trials, _best: None)
    likeliest = last(policy.likeliest(seen.view)[None])
    expert, one_gpu = compared(by_rule(row, graph, machine))
    values = {
        "row": row, "method": method, "seed": seed,
        "trials": tally.trials if method in SHIPPED else trials,
        "settings": ";".join(f"{name}={value}" for name, value in sorted(changes.items())),
        "seconds": tally.best_seconds, "likeliest_seconds": float(likeliest.seconds[0]),
        "trials_to_best": tally.bests[-1].trial if tally.bests else "",
        "distinct": tally.distinct, "invalid_share": tally.invalid / tally.trials,
        "updates": updates, "groups": task.groups.count, "expert_seconds": expert,
        "one_gpu_seconds": one_gpu, "wall_seconds": round(wall, 1),
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def compared(task: PlacementTask) -> tuple[float, float]:
    """Seconds of the expert's placement and of one GPU; inf where it does not fit."""
    problem = task.problem(threads=1)
    everywhere = problem.fastest * 0 + first_of(task.machine, "gpu")
    tally = Tally(problem, lambda _trials, _best: None)
    expert = BASELINES["expert"](problem, Budget(evaluations=1))
    found = [
        tally(placement[None]).seconds[0] for placement in (expert, problem.settle(everywhere))
    ]
    return float(found[0]), float(found[1])


def kept(path: Path) -> list[Line]:
    return read_csv(path) if path.exists() else []


def add(path: Path, line: Line) -> None:
    """Add a training to the file, in place of one that was made in the same way."""
    lines = {_key(other): other for other in kept(path)} | {_key(line): line}
    keep_csv(path, [lines[key] for key in sorted(lines)], FIELDS)


def _key(line: Line) -> tuple[str, ...]:
    names = ("method", "settings", "row", "trials", "seed")
    return tuple(line[name].zfill(8) if name == "trials" else line[name] for name in names)


def results(lines: list[Line]) -> str:
    """The trainings by the methods' own settings, one line a row and method."""
    rows = []
    for (row, method, trials), runs in _grouped(line for line in lines if not line["settings"]):
        seconds = [float(run["seconds"]) for run in runs]
        paper, case = ROWS[row]
        printed = case.published.seconds if case.published else {}
        learned = {"rl17": "RL", "gdp": "HDP" if method == "hdp-paper" else "GDP-one"}[paper]
        human = printed.get("expert", printed.get("human"))
        theirs = None if method in SHIPPED else printed.get(learned)
        rows.append((
            f"{case.title} ({paper})", method, runs[0]["groups"], f"{int(trials):,}",
            ", ".join(f"{s:.3f}" for s in seconds), f"{statistics.median(seconds):.3f}",
            ", ".join(f"{float(run['likeliest_seconds']):.3f}" for run in runs),
            f"{float(runs[0]['expert_seconds']):.3f}", f"{float(runs[0]['one_gpu_seconds']):.3f}",
            f"{statistics.median(seconds) / float(runs[0]['expert_seconds']):.3f}",
            f"{theirs / human:.3f}" if theirs and human else "-",
            f"{statistics.median(float(run['wall_seconds']) for run in runs):.0f} s",
        ))  # fmt: skip
    head = (
        "row", "method", "groups", "placements", "best, by seed", "median",
        "likeliest after it, by seed", "expert", "one GPU", "median / expert", "the paper's",
        "a training took",
    )  # fmt: skip
    return table(head, rows)


def searched(lines: list[Line]) -> str:
    """The trainings with other settings."""
    rows = [
        (line["method"], ROWS[line["row"]][1].title, line["settings"].replace(";", ", "),
         line["seed"], f"{int(line['trials']):,}", f"{float(line['seconds']):.3f}",
         f"{float(line['likeliest_seconds']):.3f}")
        for line in lines if line["settings"]
    ]  # fmt: skip
    return table(("method", "row", "settings", "seed", "placements", "best", "likeliest"), rows)


def _grouped(lines: Iterator[Line]) -> list[tuple[tuple[str, str, str], list[Line]]]:
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line["row"], line["method"], line["trials"]), []).append(line)
    return sorted(found.items(), key=lambda item: (item[0][1], item[0][0], int(item[0][2])))


def main() -> None:
    parser = parser_of(__doc__, trials=4000, seeds=3, csv=HERE / "papers.csv", readme=None)
    parser.add_argument("--methods", default="seq2seq-paper,hdp-paper,gdp-paper")
    said = f"of {', '.join(ROWS)}"
    parser.add_argument("--rows", type=among(ROWS), default="inception-2gpu", help=said)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    changes = dict(text.split("=") for text in arguments.setting)
    kinds = LearningSettings.__annotations__
    typed = {name: kinds[name](value) for name, value in changes.items()}
    for row in arguments.rows:
        for method in arguments.methods.split(","):
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                line = trained(row, method, seed, arguments.trials, typed)
                say(f"{row}, {method}, seed {seed}: {line['seconds']} in {line['wall_seconds']} s")
                add(arguments.csv, line)
    if arguments.readme:
        lines = kept(arguments.csv)
        fill(arguments.readme, "papers", f"{results(lines)}\n\n{searched(lines)}")


if __name__ == "__main__":
    main()
