"""The process that loads inputs. It may die, hang or grow: `driver` watches it from outside.

    python worker.py TARGETS.py BEAT FOLDER DESCRIPTOR GROWTH_BYTES

TARGETS.py   the file with the table `TARGETS`
BEAT         a file of numbers that this process writes and the driver reads at any time: see `Beat`
FOLDER       an empty folder for inputs
DESCRIPTOR   of the socket over which orders come and answers go
GROWTH_BYTES an input that raises the largest memory of the process by more than this has failed
"""

import contextlib
import faulthandler
import gc
import importlib.util
import logging
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

SLOW_SECONDS = 10.0
GROWTH_BYTES = 2**30
"""An input that raises the process's largest memory by more than this has failed, by default."""
ADDRESS_BYTES = 2**33
"""So much memory beyond what the process has at its start is an error in the process."""
WARM_INPUTS = 200
"""Memory is counted from here on: before, modules are imported and caches fill."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
STACK = "stack.txt"
"""The file in FOLDER that holds the stack of a process that the driver has asked for it."""


@dataclass(frozen=True)
class Failure:
    """An input that did not end as it should.

    kind     "untyped", "slow", "growth", "died"
    error    type of the exception, or of the signal
    frame    "file.py:function" of the innermost frame in the package
    detail   the exception's text, in one line
    """

    target: str
    index: int
    kind: str
    error: str = ""
    frame: str = ""
    detail: str = ""

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """Equal for failures that are taken to be one."""
        return self.target, self.kind, self.error, self.frame


class Beat:
    """Numbers in a file that two processes have mapped.

    index, began    the input that is being loaded, and when that began; began 0: none is
    inputs, loaded, typed, untyped, slow, growth   counts
    base_bytes, kept_bytes     memory after the first inputs, and now
    base_peak, peak_bytes      largest memory so far, likewise
    longest         seconds of the slowest input
    """

    NAMES = (
        "index", "began", "inputs", "loaded", "typed", "untyped", "slow", "growth", "base_bytes",
        "kept_bytes", "base_peak", "peak_bytes", "longest",
    )  # fmt: skip
    _FORMAT = struct.Struct(f"={len(NAMES)}d")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(self._FORMAT.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._FORMAT.size)

    def __getitem__(self, name: str) -> float:
        value: float = struct.unpack_from("=d", self._map, 8 * self.NAMES.index(name))[0]
        return value

    def __setitem__(self, name: str, value: float) -> None:
        struct.pack_into("=d", self._map, 8 * self.NAMES.index(name), value)

    def clear(self) -> None:
        """Set all numbers to 0."""
        self._map[:] = bytes(self._FORMAT.size)


def load_targets(path: Path) -> dict[str, Any]:
    """The table of targets in a file. Its folder is where it finds the modules beside it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    targets: dict[str, Any] = module.TARGETS
    return targets


def package_frame(trace: TracebackType | None) -> str:
    """ "journal.py:read_snapshot": the innermost frame in the package; else the innermost one."""
    frames = traceback.extract_tb(trace)
    inside = [frame for frame in frames if "/src/dovetail/" in frame.filename]
    chosen = (inside or frames)[-1:]
    return "".join(f"{Path(frame.filename).name}:{frame.name}" for frame in chosen)


