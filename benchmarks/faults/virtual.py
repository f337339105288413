"""Faults in virtual time: the parameter server, its journal and workers' loops, in one thread.

    worker's loop ── request ──► network ──► Server.take ──► journal ──► disk
                  ◄── answer ─── network ◄── deliveries
    supervisor    kills, restarts, evicts

Server, journal, ledger and workers' loops are the real ones. Clock, network, disk and supervisor
are played, so that a run takes some milliseconds, and all that happens in it follows from its plan
of faults. This is how FoundationDB is tested (Zhou et al., "FoundationDB: A Distributed Unbundled
Transactional Key Value Store", SIGMOD 2021, section 4). Differences: the plan is a list of faults,
each at the number of a message or of a write, or at a time, so that it can be shrunk fault by
fault.

A run is judged by what the journal kept. Every sample of every epoch is in exactly one commit that
was applied. The center is the sum of these commits. What a resumed server holds is, bit for bit,
what a server held after the same inputs. No input is lost if only processes die, or if every commit
waited for an honest disk.

    python benchmarks/faults/virtual.py --runs 100000 --out results.json
"""

import errno
import hashlib
import heapq
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from harness import keep_json, parser_of

from dovetail.errors import DovetailError, JournalError, UnwritableError
from dovetail.training import Gradient, Job, Storage, journal, make_rule
from dovetail.training.checks import checksum
from dovetail.training.records import Reply, Verdict
from dovetail.training.server import Delivery, Server
from dovetail.training.worker import Ask, Stepped, Told, work

RULES = (
    "downpour", "ssp", "dynsgd", "agn", "adag", "aeasgd", "easgd", "sync", "averaging", "one-shot",
)  # fmt: skip
SUMS = ("downpour", "ssp")
"""Rules by which the center is the sum of all commits."""
SIZE = 3
MOST_EVENTS = 20_000
"""A run that has not ended after so many events does not end."""
RESEND_SECONDS = 5.0
"""A worker that has no answer joins again and repeats its turn after this time."""
LEASE_SECONDS = 8.0
"""A worker that is silent for longer loses its lease."""
RESTART_SECONDS = 1.0
FAULTY_SECONDS, FAULTY_MESSAGES, FAULTY_WRITES = 60.0, 150, 60
"""Faults happen before this time, and to so many first messages and writes."""


# ---- Plans of faults ----


@dataclass(frozen=True)
class FaultPlan:
    """A run, and what goes wrong in it.

    links     workers have connections, whose end the server notices; else calls that may fail
    messages  number of a message -> "lost", "doubled", "late" (by some seconds), or "garbled"
    writes    number of a write to the disk -> (name of the error, share that is written before)
    syncs     numbers of syncs of the disk that do nothing
    moments   (seconds, what happens, a number): "server" and "power" end the server, the latter
              with what the disk has not synced, "worker" ends one, "pause" makes it silent,
              "link" cuts its connection, "clock" moves the server's clock, "rot" changes a byte
    """

    seed: int
    rule: str
    job: Job
    links: bool
    log: bool
    sync: bool
    snapshot_commits: int
    messages: tuple[tuple[int, str], ...] = ()
    writes: tuple[tuple[int, str, float], ...] = ()
    syncs: tuple[int, ...] = ()
    moments: tuple[tuple[float, str, int], ...] = ()

    @property
    def faults(self) -> int:
        return len(self.messages) + len(self.writes) + len(self.syncs) + len(self.moments)


