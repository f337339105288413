"""Computes a whole table: lists the missing tasks, runs them in workers, and reads it back."""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Protocol, TypeVar

from dovetail.errors import DovetailError, ProcessDiedError, ProcessError, UsageError
from dovetail.graph.synthetic import layered
from dovetail.machine import parse_machine
from dovetail.machine.local import available_bytes
from dovetail.runtime.processes import Channel, Worker, launch, ready
from reproductions import graphs
from reproductions.cases import CASES
from reproductions.learned import forget_trainings, untrained, with_trainings
from reproductions.methods import METHODS, PLAIN, lay_ground, run_method
from reproductions.records import Case, CaseResult, LossCurve, TowerResult
from reproductions.running import BenchSettings, forget, missing, read_row
from reproductions.store import Store
from reproductions.towers import (
    forget_towers,
    lacking,
    read_curves,
    read_towers,
    untrained_whole,
)

# ---- Tasks for a few worker processes, one thread and one core each ----
#
#     capture RNNLM ──► RNNLM 2 GPUs, plain        worker 0, core 0 ──► (began | done | failed)
#                └────► RNNLM 4 GPUs, plain        worker 1, core 1
#     capture NMT   ──► ...
#
# A task begins when all tasks in its `after` are done. If a task fails, the tasks after it fail
# too, and no others. A worker that dies is replaced.


ENTRY = "reproductions.table:serve"


@dataclass(frozen=True)
class BenchTask:
    """A call of a function in a worker.

    name       a unique name
    function   "package.module:function"; it is called with `arguments`, tell(what is being done)
               and complain(text), and returns what failed within it: errors and tracebacks
    after      names of the tasks that must be done before
    alone      True if it needs much memory: the worker ends after it, and on a machine with less
               than `ROOM_BYTES` for each worker two such tasks never run at once
    """

    name: str
    function: str
    arguments: tuple[Any, ...]
    after: tuple[str, ...] = ()
    alone: bool = False


ROOM_BYTES = 5 * 2**30
"""A worker has room for a task that needs much memory if it has this much of the machine's."""


@dataclass
class _TaskQueue:
    """The tasks that wait, those that run (slot -> task), and those that failed (name -> text)."""

    waiting: list[BenchTask]
    tell: Callable[[str, str], None]
    complain: Callable[[str], None]
    crowded: bool
    running: dict[int, BenchTask] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def next(self) -> BenchTask | None:
        """The first task that may begin now, taken off the list."""
        self._drop()
        unfinished = {task.name for task in [*self.waiting, *self.running.values()]}
        full = self.crowded and any(task.alone for task in self.running.values())
        for task in self.waiting:
            if not unfinished.intersection(task.after) and not (task.alone and full):
                self.waiting.remove(task)
                return task
        return None

    def _drop(self) -> None:
        """Fail each waiting task that comes after a failed one, and those after it in turn."""
        for task in list(self.waiting):
            lost = next((name for name in task.after if name in self.failed), None)
            if lost is not None:
                self.waiting.remove(task)
                self.failed[task.name] = f"{task.name}: not run, since {lost} failed"
                self._drop()
                return

    def hear(self, worker: Worker, slot: int) -> bool:
        """Receive one message of a worker. True if the worker must end: it died, or its task was
        one that runs alone."""
        task = self.running[slot]
        try:
            kind, content = worker.receive()
        except (ProcessError, ProcessDiedError) as error:
            self.failed[task.name] = f"{task.name}: {error}"
            del self.running[slot]
            return True
        if kind == "began":
            self.tell(task.name, content)
            return False
        if kind == "complaint":
            self.complain(content)
            return False
        if content:
            self.failed[task.name] = "\n".join(content)
        del self.running[slot]
        self.tell(task.name, "done")
        return task.alone


def work_off(
    tasks: list[BenchTask],
    jobs: int,
    tell: Callable[[str, str], None],
    complain: Callable[[str], None],
) -> dict[str, str]:
    """Run all tasks, and return task -> what failed in it, for those that did: the error if it is
    one of ours, else a traceback.

    jobs   number of worker processes; 0: the tasks run in this process
    tell   is called with (task, what is being done or "done")

    Whatever happens, the workers are ended. Ctrl-C is raised here.
    """
    queue = _TaskQueue(list(tasks), tell, complain, available_bytes() < jobs * ROOM_BYTES)
    if not jobs:
        _work_here(queue)
        return queue.failed
    with _workers() as workers:
        while queue.waiting or queue.running:
            for slot in range(jobs):
                task = None if slot in queue.running else queue.next()
                if task is not None:
                    worker = workers.get(slot) or workers.setdefault(slot, _launch(slot, jobs))
                    queue.running[slot] = task
                    worker.send((task.function, task.arguments))
            at_work = [workers[slot] for slot in queue.running]
            # No worker is at work if all waiting tasks were dropped; then there is nothing to hear.
            for worker in ready(at_work) if at_work else ():
                slot = next(s for s, other in workers.items() if other is worker)
                if queue.hear(worker, slot):
                    workers.pop(slot).close(kill=True)
    return queue.failed