def stack_frame(text: str) -> str:
    """The same, of a stack that `faulthandler` wrote, innermost frame first."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    inside = [line for line in lines if "/src/dovetail/" in line]
    for line in inside or lines:
        file, _, rest = line.removeprefix('File "').partition('"')
        return f"{Path(file).name}:{rest.rpartition(' ')[2]}"
    return ""


class Loader:
    """Loads inputs one after the other and counts how they end."""

    def __init__(
        self, targets: dict[str, Any], beat: Beat, folder: Path, growth_bytes: int
    ) -> None:
        self._targets = targets
        self._growth_bytes = growth_bytes
        self._beat = beat
        self._folder = folder
        self._seeds: dict[str, list[bytes]] = {}
        self._loaded = 0
        self._prepared = False

    def seeds(self, name: str) -> list[bytes]:
        """The seeds of a target."""
        if name not in self._seeds:
            self._seeds[name] = self._targets[name].seeds()
        return self._seeds[name]

    def prepare(self, name: str) -> None:
        """Make a target's seeds and load each once, so that modules are imported and compiled."""
        self._prepared = False
        for data in self.seeds(name):
            self.load(name, -1, data)
        self._beat.clear()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the largest memory counts from here on
        self._loaded, self._prepared = 0, True

    def input(self, name: str, seed: int, index: int) -> bytes:
        """An input of a target."""
        data: bytes = self._targets[name].input(seed, index, self.seeds(name))
        return data

    def run(self, name: str, seed: int, indices: Sequence[int]) -> Iterator[Failure]:
        """Load these inputs of a target, and yield what fails."""
        for index in indices:
            failure = self.load(name, index, self.input(name, seed, index))
            if failure is not None:
                yield failure
        self._measure()

    def load(self, name: str, index: int, data: bytes) -> Failure | None:
        """Load one input; the failure, if it is one."""
        target, beat = self._targets[name], self._beat
        path = self._folder / f"input{target.ending}"
        path.write_bytes(data)
        peak = _peak_bytes()
        began = time.monotonic()
        # Seeds may take long the first time.
        beat["index"], beat["began"] = index, began if self._prepared else 0.0
        failure = self._try(target, index, path)
        seconds = time.monotonic() - began
        beat["began"] = 0.0
        self._clean()
        beat["inputs"] += 1
        beat["longest"] = max(beat["longest"], seconds)
        if failure is None and seconds > SLOW_SECONDS:
            failure = Failure(name, index, "slow", "TimeoutError", detail=f"{seconds:.1f} s")
            beat["slow"] += 1
        grown = _peak_bytes() - peak
        if failure is None and grown > self._growth_bytes and self._prepared:
            failure = Failure(name, index, "growth", "MemoryError", detail=f"{grown >> 20} MiB")
            beat["growth"] += 1
        self._loaded += 1
        if self._loaded == WARM_INPUTS:
            self._measure()
            beat["base_bytes"], beat["base_peak"] = beat["kept_bytes"], beat["peak_bytes"]
        return failure

    def _try(self, target: Any, index: int, path: Path) -> Failure | None:
        from dovetail.errors import DovetailError

        try:
            target.load(path)
            self._beat["loaded"] += 1
        except DovetailError as error:
            self._beat["typed"] += 1
            if not str(error).strip():
                return self._untyped(target, index, error)
        # Whatever else ends a loader is what this program looks for, also SystemExit.
        except BaseException as error:
            return self._untyped(target, index, error)
        return None

    def _untyped(self, target: Any, index: int, error: BaseException) -> Failure:
        self._beat["untyped"] += 1
        frame = package_frame(error.__traceback__)
        detail = " ".join(str(error).split())[:200]
        return Failure(target.name, index, "untyped", type(error).__name__, frame, detail)

    def _clean(self) -> None:
        for entry in os.scandir(self._folder):
            if entry.name == STACK:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def _measure(self) -> None:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
        self._beat["kept_bytes"], self._beat["peak_bytes"] = resident, _peak_bytes()


def _peak_bytes() -> int:
    """The largest memory so far. `getrusage` would count that of the process that started this
    one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _limit_memory() -> None:
    """A loader that asks for very much gets a MemoryError, and not the machine's last memory."""
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + ADDRESS_BYTES, resource.RLIM_INFINITY))


def main() -> None:
    """Answer orders until the driver hangs up."""
    targets, beat, folder, descriptor, growth_bytes = sys.argv[1:]
    connection: Connection[Any, Any] = Connection(int(descriptor))
    os.environ["FUZZ_SCRATCH"] = str(Path(folder).parent)
    os.environ["DOVETAIL_CACHE"] = str(Path(folder).parent / "cache")
    # Nothing is run here that would be worth compiling the C++ runner for.
    os.environ["DOVETAIL_RUNNER"] = "python"
    stack = open(Path(folder) / STACK, "w")  # noqa: SIM115  open as long as the process
    faulthandler.register(signal.SIGUSR1, stack)
    warnings.simplefilter("ignore")
    logging.disable()
    table, folder_path = load_targets(Path(targets)), Path(folder)
    loader = Loader(table, Beat(Path(beat)), folder_path, int(growth_bytes))
    while True:
        try:
            order, name, *more = connection.recv()
        except EOFError:
            return
        if order == "prepare":
            loader.prepare(name)
            _limit_memory()
            connection.send(None)
        elif order == "input":
            connection.send(loader.input(name, *more))
        elif order == "run":
            # Each is sent at once, since the process may be gone with the next input.
            for failure in loader.run(name, *more):
                connection.send([failure])
            connection.send([])
        else:
            connection.send(loader.load(name, -1, *more))


if __name__ == "__main__":
    # Records that are sent must be of the module that the driver imports, and not of `__main__`.
    import worker

    worker.main()
