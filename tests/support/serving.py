"""Small runs of a server with workers that are functions: no process, no thread, no torch.

A worker's vector depends on the center that it pulled and on its commit's number, so that a run
that goes wrong anywhere ends elsewhere.
"""

from contextlib import nullcontext

import numpy as np

from dovetail.training.records import Commit, Job, Turn
from dovetail.training.rules import make_rule
from dovetail.training.server import Server
from tests.support.server_faults import Crash, faulty, faulty_files

SIZE = 40


def job(workers=3, samples=60, **fields):
    values = {"run": "r", "size": SIZE, "epochs": 1, "batch": 1, "window": 2} | fields
    return Job(samples=samples, workers=workers, **values)


def start():
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


def serve(name, resume=False, of=None, crash=None, **options):
    """A server of the rule `name`, at `start()` where it does not resume; `crash` is called with
    each point that its steps pass."""
    options = {"clock": lambda: 0.0} | options
    server_class = Server if crash is None else faulty(Server, crash)
    make = server_class.resume if resume else server_class
    return make(of or job(), make_rule(name), start(), **options)


class Worker:
    """One worker's side: `turn` is asked and not answered yet, None when it is through."""

    def __init__(self, index, run="r"):
        self.index, self.run = index, run
        self.inbox, self.outbox = (np.zeros(SIZE, np.float32) for _ in range(2))
        self.sequence = 0
        self.turn = Turn(index, lease=True, pull=True)

    def join(self, server):
        self.sequence = server.join(self.index, self.inbox, self.outbox)

    def answered(self, delivery):
        lease = delivery.reply.lease
        if lease is None:
            self.turn = None
            return
        if self.turn.commit is not None:
            self.sequence = self.turn.commit.sequence
        commit = self.commit(delivery.reply)
        self.turn = Turn(self.index, commit, lease=True, pull=True)
        noise = np.random.default_rng((self.index, commit.sequence)).standard_normal(SIZE)
        self.inbox[:] = -0.1 * self.outbox + 0.01 * noise

    def commit(self, reply, **fields):
        lease = reply.lease
        samples = lease.stop - lease.start
        values = {"steps": samples, "rate": 0.1, "loss": 1.0} | fields
        return Commit(
            self.run, self.index, self.sequence + 1, reply.clock, lease.number, samples, **values
        )


def finish(server, workers, revive=None):
    """Let the workers take turns, one after the other, until none is left; the last server.

    `revive()`: called when the server crashed, until it gives another one."""
    waiting = []  # asked, without an answer yet
    queue = list(workers)
    while queue:
        worker = queue.pop(0)
        try:
            deliveries = server.take(worker.turn)
        except Crash:
            server.close()
            server = _revived(None, workers, revive)
            queue = [*waiting, worker, *queue]
            waiting = []
            continue
        waiting.append(worker)
        for delivery in deliveries:
            told = workers[delivery.worker]
            waiting.remove(told)
            told.answered(delivery)
            if told.turn is not None:
                queue.append(told)
    return server


def _revived(server, workers, revive):
    """Another server that all workers have joined, however often it takes."""
    while True:
        try:
            if server is None:
                server = revive()
            for worker in workers:
                worker.join(server)
            return server
        except Crash:
            if server is not None:
                server.close()
            server = None


def run(name, storage=None, crash=None, **options):
    """A whole run; the server, still open."""
    kept = {} if storage is None else {"storage": storage}

    def made(resume):
        return serve(name, resume, crash=crash, **kept, **options)

    workers = [Worker(index) for index in range(3)]
    with faulty_files(crash) if crash else nullcontext():
        first = None if storage and crash else made(resume=False)
        server = _revived(first, workers, lambda: made(resume=True))
        return finish(server, workers, lambda: made(resume=True))


def state_of(server):
    """Everything that a refused commit must leave alone, as bytes."""
    vectors = server._state.center.vectors()
    return {name: v.tobytes() for name, v in vectors.items()}, server._state.center.counts()
