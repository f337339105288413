"""Learners for worker processes, without torch: a new process is up in half a second."""

import os
import signal
import time
from functools import partial

import numpy as np

from dovetail.training.backends.contract import Assignment
from dovetail.training.learner import Gradient
from dovetail.training.liveness import alive
from dovetail.training.records import Job
from dovetail.training.rules import make_rule


class Squares:
    """Least squares: loss is the mean of (x . theta - y)^2 / 2 over the batch; plain SGD."""

    def __init__(self, samples=64, size=8, lr=0.05, sleep=0.0, seed=0):
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((samples, size)).astype(np.float32)
        self.y = self.x @ np.ones(size, np.float32)
        self.lr = np.float32(lr)
        self.sleep = sleep
        self.steps = 0

    def gradient(self, theta, indices, epoch):
        self.steps += 1
        if self.sleep:
            time.sleep(self.sleep)
        rows = indices % len(self.x)
        error = self.x[rows] @ theta - self.y[rows]
        gradient = error @ self.x[rows] / np.float32(len(rows))
        return Gradient(gradient, float(error @ error) / 2 / len(rows), len(rows))

    def update(self, theta, gradient, epoch):
        return -self.lr * gradient

    def rate(self, epoch):
        return float(self.lr)


def assign(
    rule="downpour",
    *,
    learner=None,
    samples=64,
    size=8,
    epochs=2,
    batch=4,
    window=2,
    workers=2,
    options=None,
    **more,
):
    """An assignment of least squares; `more` goes to it."""
    job = Job("run", size, samples, epochs, batch, window, workers, seed=3)
    make = learner or (lambda worker: Squares(samples, size))
    start = np.zeros(size, np.float32)
    return Assignment(job, make_rule(rule, **(options or {})), start, make, **more)


class Sitting(Squares):
    """Does something in the n-th step of one worker: `kill`, `stop` (hang), or `raise`."""

    def __init__(self, what, step, **more):
        super().__init__(**more)
        self.what, self.step = what, step

    def gradient(self, theta, indices, epoch):
        found = super().gradient(theta, indices, epoch)
        if self.steps == self.step:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.what == "raise":
                raise ValueError("the data are gone")
        return found


class Counting:
    """Adds 1 to the coordinate of each sample it trains: the center counts what was committed.

    hold    called before each step with its center's sum: the samples that were committed when it
            was pulled, and its own since
    """

    def __init__(self, samples, seconds=0.0, hold=None):
        self.samples = samples
        self.seconds = seconds
        self.hold = hold

    def gradient(self, theta, indices, epoch):
        if self.hold is not None:
            self.hold(theta.sum())
        time.sleep(self.seconds)
        counts = np.bincount(indices, minlength=self.samples).astype(np.float32)
        return Gradient(counts, 0.0, len(indices))

    def update(self, theta, gradient, epoch):
        return np.array(gradient)

    def rate(self, epoch):
        return 1.0


class Long(Counting):
    """Each step takes several times the lease's seconds, and says now and then that it lives."""

    def gradient(self, theta, indices, epoch):
        for _ in range(8):
            alive()
            time.sleep(0.3)
        return super().gradient(theta, indices, epoch)


def count(samples=60, *, seconds=0.002, window=2, hold=None, **more):
    """An assignment whose center says how often each sample was committed; `hold(worker, sum of its
    center)` is called before each step."""
    return assign(
        "downpour",
        learner=lambda worker: Counting(samples, seconds, hold and partial(hold, worker)),
        samples=samples,
        size=samples,
        window=window,
        **more,
    )
