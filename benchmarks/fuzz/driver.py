"""Drives workers: batches of inputs, counts, failures, and smaller inputs that fail alike.

    batches ──► worker process ──► counts and failures
                   │ died, hangs or grows: the input is named, another worker goes on after it
                   ▼
                next worker

A failure is told from others by its target, its kind, the exception's type and the innermost frame
of the package.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from worker import GROWTH_BYTES, SLOW_SECONDS, STACK, Beat, Failure, stack_frame

HERE = Path(__file__).parent
TARGETS_FILE = HERE / "targets.py"
BATCH_INPUTS = 200
START_SECONDS = 180.0
"""A worker may take so long for its imports and seeds."""
MOST_INPUT_BYTES = 2**16
"""Larger inputs are not kept as files."""


@dataclass
class Counts:
    """What became of a target's inputs.

    kept_bytes    how much larger a worker's memory was at its end than after its first inputs;
                  the most of all workers
    peak_bytes    the same of the largest memory that it had
    """

    inputs: int = 0
    loaded: int = 0
    typed: int = 0
    untyped: int = 0
    slow: int = 0
    growth: int = 0
    died: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    longest_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """Inputs that did not end as they should."""
        return self.untyped + self.slow + self.growth + self.died


@dataclass
class Outcome:
    """Counts of one target, with the first input of each distinct failure."""

    target: str
    counts: Counts = field(default_factory=Counts)
    failures: dict[tuple[str, str, str, str], Failure] = field(default_factory=dict)
    occurrences: dict[tuple[str, str, str, str], int] = field(default_factory=dict)

    def add(self, failure: Failure) -> None:
        """Note a failure."""
        self.failures.setdefault(failure.signature, failure)
        self.occurrences[failure.signature] = self.occurrences.get(failure.signature, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as values that JSON can hold."""
        failures = [
            asdict(failure) | {"occurrences": self.occurrences[signature]}
            for signature, failure in self.failures.items()
        ]
        return {"target": self.target, **asdict(self.counts), "failures": failures}


class Worker:
    """One worker process, and what it says."""

    def __init__(self, targets: Path, name: str, slow_seconds: float, growth_bytes: int) -> None:
        self.name = name
        self.slow_seconds = slow_seconds
        memory = Path("/dev/shm")
        self._scratch = Path(
            tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None)
        )
        self.folder = self._scratch / "inputs"
        self.folder.mkdir()
        self.beat = Beat(self._scratch / "beat")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(targets),
                 str(self._scratch / "beat"), str(self.folder), str(theirs.fileno()),
                 str(growth_bytes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=open(self._scratch / "stderr", "w"),  # noqa: SIM115  closed with the process
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            )  # fmt: skip
        self._connection: Connection[Any, Any] = Connection(ours.detach())

    def prepare(self) -> None:
        """Let it make the target's seeds. Raises `RuntimeError` if it cannot."""
        answer = self._ask(("prepare", self.name), START_SECONDS)
        if isinstance(answer, Failure):
            text = (self._scratch / "stderr").read_text()[-2000:]
            self.close()
            raise RuntimeError(f"{self.name}: no seeds: {answer.error} {answer.detail}\n{text}")

    def input(self, seed: int, index: int) -> bytes:
        """An input of the target."""
        data: bytes = self._ask(("input", self.name, seed, index), START_SECONDS)
        return data

    def run(self, seed: int, indices: range) -> tuple[list[Failure], Failure | None]:
        """(failures among these inputs, that of the input with which the worker is gone)."""
        failures: list[Failure] = []
        answer = self._ask(("run", self.name, seed, indices), None)
        while isinstance(answer, list) and answer:
            failures += answer
            answer = self._answer(None)
        return failures, answer or None

    def load(self, data: bytes) -> Failure | None:
        """The failure of one input, if it is one. The worker may be gone afterwards."""
        answer: Failure | None = self._ask(("load", self.name, data), None)
        return answer

    @property
    def alive(self) -> bool:
        """Whether the process can be given another order."""
        return self._process.poll() is None and not self._connection.closed

    def _ask(self, order: tuple[Any, ...], limit_seconds: float | None) -> Any:
        """The worker's answer, or the `Failure` of one that died or took too long."""
        try:
            self._connection.send(order)
        except OSError:
            return self._died()
        return self._answer(limit_seconds)

    def _answer(self, limit_seconds: float | None) -> Any:
        end = None if limit_seconds is None else time.monotonic() + limit_seconds
        try:
            while not self._connection.poll(0.2):
                began = self.beat["began"]
                hangs = began and time.monotonic() - began > self.slow_seconds
                if hangs or (end is not None and time.monotonic() > end):
                    return self._stop()
            return self._connection.recv()
        except (EOFError, OSError):
            return self._died()

    def _died(self) -> Failure:
        status = self._process.wait()
        self._connection.close()
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        said = (self._scratch / "stderr").read_text(errors="replace").splitlines()
        detail = " ".join(said[-3:])
        return Failure(self.name, int(self.beat["index"]), "died", name, detail=detail[-300:])

    def _stop(self) -> Failure:
        """Kill a worker that hangs, and say where it hung."""
        stack = ""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
            stack = (self.folder / STACK).read_text()
        self._process.kill()
        self._process.wait()
        self._connection.close()
        detail = f"no end within {self.slow_seconds:g} s"
        index = int(self.beat["index"])
        return Failure(self.name, index, "slow", "TimeoutError", stack_frame(stack), detail)

    def close(self) -> None:
        """End the process and remove its files."""
        self._connection.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


