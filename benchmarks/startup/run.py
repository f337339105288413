"""How long commands take to start.

    python benchmarks/startup/run.py --rounds 5 --out startup.json
    python benchmarks/startup/run.py --version before=OTHER_TREE --version now=.

Each round runs every command once for each version of the package, in turn; a version is a folder
with `src/`. The seconds are those of whole commands, from outside. `first commit` is the time from
the start of `dovetail train` to the server's first commit, by the history that it writes; `first
step plainly` is a plain program that ends after its first step. `plan` was planned before, and so
was the first call of `dt.optimize`, in another process. Each version has a cache of its own, which
one round that does not count has filled. --only takes the commands whose names hold its text.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import ROOT, keep_json, parser_of, say, table, with_range

HERE = Path(__file__).resolve().parent
EPOCHS = 20
MODEL = "zoo:inception_v3?batch=1"
PLAN = ("plan", MODEL, "--machine", "here/2", "--budget", "30s", "--out", "found.json")
TRAIN = ("train", "digits:digits", "--epochs", str(EPOCHS), "--metric", "accuracy")


class Version:
    """A version of the package.

    folder   where its commands run and write
    """

    def __init__(self, name: str, tree: Path, folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(tree.resolve() / "src"), str(HERE))),
            "DOVETAIL_CACHE": str(folder / "cache"),
        }

    def seconds_of(self, *arguments: str, program: tuple[str, ...] = ("-m", "dovetail")) -> float:
        """The seconds that a command takes. Raises `CalledProcessError` if it fails."""
        began = time.monotonic()
        subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=self.folder, env=self._environment, check=True, capture_output=True,
        )  # fmt: skip
        return time.monotonic() - began

    def training(self, workers: int) -> dict[str, float]:
        """Seconds of a training: as a whole, and until its first commit."""
        began = time.perf_counter()
        seconds = self.seconds_of(*TRAIN, "--workers", str(workers), "--history", "history.json")
        history = json.loads((self.folder / "history.json").read_text())
        # All processes of a machine count from one moment.
        first_commit = history["meta"]["origin"] + min(history["commits"]["seconds"]) - began
        name = f"train, {workers} workers"
        return {name: seconds, f"{name}: first commit": first_commit}


Command = tuple[str, Callable[[], dict[str, float]]]


def commands(version: Version) -> list[Command]:
    """(name, what runs it and returns name -> seconds) of all that a round runs."""

    def one(name: str, *arguments: str, **program: tuple[str, ...]) -> Command:
        return name, lambda: {name: version.seconds_of(*arguments, **program)}

    return [
        one("--help", "--help"),
        one("train --help", "train", "--help"),
        one("wrong command", "plan", "zoo:none"),
        one("import torch", program=("-c", "import torch")),
        one("plan", *PLAN),
        one("optimize", "60s", program=(str(HERE / "optimized.py"),)),
        one("first step plainly", "1", program=(str(HERE / "digits.py"),)),
        one("digits plainly", program=(str(HERE / "digits.py"),)),
        ("train, 2 workers", lambda: version.training(2)),
        ("train, 4 workers", lambda: version.training(4)),
        # A version whose plans do not keep their graph captures the model again.
        one("report", "report", "plan.json", "--out", "plan.html"),
        one("export", "export", "plan.json", "--to", "trace", "--out", "trace.json"),
        one("run", "run", "plan.json", MODEL, "--steps", "2"),
    ]


def main() -> None:
    parser = parser_of(__doc__, rounds=5, out=None, only="")
    parser.add_argument("--version", action="append", help="NAME=TREE; by default now=this one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        versions = []
        for text in arguments.version or [f"now={ROOT}"]:
            name, _, tree = text.partition("=")
            versions.append(Version(name, Path(tree), Path(folder) / name))
        found: dict[str, dict[str, list[float]]] = {version.name: {} for version in versions}
        for version in versions:
            version.seconds_of(
                "plan", MODEL, "--machine", "here/2", "--placer", "balanced", "--no-compile",
                "--out", "plan.json",
            )  # fmt: skip
        for number in range(arguments.rounds + 1):
            for calls in zip(*map(commands, versions), strict=True):
                for version, (name, call) in zip(versions, calls, strict=True):
                    if not any(part in name for part in arguments.only.split(";")):
                        continue
                    for name, seconds in _seconds(call).items():
                        if number:
                            found[version.name].setdefault(name, []).append(seconds)
            say(f"round {number} of {arguments.rounds}")
    rows = [
        (name, *(with_range(seconds[name], unit=" s", to="-") for seconds in found.values()))
        for name in next(iter(found.values()))
    ]
    print(table(("", *found), rows))
    keep_json(arguments.out, {"rounds": arguments.rounds, "seconds": found})


def _seconds(call: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        return call()
    except subprocess.CalledProcessError as error:
        if "zoo:none" in error.cmd:
            return {}
        say(error.stderr.decode())
        raise


if __name__ == "__main__":
    main()
