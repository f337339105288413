"""Backends, by name: where server and workers live, and what time means.

simulated   one process, virtual time: deterministic, replayed bit for bit
threads     one process, real time: for tests and for learners that release the interpreter
processes   one machine: a server process and worker processes over shared memory
ray         many machines: actors; the extra `ray`
"""

from functools import partial
from importlib import import_module
from typing import Any

from dovetail.errors import UsageError
from dovetail.training.backends.contract import Backend

_MODULES = {
    "simulated": "dovetail.training.backends.simulated",
    "threads": "dovetail.training.backends.threads",
    "processes": "dovetail.training.backends.processes",
    "ray": "dovetail.training.backends.ray",
}
BACKENDS = tuple(_MODULES)


def load_backend(name: str, **options: Any) -> Backend:
    """The backend of that name, with its own options bound. Imports it only now."""
    if name not in _MODULES:
        raise UsageError("backend", f"there is no {name!r}; there are {', '.join(BACKENDS)}")
    run: Backend = import_module(_MODULES[name]).run
    return partial(run, **options) if options else run
