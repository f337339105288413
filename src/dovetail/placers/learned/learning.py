"""Asynchronous training of a policy: controllers around one parameter server.

A. Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.4.

    parameter server ──┬── controller 0 ── K evaluators      each controller waits for its own
      theta += v       └── controller 1 ── K evaluators      evaluators, commits when it is done,
                                                             and keeps its own baselines

The server, its backends and rules are those of `training/`: the samples of its job are the trials,
a batch is one update. So a killed controller's trials are handed out again and their number stays
exact. What controllers write down (`diary`) lies in the run's folder beside the server's state:
both together resume the run. Differences: RL17 has up to 20 controllers with 4 or 8 evaluators on
as many machines. Here both numbers are free, evaluators are threads of the simulator, and the rule
may be any whose workers step.
"""

import copy
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import TrainingError, UsageError
from dovetail.placers.learned.diary import CONTROLLERS, DiaryEntry, Readers
from dovetail.placers.learned.features import look
from dovetail.placers.learned.judges import JudgeFactory, SimulatedJudge
from dovetail.placers.learned.learner import (
    PolicyLearner,
    TaskView,
    parameters_of,
    write_parameters,
)
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import (
    Float32,
    Judge,
    Learned,
    LearningSettings,
    PlacementTask,
    Point,
)
from dovetail.runtime.files import refuse_links
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, FailurePolicy, Storage, Watcher
from dovetail.training.checkpoint import RunFolder, open_folder
from dovetail.training.modules import device_of
from dovetail.training.pickling import check_travels
from dovetail.training.records import Event, Job, Outcome
from dovetail.training.request import launched_rank
from dovetail.training.rules import make_rule
from dovetail.training.rules.contract import Rule

LEASE_SECONDS = 120.0
"""A controller that gives no sign of life for so long is hung; it gives one a second, but for
within a pass of the policy."""
RESTARTS = 3
"""Of each controller, on average."""
_IN_PROCESS = ("simulated", "threads")


