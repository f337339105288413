"""What the supervisor, the server and the workers say to each other, as arguments and results.

supervisor ── poll, copy, gone, stop, close ──► server ◄── join, turn, alive, leave ── worker
"""

from dataclasses import dataclass
from typing import Any

from dovetail.training.backends.contract import Guard, Storage
from dovetail.training.backends.processes.messages import Copied, Raised
from dovetail.training.records import Event, Job, Refusal, Reply, Row, Vector


@dataclass(frozen=True)
class ServerPlan:
    """What a server starts from.

    wire        how commits travel
    shards      actors that the center is spread over; 1: it lies in the server
    restarts    that the policy allows
    temporary   the storage's folder is of this run alone
    """

    job: Job
    rule: str
    options: dict[str, Any]
    wire: str
    guard: Guard
    storage: Storage
    shards: int
    order: tuple[int, ...] | None
    lease_seconds: float
    restarts: int
    temporary: bool = False


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker starts from. `life`: how many actors had its number before."""

    job: Job
    rule: str
    options: dict[str, Any]
    wire: str
    worker: int
    life: int
    lease_seconds: float


@dataclass(frozen=True)
class Joined:
    """`sequence` of the worker's last applied commit; `seconds` since the run began."""

    sequence: int
    seconds: float


@dataclass(frozen=True)
class Looked:
    """What a shard found in its piece of a commit: why it is refused, or its sum of squares."""

    refusal: Refusal | None
    squares: float = 0.0


@dataclass(frozen=True)
class Staged:
    """A commit whose pieces lie at the shards under a key: 16 hexadecimal digits."""

    key: str
    looked: tuple[Looked, ...]


@dataclass(frozen=True)
class Numbered:
    """The ledger's steps for all shards, as (name, fields) each, and the keys of the commits that
    they apply, as (worker, key) each. Numbers count up from 1."""

    number: int
    steps: tuple[tuple[str, dict[str, Any]], ...]
    keys: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Done:
    """The number of the last steps that a shard has done, and its life: another one each time it
    is started."""

    life: str
    number: int


@dataclass(frozen=True)
class Answered:
    """`center` [size] where it was asked for; with shards `number`, to fetch it by."""

    reply: Reply
    center: Vector | None = None
    number: int = 0


@dataclass(frozen=True)
class Report:
    """What has happened since the last one.

    life      of the server: another one each time it is started
    node      where it lives
    found     it went on from a state that it found in its folder
    first     indices of the first of `rows` and of `events`; `total`: how many there are
    seconds   since the run began
    silent    workers that lost their lease, and have not come back
    done      every sample was seen, or the run was stopped
    raised    what the server failed with
    """

    life: str
    node: str
    found: bool
    first: tuple[int, int] = (0, 0)
    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()
    total: tuple[int, int] = (0, 0)
    samples: int = 0
    seconds: float = 0.0
    silent: tuple[int, ...] = ()
    done: bool = False
    raised: Raised | None = None


@dataclass(frozen=True)
class Center:
    """theta [size], and when it was so."""

    theta: Vector
    copied: Copied
