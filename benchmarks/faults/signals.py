"""Sends signals to commands and to their processes, at random moments.

    python benchmarks/faults/signals.py --work FOLDER --out signals.json --trials 1000
    python benchmarks/faults/signals.py --work FOLDER --only 17
    python benchmarks/faults/signals.py --work FOLDER --command run --signal INT --trials 200

A trial starts a command, waits a random part of the time that it takes undisturbed, its imports
included, and sends one signal to the command or to one of its processes:

    INT    to the command's group, as Ctrl-C does: status 130 and the line "interrupted", or the
           best so far; TERM: it ends
    KILL   of the command: its processes end by themselves
    PAUSE  of any: STOP, and CONT after a second: nothing happens
    TERM, KILL of a process: the command goes on, or ends with an error that names it
    STOP   of a process, for ever: the command notices, names it, and goes on or ends

Asked of each trial: the command ends, with a status that fits; no traceback; none of its processes
is left; nothing is left in shared memory or in the temporary folder; no output is half written, and
one that was there before is whole; a killed training with a folder is resumed and counts all
samples. Command, signal, role and moment follow from the seed and the trial's number. The moment is
a share of a time that differs from machine to machine, so a repeated trial need not fail again.

A result that is there is continued. FOLDER keeps the caches and how long commands take.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import ROOT, keep_json, parser_of

MARK = "DOVETAIL_TRIAL"
"""A variable in the environment of all processes of a trial."""
END_SECONDS, TIMES = 90.0, 5
"""A command ends this long after a signal, and so many times the time that it takes undisturbed. It
is generous, as the machine may be loaded."""
LEFT_SECONDS = 6.0
"""The processes of a command are gone this long after its end."""
PATIENCE_SECONDS = 20.0
"""A command that goes on for so long after one of its processes was stopped has to name it."""
LEASE_SECONDS = 3
EPOCHS, SAMPLES = 30, 240

MODEL = "tests.support.small_models:trained"
TRAIN = ("train", "tests.support.trained_models:quadrants", "--workers", "2", "--epochs",
         str(EPOCHS))  # fmt: skip
ANALYTIC = "2 x p100 + haswell"


@dataclass(frozen=True)
class Command:
    """A command line, the files that it writes, and how often it is drawn."""

    arguments: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    weight: int = 2


COMMANDS = {
    "plan": Command(
        ("plan", MODEL, "--machine", ANALYTIC, "--budget", "100e", "--out", "plan.json"),
        ("plan.json",),
    ),
    "plan measured": Command(
        ("plan", MODEL, "--machine", "here/2", "--budget", "20e", "--no-compile", "--placer",
         "single", "--out", "plan.json"),
        ("plan.json",), 1,
    ),
    "run": Command(("run", "given.json", MODEL, "--steps", "4000"), (), 3),
    "schedule": Command(
        ("schedule", "tests.support.small_models:branches", "--device", "v100,cpu", "--rounds",
         "5"),
        (), 2,
    ),
    "learn": Command(
        ("learn", "one", MODEL, "--train", "adam", "--machine", ANALYTIC, "--controllers", "2",
         "--trials", "64", "--out", "plan.json", "--policy-out", "p.safetensors"),
        ("plan.json", "p.safetensors"),
    ),
    "train": Command(
        (*TRAIN, "--lease", f"{LEASE_SECONDS}s", "--folder", "run", "--out", "w.pt"), ("w.pt",), 3
    ),
    "train threads": Command((*TRAIN, "--backend", "threads", "--out", "w.pt"), ("w.pt",), 1),
}  # fmt: skip
PREPARE = ("plan", MODEL, "--machine", "here/2", "--budget", "20e", "--no-compile", "--placer",
           "single", "--pin", "left*=cpu0", "--pin", "right*=cpu1", "--out")  # fmt: skip
"""Makes the plan that `run` runs, on both devices."""
COORDINATOR = "coordinator"
ROLES = {
    "processes.serve": "server",
    "processes.worke": "worker",
    "executors.worke": "executor",
    "executors.plain": "executor",
    "costs.measured": "evaluator",
}
"""The begin of a process's name, or what its command line contains -> its role."""
WORKING = set(ROLES.values())
WORK_SHARE = 0.4
"""Half of the signals to a process come after the first one that works has started, in this part of
the command's time. The other half may come at any moment."""
NAMES = {
    "server": "server",
    "worker": "worker",
    "executor": "device|process",
    "evaluator": "device|process",
    "fork server": "fork server|device|process|worker|server",
    "other": "",
}
"""Role -> what a message about such a process contains. Processes die with their fork server."""
ALLOWED = {"INT": (0, 130), "TERM": (0, 143, -signal.SIGTERM), "KILL": (0, -signal.SIGKILL)}
"""Signal to the command itself -> the statuses that it may end with."""


