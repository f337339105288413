"""Plans of a network of more than 50,000 ops, op by op: GDP zero-shot, GDP as published, and what
both are compared with, on the same ops. How long each takes, in how much memory, and its step.

    python benchmarks/learned/per_op.py [--seeds 3] [--rows auto,expert] [--trials 160]

GNMT with 8 layers, one step of training, on 8 GPUs, as in Y. Zhou et al., "GDP: Generalized Device
Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, of which we could check the
abstract alone. Capture and costs are not counted, which every method needs; what is: features,
policy, proposals, search, and all simulation.

Every row places what colocation leaves apart, but for `tuned`, which trains on a few thousand
groups. `auto` has the budget and the coarser partitions that `dovetail plan` gives it by default,
and splits those down to the same groups. Every step is simulated by one simulator. Each training
and search runs in a process of its own, in one thread, and is kept when it is done, so that a
killed command goes on where it was.
"""

import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import among, count, parser_of, say, show, status_bytes, table, with_range

from dovetail.errors import DovetailError
from dovetail.graph import Groups, colocate, group_levels
from dovetail.graph.grouping import merge_single_consumers
from dovetail.machine import parse_machine
from dovetail.machine.files import machine_to_dict
from dovetail.placers import PLACERS, Budget, GroupPlacement, parse_budget
from dovetail.placers.learned.catalog import make_policy, settings_of
from dovetail.placers.learned.files import load_policy, shipped
from dovetail.placers.learned.placing import make_gdp
from dovetail.placers.learned.records import PlacementTask
from reproductions import graphs
from reproductions.cases import GDP_CASES
from reproductions.learned import Tally, by_rule, drive, views_of
from reproductions.methods import first_of
from reproductions.store import LEARNED, PLANNED, Store, code_fingerprint, fingerprint

HERE = Path(__file__).parent
HEAD = ("what", "groups", "placements", "wall", "CPU", "peak memory", "step", "over the expert")


@dataclass(frozen=True)
class Options:
    """What the rows may spend.

    budget    of `auto`
    trials    placements of gdp-paper's training
    updates   of the shipped policy's fine-tuning, on at least so many `groups`
    """

    budget: str
    trials: int
    updates: int
    groups: int


class Placed(NamedTuple):
    """A placement.

    task         what was placed, which may have other groups than the task that was given
    placement    [groups]
    placements   how many a policy proposed or drew; None: it is no policy's
    """

    task: PlacementTask
    placement: GroupPlacement
    placements: int | None = None


Place = Callable[[PlacementTask, int, Options], Placed]
"""A row's method: (task, seed, options) -> the placement."""


def one_gpu(task: PlacementTask, _seed: int, _options: Options) -> Placed:
    problem = task.problem(threads=1)
    return Placed(task, problem.settle(problem.fastest * 0 + first_of(task.machine, "gpu")))


def classical(name: str) -> Place:
    """A planner that builds one placement."""

    def place(task: PlacementTask, seed: int, _options: Options) -> Placed:
        budget = Budget(evaluations=math.inf, threads=1)
        return Placed(task, PLACERS[name](task.problem(seed=seed, threads=1), budget))

    return place


def auto(task: PlacementTask, seed: int, options: Options) -> Placed:
    levels = group_levels(task.graph)
    assert (levels.finest.of_op == task.groups.of_op).all()
    problem = replace(task.problem(seed=seed, threads=1), coarser=levels.coarser)
    budget = parse_budget(options.budget)
    budget.threads = 1
    return Placed(task, PLACERS["auto"](problem, budget))


def likeliest(task: PlacementTask, _seed: int, _options: Options) -> Placed:
    (seen,) = views_of([task])
    policy, _card = load_policy(shipped(), "gdp")
    return Placed(task, policy.likeliest(seen.view), 1)


def zero_shot(task: PlacementTask, seed: int, _options: Options) -> Placed:
    return _tuned(task, seed, 0)


def tuned(task: PlacementTask, seed: int, options: Options) -> Placed:
    fewer = replace(task, groups=of_about(task, options.groups))
    return _tuned(fewer, seed, options.updates)


def _tuned(task: PlacementTask, seed: int, updates: int) -> Placed:
    budget = Budget(threads=1)
    placement = make_gdp(None, updates)(task.problem(seed=seed, threads=1), budget)
    return Placed(task, placement, int(budget.spent))


def as_published(task: PlacementTask, seed: int, options: Options) -> Placed:
    (seen,), tally = views_of([task]), Tally(task.problem(threads=1), lambda _trials, _best: None)
    policy = make_policy("gdp-paper", seen.view, seed)
    settings = settings_of("gdp-paper")
    drive(policy, settings, [seen], [tally], trials=options.trials, seed=seed)
    placement = tally.placement
    if placement is None:
        placement = policy.likeliest(seen.view)
    return Placed(task, placement, tally.trials)


def of_about(task: PlacementTask, groups: int) -> Groups:
    """The coarsest of ever smaller groups that are so many."""
    colocated, share = colocate(task.graph), 1 / 32
    found = merge_single_consumers(task.graph, colocated, largest_share=share)
    while found.count < groups and share > 2.0**-16:
        share /= 2
        found = merge_single_consumers(task.graph, colocated, largest_share=share)
    return found


class Row(NamedTuple):
    """A row of the table: its text, its method, and whether a seed changes the placement."""

    title: str
    place: Place
    drawn: bool = True


