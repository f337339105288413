"""A worker in a process or an actor of its own: its learner, its link to the server, and the loop
between them.

    link                          a turn is                       its server is gone when
    processes.worker.WorkerLink   a packet, over shared memory    the socket breaks
    ranks.worker.RemoteLink       a frame over TCP, to the same   (its stand-in waits for another)
    ray.worker.ActorLink          a call, by the object store     the call fails

A worker whose server is gone joins the one that takes its place, and repeats its last turn. The
server recognises by the commit's number whether it has taken that turn before.
"""

import time
from abc import ABC, abstractmethod
from typing import Any

from dovetail.training.backends.contract import WorkerPlan
from dovetail.training.learner import MakeLearner
from dovetail.training.liveness import LOOKS, on_alive
from dovetail.training.worker import Ask, Told, drive, work


class ServerLink(ABC):
    """A worker's end of the way to the server. `join` and `ask` block until a server has answered,
    the present one or one that takes its place."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._ahead_seconds = 0.0  # this process's clock minus the run's clock
        self._beat_seconds = time.monotonic()  # of the last sign of life

    def seconds(self) -> float:
        """Seconds since the run began. The run's clock was read when this worker joined."""
        return time.perf_counter() - self._ahead_seconds

    def show_life(self) -> None:
        """Gives a sign of life, if the last one was given long enough ago."""
        now = time.monotonic()
        if now - self._beat_seconds > self._plan.lease_seconds / LOOKS:
            self._beat_seconds = now
            self.beat()

    def run(self, make_learner: MakeLearner) -> None:
        """Trains until no sample is left."""
        plan = self._plan
        # Making a learner may take long, so `alive()` works from here on.
        on_alive(self.show_life)
        learner = make_learner(plan.worker)
        sequence = self.join()
        steps = work(
            plan.job, plan.rule, learner, plan.worker, sequence=sequence, clock=self.seconds
        )
        drive(steps, self.ask, self.show_life)
        self.leave()

    def ask(self, ask: Ask) -> Told:
        """Sends the turn, again and again until it is answered, and returns the answer."""
        packed = self.pack(ask)
        self._beat_seconds = time.monotonic()  # the turn is a sign of life
        while (told := self.exchange(ask, packed)) is None:
            self.join()
        return told

    @abstractmethod
    def beat(self) -> None:
        """Gives a sign of life."""

    @abstractmethod
    def join(self) -> int:
        """Joins the server, reads the run's clock, and returns the number of the worker's last
        applied commit."""

    @abstractmethod
    def pack(self, ask: Ask) -> Any:
        """The turn and its vector as `exchange` sends them. Called once for a turn, since encoding
        a vector may change what stays for the next one."""

    @abstractmethod
    def exchange(self, ask: Ask, packed: Any) -> Told | None:
        """Sends the turn and returns the answer. None: the server is gone, or a part of the answer;
        the worker joins again and repeats the turn."""

    @abstractmethod
    def leave(self) -> None:
        """Tells the server that the worker has ended. If that is lost, it is not repeated."""
