"""Kills processes of trainings at random moments, and asks whether each sample was counted once.

    python benchmarks/faults/kills.py --kills 1000 --out benchmarks/faults/results/kills.json

A run has 3 to 5 workers on the `processes` backend, with and without a fork server, windows of 1 to
4 steps, and snapshots after 3 to 40 commits. The learner counts its samples, so the center itself
tells how often each was counted. A thread kills a random process below the run, server, workers and
fork server alike, after .05 to .6 s each, as long as the run goes on and until it has killed
`MOST`. Each run is a process of its own, so that one that hangs is seen.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from apart import living, tell, told_by
from harness import keep_json, parser_of

from dovetail.errors import DovetailError
from dovetail.runtime.forking import start_fork_server
from dovetail.training import (
    Assignment,
    FailurePolicy,
    Gradient,
    Job,
    Storage,
    Watcher,
    load_backend,
    make_rule,
)

SAMPLES, BATCH, EPOCHS = 400, 5, 3
STEP_SECONDS = 0.02
MOST = 25
LIMIT_SECONDS = 180.0
ROLES = {b"processes.serve": "server", b"processes.worke": "worker"}
KILLED = "killed "
"""What a run's process prints before the role of each process that was killed."""


class Counts:
    """Element i of the center ends as the times that sample i was trained on."""

    def gradient(self, theta, indices, epoch):
        time.sleep(STEP_SECONDS)
        vector = np.bincount(indices, minlength=SAMPLES).astype(np.float32)
        return Gradient(vector, 0.0, len(indices))

    def update(self, theta, gradient, epoch):
        return gradient

    def rate(self, epoch):
        return 1.0


def train(seed: int, folder: Path) -> None:
    """One run in this process; prints its result as a line."""
    rng = random.Random(seed)
    forks = rng.random() < 0.5
    if forks:
        start_fork_server(("numpy", "dovetail.training.backends.processes.worker"))
    window, workers = rng.randint(1, 4), rng.randint(3, 5)
    snapshot = rng.choice((3, 10, 40))
    begun, over = threading.Event(), threading.Event()
    killed: list[str] = []

    def kill() -> None:
        begun.wait()
        while len(killed) < MOST and not over.wait(rng.uniform(0.05, 0.6)):
            victims = _below(os.getpid())
            if victims:
                pid, role = rng.choice(victims)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(role)
                    print(KILLED + role, flush=True)

    job = Job("kills", SAMPLES, SAMPLES, EPOCHS, BATCH, window, workers, seed=seed)
    policy = FailurePolicy(worker_restarts=10**6, server_restarts=10**6, refusals=10**6)
    assignment = Assignment(
        job, make_rule("downpour"), np.zeros(SAMPLES, np.float32), lambda _worker: Counts(),
        policy=policy, storage=Storage(folder, snapshot_commits=snapshot),
    )  # fmt: skip
    threading.Thread(target=kill, daemon=True).start()
    began = time.monotonic()
    told: dict[str, object]
    try:
        outcome = load_backend("processes")(assignment, Watcher(rows=lambda _: begun.set()))
        told = {"right": bool((outcome.theta == EPOCHS).all())}
    except DovetailError as error:
        told = {"error": f"{type(error).__name__}: {error}"}
    over.set()
    seconds = round(time.monotonic() - began, 1)
    tell(told | {"forks": forks, "seconds": seconds})


def _below(root: int) -> list[tuple[int, str]]:
    """(process, what it does) of all processes below this one."""
    parents, roles = {}, {}
    for pid, parent, name, line in living():
        parents[pid] = parent
        # What was forked has its server's command line, and a name of its own.
        text = name if name.startswith(b"processes.") or b"fork_server" in line else line
        roles[pid] = next(
            (role for mark, role in ROLES.items() if mark in text),
            "fork server" if b"fork_server" in line else "other",
        )
    found, reached = [], {root}
    while more := {pid for pid, parent in parents.items() if parent in reached} - reached:
        reached |= more
        found += [(pid, roles[pid]) for pid in sorted(more)]
    return found


def main() -> None:
    parser = parser_of(__doc__, first=0, seconds=float("inf"), out=None)
    parser.add_argument("--kills", type=int, default=1000, help="runs until so many")
    parser.add_argument("--one", type=int, help="this seed, in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        with TemporaryDirectory() as folder:
            train(arguments.one, Path(folder) / "run")
        return
    runs: list[dict[str, object]] = []
    began, seed, killed = time.monotonic(), arguments.first, 0
    while killed < arguments.kills and time.monotonic() - began < arguments.seconds:
        said, lines = told_by(__file__, "--one", str(seed), limit_seconds=LIMIT_SECONDS)
        kills = [line.removeprefix(KILLED) for line in lines if line.startswith(KILLED)]
        runs.append({"seed": seed, **said, "kills": kills})
        seed += 1
        killed += len(kills)
        if not kills:
            sys.exit(f"a run without a kill: {runs[-1]}")
        print(json.dumps(runs[-1]), flush=True)
        keep_json(arguments.out, {"runs": runs})
    right = sum(run.get("right") is True for run in runs)
    print(f"{right} of {len(runs)} runs right, with {killed} kills")


if __name__ == "__main__":
    main()