ROWS = {
    "one-gpu": Row("one GPU", one_gpu, drawn=False),
    "expert": Row("expert", classical("expert"), drawn=False),
    "metis": Row("METIS", classical("metis")),
    "scotch": Row("Scotch", classical("scotch")),
    "auto": Row("`auto`, {budget}", auto),
    "likeliest": Row("shipped policy, its likeliest placement", likeliest, drawn=False),
    "zero-shot": Row("shipped policy, best proposed", zero_shot),
    "tuned": Row("shipped policy, {updates} updates of fine-tuning", tuned),
    "gdp-paper": Row("`gdp-paper`, a short training from nothing", as_published),
}


class Measured(NamedTuple):
    """One row by one seed; `seconds` None: why there are none is `reason`."""

    groups: int
    placements: int | None
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    seconds: float | None
    reason: str = ""


def measure(task: PlacementTask, name: str, seed: int, options: Options) -> Measured:
    """Place the task by a row's method, in this process, and simulate the placement."""
    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        placed = ROWS[name].place(task, seed, options)
    except DovetailError as error:  # such as a library that is not installed
        return Measured(task.groups.count, None, 0.0, 0.0, 0, None, str(error))
    tally = Tally(placed.task.problem(threads=1), lambda _trials, _best: None)
    fits = tally(placed.placement[None]).valid[0]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = status_bytes("VmHWM")
    seconds, reason = (tally.best_seconds, "") if fits else (None, tally.reason)
    return Measured(placed.task.groups.count, placed.placements, wall, cpu, peak, seconds, reason)


def measure_apart(task: PlacementTask, name: str, seed: int, options: Options) -> Measured:
    """The same in a new process, whose memory is this row's alone."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(measure, task, name, seed, options).result()


def kept(
    store: Store, model: str, task: PlacementTask, name: str, seed: int, options: Options
) -> Measured:
    """A row by one seed, measured unless it is kept."""
    spent = {
        "auto": {"budget": options.budget},
        "tuned": {"updates": options.updates, "groups": options.groups},
        "gdp-paper": {"trials": options.trials},
    }.get(name, {})
    key = fingerprint(
        PLANNED, learned=code_fingerprint(LEARNED), graph=task.graph.fingerprint,
        machine=machine_to_dict(task.machine), row=name, seed=seed, **spent,
    )  # fmt: skip
    at = f"per-op.{name}.{fingerprint(PLANNED, model=model, **spent)[:8]}.{seed}"
    value = store.get(at, key)
    if value is None:
        measured = measure_apart(task, name, seed, options)
        say(" | ".join(map(str, (name, f"seed {seed}", *measured))))
        if measured.seconds is None and not measured.peak_bytes:
            return measured  # it did not run, and may another time
        value = measured._asdict()
        store.put(at, key, value)
    return Measured(**value)


def line_of(title: str, runs: Sequence[Measured], expert: float | None) -> tuple[str, ...]:
    """A row of the table: the medians over seeds, and the spread of the step."""
    first, fitting = runs[0], [run.seconds for run in runs if run.seconds is not None]
    drawn = "-" if first.placements is None else f"{first.placements:,}"
    if not first.peak_bytes:
        return (title, f"{first.groups:,}", drawn, "-", "-", "-", first.reason, "-")
    wall = statistics.median(run.wall_seconds for run in runs)
    cpu = statistics.median(run.cpu_seconds for run in runs)
    peak = max(run.peak_bytes for run in runs) / 2**30
    step, ratio = next((run.reason for run in runs if run.reason), ""), "-"
    if len(fitting) == len(runs):
        middle = statistics.median(fitting)
        step = with_range(fitting, ".3f", " s") if len(runs) > 1 else f"{middle:.3f} s"
        ratio = f"{middle / expert:.3f}" if expert else "-"
    return (
        title, f"{first.groups:,}", drawn, f"{wall:.1f} s", f"{cpu:.1f} s", f"{peak:.2f} GiB",
        step, ratio,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seeds=1, trials=160, budget="10s", out=HERE, readme=None)
    parser.add_argument("--rows", type=among(ROWS), default=list(ROWS), help="; ".join(ROWS))
    parser.add_argument("--updates", type=count, default=50, help="of fine-tuning")
    parser.add_argument("--groups", type=count, default=5000, help="at least, of fine-tuning")
    parser.add_argument("--steps", type=count, default=66, help="that the network is unrolled for")
    parser.add_argument("--model", help="another network than GNMT, as MODEL")
    arguments = parser.parse_args(argv)
    parse_budget(arguments.budget)  # is refused at once
    options = Options(arguments.budget, arguments.trials, arguments.updates, arguments.groups)
    model = arguments.model or f"zoo:gnmt?layers=8&steps={arguments.steps}"
    (like,) = (case for case in GDP_CASES if case.key == "gnmt-8-8gpu")
    store = Store(arguments.out / "rows", say)
    graph = graphs.graph_for(store, replace(like, key="per-op", model=model))
    task = by_rule(model, graph, parse_machine(like.machine))
    task = replace(task, groups=colocate(graph))
    # Whatever rows are asked for, the expert is what they are compared with.
    expert = kept(store, model, task, "expert", 0, options).seconds
    lines = []
    for name in arguments.rows:
        seeds = range(arguments.seeds if ROWS[name].drawn else 1)
        runs = [kept(store, model, task, name, seed, options) for seed in seeds]
        title = ROWS[name].title.format(budget=options.budget, updates=options.updates)
        lines.append(line_of(title, runs, expert))
    text = (
        f"`{model}`, {like.train}, {like.machine}, {len(graph):,} ops, one thread, seeds: "
        f"{arguments.seeds}:\n\n{table(HEAD, lines)}"
    )
    show(text, arguments.readme, "per_op")


if __name__ == "__main__":
    main()
