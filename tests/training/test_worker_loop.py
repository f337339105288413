"""The worker's loop, step by step, with answers made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import TrainingError
from dovetail.training.records import Lease, Refusal, Reply, Turn, Verdict
from dovetail.training.rules import make_rule
from dovetail.training.worker import Ask, Stepped, Told, work
from tests.support.least_squares import LeastSquares, a_job, start
from tests.support.run_order import batches, order

APPLIED, REFUSED = Verdict.APPLIED, Verdict.REFUSED


def a_lease(start, stop, number=0):
    return Lease(number, start, stop)


class Worker:
    """Runs a worker to its next question; `steps` that it made since the last."""

    def __init__(self, job, rule="downpour", learner=None, **options):
        self.learner = learner or LeastSquares(job)
        self.work = work(job, make_rule(rule), self.learner, 3, **options)
        self.steps = []

    def ask(self, told=None):
        self.steps = []
        got = self.work.send(told)
        while isinstance(got, Stepped):
            self.steps.append(got)
            got = self.work.send(None)
        assert isinstance(got, Ask)
        return got

    def ends(self, told):
        with pytest.raises(StopIteration):
            self.ask(told)
        return True


def told(center=None, **reply):
    return Told(Reply(**reply), center)


def ticking(times):
    ticks = iter(times)
    return lambda: next(ticks)


def test_a_worker_pulls_trains_its_window_and_commits_the_sum_of_its_updates():
    job, center = a_job(), start(a_job())
    worker = Worker(job, clock=ticking([2.0, 5.0]))
    assert worker.ask() == Ask(Turn(3, lease=True, pull=True))
    ask = worker.ask(told(center, lease=a_lease(12, 24, number=7), clock=40))

    learner, theta, total = LeastSquares(job), center.copy(), 0
    rows = order(job, 0)[12:24].reshape(3, 4)
    losses = []
    for indices in rows:
        gradient = learner.gradient(theta, indices, 0)
        change = learner.update(theta, gradient.vector, 0.0)
        theta, total = theta + change, total + change
        losses.append(gradient.loss)
    np.testing.assert_array_equal(ask.vector, total)
    assert worker.steps == [Stepped(4, loss) for loss in losses]
    commit = ask.turn.commit
    assert ask.turn == Turn(3, commit, lease=True, pull=True)
    assert (commit.run, commit.worker, commit.sequence, commit.lease) == ("r", 3, 1, 7)
    assert (commit.base_clock, commit.samples, commit.steps) == (40, 12, 3)
    assert (commit.begin_seconds, commit.end_seconds) == (2.0, 5.0)
    assert commit.rate == 0.05
    assert commit.loss == pytest.approx(np.mean(losses))
    assert worker.learner.rates == [12 / 60, 16 / 60, 20 / 60]


def test_after_a_commit_the_worker_goes_on_from_the_new_center():
    job, center = a_job(window=1), start(a_job())
    worker = Worker(job)
    worker.ask()
    worker.ask(told(center, lease=a_lease(0, 4)))
    fresh = center + 1
    ask = worker.ask(told(fresh, verdict=APPLIED, lease=a_lease(4, 8, 1), clock=9))
    assert (ask.turn.commit.sequence, ask.turn.commit.base_clock) == (2, 9)
    learner = LeastSquares(job)
    gradient = learner.gradient(fresh, order(job, 0)[4:8], 0)
    np.testing.assert_array_equal(ask.vector, learner.update(fresh, gradient.vector, 0))
    assert worker.ends(told(verdict=APPLIED, done=True))


def test_a_worker_continues_the_numbers_of_its_former_self():
    worker = Worker(a_job(), sequence=41)
    worker.ask()
    ask = worker.ask(told(start(a_job()), lease=a_lease(0, 12)))
    assert ask.turn.commit.sequence == 42


def test_the_rest_of_a_window_at_an_epochs_end_is_committed_as_what_it_is():
    job = a_job(samples=10, batch=4)
    worker = Worker(job, "agn")
    worker.ask()
    center = start(job)
    ask = worker.ask(told(center, lease=a_lease(0, 10)))
    assert [step.samples for step in worker.steps] == [4, 4, 2]
    ask = worker.ask(told(center, verdict=APPLIED, lease=a_lease(8, 10, 1)))
    assert (ask.turn.commit.samples, ask.turn.commit.steps) == (2, 1)
    gradient = worker.learner.gradient(center, order(job, 0)[8:10], 0)
    np.testing.assert_array_equal(ask.vector, gradient.vector * np.float32(-0.05))


def test_a_commits_loss_is_the_mean_over_its_samples_not_over_its_steps():
    job = a_job(samples=5, batch=4)
    worker = Worker(job)
    worker.ask()
    commit = worker.ask(told(start(job), lease=a_lease(0, 5))).turn.commit
    big, small = worker.steps
    assert commit.loss == pytest.approx((4 * big.loss + small.loss) / 5)


def test_batches_end_with_an_epoch():
    job = a_job(samples=10, epochs=2, batch=4)
    assert list(batches(job, a_lease(4, 18))) == [(4, 8), (8, 10), (10, 14), (14, 18)]
    assert list(batches(replace(job, samples=None), a_lease(8, 14))) == [(8, 12), (12, 14)]


def test_each_epoch_has_an_order_of_its_own_that_holds_every_sample():
    job = a_job(seed=5)
    first, second = order(job, 0), order(job, 1)
    assert sorted(first) == sorted(second) == list(range(60))
    assert list(first) != list(second)
    assert list(first) == list(np.random.default_rng((5, 0)).permutation(60))
    assert order(replace(job, samples=None), 0) is None


def test_a_share_of_several_epochs_trains_each_in_its_order():
    job = a_job(samples=6, epochs=2, batch=4, window=None)
    worker = Worker(job, "averaging")
    worker.ask()
    ask = worker.ask(told(start(job), lease=a_lease(3, 9)))
    wanted = [(0, i) for i in order(job, 0)[3:]] + [(1, i) for i in order(job, 1)[:3]]
    assert worker.learner.seen == wanted
    assert (ask.turn.commit.samples, ask.turn.commit.steps) == (6, 2)


def test_an_elastic_worker_pulls_before_it_commits_and_keeps_its_parameters():
    job, center = a_job(window=1), start(a_job())
    rule = make_rule("aeasgd")
    alpha = np.float32(rule.options["alpha"])
    worker = Worker(job, "aeasgd")
    worker.ask()
    assert worker.ask(told(center, lease=a_lease(0, 4), clock=5)) == Ask(Turn(3, pull=True))
    moved = center + np.float32(0.5)
    ask = worker.ask(told(moved, clock=8))
    assert ask.turn == Turn(3, ask.turn.commit, lease=True)
    assert ask.turn.commit.base_clock == 8
    learner = LeastSquares(job)
    gradient = learner.gradient(center, order(job, 0)[:4], 0)
    theta = center + learner.update(center, gradient.vector, 0)
    force = alpha * (theta - moved)
    np.testing.assert_array_equal(ask.vector, force)
    worker.ask(told(verdict=APPLIED, lease=a_lease(4, 8, 1), clock=9))
    gradient = learner.gradient(theta, order(job, 0)[4:8], 0)
    theta = theta + learner.update(theta, gradient.vector, 0)
    theta = theta - force  # after the gradient, which was taken where the window ended
    ask = worker.ask(told(moved, clock=12))
    np.testing.assert_array_equal(ask.vector, alpha * (theta - moved))


def test_an_elastic_worker_that_is_told_to_stop_at_its_pull_ends():
    worker = Worker(a_job(), "aeasgd")
    worker.ask()
    worker.ask(told(start(a_job()), lease=a_lease(0, 12)))
    assert worker.ends(told(stop=True))


@pytest.mark.parametrize("refusal", [Refusal.LEASE, Refusal.NOT_FINITE])
@pytest.mark.parametrize("rule", ["downpour", "aeasgd", "easgd"])
def test_a_refused_window_is_dropped_and_the_next_starts_from_a_fresh_center(rule, refusal):
    job, center = a_job(window=1), start(a_job())
    worker = Worker(job, rule)
    worker.ask()
    ask = worker.ask(told(center * np.nan, lease=a_lease(0, 4)))
    if ask.turn.commit is None:
        ask = worker.ask(told(center))
    answer = {"verdict": REFUSED, "refusal": refusal, "lease": a_lease(0, 4, 6), "clock": 3}
    if ask.turn.pull:
        ask = worker.ask(told(center, **answer))
    else:
        assert worker.ask(told(**answer)) == Ask(Turn(3, lease=True, pull=True))
        ask = worker.ask(told(center, lease=a_lease(0, 4, 6), clock=3))
    if ask.turn.commit is None:
        ask = worker.ask(told(center, clock=3))
    commit = ask.turn.commit
    assert (commit.sequence, commit.lease, commit.base_clock) == (1, 6, 3)
    assert np.isfinite(ask.vector).all()
    assert np.isfinite(commit.loss)


def test_a_refused_worker_ends_where_nothing_is_left():
    worker = Worker(a_job())
    worker.ask()
    worker.ask(told(start(a_job()), lease=a_lease(0, 12)))
    assert worker.ends(told(verdict=REFUSED, refusal=Refusal.LEASE, done=True))


def test_a_commit_that_was_applied_before_counts_as_applied():
    worker = Worker(a_job())
    worker.ask()
    worker.ask(told(start(a_job()), lease=a_lease(0, 12)))
    reply = {"verdict": Verdict.DUPLICATE, "lease": a_lease(12, 24, 1)}
    assert worker.ask(told(start(a_job()), **reply)).turn.commit.sequence == 2


def test_a_server_of_another_run_is_an_error():
    worker = Worker(a_job())
    worker.ask()
    worker.ask(told(start(a_job()), lease=a_lease(0, 12)))
    with pytest.raises(TrainingError, match="'r'"):
        worker.ask(told(verdict=REFUSED, refusal=Refusal.RUN))


def test_a_stopped_worker_discards_what_it_has_and_ends():
    worker = Worker(a_job())
    worker.ask()
    assert worker.ends(told(stop=True))


def test_without_locks_the_worker_writes_to_the_center_itself():
    job, center = a_job(window=2), start(a_job())
    worker = Worker(job, "hogwild")
    worker.ask()
    before = center.copy()
    ask = worker.ask(told(center, lease=a_lease(0, 8)))
    learner = LeastSquares(job)
    for indices in order(job, 0)[:8].reshape(2, 4):
        gradient = learner.gradient(before, indices, 0)
        before = before + learner.update(before, gradient.vector, 0)
    np.testing.assert_array_equal(center, before)
    assert ask.vector is None
    assert (ask.turn.commit.samples, ask.turn.commit.steps) == (8, 2)


def test_a_stream_is_read_in_its_order_and_its_end_is_said_by_a_short_commit():
    job = a_job(samples=None)
    worker = Worker(job, learner=LeastSquares(job, stream=6))
    worker.ask()
    commit = worker.ask(told(start(job), lease=a_lease(0, 12))).turn.commit
    assert worker.learner.seen == [(0, position) for position in range(6)]
    assert (commit.samples, commit.steps) == (6, 2)


@pytest.mark.parametrize("rule", ["agn", "aeasgd", "averaging", "hogwild"])
def test_a_window_beyond_a_streams_end_is_committed_as_nothing(rule):
    job = a_job(samples=None)
    worker = Worker(job, rule, LeastSquares(job, stream=0))
    worker.ask()
    ask = worker.ask(told(start(job), lease=a_lease(0, 12)))
    if ask.turn.commit is None:
        ask = worker.ask(told(start(job)))
    commit = ask.turn.commit
    assert (commit.samples, commit.steps, commit.loss) == (0, 0, 0.0)
    assert worker.steps == []
    assert ask.vector is None or not ask.vector.any()


def test_an_exception_of_the_learner_leaves_the_loop():
    class Broken(LeastSquares):
        def gradient(self, theta, indices, epoch):
            raise ZeroDivisionError("my bug")

    worker = Worker(a_job(), learner=Broken(a_job()))
    worker.ask()
    with pytest.raises(ZeroDivisionError, match="my bug"):
        worker.ask(told(start(a_job()), lease=a_lease(0, 12)))
