"""The largest model that fits with the CPU's help, beside accelerate's device_map="auto".

    python benchmarks/gpu/largest.py --out largest.json [--gpu-memory 2GiB] [--times .5,1,2,4]

Inference of GPT-2 with more and more layers, until its weights are 4 times what the GPU may hold.
Three ways to run it take turns, round by round:

    planned      our plan for the cores and the GPU; the GPU of the machine that is planned for has
                 the capped memory, for weights and all else
    eager        the plain module on all cores
    accelerate   the plain module by `infer_auto_device_map`, whose `max_memory` of the GPU is the
                 cap, and `dispatch_model`: what does not fit is copied to the GPU at every step

The cap limits what the process of a plan's GPU allocates. A plan that takes more than it promises
is made again with a lower cap (`caps_bytes`). accelerate's cap counts weights alone and nothing
enforces it, so the most that torch had allocated is reported (`peak_bytes`). `taken_bytes` is what
the whole GPU has less than before, with CUDA's own context where a process has begun one.

accelerate keeps layers whole, as transformers asks it to. A plan's ops run one by one: segments are
compiled for the text `here` alone. What does not fit is computed by the cores in a plan and copied
by accelerate, so the number of tokens of a step (`--context`) decides which is faster. The file is
written after each size. The exit status is 1 if a size has no plan whose outputs are those of the
eager module.
"""

import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import error_line, keep_json, parser_of
from torch import Tensor, nn

from dovetail.errors import OutOfMemoryError
from dovetail.executors import PlacedNetwork, PlainNetwork, run
from dovetail.frontends import Captured
from dovetail.frontends.interpret import example_values
from dovetail.machine import Machine
from dovetail.machine.local import available_bytes
from dovetail.pipeline import plan as make_plan
from dovetail.pipeline import planned, resolve_machine, resolve_model
from dovetail.plans import Plan
from dovetail.units import parse_bytes

TIMES = ".5,1,2,4"
SIZES = {"hidden": 2048, "heads": 16, "vocabulary": 8192, "context": 128, "batch": 1}
"""Of every network. A layer has 201 MB, so that there are 5 to 42 of them for a cap of 2 GiB."""
WHOLE = "GPT2Layer"
"""The class of the modules that accelerate keeps whole."""
BUDGET = "5s"
LIMIT = 1e-3
"""An output of a plan may differ from the eager module's by this share of the largest output."""
TRIES, LOWER = 5, 0.9
"""A plan that lacks memory on the GPU is made again with a cap of at most `LOWER` of the last one,
until so many plans were tried."""
BEGINNING_STEPS = 4
"""In the third step a plan's launches are captured as CUDA graphs, which have memory of their
own."""
GPU = torch.device("cuda:0")
"""Where accelerate computes."""


@dataclass(frozen=True, eq=False)
class Case:
    """One size of the network, with real weights, and where it runs.

    machine     the cores and one GPU, which has the capped memory
    gpu_bytes   the cap
    """

    step: Captured
    machine: Machine
    inputs: tuple[Tensor, ...]
    gpu_bytes: int
    budget: str = BUDGET

    @property
    def module(self) -> nn.Module:
        return self.step.module


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run a case, ready to run.

    seconds   runs one step and returns its seconds
    output    runs one step and returns the logits, on the CPU
    facts     what is known of it before it has run
    peak      returns what is known of its memory after it has run
    """

    seconds: Callable[[], float]
    output: Callable[[], Tensor]
    facts: dict[str, Any]
    peak: Callable[[], dict[str, Any]] = dict


def network(weights_bytes: float, sizes: Mapping[str, int]) -> str:
    """The MODEL text of a GPT-2 whose weights have about so many bytes in float32. It has one layer
    or more."""
    hidden = sizes["hidden"]
    layer = 12 * hidden**2 + 13 * hidden
    rest = (sizes["vocabulary"] + sizes["context"] + 2) * hidden
    layers = max(1, round((weights_bytes / 4 - rest) / layer))
    options = "&".join(f"{name}={value}" for name, value in sizes.items())
    return f"zoo:gpt2?layers={layers}&{options}"


def capped(machine: Machine, gpu_bytes: int) -> Machine:
    """The machine's cores and its first GPU, which has so much memory."""
    gpu = next(device for device in machine.devices if device.torch_device)
    cores = [device for device in machine.devices if device.cores]
    kept = (*cores, replace(gpu, memory_bytes=min(gpu_bytes, gpu.memory_bytes)))
    names = {device.name for device in kept}
    links = tuple(link for link in machine.links if {link.source, link.destination} <= names)
    return Machine(machine.name, kept, machine.host, links)


