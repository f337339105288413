"""Signs of life: a worker that gives none for too long counts as hung, and loses its samples.

Every local step is a sign of life. A learner whose steps take longer than the policy's
`lease_seconds` calls `alive()` now and then within a step. How often a worker commits does not
matter.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar

LOOKS = 8
"""Backends send signs of life, and check for them, so many times within `lease_seconds`."""

_beat: ContextVar[Callable[[], None] | None] = ContextVar("beat", default=None)


def alive() -> None:
    """Tells the backend that this worker is alive. Does nothing outside of a worker."""
    beat = _beat.get()
    if beat is not None:
        beat()


def on_alive(beat: Callable[[], None] | None) -> Callable[[], None] | None:
    """Sets the function that `alive()` calls from here on, in this thread, and returns the one that
    it called before. Backends call this."""
    before = _beat.get()
    _beat.set(beat)
    return before


class LeaseClock:
    """Keeps when each computing worker was last heard, and which workers have fallen silent.

    A worker that waits for an answer is silent without being hung, so its time does not run.

    silent          workers that were found hung, until the caller hears them and removes them
    doubt_seconds   extra time before a worker counts as hung, from the moment at which its lateness
                    was noticed. The whole process may have been suspended until then.
    """

    def __init__(self, lease_seconds: float, doubt_seconds: float = 0.0) -> None:
        self.lease_seconds, self.doubt_seconds = lease_seconds, doubt_seconds
        self.silent: set[int] = set()
        self._heard: dict[int, float] = {}  # in seconds of the caller's clock
        self._doubted: dict[int, float] = {}

    @property
    def computing(self) -> tuple[int, ...]:
        """The workers that compute: their time runs."""
        return tuple(self._heard)

    def start(self, worker: int, seconds: float) -> None:
        """Notes that the worker computes from `seconds` on, or has given a sign of life then."""
        self._heard[worker] = seconds

    def beat(self, worker: int, seconds: float) -> None:
        """Notes a sign of life. It is ignored for a worker whose time does not run."""
        if worker in self._heard:
            self._heard[worker] = seconds

    def stop(self, worker: int) -> None:
        """Notes that the worker waits for an answer or is gone: its time stops."""
        self._heard.pop(worker, None)
        self._doubted.pop(worker, None)

    def overdue(self, seconds: float) -> dict[int, float]:
        """Returns the workers that count as hung at `seconds`, and for how long each has given no
        sign. Each is returned once, and is in `silent` from then on."""
        hung = {}
        for worker, heard in list(self._heard.items()):  # other threads may add theirs meanwhile
            if seconds - heard <= self.lease_seconds:
                self._doubted.pop(worker, None)
            elif seconds >= self._doubted.setdefault(worker, seconds) + self.doubt_seconds:
                self.stop(worker)
                self.silent.add(worker)
                hung[worker] = seconds - heard
        return hung

    def due_seconds(self) -> float:
        """The time at which `overdue` should be called next; inf while nobody computes."""
        return min(
            (
                self._heard.get(worker, math.inf) + self.lease_seconds
                if (doubted := self._doubted.get(worker)) is None
                else doubted + self.doubt_seconds
                for worker in self.computing
            ),
            default=math.inf,
        )

    def left_seconds(self, worker: int, seconds: float) -> float:
        """The seconds until the worker's time runs out; inf if its time does not run."""
        return self._heard.get(worker, math.inf) + self.lease_seconds - seconds
