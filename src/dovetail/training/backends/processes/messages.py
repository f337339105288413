"""What the supervisor and its processes say over their private channels.

supervisor ── ServerStart, Connect, Gone, AskReport, AskCopy, Stop ──► server
           ◄── Ready, ServerReport, Copied, Raised ──
supervisor ── WorkerStart, Connect ──► worker
           ◄── Finished ──
"""

from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import DovetailError
from dovetail.training.backends.contract import ServerPlan, WorkerPlan
from dovetail.training.backends.processes.memory import Parcel
from dovetail.training.supervisor import ServerUp


@dataclass(frozen=True)
class ServerStart:
    """A server's first message; the descriptor of the center's block follows.

    restart        why the server before this one died: go on where it was; None: there was none
    origin         `time.perf_counter()` when the run began; None: it begins now
    """

    plan: ServerPlan
    restart: str | None = None
    origin: float | None = None


@dataclass(frozen=True)
class WorkerStart:
    """A worker's first message; the descriptors of its own block, the center's and the learner's
    follow."""

    plan: WorkerPlan
    learner: Parcel


@dataclass(frozen=True)
class Connect:
    """One end of a new link follows as a descriptor; to the server also the worker's block.

    origin   `time.perf_counter()` when the run began
    """

    worker: int
    origin: float
    detail: str = ""


@dataclass(frozen=True)
class AskReport:
    """How many the supervisor has of each."""

    rows: int
    events: int


@dataclass(frozen=True)
class AskCopy:
    """Copy the center as soon as it has seen `samples`, in place of what was asked before.

    final   it is the last one: what the run leaves
    """

    samples: int
    final: bool = False


@dataclass(frozen=True)
class Ready:
    """The server is up. `origin`: `time.perf_counter()` when the run began, less what it had
    taken before, if it goes on from a folder."""

    origin: float
    up: ServerUp


@dataclass(frozen=True)
class Copied:
    """The center's copy lies in its block."""

    clock: int
    samples: int
    seconds: float
    final: bool


@dataclass(frozen=True)
class Finished:
    """A worker's last word."""

    worker: int


@dataclass(frozen=True)
class RaisedError:
    """An error for the caller, as parts: its class builds its message from other arguments."""

    kind: type[DovetailError]
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: DovetailError) -> "RaisedError":
        return cls(type(error), error.args, dict(vars(error)))

    def error(self) -> DovetailError:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.args = self.arguments
        vars(error).update(self.state)
        return error
