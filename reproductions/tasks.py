"""Computes a whole table of RL17 or GDP: lists the missing tasks, runs them, and reads it back."""

import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar

from dovetail.errors import DovetailError, ProcessDiedError, ProcessError, UsageError
from dovetail.graph.synthetic import layered
from dovetail.machine import parse_machine
from dovetail.machine.local import available_bytes
from dovetail.runtime.processes import Channel, Worker, launch, ready, serve_calls
from reproductions import graphs, towers
from reproductions.cases import CASES
from reproductions.learned import forget_trainings, untrained, with_trainings
from reproductions.methods import METHODS, PLAIN, lay_ground, run_method
from reproductions.records import Case, CaseResult, LossCurve, TowerResult
from reproductions.running import BenchSettings, forget, missing, read_row
from reproductions.store import Store

# ---- Tasks for a few worker processes, one thread and one core each ----
#
#     capture RNNLM ──► RNNLM 2 GPUs, plain        worker 0, core 0 ──► (began | done | failed)
#                └────► RNNLM 4 GPUs, plain        worker 1, core 1
#     capture NMT   ──► ...
#
# A task begins when all tasks in its `after` are done. If a task fails, the tasks after it fail
# too, and no others. A worker that dies is replaced.

ENTRY = "reproductions.tasks:serve"


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

    def run(self, tell: Callable[[str], None], complain: Callable[[str], None]) -> list[str]:
        """Call the function, and return what failed: an error as it is if it is one of ours, else
        a traceback."""
        module, name = self.function.split(":")
        try:
            failures: list[str] = getattr(import_module(module), name)(
                *self.arguments, tell, complain
            )
        except DovetailError as error:
            return [str(error)]
        except Exception:
            return [traceback.format_exc()]
        return failures


ROOM_BYTES = 5 * 2**30
"""A worker has room for a task that needs much memory if it has this much of the machine's."""


@dataclass
class _TaskQueue:
    """The tasks that wait, those that run (slot -> task), and those that failed (name -> text).

    crowded   no two tasks that need much memory run at once
    """

    waiting: list[BenchTask]
    crowded: bool
    running: dict[int, BenchTask] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def next(self) -> BenchTask | None:
        """The first task that may begin now, taken off the list."""
        # Each waiting task that comes after a failed one fails, and those after it in turn.
        while lost := next(
            ((t, name) for t in self.waiting for name in t.after if name in self.failed), None
        ):
            task, before = lost
            self.waiting.remove(task)
            self.failed[task.name] = f"{task.name}: not run, since {before} failed"
        unfinished = {task.name for task in [*self.waiting, *self.running.values()]}
        full = self.crowded and any(task.alone for task in self.running.values())
        for task in self.waiting:
            if not unfinished.intersection(task.after) and not (task.alone and full):
                self.waiting.remove(task)
                return task
        return None


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
    queue = _TaskQueue(list(tasks), available_bytes() < jobs * ROOM_BYTES)

    def end(task: BenchTask, failures: list[str]) -> None:
        if failures:
            queue.failed[task.name] = "\n".join(failures)
        tell(task.name, "done")

    if not jobs:
        while (task := queue.next()) is not None:
            end(task, task.run(partial(tell, task.name), complain))
        return queue.failed
    cores = sorted(os.sched_getaffinity(0))
    workers: dict[int, Worker] = {}
    try:
        while queue.waiting or queue.running:
            for slot in range(jobs):
                task = None if slot in queue.running else queue.next()
                if task is None:
                    continue
                if slot not in workers:
                    # Each worker has a core of its own if there are enough cores.
                    pinned = (cores[slot],) if jobs <= len(cores) else ()
                    workers[slot] = launch(ENTRY, cores=pinned, threads=1, name=f"bench {slot}")
                    workers[slot].post("make")
                queue.running[slot] = task
                workers[slot].begin("run", task)
            at_work = [workers[slot] for slot in queue.running]
            # No worker is at work if all waiting tasks were dropped; then there is nothing to hear.
            for worker in ready(at_work) if at_work else ():
                slot = next(s for s, other in workers.items() if other is worker)
                task = queue.running[slot]
                try:
                    kind, content = worker.receive()
                except (ProcessError, ProcessDiedError) as error:
                    kind = "died"
                    queue.failed[task.name] = f"{task.name}: {error}"
                if kind == "began":
                    tell(task.name, content)
                elif kind == "complaint":
                    complain(content)
                else:
                    del queue.running[slot]
                    if kind == "done":
                        end(task, content)
                    if kind == "died" or task.alone:
                        workers.pop(slot).close(kill=True)
    finally:
        for worker in workers.values():
            worker.close(kill=True)
    return queue.failed


