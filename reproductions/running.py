"""Computes one column of one row as far as it is not kept yet, and reads rows back.

capture ──► ground ──► bound
              └──────► each method ──► work of the expert's and the best plan
                                 each ──► OUT/rows/CASE.COLUMN.PART.json, as soon as it is there
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import RunError
from dovetail.machine.files import machine_to_dict
from reproductions import graphs
from reproductions.cases import AUTO_ON, machine_of
from reproductions.figures import work_of
from reproductions.methods import HYPOTHESIS, METHODS, PLAIN, SEARCHES, lay_ground, run_method
from reproductions.records import Case, CaseResult, Column, MethodResult, PlanWork
from reproductions.store import (
    GRAPHS,
    PLANNED,
    Kept,
    Store,
    all_code,
    code_fingerprint,
    fingerprint,
)

COLUMNS: dict[str, tuple[str, ...]] = {"rl17": (PLAIN, HYPOTHESIS), "gdp": (PLAIN,)}
"""Maps each table to its columns. The hypothesis is about RL17's figures alone."""
EXPERT, BOUND, WORK = "expert", "bound", "work"
Tell = Callable[[str], None]
"""A callback: tell(what is being done now)."""


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a table.

    name     "rl17" or "gdp"
    out      folder of the page; results go to the folder `rows` in it
    budget   budget of each search: seconds ("20s") or evaluations ("500e")
    methods  column -> its methods; None: `METHODS`
    learn    number of trials of each training of a learned method; 0: none is run
    learn_of   method -> its own number of trials. `auto` on a method's groups has as many as that
             method, if it is not named
    seeds    number of trainings of each learned method, with seeds from `seed` on
    controllers   number of asynchronous controllers of each training
    code     code fingerprints of the process that asks; a worker with other code refuses
    """

    name: str
    out: Path
    budget: str = "20s"
    seed: int = 0
    methods: dict[str, tuple[str, ...]] | None = None
    learn: int = 0
    learn_of: dict[str, int] = field(default_factory=dict)
    seeds: int = 3
    controllers: int = 1
    code: dict[str, str] = field(default_factory=all_code)

    def trials_of(self, method: str) -> int:
        """The number of trials of each training of a learned method, or of `AUTO_ON`."""
        paired = self.learn_of.get(AUTO_ON.get(method, ""), self.learn)
        return self.learn_of.get(method, paired)

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS[self.name]

    def methods_of(self, column: str) -> tuple[str, ...]:
        return (self.methods or METHODS)[column]

    def store(self, complain: Callable[[str], None], kind: str = PLANNED) -> Store:
        """The store of results. Raises `UnwritableError`, or `RunError` if the code behind that
        kind of result has changed since these settings were made."""
        if self.code.get(kind) != code_fingerprint(kind):
            raise RunError("the code changed since the command began; start it again")
        return Store(self.out / "rows", complain)


@dataclass(frozen=True)
class _StoredColumn:
    """One column of a row in the store; `graph` is the fingerprint of the row's graph."""

    settings: BenchSettings
    store: Store
    case: Case
    column: str
    graph: str = ""

    def part(self, part: str) -> Kept:
        """The place of a part: the bound, a method, or the works that are shown."""
        settings, more = self.settings, {}
        # What a part depends on beside graph, machine and column: the pictures on the placements
        # that they show, a method on its seed, and on the budget if that can end it.
        if part == WORK:
            values = self.values()
            more = {name: values[name]["placement"] for name in shown_of(values)}
        elif part != BOUND:
            timed = settings.budget if part in SEARCHES or settings.budget.endswith("e") else ""
            more = {"method": part, "budget": timed, "seed": settings.seed}
        machine = machine_to_dict(machine_of(self.case))
        facts = {"graph": self.graph, "machine": machine, "column": self.column}
        return Kept(self.store, self.name(part), fingerprint(PLANNED, **facts, **more))

    def name(self, part: str) -> str:
        return f"{self.case.key}.{self.column}.{part.lower().replace(' ', '-')}"

    def values(self) -> dict[str, dict[str, Any]]:
        """method -> its kept value, in the order of the table."""
        methods = self.settings.methods_of(self.column)
        kept = {method: self.part(method).get() for method in methods}
        return {method: value for method, value in kept.items() if value is not None}


def missing(settings: BenchSettings, store: Store, case: Case) -> dict[str, list[str]]:
    """column -> the parts that are not kept yet. A column that is complete is absent. If the graph
    must be captured, all parts are missing."""
    captured = graphs.known(store, case)
    lacking: dict[str, list[str]] = {}
    for column in settings.columns:
        parts = [BOUND, *settings.methods_of(column), WORK]
        if captured is not None:
            kept = _StoredColumn(settings, store, case, column, captured.graph)
            parts = [part for part in parts if kept.part(part).get() is None]
        if parts:
            lacking[column] = parts
    return lacking


