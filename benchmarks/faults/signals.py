"""Signals at random moments to commands and to their processes.

    python benchmarks/faults/signals.py --trials 1000 --out signals.json

A trial starts a command, waits a random part of the time that it takes undisturbed (imports
included), and sends a signal to the command itself or to one of its processes, at random:

    INT    to the command, as Ctrl-C does: it ends by itself, with 130 or with what it has so far
    TERM   to the command: it ends
    KILL   to the command or to one of its processes
    STOP   to the command, which goes on after a second, or to one of its processes

Of each trial it is asked that the command ends in time, that none of its processes is left, that
nothing is left in shared memory or in the temporary folder, that no file is half written, and that
no traceback is printed. What is judged follows from the seed but for the moment itself.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.runtime.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tests.support.small_models:trained"
MARK = "DOVETAIL_TRIAL"
"""The name of a variable in the environment of all processes of a trial."""
END_SECONDS = 60.0
"""A command ends within this time after a signal."""
LEFT_SECONDS = 6.0
"""Its processes are gone within this time after its end."""
PATIENCE_SECONDS = 5
"""What a command that may wait for a silent process is told."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", MODEL, "--machine", "here/2", "--budget", "300e", "--out", "plan.json"),
    "run": ("run", "given.json", MODEL, "--steps", "300"),
    "schedule": ("schedule", "zoo:squeezenet_1_1?batch=1", "--device", "v100"),
    "learn": (
        "learn", "one", MODEL, "--train", "adam", "--machine", "2 x p100 + haswell",
        "--controllers", "2", "--trials", "128", "--out", "plan.json",
        "--policy-out", "p.safetensors",
    ),
    "train": (
        "train", "tests.support.trained_models:quadrants", "--workers", "2", "--epochs", "30",
        "--backend", "processes", "--patience", str(PATIENCE_SECONDS), "--folder", "run",
    ),
    "train threads": (
        "train", "tests.support.trained_models:quadrants", "--workers", "2", "--epochs", "30",
        "--backend", "threads",
    ),
}  # fmt: skip
ALLOWED: dict[str, tuple[int, ...]] = {
    "INT": (0, 130),
    "TERM": (0, 130, 143, -signal.SIGTERM),
    "KILL": (-signal.SIGKILL, 0),
    "STOP": (0,),
}
"""Signal to the command itself -> the statuses that it may end with."""


@dataclass(frozen=True)
class Trial:
    """A command, the moment as a share of its usual time, the signal, and the number of the process
    that gets it: 0 for the command itself, else one of its processes."""

    number: int
    command: str
    share: float
    signal: str
    target: int


def trial_of(seed: int, number: int) -> Trial:
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(("INT", "INT", "TERM", "KILL", "STOP"))
    target = 0 if kind in ("INT", "TERM") else rng.choice((0, rng.randint(1, 1 << 30)))
    return Trial(number, rng.choice(list(COMMANDS)), rng.random(), kind, target)


