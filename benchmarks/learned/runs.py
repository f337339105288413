"""What the experiments on learned placement are made of: trainings, each kept as it is done.

    one       a fresh policy on one graph                   GDP-one, HDP
    batch     a fresh policy on several graphs in turn      GDP-batch; the policy is kept
    tuned     a batch's policy on one graph: what it proposes at once, and after fine-tuning
    converged a fresh policy on one graph, until it finds nothing better

A training is found again by everything that it depends on, the code included, so a killed run goes
on where it was. GDP-one and HDP are those of `python -m reproductions gdp`, if they have as many
trials; what lacks is trained here, and the table is left as it is.

The devices of `gdp-paper` are rows of its last layer, so its policy of a batch has as many as the
largest machine. A graph on a smaller machine has its GPUs at the first rows and its CPU at the
last, and nothing may be on the others (`widened`). GDP's paper does not say how its batches differ
in devices, as far as we could check.
"""

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from harness import say
from numpy.typing import NDArray

from dovetail.machine import parse_machine
from dovetail.machine.files import machine_to_dict
from dovetail.placers import BASELINES, Budget
from dovetail.placers.learned.catalog import make_policy, settings_of
from dovetail.placers.learned.files import load_policy, save_policy, shipped
from dovetail.placers.learned.learner import TaskView
from dovetail.placers.learned.placing import finetuning, proposals
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import (
    LearningSettings,
    PlacementTask,
    ProblemView,
    Trials,
)
from dovetail.placers.problem import PlacementProblem
from reproductions import graphs
from reproductions.cases import GDP_CASES
from reproductions.learned import Tally, drive, run_of, task_of, training_of, views_of
from reproductions.methods import first_of
from reproductions.records import BestSoFar, Case, LearnedRun, MethodResult
from reproductions.running import BenchSettings as Table
from reproductions.store import LEARNED, Store, fingerprint
from reproductions.tables import cut

REFERENCE_SETTINGS = LearningSettings(
    "reinforce", trials=4, rate=0.1, decay=0.95, decay_from=400, decay_every=50, failing=10.0,
    valid_only_from=1000,
)  # fmt: skip
REFERENCE: dict[str, Any] = {
    "hidden": 512, "grouper_hidden": 64, "bound": 1.0, "temperature": 1.0, "noise": 0.5,
    "noise_until": 750, "greedy_from": 500,
}  # fmt: skip
"""Settings and options of HDP's open version: TensorFlow's
python/grappler/hierarchical_controller.py, hierarchical_controller_hparams."""
GDP = {case.key: case for case in GDP_CASES}
_RNNLM_4, _GNMT_8 = GDP["rnnlm-4-4gpu"], GDP["gnmt-8-8gpu"]
_RNNLM_8 = replace(
    _RNNLM_4, key="rnnlm-8-8gpu", title="RNNLM-8, 8 GPUs", model="zoo:rnnlm?layers=8",
    machine="gdp/8", gpus=8, published=None,
)  # fmt: skip


def _sized(case: Case, batch: int) -> Case:
    """A variant of a network: GDP does not say in what its three differ."""
    return replace(
        case, key=f"{case.key}-batch{batch}", title=f"{case.title}, batch {batch}",
        model=f"{case.model}&batch={batch}", published=None,
    )  # fmt: skip


_LLAMA = replace(
    _RNNLM_4, key="llama-4gpu", title="Llama, 4 layers, 4 GPUs",
    model="zoo:llama?layers=4&context=256", published=None,
)  # fmt: skip
CASES = GDP | {
    case.key: case
    for case in (
        _LLAMA, _RNNLM_8, *(_sized(_RNNLM_8, n) for n in (32, 128)),
        *(_sized(_GNMT_8, n) for n in (64, 256)),
    )
}  # fmt: skip


TABLE = Path(__file__).parents[1] / "gdp"
HDP = ("hdp", "hdp-paper")
MOST_DEVICES = max(len(parse_machine(case.machine).devices) for case in CASES.values())


@dataclass(frozen=True)
class Effort:
    """How much each training may spend.

    trials     placements of a training, for each of its graphs, and of fine-tuning, with what the
               policy proposes before; hdp_trials: of HDP's
    seeds      trainings of each
    table      folder of `python -m reproductions gdp`, whose graphs and trainings are used
    out        folder of what is kept
    table_trials   of the trainings there; the first `trials` of each count, for trainings follow
                   no schedule. None: as many as `trials`
    method     "gdp" or "gdp-paper": GDP as we have it, or as published
    patience   a training until convergence ends after so many placements without a better one
    limit      or after so many in all
    """

    trials: int
    hdp_trials: int
    seeds: int
    table: Path
    out: Path
    table_trials: int | None = None
    method: str = "gdp"
    patience: int = 1000
    limit: int = 20_000

    @property
    def store(self) -> Store:
        return Store(self.out / "rows", say)

    def trials_of(self, method: str) -> int:
        return self.hdp_trials if method in HDP else self.trials

    @property
    def bench(self) -> Table:
        own = dict.fromkeys(HDP, self.hdp_trials)
        trials = self.table_trials or self.trials
        return Table("gdp", self.table, learn=trials, learn_of=own, seeds=self.seeds)


