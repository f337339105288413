"""Trains a learned method on one row alone: RL17's seq2seq, HDP, or GDP-one, ours or as published.

    graph ──► groups ──► Task ──► learn ──► LearnedRun, placement
                           └────► Tally: the simulator, and the curve of what it was asked

Every method starts from nothing: no plan of another method, no baseline, and no shipped policy but
for what that proposes untrained (`SHIPPED`). There is one exception: GDP's features hold the
choices of two classical planners (`gdp`). HDP and GDP place the same groups; as published
(`hdp-paper`, `gdp-paper`) they place every op by itself. Beside each stands `auto`, which does not
learn, on the same groups with as many evaluations (`AUTO_ON`).

One learner trains by itself, or several asynchronous controllers around a parameter server, as
RL17 has them (`train_by_controllers`).
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import analytic_costs
from dovetail.errors import InfeasibleError
from dovetail.graph import Graph, Groups, colocate, group
from dovetail.graph.cells import group_cells
from dovetail.graph.grouping import merge_single_consumers
from dovetail.machine import Machine
from dovetail.machine.files import machine_to_dict
from dovetail.methods import PLACERS
from dovetail.placers.budget import Budget
from dovetail.placers.learned.records import LearningSettings, PlacementTask, Trials
from dovetail.placers.multilevel import coarsen
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.plans import normalise
from dovetail.simulator import BatchEvaluation
from dovetail.units import format_bytes, format_seconds
from reproductions import graphs
from reproductions.cases import AUTO_ON, LEARNED, LIKELIEST, PROPOSALS, machine_of
from reproductions.figures import work_of
from reproductions.hypothesis import Settle, as_chosen, under_hypothesis
from reproductions.methods import HYPOTHESIS, PLAIN, splitting_problem
from reproductions.records import (
    BestSoFar,
    Case,
    CaseResult,
    Column,
    LearnedRun,
    MethodResult,
    PlanWork,
)
from reproductions.running import BenchSettings, Tell
from reproductions.store import DRAWN, SEARCHED, Kept, Store, fingerprint
from reproductions.store import LEARNED as TRAINING
from reproductions.tables import middle

if TYPE_CHECKING:  # they need torch
    from dovetail.placers.learned.learner import PolicyLearner, TaskView
    from dovetail.placers.learned.policy import Policy

TellTraining = Callable[[int, float], None]
"""A callback: tell(trials so far, best seconds or inf)."""
SHIPPED = (LIKELIEST, PROPOSALS)
"""These are the shipped policy's, on the groups of `gdp`. They draw once, and train nothing."""
FEWEST_GROUPS, MOST_GROUPS = 500, 1000
"""GDP and HDP train on a number of groups in this range, which two cores can do."""
IDLE_UPDATES = 50
"""A training ends after this many updates in a row that draw nothing new: the policy is sure by
then, and all further placements would be repeats."""
_FINEST_SHARE = 2.0**-12


def task_of(name: str, graph: Graph, machine: Machine, method: str) -> tuple[PlacementTask, str]:
    """(task, text on how its groups came about): the task on which a method is trained. One of
    `AUTO_ON` has that of the method that it is compared with.

    GDP and HDP get at least `FEWEST_GROUPS` groups, as few as possible. If RL17's rule gives more
    than `MOST_GROUPS`, its groups are joined by heavy edges. If it gives fewer than
    `FEWEST_GROUPS`, it is applied with ever smaller groups. If even those are too few, every group
    that colocation leaves is one.
    """
    task, grouping = by_rule(name, graph, machine), _grouping_of(method)
    groups = task.groups
    if AUTO_ON.get(method, method) == "seq2seq":
        return task, "RL17's rule"
    if grouping == "cells":
        return replace(task, groups=group_cells(graph)), "cells and branches"
    colocated, everything = colocate(graph), "all that colocation leaves"
    if grouping == "ops":
        return replace(task, groups=colocated), everything
    if groups.count > MOST_GROUPS:
        levels = coarsen(task.problem(threads=1), FEWEST_GROUPS)
        counts = [int(level.max()) + 1 for level in levels]
        of_group = levels[max(i for i, n in enumerate(counts) if n >= FEWEST_GROUPS)]
        joined = Groups(of_group[groups.of_op], int(of_group.max()) + 1)
        text = f"RL17's rule, {groups.count:,} groups, then joined by heavy edges"
        return replace(task, groups=joined), text
    share = 1 / 32
    while groups.count < FEWEST_GROUPS and share > _FINEST_SHARE:
        share /= 2
        groups = merge_single_consumers(graph, colocated, largest_share=share)
    if groups.count < FEWEST_GROUPS:
        return replace(task, groups=colocated), everything
    text = f"RL17's rule up to 1/{round(1 / share)} of the work a group"
    return replace(task, groups=groups), text


