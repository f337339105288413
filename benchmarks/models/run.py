"""Makes the table: every model in a process of its own, with limits of time and memory.

    python benchmarks/models/run.py [--packages DIR] [--only PATTERN] [--again] [--jobs N] [--write]

Rows are kept in rows.jsonl as they are made, and those that are there are not made again. Models of
packages that are not there are skipped.
"""

import argparse
import json
import multiprocessing
import re
import resource
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from cases import REGISTRY, Case
from harness import fill, parser_of, table
from measure import CASE_MODULES, PARTS, described, load_case, load_cases, measure, wanted

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
RUNS = ("inference", "sgd", "adamw")
KINDS = ("right", "refused as expected", "refused", "failed", "wrong")
"""Verdicts. Wrong numbers without an error are worse than any error."""
IMPORTED_AT_FIRST_USE = (
    "accelerate",
    "dovetail.pipeline",
    "networkx",
    "pandas",
    "scipy.optimize",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.elastic.agent.server",
    "torch.optim",
    "transformers.generation",
    "transformers.modeling_utils",
)
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


def work(name: str, options: argparse.Namespace, results: Connection) -> None:
    """Measure one case in a process of its own, and send its row."""
    began = time.monotonic()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    most_bytes = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    load_cases()
    case = REGISTRY.cases[name]
    row: dict[str, Any] = {"name": case.name, "family": case.family, "expected": case.refused}
    try:
        row = measure(load_case(name, options.packages), options.parts.split(","))
    except ModuleNotFoundError as error:
        row["skipped"] = str(error)
    except Exception as error:
        row |= described(error)
    row["wall_s"] = round(time.monotonic() - began, 1)
    results.send(row)


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
            process = context.Process(target=work, args=(case.name, options, theirs))
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
                    row["crashed"] = f"the process died ({process.exitcode})"
            elif time.monotonic() < end:
                continue
            else:
                row["crashed"] = f"not done after {options.limit:.0f} s"
            del running[process]
            process.join(5)
            process.kill()
            yield case, row
        time.sleep(0.05)


def verdict(row: dict[str, Any]) -> str:
    """The worst of `KINDS` that a part of the row shows. What torch's pipelining does with split
    points is not ours, and does not count."""
    exports = row.get("exports", {})
    plans = [exports.get(format, {}) for format in ("device_map", "split_points")]
    parts = [row, *(row.get(part, {}) for part in (*RUNS, "placed")), exports, *plans]
    if any(part.get("equal") is False for part in parts):
        return "wrong"
    if any("crashed" in part for part in parts):
        return "failed"
    if any("refused" in part for part in parts):
        return "refused as expected" if row["expected"] else "refused"
    return "right"


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
    return "refused" if "refused" in part else f"{part['entries']} on {part['devices']}"


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
    counts = Counter(verdict(row) for row in rows.values())
    return f"{len(rows)} models: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def complaints(row: dict[str, Any]) -> list[str]:
    """One line a distinct trouble of this model."""
    found: dict[str, list[str]] = {}
    exports = row.get("exports", {})
    named = [("all", row), *((name, row.get(name)) for name in PARTS), *exports.items()]
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
    return re.sub(r"\s+", " ", text).replace("`", "'").replace("](", "] (")


def main() -> None:
    parser = parser_of(__doc__, only="*", again=False, packages="", write=False)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one model")
    parser.add_argument("--memory", type=float, default=6, help="GiB for each process of a model")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_cases()
    rows = read_rows(options.rows)
    cases = [case for case in wanted(options.only) if options.again or case.name not in rows]
    skipped = 0
    for case, row in run_all(cases, options):
        if "skipped" in row:
            skipped += 1
            print(f"{case.name}: skipped, {row['skipped']}", flush=True)
            continue
        rows[case.name] = rows.get(case.name, {}) | row if options.again else row
        print(
            f"{case.name}: {verdict(row)}, {row.get('wall_s', '-')} s",
            *complaints(row),
            sep="\n  ",
            flush=True,
        )
        write_rows(options.rows, rows)
    print(summary(rows) + f"; {skipped} skipped" * bool(skipped))
    if options.write:
        fill(HERE / "README.md", "models", report(rows))


if __name__ == "__main__":
    main()