def plan_of(seed: int) -> FaultPlan:
    """The run of a seed. Each kind of fault is in some runs only: what one hides another shows."""
    rng = random.Random(seed)
    workers = rng.randint(1, 4)
    partition = rng.choice(("leased", "leased", "fixed"))
    job = Job(
        run="virtual", size=SIZE, samples=rng.randint(workers, 24), epochs=rng.randint(1, 2),
        batch=rng.randint(1, 3), window=rng.choice((1, 1, 2, 3)), workers=workers,
        seed=rng.randrange(100), dtype="float64", partition=partition,
    )  # fmt: skip
    messages = []
    for kind in ("lost", "doubled", "late", "garbled"):
        if rng.random() < 0.5:
            share = rng.choice((0.02, 0.1, 0.3))
            messages += [(n, kind) for n in range(FAULTY_MESSAGES) if rng.random() < share]
    writes = []
    if rng.random() < 0.3:
        share = rng.choice((0.02, 0.1))
        errors = ("ENOSPC", "EROFS", "EIO")
        writes = [
            (n, rng.choice(errors), rng.random())
            for n in range(3, FAULTY_WRITES)
            if rng.random() < share
        ]
    syncs = []
    if rng.random() < 0.2:
        syncs = [n for n in range(FAULTY_WRITES) if rng.random() < 0.3]
    moments = []
    for kind in ("server", "power", "worker", "pause", "link", "clock"):
        if rng.random() < 0.4:
            moments += [
                (rng.uniform(0, FAULTY_SECONDS), kind, rng.randrange(1 << 30))
                for _ in range(rng.randint(1, 6))
            ]
    if rng.random() < 0.05:
        moments.append((rng.uniform(5, FAULTY_SECONDS), "rot", rng.randrange(1 << 30)))
    return FaultPlan(
        seed=seed,
        rule=rng.choice(RULES),
        job=job,
        links=rng.random() < 0.5,
        log=rng.random() < 0.85,
        sync=rng.random() < 0.5,
        snapshot_commits=rng.choice((1, 2, 5, 1000)),
        messages=tuple(dict(messages).items()),
        writes=tuple(writes),
        syncs=tuple(syncs),
        moments=tuple(sorted(moments)),
    )


# ---- The disk ----


class PlayedDisk:
    """Stands between the journal and the files of its folder: writes fail as planned, and a power
    failure takes away what was not synced.

    durable   path -> its bytes at the last sync that was done
    named     paths whose names are on the disk
    """

    def __init__(self, plan: FaultPlan, folder: Path) -> None:
        self.folder = folder
        self.errors = {number: (name, share) for number, name, share in plan.writes}
        self.lies = set(plan.syncs)
        self.writes = self.syncs = 0
        self.durable: dict[str, int] = {}
        self.named: set[str] = set()
        self.lied = False

    def write_all(self, descriptor: int, pieces: list[memoryview]) -> None:
        number, self.writes = self.writes, self.writes + 1
        if number not in self.errors:
            _write_all(descriptor, pieces)
            return
        name, share = self.errors[number]
        whole = b"".join(bytes(piece) for piece in pieces)
        os.write(descriptor, whole[: int(len(whole) * share)])
        code = getattr(errno, name)
        raise OSError(code, os.strerror(code))

    def fsync(self, descriptor: int) -> None:
        number, self.syncs = self.syncs, self.syncs + 1
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if number in self.lies:
            self.lied = True
            return
        if path == str(self.folder):
            self.named = {str(entry) for entry in self.folder.iterdir()}
        else:
            self.durable[path] = os.fstat(descriptor).st_size

    def replace(self, source: Any, target: Any) -> None:
        os.replace(source, target)
        self.durable[str(target)] = self.durable.pop(str(source), 0)

    def lose_power(self, rng: random.Random) -> None:
        """Cut each file somewhere behind what was synced, and drop names that were not. A log's
        truncation and the removal of old files are done at once."""
        for path in sorted(self.folder.glob("*-*")):
            name, size = str(path), path.stat().st_size
            synced = min(self.durable.get(name, 0), size)
            if name not in self.named and rng.random() < 0.5:
                path.unlink()
            else:
                os.truncate(path, rng.choice((synced, size, rng.randint(synced, size))))
        (self.folder / ".snapshot.tmp").unlink(missing_ok=True)


_write_all = journal.write_all


