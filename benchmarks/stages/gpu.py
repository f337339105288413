"""Schedules of stages on a GPU, against what runs there without one.

    python benchmarks/stages/gpu.py --out gpu.json
    python benchmarks/stages/gpu.py --networks squeezenet --batches 1 --types fp16 --out gpu.json

    chosen       the fastest of our schedules (sequential, greedy, dos, ios, dataflow), by rounds of
                 their own; sequential where none is faster
    sequential   one stream, as a CUDA graph
    greedy       all that is ready at once, as a CUDA graph over streams
    eager        the module as it is, channels last
    reduce-overhead, max-autotune   `torch.compile` with that mode

Stages are timed on the GPU, each distinct one once. All contenders take turns, round by round; a
figure is the median of its samples, between CUDA events. fp32 is torch's own, with TF32 where torch
has it on for convolutions. Merging is not among the strategies. The file is written after each
case, so that what was measured is kept when a later case fails.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from cpu_peers import difference, module_of
from harness import among, count, error_line, in_turns, keep_json, parser_of

from dovetail.errors import UsageError
from dovetail.executors.stages.cuda import CudaNetwork, StageClock, event_seconds
from dovetail.executors.stages.issuing import streams_of_stages
from dovetail.executors.stages.preparing import PlacedKernels, place, prepare, require
from dovetail.frontends.interpret import example_values
from dovetail.frontends.program import Captured
from dovetail.graph.kernels import fuse
from dovetail.pipeline import resolve_model
from dovetail.schedulers.blocks import narrowed, whole
from dovetail.schedulers.dataflow import Streams, dataflow
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import ios
from dovetail.schedulers.records import (
    BlockSchedule,
    KernelBlock,
    OpSet,
    StageTimer,
    StageTiming,
    groups_of,
    members,
)
from dovetail.schedulers.scheduling import greedy
from dovetail.schedulers.timing import OnceTimer, signatures_of

MODELS = {
    "squeezenet": "zoo:squeezenet_1_0",
    "inception": "zoo:inception_v3",
    "randwire": "zoo:randwire?regular=true&channels=154",
    "nasnet": "zoo:nasnet_a_large",
}
TYPES = {"fp32": torch.float32, "fp16": torch.float16}
COMPILED = ("reduce-overhead", "max-autotune")
Scheduler = Callable[[KernelBlock, StageTimer, int], BlockSchedule]


def schedulers_of(arguments: argparse.Namespace) -> dict[str, Scheduler]:
    def by_ios(block: KernelBlock, timer: StageTimer, window: int) -> BlockSchedule:
        return ios(
            block, timer, group_ops=arguments.group_ops, groups=arguments.groups, window=window
        )

    return {
        "greedy": lambda block, timer, _: greedy(block, timer),
        "dos": lambda block, timer, window: dos(block, timer, window=window),
        "ios": by_ios,
    }


def schedules(
    placed: PlacedKernels, signatures: Sequence[str], arguments: argparse.Namespace
) -> tuple[dict[str, Streams], dict[str, Any]]:
    """(scheduler -> streams, what the searches took), with stages timed on the device."""
    block = placed.block
    clock, once = StageClock(placed, streams=arguments.streams), OnceTimer()
    kept = narrowed(block, arguments.states)
    found = {"sequential": Streams((tuple(range(len(block))),), ())}
    effort: dict[str, Any] = {"pruning": kept.pruning}

    def groups(stage: OpSet) -> list[tuple[int, ...]]:
        return [tuple(members(group)) for group in groups_of(block, stage)]

    for name, scheduler in schedulers_of(arguments).items():
        began, stages, predicted = time.perf_counter(), [], 0.0
        for part, window in zip(kept.parts, kept.windows, strict=True):

            def timed(asked: Sequence[OpSet], part: Any = part) -> list[StageTiming]:
                return [
                    StageTiming(clock.time(groups(whole(part, s))).median_seconds) for s in asked
                ]

            timer = once.of(part.block, [signatures[op] for op in part.ops], timed)
            of_part = scheduler(part.block, timer, window)
            stages += [whole(part, stage) for stage in of_part.stages]
            predicted += of_part.seconds
        found[name] = streams_of_stages(block, [groups(s) for s in stages], arguments.streams)
        effort[name] = {
            "stages": len(stages),
            "predicted_seconds": predicted,
            "search_seconds": time.perf_counter() - began,
            "timed": once.timed,
        }
    alone: dict[str, float] = {}
    for kernel, signature in enumerate(signatures):
        if signature not in alone:
            alone[signature] = clock.time([(kernel,)]).median_seconds
    seconds = [alone[signature] for signature in signatures]
    found["dataflow"], _ = dataflow(block, seconds, arguments.streams)
    return found, effort


def baselines(
    captured: Captured, inputs: Sequence[torch.Tensor], dtype: torch.dtype, compiled: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    """The module as it is, and compiled; errors of a compiler are found at the first call."""
    module = module_of(captured).to("cuda", dtype).to(memory_format=torch.channels_last)
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: module(*inputs)}
    torch._dynamo.reset()
    for mode in compiled:
        fast = torch.compile(module, mode=mode, dynamic=False)
        calls[mode] = lambda fast=fast: fast(*inputs)  # type: ignore[misc]
    return calls


def take_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, samples: int
) -> dict[str, list[float]]:
    """Name -> seconds, round by round."""
    timers = {name: partial(event_seconds, call, samples, 1) for name, call in calls.items()}
    return {name: list(chain(*of)) for name, of in in_turns(timers, rounds).items()}


def without_failures(
    calls: dict[str, Callable[[], Any]],
) -> tuple[dict[str, Callable[[], Any]], dict[str, float], dict[str, str]]:
    """(calls that work, seconds of their first five, errors of those that do not)."""
    works: dict[str, Callable[[], Any]] = {}
    first_seconds, errors = {}, {}
    for name, call in calls.items():
        began = time.perf_counter()
        try:
            for _ in range(5):
                call()
            torch.cuda.synchronize()
        except Exception as error:  # a compiler's failure is a figure, not the end of the run
            errors[name] = error_line(error)
            continue
        works[name], first_seconds[name] = call, time.perf_counter() - began
    return works, first_seconds, errors


def measure(
    model: str, batch: int, dtype: torch.dtype, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One case."""
    captured = resolve_model(f"{model}{'&' if '?' in model else '?'}batch={batch}", "")
    kernels = fuse(captured.graph)
    inputs, _ = example_values(captured)
    placed = place(prepare(captured, kernels, channels_last=True), inputs, "cuda", dtype)
    streams, effort = schedules(placed, signatures_of(captured.graph, kernels), arguments)
    networks = {name: CudaNetwork(placed, found) for name, found in streams.items()}
    screened = take_turns(
        {name: network.replay for name, network in networks.items()}, arguments.rounds, 3
    )
    medians = {name: statistics.median(seconds) for name, seconds in screened.items()}
    chosen = min(medians, key=lambda name: (medians[name], name != "sequential"))
    memory_bytes = {name: network.memory_bytes for name, network in networks.items()}
    networks = {name: networks[name] for name in {chosen, "sequential", "greedy"}}
    moved = tuple(placed.inputs.values())
    with torch.no_grad():
        calls, first_seconds, errors = without_failures(
            baselines(captured, moved, dtype, arguments.compile)
        )
        off = difference(networks[chosen](*moved), calls["eager"]())
        ours = {"chosen": chosen, "sequential": "sequential", "greedy": "greedy"}
        seconds = take_turns(
            {who: networks[name].replay for who, name in ours.items()} | calls,
            arguments.rounds,
            arguments.samples,
        )
    return {
        "chosen": chosen,
        "kernels": kernels.count,
        "median_seconds": {who: statistics.median(s) for who, s in seconds.items()},
        "seconds": seconds,
        "screened_median_seconds": medians,
        "memory_bytes": memory_bytes,
        "difference_from_eager": off,
        "first_five_calls_seconds": first_seconds,
        "errors": errors,
        "effort": effort,
    }


