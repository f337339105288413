"""How long it takes from nothing to the first compiled step, and how long the second time.

    python benchmarks/compiled/startup.py [--only rnnlm] [--readme benchmarks/compiled/README.md]

Every figure is the wall time of a whole command, from its start to its end, imports included. First
with an empty cache: nothing compiled, nothing measured, no C++ runner. Then the same again with
what the first left. Beside it a program that runs the first steps of the plain module by
`torch.compile`, also with an empty cache and again.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import fill, parser_of, table

NETWORKS = {
    "RNNLM": "zoo:rnnlm?hidden=128&steps=20&batch=16&vocabulary=1000",
    "Inception-V3": "zoo:inception_v3?batch=2&size=149",
}
HEAD = ("network", "cache", "plan", "run", "torch.compile, first steps")
PLAIN = """
import sys
from dovetail.executors import PlainNetwork
from dovetail.machine import parse_machine
from dovetail.pipeline import resolve_model
with PlainNetwork(resolve_model(sys.argv[1], "adam"), parse_machine("here"), mode="default") as it:
    it.begin()
    it.step_seconds(2)
"""


def seconds_of(command: list[str], cache: Path) -> float:
    own = {"DOVETAIL_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    own["NUMBA_CACHE_DIR"] = str(cache / "numba")
    began = time.perf_counter()
    nothing = subprocess.DEVNULL
    subprocess.run(command, env=os.environ | own, check=True, stdout=nothing, stdin=nothing)
    return time.perf_counter() - began


def main() -> None:
    arguments = parser_of(__doc__, only="", readme=None).parse_args()
    rows = []
    for name, model in NETWORKS.items():
        if arguments.only.lower() not in name.lower():
            continue
        with TemporaryDirectory() as folder:
            plan = str(Path(folder) / "plan.json")
            search = [sys.executable, "-m", "dovetail", "plan", model, "--train", "adam"]
            search += ["--machine", "here/2", "--out", plan]
            commands = {
                "plan": search,
                "run": [sys.executable, "-m", "dovetail", "run", plan, "--steps", "2"],
                "torch.compile, first steps": [sys.executable, "-c", PLAIN, model],
            }
            for cache in ("empty", "of the first time"):
                spent = []
                for title, command in commands.items():
                    # Each has a cache of its own, but for `run`, which runs what `plan` has found.
                    kept = "plan" if title == "run" else title
                    spent.append(seconds_of(command, Path(folder) / kept.replace(" ", "")))
                rows.append((name, cache, *(f"{each:.1f} s" for each in spent)))
                print(" | ".join(rows[-1]), flush=True)
        if arguments.readme:
            fill(arguments.readme, "startup", table(HEAD, rows))


if __name__ == "__main__":
    main()
