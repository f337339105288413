"""One run: its settings, what came out of it, and a file of many that is written as they end."""

import csv
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mlp import MlpLearner, Task, figures, start

from dovetail.training import (
    Assignment,
    Evaluation,
    Guard,
    Job,
    Outcome,
    StepTimes,
    Watcher,
    analysis,
    load_backend,
    make_rule,
)

JITTER = 0.2


@dataclass(frozen=True)
class Cell:
    """Settings of one run. Time is virtual, its unit one normal minibatch.

    slow      worker 0 is so many times slower
    target    accuracy at which the run ends; it is then evaluated every unit of time, otherwise
              once an epoch
    """

    experiment: str
    task: str
    rule: str
    window: int
    workers: int
    batch: int = 16
    rate: float = 1e-3
    optimizer: str = "adam"
    epochs: int = 60
    slow: float = 1.0
    target: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What came out of a cell; nan where it never came.

    accuracy, best   of the validation data: at the end, and the best at an evaluation
    staleness_mean, staleness_p95   of all commits but the first n
    target_seconds   to the target
    wall_seconds     real time that the run took
    """

    accuracy: float
    best: float
    loss: float
    seconds: float
    target_seconds: float
    staleness_mean: float
    staleness_p95: float
    commits: int
    wall_seconds: float


Row = tuple[Cell, Result]


def run_cell(cell: Cell, task: Task) -> tuple[Result, Outcome]:
    """Run it; equal cells give equal results."""
    began = time.perf_counter()
    assignment = assignment_of(cell, task)
    outcome = load_backend("simulated")(
        assignment,
        watcher_of(cell, task),
        times=StepTimes("jitter", spread=JITTER),
        slow={0: cell.slow},
    )
    return _result(cell, task, outcome, time.perf_counter() - began), outcome


def assignment_of(cell: Cell, task: Task) -> Assignment:
    size = len(start(task.sizes, 0))
    # A synchronous round is one step on one large batch: it has no window.
    window = 1 if cell.rule == "sync" else cell.window
    options = {"optimizer": cell.optimizer} if cell.rule == "sync" else {}
    job = Job(
        run="benchmark",
        size=size,
        samples=len(task.labels),
        epochs=cell.epochs,
        batch=cell.batch,
        window=window,
        workers=cell.workers,
        seed=cell.seed,
    )
    return Assignment(
        job,
        make_rule(cell.rule, **options),
        start(task.sizes, cell.seed),
        lambda worker: MlpLearner(task, cell.optimizer, cell.rate),
        guard=Guard(),
    )


def watcher_of(cell: Cell, task: Task) -> Watcher:
    def evaluate(theta, clock, samples, seconds):
        return figures(theta, task.sizes, task.test_inputs, task.test_labels)

    if not cell.target:
        return Watcher(every_samples=len(task.labels), evaluate=evaluate)
    return Watcher(
        every_seconds=1.0,
        evaluate=evaluate,
        should_stop=lambda seen: seen[-1]["accuracy"] >= cell.target,
    )


def _result(cell: Cell, task: Task, outcome: Outcome, wall_seconds: float) -> Result:
    last = figures(outcome.theta, task.sizes, task.test_inputs, task.test_labels)
    evaluations = outcome.evaluations or (Evaluation(0, 0, 0.0, last),)
    stale, _ = analysis.staleness(outcome.rows, cell.workers)
    reached = [e.seconds for e in evaluations if e.figures["accuracy"] >= (cell.target or math.inf)]
    return Result(
        accuracy=last["accuracy"],
        best=max(evaluation.figures["accuracy"] for evaluation in evaluations),
        loss=last["loss"],
        seconds=outcome.seconds,
        target_seconds=reached[0] if reached else math.nan,
        staleness_mean=stale.mean,
        staleness_p95=stale.p95,
        commits=outcome.clock,
        wall_seconds=wall_seconds,
    )


COLUMNS = [field.name for field in (*fields(Cell), *fields(Result))]
_TYPES: dict[str, Any] = {field.name: field.type for field in (*fields(Cell), *fields(Result))}


class Store:
    """Rows in a CSV file, appended as they come; a run that is there is not made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Cell, Result] = {}
        if not path.exists():
            return
        content = path.read_bytes()
        if not content.endswith(b"\n"):  # cut off while it was written
            path.write_bytes(content[: content.rfind(b"\n") + 1])
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values = {name: _TYPES[name](text) for name, text in row.items()}
                cell = Cell(**{field.name: values[field.name] for field in fields(Cell)})
                result = {field.name: values[field.name] for field in fields(Result)}
                self.rows[cell] = Result(**result)

    def add(self, cell: Cell, result: Result) -> None:
        new = not self.path.exists() or not self.path.stat().st_size
        self.rows[cell] = result
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            row = {**asdict(cell), **asdict(result)}
            writer.writerow({name: _written(value) for name, value in row.items()})


def _written(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def with_seeds(cells: Iterable[Cell], seeds: int) -> list[Cell]:
    return [replace(cell, seed=seed) for cell in cells for seed in range(seeds)]


def grouped(rows: dict[Cell, Result], cells: Sequence[Cell]) -> dict[Cell, list[Result]]:
    """The seeds' results of each cell, which is given with seed 0."""
    found: dict[Cell, list[Result]] = {cell: [] for cell in cells}
    for cell, result in rows.items():
        key = replace(cell, seed=0)
        if key in found:
            found[key].append(result)
    return found
