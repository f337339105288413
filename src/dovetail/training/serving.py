"""Serves a parameter server to its workers and to the supervisor: the same on every backend.

    join, take, leave ─────────► Server ──► deliveries ──► each worker's port
    evict, take_back, stop ────►                            cannot be reached: evict it, and so on
    look_for_life ─► LeaseClock ─► take_back
    report ◄── rows, events with their details, silent workers, done

    backend             a port                              clock              who calls
    processes, ranks    packets over a socket               perf_counter       the selector's loop
    ray                 futures of the actor's event loop   monotonic          threads of the actor
    threads             a mailbox                           perf_counter       any worker's thread
    simulated           messages in virtual time            virtual seconds    the agenda
    dt.Optimizer alone  a list                              perf_counter       the caller

It knows no transport: a port is a function that carries an answer to a worker. It imports no torch.
"""

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dovetail.training.backends.contract import ServerPlan
from dovetail.training.center import ServedCenter
from dovetail.training.liveness import LeaseClock
from dovetail.training.records import Event, Refusal, Reply, Turn, Vector, Verdict
from dovetail.training.server import Delivery, Server
from dovetail.training.supervisor import ServerReport


def open_server(
    plan: ServerPlan, center: Vector | ServedCenter, clock: Callable[[], float], *, restarted: bool
) -> Server:
    """The plan's server: a new one, or one with the state that its folder holds, if the plan
    continues a run or this server is `restarted`, in place of one that died.

    center   as `Server` takes it
    """
    rule = plan.rule
    options: dict[str, Any] = {
        "guard": plan.guard,
        "storage": plan.storage,
        "shards": plan.shards,
        "order": plan.order,
        "clock": clock,
    }
    if plan.storage is None or not (restarted or plan.storage.resume):
        return Server(plan.job, rule, center, **options)
    keeps_theta = rule.lock_free and restarted
    return Server.resume(plan.job, rule, center, keeps_theta=keeps_theta, **options)


@dataclass
class WorkerPort:
    """The server's end of the way to a worker.

    send         carries an answer to the worker; returns False if it cannot be reached any more
    inbox        [size] where its commits lie; see `Server.join`
    outbox       [size] where its pulls are copied to
    count_life   returns the worker's count of signs of life; None: the backend says them itself, to
                 the clock of leases
    close        ends the way to the worker
    detail       names the worker's process, for events
    joined       the worker has joined over this port
    holds        the worker has a lease, so its time runs whenever it does not wait for an answer
    life         the count of signs of life when it was last read
    """

    send: Callable[[Delivery], bool]
    inbox: Vector | None = None
    outbox: Vector | None = None
    count_life: Callable[[], int] | None = None
    close: Callable[[], None] = lambda: None
    detail: str = ""
    joined: bool = False
    holds: bool = False
    life: int = 0

    def hears_life(self) -> bool:
        """Whether the worker has given a sign of life since this was last asked."""
        if self.count_life is None:
            return False
        before, self.life = self.life, self.count_life()
        return self.life != before


