"""Steps on `here` beside plain PyTorch, with 0, 1 and 2 other programs computing all the time.

python benchmarks/neighbours/run.py [--rounds 4] [--neighbours 0,1,2] [--only mlp]

Contestants take turns, round after round; a ratio is of two means of the same round. Plain
PyTorch is eager, in a process of its own for each number of threads, with OMP_WAIT_POLICY=passive;
its best number of threads is picked for each number of neighbours.
"""

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases
import torch
from harness import in_turns, line, parser_of, ratios_of, say, table, with_range

import dovetail as dt
from dovetail.pipeline import resolve_model

CASES = {"mlp": "adam", "squeezenet": "", "vit": "adam"}
MACHINES = ("here", "here/1", "here/2")
SLICE_SECONDS = 0.5
SETTLE_SECONDS = 1.0
BUSY = "while True: pass"


def plain_step(case: str):
    """A step of plain PyTorch, as a user would write it."""
    model, inputs, loss, targets = getattr(cases, case)()
    if not CASES[case]:
        model.eval()

        def infer():
            with torch.no_grad():
                model(*inputs)

        return infer
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def train():
        optimizer.zero_grad()
        loss(model(*inputs), *targets).backward()
        optimizer.step()

    return train


def mean_step(step) -> float:
    """Mean seconds of a step, over steps that take `SLICE_SECONDS` in all; the first three do not
    count. The mean, for what a busy machine takes away comes in a few long pieces: the median of
    short steps would not see them."""
    for _ in range(3):
        step()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < SLICE_SECONDS:
        step()
        steps += 1
    return (time.perf_counter() - began) / steps


def peer(case: str, threads: int) -> None:
    """A peer's process: a line in, the mean seconds of its steps out."""
    torch.set_num_threads(threads)
    step = plain_step(case)
    for _ in sys.stdin:
        print(mean_step(step), flush=True)


class Peer:
    """Plain PyTorch with so many threads, in its process."""

    def __init__(self, case: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer", case, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(threads)},
        )

    def __call__(self) -> float:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None:
        self.process.kill()
        self.process.wait()


class Busy:
    """So many programs that compute all the time."""

    def __init__(self, count: int) -> None:
        self.processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]

    def __enter__(self):
        time.sleep(SETTLE_SECONDS)
        return self

    def __exit__(self, *_error) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def placed_steps(case: str, stack: ExitStack):
    """machine -> what measures the mean seconds of a step, hand-over and all."""
    found = {}
    _, inputs, _, targets = getattr(cases, case)()
    step = resolve_model(f"cases:{case}", CASES[case])
    for name in MACHINES:
        placer = "auto" if name == "here/2" else "single"
        plan = dt.plan(step, name, placer=placer, budget="2s")
        say(f"{case} on {name}: {'; '.join(plan.notes) or 'no notes'}")
        placed = stack.enter_context(dt.run(plan, step))
        given = (*inputs, *targets) if CASES[case] else inputs
        found[name] = lambda placed=placed, given=given: mean_step(lambda: placed.step(*given))
    return found


def main() -> None:
    parser = parser_of(__doc__, rounds=4, only="")
    parser.add_argument("--neighbours", default="0,1,2")
    parser.add_argument("--peer", default="")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.peer:
        peer(arguments.peer, arguments.threads)
        return
    cores = sorted(os.sched_getaffinity(0))
    counts = [int(text) for text in arguments.neighbours.split(",")]
    ratios = [f"{name} / plain" for name in MACHINES]
    print(table(("network", "neighbours", "plain ms (threads)", "here ms", *ratios), []))
    for case in CASES:
        if arguments.only not in case:
            continue
        with ExitStack() as stack:
            ours = placed_steps(case, stack)
            threads = sorted({1, len(cores)})
            peers = {count: stack.enter_context(Peer(case, count)) for count in threads}
            contestants = {**ours, **peers}
            for count in counts:
                with Busy(count):
                    seconds = in_turns(contestants, arguments.rounds)
                print(row(case, count, seconds, threads), flush=True)


def row(case, count, seconds, threads) -> str:
    best = min(threads, key=lambda n: statistics.median(seconds[n]))
    plain = seconds[best]
    return line(
        case,
        count,
        f"{1e3 * statistics.median(plain):.2f} ({best})",
        f"{1e3 * statistics.median(seconds['here']):.2f}",
        *(with_range(ratios_of(seconds[name], plain), to="-") for name in MACHINES),
    )


if __name__ == "__main__":
    main()
