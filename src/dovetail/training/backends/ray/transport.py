"""Starts server, shards and workers as actors of Ray, calls them, and finds out who has died.

Ray restarts the server as often as the policy allows. This module starts new workers, on any node
that has room. The caller's process owns the actors: they die with it, whatever kills it, and none
outlives the run.
"""

import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from dovetail.errors import MissingLibraryError, ProcessError, TrainingError, UsageError
from dovetail.runtime.user_code import line_of
from dovetail.training.backends.contract import (
    Assignment,
    FailurePolicy,
    ServerPlan,
    Storage,
    Watcher,
    WorkerPlan,
    check_options,
)
from dovetail.training.backends.messages import (
    ActorReport,
    AskCopy,
    AskReport,
    RaisedError,
    next_copy,
)
from dovetail.training.backends.ray.server import ParameterServer
from dovetail.training.backends.ray.shard import Shard
from dovetail.training.backends.ray.worker import RayWorker
from dovetail.training.options import not_negative
from dovetail.training.records import Outcome
from dovetail.training.supervisor import (
    CenterCopy,
    Gone,
    RunProgress,
    ServerEnded,
    ServerUp,
    Stop,
    Supervisor,
    Word,
    WorkerDied,
    WorkerFinished,
    WorkerRaised,
    temporary_storage,
)

