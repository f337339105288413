"""Counts for how long a thing has shown no change, so that others notice what is dead, stopped or
hung.

    who looks, each second or half       at what                         by what sign
    runtime.stopped, a thread            child processes                 stopped or not
    runtime.ranks, a thread              the other ranks                 beats in torch's store
      and in it executors.hosts          devices of a plan               instruction they are at
    runtime.ranks:guard, a process       the rank that started it        stopped or not
    training.backends.ranks, a thread    the other end of a connection   when it was heard of

A process that was stopped itself, or that got no core, blames nobody for what it has missed: each
look counts for the time since the look before, but for little more than was agreed between two.

Workers of a training have leases in the training's own clock, which may be a played one; see
`training.liveness`.
"""

import threading
import time
from collections.abc import Callable, Hashable

MOST_LATE = 1.5
"""A look counts for at most so many times the seconds between two looks: nearly in full where it is
late because the machine is busy, and for little of a stop of this process."""


class Watch:
    """Counts for how long each of several things has shown no change, from look to look.

    every_seconds   between two looks
    clock           returns seconds
    closing         is set to look no more
    thread          looks, if `run` was called
    """

    def __init__(self, every_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_seconds, self._clock = every_seconds, clock
        self._now, self._ticked = 0.0, clock()
        self._seen: dict[Hashable, tuple[object, float]] = {}
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None

    def tick(self) -> None:
        """Begin a look."""
        now = self._clock()
        passed = max(now - self._ticked, self.every_seconds)
        self._now += min(passed, MOST_LATE * self.every_seconds)
        self._ticked = now

    def still_seconds(self, thing: Hashable, sign: object) -> float:
        """Return for how many seconds the thing has shown this sign."""
        if thing not in self._seen or self._seen[thing][0] != sign:
            self._seen[thing] = sign, self._now
        return self._now - self._seen[thing][1]

    def forget(self, thing: Hashable) -> None:
        """Have the thing's time begin anew."""
        self._seen.pop(thing, None)

    def run(self, name: str, look: Callable[[], bool]) -> None:
        """Look so often in a thread of this name, until `look` returns False or this closes."""

        def loop() -> None:
            while not self.closing.wait(self.every_seconds):
                self.tick()
                if not look():
                    return

        self.thread = threading.Thread(target=loop, name=name, daemon=True)
        self.thread.start()
