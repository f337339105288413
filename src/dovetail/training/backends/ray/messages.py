"""Arguments and results of the calls between the supervisor, the server, shards and workers.

supervisor ── poll, copy, gone, stop, close ──► server ◄── join, turn, alive, leave ── worker
"""

from dataclasses import dataclass
from typing import Any

from dovetail.errors import DovetailError
from dovetail.training.records import Refusal, Reply, Vector
from dovetail.training.supervisor import ServerReport


@dataclass(frozen=True)
class Joined:
    """The answer to `join`: the `sequence` of the worker's last applied commit, and the `seconds`
    since the run began."""

    sequence: int
    seconds: float


@dataclass(frozen=True)
class PieceCheck:
    """A shard's check of its piece of a commit: why it is refused, or its sum of squares."""

    refusal: Refusal | None
    squares: float = 0.0


@dataclass(frozen=True)
class StagedCommit:
    """A commit whose pieces the shards keep under a key of 16 hexadecimal digits. `checks` has one
    entry per shard."""

    key: str
    checks: tuple[PieceCheck, ...]


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


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to a turn, with `center` [size] if it was asked for. With shards, the worker
    fetches the center from them by `number`; 0: none was asked for."""

    reply: Reply
    center: Vector | None = None
    number: int = 0


@dataclass(frozen=True)
class ActorReport:
    """The server's answer to a poll.

    life      the server's life, which is new each time it is started
    node      Ray's id of its node
    found     whether it found the run's state in its folder when it started
    seconds   seconds since the run began
    report    None if the server has failed
    raised    the error that the server failed with
    """

    life: str
    node: str
    found: bool
    seconds: float = 0.0
    report: ServerReport | None = None
    raised: DovetailError | None = None
