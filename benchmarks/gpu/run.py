"""Everything that is claimed of GPUs, in order of value, within a limit of time.

    python benchmarks/gpu/run.py --minutes 25 --out DIR [--only correctness,plans]

Each part is a process of its own with a limit of time. It writes DIR/PART.json, or DIR/PART.txt
where it has no results of its own, as soon as it has them. What fails does not stop the others. A
part that is done is not run again, so a run that was cut off goes on where it was. DIR/status.json
says how each part ended, on which GPU and with which torch.

It needs Python 3.11, torch with CUDA and dovetail installed. Optional packages that are absent are
named in status.json.

    python benchmarks/gpu/run.py --docs docs/gpus.md --out benchmarks/gpu/results

writes the page that says which parts a GPU has seen.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import ROOT, among, keep_json, parser_of

HERE = Path(__file__).parent
OPTIONAL = ("pytest", "hypothesis", "onnx", "transformers", "accelerate", "ortools", "pymetis")


@dataclass(frozen=True)
class Part:
    """What is run: `{out}` stands for the file of its results, and minutes are its limit."""

    claim: str
    command: tuple[str, ...]
    minutes: float


PARTS = {
    "correctness": Part(
        "random placements on one GPU as two devices, and on the CPU and a GPU, give the numbers "
        "of one process on the CPU, to 1e-10 in float64",
        ("benchmarks/gpu/correctness.py", "--out", "{out}"),
        5,
    ),
    "tests": Part(
        "the tests that need a GPU pass", ("-m", "pytest", "-q", "-m", "gpu", "tests"), 4
    ),
    "plans": Part(
        "plans on a GPU are as fast as eager, `torch.compile` and its mode reduce-overhead",
        ("benchmarks/gpu/plans.py", "--out", "{out}"),
        8,
    ),
    "fidelity": Part(
        "predicted seconds are within 10 % of measured ones",
        (
            "benchmarks/fidelity/run.py", "--machine", "here/gpu*2", "--repeats", "2",
            "--only", "rnnlm", "--csv", "{out}.csv",
        ),
        3,
    ),
    "stages": Part(
        "schedules of stages are faster than one stream as a CUDA graph: Inception-V3 1.25 x, "
        "NASNet 1.3 x",
        ("benchmarks/stages/gpu.py", "--out", "{out}"),
        8,
    ),
    "policies": Part(
        "GDP's policy learns on a GPU",
        ("benchmarks/learned/gpu.py", "--device", "cuda", "--seconds", "20"),
        3,
    ),
    "trainer": Part(
        "four asynchronous workers on one GPU, beside one process and torch's DDP",
        ("benchmarks/gpu/trainer.py", "--out", "{out}"),
        4,
    ),
    "largest": Part(
        "with the CPU's help a plan runs models of up to 4 x the memory that the GPU may use, "
        "beside accelerate's `device_map=\"auto\"`",
        ("benchmarks/gpu/largest.py", "--out", "{out}"),
        5,
    ),
}  # fmt: skip


def card() -> dict[str, str]:
    """What the GPU and torch are called; raises SystemExit where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU here")
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def run_part(name: str, part: Part, out: Path, left_seconds: float) -> dict[str, object]:
    """Run a part; return how it ended."""
    command = [text.replace("{out}", str(out / f"{name}.json")) for text in part.command]
    limit = min(60 * part.minutes, left_seconds)
    began = time.monotonic()
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with (out / f"{name}.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
            ended = "done" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            # Its workers end with it.
            process.kill()
            process.wait()
            ended = f"ended after {limit:.0f} s"
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1)}


def page(results: Path) -> str:
    """The text of docs/gpus.md, from what is in the folder of results."""
    path = results / "status.json"
    status = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    lines = [
        "# GPUs",
        "",
        "`benchmarks/gpu/run.py` writes this page from its results. It says what a GPU has seen of "
        "the code for GPUs. The tests of the suite run the same code on a CUDA that the CPU plays "
        "(`tests/support/played_cuda.py`). It finds missing waits of works and copies, and in "
        "steps without graphs of the freeing of memory. Between GPUs of several hosts gloo plays "
        "NCCL there, and no part below needs two GPUs.",
        "",
    ]
    if not status["parts"]:
        lines.append("**No part has run on a GPU yet.**")
    else:
        lines.append(
            f"{status['gpu']}, torch {status['torch']}, {status['date']}. The figures are in "
            "[benchmarks/gpu](../benchmarks/gpu/README.md)."
        )
    lines += ["", "| part | what is claimed | on a GPU |", "| --- | --- | --- |"]
    for name, part in PARTS.items():
        ran = status["parts"].get(name)
        said = "not run" if ran is None else f"{ran['ended']} ({ran['seconds']:.0f} s)"
        lines.append(f"| {name} | {part.claim} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, out=HERE / "results")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--only", type=among(PARTS), default=[], help="parts, with commas")
    parser.add_argument("--docs", type=Path, help="only write this page from the results")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if arguments.docs:
        arguments.docs.write_text(page(out), encoding="utf-8")
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / "status.json"
    status = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    status |= card() | {"absent": [name for name in OPTIONAL if find_spec(name) is None]}
    ends = time.monotonic() + 60 * arguments.minutes
    for name in arguments.only or PARTS:
        if status["parts"].get(name, {}).get("ended") == "done":
            print(f"{name}: done before", flush=True)
            continue
        if (left := ends - time.monotonic()) <= 0:
            print(f"{name}: no time left", flush=True)
            continue
        status["parts"][name] = run_part(name, PARTS[name], out, left)
        print(name, status["parts"][name], flush=True)
        keep_json(path, status)


if __name__ == "__main__":
    main()
