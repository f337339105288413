"""What the supervisor and its processes say over their private channels.

supervisor ── ServerPlan, Connect, Gone, AskReport, AskCopy, Stop ──► server
           ◄── Ready, Report, Copied, Raised ──
supervisor ── WorkerPlan, Connect ──► worker
           ◄── Finished ──
"""

from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import DovetailError
from dovetail.training.backends.contract import Guard, Storage
from dovetail.training.backends.processes.parcels import Parcel
from dovetail.training.records import Event, Job, Row


@dataclass(frozen=True)
class ServerPlan:
    """What a server starts from; the descriptor of the center's block follows.

    restart        why the server before this one died: go on where it was; None: there was none
    origin         `time.perf_counter()` when the run began; None: it begins now
    temporary      remove the storage's folder if the supervisor dies
    """

    job: Job
    rule: str
    options: dict[str, Any]
    guard: Guard
    storage: Storage | None
    restart: str | None
    shards: int | None
    order: tuple[int, ...] | None
    lease_seconds: float
    origin: float | None
    temporary: bool = False


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker starts from; the descriptors of its own block, the center's and the learner's
    follow. `life`: 0, or how many processes had its number before."""

    job: Job
    rule: str
    options: dict[str, Any]
    worker: int
    life: int
    wire: str
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
class Gone:
    """The worker's process has ended; `for_good`: and no other takes its place."""

    worker: int
    detail: str
    for_good: bool = False


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
class Stop:
    """Take nothing more: the run ends early, for that reason."""

    detail: str


@dataclass(frozen=True)
class Ready:
    """The server is up. `origin`: `time.perf_counter()` when the run began, less what it had
    taken before, if it goes on from a folder. How many rows and events it has, and whether it has
    seen every sample."""

    origin: float
    rows: int
    events: int
    done: bool


@dataclass(frozen=True)
class Report:
    """first     index of the first of `rows`, and of the first of `events`; some hundreds at most
    total     how many there are
    silent    workers that lost their lease, and have not come back
    done      every sample was seen, or the run was stopped
    """

    first: tuple[int, int]
    total: tuple[int, int]
    rows: tuple[Row, ...]
    events: tuple[Event, ...]
    samples: int
    silent: tuple[int, ...]
    done: bool


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
class Raised:
    """An error for the caller, as parts: its class builds its message from other arguments."""

    kind: type[DovetailError]
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: DovetailError) -> "Raised":
        return cls(type(error), error.args, dict(vars(error)))

    def error(self) -> DovetailError:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.args = self.arguments
        vars(error).update(self.state)
        return error