def case_of(model: str, machine: Machine, gpu_bytes: int, budget: str = BUDGET) -> Case:
    step = resolve_model(model)
    assert isinstance(step, Captured) and step.make is not None, "a network of the zoo"
    torch.manual_seed(0)
    # All ways copy these weights, which take longest to draw.
    module = step.make()
    step = replace(step, module_of=lambda: module, make=None)
    inputs, _ = example_values(step)
    return Case(step, capped(machine, gpu_bytes), inputs, gpu_bytes, budget)


@contextmanager
def planned_way(case: Case) -> Iterator[Way]:
    """A plan whose memory on the GPU is capped lower and lower until it runs: tensors that arrive
    there keep their places for the whole step, and kernels need memory that no plan knows of."""
    gpu = next(device.name for device in case.machine.devices if device.torch_device)
    caps = [case.gpu_bytes]
    while True:
        plan = make_plan(case.step, case.machine, budget=case.budget, caps=[(gpu, caps[-1])])
        try:
            placed = _begun(plan, case)
        except OutOfMemoryError as error:
            if len(caps) == TRIES or error.device != gpu:
                raise
            share = error.available_bytes / max(1, error.needed_bytes)
            caps.append(int(caps[-1] * (share if 0.5 < share < LOWER else LOWER)))
        else:
            break
    names = plan.machine.device_names
    facts = {
        "caps_bytes": caps,
        "predicted_seconds": plan.value,
        "placer": plan.placer,
        "ops": {name: len(order) for name, order in zip(names, plan.orders, strict=True)},
        "promised_peak_bytes": dict(zip(names, plan.peak_memory_bytes, strict=True)),
    }
    with placed:
        yield Way(
            lambda: float(placed.step_seconds(2)[0]), lambda: placed.step(*case.inputs), facts
        )


def _begun(plan: Plan, case: Case) -> PlacedNetwork:
    """The plan at work, after the steps in which it takes the memory that it needs."""
    placed = run(plan, planned(plan, case.step))
    try:
        placed.feed(case.inputs)
        placed.step_seconds(BEGINNING_STEPS)
    except BaseException:
        placed.close()
        raise
    return placed


@contextmanager
def eager_way(case: Case) -> Iterator[Way]:
    cores = [device for device in case.machine.devices if device.cores]
    all_cores = tuple(core for device in cores for core in device.cores)
    cpu = replace(cores[0], cores=all_cores, threads=0)
    with PlainNetwork(case.step, Machine("eager", (cpu,), cpu.name)) as plain:
        plain.feed(case.inputs)
        yield Way(lambda: float(plain.step_seconds(2)[0]), lambda: plain.step(*case.inputs), {})


def auto_map(module: nn.Module, gpu_bytes: int) -> dict[str, torch.device | str]:
    """accelerate's map of the module for a GPU of so much memory and this machine's."""
    from accelerate import infer_auto_device_map

    found = infer_auto_device_map(
        module,
        max_memory={0: gpu_bytes, "cpu": available_bytes()},
        no_split_module_classes=[WHOLE],
    )
    return {name: GPU if place == 0 else place for name, place in found.items()}


@contextmanager
def accelerate_way(case: Case) -> Iterator[Way]:
    from accelerate import dispatch_model

    device_map = auto_map(case.module, case.gpu_bytes)
    torch.cuda.reset_peak_memory_stats(GPU)
    module = dispatch_model(copy.deepcopy(case.module), device_map, main_device=GPU)

    def output() -> Tensor:
        with torch.no_grad():
            logits: Tensor = module(*(tensor.to(GPU) for tensor in case.inputs))
        return logits

    def seconds() -> float:
        torch.cuda.synchronize(GPU)
        began = time.perf_counter()
        output()
        torch.cuda.synchronize(GPU)
        return time.perf_counter() - began

    places = [str(place) for place in device_map.values()]
    yield Way(
        seconds,
        lambda: output().cpu(),
        {"modules": {place: places.count(place) for place in dict.fromkeys(places)}},
        lambda: {"peak_bytes": torch.cuda.max_memory_allocated(GPU)},
    )