def serve(channel: Channel) -> None:
    """Serve as a worker: run each task that arrives and send its failures back. Never returns."""
    while True:
        function, arguments = channel.receive()
        failures = _call(
            function,
            arguments,
            lambda text: channel.send(("began", text)),
            lambda text: channel.send(("complaint", text)),
        )
        channel.send(("done", failures))


def _call(
    function: str,
    arguments: tuple[Any, ...],
    tell: Callable[[str], None],
    complain: Callable[[str], None],
) -> list[str]:
    module, name = function.split(":")
    try:
        failures: list[str] = getattr(import_module(module), name)(*arguments, tell, complain)
    except DovetailError as error:
        return [str(error)]
    except Exception:
        return [traceback.format_exc()]
    return failures


def _work_here(queue: _TaskQueue) -> None:
    while (task := queue.next()) is not None:
        name = task.name
        failures = _call(
            task.function,
            task.arguments,
            lambda text, name=name: queue.tell(name, text),  # type: ignore[misc]
            queue.complain,
        )
        if failures:
            queue.failed[name] = "\n".join(failures)
        queue.tell(name, "done")


@contextmanager
def _workers() -> Iterator[dict[int, Worker]]:
    """A context with slot -> worker, which the caller fills. Its end ends all of them."""
    workers: dict[int, Worker] = {}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close(kill=True)


