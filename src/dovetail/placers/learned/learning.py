"""Asynchronous training of a policy: controllers around one parameter server.

A. Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.4.

    parameter server ──┬── controller 0 ── K evaluators      each controller waits for its own
      theta += v       └── controller 1 ── K evaluators      evaluators, commits when it is done,
                                                             and keeps its own baselines

The server, its backends and rules are those of `training/`: the samples of its job are the trials,
a batch is one update. So a killed controller's trials are handed out again and their number stays
exact. What controllers write down (`log`) lies in the run's folder beside the server's state:
both together resume the run. Differences: RL17 has up to 20 controllers with 4 or 8 evaluators on
as many machines. Here both numbers are free, evaluators are threads of the simulator, and the rule
may be any whose workers step.
"""

import copy
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dovetail.errors import TrainingError, UsageError
from dovetail.placers.learned.features import look
from dovetail.placers.learned.judges import JudgeFactory, SimulatedJudge
from dovetail.placers.learned.learner import (
    PolicyLearner,
    TaskView,
    parameters_of,
    write_parameters,
)
from dovetail.placers.learned.log import CONTROLLERS, LogEntry, LogReaders
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import Judge, Learned, LearningSettings, PlacementTask, Point
from dovetail.runtime.files import refuse_links
from dovetail.training import (
    Assignment,
    Event,
    FailurePolicy,
    Job,
    Outcome,
    Rule,
    RunFolder,
    Storage,
    Watcher,
    check_travels,
    device_of,
    launched_rank,
    load_backend,
    make_rule,
    open_folder,
)

