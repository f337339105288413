"""How a batch is shared best: whole, by towers, by micro-batches, or both; by data sheet.

    python benchmarks/pipelines/batches.py [--budget 60s] [--only PATTERN]

Each case is planned with `replicas="auto"`, and its row shows what every way to share the batch
takes, simulated op by op. Writes a table of the README.
"""

import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import dovetail as dt
from dovetail.frontends import parse_optimizer, resolve
from dovetail.transforms import Parts, Towers, the
from dovetail.units import format_seconds

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import parser_of, show, table

HERE = Path(__file__).parent
CASES = {
    "Inception-V3, batch 128": ("zoo:inception_v3?batch=128", "rmsprop", "rl17/4"),
    "GPT-2 medium, batch 32": (
        "zoo:gpt2?layers=24&hidden=1024&heads=16&batch=32",
        "adam",
        "4 x a100",
    ),
    "ViT, batch 64": ("zoo:vit?batch=64", "adam", "4 x v100"),
    "Llama 3.2 1B, batch 16": ("zoo:llama?batch=16", "adam", "2 x a100 + 2 x v100"),
}
"""name -> (MODEL, optimizer, machine). The first is Mirhoseini et al., ICML 2017, section 4.4."""


def run(name: str, budget: str) -> list[str]:
    """Plan one case, and return its row."""
    model, optimizer, machine = CASES[name]
    step = resolve(model, train=parse_optimizer(optimizer))
    began = time.perf_counter()
    plan = dt.plan(step, machine, replicas="auto", budget=budget)
    seconds = time.perf_counter() - began
    print(plan, flush=True)
    ways = {way: value for way, value in plan.baselines.items() if _is_way(way)}
    whole = ways.pop("whole batch")
    others = sorted((value, way) for way, value in ways.items() if value is not None)
    return [
        f"{name}, {machine}",
        format_seconds(whole) if whole is not None else "does not fit",
        ", ".join(f"{way} {format_seconds(value)}" for value, way in others[:4]),
        _chosen(plan),
        format_seconds(plan.value),
        f"{100 * plan.gap:.1f} %",
        f"{seconds:.0f} s",
    ]


def _chosen(plan: dt.Plan) -> str:
    towers = the(Towers, plan.transforms)
    replicas = 1 if towers is None else towers.count
    shared = the(Parts, plan.transforms) is not None
    return f"{replicas} x {plan.repeats // replicas}" if shared else "whole"


def _is_way(name: str) -> bool:
    return any(word in name for word in ("batch", "towers"))


def main() -> None:
    options = parser_of(__doc__, budget="60s", only="*").parse_args()
    names = [name for name in CASES if fnmatch(name, options.only)]
    rows = [run(name, options.budget) for name in names]
    head = (
        "case", "whole batch", "shared (the best four)", "chosen", "step", "gap", "planned in",
    )  # fmt: skip
    readme = HERE / "README.md" if len(names) == len(CASES) else None
    show(table(head, rows), readme, "batches")


if __name__ == "__main__":
    main()
