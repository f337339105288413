"""Fits the analytic costs of stages to published figures of a V100, and says how far off they are.

    python benchmarks/stages/fit_analytic.py              the fit, its error, and what was held out
    python benchmarks/stages/fit_analytic.py --write      the same, into dovetail/costs/stages.json,
                                                          and the tables into the work folder

Four parameters: the share of the peak that a launch reaches that fills the device, the elements
that fill it, seconds from launch to launch, and seconds of a stage of several groups apart from
them. Fourteen figures: sequential, greedy and IOS on four networks at batch 1 (Y. Ding et al.,
"IOS", MLSys 2021), as the logarithms of sequential seconds and of both speed-ups over it, for it is
the order of schedules that costs are asked for; and how much longer InceptionV3 takes at batch 8
and 16 than at 1 ("Accelerate DNN Inference by Inter-Operator Parallelism", DOS, 2019), without
which the share of the peak would be that of batch 1. Searches and fits alternate: schedules are
searched with the parameters so far, the parameters fitted on these schedules.

Held out: one network after the other; what DOS, another engine, took, and its other GPUs. Graphs
are captured once and kept in the work folder.
"""

import json
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from harness import parser_of, table
from scipy.optimize import least_squares
from torch import Tensor, nn
from torch.nn import functional as F

import dovetail
from dovetail.costs.stages import (
    FITTED,
    AnalyticStages,
    StageRates,
    StageWork,
    gpu_rates,
    kernel_works,
    resident_threads,
)
from dovetail.graph import Graph, load_graph, save_graph
from dovetail.graph.kernels import CONVOLUTION, FOLDED, Kernels, fuse
from dovetail.machine import PRESETS
from dovetail.networks.squeezenet import FIRES_1_0, Fire, SqueezeNet
from dovetail.pipeline.sources import graph_of, resolve_model
from dovetail.schedulers.blocks import Narrowed, narrowed
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import ios
from dovetail.schedulers.records import (
    BlockSchedule,
    KernelBlock,
    StageTimer,
    StageTiming,
    groups_of,
    members,
)
from dovetail.schedulers.scheduling import greedy, sequential
from dovetail.schedulers.timing import block_of, signatures_of

HERE = Path(__file__).parent
COLUMNS = ("sequential", "greedy", "IOS")
PUBLISHED = {
    "SqueezeNet": (0.86, 0.98, 0.73),
    "InceptionV3": (6.51, 4.62, 4.03),
    "RandWire": (8.49, 6.27, 6.02),
    "NasNet-A": (22.95, 16.78, 16.04),
}
"""Milliseconds of a V100 at batch 1, by column."""
MULTIPLY_ADDS = {"SqueezeNet": 1.16, "InceptionV3": 5.50, "RandWire": 7.67, "NasNet-A": 22.00}
"""In thousand millions, as DOS prints them."""
MODELS = {
    "InceptionV3": "zoo:inception_v3?batch={batch}",
    "RandWire": "zoo:randwire?batch={batch}&regular=true&channels=150",
    "NasNet-A": "zoo:nasnet_a_large?batch={batch}",
}
BATCHED = "InceptionV3"
BATCHES = {1: 4.66, 8: 10.55, 16: 16.56}
"""Batch size -> milliseconds of DOS, each with the schedule for it: its table 2."""
DOS = {
    ("SqueezeNet", "v100"): 0.74,
    ("InceptionV3", "v100"): 4.61,
    ("RandWire", "v100"): 7.15,
    ("NasNet-A", "v100"): 18.99,
    ("InceptionV3", "titan_xp"): 6.01,
    ("InceptionV3", "2080ti"): 4.09,
}
"""(network, device) -> milliseconds at batch 1: its tables 5 and 1."""
NAMES = ("peak_share", "full_share", "launch_seconds", "join_seconds")
LOW, HIGH, START = (0.02, 0.01, 1e-8, 1e-8), (1.0, 50.0, 1e-3, 1e-3), (0.25, 0.7, 5e-6, 1e-5)
STATES, GROUPS, ROUNDS = 2000, 4, 2
Stage = tuple[tuple[tuple[int, ...], ...], bool]
Parameters = dict[str, float]