def capture(settings: BenchSettings, case: Case, tell: Tell, complain: Tell) -> list[str]:
    """Capture the case's graph, unless it is kept. Returns no failures: it raises what a capture
    raises."""
    tell(f"capturing {case.model}")
    graphs.graph_for(settings.store(complain, GRAPHS), case)
    return []


def run_column(
    settings: BenchSettings, case: Case, column: str, tell: Tell, complain: Tell
) -> list[str]:
    """Compute and keep the parts that a column lacks, and return the tracebacks of methods that
    failed. Raises what a capture raises.
    """
    tell(f"{case.title}, {column}: bound")
    store = settings.store(complain)
    graph = graphs.graph_for(store, case)
    began = time.perf_counter()
    kept = _StoredColumn(settings, store, case, column, graph.fingerprint)
    ground = lay_ground(graph, machine_of(case), column, settings.seed)
    if kept.part(BOUND).get() is None:
        bound = {"seconds": ground.bound.seconds, "proof": ground.bound.proof}
        kept.part(BOUND).put(bound | {"wall_seconds": time.perf_counter() - began})
    failures = []
    for method in settings.methods_of(column):
        if kept.part(method).get() is None:
            tell(f"{case.title}, {column}: {method}")
            began = time.perf_counter()
            try:
                result, placement = run_method(ground, method, settings.budget)
                kept.part(method).put({
                    "found": asdict(result),
                    "placement": None if placement is None else placement.tolist(),
                    "wall_seconds": time.perf_counter() - began,
                })  # fmt: skip
            except Exception:
                failures.append(f"{case.key}, {column}, {method}:\n{traceback.format_exc()}")
    works = kept.part(WORK)
    if works.get() is None:
        tell(f"{case.title}, {column}: pictures")
        values, problem, shown = kept.values(), ground.problem, {}
        for name in shown_of(values):
            placement = np.array(values[name]["placement"], dtype=np.int32)
            shown[name] = asdict(
                work_of(problem.graph, problem.machine, problem.costs, problem.groups, placement)
            )
        works.put({"shown": shown})
    return failures


def read_row(settings: BenchSettings, store: Store, case: Case) -> CaseResult | None:
    """The row as it is kept, without methods that are missing. None if its graph, the bound of a
    column or all methods of a column are missing."""
    captured = graphs.known(store, case)
    if captured is None:
        return None
    seconds, columns = captured.seconds, {}
    for name in settings.columns:
        column = read_column(settings, store, case, name)
        if column is None:
            return None
        columns[name] = column
        kept = _StoredColumn(settings, store, case, name, captured.graph)
        parts = [kept.part(part).get() or {} for part in (BOUND, WORK)] + [*kept.values().values()]
        seconds += sum(part.get("wall_seconds", 0.0) for part in parts)
    return CaseResult(
        key=case.key,
        ops=captured.ops,
        groups=captured.groups,
        flops=captured.flops,
        parameter_bytes=captured.parameter_bytes,
        columns=columns,
        seconds=seconds,
    )


def read_column(settings: BenchSettings, store: Store, case: Case, name: str) -> Column | None:
    """The column as it is kept; None if its graph, its bound or all its methods are missing."""
    captured = graphs.known(store, case)
    if captured is None:
        return None
    kept = _StoredColumn(settings, store, case, name, captured.graph)
    bound, values = kept.part(BOUND).get(), kept.values()
    if bound is None or not values:
        return None
    methods = {method: MethodResult(**value["found"]) for method, value in values.items()}
    work = kept.part(WORK).get() or {"shown": {}}
    return Column(
        methods=methods,
        best=best_of(methods),
        bound=bound["seconds"],
        proof=bound["proof"],
        shown={method: PlanWork(**shown) for method, shown in work["shown"].items()},
    )


def forget(settings: BenchSettings, store: Store, case: Case) -> None:
    """Drop everything that is kept of a case, also its graph."""
    store.drop(graphs.name_of(case))
    for column in settings.columns:
        for part in (BOUND, *settings.methods_of(column), WORK):
            store.drop(_StoredColumn(settings, store, case, column).name(part))


def best_of(methods: dict[str, MethodResult]) -> str:
    """The method of least seconds, of equal ones the first; "" if nothing fits."""
    fitting = {
        name: result.seconds for name, result in methods.items() if result.seconds is not None
    }
    return min(fitting, key=lambda name: fitting[name]) if fitting else ""


def shown_of(values: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """The methods whose plans are drawn: the expert and the best, if they fit."""
    results = {name: MethodResult(**value["found"]) for name, value in values.items()}
    names = dict.fromkeys((EXPERT, best_of(results)))
    return tuple(name for name in names if name in results and results[name].seconds is not None)
