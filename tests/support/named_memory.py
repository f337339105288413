"""Shared memory that has a name, and so may be left behind: what of it processes have mapped."""

from contextlib import suppress
from pathlib import Path


def named_memory(pid="self"):
    """Paths of the files in /dev/shm that the process has mapped; what was unlinked has none."""
    lines = []
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return {path for path in paths if not path.endswith("(deleted)")}
