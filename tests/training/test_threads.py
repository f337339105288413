"""Whole runs on threads, with a learner in numpy."""

import itertools
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dovetail.errors import DivergedError, NoWorkersError, ProcessError, UsageError
from dovetail.training.backends import threads
from dovetail.training.backends.contract import Assignment, FailurePolicy, Guard, Storage, Watcher
from dovetail.training.backends.simulated import run as simulate
from dovetail.training.backends.threads import run
from dovetail.training.liveness import alive
from dovetail.training.records import Turn
from dovetail.training.rules import RULES, make_rule
from dovetail.training.server import Server
from dovetail.training.serving import Serving
from dovetail.training.step_times import StepTimes
from dovetail.training.supervisor import RunProgress
from tests.support.least_squares import LeastSquares, a_job, start

WINDOWS = {"one-shot": None, "sync": 1, "dc-asgd": 1, "dc-asgd-adaptive": 1}
SETTINGS = {
    "downpour-adagrad": {"lr": 0.3},
    "easgd": {"alpha": 0.25},
    "aeasgd": {"alpha": 0.3},
    "eamsgd": {"alpha": 0.3, "delta": 0.5},
}


class Crew(dict):
    """Makes a learner for each worker, and keeps the last of each; `lives` that began."""

    def __init__(self, job, learner=LeastSquares, **options):
        super().__init__()
        self.job, self.learner, self.options = job, learner, options
        self.lives = []

    def __call__(self, worker):
        self.lives.append(worker)
        self[worker] = self.learner(self.job, **self.options)
        return self[worker]

    @property
    def seen(self):
        return sorted(sample for learner in self.values() for sample in learner.seen)


def an_assignment(job, rule, learner=None, **fields):
    settings = SETTINGS.get(rule, {})
    learner = Crew(job) if learner is None else learner
    return Assignment(job, make_rule(rule, **settings), start(job), learner, **fields)


def every_sample(job):
    return [(epoch, i) for epoch in range(job.epochs) for i in range(job.samples)]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_trains_each_sample_of_each_epoch_once(rule):
    job = a_job(samples=58, epochs=30, window=WINDOWS.get(rule, 3), workers=3, dtype="float64")
    crew = Crew(job, lr=0.1)
    outcome = run(an_assignment(job, rule, crew), Watcher())
    assert crew.seen == every_sample(job)
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 58 * 30
    gathers = make_rule(rule).gathers
    assert outcome.clock == (len({r.clock for r in outcome.rows}) if gathers else len(outcome.rows))
    assert not outcome.stopped


@pytest.mark.parametrize("rule", ["adag-agn", "aeasgd", "ssp", "easgd", "averaging"])
def test_a_simulated_runs_order_makes_threads_repeat_it_bit_for_bit(rule):
    job = a_job(samples=58, epochs=3, window=2, workers=3, dtype="float64")
    times = StepTimes("exponential")
    simulated = simulate(an_assignment(job, rule), Watcher(), times=times, slow={1: 3.0})
    repeated = run(an_assignment(job, rule, order=simulated.meta["order"]), Watcher())
    assert repeated.theta.tobytes() == simulated.theta.tobytes()
    assert [(r.worker, r.staleness) for r in repeated.rows] == [
        (r.worker, r.staleness) for r in simulated.rows
    ]


def test_a_run_does_not_change_the_vector_it_was_given():
    job = a_job()
    assignment = an_assignment(job, "downpour")
    run(assignment, Watcher())
    assert assignment.theta.tobytes() == start(job).tobytes()


class Fragile(LeastSquares):
    """Raises at the gradient whose number is in `breaks`, numbered over all workers and lives."""

    def __init__(self, job, breaks, numbers):
        super().__init__(job)
        self.breaks, self.numbers = breaks, numbers

    def gradient(self, theta, indices, epoch):
        if next(self.numbers) in self.breaks:
            raise ZeroDivisionError("my bug")
        return super().gradient(theta, indices, epoch)


def test_an_exception_in_a_worker_ends_the_run_with_its_traceback():
    job = a_job(workers=2)
    crew = Crew(job, Fragile, breaks={4}, numbers=itertools.count(1))
    with pytest.raises(ProcessError, match="ZeroDivisionError: my bug") as caught:
        run(an_assignment(job, "downpour", crew), Watcher())
    assert "in gradient" in caught.value.traceback
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not [t for t in threading.enumerate() if t.name.startswith("worker ")]


