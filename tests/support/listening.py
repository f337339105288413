"""What the processes of a command listen on, read from /proc while it runs."""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import forked

LISTEN = "0A"
"""A TCP socket that listens, in /proc/net/tcp."""
ACCEPTS = 0x10000
"""The flag of a Unix socket that listens (SO_ACCEPTCON), in /proc/net/unix."""


@dataclass
class Watched:
    """A command that has ended.

    sockets     (protocol, address) of each socket that one of its processes received on: TCP
                and Unix ones that listened, and UDP ones; an address is in hex, as in /proc
    processes   most at once
    """

    status: int = 0
    output: str = ""
    sockets: set[tuple[str, str]] = field(default_factory=set)
    processes: int = 0


def watch(*command: object, folder: Path, **environment: str) -> Watched:
    """Run `python COMMAND` in the folder, forked, and watch its processes until it ends."""
    watched = Watched()
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths} | environment
    running = forked.start(command, cwd=folder, env=environment)
    while running.poll() is None:
        tree = _tree(running.pid)
        watched.processes = max(watched.processes, len(tree))
        inodes = {inode for process in tree for inode in _inodes(process)}
        watched.sockets |= {(kind, where) for kind, where, inode in _bound() if inode in inodes}
        time.sleep(0.02)
    watched.output = "".join(running.communicate())
    watched.status = running.returncode
    return watched


def _tree(root: int) -> set[int]:
    tree, waiting = {root}, [root]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                children = {int(pid) for pid in (thread / "children").read_text().split()} - tree
                tree |= children
                waiting += children
    return tree


def _inodes(process: int) -> list[str]:
    found = []
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    found.append(target[8:-1])
    return found


def _bound() -> list[tuple[str, str, str]]:
    """(protocol, local address, inode) of the machine's sockets that receive."""
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _lines(kind):
            if kind.startswith("udp") or line[3] == LISTEN:
                found.append((kind, line[1], line[9]))
    for line in _lines("unix"):
        if int(line[3], 16) & ACCEPTS:
            found.append(("unix", line[7] if len(line) > 7 else "", line[6]))
    return found


def _lines(kind: str) -> list[list[str]]:
    with suppress(OSError):  # a machine without IPv6
        return [line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return []