def _grouping_of(method: str) -> str:
    """The kind of groups of a method, or of the one that it is compared with."""
    return "" if method in SHIPPED else PLACERS[AUTO_ON.get(method, method)].grouping


def by_rule(name: str, graph: Graph, machine: Machine) -> PlacementTask:
    """The task of a row with the groups of RL17's rule, as planners get it."""
    return PlacementTask(
        name, graph, machine, analytic_costs(graph, machine), group(graph), ranked=True
    )


class Tally:
    """A judge that simulates placements, and keeps the curve of the best ones.

    A placement that was simulated before is looked up; it counts as a trial all the same.
    """

    def __init__(self, problem: PlacementProblem, tell: TellTraining) -> None:
        self.problem, self._tell = problem, tell
        self._known: dict[bytes, tuple[float, bool]] = {}
        self._seen: set[bytes] = set()
        self.trials = self.invalid = 0
        self.bests: list[BestSoFar] = []
        self.placement: GroupPlacement | None = None
        self.reason = "no placement was drawn"

    @property
    def distinct(self) -> int:
        return len(self._seen)

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        """The outcome of each placement [batch, groups]."""
        keys = [row.tobytes() for row in placements]
        unknown = {key: i for i, key in enumerate(keys) if key not in self._known}
        if unknown:
            spread = self.problem.spread(placements[list(unknown.values())])
            self._learn(list(unknown), self.problem.evaluate(spread))
        self._enter_all(keys, placements)
        outcomes = [self._known[key] for key in keys]
        valid = np.array([fits for _, fits in outcomes], dtype=bool)
        seconds = np.where(valid, [seconds for seconds, _ in outcomes], np.inf)
        return Trials(seconds, valid, np.ones(len(keys), dtype=bool))

    @property
    def best_seconds(self) -> float:
        """Seconds of the best placement so far; inf if nothing fits yet."""
        return self.bests[-1].seconds if self.bests else np.inf

    def watch(self, problem: PlacementProblem) -> PlacementProblem:
        """Return a problem with the same groups that enters here every placement that a search has
        it evaluate."""
        _, some_op = np.unique(problem.groups.of_op, return_index=True)

        def evaluate(placements: NDArray[np.int32]) -> BatchEvaluation:
            evaluated, groups = problem.evaluate(placements), placements[:, some_op]
            keys = [row.tobytes() for row in groups]
            self._learn(keys, evaluated)
            self._enter_all(keys, groups)
            return evaluated

        return replace(problem, evaluate=evaluate)

    def _enter_all(self, keys: Sequence[bytes], placements: NDArray[np.int32]) -> None:
        for key, row in zip(keys, placements, strict=True):
            seconds, valid = self._known[key]
            self._seen.add(key)
            self.trials += 1
            self.invalid += not valid
            if valid and seconds < self.best_seconds:
                self.bests.append(BestSoFar(self.trials, self.distinct, seconds))
                self.placement = row.copy()
        self._tell(self.trials, self.best_seconds)

    def _learn(self, keys: Sequence[bytes], evaluated: BatchEvaluation) -> None:
        """Note the outcome of each key's placement."""
        problem = self.problem
        over = evaluated.peak_memory_bytes - problem.capacities
        fits = evaluated.feasible & (over <= 0).all(axis=1)
        for i, key in enumerate(keys):
            self._known[key] = (float(evaluated.values[i]), bool(fits[i]))
        if not fits.any():
            worst = int(over[0].argmax())
            self.reason = (
                f"OOM: {problem.machine.device_names[worst]} needs "
                f"{format_bytes(evaluated.peak_memory_bytes[0, worst])} of "
                f"{format_bytes(problem.capacities[worst])}"
            )


