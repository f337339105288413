"""Runs on Ray whose calls fail: lost before they arrive, after they were done, and in flight.

    python benchmarks/faults/ray_calls.py --runs 20 --out benchmarks/faults/results/ray_calls.json

Ray fails its own calls (`RAY_testing_rpc_failure`; Ray draws by itself which): each call to an
actor with a chance of 10 % for each of the three kinds, up to `MOST` by each process. The learner
counts its samples, so the center itself tells whether each sample of each epoch was counted once.
Kills of workers and of the server may be added. Each run is a process of its own with a Ray of its
own.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from apart import living, tell, told_by
from harness import keep_json, parser_of

MOST = 200
"""Failures that each process injects at most."""
CALL = "CoreWorkerService.grpc_client.PushTask"
CHANCES = {"req_failure_prob": 10, "resp_failure_prob": 10, "in_flight_failure_prob": 10}
LIMIT_SECONDS = 300.0
SAMPLES, WORKERS = 480, 3


def train(seed: int, kills: int) -> None:
    """One run in this process; prints its result as a line."""
    from dovetail.errors import DovetailError
    from dovetail.training import FailurePolicy, Watcher, load_backend
    from tests.support.ray_runs import SMALL, assign_counts, each_sample_once_an_epoch

    rng = random.Random(seed)
    policy = FailurePolicy(worker_restarts=10**4, server_restarts=10**4, refusals=10**6)
    begun, over = threading.Event(), threading.Event()
    killed: list[str] = []

    def kill() -> None:
        begun.wait()
        while len(killed) < kills and not over.wait(rng.uniform(0.5, 2.0)):
            victims = _actors()
            if victims:
                name, pid = rng.choice(victims)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed.append(name)

    def hold(worker: int, total: float) -> None:
        time.sleep(0.02)

    assignment = assign_counts("calls", samples=SAMPLES, hold=hold, workers=WORKERS, policy=policy)
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    began = time.monotonic()
    told: dict[str, object]
    try:
        run = load_backend("ray", object_store_bytes=80 << 20, **SMALL)
        outcome = run(assignment, Watcher(rows=lambda _: begun.set()))
        events = [event.kind for event in outcome.events]
        told = {
            "right": each_sample_once_an_epoch(outcome),
            "events": {kind: events.count(kind) for kind in sorted(set(events))},
        }
    except DovetailError as error:
        told = {"error": f"{type(error).__name__}: {error}"}
    over.set()
    tell(told | {"kills": killed, "seconds": time.monotonic() - began})


def _actors() -> list[tuple[str, int]]:
    """(name, process) of this run's actors: of all that have its mark in the environment."""
    mark = f"DOVETAIL_CALLS={os.environ['DOVETAIL_CALLS']}".encode()
    found = []
    for pid, _, _, line in living():
        kind = re.match(rb"ray::.*(ParameterServer|RayWorker)", line)
        with suppress(OSError):
            if kind and mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append((kind[1].decode(), pid))
    return found


def main() -> None:
    parser = parser_of(__doc__, runs=10, first=0, out=None)
    parser.add_argument("--kills", type=int, default=0, help="processes killed in each run")
    parser.add_argument("--one", type=int, help="this seed, in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        train(arguments.one, arguments.kills)
        return
    runs = []
    for seed in range(arguments.first, arguments.first + arguments.runs):
        said, _ = told_by(
            __file__, "--one", str(seed), "--kills", str(arguments.kills),
            limit_seconds=LIMIT_SECONDS,
            variables={
                "DOVETAIL_CALLS": f"{os.getpid()}-{seed}",
                "RAY_testing_rpc_failure": json.dumps({CALL: {"num_failures": MOST, **CHANCES}}),
            },
        )  # fmt: skip
        runs.append({"seed": seed} | said)
        print(json.dumps(runs[-1]), flush=True)
        content = {"call": CALL, "chances": CHANCES, "most": MOST, "runs": runs}
        keep_json(arguments.out, content)
    right = sum(run.get("right") is True for run in runs)
    killed = sum(len(run.get("kills", ())) for run in runs)
    print(f"{right} of {len(runs)} runs right, with {killed} kills")


if __name__ == "__main__":
    main()
