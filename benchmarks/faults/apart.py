"""Runs in processes of their own, which may hang or die, and all processes that there are."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

RESULT = "result "
"""What the line of the run's result begins with."""


def tell(result: Mapping[str, object]) -> None:
    """In the process: its result."""
    print(RESULT + json.dumps(result))


def told_by(
    *command: str, limit_seconds: float, variables: Mapping[str, str] | None = None
) -> tuple[dict[str, object], list[str]]:
    """(the result of a Python program, or an error and the end of its stderr; its lines). A program
    that takes longer is killed with all of its group."""
    process = subprocess.Popen(
        [sys.executable, *command], env=os.environ | (variables or {}), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    said: dict[str, object] = {}
    try:
        output, errors = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        said = {"error": f"did not end within {limit_seconds:.0f} s", "tail": errors[-2000:]}
    lines = output.splitlines()
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if results:
        said = json.loads(results[-1]) | said
    elif not said:
        said = {"error": f"ended with {process.returncode}", "tail": errors[-2000:]}
    return said, lines


def living() -> Iterator[tuple[int, int, bytes, bytes]]:
    """(id, its parent's, name, command line) of each process of this machine but zombies."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            name, line = (folder / "comm").read_bytes(), (folder / "cmdline").read_bytes()
            if state != "Z":
                yield int(folder.name), int(parent), name, line
