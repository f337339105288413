"""Stages that are planned beside those that people make, on machines by data sheet.

    python benchmarks/pipelines/simulated.py [--only PATTERN] [--budget 10s] [--out FILE.json]

Each case is a training step over micro-batches, simulated op by op. "equal layers" is what
torchtitan (`generate_llm_fqn_per_model_part`, embedding and head as a layer each), DeepSpeed's
`uniform` and a user of `torch.distributed.pipelining` by hand make; "equal parameters" is
DeepSpeed's `parameters`. All have the same schedule and micro-batches. Writes the table of the
README, and the figures as JSON.
"""

import json
import sys
import time
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dovetail as dt
from dovetail.frontends import Adam, capture, resolve
from dovetail.graph.synthetic import layered

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import fill, host, keep_json, parser_of, table

HERE = Path(__file__).parent
MICRO_BATCHES = 16
MODELS = {
    "GPT-2 medium": "zoo:gpt2?layers=24&hidden=1024&heads=16",
    "Llama 3.2 1B": "zoo:llama",
    "GNMT, 8 layers": "zoo:gnmt?layers=8",
    "Inception-V3": "zoo:inception_v3",
    "U-Net": "",
}
MACHINES = {"4 equal": "4 x a100", "4 unlike": "2 x a100 + 2 x v100"}
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "interleaved")


class UNet(nn.Module):
    """Ronneberger et al., MICCAI 2015, https://arxiv.org/abs/1505.04597, with padding: each level
    of the way down is read again on the way up."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(levels + 1)]
        self.down = nn.ModuleList(
            double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.merge = nn.ModuleList(double(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def double(inputs: int, outputs: int) -> nn.Sequential:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def step_of(model: str):
    if model:
        return resolve(model, train=Adam())
    with FakeTensorMode():
        module = UNet()
        images, masks = torch.randn(2, 3, 256, 256), torch.zeros(2, 256, 256, dtype=torch.int64)
        return capture(
            module, images, targets=(masks,), loss=nn.functional.cross_entropy, train=Adam()
        )


def measure(name: str, step, machine: str, schedule: str, budget: str) -> dict:
    began = time.perf_counter()
    options = {"micro_batches": MICRO_BATCHES, "schedule": schedule, "budget": budget}
    plan = dt.plan(step, MACHINES[machine], **options)
    usual = {k: v for k, v in plan.baselines.items() if k.startswith("equal")}
    row = {
        "model": name, "machine": machine, "schedule": schedule, "seconds": plan.value,
        "bound": plan.lower_bound, "proof": plan.bound_proof, "gap": plan.gap, "usual": usual,
        "stages": plan.notes[-1], "planning_seconds": time.perf_counter() - began,
        "ops": len(step.graph),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def planning_of_50_000_ops() -> dict:
    graph = layered(50_000, training=True)
    plan = dt.plan(layered(2_000, training=True), MACHINES["4 equal"], micro_batches=8, budget="1s")
    began = time.perf_counter()
    plan = dt.plan(graph, MACHINES["4 equal"], micro_batches=8, schedule="1f1b")
    seconds = time.perf_counter() - began
    print(f"planning {len(graph):,} ops: {seconds:.1f} s", flush=True)
    return {"ops": len(graph), "planning_seconds": seconds, "seconds": plan.value, "gap": plan.gap}


def text_of(row: dict) -> list[str]:
    ratios = {
        name: "does not fit" if value is None else f"{value / row['seconds']:.2f}"
        for name, value in row["usual"].items()
    }
    return [
        f"{row['model']}, {row['machine']}", row["schedule"], f"{1e3 * row['seconds']:.4g} ms",
        ratios.get("equal layers", "-"), ratios.get("equal parameters", "-"),
        f"{100 * row['gap']:.1f} %", row["proof"], f"{row['planning_seconds']:.0f} s",
    ]  # fmt: skip


def main() -> None:
    out = HERE / "results" / "simulated.json"
    arguments = parser_of(__doc__, only="*", budget="10s", out=out).parse_args()
    rows = []
    large = planning_of_50_000_ops()
    for name, model in MODELS.items():
        if not fnmatch(name, arguments.only):
            continue
        step = step_of(model)
        for machine in MACHINES:
            for schedule in SCHEDULES:
                rows.append(measure(name, step, machine, schedule, arguments.budget))
    arguments.out.parent.mkdir(exist_ok=True)
    figures = {"host": host(torch), "micro_batches": MICRO_BATCHES, "rows": rows, "large": large}
    keep_json(arguments.out, figures)
    head = [
        "case", "schedule", "planned step", "equal layers", "equal parameters", "gap", "bound by",
        "planned in",
    ]  # fmt: skip
    if arguments.only == "*":
        fill(HERE / "README.md", "simulated", table(head, map(text_of, rows)))


if __name__ == "__main__":
    main()
