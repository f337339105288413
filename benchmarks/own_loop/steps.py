"""Steps in a user's own loop, beside what the loop would run without us, in turns in one process.

    python benchmarks/own_loop/steps.py --write
    python benchmarks/own_loop/steps.py --only "GPT 4 x 128;U-Net" --budget 60s

Inference is `dt.optimize(model)`, called under `torch.no_grad`. Training is `dt.training_step` with
Adam, a cosine schedule that is stepped each time and gradients clipped to a norm of 1. Beside them
run the same model and loop, eager and by `torch.compile`, each on all threads and on one. Each case
is a process of its own. With --again another process has made the first call before, and ours
searches on from what that one has found; given twice, a third process does. A ratio is the median
over the rounds of the seconds of the user's best way, as its median says, over those of ours.
Memory is the most that a process of its own held while it trained, over that of one that trained
eagerly, both less what they held before the first step.
"""

import copy
import gc
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiled"))
from harness import fill, host, in_child, keep_json, parser_of, say, status_bytes, table

HERE = Path(__file__).resolve().parent
CASES = (
    "GPT 4 x 128", "five conv-norm-relu", "Inception-V3", "ResNet-50 (transformers)", "ViT",
    "LSTM 2 x 128, unrolled", "LSTM 2 x 256, nn.LSTM", "mixture of experts", "U-Net", "RandWire",
    "BERT (transformers)", "GRU tagger",
)  # fmt: skip
SMALL = {"RandWire", "mixture of experts"}
"""Of small ops, for which more is asked."""
KINDS = ("inference", "training")
ROUND_SECONDS, LEAST_CALLS, MOST_CALLS = 0.05, 3, 40
HEAD = (
    "network", "step", "runs", "ours", "eager", "`torch.compile`", "best of theirs / ours",
    "spread", "first call", "memory / eager",
)  # fmt: skip
EAGER, COMPILED, OURS = "eager", "torch.compile", "ours"


