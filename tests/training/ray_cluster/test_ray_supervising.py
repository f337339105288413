"""The caller's side of a run on Ray, with actors and a clock that are none."""

import numpy as np
import pytest

from dovetail.training.backends.contract import Watcher
from dovetail.training.backends.processes.messages import Copied
from dovetail.training.backends.ray import supervising
from dovetail.training.backends.ray.actors import Died
from dovetail.training.backends.ray.messages import Center, Report
from dovetail.training.backends.ray.options import Options
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

    def tell_server(self, *message):
        self.asked.append(message)

    def poll(self, *_):
        pass

    def copy(self, samples, final):
        pass

    def wait(self, seconds):
        self.clock.now += seconds
        word = self.script.pop(0)
        return [] if word is None else [word]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervising, "time", clock)
    return clock


def report(**fields):
    return Report("a life", "a node", found=False, **fields)


def final():
    return Center(np.zeros(8, np.float32), Copied(9, 128, 1.0, True))


def supervise(actors, watcher=None):
    outcome = supervising._Supervisor(assign(), watcher or Watcher(), actors, Options()).run()
    assert not actors.script
    return outcome


def test_an_evaluation_longer_than_a_hung_servers_silence_restarts_no_server(clock):
    def evaluate(*_):
        clock.now += 2 * supervising.SILENCE_SECONDS
        return {}

    copied = Center(np.zeros(8, np.float32), Copied(4, 40, 1.0, False))
    actors = Actors(clock, report(), copied, report(), report(done=True), final())
    outcome = supervise(actors, Watcher(every_samples=40, evaluate=evaluate))
    assert len(outcome.evaluations) == 2
    assert actors.asked == [("start", 0), ("start", 1)]


def test_a_server_that_says_nothing_is_restarted(clock):
    silence = [None] * (int(supervising.SILENCE_SECONDS / supervising.POLL_SECONDS) + 2)
    done = report(done=True)
    actors = Actors(clock, report(), *silence, done, final(), (0, None), (1, None))
    supervise(actors)
    assert actors.asked.count(("restart", "server")) == 1


def test_workers_that_all_hang_are_killed_once_however_late_the_server_hears_of_it(clock):
    hang, later = report(silent=(0, 1)), report(silent=(1,))
    actors = Actors(
        clock, report(), hang, hang, (0, Died("")), hang, (1, Died("")), later, report(),
        report(done=True), final(), (0, None), (1, None),
    )  # fmt: skip
    supervise(actors)
    assert [asked for asked in actors.asked if asked[0] == "kill"] == [("kill", 0), ("kill", 1)]


def test_a_worker_that_hangs_in_its_next_life_too_is_killed_again(clock):
    hang, done = report(silent=(0, 1)), report(done=True)
    died = (0, Died("")), (1, Died(""))
    actors = Actors(
        clock, report(), hang, *died, report(), hang, done, final(), (0, None), (1, None)
    )
    supervise(actors)
    assert len([asked for asked in actors.asked if asked[0] == "kill"]) == 4
