"""How long `dovetail plan` takes, from outside, beside the budget that it is given.

    python benchmarks/own_loop/budgets.py --write
    python benchmarks/own_loop/budgets.py --version before=OTHER_TREE --version now=. --budgets 10s

Each case is planned on `here` and `here/2` with each budget, three times: from an empty cache, then
the same command, then with --again. The C++ runner, and what numba compiles once for a machine, are
there before. A version is a folder with `src/`; versions take turns. One of before --again has no
third run. A command that takes longer than --seconds is ended.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import ROOT, host, keep_json, parser_of, say, show, table

HERE = Path(__file__).resolve().parent
DISTILBERT = {
    "architectures": ["DistilBertForSequenceClassification"], "model_type": "distilbert",
    "dim": 128, "hidden_dim": 512, "n_layers": 2, "n_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 128,
}  # fmt: skip
"""A small DistilBERT's configuration."""
CASES = {
    "squeezenet": "zoo:squeezenet_1_1?batch=1&size=64",
    "distilbert": "transformers:distilbert.json?tokens=32",
}
RUNS = {"first": (), "second": (), "again": ("--again",)}


def timed(
    tree: Path, folder: Path, words: tuple[str, ...], limit_seconds: float
) -> dict[str, object]:
    """Seconds of a command, and which way its plan runs; inf where it was ended."""
    environment = os.environ | {
        "PYTHONPATH": str(tree.resolve() / "src"),
        "DOVETAIL_CACHE": str(folder / "cache"),
    }
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dovetail", "plan", *words, "--json"],
            cwd=folder, env=environment, capture_output=True, timeout=limit_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"seconds": float("inf"), "way": "ended"}
    if done.returncode:
        return {"seconds": float("inf"), "way": done.stderr.decode().splitlines()[-1]}
    plan = json.loads(done.stdout)
    return {
        "seconds": time.monotonic() - began, "way": plan["way"], "notes": plan["notes"],
        "measured": plan["measured"],
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, seconds=400.0, out=None, write=False)
    parser.add_argument("--version", action="append", help="NAME=FOLDER; default now=.")
    parser.add_argument("--budgets", default="3s,10s,30s")
    parser.add_argument("--machines", default="here,here/2")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    versions = dict(text.split("=", 1) for text in options.version or [f"now={ROOT}"])
    # The runner is built once, for all caches.
    from dovetail.runtime.files import cache_folder
    from dovetail.runtime.native import SWITCH

    os.environ.setdefault(SWITCH, str(cache_folder() / "native"))
    rows, kept = [], []
    with tempfile.TemporaryDirectory() as name:
        for tree in versions.values():
            words = (CASES["squeezenet"], "--machine", "here/2", "--budget", "40e", "--no-compile")
            timed(Path(tree), Path(name), words, options.seconds)
        for case in options.cases.split(","):
            for machine in options.machines.split(","):
                for budget in options.budgets.split(","):
                    for version, tree in versions.items():
                        folder = Path(tempfile.mkdtemp(dir=name))
                        (folder / "distilbert.json").write_text(json.dumps(DISTILBERT))
                        words = (CASES[case], "--machine", machine, "--budget", budget)
                        cells: list[str] = []
                        for run, more in RUNS.items():
                            if (
                                run == "again"
                                and not (Path(tree) / "src/dovetail/pipeline/kept.py").exists()
                            ):
                                cells.append("")
                                continue
                            found = timed(Path(tree), folder, (*words, *more), options.seconds)
                            kept.append({
                                "case": case, "machine": machine, "budget": budget, "run": run,
                                "version": version, **found,
                            })  # fmt: skip
                            cells.append(f"{found['seconds']:.1f} s, {found['way']}")
                        rows.append((case, machine, budget, version, *cells))
                        say(" | ".join(rows[-1]))
                        keep_json(options.out, kept)
    show(
        table(("case", "machine", "budget", "version", *RUNS), rows) + f"\n\n{host()}",
        HERE / "README.md" if options.write else None,
        "budgets",
    )


if __name__ == "__main__":
    main()