class Bypassed(nn.Module):
    """SqueezeNet with complex bypass, section 6 of its paper: what both papers' counts fit."""

    def __init__(self) -> None:
        super().__init__()
        plain = SqueezeNet(nn.Conv2d(3, 96, 7, stride=2), FIRES_1_0)
        self.features, self.classifier = plain.features, plain.classifier
        self.bypasses = nn.ModuleDict()
        channels = 96
        for i, layer in enumerate(self.features):
            if isinstance(layer, Fire):
                same = channels == layer.outputs
                around = nn.Identity() if same else nn.Conv2d(channels, layer.outputs, 1)
                self.bypasses[str(i)] = around
                channels = layer.outputs

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.features):
            bypass = str(i) in self.bypasses
            x = layer(x) + self.bypasses[str(i)](x) if bypass else layer(x)
        x = F.relu(self.classifier(x))
        return torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)


@dataclass(frozen=True, eq=False)
class Subject:
    """A network, cut into parts. merges [kernels]: equal where kernels may become one."""

    graph: Graph
    kernels: Kernels
    works: list[StageWork]
    signatures: list[str]
    merges: list[Hashable | None]
    narrowed: Narrowed


@cache
def subject(name: str, batch: int = 1) -> Subject:
    path = HERE / "work" / f"{name}-{batch}.json.gz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in MODELS:
            graph = graph_of(resolve_model(MODELS[name].format(batch=batch), ""))
        else:
            graph = dovetail.capture(Bypassed(), torch.zeros(batch, 3, 224, 224)).graph
        save_graph(graph, path)
    graph = load_graph(path)
    kernels = fuse(graph)
    works = kernel_works(graph, kernels)
    parts = narrowed(block_of(graph, kernels), STATES)
    merges = merges_of(graph, kernels, works)
    return Subject(graph, kernels, works, signatures_of(graph, kernels), merges, parts)


def merges_of(graph: Graph, kernels: Kernels, works: list[StageWork]) -> list[Hashable | None]:
    """Dense convolutions of one image onto grids of one size, and so of one stride."""
    found: list[Hashable | None] = [None] * kernels.count
    for op, kernel in enumerate(kernels.of_op.tolist()):
        if kernel != FOLDED and graph.kinds[op] == CONVOLUTION and works[kernel].window:
            image, weight = (int(t) for t in graph.inputs_of(op)[:2])
            if graph.shapes[weight][1] == graph.shapes[image][1]:
                found[kernel] = (image, graph.shapes[graph.outputs_of(op)[0]][2:])
    return found


def timer_of(
    of: Subject, costs: AnalyticStages, ops: Sequence[int], block: KernelBlock, *, merging: bool
) -> StageTimer:
    def timer(stages: Sequence[int]) -> list[StageTiming]:
        found = []
        for stage in stages:
            groups = [[ops[o] for o in members(g)] for g in groups_of(block, stage)]
            timing = StageTiming(costs.seconds(groups))
            keys = {of.merges[group[0]] if len(group) == 1 else None for group in groups}
            if merging and len(groups) > 1 and len(keys) == 1 and None not in keys:
                timing = min(timing, StageTiming(costs.seconds(groups, True), True), key=_seconds)
            found.append(timing)
        return found

    return timer


def _seconds(timing: StageTiming) -> float:
    return timing.seconds


def best_of(block: KernelBlock, timer: StageTimer, window: int) -> BlockSchedule:
    """IOS at r = 3 and few groups, or DOS at any number, whichever is faster."""
    chains = ios(block, timer, group_ops=3, groups=GROUPS, window=window)
    return min(chains, dos(block, timer, window=window), key=lambda found: found.seconds)


