"""Tasks for a few worker processes, one thread and one core each, in an order that depends allow.

    capture RNNLM ──► RNNLM 2 GPUs, plain        worker 0, core 0 ──► (began | done | failed)
               └────► RNNLM 4 GPUs, plain        worker 1, core 1
    capture NMT   ──► ...

A task that fails takes what depends on it along and nothing else; a worker that dies is replaced.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from dovetail.errors import ProcessDiedError, ProcessError
from dovetail.machine.local import available_bytes
from dovetail.runtime.processes import Channel, Worker, launch, ready

ENTRY = "dovetail.bench.crew:serve"


@dataclass(frozen=True)
class Task:
    """A call of a function in a worker.

    name       unique
    function   "package.module:function"; called with `arguments` and tell(what is done now), it
               returns the tracebacks of what failed within it
    after      names of tasks that must be done before
    alone      it needs much memory: the worker ends after it, and on a machine without
               `ROOM_BYTES` a worker two of them never run at once
    """

    name: str
    function: str
    arguments: tuple[Any, ...]
    after: tuple[str, ...] = ()
    alone: bool = False


ROOM_BYTES = 5 * 2**30


@dataclass
class _Crew:
    """The tasks that wait, those that run, and what failed."""

    waiting: list[Task]
    tell: Callable[[str, str], None]
    complain: Callable[[str], None]
    crowded: bool
    running: dict[int, Task] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def next(self) -> Task | None:
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
        """Fail what cannot begin any more, since a task before it failed."""
        for task in list(self.waiting):
            lost = next((name for name in task.after if name in self.failed), None)
            if lost is not None:
                self.waiting.remove(task)
                self.failed[task.name] = f"{task.name}: not run, since {lost} failed"
                self._drop()
                return

    def hear(self, worker: Worker, slot: int) -> bool:
        """Take one message of a worker; True if it cannot take another task."""
        task = self.running[slot]
        try:
            kind, said = worker.receive()
        except (ProcessError, ProcessDiedError) as error:
            self.failed[task.name] = f"{task.name}: {error}"
            del self.running[slot]
            return True
        if kind == "began":
            self.tell(task.name, said)
            return False
        if kind == "complaint":
            self.complain(said)
            return False
        if said:
            self.failed[task.name] = "\n".join(said)
        del self.running[slot]
        self.tell(task.name, "done")
        return task.alone


def work_off(
    tasks: list[Task],
    jobs: int,
    tell: Callable[[str, str], None],
    complain: Callable[[str], None],
) -> dict[str, str]:
    """Run all tasks; task -> traceback of those that failed.

    jobs   worker processes; 0: in this process
    tell   called with (task, what it does now or "done")

    Workers are ended, whatever happens; Ctrl-C is raised here.
    """
    crew = _Crew(list(tasks), tell, complain, available_bytes() < jobs * ROOM_BYTES)
    if not jobs:
        _work_here(crew)
        return crew.failed
    with _workers() as workers:
        while crew.waiting or crew.running:
            for slot in range(jobs):
                task = None if slot in crew.running else crew.next()
                if task is not None:
                    worker = workers.get(slot) or workers.setdefault(slot, _launch(slot, jobs))
                    crew.running[slot] = task
                    worker.send((task.function, task.arguments))
            at_work = [workers[slot] for slot in crew.running]
            for worker in ready(at_work) if at_work else ():  # none: what waited was dropped
                slot = next(s for s, one in workers.items() if one is worker)
                if crew.hear(worker, slot):
                    workers.pop(slot).close(kill=True)
    return crew.failed


def serve(channel: Channel) -> None:
    """A worker: run what arrives, say how it went."""
    while True:
        function, arguments = channel.receive()
        failures = _call(
            function,
            arguments,
            lambda said: channel.send(("began", said)),
            lambda said: channel.send(("complaint", said)),
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
    except Exception:
        return [traceback.format_exc()]
    return failures


def _work_here(crew: _Crew) -> None:
    while (task := crew.next()) is not None:
        name = task.name
        failures = _call(
            task.function,
            task.arguments,
            lambda said, name=name: crew.tell(name, said),  # type: ignore[misc]
            crew.complain,
        )
        if failures:
            crew.failed[name] = "\n".join(failures)
        crew.tell(name, "done")


@contextmanager
def _workers() -> Iterator[dict[int, Worker]]:
    """slot -> worker, as they are started; all are ended at the end."""
    workers: dict[int, Worker] = {}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close(kill=True)


def _launch(slot: int, jobs: int) -> Worker:
    """Worker `slot` on a core of its own where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = (cores[slot],) if jobs <= len(cores) else ()
    return launch(ENTRY, cores=pinned, threads=1, name=f"bench {slot}")