def train(
    method: str, tasks: Sequence[PlacementTask], tallies: Sequence[Tally], *, trials: int, seed: int
) -> int:
    """Train a fresh policy on the tasks in turn, and return the number of updates."""
    from dovetail.placers.learned.catalog import make_policy, settings_of

    views = views_of(tasks)
    policy = make_policy(method, views[0].view, seed)
    if len(views) == 1:
        policy = policy.alone(views[0].view)
    return drive(policy, settings_of(method), views, tallies, trials=trials, seed=seed).updates


def train_by_controllers(
    method: str,
    task: PlacementTask,
    tally: Tally,
    *,
    trials: int,
    seed: int,
    controllers: int,
) -> int:
    """Train a fresh policy by asynchronous controllers around a parameter server, and return the
    number of updates, of all controllers together.

    Mirhoseini et al., ICML 2017, https://arxiv.org/abs/1706.04972, section 3.4. Server, rule and
    controllers are those of `placers.learned.learning`, where controllers also differ from the
    paper's; here they run in virtual time, in this process and thread. How long an update of each
    takes is drawn, 20 % more or less than the mean, so controllers do not stay in step. Equal seeds
    give equal trainings. It ends after `trials` trials, also if nothing new is drawn.
    """
    import torch

    from dovetail.placers.learned.catalog import make_policy, settings_of
    from dovetail.placers.learned.learner import PolicyLearner, parameters_of
    from dovetail.training import Assignment, Job, StepTimes, Watcher, load_backend, make_rule

    views, settings = views_of([task]), settings_of(method)
    policy = make_policy(method, views[0].view, seed).alone(views[0].view)
    theta = parameters_of(policy)
    job = Job(
        f"bench-{seed}", theta.size, trials, 1, settings.trials, workers=controllers, seed=seed
    )

    def controller(number: int) -> "PolicyLearner":
        own = copy.deepcopy(policy)
        return PolicyLearner(own, views, [tally], settings, seed=seed, controller=number)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = load_backend("simulated", times=StepTimes("jitter", spread=0.2))
        return run(Assignment(job, make_rule("downpour"), theta, controller), Watcher()).clock
    finally:
        torch.set_num_threads(threads)


def propose(method: str, task: PlacementTask, tally: Tally, seed: int) -> None:
    """Have the shipped policy's likeliest placement judged, or all that it proposes. Raises
    `PolicyFileError` where no policy is shipped."""
    from dovetail.placers.learned.files import load_policy, shipped
    from dovetail.placers.learned.placing import proposals

    (seen,) = views_of([task])
    policy, _card = load_policy(shipped(), "gdp")
    if method == LIKELIEST:
        tally(policy.likeliest(seen.view)[None])
        return
    for placements in proposals(policy, seen.view, seed):
        tally(placements)


def views_of(tasks: Sequence[PlacementTask]) -> list["TaskView"]:
    """The tasks as a policy sees them."""
    from dovetail.placers.learned.features import look
    from dovetail.placers.learned.learner import TaskView

    return [TaskView(task.name, look(task.problem(threads=1))) for task in tasks]


