"""The experiments of asynchronous data-parallel training, in virtual time on one core.

    python benchmarks/data_parallel/run.py [PART ...] [--seeds 3] [--mnist FOLDER] [--higgs FILE]

PART is table, stragglers, sensitivity, cancer, curves or momentum; all of them without any. Each
run goes to rows.csv as it ends, and what is there is not run again: stop and start at will. The
tables go into README.md between their marks, the curves to curves.csv and curves.html.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: such small matrices gain nothing
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import curves
import experiments
import tables
import tasks
from cells import Cell, Store, run_cell, with_seeds
from harness import fill, keep_csv, parser_of, table
from mlp import Task

HERE = Path(__file__).parent
PARTS = ("table", "stragglers", "sensitivity", "cancer", "curves", "momentum")
CURVE_RULES = ("downpour", "dynsgd", "agn", "adag-agn", "aeasgd", "averaging", "sync")


def main(arguments: Sequence[str] | None = None) -> None:
    known = (*PARTS, "mnist", "higgs")
    parser = parser_of(__doc__, seeds=3)
    parser.add_argument("part", nargs="*", help=", ".join(known))
    parser.add_argument("--mnist", type=Path, help="folder of MNIST's four idx files")
    parser.add_argument("--higgs", type=Path, help="CSV file: label, then features")
    parser.add_argument("--hidden", default="256", help="hidden layers of mnist: 1000,2000,1000")
    parser.add_argument("--epochs", type=int, default=10, help="of mnist and higgs")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the results go")
    options = parser.parse_args(arguments)
    if odd := [part for part in options.part if part not in known]:
        parser.error(f"there is no part {odd[0]!r}")
    options.folder.mkdir(parents=True, exist_ok=True)
    store = Store(options.folder / "rows.csv")
    load = _tasks(options)
    parts = options.part or [*PARTS, *(["mnist"] * bool(options.mnist)),
                             *(["higgs"] * bool(options.higgs))]  # fmt: skip
    plan = [cell for part in parts for cell in with_seeds(_cells(part, options), options.seeds)]
    todo = [cell for cell in plan if cell not in store.rows]
    print(f"{len(plan)} runs, {len(plan) - len(todo)} of them done", flush=True)
    began = time.perf_counter()
    for number, cell in enumerate(todo, 1):
        result, _ = run_cell(cell, load(cell.task))
        store.add(cell, result)
        left = (time.perf_counter() - began) / number * (len(todo) - number)
        print(
            f"{number}/{len(todo)} {cell.experiment} {cell.rule} lambda {cell.window} n "
            f"{cell.workers} rate {cell.rate:g} slow {cell.slow:g} seed {cell.seed}: "
            f"{100 * result.accuracy:.1f} % at {result.seconds:.0f}, {left:.0f} s left",
            flush=True,
        )
    readme = options.folder / "README.md"
    for part in parts:
        text = _section(part, store, load, options)
        # A folder of one's own begins without marks.
        content = readme.read_text("utf-8") if readme.exists() else ""
        if f"<!-- {part} -->" not in content:
            marks = f"<!-- {part} -->\n<!-- end of {part} -->"
            readme.write_text(f"{content}\n## {part}\n\n{marks}\n", "utf-8")
        fill(readme, part, text)


def _tasks(options: argparse.Namespace) -> Callable[[str], Task]:
    hidden = tuple(int(width) for width in options.hidden.split(","))
    makers: dict[str, Callable[[], Task]] = {
        "digits": tasks.digits,
        "cancer": tasks.cancer,
        f"mnist {options.hidden}": lambda: tasks.mnist(options.mnist, hidden),
        "higgs": lambda: tasks.higgs(options.higgs),
    }
    return cache(lambda name: makers[name]())


def _cells(part: str, options: argparse.Namespace) -> list[Cell]:
    if part in ("mnist", "higgs"):
        if getattr(options, part) is None:
            raise SystemExit(f"{part} needs --{part}")
        task = f"mnist {options.hidden}" if part == "mnist" else part
        return experiments.on_task(task, batch=128, epochs=options.epochs)
    of_part: dict[str, Callable[[], list[Cell]]] = {
        "table": experiments.table,
        "stragglers": experiments.stragglers,
        "sensitivity": experiments.sensitivity,
        "cancer": lambda: experiments.on_task("cancer"),
    }
    return of_part[part]() if part in of_part else []


def _section(
    part: str, store: Store, load: Callable[[str], Task], options: argparse.Namespace
) -> str:
    rows = store.rows
    if part == "table":
        return f"{tables.table_of_rules(rows)}\n\n{tables.table_of_staleness(rows)}"
    if part == "stragglers":
        return f"{tables.table_of_stragglers(rows)}\n\n{tables.table_of_rates(rows)}"
    if part == "sensitivity":
        return tables.table_of_sensitivity(rows)
    if part == "momentum":
        return tables.table_of_momentum()
    if part == "curves":
        return _draw(load("digits"), options.folder)
    return tables.grid(rows, _cells(part, options), False)


def _draw(task: Task, folder: Path) -> str:
    """Write and draw the curves; the temporal efficiencies of those with equal workers."""
    charts = {}
    for title, window, slow in curves.CHARTS:
        lines = []
        for rule in CURVE_RULES:
            if rule == "agn" and window == 1:
                continue
            cell = Cell("curves", task.name, rule, window, 20, slow=slow)
            _, outcome = run_cell(cell, task)
            seconds = [evaluation.seconds for evaluation in outcome.evaluations]
            accuracy = [e.figures["accuracy"] for e in outcome.evaluations]
            lines.append((tables.NAMES[rule], seconds, accuracy))
        charts[title] = lines
    points = [
        {"chart": title, "rule": name, "seconds": f"{second:.6g}", "accuracy": f"{share:.6g}"}
        for title, lines in charts.items()
        for name, seconds, accuracy in lines
        for second, share in zip(seconds, accuracy, strict=True)
    ]
    keep_csv(folder / "curves.csv", points)
    curves.draw(folder)
    equal = charts[curves.CHARTS[0][0]]
    return table(["E(row, column)", *(n for n, _, _ in equal)], curves.efficiencies(equal))


if __name__ == "__main__":
    main()
