"""Backends, by name: where a run's server and workers live, and what time means there.

Each is a transport under the one supervisor (`training.supervisor`): adding one is a module with a
`run(assignment, watcher, **options)` and a line in `BACKENDS`.
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
    """A backend's name, the module whose `run` it is, and one line of help."""

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
            "ray", "dovetail.training.backends.ray", "actors on many machines; the extra `ray`"
        ),
    )
}
"""What `backend` may name, for the trainer and for the command line."""


def load_backend(name: str, **options: Any) -> "Backend":
    """The backend of that name, with its own options bound. Its module is imported only now."""
    if name not in BACKENDS:
        raise UsageError("backend", f"there is no {name!r}; there are {', '.join(BACKENDS)}")
    run: Backend = import_module(BACKENDS[name].module).run
    return partial(run, **options) if options else run
