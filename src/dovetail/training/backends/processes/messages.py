"""Messages between the supervisor and its processes, over their private channels.

supervisor ── ServerStart, Connect, Gone, AskReport, AskCopy, Stop ──► server
           ◄── Ready, ServerReport, Copied, RaisedError ──
supervisor ── WorkerStart, Connect ──► worker
           ◄── Finished ──
"""

from dataclasses import dataclass

from dovetail.errors import DovetailError
from dovetail.runtime.parcels import Parcel
from dovetail.training.backends.contract import ServerPlan, WorkerPlan
from dovetail.training.supervisor import ServerUp


@dataclass(frozen=True)
class ServerStart:
    """A server's first message; the descriptor of the center's block follows.

    restart   why the server before this one died, whose state this one takes over; None: it is the
              first server
    origin    `time.perf_counter()` when the run began; None: it begins now
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
    """Asks the server for a report, beyond the rows and events that the supervisor has."""

    rows: int
    events: int


@dataclass(frozen=True)
class AskCopy:
    """Asks for a copy of the center as soon as it has seen `samples`. It replaces the last request.

    final   the copy is the run's result
    """

    samples: int
    final: bool = False


@dataclass(frozen=True)
class Ready:
    """The server is up. `origin` is `time.perf_counter()` when the run began, minus the seconds
    that it had taken before if it was resumed from a folder."""

    origin: float
    up: ServerUp


@dataclass(frozen=True)
class Copied:
    """The copy that was asked for lies in the center's block."""

    clock: int
    samples: int
    seconds: float
    final: bool


@dataclass(frozen=True)
class Finished:
    """A worker's last message: it has found no sample left."""

    worker: int


@dataclass(frozen=True)
class RaisedError:
    """The server's last message: the error that it failed with, which is the caller's to know."""

    error: DovetailError