METHODS: dict[str, Callable[[KernelBlock, StageTimer, int], BlockSchedule]] = {
    "sequential": lambda block, timer, _: sequential(block, timer),
    "greedy": lambda block, timer, _: greedy(block, timer),
    "IOS": best_of,
    "DOS": lambda block, timer, window: dos(block, timer, window=window),
}


def scheduled(of: Subject, rates: StageRates, method: str) -> list[Stage]:
    """The stages of the whole network. Equal parts are searched once."""
    costs = AnalyticStages(of.works, rates)
    known: dict[Hashable, BlockSchedule] = {}
    stages: list[Stage] = []
    for part, window in zip(of.narrowed.parts, of.narrowed.windows, strict=True):
        key = (part.block.predecessors, tuple(of.signatures[op] for op in part.ops))
        if key not in known:
            merging = method in ("IOS", "DOS")
            timer = timer_of(of, costs, part.ops, part.block, merging=merging)
            known[key] = METHODS[method](part.block, timer, window)
        for stage, timing in zip(known[key].stages, known[key].timings, strict=True):
            groups = groups_of(part.block, stage)
            ops = tuple(tuple(part.ops[o] for o in members(group)) for group in groups)
            stages.append((ops, timing.merged))
    return stages


def milliseconds(of: Subject, rates: StageRates, *schedules: list[Stage]) -> list[float]:
    """Of each schedule."""
    costs = AnalyticStages(of.works, rates)
    return [1e3 * sum(costs.seconds(*stage) for stage in stages) for stages in schedules]


def rates_of(parameters: Parameters, model: str = "v100") -> StageRates:
    device = PRESETS[model].device
    peak, bandwidth = device.flops_per_second["float32"], device.bandwidth_bytes_per_second
    return gpu_rates(peak, bandwidth, resident_threads(device), parameters)


def fit(networks: Sequence[str], start: Sequence[float] = START) -> Parameters:
    """Least squares of logarithms; searched and fitted in turn."""
    logs = np.log(start)
    bounds = (np.log(LOW), np.log(HIGH))
    for _ in range(ROUNDS):
        rates = rates_of(named(logs))
        schedules = {n: [scheduled(subject(n), rates, c) for c in COLUMNS] for n in networks}
        sizes = BATCHES if BATCHED in networks else ()
        batched = {b: scheduled(subject(BATCHED, b), rates, "DOS") for b in sizes}

        def off(logs: np.ndarray, *found: Any) -> np.ndarray:
            rates = rates_of(named(logs))
            return np.concatenate([residuals(rates, found[0]), batch_residuals(rates, found[1])])

        logs = least_squares(
            off, logs, bounds=bounds, diff_step=1e-3, ftol=1e-5, xtol=1e-5,
            args=(schedules, batched),
        ).x  # fmt: skip
    return named(logs)


def residuals(rates: StageRates, schedules: dict[str, list[list[Stage]]]) -> np.ndarray:
    """[networks x 3] log of predicted over published: sequential seconds, and both speed-ups."""
    found = [milliseconds(subject(n), rates, *columns) for n, columns in schedules.items()]
    off = np.log(np.array(found) / np.array([PUBLISHED[n] for n in schedules]))
    off[:, 1:] -= off[:, :1]
    return off.ravel()


def batch_residuals(rates: StageRates, schedules: dict[int, list[Stage]]) -> np.ndarray:
    """[batch sizes - 1] log of predicted over published ratios to the first."""
    found = [milliseconds(subject(BATCHED, b), rates, s)[0] for b, s in schedules.items()]
    off = np.log(np.array(found) / np.array([BATCHES[b] for b in schedules]))
    return off[1:] - off[:1]


def named(logs: np.ndarray) -> Parameters:
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))


def predicted(network: str, parameters: Parameters) -> list[float]:
    """Milliseconds by column, each with a schedule searched at these parameters."""
    of, rates = subject(network), rates_of(parameters)
    return milliseconds(of, rates, *(scheduled(of, rates, column) for column in COLUMNS))


