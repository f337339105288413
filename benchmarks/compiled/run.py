"""Plans on two devices, and what their users run without them, in the same rounds.

    python benchmarks/compiled/run.py [--only lstm] [--rounds 15] [--budget 20s]
                                      [--compile-budget 600s] [--csv FILE] [--readme FILE]

Each case is planned for here/2 as `dovetail plan` does it. What is measured, in turns: the plan op
by op and with compiled segments, the same on all cores as one device, eager and `torch.compile` on
each number of threads, and for LSTMs `nn.LSTM`, eager and compiled. A ratio is the fastest of the
user's ways over the faster plan, round by round; its spread is the interquartile range over the
median. The last column is what calling segments costs: the compiled plan on all cores as one device
over `torch.compile` of the whole on all cores.
"""

import argparse
import csv
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dovetail as dt
from dovetail.executors import MODES, PlainNetwork, Workers
from dovetail.executors import run as execute
from dovetail.executors.stages.choosing import measure
from dovetail.frontends import Captured, parse_optimizer
from dovetail.machine import parse_machine
from dovetail.pipeline import planned, resolve_model
from dovetail.pipeline.planning import in_best_form, search_plan, with_compiled
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.sources import silent, with_threads

sys.path.insert(0, str(Path(__file__).parents[1]))
from markdown import fill, table

