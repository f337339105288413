"""What the supervisor, the server and the workers say to each other, as arguments and results.

supervisor ── poll, copy, gone, stop, close ──► server ◄── join, turn, alive, leave ── worker
"""

from dataclasses import dataclass
from typing import Any

from dovetail.training.backends.processes.messages import RaisedError
from dovetail.training.records import Refusal, Reply, Vector
from dovetail.training.supervisor import ServerReport


@dataclass(frozen=True)
class Joined:
    """`sequence` of the worker's last applied commit; `seconds` since the run began."""

    sequence: int
    seconds: float


@dataclass(frozen=True)
class PieceCheck:
    """What a shard found in its piece of a commit: why it is refused, or its sum of squares."""

    refusal: Refusal | None
    squares: float = 0.0


@dataclass(frozen=True)
class StagedCommit:
    """A commit whose pieces lie at the shards under a key: 16 hexadecimal digits."""

    key: str
    looked: tuple[PieceCheck, ...]


@dataclass(frozen=True)
class NumberedSteps:
    """The ledger's steps for all shards, as (name, fields) each, and the keys of the commits that
    they apply, as (worker, key) each. Numbers count up from 1."""

    number: int
    steps: tuple[tuple[str, dict[str, Any]], ...]
    keys: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ShardProgress:
    """The number of the last steps that a shard has done, and its life: another one each time it
    is started."""

    life: str
    number: int


@dataclass(frozen=True)
class TurnAnswer:
    """`center` [size] where it was asked for; with shards `number`, to fetch it by."""

    reply: Reply
    center: Vector | None = None
    number: int = 0


@dataclass(frozen=True)
class ActorReport:
    """What a server says of itself when it is polled.

    life      of the server: another one each time it is started
    node      where it lives
    found     it went on from a state that it found in its folder
    seconds   since the run began
    report    None where it has raised
    raised    what the server failed with
    """

    life: str
    node: str
    found: bool
    seconds: float = 0.0
    report: ServerReport | None = None
    raised: RaisedError | None = None