def drive(
    policy: "Policy",
    settings: LearningSettings,
    views: Sequence["TaskView"],
    tallies: Sequence[Tally],
    *,
    trials: int,
    seed: int,
) -> "PolicyLearner":
    """Train a policy with one controller, in this process and thread, and return the learner.

    Training ends after `trials` trials over all tasks, or after `IDLE_UPDATES` updates in a row
    that draw nothing new. The best placements of the tallies, if they have some, are the learner's
    first best ones.
    """
    import torch

    from dovetail.placers.learned.learner import BestPlacement, PolicyLearner

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    learner = PolicyLearner(policy, views, tallies, settings, seed=seed)
    for view, tally in zip(views, tallies, strict=True):
        if tally.placement is not None:
            learner.best[view.name] = BestPlacement(tally.placement, tally.best_seconds, 0)
    idle = 0
    try:
        for first in range(0, trials, settings.trials):
            distinct = sum(tally.distinct for tally in tallies)
            learner.step(min(settings.trials, trials - first))
            idle = 0 if sum(tally.distinct for tally in tallies) > distinct else idle + 1
            if idle == IDLE_UPDATES:
                break
    finally:
        torch.set_num_threads(threads)
    return learner


def run_learned(
    task: PlacementTask,
    grouping: str,
    method: str,
    *,
    trials: int,
    seed: int,
    tell: TellTraining = lambda _trials, _seconds: None,
    settle: Settle = as_chosen,
    controllers: int = 1,
) -> tuple[LearnedRun, GroupPlacement | None]:
    """Train a method for at most `trials` trials: its record, and its best placement [groups], None
    if none fits. One of `SHIPPED` has as many trials as it proposes."""
    began = time.perf_counter()
    problem = task.problem(seed=seed, threads=1)
    evaluate, trace = problem.evaluate, problem.trace
    settled = replace(
        problem,
        evaluate=lambda placements: evaluate(settle(placements)),
        trace=None if trace is None else lambda placement: trace(settle(placement[None])[0]),
    )
    tally, updates = Tally(settled, tell), 0
    controllers = _controllers(method, controllers)
    if method in SHIPPED:
        propose(method, task, tally, seed)
    elif method in AUTO_ON:
        searched = settled
        if PLACERS[AUTO_ON[method]].grouping == "ops":
            # These are all that colocation leaves, so `auto` begins with larger units, as always.
            searched = splitting_problem(task.graph, task.machine, seed)
        with suppress(InfeasibleError):
            PLACERS["auto"](tally.watch(searched), Budget(evaluations=trials, threads=1))
    elif controllers == 1:
        updates = train(method, (task,), (tally,), trials=trials, seed=seed)
    else:
        updates = train_by_controllers(
            method, task, tally, trials=trials, seed=seed, controllers=controllers
        )
    run = run_of(method, seed, grouping, tally, updates, time.perf_counter() - began)
    return replace(run, controllers=controllers), tally.placement


def _controllers(method: str, asked: int) -> int:
    """The controllers of a method; one for what trains nothing."""
    return 1 if method in SHIPPED or method in AUTO_ON else asked


def run_of(
    method: str, seed: int, grouping: str, tally: Tally, updates: int, seconds: float
) -> LearnedRun:
    """The record of a training from its tally and its duration."""
    problem, peaks = tally.problem, {}
    if tally.placement is not None:
        evaluated = problem.evaluate(problem.spread(tally.placement[None]))
        names = problem.machine.device_names
        peaks = dict(zip(names, evaluated.peak_memory_bytes[0].tolist(), strict=True))
    best = tally.bests[-1].seconds if tally.bests else None
    return LearnedRun(
        method=method,
        seed=seed,
        found=MethodResult(best, "" if tally.bests else tally.reason, peaks, seconds),
        groups=problem.groups.count,
        grouping=grouping,
        trials=tally.trials,
        distinct=tally.distinct,
        updates=updates,
        invalid_share=tally.invalid / tally.trials if tally.trials else 0.0,
        bests=tuple(tally.bests),
    )


