"""From steps to a learned policy and plans: tasks -> policy -> trials -> policy file, plans.

(step, machine) ─► Task ─► learn ─┬─► policy, with its card
                    judge ◄───────┤
simulated, or measured on the     └─► best placement of each task ─► `plan`
devices of this machine
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, PolicyMismatchError, RunError, UsageError
from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured
from dovetail.instances import Instance
from dovetail.machine import Machine
from dovetail.pipeline.planning import find_plan
from dovetail.pipeline.requests import (
    LearnRequest,
    PlanRequest,
    TaskRequest,
    default_objective,
    with_fields_of,
)
from dovetail.pipeline.sources import (
    Step,
    TellProgress,
    costs_of,
    graph_of,
    groups_of,
    machine_of,
    silent,
)
from dovetail.placers import GroupPlacement, PlacementProblem, permitted
from dovetail.placers.learned.records import Judge, Learned, PlacementTask, Point, Trials
from dovetail.plans import Plan, Source, normalise

# --- Measured trials ---
#
# Every placement that a policy draws runs on the devices of this machine. The protocol is RL17's
# (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
# https://arxiv.org/abs/1706.04972, section 4): a placement runs 10 steps, the first is dropped, and
# the mean of the others is its time. A placement that fails is invalid, and nothing more follows.
# The moving baseline takes care of noise. What is reported at the end is measured again, 15 times
# if that takes less than 10 s.
#
#     placement ─► predicted to fit? ─► orders by the simulator ─► load ─ 10 steps ─► mean
#                   no: invalid                     a failure: invalid, new processes if they died
#
# Differences: a placement that does not fit, as the simulator predicts, is not run, since too large
# a block would end whoever else uses this machine. A placement that is drawn again is run again at
# most `MOST_RUNS` times, and counts with the median of its runs. At the end the best few run in
# turns, so that a disturbance strikes all of them, and the best median wins.


STEPS = 10
"""Steps of one run of a placement; the first does not count."""
MOST_RUNS = 3
"""How many times one placement is run, however often it is drawn."""
FINAL_RUNS, LONG_SECONDS, LONG_RUNS = 15, 10.0, 3
"""How many times each finalist runs at the end, and how many times if a run takes that long."""
FINALISTS = 5
"""How many placements run again at the end."""


@dataclass(frozen=True, eq=False)
class Timed:
    """A placement [groups] that ran again and again: mean step seconds of each run [runs]."""

    placement: GroupPlacement
    run_seconds: NDArray[np.float64]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.run_seconds))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.run_seconds, (25, 75))
        return float((high - low) / self.median_seconds)


@dataclass(eq=False)
class _Tally:
    """Runs of one placement, none yet where Ctrl-C ended the first; `failed` where it could not."""

    placement: GroupPlacement
    run_seconds: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def seconds(self) -> float:
        return float("inf") if self.failed else float(np.median(self.run_seconds))


class MeasuredTrials:
    """Trials that run here. A context manager: the devices' processes are kept from one trial to
    the next. Not to be shared by threads.

    task   of `step`, on a machine whose devices are cores of this one, else `UsageError`
    """

    def __init__(
        self, step: Captured, task: PlacementTask, *, steps: int = STEPS, seed: int = 0
    ) -> None:
        self.step, self.task, self.steps, self.seed = step, task, steps, seed
        self.problem: PlacementProblem = task.problem(threads=1)
        self.failures: list[str] = []
        self._tallies: dict[bytes, _Tally] = {}
        self._workers = Workers(task.machine)

    def judge(self, placements: NDArray[np.int32]) -> Trials:
        """Run [batch, groups], one after the other: a `Judge`."""
        fits = self.problem.evaluate(self.problem.spread(placements)).feasible
        tallies = [self._try(row, bool(ok)) for row, ok in zip(placements, fits, strict=True)]
        seconds = np.array([tally.seconds for tally in tallies])
        return Trials(seconds, np.isfinite(seconds), np.ones(len(seconds), dtype=bool))

    def simulated(self, placements: NDArray[np.int32]) -> Trials:
        """The same trials by the simulator: a `Judge` that takes a millisecond each."""
        found = self.problem.evaluate(self.problem.spread(placements))
        return Trials(found.values, found.feasible, np.ones(len(placements), dtype=bool))

    @property
    def runs(self) -> int:
        """Of placements, repeated ones counted again; failures are not."""
        return sum(len(tally.run_seconds) for tally in self._tallies.values())

    def finalists(self, count: int = FINALISTS) -> list[GroupPlacement]:
        """The best distinct placements that ran, best first. Raises what ended the last trial
        where none ran."""
        ran = sorted(
            (tally for tally in self._tallies.values() if tally.run_seconds),
            key=lambda tally: tally.seconds,
        )
        if not ran:
            last = self.failures[-1] if self.failures else "none was predicted to fit into memory"
            raise InfeasibleError(f"no placement that was tried ran: {last}")
        return [tally.placement for tally in ran[:count]]

    def compare(
        self,
        placements: Sequence[GroupPlacement],
        progress: Callable[[float], None] = lambda _fraction: None,
    ) -> list[Timed]:
        """Each placement again, in turns, best median first; those that fail are left out."""
        seconds: list[list[float]] = [[] for _ in placements]
        left = list(range(len(placements)))
        turns, turn = FINAL_RUNS, 0
        while turn < turns and left:
            # Who goes first changes, so that none always follows the same one.
            for i in left[turn % len(left) :] + left[: turn % len(left)]:
                found = self._run(placements[i])
                if found is None:
                    left.remove(i)
                    continue
                seconds[i].append(found)
                if found * self.steps >= LONG_SECONDS:
                    turns = LONG_RUNS
            turn += 1
            progress(turn / turns)
        timed = [Timed(placements[i], np.array(seconds[i])) for i in left]
        return sorted(timed, key=lambda one: one.median_seconds)

    def close(self, *, kill: bool = False) -> None:
        """End the devices' processes."""
        self._workers.close(kill=kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=error is not None)

    def _try(self, placement: GroupPlacement, fits: bool) -> _Tally:
        """Run it, unless its runs so far are enough."""
        key = placement.tobytes()
        tally = self._tallies.setdefault(key, _Tally(placement.copy(), failed=not fits))
        if not tally.failed and len(tally.run_seconds) < MOST_RUNS:
            found = self._run(placement)
            if found is None:
                tally.failed = not tally.run_seconds  # a disturbed repeat says nothing new
            else:
                tally.run_seconds.append(found)
        return tally

    def _run(self, placement: GroupPlacement) -> float | None:
        """Mean seconds of a step; None where it fails."""
        if self._workers.closed:
            self._workers.close(kill=True)
            self._workers = Workers(self.task.machine)
        try:
            plan = loadable(self.problem, self.problem.spread(placement))
            with execute(plan, self.step, seed=self.seed, workers=self._workers) as placed:
                return float(placed.step_seconds(self.steps).mean())
        except (RunError, InfeasibleError) as error:
            self.failures.append(str(error))
            return None


