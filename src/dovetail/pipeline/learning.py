"""Learns a placement policy from steps, and returns it with a plan for each step.

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
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InfeasibleError, PolicyMismatchError, RunError
from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured
from dovetail.graph.source import Source
from dovetail.instances import Instance
from dovetail.machine import Machine
from dovetail.methods import PLACED_OBJECTIVES, PLACERS
from dovetail.pipeline.planning import find_plan
from dovetail.pipeline.requests import (
    LearnRequest,
    PlanRequest,
    TaskRequest,
    check_name,
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
from dovetail.placers.learned.judges import SimulatedJudge
from dovetail.placers.learned.records import Judge, Learned, PlacementTask, Point, Trials
from dovetail.plans import Plan, normalise
from dovetail.training import launched_ranks

if TYPE_CHECKING:
    from dovetail.placers.learned.policy import Policy
    from dovetail.training import Event


@dataclass(frozen=True, eq=False)
class TimedPlacement:
    """A placement [groups], and the mean step seconds of each of its runs [runs]."""

    placement: GroupPlacement
    run_seconds: NDArray[np.float64]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.run_seconds))

    @property
    def spread(self) -> float:
        """The interquartile range of the runs, divided by their median."""
        low, high = np.percentile(self.run_seconds, (25, 75))
        return float((high - low) / self.median_seconds)


@dataclass(frozen=True, eq=False)
class LearningResult:
    """A learned policy, and the plans that learning found.

    plans      [tasks] each task's plan; None if nothing that was tried fits
    policy     the policy after the last update; `card` is what its file says of it
    measured   with a measured reward: the finalists, which ran again in turns, best first
    failures   with a measured reward: why trials failed, in the order in which they did
    """

    plans: tuple[Plan | None, ...]
    policy: "Policy"
    card: dict[str, object]
    learned: Learned
    measured: tuple[TimedPlacement, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan of the first task, which is often the only one. Raises `InfeasibleError` if it
        has none."""
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
def learn(
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
    """Learn to place `step` on `machine`, and return its plan and the policy.

    per_op    gdp places every op by itself, except that ops that must stay together do
    progress  called with each update of the policy
    options   fields of `LearnRequest`: method, trials, seconds, controllers, measured, seed, ...
    the rest  as in `plan`

    A first Ctrl-C ends the learning with the best so far. Raises `InvalidError`, `TrainingError`.
    """
    name = model or (step.source.model if isinstance(step, Captured) else "") or "graph"
    task = TaskRequest(name, step, machine, objective, pins, caps, per_op, model)
    return learn_all(LearnRequest((task,), **options), progress)


def learn_all(
    request: LearnRequest,
    progress: Callable[[Point], None] | None = None,
    tell: TellProgress = silent,
    happened: Callable[["Event"], None] | None = None,
) -> LearningResult:
    """Learn one policy for all tasks, as GDP's batch training does. Raises as `learn` does.

    progress  called with each update of the policy
    tell      called before and after the learning: while costs and finalists are measured
    happened  called with what happens to controllers and to their server: lost, restarted
    """
    from dovetail.placers.learned.catalog import make_policy
    from dovetail.placers.learned.features import look
    from dovetail.placers.learned.files import load_policy
    from dovetail.placers.learned.learning import learn as learn_by_controllers

    tasks = [task_of(task, request.method, tell) for task in request.tasks]
    view = look(tasks[0].problem(seed=request.seed))
    if request.policy is None:
        policy, card = make_policy(request.method, view, request.seed), dict[str, object]()
    else:
        policy, card = load_policy(request.policy, request.method)
        sizes, names = card.get("sizes"), card.get("trained_on")
        # Only policies of GDP serve graphs of any size. The other policies have the one-hot
        # adjacency of one graph in their input.
        served = isinstance(sizes, list) and _sizes(tasks[0]) in sizes
        if not PLACERS[policy.name].carries and not served:
            graphs = ", ".join(map(str, names)) if isinstance(names, list) else "another graph"
            raise PolicyMismatchError(
                str(request.policy),
                f"it was made for {graphs}, and {request.method} serves one graph and machine",
            )
    if len(tasks) == 1:
        # What the policy can only learn of one graph is learned as well.
        policy = policy.alone(view)
    if request.measured:
        return _learn_measured(request, tasks[0], policy, card, progress, tell)
    backend = "ranks" if launched_ranks() > 1 else "processes"
    if backend == "processes" and request.controllers == 1:
        backend = "threads"
    learned = learn_by_controllers(
        tasks,
        policy,
        request.learning_settings,
        trials=request.most_trials,
        seconds=request.seconds,
        controllers=request.controllers,
        evaluators=request.evaluators,
        backend=request.backend or backend,
        device=request.device,
        rule=request.rule,
        folder=None if request.folder is None else Path(request.folder),
        resume=request.resume,
        seed=request.seed,
        progress=progress,
        happened=happened,
    )
    chosen = [learned.placements.get(task.name) for task in tasks]
    return _finish(request, tasks, chosen, policy, card, learned)


def task_of(request: TaskRequest, method: str, tell: TellProgress = silent) -> PlacementTask:
    """The task of a request, with the groups that the method places. If its machine is this one,
    the machine is probed and the costs are measured."""
    step = request.planned_step
    graph, machine = graph_of(step), machine_of(step, request.machine, tell)
    permitted(graph, machine, request.pins)
    objective = request.objective or default_objective(step)
    check_name("objective", objective, PLACED_OBJECTIVES)
    return PlacementTask(
        request.name,
        graph,
        machine,
        costs_of(step, machine, tell),
        groups_of(step, grouping="ops" if request.per_op else PLACERS[method].grouping),
        objective=objective,
        pins=tuple(request.pins),
        caps=tuple(request.caps),
        ranked=objective == "step",
    )


def _sizes(task: PlacementTask) -> list[object]:
    """The card's entry for a task: its graph, number of groups and number of devices. A policy of
    one graph serves only tasks with the same entry."""
    return [task.graph.fingerprint, task.groups.count, len(task.machine.devices)]


def _learn_measured(
    request: LearnRequest,
    task: PlacementTask,
    policy: "Policy",
    card: dict[str, object],
    progress: Callable[[Point], None] | None,
    tell: TellProgress,
) -> LearningResult:
    """Learn from measured trials of one task, with one controller in this process.

    The controller waits while the devices work. If the request asks for it, the policy first learns
    from simulated trials, and the best simulated placement runs among the finalists.
    """
    step = request.tasks[0].step
    assert isinstance(step, Captured), "the request has checked that the step can run"
    with MeasuredTrials(step, task, seed=request.seed) as trials:
        best_simulated: list[GroupPlacement] = []
        if request.simulated_first:
            simulated_request = replace(
                request,
                trials=request.simulated_first,
                seconds=None,
                measured=False,
                simulated_first=0,
            )
            simulated = SimulatedJudge(trials.problem)
            learned = _train_here(simulated_request, policy, task, simulated, progress)
            best_simulated = list(learned.placements.values())
            # Ctrl-C during the simulated trials ends learning there: nothing is measured.
            if learned.interrupted:
                chosen = [learned.placements.get(task.name)]
                return _finish(simulated_request, [task], chosen, policy, card, learned)
        learned = _train_here(request, policy, task, trials.judge, progress)
        # Nothing has run and nothing was simulated, so there is no placement to return.
        if learned.interrupted and not trials.runs and not best_simulated:
            raise KeyboardInterrupt
        # If nothing has run, `finalists` raises the reason. A simulated placement is still worth a
        # run then.
        best_measured = trials.finalists(FINALISTS) if trials.runs or not best_simulated else []
        finalists = best_measured + best_simulated
        # The best simulated placement may be among the measured ones as well.
        distinct = list({placement.tobytes(): placement for placement in finalists}.values())
        timed = trials.compare(
            distinct, lambda fraction: tell("measuring the best", fraction, None)
        )
    winner = timed[0].placement if timed else None
    result = _finish(request, [task], [winner], policy, card, learned)
    return replace(result, measured=tuple(timed), failures=tuple(trials.failures))


def _train_here(
    request: LearnRequest,
    policy: "Policy",
    task: PlacementTask,
    judge: Judge,
    progress: Callable[[Point], None] | None,
) -> Learned:
    """Train `policy` in place with one controller, in this process:

        theta ─► draw K placements ─► each is judged, in turn ─► U(g) ─► theta

    It ends when all trials are judged or the seconds are over, whichever comes first. Ctrl-C ends
    it as well; the trials of the unfinished update are then not among the points.
    """
    from dovetail.placers.learned.features import look
    from dovetail.placers.learned.learner import PolicyLearner, TaskView
    from dovetail.training import device_of

    policy.to(device_of(request.device, 0))
    settings = request.learning_settings
    seen = TaskView(task.name, look(task.problem()))
    learner = PolicyLearner(policy, [seen], [judge], settings, seed=request.seed, listen=progress)
    began = time.monotonic()
    limit_seconds = float("inf") if request.seconds is None else request.seconds
    most_updates = request.most_trials // settings.trials
    theta, interrupted = learner.theta, False
    try:
        while learner.updates < most_updates and time.monotonic() - began < limit_seconds:
            learner.step()
            theta = learner.theta
    except KeyboardInterrupt:
        interrupted = True
    # Within an update PPO moves the policy: Ctrl-C there leaves what the update before has left.
    learner.flat.write(theta)
    policy.to("cpu")
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


def _finish(
    request: LearnRequest,
    tasks: Sequence[PlacementTask],
    chosen: Sequence[GroupPlacement | None],
    policy: "Policy",
    card: dict[str, object],
    learned: Learned,
) -> LearningResult:
    """The result, with a plan for each task that has a placement. `card` is the card of the file
    that the policy came from; entries of this run replace those of the same name."""

    def plan_of(asked: TaskRequest, task: PlacementTask, placement: GroupPlacement) -> Plan:
        """With the cheap methods as baselines and a lower bound."""
        # The method returns the learned placement without a search, so one evaluation is enough.
        plan = find_plan(
            PlanRequest(
                asked.step,
                "" if isinstance(asked.step, Instance) else task.machine,
                placer=policy.name,
                method=lambda _problem, _budget: placement,
                per_op=asked.per_op,
                objective=task.objective,
                budget="1e",
                pins=task.pins,
                caps=task.caps,
                model=asked.model,
            )
        )
        # The best value was found at the first point of the curve that has it.
        best = learned.values.get(task.name)
        found_at = [p.seconds for p in learned.points if p.task == task.name and p.best == best]
        found_seconds = {policy.name: min(found_at, default=learned.seconds)}
        return replace(
            plan,
            planning_seconds=learned.seconds,
            interrupted=learned.interrupted,
            found_seconds={**plan.found_seconds, **found_seconds},
        )

    plans = [
        None if placement is None else plan_of(asked, task, placement)
        for asked, task, placement in zip(request.tasks, tasks, chosen, strict=True)
    ]
    # How the policy was trained. Updates, trials and seconds are those of this run alone, also if
    # the policy was loaded from a file.
    run = {
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
    return LearningResult(tuple(plans), policy, card | run, learned)


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
"""One run of a placement has this many steps, as in RL17; the first does not count."""
CAPTURING_STEPS = 4
"""On GPUs a placement runs so many steps before: in the third one its launches become graphs."""
MOST_RUNS = 3
"""One placement is run at most this many times, however often the policy draws it."""
FINAL_RUNS, LONG_SECONDS, LONG_RUNS = 15, 10.0, 3
"""At the end each finalist runs `FINAL_RUNS` times. Once a run has taken `LONG_SECONDS` or more,
`LONG_RUNS` times are enough."""
FINALISTS = 5
"""At the end this many of the best placements run again."""


@dataclass(eq=False)
class _Tally:
    """The runs of one placement so far.

    run_seconds  the mean step seconds of each run; empty if Ctrl-C ended the first run
    failed       the placement does not fit, or its first run failed
    """

    placement: GroupPlacement
    run_seconds: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def seconds(self) -> float:
        return float("inf") if self.failed else float(np.median(self.run_seconds))


class MeasuredTrials:
    """Judges placements by running them on this machine. It is a context manager, because it keeps
    the devices' processes from one trial to the next. Threads must not share one.

    task      the task of placing `step`, on a machine whose devices are cores of this one; for any
              other machine it raises `UsageError`
    failures  why runs failed, in the order in which they did
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
        """The measured trials of placements [batch, groups], run one after the other. A `Judge`."""
        fits = self.problem.evaluate(self.problem.spread(placements)).feasible
        tallies = []
        for placement, ok in zip(placements, fits.tolist(), strict=True):
            key = placement.tobytes()
            tally = self._tallies.setdefault(key, _Tally(placement.copy(), failed=not ok))
            tallies.append(tally)
            if not tally.failed and len(tally.run_seconds) < MOST_RUNS:
                run = self._run(placement)
                if run is None:
                    # A placement that has run before is known to work, so a failed repeat is a
                    # disturbance and does not make it invalid.
                    tally.failed = not tally.run_seconds
                else:
                    tally.run_seconds.append(run)
        # One that is drawn more than once counts with the median of all of its runs.
        seconds = np.array([tally.seconds for tally in tallies])
        return Trials(seconds, valid=np.isfinite(seconds), judged=np.ones(len(seconds), dtype=bool))

    @property
    def runs(self) -> int:
        """The number of runs so far. Each run of a repeated placement counts; a failure does
        not."""
        return sum(len(tally.run_seconds) for tally in self._tallies.values())

    def finalists(self, count: int = FINALISTS) -> list[GroupPlacement]:
        """The best distinct placements that ran, best first. Raises `InfeasibleError`, with the
        reason why the last trial failed, if none ran."""
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
    ) -> list[TimedPlacement]:
        """Run the placements again, in turns, and return their times, best median first. One that
        fails is left out. `progress` is called with the share that is done."""
        run_seconds: list[list[float]] = [[] for _ in placements]
        remaining = list(range(len(placements)))
        turns, turn = FINAL_RUNS, 0
        while turn < turns and remaining:
            # A different placement goes first in each turn, so that none always follows the same
            # one.
            first = turn % len(remaining)
            for i in remaining[first:] + remaining[:first]:
                seconds = self._run(placements[i])
                if seconds is None:
                    remaining.remove(i)
                    continue
                run_seconds[i].append(seconds)
                if seconds * self.steps >= LONG_SECONDS:
                    turns = LONG_RUNS
            turn += 1
            # The first long run may come after more turns than long runs take.
            progress(min(1.0, turn / turns))
        timed = [TimedPlacement(placements[i], np.array(run_seconds[i])) for i in remaining]
        return sorted(timed, key=lambda placement: placement.median_seconds)

    def close(self, *, kill: bool = False) -> None:
        """End the devices' processes; with `kill`, without waiting for what they are doing."""
        self._workers.close(kill=kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)

    def _run(self, placement: GroupPlacement) -> float | None:
        """The mean seconds of a step of one run; None if the run fails."""
        # If the run before this one lost a process, its workers are marked as closed. Those that
        # are still alive are ended, and new ones start.
        if self._workers.closed:
            self._workers.close(kill=True)
            self._workers = Workers(self.task.machine)
        problem = self.problem
        graph, machine = problem.graph, problem.machine
        assert problem.trace is not None, "the problem of a `PlacementTask` has a simulator"
        try:
            # A plan that can be run has the simulator's orders. It promises nothing but its
            # predicted step and memory, and is never saved, so it names no source.
            spread = problem.spread(placement)
            timeline = problem.trace(spread)
            plan = Plan(
                source=Source("", "", (), ""),
                graph_fingerprint=graph.fingerprint,
                machine=machine,
                placement=normalise(spread, graph, machine),
                orders=timeline.orders,
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
            with execute(plan, self.step, seed=self.seed, workers=self._workers) as placed:
                if any(device.torch_device for device in machine.devices):
                    placed.step_seconds(CAPTURING_STEPS)
                return float(placed.step_seconds(self.steps).mean())
        except (RunError, InfeasibleError) as error:
            self.failures.append(str(error))
            return None