def main() -> None:
    arguments = parse(sys.argv[1:])
    device = torch.cuda.get_device_name()
    record: dict[str, Any] = {"device": device, "torch": torch.__version__, "cases": []}
    for name in arguments.networks:
        for batch in arguments.batches:
            for kind in arguments.types:
                began = time.perf_counter()
                case = {"network": name, "model": MODELS[name], "batch": batch, "type": kind}
                case |= measure(MODELS[name], batch, TYPES[kind], arguments)
                record["cases"].append(case)
                keep_json(arguments.out, record)
                medians = ", ".join(
                    f"{who} {1e3 * s:.3f}" for who, s in case["median_seconds"].items()
                )
                took = time.perf_counter() - began
                print(f"{name} {batch} {kind}: {case['chosen']}; ms: {medians} ({took:.0f} s)")
                torch.cuda.empty_cache()


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The arguments; leaves with a message where they are wrong, or there is no GPU."""

    def counts(text: str) -> list[int]:
        return [count(each) for each in text.split(",")]

    parser = parser_of(__doc__, rounds=20, out=...)
    add = parser.add_argument
    add("--networks", type=among(MODELS), default=list(MODELS), help=f"of {', '.join(MODELS)}")
    add("--batches", type=counts, default=[1, 8, 16], help="1,8,16")
    add("--types", type=among(TYPES), default=list(TYPES), help="fp32,fp16")
    add("--compile", type=among(COMPILED), default=list(COMPILED), help='"" for none')
    add("--streams", type=count, default=8, help="at most")
    add("--states", type=count, default=20_000, help="of a part that is searched whole")
    add("--group-ops", type=count, default=3, help="ios: ops of a group (its r)")
    add("--groups", type=count, default=8, help="ios: groups of a stage (its s)")
    add("--samples", type=count, default=5, help="of each contender a round")
    arguments = parser.parse_args(given)
    try:
        require(torch.cuda)
    except UsageError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    main()