def by_network(rows: dict[str, list[float]]) -> list[str]:
    """Predicted and published, and how far off; whether the order of the columns is right."""
    lines, errors = [], []
    for network, found in rows.items():
        printed = PUBLISHED[network]
        cells = [
            f"{f:.2f} / {p:.2f} ({f / p - 1:+.0%})" for f, p in zip(found, printed, strict=True)
        ]
        errors += [abs(f / p - 1) for f, p in zip(found, printed, strict=True)]
        right = np.argsort(found).tolist() == np.argsort(printed).tolist()
        lines.append((network, *cells, "right" if right else "wrong"))
    ratios = [
        abs((f[c] / f[0]) / (PUBLISHED[n][c] / PUBLISHED[n][0]) - 1)
        for n, f in rows.items() for c in (1, 2)
    ]  # fmt: skip
    said = (
        f"Relative error: mean {np.mean(errors):.0%}, largest {max(errors):.0%}. Of the speed-ups "
        f"over sequential: mean {np.mean(ratios):.0%}, largest {max(ratios):.0%}."
    )
    return [table(("", *COLUMNS, "order"), lines), "", said]


def held_out(parameters: Parameters) -> list[str]:
    lines = []
    for (network, device), printed in DOS.items():
        of, rates = subject(network), rates_of(parameters, device)
        (found,) = milliseconds(of, rates, scheduled(of, rates, "DOS"))
        off = f"{found:.2f} / {printed:.2f} ({found / printed - 1:+.0%})"
        lines.append((network, device, off))
    return [table(("", "device", "predicted / DOS"), lines)]


def batches(parameters: Parameters) -> list[str]:
    lines = []
    for batch, printed in BATCHES.items():
        of, rates = subject(BATCHED, batch), rates_of(parameters)
        (found,) = milliseconds(of, rates, scheduled(of, rates, "DOS"))
        lines.append((batch, f"{found:.2f} / {printed:.2f} ({found / printed - 1:+.0%})"))
    return [table(("batch", "predicted / DOS"), lines)]


def sizes() -> list[str]:
    lines = []
    for network, printed in MULTIPLY_ADDS.items():
        works = subject(network).works
        launches = sum(len(work.launches) for work in works)
        counted = sum(work.flops for work in works) / 2e9
        lines.append((network, len(works), launches, f"{counted:.2f} / {printed:.2f}"))
    return [table(("", "kernels", "launches", "G multiply-adds, here / DOS"), lines)]


def main() -> None:
    write = parser_of(__doc__, write=f"to {FITTED.name}").parse_args().write
    parameters = fit(list(PUBLISHED))
    rows = {n: predicted(n, parameters) for n in PUBLISHED}
    start = list(parameters.values())
    left_out = {n: predicted(n, fit([m for m in PUBLISHED if m != n], start)) for n in PUBLISHED}
    sections = {
        "Parameters": [f"- {name}: {value:.4g}" for name, value in parameters.items()],
        "Sizes": sizes(),
        "Milliseconds, predicted / published": by_network(rows),
        "Each network predicted from the other three": by_network(left_out),
        f"{BATCHED} at other batch sizes, whose ratios to batch 1 were fitted": batches(parameters),
        "Another engine, other GPUs: not fitted": held_out(parameters),
    }
    text = "\n\n".join("\n".join((f"### {t}", "", *lines)) for t, lines in sections.items())
    print(text)
    if write:
        figures = {
            n: {"published_ms": PUBLISHED[n], "in_sample_ms": rows[n], "left_out_ms": left_out[n],
                "graph": subject(n).graph.fingerprint}
            for n in PUBLISHED
        }  # fmt: skip
        FITTED.write_text(
            json.dumps(
                {
                    "parameters": parameters,
                    "device": "v100",
                    "columns": COLUMNS,
                    "batches": {"network": BATCHED, "published_ms": BATCHES},
                    "torch": torch.__version__,
                    "figures": figures,
                    "command": "python benchmarks/stages/fit_analytic.py --write",
                },
                indent=2,
            )
            + "\n",
            encoding="utf-8",
        )
        (HERE / "work" / "analytic.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
