"""A script: one run on a Ray of its own. Prints the addresses that its processes listened on."""

import json
import os
import tempfile
from pathlib import Path

from dovetail.training.backends import load_backend
from tests.support.doors import Doors
from tests.support.ray_runs import SMALL, assign_counts, each_sample_once_an_epoch, held_until, once


def processes(mark):
    """Ids of the living processes that inherited an environment with that mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (folder / "environ").read_bytes()
            if marked and "\nState:\tZ" not in (folder / "status").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def listening(mark):
    """Addresses, in the kernel's hexadecimal, that those processes listen on."""
    inodes = set()
    for process in processes(mark):
        for link in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    ]


if __name__ == "__main__":
    seen = []
    mark = os.environ["RAY_RUN_MARK"]

    def look():
        seen.extend(listening(mark))
        doors.open("seen")

    with tempfile.TemporaryDirectory() as folder:
        doors = Doors(Path(folder))
        run = load_backend("ray", object_store_bytes=80 << 20, **SMALL)
        outcome = run(assign_counts("local", hold=held_until(doors, "seen", rows=3)), once(3, look))
    print(json.dumps({"right": each_sample_once_an_epoch(outcome), "listening": seen}))