# ---- Stored trainings: one file a training ----
#
#     OUT/rows/CASE.COLUMN.METHOD.seed-N.json       one training: a row, a column, a method, a seed
#     OUT/rows/CASE.COLUMN.METHOD.seed-N.work.json  the work of its best placement, for pictures
#
# With several controllers METHOD is followed by their number, as in "seq2seq.controllers-4".
# Trainings are tasks of their own, so that a killed command loses only the training that ran.


def trainings(settings: BenchSettings) -> Iterator[tuple[str, int]]:
    """Yield (method, seed) of every training of a row, seed by seed. The likeliest placement of a
    policy that is not trained needs one seed."""
    methods = [method for method in LEARNED[settings.name] if settings.trials_of(method)]
    for seed in range(settings.seed, settings.seed + settings.seeds):
        for method in methods:
            if method != LIKELIEST or seed == settings.seed:
                yield method, seed


def trained_columns(case: Case, columns: Iterable[str]) -> tuple[str, ...]:
    """Those of a row's columns in which methods are trained: of a row that the paper does not have,
    the plain one alone."""
    return tuple(columns) if case.published is not None else (PLAIN,)


@dataclass(frozen=True)
class _StoredTraining:
    """One training in the store, and the work of its best placement, each a file. `graph` is the
    fingerprint of the row's graph."""

    settings: BenchSettings
    store: Store
    case: Case
    column: str
    method: str
    seed: int
    graph: str = ""

    @property
    def _name(self) -> str:
        controllers = _controllers(self.method, self.settings.controllers)
        several = f".controllers-{controllers}" if controllers > 1 else ""
        return f"{self.case.key}.{self.column}.{self.method}{several}.seed-{self.seed}"

    @property
    def _facts(self) -> dict[str, Any]:
        machine = machine_to_dict(machine_of(self.case))
        return {
            "graph": self.graph, "machine": machine, "column": self.column, "method": self.method
        }  # fmt: skip

    @property
    def training(self) -> Kept:
        more = {
            "grouping": _grouping_of(self.method),
            "trials": self.settings.trials_of(self.method),
            "seed": self.seed,
            "controllers": _controllers(self.method, self.settings.controllers),
        }
        return Kept(self.store, self._name, fingerprint(_kind(self.method), **self._facts, **more))

    def work(self, placement: list[int] | None) -> Kept:
        key = fingerprint(DRAWN, **self._facts, placement=placement)
        return Kept(self.store, f"{self._name}.work", key)


def _kind(method: str) -> str:
    """The kind of result: what code it rests on."""
    return SEARCHED if method in AUTO_ON else TRAINING


def untrained(settings: BenchSettings, store: Store, case: Case) -> list[tuple[str, str, int]]:
    """(column, method, seed) of the trainings that are not kept yet, or not drawn."""
    captured, lacking = graphs.known(store, case), []
    for method, seed in trainings(settings):
        for column in trained_columns(case, settings.columns):
            stored = _StoredTraining(settings, store, case, column, method, seed)
            is_whole = False
            if captured is not None:
                stored = replace(stored, graph=captured.graph)
                kept = stored.training.get()
                # If a placement fits, its work is kept too.
                is_whole = kept is not None and (
                    kept["placement"] is None or stored.work(kept["placement"]).get() is not None
                )
            if not is_whole:
                lacking.append((column, method, seed))
    return lacking


