"""What workers and the parameter server say to each other, and what a run leaves behind.

    worker ── Turn(commit?, pull?, lease?) ──► server        one message and its answer a window
           ◄── Reply(verdict, lease, clock) ──               vectors travel beside them

A *lease* is the samples of one window, as positions in the run: position p is sample
`order(epoch)[p % samples]` of epoch `p // samples`. The commit that carries a lease's samples ends
it, so that each sample counts exactly once, whoever dies.
Imports no torch: the server starts with this.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]
"""[size] all parameters in one, float32 or float64."""


@dataclass(frozen=True)
class Job:
    """What is trained, for how long: all that server and workers must agree on.

    run        a random name; commits of another run are refused
    size       elements of the vector
    samples    in the data set; None for a stream whose end is not yet known
    epochs     over all samples
    batch      samples of one local step
    window     local steps between commits (lambda); None: one commit, at the end
    workers    n that the run starts with; rules that gather wait for all of them at the start
    """

    run: str
    size: int
    samples: int | None
    epochs: int
    batch: int
    window: int | None = 1
    workers: int = 1
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Lease:
    """Samples [start, stop) of the run, as positions; numbered as they were handed out."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Commit:
    """The head of a commit; its vector travels beside it.

    sequence       1, 2, ... per worker: each is applied exactly once
    base_clock     the server's clock when the parameters it started from were pulled
    lease          number of the lease whose samples it carries
    steps          local steps behind it: the window, or fewer at the end of an epoch
    rate           learning rate of the last of them, schedule included
    loss           mean over its samples
    begin_seconds, end_seconds   of the window's computation, on the worker's clock
    """

    run: str
    worker: int
    sequence: int
    base_clock: int
    lease: int
    samples: int
    steps: int
    rate: float
    loss: float
    begin_seconds: float = 0.0
    end_seconds: float = 0.0


@dataclass(frozen=True)
class Turn:
    """What a worker asks, done in this order: commit, lease, pull.

    The answer to a turn may take a while: until the round is complete (rules that gather), until
    the slowest worker has caught up (SSP), or until a sample is free or none is left.
    """

    worker: int
    commit: Commit | None = None
    lease: bool = False
    pull: bool = False


class Verdict(StrEnum):
    """What became of a commit."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # was applied before: its answer had been lost
    REFUSED = "refused"  # nothing was changed


class Refusal(StrEnum):
    """Why a commit was refused."""

    RUN = "another run"
    SHAPE = "wrong shape"
    CHECKSUM = "wrong checksum"
    NOT_FINITE = "not finite"
    NORM = "norm too large"
    LEASE = "lease not held"  # it ended while the worker was silent; others train its samples
    SEQUENCE = "out of sequence"


@dataclass(frozen=True)
class Reply:
    """The server's answer; a pulled vector travels beside it.

    verdict   of the commit; None without one
    lease     the next samples; None where none was asked for, or none is left (then `done`)
    clock     of the center that was pulled, else of now
    samples   that the center has seen
    stop      the run ends before its epochs (early stop): discard what is not committed
    """

    verdict: Verdict | None = None
    refusal: Refusal | None = None
    lease: Lease | None = None
    done: bool = False
    clock: int = 0
    samples: int = 0
    stop: bool = False


@dataclass(frozen=True)
class Row:
    """One commit in a run's history.

    clock       the server's, after it was applied; staleness = clock when applied - base clock
    seconds     since the run's start when it was answered, in the backend's own time
    begin_seconds, end_seconds   its computation, in the same time
    momentum    the online estimate of implicit momentum, nan where there is none
    """

    clock: int
    worker: int
    sequence: int
    staleness: int
    steps: int
    samples: int
    loss: float
    norm: float
    seconds: float
    begin_seconds: float
    end_seconds: float
    momentum: float = float("nan")


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: `kind` is joined | left | lost | restarted | refused |
    server_restarted | stopped. `worker` -1: the server."""

    kind: str
    worker: int
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Evaluation:
    """The center's figures at one moment, by name (`loss`, `accuracy`)."""

    clock: int
    samples: int
    seconds: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: the center, and its history."""

    theta: Vector
    clock: int
    samples: int
    seconds: float
    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    stopped: bool = False
    meta: dict[str, Any] = field(default_factory=dict)  # rule, options, backend, job: for reports