def test_an_exception_while_others_wait_for_the_round_ends_the_run_too():
    job = a_job(workers=3)
    crew = Crew(job, Fragile, breaks={8}, numbers=itertools.count(1))
    with pytest.raises(ProcessError, match="my bug"):
        run(an_assignment(job, "averaging", crew), Watcher())


def test_a_learner_that_cannot_be_made_ends_the_run():
    def learner(worker):
        raise OSError("no data")

    with pytest.raises(ProcessError, match="no data"):
        run(an_assignment(a_job(workers=2), "averaging", learner), Watcher())


@pytest.mark.parametrize("rule", ["downpour", "averaging", "ssp"])
def test_a_worker_that_is_started_again_loses_no_sample(rule):
    job = a_job(samples=58, epochs=2, workers=2)
    crew = Crew(job, Fragile, breaks={3, 11}, numbers=itertools.count(1))
    policy = FailurePolicy(worker_errors=2, worker_restarts=2)
    outcome = run(an_assignment(job, rule, crew, policy=policy), Watcher())
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 58 * 2
    assert len(crew.lives) == 4
    assert [event.kind for event in outcome.events].count("lost") == 2


def test_the_samples_of_a_worker_that_stays_away_are_trained_by_the_others():
    job = a_job(samples=58, epochs=2, workers=3)
    crew = Crew(job, Fragile, breaks={3}, numbers=itertools.count(1))
    policy = FailurePolicy(worker_errors=1, worker_restarts=0, worker_losses=1)
    outcome = run(an_assignment(job, "averaging", crew, policy=policy), Watcher())
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 58 * 2
    assert len(crew.lives) == 3


@pytest.mark.parametrize("workers, losses", [(1, 1), (3, 0)])
def test_more_losses_than_the_policy_allows_end_the_run(workers, losses):
    job = a_job(workers=workers)
    crew = Crew(job, Fragile, breaks={3}, numbers=itertools.count(1))
    policy = FailurePolicy(worker_errors=1, worker_restarts=0, worker_losses=losses)
    with pytest.raises(NoWorkersError) as caught:
        run(an_assignment(job, "downpour", crew, policy=policy), Watcher())
    assert caught.value.lost == 1
    assert "my bug" in caught.value.status


class Hanging(LeastSquares):
    """The first gradient of all waits until it is let go."""

    def __init__(self, job, gate, first):
        super().__init__(job)
        self.gate, self.first = gate, first

    def gradient(self, theta, indices, epoch):
        if self.first.acquire(blocking=False):
            self.gate.wait(60)
        return super().gradient(theta, indices, epoch)


@pytest.mark.parametrize("rule", ["downpour", "averaging"])
def test_a_hung_workers_samples_go_to_the_others_and_the_run_ends_without_it(rule):
    job = a_job(samples=58, workers=3)
    gate = threading.Event()
    crew = Crew(job, Hanging, gate=gate, first=threading.Semaphore(1))
    policy = FailurePolicy(lease_seconds=2.0)
    try:
        outcome = run(an_assignment(job, rule, crew, policy=policy), Watcher())
    finally:
        gate.set()
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 58
    assert "lost" in [event.kind for event in outcome.events]


def test_a_run_whose_every_worker_hangs_ends():
    job = a_job(workers=2)
    gate = threading.Event()
    crew = Crew(job, Hanging, gate=gate, first=threading.Semaphore(2))
    with pytest.raises(NoWorkersError, match=r"2 workers were lost.*hung for 1 s"):
        run(
            an_assignment(job, "downpour", crew, policy=FailurePolicy(lease_seconds=1.0)), Watcher()
        )
    gate.set()


def test_no_worker_is_hung_because_the_whole_process_stood_still(monkeypatch):
    """The clock leaps within one worker's step; the other's next commit has the caller look."""
    leaps, leapt, told, first = [0.0], threading.Event(), threading.Event(), threading.Semaphore(1)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + leaps[0])
    monkeypatch.setattr(threads, "time", clock)

    class Stopped(LeastSquares):
        def gradient(self, theta, indices, epoch):
            if first.acquire(blocking=False):
                leaps[0] = 2 * FailurePolicy().lease_seconds
                leapt.set()
                told.wait()
            leapt.wait()
            return super().gradient(theta, indices, epoch)

    job = a_job(workers=2)
    watcher = Watcher(rows=lambda rows: told.set())
    outcome = run(an_assignment(job, "downpour", Crew(job, Stopped)), watcher)
    assert [event.kind for event in outcome.events if event.kind == "lost"] == []
    assert outcome.samples == 60


