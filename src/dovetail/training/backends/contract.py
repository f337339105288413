"""What a backend is: it runs one assignment to its end and returns the outcome.

Backend = (Assignment, Watcher) -> Outcome        simulated, threads, processes, ray
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dovetail.training.learner import MakeLearner
from dovetail.training.records import Event, Job, Outcome, Row, Vector
from dovetail.training.rules import make_rule
from dovetail.training.rules.contract import Rule


@dataclass(frozen=True)
class Guard:
    """Which commits the server refuses before it changes anything, beside broken and foreign ones.

    norm_factor   a commit's norm may be so many times the median of the last 100 (None: any)
    norm_limit    and no larger than this (None: any)
    """

    norm_factor: float | None = None
    norm_limit: float | None = None


@dataclass(frozen=True)
class FailurePolicy:
    """Which failures a run survives. All else ends it with the first traceback.

    worker_restarts   killed workers that are started again, in all
    worker_losses     workers that may stay away once those are used up; one must remain
    worker_errors     exceptions in a worker that count as a death rather than as a bug
    server_restarts   of the server
    refusals          refused commits (not for a lost lease) before the run counts as diverged
    lease_seconds     a worker silent for longer loses its lease: it is hung. Every local step is a
                      sign of life, and so is `alive()` within a long one
    """

    worker_restarts: int = 3
    worker_losses: int = 0
    worker_errors: int = 0
    server_restarts: int = 3
    refusals: int = 100
    lease_seconds: float = 60.0


@dataclass(frozen=True)
class Storage:
    """Where a run keeps its state, so that nothing is lost with the server.

    log              every commit is written before it is applied; else a restart falls back to the
                     last snapshot
    snapshot_commits between two snapshots
    sync             wait for the disk at every commit: survives the machine's death, not only ours
    """

    folder: Path
    log: bool = True
    snapshot_commits: int = 1000
    sync: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Assignment:
    """All that a backend needs to know.

    theta         [size] where the center starts
    learner       made anew in each worker
    shards        of the center; None: the backend's choice
    wire          how vectors travel: none | float16 | bfloat16 | topk:FRACTION
    order         if given, the server takes turns in this order of workers (one entry a turn)
    """

    job: Job
    rule: Rule
    theta: Vector
    learner: MakeLearner
    guard: Guard = field(default_factory=Guard)
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    storage: Storage | None = None
    shards: int | None = None
    wire: str = "none"
    order: tuple[int, ...] | None = None


@dataclass
class Watcher:
    """The caller's side of a running run: called from one thread, in the caller's process.

    every_samples  call `evaluate` each time the center has seen so many more samples (None: never)
    every_seconds  or so many seconds of the backend's time have passed
    evaluate       (theta [size], clock, samples, seconds) -> figures by name; theta is a copy
    should_stop    (figures so far) asked after each evaluation
    rows, event    each commit as it is applied (in batches), each thing that happens
    """

    every_samples: int | None = None
    every_seconds: float | None = None
    evaluate: Callable[[Vector, int, int, float], dict[str, float]] | None = None
    should_stop: Callable[[list[dict[str, float]]], bool] | None = None
    rows: Callable[[list[Row]], None] | None = None
    event: Callable[[Event], None] | None = None


@dataclass(frozen=True)
class ServerPlan:
    """What a server in another process starts from.

    options     of the rule
    temporary   the storage's folder is of this run alone
    """

    job: Job
    rule: str
    options: dict[str, Any]
    guard: Guard
    storage: Storage | None
    shards: int
    order: tuple[int, ...] | None
    wire: str
    lease_seconds: float
    server_restarts: int = 0
    temporary: bool = False

    @classmethod
    def of(cls, assignment: Assignment, storage: Storage | None) -> Self:
        """The assignment's, with the storage that the run has in the end."""
        return cls(
            job=assignment.job,
            rule=assignment.rule.name,
            options=dict(assignment.rule.options),
            guard=assignment.guard,
            storage=storage,
            shards=assignment.shards or 1,
            order=assignment.order,
            wire=assignment.wire,
            lease_seconds=assignment.policy.lease_seconds,
            server_restarts=assignment.policy.server_restarts,
            temporary=storage is not None and assignment.storage is None,
        )

    def make_rule(self) -> Rule:
        return make_rule(self.rule, **self.options)


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker in another process starts from; its learner travels beside it.

    life   how many processes had its number before
    """

    job: Job
    rule: str
    options: dict[str, Any]
    worker: int
    life: int
    wire: str
    lease_seconds: float

    @classmethod
    def of(cls, assignment: Assignment, worker: int, life: int) -> Self:
        return cls(
            job=assignment.job,
            rule=assignment.rule.name,
            options=dict(assignment.rule.options),
            worker=worker,
            life=life,
            wire=assignment.wire,
            lease_seconds=assignment.policy.lease_seconds,
        )

    def make_rule(self) -> Rule:
        return make_rule(self.rule, **self.options)


Backend = Callable[[Assignment, Watcher], Outcome]
