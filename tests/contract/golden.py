"""The plans that every version must find: written by `python -m tests.contract.golden`.

A placer that is named, with a budget of evaluations and a seed, gives the same placement and value
on every machine. `auto` may become better, and never worse. Bounds may become tighter.
"""

import hashlib
import json
import sys
from pathlib import Path

import dovetail as dt

FILE = Path(__file__).with_name("golden.json")
INSTANCES = Path(__file__).parents[1] / "data" / "instances"
NETWORKS = {
    "rnn": ("zoo:rnnlm?layers=2&hidden=64&steps=6&batch=8&vocabulary=200", "adam"),
    "inception": ("zoo:inception_v3?batch=1&size=107", ""),
    "attention": ("zoo:gpt2?layers=3&hidden=64&heads=4&context=16&vocabulary=200&batch=2", "adamw"),
    "experts": (
        "zoo:moe?layers=2&hidden=32&heads=4&key_heads=2&inner=64&experts=4&context=8"
        "&vocabulary=100", "",
    ),
}  # fmt: skip
PUBLISHED = {
    "bert load": ("throughput/op_bert_l-3_inference.json", "load"),
    "gnmt load": ("throughput/gnmt_inference.json", "load"),
    "gnmt latency": ("latency/gnmt_inference.json", "latency"),
}
MACHINES = {
    "2 x p100": FILE.with_name("files") / "two-p100.toml",
    "k80 + 2 x v100 + haswell": FILE.with_name("files") / "k80-v100.toml",
}
"""Machines by their rates alone: what a preset's ops cost may become better known."""
PLACERS = (
    "single", "expert", "balanced", "etf", "m_topo", "heft", "linear_dp", "ideal_dp", "metis",
    "families", "sct", "multilevel", "local_search", "latency_search",
)  # fmt: skip
"""Those whose placements depend on nothing but the seed: no time, no rounding of a processor's own,
as the learned ones have it, and no library that may be absent."""
BUDGET = "200e"


def cases(graphs):
    """Case -> (step, keywords of `dt.plan`). graphs   network -> its graph"""
    found = {}
    last = list(MACHINES)[-1]
    for network, graph in graphs.items():
        for machine, file in MACHINES.items():
            for placer in (*PLACERS, "auto"):
                found[f"{network} | {machine} | {placer}"] = (
                    graph, {"machine": str(file), "placer": placer},
                )  # fmt: skip
        found[f"{network} | {last} | contiguous load"] = (
            graph, {"machine": str(MACHINES[last]), "objective": "load", "contiguous": True},
        )  # fmt: skip
    for name, (path, objective) in PUBLISHED.items():
        instance = dt.load_instance(INSTANCES / path)
        for placer in ("single", "etf", "ideal_dp", "local_search", "auto"):
            found[f"{name} | {placer}"] = instance, {"objective": objective, "placer": placer}
    return found


def facts(step, options):
    """What is kept of a case's plan; the error's name where there is none."""
    try:
        plan = dt.plan(step, budget=BUDGET, seed=3, **options)
    except dt.DovetailError as error:
        return {"error": type(error).__name__}
    placement = plan.placement.astype("<i4").tobytes()
    return {
        "value": plan.value,
        "bound": plan.lower_bound,
        "memory": list(plan.peak_memory_bytes),
        "placement": hashlib.sha256(placement).hexdigest()[:16],
        "graph": plan.graph_fingerprint,
    }


def main():
    from tests.contract.shell import Shell

    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    written = {name: facts(*case) for name, case in cases(captured(Shell(folder))).items()}
    FILE.write_text(json.dumps(written, indent=1) + "\n")


def captured(shell):
    """Network -> its graph, by the command line."""
    graphs = {}
    for name, (model, optimizer) in NETWORKS.items():
        words = ("--train", optimizer) if optimizer else ()
        shell.works("capture", model, *words, "--out", f"{name}.json.gz")
        graphs[name] = dt.load_graph(shell.folder / f"{name}.json.gz")
    return graphs


if __name__ == "__main__":
    main()
