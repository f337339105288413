"""Do sums over stages say which of two schedules is faster?

    python benchmarks/stages/additivity.py --out additivity.json

Every network has a process of its own. It draws schedules at random, from one op after another to
all that is ready at once; predicts each by its stages, each distinct one measured once; and then
runs all of them in turn, round after round. A schedule's seconds are the median of its rounds.

Noise is what the same schedule differs by: of each, the medians of its odd and of its even rounds
differ by some share of the smaller, and 95 % of the schedules by no more than the noise. Pairs of
schedules that are closer than that are not compared.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).parents[1]))

from children import Record, parser_of_networks, records, said
from harness import count, show, table

from dovetail.frontends import Captured
from dovetail.pipeline import resolve_model
from dovetail.pipeline.scheduling import check_equal, search, target_of
from dovetail.runtime.timers import Repeats, in_turns
from dovetail.schedulers.results import SEQUENTIAL
from reproductions.additivity import pairs_ordered_right
from reproductions.elsewhere import as_candidate, distinct_stages

README = Path(__file__).parent / "README.md"


def one(model: str, arguments: argparse.Namespace) -> Record:
    """Predicted and measured seconds of a network's random schedules."""
    step = resolve_model(model, "")
    assert isinstance(step, Captured)
    network = target_of(step, seed=arguments.seed, progress=said)
    rng = random.Random(arguments.seed)
    drawn = distinct_stages(
        network.block, arguments.schedules, rng, arguments.groups, arguments.group_ops
    )
    said(f"{len(drawn)} schedules", 0)
    candidates = {f"draw {i}": as_candidate(network, stages) for i, stages in enumerate(drawn)}
    steps = {name: network.step(found) for name, found in candidates.items()}
    check_equal(network, {SEQUENTIAL: network.step(search(network, SEQUENTIAL)), **steps})
    torch.set_num_threads(network.problem.streams)
    said("measuring", 0)
    runs = {name: network.timed(own) for name, own in steps.items()}
    return {
        "kernels": network.kernels.count,
        "stages": [len(found.stages) for found in candidates.values()],
        "predicted": [found.predicted_seconds for found in candidates.values()],
        "seconds": list(in_turns(runs, Repeats(arguments.rounds)).values()),
    }


def figures(record: Record) -> dict[str, float]:
    """What the predictions are worth."""
    seconds = [[1e3 * value for value in of_one] for of_one in record["seconds"]]
    measured = [statistics.median(of_one) for of_one in seconds]
    predictions = [1e3 * value for value in record["predicted"]]
    sampled = list(zip(predictions, measured, strict=True))
    noise = noise_of(seconds)
    right, compared = pairs_ordered_right(sampled, noise)
    all_right, pairs = pairs_ordered_right(sampled)
    return {
        "schedules": len(measured),
        "fastest": min(measured),
        "slowest": max(measured),
        "noise": noise,
        "compared": compared / pairs if pairs else 0.0,
        "right": right / compared if compared else 0.0,
        "right_of_all": all_right / pairs if pairs else 0.0,
        "tau": float(kendalltau(predictions, measured).statistic),
        "error": statistics.mean(abs(p / m - 1) for p, m in sampled),
        "bias": statistics.median(p / m for p, m in sampled),
    }


def noise_of(seconds: Sequence[Sequence[float]]) -> float:
    """[schedules][rounds] -> the share by which two measurements of one schedule may differ."""
    shares = []
    for of_one in seconds:
        halves = statistics.median(of_one[::2]), statistics.median(of_one[1::2])
        shares.append(max(halves) / min(halves) - 1)
    return float(np.quantile(shares, 0.95))


def tables(found: Mapping[str, Record]) -> str:
    """One row a network."""
    head = ("network", "schedules", "stages", "ms", "noise", "pairs compared", "ordered right",
            "of all pairs", "Kendall's tau", "mean error", "predicted / measured")  # fmt: skip
    lines = []
    for network, record in found.items():
        own, stages = figures(record), record["stages"]
        shares = [f"{100 * own[name]:.1f} %" for name in ("noise", "compared", "right")]
        lines.append((
            network, str(own["schedules"]), f"{min(stages)} to {max(stages)}",
            f"{own['fastest']:.3g} to {own['slowest']:.3g}", *shares,
            f"{100 * own['right_of_all']:.1f} %", f"{own['tau']:.2f}",
            f"{100 * own['error']:.1f} %", f"{own['bias']:.2f}",
        ))  # fmt: skip
    return table(head, lines)


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of_networks(__doc__, rounds=10)
    add = parser.add_argument
    add("--schedules", type=count, default=100)
    add("--groups", type=count, default=8, help="of a stage, at most")
    add("--group-ops", type=count, default=3, help="of a group, at most")
    arguments = parser.parse_args(given)
    if arguments.rounds < 2:
        parser.error("--rounds: noise needs two or more")
    return arguments


def main(given: Sequence[str]) -> None:
    arguments = parse(given)
    names = ("rounds", "seed", "schedules", "groups", "group_ops")
    settings = {name: getattr(arguments, name) for name in names}
    options = [
        text for name in names for text in (f"--{name.replace('_', '-')}", str(settings[name]))
    ]
    found = records(__file__, arguments, settings, options, one)
    show(tables(found), README if arguments.write else None, "table of additivity.py")
    if len(found) < len(arguments.networks):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