@dataclass(frozen=True)
class Trial:
    """One signal to one process.

    share    the moment, as a share of the time that the command takes undisturbed
    on_role  whether one of the command's processes gets it, if there is one
    choice   draws the role from those that live at that moment, and the process
    before   the outputs exist before the command starts
    """

    number: int
    command: str
    share: float
    signal: str
    on_role: bool
    choice: int
    before: bool


def trial_of(seed: int, number: int, command: str = "", to_itself: str = "") -> Trial:
    """The trial of this number; with `to_itself` this signal to the command, and with `command`
    this command."""
    rng = random.Random(f"{seed} {number}")
    names = [name for name, each in COMMANDS.items() for _ in range(each.weight)]
    drawn, on_role = rng.choice(names), rng.random() < 0.55 and not to_itself
    command = command or drawn
    kinds = ("TERM", "KILL", "KILL", "STOP", "STOP", "PAUSE", "INT")
    kind = rng.choice(kinds if on_role else ("INT", "INT", "INT", "TERM", "KILL", "PAUSE"))
    # The processes of a command come in its second half; its imports in the first.
    share = rng.uniform(0.25, 1.0) if on_role else rng.random()
    kind = to_itself or kind
    return Trial(number, command, share, kind, on_role, rng.getrandbits(30), rng.random() < 0.5)


# The processes of a trial


def state_of(pid: int) -> str:
    """The state of a process, such as "S"; "" if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def processes_of(mark: str) -> list[int]:
    """The living processes with this mark in their environment, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            marked = f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes()
            if marked and state_of(int(entry.name)) not in ("Z", ""):
                found.append(int(entry.name))
    return sorted(found)