POLL_SECONDS = 0.1
"""The server waits at most so long for news before it reports."""
SILENCE_SECONDS = 60.0
"""If the server does not report for so long, it hangs, or no node has room for it."""
CLOSE_SECONDS = 10.0
"""The server has so long to release its folder before it is killed."""
INLINE_BYTES = 2**15
"""Vectors of at most this size are sent as arguments, larger ones through the object store."""
_COLOR = re.compile(r"\x1b\[\d+m")
_RAY_SHARES = 10_000
"""Ray counts parts of a resource in these."""
_LOOPBACK = "127.0.0.1"
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # With this setting, which Ray made for other systems, its processes use the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Run the assignment on a cluster; see `RayOptions`.

    The storage's folder must be the same on all nodes that may hold the server. Without a storage
    there is a temporary one on the server's node: the run survives the death of the server's
    process, and ends with an error when the node is lost. Ctrl-C ends the run and returns what it
    has reached, marked as stopped; pressed once more it raises `KeyboardInterrupt`.
    Raises `ProcessError` with the first traceback when a worker raises and the policy does not
    count that as a death, and when the server raises; `NoWorkersError`, `ServerLostError`,
    `DivergedError`, `MissingLibraryError`.
    """
    chosen = RayOptions.of(options)
    if assignment.rule.lock_free:
        raise UsageError("rule", f"{assignment.rule.name} needs memory that all workers share")
    storage = assignment.storage
    if storage is not None and not storage.log and (assignment.shards or 1) > 1:
        raise UsageError("log", "shards find each other's version again by their logs; keep them")
    with ExitStack() as stack:
        if storage is None:
            storage = stack.enter_context(temporary_storage(assignment))
        ray = stack.enter_context(connected(chosen, assignment.job.workers))
        actors = stack.enter_context(RayActors(ray, assignment, chosen, storage))
        transport = RayTransport(actors, assignment.policy)
        return Supervisor(assignment, watcher, transport, late=chosen.late).run()


@dataclass(frozen=True)
class RayOptions:
    """How a run uses a cluster.

    address       of a cluster to join ("auto": the one of this machine); None: start Ray here, for
                  this run alone, on the loopback interface
    namespace     of the actors' names; None: of the run
    worker_cores, server_cores           that Ray sets aside for each
    worker_resources, server_resources   custom resources that their nodes must have
    server_node   the node's id or address that should hold the server; when it is lost, another may
    spread        workers over the nodes; else they are packed
    object_store_bytes   of a Ray started here; None: its choice
    log_to_driver        show what actors print
    late          one more worker is started each time the center has seen so many samples
    """

    address: str | None = None
    namespace: str | None = None
    worker_cores: float = 1.0
    server_cores: float = 1.0
    worker_resources: Mapping[str, float] = field(default_factory=dict)
    server_resources: Mapping[str, float] = field(default_factory=dict)
    server_node: str | None = None
    spread: bool = True
    object_store_bytes: int | None = None
    log_to_driver: bool = False
    late: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("worker_cores", "server_cores"):
            not_negative(name, getattr(self, name))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RayOptions":
        """Raises `UsageError` for one that is not there."""
        check_options("ray", options, cls.__dataclass_fields__)
        return cls(**options)


class RayTransport:
    """What the supervisor asks for, as calls of actors.

    life          of the server; "" until it has reported
    ahead_seconds the run's clock, before this machine's
    away          the server was lost, and has not reported since
    """

    name = "ray"
    mercy_seconds = 0.0
    interruptible = True

    def __init__(self, actors: "RayActors", policy: FailurePolicy) -> None:
        self.actors = actors
        self.server_restarts = policy.server_restarts
        self.life = ""
        self.heard = time.monotonic()  # of the server
        self.away = False
        self.ahead_seconds = -time.time()
        self.done = self.copied_final = False

    def start_server(self, died: str | None = None) -> None:
        """Starts the first server. Ray itself starts the next ones."""
        self.actors.start_server()

    def start_worker(self, worker: int) -> None:
        self.actors.start_worker(worker)

    def kill_workers(self, workers: set[int]) -> None:
        for worker in sorted(workers):
            self.actors.kill_worker(worker)

    def tell(self, message: Gone | Stop) -> None:
        self.actors.tell_server(message)

    def turn(self, progress: RunProgress) -> Iterator[Word]:
        self.actors.ask_report(AskReport(*progress.known), self.life, POLL_SECONDS)
        if self.life and not self.copied_final:
            copy = next_copy(progress, time.time() + self.ahead_seconds, self.done)
            if copy is not None:
                self.actors.ask_copy(copy)
        words = list(self.actors.wait(POLL_SECONDS))
        for word in words:
            match word:
                case ActorReport(life, node, was_found, seconds, report):
                    self.heard, self.away = time.monotonic(), False
                    self.ahead_seconds = seconds - time.time()
                    if self.life and life != self.life and not was_found:
                        raise TrainingError(
                            f"the server was restarted on node {node}, which does not have the "
                            "run's folder; give a storage on a file system that all nodes share"
                        )
                    if life != self.life:
                        self.life = life
                        yield ServerUp(*report.total, report.done)
                    self.done = report.done
                    yield report
                case RaisedError():
                    raise word.error
                case CenterCopy():
                    self.copied_final = word.final
                    yield replace(word, theta=np.array(word.theta))  # Ray's own is read-only
                case ServerEnded(for_good=False):  # Ray starts it again
                    self.away = True
                    time.sleep(POLL_SECONDS / 2)
                case _:
                    yield word
        # If answers have just come, the server is not silent: this process itself may have been
        # busy with a long evaluation.
        if not words and time.monotonic() > self.heard + SILENCE_SECONDS:
            # A server that was lost or has never reported has no node: it has ended for good.
            if self.away or not self.life:
                status = f"no node of the cluster has had room for it for {SILENCE_SECONDS:.0f} s"
                yield ServerEnded(status, for_good=True)
            self.heard, self.away = time.monotonic(), True
            self.actors.restart_server()

    def facts(self) -> dict[str, Any]:
        return {}


class RayActors:
    """Starts, calls and ends actors. A context manager, which ends all of them."""

    def __init__(
        self, ray: Any, assignment: Assignment, options: RayOptions, storage: Storage
    ) -> None:
        self._ray, self._assignment, self._options = ray, assignment, options
        self._storage = storage
        self._namespace = options.namespace or f"dovetail-{assignment.job.run}"
        self._server: Any = None
        self._shards: list[Any] = []
        self.workers: dict[int, Any] = {}
        self._lives: dict[int, int] = {}
        # Awaited result -> what was asked of the server, or the worker whose end it is.
        self._asked: dict[Any, AskReport | AskCopy | int] = {}
        large = assignment.theta.nbytes > INLINE_BYTES
        self._theta = [ray.put(assignment.theta)] if large else assignment.theta
        self._worker_gpus = worker_gpus(ray, assignment, options)
        self._learner = ray.put(assignment.learner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.workers):
            self.kill_worker(worker)
        if self._server is None:
            return
        with suppress(Exception):  # a server that cannot be asked is killed all the same
            self._ray.get(self._server.close.remote(), timeout=CLOSE_SECONDS)
        for actor in (self._server, *self._shards):
            self._ray.kill(actor)

    def start_server(self) -> None:
        plan = ServerPlan.of(self._assignment, self._storage)
        theta = self._theta
        if plan.shards > 1:
            self._shards = [
                self._restartable(Shard, f"shard-{i}", "SPREAD").remote(plan, theta, i)
                for i in range(plan.shards)
            ]
        place: Any = "DEFAULT"
        if (wanted := self._options.server_node) is not None:  # as long as that node lives
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            fitting = [
                node["NodeID"]
                for node in sorted(self._ray.nodes(), key=lambda node: str(node["NodeID"]))
                if node["Alive"]
                and wanted in (node["NodeID"], node["NodeManagerAddress"], *node["Resources"])
            ]
            if not fitting:
                raise UsageError(
                    "server_node", f"no node has the id, address or resource {wanted!r}"
                )
            place = NodeAffinitySchedulingStrategy(fitting[0], soft=True)
        lasting = self._restartable(ParameterServer, "server", place)
        self._server = lasting.remote(plan, theta, self._shards)

    def _restartable(self, kind: type, name: str, place: Any) -> Any:
        """An actor that Ray starts again as often as the policy allows. Ray must not repeat calls:
        only the callers do, with numbers by which the actor knows what it has done."""
        return self._ray.remote(kind).options(
            name=name,
            namespace=self._namespace,
            num_cpus=self._options.server_cores,
            resources=dict(self._options.server_resources) or None,
            max_restarts=self._assignment.policy.server_restarts,
            max_task_retries=0,
            scheduling_strategy=place,
        )

    def start_worker(self, worker: int) -> None:
        """A new actor for that number, in place of a dead one if there was one."""
        options = self._options
        life = self._lives[worker] = self._lives.get(worker, -1) + 1
        if worker in self.workers:
            self.kill_worker(worker)
        plan = WorkerPlan.of(self._assignment, worker, life)
        actor = (
            self._ray.remote(RayWorker)
            .options(
                name=f"worker-{worker}-{life}",
                namespace=self._namespace,
                num_cpus=options.worker_cores,
                num_gpus=self._worker_gpus,
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
        """Kills the worker. `wait` reports it like any other death."""
        self._ray.kill(self.workers[worker])

    def restart_server(self) -> None:
        """Kills a server that does not react, and lets Ray start it again."""
        self._ray.kill(self._server, no_restart=False)

    def ask_report(self, ask: AskReport, life: str, seconds: float) -> None:
        """Asks for a report, if none is on its way; see `ParameterServer.report`."""
        if not any(isinstance(each, AskReport) for each in self._asked.values()):
            self._asked[self._server.report.remote(ask, life, seconds)] = ask

    def ask_copy(self, ask: AskCopy) -> None:
        """Asks for a copy of the center, in place of what was asked before."""
        if ask in self._asked.values():
            return
        for pending in [ref for ref, each in self._asked.items() if isinstance(each, AskCopy)]:
            del self._asked[pending]
        self._asked[self._server.copy.remote(ask)] = ask

    def tell_server(self, message: Gone | Stop) -> None:
        self._server.tell.remote(message)

    def wait(self, seconds: float) -> Iterator[Word | ActorReport | RaisedError]:
        """Waits at most so many seconds for an answer or the end of a worker, and yields what it
        says."""
        from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        for ref in ready:
            asked = self._asked.pop(ref)
            worker = asked if isinstance(asked, int) else None
            try:
                answer = self._ray.get(ref)
            except RayTaskError as error:
                # What the server raised is in its next report, and so is its end, which may have
                # ended the worker.
                if worker is not None and not isinstance(error.cause, RayActorError):
                    text = _COLOR.sub("", str(error))
                    raised = ProcessError(f"worker {worker}", text, line_of(error.cause))
                    yield WorkerRaised(worker, raised)
                    yield WorkerDied(worker, raised.said)
                elif worker is None and isinstance(error, ActorDiedError):
                    # The server lost a shard for good while it answered: the error is of both
                    # classes.
                    yield ServerEnded(shorten(error), for_good=True)
            except RayError as error:
                if worker is not None:
                    yield WorkerDied(worker, shorten(error))
                else:  # for good, if Ray does not start it again
                    for_good = isinstance(error, ActorDiedError)
                    yield ServerEnded(shorten(error), for_good=for_good)
            else:
                if worker is not None:
                    yield WorkerFinished(worker)
                elif answer is not None:
                    yield answer


def worker_gpus(ray: Any, assignment: Assignment, options: RayOptions) -> float | None:
    """The share of a GPU that each worker asks for; None if workers compute on the CPU.

    The workers share the GPUs of the nodes that they may be on. Ray sets CUDA_VISIBLE_DEVICES in an
    actor to the GPU that it assigned, so the actor's device is "cuda:0". Raises `UsageError` if
    there is no GPU.
    """
    if assignment.device == "cpu":
        return None
    needed = set(options.worker_resources)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes if needed <= set(node))
    if not gpus:
        which = f" with {', '.join(sorted(needed))}" if needed else ""
        says = f"{assignment.device!r} is not there: no node{which} of the Ray cluster has a GPU"
        raise UsageError("device", says)
    workers = assignment.job.workers + len(options.late)
    # A worker's share is on one GPU. Of two GPUs, three workers ask for a half each: if each asked
    # for two thirds, the third worker would wait for ever.
    return _share_of_gpu(math.ceil(workers / gpus))


def _share_of_gpu(workers: int) -> float:
    """The share of each of so many workers. Ray counts in ten thousandths and rounds, so that six
    shares of 1/6 would be more than one GPU."""
    return math.floor(_RAY_SHARES / workers) / _RAY_SHARES


def shorten(error: Exception) -> str:
    """The first lines of one of Ray's messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]


