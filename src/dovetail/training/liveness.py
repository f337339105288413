"""Signs of life: a worker that gives none for too long is thought hung, and loses its samples.

Every local step is one. A learner whose steps take longer than the policy's `lease_seconds` calls
`alive()` now and then within them; how many commits it makes is nobody's business.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar

LOOKS = 8
"""Signs of life are sent, and looked at, so many times within `lease_seconds`."""

_beat: ContextVar[Callable[[], None] | None] = ContextVar("beat", default=None)


def alive() -> None:
    """Say that this worker is alive. Does nothing outside of a worker."""
    beat = _beat.get()
    if beat is not None:
        beat()


def on_alive(beat: Callable[[], None] | None) -> None:
    """Set what `alive()` calls from here on, in this thread: a backend's business."""
    _beat.set(beat)


class LeaseClock:
    """When each worker that computes was heard last, and which of them have fallen silent.

    A worker that waits for an answer is silent without being hung: its time does not run.

    silent          workers that were found hung, and were not heard since
    doubt_seconds   a worker whose time has run out is given so much more before it counts as hung,
                    from when that was noticed: all of the process may have stood still before
    """

    def __init__(self, lease_seconds: float, doubt_seconds: float = 0.0) -> None:
        self.lease_seconds, self.doubt_seconds = lease_seconds, doubt_seconds
        self.silent: set[int] = set()
        self._heard: dict[int, float] = {}  # in seconds of the caller's clock
        self._doubted: dict[int, float] = {}

    @property
    def computing(self) -> tuple[int, ...]:
        """The workers whose time runs."""
        return tuple(self._heard)

    def start(self, worker: int, seconds: float) -> None:
        """The worker computes from now on, or has given a sign of life."""
        self._heard[worker] = seconds

    def beat(self, worker: int, seconds: float) -> None:
        """A sign of life, which says nothing of a worker whose time does not run."""
        if worker in self._heard:
            self._heard[worker] = seconds

    def stop(self, worker: int) -> None:
        """The worker waits for an answer, or is gone."""
        self._heard.pop(worker, None)
        self._doubted.pop(worker, None)

    def overdue(self, seconds: float) -> dict[int, float]:
        """The workers whose time has run out by now, and for how long each has said nothing. Each
        is told once, and is silent from then on."""
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
        """When to look again; inf while nobody computes."""
        return min((self._due(worker) for worker in self.computing), default=math.inf)

    def _due(self, worker: int) -> float:
        if worker in self._doubted:
            return self._doubted[worker] + self.doubt_seconds
        return self._heard.get(worker, math.inf) + self.lease_seconds

    def left_seconds(self, worker: int, seconds: float) -> float:
        """How much of its time a worker has left; inf if it does not run."""
        return self._heard.get(worker, math.inf) + self.lease_seconds - seconds
