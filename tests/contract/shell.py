"""Runs `dovetail` as a user's shell does: in a process and a folder of its own.

The process is forked from one that has imported the package (`tests.support.forked`), but where a
test is about what a user gets who sets nothing, or kills the command.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support import forked

PROGRAMS = Path(__file__).parent / "programs"
"""Files that users would have in their current folder."""
OF_THE_SUITE = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCHINDUCTOR_CACHE_DIR")
"""Variables by which several tests run side by side, and which a user has not set."""
LIMIT_SECONDS = 300
DOVETAIL = ("-m", "dovetail")


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


class Shell:
    """A user's shell in `folder`, which holds copies of `PROGRAMS`.

    by_default   processes import by themselves, and OpenMP is as it comes; else its threads are
                 those of the suite
    """

    def __init__(self, folder, *, by_default=False):
        self.folder = Path(folder)
        self._left_out = OF_THE_SUITE if by_default else ()
        shutil.copytree(PROGRAMS, self.folder, dirs_exist_ok=True)

    def python(self, *words, **variables):
        """Run Python with these arguments, whatever its status."""
        start = _start if self._left_out else forked.start
        process = start(words, cwd=self.folder, env=self._environment(variables))
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Ended(process.returncode, out, err)

    def dovetail(self, *words, **variables):
        """Run a command, whatever its status."""
        return self.python(*DOVETAIL, *words, **variables)

    def works(self, *words, **variables):
        """Run a command that must succeed."""
        ended = self.dovetail(*words, **variables)
        assert ended.status == 0, f"{words}: {ended.err}"
        return ended

    def kills(self, *words, when, launcher=DOVETAIL, **variables):
        """Run a command, and kill it with all processes in its folder, as its own ones are, once
        `when()` is true. Returns whether it was still running then."""
        process = _start(
            (*launcher, *words),
            cwd=self.folder,
            env=self._environment(variables),
            outputs=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + LIMIT_SECONDS
        while not when() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        was_running = process.poll() is None
        while left := self._processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)
        process.wait()
        return was_running

    def _processes(self):
        """The processes whose current folder is this one, but for those that have ended."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if entry.joinpath("cwd").resolve(strict=True) == self.folder.resolve():
                    found.append(int(entry.name))
        return found

    def _environment(self, variables):
        kept = {name: text for name, text in os.environ.items() if name not in self._left_out}
        return {**kept, **{name: str(value) for name, value in variables.items()}}


def _start(words, *, cwd, env, outputs=subprocess.PIPE):
    """Start `python WORDS` as a process that imports by itself."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=env,
        stdout=outputs,
        stderr=outputs,
        text=True,
    )