STEPS, BATCH = 40, 16
HEAD = (
    "case", "step", "goal", "ratio", "spread", "plan", "fastest other", "seconds to plan",
    "one device / torch.compile",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A network, one step of it, and the ratio that is aimed at.

    model    the MODEL text; or the width of a two-layer LSTM, written out step by step or `nn.LSTM`
    train    the optimizer's text; "": inference
    """

    name: str
    model: str | int
    train: str
    goal: float
    fused: bool = False


def cases() -> list[Case]:
    found = []
    for width in (128, 256):
        for fused in (False, True):
            for train in ("", "adam"):
                kind = "nn.LSTM" if fused else "unrolled"
                found.append(Case(f"LSTM 2 x {width}, {kind}", width, train, 1.3, fused))
    small = {
        "RandWire": "zoo:randwire?batch=1&size=128&channels=32",
        "NMT": "zoo:nmt?hidden=128&steps=20&batch=16&vocabulary=1000",
        "mixture of experts": (
            "zoo:moe?layers=2&hidden=128&heads=4&key_heads=2&inner=256&experts=4&context=64"
            "&vocabulary=1000"
        ),
    }  # fmt: skip
    found += [Case(name, model, "", 1.2) for name, model in small.items()]
    large = {
        "Inception-V3": "zoo:inception_v3?batch=2&size=149",
        "ViT": "zoo:vit?batch=2&layers=4&hidden=384&heads=6&inner=1536",
        "GPT-2": "zoo:gpt2?layers=4&batch=1&context=128&vocabulary=5000",
        "Llama": (
            "zoo:llama?layers=4&hidden=512&heads=8&key_heads=4&inner=1024&context=64"
            "&vocabulary=5000"
        ),
    }  # fmt: skip
    for name, model in large.items():
        found += [Case(name, model, train, 0.97) for train in ("", "adam")]
    found += [Case("ResNet-50", "resnet50", train, 0.97) for train in ("", "adam")]
    return found


class Cells(nn.Module):
    """Two layers of LSTM cells, step by step, as tutorials write them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        zeros = torch.zeros(inputs.shape[1], inputs.shape[2])
        states = [(zeros, zeros) for _ in self.layers]
        outputs = []
        for x in inputs.unbind(0):
            for number, layer in enumerate(self.layers):
                states[number] = layer(x, states[number])
                x = states[number][0]
            outputs.append(x)
        return torch.stack(outputs)


class Fused(nn.Module):
    """The same by `nn.LSTM`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lstm(inputs)[0]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def step_of(case: Case, fused: bool) -> Captured:
    train = parse_optimizer(case.train) if case.train else None
    if case.model == "resnet50":
        from transformers import ResNetConfig, ResNetForImageClassification

        module = ResNetForImageClassification(ResNetConfig(num_labels=1000))
        module = module.train(train is not None)
        images = torch.randn(2, 3, 224, 224)
        if train is None:
            return dt.capture(module, images)
        return dt.capture(module, images, labels=torch.randint(1000, (2,)), train=train)
    if isinstance(case.model, str):
        step = resolve_model(case.model, case.train)
        assert isinstance(step, Captured)
        return step
    torch.manual_seed(0)
    module = (Fused if fused else Cells)(case.model).train(train is not None)
    inputs = torch.randn(STEPS, BATCH, case.model)
    if train is None:
        return dt.capture(module, inputs)
    target = torch.zeros_like(inputs)
    return dt.capture(module, inputs, targets=target, loss=squared, train=train)


def measured(
    case: Case, rounds: int, budget: str, compile_budget: str
) -> tuple[dict[str, tuple[float, ...]], float]:
    """(way -> [rounds] seconds of a step, seconds that planning and compiling took)."""
    step = step_of(case, case.fused)
    seconds = float(compile_budget.removesuffix("s"))
    began = time.perf_counter()
    plans: dict[str, dt.Plan] = {}
    for machine in ("here/2", "here"):
        request = PlanRequest(step, machine, budget=budget)
        request, plan = in_best_form(request, search_plan(request, silent), silent)
        op_by_op, segmented = with_compiled(plan, request, seconds, silent)
        plans[f"plan on {machine}"] = op_by_op
        if segmented is not op_by_op:
            plans[f"plan on {machine}, compiled"] = segmented
    spent = time.perf_counter() - began
    own = {"": step}
    if isinstance(case.model, int) and not case.fused:
        own["nn.LSTM "] = step_of(case, True)
    here = parse_machine("here")
    cores = len(here.devices[0].cores)
    with ExitStack() as stack:
        timers = {}
        for label, own_step in own.items():
            for way in ("eager", "torch.compile"):
                for count in dict.fromkeys((cores, 1)):
                    name = f"{label}{way}, {count} threads"
                    network = PlainNetwork(own_step, with_threads(here, count), mode=MODES[way])
                    stack.enter_context(network).begin()
                    timers[name] = partial(_seconds, network)
        for name, plan in plans.items():
            workers = stack.enter_context(Workers(plan.machine))
            placed = stack.enter_context(execute(plan, planned(plan, step), workers=workers))
            placed.feed()
            timers[name] = partial(_seconds, placed)
        return measure(timers, rounds), spent


def _seconds(network: Any) -> float:
    return float(network.step_seconds(2)[0])


def row_of(case: Case, seconds: dict[str, tuple[float, ...]], spent: float) -> list[str]:
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    plan = min((n for n in medians if n.startswith("plan")), key=lambda n: medians[n])
    other = min((n for n in medians if not n.startswith("plan")), key=lambda n: medians[n])
    ratios = np.array(seconds[other]) / np.array(seconds[plan])
    low, high = np.percentile(ratios, [25, 75])
    ratio = float(np.median(ratios))
    one_device = seconds.get("plan on here, compiled")
    whole = next(of for n, of in seconds.items() if n.startswith("torch.compile"))
    overhead = np.median(np.array(one_device) / np.array(whole)) if one_device else None
    return [
        case.name,
        case.train or "inference",
        f"{case.goal:g}",
        f"{ratio:.2f}",
        f"{(high - low) / ratio:.2f}",
        f"{plan}, {medians[plan] * 1e3:.2f} ms",
        f"{other}, {medians[other] * 1e3:.2f} ms",
        f"{spent:.0f}",
        "-" if overhead is None else f"{overhead:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="cases with one of these texts: lstm;gpt-2, adam"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--compile-budget", default="600s")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args()
    rows, lines = [], []
    for case in cases():
        only = arguments.only.lower().split(";")
        if not any(text in f"{case.name}, {case.train or 'inference'}".lower() for text in only):
            continue
        seconds, spent = measured(
            case, arguments.rounds, arguments.budget, arguments.compile_budget
        )
        rows.append(row_of(case, seconds, spent))
        print(" | ".join(rows[-1]), flush=True)
        for name, of in seconds.items():
            facts = {"case": case.name, "step": case.train or "inference", "way": name}
            lines += [facts | {"round": n, "seconds": value} for n, value in enumerate(of)]
        if arguments.csv:
            with arguments.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, tuple(lines[0]))
                writer.writeheader()
                writer.writerows(lines)
        if arguments.readme:
            fill(arguments.readme, "compiled", table(HEAD, rows))


if __name__ == "__main__":
    main()