def loadable(problem: PlacementProblem, placement: NDArray[np.int32]) -> Plan:
    """A plan of this placement [ops] that can be run: in the simulator's orders, with no promise
    but its predicted step and memory."""
    if problem.trace is None:
        raise UsageError("task", "nobody simulates it, and a run needs the simulator's orders")
    graph, machine = problem.graph, problem.machine
    timeline = problem.trace(placement)
    return Plan(
        source=Source("", "", (), ""),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=normalise(placement, graph, machine),
        orders=tuple(timeline.order_of(device) for device in range(len(machine.devices))),
        compute_seconds=problem.costs.compute_seconds,
        costs_source=problem.costs.source,
        placer="trial",
        seed=problem.seed,
        objective=problem.objective,
        value=timeline.step_seconds,
        lower_bound=0.0,
        bound_proof="",
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
        groups=problem.groups.count,
        planning_seconds=0.0,
    )


# --- The flow ---

if TYPE_CHECKING:
    from dovetail.placers.learned.policy import Policy


@dataclass(frozen=True, eq=False)
class LearningResult:
    """What learning leaves.

    plans      of each task in turn; None where nothing that was tried fits
    policy     after the last update, with the card of its file
    measured   of a measured reward: the best few, which ran again side by side; best first
    failures   of a measured reward: why trials failed, the last one last
    """

    plans: tuple[Plan | None, ...]
    policy: "Policy"
    card: dict[str, object]
    learned: Learned
    measured: tuple[Timed, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """That of the only task, or of the first. Raises `InfeasibleError` without one."""
        if self.plans[0] is None:
            raise InfeasibleError(
                "no placement that was tried fits; give it more trials, or larger devices"
            )
        return self.plans[0]

    def save_policy(self, path: str | Path) -> None:
        """Write the policy with its card as safetensors. Raises `UnwritableError`."""
        from dovetail.placers.learned.files import save_policy

        save_policy(path, self.policy, self.card)


@with_fields_of(LearnRequest, skip=("tasks",))
def learn(  # noqa: PLR0913  keyword-only but two: the task, and what the caller listens with
    step: Step,
    machine: str | Machine = "",
    *,
    objective: str = "",
    pins: Sequence[tuple[str, str]] = (),
    caps: Sequence[tuple[str, int]] = (),
    per_op: bool = False,
    model: str = "",
    progress: Callable[[Point], None] | None = None,
    **options: Any,
) -> LearningResult:
    """Learn to place `step` on `machine`: its plan, and the policy.

    per_op    every op is placed by itself, but for what must stay together: for gdp
    options   fields of `LearnRequest`: method, trials, seconds, controllers, measured, seed, ...
    the rest  as in `plan`

    A first Ctrl-C ends it with the best so far. Raises `InvalidError`, `TrainingError`.
    """
    name = model or (step.source.model if isinstance(step, Captured) else "") or "graph"
    task = TaskRequest(name, step, machine, objective, pins, caps, per_op, model)
    return learn_all(LearnRequest((task,), **options), progress)


def learn_all(
    request: LearnRequest,
    progress: Callable[[Point], None] | None = None,
    doing: TellProgress = silent,
) -> LearningResult:
    """Learn one policy for all tasks, as GDP's batch training does. Raises as `learn` does."""
    tasks = [task_of(task, doing) for task in request.tasks]
    start, card = _starting_policy(request, tasks)
    if request.measured:
        return _learn_measured(request, tasks[0], (start, card), progress, doing)
    learned = _train(request, tasks, start, progress)
    chosen = [learned.placements.get(task.name) for task in tasks]
    return _finish(
        request, tasks, chosen, start, card | _card(request, tasks, start, learned), learned
    )


def task_of(request: TaskRequest, progress: TellProgress = silent) -> PlacementTask:
    """The task, its machine probed and its costs measured where that is this one."""
    step = request.planned_step
    graph, machine = graph_of(step), machine_of(step, request.machine, progress)
    permitted(graph, machine, request.pins)
    objective = request.objective or default_objective(step)
    return PlacementTask(
        request.name,
        graph,
        machine,
        costs_of(step, machine, progress),
        groups_of(step, per_op=request.per_op),
        objective=objective,
        pins=tuple(request.pins),
        caps=tuple(request.caps),
        ranked=objective == "step",
    )


def _starting_policy(
    request: LearnRequest, tasks: Sequence[PlacementTask]
) -> tuple["Policy", dict[str, object]]:
    """A new policy, or the file's, and the card it brings. Raises `PolicyMismatchError` for one
    that was made for another graph."""
    from dovetail.placers.learned.catalog import make_policy
    from dovetail.placers.learned.features import look

    view = look(tasks[0].problem(seed=request.seed))
    policy, card = make_policy(request.method, view, request.seed), dict[str, object]()
    if request.policy is not None:
        policy, card = _loaded(request.method, tasks[0], request.policy)
    return (policy.alone(view) if len(tasks) == 1 else policy), card


def _loaded(
    method: str, task: PlacementTask, path: str | Path
) -> tuple["Policy", dict[str, object]]:
    from dovetail.placers.learned.files import load_policy

    policy, card = load_policy(path, method)
    sizes = card.get("sizes")
    if method != "gdp" and not (isinstance(sizes, list) and _sizes(task) in sizes):
        names = card.get("trained_on")
        made = ", ".join(map(str, names)) if isinstance(names, list) else "another graph"
        raise PolicyMismatchError(
            str(path), f"it was made for {made}, and {method} serves one graph and machine"
        )
    return policy, card


def _sizes(task: PlacementTask) -> list[object]:
    """What a policy of one graph must agree with."""
    return [task.graph.fingerprint, task.groups.count, len(task.machine.devices)]


def _train(
    request: LearnRequest,
    tasks: Sequence[PlacementTask],
    policy: "Policy",
    progress: Callable[[Point], None] | None,
) -> Learned:
    """Train `policy` itself, on simulated trials."""
    from dovetail.placers.learned.learning import learn as train

    return train(
        list(tasks),
        policy,
        request.learning_settings,
        trials=request.most_trials,
        seconds=request.seconds,
        controllers=request.controllers,
        evaluators=request.evaluators,
        backend=request.backend or ("threads" if request.controllers == 1 else "processes"),
        rule=request.rule,
        folder=None if request.folder is None else Path(request.folder),
        resume=request.resume,
        seed=request.seed,
        progress=progress,
    )


def _learn_measured(
    request: LearnRequest,
    task: PlacementTask,
    start: tuple["Policy", dict[str, object]],
    progress: Callable[[Point], None] | None,
    doing: TellProgress,
) -> LearningResult:
    """One controller in this process, which waits while the devices work."""
    step = request.tasks[0].step
    assert isinstance(step, Captured), "checked"
    policy, card = start
    with MeasuredTrials(step, task, seed=request.seed) as here:
        first: list[GroupPlacement] = []
        if request.simulated_first:
            simulated = replace(
                request,
                trials=request.simulated_first,
                seconds=None,
                measured=False,
                simulated_first=0,
            )
            before = train_here(simulated, policy, task, here.simulated, progress)
            first = list(before.placements.values())
            if before.interrupted:
                card |= _card(simulated, [task], policy, before)
                return _finish(request, [task], first[:1] or [None], policy, card, before)
        learned = train_here(request, policy, task, here.judge, progress)
        if learned.interrupted and not here.runs and not first:
            raise KeyboardInterrupt
        finalists = (here.finalists(FINALISTS) if here.runs or not first else []) + first
        distinct = list({one.tobytes(): one for one in finalists}.values())
        timed = here.compare(distinct, lambda done: doing("measuring the best", done, None))
    chosen = timed[0].placement if timed else None
    card |= _card(request, [task], policy, learned)
    result = _finish(request, [task], [chosen], policy, card, learned)
    return replace(result, measured=tuple(timed), failures=tuple(here.failures))


def _finish(
    request: LearnRequest,
    tasks: Sequence[PlacementTask],
    chosen: Sequence[GroupPlacement | None],
    policy: "Policy",
    card: dict[str, object],
    learned: Learned,
) -> LearningResult:
    """The result, with a plan for each task that has a placement."""
    plans = [
        None if placement is None else _plan_of(asked, task, placement, policy.name, learned)
        for asked, task, placement in zip(request.tasks, tasks, chosen, strict=True)
    ]
    return LearningResult(tuple(plans), policy, card, learned)


def _plan_of(
    request: TaskRequest,
    task: PlacementTask,
    placement: GroupPlacement,
    method: str,
    learned: Learned,
) -> Plan:
    """The plan of what was learned, among the cheap methods' baselines and above a bound."""
    found = find_plan(
        PlanRequest(
            request.step,
            "" if isinstance(request.step, Instance) else task.machine,
            placer=method,
            method=lambda _problem, _budget: placement,
            per_op=request.per_op,
            objective=task.objective,
            budget="1e",
            pins=task.pins,
            caps=task.caps,
            model=request.model,
        )
    )
    best = learned.values.get(task.name)
    at = [p.seconds for p in learned.points if p.task == task.name and p.best == best]
    return replace(
        found,
        planning_seconds=learned.seconds,
        interrupted=learned.interrupted,
        found_seconds={**found.found_seconds, method: min(at, default=learned.seconds)},
    )


def _card(
    request: LearnRequest, tasks: Sequence[PlacementTask], policy: "Policy", learned: Learned
) -> dict[str, object]:
    """What the policy file says of its making; an earlier card's counts are not added up."""
    return {
        "method": policy.name,
        "trained_on": [task.name for task in tasks],
        "machines": [task.machine.name for task in tasks],
        "sizes": [_sizes(task) for task in tasks],
        "reward": "measured" if request.measured else "simulated",
        "controllers": request.controllers,
        "settings": dict(request.settings),
        "seed": request.seed,
        "updates": learned.updates,
        "trials": learned.trials,
        "seconds": learned.seconds,
        "interrupted": learned.interrupted,
        "versions": {name: version(name) for name in ("dovetail", "torch", "numpy")},
    }


def train_here(
    request: LearnRequest,
    policy: "Policy",
    task: PlacementTask,
    judge: Judge,
    progress: Callable[[Point], None] | None,
) -> Learned:
    """Train `policy` itself with one controller, in the process that waits for the devices:

        theta ─► draw K placements ─► each runs on the devices, in turn ─► U(g) ─► theta

    It ends when the trials are judged or the seconds are over, whichever comes first. Ctrl-C ends
    it as well: what the update under way had judged is not among its points.
    """
    from dovetail.placers.learned.learner import PolicyLearner

    settings = request.learning_settings
    learner = PolicyLearner(policy, [task], [judge], settings, seed=request.seed, listen=progress)
    began, theta, interrupted = time.monotonic(), learner.theta, False
    seconds = float("inf") if request.seconds is None else request.seconds
    most_updates = request.most_trials // settings.trials
    updates = 0
    try:
        while updates < most_updates and time.monotonic() - began < seconds:
            indices = np.arange(updates * settings.trials, (updates + 1) * settings.trials)
            gradient = learner.gradient(theta, indices, 0)
            theta += learner.update(theta, gradient.vector, 0.0)
            updates += 1
    except KeyboardInterrupt:
        interrupted = True
    learner.flat.write(theta)
    return Learned(
        theta=theta,
        placements={name: best.placement for name, best in learner.best.items()},
        values={name: best.seconds for name, best in learner.best.items()},
        found={name: best.found for name, best in learner.best.items()},
        trials=learner.trials,
        updates=learner.updates,
        seconds=time.monotonic() - began,
        points=tuple(learner.points),
        interrupted=interrupted,
    )
