"""What calibration is worth: steps on this machine, predicted by its cost model and measured.

    python benchmarks/predictor/here.py --write

The machine is calibrated as `dovetail machine here --calibrate` does. Each network's step is then
predicted from analytic costs alone, with the calibration and without, and measured as
`dovetail plan MODEL --machine here` measures the eager step. No network is part of the calibration.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import host, parser_of, say, show, table

from dovetail.costs import analytic_costs
from dovetail.machine import Machine, load_machine
from dovetail.pipeline import graph_of, resolve_model

HERE = Path(__file__).resolve().parent
MODELS = (
    "zoo:squeezenet_1_1?batch=4", "zoo:vit?batch=1", "zoo:inception_v3?batch=2&size=149",
    "zoo:gpt2?layers=4&hidden=256&heads=4&context=128&vocabulary=4000&batch=4",
    "zoo:rnnlm?layers=2&steps=20&batch=16&vocabulary=1000&hidden=256", "zoo:randwire?batch=2",
)  # fmt: skip


def command(*words: str) -> str:
    said = subprocess.run(
        [sys.executable, "-m", "dovetail", *words], capture_output=True, text=True, check=True
    )
    return said.stdout


def predicted(model: str, train: str, machine: Machine) -> float:
    step = resolve_model(model, train=train)
    return float(analytic_costs(graph_of(step), machine).compute_seconds[:, 0].sum())


def main() -> None:
    given = parser_of(__doc__, write=False).parse_args()
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder) / "box.toml"
        command("machine", "here", "--calibrate", "--out", str(box))
        machine = load_machine(box)
    bare = replace(machine, devices=tuple(replace(d, calibration={}) for d in machine.devices))
    for model in MODELS:
        for train in ("", "sgd:lr=1e-3"):
            say(f"{model} {train}")
            words = ["plan", model, "--machine", "here", "--budget", "20s", "--json"]
            words += ["--train", train] if train else []
            measured = json.loads(command(*words))["measured"]
            if "eager" not in measured:
                say("its budget left no time to measure the eager step")
                continue
            seconds = measured["eager"]
            off = [predicted(model, train, m) / seconds - 1 for m in (bare, machine)]
            errors.append(off)
            rows.append([model.removeprefix("zoo:"), train or "inference", f"{1e3 * seconds:.2f}",
                         *(f"{100 * e:+.0f} %" for e in off)])  # fmt: skip
    medians = [
        f"{100 * statistics.median(abs(e) for e in of):.0f} %" for of in zip(*errors, strict=True)
    ]
    rows.append(["median error", "", "", *medians])
    head = ("network", "step", "eager, ms", "data sheet", "calibrated")
    show(
        f"{table(head, rows)}\n\nMachine: {host()}",
        HERE / "README.md" if given.write else None,
        "here",
    )


if __name__ == "__main__":
    main()
