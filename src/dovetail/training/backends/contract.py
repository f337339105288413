"""Records that a backend is given: the assignment, the caller's watcher, and the failure policy.

    Backend = (Assignment, Watcher) -> Outcome        simulated, threads, processes, ranks, ray

A backend runs one assignment to its end and returns the outcome.

    RunSettings ─┬─► Assignment   and the center and the learners, which stay with the caller
                 ├─► ServerPlan   what a server in another process is sent
                 └─► WorkerPlan   what a worker in another process is sent
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Self

from dovetail.errors import UsageError
from dovetail.training.learner import MakeLearner
from dovetail.training.options import FailurePolicy, Guard, Storage
from dovetail.training.records import Event, Job, Outcome, Row, Vector
from dovetail.training.rules.contract import Rule


def check_options(backend: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `UsageError` for an option that the backend does not have."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(unknown[0], f"the {backend} backend has no such option")


@dataclass(frozen=True)
class RunSettings:
    """What a run's server and its workers are told alike. Whoever is told a run's settings is given
    this record whole, so a new setting is one more field here.

    rule      where this record was sent to, it was made anew, by its name and options
    shards    number of shards of the center; None: the backend chooses
    wire      encoding of commits: none | float16 | bfloat16 | topk:FRACTION
    order     workers; if given, the server takes turns in this order, one entry a turn
    """

    job: Job
    rule: Rule
    _: KW_ONLY
    guard: Guard = field(default_factory=Guard)
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    storage: Storage | None = None
    shards: int | None = None
    wire: str = "none"
    order: tuple[int, ...] | None = None

    @property
    def lease_seconds(self) -> float:
        return self.policy.lease_seconds

    @property
    def server_restarts(self) -> int:
        return self.policy.server_restarts

    def settings(self) -> dict[str, Any]:
        """The fields of this record, from which others of the same run are made."""
        return {each.name: getattr(self, each.name) for each in fields(RunSettings)}


@dataclass(frozen=True)
class Assignment(RunSettings):
    """A run for a backend to do.

    theta     [size] the initial center
    learner   makes the learner of a worker; called in each worker
    device    where workers compute, as the request names it, for backends that assign GPUs
    facts     what all ranks must agree on if each of them makes this assignment: name -> JSON
    """

    theta: Vector
    learner: MakeLearner
    _: KW_ONLY
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
class ServerPlan(RunSettings):
    """The settings of a run's server.

    temporary   the storage's folder is temporary and ends with this run
    """

    _: KW_ONLY
    shards: int = 1
    temporary: bool = False

    @classmethod
    def of(cls, run: RunSettings, storage: Storage | None) -> Self:
        """The plan of a run's server. `storage` replaces the run's, which may be None."""
        own: dict[str, Any] = {"storage": storage, "shards": run.shards or 1}
        temporary = storage is not None and run.storage is None
        return cls(**run.settings() | own, temporary=temporary)


@dataclass(frozen=True)
class WorkerPlan(RunSettings):
    """The settings of a worker in another process. Its learner travels beside them.

    life   how many processes have had this worker's number before
    """

    worker: int
    life: int

    @classmethod
    def of(cls, run: RunSettings, worker: int, life: int) -> Self:
        # What a server alone needs stays here: an order has an entry for each turn.
        own: dict[str, Any] = {"storage": None, "order": None}
        return cls(**run.settings() | own, worker=worker, life=life)


Backend = Callable[[Assignment, Watcher], Outcome]

__all__ = [
    "Assignment",
    "Backend",
    "FailurePolicy",
    "Guard",
    "RunSettings",
    "ServerPlan",
    "Storage",
    "Watcher",
    "WorkerPlan",
    "check_options",
]
