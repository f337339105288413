"""The worker actor: its learner, its way to the server, and the loop between them.

A call fails when the server's process or node dies. The worker then waits for its next life, joins
again, and says its last turn again: the server tells by the numbers what it has heard already.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.training.backends.ray.messages import WorkerPlan
from dovetail.training.backends.ray.transport import make_transport
from dovetail.training.learner import MakeLearner
from dovetail.training.liveness import on_alive
from dovetail.training.rules import make_rule
from dovetail.training.worker import Ask, Stepped, Told, Work, work

AGAIN_SECONDS = 0.1
"""Between two tries to reach a server that is being restarted."""
BEATS = 8
"""Signs of life within `lease_seconds`, at most."""


class Worker:
    """The actor: `run` is its whole life."""

    def __init__(
        self, server: Any, shards: Sequence[Any], plan: WorkerPlan, make: MakeLearner
    ) -> None:
        self._server, self._shards, self._plan, self._make = server, shards, plan, make

    def run(self) -> int:
        """Train until no sample is left; its number."""
        plan = self._plan
        link = Link(self._server, self._shards, plan)
        on_alive(link.beat)
        learner = self._make(plan.worker)
        rule = make_rule(plan.rule, **plan.options)
        sequence = link.join()
        steps = work(plan.job, rule, learner, plan.worker, sequence=sequence, clock=link.seconds)
        drive(steps, link)
        link.leave()
        return plan.worker


def drive(steps: Work, link: "Link") -> None:
    """The worker's loop over a link."""
    told: Told | None = None
    try:
        while True:
            event = steps.send(told)
            told = None
            if isinstance(event, Stepped):
                link.beat()
            else:
                told = link.ask(event)
    except StopIteration:
        return


class Link:
    """The worker's end: `ask` blocks until the server has answered, whichever life that is of."""

    def __init__(self, server: Any, shards: Sequence[Any], plan: WorkerPlan) -> None:
        self._server, self._plan = server, plan
        self._who = plan.worker, plan.life
        self._transport = make_transport(server, shards, plan, self._call)
        self._ahead_seconds = 0.0  # our clock's, before the run's
        self._beaten = time.monotonic()

    def seconds(self) -> float:
        """Since the run began, by the server's clock as it was when this worker joined."""
        return time.perf_counter() - self._ahead_seconds

    def beat(self) -> None:
        """A sign of life; not each one is sent."""
        now = time.monotonic()
        if now - self._beaten > self._plan.lease_seconds / BEATS:
            self._beaten = now
            self._server.alive.remote(*self._who)

    def join(self) -> int:
        """The number of the last commit that the server has applied."""
        while True:
            asked = time.perf_counter()
            joined = self._call(lambda: self._server.join.remote(*self._who))
            if joined is not None:
                heard = time.perf_counter()
                self._ahead_seconds = (asked + heard) / 2 - joined.seconds
                return int(joined.sequence)
            time.sleep(AGAIN_SECONDS)

    def ask(self, ask: Ask) -> Told:
        packed = self._transport.pack(ask)
        self._beaten = time.monotonic()
        while True:
            exchanged = self._transport.exchange(ask, packed)
            if exchanged is not None:
                return Told(exchanged[0].reply, exchanged[1])
            self.join()

    def leave(self) -> None:
        self._call(lambda: self._server.leave.remote(*self._who))

    def _call(self, call: Callable[[], Any]) -> Any:
        """The result; None if the server was lost meanwhile: it may have heard us, or not."""
        import ray
        from ray.exceptions import ActorDiedError, RayError

        try:
            return ray.get(call())
        except ActorDiedError:  # no other life follows
            raise
        except RayError:
            time.sleep(AGAIN_SECONDS)
            return None