def test_a_long_step_with_signs_of_life_is_not_hung():
    class Long(LeastSquares):
        def gradient(self, theta, indices, epoch):
            if not self.seen:
                for _ in range(12):
                    threading.Event().wait(0.1)
                    alive()
            return super().gradient(theta, indices, epoch)

    job = a_job(samples=8)
    policy = FailurePolicy(lease_seconds=1.0)
    outcome = run(an_assignment(job, "downpour", Crew(job, Long), policy=policy), Watcher())
    assert "lost" not in [event.kind for event in outcome.events]


class Poisoned(LeastSquares):
    def update(self, theta, gradient, epoch):
        return super().update(theta, gradient, epoch) * np.nan


def test_commits_that_are_not_finite_are_refused_until_the_run_counts_as_diverged():
    job = a_job(workers=2)
    crew = Crew(job, Poisoned)
    policy = FailurePolicy(refusals=5)
    with pytest.raises(DivergedError, match="not finite") as caught:
        run(an_assignment(job, "downpour", crew, policy=policy), Watcher())
    assert caught.value.rule == "downpour"


def test_a_refused_window_is_trained_again():
    class Once(LeastSquares):
        def update(self, theta, gradient, epoch):
            bad = len(self.rates) == 3
            return super().update(theta, gradient, epoch) * (np.inf if bad else 1)

    job = a_job(samples=58)
    outcome = run(an_assignment(job, "downpour", Crew(job, Once), guard=Guard()), Watcher())
    assert outcome.samples == 58
    assert [event.kind for event in outcome.events].count("refused") == 1
    assert np.isfinite(outcome.theta).all()