@dataclass(frozen=True)
class Trained:
    """What a fresh policy came to on one of the graphs that it was trained on.

    likeliest   seconds of the placement that it takes for likeliest in the end; None: it does not
                fit
    """

    run: LearnedRun
    likeliest: float | None


@dataclass(frozen=True)
class Tuned:
    """What a policy that was trained before comes to on one graph.

    zero_shot   seconds of the best that it proposes
    likeliest   seconds of the likeliest alone; None: it does not fit
    run         all placements, the proposals first and then the fine-tuning's
    """

    zero_shot: float | None
    likeliest: float | None
    run: LearnedRun


def one(
    effort: Effort, key: str, seed: int, method: str | None = None, **options: Any
) -> LearnedRun:
    """A training on one graph: the table's if it has one, else one of this folder. The method is
    the effort's, if none is named."""
    method = method or effort.method
    if not options and key in GDP:
        table = effort.bench
        found = training_of(table, table.store(say), CASES[key], method, seed)
        if found is not None:
            return cut(found, effort.trials_of(method))
    return batch(effort, (key,), seed, method, **options)[key].run


def batch(
    effort: Effort, keys: Sequence[str], seed: int, method: str | None = None, **options: Any
) -> dict[str, Trained]:
    """key -> what one policy found for that graph, trained on all of them in turn.

    options   of the policy, and `table=False`: without the table of logits that `Policy.alone` adds
              to a policy of one graph. A policy of several graphs never has one.
    """
    method = method or effort.method
    name, key = _named(effort, keys, seed, method, options)
    kept = effort.store.get(name, key)
    if kept is None or not _policy_file(effort, name).exists():
        kept = _train(effort, keys, seed, method, options, _policy_file(effort, name))
        effort.store.put(name, key, kept)
    return {row: Trained(_run(raw["run"]), raw["likeliest"]) for row, raw in kept.items()}


def tuned(effort: Effort, keys: Sequence[str], row: str, seed: int, **options: Any) -> Tuned:
    """The policy of a batch on a graph, which may be one of them."""
    batch(effort, keys, seed, **options)
    name, trained = _named(effort, keys, seed, effort.method, options)
    return _tuned(effort, _policy_file(effort, name), trained, row, seed, effort.method)


def tuned_shipped(effort: Effort, row: str, seed: int) -> Tuned:
    """The policy that comes with the package on a graph."""
    file = shipped()
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    return _tuned(effort, file, f"shipped {content} {seed}", row, seed, "gdp")


def _tuned(effort: Effort, file: Path, trained: str, row: str, seed: int, method: str) -> Tuned:
    name = f"tuned.{row}.{_short(trained)}"
    key = fingerprint(LEARNED, **_ground(effort, (row,)), trained=trained, trials=effort.trials)
    kept = effort.store.get(name, key)
    if kept is None:
        policy, _ = load_policy(file, method)
        kept = _tune(effort, policy, row, seed)
        effort.store.put(name, key, kept)
    return Tuned(kept["zero_shot"], kept["likeliest"], _run(kept["run"]))


@dataclass(frozen=True)
class Converged:
    """A training until convergence.

    ended   "no better": no better placement in as many as the patience; "nothing new": the policy
            draws what it drew before (`IDLE_UPDATES`); "limit"
    """

    run: LearnedRun
    ended: str


def converged(effort: Effort, key: str, seed: int, method: str, **options: Any) -> Converged:
    """Train a fresh policy on one graph until it converges."""
    limits = {"patience": effort.patience, "limit": effort.limit}
    name = f"{method}-converged.{key}.{_short(repr(sorted(options.items())))}.{seed}"
    fingerprinted = fingerprint(
        LEARNED, **_ground(effort, (key,)), method=method, seed=seed, options=options, **limits
    )
    kept = effort.store.get(name, fingerprinted)
    if kept is None:
        kept = _converge(effort, key, seed, method, options)
        effort.store.put(name, fingerprinted, kept)
    return Converged(_run(kept["run"]), kept["ended"])


class _NoBetter(Exception):
    """A training has not found anything better for as long as it may."""