def learn(
    tasks: Sequence[PlacementTask],
    policy: Policy,
    settings: LearningSettings,
    *,
    trials: int,
    seconds: float | None = None,
    controllers: int = 1,
    evaluators: int = 1,
    backend: str = "processes",
    device: str = "cpu",
    rule: Rule | str = "downpour",
    judge: JudgeFactory | None = None,
    folder: Path | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: Callable[[Point], None] | None = None,
    happened: Callable[[Event], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Learned:
    """Train the policy on the tasks, in turn, for so many trials in all; it holds the result.

    seconds       after which it ends with fewer trials; None: never
    controllers   that draw and learn, each on its own
    evaluators    of each: threads of the simulator
    backend       simulated | threads | processes | ranks | ray; `options`: its own
    device        where controllers compute: cpu, cuda for the GPUs in turn, or cuda:1
    judge         makes a task's judge in each controller's process; None: the simulator
    folder        where the run is kept, new or empty; on `ray` and `ranks`, one that all machines
                  see. None: a temporary one, which `ranks` refuses
    resume        go on with the run in `folder`; with one controller, bit for bit
    progress      called with each update as it becomes known
    happened      called with what happens to controllers and to their server

    With the backend `ranks` all ranks call this, and all return the same; `progress` and `happened`
    are called on the first one.

    Ctrl-C ends the run and keeps the best so far, `interrupted`; `KeyboardInterrupt` where there is
    none yet. Raises `UsageError`, `RunMismatchError` for another run's folder, and what the
    backend raises.
    """
    _check(tasks, trials, controllers, evaluators, settings)
    bound = make_rule(rule) if isinstance(rule, str) else rule
    started = load_backend(backend, **(options or {}))
    rank = launched_rank() if backend == "ranks" else 0
    if backend == "ranks" and folder is None:
        says = "all ranks write down what they try there; name one that all of them see"
        raise UsageError("folder", says)
    with _home(folder, resume) as path:
        theta = parameters_of(policy)
        facts = {
            "seed": seed,
            "rule": bound.name,
            "options": bound.options,
            "policy": [policy.name, _digest(policy.config), theta.size],
            "tasks": [_facts_of(task) for task in tasks],
            "settings": _digest(asdict(settings)),
            "trials": trials,
            "controllers": controllers,
        }
        # Rank 0 alone opens the run. Its name comes to the others with their first message.
        home = (
            RunFolder(path, "") if rank else open_folder(path, facts, resume, more=(CONTROLLERS,))
        )
        refuse_links(path / CONTROLLERS)
        job = Job(
            run=home.run, size=theta.size, samples=trials, epochs=1, batch=settings.trials,
            window=1, workers=controllers, seed=seed,
        )  # fmt: skip
        run = _LearningRun(
            home,
            None if rank else progress,
            happened,
            listens=backend == "simulated",
            seconds=seconds,
        )
        recipe = Controllers(
            copy.deepcopy(policy),
            tuple(tasks),
            settings,
            path,
            evaluators,
            judge,
            seed,
            run.origin,
            device,
        )
        if backend not in _IN_PROCESS:
            check_travels({"policy": policy, "judge": judge})
        assignment = Assignment(
            job=job,
            rule=bound,
            theta=theta,
            learner=run.remember(recipe) if backend in _IN_PROCESS else recipe,
            policy=FailurePolicy(
                worker_restarts=RESTARTS * controllers, lease_seconds=LEASE_SECONDS
            ),
            storage=None if folder is None else Storage(home.center, resume=resume),
            facts=facts,
        )
        learned = run.end(assignment, started)
    write_parameters(policy, learned.theta)
    return learned


def _check(
    tasks: Sequence[PlacementTask],
    trials: int,
    controllers: int,
    evaluators: int,
    settings: LearningSettings,
) -> None:
    counts = {"trials": trials, "controllers": controllers, "evaluators": evaluators}
    for name, count in {**counts, "settings": settings.trials}.items():
        if count < 1:
            raise UsageError(name, f"must be a whole number of at least 1, not {count!r}")
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise UsageError("tasks", "need names of their own" if names else "there are none")


@contextmanager
def _home(folder: Path | None, resume: bool) -> Iterator[Path]:
    if folder is not None:
        yield Path(folder).absolute()
        return
    if resume:
        raise UsageError("resume", "needs the folder of the run")
    with tempfile.TemporaryDirectory(prefix="dovetail-learn-") as name:
        yield Path(name)


def _facts_of(task: PlacementTask) -> list[Any]:
    """What is the same in every life of a run."""
    return [
        task.name, task.graph.fingerprint, task.machine.fingerprint, task.costs.source,
        task.groups.count, task.objective, task.pins, task.caps,
    ]  # fmt: skip


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Controllers:
    """Controller's number -> its learner, with its evaluators; travels to its process."""

    policy: Policy
    tasks: tuple[PlacementTask, ...]
    settings: LearningSettings
    folder: Path
    evaluators: int
    judge: JudgeFactory | None
    seed: int
    origin: float
    device: str = "cpu"

    def __call__(
        self, controller: int, listen: Callable[[Point], None] | None = None
    ) -> PolicyLearner:
        """A learner with a policy of its own."""
        problems = [task.problem(threads=self.evaluators) for task in self.tasks]
        judges: list[Judge] = [SimulatedJudge(problem) for problem in problems]
        if self.judge is not None:
            judges = [self.judge(task) for task in self.tasks]
        seen = [TaskView(t.name, look(p)) for t, p in zip(self.tasks, problems, strict=True)]
        policy = copy.deepcopy(self.policy).to(device_of(self.device, controller))
        return PolicyLearner(
            policy, seen, judges, self.settings, seed=self.seed,
            controller=controller, folder=self.folder, origin=self.origin, listen=listen,
        )  # fmt: skip


@dataclass
class _LearningRun:
    """The caller's side of a run.

    listens   the learners here tell of their updates themselves; else their diaries are read
    learners  that were made in this process
    origin    `time.time()` of the run's start; of a run that is resumed, as if it had never paused
    seconds   after which it is to end; `is_over`: it did
    """

    home: RunFolder
    progress: Callable[[Point], None] | None
    happened: Callable[[Event], None] | None
    listens: bool
    origin: float = field(default_factory=time.time)
    seconds: float | None = None
    is_over: bool = False
    entries: list[DiaryEntry] = field(default_factory=list)
    learners: list[PolicyLearner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._readers = Readers(self.home.path)
        self.entries += self._readers.news()  # of the run's former life: nothing to tell
        self.origin -= max((entry.point.seconds for entry in self.entries), default=0.0)
        self._lock, self._began = threading.Lock(), time.monotonic()

    def remember(self, recipe: Controllers) -> Callable[[int], PolicyLearner]:
        """The recipe, for learners in this process: they are closed at the end."""

        def make(controller: int) -> PolicyLearner:
            learner = recipe(controller, self.progress if self.listens else None)
            with self._lock:
                self.learners.append(learner)
            return learner

        return make

    def end(
        self, assignment: Assignment, backend: Callable[[Assignment, Watcher], Outcome]
    ) -> Learned:
        """Run it, and put together what it leaves."""
        watcher = Watcher(rows=lambda _rows: self._read(), event=self._happened)
        if self.seconds is not None:
            watcher.every_seconds = max(0.05, self.seconds / 100)
            watcher.evaluate = lambda _theta, _clock, _samples, _seconds: {}
            watcher.should_stop = self._should_stop
        outcome = None
        try:
            outcome = backend(assignment, watcher)
        except KeyboardInterrupt:
            if not any(learner.updates for learner in self.learners):
                raise
        finally:
            for learner in self.learners:
                learner.close()
        self._read()
        if not self.entries and outcome is not None and outcome.stopped:
            raise KeyboardInterrupt
        if not self.entries:
            raise TrainingError(
                f"no controller has written to {self.home.path}; give a folder that all nodes see"
            )
        return self._learned(outcome)

    def _should_stop(self, _figures: list[dict[str, float]]) -> bool:
        """The seconds are over, and something was learned in them."""
        assert self.seconds is not None
        self.is_over = time.monotonic() - self._began >= self.seconds and bool(self.entries)
        return self.is_over

    def _happened(self, event: Event) -> None:
        self._read()
        if self.happened is not None:
            self.happened(event)

    def _read(self) -> None:
        for entry in self._readers.news():
            self.entries.append(entry)
            if self.progress is not None and not self.listens:
                self.progress(entry.point)

    def _learned(self, outcome: Outcome | None) -> Learned:
        entries = sorted(self.entries, key=lambda entry: entry.point.seconds)
        counted = list({entry.first: entry for entry in entries}.values())  # the last of each
        bests: dict[str, tuple[float, int, DiaryEntry]] = {}
        tried: dict[str, int] = {}
        before: dict[int, int] = {}  # trials of its task before each update
        for entry in entries:
            name = entry.point.task
            if entry.first not in before:
                before[entry.first] = tried.get(name, 0)
                tried[name] = tried.get(name, 0) + entry.judged
            found = before[entry.first] + entry.at + 1
            if entry.at >= 0 and (name not in bests or entry.point.best < bests[name][0]):
                bests[name] = (entry.point.best, found, entry)
        placements = {
            name: entry.placement
            for name, (_, _, entry) in bests.items()
            if entry.placement is not None
        }
        # Of a learner that came back and has made no update since, the run before counts as 0.
        last = max(
            self.learners,
            key=lambda learner: learner.points[-1].seconds if learner.points else 0.0,
            default=None,
        )
        if outcome is None:
            assert last is not None, "an interrupt without an outcome is of a run in this process"
        return Learned(
            theta=self._theta(outcome, last),
            placements=placements,
            values={name: value for name, (value, _, _) in bests.items()},
            found={name: found for name, (_, found, _) in bests.items()},
            trials=sum(entry.judged for entry in counted),
            updates=len(counted) if outcome is None else outcome.clock,
            seconds=time.time() - self.origin,
            points=tuple(entry.point for entry in counted),
            interrupted=outcome is None or (outcome.stopped and not self.is_over),
            meta={"events": () if outcome is None else outcome.events},
        )

    def _theta(self, outcome: Outcome | None, last: PolicyLearner | None) -> Float32:
        if outcome is not None:
            return np.asarray(outcome.theta, dtype=np.float32)
        assert last is not None
        return last.theta
