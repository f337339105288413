"""Drawn loops through `dt.training_step`, each beside the same loop in plain PyTorch, in float64.

    python benchmarks/own_loop/random_loops.py --loops 500

Prints each loop that differs by more than 1e-10 in a loss, a weight, a buffer or any other state,
and at the end how many were tried and the largest difference. Plans are of all ops in order on all
cores, and nothing is measured or compiled: what is tried is what runs, not how fast.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.own_loop.loops import drawn_loop, largest_difference, outcome
from dovetail.machine import parse_machine
from dovetail.pipeline import training_steps
from dovetail.pipeline.sources import in_order, with_threads

TOLERANCE = 1e-10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    # On equally many threads a step computes what plain training does, bit for bit.
    machine = with_threads(parse_machine("here/cpu"), torch.get_num_threads())
    largest, failures = 0.0, 0
    with mock.patch.object(
        training_steps, "find_plan", lambda request, _: in_order(request.step.graph, machine)
    ):
        for seed in range(given.first, given.first + given.loops):
            loop = drawn_loop(seed)
            found = largest_difference(
                outcome(loop, planned=False), outcome(loop, planned=True, machine=machine)
            )
            largest = max(largest, found)
            if not found <= TOLERANCE:
                failures += 1
                print(f"{loop}: differs by {found:.1e}", flush=True)
    print(f"{given.loops} loops, {failures} differ by more than {TOLERANCE}; at most {largest:.1e}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
