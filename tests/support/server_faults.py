"""A parameter server that dies where a test says: by wrapping its steps and the files it writes.

    received ─► checked ─► journal-half ─► journalled ─► applied ─► answered
                                    snapshot-half ─► snapshot-renamed ─► segment-removed

`faulty(Server, crash)` is a server that calls `crash` with the name of each point as it is passed;
`faulty_files(crash)` does so in the middle of a record and around a snapshot. In a process or an
actor of its own, `Lives` kills one life of the server after the other.
"""

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

CRASH_POINTS = (
    "received",
    "checked",
    "journal-half",
    "journalled",
    "applied",
    "answered",
    "snapshot-half",
    "snapshot-renamed",
    "segment-removed",
)
HALVES = {b"rec\n": "journal-half", b"dovetS2\n": "snapshot-half"}
"""Where a write that begins so is interrupted in its middle."""


class Crash(Exception):
    pass


class CrashEvery:
    """Raises each `every`-th time that `point` is passed, across restarts."""

    def __init__(self, point, every=3, most=8):
        self.point, self.every, self.most = point, every, most
        self.passed = self.crashes = 0

    def __call__(self, point):
        if point != self.point or self.crashes == self.most:
            return
        self.passed += 1
        if self.passed % self.every == 0:
            self.crashes += 1
            raise Crash(point)


def faulty(server_class, crash):
    """The server class, its steps wrapped."""

    class FaultyServer(server_class):
        def take(self, *turn, **vector):
            crash("received")
            return super().take(*turn, **vector)

        def _examine(self, *turn):
            payload = super()._examine(*turn)
            crash("checked")
            return payload

        def _log(self, header, *payload):
            logged = super()._log(header, *payload)
            if header["kind"] == "turn":
                crash("journalled")
            return logged

        def _enact(self, header, *payload):
            deliveries = super()._enact(header, *payload)
            if header["kind"] == "turn":
                crash("applied")
            return deliveries

        def _finish(self, *deliveries):
            finished = super()._finish(*deliveries)
            crash("answered")
            return finished

    return FaultyServer


@contextmanager
def faulty_files(crash):
    """Wraps what journals and snapshots are written by, in this process."""
    writev, replace, unlink = os.writev, os.replace, Path.unlink

    def halting_writev(descriptor, pieces):
        point = next(
            (p for magic, p in HALVES.items() if bytes(pieces[0][:8]).startswith(magic)), None
        )
        if point is None:
            return writev(descriptor, pieces)
        whole = b"".join(pieces)
        half = len(whole) // 2
        os.write(descriptor, whole[:half])
        crash(point)
        return half + os.write(descriptor, whole[half:])

    def halting_replace(source, target):
        replace(source, target)
        if Path(target).name.startswith("snapshot-"):
            crash("snapshot-renamed")

    def halting_unlink(path, missing_ok=False):
        unlink(path, missing_ok=missing_ok)
        if path.name.startswith(("log-", "snapshot-")):
            crash("segment-removed")

    with (
        mock.patch.object(os, "writev", halting_writev),
        mock.patch.object(os, "replace", halting_replace),
        mock.patch.object(Path, "unlink", halting_unlink),
    ):
        yield


class Lives:
    """Which point each life of a server dies at, in a file that outlives them.

    crashes   (point, count) of each life: it ends when it passes the point for the count-th time
    """

    def __init__(self, path, crashes):
        self.path = Path(path)
        self.path.write_text(json.dumps(crashes))

    @staticmethod
    def begin(path):
        """The hook of the next life: it kills this process. Lives beyond the last go on."""
        crashes = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps(crashes[1:]))
        point, count = crashes[0] if crashes else (None, 0)
        passed = 0

        def crash(name):
            nonlocal passed
            passed += name == point
            if name == point and passed == count:
                os.kill(os.getpid(), signal.SIGKILL)

        return crash