class Loop:
    """A model at work in a user's loop. Calling it runs a step."""

    def __init__(
        self, name: str, kind: str, way: str, budget: str = "", *, again: bool = False
    ) -> None:
        import torch
        from cases import step_of

        import dovetail as dt
        from dovetail.frontends.interpret import example_values

        step = step_of(name, kind == "training")
        assert step.plain is not None
        inputs, targets = example_values(step, 0)
        self._args, self._kwargs = step.signature.call(inputs)
        self._targets = step.signature.loss_arguments(targets)
        self._loss = step.plain.loss
        model = step.make() if step.make is not None else copy.deepcopy(step.module)
        model.train(kind == "training")
        self._no_grad = torch.no_grad
        self._trained: Callable[[], object] | None = None
        if kind == "inference":
            self.model = model
            if way == OURS:
                dt.optimize(model, budget=budget, again=again)
            if way == COMPILED:
                self.model = torch.compile(model)
            return
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        if way == OURS:
            own = dt.training_step(
                model, self._loss, optimizer, clip=1.0, budget=budget, again=again
            )

            def train() -> object:
                if self._loss is None:
                    value = own(*self._args, **self._kwargs)
                else:
                    value = own(self._args, *self._targets, **self._kwargs)
                schedule.step()
                return value

            self.step: Any = own
        else:
            used = torch.compile(model) if way == COMPILED else model

            def train() -> object:
                optimizer.zero_grad()
                output = used(*self._args, **self._kwargs)
                loss = output.loss if self._loss is None else self._loss(output, *self._targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                return loss.detach()

        self._trained = train

    def __call__(self) -> object:
        if self._trained is not None:
            return self._trained()
        with self._no_grad():
            return self.model(*self._args, **self._kwargs)

    def describe(self) -> str:
        """Which way our step runs."""
        if self._trained is not None:
            plan = self.step.plan
            return "plain" if plan is None else plan.way
        from dovetail.runtime.torch_versions import replaced_call

        (decision,) = replaced_call(self.model)._decisions.values()
        return decision.way


def measured(name: str, kind: str, options: Namespace) -> dict[str, Any]:
    """Way -> [rounds] seconds of a step, what runs, and the seconds of our first call."""
    import torch

    ours = Loop(name, kind, OURS, options.budget, again=bool(options.again))
    began = time.perf_counter()
    ours()
    first_seconds = time.perf_counter() - began
    if kind == "training":
        # What the first call set in the model may have a plan made again, by this one.
        ours()
    # torch's own compiling follows, with all that the machine has.
    usual = torch.get_num_threads()
    ways: dict[str, tuple[Loop, int]] = {OURS: (ours, usual)}
    for threads in dict.fromkeys((usual, 1)):
        torch.set_num_threads(threads)
        for way in (EAGER, COMPILED):
            ways[f"{way}, {threads}"] = loop, _ = Loop(name, kind, way), threads
            for _ in range(3):
                loop()
    counts, seconds = {}, {way: list[float]() for way in ways}
    for way, (loop, threads) in ways.items():
        torch.set_num_threads(threads)
        counts[way] = round(ROUND_SECONDS / min(timed(loop) for _ in range(3)))
        counts[way] = min(MOST_CALLS, max(LEAST_CALLS, counts[way]))
    names = list(ways)
    for turn in range(options.rounds):
        at = turn % len(names)
        for way in names[at:] + names[:at]:
            loop, threads = ways[way]
            torch.set_num_threads(threads)
            calls = [timed(loop) for _ in range(counts[way])]
            # The first ones find in the caches what other ways have left.
            seconds[way].append(statistics.median(calls[len(calls) // 3 :]))
    torch.set_num_threads(usual)
    return {"runs": ours.describe(), "first_seconds": first_seconds, "seconds": seconds}


def timed(loop: Callable[[], object]) -> float:
    began = time.perf_counter()
    loop()
    return time.perf_counter() - began


def memory(name: str, way: str, budget: str) -> dict[str, int]:
    """The most bytes that the process held in 20 steps, over what it held before the first one. The
    plan was found before, by another process; what its capture leaves counts as ours."""
    loop = Loop(name, "training", way, budget)
    gc.collect()
    before = status_bytes("VmRSS")
    for _ in range(3):
        loop()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(20):
        loop()
    return {"bytes": status_bytes("VmHWM") - before}


def best_of(seconds: dict[str, Sequence[float]]) -> str:
    """The user's own way of the least median."""
    return min((way for way in seconds if way != OURS), key=lambda w: statistics.median(seconds[w]))


def row_of(name: str, kind: str, found: dict[str, Any]) -> list[str]:
    seconds = found["seconds"]
    medians = {way: 1e3 * statistics.median(of) for way, of in seconds.items()}

    def least(way: str) -> str:
        return f"{min(ms for each, ms in medians.items() if each.startswith(way)):.2f} ms"

    low, ratio, high = found["quartiles"]
    share = found.get("memory")
    return [
        name, kind, found["runs"], f"{medians[OURS]:.2f} ms", least(EAGER), least(COMPILED),
        f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{found['first_seconds']:.0f} s",
        "" if share is None else f"{share:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, rounds=24, budget="60s", only="", out=None, write=False)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--again", action="count", default=0, help="search on from an earlier call")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--child", nargs="+", help="a case, in this process")
    options = parser.parse_args()
    if options.child:
        what, name, kind = options.child
        if what == "steps":
            print(json.dumps(measured(name, kind, options)))
        elif what == "first":
            Loop(name, kind, OURS, options.budget, again=bool(options.again))()
            print("{}")
        else:
            print(json.dumps(memory(name, kind, options.budget)))
        return
    kept, rows = {}, []
    script, shared = str(Path(__file__).resolve()), ("--budget", options.budget)
    for name in options.only.split(";") if options.only else CASES:
        for kind in options.kinds.split(","):
            rounds = ("--rounds", str(options.rounds))
            for call in range(options.again):
                again = ("--again",) if call else ()
                in_child(script, *shared, *again, "--child", "first", name, kind)
                rounds += ("--again",)
            found = in_child(script, *shared, *rounds, "--child", "steps", name, kind)
            seconds = found["seconds"]
            best = seconds[best_of(seconds)]
            ratios = [other / own for other, own in zip(best, seconds[OURS], strict=True)]
            found["quartiles"] = statistics.quantiles(ratios, n=4)
            if kind == "training" and not options.no_memory:
                own, eager = (
                    in_child(script, *shared, "--child", "memory", name, way)["bytes"]
                    for way in (OURS, EAGER)
                )
                found["memory"] = own / eager
            kept[f"{name}, {kind}"] = found
            keep_json(options.out, kept)
            rows.append(row_of(name, kind, found))
            say(" | ".join(rows[-1]))
    ratios = [found["quartiles"][1] for found in kept.values()]
    small = [found["quartiles"][1] for key, found in kept.items() if key.split(",")[0] in SMALL]
    ends = [
        f"The geometric mean of the {len(ratios)} ratios is {statistics.geometric_mean(ratios):.2f}"
        f", the least {min(ratios):.2f}, and {sum(r < 0.97 for r in ratios)} are below .97."
    ]
    if small:
        ends.append(f"Where ops are small it is {statistics.geometric_mean(small):.2f}.")
    text = f"{table(HEAD, rows)}\n\n{' '.join(ends)} {host()}."
    print(text)
    if options.write:
        fill(HERE / "README.md", "steps", text)


if __name__ == "__main__":
    main()
