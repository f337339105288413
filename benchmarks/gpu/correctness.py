"""Random placements on GPUs against the same step in one process on the CPU, in float64.

    python benchmarks/gpu/correctness.py --out correctness.json [--machines here/gpu*2,here]

Five networks, inference and training, five steps each, of which the last three run as CUDA graphs.
The error is the largest difference of an output or a parameter, relative to the largest value of
its tensor. Dropout is off, since generators of GPUs draw other numbers.
"""

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from harness import error_line, keep_json, parser_of

from dovetail.costs import analytic_costs
from dovetail.executors import Workers, run
from dovetail.frontends import SGD, Adam, example_values, initial_values, resolve, run_step
from dovetail.machine import parse_machine
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import search_plan
from dovetail.pipeline.sources import silent
from dovetail.plans import normalise
from dovetail.runtime.torch_versions import pytree
from dovetail.simulator import Simulator
from tests.support.placing import random_placement

NETWORKS = {
    "RNNLM": ("zoo:rnnlm?layers=2&hidden=32&steps=6&batch=8&vocabulary=100", Adam(lr=1e-3)),
    "NMT": ("zoo:nmt?hidden=32&steps=5&batch=4&vocabulary=60", SGD(lr=0.1, momentum=0.9)),
    "GPT-2": (
        "zoo:gpt2?layers=2&batch=2&context=16&hidden=32&heads=2&vocabulary=100",
        Adam(lr=1e-3),
    ),
    "mixture of experts": (
        "zoo:moe?layers=2&hidden=32&heads=2&key_heads=1&inner=32&experts=2&context=16"
        "&vocabulary=60",
        SGD(lr=0.1),
    ),
    # At a rate of .01 five steps make biases that differ by 100 % of a change of weights by 2e-16.
    "Inception-V3": ("zoo:inception_v3?width=0.0625&size=107&batch=8&dropout=0", SGD(lr=1e-6)),
}
MACHINES = "here/gpu*2,here"
STEPS, PLACEMENTS, LIMIT = 5, 4, 1e-10


def random_plan(captured, machine, seed):
    """A plan of a random placement, colocated ops together, in the order of a simulation."""
    graph = captured.graph
    devices = [d for d, device in enumerate(machine.devices) if device.kind != "host"]
    drawn = np.array(devices, np.int32)[random_placement(graph, seed, len(devices))]
    placement = normalise(drawn, graph, machine)
    costs = analytic_costs(graph, machine)
    timeline = Simulator(graph, machine, costs).timeline(placement)
    request = PlanRequest(captured, machine, placer="single", budget="1e")
    return replace(
        search_plan(request, silent, costs),
        placement=placement,
        orders=tuple(timeline.order_of(d) for d in range(len(machine.devices))),
        value=timeline.step_seconds,
        transforms=captured.transforms,
        peak_memory_bytes=tuple(timeline.peak_memory_bytes.tolist()),
    )


def error_of(found, expected):
    worst = 0.0
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if other.numel():
            scale = max(float(other.abs().max()), 1e-30)
            error = float((one - other).abs().max()) / scale
            # Of a number and NaN, `max` may choose the number.
            worst = error if math.isnan(error) else max(worst, error)
            if math.isnan(worst):
                break
    return worst


@functools.cache
def expected_of(name, train):
    """(captured step, what it returns in each step, its tensors after the last) on the CPU."""
    model, optimizer = NETWORKS[name]
    captured = resolve(model, train=optimizer) if train else resolve(model)
    values = initial_values(captured)
    data = example_values(captured)
    expected = [run_step(captured, values, *data, step=i) for i in range(STEPS)]
    return captured, expected, values


def measure(name, train, seed, workers):
    captured, expected, values = expected_of(name, train)
    inputs, targets = example_values(captured)
    plan = random_plan(captured, workers.machine, seed)
    with run(plan, captured, workers=workers) as placed:
        found = [placed.step(*inputs, *targets) for _ in range(STEPS)]
        state = placed.state_dict() | placed.optimizer_state_dict()
    worst = error_of(found, expected)
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.name in state:
            tensor = captured.graph.outputs_of(op)[0]
            worst = max(worst, error_of(state[source.name], values[tensor]))
    return worst


def main() -> None:
    parser = parser_of(__doc__, out=...)
    parser.add_argument("--machines", default=MACHINES)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    rows = []
    for text in arguments.machines.split(","):
        machine = parse_machine(text)
        workers = Workers(machine)
        for name in NETWORKS:
            for train in (False, True):
                for seed in range(PLACEMENTS):
                    row = {"machine": text, "network": name, "train": train, "seed": seed}
                    try:
                        row["error"] = measure(name, train, seed, workers)
                        row["right"] = row["error"] <= LIMIT
                    # The next case is worth its own try, with processes of its own.
                    except Exception as error:
                        row["right"], row["raised"] = False, error_line(error)
                        workers.close(kill=True)
                        workers = Workers(machine)
                    rows.append(row)
                    print(row, flush=True)
                    keep_json(arguments.out, {"rows": rows})
        workers.close()
    sys.exit(any(not row["right"] for row in rows))


if __name__ == "__main__":
    main()