def library() -> Any:
    """Ray; raises `MissingLibraryError`."""
    try:
        import ray
    except ImportError as error:
        raise MissingLibraryError("ray", "pip install 'dovetail[ray]'") from error
    return ray


@contextmanager
def connected(options: RayOptions, workers: int) -> Iterator[Any]:
    """Ray, connected to the cluster. A Ray or a connection that is made here ends with the block.
    One that the caller had made before stays."""
    local = options.address is None
    path = os.pathsep.join(name or os.getcwd() for name in sys.path)
    sizes: dict[str, Any] = {}
    if local:
        count = workers + len(options.late)
        resources = {**options.worker_resources}
        for name, amount in options.server_resources.items():
            resources[name] = resources.get(name, 0) + amount
        sizes = {
            "include_dashboard": False,
            "num_cpus": max(1, round(count * options.worker_cores + options.server_cores + 0.5)),
            "resources": {name: amount * count for name, amount in resources.items()} or None,
            "object_store_memory": options.object_store_bytes,
        }
    with _environment(_LOCAL | {"PYTHONPATH": path} if local else {}):
        ray = library()
        is_own = not ray.is_initialized()
        if is_own:
            with _loopback() if local else nullcontext():
                ray.init(
                    address="local" if local else options.address,  # "local": beside any other
                    log_to_driver=options.log_to_driver,
                    configure_logging=False,
                    **sizes,
                )
    try:
        if is_own and local:
            # Ray's version may not know the setting.
            addresses = sorted({str(node["NodeManagerAddress"]) for node in ray.nodes()})
            if addresses != [_LOOPBACK]:
                raise UsageError(
                    "address",
                    f"this version of Ray listens on {', '.join(addresses)}, beyond this machine; "
                    "start it as you see fit, and give its address",
                )
        yield ray
    finally:
        if is_own:
            ray.shutdown()


@contextmanager
def _loopback() -> Iterator[None]:
    """Sets Ray's loopback setting in its module too: Ray reads the environment only when it is
    imported, which may have happened before."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for processes that are started within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