class Fuzzer:
    """Runs one target's inputs, with as many workers as it takes, one at a time.

    targets        the file with the table of targets
    slow_seconds   an input that takes longer is a failure
    growth_bytes   and so is one that raises the largest memory by more
    worker         one of the same file and limits that another target is done with
    """

    def __init__(
        self,
        name: str,
        *,
        targets: Path = TARGETS_FILE,
        slow_seconds: float = SLOW_SECONDS,
        growth_bytes: int = GROWTH_BYTES,
        worker: Worker | None = None,
    ) -> None:
        self.name = name
        self.outcome = Outcome(name)
        self.targets = targets
        self._limits = slow_seconds, growth_bytes
        self._worker, self._is_prepared = worker, False

    def run(
        self, inputs: int, seed: int = 0, seconds: float = float("inf"), *, keeps: bool = False
    ) -> Outcome:
        """Load inputs 0 to `inputs`, or as many of them as there is time for.

        keeps   the worker stays, for `release`
        """
        began = time.monotonic()
        self._ready()
        began_loading, index = time.monotonic(), 0
        while index < inputs and time.monotonic() - began < seconds:
            stop = min(inputs, index + BATCH_INPUTS)
            failures, last = self._ready().run(seed, range(index, stop))
            for failure in failures:
                self.outcome.add(failure)
            if last is None:
                index = stop
            else:
                self._lost(last)
                index = max(index, last.index) + 1
        if self._worker is not None:
            self._count()
        if not keeps:
            self.close()
        self.outcome.counts.seconds += time.monotonic() - began_loading
        return self.outcome

    def input(self, failure: Failure, seed: int = 0) -> bytes:
        """The input that failed."""
        return self._ready().input(seed, failure.index)

    def load(self, data: bytes) -> Failure | None:
        """The failure of an input, if it is one."""
        failure = self._ready().load(data)
        if self._worker is not None and not self._worker.alive:
            self.close()
        return failure

    def fails_alike(self, data: bytes, failure: Failure) -> bool:
        """Whether this input fails as that one did."""
        found = self.load(data)
        return found is not None and found.signature == failure.signature

    def release(self) -> Worker | None:
        """The worker, which may serve another target from now on; None if there is none."""
        worker, self._worker = self._worker, None
        return worker

    def close(self) -> None:
        """End the worker."""
        if worker := self.release():
            worker.close()

    def _ready(self) -> Worker:
        if self._worker is None:
            self._worker, self._is_prepared = Worker(self.targets, self.name, *self._limits), False
        if not self._is_prepared:
            self._worker.name = self.name
            self._worker.prepare()
            self._is_prepared = True
        return self._worker

    def _lost(self, failure: Failure) -> None:
        """Count a worker's last input, and end it."""
        self.outcome.add(failure)
        counts = self.outcome.counts
        counts.inputs += 1
        setattr(counts, failure.kind, getattr(counts, failure.kind) + 1)
        self._count()
        self.close()

    def _count(self) -> None:
        """Take over the worker's counts."""
        assert self._worker is not None
        beat, counts = self._worker.beat, self.outcome.counts
        for name in ("inputs", "loaded", "typed", "untyped", "slow", "growth"):
            setattr(counts, name, getattr(counts, name) + int(beat[name]))
        counts.longest_seconds = max(counts.longest_seconds, beat["longest"])
        if beat["base_bytes"]:
            kept = int(beat["kept_bytes"] - beat["base_bytes"])
            peak = int(beat["peak_bytes"] - beat["base_peak"])
            counts.kept_bytes = max(counts.kept_bytes, kept)
            counts.peak_bytes = max(counts.peak_bytes, peak)
        beat.clear()


# Smaller inputs that fail alike


def minimise(
    data: bytes, fails: Callable[[bytes], bool], *, tries: int = 400, seconds: float = 60.0
) -> bytes:
    """A smaller input for which `fails` is still true: parts are left out while that holds.

    JSON is cut along its tree, everything else in ever smaller pieces (A. Zeller, R. Hildebrandt:
    "Simplifying and Isolating Failure-Inducing Input", 2002, ddmin, without its complements' first
    half, which leaves the same pieces out).
    """
    end = time.monotonic() + seconds
    left = tries
    for smaller in (_smaller_trees, _smaller_bytes):
        improved = True
        while improved and left > 0 and time.monotonic() < end:
            improved = False
            for candidate in smaller(data):
                left -= 1
                if left < 0 or time.monotonic() > end:
                    break
                if fails(candidate):
                    data, improved = candidate, True
                    break
    return data


def _smaller_bytes(data: bytes) -> Iterator[bytes]:
    size = len(data) // 2
    while size:
        for start in range(0, len(data), size):
            yield data[:start] + data[start + size :]
        size //= 2


def _smaller_trees(data: bytes) -> Iterator[bytes]:
    import json

    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return
    for path in sorted(_paths(tree), key=len):
        for part in _simpler(_at(tree, path)):
            candidate = json.dumps(_with(tree, path, part)).encode()
            if len(candidate) < len(data):
                yield candidate


_GONE = object()


def _simpler(value: Any) -> Iterator[Any]:
    yield _GONE
    if isinstance(value, list) and len(value) > 1:
        yield value[: len(value) // 2]
        yield value[len(value) // 2 :]
    if isinstance(value, dict) and len(value) > 1:
        items = list(value.items())
        yield dict(items[: len(items) // 2])
        yield dict(items[len(items) // 2 :])
    if isinstance(value, str) and len(value) > 1:
        yield value[: len(value) // 2]
    if value:
        yield type(value)()


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if not isinstance(tree, dict | list) or len(path) > 50:
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _paths(value, (*path, key))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value at the path; `_GONE` leaves it out."""
    if not path:
        return None if value is _GONE else value
    key, *rest = path
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(path) == 1 and value is _GONE:
        del changed[key]
    else:
        changed[key] = _with(tree[key], tuple(rest), value)
    return changed