def run_training(
    settings: BenchSettings,
    case: Case,
    column: str,
    method: str,
    seed: int,
    tell: Tell,
    complain: Tell,
) -> list[str]:
    """Train a method on a case's column from one seed, and keep the result and its picture. Returns
    no failures: it raises what a capture or a training raises."""

    store = settings.store(complain, _kind(method))
    graph = graphs.graph_for(store, case)
    machine = machine_of(case)
    settle: Settle = as_chosen
    if column == HYPOTHESIS:
        machine, settle = under_hypothesis(graph, machine)
    task, grouping = task_of(case.key, graph, machine, method)
    stored = _StoredTraining(settings, store, case, column, method, seed, graph.fingerprint)
    name = f"{case.title}, {column}: {method}, seed {seed}"
    tell(name)
    limit, tenths = settings.trials_of(method), 0

    def tell_tenth(trials: int, seconds: float) -> None:
        nonlocal tenths
        if 10 * trials // limit > tenths:
            tenths = 10 * trials // limit
            tell(f"{name}: {trials:,} trials, {format_seconds(seconds)}")

    kept = stored.training.get()
    if kept is None:
        run, placement = run_learned(
            task, grouping, method, trials=limit, seed=seed, tell=tell_tenth, settle=settle,
            controllers=settings.controllers,
        )  # fmt: skip
        kept = {"run": asdict(run), "placement": None if placement is None else placement.tolist()}
        stored.training.put(kept)
    if kept["placement"] is not None:
        of_op = np.array(kept["placement"], dtype=np.int32)[task.groups.of_op]
        placed = normalise(settle(of_op[None])[0], graph, machine)
        work = work_of(graph, machine, task.costs, task.groups, placed)
        stored.work(kept["placement"]).put(asdict(work))
    return []


def with_trainings(
    settings: BenchSettings, store: Store, case: Case, row: CaseResult
) -> CaseResult:
    """The row with all kept trainings in its columns."""
    columns = {
        name: column_with_trainings(settings, store, case, name, column)
        for name, column in row.columns.items()
    }
    runs = [run for column in columns.values() for of in column.learned.values() for run in of]
    seconds = sum(run.found.search_seconds for run in runs)
    return replace(row, columns=columns, seconds=row.seconds + seconds)


def column_with_trainings(
    settings: BenchSettings, store: Store, case: Case, name: str, column: Column
) -> Column:
    """The column with all its kept trainings. The run of the median of each learned method stands
    among the methods, and the work of its best run among what is shown."""
    runs: dict[str, list[LearnedRun]] = {}
    shown = dict(column.shown)
    for method, seed in trainings(settings):
        run = training_of(settings, store, case, method, seed, name)
        if run is not None:
            runs.setdefault(method, []).append(run)
    graph = graphs.known(store, case)
    for method, of in runs.items():
        if method in AUTO_ON or method in SHIPPED or graph is None:
            continue
        best = min(of, key=lambda run: run.found.seconds or math.inf)
        stored = _StoredTraining(settings, store, case, name, method, best.seed, graph.graph)
        work = stored.work(stored.training.get()["placement"]).get()
        if work is not None:
            shown[method] = PlanWork(**work)
    medians = {method: middle(of).found for method, of in runs.items()}
    learned = {method: tuple(of) for method, of in runs.items()}
    return replace(column, methods={**column.methods, **medians}, learned=learned, shown=shown)


def training_of(
    settings: BenchSettings, store: Store, case: Case, method: str, seed: int, column: str = PLAIN
) -> LearnedRun | None:
    """One training, if it is kept."""
    graph = graphs.known(store, case)
    if graph is None:
        return None
    stored = _StoredTraining(settings, store, case, column, method, seed, graph.graph)
    kept = stored.training.get()
    if kept is None:
        return None
    raw = kept["run"]
    bests = tuple(BestSoFar(**best) for best in raw["bests"])
    return LearnedRun(**{**raw, "found": MethodResult(**raw["found"]), "bests": bests})


def forget_trainings(settings: BenchSettings, store: Store, case: Case) -> None:
    """Drop the kept trainings of a case that these settings ask for."""
    for method, seed in trainings(settings):
        for column in settings.columns:
            stored = _StoredTraining(settings, store, case, column, method, seed)
            stored.training.drop()
            stored.work(None).drop()
