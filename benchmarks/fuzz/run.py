"""Feeds every loader with changed inputs and counts how they end.

    python benchmarks/fuzz/run.py --inputs 10000 [--seconds 600] [--seed 0] [--only plan,onnx]
                                  [--out benchmarks/fuzz/results/NAME]
                                  [--keep tests/data/regressions]

Every input must be loaded or refused by an error of the package, within 10 s and without growing
memory. `--inputs` is per target. `--seconds` is for all targets together, in equal parts. `--out`
writes NAME.json and NAME.csv, whole or not at all. `--keep` writes a smaller input for each
distinct failure. The exit status is 1 if anything failed.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from driver import MOST_INPUT_BYTES, TARGETS_FILE, Fuzzer, Outcome, minimise
from harness import among, keep_csv, keep_json, parser_of
from worker import load_targets

from dovetail.runtime.files import write_atomically
from dovetail.units import MIB

COLUMNS = ("target", "inputs", "loaded", "typed", "untyped", "slow", "growth", "died",
           "kept_bytes", "peak_bytes", "longest_seconds", "seconds")  # fmt: skip


def main() -> None:
    """Parse the arguments, run the targets, and write what came of them."""
    parser = parser_of(__doc__, seed=0, seconds=float("inf"), out=None)
    parser.add_argument("--inputs", type=int, default=1000, help="per target")
    parser.add_argument("--only", default="", help="names of targets, with commas")
    parser.add_argument("--keep", type=Path, help="folder for smaller inputs that fail")
    parser.add_argument("--targets", type=Path, default=TARGETS_FILE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = list(load_targets(arguments.targets))
    try:
        names = among(known)(arguments.only) or known
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    end, outcomes = time.monotonic() + arguments.seconds, []
    for number, name in enumerate(names):
        share = (end - time.monotonic()) / (len(names) - number)
        fuzzer = Fuzzer(name, targets=arguments.targets)
        try:
            outcome = fuzzer.run(arguments.inputs, arguments.seed, share)
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
            for failure in outcome.failures.values():
                times = outcome.occurrences[failure.signature]
                print(f"    {times} x {failure.kind} {failure.error} in {failure.frame}, "
                      f"e.g. input {failure.index}: {failure.detail}", flush=True)  # fmt: skip
            if arguments.keep is not None:
                _keep(fuzzer, outcome, arguments.seed, arguments.keep)
        finally:
            fuzzer.close()
        if arguments.out is not None:
            rows = [outcome.to_json() for outcome in outcomes]
            keep_json(arguments.out.with_suffix(".json"), {"seed": arguments.seed, "targets": rows})
            keep_csv(arguments.out.with_suffix(".csv"), rows, COLUMNS)
    sys.exit(any(outcome.counts.failed for outcome in outcomes))


def _line(outcome: Outcome) -> str:
    c = outcome.counts
    rate = c.inputs / c.seconds if c.seconds else 0.0
    return (
        f"{outcome.target:<13}{c.inputs:>8} inputs {rate:>6.0f}/s  {c.loaded:>7} loaded "
        f"{c.typed:>8} refused  {c.untyped} untyped, {c.slow} slow, {c.growth} grew, {c.died} died;"
        f" kept {c.kept_bytes / MIB:.0f} MiB, peak +{c.peak_bytes / MIB:.0f} MiB, "
        f"slowest {c.longest_seconds:.2f} s"
    )


def _keep(fuzzer: Fuzzer, outcome: Outcome, seed: int, folder: Path) -> None:
    """Write a smaller input for each distinct failure to TARGET-HASH.ENDING."""
    ending = load_targets(fuzzer.targets)[outcome.target].ending
    for failure in outcome.failures.values():
        data = fuzzer.input(failure, seed)
        if fuzzer.fails_alike(data, failure):
            data = minimise(data, lambda smaller, like=failure: fuzzer.fails_alike(smaller, like))
        digest = hashlib.sha256(data).hexdigest()[:8]
        if len(data) > MOST_INPUT_BYTES:
            print(f"    input {failure.index} has {len(data)} bytes and is not kept", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{outcome.target}-{digest}{ending}", data)


if __name__ == "__main__":
    main()
