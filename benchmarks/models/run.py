"""Makes the table: every model in a process of its own, with a time limit.

    python benchmarks/models/run.py [--only PATTERN] [--again] [--jobs N] [--write]

Rows are kept in rows.jsonl as they are made, and those that are there are not made again.
"""

import argparse
import fnmatch
import json
import multiprocessing
import re
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from cases import REGISTRY, Case
from markdown import fill, table
from measure import CASE_MODULES, PARTS, load_cases, measure

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
RUNS = ("inference", "sgd", "adamw")
IMPORTED_AT_FIRST_USE = ("torch._dynamo", "transformers.generation", "accelerate", "torch.optim")
"""What a case imports when it is first measured, and that takes seconds."""


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """name -> its last row."""
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return {row["name"]: row for row in rows}


def write_rows(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    ordered = [rows[name] for name in REGISTRY.cases if name in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in ordered), "utf-8")


def work(name: str, parts: list[str], folder: str, results: Connection) -> None:
    """Measure one case in a process of its own, and send its row."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_cases(folder, name)
    case = REGISTRY.cases[name]
    try:
        results.send(measure(case, parts))
    except Exception as error:
        row = {"name": case.name, "family": case.family, "expected": case.refused}
        results.send(row | {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"})


def run_all(cases: list[Case], options: argparse.Namespace) -> Any:
    """(case, row) as they end, `--jobs` at once."""
    # Importing the libraries takes longer than most models, so a server imports them once and is
    # forked for each case. This process has computed and cannot be forked: torch's threads of
    # OpenMP and of autograd do not survive that.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *CASE_MODULES, *IMPORTED_AT_FIRST_USE])
    waiting, running = list(cases), {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            case = waiting.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            args = (case.name, options.parts.split(","), options.torchvision, theirs)
            process = context.Process(target=work, args=args)
            process.start()
            theirs.close()
            running[process] = (case, mine, time.monotonic() + options.limit)
        for process, (case, mine, end) in list(running.items()):
            row: dict[str, Any] = {"name": case.name, "family": case.family}
            row["expected"] = case.refused
            if mine.poll():
                try:
                    row = mine.recv()
                except EOFError:
                    process.join()
                    row["error"] = f"the process died ({process.exitcode})"
            elif time.monotonic() < end:
                continue
            else:
                row["error"] = f"not done after {options.limit:.0f} s"
            del running[process]
            process.join(5)
            process.kill()
            yield case, row
        time.sleep(0.05)


def verdict(row: dict[str, Any]) -> str:
    """right, refused (one typed line for what is known to be unsupported), or what is wrong."""
    if "error" in row:
        return "failed"
    parts = [row[part] for part in (*RUNS, "placed") if part in row]
    if any(part.get("equal") is False for part in parts):
        return "WRONG"
    if any("crashed" in part for part in parts):
        return "crashed"
    refused = [part for part in parts if "refused" in part]
    if not refused:
        return "right"
    return "refused, as expected" if row["expected"] else "refused"


def cells(row: dict[str, Any]) -> list[str]:
    inference, training = row.get("inference", {}), row.get("adamw", row.get("sgd", {}))
    both = [inference, training]
    exports = row.get("exports", {})
    return [
        row["name"] + " *" * bool(row.get("checkpointing")),
        verdict(row),
        " / ".join(f"{p['ops']:,}" if "ops" in p else "-" for p in both),
        " / ".join(f"{p['seconds']:.1f}" if "seconds" in p else "-" for p in both),
        " / ".join(f"{p['peak_mb']}" if "peak_mb" in p else "-" for p in both),
        *(_difference(row.get(part)) for part in (*RUNS, "placed")),
        _export(exports.get("device_map")),
        _export(exports.get("split_points")),
        _pipelining(exports.get("pipelining")),
    ]


def _difference(part: dict[str, Any] | None) -> str:
    if part is None:
        return ""
    if "difference" not in part:
        return "refused" if "refused" in part else "crashed"
    text = f"{part['difference']:.0e}" if part["difference"] else "0"
    return text + (f" ({part['difference64']:.0e})" if "difference64" in part else "")


def _export(part: dict[str, Any] | None) -> str:
    if part is None:
        return ""
    return "no" if "error" in part else f"{part['entries']} on {part['devices']}"


def _pipelining(part: dict[str, Any] | None) -> str:
    if part is None:
        return ""
    return "no" if "error" in part else f"{part['stages']} stages, {part['difference']:.0e}"


HEAD = ("model", "verdict", "ops", "capture s", "MB", "inference", "SGD", "AdamW", "placed",
        "device map", "split points", "pipelining")  # fmt: skip


def report(rows: dict[str, dict[str, Any]]) -> str:
    parts = [summary(rows)]
    for family in dict.fromkeys(case.family for case in REGISTRY.cases.values()):
        own = [cells(rows[c.name]) for c in REGISTRY.cases.values()
               if c.family == family and c.name in rows]  # fmt: skip
        if own:
            parts += [f"**{family}**", table(HEAD, own)]
    troubles = [line for row in rows.values() for line in complaints(row)]
    return "\n\n".join([*parts, "Refusals and failures, word for word:", "\n".join(troubles)])


def summary(rows: dict[str, dict[str, Any]]) -> str:
    kinds: dict[str, int] = {}
    for row in rows.values():
        kinds[verdict(row)] = kinds.get(verdict(row), 0) + 1
    return f"{len(rows)} models: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))


def complaints(row: dict[str, Any]) -> list[str]:
    """One line a distinct trouble of this model."""
    found: dict[str, list[str]] = {}
    if "error" in row:
        found[row["error"]] = ["all"]
    exports = row.get("exports", {})
    named = [(name, row.get(name)) for name in PARTS] + list(exports.items())
    for name, part in named:
        if not isinstance(part, dict):
            continue
        for key in ("refused", "crashed", "error"):
            if key in part:
                found.setdefault(f"{part[key]}", []).append(name)
        if part.get("equal") is False:
            exact = f", {part['difference64']:.1e} in float64" if "difference64" in part else ""
            text = f"differs by {part['difference']:.1e}{exact}"
            found.setdefault(text, []).append(name)
    return [
        f"* {row['name']} ({', '.join(where)}): `{_short(text)}`" for text, where in found.items()
    ]


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("`", "'")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="*", help="pattern of names, several with commas")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one model")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--torchvision", default="", help="folder that torchvision is in")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--write", action="store_true", help="write the README's table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_cases("", "")
    rows = read_rows(options.rows)
    wanted = [
        case
        for case in REGISTRY.cases.values()
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.only.split(","))
        and (options.again or case.name not in rows)
    ]
    for case, row in run_all(wanted, options):
        rows[case.name] = rows.get(case.name, {}) | row if options.again else row
        print(f"{case.name}: {verdict(row)}", *complaints(row), sep="\n  ", flush=True)
        write_rows(options.rows, rows)
    print(summary(rows))
    if options.write:
        fill(HERE / "README.md", "models", report(rows))


if __name__ == "__main__":
    main()