def role_of(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "other"
    for begin, role in ROLES.items():
        if name.startswith(begin) or ("child.py" in line and begin in line):
            return role
    if "fork_server.py" in line:
        return "fork server"
    return COORDINATOR if "-m dovetail" in line else "other"


@dataclass
class Found:
    """What a trial has come to. `wrong` is "" if it is as it should be; `left` is what a command
    that was killed has left behind, as nobody was there to remove it."""

    role: str = COORDINATOR
    wrong: str = ""
    left: str = ""


@dataclass
class Running:
    """A command that was started, with its folders and what it prints."""

    process: subprocess.Popen[bytes]
    mark: str
    there: Path
    temporary: Path
    printed_to: Path

    def printed(self) -> str:
        return self.printed_to.read_text(errors="replace")

    def ended(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass
class Trials:
    """Runs trials below one folder.

    usual   command -> seconds that it takes undisturbed
    """

    work: Path
    usual: dict[str, float] = field(default_factory=dict)

    def prepare(self, names: Collection[str]) -> None:
        """Make the plan that `run` runs; run these commands twice, the first time for the
        caches."""
        self.work.mkdir(parents=True, exist_ok=True)
        given, times = self.work / "given.json", self.work / "usual.json"
        if not given.exists():
            self._undisturbed((*PREPARE, str(given)))
        if times.exists():
            self.usual = json.loads(times.read_text())
        for name in names:
            arguments = COMMANDS[name].arguments
            if name not in self.usual:
                self._undisturbed(arguments)
                began = time.monotonic()
                self._undisturbed(arguments)
                self.usual[name] = round(time.monotonic() - began, 2)
                times.write_text(json.dumps(self.usual))

    def _undisturbed(self, arguments: tuple[str, ...]) -> None:
        running = self.start(arguments, "prepare")
        running.process.wait()
        if running.process.returncode:
            raise SystemExit(f"dovetail {' '.join(arguments)}:\n{running.printed()}")
        self.remove(running)

    def start(self, arguments: tuple[str, ...], mark: str, at: Path | None = None) -> Running:
        """Start a command, in a new folder or in this one."""
        temporary, there = self.work / f"tmp-{mark}", at or self.work / f"there-{mark}"
        for folder in (temporary, there):
            folder.mkdir(exist_ok=True)
        if (self.work / "given.json").exists():
            shutil.copy(self.work / "given.json", there)
        environment = os.environ | {
            MARK: mark,
            "DOVETAIL_CACHE": str(self.work / "cache"),
            "TMPDIR": str(temporary),
            # A process that aborts says where its threads were.
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        printed_to = self.work / f"printed-{mark}"
        # What it prints goes to a file: a pipe would stay open as long as any of its processes.
        with printed_to.open("wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "dovetail", *arguments],
                cwd=there, env=environment, stdin=subprocess.DEVNULL, stdout=printed,
                stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        return Running(process, mark, there, temporary, printed_to)

    def remove(self, running: Running) -> None:
        """End what is left of a command, and remove its folders."""
        for pid in processes_of(running.mark):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        running.process.wait()
        for folder in (running.there, running.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        running.printed_to.unlink(missing_ok=True)

    def run(self, trial: Trial) -> Found:
        command, mark = COMMANDS[trial.command], f"{os.getpid()}-{trial.number}"
        shared = _shared()
        there = self.work / f"there-{mark}"
        there.mkdir()
        for name in command.outputs if trial.before else ():
            (there / name).write_bytes(BEFORE)
        running = self.start(command.arguments, mark)
        found = Found()
        try:
            found.wrong = self._judge(trial, running, found, shared)
            if found.wrong:
                found.wrong += f" | {_last_lines(running.printed())}"
        finally:
            self.remove(running)
        return found

    def _judge(self, trial: Trial, running: Running, found: Found, shared: set[str]) -> str:
        usual, process = self.usual[trial.command], running.process
        if trial.on_role and trial.choice % 2:
            self._await_work(running)
            usual *= WORK_SHARE
        with suppress(subprocess.TimeoutExpired):
            process.wait(trial.share * usual)
        usual = self.usual[trial.command]
        target = self._target(trial, running, found)
        sent = time.monotonic()
        _send(trial, process.pid, target)
        if not running.ended(END_SECONDS + TIMES * usual):
            return f"it does not end; its processes: {_states(running.mark)}"
        seconds, printed = time.monotonic() - sent, running.printed()
        if "Traceback" in printed or "Exception ignored" in printed or "leaked" in printed:
            return "it prints a traceback"
        itself = target == process.pid
        wrong = _of_status(trial.signal, process.returncode, printed, itself)
        if not wrong and not itself and trial.signal == "STOP" and seconds > PATIENCE_SECONDS:
            named = re.search(NAMES[found.role], printed, re.IGNORECASE)
            wrong = "" if named else f"it names no {found.role} after {seconds:.0f} s"
        return wrong or self._of_rest(trial, running, found, shared, itself)

    def _await_work(self, running: Running) -> None:
        """Wait until one of the command's processes does its work."""
        while running.process.poll() is None:
            if any(role_of(pid) in WORKING for pid in processes_of(running.mark)):
                return
            time.sleep(0.05)

    def _target(self, trial: Trial, running: Running, found: Found) -> int:
        by_role: dict[str, list[int]] = {}
        for pid in processes_of(running.mark) if trial.on_role else ():
            if pid != running.process.pid:
                by_role.setdefault(role_of(pid), []).append(pid)
        if not by_role or (trial.signal == "STOP" and set(by_role) == {"other"}):
            return running.process.pid
        found.role = sorted(by_role)[trial.choice // 2 % len(by_role)]
        living = by_role[found.role]
        return living[trial.choice // 7 % len(living)]

    def _of_rest(
        self, trial: Trial, running: Running, found: Found, shared: set[str], itself: bool
    ) -> str:
        """What is wrong with what the command leaves behind."""
        until = time.monotonic() + LEFT_SECONDS
        while processes_of(running.mark) and time.monotonic() < until:
            time.sleep(0.05)
        if states := _states(running.mark):
            return f"processes are left: {states}"
        if more := _shared() - shared:
            return f"left in shared memory: {sorted(more)[0]}"
        left = sorted(os.listdir(running.temporary)) + [
            p.name for p in running.there.rglob("*") if p.name.startswith(".") and p.is_file()
        ]
        if left and itself and running.process.returncode == -signal.SIGKILL:
            found.left = re.sub(r"\w{8}$", "*", left[0])
        elif left:
            return f"left in a folder: {left[0]}"
        ends_well = running.process.returncode == 0
        for name in COMMANDS[trial.command].outputs:
            if wrong := _of_output(running.there / name, ends_well, trial.before):
                return wrong
        folder = running.there / "run"
        killed = itself and trial.signal in ("KILL", "TERM")
        if killed and folder.exists() and running.process.returncode:
            return self._resume(trial, running)
        return ""

    def _resume(self, trial: Trial, running: Running) -> str:
        """What is wrong with going on after the kill."""
        arguments = (*COMMANDS[trial.command].arguments, "--resume", "--json")
        again = self.start(arguments, f"{running.mark}-again", running.there)
        try:
            if not again.ended(END_SECONDS + TIMES * self.usual[trial.command]):
                return "the resumed run does not end"
            printed = again.printed()
            if again.process.returncode:
                return f"the resumed run ends with {again.process.returncode}: {printed[-300:]}"
            told = json.loads(printed[printed.index('{"function"') :].splitlines()[0])
            if told["samples"] != EPOCHS * SAMPLES:
                return f"the resumed run counts {told['samples']} samples"
        finally:
            self.remove(again)
        return ""


def _of_output(path: Path, ends_well: bool, before: bool) -> str:
    """What is wrong with a file that a command writes if it ends well."""
    if not path.exists():
        return f"{path.name} is gone" if before or ends_well else ""
    if path.read_bytes() == BEFORE:
        return f"{path.name} was not written" if ends_well else ""
    return "" if WHOLE[path.suffix](path) else f"{path.name} is half written"


BEFORE = b'{"an earlier": "output"}'


def _is_json(path: Path) -> bool:
    with suppress(ValueError):
        return bool(json.loads(path.read_bytes()))
    return False


def _is_safetensors(path: Path) -> bool:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    with suppress(ValueError):
        entries = json.loads(content[8 : 8 + size])
        ends = [e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"]
        return len(content) == 8 + size + max(ends)
    return False


def _is_weights(path: Path) -> bool:
    return zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip() is None


WHOLE: dict[str, Callable[[Path], bool]] = {
    ".json": _is_json,
    ".safetensors": _is_safetensors,
    ".pt": _is_weights,
}
"""The end of a file's name -> whether such a file is whole."""


def _send(trial: Trial, command: int, target: int) -> None:
    with suppress(OSError):
        if trial.signal == "INT" and target == command:
            os.killpg(command, signal.SIGINT)
        elif trial.signal in ("STOP", "PAUSE"):
            os.kill(target, signal.SIGSTOP)
        else:
            os.kill(target, getattr(signal, f"SIG{trial.signal}"))
    # Nobody can notice that the command itself has stopped.
    if trial.signal == "PAUSE" or (trial.signal == "STOP" and target == command):
        time.sleep(1)
        with suppress(OSError):
            os.kill(target, signal.SIGCONT)


def _of_status(kind: str, status: int, printed: str, itself: bool) -> str:
    lines = printed.strip().splitlines() or [""]
    if itself:
        # Python itself has not begun to handle Ctrl-C.
        if kind == "INT" and status == -signal.SIGINT and not printed:
            return ""
        if status not in ALLOWED.get(kind, (0,)):
            return f"exit status {status}"
        if status == 130 and (lines[-1] != "interrupted" or printed.count("interrupted") > 1):
            return "130 without one line"
        return ""
    if kind in ("PAUSE", "INT") and status:
        return f"exit status {status}"
    if status not in (0, 1):
        return f"exit status {status}"
    if status == 1 and not lines[-1].startswith("error: "):
        return "1 without a line of the error"
    return ""


def _states(mark: str) -> str:
    return ", ".join(f"{role_of(pid)} {state_of(pid)}" for pid in processes_of(mark))


def _last_lines(printed: str) -> str:
    return " / ".join(line.strip()[:200] for line in printed.strip().splitlines()[-4:])


# The result


def _shared() -> set[str]:
    """What is in shared memory, but for what a fuzzer that runs beside has there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("fuzz-")}


def main() -> None:
    parser = parser_of(__doc__, trials=1000, seed=0, seconds=float("inf"), out=None)
    parser.add_argument("--work", type=Path, required=True, help="folder of caches and trials")
    parser.add_argument("--only", type=int, help="run this trial alone, and write no result")
    parser.add_argument("--command", choices=COMMANDS, default="", help="this command alone")
    parser.add_argument("--signal", choices=ALLOWED, default="", help="this signal to it alone")
    arguments = parser.parse_args()
    # What a shell starts in the background ignores Ctrl-C, and so would the commands.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trials = Trials(arguments.work.resolve())
    trials.prepare([arguments.command] if arguments.command else COMMANDS)
    began = time.monotonic()
    if arguments.only is not None:
        trial = trial_of(arguments.seed, arguments.only, arguments.command, arguments.signal)
        print(trial, trials.run(trial), sep="\n")
        return
    result: dict[str, Any] = {
        "seed": arguments.seed, "trials": 0, "seconds": 0.0, "wrong": [], "counts": {}, "left": {},
    }  # fmt: skip
    if arguments.out is not None and arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    counts, left, before = Counter(result["counts"]), Counter(result["left"]), result["seconds"]
    while result["trials"] < arguments.trials and time.monotonic() - began < arguments.seconds:
        trial = trial_of(result["seed"], result["trials"], arguments.command, arguments.signal)
        found = trials.run(trial)
        counts[f"{trial.command}, {trial.signal}, {found.role}"] += 1
        if found.left:
            left[f"{trial.command}: {found.left}"] += 1
        if found.wrong:
            line = (
                f"--only {trial.number}: {trial.command}, {trial.signal} to {found.role} at "
                f"{trial.share:.3f}: {found.wrong}"
            )
            print(line, flush=True)
            result["wrong"].append(line)
        result |= {
            "trials": result["trials"] + 1,
            "seconds": round(before + time.monotonic() - began, 1),
            "usual_seconds": trials.usual,
            "counts": dict(sorted(counts.items())),
            "left": dict(sorted(left.items())),
        }
        keep_json(arguments.out, result)
    print(f"{len(result['wrong'])} of {result['trials']} trials are wrong")
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