LEASE_SECONDS = 120.0
"""A controller that gives no sign of life for so long is hung; it gives one a second, but for
within a pass of the policy."""
RESTARTS = 3
"""Of each controller, on average."""


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
    counts = {
        "trials": trials, "controllers": controllers, "evaluators": evaluators,
        "settings": settings.trials,
    }  # fmt: skip
    wrong = [name for name, count in counts.items() if count < 1]
    if wrong:
        says = f"must be a whole number of at least 1, not {counts[wrong[0]]!r}"
        raise UsageError(wrong[0], says)
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise UsageError("tasks", "need names of their own" if names else "there are none")
    bound = make_rule(rule) if isinstance(rule, str) else rule
    started = load_backend(backend, **(options or {}))
    rank = launched_rank() if backend == "ranks" else 0
    if folder is None and backend == "ranks":
        says = "all ranks write down what they try there; name one that all of them see"
        raise UsageError("folder", says)
    if folder is None and resume:
        raise UsageError("resume", "needs the folder of the run")
    with ExitStack() as stack:
        path = Path(folder or stack.enter_context(TemporaryDirectory(prefix="dovetail-learn-")))
        path = path.absolute()
        # The run, in this folder. Its facts are the same in every life of it.
        theta = parameters_of(policy)
        facts = {
            "seed": seed,
            "rule": bound.name,
            "options": bound.options,
            "policy": [policy.name, _digest(policy.config), theta.size],
            "tasks": [
                [
                    task.name, task.graph.fingerprint, task.machine.fingerprint, task.costs.source,
                    task.groups.count, task.objective, task.pins, task.caps,
                ]
                for task in tasks
            ],
            "settings": _digest(asdict(settings)),
            "trials": trials,
            "controllers": controllers,
        }  # fmt: skip
        # Rank 0 alone opens the run. Its name comes to the others with their first message.
        home = (
            RunFolder(path, "") if rank else open_folder(path, facts, resume, more=(CONTROLLERS,))
        )
        refuse_links(path / CONTROLLERS)
        job = Job(
            run=home.run, size=theta.size, samples=trials, epochs=1, batch=settings.trials,
            window=1, workers=controllers, seed=seed,
        )  # fmt: skip

        # What the caller follows it by: in virtual time learners here tell of their updates
        # themselves, else their logs are read. A run that is resumed goes on as if it had never
        # paused; of its former life there is nothing to tell.
        in_process, listens = backend in ("simulated", "threads"), backend == "simulated"
        tell = None if rank else progress
        readers = LogReaders(home.path)
        entries = list(readers.news())
        origin = time.time() - max((entry.point.seconds for entry in entries), default=0.0)
        recipe = Controllers(
            copy.deepcopy(policy),
            tuple(tasks),
            settings,
            path,
            evaluators,
            judge,
            seed,
            origin,
            device,
        )
        learners: list[PolicyLearner] = []
        lock, began, is_over = threading.Lock(), time.monotonic(), False

        def make(controller: int) -> PolicyLearner:
            learner = recipe(controller, tell if listens else None)
            with lock:
                learners.append(learner)
                stack.callback(learner.close)
            return learner

        def read() -> None:
            for entry in readers.news():
                entries.append(entry)
                if tell is not None and not listens:
                    tell(entry.point)

        def hear(event: Event) -> None:
            read()
            if happened is not None:
                happened(event)

        def should_stop(_figures: list[dict[str, float]]) -> bool:
            """The seconds are over, and something was learned in them."""
            nonlocal is_over
            is_over = time.monotonic() - began >= (seconds or 0.0) and bool(entries)
            return is_over

        watcher = Watcher(rows=lambda _rows: read(), event=hear)
        if seconds is not None:
            watcher.every_seconds = max(0.05, seconds / 100)
            watcher.evaluate = lambda _theta, _clock, _samples, _seconds: {}
            watcher.should_stop = should_stop

        if not in_process:
            check_travels({"policy": policy, "judge": judge})
        assignment = Assignment(
            job=job,
            rule=bound,
            theta=theta,
            learner=make if in_process else recipe,
            policy=FailurePolicy(
                worker_restarts=RESTARTS * controllers, lease_seconds=LEASE_SECONDS
            ),
            storage=None if folder is None else Storage(home.center, resume=resume),
            facts=facts,
        )
        outcome = None
        try:
            outcome = started(assignment, watcher)
        except KeyboardInterrupt:
            if not any(learner.updates for learner in learners):
                raise
        read()
        if not entries and outcome is not None and outcome.stopped:
            raise KeyboardInterrupt
        if not entries:
            raise TrainingError(
                f"no controller has written to {home.path}; give a folder that all nodes see"
            )
        learned = _learned(entries, learners, outcome, time.time() - origin, is_over=is_over)
    write_parameters(policy, learned.theta)
    return learned


def _learned(
    entries: Sequence[LogEntry],
    learners: Sequence[PolicyLearner],
    outcome: Outcome | None,
    seconds: float,
    *,
    is_over: bool,
) -> Learned:
    """What a run leaves. Without an outcome it was interrupted, and its learners were made in this
    process. `is_over`: its seconds were."""
    entries = sorted(entries, key=lambda entry: entry.point.seconds)
    counted = list({entry.first: entry for entry in entries}.values())  # the last of each
    bests: dict[str, tuple[float, int, LogEntry]] = {}
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
    if outcome is None:
        # Of a learner that came back and has made no update since, the run before counts as 0.
        theta = max(
            learners, key=lambda each: each.points[-1].seconds if each.points else 0.0
        ).theta
    else:
        theta = np.asarray(outcome.theta, dtype=np.float32)
    return Learned(
        theta=theta,
        placements={
            name: entry.placement
            for name, (_, _, entry) in bests.items()
            if entry.placement is not None
        },
        values={name: value for name, (value, _, _) in bests.items()},
        found={name: found for name, (_, found, _) in bests.items()},
        trials=sum(entry.judged for entry in counted),
        updates=len(counted) if outcome is None else outcome.clock,
        seconds=seconds,
        points=tuple(entry.point for entry in counted),
        interrupted=outcome is None or (outcome.stopped and not is_over),
        meta={"events": () if outcome is None else outcome.events},
    )


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