def processes_of(mark: str) -> list[int]:
    """The living processes with this mark in their environment, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            own = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{MARK}={mark}".encode() in own and state != "Z":
                found.append(int(entry.name))
    return sorted(found)


class Trials:
    """Runs trials in one folder.

    usual   command -> seconds that it takes undisturbed
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.usual: dict[str, float] = {}
        self.temporary = folder / "tmp"
        self.plan = folder / "given.json"

    def prepare(self) -> None:
        """Run each command undisturbed: twice, as the first one fills the caches."""
        self.command(("plan", MODEL, "--machine", "here/2", "--budget", "50e", "--no-compile",
                      "--out", str(self.plan)), "prepare")  # fmt: skip
        for name, arguments in COMMANDS.items():
            for _ in range(2):
                began = time.monotonic()
                self.command(arguments, "prepare")
                self.usual[name] = time.monotonic() - began

    def start(self, arguments: tuple[str, ...], mark: str) -> tuple[subprocess.Popen[str], Path]:
        """Start a command in a new folder."""
        self.temporary.mkdir(exist_ok=True)
        there = Path(tempfile.mkdtemp(dir=self.folder, prefix="there-"))
        if self.plan.exists():
            shutil.copy(self.plan, there)
        environment = os.environ | {
            MARK: mark,
            "DOVETAIL_CACHE": str(self.cache),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "dovetail", *arguments],
            cwd=there, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, process_group=0,
        )  # fmt: skip
        return process, there

    def command(self, arguments: tuple[str, ...], mark: str) -> None:
        process, there = self.start(arguments, mark)
        printed, _ = process.communicate()
        shutil.rmtree(there)
        if process.returncode:
            raise SystemExit(f"dovetail {' '.join(arguments)}:\n{printed}")

    def run(self, trial: Trial) -> str:
        """What is wrong with the trial; "" for nothing."""
        mark = f"{os.getpid()}-{trial.number}"
        shared = set(os.listdir("/dev/shm"))
        process, there = self.start(COMMANDS[trial.command], mark)
        try:
            found = self._judge(trial, process, mark, there, shared)
        finally:
            for pid in processes_of(mark):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(there, ignore_errors=True)
            shutil.rmtree(self.temporary, ignore_errors=True)
        return found

    def _judge(
        self, trial: Trial, process: subprocess.Popen[str], mark: str, there: Path, shared: set[str]
    ) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(trial.share * self.usual[trial.command])
        number = getattr(signal, f"SIG{trial.signal}")
        others = [pid for pid in processes_of(mark) if pid != process.pid]
        target = process.pid
        if trial.target and others:
            target = others[trial.target % len(others)]
        with suppress(OSError):
            os.kill(target, number)
        if trial.signal == "STOP" and target == process.pid:
            time.sleep(1)
            with suppress(OSError):
                os.kill(target, signal.SIGCONT)
        try:
            printed, _ = process.communicate(timeout=END_SECONDS + self.usual[trial.command])
        except subprocess.TimeoutExpired:
            return "it does not end"
        if "Traceback" in printed:
            return f"it prints a traceback: {printed.strip().splitlines()[-1]}"
        status = process.returncode
        if target == process.pid and status not in ALLOWED[trial.signal]:
            return f"exit status {status}: {printed.strip()[-200:]}"
        if target != process.pid and status not in (0, 1):
            return f"exit status {status}: {printed.strip()[-200:]}"
        killed = trial.signal in ("KILL", "TERM") and target == process.pid
        return self._left(mark, there, shared, killed=killed)

    def _left(self, mark: str, there: Path, shared: set[str], *, killed: bool) -> str:
        """What is left behind; "" for nothing. A command that was killed cannot clean up."""
        ends = time.monotonic() + LEFT_SECONDS
        while (left := processes_of(mark)) and time.monotonic() < ends:
            time.sleep(0.05)
        if left:
            return f"{len(left)} processes are left"
        if more := set(os.listdir("/dev/shm")) - shared:
            return f"left in shared memory: {sorted(more)[0]}"
        if not killed and (rest := os.listdir(self.temporary)):
            return f"left in the temporary folder: {rest[0]}"
        half = [p.name for p in there.rglob("*") if p.name.startswith(".") and p.is_file()]
        if half and not killed:
            return f"half a file is left: {half[0]}"
        for path in there.glob("*.json"):
            try:
                json.loads(path.read_text())
            except ValueError:
                return f"{path.name} is half written"
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of all trials")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began, counts, wrong = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        trials.prepare()
        for number in range(arguments.first, arguments.first + arguments.trials):
            if time.monotonic() - began > arguments.seconds:
                break
            trial = trial_of(arguments.seed, number)
            found = trials.run(trial)
            counts[f"{trial.signal} {trial.command}"] += 1
            if found:
                wrong.append({**vars(trial), "found": found})
                print(wrong[-1], flush=True)
            result: dict[str, Any] = {
                "trials": sum(counts.values()), "wrong": wrong, "of": dict(sorted(counts.items())),
                "usual_seconds": {name: round(s, 2) for name, s in trials.usual.items()},
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            if arguments.out is not None:
                write_atomically(arguments.out, json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
