"""The actors of a run, and what is asked of them."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from dovetail.errors import UsageError
from dovetail.training.backends.contract import Assignment, Storage
from dovetail.training.backends.ray.messages import Center, Report, ServerPlan, WorkerPlan
from dovetail.training.backends.ray.options import Options
from dovetail.training.backends.ray.serving import ParameterServer
from dovetail.training.backends.ray.shard import Shard
from dovetail.training.backends.ray.working import Worker

CLOSE_SECONDS = 10.0
"""For the server to let go of its folder before it is killed."""
INLINE_BYTES = 2**15
"""Vectors up to here travel within an actor's arguments, larger ones through the object store."""
_COLOR = re.compile(r"\x1b\[\d+m")
POLL, COPY = "poll", "copy"


@dataclass(frozen=True)
class Raised:
    """A worker ended by an exception of its learner's."""

    traceback: str


@dataclass(frozen=True)
class Died:
    """A worker's process or node is gone."""

    status: str


@dataclass(frozen=True)
class Lost:
    """The server could not be reached; `for_good`: Ray starts no other."""

    status: str
    for_good: bool


Word = Report | Center | Lost | tuple[int, Raised | Died | None]


class Actors:
    """Starts actors, asks them, ends them. A context manager: it leaves none behind."""

    def __init__(
        self, ray: Any, assignment: Assignment, options: Options, storage: Storage
    ) -> None:
        self._ray, self._assignment, self._options = ray, assignment, options
        self._storage = storage
        self._namespace = options.namespace or f"dovetail-{assignment.job.run}"
        self._server: Any = None
        self._shards: list[Any] = []
        self.workers: dict[int, Any] = {}
        self._lives: dict[int, int] = {}
        self._asked: dict[
            Any, str | int
        ] = {}  # what a result will be: of a worker's end, its number
        large = assignment.theta.nbytes > INLINE_BYTES
        self._theta = [ray.put(assignment.theta)] if large else assignment.theta
        self._learner = ray.put(assignment.learner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in list(self.workers):
            self.kill_worker(worker)
        if self._server is None:
            return
        with suppress(Exception):  # a server that cannot be asked is killed all the same
            self._ray.get(self._server.close.remote(), timeout=CLOSE_SECONDS)
        for actor in (self._server, *self._shards):
            self._ray.kill(actor)

    def start_server(self) -> None:
        assignment = self._assignment
        plan = ServerPlan(
            job=assignment.job,
            rule=assignment.rule.name,
            options=dict(assignment.rule.options),
            wire=assignment.wire,
            guard=assignment.guard,
            storage=self._storage,
            shards=assignment.shards or 1,
            order=assignment.order,
            lease_seconds=assignment.policy.lease_seconds,
            restarts=assignment.policy.server_restarts,
            temporary=assignment.storage is None,
        )
        theta = self._theta
        if plan.shards > 1:
            self._shards = [
                self._lasting(Shard, f"shard-{i}", "SPREAD").remote(plan, theta, i)
                for i in range(plan.shards)
            ]
        lasting = self._lasting(ParameterServer, "server", self._place())
        self._server = lasting.remote(plan, theta, self._shards)

    def _lasting(self, kind: type, name: str, place: Any) -> Any:
        """An actor that Ray starts again as often as the policy allows. What may have been done is
        repeated by its number, never by Ray."""
        return self._ray.remote(kind).options(
            name=name,
            namespace=self._namespace,
            num_cpus=self._options.server_cores,
            resources=dict(self._options.server_resources) or None,
            max_restarts=self._assignment.policy.server_restarts,
            max_task_retries=0,
            scheduling_strategy=place,
        )

    def _place(self) -> Any:
        """The server's node, as long as it lives."""
        wanted = self._options.server_node
        if wanted is None:
            return "DEFAULT"
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in sorted(self._ray.nodes(), key=lambda node: str(node["NodeID"])):
            names = (node["NodeID"], node["NodeManagerAddress"], *node["Resources"])
            if node["Alive"] and wanted in names:
                return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        raise UsageError("server_node", f"no node has the id, address or resource {wanted!r}")

    def start_worker(self, worker: int) -> None:
        """A new actor for that number, in place of a dead one if there was one."""
        assignment, options = self._assignment, self._options
        life = self._lives[worker] = self._lives.get(worker, -1) + 1
        if worker in self.workers:
            self.kill_worker(worker)
        plan = WorkerPlan(
            job=assignment.job,
            rule=assignment.rule.name,
            options=dict(assignment.rule.options),
            wire=assignment.wire,
            worker=worker,
            life=life,
            lease_seconds=assignment.policy.lease_seconds,
        )
        actor = (
            self._ray.remote(Worker)
            .options(
                name=f"worker-{worker}-{life}",
                namespace=self._namespace,
                num_cpus=options.worker_cores,
                resources=dict(options.worker_resources) or None,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD" if options.spread else "DEFAULT",
            )
            .remote(self._server, self._shards, plan, self._learner)
        )
        self.workers[worker] = actor
        self._asked[actor.run.remote()] = worker

    def kill_worker(self, worker: int) -> None:
        """End it; `wait` tells of it as of any other death."""
        self._ray.kill(self.workers[worker])

    def restart_server(self) -> None:
        """End a server that does not react; another life follows."""
        self._ray.kill(self._server, no_restart=False)

    def poll(self, life: str, rows: int, events: int, seconds: float) -> None:
        """Ask for a report, if none is on its way."""
        if POLL not in self._asked.values():
            self._asked[self._server.poll.remote(life, rows, events, seconds)] = POLL

    def copy(self, samples: int, final: bool) -> None:
        """Ask for a copy of the center, in place of what was asked before."""
        kind = f"{COPY} {samples} {final}"
        if kind in self._asked.values():
            return
        for asked in [ref for ref, each in self._asked.items() if str(each).startswith(COPY)]:
            del self._asked[asked]
        self._asked[self._server.copy.remote(samples, final)] = kind

    def tell_server(self, method: str, *arguments: Any) -> None:
        """Call a method whose result nobody needs."""
        getattr(self._server, method).remote(*arguments)

    def wait(self, seconds: float) -> Iterator[Word]:
        """What actors have answered, at most so many seconds from now."""
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        for ref in ready:
            asked = self._asked.pop(ref)
            if isinstance(asked, int):
                end = self._end(ref)
                if end != Raised(""):
                    yield asked, end
            else:
                word = self._word(ref)
                if word is not None:
                    yield word

    def _word(self, ref: Any) -> Report | Center | Lost | None:
        """The server's answer."""
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        try:
            word: Report | Center | None = self._ray.get(ref)
        except ActorDiedError as error:
            return Lost(_brief(error), for_good=True)
        except RayTaskError:  # the next report says what it was
            return None
        except RayError as error:
            return Lost(_brief(error), for_good=False)
        return word

    def _end(self, ref: Any) -> Raised | Died | None:
        """How a worker's run ended."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            self._ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, RayActorError):  # it was the server that died
                return Raised("")
            return Raised(_COLOR.sub("", str(error)))
        except RayError as error:
            return Died(_brief(error))
        return None


def _brief(error: Exception) -> str:
    """The first lines of one of Ray's messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]