class _PlayedOs:
    """`os` as the journal sees it."""

    def __init__(self, disk: PlayedDisk) -> None:
        self.fsync = self.fdatasync = disk.fsync
        self.replace = disk.replace

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextmanager
def played_disk(disk: PlayedDisk) -> Iterator[None]:
    before = journal.write_all, journal.os
    journal.write_all, journal.os = disk.write_all, _PlayedOs(disk)  # type: ignore[assignment]
    try:
        yield
    finally:
        journal.write_all, journal.os = before


# ---- Workers ----


class Counting:
    """A learner whose gradient counts samples: [how many, the sum of their numbers, of squares].
    The sum of all commits then says which samples were trained."""

    def gradient(self, theta: Any, indices: Any, epoch: int) -> Gradient:
        del theta, epoch
        numbers = indices.astype(np.float64)
        vector = np.array([len(numbers), numbers.sum(), (numbers**2).sum()])
        return Gradient(vector, 1.0, len(indices))

    def update(self, theta: Any, gradient: Any, epoch: float) -> Any:
        del theta, epoch
        return gradient.copy()

    def rate(self, epoch: float) -> float:
        del epoch
        return 1.0


@dataclass
class PlayedWorker:
    """One life of a worker.

    asked      the turn that waits for an answer, with its vector; None: it waits for its joining
    request    number of the request whose answer it waits for
    wakes      when it goes on after a pause
    """

    index: int
    life: int
    loop: Any = None
    asked: Ask | None = None
    request: int = -1
    link: int = 0
    seconds: float = 0.0
    wakes: float = 0.0
    alive: bool = True
    ended: bool = False


@dataclass(frozen=True)
class Request:
    """What a worker sends. `ask` None: it joins."""

    number: int
    worker: int
    life: int
    link: int
    ask: Ask | None
    vector: Any = None
    checksum: int = 0


class Broken(AssertionError):
    """A promise that a run has broken."""


# ---- A run ----