def _launch(slot: int, jobs: int) -> Worker:
    """Start worker `slot`, on a core of its own if there are enough cores."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = (cores[slot],) if jobs <= len(cores) else ()
    return launch(ENTRY, cores=pinned, threads=1, name=f"bench {slot}")


@dataclass(frozen=True)
class BenchTable:
    """A paper's table as far as it is computed.

    rows       the rows that are done, in the order of `cases`
    computed   number of tasks that this call ran; 0: everything was kept from before
    failures   task -> what failed in it: errors and tracebacks
    """

    cases: tuple[Case, ...]
    rows: tuple[CaseResult, ...]
    towers: tuple[TowerResult, ...]
    curves: tuple[LossCurve, ...]
    computed: int
    failures: dict[str, str]

    @property
    def done(self) -> list[tuple[Case, CaseResult]]:
        """The rows, each with its case."""
        of_key = {row.key: row for row in self.rows}
        return [(case, of_key[case.key]) for case in self.cases if case.key in of_key]


class Keyed(Protocol):
    """Whatever has a key, by which rows are asked for."""

    @property
    def key(self) -> str: ...


Row = TypeVar("Row", bound=Keyed)


def matching(cases: Iterable[Row], patterns: str) -> list[Row]:
    """The cases whose key matches one of the patterns "rnnlm-*,nmt-2gpu"; all for "".

    Raises `UsageError` if none does.
    """
    cases = list(cases)
    globs = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    matches = [
        case
        for case in cases
        if not globs or any(fnmatchcase(case.key, pattern) for pattern in globs)
    ]
    if not matches:
        keys = ", ".join(case.key for case in cases)
        raise UsageError("--rows", f"{patterns!r} matches none of {keys}")
    return matches


_Lack = tuple[str, Case | None, str, tuple[Any, ...]]
"""A missing task: its name, the case whose graph it needs, its function and its arguments."""
_COMPILE = BenchTask("compile kernels", "reproductions.table:compile_kernels", ())


def tasks_of(
    settings: BenchSettings, store: Store, cases: Iterable[Case], *, towers: bool, jobs: int
) -> list[BenchTask]:
    """The tasks that these rows lack, with towers and curves if they are wanted.

    Captures come first, each network once. Meanwhile one of several workers compiles the kernels
    that the others then load. Columns follow as their graphs are ready, then trainings, those of
    the first seed first.
    """
    lacks: list[_Lack] = []
    if towers:
        for name, (of, function) in lacking(settings, store).items():
            lacks.append((name, of, function, (settings,)))
    lacks += _columns(settings, store, cases := list(cases))
    learned = list(_trainings(settings, store, cases))
    if towers:
        learned += _of_trainings(settings, *untrained_whole(settings, store))
    lacks += sorted(learned, key=lambda lack: lack[3][-1])
    before = [_COMPILE] if jobs > 1 and any(of for _, of, _, _ in lacks) else []
    captures: dict[str, BenchTask] = {}
    tasks = []
    for name, of, function, arguments in lacks:
        after = [task.name for task in before] if of else []
        if of is not None and graphs.known(store, of) is None:
            capture = f"capture {of.model} {of.train}"
            captures[capture] = BenchTask(
                capture, "reproductions.running:capture", (settings, of), alone=True
            )
            after.append(capture)
        tasks.append(BenchTask(name, function, arguments, tuple(after)))
    return [*before, *captures.values(), *tasks]


def _columns(settings: BenchSettings, store: Store, cases: Iterable[Case]) -> Iterator[_Lack]:
    for case in cases:
        for column in missing(settings, store, case):
            name, function = f"{case.key} {column}", "reproductions.running:run_column"
            yield name, case, function, (settings, case, column)


def _trainings(settings: BenchSettings, store: Store, cases: Iterable[Case]) -> Iterator[_Lack]:
    for case in cases:
        yield from _of_trainings(settings, case, untrained(settings, store, case))


def _of_trainings(
    settings: BenchSettings, case: Case, lacking: Iterable[tuple[str, str, int]]
) -> Iterator[_Lack]:
    for column, method, seed in lacking:
        name = f"{case.key} {column} {method} seed {seed}"
        function = "reproductions.learned:run_training"
        yield name, case, function, (settings, case, column, method, seed)


def run_table(
    settings: BenchSettings,
    cases: tuple[Case, ...] = (),
    *,
    rows: str = "",
    jobs: int = 2,
    fresh: bool = False,
    tell: Callable[[str, float], None] = lambda _text, _fraction: None,
    complain: Callable[[str], None] = lambda _text: None,
) -> BenchTable:
    """Compute what is missing of the rows that `rows` names, and read the whole table back.

    cases   by default those of the paper's table. RL17's has towers and curves as well, which are
            computed if all rows are
    jobs    number of worker processes; 0: everything runs in this process
    fresh   forget first what is kept of those rows
    tell    is called with (what is being done, share of the tasks that are done)
    """
    extras = not cases and settings.name == "rl17"
    cases = cases or CASES[settings.name]
    store, selected = settings.store(complain), matching(cases, rows)
    towers = extras and not rows
    for case in selected if fresh else ():
        forget(settings, store, case)
        forget_trainings(settings, store, case)
    if fresh and towers:
        forget_towers(settings, store)
    tasks = tasks_of(settings, store, selected, towers=towers, jobs=jobs)
    done = 0

    def tell_share(_task: str, text: str) -> None:
        nonlocal done
        done += text == "done"
        tell(text, done / max(1, len(tasks)))

    failures = work_off(tasks, jobs, tell_share, complain)
    results = [row for case in cases if (row := _row(settings, store, case)) is not None]
    return BenchTable(
        cases=cases,
        rows=tuple(results),
        towers=tuple(read_towers(store) if extras else ()),
        curves=tuple(read_curves(settings, store, results) if extras else ()),
        computed=len(tasks),
        failures=failures,
    )


def _row(settings: BenchSettings, store: Store, case: Case) -> CaseResult | None:
    row = read_row(settings, store, case)
    return None if row is None else with_trainings(settings, store, case, row)


# ---- Compiling the kernels once, before several workers would each compile all of them ----
#
# The first run on a machine compiles for the better part of a minute, or for minutes if several
# processes do it at once. The first process keeps what it compiled on disk, and the others load it.

_OPS, _BUDGET, _MACHINE = 300, "40e", "2 x k80 + haswell"


def compile_kernels(tell: Callable[[str], None], _complain: Callable[[str], None]) -> list[str]:
    """Run every method on a small graph, so that it compiles its kernels and keeps them on disk."""
    ground = lay_ground(layered(_OPS, training=True), parse_machine(_MACHINE), PLAIN, seed=0)
    for method in METHODS[PLAIN]:
        tell(f"compiling {method}")
        # A method that fails here fails in every row as well, and each row reports it.
        with suppress(Exception):
            run_method(ground, method, _BUDGET)
    return []
