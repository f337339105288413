"""Time to 97 % validation accuracy: asynchronous rules on real processes against torch DDP.

python benchmarks/stragglers/run.py [--seeds 5] [--seconds 60] [--systems DDP downpour adag]

The learning rate is the best of one grid for each system and slowdown (seed 0), then five other
seeds are trained with it. Medians and ranges; `never` counts as infinite.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from harness import line, parser_of, say, table
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from workload import (
    BATCH,
    TARGET,
    WORKERS,
    Run,
    accuracy,
    adam,
    compute_seconds,
    digits,
    network,
    time_to_target,
    wait_a_step,
)

from dovetail.training import Assignment, Gradient, Job, ModuleLearner, Watcher, flatten, make_rule
from dovetail.training.backends.processes import run as run_processes

RATES = (0.002, 0.003, 0.005)
SLOW = (1.0, 4.0, 10.0)
SYSTEMS = {"DDP": 1, "downpour": 1, "adag": 1, "agn": 4}  # name -> window
KEEP_SAMPLES = 4 * WORKERS * BATCH  # a center is kept every four steps of all
LOG = False  # as on the other side, nothing is kept for a restart
HERE = Path(__file__).parent


@dataclass
class Paced:
    """A learner that waits before each gradient, as the benchmark's workers do."""

    inner: ModuleLearner
    slow: float
    computed_seconds: float = field(default_factory=compute_seconds)

    def gradient(
        self, theta: NDArray[np.float32], indices: NDArray[np.int64], epoch: int
    ) -> Gradient:
        wait_a_step(self.slow, self.computed_seconds)
        return self.inner.gradient(theta, indices, epoch)

    def update(self, theta: NDArray[np.float32], gradient: NDArray[np.float32], epoch: float):
        return self.inner.update(theta, gradient, epoch)

    def rate(self, epoch: float) -> float:
        return self.inner.rate(epoch)


def make_learner(run: Run, folder: str, worker: int) -> Paced:
    """The worker's learner, once all workers have theirs: nobody begins before the others."""
    torch.set_num_threads(1)
    images, labels, *_ = digits()
    stepper = partial(adam, lr=run.rate)
    data = TensorDataset(images, labels)
    learner = ModuleLearner(network(run.seed), cross_entropy, stepper, data)
    paced = Paced(learner, run.slow if worker == 0 else 1.0)
    paced.inner.gradient(flatten(network(run.seed)), np.arange(BATCH), 0)
    Path(folder, str(worker)).touch()
    while len(os.listdir(folder)) < WORKERS:
        time.sleep(0.01)
    return paced


@dataclass
class Keeper:
    """Keeps centers with their times; looks at the newest once an epoch, to end the run."""

    kept: list[tuple[float, NDArray[np.float32]]] = field(default_factory=list)

    def __call__(self, theta: NDArray[np.float32], clock: int, samples: int, seconds: float):
        self.kept.append((seconds, theta.copy()))
        if len(self.kept) % 6:
            return {"accuracy": 0.0}
        _, _, images, labels = digits()
        model = network(0)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(theta), model.parameters())
        return {"accuracy": accuracy(model, images, labels)}


def train(run: Run) -> float:
    """Seconds from the first worker's first step to the target."""
    samples = len(digits()[1])
    theta = flatten(network(run.seed))
    epochs = max(3, int(run.seconds / (samples / BATCH / WORKERS * 0.04)))
    name, window = f"{run.system}-{run.seed}", SYSTEMS[run.system]
    job = Job(name, theta.size, samples, epochs, BATCH, window, WORKERS, run.seed)
    keeper = Keeper()
    watcher = Watcher(
        every_samples=KEEP_SAMPLES,
        evaluate=keeper,
        should_stop=lambda figures: figures[-1]["accuracy"] >= TARGET,
    )
    rule = make_rule(run.system)
    with tempfile.TemporaryDirectory() as folder:
        assignment = Assignment(job, rule, theta, partial(make_learner, run, folder))
        outcome = run_processes(assignment, watcher, log=LOG)
    begin = min(row.begin_seconds for row in outcome.rows)
    return time_to_target(keeper.kept) - begin


def train_ddp(runs: list[Run]) -> list[float]:
    """Seconds to the target of each run, all in one group of processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    text = json.dumps([asdict(run) for run in runs]).encode()
    with tempfile.TemporaryDirectory() as folder:
        group = [
            subprocess.Popen(
                [sys.executable, HERE / "ddp.py", str(rank), f"{folder}/store"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                env=environment,
            )
            for rank in range(WORKERS)
        ]
        for process in group[1:]:
            process.stdin.write(text)
            process.stdin.close()
        lines = group[0].communicate(text)[0].decode().split()
        assert not any(process.wait() for process in group)
    return [math.inf if line == "null" else float(line) for line in lines]


def train_all(runs: list[Run]) -> list[float]:
    if runs[0].system == "DDP":
        return train_ddp(runs)
    found = []
    for run in runs:
        found.append(train(run))
        say(f"  {run.system} rate {run.rate} slow {run.slow} seed {run.seed}: {found[-1]:.2f} s")
    return found


def main() -> None:
    parser = parser_of(__doc__, seeds=5)
    parser.add_argument("--seconds", type=float, default=60, help="the longest a run may take")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    arguments = parser.parse_args()
    head = ("slowed worker", "system", "rate", "median s", "range", "DDP / this")
    print(table(head, []), flush=True)
    for slow in SLOW:
        reference = math.nan
        for system in arguments.systems:
            grid = [Run(system, rate, slow, 0, arguments.seconds) for rate in RATES]
            times = dict(zip(RATES, train_all(grid), strict=True))
            rate = min(RATES, key=times.__getitem__)
            seeds = range(1, arguments.seeds + 1)
            found = train_all([Run(system, rate, slow, s, arguments.seconds) for s in seeds])
            median = statistics.median(found)
            reference = median if system == "DDP" else reference
            span = f"{min(found):.2f} to {max(found):.2f}"
            cells = (f"{slow:g} x", system, rate, f"{median:.2f}", span)
            print(line(*cells, f"{reference / median:.2f}"), flush=True)


if __name__ == "__main__":
    main()
