"""Asynchronous controllers: throughput, quality, and what a killed controller costs.

python benchmarks/learned/asynchrony.py [--backends processes ray] [--controllers 1 2 4]
                                        [--seeds 2] [--trials 960]

Every evaluation sleeps .2 s, as a real run would take, four at once; its value is the simulator's.
Controllers train one small seq2seq policy on one synthetic network. Rates are those of the time in
which all controllers were at work: from the last one's second update to the first one's last. In
the last run of each backend one of two controllers is killed.
"""

import math
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import parser_of, show, table

from dovetail.costs import analytic_costs
from dovetail.graph.grouping import group
from dovetail.graph.synthetic import layered
from dovetail.machine import parse_machine
from dovetail.placers.learned.features import look
from dovetail.placers.learned.judges import SimulatedJudge
from dovetail.placers.learned.learner import PolicyLearner, TaskView
from dovetail.placers.learned.learning import learn
from dovetail.placers.learned.records import Judge, Learned, PlacementTask, Point, Trials
from dovetail.placers.learned.seq2seq import SETTINGS, Seq2Seq

EVALUATION_SECONDS = 0.2
EVALUATORS = 4
CONTROLLERS = (1, 2, 4)
RULES = replace(
    SETTINGS, trials=EVALUATORS, rate=0.003, baseline="mean", failing=1.0, normalised=True,
    valid_only_from=None,
)  # fmt: skip
OPTIONS = {
    "processes": {},
    "ray": {"worker_cores": 0.1, "server_cores": 0.1, "object_store_bytes": 80 << 20},
}
HEAD = ("backend, controllers", "rate", "of linear", "best", "mean of the last", "seconds")


def make_task() -> PlacementTask:
    graph = layered(1200, width=3, depth=6, seed=1, training=True)
    machine = parse_machine("gdp/2")
    return PlacementTask(
        "layered", graph, machine, analytic_costs(graph, machine), group(graph, largest_share=1 / 4)
    )


def make_policy(task: PlacementTask, seed: int) -> Seq2Seq:
    return Seq2Seq.for_view(look(task.problem()), seed=seed, hidden=16)


@dataclass(frozen=True)
class Sleeping:
    """Makes a judge that takes its time: `EVALUATORS` placements at once, each as long as a real
    run. Leaves the number of the controller's process in the folder."""

    folder: Path

    def __call__(self, task: PlacementTask) -> Judge:
        judge = SimulatedJudge(task.problem(threads=1))
        judge(np.zeros((1, task.groups.count), np.int32))  # compiled before anyone waits for it
        (self.folder / str(os.getpid())).touch()

        def judge_slowly(placements: NDArray[np.int32]) -> Trials:
            begin = time.perf_counter()
            found = judge(placements)
            rounds = math.ceil(len(placements) / EVALUATORS)
            left = EVALUATION_SECONDS * rounds - (time.perf_counter() - begin)
            time.sleep(max(0.0, left))
            return found

        return judge_slowly


def rate_of(points: tuple[Point, ...], controllers: int) -> float:
    """Placements a second while all controllers were at work."""
    of_each = [[p.seconds for p in points if p.controller == c] for c in range(controllers)]
    begin, end = max(times[1] for times in of_each), min(times[-1] for times in of_each)
    return EVALUATORS * sum(begin < p.seconds <= end for p in points) / (end - begin)


@dataclass
class Killer:
    """Kills a controller a third of the way in."""

    folder: Path
    trials: int
    seen: int = 0
    killed: str = ""

    def __call__(self, point: Point) -> None:
        self.seen += EVALUATORS
        if not self.killed and self.seen >= self.trials // 3:
            self.killed = min(path.name for path in self.folder.iterdir())
            os.kill(int(self.killed), signal.SIGKILL)


def run(
    folder: Path, backend: str, controllers: int, trials: int, seed: int, progress=None
) -> Learned:
    task = make_task()
    return learn(
        [task], make_policy(task, seed), RULES, trials=trials, controllers=controllers,
        backend=backend, judge=Sleeping(folder), seed=seed, progress=progress,
        options=OPTIONS[backend],
    )  # fmt: skip


def run_and_kill(backend: str, trials: int) -> tuple[Learned, str]:
    """A run of two controllers of which one is killed, and what to say of it."""
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), trials)
        learned = run(Path(folder), backend, 2, trials, 0, killer)
    return learned, f"{backend}: a controller was killed; {learned.trials} trials were judged."


def final_mean(learned: Learned) -> float:
    """Of the last tenth of the updates."""
    last = learned.points[-max(1, len(learned.points) // 10) :]
    return statistics.fmean(point.mean for point in last)


def row(name: str, runs: list[Learned], rates: tuple[str, str]) -> list[str]:
    return [
        name,
        *rates,
        f"{statistics.fmean(next(iter(r.values.values())) for r in runs) * 1e3:.2f} ms",
        f"{statistics.fmean(map(final_mean, runs)) * 1e3:.2f} ms",
        f"{statistics.fmean(r.seconds for r in runs):.0f}",
    ]


def policy_seconds() -> float:
    """CPU seconds of one update without its evaluations."""
    task = make_task()
    problem = task.problem(threads=1)
    learner = PolicyLearner(
        make_policy(task, 0), [TaskView("", look(problem))], [SimulatedJudge(problem)], RULES
    )
    begin = 0.0
    for update in range(40):
        if update == 10:
            begin = time.process_time()
        learner.step()
    return (time.process_time() - begin) / 30


def main() -> None:
    parser = parser_of(__doc__, seeds=2, trials=960, readme=None)
    parser.add_argument("--backends", nargs="+", default=list(OPTIONS), choices=OPTIONS)
    parser.add_argument("--controllers", nargs="*", type=int, default=list(CONTROLLERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spent = policy_seconds()
    share = spent / EVALUATION_SECONDS
    said = [f"An update takes {spent * 1e3:.1f} ms of CPU, {share:.1%} of an evaluation."]
    print(said[-1], flush=True)
    rows = []
    for backend in arguments.backends:
        linear = 0.0
        for controllers in arguments.controllers:
            seeds = range(arguments.seeds)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                runs = [run(folder, backend, controllers, arguments.trials, s) for s in seeds]
            rate = statistics.fmean(rate_of(r.points, controllers) for r in runs)
            linear = linear or rate / controllers
            rates = f"{rate:.1f}/s", f"{rate / (controllers * linear):.3f}"
            rows.append(row(f"{backend}, {controllers}", runs, rates))
            print(rows[-1], flush=True)
        learned, text = run_and_kill(backend, arguments.trials)
        said.append(text)
        print(said[-1], flush=True)
        rows.append(row(f"{backend}, 2, one killed", [learned], ("", "")))
        print(rows[-1], flush=True)
    show(table(HEAD, rows) + "\n\n" + "\n".join(said), arguments.readme, "asynchrony")


if __name__ == "__main__":
    main()