@dataclass(frozen=True)
class TaskProcess:
    """What lives in a worker's process. Before the reply to a call it sends what a task tells."""

    channel: Channel

    def run(self, task: BenchTask) -> tuple[str, list[str]]:
        """("done", what failed)."""
        failures = task.run(
            lambda text: self.channel.send(("began", text)),
            lambda text: self.channel.send(("complaint", text)),
        )
        return "done", failures


def serve(channel: Channel) -> None:
    """Serve as a worker."""
    serve_calls(channel, lambda: TaskProcess(channel))


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


def run_missing(
    tasks: list[BenchTask],
    wanted: int,
    jobs: int,
    tell: Callable[[str, str, float], None],
    complain: Callable[[str], None],
) -> dict[str, str]:
    """Run the tasks that are missing of `wanted`, and return the failures as `work_off` does.

    tell   is called with (task, what is being done or "done", share of the tasks that are done)
    """
    done = wanted - len(tasks)

    def tell_share(task: str, text: str) -> None:
        nonlocal done
        done += text == "done"
        tell(task, text, done / max(1, wanted))

    return work_off(tasks, jobs, tell_share, complain)


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
    with_towers = extras and not rows
    for case in selected if fresh else ():
        forget(settings, store, case)
        forget_trainings(settings, store, case)
    if fresh and with_towers:
        towers.forget_towers(settings, store)
    tasks = tasks_of(settings, store, selected, with_towers=with_towers, jobs=jobs)
    failures = run_missing(
        tasks, len(tasks), jobs, lambda _, text, share: tell(text, share), complain
    )
    results = [
        with_trainings(settings, store, case, row)
        for case in cases
        if (row := read_row(settings, store, case)) is not None
    ]
    return BenchTable(
        cases=cases,
        rows=tuple(results),
        towers=tuple(towers.read_towers(store) if extras else ()),
        curves=tuple(towers.read_curves(settings, store, results) if extras else ()),
        computed=len(tasks),
        failures=failures,
    )


def tasks_of(
    settings: BenchSettings, store: Store, cases: Iterable[Case], *, with_towers: bool, jobs: int
) -> list[BenchTask]:
    """The tasks that these rows lack, with towers and curves if they are wanted.

    Captures come first, each network once. Meanwhile one of several workers compiles the kernels
    that the others then load. Columns follow as their graphs are ready, then trainings, those of
    the first seed first.
    """
    cases = list(cases)
    # (name, the case whose graph it needs, function, arguments) of each missing task
    lacks: list[tuple[str, Case, str, tuple[Any, ...]]] = []
    if with_towers:
        for name, (of, function) in towers.lacking(settings, store).items():
            lacks.append((name, of, function, (settings,)))
    for case in cases:
        for column in missing(settings, store, case):
            function = "reproductions.running:run_column"
            lacks.append((f"{case.key} {column}", case, function, (settings, case, column)))
    function = "reproductions.learned:run_training"
    learned = [
        (
            f"{case.key} {column} {method} seed {seed}",
            case,
            function,
            (settings, case, column, method, seed),
        )
        for case in [*cases, *([towers.WHOLE] if with_towers else [])]
        for column, method, seed in untrained(settings, store, case)
    ]
    lacks += sorted(learned, key=lambda lack: lack[3][-1])
    before = []
    if jobs > 1 and lacks:
        before.append(BenchTask("compile kernels", "reproductions.tasks:compile_kernels", ()))
    captures: dict[str, BenchTask] = {}
    tasks = []
    for name, of, function, arguments in lacks:
        after = [task.name for task in before]
        if graphs.known(store, of) is None:
            capture = f"capture {of.model} {of.train}"
            captures[capture] = BenchTask(
                capture, "reproductions.running:capture", (settings, of), alone=True
            )
            after.append(capture)
        tasks.append(BenchTask(name, function, arguments, tuple(after)))
    return [*before, *captures.values(), *tasks]


def compile_kernels(tell: Callable[[str], None], _complain: Callable[[str], None]) -> list[str]:
    """Run every method on a small graph, so that it compiles its kernels and keeps them on disk.

    The first run on a machine compiles for the better part of a minute, or for minutes if several
    processes do it at once. The first process keeps what it compiled on disk, and the others load
    it.
    """
    graph, machine = layered(300, training=True), parse_machine("2 x k80 + haswell")
    ground = lay_ground(graph, machine, PLAIN, seed=0)
    for method in METHODS[PLAIN]:
        tell(f"compiling {method}")
        # A method that fails here fails in every row as well, and each row reports it.
        with suppress(Exception):
            run_method(ground, method, "40e")
    return []