class _Patient(Tally):
    """A tally that ends the training after `patience` placements without a better one."""

    def __init__(self, problem: PlacementProblem, patience: int) -> None:
        super().__init__(problem, _quiet)
        self._patience = patience

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        outcomes = super().__call__(placements)
        if self.trials - (self.bests[-1].trial if self.bests else 0) >= self._patience:
            raise _NoBetter
        return outcomes


def _converge(
    effort: Effort, key: str, seed: int, method: str, options: dict[str, Any]
) -> dict[str, Any]:
    say(f"training {method} on {key} until it converges, seed {seed} {options or ''}")
    task, grouping = task_for(effort.table, key, method)
    (seen,), tally = views_of([task]), _Patient(task.problem(threads=1), effort.patience)
    policy, settings = _fresh(method, seen.view, seed, options)
    policy = policy.alone(seen.view)
    began, ended = time.perf_counter(), "nothing new"
    try:
        drive(policy, settings, [seen], [tally], trials=effort.limit, seed=seed)
        if tally.trials >= effort.limit:
            ended = "limit"
    except _NoBetter:
        ended = "no better"
    spent = time.perf_counter() - began
    say(f"it took {spent:.0f} s, {spent / tally.trials:.3f} s a placement: {ended}")
    run = run_of(method, seed, grouping, tally, -(-tally.trials // settings.trials), spent)
    return {"run": asdict(run), "ended": ended}


def fixed(effort: Effort, row: str, method: str) -> tuple[float | None, float | None]:
    """(expert, one GPU): seconds of these placements of the groups that a method places; None where
    one does not fit."""
    task, _ = task_for(effort.table, row, method)
    problem = task.problem(threads=1)
    expert = BASELINES["expert"](problem, Budget(evaluations=1))
    one_gpu = problem.settle(problem.fastest * 0 + first_of(task.machine, "gpu"))
    judged = Tally(problem, _quiet)(np.stack([expert, one_gpu]))
    of_expert, of_gpu = (
        float(seconds) if valid else None
        for seconds, valid in zip(judged.seconds, judged.valid, strict=True)
    )
    return of_expert, of_gpu


@cache
def task_for(table: Path, row: str, method: str) -> tuple[PlacementTask, str]:
    """A row's task and how its groups came about; the graph is captured where it is not kept."""
    case = CASES[row]
    graph = graphs.graph_for(Table("gdp", table).store(say), case)
    return task_of(row, graph, parse_machine(case.machine), method)


def _train(
    effort: Effort,
    keys: Sequence[str],
    seed: int,
    method: str,
    options: dict[str, Any],
    file: Path,
) -> dict[str, Any]:
    say(f"training {method} on {', '.join(keys)}, seed {seed} {options or ''}")
    pairs = [task_for(effort.table, row, method) for row in keys]
    devices = _devices(method, keys)
    seen, tallies = zip(*(_seat(task, devices) for task, _ in pairs), strict=True)
    policy, settings = _fresh(method, seen[0].view, seed, options)
    if len(keys) == 1 and options.get("table", True):
        policy = policy.alone(seen[0].view)
    trials = effort.trials_of(method) * len(keys)
    began = time.perf_counter()
    learner = drive(policy, settings, seen, tallies, trials=trials, seed=seed)
    spent = time.perf_counter() - began
    card = {"trained_on": list(keys), "seed": seed, "trials": trials, "updates": learner.updates}
    save_policy(file, policy, card)
    updates = learner.updates // len(keys)
    say(f"it took {spent:.0f} s, {spent / max(1, learner.trials):.3f} s a placement")
    kept = {}
    for row, (_, grouping), view, tally in zip(keys, pairs, seen, tallies, strict=True):
        run = asdict(run_of(method, seed, grouping, tally, updates, spent))
        kept[row] = {"run": run, "likeliest": _likeliest(policy, view, tally)}
    return kept


def _likeliest(policy: Policy, seen: TaskView, tally: Tally) -> float | None:
    outcome = tally(policy.likeliest(seen.view)[None])
    return float(outcome.seconds[0]) if outcome.valid[0] else None


def _fresh(
    method: str, view: ProblemView, seed: int, options: dict[str, Any]
) -> tuple[Policy, LearningSettings]:
    """A policy and how it is trained; of HDP with the option `reference` that of its authors."""
    if options.get("reference"):
        return make_policy(method, view, seed, **REFERENCE), REFERENCE_SETTINGS
    options = {name: value for name, value in options.items() if name != "table"}
    return make_policy(method, view, seed, **options), settings_of(method)


def _tune(effort: Effort, policy: Policy, row: str, seed: int) -> dict[str, Any]:
    task, grouping = task_for(effort.table, row, policy.name)
    seen, tally = _seat(task, policy.config.get("devices"))
    policy = policy.alone(seen.view)
    if policy.name == "gdp":
        settings, proposed = finetuning(seen.view), proposals(policy, seen.view, seed)
    else:
        # As published, a policy has one likeliest placement, and is tuned as it was trained.
        settings = settings_of(policy.name)
        proposed = iter([policy.likeliest(seen.view)[None]])
    torch.set_num_threads(1)
    began = time.perf_counter()
    likeliest = None
    for placements in proposed:
        outcome = tally(placements[: effort.trials - tally.trials])
        # The first proposal of all is the likeliest.
        likeliest = outcome if likeliest is None else likeliest
        if tally.trials == effort.trials:
            break
    assert likeliest is not None
    zero_shot, left = tally.best_seconds, effort.trials - tally.trials
    learner = drive(policy, settings, [seen], [tally], trials=left, seed=seed)
    return {
        "zero_shot": zero_shot if np.isfinite(zero_shot) else None,
        "likeliest": float(likeliest.seconds[0]) if likeliest.valid[0] else None,
        "run": asdict(
            run_of(policy.name, seed, grouping, tally, learner.updates, time.perf_counter() - began)
        ),
    }


def _devices(method: str, keys: Sequence[str]) -> int | None:
    """How many devices each view of a training has; None: those of its machine."""
    return MOST_DEVICES if method == "gdp-paper" and len(keys) > 1 else None


def _seat(task: PlacementTask, devices: int | None) -> tuple[TaskView, Tally]:
    """A task as a policy of so many devices sees it, and the judge of what it draws for it."""
    (seen,), problem = views_of([task]), task.problem(threads=1)
    if devices is None or devices == seen.view.device_count:
        return seen, Tally(problem, _quiet)
    gpus = [device.kind for device in task.machine.devices].count("gpu")
    count = seen.view.device_count
    # Every machine has its GPUs first (`parse_machine`).
    rows = np.concatenate([np.arange(gpus), np.arange(devices - count + gpus, devices)])
    return TaskView(seen.name, widened(seen.view, rows, devices)), _Narrowing(problem, rows)


def widened(view: ProblemView, rows: NDArray[np.int64], devices: int) -> ProblemView:
    """The view with so many devices, its own ones as `rows` [its devices]; on the others nothing
    may be. Raises `ValueError` where they are too few."""
    if len(rows) > devices or len(rows) != view.device_count:
        raise ValueError(f"{view.device_count} devices do not fit into {devices}")
    seconds = np.repeat(view.seconds.max(axis=1, keepdims=True), devices, axis=1)
    allowed = np.zeros(seconds.shape, dtype=bool)
    described = np.zeros((devices, view.devices.shape[1]), dtype=view.devices.dtype)
    links = np.zeros((devices, devices, view.links.shape[2]), dtype=view.links.dtype)
    seconds[:, rows], allowed[:, rows] = view.seconds, view.allowed
    described[rows], links[np.ix_(rows, rows)] = view.devices, view.links
    return replace(
        view, seconds=seconds, allowed=allowed, devices=described, links=links,
        settled=rows[view.settled].astype(np.int32),
    )  # fmt: skip


class _Narrowing(Tally):
    """The tally of a `widened` view: placements name its devices by `rows`."""

    def __init__(self, problem: PlacementProblem, rows: NDArray[np.int64]) -> None:
        super().__init__(problem, _quiet)
        self._device_of = np.full(int(rows.max()) + 1, -1, dtype=np.int32)
        self._device_of[rows] = np.arange(len(rows))

    def __call__(self, placements: NDArray[np.int32]) -> Trials:
        return super().__call__(self._device_of[placements])


def _quiet(_trials: int, _seconds: float) -> None:
    """Tells nobody."""


def _named(
    effort: Effort, keys: Sequence[str], seed: int, method: str, options: dict[str, Any]
) -> tuple[str, str]:
    """(name, fingerprint) of a training."""
    key = fingerprint(
        LEARNED, **_ground(effort, keys), method=method, trials=effort.trials_of(method), seed=seed,
        options=options, devices=_devices(method, keys), kept="run, likeliest",
    )  # fmt: skip
    return f"{method}.{_short(','.join(keys))}.{_short(repr(sorted(options.items())))}.{seed}", key


def _ground(effort: Effort, keys: Sequence[str]) -> dict[str, Any]:
    tasks = [task_for(effort.table, row, "gdp")[0] for row in keys]
    return {
        "graphs": [task.graph.fingerprint for task in tasks],
        "machines": [machine_to_dict(task.machine) for task in tasks],
    }


def _policy_file(effort: Effort, name: str) -> Path:
    return effort.out / "rows" / f"{name}.safetensors"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _run(raw: dict[str, Any]) -> LearnedRun:
    bests = tuple(BestSoFar(**best) for best in raw["bests"])
    return LearnedRun(**{**raw, "found": MethodResult(**raw["found"]), "bests": bests})
