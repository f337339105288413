"""Defines the records that workers and the parameter server exchange, and those of a run's outcome.

    worker ── Turn(commit?, pull?, lease?) ──► server        one message and its answer a window
           ◄── Reply(verdict, lease, clock) ──               vectors travel beside them

A *lease* is the samples of one window, as positions in the run; `positions` says which samples they
are. The commit that carries a lease's samples ends the lease. So each sample counts exactly once,
even if workers die. This module imports no torch, so that the server starts without it.
"""

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]
"""[size] all trainable parameters in one vector, float32 or float64."""
LEASED = "leased"
"""The partition of a run whose workers lease from one pool; see `positions`."""


CHANGING = ("epochs", "workers")
"""Fields of a job that may differ in a run that is resumed: more epochs, or other workers."""


@dataclass(frozen=True)
class Job:
    """The settings of a run on which server and workers must agree.

    run        a random name; commits of another run are refused
    size       elements of the vector
    samples    samples of the data set; None for a stream whose end is not yet known
    epochs     passes over all samples
    batch      samples of one local step
    window     local steps between commits (lambda); None: each worker commits once, at the end
    workers    n that the run starts with; rules that gather wait for all of them at the start
    partition  which samples are whose: a name in `request.PARTITIONS`
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
    partition: str = LEASED

    def facts(self) -> dict[str, Any]:
        """The fields that identify a run, but for `run`. Its resumption must share all but those of
        `CHANGING`. A partition is named only if it is not the first one, so that runs from before
        there were others go on."""
        fields = {name: value for name, value in asdict(self).items() if name != "run"}
        if self.partition == LEASED:
            del fields["partition"]
        return fields


@dataclass(frozen=True)
class Lease:
    """Samples [start, stop) of the run, as positions. `number` counts leases as they are taken."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Commit:
    """The head of a commit; its vector travels beside it.

    sequence       1, 2, ... per worker: each number is applied exactly once
    base_clock     the server's clock when the parameters that the window started from were pulled
    lease          number of the lease whose samples it carries
    steps          local steps of the window: `Job.window`, or fewer at the end of an epoch
    rate           learning rate of the last local step, schedule included
    loss           mean over its samples
    begin_seconds, end_seconds   when the window's computation began and ended, by the worker
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
    """What a worker asks of the server, which does it in this order: commit, lease, pull.

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

    verdict   what became of the commit; None if there was none
    lease     the next samples; None if none was asked for, or none is left (then `done` is true)
    clock     the clock of the center that was pulled, else the present clock
    samples   samples that the center has seen
    stop      the run ends before its epochs (early stop): the worker discards what it has not
              committed
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

    clock       the server's clock after the commit was applied
    staleness   the server's clock just before it was applied - the commit's base clock
    seconds     when the server applied it, since the run's start, in the backend's own time
    begin_seconds, end_seconds   when its computation began and ended
    momentum    the online estimate of implicit momentum; nan if there is none
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


COLUMNS: dict[str, Any] = {each.name: each.type for each in fields(Row)}
"""Name -> type of a row's fields, in order. A run's files, the checks of what they hold, and its
tables follow from it."""
COUNTS = tuple(name for name, kind in COLUMNS.items() if kind is int)
"""Names of those that are whole numbers."""
TIMES = tuple(name for name in COLUMNS if name.endswith("seconds"))
"""Names of those that are moments of the run."""


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
    """The result of a run: the center theta [size], and the run's history."""

    theta: Vector
    clock: int
    samples: int
    seconds: float
    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    stopped: bool = False
    meta: dict[str, Any] = field(default_factory=dict)  # rule, options, backend, job: for reports
