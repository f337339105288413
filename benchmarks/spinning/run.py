"""Ops on two threads under several lengths of OpenMP's spinning, in turn.

python benchmarks/spinning/run.py [--rounds 3] [--steps 300]
"""

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import in_child, parser_of, table

SETTINGS = (
    {},
    {"OMP_WAIT_POLICY": "passive"},
    {"GOMP_SPINCOUNT": "1000"},
    {"GOMP_SPINCOUNT": "10000"},
    {"GOMP_SPINCOUNT": "100000"},
)


def one(steps: int) -> dict[str, float]:
    """Microseconds of a chain of ops, and the median of its one elementwise product."""
    import torch

    torch.set_num_threads(2)
    rows, weight, bias = torch.rand(16, 256), torch.rand(256, 1024), torch.rand(1024)
    left, right = torch.rand(64, 2048), torch.rand(64, 2048)
    image, kernel, square = (
        torch.rand(1, 64, 35, 35),
        torch.rand(96, 64, 3, 3),
        torch.rand(512, 512),
    )
    chain = [
        lambda: left * right,
        lambda: torch.addmm(bias, rows, weight),
        lambda: torch.sigmoid(left),
        lambda: torch.log_softmax(left, 1),
        lambda: torch.nn.functional.conv2d(image, kernel, padding=1),
        lambda: square @ square,
    ]
    seconds: list[list[float]] = []
    with torch.inference_mode():
        for _ in range(steps):
            stamps = [time.perf_counter()]
            for call in chain:
                call()
                stamps.append(time.perf_counter())
            seconds.append([stamps[1] - stamps[0], stamps[-1] - stamps[0]])
    whole = sorted(chain_seconds for _, chain_seconds in seconds[20:])
    return {
        "product": statistics.median(product for product, _ in seconds[20:]) * 1e6,
        "median": statistics.median(whole) * 1e6,
        "mean": statistics.mean(whole) * 1e6,
        "99 %": whole[int(0.99 * len(whole))] * 1e6,
    }


def main() -> None:
    parser = parser_of(__doc__, rounds=3, steps=300)
    parser.add_argument("--one", action="store_true", help="one setting, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.steps)))
        return
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for setting in SETTINGS:
            name = ", ".join("=".join(pair) for pair in setting.items()) or "default"
            steps = str(arguments.steps)
            row = in_child(__file__, "--one", "--steps", steps, variables=setting)
            found.setdefault(name, []).append(row)
    lines = [
        (name, *(" / ".join(f"{row[key]:.0f}" for row in rows) for key in rows[0]))
        for name, rows in found.items()
    ]
    print(table(("setting", "product us", "chain us: median", "mean", "99 %"), lines))


if __name__ == "__main__":
    main()
