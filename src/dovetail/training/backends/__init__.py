"""The table of backends. A backend decides where server and workers live, and which clock counts.

Each is a transport under the one supervisor (`training.supervisor`). To add one, write a module
with a function `run(assignment, watcher, **options)` and add a line to `BACKENDS`.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dovetail.errors import UsageError

if TYPE_CHECKING:  # the command line reads the table without loading numpy
    from dovetail.training.backends.contract import Backend


@dataclass(frozen=True)
class BackendEntry:
    """A backend's name, the module that has its `run`, and one line of help."""

    name: str
    module: str
    help: str


BACKENDS = {
    entry.name: entry
    for entry in (
        BackendEntry(
            "simulated",
            "dovetail.training.backends.simulated",
            "one process in virtual time, replayed bit for bit",
        ),
        BackendEntry(
            "threads",
            "dovetail.training.backends.threads",
            "one process, for learners that release the interpreter",
        ),
        BackendEntry(
            "processes",
            "dovetail.training.backends.processes",
            "a server process and worker processes of this machine, over shared memory",
        ),
        BackendEntry(
            "ranks",
            "dovetail.training.backends.ranks",
            "workers on all ranks that a launcher as torchrun started, on one machine or many",
        ),
        BackendEntry(
            "ray", "dovetail.training.backends.ray", "actors on many machines; the extra `ray`"
        ),
    )
}
"""Name -> backend, for the trainer's option `backend` and for the command line."""


def load_backend(name: str, **options: Any) -> "Backend":
    """The backend of that name, with its options bound. Its module is imported by this call."""
    if name not in BACKENDS:
        raise UsageError("backend", f"there is no {name!r}; there are {', '.join(BACKENDS)}")
    run: Backend = import_module(BACKENDS[name].module).run
    return partial(run, **options) if options else run