def test_the_watcher_sees_every_row_and_event_and_its_evaluations_when_they_are_due():
    job = a_job(samples=58, epochs=4, workers=2)
    rows, events, asked, threads = [], [], [], set()

    def evaluate(theta, clock, samples, seconds):
        threads.add(threading.current_thread())
        asked.append(samples)
        theta[:] = np.nan  # a copy
        return {"samples": samples}

    watcher = Watcher(every_samples=40, evaluate=evaluate, rows=rows.extend, event=events.append)
    outcome = run(an_assignment(job, "downpour"), watcher)
    assert tuple(rows) == outcome.rows
    assert tuple(events) == outcome.events
    assert [e.figures["samples"] for e in outcome.evaluations] == asked
    assert threads == {threading.main_thread()}
    marks = [samples // 40 for samples in asked]
    assert marks == sorted(set(marks)) and marks[-1] == 58 * 4 // 40
    assert np.isfinite(outcome.theta).all()


def test_an_evaluation_by_time_comes_while_a_worker_computes():
    done = threading.Event()

    class Waiting(LeastSquares):
        def gradient(self, theta, indices, epoch):
            assert done.wait(30), "nobody evaluated"
            return super().gradient(theta, indices, epoch)

    def evaluate(*_):
        done.set()
        return {}

    job = a_job(samples=4)
    watcher = Watcher(every_seconds=0.01, evaluate=evaluate)
    outcome = run(an_assignment(job, "downpour", Crew(job, Waiting)), watcher)
    assert outcome.evaluations[0].samples == 0


@pytest.mark.parametrize("rule", ["downpour", "averaging", "aeasgd", "ssp"])
def test_an_early_stop_ends_the_run_and_keeps_the_center(rule):
    job = a_job(epochs=10**6, workers=3)
    watcher = Watcher(
        every_samples=100,
        evaluate=lambda theta, clock, samples, seconds: {"samples": samples},
        should_stop=lambda figures: len(figures) == 3,
    )
    outcome = run(an_assignment(job, rule), watcher)
    assert outcome.stopped
    assert len(outcome.evaluations) == 3
    assert 300 <= outcome.samples < 60 * 10**6
    assert outcome.samples == sum(row.samples for row in outcome.rows)


class Held(LeastSquares):
    """From the gradient of that number on, over all workers, waits until it is let go."""

    def __init__(self, job, gate, number, numbers):
        super().__init__(job)
        self.gate, self.number, self.numbers = gate, number, numbers

    def gradient(self, theta, indices, epoch):
        if next(self.numbers) >= self.number:
            self.gate.wait()
        return super().gradient(theta, indices, epoch)


@pytest.mark.parametrize("backend", [run, simulate])
@pytest.mark.parametrize("rule", ["agn", "averaging"])
def test_a_run_that_was_stopped_early_goes_on_when_it_is_resumed(
    rule, backend, tmp_path, monkeypatch
):
    """Threads that have trained 240 of the 1200 samples wait until the run was stopped."""
    job = a_job(epochs=20, workers=2)
    gate, end = threading.Event(), Server.stop

    def stop_and_let_go(server):
        deliveries = end(server)
        gate.set()
        return deliveries

    monkeypatch.setattr(Server, "stop", stop_and_let_go)
    number = 60 if backend is run else math.inf
    crew = Crew(job, Held, gate=gate, number=number, numbers=itertools.count(1))
    stop = Watcher(every_samples=100, evaluate=lambda *_: {}, should_stop=lambda _: True)
    first = backend(an_assignment(job, rule, crew, storage=Storage(tmp_path)), stop)
    assert first.stopped
    assert first.samples < 1200
    for _ in range(2):  # the second time it has ended
        storage = Storage(tmp_path, resume=True)
        outcome = backend(an_assignment(job, rule, storage=storage), Watcher())
        assert not outcome.stopped
        assert outcome.samples == sum(row.samples for row in outcome.rows) == 1200


@pytest.mark.parametrize("backend", [run, simulate])
@pytest.mark.parametrize("rule", ["downpour", "ssp", "averaging"])
def test_a_continued_run_gives_a_late_workers_samples_to_others(rule, backend, tmp_path):
    """All of the first part was killed when worker 2, a late one, had committed nothing yet."""
    job = a_job(workers=2)
    assignment = an_assignment(job, rule, storage=Storage(tmp_path))
    options = {"storage": assignment.storage, "clock": lambda: 0.0}
    with Server(job, assignment.rule, start(job), **options) as server:
        for worker in range(3):
            server.join(worker)
        for worker in range(3):
            server.take(Turn(worker, lease=True, pull=True))
        assert server.holders == (0, 1, 2)
    storage = Storage(tmp_path, resume=True)
    outcome = backend(an_assignment(job, rule, storage=storage), Watcher())
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 60


def test_an_exception_in_the_watcher_ends_the_run():
    def evaluate(*_):
        raise KeyboardInterrupt

    job = a_job(epochs=10**6, workers=2)
    with pytest.raises(KeyboardInterrupt):
        run(an_assignment(job, "downpour"), Watcher(every_samples=1, evaluate=evaluate))
    assert not [t for t in threading.enumerate() if t.name.startswith("worker ")]


@pytest.mark.parametrize("rule", ["downpour", "averaging", "hogwild"])
@pytest.mark.parametrize("length", [0, 1, 37, 48])
def test_a_stream_of_unknown_length_ends_by_itself(rule, length):
    job = a_job(samples=None, workers=3)
    crew = Crew(job, stream=length)
    outcome = run(an_assignment(job, rule, crew), Watcher())
    assert crew.seen == [(0, position) for position in range(length)]
    assert outcome.samples == sum(row.samples for row in outcome.rows) == length


def test_what_happens_while_the_watcher_is_told_is_told_next_time():
    server = SimpleNamespace(samples=0, rows=[], events=[])
    rows, events = [], []

    def tell_rows(new):
        rows.extend(new)
        if len(rows) < 3:
            server.rows.append("another thread's")

    def tell_event(event):
        events.append(event)
        if len(events) < 3:
            server.events.append("another thread's")

    progress = RunProgress(Watcher(rows=tell_rows, event=tell_event))
    server.rows.append("first")
    server.events.append("first")
    for _ in range(3):
        progress.add(Serving(server).report(progress.known, done=False))
    assert rows == server.rows
    assert events == server.events


def test_threads_have_no_wire():
    with pytest.raises(UsageError) as caught:
        run(an_assignment(a_job(), "downpour", wire="float16"), Watcher())
    assert caught.value.option == "wire"


def test_an_outcome_says_what_ran():
    job = a_job()
    outcome = run(an_assignment(job, "agn"), Watcher())
    assert outcome.meta["backend"] == "threads"
    assert outcome.meta["rule"] == "agn"
    assert outcome.meta["job"]["samples"] == 60
    assert outcome.seconds >= outcome.rows[-1].seconds
