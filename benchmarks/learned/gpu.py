"""GDP's policy on a GPU: placements drawn and updates a second, per-op training, a larger policy.

    python benchmarks/learned/gpu.py --device cuda
    python benchmarks/learned/gpu.py --device cpu --seconds 20 --rows transformer-xl-2-2gpu

    throughput   placements/s drawn, updates/s of PPO, and the whole of training with its simulator
    per op       the same with every op a group of its own, and the best that training finds
    larger       the same with a policy of several times the width and depth

The simulator runs on the CPU's cores, the policy on the device. Each figure is of a fixed number of
seconds after two updates that warm up.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import among, parser_of, say, show, table
from runs import CASES, TABLE

from dovetail.graph.grouping import colocate
from dovetail.machine import parse_machine
from dovetail.placers.learned.catalog import make_policy, settings_of
from dovetail.placers.learned.features import look
from dovetail.placers.learned.learner import PolicyLearner, TaskView
from dovetail.placers.learned.records import PlacementTask
from reproductions import graphs
from reproductions.learned import Tally, by_rule
from reproductions.running import BenchSettings as Table

LARGER: dict[str, Any] = {"hidden": 256, "layers": 6, "sage_layers": 4, "heads": 8, "segment": 512}


def per_op(task: PlacementTask) -> PlacementTask:
    """Every op a group of its own, but for what the graph itself ties together."""
    return replace(task, groups=colocate(task.graph))


def measure(
    task: PlacementTask, device: str, seconds: float, trials: int, **options: Any
) -> tuple[str, ...]:
    """One line of the table."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    problem = task.problem(threads=len(os.sched_getaffinity(0)))
    view, settings = look(problem), replace(settings_of("gdp"), trials=trials)
    policy = make_policy("gdp", view, 0, **options).to(device)
    parameters = sum(p.numel() for p in policy.parameters())
    generator = torch.Generator(device=device).manual_seed(0)
    draws = _rate(lambda: policy.draw(view, trials, generator), device, seconds / 4) * trials
    tally = Tally(problem, lambda _trials, _seconds: None)
    learner = PolicyLearner(policy, [TaskView(task.name, view)], [tally], settings)
    updates = _rate(learner.step, device, seconds)
    best = f"{tally.best_seconds:.3f} s after {tally.trials:,}"
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else 0.0
    return (
        task.name, f"{task.groups.count:,}", f"{parameters:,}", f"{draws:,.0f}", f"{updates:.2f}",
        f"{updates * trials:,.0f}", f"{memory:.1f} GiB" if memory else "-", best,
    )  # fmt: skip


def _rate(call: Callable[[], object], device: str, seconds: float) -> float:
    """Calls a second."""
    for _ in range(2):
        call()
    _wait(device)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        _wait(device)
        calls += 1
    return calls / (time.perf_counter() - began)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = parser_of(
        __doc__, device="cuda", trials=settings_of("gdp").trials, table=TABLE, readme=None
    )
    parser.add_argument("--rows", type=among(CASES), default="gnmt-8-8gpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each figure")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs it on the CPU")
    store, rows = Table("gdp", arguments.table).store(say), []
    for key in arguments.rows:
        graph = graphs.graph_for(store, CASES[key])
        task = by_rule(key, graph, parse_machine(CASES[key].machine))
        kinds = [(f"{key}, groups", task, {}), (f"{key}, per op", per_op(task), {}),
                 (f"{key}, groups, larger policy", task, LARGER)]  # fmt: skip
        for name, of, options in kinds:
            say(name)
            named = replace(of, name=name)
            rows.append(
                measure(named, arguments.device, arguments.seconds, arguments.trials, **options)
            )
    head = ("", "groups", "parameters", "placements drawn/s", "updates/s",
            "placements trained on/s", "GPU memory", "best found")  # fmt: skip
    where = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    text = f"{table(head, rows)}\n\n{where}, {arguments.trials} placements an update."
    show(text, arguments.readme, "gpu")


if __name__ == "__main__":
    main()
