"""How long a run stands still when a worker or the server is killed.

Four workers of 20 ms steps on a vector of a million elements; a thread kills one of the processes
every few seconds, by SIGKILL from outside.

    worker:   kill ─► next commit of the others ─► the lost samples committed ─► its successor's
    server:   kill ─► first commit after it
"""

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from apart import living
from harness import host, parser_of, table

from dovetail.training import Assignment, FailurePolicy, Gradient, Job, Watcher, make_rule
from dovetail.training.backends.processes import run

WORKER, SERVER = "processes.worker", "processes.server"
WORKERS, BATCH, SAMPLES = 4, 8, 4000


class Steps:
    """Sleeps, and writes down what it computes: epoch, first sample, and when."""

    def __init__(self, path, size, step_seconds):
        self.path, self.step_seconds = path, step_seconds
        self.vector = np.full(size, 1e-6, np.float32)

    def gradient(self, theta, indices, epoch):
        with open(self.path, "a") as file:
            file.write(f"{epoch} {indices[0]} {time.perf_counter()}\n")
        time.sleep(self.step_seconds)
        return Gradient(self.vector, 1.0, len(indices))

    def update(self, theta, gradient, epoch):
        return -gradient

    def rate(self, epoch):
        return 1.0


def kill(entry, options, folder, begun, done):
    """Kill a process that runs `entry`, so many times; fill `done` with (when, process id)."""
    begun.wait()
    while len(done) < options.kills:
        time.sleep(options.pause_seconds * random.uniform(1, 1.5))
        us, wanted = os.getpid(), entry.encode()
        victims = [pid for pid, parent, _, line in living() if parent == us and wanted in line]
        if entry == WORKER:  # one that has begun to compute
            victims = [pid for pid in victims if list(Path(folder).glob(f"*-{pid}"))]
        if victims:
            pid = random.choice(victims)
            os.kill(pid, signal.SIGKILL)
            done.append((time.perf_counter(), pid))
    time.sleep(options.pause_seconds)
    done.append(None)


def measure(entry, options):
    """One run with its kills: the outcome, the kills, and the steps of each worker."""
    begun, done = threading.Event(), []
    with tempfile.TemporaryDirectory() as folder:

        def make(worker):
            return Steps(f"{folder}/{worker}-{os.getpid()}", options.size, options.step_seconds)

        job = Job("faults", options.size, SAMPLES, 10**6, BATCH, 1, WORKERS)
        policy = FailurePolicy(worker_restarts=10**6, server_restarts=10**6)
        start = np.zeros(options.size, np.float32)
        assignment = Assignment(job, make_rule("downpour"), start, make, policy=policy)
        watcher = Watcher(
            every_seconds=0.5,
            evaluate=lambda *_: {},
            should_stop=lambda _: done[-1:] == [None],
            rows=lambda rows: begun.set() if {r.worker for r in rows} else None,
        )
        killer = threading.Thread(target=kill, args=(entry, options, folder, begun, done))
        killer.start()
        outcome = run(assignment, watcher)
        killer.join()
        steps = {path.name: path.read_text().split("\n") for path in Path(folder).iterdir()}
    return outcome, done[:-1], steps


def recomputed(steps, pid, since):
    """(worker, when) of the step over the samples that process `pid` was computing as it died."""
    lost = [line for name, lines in steps.items() for line in lines if name.endswith(f"-{pid}")]
    last = [line.split() for line in lost if len(line.split()) == 3]
    if not last:
        return None
    for name, lines in steps.items():
        for epoch, first, when in (line.split() for line in lines if len(line.split()) == 3):
            if [epoch, first] == last[-1][:2] and float(when) > since:
                return int(name.split("-")[0]), float(when)
    return None  # it had been committed


def of_workers(options):
    outcome, kills, steps = measure(WORKER, options)
    origin = outcome.meta["origin"]
    rows, times = outcome.rows, {"others commit": [], "lost samples": [], "successor": []}
    for when, pid in kills:
        worker = next(int(name.split("-")[0]) for name in steps if name.endswith(f"-{pid}"))
        after = [row for row in rows if row.seconds > when - origin]
        others = [row.seconds for row in after if row.worker != worker]
        own = [r.seconds for r in after if r.worker == worker and r.begin_seconds > when - origin]
        if others:
            times["others commit"].append(others[0] + origin - when)
        if own:
            times["successor"].append(own[0] + origin - when)
        again = recomputed(steps, pid, when)
        if again:
            by, moment = again
            row = next(r for r in after if r.worker == by and r.end_seconds > moment - origin)
            times["lost samples"].append(row.seconds + origin - when)
    return times


def of_server(options):
    outcome, kills, _ = measure(SERVER, options)
    origin = outcome.meta["origin"]
    found = []
    for when, _ in kills:
        after = [row.seconds for row in outcome.rows if row.seconds > when - origin]
        if after:
            found.append(after[0] + origin - when)
    return {"server: first commit": found}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--pause-seconds", type=float, default=4.0)
    parser.add_argument("--size", type=int, default=10**6)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    options = parser.parse_args()
    print(host(np), flush=True)
    rows = []
    for name, times in (of_workers(options) | of_server(options)).items():
        figures = statistics.median(times), min(times), max(times)
        rows.append((name, *(f"{1000 * seconds:.0f} ms" for seconds in figures), len(times)))
    print(table(("from the kill to", "median", "least", "most", "kills"), rows))


if __name__ == "__main__":
    main()