@dataclass
class Tally:
    """What a run has shown."""

    restarts: int = 0
    lost_records: int = 0
    refused: int = 0
    unwritable: int = 0
    rotten: int = 0
    unreadable: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class PlayedRun:
    """A run of a plan in a folder of its own."""

    def __init__(self, plan: FaultPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rng = random.Random(plan.seed + 1)
        self.disk = PlayedDisk(plan, folder)
        self.tally = Tally()
        self.storage = Storage(
            folder, log=plan.log, snapshot_commits=plan.snapshot_commits, sync=plan.sync
        )
        self.now, self.jump = 0.0, 0.0
        self.server: Server | None = None
        self.began = False
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.serials, self.requests, self.sent = count(), count(), count()
        self.faults = dict(plan.messages)
        self.workers: dict[int, PlayedWorker] = {}
        self.lives: Counter[int] = Counter()
        self.links: dict[int, int] = {}  # worker -> its link that the server has
        self.known_lives: dict[int, int] = {}
        self.open_requests: dict[int, Request] = {}
        self.gone: list[int] = []  # deaths that the server was not told of yet
        self.digests: dict[int, str] = {}
        self.outboxes: dict[int, Any] = {}
        self.applied: set[tuple[int, int]] = set()  # commits that workers were told of
        self.ended_at = 0  # number of the next input when the last server ended
        self.over = self.lost_power = False

    def run(self) -> Tally:
        """Raises `Broken` for a promise that does not hold."""
        with played_disk(self.disk):
            try:
                self._run()
            finally:
                if self.server is not None:
                    self.server.close()
        return self.tally

    def _run(self) -> None:
        for index in range(self.plan.job.workers):
            self._start_worker(index)
        for seconds, kind, number in self.plan.moments:
            self._at(seconds, lambda kind=kind, number=number: self._happen(kind, number))
        self._start_server()
        for _ in range(MOST_EVENTS):
            if self.over:
                return
            if not self.agenda:
                raise Broken("nothing happens any more, and the run is not done")
            seconds, _, act = heapq.heappop(self.agenda)
            self.now = max(self.now, seconds)
            act()
            if self.server is not None and self.server.done:
                self._judge()
                return
        raise Broken(f"the run does not end: {self.server and self.server.samples} samples")

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (seconds, next(self.serials), act))

    # The server

    def _clock(self) -> float:
        return self.now + self.jump

    def _start_server(self) -> None:
        plan, theta = self.plan, np.zeros(SIZE)
        rule = make_rule(plan.rule)
        try:
            if not self.began:
                self.server = Server(plan.job, rule, theta, storage=self.storage, clock=self._clock)
                self.began = True
            else:
                self.server = Server.resume(
                    plan.job, rule, theta, storage=self.storage, clock=self._clock
                )
                # Every backend refuses this.
                if not self.server.events and self.ended_at:
                    raise JournalError(str(self.folder), "it was emptied while the run went on")
        except UnwritableError:
            self.tally.unwritable += 1
            # A server that could not write its first snapshot has a folder all the same.
            self.began = self.began or bool(list(self.folder.glob("snapshot-*")))
            self._at(self.now + RESTART_SECONDS, self._start_server)
            return
        except JournalError:
            # It was found, which is all that can be asked.
            if self.tally.rotten or (self.lost_power and self.disk.lied):
                self.tally.unreadable += 1
                self.over = True
                return
            raise
        self._check_resumed()
        self._watch()
        while self.gone and self.server is not None:
            worker = self.gone[0]
            self._do(lambda worker=worker: self._server().evict(worker))
            if self.server is not None:
                del self.gone[0]

    def _server(self) -> Server:
        assert self.server is not None, "it was asked for while it runs"
        return self.server

    def _check_resumed(self) -> None:
        """A resumed server holds what one held after the same inputs, and lacks none of them but
        where the disk may have lost some."""
        own = self._server()._journal
        assert own is not None
        if not self._server().events or self._server().events[-1].kind != "server_restarted":
            return
        number = own.number - 1  # without the input that says that it was restarted
        if self.digests.get(number) != self._digest():
            raise Broken(f"after {number} inputs the resumed server differs from what it was")
        # A server that failed while it resumed has added inputs, that it was restarted.
        lost = max(0, self.ended_at - number)
        if lost and not self._may_lose():
            raise Broken(f"{lost} inputs were lost with an honest disk")
        self.tally.lost_records += lost

    def _may_lose(self) -> bool:
        plan = self.plan
        return not plan.log or (self.lost_power and (not plan.sync or self.disk.lied))

    def _watch(self) -> None:
        """Note the state before each input that the journal gets."""
        server = self._server()
        own = server._journal
        assert own is not None
        append = own.append

        def noting(header: dict[str, Any], vector: Any = None, checksum_: int = 0) -> None:
            self.digests[own.number] = self._digest()
            append(header, vector, checksum_)

        own.append = noting  # type: ignore[method-assign]

    def _digest(self) -> str:
        """Of all that later answers and commits depend on."""
        state = self._server()._state
        state.center.flush()
        state.settle()
        ledger = state.ledger.state()
        del ledger["leases"]["number"]  # a restarted server numbers leases anew
        text = json.dumps([ledger, len(state.rows), dict(state.present)])
        theta = state.center.theta.tobytes()
        rows = b"".join(repr(row).encode() for row in state.rows[-1:])
        return hashlib.sha256(text.encode() + theta + rows).hexdigest()

    def _stop_server(self) -> None:
        """The process ends; what it has not written is gone."""
        server = self._server()
        own = server._journal
        assert own is not None
        self.digests[own.number] = self._digest()
        self.ended_at = own.number
        server.close()
        self.server = None
        self.links.clear()
        self.known_lives.clear()
        self.open_requests.clear()
        self.tally.restarts += 1
        self._at(self.now + RESTART_SECONDS, self._start_server)

    def _do(self, act: Callable[[], list[Delivery]]) -> None:
        """Let the server act. An error of the disk ends its process, as in every backend."""
        try:
            deliveries = act()
        except UnwritableError:
            self.tally.unwritable += 1
            self._stop_server()
            return
        for delivery in deliveries:
            request = self.open_requests.pop(delivery.worker, None)
            if request is not None:
                center = self.outboxes[delivery.worker].copy() if delivery.pulled else None
                self._answer(request, delivery.reply, center)

    # What happens from outside

    def _happen(self, kind: str, number: int) -> None:
        self.tally.faults[kind] += 1
        alive = [w for w in self.workers.values() if w.alive and not w.ended]
        worker = alive[number % len(alive)] if alive else None
        if kind in ("server", "power", "rot") and self.server is not None:
            self._stop_server()
            if kind == "power":
                self.disk.lose_power(random.Random(number))
                self.lost_power = True
            if kind == "rot":
                self._rot(random.Random(number))
        elif kind == "worker" and worker is not None:
            self._kill_worker(worker)
        elif kind == "pause" and worker is not None:
            worker.wakes = self.now + number % 20
        elif kind == "link" and worker is not None:
            self._cut(worker.index)
        elif kind == "clock":
            self.jump += (number % 200) - 100

    def _rot(self, rng: random.Random) -> None:
        files = [path for path in sorted(self.folder.glob("*-*")) if path.stat().st_size]
        if not files:
            return
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        self.tally.rotten += 1

    def _kill_worker(self, worker: PlayedWorker) -> None:
        worker.alive = False
        self._tell_gone(worker.index)
        self._at(self.now + RESTART_SECONDS, lambda: self._start_worker(worker.index))

    def _tell_gone(self, index: int) -> None:
        """The supervisor tells the server of a death, at once or when there is one again."""
        self.links.pop(index, None)
        self.open_requests.pop(index, None)
        if self.server is None:
            self.gone.append(index)
        else:
            self._do(lambda: self._server().evict(index))

    def _cut(self, index: int) -> None:
        """A connection dies: the server takes that for the worker's death."""
        if self.plan.links and index in self.links:
            self._tell_gone(index)

    # Workers

    def _start_worker(self, index: int) -> None:
        life = self.lives[index]
        self.lives[index] += 1
        worker = self.workers[index] = PlayedWorker(index, life, seconds=self.now)
        self._send(worker, None)

    def _send(self, worker: PlayedWorker, ask: Ask | None) -> None:
        """Join, or ask over the present link."""
        if not worker.alive or worker.ended:
            return
        worker.request = next(self.requests)
        if ask is None:
            worker.link = worker.request
        vector = None if ask is None or ask.vector is None else ask.vector.copy()
        own_checksum = 0 if vector is None else checksum(vector)
        request = Request(
            worker.request, worker.index, worker.life, worker.link, ask, vector, own_checksum
        )
        self._transmit(request, lambda sent: self._arrive(sent))
        self._at(self.now + RESEND_SECONDS, lambda: self._resend(worker, request.number))

    def _resend(self, worker: PlayedWorker, number: int) -> None:
        """Join again if there is no answer yet: the turn is repeated behind that."""
        if not worker.alive or worker.ended or worker.request != number:
            return
        server = self.server
        # The connection shows that the server is there: a worker waits for its round.
        if self.plan.links and server is not None and self.links.get(worker.index) == worker.link:
            waits = worker.index in self.open_requests
            if waits and self.open_requests[worker.index].number == number:
                self._at(self.now + RESEND_SECONDS, lambda: self._resend(worker, number))
                return
        self._cut(worker.index)
        self._send(worker, None)

    def _transmit(self, message: Any, arrive: Callable[[Any], None]) -> None:
        """Send a message over the network, which does with it as planned."""
        number = next(self.sent)
        fault = self.faults.get(number)
        delay = 0.05 + 0.1 * _share(self.plan.seed, number)
        if fault is not None:
            self.tally.faults[fault] += 1
        if fault == "lost":
            return
        if fault == "late":
            delay += 15 * _share(self.plan.seed, number, 1)
        if fault == "garbled" and isinstance(message, Request) and message.vector is not None:
            garbled = message.vector.copy()
            garbled[number % SIZE] += 1.0
            message = replace(message, vector=garbled)
        self._at(self.now + delay, lambda: arrive(message))
        if fault == "doubled":
            again = delay + 0.2 * _share(self.plan.seed, number, 2)
            self._at(self.now + again, lambda: arrive(message))

    def _arrive(self, request: Request) -> None:
        if self.server is None:
            return
        index = request.worker
        if request.life < self.known_lives.get(index, 0):
            return  # of a process that was replaced
        if request.ask is None:
            self._join(request)
            return
        # A connection delivers nothing after its end, and a call none before the joining.
        if self.links.get(index) != request.link:
            return
        self.open_requests[index] = request
        turn, vector = request.ask.turn, request.vector
        self._do(lambda: self._server().take(turn, request.checksum, vector))

    def _join(self, request: Request) -> None:
        index, server = request.worker, self._server()
        if request.link < self.links.get(index, -1):
            return  # a later one has been there
        if request.life > self.known_lives.get(index, 0 if request.life == 0 else -1):
            # A new process: the lease of the one before it is free again.
            self._do(lambda: server.evict(index))
            if self.server is None:
                return
        self.known_lives[index] = request.life
        self.links[index] = request.link
        self.open_requests.pop(index, None)
        self.outboxes[index] = np.zeros(SIZE)
        try:
            sequence = server.join(index, None, self.outboxes[index])
        except UnwritableError:
            self.tally.unwritable += 1
            self._stop_server()
            return
        self._answer(request, sequence, None)

    def _answer(self, request: Request, reply: Reply | int, center: Any) -> None:
        self._transmit((request, reply, center), lambda sent: self._hear(*sent))

    def _hear(self, request: Request, reply: Reply | int, center: Any) -> None:
        worker = self.workers[request.worker]
        if not worker.alive or worker.life != request.life or worker.request != request.number:
            return
        if self.now < worker.wakes:
            self._at(worker.wakes, lambda: self._hear(request, reply, center))
            if worker.wakes - self.now > LEASE_SECONDS:
                self._at(self.now + LEASE_SECONDS, lambda: self._look_for_life(worker, request))
            return
        worker.request = -1
        if isinstance(reply, int):
            if worker.loop is None:
                worker.loop = work(
                    self.plan.job, make_rule(self.plan.rule), Counting(), worker.index,
                    sequence=reply, clock=lambda: worker.seconds,
                )  # fmt: skip
                self._advance(worker, None)
            elif worker.asked is not None:
                self._send(worker, worker.asked)
            return
        commit = worker.asked and worker.asked.turn.commit
        if commit and reply.verdict in (Verdict.APPLIED, Verdict.DUPLICATE):
            self.applied.add((worker.index, commit.sequence))
        if reply.verdict is Verdict.REFUSED:
            self.tally.refused += 1
        self._advance(worker, Told(reply, center))

    def _look_for_life(self, worker: PlayedWorker, request: Request) -> None:
        """A worker that is silent for too long loses its lease, and keeps its connection."""
        if worker.alive and worker.request == request.number and self.server is not None:
            self._do(lambda: self._server().evict(worker.index))

    def _advance(self, worker: PlayedWorker, told: Told | None) -> None:
        """Compute up to the worker's next turn, and send it when its steps are done."""
        worker.seconds = self.now
        worker.asked = None
        try:
            event = worker.loop.send(told)
            while isinstance(event, Stepped):
                worker.seconds += 0.1 + _share(self.plan.seed, worker.index, worker.life)
                event = worker.loop.send(None)
        except StopIteration:
            worker.ended = True
            return
        worker.asked = event
        self._at(worker.seconds, lambda: self._send(worker, event))

    # The verdict

    def _judge(self) -> None:
        server, plan = self._server(), self.plan
        total = plan.job.samples * plan.job.epochs
        if server.samples != total:
            raise Broken(f"{server.samples} samples were counted, of {total}")
        rows = server.rows
        if sum(row.samples for row in rows) != total:
            raise Broken(f"rows hold {sum(row.samples for row in rows)} samples, of {total}")
        numbers = Counter((row.worker, row.sequence) for row in rows)
        if numbers and max(numbers.values()) > 1:
            raise Broken(f"commit {numbers.most_common(1)[0][0]} was applied twice")
        if self.applied - set(numbers) and not self.tally.lost_records:
            raise Broken(f"{sorted(self.applied - set(numbers))[0]} was applied and is gone")
        if plan.rule in SUMS:
            indices = np.arange(plan.job.samples, dtype=np.float64)
            once = np.array([len(indices), indices.sum(), (indices**2).sum()])
            if not np.array_equal(server.theta, once * plan.job.epochs):
                raise Broken(f"the center is {server.theta}, not {once * plan.job.epochs}")