class Serving:
    """A server, the ports of its workers, and the clock of their leases. All times are the run's,
    by `Server.seconds`.

    restart         why the server before this one died, whose state this one took over; None: it is
                    the first server
    lease_seconds, doubt_seconds   see `LeaseClock`

    ports   by worker
    life    who computes, and who has fallen silent
    ended   the run was ended at once: nothing counts any more
    """

    def __init__(
        self,
        server: Server,
        lease_seconds: float = math.inf,
        *,
        doubt_seconds: float = 0.0,
        restart: str | None = None,
    ) -> None:
        self.server, self.restart = server, restart
        self.ports: dict[int, WorkerPort] = {}
        self.life = LeaseClock(lease_seconds, doubt_seconds)
        self.ended = False
        # Details of events that the journal does not keep, by the events' index.
        self._details: dict[int, str] = {}
        # Several threads may deliver answers while another one drops a port.
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether every sample was seen, or the run was stopped."""
        return self.ended or self.server.stopped or self.server.done

    def is_due(self, samples: int) -> bool:
        """Whether the center has seen so many samples, or will see no more."""
        return self.done or self.server.samples >= samples

    # What workers do

    def connect(self, worker: int, port: WorkerPort) -> None:
        """Takes in the way to a worker, in place of the one that its number had before."""
        self.evict(worker, "replaced")
        port.hears_life()
        # The server before this one may have died while the worker computed.
        port.holds = port.life > 0 and worker in self.server.holders
        self.ports[worker] = port
        if port.holds:
            self.life.start(worker, self.server.seconds())

    def join(self, worker: int, port: WorkerPort | None = None, *, replaces: bool = False) -> int:
        """Adds the worker, and returns the number of its last applied commit.

        port       the way to it, if it is not connected yet
        replaces   it is a new process, so the lease of the one before it is free again
        """
        if port is None:
            port = self.ports[worker]
        else:
            self.connect(worker, port)
        if replaces:
            self.take_back(worker, "it was replaced")
        port.joined = True
        return self._join(worker, port, port.detail)

    def take(self, turn: Turn, checksum: int | None = None, vector: Any = None) -> None:
        """Takes a turn and sends the answers that follow; see `Server.take`."""
        worker = turn.worker
        port = self.ports.get(worker)
        if port is not None and worker in self.life.silent:  # it was thought hung, and is back
            self.life.silent.discard(worker)
            self._join(worker, port, "it woke up")
        self.life.stop(worker)
        if not self.ended:  # else nothing counts any more; the supervisor ends us all
            self._deliver(self.server.take(turn, checksum, vector))

    def refuse(self, worker: int, refusal: Refusal) -> None:
        """Answers what could not be read with a refusal. Nothing was changed by it."""
        server = self.server
        server.refusals[refusal] += 1
        self._add_event("refused", worker, refusal.value)
        reply = Reply(Verdict.REFUSED, refusal, clock=server.clock, samples=server.samples)
        self._deliver([Delivery(worker, reply)])

    def leave(self, worker: int) -> None:
        """Notes that the worker has ended."""
        self._drop(worker)
        self._deliver(self.server.leave(worker))

    # What happens to workers

    def evict(self, worker: int, detail: str = "", *, surely: bool = False) -> None:
        """Notes that the worker is dead: its samples go to others. Only the first call does so,
        since both the port and the supervisor may notice a death.

        surely   also if the worker has no port, or has never joined: nobody takes its place
        """
        self._deliver(self._evict(worker, detail, surely=surely))

    def take_back(self, worker: int, detail: str = "") -> None:
        """Takes the lease of a worker that may come back, so that its samples go to others."""
        port = self.ports.get(worker)
        if port is None:  # another worker's answer has found it dead
            return
        port.holds = False
        events = len(self.server.events)
        deliveries = self.server.evict(worker)
        self.explain(worker, detail, events)
        self._deliver(deliveries)

    def look_for_life(self) -> None:
        """Takes the lease of each worker that computes but has given no sign of life for too
        long."""
        for worker, detail in self.overdue():
            self.take_back(worker, detail)

    def overdue(self) -> list[tuple[int, str]]:
        """The workers whose lease is to be taken back, and why. Each is returned once, and counts
        as silent from then on."""
        now = self.server.seconds()
        for worker in self.life.computing:
            port = self.ports.get(worker)
            if port is not None and port.hears_life():
                self.life.beat(worker, now)
        hung = self.life.overdue(now)
        return [(worker, f"no sign of life for {hung[worker]:.3g} s") for worker in hung]

    # What the supervisor asks for

    def stop(self) -> None:
        """Ends the run early. Workers are told, those that wait at once."""
        self._deliver(self.server.stop())

    def end(self, detail: str) -> None:
        """Ends the run at once, and answers nobody any more. The ledger is not stopped, so that a
        run that is resumed from its folder goes on."""
        if not self.ended:
            self.ended = True
            self._add_event("stopped", -1, detail)

    def report(
        self,
        known: tuple[int, int],
        *,
        done: bool | None = None,
        silent: Iterable[int] | None = None,
        least_rows: int = 1,
        most: int = sys.maxsize,
    ) -> ServerReport:
        """Reports what the server has beyond the rows and events that are known.

        known          how many rows and events the supervisor has
        done, silent   None: as they are
        least_rows     if there are fewer new rows, the report has none
        most           the report has at most so many rows, and so many events; the next one
                       continues
        """
        server = self.server
        # Counted once: rows that are added while the report is made are left to the next report.
        total = len(server.rows), len(server.events)
        # A restarted server without a log may have fewer than its predecessor had reported.
        rows, events = min(known[0], total[0]), min(known[1], total[1])
        new_rows = min(total[0] - rows, most)
        last_event = min(total[1], events + most)
        details = self._details
        news = enumerate(server.events[events:last_event], events)
        return ServerReport(
            first=(rows, events),
            total=total,
            rows=tuple(server.rows[rows : rows + new_rows]) if new_rows >= least_rows else (),
            events=tuple(replace(e, detail=details[i]) if i in details else e for i, e in news),
            samples=server.samples,
            silent=tuple(sorted(tuple(self.life.silent) if silent is None else silent)),
            done=self.done if done is None else done,
        )

    def explain(self, worker: int, detail: str, events: int) -> None:
        """Gives a detail to the worker's events without one, from the index `events` on."""
        for index in range(max(events, 0), len(self.server.events)):
            event = self.server.events[index]
            # Another thread may have added another worker's event meanwhile.
            if detail and event.worker == worker and not event.detail:
                self._details[index] = detail

    # Within

    def _join(self, worker: int, port: WorkerPort, detail: str) -> int:
        events = len(self.server.events)
        sequence = self.server.join(worker, port.inbox, port.outbox)
        self.explain(worker, detail, events)
        return sequence

    def _evict(self, worker: int, detail: str, *, surely: bool = False) -> list[Delivery]:
        port = self._drop(worker)
        # A worker that never joined holds nothing, and its replacement is still expected. Whether
        # it had joined the server before this one is not known here.
        had_joined = port is not None and (port.joined or self.restart is not None)
        if not (had_joined or surely):
            return []
        events = len(self.server.events)
        deliveries = self.server.evict(worker)
        self.explain(worker, detail, events)
        return deliveries

    def _drop(self, worker: int) -> WorkerPort | None:
        with self._lock:
            port = self.ports.pop(worker, None)
            self.life.stop(worker)
            self.life.silent.discard(worker)
        if port is not None:
            port.close()
        return port

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Sends the answers. A worker that cannot be reached is lost, and its samples may allow
        further answers."""
        waiting = deque(deliveries)
        while waiting:
            delivery = waiting.popleft()
            worker, reply = delivery.worker, delivery.reply
            with self._lock:
                port = self.ports.get(worker)
                if port is None:
                    continue
                # The worker's time runs before it is answered: its next turn, which stops it, may
                # be taken by another thread at once.
                if reply.verdict is not None or reply.lease is not None:
                    port.holds = reply.lease is not None
                port.hears_life()
                if port.holds:
                    self.life.start(worker, self.server.seconds())
            if not port.send(delivery):
                waiting.extend(self._evict(worker, "its link broke"))

    def _add_event(self, kind: str, worker: int, detail: str) -> None:
        """Adds an event that the journal does not keep."""
        self.server.events.append(Event(kind, worker, self.server.seconds(), detail))
