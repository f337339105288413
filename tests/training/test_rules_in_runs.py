"""Whole runs of one worker, or of synchronous ones, do what one process does."""

import numpy as np
import pytest

from dovetail.training.backends import simulated, threads
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.optimizers import make_optimizer
from dovetail.training.rules import make_rule
from tests.support.least_squares import LeastSquares, a_job, start

BACKENDS = {"simulated": simulated.run, "threads": threads.run}
WORKERS_OPTIMIZE = ("downpour", "dynsgd", "ssp", "agn", "adag", "adag-agn", "hogwild")
SERVER_OPTIMIZES = [
    ("sync", {"optimizer": "adam"}, "adam"),
    ("sync", {"optimizer": "sgd", "momentum": 0.9}, "sgd"),
    ("downpour-adagrad", {}, "adagrad"),
    ("dc-asgd", {}, "sgd"),
    ("dc-asgd-adaptive", {}, "sgd"),
]


class Optimizing(LeastSquares):
    """Steps of an optimizer that keeps something."""

    def __init__(self, job, optimizer, **settings):
        super().__init__(job, lr=0.01)
        self.optimizer = make_optimizer(optimizer, **settings)
        self.slots = {name: np.zeros(job.size, job.dtype) for name in self.optimizer.slots}
        self.counts = {}

    def update(self, theta, gradient, epoch):
        return self.optimizer.update(theta, gradient, self.slots, self.counts, self.rate(epoch))


def in_one_process(job, learner):
    """theta += U(g)"""
    theta = start(job)
    for epoch in range(job.epochs):
        order = np.random.default_rng((job.seed, epoch)).permutation(job.samples)
        for first in range(0, job.samples, job.batch):
            found = learner.gradient(theta, order[first : first + job.batch], epoch)
            theta += learner.update(theta, found.vector, epoch + first / job.samples)
    return theta


def run(backend, job, rule, learner):
    return BACKENDS[backend](Assignment(job, rule, start(job), lambda _: learner()), Watcher())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", WORKERS_OPTIMIZE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_worker_that_commits_each_step_is_one_process_bit_for_bit(backend, rule, dtype):
    job = a_job(samples=58, epochs=3, window=1, dtype=dtype)
    outcome = run(backend, job, make_rule(rule), lambda: Optimizing(job, "adam"))
    assert outcome.theta.tobytes() == in_one_process(job, Optimizing(job, "adam")).tobytes()
    assert [row.staleness for row in outcome.rows] == [0] * outcome.clock


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rule", "options", "optimizer"), SERVER_OPTIMIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_worker_and_the_server_s_optimizer_are_one_process_bit_for_bit(
    backend, rule, options, optimizer, dtype
):
    job = a_job(samples=58, epochs=3, window=1, dtype=dtype)
    outcome = run(backend, job, make_rule(rule, **options), lambda: LeastSquares(job, lr=0.01))
    settings = {key: value for key, value in options.items() if key != "optimizer"}
    expected = in_one_process(job, Optimizing(job, optimizer, **settings))
    assert outcome.theta.tobytes() == expected.tobytes()


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_synchronous_workers_are_one_process_with_a_large_batch(backend, optimizer, workers):
    """The last share of each epoch is short, and each round is of one epoch."""
    job = a_job(samples=62, epochs=4, batch=4, window=1, workers=workers, dtype="float32")
    rule = make_rule("sync", optimizer=optimizer)
    outcome = run(backend, job, rule, lambda: LeastSquares(job, lr=0.01))
    large = a_job(samples=62, epochs=4, batch=4 * workers, dtype="float32")
    expected = in_one_process(large, Optimizing(large, optimizer))
    assert np.linalg.norm(outcome.theta - expected) <= 1e-6 * np.linalg.norm(expected)
    assert outcome.clock == 4 * -(-62 // (4 * workers))
