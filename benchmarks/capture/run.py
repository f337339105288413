"""Seconds and peak memory of capturing the networks, FLOPs against their closed forms.

    python benchmarks/capture/run.py [--repeats 3] [--write] [NETWORK ...]

Each capture is a process of its own, which also imports torch and builds the fake module. `--write`
puts what was found into the table that `dovetail networks` prints.
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import ROOT, in_child, line, parser_of, table, with_range

TABLE = ROOT / "src" / "dovetail" / "networks" / "sizes.json"
OPTIMIZERS = {"inception_v3": "rmsprop"}
"""Where a paper places a step of another than Adam."""

Found = dict[str, Any]


def capture_once(model: str, train: str) -> Found:
    """What one capture took and found, measured in this process; `train` "" is inference."""
    began = time.perf_counter()
    from dovetail.frontends import matrix_flops, parse_optimizer, resolve

    imported = time.perf_counter()
    graph = resolve(model, train=parse_optimizer(train) if train else None).graph
    seconds = time.perf_counter() - imported
    return {
        "ops": int((~graph.is_source).sum()),
        "import_seconds": imported - began,
        "capture_seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "matrix_flops": matrix_flops(graph),
        "flops": int(graph.flops.sum()),
    }


def parameters_of(name: str) -> dict[str, int]:
    """How many a network has at its defaults, and their bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dovetail.networks import NETWORKS

    network = NETWORKS[name]
    with FakeTensorMode():
        parameters = list(network.modules(**network.defaults).parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
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


FORMULAS = {"rnnlm": rnnlm_flops, "inception_v3": inception_flops}


def row_of(model: str, train: str, found: list[Found]) -> str:
    """A line of the table."""
    seconds = [one["capture_seconds"] for one in found]
    whole = statistics.median(one["capture_seconds"] + one["import_seconds"] for one in found)
    peak = max(one["peak_bytes"] for one in found) / 1e9
    return line(
        f"{model}{' --train ' * bool(train)}{train}",
        f"{found[0]['ops']:,}",
        with_range(seconds, ".1f") if len(found) > 1 else f"{seconds[0]:.1f}",
        f"{whole:.1f}",
        f"{peak:.2f}",
    )


def write_table(sizes: dict[str, dict[str, int]]) -> None:
    """Put `sizes` into the table, and take out what is a network no more."""
    from dovetail.networks import NETWORKS

    every = json.loads(TABLE.read_text()) | sizes
    kept = {name: every[name] for name in sorted(every) if name in NETWORKS}
    TABLE.write_text(json.dumps(kept, indent=2) + "\n")


def main() -> None:
    from dovetail.networks import NETWORKS

    parser = parser_of(__doc__, repeats=3, write=f"into {TABLE.name}")
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="default: all")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "TRAIN"), help="one capture, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(capture_once(*arguments.one)))
        return
    print(table(("network", "ops", "capture s", "with imports s", "peak RSS GB"), []))
    flops = {}
    for name in arguments.networks or NETWORKS:
        found = {}
        for train in ("", OPTIMIZERS.get(name, "adam")):
            found[bool(train)] = [
                in_child(__file__, "--one", f"zoo:{name}", train) for _ in range(arguments.repeats)
            ]
            print(row_of(f"zoo:{name}", train, found[bool(train)]), flush=True)
        inference, training = found[False][0], found[True][0]
        flops[name] = training["matrix_flops"]
        if arguments.write:
            counts = {"flops": inference["flops"], "ops": inference["ops"]}
            counts |= {"training_ops": training["ops"]}
            write_table({name: parameters_of(name) | counts})
    rows = []
    for name in (name for name in flops if name in FORMULAS):
        counted, formula = flops[name], FORMULAS[name]()
        difference = f"{counted / formula - 1:+.2%}"
        rows.append((f"zoo:{name}", f"{counted:.6e}", f"{formula:.6e}", difference))
    head = ("training step", "FLOPs of matrix products", "closed form", "difference")
    print(f"\n{table(head, rows)}")


if __name__ == "__main__":
    main()