WAYS = {"eager": eager_way, "planned": planned_way, "accelerate": accelerate_way}
"""The first gives the outputs that those of the others are compared with."""


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Way -> what was measured of it: `fits`, seconds of a step, and the difference of its outputs
    from those of the eager module on the CPU; of a way that fails, the error."""
    found: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        expected: Tensor | None = None
        for name, open_way in WAYS.items():
            free = _free_bytes(case)
            opened = ExitStack()
            try:
                way = opened.enter_context(open_way(case))
                output = way.output()
                way.seconds()
            except Exception as error:  # the next way is worth its own try
                found[name] = {"fits": False, "raised": error_line(error)}
                opened.close()
                continue
            stack.push(opened)
            ways[name], seconds[name] = way, []
            expected = output if name == next(iter(WAYS)) else expected
            found[name] = {"fits": True, **way.facts}
            if free is not None:
                found[name]["taken_bytes"] = free - (_free_bytes(case) or 0)
            if expected is not None:
                found[name]["max_difference"] = float((output - expected).abs().max())
                found[name]["max_output"] = float(expected.abs().max())
        for _ in range(rounds):
            for name, way in list(ways.items()):
                try:
                    way.seconds()  # the one before has left other things in the caches
                    seconds[name].append(way.seconds())
                except Exception as error:
                    found[name] |= {"fits": False, "raised": error_line(error)}
                    del ways[name]
        for name, way in ways.items():
            found[name] |= {"seconds": statistics.median(seconds[name]), **way.peak()}
    return found


def _free_bytes(case: Case) -> int | None:
    """What is free on the GPU; None where torch sees none, as where another CUDA was handed in."""
    name = next(d.torch_device for d in case.machine.devices if d.torch_device)
    return torch.cuda.mem_get_info(torch.device(name))[0] if torch.cuda.is_available() else None


def rows_of(
    machine: Machine,
    gpu_bytes: int,
    times: list[float],
    rounds: int,
    sizes: Mapping[str, int] = SIZES,
    budget: str = BUDGET,
) -> Iterator[dict[str, Any]]:
    """A row for each size of the weights, as so many times what the GPU may hold."""
    for share in times:
        model = network(share * gpu_bytes, sizes)
        row: dict[str, Any] = {"network": model, "times": share, "gpu_bytes": gpu_bytes}
        try:
            case = case_of(model, machine, gpu_bytes, budget)
            row["weights_bytes"] = sum(p.nbytes for p in case.module.parameters())
            row["ways"] = measure(case, rounds)
        except Exception as error:  # the next size is worth its own try
            row["raised"] = error_line(error)
        yield row
        # The next size needs the memory.
        case = None
        gc.collect()
        torch.cuda.empty_cache()


def is_right(row: Mapping[str, Any]) -> bool:
    """True if the plan of this size fits and gives the outputs of the eager module, to round-off in
    float32."""
    found = row.get("ways", {}).get("planned", {"fits": False})
    return bool(found["fits"]) and found["max_difference"] <= LIMIT * found["max_output"]


def main() -> None:
    parser = parser_of(__doc__, out=..., rounds=5)
    parser.add_argument("--gpu-memory", type=parse_bytes, default="2GiB")
    parser.add_argument("--times", default=TIMES, help="sizes of the weights in caps")
    parser.add_argument("--context", type=int, default=SIZES["context"], help="tokens of a step")
    arguments = parser.parse_args()
    times = [float(text) for text in arguments.times.split(",")]
    rows: list[dict[str, Any]] = []
    machine = resolve_machine("here")
    if not any(device.torch_device for device in machine.devices):
        raise SystemExit("torch sees no GPU here")
    sizes = SIZES | {"context": arguments.context}
    for row in rows_of(machine, arguments.gpu_memory, times, arguments.rounds, sizes):
        rows.append(row)
        print(row, flush=True)
        keep_json(arguments.out, {"rows": rows})
    sys.exit(not all(map(is_right, rows)))


if __name__ == "__main__":
    main()
