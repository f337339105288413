"""The end of processes that are not our children."""

import time
from pathlib import Path


def gone(pid):
    """True once the process has ended: it is reaped, or a zombie. Waits for that: a process that
    stays ends by pytest's own limit."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
