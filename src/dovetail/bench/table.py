"""A whole table: which tasks it takes, and what stands in it once they are done."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dovetail.bench import graphs
from dovetail.bench.cases import CASES
from dovetail.bench.crew import Task, work_off
from dovetail.bench.learned_parts import forget_trainings, untrained, with_trainings
from dovetail.bench.records import Case, Curve, Row, Tower
from dovetail.bench.running import Settings, forget, missing, read_row
from dovetail.bench.store import Store
from dovetail.bench.towers import forget_towers, lacking, read_curves, read_towers
from dovetail.errors import UsageError


@dataclass(frozen=True)
class Table:
    """What there is of a paper's table.

    rows       those that are done, in the order of `cases`
    computed   tasks that this call ran; 0: all was kept from before
    failures   task -> traceback of what failed in it
    """

    cases: tuple[Case, ...]
    rows: tuple[Row, ...]
    towers: tuple[Tower, ...]
    curves: tuple[Curve, ...]
    computed: int
    failures: dict[str, str]

    @property
    def done(self) -> list[tuple[Case, Row]]:
        """The rows, each with its case."""
        of_key = {row.key: row for row in self.rows}
        return [(case, of_key[case.key]) for case in self.cases if case.key in of_key]


def matching(cases: Iterable[Case], patterns: str) -> list[Case]:
    """Cases whose key matches one of the patterns "rnnlm-*,nmt-2gpu"; all for "".

    Raises `UsageError` where none does.
    """
    cases = list(cases)
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    found = [
        case
        for case in cases
        if not wanted or any(fnmatchcase(case.key, pattern) for pattern in wanted)
    ]
    if not found:
        known = ", ".join(case.key for case in cases)
        raise UsageError("--rows", f"{patterns!r} matches none of {known}")
    return found


_Lack = tuple[str, Case | None, str, tuple[Any, ...]]
"""name of a task, the case whose graph it needs, function, arguments"""
_COMPILE = Task("compile kernels", "dovetail.bench.warming:compile_kernels", ())


def tasks_of(
    settings: Settings, store: Store, cases: Iterable[Case], *, towers: bool, jobs: int
) -> list[Task]:
    """What these rows lack, and the towers and curves if they are wanted: captures first, each
    network once, while one of several workers compiles what the others load then; then columns
    as the graphs come, and then trainings, those of the first seed first."""
    lacks: list[_Lack] = []
    if towers:
        for name, (of, function) in lacking(settings, store).items():
            lacks.append((name, of, function, (settings,)))
    lacks += _columns(settings, store, cases := list(cases))
    lacks += sorted(_trainings(settings, store, cases), key=lambda lack: lack[3][-1])
    before = [_COMPILE] if jobs > 1 and any(of for _, of, _, _ in lacks) else []
    captures: dict[str, Task] = {}
    tasks = []
    for name, of, function, arguments in lacks:
        after = [task.name for task in before] if of else []
        if of is not None and graphs.known(store, of) is None:
            capture = f"capture {of.model} {of.train}"
            captures[capture] = Task(
                capture, "dovetail.bench.running:capture", (settings, of), alone=True
            )
            after.append(capture)
        tasks.append(Task(name, function, arguments, tuple(after)))
    return [*before, *captures.values(), *tasks]


def _columns(settings: Settings, store: Store, cases: Iterable[Case]) -> Iterator[_Lack]:
    for case in cases:
        for column in missing(settings, store, case):
            name, function = f"{case.key} {column}", "dovetail.bench.running:run_column"
            yield name, case, function, (settings, case, column)


def _trainings(settings: Settings, store: Store, cases: Iterable[Case]) -> Iterator[_Lack]:
    for case in cases:
        for method, seed in untrained(settings, store, case):
            name = f"{case.key} {method} seed {seed}"
            function = "dovetail.bench.learned_parts:run_training"
            yield name, case, function, (settings, case, method, seed)


def run_table(
    settings: Settings,
    cases: tuple[Case, ...] = (),
    *,
    rows: str = "",
    jobs: int = 2,
    fresh: bool = False,
    tell: Callable[[str, float], None] = lambda _said, _fraction: None,
    complain: Callable[[str], None] = lambda _text: None,
) -> Table:
    """Compute what the rows that `rows` names lack, and read back the table.

    cases   default: those of the paper's table, to which RL17 has towers and curves as well; they
            are computed where all rows are
    jobs    worker processes; 0: in this one
    fresh   forget first what is kept of those rows
    tell    called with (what is done now, share of the tasks that are done)
    """
    extras = not cases and settings.name == "rl17"
    cases = cases or CASES[settings.name]
    store, wanted = settings.store(complain), matching(cases, rows)
    towers = extras and not rows
    for case in wanted if fresh else ():
        forget(settings, store, case)
        forget_trainings(settings, store, case)
    if fresh and towers:
        forget_towers(settings, store)
    tasks = tasks_of(settings, store, wanted, towers=towers, jobs=jobs)
    done = 0

    def heard(_task: str, said: str) -> None:
        nonlocal done
        done += said == "done"
        tell(said, done / max(1, len(tasks)))

    failures = work_off(tasks, jobs, heard, complain)
    found = [row for case in cases if (row := _row(settings, store, case)) is not None]
    return Table(
        cases=cases,
        rows=tuple(found),
        towers=tuple(read_towers(store) if extras else ()),
        curves=tuple(read_curves(settings, store, found) if extras else ()),
        computed=len(tasks),
        failures=failures,
    )


def _row(settings: Settings, store: Store, case: Case) -> Row | None:
    row = read_row(settings, store, case)
    return None if row is None else with_trainings(settings, store, case, row)
