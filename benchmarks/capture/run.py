"""Seconds and peak memory of capturing the papers' networks, FLOPs against their closed forms.

    python benchmarks/capture/run.py [--repeats 3]

Each capture is a process of its own, which also imports torch and builds the fake module.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from rich.console import Console

CASES = (("zoo:rnnlm", "adam"), ("zoo:inception_v3", "rmsprop"))


def capture_once(model: str, train: str) -> dict[str, float]:
    """What one capture took and found, measured in this process."""
    began = time.perf_counter()
    from dovetail.frontends import matrix_flops, parse_optimizer, resolve

    imported = time.perf_counter()
    graph = resolve(model, train=parse_optimizer(train)).graph
    return {
        "ops": len(graph),
        "import_seconds": imported - began,
        "capture_seconds": time.perf_counter() - imported,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "matrix_flops": matrix_flops(graph),
    }


def rnnlm_flops() -> int:
    """2 m n k of every product of a step: each forward product has two backward ones, except that
    the first step's h is a constant, which needs no gradient."""
    from dovetail.networks import NETWORKS

    sizes = NETWORKS["rnnlm"].defaults
    steps, batch, layers = (int(sizes[key]) for key in ("steps", "batch", "layers"))
    hidden, vocabulary = int(sizes["hidden"]), int(sizes["vocabulary"])
    product = 2 * batch * hidden * 4 * hidden
    forward = steps * (layers * 2 * product + 2 * batch * hidden * vocabulary)
    return 3 * forward - layers * product


def inception_flops() -> int:
    """2 x outputs x inputs that each reads, of every convolution and linear layer; images need no
    gradient."""
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dovetail.networks import NETWORKS

    layers: list[int] = []

    def count(module: nn.Module, _inputs: object, output) -> None:
        reads = module.weight[0].numel()
        layers.append(2 * output.numel() * reads)

    with FakeTensorMode():
        module, images, _, _ = NETWORKS["inception_v3"].build()
        for layer in module.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.register_forward_hook(count)
        module(*images)
    return 3 * sum(layers) - layers[0]


FORMULAS = {"zoo:rnnlm": rnnlm_flops, "zoo:inception_v3": inception_flops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "TRAIN"), help="one capture, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(capture_once(*arguments.one)))
        return
    console = Console(width=140)
    console.print(
        "| network | ops | capture s, median (min to max) | with imports s | peak RSS GB |"
    )
    console.print("|---|---:|---|---:|---:|")
    flops = {}
    for model, train in CASES:
        command = [sys.executable, __file__, "--one", model, train]
        found = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(arguments.repeats)
        ]
        seconds = [one["capture_seconds"] for one in found]
        whole = statistics.median(one["capture_seconds"] + one["import_seconds"] for one in found)
        peak = max(one["peak_bytes"] for one in found) / 1e9
        flops[model] = found[0]["matrix_flops"]
        console.print(
            f"| {model} --train {train} | {found[0]['ops']} | {statistics.median(seconds):.1f} "
            f"({min(seconds):.1f} to {max(seconds):.1f}) | {whole:.1f} | {peak:.2f} |",
            markup=False,
        )
    console.print("\n| network | FLOPs of matrix products | closed form | difference |")
    console.print("|---|---:|---:|---:|")
    for model, counted in flops.items():
        formula = FORMULAS[model]()
        console.print(
            f"| {model} | {counted:.6e} | {formula:.6e} | {counted / formula - 1:+.2%} |",
            markup=False,
        )


if __name__ == "__main__":
    main()