def _share(*numbers: int) -> float:
    """A number in [0, 1) that follows from these."""
    mixed = hash(numbers) & 0xFFFFFFFFFFFFFFFF
    # The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): neighbours become unlike.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53


# ---- Shrinking ----


def failure_of(plan: FaultPlan, root: Path) -> str:
    """What a run of the plan breaks; "" if it keeps every promise."""
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        PlayedRun(plan, folder).run()
    except (AssertionError, DovetailError, Exception) as error:  # whatever the server raises
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def shrunk(plan: FaultPlan, root: Path) -> FaultPlan:
    """A plan with as few faults as leave a failure, found by leaving out ever smaller parts of
    them (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002)."""
    kinds = ("messages", "writes", "syncs", "moments")
    faults: list[tuple[str, Any]] = [(kind, f) for kind in kinds for f in getattr(plan, kind)]
    size = max(1, len(faults) // 2)
    while True:
        start, removed = 0, False
        while start < len(faults):
            fewer = faults[:start] + faults[start + size :]
            smaller = replace(
                plan, **{kind: tuple(f for k, f in fewer if k == kind) for kind in kinds}
            )
            if failure_of(smaller, root):
                faults, plan, removed = fewer, smaller, True
            else:
                start += size
        if size == 1 and not removed:
            return plan
        size = max(1, size // 2)


# ---- Many runs ----


CHUNK = 200
"""So many runs are one task of a process."""


def run_many(first: int, runs: int, root: str) -> dict[str, Any]:
    """Runs of the seeds from `first` on: figures of all, and the failures, shrunk."""
    shown, kinds, failures = Counter[str](), Counter[str](), []
    for seed in range(first, first + runs):
        plan = plan_of(seed)
        folder = Path(tempfile.mkdtemp(dir=root))
        try:
            tally = PlayedRun(plan, folder).run()
        except Exception as error:  # whatever the server raises
            found = shrunk(plan, Path(root))
            failures.append(
                {"seed": seed, "error": f"{type(error).__name__}: {error}", "shrunk": repr(found)}
            )
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        kinds += tally.faults
        for name, value in vars(tally).items():
            if name != "faults":
                shown[name] += value
    return {"runs": runs, "failures": failures, "shown": dict(shown), "faults": dict(kinds)}


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several calls of `run_many` as those of one."""
    whole: dict[str, Any] = {"runs": 0, "failures": [], "shown": Counter(), "faults": Counter()}
    for part in parts:
        whole["runs"] += part["runs"]
        whole["failures"] += part["failures"]
        whole["shown"] += Counter(part["shown"])
        whole["faults"] += Counter(part["faults"])
    return whole


def main() -> None:
    parser = parser_of(__doc__, runs=1000, first=0, out=None)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    memory, began = Path("/dev/shm"), time.perf_counter()
    last = arguments.first + arguments.runs
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root,
        ProcessPoolExecutor(arguments.processes) as pool,
    ):
        tasks = [
            pool.submit(run_many, first, min(CHUNK, last - first), root)
            for first in range(arguments.first, last, CHUNK)
        ]
        parts: list[dict[str, Any]] = []
        for task in tasks:
            parts.append(task.result())
            found = together(parts) | {"first": arguments.first}
            found["seconds"] = round(time.perf_counter() - began, 1)
            keep_json(arguments.out, found)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
