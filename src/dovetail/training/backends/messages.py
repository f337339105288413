"""Messages between the supervisor, the server and the workers, whoever started these.

    supervisor ── Gone, Stop, AskReport, AskCopy ────────────► server, a process or an actor
               ◄── ServerReport, CenterCopy, RaisedError ──
               ── ServerStart, Connect ──► server process ── Ready ──►
               ── WorkerStart, Connect ──► worker process ── Finished ──►

    worker actor ── Turn, StagedCommit ──► server actor ── Joined, TurnAnswer ──► worker actor
    server actor ── NumberedSteps ──► shard actors ── ShardProgress ──►

Processes exchange them over private channels, and their vectors lie in shared memory. Actors
exchange them as arguments and results of calls. The packets of a worker process's turns are in
`processes.frames`.
"""

from dataclasses import dataclass
from typing import Any

from dovetail.errors import DovetailError
from dovetail.runtime.parcels import Parcel
from dovetail.training.backends.contract import ServerPlan, WorkerPlan
from dovetail.training.center import CommitPayload
from dovetail.training.records import Reply, Vector
from dovetail.training.supervisor import RunProgress, ServerReport, ServerUp

# Between the supervisor and the server


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


def next_copy(progress: RunProgress, seconds: float, done: bool) -> AskCopy | None:
    """The copy of the center that the next evaluation needs, or the run's end if it is `done`;
    None: when an evaluation is due depends on time alone."""
    if done:
        return AskCopy(0, final=True)
    samples = progress.wanted_samples(seconds)
    return None if samples is None else AskCopy(samples)


@dataclass(frozen=True)
class RaisedError:
    """The server's last message: the error that it failed with, which is the caller's to know."""

    error: DovetailError


@dataclass(frozen=True)
class ActorReport:
    """What an actor, which Ray may have restarted, reports.

    life      the server's life, which is new each time it is started
    node      Ray's id of its node
    found     whether it found the run's state in its folder when it started
    seconds   seconds since the run began
    """

    life: str
    node: str
    found: bool
    seconds: float
    report: ServerReport


# Starts of processes, and their links


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
class Ready:
    """The server is up. `origin` is `time.perf_counter()` when the run began, minus the seconds
    that it had taken before if it was resumed from a folder."""

    origin: float
    up: ServerUp


@dataclass(frozen=True)
class Finished:
    """A worker's last message: it has found no sample left."""

    worker: int


# Calls of actors


@dataclass(frozen=True)
class Joined:
    """The answer to `join`: the `sequence` of the worker's last applied commit, and the `seconds`
    since the run began."""

    sequence: int
    seconds: float


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to a turn, with `center` [size] if it was asked for. With shards, the worker
    fetches the center from them by `number`; 0: none was asked for."""

    reply: Reply
    center: Vector | None = None
    number: int = 0


@dataclass(frozen=True)
class StagedCommit:
    """A commit whose pieces the shards keep under a key of 16 hexadecimal digits. `pieces` has what
    each shard has found of its own, without the vector."""

    key: str
    pieces: tuple[CommitPayload, ...]


@dataclass(frozen=True)
class NumberedSteps:
    """The ledger's steps for all shards, (name, fields) each, and the keys of the commits that they
    apply, (worker, key) each. Numbers count up from 1."""

    number: int
    steps: tuple[tuple[str, dict[str, Any]], ...]
    keys: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ShardProgress:
    """The number of the last steps that a shard has done, and the shard's life, which is new each
    time it is started."""

    life: str
    number: int
