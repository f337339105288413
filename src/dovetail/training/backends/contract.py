"""Records that a backend is given: the assignment, the caller's watcher, and the failure policy.

    Backend = (Assignment, Watcher) -> Outcome        simulated, threads, processes, ranks, ray

A backend runs one assignment to its end and returns the outcome.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dovetail.errors import UsageError
from dovetail.training.learner import MakeLearner
from dovetail.training.records import Event, Job, Outcome, Row, Vector
from dovetail.training.rules import make_rule
from dovetail.training.rules.contract import Rule


def check_options(backend: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `UsageError` for an option that the backend does not have."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(unknown[0], f"the {backend} backend has no such option")


@dataclass(frozen=True)
class Guard:
    """Which commits the server refuses by their norm. Broken and foreign ones are always refused.

    norm_factor   a commit's norm may be at most so many times the median of the last 100 norms
                  (None: no limit)
    norm_limit    a commit's norm may be at most this (None: no limit)
    """

    norm_factor: float | None = None
    norm_limit: float | None = None


@dataclass(frozen=True)
class FailurePolicy:
    """Which failures a run survives. Any other failure ends it, with the first traceback.

    worker_restarts   how many dead workers are started again, over the whole run
    worker_losses     how many workers may be lost once the restarts are used up; one must remain
    worker_errors     how many exceptions in workers count as deaths; one more ends the run
    server_restarts   how often the server is started again
    refusals          how many commits may be refused, other than for a lost lease, before the run
                      counts as diverged
    lease_seconds     a worker that is silent for longer counts as hung and loses its lease. Every
                      local step is a sign of life, and so is a call of `alive()` within a long one
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

    log               every commit is written before it is applied; without a log, a restart goes
                      back to the last snapshot
    snapshot_commits  commits between two snapshots
    sync              every commit waits for the disk, so that the log survives the death of the
                      machine too, and not only the server's
    resume            the run that the folder holds is continued
    """

    folder: Path
    log: bool = True
    snapshot_commits: int = 1000
    sync: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Assignment:
    """A run for a backend to do.

    theta     [size] the initial center
    learner   makes the learner of a worker; called in each worker
    shards    number of shards of the center; None: the backend chooses
    wire      encoding of commits: none | float16 | bfloat16 | topk:FRACTION
    order     workers; if given, the server takes turns in this order, one entry a turn
    device    where workers compute, as the request names it, for backends that assign GPUs
    facts     what all ranks must agree on if each of them makes this assignment: name -> JSON
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
    device: str = "cpu"
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Watcher:
    """The caller's side of a run: callbacks, all called from one thread of the caller's process.

    every_samples  call `evaluate` each time the center has seen so many more samples (None: never)
    every_seconds  call `evaluate` also each time so many seconds of the backend's time have passed
    evaluate       (theta [size], clock, samples, seconds) -> figures by name; theta is a copy
    should_stop    (figures so far) asked after each evaluation
    rows           called with the commits that were applied, in batches; True ends the run
    resumed        called in place of `rows` with those that the run had before it was resumed
    forgotten      called with how many of all rows a server without a log has kept
    event          called with each event
    result         (outcome) -> the center [size] that the caller keeps, for backends that give it
                   to other processes; None: the outcome's
    """

    every_samples: int | None = None
    every_seconds: float | None = None
    evaluate: Callable[[Vector, int, int, float], dict[str, float]] | None = None
    should_stop: Callable[[list[dict[str, float]]], bool] | None = None
    rows: Callable[[list[Row]], bool | None] | None = None
    resumed: Callable[[list[Row]], None] | None = None
    forgotten: Callable[[int], None] | None = None
    event: Callable[[Event], None] | None = None
    result: Callable[[Outcome], Vector] | None = None


@dataclass(frozen=True)
class ServerPlan:
    """The settings of a server in another process. The rule is sent as its name and options.

    options     options of the rule
    temporary   the storage's folder is temporary and ends with this run
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
        """The assignment's plan. `storage` replaces the assignment's, which may be None."""
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
    """The settings of a worker in another process. Its learner travels beside them.

    life   how many processes have had this worker's number before
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
