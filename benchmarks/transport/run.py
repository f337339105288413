"""What a commit, its application and a pull cost, beside the memory traffic that they must make.

    OMP_NUM_THREADS=1 python benchmarks/transport/run.py kernels [--rounds 31]
    OMP_NUM_THREADS=1 python benchmarks/transport/run.py transport [--rounds 7] [--only NAME ...]

Prints Markdown. Everything of one size is measured in turns within one run, and compared with what
was measured in the same turn.
"""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import peers
from harness import host, in_turns, parser_of, quartiles, table

from dovetail.training import kernels
from dovetail.training.checks import check, checksum, copy_and_checksum

MEGABYTE = 10**6
PEERS = {
    "in-place add": peers.add,
    "in-place add + two copies": peers.limit,
    "shared memory": peers.shared_memory,
    "shared memory, ADAG": functools.partial(peers.shared_memory, rule="adag"),
    "shared memory, log on": functools.partial(peers.shared_memory, log=True),
    "gloo send/recv": peers.gloo,
    "Ray actor call": peers.ray_actor,
    "raw TCP": peers.raw_tcp,
    "pickle over TCP": peers.pickle_over_tcp,
}
LIMIT = "in-place add + two copies"
SLOW = ("pickle over TCP",)


def show(title: str, seconds: dict[str, list[list[float]]], base: str) -> None:
    """A table: medians, and the median of a turn's ratios with its quartiles."""
    rows = []
    for name, turns in seconds.items():
        every = [value for turn in turns for value in turn]
        low, middle, high = quartiles(
            [
                statistics.median(turn) / statistics.median(other)
                for turn, other in zip(turns, seconds[base], strict=True)
            ]
        )
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append((name, f"{1e3 * statistics.median(every):.2f}", ratio))
    print(f"\n{title}\n\n{table(('', 'ms', f'times {base} (quartiles)'), rows)}")


def measure_kernels(rounds: int, megabytes: int) -> None:
    size = megabytes * MEGABYTE // 4
    rng = np.random.default_rng(0)
    theta, base, pushed, inbox, scratch = (
        rng.normal(size=size).astype(np.float32) for _ in range(5)
    )
    pushed *= 1e-3
    np.add(theta, np.float32(1e-3), out=base)

    def naive() -> None:
        np.subtract(theta, base, out=scratch)
        np.multiply(scratch, scratch, out=scratch)
        np.divide(scratch, np.float32(1e-4), out=scratch)
        np.add(scratch, np.float32(1), out=scratch)
        np.divide(pushed, scratch, out=scratch)
        np.add(theta, scratch, out=theta)

    calls: dict[str, Callable[[], object]] = {
        "in-place add": lambda: kernels.add(theta, pushed),
        "ADAG": lambda: kernels.add_damped(theta, pushed, base, 1e-4),
        "ADAG, numpy": naive,
        "DC-ASGD": lambda: kernels.add_compensated(theta, pushed, base, 1e-3, 0.04),
        "copy": lambda: np.copyto(inbox, pushed),
        "copy + checksum": lambda: copy_and_checksum(inbox, pushed),
        "check": lambda: check(pushed),
        "its checksum alone": lambda: checksum(pushed),
        "dot product with itself": lambda: np.dot(pushed, pushed),
        "np.isfinite(v).all()": lambda: np.isfinite(pushed).all(),
    }

    def three(call: Callable[[], object]) -> list[float]:
        found = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return found

    timers = {name: functools.partial(three, call) for name, call in calls.items()}
    turns = in_turns(timers, rounds + 1)
    # The first turn compiles and warms up.
    seconds = {name: of[1:] for name, of in turns.items()}
    show(f"{megabytes} MB, float32, {rounds} turns of 3", seconds, "in-place add")


def measure_transport(rounds: int, megabytes: int, only: list[str]) -> None:
    """Turns of one untimed exchange and `timed` timed ones for each way, all servers up."""
    size = megabytes * MEGABYTE // 4
    timed = 3

    def exchanges(exchange: Callable[[], float], each: int) -> list[float]:
        exchange()
        return [exchange() for _ in range(each)]

    with contextlib.ExitStack() as stack:
        ways = {}
        for name, make in PEERS.items():
            if only and name not in only and name != LIMIT:
                continue
            each = 1 if name in SLOW else timed
            exchange = stack.enter_context(make(size, (rounds + 1) * (each + 1)))
            ways[name] = functools.partial(exchanges, exchange, each)
        turns = in_turns(ways, rounds + 1)
    seconds = {name: of[1:] for name, of in turns.items()}
    show(f"{megabytes} MB, float32, {rounds} turns, one worker", seconds, LIMIT)


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("part", choices=("kernels", "transport"))
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=list(PEERS))
    arguments = parser.parse_args()
    print(host(np))
    for megabytes in arguments.megabytes:
        if arguments.part == "kernels":
            measure_kernels(arguments.rounds or 31, megabytes)
        else:
            measure_transport(arguments.rounds or 7, megabytes, arguments.only)


if __name__ == "__main__":
    main()
