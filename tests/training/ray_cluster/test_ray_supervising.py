"""The caller's side of a run on Ray, with actors and a clock that are none."""

import numpy as np
import pytest

from dovetail.training import supervisor
from dovetail.training.backends.contract import Watcher
from dovetail.training.backends.messages import ActorReport
from dovetail.training.backends.ray import transport
from dovetail.training.backends.ray.transport import RayTransport
from dovetail.training.supervisor import (
    CenterCopy,
    ServerReport,
    Supervisor,
    WorkerDied,
    WorkerFinished,
)
from tests.support.ray_runs import assign


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds


class Actors:
    """Says the words of a script, one a wait; keeps what was asked of it."""

    def __init__(self, clock, *script):
        self.clock, self.script = clock, list(script)
        self.workers, self.asked = {}, []

    def start_server(self):
        pass

    def start_worker(self, worker):
        self.workers[worker] = object()
        self.asked.append(("start", worker))

    def kill_worker(self, worker):
        self.asked.append(("kill", worker))

    def restart_server(self):
        self.asked.append(("restart", "server"))

    def tell_server(self, message):
        self.asked.append(message)

    def ask_report(self, *_):
        pass

    def ask_copy(self, _):
        pass

    def wait(self, seconds):
        self.clock.now += seconds
        word = self.script.pop(0)
        return [] if word is None else [word]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


def report(**fields):
    news = ServerReport((0, 0), (0, 0), **fields)
    return ActorReport("a life", "a node", False, 0.0, news)


def kills(actors):
    return [asked for asked in actors.asked if isinstance(asked, tuple) and asked[0] == "kill"]


def final():
    return CenterCopy(np.zeros(8, np.float32), 9, 128, 1.0, final=True)


def supervise(actors, watcher=None):
    assignment = assign()
    calls = RayTransport(actors, assignment.policy)
    outcome = Supervisor(assignment, watcher or Watcher(), calls).run()
    assert not actors.script
    return outcome


def test_an_evaluation_longer_than_a_hung_servers_silence_restarts_no_server(clock):
    def evaluate(*_):
        clock.now += 2 * transport.SILENCE_SECONDS
        return {}

    copied = CenterCopy(np.zeros(8, np.float32), 4, 40, 1.0)
    actors = Actors(clock, report(), copied, report(), report(done=True), final())
    outcome = supervise(actors, Watcher(every_samples=40, evaluate=evaluate))
    assert len(outcome.evaluations) == 2
    assert actors.asked == [("start", 0), ("start", 1)]


def test_a_server_that_says_nothing_is_restarted(clock):
    silence = [None] * (int(transport.SILENCE_SECONDS / transport.POLL_SECONDS) + 2)
    done = report(done=True)
    actors = Actors(clock, report(), *silence, done, final(), WorkerFinished(0), WorkerFinished(1))
    supervise(actors)
    assert actors.asked.count(("restart", "server")) == 1


def test_workers_that_all_hang_are_killed_once_however_late_the_server_hears_of_it(clock):
    hang, later = report(silent=(0, 1)), report(silent=(1,))
    actors = Actors(
        clock, report(), hang, hang, WorkerDied(0, ""), hang, WorkerDied(1, ""), later, report(),
        report(done=True), final(), WorkerFinished(0), WorkerFinished(1),
    )  # fmt: skip
    supervise(actors)
    assert kills(actors) == [("kill", 0), ("kill", 1)]


def test_a_worker_that_hangs_in_its_next_life_too_is_killed_again(clock):
    hang, done = report(silent=(0, 1)), report(done=True)
    died = WorkerDied(0, ""), WorkerDied(1, "")
    actors = Actors(
        clock,
        report(),
        hang,
        *died,
        report(),
        hang,
        done,
        final(),
        WorkerFinished(0),
        WorkerFinished(1),
    )
    supervise(actors)
    assert len(kills(actors)) == 4
